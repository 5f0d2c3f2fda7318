"""The norm gate: what is far larger than a fragment's last contributions is not merged as it is."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from decoupled_diloco.protocol.effects import Drop, Fold
from decoupled_diloco.protocol.gate import (
    SAMPLES_MAX,
    SAMPLES_MIN,
    Sample,
    grown,
    norm_limit,
    remember,
)


def test_the_limit_is_median_plus_k_mad() -> None:
    norms = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 19.0]
    samples = [(norm, 24) for norm in norms]
    middle = median(norms)
    deviation = median(abs(norm - middle) for norm in norms)
    assert (middle, deviation) == (5.0, 2.0)
    assert norm_limit(samples, 24, 3.0) == middle + 3.0 * deviation


def test_norms_that_are_all_alike_leave_room_for_the_next() -> None:
    assert norm_limit([(5.0, 24)] * 20, 24, 10.0) == pytest.approx(10.0)


def test_a_few_norms_are_no_reason_to_refuse() -> None:
    assert norm_limit([(1.0, 24)] * (SAMPLES_MIN - 1), 24, 10.0) is None
    assert norm_limit([(1.0, 24)] * 20, 24, 0.0) is None, "no gate"


@pytest.mark.parametrize("steps", [1, 6, 24, 96])
def test_no_honest_number_of_steps_is_refused(steps: int) -> None:
    """A random walk grows like the root of its steps, a straight line like them."""
    for power in (0.5, 0.75, 1.0):
        samples = [(since**power, since) for since in (12, 23, 24, 25, 24, 24, 23, 48)]
        limit = norm_limit(samples, steps, 10.0)
        assert limit is not None
        assert steps**power <= limit


def test_a_norm_in_other_numbers_of_steps() -> None:
    assert grown(2.0, 24, 24) == 2.0
    assert grown(2.0, 24, 48) == 4.0
    assert grown(2.0, 24, 6) == 1.0


def test_only_the_last_norms_are_remembered() -> None:
    samples: list[Sample] = []
    for number in range(100):
        remember(samples, float(number), 24)
    assert samples[0] == (100.0 - SAMPLES_MAX, 24)
    assert len(samples) == SAMPLES_MAX


def rounds(bench: Any, norms: list[float]) -> list[Any]:
    """One round for each norm, all of one learner; the orders that each body has led to."""
    orders = []
    for norm in norms:
        bench.step("a")
        orders.append(bench.body("a", norm=norm))
        if bench.machine.state.rounds:
            bench.merged()
    return orders


@pytest.mark.parametrize("oversized", ["refuse", "clip"])
def test_one_that_is_too_large_is_refused_or_clipped(shard_bench: Any, oversized: str) -> None:
    bench = shard_bench("a", fragments=1, period=1, norm_gate=10.0, oversized=oversized)
    *before, poisoned = rounds(bench, [1.0] * SAMPLES_MIN + [50.0])
    folds = [e for effects in before for e in effects if isinstance(e, Fold)]
    assert [fold.scale for fold in folds] == [1.0] * SAMPLES_MIN
    found = [effect for effect in poisoned if isinstance(effect, Fold | Drop)]
    reason = "its norm 50 in 1 steps exceeds 2, median + 10 · MAD of the fragment's last ones"
    if oversized == "clip":
        assert found[0].scale == pytest.approx(2.0 / 50.0)
        assert found[0].why == f"delivered in time; clipped: {reason}"
    else:
        assert isinstance(found[0], Drop)
        assert found[0].why == reason


def test_when_all_become_larger_the_limit_follows(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=1, period=1, norm_gate=10.0)
    orders = rounds(bench, [1.0] * SAMPLES_MIN + [50.0] * SAMPLES_MAX)
    folded = [any(isinstance(e, Fold) for e in effects) for effects in orders]
    first = SAMPLES_MIN
    assert not any(folded[first : first + SAMPLES_MIN // 2])
    assert all(folded[-SAMPLES_MAX // 2 :])
