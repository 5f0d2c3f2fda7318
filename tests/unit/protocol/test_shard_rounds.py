"""Rounds of a shard: opening, requesting, folding, merging (rules 2, 3, 4, 6)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.messages import (
    Broadcast,
    Failed,
    Fold,
    GivenUp,
    Leave,
    Merge,
    Note,
    Outcome,
    Published,
    Pull,
    Received,
    RoundFinished,
    RoundOpened,
    Unexpect,
)
from decoupled_diloco.protocol.rounds import MERGE_PAUSE_SECONDS, RULE_FAILED
from unit.protocol.conftest import merge_of
from unit.protocol.shard_rounds import DELIVERY_SECONDS, opened, outcomes, states, tick_at


def test_rule_2_rounds_are_limited_and_due_fragments_wait_with_their_tick(shard_bench: Any) -> None:
    """Rule 2: at most ⌈τ·P/H⌉ hold a slot, until they merge; the rest waits in order."""
    bench = shard_bench("a", fragments=4, period=4, overlap=2)
    for _ in range(4):
        bench.step("a")
    state = bench.machine.state
    assert bench.machine.options.open_rounds_max == 2
    assert [round.tick for round in state.rounds.values()] == [1, 2]
    assert state.queue == {3: 3, 0: 4}
    bench.body("a", 1)
    assert bench.orders(Merge)
    assert not bench.orders(RoundOpened), "it is not merged yet"
    bench.merged(1)
    assert [pull.tick for pull in bench.messages(Pull)] == [3], (
        "requested for the tick at which it was due"
    )


def waiting_for_a_slot(shard_bench: Any) -> Any:
    """One slot: the round of fragment 1 has one of its two learners, and fragment 2 is due."""
    bench = shard_bench("a", "b", fragments=4, period=4, overlap=1, quorum=2)
    for learner in "abab":
        bench.step(learner)
    bench.body("a", 1)
    assert list(bench.machine.state.rounds) == [1]
    assert bench.machine.state.queue == {2: 2}
    return bench


def test_rule_2_a_slot_is_released_at_the_end_of_the_delivery_window(shard_bench: Any) -> None:
    """Rule 2: after τ·ξ_step, a round without its quorum blocks no other, and waits on."""
    bench = waiting_for_a_slot(shard_bench)
    tick_at(bench, 0.99)
    assert not bench.orders(RoundOpened)
    assert bench.machine.deadline() == 1.0
    tick_at(bench, 1.0)
    assert [order.fragment for order in bench.orders(RoundOpened)] == [2]
    assert list(bench.machine.state.rounds) == [1, 2]
    bench.body("b", 1)
    assert [order.fragment for order in bench.orders(Merge)] == [1]


def test_rule_2_the_delivery_window_is_that_of_the_fastest_learner(shard_bench: Any) -> None:
    """Rule 4: τ·ξ_step; the opening's record contains it."""
    bench = shard_bench("fast", "slow", fragments=1, period=2, overlap=3)
    bench.step("slow", seconds=7.0)
    bench.step("fast", 3.5, seconds=0.5)
    bench.step("fast", 4.0, seconds=0.5)
    (record,) = bench.orders(RoundOpened)
    assert (record.term, record.round, record.delivery_seconds) == (1, 1, 1.5)
    assert bench.machine.state.rounds[0].deliver_until == 5.5


def test_rule_2_a_fragment_that_is_due_while_its_round_is_open_waits_for_its_end(
    shard_bench: Any,
) -> None:
    """Rule 2: it opens the next one as soon as that ends, once, at the latest tick."""
    bench = shard_bench("a", fragments=1, period=2)
    for _ in range(7):
        bench.step("a")
    assert len(bench.machine.state.rounds) == 1
    assert not bench.machine.state.queue
    bench.body("a")
    bench.merged()
    assert [(order.round, order.tick) for order in bench.orders(RoundOpened)] == [(2, 6)]
    bench.body("a")
    bench.merged()
    assert not bench.orders(RoundOpened)
    assert not bench.machine.state.queue


def test_a_round_from_the_tick_to_the_published_copy(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=2, participants="all")
    bench.step("a")
    bench.step("b")
    bench.step("a")
    assert bench.requested() == ["a", "b"]
    bench.body("a")
    assert bench.orders(Fold)
    assert not bench.orders(Merge)
    bench.body("b")
    assert bench.orders(Merge) == [
        Merge(1, 0, Version(1, 1), Version(1, 0), "all 2 live learners qualify")
    ]
    bench.merged()
    assert [message.verdict for message in bench.messages(Outcome)] == ["accepted", "accepted"]
    (published,) = [o.message for o in bench.orders(Broadcast) if isinstance(o.message, Published)]
    assert (published.version, published.base) == (Version(1, 1), Version(1, 0))
    (finished,) = bench.orders(RoundFinished)
    assert finished.verdict == "merged"
    assert [participant.state for participant in finished.participants] == ["folded", "folded"]


