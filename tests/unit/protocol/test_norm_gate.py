"""The norm gate: a contribution far above the fragment's last norms is clipped or refused."""

from __future__ import annotations

from math import isfinite
from statistics import median
from typing import Any

import pytest

from decoupled_diloco.protocol.messages import Drop, Fold, Outcome, Send
from decoupled_diloco.protocol.norm_gate import (
    OWN_MAX,
    OWN_MIN,
    OWN_SIZE_MAX,
    SAMPLES_FULL,
    SAMPLES_MAX,
    SAMPLES_MIN,
    grown,
    norm_limit,
    remember,
    remember_own,
)
from decoupled_diloco.protocol.syncer_state import Sample


def test_the_limit_is_median_plus_k_mad() -> None:
    norms = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 19.0]
    samples = [(norm, 24) for norm in norms]
    middle = median(norms)
    deviation = median(abs(norm - middle) for norm in norms)
    assert (middle, deviation) == (5.0, 2.0)
    assert norm_limit(samples, [], 24, 3.0) == (middle + 3.0 * deviation, middle)


def test_norms_that_are_all_alike_leave_room_for_the_next() -> None:
    assert norm_limit([(5.0, 24)] * 20, [], 24, 10.0) == pytest.approx((10.0, 5.0))


def test_the_first_norms_give_a_higher_limit_or_none() -> None:
    assert norm_limit([(1.0, 24)] * (SAMPLES_MIN - 1), [], 24, 10.0) is None
    limits = []
    for count in range(SAMPLES_MIN, SAMPLES_FULL + 2):
        found = norm_limit([(1.0, 24)] * count, [], 24, 10.0)
        assert found is not None
        limits.append(found[0])
    assert limits[0] == pytest.approx(1 + 8 / 3)
    assert limits == sorted(limits, reverse=True)
    assert limits[-2:] == pytest.approx([2.0, 2.0])
    one_bad = norm_limit([(1.0, 24), (10.0, 24), (1.1, 24)], [], 24, 10.0)
    assert one_bad is not None
    assert one_bad[0] < 5.0
    assert norm_limit([(1.0, 24)] * 20, [], 24, 0.0) is None, "no gate"


@pytest.mark.parametrize("steps", [1, 6, 24, 96])
def test_no_honest_number_of_steps_is_refused(steps: int) -> None:
    """A random walk grows with the root of its steps, a straight line in proportion to them."""
    for power in (0.5, 0.75, 1.0):
        samples = [(since**power, since) for since in (12, 23, 24, 25, 24, 24, 23, 48)]
        found = norm_limit(samples, [], steps, 10.0)
        assert found is not None
        assert steps**power <= found[0]


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
    """Run one round per norm, all of one learner; return the orders of each payload."""
    orders = []
    for norm in norms:
        bench.step("a")
        orders.append(bench.body("a", norm=norm))
        if bench.machine.state.rounds:
            bench.merged()
    return orders


@pytest.mark.parametrize("oversized", ["refuse", "clip"])
def test_a_norm_above_the_limit_is_refused_or_clipped(shard_bench: Any, oversized: str) -> None:
    bench = shard_bench("a", fragments=1, period=1, norm_gate=10.0, oversized=oversized)
    *before, poisoned = rounds(bench, [1.0] * SAMPLES_FULL + [50.0])
    folds = [e for effects in before for e in effects if isinstance(e, Fold)]
    assert [fold.scale for fold in folds] == [1.0] * SAMPLES_FULL
    found = [effect for effect in poisoned if isinstance(effect, Fold | Drop)]
    reason = "norm=50 in 1 steps exceeds the limit of 2; the usual norm of this fragment is 1"
    if oversized == "clip":
        assert found[0].scale == pytest.approx(2.0 / 50.0)
        assert found[0].why == f"delivered in time; clipped: {reason}"
    else:
        assert isinstance(found[0], Drop)
        assert found[0].why == reason
        (outcome,) = [
            e.message for e in poisoned if isinstance(e, Send) and type(e.message) is Outcome
        ]
        assert outcome.verdict == "unfit"


def scales(orders: list[list[Any]]) -> list[float]:
    """Return the factor of each payload's values; 0: it was refused."""
    return [sum(e.scale for e in effects if isinstance(e, Fold)) for effects in orders]


def test_clipping_is_the_default(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=1, period=1, norm_gate=10.0)
    assert scales(rounds(bench, [1.0] * SAMPLES_FULL + [50.0]))[-1] == pytest.approx(2.0 / 50.0)


