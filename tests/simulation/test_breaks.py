"""Every deliberate break of the core and of its storage is caught, within so many random worlds."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decoupled_diloco.simulate import crashes, worlds
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.disk import Loss
from decoupled_diloco.simulate.shrink import Changes, signature
from simulation.apart_breaks import APART
from simulation.breaks import CORE, SHELLS, STORAGE, Break
from simulation.own_breaks import OWN_STEPS
from simulation.residual_breaks import RESIDUALS
from simulation.revision_breaks import REVISIONS
from unit.learner import test_exchange
from unit.syncer import test_late_ticks

SEEDS_MAX = 130
"""Most breaks are caught by one of the first ten seeds; a few need a rare coincidence. The world
that has noticed one is tried first; if it does no longer, the others are looked through."""


def names(breaks: tuple[Break, ...]) -> list[str]:
    return [each.what for each in breaks]


@pytest.mark.parametrize("each", CORE, ids=names(CORE))
def test_a_broken_core_is_caught(each: Break) -> None:
    with each.broken():
        seeds = (each.noticed_by, *range(SEEDS_MAX))
        caught = next((seed for seed in seeds if worlds.failure(seed, each.changes)), None)
    assert caught is not None, f"nobody notices that {each.what}"
    assert worlds.failure(caught, each.changes) is None, "the core itself holds"


@pytest.mark.parametrize("each", RESIDUALS, ids=names(RESIDUALS))
def test_broken_error_feedback_is_caught(each: Break) -> None:
    test_a_broken_core_is_caught(each)


@pytest.mark.parametrize("each", REVISIONS, ids=names(REVISIONS))
def test_a_broken_revision_is_caught(each: Break) -> None:
    test_a_broken_core_is_caught(each)


@pytest.mark.parametrize("each", OWN_STEPS, ids=names(OWN_STEPS))
def test_broken_rounds_of_ones_own_are_caught(each: Break) -> None:
    test_a_broken_core_is_caught(each)


@pytest.mark.parametrize("each", APART, ids=names(APART))
def test_who_was_apart_and_keeps_it_is_caught(each: Break) -> None:
    test_a_broken_core_is_caught(each)


def told_wrong(seed: int, folder: Path) -> bool:
    try:
        crashes.story(seed, folder)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("each", STORAGE, ids=names(STORAGE))
def test_a_broken_disk_is_caught(each: Break, tmp_path: Path) -> None:
    with each.broken():
        seeds = range(SEEDS_MAX)
        caught = next((s for s in seeds if told_wrong(s, tmp_path / f"broken-{s}")), None)
    assert caught is not None, f"nobody notices that {each.what}"
    assert not told_wrong(caught, tmp_path / "whole"), "the storage itself holds"


def test_a_journal_without_sync_is_caught_at_its_first_crash_point(tmp_path: Path) -> None:
    (each,) = (e for e in STORAGE if "not forced to the disk" in e.what)
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


CHECKS: dict[str, Callable[[Path], None]] = {"_reference": rebases, "_tick": ticks}


@pytest.mark.parametrize("each", SHELLS, ids=names(SHELLS))
def test_a_broken_shell_is_caught(each: Break, tmp_path: Path) -> None:
    check = CHECKS[each.name]
    with each.broken(), pytest.raises(AssertionError):
        check(tmp_path / "broken")
    check(tmp_path / "whole")


SHRUNKEN = (
    "one contribution is enough, whatever the quorum",
    "a lease is not renewed by what is heard",
)


@pytest.mark.parametrize("what", SHRUNKEN)
def test_a_failing_world_shrinks_to_one_that_fails_alike(what: str) -> None:
    (each,) = (e for e in CORE if e.what == what)
    with each.broken():
        seed = next(s for s in range(SEEDS_MAX) if worlds.failure(s))
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
