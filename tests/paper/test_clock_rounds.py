"""Clock, rounds, participants and grace window, measured in virtual time (rules 1 to 3, Eq. 3).

The settings are those of the paper: P = H = 24, τ = 2, γ = 0.8. The fastest learner's step takes
one second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol.clock import (
    Timing,
    advanced,
    kth_largest,
    shift_after_leave,
    window_decision,
)
from decoupled_diloco.protocol.messages import (
    ClockAdvanced,
    Pull,
    Received,
    RoundFinished,
    SendBody,
    Snapshot,
)
from decoupled_diloco_lab.simulate import Choices, LearnerSpec
from decoupled_diloco_lab.simulate.crowd import Crowd

WARM_UP_SECONDS = 60.0


@dataclass
class Run:
    """Records one run after its warm-up."""

    world: Crowd
    ticks: list[float] = field(default_factory=list)
    rounds: list[RoundFinished] = field(default_factory=list)
    pulls: Counter[str] = field(default_factory=Counter)
    answered_at_once: Counter[str] = field(default_factory=Counter)
    snapshots: int = 0

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Record one event."""
        for effect in effects:
            if isinstance(effect, ClockAdvanced):
                self.ticks.append(now)
            elif isinstance(effect, RoundFinished):
                self.rounds.append(effect)
            self.snapshots += isinstance(effect, Snapshot)
        if isinstance(event, Received) and isinstance(event.message, Pull):
            self.pulls[process] += 1
            self.answered_at_once[process] += any(isinstance(e, SendBody) for e in effects)

    def share(self, learner: str) -> float:
        """Return the share of merged rounds in which a learner took part."""
        return sum(learner in folded(r) for r in self.merged) / len(self.merged)

    def merged_into(self, learner: str) -> set[int]:
        """Return the fragments that have merged a learner's contribution."""
        return {r.fragment for r in self.merged if learner in folded(r)}

    @property
    def merged(self) -> list[RoundFinished]:
        """The rounds that were not abandoned."""
        return [round for round in self.rounds if round.verdict == "merged"]

    @property
    def longest_pause(self) -> float:
        """The longest time between two ticks, in steps of the fastest learner."""
        return max(b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False))


def folded(round: RoundFinished) -> set[str]:
    """Return the learners in a merge."""
    return {p.learner for p in round.participants if p.state == "folded"}


def run(
    *speeds: float,
    seconds: float = 240.0,
    latency: float = 0.002,
    variance: float = 0.0,
    **options: Any,
) -> Run:
    """Run learners with these seconds per step, at random phases, and record after the warm-up."""
    choices = Choices("phases")
    specs = [
        LearnerSpec(
            f"learner-{number}",
            step_seconds=speed,
            variance=variance,
            latency=latency,
            joins_at=choices.uniform(0.0, max(speeds)),
        )
        for number, speed in enumerate(speeds)
    ]
    world = Crowd(Options(**options), specs, seed=1)
    world.run(until=WARM_UP_SECONDS)
    seen = Run(world)
    world.recorders.append(seen)
    world.run(until=WARM_UP_SECONDS + seconds)
    return seen


EVERY_FRAGMENT = set(range(24))


def test_rule_1_the_clock_is_the_kth_largest_run_step() -> None:
    assert [kth_largest([5, 9, 7], k) for k in (1, 2, 3, 4)] == [9, 7, 5, None]
    assert advanced(4, [9, 7, 5], 2) == 7
    assert advanced(8, [9, 7, 5], 2) == 8, "it never goes back"
    assert advanced(8, [9], 2) == 8, "it stops with fewer than K live learners"


def test_rule_1_remaining_learners_are_shifted_so_that_the_clock_continues() -> None:
    assert shift_after_leave(10, [7, 4], 1) == 3
    assert shift_after_leave(10, [7, 4], 2) == 6
    assert shift_after_leave(10, [12, 4], 1) == 0, "the learner that left was not ahead"
    assert shift_after_leave(10, [7], 2) == 0, "fewer than K are live"


def test_rule_1_equal_learners_tick_once_per_step_not_m_times() -> None:
    seen = run(*[1.0] * 8)
    assert len(seen.ticks) == pytest.approx(240, abs=1)
    assert all(seen.share(name) == 1.0 for name in seen.world.learners)


def test_rule_1_with_all_as_quorum_the_slowest_sets_the_pace() -> None:
    """The paper reports a goodput of 84 % for learners whose speeds differ by 18 %."""
    seen = run(*[1.0] * 4, *[1.18] * 4, quorum=8)
    assert len(seen.ticks) / 240 == pytest.approx(1 / 1.18, abs=0.01)


def test_rule_1_the_death_of_the_fastest_learner_causes_no_long_pause() -> None:
    seen = run(2.0, 2.3, 2.6, seconds=40.0)
    fastest = seen.world.learners["learner-0"]
    seen.world.crash(fastest)
    seen.world.run(until=seen.world.now + 80.0)
    assert seen.longest_pause / 2.0 < 2.7


