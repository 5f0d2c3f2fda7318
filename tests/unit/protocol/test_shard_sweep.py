"""The closing sweep of a shard: nothing that was trained is missing from the result (rule 12)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol.effects import Expect, Merge, Note, RoundFinished, RoundOpened
from decoupled_diloco.protocol.events import Heard, Lost, MergeFailed, Received, Tick
from decoupled_diloco.protocol.membership import RECONNECT_SECONDS
from decoupled_diloco.protocol.messages import (
    Ending,
    EndOrdered,
    FinishOrdered,
    GivenUp,
    Leave,
    Outcome,
    Progress,
    Pull,
    StepReport,
    Swept,
)
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.syncer import LINGER_SECONDS
from decoupled_diloco.protocol.syncer_rounds import CLOSING_SECONDS, SWEEP_TRIES_MAX
from decoupled_diloco.protocol.versions import Holding


def test_rule_12_the_closing_sweep_asks_everybody_once(shard_bench: Any) -> None:
    """Rule 12: every fragment has one last round."""
    bench = shard_bench("a", "b", fragments=1, period=8)
    bench.step("a")
    bench.told(Received(COORDINATOR, EndOrdered()))
    assert bench.messages(Ending)
    assert sorted(bench.asked()) == ["a", "b"]
    assert all(pull.final for pull in bench.messages(Pull))
    bench.body("a")
    bench.decline("b", "nothing new")
    assert bench.orders(Merge)
    bench.merged()
    assert bench.messages(Swept)


def test_tokens_that_spend_the_budget_without_a_tick_end_the_run(shard_bench: Any) -> None:
    """Each learner has trained its share, and waits for the end; only the first moved the clock."""
    bench = shard_bench("a", "b", fragments=1, period=8, quorum=1, budget_tokens=40)
    for learner in "aab":
        bench.step(learner)
    assert bench.messages(Progress) == []
    assert bench.machine.state.tokens == 30
    bench.told(Tick(), bench.now + 5.0)
    assert bench.messages(Progress) == [], "the budget is not spent yet"
    bench.step("b")
    assert bench.messages(Progress) == [Progress(2, 40)]


def test_the_closing_sweep_is_over_when_nobody_has_anything_new(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=1, period=8)
    bench.told(Received(COORDINATOR, EndOrdered()))
    bench.decline("a", "nothing new")
    assert bench.messages(Swept)


def test_a_round_from_before_is_not_the_closing_one(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=1, period=1)
    bench.step("a")
    bench.told(Received(COORDINATOR, EndOrdered()))
    bench.body("a")
    bench.merged()
    assert not bench.messages(Swept)
    assert [pull.final for pull in bench.messages(Pull)] == [True]


def test_the_closing_sweep_waits_for_who_is_away_within_its_lease(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=8)
    bench.told(Lost("b"))
    bench.told(Received(COORDINATOR, EndOrdered()))
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
    bench.told(Received(COORDINATOR, EndOrdered()))
    assert sorted(bench.asked()) == sorted(learners)
    return bench


def reconnect(bench: Any, learner: str) -> None:
    """Half a second without a connection."""
    bench.told(Lost(learner))
    bench.now += 0.5
    held = bench.machine.state.members[learner].held
    bench.greet(learner, step=1, run_step=1, held=tuple(Holding(p, v) for p, v in held.items()))


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
    assert not bench.orders(RoundFinished)
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
    bench.told(Lost("b"))
    bench.body("a")
    bench.told(Tick(), 1.0 + RECONNECT_SECONDS)
    assert bench.orders(Merge)
    bench.greet("b", step=1, run_step=1)
    bench.merged()
    assert sorted(bench.asked()) == ["a", "b"]


def test_rule_12_what_is_lost_in_the_sweep_is_noted(shard_bench: Any) -> None:
    """Rule 12: the result says what is missing from it."""
    bench = sweeping(shard_bench, "a")
    bench.told(Lost("a"))
    bench.told(Tick(), bench.machine.deadline())
    assert bench.messages(Swept)
    (note,) = (note for note in bench.orders(Note) if "without" in note.text)
    assert note.text == "fragment 0 is without what a trained last"
    assert note.why.startswith("its connection broke and its lease ran out")


def test_who_was_late_in_the_closing_round_gets_another_chance(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=8)
    bench.told(Received(COORDINATOR, EndOrdered()))
    bench.spoil("b", "truncated")
    bench.body("a")
    bench.merged()
    assert not bench.messages(Swept)
    assert sorted(bench.asked()) == ["a", "b"]
    bench.decline("a", "nothing new")
    bench.body("b")
    bench.merged()
    assert bench.messages(Swept)


def wait(bench: Any, seconds: float) -> None:
    """Time passes, tick by tick; everybody is heard."""
    until = bench.now + seconds
    while bench.now < until:
        bench.told(Heard(tuple(bench.machine.state.members)), min(until, bench.now + 1.0))
        bench.told(Tick())


def gathering(shard_bench: Any) -> Any:
    """a has delivered, b is under way; both were asked in a round that needs both."""
    bench = shard_bench("a", "b", fragments=1, period=2, quorum=2)
    for learner in "abab":
        bench.step(learner)
    bench.body("a")
    assert not bench.orders(Merge)
    return bench


def test_rule_12_a_round_that_gathers_is_given_up_and_what_it_has_is_merged(
    shard_bench: Any,
) -> None:
    """Rule 12: open rounds are given up; then each fragment has its closing rounds."""
    bench = gathering(shard_bench)
    bench.told(Received(COORDINATOR, EndOrdered()))
    (finished,) = bench.orders(RoundFinished)
    assert (finished.verdict, finished.reason) == ("abandoned", "the run ends")
    assert bench.messages(GivenUp) == [GivenUp(0, "the run ends")]
    assert not bench.messages(Outcome), "what a has sent, and what b is sending, stays"
    (record,) = bench.orders(RoundOpened)
    assert record.closing
    assert bench.asked() == [], "both are asked already"
    bench.body("b")
    assert bench.orders(Merge)


def test_rule_12_what_was_asked_for_before_the_end_is_not_all(shard_bench: Any) -> None:
    """Rule 12: steps were made since its snapshot: another closing round asks everybody."""
    bench = gathering(shard_bench)
    bench.told(Received(COORDINATOR, EndOrdered()))
    bench.body("b")
    bench.merged()
    assert not bench.messages(Swept)
    assert sorted(bench.asked()) == ["a", "b"]
    assert all(pull.final for pull in bench.messages(Pull))
    bench.body("a")
    bench.decline("b")
    bench.merged()
    assert bench.messages(Swept)


def test_rule_12_a_late_body_that_is_under_way_is_waited_for(shard_bench: Any) -> None:
    """Rule 12: however late it is; then its learner is asked for its rest."""
    bench = shard_bench("a", "b", fragments=1, period=2)
    for learner in "abab":
        bench.step(learner)
    bench.body("a")
    wait(bench, 2.0)
    bench.merged()
    late = bench.ask("b")
    bench.announce("b")
    bench.told(Received(COORDINATOR, EndOrdered()))
    assert bench.asked() == ["a"]
    bench.body("a")
    wait(bench, 10 * CLOSING_SECONDS)
    assert not bench.orders(Merge), "bytes move: only its lease or its connection ends it"
    bench.body("b", ask=late)
    assert bench.orders(Merge)
    bench.merged()
    assert not bench.messages(Swept)
    assert sorted(bench.asked()) == ["a", "b"]
    bench.decline("a")
    bench.body("b")
    bench.merged()
    assert bench.messages(Swept)
    assert not bench.orders(Note)


def test_rule_12_a_pull_that_was_not_answered_before_the_end_is_waited_for(
    shard_bench: Any,
) -> None:
    """Rule 12: and if its learner has nothing for it, it is asked anew, as everybody is."""
    bench = shard_bench("a", "b", fragments=1, period=2)
    for learner in "abab":
        bench.step(learner)
    bench.body("a")
    wait(bench, 2.0)
    bench.merged()
    bench.told(Received(COORDINATOR, EndOrdered()))
    bench.body("a")
    assert not bench.orders(Merge)
    bench.decline("b", "behind: I hold 1.1")
    assert bench.orders(Merge)
    bench.merged()
    assert sorted(bench.asked()) == ["a", "b"]
    bench.decline("a")
    bench.decline("b")
    assert bench.messages(Swept)
    assert not bench.orders(Note)


def test_rule_12_the_sweep_asks_for_every_fragment_whatever_is_under_way(
    shard_bench: Any,
) -> None:
    """Rule 12: arrears and busy links are for while learners train."""
    bench = shard_bench("a", "b", fragments=4, period=4, overlap=1)
    for _ in range(2):
        for learner in "ab":
            bench.step(learner)
    assert bench.machine.state.members["a"].under_way == {1}
    bench.told(Received(COORDINATOR, EndOrdered()))
    asked = bench.orders(Expect)
    while bench.machine.state.rounds:
        (fragment,) = bench.machine.state.rounds
        for learner in "ab":
            bench.decline(learner, fragment=fragment)
            asked += bench.orders(Expect)
    assert {(order.learner, order.fragment) for order in asked} >= {
        (learner, fragment) for learner in "ab" for fragment in (0, 2, 3)
    }
    assert bench.messages(Swept)


def test_rule_12_a_merge_that_is_under_way_is_no_closing_round(shard_bench: Any) -> None:
    """Rule 12: it is not given up; the closing round comes after it."""
    bench = shard_bench("a", fragments=1, period=1)
    bench.step("a")
    bench.body("a")
    assert bench.orders(Merge)
    bench.told(Received(COORDINATOR, EndOrdered()))
    assert not bench.orders(RoundFinished)
    bench.merged()
    assert not bench.messages(Swept)
    assert [pull.final for pull in bench.messages(Pull)] == [True]


def test_rule_12_a_learner_whose_loop_stands_still_ends_the_sweep_after_three_tries(
    shard_bench: Any,
) -> None:
    """Rule 4: nobody waits for it for ever; rule 12: the result says what is missing."""
    bench = sweeping(shard_bench, "a", "b")
    for number in range(1, SWEEP_TRIES_MAX + 1):
        bench.decline("a") if number > 1 else bench.body("a")
        wait(bench, CLOSING_SECONDS - 1.0)
        assert not bench.messages(Swept)
        assert "b" in bench.machine.state.fragments[0].asks
        assert bench.machine.deadline() <= number * CLOSING_SECONDS
        bench.told(Heard(("a", "b")), number * CLOSING_SECONDS)
        bench.told(Tick())
        if number == 1:
            assert bench.orders(Merge)
            bench.merged()
    assert bench.messages(Swept)
    (note,) = bench.orders(Note)
    assert note.text == "fragment 0 is without what b trained last"
    assert note.why == "no answer within 60 s: its loop stands still; closing rounds that failed: 3"


def test_rule_12_who_has_begun_to_answer_has_all_the_time_it_needs(shard_bench: Any) -> None:
    """Rule 4: no upload has a deadline."""
    bench = sweeping(shard_bench, "a", "b")
    bench.body("a")
    bench.announce("b")
    wait(bench, 10 * CLOSING_SECONDS)
    assert not bench.orders(Merge)
    bench.body("b")
    assert bench.orders(Merge)
    bench.merged()
    assert bench.messages(Swept)


def test_rule_12_a_closing_asking_has_its_time_from_when_it_was_made(shard_bench: Any) -> None:
    """Rule 12: who connects anew in the sweep has as long as the others had."""
    bench = sweeping(shard_bench, "a", "b")
    bench.body("a")
    wait(bench, CLOSING_SECONDS - 5.0)
    reconnect(bench, "b")
    assert bench.asked() == ["b"]
    wait(bench, CLOSING_SECONDS - 1.0)
    assert not bench.orders(Merge)
    assert not bench.machine.state.fragments[0].sweep_tries
    wait(bench, 1.0)
    assert bench.orders(Merge)


def test_rule_12_what_was_asked_for_before_the_end_has_its_time_from_then(
    shard_bench: Any,
) -> None:
    bench = gathering(shard_bench)
    wait(bench, 10 * CLOSING_SECONDS)
    bench.told(Received(COORDINATOR, EndOrdered()))
    wait(bench, CLOSING_SECONDS - 1.0)
    assert "b" in bench.machine.state.fragments[0].asks
    wait(bench, 1.0)
    assert "b" not in bench.machine.state.fragments[0].asks


def test_rule_12_a_closing_merge_that_fails_is_tried_three_times(shard_bench: Any) -> None:
    """Rule 12: a full disk ends the sweep at last, and the result says what is missing."""
    bench = sweeping(shard_bench, "a")
    for number in range(1, SWEEP_TRIES_MAX + 1):
        bench.body("a")
        assert bench.orders(Merge)
        round = bench.machine.state.rounds[0]
        bench.told(MergeFailed(round.number, 0, "no space left"))
        if number < SWEEP_TRIES_MAX:
            assert not bench.messages(Swept)
            assert not bench.orders(Expect), "it pauses"
            wait(bench, 2.0**number)
            assert bench.ask("a").term
    assert bench.messages(Swept)
    (note,) = bench.orders(Note)
    assert note.text == "fragment 0 is without what a trained last"
    assert note.why == "no space left; closing rounds that failed: 3"


def test_rule_12_who_leaves_in_the_sweep_is_not_waited_for(shard_bench: Any) -> None:
    bench = sweeping(shard_bench, "a", "b")
    bench.body("a")
    bench.told(Received("b", Leave("enough")))
    assert bench.orders(Merge)


@pytest.mark.parametrize("delivered", [False, True])
def test_rule_12_who_has_made_no_step_is_asked_as_well(shard_bench: Any, delivered: bool) -> None:
    bench = shard_bench("a", "b", fragments=1, period=8)
    bench.step("a")
    bench.told(Received(COORDINATOR, EndOrdered()))
    assert sorted(bench.asked()) == ["a", "b"]
    bench.told(Received("b", StepReport(1, 10, 1.0)))
    bench.body("a")
    if delivered:
        bench.body("b")
    else:
        bench.decline("b")
    assert bench.orders(Merge)


def finished(shard_bench: Any) -> Any:
    """Swept and finished; a holds everything, b lacks both fragments."""
    bench = shard_bench("a", "b", fragments=2, period=2, overlap=1)
    bench.step("a")
    bench.step("b")
    bench.told(Received(COORDINATOR, EndOrdered()))
    for fragment in (0, 1):
        for learner in ("a", "b"):
            if learner in bench.machine.state.fragments[fragment].asks:
                bench.body(learner, fragment)
        bench.merged(fragment)
        for learner in ("a", "b"):
            while learner in bench.machine.state.fragments[fragment].asks:
                bench.decline(learner, fragment=fragment)
    assert bench.machine.state.phase == "swept"
    bench.told(Received(COORDINATOR, FinishOrdered()))
    bench.holds("a")
    return bench


def test_rule_12_a_shard_stays_while_a_learner_gets_one_copy_after_the_other(
    shard_bench: Any,
) -> None:
    """Over a slow link the last copies take longer than it waits for who is silent."""
    bench = finished(shard_bench)
    wait(bench, LINGER_SECONDS - 1.0)
    bench.told(Received("b", Holding(0, bench.machine.state.fragments[0].version)))
    wait(bench, LINGER_SECONDS)
    assert not bench.machine.state.stopped
    bench.told(Received("b", Holding(1, bench.machine.state.fragments[1].version)))
    wait(bench, LINGER_SECONDS)
    assert bench.machine.state.stopped


def test_rule_12_a_shard_does_not_stay_for_who_gets_nothing(shard_bench: Any) -> None:
    bench = finished(shard_bench)
    wait(bench, CLOSING_SECONDS + LINGER_SECONDS)
    assert bench.machine.state.stopped
