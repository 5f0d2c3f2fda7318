"""Calibration of unpublished constants on the published cells marked for it.

    ddiloco goodput --calibrate

Five times are fitted on ten cells: a step, a downscale, an upscale, its window, and a restart. The
method is least squares of the residuals (Gauss-Newton with Levenberg's damping). All simulations
use the same seed, so the residuals are smooth in the constants. The minimum is flat: steps of 4 to
6 s with windows of 60 to 80 s fit equally well, to a tenth of a point.

Source: Decoupled DiLoCo (arXiv 2604.21428): goodput over chips at one interruption per chip and
year.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from decoupled_diloco_plan.goodput.cluster_settings import Cluster, Constants, System
from decoupled_diloco_plan.goodput.systems import simulate


@dataclass(frozen=True, slots=True)
class Cell:
    """A published goodput, percent; ``calibrate`` marks cells that may be used for fitting."""

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
    """Return the published goodput of a cluster, percent, or ``None``."""
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
"""The constants that affect each system."""

START = (5.0, 15.0, 15.0, 60.0, 80.0)
"""Start of the search: tens of seconds, as operators report for such pauses."""

FAILURES = 50_000
"""Failures in the simulation of each cell."""

ITERATIONS = 7
DIFFERENCE = 0.15
"""Step in each constant's logarithm for the derivative: large compared with simulation noise."""

DAMPING = 0.3


@dataclass(frozen=True, slots=True)
class Residual:
    """A cell's published goodput, and the simulated one, percent."""

    cell: Cell
    goodput: float

    @property
    def points(self) -> float:
        """Simulated minus published goodput, percentage points."""
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
    report: Callable[[str], None] = lambda text: None,
    start: tuple[float, ...] = START,
    iterations: int = ITERATIONS,
    failures: int = FAILURES,
) -> Constants:
    """Fit the constants, using only the cells marked for calibration."""
    cells = [cell for cell in CELLS if cell.calibrate]
    found = np.log(np.array(start))  # logarithms keep the times positive
    misses = _misses(found, cells, failures)
    for _ in range(iterations):
        report(_progress_line(found, misses))
        slopes = _slopes(found, cells, misses, failures)
        normal = slopes.T @ slopes
        damped = normal + DAMPING * np.diag(np.diag(normal))
        found = found - np.linalg.solve(damped, slopes.T @ misses)
        misses = _misses(found, cells, failures)
    report(_progress_line(found, misses))
    return _constants(found)


def rounded(constants: Constants) -> Constants:
    """Round to three digits, which is more precise than the published figures."""
    values: dict[str, Any] = {name: float(f"{getattr(constants, name):.3g}") for name in NAMES}
    return replace(Constants(), **values)


def residuals(constants: Constants, cells: tuple[Cell, ...] = CELLS) -> list[Residual]:
    """Return the residuals of these constants on the cells."""
    return [Residual(cell, _goodput(cell, constants)) for cell in cells]


def _constants(found: np.ndarray) -> Constants:
    values: dict[str, Any] = dict(zip(NAMES, np.exp(found).tolist(), strict=True))
    return replace(Constants(), **values)


def _slopes(found: np.ndarray, cells: list[Cell], misses: np.ndarray, failures: int) -> np.ndarray:
    """Return the change in points per constant's logarithm, shape (cells, constants)."""
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


def _progress_line(found: np.ndarray, misses: np.ndarray) -> str:
    values = ", ".join(
        f"{name} {value:.3g}" for name, value in zip(NAMES, np.exp(found), strict=True)
    )
    return f"{values}: largest residual {np.abs(misses).max():.1f} points"
