"""The closing sweep of a shard: no training is missing from the result (rule 12)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Ending,
    EndOrdered,
    Expect,
    Failed,
    FinishOrdered,
    GivenUp,
    Heard,
    Holding,
    Leave,
    Lost,
    Merge,
    Note,
    Outcome,
    Progress,
    Pull,
    Received,
    RoundFinished,
    RoundOpened,
    StepReport,
    Swept,
    Tick,
)
from decoupled_diloco.protocol.rounds import CLOSING_SECONDS, SWEEP_TRIES_MAX
from decoupled_diloco.protocol.syncer_machine import LINGER_SECONDS
from decoupled_diloco.protocol.syncer_state import RECONNECT_SECONDS
from unit.protocol.conftest import merge_of


def test_rule_12_the_closing_sweep_asks_each_learner_once(shard_bench: Any) -> None:
    """Rule 12: every fragment has one last round."""
    bench = shard_bench("a", "b", fragments=1, period=8)
    bench.step("a")
    bench.handle(Received(COORDINATOR, EndOrdered()))
    assert bench.messages(Ending)
    assert sorted(bench.requested()) == ["a", "b"]
    assert all(pull.final for pull in bench.messages(Pull))
    bench.body("a")
    bench.decline("b", "nothing new")
    assert bench.orders(Merge)
    bench.merged()
    assert bench.messages(Swept)


def test_tokens_that_spend_the_budget_without_a_tick_end_the_run(shard_bench: Any) -> None:
    """Each learner has trained its share and waits for the end; only the first moved the clock."""
    bench = shard_bench("a", "b", fragments=1, period=8, quorum=1, max_tokens=40)
    for learner in "aab":
        bench.step(learner)
    assert bench.messages(Progress) == []
    assert bench.machine.state.tokens == 30
    bench.handle(Tick(), bench.now + 5.0)
    assert bench.messages(Progress) == [], "the budget is not reached yet"
    bench.step("b")
    assert bench.messages(Progress) == [Progress(2, 40)]


def test_the_closing_sweep_ends_when_no_learner_has_anything_new(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=1, period=8)
    bench.handle(Received(COORDINATOR, EndOrdered()))
    bench.decline("a", "nothing new")
    assert bench.messages(Swept)


def test_an_earlier_round_is_not_the_closing_one(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=1, period=1)
    bench.step("a")
    bench.handle(Received(COORDINATOR, EndOrdered()))
    bench.body("a")
    bench.merged()
    assert not bench.messages(Swept)
    assert [pull.final for pull in bench.messages(Pull)] == [True]


def test_the_closing_sweep_waits_for_a_disconnected_learner_within_its_lease(
    shard_bench: Any,
) -> None:
    bench = shard_bench("a", "b", fragments=1, period=8)
    bench.handle(Lost("b"))
    bench.handle(Received(COORDINATOR, EndOrdered()))
    assert bench.requested() == ["a"]
    bench.body("a")
    assert not bench.orders(Merge)
    bench.handle(Tick(), RECONNECT_SECONDS)
    assert bench.orders(Merge), "b has left"


def sweeping(shard_bench: Any, *learners: str, **options: Any) -> Any:
    """Return a closing round with requests to all learners, which have taken a step each."""
    bench = shard_bench(*learners, **{"fragments": 1, "period": 8, **options})
    for learner in learners:
        bench.step(learner)
    bench.handle(Received(COORDINATOR, EndOrdered()))
    assert sorted(bench.requested()) == sorted(learners)
    return bench


def reconnect(bench: Any, learner: str) -> None:
    """Half a second without a connection."""
    bench.handle(Lost(learner))
    bench.now += 0.5
    held = bench.machine.state.members[learner].held
    bench.greet(learner, step=1, run_step=1, held=tuple(Holding(p, v) for p, v in held.items()))


def test_rule_12_the_sweep_asks_a_reconnected_learner_again(shard_bench: Any) -> None:
    """Rule 12: no training is missing from the result, though a link breaks in the sweep."""
    bench = sweeping(shard_bench, "a", "b")
    reconnect(bench, "b")
    assert bench.requested() == ["b"]
    bench.body("a")
    assert not bench.orders(Merge)
    bench.body("b")
    assert bench.orders(Merge)
    bench.merged()
    assert bench.messages(Swept)
    assert not bench.orders(Note)


def test_rule_12_the_sweep_asks_a_lone_learner_again(shard_bench: Any) -> None:
    """Rule 12: a short absence does not mean that there is nothing new."""
    bench = sweeping(shard_bench, "a")
    reconnect(bench, "a")
    assert not bench.orders(RoundFinished)
    assert bench.requested() == ["a"]


def test_rule_12_a_failed_upload_is_requested_again(shard_bench: Any) -> None:
    """Rule 12: only a learner with nothing new may decline its last contribution."""
    bench = sweeping(shard_bench, "a")
    bench.decline("a", "upload failed: reset")
    assert not bench.messages(Swept)
    assert bench.requested() == ["a"]


def test_rule_12_a_learner_back_during_a_closing_merge_is_also_asked(
    shard_bench: Any,
) -> None:
    """Rule 12: its lease had expired, but it is back before the fragment is swept."""
    bench = sweeping(shard_bench, "a", "b")
    bench.handle(Heard(("a",)), 1.0)
    bench.handle(Lost("b"))
    bench.body("a")
    bench.handle(Tick(), 1.0 + RECONNECT_SECONDS)
    assert bench.orders(Merge)
    bench.greet("b", step=1, run_step=1)
    bench.merged()
    assert sorted(bench.requested()) == ["a", "b"]


def test_rule_12_training_lost_in_the_sweep_is_logged(shard_bench: Any) -> None:
    """Rule 12: the log lists what is missing from the result."""
    bench = sweeping(shard_bench, "a")
    bench.handle(Lost("a"))
    bench.handle(Tick(), bench.machine.deadline())
    assert bench.messages(Swept)
    (note,) = (note for note in bench.orders(Note) if "lacks" in note.text)
    assert note.text == "fragment 0 lacks the last training of a"
    assert note.why.startswith("its connection broke and its lease ran out")


def test_a_late_learner_in_the_closing_round_gets_another_chance(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=8)
    bench.handle(Received(COORDINATOR, EndOrdered()))
    bench.corrupt("b", "truncated")
    bench.body("a")
    bench.merged()
    assert not bench.messages(Swept)
    assert sorted(bench.requested()) == ["a", "b"]
    bench.decline("a", "nothing new")
    bench.body("b")
    bench.merged()
    assert bench.messages(Swept)


def wait(bench: Any, seconds: float) -> None:
    """Let time pass, tick by tick, with bytes from all learners."""
    until = bench.now + seconds
    while bench.now < until:
        bench.handle(Heard(tuple(bench.machine.state.members)), min(until, bench.now + 1.0))
        bench.handle(Tick())


def gathering(shard_bench: Any) -> Any:
    """a has delivered, b is in progress; both were asked in a round that needs both."""
    bench = shard_bench("a", "b", fragments=1, period=2, quorum=2)
    for learner in "abab":
        bench.step(learner)
    bench.body("a")
    assert not bench.orders(Merge)
    return bench


def test_rule_12_a_round_that_gathers_is_given_up_and_what_it_has_is_merged(
    shard_bench: Any,
) -> None:
    """Rule 12: open rounds are abandoned; then each fragment has its closing rounds."""
    bench = gathering(shard_bench)
    bench.handle(Received(COORDINATOR, EndOrdered()))
    (finished,) = bench.orders(RoundFinished)
    assert (finished.verdict, finished.reason) == ("abandoned", "the run ends")
    assert bench.messages(GivenUp) == [GivenUp(0, "the run ends")]
    assert not bench.messages(Outcome), "a's contribution and b's upload stay"
    (record,) = bench.orders(RoundOpened)
    assert record.closing
    assert bench.requested() == [], "both have requests already"
    bench.body("b")
    assert bench.orders(Merge)


def test_rule_12_a_request_from_before_the_end_does_not_cover_everything(shard_bench: Any) -> None:
    """Rule 12: steps were taken since its snapshot: another closing round asks all learners."""
    bench = gathering(shard_bench)
    bench.handle(Received(COORDINATOR, EndOrdered()))
    bench.body("b")
    bench.merged()
    assert not bench.messages(Swept)
    assert sorted(bench.requested()) == ["a", "b"]
    assert all(pull.final for pull in bench.messages(Pull))
    bench.body("a")
    bench.decline("b")
    bench.merged()
    assert bench.messages(Swept)


def test_rule_12_the_sweep_waits_for_a_late_upload(shard_bench: Any) -> None:
    """Rule 12: however late it is; then its learner is asked for the rest."""
    bench = shard_bench("a", "b", fragments=1, period=2)
    for learner in "abab":
        bench.step(learner)
    bench.body("a")
    wait(bench, 2.0)
    bench.merged()
    late = bench.ask("b")
    bench.announce("b")
    bench.handle(Received(COORDINATOR, EndOrdered()))
    assert bench.requested() == ["a"]
    bench.body("a")
    wait(bench, 10 * CLOSING_SECONDS)
    assert not bench.orders(Merge), "bytes move: only its lease or its connection ends it"
    bench.body("b", ask=late)
    assert bench.orders(Merge)
    bench.merged()
    assert not bench.messages(Swept)
    assert sorted(bench.requested()) == ["a", "b"]
    bench.decline("a")
    bench.body("b")
    bench.merged()
    assert bench.messages(Swept)
    assert not bench.orders(Note)


def test_rule_12_the_sweep_waits_for_an_unanswered_request(
    shard_bench: Any,
) -> None:
    """Rule 12: if its learner declines, it is asked again, like all learners."""
    bench = shard_bench("a", "b", fragments=1, period=2)
    for learner in "abab":
        bench.step(learner)
    bench.body("a")
    wait(bench, 2.0)
    bench.merged()
    bench.handle(Received(COORDINATOR, EndOrdered()))
    bench.body("a")
    assert not bench.orders(Merge)
    bench.decline("b", "behind: it holds 1.1")
    assert bench.orders(Merge)
    bench.merged()
    assert sorted(bench.requested()) == ["a", "b"]
    bench.decline("a")
    bench.decline("b")
    assert bench.messages(Swept)
    assert not bench.orders(Note)


def test_rule_12_the_sweep_asks_for_every_fragment_despite_busy_links(
    shard_bench: Any,
) -> None:
    """Rule 12: backlogs and busy links matter only while learners train."""
    bench = shard_bench("a", "b", fragments=4, period=4, overlap=1)
    for _ in range(2):
        for learner in "ab":
            bench.step(learner)
    assert bench.machine.state.members["a"].under_way == {1}
    bench.handle(Received(COORDINATOR, EndOrdered()))
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


def test_rule_12_a_merge_in_progress_is_not_a_closing_round(shard_bench: Any) -> None:
    """Rule 12: it is not abandoned; the closing round comes after it."""
    bench = shard_bench("a", fragments=1, period=1)
    bench.step("a")
    bench.body("a")
    assert bench.orders(Merge)
    bench.handle(Received(COORDINATOR, EndOrdered()))
    assert not bench.orders(RoundFinished)
    bench.merged()
    assert not bench.messages(Swept)
    assert [pull.final for pull in bench.messages(Pull)] == [True]


def test_rule_12_a_stalled_learner_ends_the_sweep_after_three_tries(
    shard_bench: Any,
) -> None:
    """Rule 4: no round waits forever; rule 12: the log lists what is missing."""
    bench = sweeping(shard_bench, "a", "b")
    for number in range(1, SWEEP_TRIES_MAX + 1):
        bench.decline("a") if number > 1 else bench.body("a")
        wait(bench, CLOSING_SECONDS - 1.0)
        assert not bench.messages(Swept)
        assert "b" in bench.machine.state.fragments[0].asks
        assert bench.machine.deadline() <= number * CLOSING_SECONDS
        bench.handle(Heard(("a", "b")), number * CLOSING_SECONDS)
        bench.handle(Tick())
        if number == 1:
            assert bench.orders(Merge)
            bench.merged()
    assert bench.messages(Swept)
    (note,) = bench.orders(Note)
    assert note.text == "fragment 0 lacks the last training of b"
    assert note.why == "no answer within 60 s: its loop has stalled; closing rounds that failed: 3"


def test_rule_12_an_upload_has_no_deadline(shard_bench: Any) -> None:
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


def test_rule_12_the_time_of_a_closing_request_counts_from_the_request(shard_bench: Any) -> None:
    """Rule 12: a learner that reconnects in the sweep has as much time as the others had."""
    bench = sweeping(shard_bench, "a", "b")
    bench.body("a")
    wait(bench, CLOSING_SECONDS - 5.0)
    reconnect(bench, "b")
    assert bench.requested() == ["b"]
    wait(bench, CLOSING_SECONDS - 1.0)
    assert not bench.orders(Merge)
    assert not bench.machine.state.fragments[0].sweep_tries
    wait(bench, 1.0)
    assert bench.orders(Merge)


def test_rule_12_the_time_of_an_earlier_request_counts_from_the_end(
    shard_bench: Any,
) -> None:
    bench = gathering(shard_bench)
    wait(bench, 10 * CLOSING_SECONDS)
    bench.handle(Received(COORDINATOR, EndOrdered()))
    wait(bench, CLOSING_SECONDS - 1.0)
    assert "b" in bench.machine.state.fragments[0].asks
    wait(bench, 1.0)
    assert "b" not in bench.machine.state.fragments[0].asks


def test_rule_12_a_closing_merge_that_fails_is_tried_three_times(shard_bench: Any) -> None:
    """Rule 12: a full disk finally ends the sweep, and the log lists what is missing."""
    bench = sweeping(shard_bench, "a")
    for number in range(1, SWEEP_TRIES_MAX + 1):
        bench.body("a")
        assert bench.orders(Merge)
        round = bench.machine.state.rounds[0]
        bench.handle(Failed(merge_of(round.number, 0), "no space left"))
        if number < SWEEP_TRIES_MAX:
            assert not bench.messages(Swept)
            assert not bench.orders(Expect), "it pauses"
            wait(bench, 2.0**number)
            assert bench.ask("a").term
    assert bench.messages(Swept)
    (note,) = bench.orders(Note)
    assert note.text == "fragment 0 lacks the last training of a"
    assert note.why == "no space left; closing rounds that failed: 3"


def test_rule_12_the_sweep_does_not_wait_for_a_learner_that_leaves(shard_bench: Any) -> None:
    bench = sweeping(shard_bench, "a", "b")
    bench.body("a")
    bench.handle(Received("b", Leave("enough")))
    assert bench.orders(Merge)


@pytest.mark.parametrize("delivered", [False, True])
def test_rule_12_a_learner_without_steps_is_also_asked(shard_bench: Any, delivered: bool) -> None:
    bench = shard_bench("a", "b", fragments=1, period=8)
    bench.step("a")
    bench.handle(Received(COORDINATOR, EndOrdered()))
    assert sorted(bench.requested()) == ["a", "b"]
    bench.handle(Received("b", StepReport(1, 10, 1.0)))
    bench.body("a")
    if delivered:
        bench.body("b")
    else:
        bench.decline("b")
    assert bench.orders(Merge)


def finished(shard_bench: Any) -> Any:
    """Return a finished shard; a holds everything, b lacks both fragments."""
    bench = shard_bench("a", "b", fragments=2, period=2, overlap=1)
    bench.step("a")
    bench.step("b")
    bench.handle(Received(COORDINATOR, EndOrdered()))
    for fragment in (0, 1):
        for learner in ("a", "b"):
            if learner in bench.machine.state.fragments[fragment].asks:
                bench.body(learner, fragment)
        bench.merged(fragment)
        for learner in ("a", "b"):
            while learner in bench.machine.state.fragments[fragment].asks:
                bench.decline(learner, fragment=fragment)
    assert bench.machine.state.phase == "swept"
    bench.handle(Received(COORDINATOR, FinishOrdered()))
    bench.holds("a")
    return bench


def test_rule_12_a_shard_stays_while_a_learner_fetches_copies(
    shard_bench: Any,
) -> None:
    """Over a slow link, the last copies take longer than the wait for a silent learner."""
    bench = finished(shard_bench)
    wait(bench, LINGER_SECONDS - 1.0)
    bench.handle(Received("b", Holding(0, bench.machine.state.fragments[0].version)))
    wait(bench, LINGER_SECONDS)
    assert not bench.machine.state.stopped
    bench.handle(Received("b", Holding(1, bench.machine.state.fragments[1].version)))
    wait(bench, LINGER_SECONDS)
    assert bench.machine.state.stopped


def test_rule_12_a_shard_does_not_stay_for_a_learner_that_fetches_nothing(shard_bench: Any) -> None:
    bench = finished(shard_bench)
    wait(bench, CLOSING_SECONDS + LINGER_SECONDS)
    assert bench.machine.state.stopped
