"""The norm of a contribution, and the scaling of a contribution."""

from __future__ import annotations

import pytest
import torch

from decoupled_diloco.merge import Accumulator, Contribution, Segment

SEGMENTS = (Segment(0, 5, "rda"), Segment(5, 8, "mean"), Segment(8, 12, "rda"))


def contribution(vector: torch.Tensor, cut: int = 7) -> Contribution:
    made = Contribution(vector.numel(), SEGMENTS)
    made.add(cut, vector[cut:])
    made.add(0, vector[:cut])
    return made


def test_the_norm_includes_mean_segments() -> None:
    vector = torch.linspace(-3, 4, 12)
    assert contribution(vector).norm == pytest.approx(float(vector.norm()), rel=1e-6)


def test_a_scaled_contribution_merges_as_the_scaled_vector() -> None:
    vector, other = torch.linspace(-3, 4, 12), torch.linspace(2, -1, 12)
    scaled = contribution(vector)
    scaled.scale(0.25)
    assert scaled.norm == pytest.approx(0.25 * float(vector.norm()), rel=1e-6)
    ours, theirs = Accumulator(12, SEGMENTS), Accumulator(12, SEGMENTS)
    ours.add_contribution(scaled, 2.0)
    theirs.add(0.25 * vector, 2.0)
    for accumulator in (ours, theirs):
        accumulator.add(other, 1.0)
    torch.testing.assert_close(ours.result(), theirs.result())
    assert torch.equal(vector, torch.linspace(-3, 4, 12)), "what was handed in stays"
