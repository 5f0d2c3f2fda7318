"""What a shard believes of a learner's numbers: no more than it has seen itself (rule 13)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from decoupled_diloco.protocol.draining import LEAVINGS_MAX
from decoupled_diloco.protocol.effects import Evict, Expect, Fold, RoundOpened
from decoupled_diloco.protocol.events import Heard, Lost, Received, Tick
from decoupled_diloco.protocol.membership import (
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
from decoupled_diloco.protocol.messages import Draining, StepReport, Welcome

LEAST, MOST = STEPS_PER_SECOND


def test_rule_13_one_report_moves_the_clock_by_no_more_than_can_be_true(shard_bench: Any) -> None:
    """Rule 13: a number is no step; what is not believed at once is when time has passed."""
    bench = shard_bench("a", "b", fragments=1, period=10)
    lie = Received("a", StepReport(STEPS_AHEAD_MAX, 10, 1.0))
    bench.told(lie)
    assert bench.machine.state.clock == STEPS_BURST
    bench.told(lie)
    assert bench.machine.state.clock == STEPS_BURST
    bench.told(lie, 2.0)
    assert bench.machine.state.clock == STEPS_BURST + 2.0 * LEAST
    assert not bench.orders(Evict), "it may have been paused, or the shard"


def test_rule_13_who_steps_fast_is_believed_soon(shard_bench: Any) -> None:
    """Rule 13: its own pace is seen; it may even become faster."""
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


def test_rule_13_what_was_not_reported_for_long_does_not_add_up() -> None:
    """Rule 13: who has been silent has no more in store than one who has just come."""
    pace = Pace(0.0)
    pace.saw(1000.0, 1)
    assert pace.allows(1000.0 + DRAIN_SECONDS) > 1000 * LEAST, "reports that come all at once"
    assert pace.allows(1002.0) == STEPS_BURST + 2.0 * LEAST


def test_rule_13_who_comes_back_is_where_its_pace_allows(shard_bench: Any) -> None:
    """Rule 13: a greeting is believed no more than a report."""
    bench = shard_bench("a", "b", fragments=1, period=10)
    for _ in range(5):
        bench.step("a")
    bench.told(Lost("a"))
    bench.told(Tick(), RECONNECT_SECONDS)
    assert "a" not in bench.machine.state.members
    bench.greet("a", step=100_000, run_step=100_000)
    (welcome,) = bench.messages(Welcome)
    assert welcome.run_step == STEPS_BURST + RECONNECT_SECONDS * LEAST
    assert bench.machine.state.clock == welcome.run_step


def test_rule_13_who_is_new_is_not_ahead_of_the_clock(shard_bench: Any) -> None:
    """Rule 13: nothing was seen of it yet."""
    bench = shard_bench("a", fragments=1, period=10)
    bench.step("a")
    bench.greet("new", step=900, run_step=900)
    assert bench.messages(Welcome)[0].run_step == bench.machine.state.clock == 1


def test_rule_13_a_step_time_that_its_reports_belie_is_not_believed(shard_bench: Any) -> None:
    """Rule 13: it would make every delivery window as short, and nobody could deliver."""
    bench = shard_bench("a", "b", fragments=1, period=100)
    for at in (1.0, 2.0, 3.0):
        bench.step("a", at, seconds=1e-9)
    assert bench.machine.state.members["a"].step_seconds == pytest.approx(0.5)
    assert bench.machine.state.step_seconds == pytest.approx(0.5)


def test_rule_13_a_first_report_does_not_lower_the_step_time_of_the_others(
    shard_bench: Any,
) -> None:
    """It would shrink everybody's grace window to nothing until its second."""
    bench = shard_bench("a", "b")
    bench.step("a", 1.0, seconds=1.0)
    bench.step("b", 1.5, seconds=1e-9)
    assert bench.machine.state.step_seconds == 1.0


def test_rule_13_a_step_time_that_nothing_speaks_against_is_believed(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=100)
    for at in (1.0, 2.0, 3.0):
        bench.step("a", at, seconds=0.8)
    bench.step("b", 3.0, seconds=7.0)
    steps = {name: one.step_seconds for name, one in bench.machine.state.members.items()}
    assert steps == {"a": 0.8, "b": 7.0}


