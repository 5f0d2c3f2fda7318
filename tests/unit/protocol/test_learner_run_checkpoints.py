"""A learner's part of a checkpoint of the run: at which boundary, and before what."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.checkpoints.effects import TakeCheckpoint
from decoupled_diloco.protocol.checkpoints.events import CheckpointHeard, PartWritten
from decoupled_diloco.protocol.checkpoints.messages import CheckpointOrdered, PartSaved
from decoupled_diloco.protocol.effects import Apply, SendBody, Settle, Snapshot
from decoupled_diloco.protocol.events import Paused, Received
from decoupled_diloco.protocol.messages import Outcome, Pull, Welcome
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.versions import Asking

V0, V1 = Version(1, 0), Version(1, 1)


def started(learner_bench: Any, **options: Any) -> Any:
    """A learner that has applied version 1.0 and made some steps."""
    bench = learner_bench(**options)
    bench.told(Paused())
    for _ in range(4):
        bench.step()
    return bench


def test_the_part_is_taken_at_the_next_boundary_before_anything_staged_is_applied(
    learner_bench: Any,
) -> None:
    bench = started(learner_bench)
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.told(CheckpointHeard(1))
    assert not bench.orders(TakeCheckpoint), "only at a boundary"
    bench.step()
    assert [order.number for order in bench.orders(TakeCheckpoint)] == [1]
    assert not bench.orders(Apply)
    bench.step()
    assert not bench.orders(TakeCheckpoint)
    assert [order.version for order in bench.orders(Apply)] == [V1]
    bench.told(PartWritten(1, "digest", 12))
    assert bench.messages(PartSaved) == [PartSaved(1, "digest", 12, "")]


def test_the_order_and_the_number_are_one_checkpoint(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.told(Received(COORDINATOR, CheckpointOrdered(3, ())))
    bench.told(CheckpointHeard(3))
    bench.told(CheckpointHeard(2))
    bench.step()
    assert [order.number for order in bench.orders(TakeCheckpoint)] == [3]
    bench.step()
    assert not bench.orders(TakeCheckpoint)


def test_checkpoints_as_fast_as_steps_do_not_keep_a_learner_from_everything_else(
    learner_bench: Any,
) -> None:
    bench = started(learner_bench)
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.told(CheckpointHeard(1))
    bench.step()
    assert bench.orders(TakeCheckpoint)
    bench.told(CheckpointHeard(2))
    bench.step()
    assert not bench.orders(TakeCheckpoint)
    (kept,) = bench.messages(PartSaved)
    assert (kept.number, kept.problem) == (2, "checkpoints come faster than its steps")
    assert bench.orders(Apply)
    bench.told(CheckpointHeard(3))
    bench.step()
    assert bench.orders(TakeCheckpoint), "every other one"
    assert not bench.orders(Snapshot)


def test_who_holds_no_copy_yet_has_no_part(learner_bench: Any) -> None:
    bench = learner_bench(begin=False)
    bench.told(Received(COORDINATOR, CheckpointOrdered(1, ())))
    assert [kept.problem for kept in bench.messages(PartSaved)] == ["it is only joining"]
    bench.publish(V0, None)
    bench.fetched(V0)
    bench.told(Paused())
    assert bench.orders(Apply)
    assert not bench.orders(TakeCheckpoint)


ASK = Asking(1, 10)


def contributed(learner_bench: Any) -> Any:
    """A learner whose contribution is accepted, and whose parameters still have its steps."""
    bench = started(learner_bench, error_feedback=True)
    bench.hear(Pull(0, ASK, V0, 4, "int2", "overwrite", "/up/1", False))
    assert bench.orders(SendBody)
    bench.hear(Outcome(0, ASK, "accepted", "because", V1))
    return bench


def test_a_residual_changes_when_the_steps_that_were_sent_leave_the_parameters(
    learner_bench: Any,
) -> None:
    """A checkpoint in between would have these steps twice: in the parameters and the residual."""
    bench = contributed(learner_bench)
    assert not bench.orders(Settle)
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.told(CheckpointHeard(1))
    bench.step()
    assert bench.orders(TakeCheckpoint)
    assert not bench.orders(Settle)
    bench.step()
    kinds = [type(each) for each in bench.effects if isinstance(each, Apply | Settle)]
    assert kinds == [Apply, Settle]
    (settled,) = bench.orders(Settle)
    assert (settled.ask, settled.gone) == (ASK, True)


def test_a_contribution_that_is_accepted_after_its_steps_left_is_settled_at_once(
    learner_bench: Any,
) -> None:
    bench = started(learner_bench, error_feedback=True)
    bench.hear(Pull(0, ASK, V0, 4, "int2", "overwrite", "/up/1", False))
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.step()
    assert bench.orders(Apply)
    assert not bench.orders(Settle)
    bench.hear(Outcome(0, ASK, "accepted", "because", Version(1, 2)))
    (settled,) = bench.orders(Settle)
    assert settled.gone


def test_a_shard_that_lost_what_it_accepted_has_the_residual_restored(learner_bench: Any) -> None:
    """Its next life renames the version before: the same steps are sent again."""
    bench = contributed(learner_bench)
    bench.hear(Welcome(0, 2, 0, 4, 4))
    bench.publish(Version(2, 0), V0, difference="")
    (settled,) = bench.orders(Settle)
    assert (settled.ask, settled.gone) == (ASK, False)
