"""Which progress the checkers require in a world without faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.protocol.messages import Failed, Fetch, Version
from worlds.liveness import is_ending, must_be_merged, must_go_on
from worlds.scene import Mishaps, Scene, draw, heal
from worlds.shrink import Changes
from worlds.worlds import must_end

OPTIONS = {
    "fragments": 2,
    "period": 4,
    "overlap": 1,
    "shards": 1,
    "quorum": 1,
    "wait": "never",
    "late": "next",
}
NEAR = {
    "step_seconds": 1.0,
    "variance": 0.0,
    "latency": 0.001,
    "jitter": 0.0,
    "joins_at": 0.0,
    "up_bytes_per_second": 1e6,
    "down_bytes_per_second": 1e6,
}
Begin = Callable[..., Scene]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Draw a world of three learners, without faults."""
    with ExitStack() as stack:

        def begun(options: dict[str, Any], **learners: Any) -> Scene:
            changes = Changes(
                without_faults=tuple(range(1000)),
                without_standbys=True,
                options={**OPTIONS, **options},
                mishaps={f.name: 0.0 for f in fields(Mishaps)},
                learners={**NEAR, **learners},
            )
            scene = draw(2, tmp_path / "run", changes)
            stack.callback(scene.system.close)
            return scene

        yield begun


def test_a_learner_that_lost_power_before_the_end_is_evicted_during_it(begin: Begin) -> None:
    """Its lease expires in the closing sweep: the consequences of its fault are not over before."""
    scene = begin({"max_steps": 12})
    system = scene.system
    system.run(until=10.5)
    system.crash(system.learners["learner-1"], silent=True)
    system.run(until=15.0, stop=lambda: is_ending(system))
    heal(scene)
    must_go_on(scene)
    must_end(scene)


@pytest.mark.parametrize(("latency", "merged"), [(0.4, True), (0.6, False)])
def test_a_learner_whose_copies_are_always_superseded_need_not_be_merged(
    begin: Begin, latency: float, merged: bool
) -> None:
    """A fragment has a new version every second, and the round trip takes about as long."""
    scene = begin({"period": 1, "overlap": 0}, latency=latency)
    assert must_be_merged(scene, "learner-0") is merged


@pytest.mark.parametrize(("latency", "more"), [(0.1, 0.0), (3.0, 7.0)])
def test_only_a_distant_learner_has_more_time_for_each_superseded_copy(
    begin: Begin, latency: float, more: float
) -> None:
    bounds = begin({}, latency=latency).bounds
    learner = bounds.learners[0]
    before = bounds.behind_seconds_max(learner, 5.0)
    failed = Failed(Fetch(0, 0, Version(1, 1), "", True, "", ""), "withdrawn")
    for now in (4.0, 6.0):
        bounds(learner.name, now, failed, ())
    found = bounds.behind_seconds_max(learner, 5.0) - before
    assert found == pytest.approx(more, abs=0.01)
