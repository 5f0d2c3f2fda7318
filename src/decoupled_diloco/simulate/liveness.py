"""What must happen in a random system once faults have ceased.

Every fragment goes on, at its pace, and hears everybody; a loop that stands still holds nobody up;
where shards have standbys, each of them takes over once more, within a time that is known; a run
with a budget ends, and nothing is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decoupled_diloco.protocol.membership import STANDS_SECONDS, STANDS_STEPS
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.claim_checker import takeover_seconds_max
from decoupled_diloco.simulate.drawn import CONTRIBUTED
from decoupled_diloco.simulate.faults import Fault, Kind, strike
from decoupled_diloco.simulate.scene import Scene
from decoupled_diloco.simulate.spec import LearnerSpec
from decoupled_diloco.simulate.system import System

SETTLE_SECONDS = 90.0
"""When faults have ceased: leases (10 s), lost connections (11 s), backoff, a process that is
started again after several failures."""

EVENTS_MIN = 300
"""A system goes on for at least so many events, unless it ends."""

AWAY = ("starting", "restoring")
"""Phases in which a shard is not at work."""

HEARD_SECONDS = 20.0
"""And four steps: then everybody has heard of a plan."""

LOOK_STEPS = 3
"""After so many steps it is looked again whether what must happen has happened."""


def must_go_on(scene: Scene) -> None:
    """Without faults every fragment goes on, and hears everybody."""
    system, checker = scene.system, scene.checker
    patience = SETTLE_SECONDS + 4 * (scene.options.periods[1] + 4) * pace(scene)
    patience += 4 * transfer_seconds(scene)
    if system.finished:
        return
    checker.forget()
    _go_on(scene, SETTLE_SECONDS + patience)
    _take_over(scene, patience)
    if is_ending(system):
        return  # it came to its end so soon that what faults have led to need not be over
    checker.forget()
    scene.bounds.calm()
    _go_on(scene, patience)
    _keeps_pace(scene, list(system.learners))
    standing = scene.bounds.standing()
    assert not standing, f"{standing} do not step: {_phases(system)}"
    scene.revisions.check_calm(HEARD_SECONDS + 4 * pace(scene))
    _stand_still(scene, patience)
    heard = all(keeps_up(scene, n) and must_be_heard(scene, n) for n in system.learners)
    if scene.data is not None and heard:  # what is never merged is never durable
        scene.data.check_progress(6 * patience)


def _go_on(scene: Scene, patience: float) -> None:
    """Lets time pass until every fragment was merged and has heard everybody; or it has not."""
    system, checker = scene.system, scene.checker
    until = system.now + patience
    while True:
        sweeping = is_ending(system)
        still = checker.fragments_without_merge()
        unheard = [pair for pair in checker.unheard() if must_be_heard(scene, pair[1])]
        done = not still and not unheard and _all_here(system) and system.events >= EVENTS_MIN
        if sweeping or done or system.now >= until:
            break
        system.run(until=min(until, system.now + LOOK_STEPS * pace(scene)))
    assert sweeping or not still, f"nothing merged into {still}: {_phases(system)}"
    assert sweeping or not unheard, f"a fragment does not hear a learner: {unheard}"
    assert sweeping or _all_here(system), f"somebody is not back: {_phases(system)}"


def _take_over(scene: Scene, patience: float) -> None:
    """Strikes each shard that has a standby: the other process is at work, and commits, in time."""
    system, checker = scene.system, scene.checker
    for standby in system.standbys:
        before = system.acting(standby.shard)
        seconds = takeover_seconds_max(system) + transfer_seconds(scene)
        if not before.alive or before.over or _ends_within(scene, 3 * seconds):
            return
        kinds: list[Kind] = ["crash", "pause", "unmount"]
        kind = before.choices.pick(kinds)
        strike(system, [Fault(system.now, kind, before.name, seconds)])
        struck_at = system.now
        system.run(until=struck_at + seconds)
        after = system.acting(standby.shard)
        text = f"{seconds:.1f} s after {kind} of {before.name}: {_phases(system)}"
        assert after is not before or after.life != before.life or system.finished, text
        at_work = after.machine is not None and after.machine.state.phase not in AWAY
        assert at_work or system.finished, text
        checker.forget()
        _go_on(scene, SETTLE_SECONDS + patience)


def _keeps_pace(scene: Scene, learners: Sequence[str]) -> None:
    """Nobody waits for a slow link, nor for who is not among these: enough others are brisk."""
    options, system = scene.options, scene.system
    brisk = [host.spec for name, host in system.learners.items() if name in learners]
    brisk = [spec for spec in brisk if _keeps_up(scene, spec)]
    if options.wait != "never" or len(brisk) < options.quorum or is_ending(system):
        return
    allowed = merge_seconds_max(scene, brisk)
    for fragment in range(options.fragments):
        seconds = scene.checker.seconds_without_merge(fragment)
        text = f"nothing merged into fragment {fragment} for {seconds:.1f} s"
        assert seconds <= allowed, f"{text}: at most {allowed:.1f}"


def merge_seconds_max(scene: Scene, brisk: Sequence[LearnerSpec]) -> float:
    """How long nothing may be merged into a fragment where these keep up.

    A fragment is due once in H steps of a learner that the clock goes by, and again if its round
    is given up; its round then waits for a slot, for the grace window and for its quorum. Before,
    the clock may have to find that the loop that it goes by stands still.
    """
    options, learners = scene.options, scene.learners
    step = max(spec.step_seconds * (1 + 7 * spec.variance) for spec in learners)
    way = max(spec.latency + spec.jitter for spec in brisk)
    slowest = min(min(s.up_bytes_per_second, s.down_bytes_per_second) for s in brisk)
    model = scene.system.model_bytes / slowest
    stands = STANDS_SECONDS + STANDS_STEPS * step
    return (
        3 * (options.periods[1] + options.overlaps[1] + 4) * step
        + 12 * way
        + 3 * model
        + 2.0
        + stands
    )


STANDS = 0.3
"""Share of the worlds in which a loop stands still while all else is calm."""


def _stand_still(scene: Scene, patience: float) -> None:
    """Lets one loop stand for up to three hundred steps: rounds go on, and hear it afterwards."""
    system, checker = scene.system, scene.checker
    choices = Choices(f"{scene.seed}/stands")
    if scene.options.wait != "never" or not choices.chance(STANDS) or not _runs(system):
        return
    names = [name for name in system.learners if not _is_waited_for(scene, name)]
    if not names:
        return
    learner = system.learners[choices.pick(names)]
    seconds = learner.spec.step_seconds * choices.log_uniform(10.0, 300.0)
    if learner.over or not learner.alive or _ends_within(scene, 3 * seconds):
        return
    checker.forget()
    learner.stand_still()
    system.run(until=system.now + seconds)
    _keeps_pace(scene, [name for name in system.learners if name != learner.name])
    learner.step_again()
    checker.forget()
    _go_on(scene, patience)


def _runs(system: System) -> bool:
    """Whether every shard opens rounds."""
    return _all_here(system) and all(
        system.acting(shard).machine.state.phase == "running" for shard in range(len(system.shards))
    )


def _is_waited_for(scene: Scene, learner: str) -> bool:
    """Whether without this learner there is no quorum."""
    shards = map(scene.system.acting, range(scene.options.shards))
    others = (shard.machine.state.members.keys() - {learner} for shard in shards)
    return min(map(len, others)) < scene.options.quorum


def _ends_within(scene: Scene, seconds: float) -> bool:
    """Whether the budget may be spent by then: who comes back late is not in the closing sweep."""
    if not scene.ends:
        return False
    coordinator = scene.system.coordinator
    if coordinator is None:
        return True
    budget, clocks = scene.options.budget_steps or 0, coordinator.state.clocks
    fastest = min(spec.step_seconds for spec in _specs(scene))
    return (budget - max(clocks.values(), default=0)) * 0.5 * fastest < seconds


def is_ending(system: System) -> bool:
    """Whether the budget is spent, as far as the coordinator knows."""
    coordinator = system.coordinator
    return coordinator is not None and coordinator.state.phase in ("ending", "finished")


def _all_here(system: System) -> bool:
    """Whether every process is alive, and every shard at work."""
    return all(host.alive or host.over for host in system.hosts) and all(
        shard.machine is not None and shard.machine.state.phase not in AWAY
        for shard in map(system.acting, range(len(system.shards)))
    )


def _specs(scene: Scene) -> list[LearnerSpec]:
    """Of those who train."""
    return [host.spec for host in scene.system.learners.values()]


def keeps_up(scene: Scene, learner: str) -> bool:
    """Whether a learner's link carries what it is asked for and told, with half to spare."""
    return _keeps_up(scene, scene.system.learners[learner].spec)