def test_rule_4_a_round_merges_as_soon_as_all_requests_are_delivered(shard_bench: Any) -> None:
    """Rule 4: it does not wait for the delivery window."""
    bench = opened(shard_bench, "a", "b", "c")
    for learner in "ab":
        bench.body(learner, at=0.1)
        assert not bench.orders(Merge)
    bench.body("c", at=0.2)
    assert bench.orders(Merge)


def test_rule_4_with_its_quorum_a_round_merges_when_the_delivery_window_is_over(
    shard_bench: Any,
) -> None:
    """Rule 4: not before, and without uploads in progress."""
    bench = opened(shard_bench, "a", "b")
    bench.body("a")
    assert bench.machine.deadline() == DELIVERY_SECONDS
    tick_at(bench, DELIVERY_SECONDS - 0.01)
    assert not bench.orders(Merge)
    tick_at(bench, DELIVERY_SECONDS)
    assert bench.orders(Merge)
    assert not bench.orders(Unexpect), "its upload continues"
    bench.merged()
    (finished,) = bench.orders(RoundFinished)
    assert states(finished) == {"a": "folded", "b": "late"}
    assert outcomes(bench) == [("a", "accepted")], "b's outcome comes later"


def test_rule_4_a_round_does_not_wait_after_a_decline(shard_bench: Any) -> None:
    """Rule 4: all learners that can still deliver have."""
    bench = opened(shard_bench, "a", "b")
    bench.body("a")
    bench.decline("b")
    assert bench.orders(Merge)


def only(*names: str) -> Any:
    return lambda learner, round: learner.name in names


def test_rule_27_a_participation_rule_chooses_the_learners_of_a_round(shard_bench: Any) -> None:
    bench = opened(shard_bench, "a", "b", "c", rule=only("b"))
    assert set(bench.machine.state.fragments[0].asks) == {"b"}
    bench.body("b")
    round = bench.machine.state.rounds[0]
    assert round.settled_at is None, "the grace window is open for the others"
    tick_at(bench, round.closes_at)
    assert round.settled_at == round.closes_at
    assert [ask.learner for ask in round.folded] == ["b"]


def test_rule_27_a_rule_sees_the_learners_and_the_round(shard_bench: Any) -> None:
    seen = []

    def rule(learner: Any, round: Any) -> str:
        seen.append((learner, round.fragment, round.tick, [each.name for each in round.learners]))
        return "it is chosen" if learner == max(round.learners) else ""

    bench = opened(shard_bench, "b", "a", rule=rule)
    learner, *round = seen[-1]
    assert round == [0, 2, ["a", "b"]]
    assert (learner.step, learner.has_stepped, learner.missed) == (2, True, False)
    assert learner.step_seconds == 1.0
    assert set(bench.machine.state.fragments[0].asks) == {"b"}


def test_rule_27_a_round_without_its_quorum_requests_from_all(shard_bench: Any) -> None:
    bench = opened(shard_bench, "a", "b", rule=lambda learner, round: False)
    assert not bench.machine.state.fragments[0].asks
    tick_at(bench, bench.machine.state.rounds[0].deliver_until)
    assert set(bench.machine.state.fragments[0].asks) == {"a", "b"}


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (lambda learner, round: 1 / 0, "participation rule raises ZeroDivisionError"),
        (lambda learner, round: None, "participation rule returned a NoneType for a"),
    ],
)
def test_rule_27_a_rule_that_fails_costs_time_but_not_the_run(
    shard_bench: Any, rule: Any, reason: str
) -> None:
    bench = shard_bench("a", "b", fragments=1, period=2, rule=rule)
    notes = []
    for learner in "abab":
        bench.step(learner)
        notes += bench.orders(Note)
    (note,) = notes
    assert (note.text, note.warns) == (RULE_FAILED, True)
    assert reason in note.why
    tick_at(bench, bench.machine.state.rounds[0].deliver_until)
    assert set(bench.machine.state.fragments[0].asks) == {"a", "b"}


def test_rule_4_with_all_as_quorum_a_round_waits_for_all(shard_bench: Any) -> None:
    """Rule 4: K = M, the synchronous baselines: however long it takes."""
    bench = opened(shard_bench, "a", "b", quorum=2)
    bench.body("a")
    for at in (DELIVERY_SECONDS, 10.0, 60.0, 600.0):
        while bench.now < at:
            tick_at(bench, min(at, bench.now + 5.0))
            assert not bench.orders(Merge)
            assert not bench.orders(RoundFinished)
    bench.body("b")
    assert bench.orders(Merge)


