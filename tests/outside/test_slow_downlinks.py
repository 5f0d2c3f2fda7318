"""Rules 3, 4 and 12 for a learner whose published copies come slowly."""

from __future__ import annotations

import pytest

from decoupled_diloco.protocol import Options
from outside.measures import calm, heard, nominal, nothing_trained_is_missing
from outside.nodes import Spec
from outside.world import World

PAPER = Options(fragments=24, period=24, overlap=2)


@pytest.mark.parametrize("download", [0.5, 0.9])
def test_rule_3_a_learner_whose_downlink_just_suffices_is_heard(download: float) -> None:
    world, rounds = calm(PAPER, [*[Spec()] * 3, Spec(download=download)])
    world.run(300.0)
    assert rounds.merged(48.0, world.now) >= 0.98 * nominal(PAPER, world.now - 48.0)
    assert min(heard(world, world.learners[-1]).values()) >= 0.5 * world.now / PAPER.period


@pytest.mark.parametrize(
    ("upload", "download"),
    [
        (0.02, 1.2),
        (0.02, 3.0),
        (3.0, 3.0),
        (0.02, 12.0),
    ],
)
def test_rule_3_every_fragment_hears_a_learner_whose_downlink_is_too_slow(
    upload: float, download: float
) -> None:
    """At least once in twice the time in which its link brings the whole model once."""
    world, rounds = calm(PAPER, [*[Spec()] * 3, Spec(upload=upload, download=download)])
    world.run(100.0 + 4 * 24 * download)
    assert rounds.merged(48.0, world.now) >= 0.98 * nominal(PAPER, world.now - 48.0)
    assert min(heard(world, world.learners[-1]).values()) >= 1


def test_rule_3_one_fragment_hears_a_learner_that_is_always_a_version_behind() -> None:
    """The least world: one fragment, due every 4 s, that takes 40 s to come."""
    world = World(Options(fragments=1, period=4), [Spec(), Spec(download=40.0)])
    world.run(400.0)
    assert world.learners[1].done > 300
    assert heard(world, world.learners[1])[0] >= 1


@pytest.mark.parametrize("download", [40.0, 70.0, 150.0])
def test_rule_12_the_sweep_waits_for_the_copy_that_it_asks_a_contribution_to(
    download: float,
) -> None:
    world = World(Options(fragments=1, period=4), [Spec(), Spec(download=download)])
    world.run(300.3)
    world.end(within=1000.0)
    nothing_trained_is_missing(world, world.learners)
