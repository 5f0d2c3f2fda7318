"""The numbers that a shard believes: no more than it has observed itself (rule 13)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from decoupled_diloco.protocol.leaving import DEPARTURES_MAX
from decoupled_diloco.protocol.messages import (
    Draining,
    Evict,
    Expect,
    Fold,
    Heard,
    Lost,
    Received,
    RoundOpened,
    StepReport,
    Tick,
    Welcome,
)
from decoupled_diloco.protocol.syncer_state import (
    DRAIN_SECONDS,
    LEASE_SECONDS,
    PACE_FACTOR,
    RECONNECT_SECONDS,
    STEPS_AHEAD_MAX,
    STEPS_BURST,
    STEPS_PER_SECOND,
    TOKENS_AHEAD_MAX,
    TOKENS_FACTOR,
    Pace,
)

LEAST, MOST = STEPS_PER_SECOND


def test_rule_13_one_report_moves_the_clock_by_no_more_than_can_be_true(shard_bench: Any) -> None:
    """Rule 13: a number is not a step; the rest is believed when enough time has passed."""
    bench = shard_bench("a", "b", fragments=1, period=10)
    lie = Received("a", StepReport(STEPS_AHEAD_MAX, 10, 1.0))
    bench.handle(lie)
    assert bench.machine.state.clock == STEPS_BURST
    bench.handle(lie)
    assert bench.machine.state.clock == STEPS_BURST
    bench.handle(lie, 2.0)
    assert bench.machine.state.clock == STEPS_BURST + 2.0 * LEAST
    assert not bench.orders(Evict), "it may have been paused, or the shard"


def test_rule_13_a_fast_learner_is_believed_soon(shard_bench: Any) -> None:
    """Rule 13: its pace is measured, and it may even become faster."""
    bench = shard_bench("a", fragments=1, period=100)
    for step in range(1, 501):
        bench.step("a", 0.01 * step, seconds=0.01)
    assert bench.machine.state.clock == 500


def test_rule_13_a_pace_lets_a_learner_become_faster_within_bounds() -> None:
    """Rule 13: by a factor; never slower than the least, nor faster than the most."""
    for seconds, rate in ((0.01, PACE_FACTOR / 0.01), (1e-9, MOST), (60.0, LEAST)):
        pace = Pace(0.0, credit=0.0)
        pace.seconds.update(seconds)
        assert pace.allows(2.0) == int(2.0 * rate)


def test_rule_13_credit_does_not_accumulate_during_silence() -> None:
    """Rule 13: after silence, a learner has no more credit than a new one."""
    pace = Pace(0.0)
    pace.observe(1000.0, 1)
    assert pace.allows(1000.0 + DRAIN_SECONDS) > 1000 * LEAST, "reports that come all at once"
    assert pace.allows(1002.0) == STEPS_BURST + 2.0 * LEAST


def test_rule_13_a_returning_learner_is_bounded_by_its_pace(shard_bench: Any) -> None:
    """Rule 13: a greeting is believed no more than a report."""
    bench = shard_bench("a", "b", fragments=1, period=10)
    for _ in range(5):
        bench.step("a")
    bench.handle(Lost("a"))
    bench.handle(Tick(), RECONNECT_SECONDS)
    assert "a" not in bench.machine.state.members
    bench.greet("a", step=100_000, run_step=100_000)
    (welcome,) = bench.messages(Welcome)
    assert welcome.run_step == STEPS_BURST + RECONNECT_SECONDS * LEAST
    assert bench.machine.state.clock == welcome.run_step


def test_rule_13_a_new_learner_is_not_ahead_of_the_clock(shard_bench: Any) -> None:
    """Rule 13: the shard has observed nothing of it yet."""
    bench = shard_bench("a", fragments=1, period=10)
    bench.step("a")
    bench.greet("new", step=900, run_step=900)
    assert bench.messages(Welcome)[0].run_step == bench.machine.state.clock == 1


def test_rule_13_a_step_time_that_its_reports_belie_is_not_believed(shard_bench: Any) -> None:
    """Rule 13: otherwise every delivery window would be too short for all learners."""
    bench = shard_bench("a", "b", fragments=1, period=100)
    for at in (1.0, 2.0, 3.0):
        bench.step("a", at, seconds=1e-9)
    assert bench.machine.state.members["a"].step_seconds == pytest.approx(0.5)
    assert bench.machine.state.step_seconds == pytest.approx(0.5)


def test_rule_13_a_first_report_does_not_lower_the_step_time_of_the_others(
    shard_bench: Any,
) -> None:
    """It would shrink all grace windows to nothing until its second report."""
    bench = shard_bench("a", "b")
    bench.step("a", 1.0, seconds=1.0)
    bench.step("b", 1.5, seconds=1e-9)
    assert bench.machine.state.step_seconds == 1.0


def test_rule_13_a_plausible_step_time_is_believed(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=100)
    for at in (1.0, 2.0, 3.0):
        bench.step("a", at, seconds=0.8)
    bench.step("b", 3.0, seconds=7.0)
    steps = {name: one.step_seconds for name, one in bench.machine.state.members.items()}
    assert steps == {"a": 0.8, "b": 7.0}


def dishonest(shard_bench: Any) -> Any:
    """Of three learners with one step each, c reports as many tokens as it may."""
    bench = shard_bench("a", "b", "c", fragments=1, period=2, quorum=3)
    for step in (1, 2):
        for name in "ab":
            bench.handle(Received(name, StepReport(step, 10 * step, 1.0)))
        bench.handle(Received("c", StepReport(step, TOKENS_AHEAD_MAX, 1.0)))
    assert bench.machine.state.step_tokens == 10.0
    return bench


def test_rule_13_counted_tokens_are_bounded_by_the_median_learner(shard_bench: Any) -> None:
    """Rule 13: at most a multiple of the median learner's tokens."""
    bench = dishonest(shard_bench)
    assert bench.machine.state.tokens == 20 + 20 + TOKENS_FACTOR * 10 * 2