def test_when_all_become_larger_the_limit_follows(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=1, period=1, norm_gate=10.0, oversized="refuse")
    found = scales(rounds(bench, [1.0] * SAMPLES_FULL + [50.0] * SAMPLES_MAX))
    first = SAMPLES_FULL
    assert not any(found[first : first + SAMPLES_FULL // 2])
    assert all(found[-SAMPLES_MAX // 2 :])


@pytest.mark.parametrize(
    ("own", "limit"),
    [
        ([2.5] * (OWN_MIN - 1), 2.0),
        ([2.5] * OWN_MIN, 5.0),
        ([1.0, 2.5, 9.0], 5.0),
        ([0.1] * OWN_MIN, 2.0),
    ],
    ids=[
        "too few",
        "its median counts",
        "not its largest",
        "a small learner has the others' limit",
    ],
)
def test_a_learner_with_larger_norms_has_a_higher_limit(own: list[float], limit: float) -> None:
    found = norm_limit([(3.0, 24)] * SAMPLES_FULL, own, 24, 10.0)
    assert found == pytest.approx((3.0 * limit, 3.0))


def test_only_its_last_sizes_are_remembered_in_usual_norms() -> None:
    own: list[float] = []
    for size in range(1, 2 * OWN_MAX):
        remember_own(own, 0.5 * size, 5.0)
    assert own == pytest.approx([0.1 * size for size in range(OWN_MAX, 2 * OWN_MAX)])


@pytest.mark.parametrize("size", [1.01 * OWN_SIZE_MAX, 10.0, 1e300])
def test_a_learner_that_is_always_much_larger_has_no_limit_of_its_own(size: float) -> None:
    own: list[float] = []
    for _ in range(OWN_MIN):
        remember_own(own, size, 1.0)
    assert all(map(isfinite, own))
    assert norm_limit([(1.0, 24)] * SAMPLES_FULL, own, 24, 10.0) == pytest.approx((2.0, 1.0))


def merged_norms(bench: Any, norms: dict[str, float], rounds: int) -> list[list[float]]:
    """Run rounds with a norm for each learner; return the folded norms of each round."""
    found = []
    for _ in range(rounds):
        for name in norms:
            bench.step(name)
        (fragment,) = bench.machine.state.rounds
        merged = []
        for name, norm in norms.items():
            bench.body(name, fragment, norm=norm)
            (fold,) = bench.orders(Fold)
            merged.append(fold.scale * norm)
        bench.merged(fragment)
        found.append(merged)
    return found


def test_a_learner_of_ten_times_the_size_counts_like_the_others(shard_bench: Any) -> None:
    """Also in the first round of another fragment, where it arrives before there is a limit."""
    norms = {"bad": 10.0, "a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
    bench = shard_bench(*norms, fragments=2, period=2, norm_gate=10.0, participants="all", quorum=5)
    early = dict(list(reversed(norms.items())))  # first in the order of arrival
    merged = merged_norms(bench, early, 1)
    assert merged[0][-1] < 4.0, "clipped by the first norms of the others"
    merged = merged_norms(bench, norms, 12)
    first = [each[0] for each in merged]
    assert first[0] == pytest.approx(1.0), "by its size in the other fragment"
    assert max(first[4:]) == pytest.approx(1.0)
    assert {norm for each in merged for norm in each[1:]} == {1.0}, "no honest one is clipped"


def test_a_learner_that_was_larger_once_or_twice_is_not_clipped(shard_bench: Any) -> None:
    norms = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 3.4}
    bench = shard_bench(*norms, fragments=4, period=4, norm_gate=10.0, participants="all", quorum=4)
    assert merged_norms(bench, norms, 1) == [[1.0, 1.0, 1.0, 3.4]], "below the limit of 3.7"
    usual = {"d": 0.5, "a": 1.0, "b": 1.0, "c": 1.0}
    assert merged_norms(bench, usual, 3) == [[0.5, 1.0, 1.0, 1.0]] * 3


def test_a_larger_learner_is_clipped_until_its_past_is_known(
    shard_bench: Any,
) -> None:
    """Three learners of norm 1, and one whose data give 2.5: it is never refused."""
    names = ("a", "b", "c", "large")
    bench = shard_bench(*names, fragments=1, period=1, norm_gate=10.0, participants="all", quorum=4)
    found = []
    for _ in range(8):
        for name in names:
            bench.step(name)
        for name in names:
            bench.body(name, norm=2.5 if name == "large" else 1.0)
            (fold,) = bench.orders(Fold)
            if name == "large":
                found.append(fold.scale)
            else:
                assert fold.scale == 1.0
        bench.merged()
    assert min(found) == pytest.approx(2.0 / 2.5), "mildly"
    assert found[OWN_MIN:] == [1.0] * (8 - OWN_MIN)
