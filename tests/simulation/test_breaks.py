"""Random worlds notice every deliberate break of the core, its shells and its storage."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from decoupled_diloco.simulate import crashes, worlds
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.disk import Loss
from decoupled_diloco.simulate.shrink import Changes, signature
from deliberate_breaks import ROOT, Break
from simulation.apart_breaks import APART
from simulation.breaks import CORE, SHELLS, STORAGE
from simulation.own_breaks import OWN_STEPS
from simulation.residual_breaks import RESIDUALS
from simulation.revision_breaks import REVISIONS
from simulation.shell_breaks import SHELLS as REAL_SHELLS
from simulation.trial_breaks import TRIAL
from unit.learner import test_exchange
from unit.syncer import test_late_ticks

SEEDS = range(130)
"""One of the first ten worlds notices most breaks; a few need a rare coincidence. The recorded seed
is tried first, so that only a break whose seed no longer notices it takes long."""

WORLDS = (*CORE, *RESIDUALS, *REVISIONS, *OWN_STEPS, *APART, *REAL_SHELLS)


def marks_of(breaks: tuple[Break, ...]) -> list[str]:
    return [each.mark for each in breaks]


def noticed(each: Break, seeds: Iterable[int]) -> int | None:
    """The first world that notices a break."""
    with each.broken():
        return next((seed for seed in seeds if worlds.failure(seed, each.changes)), None)


@pytest.mark.parametrize("each", WORLDS, ids=marks_of(WORLDS))
def test_a_world_notices_a_break(each: Break) -> None:
    seed = noticed(each, (each.noticed_by, *SEEDS))
    assert seed is not None, f"no world notices that {each.what}"
    assert worlds.failure(seed, each.changes) is None, "the code itself holds"


def told_wrong(seed: int, folder: Path) -> bool:
    try:
        crashes.story(seed, folder)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("each", STORAGE, ids=marks_of(STORAGE))
def test_a_story_of_crashes_notices_a_break(each: Break, tmp_path: Path) -> None:
    with each.broken():
        seeds = SEEDS
        caught = next((s for s in seeds if told_wrong(s, tmp_path / f"broken-{s}")), None)
    assert caught is not None, f"no story notices that {each.what}"
    assert not told_wrong(caught, tmp_path / "whole"), "the storage itself holds"


def test_a_journal_without_sync_is_caught_at_its_first_crash_point(tmp_path: Path) -> None:
    (each,) = (e for e in STORAGE if e.mark == "journal-not-synced")
    (tmp_path / "history").mkdir()
    with each.broken():
        history = crashes.record(tmp_path / "history", "01")
    loss = Loss(Choices(0), names=1.0, writes=1.0)
    with pytest.raises(AssertionError, match=r"1\.0, 1\.1 told"):
        crashes.crash(history, len(history.disk.log), loss, tmp_path / "after")


def rebases(folder: Path) -> None:
    test_exchange.test_rebase_keeps_nothing_of_a_rounding(torch.bfloat16)


def ticks(folder: Path) -> None:
    asyncio.run(test_late_ticks.test_what_has_arrived_is_told_before_the_tick(folder))


CHECKS: dict[str, Callable[[Path], None]] = {
    "rebase-keeps-rounding": rebases,
    "tick-before-arrivals": ticks,
}


@pytest.mark.parametrize("each", SHELLS, ids=marks_of(SHELLS))
def test_a_test_of_the_real_shell_notices_a_break(each: Break, tmp_path: Path) -> None:
    check = CHECKS[each.mark]
    with each.broken(), pytest.raises(AssertionError):
        check(tmp_path / "broken")
    check(tmp_path / "whole")


@pytest.mark.parametrize("mark", ["quorum-of-one", "lease-not-renewed"])
def test_a_failing_world_shrinks_to_one_that_fails_alike(mark: str) -> None:
    (each,) = (e for e in CORE if e.mark == mark)
    with each.broken():
        seed = next(s for s in SEEDS if worlds.failure(s))
        before = worlds.failure(seed)
        changes = worlds.shrunken(seed)
        assert before is not None
        assert changes is not None
        again = Changes.from_json(changes.to_json())
        after = worlds.failure(seed, again)
        assert after is not None
        assert signature(after) == signature(before)
        assert changes != Changes()
        assert worlds.command(seed, again).endswith(f"--seed {seed} --with '{changes.to_json()}'")
    assert worlds.failure(seed, again) is None, "the shrunken world of the whole core holds"


def test_a_world_that_holds_does_not_shrink() -> None:
    assert worlds.shrunken(3) is None


def test_the_line_repeats_the_world_that_is_left() -> None:
    changes = Changes(
        without_faults=(0, 1), options={"quorum": 1}, learners={"jitter": 0.0}, faulty_seconds=9.5
    )
    shown = worlds.command(5, changes).removeprefix("python ")
    command = f"{sys.executable} {shown} --quiet"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert "quorum=1" in done.stdout
    assert f"events={worlds.run(5, changes=changes).events}" in done.stdout
    assert worlds.run(5, changes=changes).events != worlds.run(5).events


APPLIED = """\
import sys, pytest
from simulation.trial_breaks import TRIAL
(each,) = (each for each in TRIAL if each.mark == sys.argv[1])
with each.broken():
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"tests/{each.test}"]))
"""


@pytest.mark.long
@pytest.mark.parametrize("each", TRIAL, ids=marks_of(TRIAL))
def test_the_named_test_notices_a_break(each: Break) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-c", APPLIED, each.mark],
        cwd=ROOT,
        env=own | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "1 failed" in done.stdout
