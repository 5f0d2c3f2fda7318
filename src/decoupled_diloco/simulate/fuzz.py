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
from dataclasses import dataclass, fields, replace
from typing import Any

from decoupled_diloco.protocol.options import Options
from decoupled_diloco.simulate.bodies import NoBodies
from decoupled_diloco.simulate.bounds import Bounds
from decoupled_diloco.simulate.checkers import Checker
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.claim_checker import ClaimChecker, takeover_seconds_max
from decoupled_diloco.simulate.claims import Standbys
from decoupled_diloco.simulate.cuts import check_cut, resumed
from decoupled_diloco.simulate.data_checker import DataChecker
from decoupled_diloco.simulate.faults import (
    Fault,
    Kind,
    random_faults,
    random_takeovers,
    strike,
)
from decoupled_diloco.simulate.learner_process import LearnerProcess, LearnerSpec
from decoupled_diloco.simulate.leased_loop import NumberedParts, VirtualData
from decoupled_diloco.simulate.network import Link
from decoupled_diloco.simulate.shard_process import ShardProcess
from decoupled_diloco.simulate.shell import Shell
from decoupled_diloco.simulate.shrink import Changes, Size, shrink, signature
from decoupled_diloco.simulate.world import Mishaps, World

COMMAND = "python -m decoupled_diloco.simulate.fuzz --seed {seed}"

RESUMED = 0.3
"""Share of the worlds with complete cuts in which another world goes on from one of them."""

SETTLE_SECONDS = 90.0
"""When faults have ceased: leases (10 s), lost connections (11 s), backoff, a missed first upload
deadline (60 s)."""

EVENTS_MIN = 300
"""A world goes on for at least so many events, unless it ends."""

AWAY = ("starting", "restoring")
"""Phases in which a shard is not at work."""

LOOK_SECONDS = 5.0
"""How often it is looked whether what must happen has happened."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one random world has seen."""

    seed: int
    events: int
    seconds: float
    merges: int
    abandoned: int
    verdict: str


def random_options(choices: Choices, learners: int) -> Options:
    """Settings drawn from all of those that make sense together."""
    fragments, period = choices.integer(1, 10), choices.integer(1, 10)
    quorum = choices.pick([1, 1, 2, learners, choices.integer(1, learners)])
    quorum = min(quorum, learners)
    wait = quorum == learners and choices.chance(0.4)
    overlap = choices.integer(0, 3)
    return Options(
        fragments=fragments,
        period=period,
        overlap=min(overlap, period - 1) if wait else overlap,
        quorum=quorum,
        shards=choices.integer(1, min(3, fragments)),
        grace_margin=choices.chance(0.7) * choices.uniform(0.0, 0.95),
        participants=choices.pick(["reported", "all"]),
        alignment=choices.pick(["overwrite", "carry", "blend"]),
        missed=choices.pick(["overwrite", "rebase"]),
        apply=choices.pick(["on_arrival", "at_tau"]),
        wait="at_overlap" if wait else "never",
        counter_cap_periods=choices.integer(1, 4),
        norm_gate=choices.fork("gate").pick([0.0, 10.0]),
        oversized=choices.fork("oversized").pick(["refuse", "clip"]),
        checkpoint_every_seconds=choices.fork("cuts").pick([0.0, 2.0, 5.0, 15.0]),
    )


def random_learners(choices: Choices, count: int, step_seconds: float) -> list[LearnerSpec]:
    """Learners of different speeds behind different links; sometimes an observer."""
    spread = choices.pick([1.0, 1.2, 2.0, 4.0])
    latency = choices.log_uniform(0.0002, 0.2)
    specs = []
    for number in range(count):
        rate = choices.log_uniform(300.0, 1e6) / step_seconds
        specs.append(
            LearnerSpec(
                name=f"learner-{number}",
                step_seconds=step_seconds * choices.pick([1.0, spread, choices.uniform(1, spread)]),
                variance=choices.pick([0.0, 0.02, 0.3]),
                latency=latency * choices.uniform(0.5, 2.0),
                jitter=latency * choices.pick([0.0, 0.0, 1.0, 10.0]),
                up_bytes_per_second=rate,
                down_bytes_per_second=rate * choices.uniform(1.0, 10.0),
                tokens_per_step=choices.integer(1, 100),
                joins_at=choices.pick([0.0, 0.0, choices.uniform(0.0, 30.0)]),
            )
        )
    if choices.chance(0.2):
        specs.append(LearnerSpec("observer", joins_at=choices.uniform(0, 20), role="observer"))
    return specs