def test_rule_13_weights_are_bounded_by_the_median_learner(shard_bench: Any) -> None:
    """Rule 13: a contribution's weight follows from its tokens."""
    bench = dishonest(shard_bench)
    bench.body("c", steps=2, tokens=2**53)
    (fold,) = bench.orders(Fold)
    assert (fold.steps, fold.tokens) == (2.0, TOKENS_FACTOR * 10.0 * 2)
    assert fold.why == f"delivered in time; 640 of its {2**53} tokens count"


def test_rule_13_dishonest_learners_below_the_quorum_do_not_move_the_clock(
    shard_bench: Any,
) -> None:
    """K − 1 of them report as much as is believed; the honest learners set the clock."""
    bench = shard_bench("a", "b", "c", "d", fragments=1, period=10, quorum=3)
    for at in range(1, 6):
        for liar in "ab":
            bench.handle(Received(liar, StepReport(STEPS_AHEAD_MAX, 10, 1.0)), float(at))
        for honest in "cd":
            bench.step(honest, float(at))
        assert bench.machine.state.clock == at


def test_rule_13_claimed_tokens_do_not_count_with_uniform_weights(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=2, quorum=2, weighting="uniform")
    for step in (1, 2):
        bench.handle(Received("a", StepReport(step, 10 * step, 1.0)))
        bench.handle(Received("b", StepReport(step, TOKENS_AHEAD_MAX, 1.0)))
    bench.body("a", steps=2, tokens=20)
    bench.body("b", steps=2, tokens=2**53)
    folded = bench.machine.state.fragments[0].folded or bench.machine.state.rounds[0].folded
    assert [(ask.learner, ask.weight) for ask in folded] == [("a", 1.0), ("b", 1.0)]


def test_rule_13_tokens_weigh_no_more_than_was_reported(shard_bench: Any) -> None:
    """Rule 13: a contribution's weight counts at most the reported tokens."""
    bench = dishonest(shard_bench)
    bench.body("a", steps=2, tokens=300)
    (fold,) = bench.orders(Fold)
    assert fold.tokens == 20.0


def test_rule_13_reports_of_an_earlier_incarnation_count(shard_bench: Any) -> None:
    """Rule 13: it continues from its checkpoint, with training that is not merged yet."""
    bench = shard_bench("a", fragments=1, period=4)
    for _ in range(3):
        bench.step("a")
    bench.greet("a", epoch=2, run_step=3)
    bench.step("a")
    bench.body("a", epoch=2, steps=4, tokens=40)
    (fold,) = bench.orders(Fold)
    assert fold.tokens == 40.0


def leave_again_and_again(bench: Any, *, delivers: bool) -> tuple[Counter[Any], Counter[int]]:
    """a announces its departure twenty times; count requests and rounds."""
    asked: Counter[Any] = Counter()
    opened: Counter[int] = Counter()

    def look() -> None:
        asked.update((order.learner, order.fragment) for order in bench.orders(Expect))
        opened.update(order.fragment for order in bench.orders(RoundOpened))

    def answer(learner: str, fragment: int) -> None:
        if delivers or learner != "a":
            bench.body(learner, fragment)
        else:
            bench.decline(learner, fragment=fragment)
        look()

    for _ in range(20):
        bench.handle(Received("a", Draining((0, 1), "asked to stop")))
        look()
        while bench.machine.state.rounds:
            fragment = next(iter(bench.machine.state.rounds))
            for learner in list(bench.machine.state.fragments[fragment].asks):
                answer(learner, fragment)
            bench.merged(fragment)
            look()
    return asked, opened


def test_rule_13_who_goes_again_and_again_has_everybody_asked_once(shard_bench: Any) -> None:
    """Rule 13: its training is drained; no learner sends a payload in vain."""
    bench = shard_bench("a", "b", "c", fragments=2, period=100, overlap=50)
    for learner in "abc":
        bench.step(learner)
    asked, _ = leave_again_and_again(bench, delivers=True)
    assert asked == Counter((name, fragment) for name in "abc" for fragment in (0, 1))


def test_rule_13_repeated_departures_without_a_drain_are_ignored(
    shard_bench: Any,
) -> None:
    """Rule 13: each reconnection repeats the announcement, up to a limit."""
    bench = shard_bench("a", "b", "c", fragments=2, period=100, overlap=50)
    for learner in "abc":
        bench.step(learner)
    _, opened = leave_again_and_again(bench, delivers=False)
    assert opened == {0: DEPARTURES_MAX, 1: DEPARTURES_MAX}


def test_rule_1_simultaneous_departures_shift_the_others_once(shard_bench: Any) -> None:
    """Rule 1: a lost cluster is a single event."""
    bench = shard_bench("first", "second", "slow", fragments=1, period=100)
    for _ in range(5):
        bench.step("first")
        bench.step("second")
    bench.step("slow")
    bench.handle(Heard(("slow",)), LEASE_SECONDS)
    bench.handle(Tick())
    assert [order.learner for order in bench.orders(Evict)] == ["first", "second"]
    (shifted,) = [order for order in bench.effects if hasattr(order, "message")]
    assert (shifted.message.by, shifted.why) == (4, "one of 2 learners was ahead and left")
