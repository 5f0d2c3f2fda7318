"""Published goodput, to calibrate on and to compare with. Nothing simulated reads these numbers.

Source: Decoupled DiLoCo (arXiv 2604.21428): goodput over chips at one interruption a chip and year.
"""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco_plan.goodput.settings import Cluster, System


@dataclass(frozen=True, slots=True)
class Cell:
    """One published number, percent; ``calibrate``: constants may be fitted on it."""

    system: System
    chips: int
    learners: int
    goodput: float
    calibrate: bool = False


CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)


def _row(
    system: System, learners: int, figures: tuple[float, ...], *, calibrate: bool = False
) -> tuple[Cell, ...]:
    return tuple(
        Cell(system, chips, learners, figure, calibrate)
        for chips, figure in zip(CHIPS, figures, strict=True)
    )


CELLS = (
    *_row("data-parallel", 1, (72, 57, 38, 27, 18), calibrate=True),
    *_row("elastic", 1, (88, 80, 69, 58, 40), calibrate=True),
    *_row("decoupled", 8, (98, 96, 94, 88, 80)),
    Cell("decoupled", 1_200_000, 16, 93),
)


def published(cluster: Cluster) -> float | None:
    """What was published for this cell, percent; ``None``: nothing."""
    for cell in CELLS:
        same = (cell.system, cell.chips, cell.learners)
        if same == (cluster.system, cluster.chips, cluster.learners):
            return cell.goodput
    return None
