"""Published bandwidth tables and wall-clock model, reproduced.

A table cell is the smallest of 50 bandwidths that reaches a compute utilization. The bandwidths are
spaced evenly in the logarithm from 0.1 to 1000 Gbit/s. The cells are recomputed from the papers'
assumptions: compute and layer-by-layer reductions on one link.

- A step has 3L − 1 pieces of compute of equal length: L forward, then two per layer from the last
  to the first, for the gradients of its input and its parameters. The first layer needs no input
  gradient.
- A layer's reduction may start when its parameters' gradient is complete.
- Reductions share one link in FIFO order. A step ends when all reductions due in it have arrived;
  the next step waits for that.
- A reduction moves `volume · N · bits` bits, where N is the number of parameters. The volume is
  fitted, not derived: one number per paper, the same for all systems, sizes and cells.

Source:
    Streaming DiLoCo (arXiv 2501.18512), the table of simulated bandwidths at H = 100; Scaling Laws
    for DiLoCo (arXiv 2503.09799), the table at other H, and the wall-clock model.

Symbols:
    L  layers
    H  steps between two reductions of the same layer
    τ  steps that a reduction may take after the step in which it starts
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from decoupled_diloco.config.settings import suggestion
from decoupled_diloco.errors import ConfigError
from decoupled_diloco_plan.bandwidth.case import Model
from decoupled_diloco_plan.checks import above, at_least

PERIODS = 6
"""Simulated periods: the first half is warm-up, the second half is measured."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The layers that are reduced in each phase of the period."""

    layers: int
    period: int
    # layers whose reduction starts in a phase, by phase
    due: Mapping[int, Sequence[int]]
    overlap: int = 0


def whole(layers: int, period: int) -> Schedule:
    """Reduce all layers at once in every H-th step: data-parallel (H = 1) and DiLoCo."""
    return Schedule(layers, period, {0: range(layers)})