def random_data(choices: Choices) -> VirtualData | None:
    """Parts of some batches each, in half of all worlds."""
    if choices.chance(0.5):
        return None
    parts = NumberedParts(choices.integer(1, 12), choices.pick([1, 4, 12]))
    return VirtualData(parts, choices.integer(1, 3), choices.pick([1, 1, 3]))


def random_standbys(choices: Choices, changes: Changes) -> Standbys | None:
    """A standby for every shard, in a third of all worlds."""
    without = choices.chance(0.67) and not changes.with_standbys
    if without or changes.without_standbys:
        return None
    return Standbys(
        lease_seconds=choices.log_uniform(1.0, 15.0),
        storage_seconds=choices.log_uniform(0.0005, 0.1),
        storage_fails=choices.pick([0.0, 0.0, 0.05]),
    )


@dataclass(slots=True)
class Scenario:
    """One random world and what will befall it."""

    seed: int
    options: Options
    learners: list[LearnerSpec]
    faults: list[Fault]
    mishaps: Mishaps
    world: World
    checker: Checker
    bounds: Bounds
    claims: ClaimChecker
    faulty_seconds: float
    step_seconds: float
    ends: bool

    @property
    def size(self) -> Size:
        """What can be taken away from it."""
        mishaps = tuple(f.name for f in fields(Mishaps) if getattr(self.mishaps, f.name))
        learners = tuple(spec.name for spec in self.learners)
        return Size(len(self.faults), learners, mishaps, self.faulty_seconds)


def draw(seed: int, changes: Changes | None = None) -> Scenario:
    """The random world of a seed, without what is taken away from it."""
    changes = changes or Changes()
    choices = Choices(seed)
    count = choices.pick([1, 2, 2, 3, 4, 6])
    faulty = choices.uniform(20.0, 80.0)
    step_seconds = faulty * count / choices.log_uniform(30.0, 160.0)
    step_seconds = min(step_seconds, 2.0)
    options = random_options(choices.fork("options"), count)
    ends = choices.chance(0.6)
    if ends:
        steps = int((faulty + choices.uniform(0.0, 60.0)) / step_seconds) + 1
        options = replace(options, budget_steps=steps)
    learners = random_learners(choices.fork("learners"), count, step_seconds)
    often = choices.pick([0.0, 0.0, 0.02])
    mishaps = Mishaps(
        spurious_ticks=choices.pick([0.0, 0.1]),
        spoil=often,
        merge_fails=often,
        crash_after_persist=choices.pick([0.0, 0.0, 0.2]),
        poison=choices.fork("poison").pick([0.0, 0.0, 0.02]),
        disk_lies=choices.fork("lies").pick([0.0, 0.0, 0.1]),
        disk_lost=choices.fork("disks").pick([0.0, 0.3, 1.0]),
        checkpoints=choices.fork("checkpoints").pick([0.0, 0.05, 0.5]),
        checkpoint_lost=choices.fork("checkpoint lost").pick([0.0, 0.3]),
        donors=choices.fork("donors").pick([0.0, 1.0]),
        preempted=choices.fork("preempted").pick([0.0, 0.5]),
    )
    from_file = choices.chance(0.2)
    fragment_bytes = [choices.integer(10, 1000) for _ in range(options.fragments)]
    inbox_seconds = choices.fork("inbox").pick([0.0, 0.0, 0.02, 0.3])
    mean = choices.pick([2.0, 5.0, 15.0, 1000.0])
    faults = random_faults(
        choices.fork("faults"),
        [spec.name for spec in learners],
        options.shards,
        until=faulty,
        mean_seconds=mean,
    )
    standbys = random_standbys(choices.fork("standbys"), changes)
    faults += _of_claims(choices.fork("takeovers"), options.shards, standbys, faulty)
    options = replace(options, **changes.options)
    mishaps = replace(mishaps, **changes.mishaps)
    kept = [
        replace(s, **changes.learners) for s in learners if s.name not in changes.without_learners
    ]
    world = World(
        options,
        kept,
        seed=f"{seed}/world",
        mishaps=mishaps,
        weights_from_file=from_file,
        fragment_bytes=fragment_bytes[: options.fragments],
        inbox_seconds=inbox_seconds,
        data=random_data(choices.fork("data")),
        standbys=standbys,
    )
    # Its orders reach one participant long before another: what a cut must not mind.
    world.coordinator.link = Link(jitter=choices.fork("orders").pick([0.0, 0.0, 3.0, 10.0]))
    strike(world, _left(faults, world, changes))
    return Scenario(
        seed,
        options,
        kept,
        faults,
        mishaps,
        world,
        Checker(world),
        Bounds(world),
        ClaimChecker(world),
        changes.faulty_seconds or faulty,
        step_seconds,
        options.budget_steps is not None,
    )


