"""What must happen in a random world once faults have ceased.

Every fragment goes on, at its pace, and hears everybody; a loop that stands still holds nobody up;
where shards have standbys, each of them takes over once more, within a time that is known; a run
with a budget ends, and nothing is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decoupled_diloco.protocol.membership import STANDS_SECONDS, STANDS_STEPS
from decoupled_diloco.simulate.bodies import NoBodies
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.claim_checker import takeover_seconds_max
from decoupled_diloco.simulate.data_checker import DataChecker
from decoupled_diloco.simulate.drawn import Scenario
from decoupled_diloco.simulate.faults import Fault, Kind, strike
from decoupled_diloco.simulate.learner_process import LearnerProcess, LearnerSpec
from decoupled_diloco.simulate.shard_process import ShardProcess
from decoupled_diloco.simulate.shell import Shell
from decoupled_diloco.simulate.world import World

SETTLE_SECONDS = 90.0
"""When faults have ceased: leases (10 s), lost connections (11 s), backoff, a missed first upload
deadline (60 s)."""

EVENTS_MIN = 300
"""A world goes on for at least so many events, unless it ends."""

AWAY = ("starting", "restoring")
"""Phases in which a shard is not at work."""

LOOK_SECONDS = 5.0
"""How often it is looked whether what must happen has happened."""


def must_go_on(scenario: Scenario, data: DataChecker | None = None) -> None:
    """Without faults every fragment goes on, and a run with a budget ends with nothing missing."""
    world, checker = scenario.world, scenario.checker
    slowest = pace(scenario)
    patience = SETTLE_SECONDS + 4 * (scenario.options.period + 4) * slowest
    patience += 4 * transfer_seconds(scenario)
    if not world.finished:
        checker.forget()
        _go_on(scenario, SETTLE_SECONDS + patience)
        _take_over(scenario, patience)
        checker.forget()
        scenario.bounds.calm()
        _go_on(scenario, patience)
        _keeps_pace(scenario, _trainers(scenario))
        standing = scenario.bounds.standing()
        assert not standing, f"{standing} do not step: {_phases(world)}"
        _stand_still(scenario, patience)
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
        unheard = [pair for pair in checker.unheard() if must_be_heard(scenario, pair[1])]
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
        seconds = takeover_seconds_max(world, standby.shard) + transfer_seconds(scenario)
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


def _keeps_pace(scenario: Scenario, learners: Sequence[str]) -> None:
    """Nobody waits for a slow link, nor for who is not among these: enough others are brisk."""
    options, world = scenario.options, scenario.world
    brisk = [spec for spec in scenario.learners if spec.name in learners]
    brisk = [spec for spec in brisk if keeps_up(scenario, spec.name)]
    sweeping = world.coordinator.machine.state.phase in ("ending", "finished")
    if options.wait != "never" or len(brisk) < options.quorum or sweeping:
        return
    allowed = merge_seconds_max(scenario, brisk)
    for fragment in range(options.fragments):
        seconds = scenario.checker.seconds_without_merge(fragment)
        text = f"nothing merged into fragment {fragment} for {seconds:.1f} s"
        assert seconds <= allowed, f"{text}: at most {allowed:.1f}"


def merge_seconds_max(scenario: Scenario, brisk: Sequence[LearnerSpec]) -> float:
    """How long nothing may be merged into a fragment where these keep up.

    A fragment is due once in H steps of a learner that the clock goes by, and again if its round
    is given up; its round then waits for a slot, for the grace window and for its quorum. Before,
    the clock may have to find that the loop that it goes by stands still.
    """
    options, learners = scenario.options, scenario.learners
    step = max(spec.step_seconds * (1 + 7 * spec.variance) for spec in learners)
    way = max(spec.latency + spec.jitter for spec in brisk)
    assert isinstance(scenario.world.bodies, NoBodies)
    slowest = min(min(s.up_bytes_per_second, s.down_bytes_per_second) for s in brisk)
    model = sum(scenario.world.bodies.fragment_bytes) / slowest
    stands = STANDS_SECONDS + STANDS_STEPS * step
    return 3 * (options.period + options.overlap + 4) * step + 12 * way + 3 * model + 2.0 + stands


STANDS = 0.3
"""Share of the worlds in which a loop stands still while all else is calm."""


def _stand_still(scenario: Scenario, patience: float) -> None:
    """Lets one loop stand for up to three hundred steps: rounds go on, and hear it afterwards."""
    world, checker = scenario.world, scenario.checker
    choices = Choices(f"{scenario.seed}/stands")
    if scenario.options.wait != "never" or not choices.chance(STANDS) or not _runs(world):
        return
    names = [name for name in _trainers(scenario) if not _is_waited_for(scenario, name)]
    if not names:
        return
    learner = world.learners[choices.pick(names)]
    seconds = learner.spec.step_seconds * choices.log_uniform(10.0, 300.0)
    if learner.over or not learner.alive or _ends_within(scenario, 3 * seconds):
        return
    checker.forget()
    learner.stand_still()
    world.run(until=world.now + seconds)
    _keeps_pace(scenario, [name for name in _trainers(scenario) if name != learner.name])
    learner.step_again()
    checker.forget()
    _go_on(scenario, patience)


def _runs(world: World) -> bool:
    """Whether every shard opens rounds."""
    return _all_here(world) and all(
        world.acting(shard).machine.state.phase == "running" for shard in range(len(world.shards))
    )


def _is_waited_for(scenario: Scenario, learner: str) -> bool:
    """Whether without this learner there is no quorum."""
    shards = map(scenario.world.acting, range(scenario.options.shards))
    others = (shard.machine.state.members.keys() - {learner} for shard in shards)
    return min(map(len, others)) < scenario.options.quorum


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
    """Whether a learner's link carries what it is asked for and told, with half to spare."""
    return _keeps_up(scenario, scenario.world.learners[learner].spec)


