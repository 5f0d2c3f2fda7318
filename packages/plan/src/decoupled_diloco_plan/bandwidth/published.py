"""The published tables of bandwidth against compute utilisation, rebuilt from their assumptions.

The tables say which of 50 bandwidths, spaced evenly in the logarithm from 0.1 to 1000 Gbit/s, is
the first that reaches a compute utilisation. `timeline` says what happens in a step. What is
reduced are `volume · N · bits` bits, N being the parameters. The volume is fitted, not explained:
one number for each of the two papers, none for a system, a size or a cell.

Source:
    Streaming DiLoCo (arXiv 2501.18512), its table of simulated bandwidths at H = 100; Scaling Laws
    for DiLoCo (arXiv 2503.09799), its table at other H.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from decoupled_diloco.config.settings import suggestion
from decoupled_diloco.errors import ConfigError
from decoupled_diloco_plan.bandwidth.setting import Model
from decoupled_diloco_plan.bandwidth.timeline import Schedule, strided, utilization, whole
from decoupled_diloco_plan.checks import at_least

Source = Literal["streaming-diloco", "scaling-laws"]

GRID_GBIT = tuple(10.0 ** (-1.0 + 4.0 * i / 49.0) for i in range(50))
"""The bandwidths that the tables choose from, Gbit/s."""

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""The compute utilisations of the tables' columns."""

FRAGMENT_LAYERS = 3
"""Layers of one of Streaming DiLoCo's fragments, strided."""

PERIOD_OF_STREAMING = 100
"""H of Streaming DiLoCo's whole table."""

VOLUMES: dict[Source, float] = {"streaming-diloco": 0.832, "scaling-laws": 0.7225}
"""What a reduction of N parameters moves, as a share of N · bits.

Each is the middle of the narrow range in which most cells are met. Data-parallel is the same row in
both papers and has the first.
"""

ROUNDING = 1e-9
"""A utilisation that falls short by less has reached its target."""


@dataclass(frozen=True, slots=True)
class System:
    """A row of the tables."""

    streams: bool = False
    periodic: bool = True
    overlap: int = 0
    bits: int = 16


SYSTEMS = {
    "data-parallel": System(periodic=False),
    "diloco": System(),
    "streaming": System(streams=True),
    "streaming-overlap": System(streams=True, overlap=1),
    "streaming-overlap-4bit": System(streams=True, overlap=1, bits=4),
}


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One cell: the smallest bandwidth of the grid that reaches a utilisation.

    Attributes:
        system: One of `SYSTEMS`.
        period: H; 1 for data-parallel.
        utilization: The target, 0 to 1.
        gbit_per_second: The bandwidth; None if the grid's largest one does not reach the target.
        source: Whose volume was taken.
        volume: Share of N · bits that a reduction moves.
    """

    system: str
    period: int
    utilization: float
    gbit_per_second: float | None
    source: Source
    volume: float


def source_of(system: str, period: int) -> Source:
    """The paper whose table has such a row: Streaming DiLoCo's is all at H = 100.

    DiLoCo with a period of one step is data-parallel, and needs what that does.
    """
    each = SYSTEMS[system]
    if not each.periodic or each.streams or period in (1, PERIOD_OF_STREAMING):
        return "streaming-diloco"
    return "scaling-laws"


def rows(
    model: Model,
    period: int,
    systems: Sequence[str] = tuple(SYSTEMS),
    source: Source | None = None,
    targets: Sequence[float] = TARGETS,
) -> list[PublishedRow]:
    """The rows of the tables for one model.

    Args:
        model: its size, depth and step.
        period: H in steps, at least 1.
        systems: Names in `SYSTEMS`.
        source: Whose volume to take; None: that of the paper whose table has this H.
        targets: Compute utilisations, each above 0 and at most 1.

    Raises:
        ConfigError: A number is out of its range, or a system is unknown.
    """
    at_least(1, period=period)
    for target in targets:
        if not 0 < target <= 1:
            raise ConfigError(f"utilization={target:g} is no share: it must be above 0, at most 1")
    for system in systems:
        if system not in SYSTEMS:
            raise ConfigError(f"system {system!r} is unknown: {suggestion(system, SYSTEMS)}")
    return [
        row
        for system in systems
        for row in _rows_of(system, model, period, source or source_of(system, period), targets)
    ]


def _rows_of(
    name: str, model: Model, period: int, source: Source, targets: Sequence[float]
) -> Iterator[PublishedRow]:
    system = SYSTEMS[name]
    schedule = schedule_of(system, model.layers, period)
    volume = VOLUMES[source if schedule.period > 1 else "streaming-diloco"]
    layer_gbit = volume * model.params * system.bits / model.layers / 1e9
    reached = [utilization(schedule, model.step_seconds, layer_gbit / gbit) for gbit in GRID_GBIT]
    for target in targets:
        enough = (g for g, u in zip(GRID_GBIT, reached, strict=True) if u >= target - ROUNDING)
        yield PublishedRow(name, schedule.period, target, next(enough, None), source, volume)


def schedule_of(system: System, layers: int, period: int) -> Schedule:
    """When which layers are reduced."""
    if not system.streams:
        return whole(layers, period if system.periodic else 1)
    return strided(layers, period, FRAGMENT_LAYERS, system.overlap)