def test_rule_1_the_death_of_a_learner_twice_as_fast_causes_no_long_pause() -> None:
    """Without the shift, the clock would stop until the slower learner had caught up."""
    seen = run(2.0, 4.0, seconds=100.0)
    seen.world.crash(seen.world.learners["learner-0"])
    before = seen.world.shards[0].machine.state.clock
    seen.world.run(until=seen.world.now + 80.0)
    assert seen.longest_pause / 4.0 < 2.7
    assert seen.world.shards[0].machine.state.clock >= before + 17


@pytest.mark.parametrize(
    ("overlap", "fragments", "period", "limit"),
    [(2, 24, 24, 2), (0, 24, 24, 1), (2, 12, 24, 1), (3, 24, 12, 6), (1, 1, 1, 1), (1, 3, 2, 2)],
)
def test_rule_2_open_rounds_are_limited(
    overlap: int, fragments: int, period: int, limit: int
) -> None:
    assert Options(overlap=overlap, fragments=fragments, period=period).open_rounds_max == limit


@pytest.mark.parametrize(
    ("fragments", "period"), [(24, 24), (8, 24), (24, 8), (5, 7), (7, 5), (1, 1)]
)
def test_rule_2_every_fragment_is_due_once_per_period(fragments: int, period: int) -> None:
    options = Options(fragments=fragments, period=period)
    due = [fragment for step in range(period) for fragment in options.due(step)]
    assert sorted(due) == list(range(fragments))
    for step in range(period):
        assert all(options.phase(fragment) == step for fragment in options.due(step))


@pytest.mark.parametrize(
    ("phases", "overlap", "limit"),
    [
        ((0, 0, 0), 1, 3),
        ((0, 2, 4), 2, 1),
        ((0, 5, 3), 2, 2),  # 5 and 0 follow one another
        ((0, 1, 2), 0, 1),
    ],
)
def test_rule_2_unevenly_spread_fragments_take_the_slots_that_they_need(
    phases: tuple[int, ...], overlap: int, limit: int
) -> None:
    options = Options(fragments=3, period=6, overlap=overlap, phases=phases)
    assert options.open_rounds_max == limit
    assert [options.phase(fragment) for fragment in range(3)] == list(phases)
    assert all(fragment in options.due(12 + phases[fragment]) for fragment in range(3))
    assert sum(len(options.due(step)) for step in range(6)) == 3


def test_rule_2_with_p_equal_h_one_fragment_is_due_in_every_step() -> None:
    assert [Options().due(step) for step in (0, 1, 23, 24)] == [(0,), (1,), (23,), (0,)]


def test_rule_2_without_overlap_rounds_follow_one_another() -> None:
    """Rule 4: without a delivery window, a round waits for K only. The rest is late by one."""
    seen = run(1.0, 1.0, overlap=0, seconds=48.0)
    assert len(seen.merged) >= 47
    assert {p.state for r in seen.merged for p in r.participants} <= {"folded", "late"}
    assert max(p.age for r in seen.merged for p in r.participants) <= 1
    assert all(seen.share(name) > 0.95 for name in seen.world.learners)


def test_rule_2_without_overlap_a_quorum_of_all_waits_for_all() -> None:
    """Rule 14, synchronous baselines: all contributions are in time."""
    seen = run(1.0, 1.0, overlap=0, quorum=2, seconds=48.0)
    assert len(seen.merged) >= 47
    assert {(p.state, p.age) for r in seen.merged for p in r.participants} == {("folded", 0)}


def test_rule_3_the_grace_window_brings_the_slower_half_in() -> None:
    """Speeds differ by 18 %, K = 1: goodput is full, and all eight take part in every round."""
    seen = run(*[1.0] * 4, *[1.18] * 4)
    assert len(seen.ticks) == pytest.approx(240, abs=1)
    assert min(seen.share(name) for name in seen.world.learners) > 0.99


def test_rule_3_reported_takes_learners_with_a_report_since_the_previous_tick() -> None:
    seen = run(1.0, 1.0, 2.0, 4.0, seconds=480.0)
    assert len(seen.ticks) == pytest.approx(480, abs=1)
    assert seen.share("learner-0") == seen.share("learner-1") == 1.0
    assert 0.5 < seen.share("learner-3") < 0.9
    assert all(seen.merged_into(name) == EVERY_FRAGMENT for name in seen.world.learners)


def test_rule_3_all_takes_every_learner() -> None:
    seen = run(1.0, 1.0, 2.0, 4.0, participants="all")
    assert len(seen.ticks) == pytest.approx(240, abs=1)
    assert min(seen.share(name) for name in seen.world.learners) > 0.99


@pytest.mark.parametrize("slowness", [2.0, 3.0, 4.0])
def test_rule_3_without_grace_every_fragment_still_merges_every_learner(slowness: float) -> None:
    """This includes learners of exactly half the speed, whose steps meet the same fragments."""
    seen = run(1.0, slowness, grace_margin=0.0, seconds=480.0)
    assert 0.9 / slowness < seen.share("learner-1") < 0.8
    assert seen.merged_into("learner-1") == EVERY_FRAGMENT


