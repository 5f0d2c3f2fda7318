"""The properties that all shipped methods have, and methods that lack one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from decoupled_diloco.config.sync import BITS, MOMENTUM_DEFAULTS, ROBUST_RULES, SUMMED_RULES
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.machine_options import Candidate, RoundView
from decoupled_diloco_lab.study import check
from decoupled_diloco_lab.study.check import CODEC, MERGE, OUTER, PARTICIPATION, SCHEDULE

NOT_FOR_FLAT_VECTORS = {"LBFGS", "Muon", "Optimizer", "SparseAdam"}
OF_TORCH = sorted(
    name
    for name, each in vars(torch.optim).items()
    if inspect.isclass(each)
    and issubclass(each, torch.optim.Optimizer)
    and name not in NOT_FOR_FLAT_VECTORS
)


@pytest.mark.parametrize("rule", SUMMED_RULES + ROBUST_RULES)
def test_a_shipped_merge_rule_has_all_properties(rule: str) -> None:
    assert check(rule) == tuple(MERGE)


@pytest.mark.parametrize("optimizer", [*MOMENTUM_DEFAULTS, *OF_TORCH])
def test_a_shipped_outer_optimizer_has_all_properties(optimizer: str) -> None:
    options = {"every": 2} if optimizer == "delayed-nesterov" else {}
    assert check(optimizer, **options) == tuple(OUTER)


@pytest.mark.parametrize("codec", [*BITS, "topk-40"])
def test_a_shipped_codec_has_all_properties(codec: str) -> None:
    assert check(codec) == tuple(CODEC)


class Half:
    group = 1

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, vector: Tensor) -> Tensor:
        return vector.half().view(torch.uint8)

    def decode(self, body: Tensor, numel: int) -> Tensor:
        return body.view(torch.float16).float()


class Sum:
    def __init__(self, numel: int) -> None:
        self.total, self.weight = torch.zeros(numel), 0.0

    def add(self, vector: Tensor, weight: float) -> None:
        self.total += weight * vector
        self.weight += weight

    def result(self) -> Tensor:
        return self.total / self.weight


def half() -> Half:
    return Half()


def mean(contributions: Tensor, weights: Tensor) -> Tensor:
    return weights @ contributions


def two_phases(step: int, steps: int | None) -> int:
    return 24 if step < 0.8 * (steps or 1000) else 8


def in_turn(learner: Candidate, round: RoundView) -> bool:
    return learner == round.learners[round.number % len(round.learners)]


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        (Half, CODEC),
        (Half(), CODEC),
        (half, CODEC),
        (mean, MERGE),
        (Sum, MERGE),
        (torch.optim.AdamW, OUTER),
        (two_phases, SCHEDULE),
        (in_turn, PARTICIPATION),
    ],
)
def test_the_kind_of_a_method_is_found(method: Any, kind: Any) -> None:
    assert check(method) == tuple(kind)


@pytest.mark.parametrize("rule", ["active", "all"])
def test_a_shipped_participation_rule_has_all_properties(rule: str) -> None:
    assert check(rule) == tuple(PARTICIPATION)


def the_first(learner: Candidate, round: RoundView) -> bool:
    return learner == round.learners[0]


def late(learner: Candidate, round: RoundView) -> bool:
    return round.number > 3


@pytest.mark.parametrize(
    ("method", "law", "given"),
    [
        (lambda step, steps: steps // 10, next(iter(SCHEDULE)), "returned 0 for step=0, steps=1:"),
        (the_first, list(PARTICIPATION)[1], "64 rounds of 2 learners, it returned ['learner-0']"),
        (late, next(iter(PARTICIPATION)), "with round 1 of 1 learners, it returned []"),
    ],
)
def test_a_property_that_a_schedule_or_a_rule_lacks_is_named(
    method: Any, law: str, given: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check(method)
    assert f"- {law}: " in str(error.value)
    assert given in str(error.value)


def doubled(contributions: Tensor, weights: Tensor) -> Tensor:
    return 2 * weights @ contributions


def of_the_first(contributions: Tensor, weights: Tensor) -> Tensor:
    return contributions[0]


def inverse(contributions: Tensor, weights: Tensor) -> Tensor:
    return weights @ contributions / (contributions.abs().sum() + 1e-45)


def shifted(contributions: Tensor, weights: Tensor) -> Tensor:
    return weights @ contributions + 1e-3


class Careless(Sum):
    def add(self, vector: Tensor, weight: float) -> None:
        super().add(vector, weight)
        vector.zero_()


class Unweighted(Sum):
    def result(self) -> Tensor:
        return self.total / (self.weight + 1)


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (doubled, "equal contributions give that contribution"),
        (of_the_first, "the order of the learners does not matter"),
        (shifted, "zero contributions give zero"),
        (Careless, "the same contributions give the same bits, and do not change"),
        (Unweighted, "only the ratios of the weights matter"),
    ],
)
def test_a_merge_rule_without_a_property(rule: Any, law: str) -> None:
    with pytest.raises(ConfigError, match=law):
        check(rule)


class Ascent(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=group["lr"])


class Drifting(Ascent):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad + 1e-6, alpha=group["lr"])


@pytest.mark.parametrize(
    ("optimizer", "law"),
    [
        (Ascent, "the first step goes against the gradient"),
        (Drifting, "zero weights with a zero gradient stay zero"),
    ],
)
def test_an_outer_optimizer_without_a_property(optimizer: Any, law: str) -> None:
    with pytest.raises(ConfigError, match=law):
        check(optimizer)


class Louder(Half):
    def decode(self, body: Tensor, numel: int) -> Tensor:
        return 3 * super().decode(body, numel)


class Offset(Half):
    def decode(self, body: Tensor, numel: int) -> Tensor:
        return super().decode(body, numel) + 1e-3


class Signs(Half):
    """Sends only signs: the rest grows if an element is larger than 1."""

    def encode(self, vector: Tensor) -> Tensor:
        return super().encode(0.2 * vector.sign())


@pytest.mark.parametrize(
    ("codec", "law"),
    [
        (Louder, "the error is smaller than the vector"),
        (Offset, "zeros decode to zeros"),
        (Signs, "with error feedback, the mean"),
    ],
)
def test_a_codec_without_a_property(codec: Any, law: str) -> None:
    with pytest.raises(ConfigError, match=law):
        check(codec)


def test_one_error_lists_each_failure_with_its_input() -> None:
    with pytest.raises(ConfigError) as error:
        check(shifted)
    first, *listed = str(error.value).splitlines()
    assert first.startswith("merge rule '")
    assert first.endswith(f":shifted' lacks 2 of {len(MERGE)} properties:")
    assert listed[1] == (
        "- zero contributions give zero: with 1 contributions of 1 elements, all zero, it returned "
        "float32 [1] [0.001]"
    )


@pytest.mark.parametrize(
    ("method", "kind", "message"),
    [
        (lambda: 3, None, "is a.* int.* without nbytes, encode, decode"),
        (lambda a, b, c: a, None, "is not clear: pass kind="),
        ("media", None, "'media' is unknown"),
        ("mean", "rule", "kind='rule' is not valid"),
        (lambda c, w: c, "merge", r"returned shape \[1, 1\]"),
    ],
)
def test_what_is_not_a_method_is_an_error(method: Any, kind: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(method, kind)
