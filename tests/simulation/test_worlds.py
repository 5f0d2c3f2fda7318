"""Random worlds of real processes hold, and repeat exactly."""

from __future__ import annotations

import re
from hashlib import sha256

import pytest

from decoupled_diloco.simulate import worlds
from decoupled_diloco.simulate.shrink import Changes

SEEDS = range(80)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_holds(seed: int) -> None:
    try:
        report = worlds.run(seed)
    except AssertionError as error:
        command = worlds.COMMAND.format(seed=seed)
        raise AssertionError(f"{error}\nrepeat it with: {command}") from error
    assert report.events > 0


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("seed", range(40, 45))
def test_a_world_of_several_ranks_holds(seed: int, staged: bool) -> None:
    learners = {"ranks": 3, "carriers": 2, "staged": staged}
    assert worlds.run(seed, changes=Changes(learners=learners)).events > 0


def test_a_world_repeats_exactly() -> None:
    def digest(seed: int) -> str:
        seen = sha256()

        def see(*event: object) -> None:
            seen.update(re.sub(r"/\S*?/run/", "RUN/", repr(event)).encode())

        worlds.run(seed, see)
        return seen.hexdigest()

    assert [digest(seed) for seed in range(3)] == [digest(seed) for seed in range(3)]
