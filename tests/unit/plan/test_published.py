"""The published tables are reproduced, and the number of exact cells is checked."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from decoupled_diloco.errors import ConfigError
from decoupled_diloco_plan.bandwidth.case import Model
from decoupled_diloco_plan.bandwidth.published_tables import (
    GRID_GBIT,
    SYSTEMS,
    TARGETS,
    Source,
    rows,
    source_of,
)
from unit.plan.published_cells import CELLS, MODELS


def grid_index(gbit: float) -> int:
    return min(range(len(GRID_GBIT)), key=lambda i: abs(math.log(GRID_GBIT[i] / gbit)))


def misses(source: Source | None = None) -> dict[tuple[str, str, int, float], int]:
    """Return the difference in grid steps of each cell that is not exact."""
    found = {}
    for (model, system, period), published in CELLS.items():
        rebuilt = rows(Model(*MODELS[model]), period, [system], source)
        for row, gbit in zip(rebuilt, published, strict=True):
            assert row.gbit_per_second is not None
            off = grid_index(row.gbit_per_second) - grid_index(gbit)
            if off:
                found[model, system, period, row.utilization] = off
    return found


def test_every_published_cell_is_within_one_step_and_60_of_65_are_exact() -> None:
    """There are 65 cells; the ones that are off are listed."""
    total = sum(len(each) for each in CELLS.values())
    off = misses()
    assert total == 65
    assert off == {
        ("1B", "streaming-overlap-4bit", 100, 0.5): -1,
        ("10B", "streaming", 100, 0.99): 1,
        ("10B", "streaming-overlap", 100, 0.5): -1,
        ("10B", "diloco", 10, 0.95): -1,
        ("10B", "diloco", 50, 0.95): 1,
    }
    assert total - len(off) == 60


def test_one_volume_for_both_papers_is_within_one_step_but_for_one_cell() -> None:
    """Effect of the second volume: without it, three in four cells are exact."""
    off = misses("streaming-diloco")
    assert len(off) == 14
    assert [cell for cell, steps in off.items() if abs(steps) > 1] == [("10B", "diloco", 50, 0.95)]


def test_the_source_is_the_paper_with_the_row() -> None:
    assert source_of("diloco", 100) == "streaming-diloco"
    assert source_of("diloco", 30) == "scaling-laws"
    assert source_of("streaming", 30) == source_of("data-parallel", 30) == "streaming-diloco"


def test_a_period_of_one_step_is_data_parallel() -> None:
    found = rows(Model(10e9, 48, 0.8), 1, ["data-parallel", "diloco"])
    assert [r.gbit_per_second for r in found[:5]] == [r.gbit_per_second for r in found[5:]]


def test_a_higher_target_needs_more_bandwidth() -> None:
    """Check sizes that no table lists."""
    for model in (Model(100e9, 108, 4.9), Model(405e9, 126, 26.0), Model(3e9, 31, 0.3)):
        for system in SYSTEMS:
            needed = [row.gbit_per_second or math.inf for row in rows(model, 100, [system])]
            assert all(a <= b for a, b in pairwise(needed)), system
            assert needed[0] < math.inf


def test_a_target_beyond_the_grid_has_no_bandwidth() -> None:
    (row,) = rows(Model(1e15, 10, 0.1), 1, ["data-parallel"], targets=(0.99,))
    assert row.gbit_per_second is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"period": 0}, "period=0 is out of range"),
        ({"systems": ["dilco"]}, "did you mean 'diloco'"),
        ({"targets": (1.5,)}, "utilization=1.5 is out of range"),
    ],
)
def test_invalid_input_is_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rows(**{"model": Model(1e9, 24, 0.1), "period": 100, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0.0, 24, 0.1), "params=0 is out of range"),
        ((1e9, 0, 0.1), "layers=0 is out of range"),
        ((1e9, 24, -1.0), "step_seconds=-1 is out of range"),
    ],
)
def test_an_invalid_model_is_rejected(given: tuple[float, int, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Model(*given)


def test_the_targets_are_those_of_the_tables() -> None:
    assert TARGETS == (0.5, 0.8, 0.9, 0.95, 0.99)
    assert GRID_GBIT[0] == pytest.approx(0.1)
    assert GRID_GBIT[-1] == pytest.approx(1000.0)