def _keeps_up(scene: Scene, spec: LearnerSpec) -> bool:
    system, options = scene.system, scene.options
    nbytes = system.model_bytes * CONTRIBUTED
    fastest = min(spec.step_seconds for spec in _specs(scene))
    rate = min(spec.up_bytes_per_second, spec.down_bytes_per_second)
    return rate * options.periods[0] * fastest > 1.5 * nbytes


def must_be_heard(scene: Scene, learner: str) -> bool:
    """Whether it is waited for until every fragment has heard a learner.

    In a third of all worlds for those with slow uplinks, too: they are heard in turns. Where late
    contributions are dropped, who is always a little late is never heard.
    """
    spec = scene.system.learners[learner].spec
    if scene.options.late == "drop" or not _asks_in_time(scene, spec):
        return False
    if keeps_up(scene, learner):
        return True
    swift = replace(spec, up_bytes_per_second=float("inf"))
    patient = Choices(f"{scene.seed}/patient").chance(0.33)
    return patient and _keeps_up(scene, swift)


def _asks_in_time(scene: Scene, spec: LearnerSpec) -> bool:
    """Whether a whole copy is still offered, on the average, when a learner asks for it.

    It makes way for the next version, a period later: who is farther away has it by luck.
    """
    there_and_back = 2 * spec.latency + spec.jitter + scene.system.link_of_shards.jitter
    fastest = min(each.step_seconds for each in _specs(scene))
    return there_and_back < scene.options.periods[0] * fastest


def pace(scene: Scene) -> float:
    """An upper bound of anybody's seconds per step, waiting included where they wait."""
    options, learners = scene.options, scene.learners
    step = 1.5 * max(spec.step_seconds for spec in learners)
    if options.wait == "never":
        return step
    way = max(spec.latency + spec.jitter for spec in learners)
    return step + 12 * way + 3 * transfer_seconds(scene) / options.period


def transfer_seconds(scene: Scene) -> float:
    """An upper bound of how long the whole model takes up anybody's link and down anybody's."""
    up = min(spec.up_bytes_per_second for spec in scene.learners)
    down = min(spec.down_bytes_per_second for spec in scene.learners)
    return scene.system.model_bytes * (1 / up + 1 / down)


def _phases(system: System) -> str:
    coordinator = system.coordinator
    phases = [f"coordinator {None if coordinator is None else coordinator.state.phase}"]
    for shard in system.shard_processes:
        phase = "waiting" if shard.machine is None else shard.machine.state.phase
        phases.append(f"{shard.name} {phase if shard.alive else 'dead'}")
    phases += [
        f"{host.name} {'over' if host.over else 'alive' if host.alive else 'dead'}"
        for host in system.participants.values()
    ]
    return ", ".join(phases)
