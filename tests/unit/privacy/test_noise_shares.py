"""An opened sum has the promised noise, whichever learners drop out (rules 24 and 25)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge.fixed_point import FixedPoint, Opened, opened, quantize, reduced
from decoupled_diloco.merge.fragments import Segment
from decoupled_diloco.privacy.dp import Mechanism
from unit.privacy.sums import SecureSum

N = 20_000
SEGMENTS = (Segment(0, N, "mean"),)
MECHANISM = Mechanism(clip=2.0, noise_multiplier=3.0, numel=4 * N)  # one of four equal fragments
DEVIATION = MECHANISM.noise_multiplier * MECHANISM.clip


def sum_of(count: int, seed: int = 0, *, quiet: bool = True) -> SecureSum:
    sums = SecureSum(count, seed=seed, segments=SEGMENTS, mechanism=MECHANISM)
    if quiet:
        sums.vectors = {name: torch.zeros(N) for name in sums.names}
    return sums


def run(sums: SecureSum, dropped: int = 0) -> Opened:
    """Run a sum whose last learners drop out before they send their integers."""
    sums.claim()
    sums.share()
    sums.mask(dropped=sums.names[len(sums.names) - dropped :])
    sums.open().unmask(sums.total)
    ones = [1.0] * len(sums.survivors)
    return opened(sums.form, SEGMENTS, sums.total, sums.base, ones, 1.0, sums.cohort.bounds)


def noise_of(sums: SecureSum, dropped: int = 0) -> Tensor:
    found = run(sums, dropped).accumulator.state_dict()["sums"]
    return found.double()


@pytest.fixture(autouse=True)
def equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with weighting="uniform", which `[privacy.dp]` requires."""
    monkeypatch.setattr("unit.privacy.sums.token_weight", lambda tokens, steps: 1.0)


@pytest.mark.parametrize(("count", "dropped"), [(2, 0), (6, 2), (6, 1), (6, 0), (9, 4)])
def test_a_sum_has_at_least_the_noise_whoever_drops_out(count: int, dropped: int) -> None:
    sums = sum_of(count)
    noise = noise_of(sums, dropped)
    times = (count - dropped) / sums.cohort.needed
    assert times >= 1
    scaled = (noise / (DEVIATION * math.sqrt(times))).numpy()
    assert stats.kstest(scaled, "norm").pvalue > 1e-3
    assert scaled.std() == pytest.approx(1.0, abs=0.02)


def test_the_least_number_of_survivors_has_exactly_the_noise() -> None:
    sums = sum_of(6)
    noise = noise_of(sums, 2)
    assert sums.cohort.needed == len(sums.survivors) == 4
    assert float(noise.std()) == pytest.approx(DEVIATION, rel=0.02)


def test_the_noise_consists_of_whole_units() -> None:
    sums = sum_of(4)
    run(sums)
    units = reduced(sums.form, sums.total.elements)
    assert units.dtype == torch.int32
    unit = MECHANISM.clip_of(N) / sums.form.one
    assert float(units.double().std()) == pytest.approx(DEVIATION * math.sqrt(4 / 3) / unit, 0.02)


def test_learners_fragments_and_rounds_have_noise_of_their_own() -> None:
    drawn = []
    for seed in range(2):
        sums = sum_of(3, seed)
        sums.claim()
        drawn += [sums.integers(name).elements for name in sums.names for _ in range(2)]
    matrix = np.corrcoef(torch.stack(drawn).double().numpy())
    assert np.abs(matrix - np.eye(len(drawn))).max() < 0.04


@pytest.mark.parametrize("colluding", [1, 3])
def test_colluding_members_leave_the_noise_of_the_others(colluding: int) -> None:
    """Of the least number m of survivors, k can subtract their own shares: 1 - k/m is left."""
    sums = sum_of(6)
    sums.claim()
    shares = [sums.integers(name).elements for name in sums.names[:4]]
    left = torch.stack(shares[colluding:]).sum(0).double() * MECHANISM.clip_of(N) / sums.form.one
    expected = DEVIATION * math.sqrt(1 - colluding / sums.cohort.needed)
    assert float(left.std()) == pytest.approx(expected, rel=0.02)


def test_a_sum_is_that_of_the_contributions_and_the_noise() -> None:
    sums = sum_of(3, quiet=False)
    for vector in sums.vectors.values():
        vector.mul_(0.4 * MECHANISM.clip_of(N) / vector.norm())  # none is clipped
    total = noise_of(sums)
    signal = torch.stack(list(sums.vectors.values())).sum(0).double()
    left = (total - signal) / (DEVIATION * math.sqrt(3 / 2))
    assert stats.kstest(left.numpy(), "norm").pvalue > 1e-3
    one = sums.vectors[sums.names[0]].double()
    found = float(total @ one / (one @ one))
    error = DEVIATION * math.sqrt(3 / 2) / float(one.norm())
    assert abs(found - 1.0) < 4 * error, "each contribution is in the sum once"


def test_nothing_but_the_elements_depends_on_a_contribution() -> None:
    """The norms would be opened without noise."""
    sums = sum_of(3, quiet=False)
    sums.claim()
    for name in sums.names:
        assert sums.integers(name).scalars.tolist()[1:] == [0]
    result = run(sum_of(3, quiet=False))
    assert result.norms == (0.0,)


@pytest.mark.parametrize("bits", [8, 12, 16, 24])
@pytest.mark.parametrize("size", [0.1, 1.0, 1000.0])
def test_no_contribution_is_longer_than_the_clip(bits: int, size: float) -> None:
    """Rounding to the nearest integer would lengthen it: by half a unit in each element."""
    form, bound = FixedPoint(bits, 32), MECHANISM.clip_of(N)
    rng = torch.Generator().manual_seed(bits)
    for share in (1.0, 0.4):
        for values in (torch.randn(N, generator=rng), torch.ones(N)):
            values.mul_(size * bound / values.norm())
            args = (values, torch.zeros(N), share, (bound,))
            found = quantize(form, SEGMENTS, *args, private=True).elements
            squares = int((found.long() ** 2).sum())
            assert squares <= (share * form.one) ** 2
            if size == 1.0 and bits == 24:
                assert math.sqrt(squares) > 0.99 * share * form.one


@pytest.mark.parametrize(
    ("bits", "learners", "noise", "expected"),
    [
        (None, 8, 0.0, FixedPoint(24, 32)),
        (None, 8, 20.0, FixedPoint(24, 32)),
        (None, 8, 100.0, FixedPoint(21, 32)),
        (12, 8, 100.0, FixedPoint(12, 24)),
    ],
)
def test_the_format_has_room_for_the_noise(
    bits: int | None, learners: int, noise: float, expected: FixedPoint
) -> None:
    form = FixedPoint.of(bits, learners, noise)
    assert form == expected
    most = (learners + 12 * noise) * form.one
    assert most < 2 ** (form.modulus_bits - 1)


def test_a_format_without_room_for_the_noise_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        FixedPoint.of(24, 8, 100.0)
    assert str(error.value) == (
        "bits=24 in [privacy] is out of range: with 8 learners and the noise of [privacy.dp] it "
        "must be 8 to 21, so that a sum fits into 32 bits"
    )
    with pytest.raises(ConfigError) as error:
        FixedPoint.of(None, 8, 2e6)
    assert str(error.value) == (
        "a sum of 8 contributions with noise of 2e+06 times the clip of a fragment does not fit "
        "into 32 bits: lower noise_multiplier in [privacy.dp], or divide the model into fewer or "
        "more equal fragments"
    )
