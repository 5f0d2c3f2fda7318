"""Compute and reductions on one link, layer by layer: what synchronous systems wait for.

A step is 3L − 1 pieces of compute of equal length: L forward, then for each layer from the last to
the first the gradient of its input (which the first needs none of) and that of its parameters. A
layer's reduction may start when its parameters' gradient is there. Reductions share one link, first
come first served; a step ends when what is due in it has arrived, and the next one waits.

Symbols:
    L  layers
    H  steps between two reductions of the same layer
    τ  steps that a reduction may take beyond the step it starts in
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PERIODS = 6
"""The first half warms up, the second half is measured."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which layers are reduced when.

    Attributes:
        layers: L, at least 1.
        period: H in steps, at least 1.
        due: layers whose reduction starts in a phase of the period, by phase.
        overlap: τ in steps.
    """

    layers: int
    period: int
    due: Mapping[int, Sequence[int]]
    overlap: int = 0


def whole(layers: int, period: int) -> Schedule:
    """All layers at once, in every H-th step: data-parallel (H = 1) and DiLoCo."""
    return Schedule(layers, period, {0: range(layers)})


def strided(layers: int, period: int, fragment_layers: int, overlap: int) -> Schedule:
    """Fragments of a few layers each, far from one another: Streaming DiLoCo.

    Args:
        layers: L.
        period: H.
        fragment_layers: layers of one fragment; fragment p of P has the layers p, p + P, p + 2P …,
            and is due in the phase ⌊p·H/P⌋.
        overlap: τ.
    """
    fragments = max(1, -(-layers // fragment_layers))
    due: dict[int, list[int]] = {}
    for p in range(fragments):
        due.setdefault(p * period // fragments, []).extend(range(p, layers, fragments))
    return Schedule(layers, period, due, overlap)


def gradient_seconds(layers: int, step_seconds: float) -> list[float]:
    """When, within a step, each layer's gradient is there; the first layer's last.

    >>> gradient_seconds(2, 5.0)
    [5.0, 4.0]
    """
    piece = step_seconds / (3 * layers - 1)
    last = [layers + 2 * (layers - layer) for layer in range(layers)]
    return [piece * (last[layer] if layer else 3 * layers - 1) for layer in range(layers)]


def utilization(
    schedule: Schedule, step_seconds: float, layer_seconds: float, latency_seconds: float = 0.0
) -> float:
    """Share of the time in which compute goes on.

    Args:
        schedule: What is reduced when.
        step_seconds: Length of a step without waiting, greater than 0.
        layer_seconds: How long one layer's reduction occupies the link, 0 and up.
        latency_seconds: From the end of a reduction on the link until its result is everywhere.

    Returns:
        Compute over wall-clock in the steady state, 0 to 1.

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
        now += (following - step - 1) * step_seconds  # Nothing is awaited in between.
        step = following
    measured = PERIODS - PERIODS // 2
    return measured * schedule.period * step_seconds / (marks[-1] - marks[PERIODS // 2])


def _next(step: int, phases: Sequence[int], period: int) -> int:
    """The next step in which something starts; phase 0 always counts."""
    base, phase = divmod(step, period)
    index = bisect_right(phases, phase)
    return base * period + (phases[index] if index < len(phases) else period)
