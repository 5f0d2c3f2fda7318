"""What arrives for a round of a shard, and over which connection (rules 3, 4, 6, 10)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.effects import (
    Drop,
    Fold,
    Merge,
    RoundFinished,
    Send,
    Unexpect,
)
from decoupled_diloco.protocol.events import BodyCorrupt, Lost, Received
from decoupled_diloco.protocol.messages import (
    Decline,
    Leave,
    Outcome,
    StepReport,
    Welcome,
)
from decoupled_diloco.protocol.versions import Asking, Holding
from unit.protocol.rounds import opened, states


@pytest.mark.parametrize(
    ("fields", "verdict", "reason"),
    [
        ({"base": Version(0, 7)}, "behind", "its base 0.7 is not 1.0"),
        ({"base": Version(1, 1)}, "behind", "its base 1.1 is not 1.0"),
        ({"tokens": 0}, "refused", "0 tokens in 1 steps"),
        ({"steps": 0}, "refused", "10 tokens in 0 steps"),
    ],
)
def test_rule_6_a_body_that_is_not_wanted_is_dropped_and_its_learner_told(
    shard_bench: Any, fields: dict[str, Any], verdict: str, reason: str
) -> None:
    """Rules 4 and 6: behind or refused, its learner hears why; no weight is nothing."""
    bench = opened(shard_bench, "a", "b")
    name = bench.ask("a")
    bench.body("a", **fields)
    assert [(order.ask, order.why) for order in bench.orders(Drop)] == [(name, reason)]
    assert not bench.orders(Fold)
    (outcome,) = bench.messages(Outcome)
    assert (outcome.ask, outcome.verdict, outcome.reason) == (name, verdict, reason)
    bench.body("b")
    assert bench.orders(Merge), "and the round goes on"


@pytest.mark.parametrize(
    "fields",
    [{"ask": Asking(1, 77)}, {"ask": Asking(0, 1)}, {"learner": "stranger"}, {"epoch": 2}],
)
def test_rule_4_a_body_that_nobody_asked_for_is_dropped(
    shard_bench: Any, fields: dict[str, Any]
) -> None:
    """Rule 4: of another asking, another term, another learner or another life."""
    bench = opened(shard_bench, "a", "b")
    bench.body(**{"learner": "a", **fields})
    (dropped,) = bench.orders(Drop)
    assert dropped.why == "it was asked anew since, or is gone"
    assert not bench.orders(Fold)
    assert not bench.messages(Outcome)
    assert set(bench.machine.state.fragments[0].asks) == {"a", "b"}


def test_rule_4_a_second_body_to_one_asking_is_dropped(shard_bench: Any) -> None:
    """Rule 4: what is folded is folded once."""
    bench = opened(shard_bench, "a", "b")
    name = bench.ask("a")
    bench.body("a")
    bench.body("a", ask=name)
    assert bench.orders(Drop)
    assert not bench.orders(Fold)


def test_rule_4_askings_bear_the_term_and_a_number_of_their_own(shard_bench: Any) -> None:
    """Rule 4: whatever names a round names its term."""
    bench = opened(shard_bench, "a", "b")
    first, second = bench.ask("a"), bench.ask("b")
    assert first.term == second.term == 1
    assert first.number < second.number
    bench.body("a")
    bench.body("b")
    bench.merged()
    for _ in range(2):
        bench.step("a")
    assert bench.ask("a").number > second.number


def test_rule_10_a_body_of_an_earlier_life_is_dropped_and_the_newer_life_told_nothing(
    shard_bench: Any,
) -> None:
    """Its own contribution may be on its way to the same round, and its outcome must be its own."""
    bench = shard_bench(*"abcde", fragments=1, period=2, quorum=3)
    for learner in "abcdeabc":
        bench.step(learner)
    before = bench.ask("a")
    bench.greet("a", epoch=2, run_step=2)
    bench.step("a")
    assert bench.ask("a") > before, "the newer life is asked in the same round"
    bench.body("a", ask=before)
    assert bench.orders(Drop)
    assert not bench.messages(Outcome)
    bench.body("a", epoch=2)
    assert bench.orders(Fold)


def test_rule_6_counters_are_capped(shard_bench: Any) -> None:
    """Rule 6: so that one long-lost learner cannot dominate."""
    bench = shard_bench("a", "b", fragments=1, period=5, counter_cap_periods=2)
    bench.told(Received("a", StepReport(5, 280, 1.0)))
    bench.body("a", steps=28, tokens=280)
    (fold,) = bench.orders(Fold)
    assert (fold.steps, fold.tokens) == (10.0, 100.0)
    assert "capped" in fold.why


def test_a_spoiled_body_is_refused_and_the_round_goes_on(shard_bench: Any) -> None:
    bench = opened(shard_bench, "a", "b")
    bench.spoil("a", "not finite")
    assert bench.orders(Unexpect)
    assert [message.verdict for message in bench.messages(Outcome)] == ["refused"]
    bench.body("b")
    assert bench.orders(Merge)


def test_a_decline_is_answered(shard_bench: Any) -> None:
    """Its upload may have failed for the learner only: it needs to hear what became of it."""
    bench = opened(shard_bench, "a", "b")
    bench.decline("a", "upload failed")
    assert [(o.peer, o.message.verdict) for o in bench.orders(Send)] == [("a", "refused")]


def test_windows_pass_in_ticks_only(shard_bench: Any) -> None:
    """A paused shard first hears what has arrived meanwhile."""
    bench = opened(shard_bench, "a", "b")
    bench.body("a", at=500.0)
    assert bench.orders(Fold)
    assert not bench.orders(Merge)
    bench.body("b", at=500.0)
    (order,) = bench.orders(Merge)
    assert order.why == "all 2 live learners qualify"


def test_who_connects_anew_is_not_waited_for_when_the_window_has_closed(shard_bench: Any) -> None:
    bench = opened(shard_bench, "a", "b", quorum=1)
    first = bench.machine.state.fragments[0].asks["a"].path
    bench.told(Lost("a"))
    bench.greet("a", step=2, run_step=2)
    assert [order.path for order in bench.orders(Unexpect)] == [first]
    assert bench.asked() == []
    bench.body("b")
    assert bench.orders(Merge)


def test_who_connects_anew_while_the_window_is_open_is_asked_again(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", "c", fragments=1, period=2)
    for learner in ("a", "b", "c", "a", "b"):
        bench.step(learner)
    first = bench.machine.state.fragments[0].asks["a"].path
    bench.greet("a", step=2)
    assert bench.asked() == ["a"]
    assert bench.machine.state.fragments[0].asks["a"].path != first


def test_rule_4_what_is_being_sent_survives_a_new_connection(shard_bench: Any) -> None:
    """Rule 4: an upload ends when no byte moves any more, not with a control connection."""
    bench = opened(shard_bench, "a", "b")
    name = bench.ask("a")
    bench.told(Lost("a"))
    bench.greet("a", step=2, run_step=2, asks=(Asking(1, 77), name))
    assert not bench.orders(Unexpect)
    assert bench.asked() == []
    assert [welcome.asks for welcome in bench.messages(Welcome)] == [(name,)]
    bench.body("a", ask=name)
    assert bench.orders(Fold)


def test_rule_4_what_is_not_being_sent_is_over_with_the_connection(shard_bench: Any) -> None:
    """Rule 4: its pull did not get through, whatever else the learner is sending."""
    bench = opened(shard_bench, "a", "b")
    path = bench.machine.state.fragments[0].asks["a"].path
    bench.told(Lost("a"))
    bench.greet("a", step=2, run_step=2, asks=(Asking(1, 77),))
    assert [order.path for order in bench.orders(Unexpect)] == [path]
    assert [welcome.asks for welcome in bench.messages(Welcome)] == [()]


def test_rule_4_a_welcome_names_what_is_under_way_folded_or_merging(shard_bench: Any) -> None:
    """Rule 4: every other asking is over, and its learner must not wait for an outcome."""
    bench = shard_bench("a", "b", fragments=3, period=3, overlap=3, quorum=2)
    for learner in "ababab":
        bench.step(learner)
    names = [bench.ask("a", fragment) for fragment in (0, 1, 2)]
    bench.body("a", 1)
    bench.body("b", 1)
    assert bench.orders(Merge)
    bench.body("a", 2)
    bench.greet("a", step=3, run_step=3, asks=tuple(names))
    (welcome,) = bench.messages(Welcome)
    assert welcome.asks == tuple(names)
    bench.merged(1)
    bench.greet("a", step=3, run_step=3, asks=tuple(names))
    (welcome,) = bench.messages(Welcome)
    assert welcome.asks == (names[0], names[2]), "that one is in a version, and told"
    bench.greet("b", step=3, run_step=3)
    (welcome,) = bench.messages(Welcome)
    assert set(welcome.asks).isdisjoint(names)


def test_rule_4_what_was_folded_of_who_is_gone_stays(shard_bench: Any) -> None:
    """Rule 4: it belongs to its fragment."""
    bench = opened(shard_bench, "a", "b")
    bench.body("a")
    bench.told(Received("a", Leave("enough")))
    bench.body("b")
    bench.merged()
    (finished,) = bench.orders(RoundFinished)
    assert states(finished) == {"a": "folded", "b": "folded"}


def test_rule_4_an_upload_ends_with_its_learners_lease(shard_bench: Any) -> None:
    """Rule 4: nobody waits for who is gone."""
    bench = opened(shard_bench, "a", "b")
    path = bench.machine.state.fragments[0].asks["b"].path
    bench.body("a")
    bench.told(Received("b", Leave("enough")))
    assert [order.path for order in bench.orders(Unexpect)] == [path]
    assert bench.orders(Merge)


def test_rule_4_the_failure_of_an_earlier_asking_does_not_take_back_the_next(
    shard_bench: Any,
) -> None:
    """Rule 4: who connects anew is asked anew; what still comes of the first asking is void."""
    bench = shard_bench("a", "b", "c", fragments=1, period=2)
    for learner in ("a", "b", "c", "a", "b"):
        bench.step(learner)
    first = bench.ask("a")
    bench.greet("a", step=2)
    assert bench.ask("a") != first
    assert not bench.told(Received("a", Decline(0, first, False, "upload failed: reset")))
    assert not bench.told(BodyCorrupt("a", 0, first, "truncated"))
    bench.body("a", ask=first)
    assert bench.orders(Drop)
    assert not bench.orders(Send), "its part in the round is not over"
    bench.body("a")
    assert bench.orders(Fold)


def test_a_new_epoch_is_not_asked_for_what_its_earlier_life_has_delivered(
    shard_bench: Any,
) -> None:
    bench = shard_bench("a", "b", "c", fragments=1, period=1, participants="all", quorum=2)
    bench.step("a")
    bench.step("b")
    bench.body("a")
    bench.greet("a", epoch=2)
    bench.step("a")
    assert "a" not in bench.asked()
    assert [ask.learner for ask in bench.machine.state.fragments[0].folded] == ["a"]


def test_who_missed_a_fragment_is_asked_the_next_time(shard_bench: Any) -> None:
    """A learner of half the speed would otherwise meet the same fragments for ever."""
    bench = shard_bench("fast", "slow", fragments=1, period=2, grace_margin=0.0)
    bench.step("fast", 1.0)
    bench.step("slow", 1.0)
    bench.step("fast", 2.0)
    assert bench.asked() == ["fast"]
    bench.body("fast")
    bench.merged()
    bench.step("fast", 3.0)
    bench.step("fast", 4.0)
    assert sorted(bench.asked()) == ["fast", "slow"]


def test_eq_3_a_joiner_does_not_measure_the_broadcast(shard_bench: Any) -> None:
    """Rule 3: the slack is that of who held the base when the new copy was published."""
    bench = shard_bench("a", "b", fragments=1, period=1)
    for learner in ("a", "b"):
        bench.told(Received(learner, Holding(0, Version(1, 0))))
    bench.step("a")
    bench.body("a")
    bench.merged()
    bench.told(Lost("b"))
    bench.greet("b")
    bench.greet("joiner")
    broadcast = bench.machine.state.timing.broadcast
    for learner in ("b", "joiner"):
        bench.told(Received(learner, Holding(0, Version(1, 1))), 2.0)
        assert broadcast.value is None, learner
    bench.told(Received("a", Holding(0, Version(1, 1))), 2.5)
    assert broadcast.value == 2.5
    bench.told(Received("a", Holding(0, Version(1, 1))), 9.0)
    assert broadcast.value == 2.5, "once"
