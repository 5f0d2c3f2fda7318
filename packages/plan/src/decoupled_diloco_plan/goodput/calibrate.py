"""Finds the constants that nobody has published, on the cells that may be used for it.

    ddiloco goodput --calibrate

Five lengths of time for ten cells: a step, a downscale, an upscale, its window, a restart. The
least squares of the residuals, by Gauss's and Newton's method with Levenberg's damping; all
simulations have the same seed, so that the residuals are smooth in the constants. The valley is
flat: steps of 4 to 6 s with windows of 60 to 80 s do as well, to a tenth of a point.

Source: Decoupled DiLoCo (arXiv 2604.21428): goodput over chips at one interruption a chip and year.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from decoupled_diloco_plan.goodput.settings import Cluster, Constants, System
from decoupled_diloco_plan.goodput.systems import simulate


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


NAMES = (
    "step_seconds",
    "downscale_seconds",
    "upscale_seconds",
    "upscale_window_seconds",
    "restart_seconds",
)
MATTER = {"data-parallel": ("step_seconds", "restart_seconds"), "elastic": NAMES[:4]}
"""For each system the constants on which it depends."""

START = (5.0, 15.0, 15.0, 60.0, 80.0)
"""Where the search begins: tens of seconds, as operators tell of such stops."""

FAILURES = 50_000
"""Failures in the simulation of each cell."""

ITERATIONS = 7
DIFFERENCE = 0.15
"""Step of each constant's logarithm for the derivative: large against what is left of chance."""

DAMPING = 0.3


@dataclass(frozen=True, slots=True)
class Residual:
    """One cell: what was published, and what the constants give, percent."""

    cell: Cell
    goodput: float

    @property
    def points(self) -> float:
        """How far above what was published."""
        return self.goodput - self.cell.goodput

    def as_json(self) -> dict[str, Any]:
        return {
            "system": self.cell.system,
            "chips": self.cell.chips,
            "learners": self.cell.learners,
            "published": self.cell.goodput,
            "goodput": round(self.goodput, 2),
            "calibrated": self.cell.calibrate,
        }


def calibrated(
    tell: Callable[[str], None] = lambda text: None,
    start: tuple[float, ...] = START,
    iterations: int = ITERATIONS,
    failures: int = FAILURES,
) -> Constants:
    """The constants, from the cells marked for calibration alone."""
    cells = [cell for cell in CELLS if cell.calibrate]
    found = np.log(np.array(start))
    misses = _misses(found, cells, failures)
    for _ in range(iterations):
        tell(_told(found, misses))
        slopes = _slopes(found, cells, misses, failures)
        normal = slopes.T @ slopes
        damped = normal + DAMPING * np.diag(np.diag(normal))
        found = found - np.linalg.solve(damped, slopes.T @ misses)
        misses = _misses(found, cells, failures)
    tell(_told(found, misses))
    return _constants(found)


def rounded(constants: Constants) -> Constants:
    """The same to three digits, which is more than the published figures tell."""
    values: dict[str, Any] = {name: float(f"{getattr(constants, name):.3g}") for name in NAMES}
    return replace(Constants(), **values)


def residuals(constants: Constants, cells: tuple[Cell, ...] = CELLS) -> list[Residual]:
    """What these constants give for the cells."""
    return [Residual(cell, _goodput(cell, constants)) for cell in cells]


def _constants(found: np.ndarray) -> Constants:
    values: dict[str, Any] = dict(zip(NAMES, np.exp(found).tolist(), strict=True))
    return replace(Constants(), **values)


def _slopes(found: np.ndarray, cells: list[Cell], misses: np.ndarray, failures: int) -> np.ndarray:
    """Points for each constant's logarithm, shape (cells, constants)."""
    slopes = np.zeros((len(cells), len(NAMES)))
    for index, name in enumerate(NAMES):
        moved = found.copy()
        moved[index] += DIFFERENCE
        rows = [row for row, cell in enumerate(cells) if name in MATTER[cell.system]]
        there = _misses(moved, [cells[row] for row in rows], failures)
        slopes[rows, index] = (there - misses[rows]) / DIFFERENCE
    return slopes


def _misses(found: np.ndarray, cells: list[Cell], failures: int) -> np.ndarray:
    constants = _constants(found)
    return np.array([_goodput(cell, constants, failures) - cell.goodput for cell in cells])


def _goodput(cell: Cell, constants: Constants, failures: int = FAILURES) -> float:
    cluster = Cluster(cell.system, cell.chips, cell.learners, constants=constants)
    seconds = failures * cluster.mtbi_seconds / cell.chips
    return simulate(cluster, max(seconds, 86400.0), seed=1).goodput


def _told(found: np.ndarray, misses: np.ndarray) -> str:
    values = ", ".join(
        f"{name} {value:.3g}" for name, value in zip(NAMES, np.exp(found), strict=True)
    )
    return f"{values}: largest residual {np.abs(misses).max():.1f} points"
