"""Rounds of a shard: opening, asking, folding, settling (rules 2, 3, 4, 6)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.effects import (
    Broadcast,
    Drop,
    Fold,
    Merge,
    RoundFinished,
    RoundOpened,
    Send,
    Unexpect,
)
from decoupled_diloco.protocol.events import BodyCorrupt, Heard, Lost, MergeFailed, Received, Tick
from decoupled_diloco.protocol.messages import (
    Decline,
    GivenUp,
    Leave,
    Outcome,
    Published,
    Pull,
    StepReport,
    Welcome,
)
from decoupled_diloco.protocol.syncer_rounds import MERGE_PAUSE_SECONDS
from decoupled_diloco.protocol.versions import Asking, Holding

DELIVERY_SECONDS = 2.0
"""The delivery window of these rounds: τ = 2 steps of a second."""


def opened(shard_bench: Any, *learners: str, **options: Any) -> Any:
    """A shard whose learners have all reported two steps; the round of fragment 0 is open."""
    bench = shard_bench(*learners, **{"fragments": 1, "period": 2, **options})
    for learner in (*learners, *learners):
        bench.step(learner)
    assert bench.machine.state.rounds[0].tick == 2
    return bench


def tick_at(bench: Any, at: float) -> list[Any]:
    """A tick, by when everybody has been heard."""
    bench.told(Heard(tuple(bench.machine.state.members)), at)
    return list(bench.told(Tick()))


def outcomes(bench: Any) -> list[tuple[str, str]]:
    """Who is told what became of its contribution."""
    return [
        (order.peer, order.message.verdict)
        for order in bench.orders(Send)
        if isinstance(order.message, Outcome)
    ]


def states(finished: RoundFinished) -> dict[str, str]:
    return {participant.learner: participant.state for participant in finished.participants}


def test_rule_2_rounds_are_limited_and_what_is_due_waits_with_its_tick(shard_bench: Any) -> None:
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
    assert [pull.tick for pull in bench.messages(Pull)] == [3], "asked for the tick that was due"


def waiting_for_a_slot(shard_bench: Any) -> Any:
    """One slot; the round of fragment 1 has one of its two, that of fragment 2 is due."""
    bench = shard_bench("a", "b", fragments=4, period=4, overlap=1, quorum=2)
    for learner in "abab":
        bench.step(learner)
    bench.body("a", 1)
    assert list(bench.machine.state.rounds) == [1]
    assert bench.machine.state.queue == {2: 2}
    return bench


def test_rule_2_a_slot_is_given_back_at_the_end_of_the_delivery_window(shard_bench: Any) -> None:
    """Rule 2: held at most for τ·ξ_step: what lacks its quorum holds nobody up, and waits on."""
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
    """Rule 4: τ·ξ_step; the opening's record tells it."""
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
    assert bench.asked() == ["a", "b"]
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


def test_rule_4_a_round_merges_as_soon_as_everybody_asked_has_delivered(shard_bench: Any) -> None:
    """Rule 4: the delivery window is not waited for."""
    bench = opened(shard_bench, "a", "b", "c")
    for learner in "ab":
        bench.body(learner, at=0.1)
        assert not bench.orders(Merge)
    bench.body("c", at=0.2)
    assert bench.orders(Merge)


def test_rule_4_with_its_quorum_a_round_merges_when_the_delivery_window_is_over(
    shard_bench: Any,
) -> None:
    """Rule 4: not before, and without who is still under way."""
    bench = opened(shard_bench, "a", "b")
    bench.body("a")
    assert bench.machine.deadline() == DELIVERY_SECONDS
    tick_at(bench, DELIVERY_SECONDS - 0.01)
    assert not bench.orders(Merge)
    tick_at(bench, DELIVERY_SECONDS)
    assert bench.orders(Merge)
    assert not bench.orders(Unexpect), "its upload goes on"
    bench.merged()
    (finished,) = bench.orders(RoundFinished)
    assert states(finished) == {"a": "folded", "b": "late"}
    assert outcomes(bench) == [("a", "accepted")], "b is told at last, not now"


def test_rule_4_who_declines_is_not_waited_for(shard_bench: Any) -> None:
    """Rule 4: all who can still deliver have."""
    bench = opened(shard_bench, "a", "b")
    bench.body("a")
    bench.decline("b")
    assert bench.orders(Merge)


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
    """Rule 4: the window is over long since; the third is not waited for."""
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


def test_rule_4_too_few_that_can_deliver_give_the_round_up_and_it_is_due_again(
    shard_bench: Any,
) -> None:
    """Rule 4: fewer than K of the asked can still deliver; at the next tick, not at once."""
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


def test_rule_4_a_round_that_more_learners_may_join_is_not_given_up(shard_bench: Any) -> None:
    """Rule 4: who has not reported yet may come in while too few are."""
    bench = shard_bench("a", "b", "c", fragments=1, period=2, quorum=2)
    for learner in "abcab":
        bench.step(learner, 1.0)
    bench.body("a")
    bench.decline("b", "behind")
    assert not bench.orders(RoundFinished)
    bench.step("c")
    assert bench.asked() == ["c"]
    bench.body("c")
    assert bench.orders(Merge)


