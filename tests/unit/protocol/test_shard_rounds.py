"""Rounds of a shard: opening, asking, folding, settling (rules 2, 3, 4, 6)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.effects import (
    Abandon,
    Broadcast,
    Drop,
    Fold,
    Merge,
    Note,
    RoundFinished,
    Send,
    Unexpect,
)
from decoupled_diloco.protocol.events import (
    BodySpoiled,
    Disconnected,
    Heard,
    MergeFailed,
    Ordered,
    Said,
    Tick,
)
from decoupled_diloco.protocol.membership import RECONNECT_SECONDS
from decoupled_diloco.protocol.messages import (
    Decline,
    Ending,
    EndOrdered,
    Holding,
    Outcome,
    Published,
    Pull,
    Swept,
)


def opened(shard_bench: Any, *learners: str, **options: Any) -> Any:
    """A shard whose learners have all reported two steps; the round of fragment 0 is open."""
    bench = shard_bench(*learners, **{"fragments": 1, "period": 2, **options})
    for learner in (*learners, *learners):
        bench.step(learner)
    assert bench.machine.state.rounds[0].tick == 2
    return bench


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


def test_rule_2_rounds_are_limited_and_what_is_due_waits_with_its_tick(shard_bench: Any) -> None:
    """Rule 2: at most ⌈τ·P/H⌉ are open; the rest waits in order."""
    bench = shard_bench("a", fragments=4, period=4, overlap=2)
    for _ in range(4):
        bench.step("a")
    state = bench.machine.state
    assert bench.machine.options.open_rounds_max == 2
    assert [round.tick for round in state.rounds.values()] == [1, 2]
    assert state.queue == {3: 3, 0: 4}
    bench.body("a", 1)
    bench.merged(1)
    assert [pull.tick for pull in bench.messages(Pull)] == [3], "asked for the tick that was due"


def test_without_overlap_one_round_is_open(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=4, period=4, overlap=0)
    for _ in range(4):
        bench.step("a")
    assert len(bench.machine.state.rounds) == 1


@pytest.mark.parametrize(
    ("fields", "verdict", "reason"),
    [
        ({"base": Version(0, 7)}, "behind", "its base 0.7 is not 1.0"),
        ({"round": 77}, "late", "its round is over"),
        ({"learner": "stranger"}, "refused", "was not asked"),
        ({"tokens": 0}, "refused", "0 tokens in 1 steps"),
        ({"steps": 0}, "refused", "10 tokens in 0 steps"),
    ],
)
def test_rule_4_a_body_that_is_not_wanted_is_dropped_and_its_learner_told(
    shard_bench: Any, fields: dict[str, Any], verdict: str, reason: str
) -> None:
    """Rules 4 and 6: behind, refused or late, its learner hears why; no weight is nothing."""
    bench = opened(shard_bench, "a", "b")
    bench.body(**{"learner": "a", **fields})
    assert bench.orders(Drop)
    assert not bench.orders(Fold)
    (outcome,) = bench.messages(Outcome)
    assert outcome.verdict == verdict
    assert reason in outcome.reason


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


def test_rule_4_a_second_body_of_one_learner_is_late(shard_bench: Any) -> None:
    """Rule 4: each contributor is told the outcome."""
    bench = opened(shard_bench, "a", "b")
    bench.body("a")
    bench.body("a")
    assert bench.orders(Drop)
    assert [message.verdict for message in bench.messages(Outcome)] == ["late"]


def test_rule_6_counters_are_capped(shard_bench: Any) -> None:
    """Rule 6: so that one long-lost learner cannot dominate."""
    bench = shard_bench("a", "b", fragments=1, period=5, counter_cap_periods=2)
    for _ in range(5):
        bench.step("a")
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


def test_rule_4_fewer_than_k_delivered_gives_the_round_up_and_it_is_due_again(
    shard_bench: Any,
) -> None:
    """Rule 4: fewer than min(K, asked) delivered."""
    bench = shard_bench("a", "b", fragments=1, period=8, quorum=2)
    for _ in range(8):
        bench.step("a")
        bench.step("b")
    bench.body("a")
    bench.decline("b", "behind")
    assert bench.orders(Abandon)
    assert "abandoned" in {message.verdict for message in bench.messages(Outcome)}
    bench.step("a")
    bench.step("b")
    assert sorted(bench.asked()) == ["a", "b"], "due again at the next tick"
    assert bench.machine.state.rounds[0].tick == 9


def test_rule_4_all_who_were_asked_are_enough_when_fewer_than_k_are_left(shard_bench: Any) -> None:
    """Rule 4: min(K, asked): in the sweep with fewer learners than K, one is enough."""
    bench = shard_bench("a", "b", fragments=1, period=8, quorum=2)
    bench.step("a")
    bench.told(Ordered(EndOrdered()))
    bench.decline("b", "nothing new")
    bench.body("a")
    assert bench.orders(Merge)


def test_rule_4_without_any_weight_the_round_is_given_up(shard_bench: Any) -> None:
    """Rule 4: Σw = 0; who sent no tokens is refused, all hear that the round is given up."""
    bench = shard_bench("a", "b", fragments=1, period=8)
    for _ in range(8):
        bench.step("a")
        bench.step("b")
    for learner in sorted(bench.machine.state.rounds[0].asks):
        bench.body(learner, tokens=0)
    assert bench.orders(Abandon)
    assert {message.verdict for message in bench.messages(Outcome)} == {"refused", "abandoned"}
    assert bench.machine.state.again == {0}


def test_a_failed_merge_is_as_if_given_up(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=1, period=8)
    for _ in range(8):
        bench.step("a")
    bench.body("a")
    bench.told(MergeFailed(1, 0, "no memory"))
    assert bench.orders(Abandon)
    assert bench.machine.state.fragments[0].version == Version(1, 0)
    assert bench.machine.state.again == {0}


def test_a_decline_is_answered(shard_bench: Any) -> None:
    """Its upload may have failed for the learner only: it needs to hear what became of it."""
    bench = opened(shard_bench, "a", "b")
    bench.decline("a", "upload failed")
    assert [(o.learner, o.message.verdict) for o in bench.orders(Send)] == [("a", "refused")]


def test_deadlines_of_uploads_pass_in_ticks_only(shard_bench: Any) -> None:
    """A paused shard first hears what has arrived meanwhile."""
    bench = opened(shard_bench, "a", "b")
    bench.body("a", at=500.0)
    assert bench.orders(Fold)
    bench.told(Tick(), 501.0)
    assert not bench.messages(Outcome), "and who was held up by the pause gets as much longer"


def test_an_overdue_body_is_given_up_in_a_tick(shard_bench: Any) -> None:
    bench = opened(shard_bench, "a", "b")
    bench.told(Heard(("a", "b")), 1.0)
    bench.body("a")
    while not bench.orders(Merge):
        bench.told(Heard(("a", "b")), bench.machine.deadline())
        bench.told(Tick())
        assert bench.now < 100.0
    assert [message.verdict for message in bench.messages(Outcome)] == ["late"]


def test_a_slow_link_is_found_out(shard_bench: Any) -> None:
    """A deadline that was missed makes the next one longer."""
    bench = opened(shard_bench, "a", quorum=1)
    first = bench.machine.state.rounds[0].asks["a"].deadline
    while not bench.orders(Abandon):
        bench.told(Heard(("a",)), bench.machine.deadline())
        bench.told(Tick())
    bench.step("a")
    ask = bench.machine.state.rounds[0].asks["a"]
    assert ask.deadline - ask.asked_at > 1.5 * first


def test_who_connects_anew_is_not_waited_for_when_the_window_has_closed(shard_bench: Any) -> None:
    bench = opened(shard_bench, "a", "b", quorum=1)
    (first, _) = (ask.path for ask in bench.machine.state.rounds[0].asks.values())
    bench.told(Disconnected("a"))
    bench.greet("a", step=2, run_step=2)
    assert [order.path for order in bench.orders(Unexpect)] == [first]
    assert bench.asked() == []
    bench.body("b")
    assert bench.orders(Merge)


def test_who_connects_anew_while_the_window_is_open_is_asked_again(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", "c", fragments=1, period=2)
    for learner in ("a", "b", "c", "a", "b"):
        bench.step(learner)
    first = bench.machine.state.rounds[0].asks["a"].path
    bench.greet("a", step=2)
    assert bench.asked() == ["a"]
    assert bench.machine.state.rounds[0].asks["a"].path != first


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
    assert not bench.told(Said("a", Decline(1, 0, first, False, "upload failed: reset")))
    assert not bench.told(BodySpoiled("a", 1, 0, first, "truncated"))
    bench.body("a", ask=first)
    assert bench.orders(Drop)
    assert not bench.orders(Send), "its part in the round is not over"
    bench.body("a")
    assert bench.orders(Fold)


def test_a_new_epoch_is_not_asked_twice_in_a_round(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", "c", fragments=1, period=1, participants="all", quorum=2)
    bench.step("a")
    bench.step("b")
    bench.body("a")
    bench.greet("a", epoch=2)
    bench.step("a")
    assert "a" not in bench.asked()
    assert bench.machine.state.rounds[0].asks["a"].state == "folded"


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
        bench.told(Said(learner, Holding(0, Version(1, 0))))
    bench.step("a")
    bench.body("a")
    bench.merged()
    bench.told(Disconnected("b"))
    bench.greet("b")
    bench.greet("joiner")
    broadcast = bench.machine.state.timing.broadcast
    for learner in ("b", "joiner"):
        bench.told(Said(learner, Holding(0, Version(1, 1))), 2.0)
        assert broadcast.value is None, learner
    bench.told(Said("a", Holding(0, Version(1, 1))), 2.5)
    assert broadcast.value == 2.5
    bench.told(Said("a", Holding(0, Version(1, 1))), 9.0)
    assert broadcast.value == 2.5, "once"


# ---- the closing sweep


def test_rule_12_the_closing_sweep_asks_everybody_once(shard_bench: Any) -> None:
    """Rule 12: every fragment has one last round."""
    bench = shard_bench("a", "b", fragments=1, period=8)
    bench.step("a")
    bench.told(Ordered(EndOrdered()))
    assert bench.messages(Ending)
    assert sorted(bench.asked()) == ["a", "b"]
    assert all(pull.final for pull in bench.messages(Pull))
    bench.body("a")
    bench.decline("b", "nothing new")
    assert bench.orders(Merge)
    bench.merged()
    assert bench.messages(Swept)


def test_the_closing_sweep_is_over_when_nobody_has_anything_new(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=1, period=8)
    bench.told(Ordered(EndOrdered()))
    bench.decline("a", "nothing new")
    assert bench.messages(Swept)


def test_a_round_from_before_is_not_the_closing_one(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=1, period=1)
    bench.step("a")
    bench.told(Ordered(EndOrdered()))
    bench.body("a")
    bench.merged()
    assert not bench.messages(Swept)
    assert [pull.final for pull in bench.messages(Pull)] == [True]


def test_the_closing_sweep_waits_for_who_is_away_within_its_lease(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=8)
    bench.told(Disconnected("b"))
    bench.told(Ordered(EndOrdered()))
    assert bench.asked() == ["a"]
    bench.body("a")
    assert not bench.orders(Merge)
    bench.told(Tick(), RECONNECT_SECONDS)
    assert bench.orders(Merge), "b is gone"


def sweeping(shard_bench: Any, *learners: str, **options: Any) -> Any:
    """A closing round that has asked everybody; all have made a step."""
    bench = shard_bench(*learners, **{"fragments": 1, "period": 8, **options})
    for learner in learners:
        bench.step(learner)
    bench.told(Ordered(EndOrdered()))
    assert sorted(bench.asked()) == sorted(learners)
    return bench


def reconnect(bench: Any, learner: str) -> None:
    """Half a second without a connection."""
    bench.told(Disconnected(learner))
    bench.now += 0.5
    bench.greet(learner, step=1, run_step=1)


def test_rule_12_the_sweep_asks_who_reconnects_again(shard_bench: Any) -> None:
    """Rule 12: nothing trained is missing from the result, though a link breaks in the sweep."""
    bench = sweeping(shard_bench, "a", "b")
    reconnect(bench, "b")
    assert bench.asked() == ["b"]
    bench.body("a")
    assert not bench.orders(Merge)
    bench.body("b")
    assert bench.orders(Merge)
    bench.merged()
    assert bench.messages(Swept)
    assert not bench.orders(Note)


def test_rule_12_the_sweep_asks_a_lone_learner_again(shard_bench: Any) -> None:
    """Rule 12: who is gone for a moment has not said that there is nothing new."""
    bench = sweeping(shard_bench, "a")
    reconnect(bench, "a")
    assert not bench.orders(Abandon)
    assert bench.asked() == ["a"]


def test_rule_12_an_upload_that_failed_is_asked_for_again(shard_bench: Any) -> None:
    """Rule 12: only who has nothing new may decline its last contribution."""
    bench = sweeping(shard_bench, "a")
    bench.decline("a", "upload failed: reset")
    assert not bench.messages(Swept)
    assert bench.asked() == ["a"]


def test_rule_12_who_comes_back_while_the_sweep_merges_is_asked_as_well(
    shard_bench: Any,
) -> None:
    """Rule 12: its lease had run out, but it is here before the fragment is swept."""
    bench = sweeping(shard_bench, "a", "b")
    bench.told(Heard(("a",)), 1.0)
    bench.told(Disconnected("b"))
    bench.body("a")
    bench.told(Tick(), 1.0 + RECONNECT_SECONDS)
    assert bench.orders(Merge)
    bench.greet("b", step=1, run_step=1)
    bench.merged()
    assert sorted(bench.asked()) == ["a", "b"]


def test_rule_12_what_is_lost_in_the_sweep_is_noted(shard_bench: Any) -> None:
    """Rule 12: the result says what is missing from it."""
    bench = sweeping(shard_bench, "a")
    bench.told(Disconnected("a"))
    bench.told(Tick(), bench.machine.deadline())
    assert bench.messages(Swept)
    assert any("without what a trained last" in note.text for note in bench.orders(Note))


def test_who_was_late_in_the_closing_round_gets_another_chance(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=8)
    bench.told(Ordered(EndOrdered()))
    bench.spoil("b", "truncated")
    bench.body("a")
    bench.merged()
    assert not bench.messages(Swept)
    assert sorted(bench.asked()) == ["a", "b"]
    bench.decline("a", "nothing new")
    bench.body("b")
    bench.merged()
    assert bench.messages(Swept)


def test_a_tick_moves_the_deadline_on_when_it_removes_the_fastest(shard_bench: Any) -> None:
    """The patience with late bodies is counted in the steps of the fastest that is live."""
    bench = shard_bench("fast", "new", fragments=1, period=10, participants="all")
    bench.step("new", 1.0, seconds=0.0)
    for _ in range(10):
        bench.step("fast", 1.0, seconds=1.0)
    bench.body("fast")
    bench.told(Disconnected("fast"))
    bench.told(Heard(("new",)), 3.5)
    bench.told(Tick(), 1.0 + RECONNECT_SECONDS)
    deadline = bench.machine.deadline()
    assert deadline is None or deadline > bench.now