def strided(layers: int, period: int, fragment_layers: int, overlap: int) -> Schedule:
    """Reduce fragments of a few layers, far from one another: Streaming DiLoCo.

    Fragment p of P has the layers p, p + P, p + 2P …, and is due in the phase ⌊p·H/P⌋.
    """
    fragments = max(1, -(-layers // fragment_layers))
    due: dict[int, list[int]] = {}
    for p in range(fragments):
        due.setdefault(p * period // fragments, []).extend(range(p, layers, fragments))
    return Schedule(layers, period, due, overlap)


def gradient_seconds(layers: int, step_seconds: float) -> list[float]:
    """Return when, within a step, each layer's gradient is complete; the first layer is last.

    >>> gradient_seconds(2, 5.0)
    [5.0, 4.0]
    """
    piece = step_seconds / (3 * layers - 1)
    last = [layers + 2 * (layers - layer) for layer in range(layers)]
    return [piece * (last[layer] if layer else 3 * layers - 1) for layer in range(layers)]


def utilization(
    schedule: Schedule, step_seconds: float, layer_seconds: float, latency_seconds: float = 0.0
) -> float:
    """Return the share of the time in which compute runs.

    Args:
        step_seconds: Length of a step without waiting, greater than 0.
        layer_seconds: Time that one layer's reduction occupies the link, 0 or more.
        latency_seconds: Time from the end of a reduction on the link until all have its result.

    Source:
        Streaming DiLoCo (arXiv 2501.18512), the simulation of compute utilisation.
    """
    ready = gradient_seconds(schedule.layers, step_seconds)
    phases = sorted({0, *schedule.due})
    starting = {phase: sorted(schedule.due.get(phase, ()), reverse=True) for phase in phases}
    now = link_free = 0.0
    step, awaited, marks = 0, list[tuple[int, float]](), list[float]()
    while len(marks) <= PERIODS:
        phase = step % schedule.period
        if phase == 0:
            marks.append(now)
        if starting.get(phase):
            for layer in starting[phase]:
                link_free = max(link_free, now + ready[layer]) + layer_seconds
            awaited.append((step + schedule.overlap, link_free + latency_seconds))
        now = max([now + step_seconds, *(end for due, end in awaited if due == step)])
        awaited = [(due, end) for due, end in awaited if due > step]
        following = min([_next(step, phases, schedule.period), *(due for due, _ in awaited)])
        # No reduction is awaited in the steps between, so they take no extra time.
        now += (following - step - 1) * step_seconds
        step = following
    measured = PERIODS - PERIODS // 2
    return measured * schedule.period * step_seconds / (marks[-1] - marks[PERIODS // 2])


def _next(step: int, phases: Sequence[int], period: int) -> int:
    """Return the next step in which a reduction starts; phase 0 always counts."""
    base, phase = divmod(step, period)
    index = bisect_right(phases, phase)
    return base * period + (phases[index] if index < len(phases) else period)


Source = Literal["streaming-diloco", "scaling-laws"]

GRID_GBIT = tuple(10.0 ** (-1.0 + 4.0 * i / 49.0) for i in range(50))
"""Bandwidths of the tables, Gbit/s."""

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Compute utilizations of the tables' columns."""

FRAGMENT_LAYERS = 3
"""Layers per strided fragment of Streaming DiLoCo."""

PERIOD_OF_STREAMING = 100
"""H of all rows of Streaming DiLoCo's table."""

VOLUMES: dict[Source, float] = {"streaming-diloco": 0.832, "scaling-laws": 0.7225}
"""Volume of a reduction of N parameters, as a share of N · bits.

Each is the middle of the narrow range that reproduces most cells. Data-parallel is the same row in
both papers and uses the first value.
"""

ROUNDING = 1e-9
"""A utilization reaches its target if it falls short by less than this."""


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
    """One cell: the smallest bandwidth of the grid that reaches a utilization."""

    system: str
    period: int  # H; 1 for data-parallel
    utilization: float  # the target, 0 to 1
    # the bandwidth; None if the largest of the grid does not reach the target
    gbit_per_second: float | None
    source: Source
    volume: float  # share of N · bits that a reduction moves


def source_of(system: str, period: int) -> Source:
    """Return the paper whose table has this row; all of Streaming DiLoCo's is at H = 100.

    DiLoCo with a period of one step is data-parallel and needs the same bandwidth.
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
    """Return the rows for one model; by default from the paper whose table has this H."""
    at_least(1, period=period)
    for target in targets:
        if not 0 < target <= 1:
            raise ConfigError(f"utilization={target:g} is out of range: above 0, at most 1")
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
    """Return the layers that a system reduces in each phase."""
    if not system.streams:
        return whole(layers, period if system.periodic else 1)
    return strided(layers, period, FRAGMENT_LAYERS, system.overlap)


BITS = 16
"""Bits per parameter in the paper's reductions: bf16."""


@dataclass(frozen=True, slots=True)
class Reach:
    """A network in the wall-clock model: W in bytes per second, ε in seconds per reduction."""

    bandwidth: float
    latency_seconds: float


NETWORKS = {
    "high": Reach(400e9 / 8, 1e-4),
    "medium": Reach(100e9 / 8, 1e-3),
    "low": Reach(10e9 / 8, 1e-2),
}
"""The paper's three networks."""


@dataclass(frozen=True, slots=True)
class WallClock:
    """Seconds of a whole training run, by component."""

    compute: float
    within: float
    between: float

    @property
    def total(self) -> float:
        """Sum of all components; this model has no overlap."""
        return self.compute + self.within + self.between


def wall_clock(
    *,
    params: float,
    tokens: float,
    tokens_per_step: float,
    chips: float,
    flops_per_chip: float,
    learners: int,
    period: int,
    between: Reach,
) -> WallClock:
    """Return the seconds of compute, of communication within learners, and between sites.

    T_comp = 6ND/(RQ), T_intra = (2N/W₀·(1 - M/R) + ε₀)·T, T_inter = (2N/W₁·(1 - 1/R) + ε₁)·T/H.

    N params, D tokens, T = D/B steps of B tokens, R chips of Q FLOP/s, M learners, H period (both 1
    for data-parallel). W₁ and ε₁ are those between the sites. Within a learner (W₀, ε₀) the network
    is the "high" one of `NETWORKS`.
    """
    above(0, params=params, tokens=tokens, tokens_per_step=tokens_per_step)
    above(0, chips=chips, flops=flops_per_chip)
    if learners > chips:
        raise ConfigError(f"learners={learners} exceeds chips={chips:g}: a learner needs a chip")
    steps = tokens / tokens_per_step
    reduction, within = 2 * params * BITS / 8, NETWORKS["high"]
    inside = reduction / within.bandwidth * (1 - learners / chips) + within.latency_seconds
    across = reduction / between.bandwidth * (1 - 1 / chips) + between.latency_seconds
    return WallClock(
        compute=6 * params * tokens / (chips * flops_per_chip),
        within=inside * steps if learners > 1 or period > 1 else 0.0,
        between=across * steps / period,
    )
