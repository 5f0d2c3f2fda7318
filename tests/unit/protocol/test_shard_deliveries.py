"""Arrivals for a round of a shard, and their connections (rules 3, 4, 6, 10)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.messages import (
    Asking,
    BodyCorrupt,
    Decline,
    Drop,
    Fold,
    Holding,
    Leave,
    Lost,
    Merge,
    Outcome,
    Received,
    RoundFinished,
    Send,
    StepReport,
    Unexpect,
    Welcome,
)
from unit.protocol.shard_rounds import opened, states


@pytest.mark.parametrize(
    ("fields", "verdict", "reason"),
    [
        ({"base": Version(0, 7)}, "behind", "its base 0.7 is not 1.0"),
        ({"base": Version(1, 1)}, "behind", "its base 1.1 is not 1.0"),
        ({"tokens": 0}, "refused", "0 tokens in 1 steps"),
        ({"steps": 0}, "refused", "10 tokens in 0 steps"),
    ],
)
def test_rule_6_an_invalid_payload_is_dropped_with_an_outcome(
    shard_bench: Any, fields: dict[str, Any], verdict: str, reason: str
) -> None:
    """Rules 4 and 6: behind or refused, its learner receives the reason."""
    bench = opened(shard_bench, "a", "b")
    name = bench.ask("a")
    bench.body("a", **fields)
    assert [(order.ask, order.why) for order in bench.orders(Drop)] == [(name, reason)]
    assert not bench.orders(Fold)
    (outcome,) = bench.messages(Outcome)
    assert (outcome.ask, outcome.verdict, outcome.reason) == (name, verdict, reason)
    bench.body("b")
    assert bench.orders(Merge), "and the round continues"


@pytest.mark.parametrize(
    "fields",
    [{"ask": Asking(1, 77)}, {"ask": Asking(0, 1)}, {"learner": "stranger"}, {"epoch": 2}],
)
def test_rule_4_an_unrequested_payload_is_dropped(shard_bench: Any, fields: dict[str, Any]) -> None:
    """Rule 4: of another request, another term, another learner or another incarnation."""
    bench = opened(shard_bench, "a", "b")
    bench.body(**{"learner": "a", **fields})
    (dropped,) = bench.orders(Drop)
    assert dropped.why == "its request was replaced, or the learner left"
    assert not bench.orders(Fold)
    assert not bench.messages(Outcome)
    assert set(bench.machine.state.fragments[0].asks) == {"a", "b"}


def test_rule_4_a_second_payload_for_one_request_is_dropped(shard_bench: Any) -> None:
    """Rule 4: a contribution is folded once."""
    bench = opened(shard_bench, "a", "b")
    name = bench.ask("a")
    bench.body("a")
    bench.body("a", ask=name)
    assert bench.orders(Drop)
    assert not bench.orders(Fold)


def test_rule_4_requests_have_the_term_and_their_own_number(shard_bench: Any) -> None:
    """Rule 4: every reference to a round includes its term."""
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


def test_rule_10_a_payload_of_an_earlier_incarnation_is_dropped_silently(
    shard_bench: Any,
) -> None:
    """The newer incarnation may be contributing to the same round, and expects its own outcome."""
    bench = shard_bench(*"abcde", fragments=1, period=2, quorum=3)
    for learner in "abcdeabc":
        bench.step(learner)
    before = bench.ask("a")
    bench.greet("a", epoch=2, run_step=2)
    bench.step("a")
    assert bench.ask("a") > before, "the newer incarnation is asked in the same round"
    bench.body("a", ask=before)
    assert bench.orders(Drop)
    assert not bench.messages(Outcome)
    bench.body("a", epoch=2)
    assert bench.orders(Fold)


def test_rule_6_counters_are_capped(shard_bench: Any) -> None:
    """Rule 6: so that one long-absent learner cannot dominate."""
    bench = shard_bench("a", "b", fragments=1, period=5, counter_cap_periods=2)
    bench.handle(Received("a", StepReport(5, 280, 1.0)))
    bench.body("a", steps=28, tokens=280)
    (fold,) = bench.orders(Fold)
    assert (fold.steps, fold.tokens) == (10.0, 100.0)
    assert "capped" in fold.why


def test_a_corrupted_payload_is_refused_and_the_round_continues(shard_bench: Any) -> None:
    bench = opened(shard_bench, "a", "b")
    bench.corrupt("a", "not finite")
    assert bench.orders(Unexpect)
    assert [message.verdict for message in bench.messages(Outcome)] == ["refused"]
    bench.body("b")
    assert bench.orders(Merge)


def test_a_decline_is_answered(shard_bench: Any) -> None:
    """Its upload may have failed for the learner only: it needs the outcome."""
    bench = opened(shard_bench, "a", "b")
    bench.decline("a", "upload failed")
    assert [(o.peer, o.message.verdict) for o in bench.orders(Send)] == [("a", "refused")]


def test_windows_close_only_in_ticks(shard_bench: Any) -> None:
    """A paused shard first receives what has arrived meanwhile."""
    bench = opened(shard_bench, "a", "b")
    bench.body("a", at=500.0)
    assert bench.orders(Fold)
    assert not bench.orders(Merge)
    bench.body("b", at=500.0)
    (order,) = bench.orders(Merge)
    assert order.why == "all 2 live learners qualify"


def test_a_closed_window_does_not_wait_for_a_reconnected_learner(shard_bench: Any) -> None:
    bench = opened(shard_bench, "a", "b", quorum=1)
    first = bench.machine.state.fragments[0].asks["a"].path
    bench.handle(Lost("a"))
    bench.greet("a", step=2, run_step=2)
    assert [order.path for order in bench.orders(Unexpect)] == [first]
    assert bench.requested() == []
    bench.body("b")
    assert bench.orders(Merge)


def test_an_open_window_asks_a_reconnected_learner_again(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", "c", fragments=1, period=2)
    for learner in ("a", "b", "c", "a", "b"):
        bench.step(learner)
    first = bench.machine.state.fragments[0].asks["a"].path
    bench.greet("a", step=2)
    assert bench.requested() == ["a"]
    assert bench.machine.state.fragments[0].asks["a"].path != first


def test_rule_4_an_upload_survives_a_reconnection(shard_bench: Any) -> None:
    """Rule 4: an upload ends when no more bytes move, not with a control connection."""
    bench = opened(shard_bench, "a", "b")
    name = bench.ask("a")
    bench.handle(Lost("a"))
    bench.greet("a", step=2, run_step=2, asks=(Asking(1, 77), name))
    assert not bench.orders(Unexpect)
    assert bench.requested() == []
    assert [welcome.asks for welcome in bench.messages(Welcome)] == [(name,)]
    bench.body("a", ask=name)
    assert bench.orders(Fold)


def test_rule_4_an_unanswered_request_ends_with_the_connection(shard_bench: Any) -> None:
    """Rule 4: the request was lost, whatever else the learner is sending."""
    bench = opened(shard_bench, "a", "b")
    path = bench.machine.state.fragments[0].asks["a"].path
    bench.handle(Lost("a"))
    bench.greet("a", step=2, run_step=2, asks=(Asking(1, 77),))
    assert [order.path for order in bench.orders(Unexpect)] == [path]
    assert [welcome.asks for welcome in bench.messages(Welcome)] == [()]


def test_rule_4_a_welcome_lists_all_valid_requests(shard_bench: Any) -> None:
    """Rule 4: every other request is void, and its learner must not wait for an outcome."""
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
    assert welcome.asks == (names[0], names[2]), "that one is in a version, and has its outcome"
    bench.greet("b", step=3, run_step=3)
    (welcome,) = bench.messages(Welcome)
    assert set(welcome.asks).isdisjoint(names)


def test_rule_4_a_folded_contribution_outlives_its_learner(shard_bench: Any) -> None:
    """Rule 4: it belongs to its fragment."""
    bench = opened(shard_bench, "a", "b")
    bench.body("a")
    bench.handle(Received("a", Leave("enough")))
    bench.body("b")
    bench.merged()
    (finished,) = bench.orders(RoundFinished)
    assert states(finished) == {"a": "folded", "b": "folded"}


def test_rule_4_an_upload_ends_with_its_learners_lease(shard_bench: Any) -> None:
    """Rule 4: no round waits for a learner that has left."""
    bench = opened(shard_bench, "a", "b")
    path = bench.machine.state.fragments[0].asks["b"].path
    bench.body("a")
    bench.handle(Received("b", Leave("enough")))
    assert [order.path for order in bench.orders(Unexpect)] == [path]
    assert bench.orders(Merge)


def test_rule_4_the_failure_of_an_earlier_request_does_not_void_the_next(
    shard_bench: Any,
) -> None:
    """Rule 4: a reconnected learner receives a new request; answers to the first are void."""
    bench = shard_bench("a", "b", "c", fragments=1, period=2)
    for learner in ("a", "b", "c", "a", "b"):
        bench.step(learner)
    first = bench.ask("a")
    bench.greet("a", step=2)
    assert bench.ask("a") != first
    assert not bench.handle(Received("a", Decline(0, first, False, "upload failed: reset")))
    assert not bench.handle(BodyCorrupt("a", 0, first, "truncated"))
    bench.body("a", ask=first)
    assert bench.orders(Drop)
    assert not bench.orders(Send), "its part in the round is not over"
    bench.body("a")
    assert bench.orders(Fold)


def test_a_new_incarnation_is_not_asked_for_what_the_earlier_one_delivered(
    shard_bench: Any,
) -> None:
    bench = shard_bench("a", "b", "c", fragments=1, period=1, participants="all", quorum=2)
    bench.step("a")
    bench.step("b")
    bench.body("a")
    bench.greet("a", epoch=2)
    bench.step("a")
    assert "a" not in bench.requested()
    assert [ask.learner for ask in bench.machine.state.fragments[0].folded] == ["a"]


def test_a_learner_that_missed_a_fragment_is_asked_the_next_time(shard_bench: Any) -> None:
    """Otherwise, a learner of half the speed would always meet the same fragments."""
    bench = shard_bench("fast", "slow", fragments=1, period=2, grace_margin=0.0)
    bench.step("fast", 1.0)
    bench.step("slow", 1.0)
    bench.step("fast", 2.0)
    assert bench.requested() == ["fast"]
    bench.body("fast")
    bench.merged()
    bench.step("fast", 3.0)
    bench.step("fast", 4.0)
    assert sorted(bench.requested()) == ["fast", "slow"]


def test_eq_3_a_joiner_does_not_measure_the_broadcast(shard_bench: Any) -> None:
    """Rule 3: only learners that held the base at publication determine the slack."""
    bench = shard_bench("a", "b", fragments=1, period=1)
    for learner in ("a", "b"):
        bench.handle(Received(learner, Holding(0, Version(1, 0))))
    bench.step("a")
    bench.body("a")
    bench.merged()
    bench.handle(Lost("b"))
    bench.greet("b")
    bench.greet("joiner")
    broadcast = bench.machine.state.timing.broadcast
    for learner in ("b", "joiner"):
        bench.handle(Received(learner, Holding(0, Version(1, 1))), 2.0)
        assert broadcast.value is None, learner
    bench.handle(Received("a", Holding(0, Version(1, 1))), 2.5)
    assert broadcast.value == 2.5
    bench.handle(Received("a", Holding(0, Version(1, 1))), 9.0)
    assert broadcast.value == 2.5, "once"
