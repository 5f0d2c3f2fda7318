"""A learner that trains for too long without its link drops that training (ours).

H is 4, and steps of two periods count: nine are too many.
"""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.leaving import drained
from decoupled_diloco.protocol.messages import (
    Apply,
    Asking,
    BodyEncoded,
    Connected,
    Decline,
    DrainAsked,
    Draining,
    Ending,
    Lost,
    Outcome,
    Paused,
    Pull,
    SendBody,
    Snapshot,
    Welcome,
    shard_peer,
)

HELD, NEXT, BEFORE, NEWEST = Version(1, 0), Version(1, 1), Version(1, 2), Version(1, 3)
ASK, LATER = Asking(1, 1), Asking(1, 2)


def alone(learner_bench: Any, steps: int, **options: Any) -> Any:
    """Return a learner that trained these steps while its link was down, and has reconnected."""
    bench = learner_bench(counter_cap_periods=2, **options)
    bench.handle(Paused())
    return cut(bench, steps)


def cut(bench: Any, steps: int) -> Any:
    bench.handle(Lost(shard_peer(0)))
    for _ in range(steps):
        bench.step()
    bench.handle(Connected(shard_peer(0)))
    step = bench.machine.state.step
    bench.receive(Welcome(0, 1, step, step, step, news=1))
    return bench


def pulled(bench: Any, base: Version, *, ask: Asking = ASK, final: bool = False) -> Any:
    """Send it a request, then a step."""
    tick = bench.machine.state.step
    pull = Pull(0, ask, base, tick, "bf16", bench.machine.options.alignment, "/up", final=final)
    answers = bench.receive(pull)
    answers += bench.handle(Paused()) if final else bench.step()
    bench.effects = answers
    return bench


@pytest.mark.parametrize(
    ("missed", "steps", "mode"),
    [("overwrite", 8, "rebase"), ("overwrite", 9, "overwrite"), ("rebase", 9, "rebase")],
)
def test_a_diverged_learner_drops_its_training(
    learner_bench: Any, missed: str, steps: int, mode: str
) -> None:
    """It has become another model: its change would throw the run far back."""
    bench = alone(learner_bench, steps, missed=missed)
    bench.publish(NEWEST, BEFORE)
    bench.fetched(NEWEST)
    bench.handle(Paused())
    (applied,) = bench.orders(Apply)
    tokens = 10 * steps if mode == "overwrite" else 0
    assert (applied.mode, applied.discarded_tokens) == (mode, tokens)
    pulled(bench, NEWEST)
    (body,) = bench.orders(SendBody)
    assert body.steps in ((1,) if mode == "overwrite" else (steps, steps + 1))


def test_a_diverged_learner_contributes_nothing_before_the_copy_arrives(learner_bench: Any) -> None:
    """Its shard also accepts contributions from older versions, up to 32 versions late."""
    bench = alone(learner_bench, 9)
    bench.publish(NEWEST, BEFORE)
    pulled(bench, HELD)
    assert bench.messages(Decline)
    assert not bench.orders(SendBody)
    bench.fetched(NEWEST)
    pulled(bench, HELD, ask=LATER)
    assert bench.messages(Decline)
    assert not bench.orders(SendBody)
    (applied,) = bench.orders(Apply)
    assert (applied.mode, applied.discarded_tokens) == ("overwrite", 110)


def test_a_waiting_request_is_not_answered_before_the_copy_is_applied(learner_bench: Any) -> None:
    bench = alone(learner_bench, 9)
    bench.receive(Pull(0, ASK, HELD, 100, "bf16", "overwrite", "/up", final=False))
    bench.publish(NEWEST, BEFORE)
    bench.fetched(NEWEST)
    bench.step()
    assert not bench.orders(SendBody)
    assert bench.orders(Apply)[0].mode == "overwrite"


def test_a_waiting_request_is_declined_at_the_boundary_after_a_new_version(
    learner_bench: Any,
) -> None:
    bench = alone(learner_bench, 9)
    bench.receive(Pull(0, ASK, HELD, 100, "bf16", "overwrite", "/up", final=False))
    bench.publish(NEWEST, BEFORE)
    bench.step()
    assert bench.messages(Decline)
    assert not bench.orders(SendBody)


