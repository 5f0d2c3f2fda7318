"""The simulation of one learner, against one that steps through every instant."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from decoupled_diloco_plan.goodput.chip_learner import (
    DOWNSCALE,
    LOST,
    NEVER,
    RESTART,
    RUN,
    SHORT,
    UPSCALE,
    Habits,
    Life,
    Slices,
    Visits,
)

Failure = tuple[int, int, int]


def script(failures: list[Failure]) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yield these failures, and then none."""
    yield tuple(map(list, zip(*failures, strict=True)))  # type: ignore[misc]
    while True:
        yield [NEVER], [0], [1]


def by_events(
    slices: Slices, habits: Habits, failures: list[Failure], until: int
) -> Counter[tuple[int, int]]:
    life = Life(slices, habits, script(failures))
    life.advance(until)
    found: Counter[tuple[int, int]] = Counter()
    numbers = life.spans.tolist()
    end = 0
    for at in range(0, len(numbers), 5):
        start, stop, kind, chips, allocated = numbers[at : at + 5]
        assert start == end, "spans follow one another"
        assert allocated == slices.chips
        end = stop
        if start < until:
            found[kind, chips] += min(stop, until) - start
    return found


def by_instants(
    slices: Slices, habits: Habits, failures: list[Failure], until: int
) -> Counter[tuple[int, int]]:
    """Apply the same rules, one unit of time after another, chip by chip."""
    sizes = slices.sizes()
    there = set(range(slices.count))
    back: dict[int, int] = {}
    todo = list(failures)
    found: Counter[tuple[int, int]] = Counter()
    state, anchor, ends, joining = RUN, 0, 0, []

    def leave(now: int) -> bool:
        left = False
        while todo and todo[0][0] <= now:
            at, which, length = todo.pop(0)
            if which in there:
                there.discard(which)
                back[which] = max(now, at + length)
                left = True
        return left

    now = 0
    while now < until:
        if state != RUN and now == ends:
            if state == SHORT:
                leave(now)
                joining = [which for which, at in back.items() if at <= now]
                for which in joining:
                    del back[which]
                state, ends = UPSCALE, now + habits.upscale
                continue
            leave(now)
            there |= set(joining)
            joining = []
            if len(there) < habits.minimum:
                needed = habits.minimum - len(there)
                state, ends = SHORT, max(now, sorted(back.values())[needed - 1])
                continue
            state, anchor = RUN, now
        if state == RUN and (now - anchor) % habits.step == 0:
            if leave(now):
                state, ends, joining = DOWNSCALE, now + habits.downscale, []
                continue
            if back and min(back.values()) + habits.window <= now:
                joining = [which for which, at in back.items() if at <= now]
                for which in joining:
                    del back[which]
                state, ends = UPSCALE, now + habits.upscale
                continue
        found[state, sum(sizes[which] for which in there)] += 1
        now += 1
    return found