@pytest.mark.parametrize("jitter", [0.0, 0.05, 0.2])
def test_eq_3_windows_never_exceed_their_share_of_the_slack(jitter: float) -> None:
    seen = run(1.0, 1.18, 2.0, variance=jitter, seconds=120.0)
    for round in seen.rounds:
        assert 0.0 <= round.grace_seconds <= max(0.0, 0.8 * round.slack_seconds) + 1e-12
        assert round.slack_seconds <= 2 * round.step_seconds


def test_eq_3_the_slack_is_what_the_overlap_leaves() -> None:
    timing = Timing()
    timing.quorum.update(0.1)
    timing.merge.update(0.2)
    timing.broadcast.update(0.3)
    window = timing.window(overlap=2, margin=0.8, step_seconds=1.0)
    assert window.slack == pytest.approx(2 * 1.0 - (0.1 + 0.5))
    assert window.seconds == pytest.approx(0.8 * window.slack)
    assert timing.window(0, 0.8, 1.0).seconds == 0.0, "no overlap, no slack"
    assert timing.window(2, 0.8, 0.1).seconds == 0.0, "a negative slack counts as zero"
    assert timing.window(2, 0.0, 1.0).seconds == 0.0


def decisions() -> Iterator[tuple[dict[str, Any], bool, float | None, str]]:
    """Yield arguments, whether the window closes, when to check again, and the reason."""
    usual = {"now": 5.0, "closes_at": 6.0, "quorum": 2, "qualified": 2, "possible": 4}
    yield {**usual, "qualified": 1}, False, None, "1 of the quorum of 2"
    yield usual, False, 6.0, "the window is open: 2 of 4 qualify"
    yield {**usual, "now": 6.0}, True, None, "the grace window is over: 2 of 4 qualify"
    yield {**usual, "qualified": 4}, True, None, "all 4 live learners"
    yield {**usual, "qualified": 1, "now": 9.0}, False, None, "1 of the quorum of 2"


@pytest.mark.parametrize(("arguments", "close", "wake", "reason"), [*decisions()])
def test_rule_3_the_window_closes_after_its_time_or_with_all_learners(
    arguments: dict[str, Any], close: bool, wake: float | None, reason: str
) -> None:
    decision = window_decision(arguments.pop("now"), **arguments)
    assert (decision.close, decision.wake) == (close, wake)
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("speeds", "options"),
    [
        pytest.param([1.0] * 4, {}, id="equal"),
        pytest.param([1.0, 1.0, 1.18, 1.18], {}, id="18 percent"),
        pytest.param([1.0, 1.0, 2.0], {}, id="twice"),
        pytest.param([1.0, 1.0, 4.0], {}, id="four times"),
        pytest.param([1.0, 1.0, 2.0, 4.0], {"participants": "all"}, id="all"),
        pytest.param([1.0, 1.0, 1.5], {"quorum": 2}, id="quorum of two"),
    ],
)
@pytest.mark.parametrize("latency", [0.002, 0.05])
def test_rule_4_pulls_are_answered_at_once(
    speeds: list[float], options: dict[str, Any], latency: float
) -> None:
    seen = run(*speeds, latency=latency, variance=0.02, seconds=120.0, **options)
    for learner, pulls in seen.pulls.items():
        assert seen.answered_at_once[learner] / pulls >= 0.9, learner
    assert seen.snapshots <= 2.5 * sum(seen.pulls.values()), "few snapshots are unused"


def test_rule_11_rounds_continue_while_the_coordinator_is_down() -> None:
    """Rule 11: its absence stops joins, leases and the end, but rounds continue."""
    seen = run(1.0, 1.0, 1.0, seconds=10.0)
    world = seen.world
    world.pause(world.coordinator)
    seen.rounds.clear()
    gone_at = len(seen.ticks)
    world.run(until=world.now + 48.0)
    assert len(seen.ticks) - gone_at == pytest.approx(48, abs=1)
    assert {round.fragment for round in seen.merged} == EVERY_FRAGMENT
    assert all(seen.share(name) == 1.0 for name in world.learners)


def test_a_synchronous_learner_waits_for_the_slowest() -> None:
    seen = run(1.0, 1.0, 1.5, quorum=3, wait="at_overlap", overlap=0, fragments=1, period=1)
    assert len(seen.ticks) * 1.5 == pytest.approx(240, rel=0.02)
    assert all(seen.share(name) == 1.0 for name in seen.world.learners)


def test_rule_3_a_learner_whose_step_is_longer_than_the_period_takes_part_sometimes() -> None:
    seen = run(1.0, 4.0, fragments=2, period=1, overlap=1)
    assert seen.merged_into("learner-1") == {0, 1}
    assert seen.share("learner-1") > 0.1