def _of_claims(
    choices: Choices, shards: int, standbys: Standbys | None, until: float
) -> list[Fault]:
    """What befalls claims, where there are any."""
    if standbys is None:
        return []
    often = choices.pick([3.0, 10.0, 30.0])
    return random_takeovers(choices, shards, until=until, mean_seconds=often)


def _left(faults: Sequence[Fault], world: World, changes: Changes) -> list[Fault]:
    """The faults that are not taken away, nor the process that they would strike."""
    there = {"", *(process.name for process in world.processes)}
    until = changes.faulty_seconds or float("inf")
    return [
        fault
        for number, fault in enumerate(faults)
        if number not in changes.without_faults
        and {fault.process, fault.peer} <= there
        and fault.at < until
    ]


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
    _must_go_on(scenario, data)
    if data is not None:
        data.check_accounts()
    _must_go_on_from_a_cut(scenario, data)
    merged = sum(r.verdict == "merged" for r in checker.rounds)
    return Report(
        seed,
        world.events,
        time.perf_counter() - started,
        merged,
        len(checker.rounds) - merged,
        "finished" if world.finished else "went on",
    )


def _must_go_on_from_a_cut(scenario: Scenario, earlier: DataChecker | None) -> None:
    """Every complete cut is consistent, and what goes on from one goes on as it should."""
    complete = sorted(scenario.world.cuts.complete)
    for number in complete:
        check_cut(scenario.world, number)
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
    _must_go_on(after, data)
    if data is not None:
        data.check_accounts()
    for later in sorted(world.cuts.complete):
        check_cut(world, later)


def _must_go_on(scenario: Scenario, data: DataChecker | None = None) -> None:
    """Without faults every fragment goes on, and a run with a budget ends with nothing missing."""
    world, checker = scenario.world, scenario.checker
    slowest = max(pace(spec, scenario.options) for spec in scenario.learners)
    patience = SETTLE_SECONDS + 4 * (scenario.options.period + 4) * slowest
    if not world.finished:
        checker.forget()
        _go_on(scenario, SETTLE_SECONDS + patience)
        _take_over(scenario, patience)
        checker.forget()
        scenario.bounds.calm()
        _go_on(scenario, patience)
        standing = scenario.bounds.standing()
        assert not standing, f"{standing} do not step: {_phases(world)}"
        if data is not None and all(keeps_up(scenario, name) for name in _trainers(scenario)):
            data.check_progress(6 * patience)
    if scenario.ends:
        steps = scenario.options.budget_steps or 0
        world.run(until=world.now + 2 * patience + 2 * steps * slowest)
        assert world.finished, f"the run does not end: {_phases(world)}"
        checker.check_end()


def _go_on(scenario: Scenario, patience: float) -> None:
    """Lets time pass until every fragment was merged and has heard everybody; or it has not."""
    world, checker = scenario.world, scenario.checker
    until = world.now + patience
    while True:
        sweeping = world.coordinator.machine.state.phase in ("ending", "finished")
        still = checker.fragments_without_merge()
        unheard = [pair for pair in checker.unheard() if keeps_up(scenario, pair[1])]
        done = not still and not unheard and _all_here(world) and world.events >= EVENTS_MIN
        if sweeping or done or world.now >= until:
            break
        world.run(until=min(until, world.now + LOOK_SECONDS))
    assert sweeping or not still, f"nothing merged into {still}: {_phases(world)}"
    assert sweeping or not unheard, f"a fragment does not hear a learner: {unheard}"
    assert sweeping or _all_here(world), f"somebody is not back: {_phases(world)}"