@pytest.mark.parametrize("seed", range(60))
def test_events_and_instants_give_the_same_account(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    slices = Slices(rng.randint(count, 20), count)
    habits = Habits(
        step=rng.randint(1, 6),
        downscale=rng.randint(1, 9),
        upscale=rng.randint(1, 9),
        window=rng.randint(0, 15),
        minimum=rng.randint(1, count),
    )
    mean = rng.choice([3, 10, 40])
    at, failures = 0, []
    for _ in range(300):
        at += rng.randint(1, 2 * mean)
        failures.append((at, rng.randrange(count), rng.randint(1, 60)))
    until = at - 10
    expected = by_instants(slices, habits, failures, until)
    assert by_events(slices, habits, failures, until) == expected
    assert sum(expected.values()) == until


def spans(life: Life) -> list[tuple[int, ...]]:
    numbers = life.spans.tolist()
    return [tuple(numbers[at : at + 4]) for at in range(0, len(numbers), 5)]


HABITS = Habits(step=10, downscale=30, upscale=20, window=50)


def test_a_failure_takes_effect_at_the_end_of_the_step_and_its_slice_returns() -> None:
    life = Life(Slices(4, 4), HABITS, script([(12, 1, 100)]))
    life.advance(400)
    assert spans(life)[:4] == [
        (0, 20, RUN, 4),
        (20, 50, DOWNSCALE, 3),
        (50, 170, RUN, 3),
        (170, 190, UPSCALE, 3),
    ]
    assert spans(life)[4][2:] == (RUN, 4)


def test_failures_during_a_pause_join_it_and_returned_slices_share_an_upscale() -> None:
    life = Life(Slices(4, 4), HABITS, script([(12, 1, 88), (25, 2, 110), (30, 2, 5)]))
    life.advance(400)
    assert [span[2:] for span in spans(life)] == [
        (RUN, 4),
        (DOWNSCALE, 3),
        (RUN, 2),
        (UPSCALE, 2),
        (RUN, 4),
    ]


def test_sudden_failures_lose_the_current_step() -> None:
    habits = Habits(step=10, downscale=30, upscale=20, window=50, sudden=True)
    life = Life(Slices(4, 4), habits, script([(12, 1, 500)]))
    life.advance(50)
    assert spans(life)[:3] == [(0, 10, RUN, 4), (10, 12, LOST, 4), (12, 42, DOWNSCALE, 3)]


def test_non_elastic_training_loses_the_work_since_its_checkpoint() -> None:
    habits = Habits(step=10, downscale=30, upscale=30, window=0, spare=True, checkpoint=40)
    life = Life(Slices(4, 4), habits, script([(95, 1, 500), (110, 2, 5), (140, 0, 1)]))
    life.advance(300)
    assert spans(life)[:5] == [
        (0, 80, RUN, 4),
        (80, 100, LOST, 4),
        (100, 130, RESTART, 4),
        (130, 140, LOST, 4),
        (140, 170, RESTART, 4),
    ]


def test_a_learner_below_its_minimum_waits_for_slices() -> None:
    habits = Habits(step=10, downscale=30, upscale=20, window=50, minimum=3)
    life = Life(Slices(4, 4), habits, script([(5, 1, 100), (6, 2, 300)]))
    life.advance(400)
    assert spans(life)[:5] == [
        (0, 10, RUN, 4),
        (10, 40, DOWNSCALE, 2),
        (40, 105, SHORT, 2),
        (105, 125, UPSCALE, 2),
        (125, 365, RUN, 3),
    ]


def test_a_failure_in_a_slice_that_is_away_loses_no_step() -> None:
    habits = Habits(step=10, downscale=30, upscale=20, window=50, sudden=True)
    life = Life(Slices(4, 4), habits, script([(12, 1, 500), (55, 1, 5), (57, 1, 5)]))
    life.advance(500)
    assert spans(life)[3:5] == [(42, 562, RUN, 3), (562, 582, UPSCALE, 3)]


def test_a_slice_preempted_during_its_repair_stays_away() -> None:
    visits = Visits(heap=[(25, 1, 1000)])
    life = Life(Slices(4, 4), HABITS, script([(12, 1, 30)]), visits)
    life.advance(1200)
    joined = [start for start, _, kind, chips in spans(life) if (kind, chips) == (RUN, 4)]
    assert joined[0] == 0
    assert joined[1] >= 1025 + HABITS.window, "repaired at 42, but preempted until 1025"


def test_a_preemption_of_an_absent_slice_starts_no_upscale() -> None:
    visits = Visits(heap=[(55, 2, 1000)])
    life = Life(Slices(4, 4), HABITS, script([(12, 1, 1), (13, 2, 500)]), visits)
    life.advance(200)
    upscales = [start for start, _, kind, _ in spans(life) if kind == UPSCALE]
    assert upscales[0] == 70, "the window of the slice that returned at 20 is over"
