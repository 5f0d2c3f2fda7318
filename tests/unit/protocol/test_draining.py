"""How a learner that was asked to stop is drained: both machines, event by event."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.leaving import drained
from decoupled_diloco.protocol.messages import (
    Asking,
    DrainAsked,
    Draining,
    DrainRefused,
    Heard,
    Merge,
    Outcome,
    Paused,
    Pull,
    Received,
    RoundOpened,
    Send,
    Tick,
    Welcome,
)


def test_fragments_of_a_leaving_learner_are_due_at_once_for_all_learners(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", "c", fragments=4, period=100, overlap=50)
    bench.step("b")
    bench.step("c")
    bench.step("c")
    for _ in range(3):
        bench.step("a")
    assert not bench.machine.state.rounds
    bench.handle(Received("a", Draining((1, 3), "asked to stop")))
    opened = bench.orders(RoundOpened)
    assert [each.fragment for each in opened] == [1, 3]
    assert all(each.why == "a is about to leave, so all learners take part" for each in opened)
    asked = [(p.fragment, p.base) for p in bench.messages(Pull)]
    assert len(asked) == 6, "three learners, two fragments: no training is overwritten for nothing"


def test_an_open_round_asks_a_leaving_learner_at_once(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", quorum=2, fragments=1, period=1)
    bench.step("b")
    bench.step("a")
    number = bench.machine.state.rounds[0].number
    bench.decline("a")
    bench.decline("b")
    bench.step("b")
    bench.step("a")
    assert bench.machine.state.rounds[0].number > number
    bench.handle(Received("a", Draining((0,), "asked to stop")))
    assert not bench.orders(RoundOpened)
    assert bench.machine.state.fragments[0].asks.keys() == {"a", "b"}, "like all learners"


def test_a_round_waits_for_a_leaving_learner_beyond_its_delivery_window(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=1)
    bench.step("b")
    bench.handle(Received("a", Draining((0,), "asked to stop")))
    assert bench.requested() == ["a"], "into the open round, without another step"
    bench.body("b")
    bench.handle(Heard(("a", "b")), bench.machine.deadline())
    bench.handle(Tick())
    assert bench.machine.state.rounds[0].delivery_over
    assert not bench.orders(Merge)
    bench.body("a")
    assert bench.orders(Merge)


def test_without_a_quorum_a_leaving_learner_is_dismissed(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", quorum=2, fragments=1, period=10)
    bench.step("a")
    bench.handle(Received("a", Draining((0,), "asked to stop")))
    (message,) = bench.messages(DrainRefused)
    assert message.reason == "only 1 learners are live, fewer than the quorum"
    assert not bench.orders(RoundOpened)


def test_a_leaving_learner_reports_its_training_and_waits_for_the_outcome(
    learner_bench: Any,
) -> None:
    bench = learner_bench(fragments=2, period=100)
    state, options = bench.machine.state, bench.machine.options
    bench.step()
    bench.step()
    assert not drained(state, options)
    bench.handle(DrainAsked("asked to stop"))
    assert bench.messages(Draining) == [Draining((0, 1), "asked to stop")]
    bench.handle(Received("shard-0", DrainRefused("no other learner is present")))
    assert drained(state, options)


def test_a_leaving_learner_repeats_its_announcement_after_a_reconnection(
    learner_bench: Any,
) -> None:
    bench = learner_bench(fragments=2, period=100)
    bench.step()
    bench.step()
    bench.handle(DrainAsked("asked to stop"))
    bench.handle(Received("shard-0", Welcome(0, 1, 0, 1, 1)))
    assert [order.message for order in bench.orders(Send)] == [Draining((0, 1), "asked to stop")]


def test_accepted_training_is_drained(learner_bench: Any) -> None:
    bench = learner_bench(fragments=1, period=100)
    state, options = bench.machine.state, bench.machine.options
    bench.step()
    bench.step()
    bench.handle(DrainAsked("asked to stop"))
    held = state.fragments[0].held
    bench.handle(
        Received("shard-0", Pull(0, Asking(1, 1), held, 1, "bf16", "overwrite", "/up", False))
    )
    bench.handle(Paused())
    assert state.fragments[0].sent is not None
    assert not drained(state, options)
    bench.handle(Received("shard-0", Outcome(0, Asking(1, 1), "accepted", "", Version(1, 1))))
    assert drained(state, options)
