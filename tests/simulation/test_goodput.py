"""What the goodput simulator says, against what was published; how its constants were found."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from decoupled_diloco.goodput.calibrate import NAMES, calibrated, rounded
from decoupled_diloco.goodput.published import CELLS, Cell
from decoupled_diloco.goodput.scavenge import relative_time
from decoupled_diloco.goodput.settings import Cluster, Constants
from decoupled_diloco.goodput.study import Effort, study

POINTS = 3.0


@pytest.mark.timeout(900)
def test_the_constants_are_what_calibration_finds() -> None:
    """On another machine's arithmetic the search may end a little elsewhere."""
    found = asdict(rounded(calibrated()))
    kept = asdict(Constants())
    assert {name: found[name] for name in NAMES} == pytest.approx(
        {name: kept[name] for name in NAMES}, rel=0.05
    )
    assert {n: v for n, v in found.items() if n not in NAMES} == {
        n: v for n, v in kept.items() if n not in NAMES
    }


def test_only_cells_of_systems_with_one_learner_are_fitted() -> None:
    assert {cell.system for cell in CELLS if cell.calibrate} == {"data-parallel", "elastic"}
    assert {cell.learners for cell in CELLS if cell.calibrate} == {1}


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.system}-{c.chips}-{c.learners}")
def test_published_goodput_is_met_within_three_points(cell: Cell) -> None:
    cluster = Cluster(cell.system, cell.chips, cell.learners)
    row = study(cluster, Effort(seeds=3))
    assert row.goodput == pytest.approx(cell.goodput, abs=POINTS)


@pytest.mark.parametrize("learners", [4, 8, 16])
def test_somebody_always_steps(learners: int) -> None:
    row = study(Cluster("decoupled", 2_400_000, learners), Effort(seeds=2, days=1.0))
    assert row.uptime > 99


@pytest.mark.parametrize(("share", "published"), [(0.25, 0.90), (0.5, 0.83), (1, 0.75), (3, 0.62)])
def test_decoupled_training_uses_scavenged_chips_as_well_as_can_be(
    share: float, published: float
) -> None:
    time = relative_time(Cluster("decoupled", 150_000, 8), share)
    assert time == pytest.approx(published, abs=0.02)


@pytest.mark.parametrize(("share", "published"), [(0.25, 1.07), (0.5, 1.09)])
def test_elastic_training_loses_by_them(share: float, published: float) -> None:
    assert relative_time(Cluster("elastic", 150_000), share) == pytest.approx(published, abs=0.03)