def _keeps_up(scenario: Scenario, spec: LearnerSpec) -> bool:
    world, options = scenario.world, scenario.options
    assert isinstance(world.bodies, NoBodies)
    nbytes = sum(world.bodies.fragment_bytes) * world.bodies.ratio
    fastest = min(spec.step_seconds for spec in scenario.learners if spec.role == "learner")
    rate = min(spec.up_bytes_per_second, spec.down_bytes_per_second)
    return rate * options.period * fastest > 1.5 * nbytes


def must_be_heard(scenario: Scenario, learner: str) -> bool:
    """Whether it is waited for until every fragment has heard a learner.

    In a third of all worlds for those with slow uplinks, too: they are heard in turns.
    """
    if keeps_up(scenario, learner):
        return True
    spec = scenario.world.learners[learner].spec
    swift = replace(spec, up_bytes_per_second=float("inf"))
    patient = Choices(f"{scenario.seed}/patient").chance(0.33)
    return patient and _keeps_up(scenario, swift)


def pace(scenario: Scenario) -> float:
    """An upper bound of anybody's seconds per step, waiting included where they wait."""
    options, learners = scenario.options, scenario.learners
    step = 1.5 * max(spec.step_seconds for spec in learners)
    if options.wait == "never":
        return step
    way = max(spec.latency + spec.jitter for spec in learners)
    return step + 12 * way + 3 * transfer_seconds(scenario) / options.period


def transfer_seconds(scenario: Scenario) -> float:
    """An upper bound of how long the whole model takes up anybody's link and down anybody's."""
    assert isinstance(scenario.world.bodies, NoBodies)
    up = min(spec.up_bytes_per_second for spec in scenario.learners)
    down = min(spec.down_bytes_per_second for spec in scenario.learners)
    return sum(scenario.world.bodies.fragment_bytes) * (1 / up + 1 / down)


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