def test_rule_4_without_k_live_learners_a_round_waits_for_who_comes(shard_bench: Any) -> None:
    """Rule 4: the clock stands as well; nothing would be due at a next tick."""
    bench = shard_bench("a", "b", "c", fragments=1, period=2, quorum=2)
    for learner in "abcab":
        bench.step(learner, 1.0)
    bench.body("a")
    for learner in "bc":
        bench.told(Received(learner, Leave("enough")))
        assert not bench.orders(RoundFinished)
    bench.greet("d")
    bench.step("d")
    assert bench.asked() == ["d"]
    bench.body("d")
    assert bench.orders(Merge)


def test_rule_4_what_is_folded_when_a_round_is_given_up_is_kept(shard_bench: Any) -> None:
    """Rule 4: a contribution belongs to its fragment: it is asked for once, and merged later."""
    bench = shard_bench("a", "b", fragments=1, period=8, quorum=2)
    for _ in range(8):
        bench.step("a")
        bench.step("b")
    first = bench.ask("a")
    bench.body("a")
    bench.decline("b", "behind")
    assert outcomes(bench) == [("b", "refused")]
    assert bench.messages(GivenUp) == [GivenUp(0, "too few learners are left for the quorum")]
    bench.step("a")
    bench.step("b")
    assert bench.asked() == ["b"], "what a has is folded already"
    bench.body("b")
    assert bench.orders(Merge)
    bench.merged()
    accepted = [message.ask for message in bench.messages(Outcome)]
    assert accepted[0] == first
    assert outcomes(bench) == [("a", "accepted"), ("b", "accepted")]


def test_rule_4_what_is_under_way_when_a_round_is_given_up_goes_on(shard_bench: Any) -> None:
    """Rule 4: it counts for the next round, and nobody is asked twice."""
    bench = opened(shard_bench, "a", "b", "c", quorum=3)
    bench.decline("a", "behind")
    assert outcomes(bench) == [("a", "refused")]
    assert bench.messages(GivenUp)
    assert not [order.path for order in bench.orders(Unexpect) if "/b/" in order.path]
    bench.body("b")
    assert bench.orders(Fold)
    for learner in "abc":
        bench.step(learner)
    assert bench.asked() == ["a"], "c is under way still, and in arrears"
    bench.body("a")
    bench.body("c")
    assert bench.orders(Merge)
    assert not bench.asked(), "c has delivered what it has: its arrears are none"


def test_rule_4_without_any_weight_the_round_is_given_up(shard_bench: Any) -> None:
    """Rule 4: Σw = 0; who sent no tokens is refused, all hear that the round is given up."""
    bench = opened(shard_bench, "a", "b")
    for learner in "ab":
        bench.body(learner, tokens=0)
    assert outcomes(bench) == [("b", "refused")]
    assert bench.messages(GivenUp)
    assert not bench.machine.state.rounds
    assert bench.machine.state.again == {0}


def fail_merge(bench: Any) -> None:
    """Everybody is asked, delivers, and the worker cannot merge."""
    if not bench.asked():
        tick_at(bench, bench.machine.state.fragments[0].retry_at)
    bench.body("a")
    round = bench.machine.state.rounds[0]
    bench.told(MergeFailed(round.number, 0, "no memory"))


def test_rule_4_after_a_failed_merge_the_fragment_pauses(shard_bench: Any) -> None:
    """What was folded is gone, its learner told so; a full disk is not hammered upon."""
    bench = opened(shard_bench, "a")
    fail_merge(bench)
    assert outcomes(bench) == [("a", "abandoned")]
    assert bench.messages(GivenUp) == [GivenUp(0, "no memory")], "nobody waits for the version"
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
    bench.told(MergeFailed(1, 0, "no memory"))
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


def test_rule_4_a_pause_holds_up_no_other_fragment(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=2, period=2, overlap=1)
    bench.step("a")
    bench.body("a", 1)
    bench.told(MergeFailed(1, 1, "no memory"))
    bench.step("a")
    assert [order.fragment for order in bench.orders(RoundOpened)] == [0]


def test_rule_4_what_arrives_during_a_merge_that_fails_is_not_lost_with_it(
    shard_bench: Any,
) -> None:
    """It was not in the accumulator that failed."""
    bench = opened(shard_bench, "a", "b")
    bench.body("a")
    tick_at(bench, DELIVERY_SECONDS)
    bench.body("b")
    assert bench.orders(Fold)
    bench.told(MergeFailed(1, 0, "no memory"))
    assert outcomes(bench) == [("a", "abandoned")]
    assert [ask.learner for ask in bench.machine.state.fragments[0].folded] == ["b"]


def test_a_merge_of_another_round_is_none(shard_bench: Any) -> None:
    bench = opened(shard_bench, "a")
    bench.body("a")
    assert not bench.told(MergeFailed(7, 0, "no memory"))
    assert not bench.orders(RoundFinished)
    assert bench.merged()


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