def test_rule_4_without_its_quorum_a_round_merges_with_the_kth_delivery(shard_bench: Any) -> None:
    """Rule 4: the window is long over; the third learner is not waited for."""
    bench = opened(shard_bench, "a", "b", "c", quorum=2)
    bench.body("a")
    tick_at(bench, DELIVERY_SECONDS)
    assert not bench.machine.state.rounds[0].holds_slot
    assert not bench.orders(Merge)
    bench.body("c", at=3.0)
    assert bench.orders(Merge)
    bench.merged()
    (finished,) = bench.orders(RoundFinished)
    assert states(finished) == {"a": "folded", "c": "folded", "b": "late"}


def test_rule_4_one_learner_counts_once_for_the_quorum(shard_bench: Any) -> None:
    """Rule 4: K learners, not K contributions."""
    bench = opened(shard_bench, "a", "b", quorum=1, late="next")
    bench.body("a")
    tick_at(bench, DELIVERY_SECONDS)
    bench.body("b")
    bench.merged()
    entry = bench.machine.state.fragments[0]
    assert [(ask.learner, ask.age) for ask in entry.folded] == [("b", 1)]
    bench.machine.options = opened(shard_bench, "a", "b", quorum=2).machine.options
    for learner in "abab":
        bench.step(learner)
    bench.body("b")
    assert len(entry.folded) == 2
    tick_at(bench, bench.now + DELIVERY_SECONDS)
    assert not bench.orders(Merge), "a is the second learner"
    bench.body("a")
    assert bench.orders(Merge)


def test_rule_4_a_round_with_too_few_learners_is_abandoned_and_due_again(
    shard_bench: Any,
) -> None:
    """Rule 4: fewer than K can still deliver; due at the next tick, not at once."""
    bench = shard_bench("a", "b", fragments=1, period=8, quorum=2)
    for _ in range(8):
        bench.step("a")
        bench.step("b")
    bench.body("a")
    bench.decline("b", "behind")
    (finished,) = bench.orders(RoundFinished)
    assert (finished.verdict, finished.term) == ("abandoned", 1)
    assert not bench.orders(RoundOpened)
    bench.step("a")
    assert not bench.orders(RoundOpened)
    bench.step("b")
    assert bench.machine.state.rounds[0].tick == 9


def test_rule_4_a_round_that_more_learners_may_join_is_not_abandoned(shard_bench: Any) -> None:
    """Rule 4: a learner without a report so far may still qualify."""
    bench = shard_bench("a", "b", "c", fragments=1, period=2, quorum=2)
    for learner in "abcab":
        bench.step(learner, 1.0)
    bench.body("a")
    bench.decline("b", "behind")
    assert not bench.orders(RoundFinished)
    bench.step("c")
    assert bench.requested() == ["c"]
    bench.body("c")
    assert bench.orders(Merge)


def test_rule_4_without_k_live_learners_a_round_waits_for_new_ones(shard_bench: Any) -> None:
    """Rule 4: the clock has stopped too; nothing would be due at a next tick."""
    bench = shard_bench("a", "b", "c", fragments=1, period=2, quorum=2)
    for learner in "abcab":
        bench.step(learner, 1.0)
    bench.body("a")
    for learner in "bc":
        bench.handle(Received(learner, Leave("enough")))
        assert not bench.orders(RoundFinished)
    bench.greet("d")
    bench.step("d")
    assert bench.requested() == ["d"]
    bench.body("d")
    assert bench.orders(Merge)


def test_rule_4_folded_contributions_of_an_abandoned_round_are_kept(shard_bench: Any) -> None:
    """Rule 4: a contribution belongs to its fragment: requested once, and merged later."""
    bench = shard_bench("a", "b", fragments=1, period=8, quorum=2)
    for _ in range(8):
        bench.step("a")
        bench.step("b")
    first = bench.ask("a")
    bench.body("a")
    bench.decline("b", "behind")
    assert outcomes(bench) == [("b", "refused")]
    assert bench.messages(GivenUp) == [GivenUp(0, "too few learners remain for the quorum")]
    bench.step("a")
    bench.step("b")
    assert bench.requested() == ["b"], "a's contribution is folded already"
    bench.body("b")
    assert bench.orders(Merge)
    bench.merged()
    accepted = [message.ask for message in bench.messages(Outcome)]
    assert accepted[0] == first
    assert outcomes(bench) == [("a", "accepted"), ("b", "accepted")]


