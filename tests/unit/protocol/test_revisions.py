"""H and τ follow the links, within the user's limits, and do not flap (rule 20)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from decoupled_diloco.errors import MethodError
from decoupled_diloco.protocol.adapt import (
    LATE_MAX,
    REVIEWS_WELL,
    AdaptLimits,
    Reviser,
    demand_of,
    fitting,
    period_at,
    scheduled,
    ticks_apart,
)
from decoupled_diloco.protocol.coordinator_machine import SCHEDULE_FAILED, CoordinatorMachine
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.link_measurements import follow, is_due, record
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    Demand,
    Note,
    Persist,
    Progress,
    Received,
    Revision,
)

LIMITS = AdaptLimits((24, 192), (2, 16))
FRAGMENTS = 24
APART = LIMITS.period[0] // 2


class Run:
    """A coordinator's clock, and the demand that one shard reports at each tick."""

    def __init__(self, limits: AdaptLimits = LIMITS) -> None:
        self.limits = limits
        self.reviser = Reviser()
        self.plan = Revision(0, 0, limits.period[0], limits.overlap[0])
        self.clock = 0
        self.made: list[tuple[Revision, str]] = []

    def go(self, ticks: int, body: float, answer: float = 1.0) -> Revision:
        """Run ticks in which a payload takes this number of steps."""
        for _ in range(ticks):
            self.clock += 1
            self.reviser.record(0, Demand(body, answer))
            found = self.reviser.review(self.clock, self.limits, self.plan, FRAGMENTS)
            if found is not None:
                self.plan = found[0]
                self.made.append(found)
        return self.plan


@pytest.mark.parametrize(
    ("body", "period"),
    [(0.1, 24), (0.94, 24), (0.96, 48), (1.89, 48), (1.91, 96), (3.9, 192), (99.0, 192)],
)
def test_the_smallest_period_that_the_links_carry(body: float, period: int) -> None:
    run = Run()
    assert run.go(500, body).period == period
    assert len(run.made) == (period > 24)


@pytest.mark.parametrize(
    ("answer", "overlap"), [(0.3, 2), (1.59, 2), (1.61, 3), (4.0, 5), (50.0, 16)]
)
def test_the_smallest_overlap_in_which_payloads_arrive(answer: float, overlap: int) -> None:
    assert Run().go(500, 0.1, answer).overlap == overlap


def test_the_overlap_stays_below_the_period() -> None:
    run = Run(AdaptLimits((4, 8), (1, 20)))
    run.go(500, 0.01, 100.0)
    assert (run.plan.period, run.plan.overlap) == (8, 7)


def test_the_period_is_longer_than_the_needed_overlap() -> None:
    run = Run(AdaptLimits((1, 64), (0, 16)))
    run.go(200, 0.005, 1.2)
    assert (run.plan.period, run.plan.overlap) == (4, 2)


def test_queued_answers_do_not_raise_the_overlap() -> None:
    """More is due than the greatest period carries: τ follows one payload alone."""
    run = Run()
    for answer in range(10, 60):
        run.go(50, 9.0, float(answer))
    assert (run.plan.period, run.plan.overlap) == (192, 12)
    assert len(run.made) == 1


def test_a_slow_moment_changes_nothing() -> None:
    run = Run()
    run.go(100, 0.5)
    run.go(APART - 1, 50.0)
    run.go(200, 0.5)
    assert not run.made


def test_it_takes_the_documented_number_of_reviews() -> None:
    run = Run()
    run.go(1 + LATE_MAX * APART - 1, 2.0)
    assert not run.made
    run.go(1, 2.0)
    ((plan, why),) = run.made
    assert (plan.number, plan.period) == (1, 96)
    assert plan.tick > run.clock, "it applies from a tick that no shard has passed"
    assert why == (
        "a payload occupies a link for 2 steps and arrives 1 steps after its request: "
        "this is too much"
    )


def test_a_link_that_recovers_gets_the_short_period_again() -> None:
    run = Run()
    assert run.go(100, 3.9).period == 192
    apart = ticks_apart(LIMITS, run.plan, FRAGMENTS)
    run.go(2 + REVIEWS_WELL * apart + apart, 0.2)
    assert (run.plan.period, run.plan.number) == (24, 2)
    assert run.made[-1][1].endswith("this leaves room")


def test_between_too_much_and_room_nothing_changes() -> None:
    """1.3 steps fit a period of 48; for 24 they would have to be half a step."""
    run = Run()
    run.go(100, 1.3)
    number = run.plan.number
    run.go(2000, 0.51)
    assert (run.plan.number, run.plan.period) == (number, 48)


def test_an_unstable_link_does_not_flap() -> None:
    run, chance = Run(), random.Random(1)
    for _ in range(400):
        run.go(chance.randint(20, 200), chance.choice([0.2, 2.0]))
    assert len(run.made) <= 20, f"{len(run.made)} revisions in {run.clock} ticks"


def test_the_slowest_shard_counts() -> None:
    run = Run()
    run.reviser.record(1, Demand(1.2, 3.0))
    run.go(100, 0.1, 0.5)
    assert (run.plan.period, run.plan.overlap) == (48, 4)


def test_without_measurements_nothing_changes() -> None:
    reviser, plan = Reviser(), Revision(0, 0, 24, 2)
    for clock in range(200):
        assert reviser.review(clock, LIMITS, plan, FRAGMENTS) is None


