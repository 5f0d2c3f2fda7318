"""Count the files that a merged fragment and a join enter, which a reader has to open.

ARCHITECTURE.md describes both paths file by file. The tape, leases, checkpoints and flow control
beside a path enter files, too. The limits are the present numbers: a change that adds a file to a
path must change a number here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import decoupled_diloco
from decoupled_diloco.config import RunConfig
from decoupled_diloco_lab.simulate.training import VirtualRun, virtual_run

PACKAGE = Path(decoupled_diloco.__file__).parent
ARCHITECTURE = PACKAGE.parents[1] / "ARCHITECTURE.md"
BASE = ("runtime", "workloads", "units.py", "errors.py")  # used everywhere, or by the user's code

ALL_FILES_OF_A_FRAGMENT = 79
ALL_FILES_OF_A_JOIN = 109


def entered(action: Callable[[], object]) -> set[str]:
    """Return the project's files that an action enters. Virtual time uses a single thread."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":  # not an import
            found.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    inside = [Path(name).relative_to(PACKAGE) for name in found if name.startswith(str(PACKAGE))]
    return {str(path) for path in inside if path.parts[0] not in BASE}


def described(heading: str) -> set[str]:
    """Return the files that a section of ARCHITECTURE.md names, as `folder/file.py`."""
    text = ARCHITECTURE.read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"`((?:\w+/)*\w+\.py)`", section))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The files that the join of a run's first learner and one round of one fragment enter."""
    config = RunConfig(
        run={
            "name": "paths",
            "folder": tmp_path_factory.mktemp("paths") / "run",
            "max_steps": 60,
            "learners": 1,
        },
        sync={"fragments": 1, "sync_every": 8, "overlap_steps": 2, "quorum": 1},
        data={"elastic": False},
        learner={"checkpoint_interval_seconds": 0},
        workload={
            "name": "gpt",
            "options": {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 2},
        },
    )
    with virtual_run(config) as run:
        return {
            "join": entered(lambda: until(run, lambda: trained(run) >= 1)),
            "warm": entered(lambda: until(run, lambda: clock(run) >= 24)),
            "fragment": entered(lambda: until(run, lambda: clock(run) >= 32)),
        }


def until(run: VirtualRun, reached: Callable[[], bool]) -> None:
    run.system.run(stop=reached, until=1e9)
    assert reached()


def trained(run: VirtualRun) -> int:
    (host,) = run.system.learners.values()
    return 0 if host.machine is None else host.machine.state.step


def clock(run: VirtualRun) -> int:
    return run.system.shards[0].machine.state.clock


@pytest.mark.parametrize(
    ("path", "heading", "limit"),
    [
        ("fragment", "From a step to a merged fragment, file by file", ALL_FILES_OF_A_FRAGMENT),
        ("join", "From a start to the first step, file by file", ALL_FILES_OF_A_JOIN),
    ],
)
def test_a_path_enters_the_described_files(
    paths: dict[str, set[str]], path: str, heading: str, limit: int
) -> None:
    named = described(heading)
    assert named <= paths[path], "ARCHITECTURE.md names files that the path does not enter"
    assert 10 < len(named) <= 20
    assert len(paths[path]) <= limit, sorted(paths[path])
