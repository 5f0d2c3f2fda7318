"""A learner's part of a checkpoint of the run: at which boundary, and before what."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Apply,
    Asking,
    CheckpointHeard,
    CheckpointOrdered,
    Done,
    Made,
    Outcome,
    PartSaved,
    Paused,
    Pull,
    Received,
    SendBody,
    Settle,
    Snapshot,
    TakeCheckpoint,
    Welcome,
)

V0, V1 = Version(1, 0), Version(1, 1)


def started(learner_bench: Any, **options: Any) -> Any:
    """Return a learner that has applied version 1.0 and taken some steps."""
    bench = learner_bench(**options)
    bench.handle(Paused())
    for _ in range(4):
        bench.step()
    return bench


def test_the_part_is_taken_at_the_next_boundary_before_anything_staged_is_applied(
    learner_bench: Any,
) -> None:
    bench = started(learner_bench)
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.handle(CheckpointHeard(1))
    assert not bench.orders(TakeCheckpoint), "only at a boundary"
    bench.step()
    assert [order.number for order in bench.orders(TakeCheckpoint)] == [1]
    assert not bench.orders(Apply)
    bench.step()
    assert not bench.orders(TakeCheckpoint)
    assert [order.version for order in bench.orders(Apply)] == [V1]
    bench.handle(Done(TakeCheckpoint(1, ""), Made("digest", 12)))
    assert bench.messages(PartSaved) == [PartSaved(1, "digest", 12, "")]


def test_the_order_and_the_number_are_one_checkpoint(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.handle(Received(COORDINATOR, CheckpointOrdered(3, ())))
    bench.handle(CheckpointHeard(3))
    bench.handle(CheckpointHeard(2))
    bench.step()
    assert [order.number for order in bench.orders(TakeCheckpoint)] == [3]
    bench.step()
    assert not bench.orders(TakeCheckpoint)


def test_checkpoints_as_fast_as_steps_do_not_block_a_learner(
    learner_bench: Any,
) -> None:
    bench = started(learner_bench)
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.handle(CheckpointHeard(1))
    bench.step()
    assert bench.orders(TakeCheckpoint)
    bench.handle(CheckpointHeard(2))
    bench.step()
    assert not bench.orders(TakeCheckpoint)
    (kept,) = bench.messages(PartSaved)
    assert (kept.number, kept.problem) == (2, "checkpoints come faster than its steps")
    assert bench.orders(Apply)
    bench.handle(CheckpointHeard(3))
    bench.step()
    assert bench.orders(TakeCheckpoint), "every other one"
    assert not bench.orders(Snapshot)


def test_a_learner_without_copies_has_no_part(learner_bench: Any) -> None:
    bench = learner_bench(begin=False)
    bench.handle(Received(COORDINATOR, CheckpointOrdered(1, ())))
    assert [kept.problem for kept in bench.messages(PartSaved)] == ["it is still joining"]
    bench.publish(V0, None)
    bench.fetched(V0)
    bench.handle(Paused())
    assert bench.orders(Apply)
    assert not bench.orders(TakeCheckpoint)


ASK = Asking(1, 10)


def contributed(learner_bench: Any) -> Any:
    """Return a learner with an accepted contribution whose steps are still in its parameters."""
    bench = started(learner_bench, error_feedback=True)
    bench.receive(Pull(0, ASK, V0, 4, "int2", "overwrite", "/up/1", False))
    assert bench.orders(SendBody)
    bench.receive(Outcome(0, ASK, "accepted", "because", V1))
    return bench


def test_a_residual_changes_when_the_steps_that_were_sent_leave_the_parameters(
    learner_bench: Any,
) -> None:
    """A checkpoint in between would have these steps twice: in the parameters and the residual."""
    bench = contributed(learner_bench)
    assert not bench.orders(Settle)
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.handle(CheckpointHeard(1))
    bench.step()
    assert bench.orders(TakeCheckpoint)
    assert not bench.orders(Settle)
    bench.step()
    kinds = [type(each) for each in bench.effects if isinstance(each, Apply | Settle)]
    assert kinds == [Apply, Settle]
    (settled,) = bench.orders(Settle)
    assert (settled.ask, settled.gone) == (ASK, True)


def test_a_late_accepted_contribution_is_settled_at_once(
    learner_bench: Any,
) -> None:
    bench = started(learner_bench, error_feedback=True)
    bench.receive(Pull(0, ASK, V0, 4, "int2", "overwrite", "/up/1", False))
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.step()
    assert bench.orders(Apply)
    assert not bench.orders(Settle)
    bench.receive(Outcome(0, ASK, "accepted", "because", Version(1, 2)))
    (settled,) = bench.orders(Settle)
    assert settled.gone


def test_the_residual_is_restored_when_a_shard_lost_an_accepted_contribution(
    learner_bench: Any,
) -> None:
    """Its next process renames the version before: the same steps are sent again."""
    bench = contributed(learner_bench)
    bench.receive(Welcome(0, 2, 0, 4, 4))
    bench.publish(Version(2, 0), V0, difference="")
    (settled,) = bench.orders(Settle)
    assert (settled.ask, settled.gone) == (ASK, False)
