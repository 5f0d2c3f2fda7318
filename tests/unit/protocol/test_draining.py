"""What a learner that is told to go drains: both machines, event by event."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.draining import drained
from decoupled_diloco.protocol.effects import Merge, RoundOpened, Send
from decoupled_diloco.protocol.events import DrainAsked, Heard, Paused, Received, Tick
from decoupled_diloco.protocol.messages import Draining, DrainRefused, Outcome, Pull, Welcome
from decoupled_diloco.protocol.versions import Asking


def test_fragments_of_who_goes_are_due_at_once_and_everybody_is_asked(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", "c", fragments=4, period=100, overlap=50)
    bench.step("b")
    bench.step("c")
    bench.step("c")
    for _ in range(3):
        bench.step("a")
    assert not bench.machine.state.rounds
    bench.told(Received("a", Draining((1, 3), "told to go")))
    opened = bench.orders(RoundOpened)
    assert [each.fragment for each in opened] == [1, 3]
    assert all(each.why == "a is about to go: everybody is asked" for each in opened)
    asked = [(p.fragment, p.base) for p in bench.messages(Pull)]
    assert len(asked) == 6, "three learners, two fragments: nobody is overwritten for nothing"


def test_an_open_round_asks_who_goes_at_once(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", quorum=2, fragments=1, period=1)
    bench.step("b")
    bench.step("a")
    number = bench.machine.state.rounds[0].number
    bench.decline("a")
    bench.decline("b")
    bench.step("b")
    bench.step("a")
    assert bench.machine.state.rounds[0].number > number
    bench.told(Received("a", Draining((0,), "told to go")))
    assert not bench.orders(RoundOpened)
    assert bench.machine.state.fragments[0].asks.keys() == {"a", "b"}, "as everybody was"


def test_a_round_waits_for_who_goes_longer_than_its_delivery_window(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=1)
    bench.step("b")
    bench.told(Received("a", Draining((0,), "told to go")))
    assert bench.asked() == ["a"], "into the round that is open, without a step since"
    bench.body("b")
    bench.told(Heard(("a", "b")), bench.machine.deadline())
    bench.told(Tick())
    assert bench.machine.state.rounds[0].delivery_over
    assert not bench.orders(Merge)
    bench.body("a")
    assert bench.orders(Merge)


def test_where_no_quorum_is_left_who_goes_is_dismissed(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", quorum=2, fragments=1, period=10)
    bench.step("a")
    bench.told(Received("a", Draining((0,), "told to go")))
    (message,) = bench.messages(DrainRefused)
    assert message.reason == "1 learners are live, fewer than the quorum"
    assert not bench.orders(RoundOpened)


def test_a_learner_tells_what_it_has_and_waits_for_what_becomes_of_it(learner_bench: Any) -> None:
    bench = learner_bench(fragments=2, period=100)
    state, options = bench.machine.state, bench.machine.options
    bench.step()
    bench.step()
    assert not drained(state, options)
    bench.told(DrainAsked("told to go"))
    assert bench.messages(Draining) == [Draining((0, 1), "told to go")]
    bench.told(Received("shard-0", DrainRefused("nobody else is there")))
    assert drained(state, options)


def test_who_comes_back_to_a_shard_says_again_that_it_goes(learner_bench: Any) -> None:
    bench = learner_bench(fragments=2, period=100)
    bench.step()
    bench.step()
    bench.told(DrainAsked("told to go"))
    bench.told(Received("shard-0", Welcome(0, 1, 0, 1, 1)))
    assert [order.message for order in bench.orders(Send)] == [Draining((0, 1), "told to go")]


def test_what_is_accepted_is_handed_in(learner_bench: Any) -> None:
    bench = learner_bench(fragments=1, period=100)
    state, options = bench.machine.state, bench.machine.options
    bench.step()
    bench.step()
    bench.told(DrainAsked("told to go"))
    held = state.fragments[0].held
    bench.told(
        Received("shard-0", Pull(0, Asking(1, 1), held, 1, "bf16", "overwrite", "/up", False))
    )
    bench.told(Paused())
    assert state.fragments[0].sent is not None
    assert not drained(state, options)
    bench.told(Received("shard-0", Outcome(0, Asking(1, 1), "accepted", "", Version(1, 1))))
    assert drained(state, options)
