"""Random worlds notice every deliberate break of the core, its shells and its storage."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.virtual_disk import Loss
from deliberate_breaks import ROOT, Break
from simulation.apart_breaks import APART
from simulation.breaks import CORE, STORAGE
from simulation.own_breaks import OWN_STEPS
from simulation.relay_breaks import RELAYS
from simulation.residual_breaks import RESIDUALS
from simulation.revision_breaks import REVISIONS
from simulation.shell_breaks import SHELLS
from worlds import crashes, worlds
from worlds.shrink import Changes, signature

SEEDS = range(130)
"""One of the first ten worlds notices most breaks. A few need a rare coincidence. The recorded seed
is tried first, so a test takes long only if that seed no longer notices the break."""

WORLDS = (*CORE, *RESIDUALS, *REVISIONS, *OWN_STEPS, *APART, *SHELLS, *RELAYS)


SLOW = {
    *("abandoned-round-ignored", "refused-keeps-encoding-loss", "steps-counted-per-shard"),
    *("arrival-during-merge-waits", "backlog-first-fragment", "backlog-never-requested"),
    *("coordinator-not-rejoined", "earlier-epoch-stays", "failed-fetch-unreported"),
    *("final-round-not-retried", "heard-unreported", "lost-relay-keeps-requests"),
    *("lost-request-in-flight", "newer-version-loses-turn", "relay-keeps-corrupt-copy"),
    *("older-connection-accepted", "ranks-keep-no-copies", "residual-overwrites-later"),
    *("restarted-shard-lacks-revision", "whole-copy-zeroed", "wrong-part-accepted"),
}
"""Breaks that need more than five seconds of one core to be noticed."""


def marks_of(breaks: tuple[Break, ...]) -> list[str]:
    return [each.mark for each in breaks]


def noticed(each: Break, seeds: Iterable[int]) -> int | None:
    """Return the seed of the first world that notices a break."""
    with each.broken():
        return next((seed for seed in seeds if worlds.failure(seed, each.changes)), None)


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.mark, marks=[pytest.mark.long] if each.mark in SLOW else [])
        for each in WORLDS
    ],
)
def test_a_world_notices_a_break(each: Break) -> None:
    seed = noticed(each, (each.noticed_by, *SEEDS))
    assert seed is not None, f"no world notices that {each.what}"
    assert worlds.failure(seed, each.changes) is None, "the unbroken code passes"


def story_fails(seed: int, folder: Path) -> bool:
    try:
        crashes.story(seed, folder)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("each", STORAGE, ids=marks_of(STORAGE))
def test_a_story_of_crashes_notices_a_break(each: Break, tmp_path: Path) -> None:
    with each.broken():
        seeds = SEEDS
        caught = next((s for s in seeds if story_fails(s, tmp_path / f"broken-{s}")), None)
    assert caught is not None, f"no story notices that {each.what}"
    assert not story_fails(caught, tmp_path / "whole"), "the unbroken storage passes"


def test_a_journal_without_sync_is_caught_at_its_first_crash_point(tmp_path: Path) -> None:
    (each,) = (e for e in STORAGE if e.mark == "journal-not-synced")
    (tmp_path / "history").mkdir()
    with each.broken():
        history = crashes.record(tmp_path / "history", "01")
    loss = Loss(Choices(0), names=1.0, writes=1.0)
    with pytest.raises(AssertionError, match=r"recovered 1\.0, published 1\.1"):
        crashes.crash(history, len(history.disk.log), loss, tmp_path / "after")


@pytest.mark.long
@pytest.mark.parametrize("mark", ["lease-not-renewed", "quorum-of-one"])
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
    assert worlds.failure(seed, again) is None, "the smaller world passes with the unbroken core"


def test_a_world_that_passes_does_not_shrink() -> None:
    assert worlds.shrunken(3) is None


@pytest.mark.long
def test_the_printed_command_repeats_the_smaller_world() -> None:
    changes = Changes(
        without_faults=(0, 1), options={"quorum": 1}, learners={"jitter": 0.0}, faulty_seconds=9.5
    )
    shown = worlds.command(5, changes).replace(" python ", f" {sys.executable} ")
    command, root = f"{shown} --quiet", Path(__file__).parents[2]
    done = subprocess.run(command, shell=True, cwd=root, capture_output=True, text=True, check=True)
    assert "quorum=1" in done.stdout
    assert f"events={worlds.run(5, changes=changes).events}" in done.stdout
    assert worlds.run(5, changes=changes).events != worlds.run(5).events


NAMED_TESTS = """\
import os, sys
import pytest
import worlds.worlds  # before the forks: it takes most of a test's time
from simulation.relay_breaks import RELAY_TRIAL
from simulation.secure_breaks import SECURE_TRIAL
from simulation.trial_breaks import TRIAL

class Failed:
    calls = 0
    def pytest_runtest_logreport(self, report):
        self.calls += report.failed and report.when == "call"

COLLECT = ["-q", "-p", "no:cacheprovider", "--collect-only", "tests/unit/test_base.py"]
assert pytest.main(COLLECT) == 0  # before the forks, for the same reason: it imports all plugins
for each in (*TRIAL, *RELAY_TRIAL, *SECURE_TRIAL)[int(sys.argv[1]) :: int(sys.argv[2])]:
    sys.stdout.flush()
    if os.fork() == 0:
        failed = Failed()
        try:
            with each.broken():
                options = ["-qx", "-p", "no:cacheprovider", f"tests/{each.test}"]
                pytest.main(options, plugins=[failed])
        finally:  # resources that a failed test left open must not change the exit code
            os._exit(0 if failed.calls == 1 else 1)
    if os.wait()[1]:
        print("NOT NOTICED:", each.mark)
"""


@pytest.mark.parametrize("part", range(4))
def test_the_named_tests_notice_each_break(part: int) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-c", NAMED_TESTS, str(part), "4"],
        cwd=ROOT,
        env=own | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "NOT NOTICED" not in done.stdout, done.stdout
