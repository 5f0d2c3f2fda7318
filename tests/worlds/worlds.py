"""Random worlds: simulated runs with random faults, and checks that they always pass.

    PYTHONPATH=tests python -m worlds.worlds --runs 100
    PYTHONPATH=tests python -m worlds.worlds --seed 17            # one world, with its events
    PYTHONPATH=tests python -m worlds.worlds --seed 17 --shrink   # a smaller failing world

A world has three phases. First, faults happen at random. Then there are none, and every fragment
must progress. If shards have standbys, each of them takes over once more within a known time. With
a budget, the run then ends, and nothing may be missing.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.errors import StorageError
from decoupled_diloco.launch.resume_run import go_back
from decoupled_diloco.merge import digested_by
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.hosts import LearnerHost, VirtualLearner
from decoupled_diloco_lab.simulate.stage import Recorder
from decoupled_diloco_lab.simulate.system import System
from worlds.checkers import Checker
from worlds.liveness import must_go_on, pace, transfer_seconds
from worlds.scene import Scene, draw, heal, watch_checkpoints
from worlds.shrink import Changes, shrink, signature

COMMAND = "PYTHONPATH=tests python -m worlds.worlds --seed {seed}"

SETTLE_SECONDS = 120.0
"""Time for leases, lost connections and backoff after faults have ceased."""

RESUMED = 0.3
"""Share of the worlds with checkpoints of the whole run that resume from the last one."""

BLOCK = 16
"""Elements per digest block. Models are small, and sync ranks hold whole blocks."""

RAM = "/dev/shm"
"""Folder for a world's files, if this machine has it: they need not survive."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a world."""

    seed: int | str
    events: int
    seconds: float
    processor_seconds: float
    verdict: str


def run(
    seed: int | str, recorder: Recorder | None = None, changes: Changes | None = None
) -> Report:
    """Run the world of a seed.

    Raises:
        AssertionError: A rule is broken.
    """
    started = time.process_time()
    torch.set_num_threads(1)
    with digested_by(BLOCK), a_folder() as folder:
        scene = draw(seed, folder, changes)
        system = scene.system
        if recorder is not None:
            system.recorders.insert(0, recorder)
        try:
            must_hold(scene)
            verdict = "finished" if system.finished else "went on"
        finally:
            system.close()
        events = system.events + must_go_on_from_a_checkpoint(scene)
    return Report(seed, events, system.now, time.process_time() - started, verdict)


def must_hold(scene: Scene) -> None:
    """Run a world through all its phases.

    Raises:
        AssertionError: A rule is broken.
    """
    system = scene.system
    system.run(until=scene.calm_at, stop=lambda: system.finished)
    heal(scene)
    if scene.goes_on:
        must_go_on(scene)
    if scene.ends:
        must_end(scene)
    if scene.data is not None:
        scene.data.check_accounts()
    problems = [text for host in system.hosts for loop in host.graves for text in loop.problems]
    assert not problems, problems[0]


def must_end(scene: Scene) -> None:
    """Check that the run ends in time, with nothing missing.

    Raises:
        AssertionError: It does not.
    """
    system = scene.system
    limit = max(system.now, scene.calm_at) + patience(scene)
    system.run(until=limit, stop=lambda: system.finished)
    assert system.finished, f"the run is not over after {limit:.0f} s: {_state(scene)}"
    system.run(until=system.now + 60.0)
    scene.checker.check_end()
    scene.lineage.check_end()
    unwritten = [host.name for host in system.learners.values() if host.over and _writes(host)]
    assert not unwritten, f"{unwritten} have left without writing their checkpoints"


def _writes(host: LearnerHost) -> bool:
    learner = host.participant
    checkpointer = (
        learner.party.boundary.checkpointer if isinstance(learner, VirtualLearner) else None
    )
    writing = None if checkpointer is None else checkpointer.writing
    return writing is not None and not writing.done()


def must_go_on_from_a_checkpoint(scene: Scene) -> int:
    """In some worlds, resume the run from its last checkpoint and check its end again.

    Returns:
        The number of events of the resumed run.

    Raises:
        AssertionError: It does not.
    """
    old, chosen = scene.system, Choices(f"{scene.seed}/resume").chance(RESUMED)
    if not (chosen and scene.ends and old.options.checkpoint_every_seconds) or old.standbys:
        return 0
    try:
        go_back(old.folder, old.config, "last")
    except StorageError:
        return 0  # there is no complete checkpoint
    system = System(
        old.config,
        scene.learners,
        old.folder,
        seed=f"{scene.seed}/resumed",
        sizes=old.sizes,
        relays=[host.spec for host in old.relays],
    )
    checker, again = Checker(system), replace(scene, system=system)
    scene.lineage.resumed(system)
    scene.residuals.resumed(system)
    watch_checkpoints(system, scene.lineage, scene.residuals)
    try:
        system.run(until=patience(again), stop=lambda: system.finished)
        assert system.finished, f"the resumed run is not over: {_state(again)}"
        system.run(until=system.now + 60.0)
        checker.check_end()
        scene.lineage.check_end()
    finally:
        system.close()
    return system.events


