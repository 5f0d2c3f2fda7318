"""Compare the goodput simulator with published results, and check how its constants were fitted."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from decoupled_diloco_plan.goodput.calibrate import (
    CELLS,
    CHIPS,
    NAMES,
    Cell,
    calibrated,
    residuals,
    rounded,
)
from decoupled_diloco_plan.goodput.cluster_settings import Cluster, Constants, System
from decoupled_diloco_plan.goodput.systems import simulate
from simulation.scavenging import SCAVENGED, relative_time

POINTS = 3.0


def kept() -> dict[str, float]:
    constants = asdict(Constants())
    return {name: constants[name] for name in NAMES}


def squares(constants: Constants) -> float:
    fitted = tuple(cell for cell in CELLS if cell.calibrate)
    return sum(each.points**2 for each in residuals(constants, fitted))


@pytest.mark.long
def test_the_constants_are_a_minimum_of_the_calibration() -> None:
    """The valley is flat in the step's duration, so only the value of the minimum is compared."""
    found = calibrated(start=tuple(kept().values()), iterations=1, failures=20_000)
    assert squares(found) == pytest.approx(squares(Constants()), rel=0.1)
    changes = {name: asdict(found)[name] / value for name, value in kept().items()}
    assert changes == pytest.approx(dict.fromkeys(NAMES, 1.0), abs=0.15)
    others = {n: v for n, v in asdict(rounded(found)).items() if n not in NAMES}
    assert others == {n: v for n, v in asdict(Constants()).items() if n not in NAMES}


def test_the_search_finds_the_constants_from_its_start() -> None:
    found = asdict(calibrated(failures=1_000))
    assert {name: found[name] for name in NAMES} == pytest.approx(kept(), rel=0.3)
    for name in ("downscale_seconds", "restart_seconds"):
        assert found[name] == pytest.approx(kept()[name], rel=0.07)


def test_only_cells_of_systems_with_one_learner_are_fitted() -> None:
    assert {cell.system for cell in CELLS if cell.calibrate} == {"data-parallel", "elastic"}
    assert {cell.learners for cell in CELLS if cell.calibrate} == {1}


def goodput(system: System, chips: int, learners: int = 1, failures: int = 15_000) -> float:
    """Simulate enough failures that chance accounts for only a few tenths of a point."""
    cluster = Cluster(system, chips, learners)
    return simulate(cluster, failures * cluster.mtbi_seconds / chips, 0).goodput


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.system}-{c.chips}-{c.learners}")
def test_published_goodput_is_met_within_three_points(cell: Cell) -> None:
    assert goodput(cell.system, cell.chips, cell.learners) == pytest.approx(
        cell.goodput, abs=POINTS
    )


@pytest.mark.parametrize("learners", [2, 3, 4, 16])
def test_learners_do_as_well_as_elastic_training_of_their_size(learners: int) -> None:
    """This is a published observation for all sizes. Here it must follow from the simulation."""
    for chips in CHIPS:
        whole = goodput("decoupled", chips, learners)
        assert whole == pytest.approx(goodput("elastic", chips // learners), abs=1.0)


def test_goodput_falls_with_chips_and_rises_with_learners_listed_or_not() -> None:
    chips = (50_000, 75_000, 150_000, 450_000, 1_000_000, 2_400_000, 5_000_000, 10_000_000)
    rows = [[goodput("decoupled", n, m, 5_000) for n in chips] for m in (1, 2, 3, 5, 12, 32)]
    table = np.array(rows)
    assert (np.diff(table, axis=1) < 0).all()
    assert (np.diff(table, axis=0) > 0).all()


@pytest.mark.parametrize("learners", [4, 8, 16])
def test_some_learner_always_steps(learners: int) -> None:
    account = simulate(Cluster("decoupled", 2_400_000, learners), 86400.0, 0)
    assert account.uptime > 99


@pytest.mark.parametrize("chips", [150_000, 2_400_000])
@pytest.mark.parametrize(("share", "published"), [(x, both[0]) for x, both in SCAVENGED.items()])
def test_decoupled_training_uses_scavenged_chips_as_published(
    chips: int, share: float, published: float
) -> None:
    time = relative_time(Cluster("decoupled", chips, 8), share)
    assert time == pytest.approx(published, abs=0.03)


@pytest.mark.parametrize(("share", "published"), [(x, both[1]) for x, both in SCAVENGED.items()])
def test_elastic_training_uses_scavenged_chips_as_published(share: float, published: float) -> None:
    """The size of the cluster is not published, so two sizes are compared."""
    assert relative_time(Cluster("elastic", 2_400_000), share) == pytest.approx(published, abs=0.03)
    assert relative_time(Cluster("elastic", 1_200_000), share) == pytest.approx(published, abs=0.06)