def liar(shard_bench: Any) -> Any:
    """Of three that have each reported a step, c names as many tokens as it may."""
    bench = shard_bench("a", "b", "c", fragments=1, period=2, quorum=3)
    for step in (1, 2):
        for name in "ab":
            bench.told(Received(name, StepReport(step, 10 * step, 1.0)))
        bench.told(Received("c", StepReport(step, TOKENS_AHEAD_MAX, 1.0)))
    assert bench.machine.state.step_tokens == 10.0
    return bench


def test_rule_13_tokens_spend_the_budget_as_far_as_others_have_as_many(shard_bench: Any) -> None:
    """Rule 13: of so many times the median learner's, and no more."""
    bench = liar(shard_bench)
    assert bench.machine.state.tokens == 20 + 20 + TOKENS_FACTOR * 10 * 2


def test_rule_13_tokens_weigh_as_far_as_others_have_as_many(shard_bench: Any) -> None:
    """Rule 13: the weight of a contribution is of its tokens."""
    bench = liar(shard_bench)
    bench.body("c", steps=2, tokens=2**53)
    (fold,) = bench.orders(Fold)
    assert (fold.steps, fold.tokens) == (2.0, TOKENS_FACTOR * 10.0 * 2)
    assert fold.why == f"delivered in time; 640 of its {2**53} tokens are believed"


def test_rule_13_tokens_weigh_no_more_than_was_reported(shard_bench: Any) -> None:
    """Rule 13: who sends more than it has trained has the weight of what it has trained."""
    bench = liar(shard_bench)
    bench.body("a", steps=2, tokens=300)
    (fold,) = bench.orders(Fold)
    assert fold.tokens == 20.0


def test_rule_13_what_an_earlier_epoch_has_reported_counts(shard_bench: Any) -> None:
    """Rule 13: it goes on from its checkpoint, with what it had not handed in yet."""
    bench = shard_bench("a", fragments=1, period=4)
    for _ in range(3):
        bench.step("a")
    bench.greet("a", epoch=2, run_step=3)
    bench.step("a")
    bench.body("a", epoch=2, steps=4, tokens=40)
    (fold,) = bench.orders(Fold)
    assert fold.tokens == 40.0


def leave_again_and_again(bench: Any, *, delivers: bool) -> tuple[Counter[Any], Counter[int]]:
    """a says twenty times that it goes; how often each is asked, and each fragment opened."""
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
        bench.told(Received("a", Draining((0, 1), "told to go")))
        look()
        while bench.machine.state.rounds:
            fragment = next(iter(bench.machine.state.rounds))
            for learner in list(bench.machine.state.fragments[fragment].asks):
                answer(learner, fragment)
            bench.merged(fragment)
            look()
    return asked, opened


def test_rule_13_who_goes_again_and_again_has_everybody_asked_once(shard_bench: Any) -> None:
    """Rule 13: what it had is handed in; nobody sends for nothing."""
    bench = shard_bench("a", "b", "c", fragments=2, period=100, overlap=50)
    for learner in "abc":
        bench.step(learner)
    asked, _ = leave_again_and_again(bench, delivers=True)
    assert asked == Counter((name, fragment) for name in "abc" for fragment in (0, 1))


def test_rule_13_who_goes_again_and_again_and_hands_nothing_in_is_heard_no_more(
    shard_bench: Any,
) -> None:
    """Rule 13: who has lost its connection says it anew; so often, and no more."""
    bench = shard_bench("a", "b", "c", fragments=2, period=100, overlap=50)
    for learner in "abc":
        bench.step(learner)
    _, opened = leave_again_and_again(bench, delivers=False)
    assert opened == {0: LEAVINGS_MAX, 1: LEAVINGS_MAX}


def test_rule_1_learners_that_go_at_once_shift_the_others_once(shard_bench: Any) -> None:
    """Rule 1: a cluster that is gone is one thing that has happened."""
    bench = shard_bench("first", "second", "slow", fragments=1, period=100)
    for _ in range(5):
        bench.step("first")
        bench.step("second")
    bench.step("slow")
    bench.told(Heard(("slow",)), LEASE_SECONDS)
    bench.told(Tick())
    assert [order.learner for order in bench.orders(Evict)] == ["first", "second"]
    (shifted,) = [order for order in bench.effects if hasattr(order, "message")]
    assert (shifted.message.by, shifted.why) == (4, "one of 2 learners was ahead and has gone")