def patience(scene: Scene) -> float:
    """Return the longest time from a world's last fault to the end of its run."""
    options = scene.options
    steps = (options.max_steps or 0) + 6 * options.periods[1]
    way = max(spec.latency + spec.jitter for spec in scene.learners)
    rest = 12 * transfer_seconds(scene) + 60 * (way + scene.system.link_of_shards.jitter)
    return SETTLE_SECONDS + 3 * steps * pace(scene) + rest


def _state(scene: Scene) -> str:
    parts = []
    for host in scene.system.hosts:
        phase = getattr(getattr(getattr(host, "machine", None), "state", None), "phase", "")
        parts.append(f"{host.name} {'alive' if host.alive else 'dead'} {phase}".strip())
    return ", ".join(parts)


@contextmanager
def a_folder() -> Iterator[Path]:
    """A new folder for a world, which is deleted afterwards."""
    with tempfile.TemporaryDirectory(dir=RAM if Path(RAM).is_dir() else None) as folder:
        yield Path(folder) / "run"


def failure(seed: int | str, changes: Changes | None = None) -> Exception | None:
    """Run the world of a seed and return its error, or ``None``."""
    try:
        run(seed, changes=changes)
    except Exception as error:
        return error
    return None


def shrunken(seed: int | str, changes: Changes | None = None) -> Changes | None:
    """Find the parts that can be removed so that a world still fails alike.

    Returns:
        The changes, or ``None`` if the world does not fail.
    """
    failed = failure(seed, changes)
    if failed is None:
        return None
    same = signature(failed)

    def fails(candidate: Changes) -> bool:
        try:
            error = failure(seed, candidate)
        except (ValueError, IndexError, KeyError):
            return False  # too little is left of that world, or its options are not valid together
        return error is not None and signature(error) == same

    with a_folder() as folder:
        size = draw(seed, folder, changes).size
    return shrink(size, fails, changes)


def command(seed: int | str, changes: Changes | None = None) -> str:
    """Return the command that repeats a world."""
    text = (changes or Changes()).to_json()
    return COMMAND.format(seed=seed) + ("" if text == "{}" else f" --with '{text}'")


def collect(*, first: bool) -> None:
    """Free a world's objects. After the first world, freeze the imports to skip them later."""
    gc.collect()
    if first:
        gc.freeze()


def tape(process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
    """Print an event and its effects."""
    print(f"{now:10.4f} {process:12} {event}")
    for effect in effects:
        print(f"{'':24}→ {effect}")


def _report(seed: int, changes: Changes | None, error: Exception) -> None:
    where = traceback.extract_tb(error.__traceback__)[-1]
    print(
        f"{command(seed, changes)}\n    {where.name}:{where.lineno}: {error!r}"[:1500], flush=True
    )


def _shrink(seed: int, changes: Changes | None) -> int:
    smaller = shrunken(seed, changes)
    if smaller is None:
        print(f"seed {seed} does not fail: there is nothing to shrink")
        return 0
    error = failure(seed, smaller)
    assert error is not None
    _report(seed, smaller, error)
    return 1


def _repeat(seed: int, changes: Changes | None, *, quiet: bool) -> int:
    with digested_by(BLOCK), a_folder() as folder:
        scene = draw(seed, folder, changes)
        print(scene.options, scene.mishaps, *scene.learners, *scene.faults, sep="\n")
    print(run(seed, None if quiet else tape, changes))
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat one world and print its events")
    parser.add_argument("--with", dest="changes", type=Changes.from_json, help="see `shrink`")
    parser.add_argument("--shrink", action="store_true", help="with --seed: find a smaller world")
    parser.add_argument("--quiet", action="store_true", help="with --seed: print no events")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if arguments.seed is not None and arguments.shrink:
        return _shrink(arguments.seed, arguments.changes)
    if arguments.seed is not None:
        return _repeat(arguments.seed, arguments.changes, quiet=arguments.quiet)
    failed, events, started = 0, 0, time.process_time()
    for seed in range(arguments.first, arguments.first + arguments.runs):
        try:
            events += run(seed).events
        except Exception as error:  # of any kind: the seed repeats it
            failed += 1
            _report(seed, None, error)
        collect(first=seed == arguments.first)
    seconds = time.process_time() - started
    print(f"{arguments.runs} worlds, {events} events, {failed} failed, {seconds:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
