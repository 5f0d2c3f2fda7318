"""Random worlds: options, learners, links and faults are drawn from a seed and must all hold.

    python -m decoupled_diloco.simulate.fuzz --seed 17            # repeat one, print its tape
    python -m decoupled_diloco.simulate.fuzz --seed 17 --shrink   # a smaller one that fails alike
    python -m decoupled_diloco.simulate.fuzz --runs 500           # seeds 0, 1, 2, …

A run has three parts: faults at random; then none, and every fragment must go on; then, with a
budget, the end, in which nothing may be missing. Where shards have standbys, each of them takes
over once more in between, within a time that is known.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from decoupled_diloco.simulate.bounds import Bounds
from decoupled_diloco.simulate.checkers import Checker
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.cuts import check_run_checkpoint, resumed
from decoupled_diloco.simulate.data_checker import DataChecker
from decoupled_diloco.simulate.drawn import Scenario, draw
from decoupled_diloco.simulate.liveness import must_go_on
from decoupled_diloco.simulate.shrink import Changes, shrink, signature
from decoupled_diloco.simulate.world import World

COMMAND = "python -m decoupled_diloco.simulate.fuzz --seed {seed}"

RESUMED = 0.3
"""Share of the worlds with complete cuts in which another world goes on from one of them."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one random world has seen."""

    seed: int
    events: int
    seconds: float
    merges: int
    abandoned: int
    verdict: str


def run(seed: int, recorder: Any = None, changes: Changes | None = None) -> Report:
    """Runs the random world of a seed; raises `AssertionError` when something does not hold."""
    started = time.perf_counter()
    scenario = draw(seed, changes)
    world, checker = scenario.world, scenario.checker
    data = None if world.data is None else DataChecker(world)
    if recorder is not None:
        world.recorders.insert(0, recorder)
    world.run(until=scenario.faulty_seconds)
    heal(world)
    must_go_on(scenario, data)
    if data is not None:
        data.check_accounts()
    _must_go_on_from_a_checkpoint(scenario, data)
    merged = sum(r.verdict == "merged" for r in checker.rounds)
    return Report(
        seed,
        world.events,
        time.perf_counter() - started,
        merged,
        len(checker.rounds) - merged,
        "finished" if world.finished else "went on",
    )


def _must_go_on_from_a_checkpoint(scenario: Scenario, earlier: DataChecker | None) -> None:
    """Every complete cut is consistent, and what goes on from one goes on as it should."""
    complete = sorted(scenario.world.cuts.complete)
    for number in complete:
        check_run_checkpoint(scenario.world, number)
    choices = Choices(f"{scenario.seed}/resume")
    old = scenario.world
    if not complete or not choices.chance(RESUMED):
        return
    number = choices.pick(complete)

    def make() -> World:
        return World(
            scenario.options,
            scenario.learners,
            seed=f"{scenario.seed}/cut-{number}",
            bodies=old.bodies,
            weights_from_file=old.weights_from_file,
            inbox_seconds=old.inbox_seconds,
            data=old.data and replace(old.data, trained=list(old.data.trained)),
        )

    world = resumed(old, number, make)
    data = None
    if earlier is not None:
        data = DataChecker(world)
        data.go_on_from(earlier)
    after = replace(scenario, world=world, checker=Checker(world), bounds=Bounds(world))
    world.run(until=1.0)
    must_go_on(after, data)
    if data is not None:
        data.check_accounts()
    for later in sorted(world.cuts.complete):
        check_run_checkpoint(world, later)


SPOIL_MAX = 0.02
"""In calm so many bodies come wrong, at most: nobody is to wait because of one."""


def heal(world: World) -> None:
    """No faults from here on, but for a body now and then; whoever is down comes back."""
    world.crash_after_persist = world.crash_after_merge = world.merge_fails = 0.0
    world.spoil = min(world.spoil, SPOIL_MAX)
    world.stalls = world.slips = world.copies_slip = 0.0
    for process in world.processes:
        world.resume(process)
        world.restart(process)
        for other in world.processes:
            world.heal(process, other)
    for shard in world.shard_processes:
        shard.storage_gone = shard.disk_is_full = False
    for learner in world.learners.values():
        learner.slowness = 1.0
        learner.choke(1.0, "up")
        learner.choke(1.0, "down")
        learner.step_again()


def tape(who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
    """Prints one event and what it led to."""
    print(f"{now:10.4f} {who:12} {event}")
    for effect in effects:
        print(f"{'':24}→ {effect}")


def failure(seed: int, changes: Changes | None = None) -> AssertionError | None:
    """How the random world of a seed fails; ``None``: it holds."""
    try:
        run(seed, changes=changes)
    except AssertionError as error:
        return error
    return None


def shrunken(seed: int, changes: Changes | None = None) -> Changes | None:
    """What can be taken away from a world so that it still fails alike; ``None``: it holds."""
    failed = failure(seed, changes)
    if failed is None:
        return None
    same = signature(failed)

    def fails(candidate: Changes) -> bool:
        try:
            run(seed, changes=candidate)
        except AssertionError as error:
            return signature(error) == same
        except (ValueError, IndexError, KeyError):
            pass  # nothing is left of that world, or its options do not fit together
        return False

    return shrink(draw(seed, changes).size, fails, changes)


def command(seed: int, changes: Changes | None = None) -> str:
    """The line that repeats a world."""
    text = (changes or Changes()).to_json()
    return COMMAND.format(seed=seed) + ("" if text == "{}" else f" --with '{text}'")


def _tell(seed: int, changes: Changes | None, error: AssertionError) -> None:
    where = traceback.extract_tb(error.__traceback__)[-1]
    print(f"{command(seed, changes)}\n    {where.name}:{where.lineno}: {error}")


def _shrink(seed: int, changes: Changes | None) -> int:
    smaller = shrunken(seed, changes)
    if smaller is None:
        print(f"seed {seed} holds: there is nothing to shrink")
        return 0
    error = failure(seed, smaller)
    assert error is not None
    _tell(seed, smaller, error)
    return 1


def _repeat(seed: int, changes: Changes | None, *, quiet: bool) -> int:
    scenario = draw(seed, changes)
    print(scenario.options, *scenario.learners, *scenario.faults, sep="\n")
    print(run(seed, None if quiet else tape, changes))
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat one run and print its tape")
    parser.add_argument("--with", dest="changes", type=Changes.from_json, help="see `shrink`")
    parser.add_argument("--shrink", action="store_true", help="with --seed: find a smaller one")
    parser.add_argument("--quiet", action="store_true", help="with --seed: no tape")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    if arguments.seed is not None and arguments.shrink:
        return _shrink(arguments.seed, arguments.changes)
    if arguments.seed is not None:
        return _repeat(arguments.seed, arguments.changes, quiet=arguments.quiet)
    failed, events, started = 0, 0, time.perf_counter()
    for seed in range(arguments.first, arguments.first + arguments.runs):
        try:
            events += run(seed).events
        except AssertionError as error:
            failed += 1
            _tell(seed, None, error)
    seconds = time.perf_counter() - started
    print(f"{arguments.runs} runs, {events} events, {failed} failed, {seconds:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