def test_the_demand_excludes_the_slowest_learners() -> None:
    links = [(0.2, 1.0), (0.4, 2.0), (8.0, 9.0), (3.0, 1.5)]
    assert demand_of(links, 0.75, 0.5) == Demand(3.0 / 0.5, 2.0 / 0.5)
    assert demand_of(links, 1.0, 0.5) == Demand(16.0, 18.0)
    assert demand_of([], 0.75, 0.5) is demand_of(links, 0.75, 0.0) is None


def test_limits_that_are_one_value_stay() -> None:
    limits = AdaptLimits((24, 24), (2, 2))
    assert limits.periods == (24,)
    assert fitting(limits, FRAGMENTS, Demand(99.0, 99.0), 24, busy=0.95, filled=0.8) == (24, 2)
    run = Run(limits)
    run.go(500, 99.0, 99.0)
    assert not run.made


def test_an_older_revision_is_ignored() -> None:
    state = LearnerState(fragments=[], shards=[])
    first, second = Revision(1, 10, 48, 2), Revision(2, 20, 24, 2)
    assert record(state, second)
    assert not record(state, first)
    assert not record(state, second)
    assert state.next_revisions == (second,)


def test_revisions_apply_in_order_from_their_ticks() -> None:
    state, options = LearnerState(fragments=[], shards=[]), Options(period=24)
    assert record(state, Revision(1, 10, 48, 2))
    assert record(state, Revision(2, 20, 96, 3))
    held = []
    for tick in range(25):
        while is_due(state, tick):
            options = follow(state, options)
        held.append(options.period)
    assert held == [24] * 10 + [48] * 10 + [96] * 5


def test_a_revision_changes_only_when_fragments_are_due() -> None:
    options = Options(fragments=4, period=4, overlap=1, adapt=LIMITS)
    other = options.revised(Revision(1, 10, 8, 3))
    assert [options.due(tick) for tick in range(4)] == [(0,), (1,), (2,), (3,)]
    assert [other.due(tick) for tick in range(8)] == [(0,), (), (1,), (), (2,), (), (3,), ()]
    assert (other.period, other.overlap, other.quorum) == (8, 3, options.quorum)


def two_phases(step: int, steps: int | None) -> int:
    assert steps is not None
    return 24 if step < 0.8 * steps else 8


def test_a_schedule_becomes_revisions_that_apply_at_their_steps() -> None:
    present = Revision(0, 0, 24, 2)
    found = [scheduled(two_phases, 100, clock, present) for clock in range(79)]
    assert found[:78] == [None] * 78
    assert found[78] == (Revision(1, 80, 8, 2), "the schedule returns 8 for step 80")
    later = Revision(1, 80, 8, 2)
    assert not any(scheduled(two_phases, 100, clock, later) for clock in range(79, 100))


def test_a_schedule_waits_until_the_last_revision_applies() -> None:
    plan, plans = Revision(0, 0, 24, 2), []
    for clock in range(20):
        found = scheduled(lambda step, steps: 24 - step // 2, None, clock, plan)
        if found is not None:
            assert clock >= plan.tick
            plan = found[0]
            plans.append((plan.tick, plan.period))
    assert plans == [(tick, 24 - tick // 2) for tick in range(2, 22, 2)]


@pytest.mark.parametrize("value", [2, 0, -1, 100_001, 3.0, "8", None, True])
def test_a_schedule_returns_an_integer_above_the_overlap(value: Any) -> None:
    assert period_at(lambda step, steps: 3, 5, None, overlap=2) == 3
    with pytest.raises(MethodError) as error:
        period_at(lambda step, steps: value, 5, 9, overlap=2)
    assert str(error.value) == (
        f"schedule returned {value!r} for step=5, steps=9: return an integer from 3 "
        "(overlap_steps + 1) to 100000"
    )


def coordinator(schedule: Any) -> CoordinatorMachine:
    machine = CoordinatorMachine(Options(period=24, schedule=schedule, max_steps=100))
    machine.state.phase = "running"
    return machine


def test_the_coordinator_announces_what_the_schedule_returns() -> None:
    machine = coordinator(two_phases)
    assert not machine.handle(1.0, Received("shard-0", Progress(77, 5)))
    persist, note, *_ = machine.handle(2.0, Received("shard-0", Progress(78, 5)))
    assert persist == Persist("the schedule returns 8 for step 80")
    assert isinstance(note, Note)
    assert note.text == "revision 1: H = 8, τ = 2 from step 80 on (before: H = 24, τ = 2)"
    assert machine.state.revision == Revision(1, 80, 8, 2)


def test_a_schedule_that_fails_keeps_the_period_with_one_warning() -> None:
    def fails(step: int, steps: int | None) -> int:
        return 24 // (12 - step)

    machine = coordinator(fails)
    machine.state.revision = Revision(1, 0, 12, 2)
    notes = [
        each
        for clock in range(10, 13)
        for each in machine.handle(1.0, Received("shard-0", Progress(clock, 5)))
    ]
    reason = (
        "schedule raises ZeroDivisionError('integer division or modulo by zero') for step=12, "
        "steps=100: correct the function"
    )
    assert notes == [Note(SCHEDULE_FAILED, reason, warns=True)]
    assert machine.state.revision == Revision(1, 0, 12, 2)