@pytest.mark.parametrize("counter", [0, 1])
def test_without_new_versions_it_is_one_long_contribution(learner_bench: Any, counter: int) -> None:
    """The shard was unreachable for all: dropping it would waste the training of all."""
    bench = alone(learner_bench, 40)
    if counter:
        bench.publish(Version(1, counter), Version(1, counter - 1))
    pulled(bench, HELD)
    (body,) = bench.orders(SendBody)
    assert body.steps in (40, 41)


@pytest.mark.parametrize("flaps", [False, True])
def test_a_slow_link_drops_nothing(learner_bench: Any, *, flaps: bool) -> None:
    """It has not diverged: it receives all messages of its shard, with one short interruption."""
    bench = learner_bench(counter_cap_periods=2)
    bench.handle(Paused())
    for _ in range(20):
        bench.step()
    bench.publish(BEFORE, NEXT)
    if flaps:
        cut(bench, 1)
    for _ in range(20):
        bench.step()
    bench.publish(NEWEST, BEFORE)
    pulled(bench, HELD)
    assert bench.orders(SendBody)[0].steps >= 40


@pytest.mark.parametrize(("second", "apart"), [(4, False), (5, True)])
def test_several_cuts_add_up(learner_bench: Any, second: int, *, apart: bool) -> None:
    bench = cut(alone(learner_bench, 4), second)
    bench.publish(NEWEST, BEFORE)
    pulled(bench, HELD)
    assert bool(bench.messages(Decline)) is apart
    assert bool(bench.orders(SendBody)) is not apart


def test_a_leaving_learner_does_not_announce_what_it_will_drop(learner_bench: Any) -> None:
    bench = alone(learner_bench, 9)
    bench.publish(NEWEST, BEFORE)
    bench.handle(DrainAsked("it is leaving"))
    (draining,) = bench.messages(Draining)
    assert draining.fragments == ()
    assert drained(bench.machine.state, bench.machine.options)


@pytest.mark.parametrize("alignment", ["overwrite", "carry", "blend"])
@pytest.mark.parametrize("outcome", ["lost", "accepted", "still under way"])
def test_an_earlier_contribution_does_not_keep_diverged_training(
    learner_bench: Any, alignment: str, outcome: str
) -> None:
    bench = learner_bench(counter_cap_periods=2, alignment=alignment)
    bench.step()
    pulled(bench, HELD)
    assert bench.orders(SendBody)
    bench.handle(BodyEncoded(0, ASK, "digest"))
    if outcome == "accepted":
        bench.receive(Outcome(0, ASK, "accepted", "it is folded", NEXT))
    bench.handle(Lost(shard_peer(0)))
    for _ in range(9):
        bench.step()
    bench.handle(Connected(shard_peer(0)))
    asks = (ASK,) if outcome == "still under way" else ()
    bench.receive(Welcome(0, 1, 9, 9, 9, news=1, asks=asks))
    bench.publish(NEWEST, BEFORE)
    bench.fetched(NEWEST)
    bench.step()
    (applied,) = bench.orders(Apply)
    sent = 0 if outcome == "lost" else 10
    assert (applied.mode, applied.discarded_tokens) == ("overwrite", 110 - sent)


def test_diverged_training_is_also_dropped_at_the_end(learner_bench: Any) -> None:
    """The common model is the result."""
    bench = alone(learner_bench, 9)
    bench.publish(NEWEST, BEFORE)
    bench.receive(Ending())
    pulled(bench, HELD, final=True)
    (declined,) = bench.messages(Decline)
    assert declined.nothing_new
    assert not bench.orders(Snapshot)


@pytest.mark.parametrize("verdict", ["accepted", "refused", None])
def test_a_contribution_before_the_next_version_decides(
    learner_bench: Any, verdict: str | None
) -> None:
    """If it is accepted, the learner no longer counts as diverged. Otherwise it keeps all of it."""
    bench = alone(learner_bench, 9, alignment="carry")
    pulled(bench, HELD)
    assert bench.orders(SendBody)
    if verdict:
        version = NEWEST if verdict == "accepted" else None
        bench.receive(Outcome(0, ASK, verdict, "the shard says so", version))
    bench.publish(NEWEST, BEFORE)
    if verdict == "refused":
        pulled(bench, HELD, ask=LATER)
        assert not bench.orders(SendBody)
    bench.fetched(NEWEST)
    bench.step()
    (applied,) = bench.orders(Apply)
    assert applied.mode == ("carry" if verdict == "accepted" else "overwrite")
