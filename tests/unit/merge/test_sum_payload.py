"""The payload of a relay's sum: it stands for the contributions that were folded into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.errors import MergeError, ProtocolError
from decoupled_diloco.merge import digest
from decoupled_diloco.merge.accumulate import Accumulator
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.merge.sum_payload import read_sum, sum_nbytes, write_sum
from unit import plans


def plan_of(codec: str = "fp32", method: str = "rda", **fields: Any) -> MergePlan:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 6), nn.BatchNorm1d(6))
    return plans.plan_of(model, codec, method, **fields)


def contributions(plan: MergePlan, count: int = 5) -> list[tuple[Tensor, float]]:
    rng = torch.Generator().manual_seed(3)
    numel = plan.fragments[0].numel
    return [(torch.randn(numel, generator=rng) * 10.0**-n, 7.0 * 3.0**n) for n in range(count)]


def folded(plan: MergePlan, parts: list[tuple[Tensor, float]]) -> Accumulator:
    accumulator = plan.accumulator(0)
    assert isinstance(accumulator, Accumulator)
    for vector, weight in parts:
        accumulator.add(vector.clone(), weight)
    return accumulator


@pytest.mark.parametrize("buffers", ["mean", "one"])
@pytest.mark.parametrize("method", ["rda", "mean"])
def test_sums_of_two_sites_give_the_merge_of_all(method: str, buffers: Any) -> None:
    plan = plan_of(method=method, buffers=buffers)
    parts = contributions(plan)
    total = folded(plan, parts[:1])
    for site in (parts[1:3], parts[3:]):
        body, announced, left = write_sum(plan, 0, folded(plan, site), ())
        assert left is None
        assert body.numel() == sum_nbytes(plan, 0)
        total.combine(read_sum(plan, 0, body, announced))
    assert total.count == len(parts)
    torch.testing.assert_close(total.result(), folded(plan, parts).result(), rtol=1e-6, atol=1e-9)


def test_an_exact_codec_leaves_no_residual() -> None:
    plan = plan_of("bf16", feedback=1.0)
    assert write_sum(plan, 0, folded(plan, contributions(plan)), ())[2] is None


@pytest.mark.parametrize(("codec", "error"), [("int8", 0.01), ("int4", 0.15)])
def test_a_coarse_codec_leaves_a_residual_that_the_next_sum_sends(codec: str, error: float) -> None:
    plan = plan_of(codec, feedback=1.0)
    parts = contributions(plan)
    exact = folded(plan, parts).state_dict()["sums"].clone()
    trained = 10 * 4 + 6 * 4 + 6 + 12
    sent, residuals = torch.zeros_like(exact), tuple[Tensor, ...]()
    for _ in range(8):
        body, announced, left = write_sum(plan, 0, folded(plan, parts), residuals)
        sent += read_sum(plan, 0, body, announced).state_dict()["sums"]
        assert left is not None
        residuals = (left,)
    wrong = (sent / 8 - exact)[:trained]
    assert float(wrong.norm()) < error / 4 * float(exact[:trained].norm())
    torch.testing.assert_close(sent + residuals[0], 8 * exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1e-8, 1e-3, 1e3])
def test_a_block_of_a_codec_suits_all_segments(size: float) -> None:
    """A block extends over an RDA segment, whose sum is of directions, and a mean segment."""
    plan = plan_of("int4")
    numel, parts = plan.fragments[0].numel, []
    for vector, weight in contributions(plan):
        parts.append((vector / vector.norm() * size * numel**0.5, weight))
    exact = folded(plan, parts)
    body, announced, _ = write_sum(plan, 0, folded(plan, parts), ())
    merged, wanted = read_sum(plan, 0, body, announced).result(), exact.result()
    assert {segment.merge for segment in exact.segments} == {"rda", "mean", "buffer"}
    for segment in exact.segments:
        own = slice(segment.start, segment.stop)
        assert float((merged - wanted)[own].norm()) < 0.2 * float(wanted[own].norm())


@pytest.mark.parametrize("weight", [1e-20, 1.0, 1e20])
def test_the_range_of_the_codec_does_not_depend_on_the_weights(weight: float) -> None:
    plan = plan_of("fp4-e3m0")
    parts = [(vector, weight) for vector, _ in contributions(plan, 3)]
    body, announced, _ = write_sum(plan, 0, folded(plan, parts), ())
    merged = read_sum(plan, 0, body, announced).result()
    assert torch.isfinite(merged).all()
    exact = folded(plan, parts).result()
    assert float((merged - exact).norm()) < 0.5 * float(exact.norm())


def test_a_payload_that_was_changed_is_rejected() -> None:
    plan = plan_of()
    body, announced, _ = write_sum(plan, 0, folded(plan, contributions(plan)), ())
    body[100] ^= 1
    with pytest.raises(ProtocolError, match="was announced"):
        read_sum(plan, 0, body, announced)
    with pytest.raises(ProtocolError, match="are needed"):
        read_sum(plan, 0, body[:-1], digest(body[:-1]))


@pytest.mark.parametrize(
    ("start", "value", "why"),
    [
        (8, float("nan"), "weight nan"),
        (8, -1.0, "weight -1.0"),
        (24, float("inf"), "not finite"),
        (24, -1.0, "negative"),
    ],
)
def test_a_payload_of_a_dishonest_relay_is_rejected(start: int, value: float, why: str) -> None:
    """Its digest is right, but its numbers cannot be those of sums."""
    plan = plan_of()
    body, _, _ = write_sum(plan, 0, folded(plan, contributions(plan)), ())
    body[start : start + 8] = torch.tensor([value], dtype=torch.float64).view(torch.uint8)
    with pytest.raises(MergeError, match=why):
        read_sum(plan, 0, body, digest(body))


def test_values_that_are_not_finite_are_rejected() -> None:
    plan = plan_of()
    accumulator = folded(plan, contributions(plan))
    accumulator.state_dict()["sums"][3] = float("nan")
    body, announced, _ = write_sum(plan, 0, accumulator, ())
    with pytest.raises(MergeError, match="not finite"):
        read_sum(plan, 0, body, announced)
