"""What a plan starts from, with what was assumed where nothing was said."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.observe.tape import TapeReader
from decoupled_diloco_plan.bandwidth.network import Network
from decoupled_diloco_plan.bandwidth.predict import Prices
from decoupled_diloco_plan.bandwidth.setting import (
    Model,
    assumed_layers,
    assumed_step_seconds,
    step_seconds_of,
)
from decoupled_diloco.units import format_count, format_duration


@dataclass(frozen=True, slots=True)
class Chips:
    """What the chips do; None where it was not said.

    Attributes:
        count: R, of all learners together.
        flops: Q, of one chip, FLOP/s.
        tokens_per_step: B, of all learners together.
        tokens: D, the whole budget.
    """

    count: float | None = None
    flops: float | None = None
    tokens_per_step: float | None = None
    tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """A model on a network, and what was assumed, in sentences."""

    model: Model
    network: Network
    chips: Chips
    prices: Prices | None
    assumed: tuple[str, ...]


def model_of(
    params: float, layers: int | None, step_seconds: float | None, chips: Chips
) -> tuple[Model, tuple[str, ...]]:
    """The model, with layers and step time assumed where they are not given.

    Raises:
        ConfigError: a number is out of its range, or the step is given twice.
    """
    assumed = []
    if layers is None:
        layers = assumed_layers(params) if params > 0 else 1
        assumed.append(f"{layers} layers, by the published models' depth (--layers)")
    arithmetic = (chips.flops, chips.count, chips.tokens_per_step)
    if step_seconds is None and chips.flops is not None:
        if chips.count is None or chips.tokens_per_step is None:
            raise ConfigError("--flops gives the step with --chips and --tokens-per-step: add them")
        step_seconds = step_seconds_of(params, chips.tokens_per_step, chips.count, chips.flops)
        assumed.append(
            f"a step of {format_duration(step_seconds)}: 6·N·B/(R·Q), nothing lost within a learner"
        )
    elif step_seconds is None:
        step_seconds = assumed_step_seconds(params)
        assumed.append(
            f"a step of {format_duration(step_seconds)}, as the published 10B model's 0.8 s "
            "(--step-seconds)"
        )
    elif None not in arithmetic and chips.tokens is None:
        raise ConfigError(
            "the step's length is given twice, by --step-seconds and by --flops with --chips: "
            "leave one out"
        )
    return Model(params, layers, step_seconds), tuple(assumed)


def prices_of(chip_hour: float | None, gigabyte: float | None, chips: Chips) -> Prices | None:
    """The prices, if there are any.

    Raises:
        ConfigError: what they need is missing.
    """
    if chip_hour is None and gigabyte is None:
        return None
    if chips.count is None or chips.tokens_per_step is None:
        raise ConfigError(
            "a cost per token needs --chips and --tokens-per-step besides the prices: add them"
        )
    return Prices(chip_hour or 0.0, gigabyte or 0.0, chips.count, chips.tokens_per_step)


@dataclass(frozen=True, slots=True)
class OfRun:
    """What a run's file says of a plan; the step only where its workload has one of its own."""

    params: int
    layers: int | None
    step_seconds: float | None


def read_run(config: RunConfig) -> OfRun:
    """The size of a run's model, and its step if it is paced.

    Raises:
        ConfigError: the workload's model cannot be built.
    """
    from decoupled_diloco.simulate.simulation import workload_of

    tensors = {
        name: each.numel()
        for name, each in workload_of(config).model().named_parameters()
        if each.requires_grad
    }
    blocks = {match[0] for name in tensors if (match := re.match(r".*?\.\d+\.", name))}
    pace = config.workload.options.get("step_seconds") if config.workload.name == "paced" else None
    step = max(pace) if isinstance(pace, list | tuple) else pace
    return OfRun(sum(tensors.values()), len(blocks) or None, step)


def taped_step_seconds(folder: Path) -> float | None:
    """What a step took in a run that was made: the median learner's median; None without a tape.

    Raises:
        StorageError: a tape cannot be read.
    """
    medians = []
    for path in sorted(folder.glob("tape/learner-*.jsonl")):
        ends = [record.at for record in TapeReader(path) if record.type == "StepFinished"]
        if len(ends) > 1:
            medians.append(median(b - a for a, b in pairwise(ends)))
    return median(medians) if medians else None


def size_of(params: float) -> str:
    """Parameters as people say them.

    >>> size_of(12e9), size_of(853_120)
    ('12B', '853k')
    """
    return format_count(params).replace("G", "B")


def told(model: Model, network: Network) -> str:
    """What is planned, in one line."""
    n, m = len(network.sites), network.learners
    paces = sorted(set(network.paces(model.step_seconds)))
    ends = dict.fromkeys((paces[0], paces[-1]))
    return (
        f"{size_of(model.params)} parameters, {model.layers} layers, a step of "
        f"{' to '.join(map(format_duration, ends))}; {m} learner{'s' * (m > 1)} at {n} "
        f"site{'s' * (n > 1)}"
    )