def test_rule_4_uploads_of_an_abandoned_round_continue(shard_bench: Any) -> None:
    """Rule 4: they count for the next round, and no learner is asked twice."""
    bench = opened(shard_bench, "a", "b", "c", quorum=3)
    bench.decline("a", "behind")
    assert outcomes(bench) == [("a", "refused")]
    assert bench.messages(GivenUp)
    assert not [order.path for order in bench.orders(Unexpect) if "/b/" in order.path]
    bench.body("b")
    assert bench.orders(Fold)
    for learner in "abc":
        bench.step(learner)
    assert bench.requested() == ["a"], "c is still in progress, and has a backlog"
    bench.body("a")
    bench.body("c")
    assert bench.orders(Merge)
    assert not bench.requested(), "c has delivered everything: it has no backlog"


def test_rule_4_a_round_without_any_weight_is_abandoned(shard_bench: Any) -> None:
    """Rule 4: Σw = 0; contributions without tokens are refused."""
    bench = opened(shard_bench, "a", "b")
    for learner in "ab":
        bench.body(learner, tokens=0)
    assert outcomes(bench) == [("b", "refused")]
    assert bench.messages(GivenUp)
    assert not bench.machine.state.rounds
    assert bench.machine.state.again == {0}


def fail_merge(bench: Any) -> None:
    """All learners are asked and deliver, and the worker cannot merge."""
    if not bench.requested():
        tick_at(bench, bench.machine.state.fragments[0].retry_at)
    bench.body("a")
    round = bench.machine.state.rounds[0]
    bench.handle(Failed(merge_of(round.number, 0), "no memory"))


def test_rule_4_after_a_failed_merge_the_fragment_pauses(shard_bench: Any) -> None:
    """The folded contributions are lost, with outcomes; a full disk is not retried at once."""
    bench = opened(shard_bench, "a")
    fail_merge(bench)
    assert outcomes(bench) == [("a", "abandoned")]
    assert bench.messages(GivenUp) == [GivenUp(0, "no memory")], "no learner waits for the version"
    (finished,) = bench.orders(RoundFinished)
    assert (finished.verdict, finished.reason, finished.version) == ("abandoned", "no memory", None)
    entry = bench.machine.state.fragments[0]
    assert (entry.version, entry.folded) == (Version(1, 0), [])
    bench.step("a")
    bench.step("a")
    assert not bench.orders(RoundOpened), "not at the next tick, nor at the next period"
    assert bench.machine.deadline() == MERGE_PAUSE_SECONDS[0]
    tick_at(bench, 0.99)
    assert not bench.orders(RoundOpened)
    tick_at(bench, 1.0)
    assert [order.tick for order in bench.orders(RoundOpened)] == [4], "the latest it was due at"


def test_rule_2_after_a_failed_merge_the_latest_tick_is_due(shard_bench: Any) -> None:
    """Rule 2: it was due again while its round was open; once, at the latest tick."""
    bench = opened(shard_bench, "a")
    for _ in range(4):
        bench.step("a")
    bench.body("a")
    bench.handle(Failed(merge_of(1, 0), "no memory"))
    tick_at(bench, MERGE_PAUSE_SECONDS[0])
    assert [order.tick for order in bench.orders(RoundOpened)] == [6]


def test_rule_4_the_pause_doubles_up_to_a_minute_and_ends_with_a_merge(shard_bench: Any) -> None:
    bench = opened(shard_bench, "a")
    pauses = []
    for _ in range(8):
        fail_merge(bench)
        pauses.append(bench.machine.state.fragments[0].retry_at - bench.now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    tick_at(bench, bench.machine.state.fragments[0].retry_at)
    bench.body("a")
    bench.merged()
    assert bench.machine.state.fragments[0].retry_at is None
    bench.step("a")
    bench.step("a")
    fail_merge(bench)
    assert bench.machine.state.fragments[0].retry_at == bench.now + 1.0


def test_rule_4_a_pause_blocks_no_other_fragment(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=2, period=2, overlap=1)
    bench.step("a")
    bench.body("a", 1)
    bench.handle(Failed(merge_of(1, 1), "no memory"))
    bench.step("a")
    assert [order.fragment for order in bench.orders(RoundOpened)] == [0]


def test_rule_4_arrivals_during_a_failed_merge_are_not_lost(
    shard_bench: Any,
) -> None:
    """It was not in the accumulator that failed."""
    bench = opened(shard_bench, "a", "b")
    bench.body("a")
    tick_at(bench, DELIVERY_SECONDS)
    bench.body("b")
    assert bench.orders(Fold)
    bench.handle(Failed(merge_of(1, 0), "no memory"))
    assert outcomes(bench) == [("a", "abandoned")]
    assert [ask.learner for ask in bench.machine.state.fragments[0].folded] == ["b"]


def test_a_merge_of_another_round_is_ignored(shard_bench: Any) -> None:
    bench = opened(shard_bench, "a")
    bench.body("a")
    assert not bench.handle(Failed(merge_of(7, 0), "no memory"))
    assert not bench.orders(RoundFinished)
    assert bench.merged()