def _take_over(scenario: Scenario, patience: float) -> None:
    """Strikes each shard that has a standby: the other process is at work, and commits, in time."""
    world, checker = scenario.world, scenario.checker
    for standby in world.standbys:
        before = world.acting(standby.shard)
        seconds = takeover_seconds_max(world, standby.shard)
        if not before.alive or _is_over(before) or _ends_within(scenario, 3 * seconds):
            return
        kinds: list[Kind] = ["crash", "pause", "unmount"]
        kind = before.choices.pick(kinds)
        strike(world, [Fault(world.now, kind, before.name, seconds)])
        struck_at = world.now
        world.run(until=struck_at + seconds)
        after = world.acting(standby.shard)
        text = f"{seconds:.1f} s after {kind} of {before.name}: {_phases(world)}"
        assert after is not before or after.life != before.life or world.finished, text
        at_work = after.machine is not None and after.machine.state.phase not in AWAY
        assert at_work or world.finished, text
        checker.forget()
        _go_on(scenario, SETTLE_SECONDS + patience)


def _ends_within(scenario: Scenario, seconds: float) -> bool:
    """Whether the budget may be spent by then: who comes back late is not in the closing sweep."""
    budget, clocks = scenario.options.budget_steps, scenario.world.coordinator.machine.state.clocks
    if budget is None:
        return False
    fastest = min(spec.step_seconds for spec in scenario.learners if spec.role == "learner")
    return (budget - max(clocks.values(), default=0)) * 0.5 * fastest < seconds


def _all_here(world: World) -> bool:
    """Whether every process is alive, and every shard at work."""
    return all(process.alive or _is_over(process) for process in world.processes) and all(
        shard.machine is not None and shard.machine.state.phase not in AWAY
        for shard in map(world.acting, range(len(world.shards)))
    )


def _is_over(process: Shell) -> bool:
    if isinstance(process, ShardProcess):
        return process.finished
    return isinstance(process, LearnerProcess) and process.over


def _trainers(scenario: Scenario) -> list[str]:
    return [spec.name for spec in scenario.learners if spec.role == "learner"]


def keeps_up(scenario: Scenario, learner: str) -> bool:
    """Whether a learner's uplink carries what it is asked for, with half as much to spare."""
    world, options = scenario.world, scenario.options
    assert isinstance(world.bodies, NoBodies)
    nbytes = sum(world.bodies.fragment_bytes) * world.bodies.ratio
    fastest = min(spec.step_seconds for spec in scenario.learners if spec.role == "learner")
    rate = world.learners[learner].spec.up_bytes_per_second
    return rate * options.period * fastest > 1.5 * nbytes


def pace(spec: LearnerSpec, options: Options) -> float:
    """An upper bound of a learner's seconds per step, waiting included if it waits."""
    way = spec.latency + spec.jitter
    bodies = 1500.0 * options.fragments / options.period / spec.up_bytes_per_second
    waits = options.wait == "at_overlap"
    return 1.5 * spec.step_seconds + (12 * way + 3 * bodies if waits else 0.0)


def heal(world: World) -> None:
    """No faults from here on; whoever is down comes back."""
    world.crash_after_persist = world.spoil = world.merge_fails = 0.0
    for process in world.processes:
        world.resume(process)
        world.restart(process)
        for other in world.processes:
            world.heal(process, other)
    for shard in world.shard_processes:
        shard.storage_gone = False
    for learner in world.learners.values():
        learner.slowness = 1.0


def _phases(world: World) -> str:
    phases = [f"coordinator {world.coordinator.machine.state.phase}"]
    for shard in world.shard_processes:
        phase = "waiting" if shard.machine is None else shard.machine.state.phase
        phases.append(f"{shard.name} {phase if shard.alive else 'dead'}")
    phases += [
        f"{learner.name} {'over' if learner.over else 'alive' if learner.alive else 'dead'}"
        for learner in world.learners.values()
    ]
    return ", ".join(phases)


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
