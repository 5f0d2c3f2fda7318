"""The mixture of experts: routing and losses against naive versions, and training."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge import layout_of
from decoupled_diloco.merge.fragments import partition
from decoupled_diloco_lab.workloads.moe import (
    MixtureOfExperts,
    MoeOptions,
    MoeWorkload,
    balancing_loss,
    expert_shares,
    recorded_logits,
    route,
    router_z_loss,
)

TINY: dict[str, Any] = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "context": 32,
    "batch_size": 4,
    "eval_batches": 2,
    "corpus_bytes_max": 200_000,
    "experts": 4,
    "expert_hidden": 24,
}


def tiny(**options: Any) -> MoeWorkload:
    return MoeWorkload(MoeOptions(**{**TINY, **options}))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(workload: MoeWorkload, steps: int) -> list[float]:
    model = workload.model()
    optimizer = workload.optimizer(model)
    losses = []
    for batch in itertools.islice(workload.batches(0, 1), steps):
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("k", [1, 2, 4])
def test_routing_equals_a_loop_over_tokens(k: int) -> None:
    layer = MixtureOfExperts(width=8, hidden=12, experts=4, experts_per_token=k)
    x = noise(2, 5, 8)
    with torch.no_grad():
        mixed = layer(x)
        for token, made in zip(x.flatten(0, 1), mixed.flatten(0, 1), strict=True):
            probabilities = layer.router(token).softmax(-1).tolist()
            best = sorted(range(4), key=lambda e: -probabilities[e])[:k]
            total = sum(probabilities[e] for e in best) if k > 1 else 1.0
            naive = sum(probabilities[e] / total * layer.experts[e](token) for e in best)
            assert torch.allclose(made, naive, atol=1e-6)


def test_no_token_is_dropped_if_all_choose_the_same_expert() -> None:
    layer = MixtureOfExperts(width=4, hidden=6, experts=3, experts_per_token=1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[1] = 5.0
        x = noise(1, 40, 4).abs()
        mixed = layer(x)
        weight = layer.router(x).softmax(-1)[..., 1:2]
        assert torch.allclose(mixed, weight * layer.experts[1](x), atol=1e-6)


def test_an_expert_without_tokens_gets_no_gradient() -> None:
    layer = MixtureOfExperts(width=4, hidden=6, experts=3, experts_per_token=1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[1] = 5.0
    layer(noise(1, 8, 4).abs()).sum().backward()
    grads = [expert.expand.weight.grad is not None for expert in layer.experts]
    assert grads == [False, True, False]
    assert layer.router.weight.grad is not None
    assert layer.router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_balancing_loss_equals_a_naive_version(k: int) -> None:
    logits = noise(50, 5, seed=k)
    probabilities = [row.softmax(0).tolist() for row in logits]
    counts = [0] * 5
    for row in probabilities:
        for expert in sorted(range(5), key=lambda e: -row[e])[:k]:
            counts[expert] += 1
    naive = 5 * sum(
        counts[e] / (50 * k) * sum(row[e] for row in probabilities) / 50 for e in range(5)
    )
    assert balancing_loss(logits, k).item() == pytest.approx(naive, rel=1e-5)
    assert expert_shares(logits, k).tolist() == pytest.approx([c / (50 * k) for c in counts])


def test_the_balancing_loss_ranges_from_1_to_the_number_of_experts() -> None:
    even = 20.0 * torch.eye(4).repeat(3, 1)
    one = torch.tensor([[20.0, 0.0, 0.0, 0.0]]).repeat(12, 1)
    assert balancing_loss(even, 1).item() == pytest.approx(1.0, abs=1e-4)
    assert balancing_loss(one, 1).item() == pytest.approx(4.0, abs=1e-4)


def test_the_z_loss_is_the_squared_log_of_the_sum() -> None:
    logits = noise(7, 3)
    naive = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / 7
    assert router_z_loss(logits).item() == pytest.approx(naive, rel=1e-5)


def test_the_auxiliary_losses_are_part_of_the_loss_with_their_weights() -> None:
    plain, weighted = (
        tiny(balance_weight=0.0, router_z_weight=0.0),
        tiny(balance_weight=0.5, router_z_weight=0.25),
    )
    model, batch = plain.model(), next(plain.batches(0, 1))
    with recorded_logits(model) as logits:
        loss = plain.loss(model, batch)
    balance = sum(balancing_loss(each, 2) for each in logits) / 2
    z = sum(router_z_loss(each) for each in logits) / 2
    expected = loss + 0.5 * balance + 0.25 * z
    assert torch.allclose(weighted.loss(model, batch), expected)


def test_a_learner_balances_over_its_own_batch_only() -> None:
    workload = tiny()
    model = workload.model()
    first, second = (next(workload.batches(part, 2)) for part in (0, 1))
    alone = workload.loss(model, first).item()
    workload.loss(model, second)
    assert workload.loss(model, first).item() == alone, "the loss depends on an earlier batch"


def test_the_balancing_loss_spreads_tokens_over_experts() -> None:
    torch.manual_seed(0)
    router = torch.nn.Linear(6, 4, bias=False)
    with torch.no_grad():
        router.weight[0] += 1.0
    x = noise(64, 6).abs()
    optimizer = torch.optim.SGD(router.parameters(), lr=0.5)
    before = expert_shares(router(x), 1).max().item()
    for _ in range(50):
        optimizer.zero_grad()
        balancing_loss(router(x), 1).backward()
        optimizer.step()
    after = expert_shares(router(x), 1).max().item()
    assert before > 0.9
    assert after < 0.6


def test_recording_removes_its_hooks_and_the_model_can_be_copied() -> None:
    workload = tiny()
    model = workload.model()
    workload.loss(model, next(workload.batches(0, 1)))
    assert not any(module._forward_hooks for module in model.modules())
    copy.deepcopy(model)


def test_the_loss_falls_in_20_steps() -> None:
    losses = train(tiny(learning_rate=5e-3), 20)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_training_is_bitwise_deterministic() -> None:
    assert train(tiny(), 3) == train(tiny(), 3)


def test_an_evaluation_reports_the_use_of_experts() -> None:
    workload = tiny()
    metrics = workload.evaluate(workload.model())
    assert list(metrics) == ["loss", "expert_load_min", "expert_load_max", "router_entropy"]
    assert 0 <= metrics["expert_load_min"] <= 1 <= metrics["expert_load_max"] <= 4
    assert 0 < metrics["router_entropy"] <= 1
    assert metrics == workload.evaluate(workload.model())


def test_the_default_model_has_2_430_080_parameters_in_equal_fragments() -> None:
    workload = MoeWorkload(MoeOptions())
    # Like "gpt", but each of 4 blocks has 8 experts of 2 · 128 · 256 and a router of 128 · 8.
    expected = 4 * (4 * 128**2 + 8 * 2 * 128 * 256 + 128 * 8) + 2 * 256 * 128 + 9 * 128
    assert workload.parameters() == expected == 2_430_080
    with torch.device("meta"):
        layout = layout_of(workload._build())
    assert layout.tensors[8].name == "blocks.0.mlp.experts.0.expand.weight"
    sizes = [fragment.numel for fragment in partition(layout, 24)]
    assert max(sizes) < 1.2 * min(sizes)
    assert len(partition(layout, 4, "layer-strided")) == 4


def test_describe_names_the_workload() -> None:
    facts = tiny().describe()
    assert facts["workload"] == "moe"
    assert facts["parameters"] == sum(p.numel() for p in tiny().model().parameters())
    assert facts["options"]["experts"] == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"experts_per_token": 9},
            "experts_per_token=9 in [workload.options] exceeds experts=8: "
            "lower experts_per_token or add experts",
        ),
        (
            {"experts": 1},
            "experts=1 in [workload.options] is out of range: it must be at least 2",
        ),
        (
            {"expert": 4},
            "unknown key 'expert' in [workload.options]: did you mean 'experts'?",
        ),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        MoeOptions(**options)
    assert str(error.value) == sentence


def test_routing_returns_the_likeliest_first_with_weights_that_sum_to_1() -> None:
    weights, chosen = route(torch.tensor([[0.0, 2.0, 1.0]]), 2)
    assert chosen.tolist() == [[1, 2]]
    e = math.e
    assert weights[0].tolist() == pytest.approx([e**2 / (e**2 + e), e / (e**2 + e)])
