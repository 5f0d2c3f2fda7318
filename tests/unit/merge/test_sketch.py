"""Sketches distinguish nearly parallel contributions from others."""

from __future__ import annotations

import pytest
import torch

from decoupled_diloco.merge.sketch import NEARLY_PARALLEL, WIDTH, are_alike, cosine, sketch


@pytest.mark.parametrize("numel", [1, 12, WIDTH - 1, 2 * WIDTH, 9 * WIDTH + 5, 400 * WIDTH])
def test_a_small_change_is_nearly_parallel_and_other_data_are_not(numel: int) -> None:
    rng = torch.Generator().manual_seed(numel)
    d = torch.randn(numel, generator=rng)
    other = torch.randn(numel, generator=rng)
    assert cosine(sketch(d), sketch(d + 0.02 * other)) > NEARLY_PARALLEL
    assert cosine(sketch(d), sketch(3 * d)) == pytest.approx(1.0, abs=1e-5)
    if numel > 1000:
        assert abs(cosine(sketch(d), sketch(other))) < 0.2
        assert cosine(sketch(d), sketch(d + 0.5 * other)) < NEARLY_PARALLEL


def test_a_sparse_contribution_equals_itself() -> None:
    d = torch.zeros(100 * WIDTH)
    d[:: WIDTH + 1] = 1.0
    assert cosine(sketch(d), sketch(d.clone())) == pytest.approx(1.0, abs=1e-5)
    assert cosine(sketch(d), sketch(torch.zeros_like(d))) == 0.0


def test_parallel_rounds_of_one_learner_prevent_a_conclusion() -> None:
    rng = torch.Generator().manual_seed(1)
    way, noise, more = (torch.randn(999, generator=rng) for _ in range(3))
    assert are_alike(way, way, noise)
    assert are_alike(way, way + 0.01 * noise, way + 0.1 * more), "closer than its own one before"
    assert not are_alike(way, way + 0.01 * noise, way + 0.01 * more)
    assert not are_alike(way, way, -way), "nor where it goes back and forth"
