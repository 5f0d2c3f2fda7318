"""Checks of progress in a random system after faults have ceased.

Every fragment continues at its pace and merges contributions of every learner. A stalled loop
delays no other learner. If shards have standbys, each of them takes over once more within a known
time. A run with a budget ends with nothing missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decoupled_diloco.protocol.syncer_state import STANDS_SECONDS, STANDS_STEPS
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from worlds.claim_checker import takeover_seconds_max
from worlds.drawn import CONTRIBUTED
from worlds.faults import Fault, Kind, strike
from worlds.scene import Scene

SETTLE_SECONDS = 90.0
"""Time for the consequences of faults after they have ceased: leases (10 s), lost connections
(11 s), backoff, and the restart of a process that failed several times."""

EVENTS_MIN = 300
"""A system continues for at least this number of events, unless it ends."""

AWAY = ("starting", "restoring")
"""Phases in which a shard does not open rounds."""

PLAN_SECONDS = 20.0
"""Within this time and four steps, every process has received a new plan."""

CHECK_STEPS = 3
"""Interval between checks for progress, in steps."""


def must_go_on(scene: Scene) -> None:
    """Check that without faults every fragment merges contributions of every learner."""
    system, checker = scene.system, scene.checker
    patience = SETTLE_SECONDS + 4 * (scene.options.periods[1] + 4) * pace(scene)
    patience += 4 * transfer_seconds(scene)
    if system.finished:
        return
    checker.forget()
    _go_on(scene, SETTLE_SECONDS + patience)
    _take_over(scene, patience)
    if is_ending(system):
        return  # it ended so soon that the consequences of faults need not be over
    checker.forget()
    scene.bounds.calm()
    _go_on(scene, patience)
    _keeps_pace(scene, list(system.learners))
    stalled = scene.bounds.stalled()
    assert not stalled, f"{stalled} do not step: {_phases(system)}"
    scene.revisions.check_calm(PLAN_SECONDS + 4 * pace(scene))
    _stall_one(scene, patience)
    merged = all(keeps_up(scene, n) and must_be_merged(scene, n) for n in system.learners)
    if scene.data is not None and merged:  # data that is never merged is never durable
        scene.data.check_progress(6 * patience)


def _go_on(scene: Scene, patience: float) -> None:
    """Let time pass until every fragment has merged contributions of every learner."""
    system, checker = scene.system, scene.checker
    until = system.now + patience
    while True:
        sweeping = is_ending(system)
        still = checker.fragments_without_merge()
        missing = [pair for pair in checker.not_merged_from() if must_be_merged(scene, pair[1])]
        done = not still and not missing and _all_here(system) and system.events >= EVENTS_MIN
        if sweeping or done or system.now >= until:
            break
        system.run(until=min(until, system.now + CHECK_STEPS * pace(scene)))
    assert sweeping or not still, f"nothing merged into {still}: {_phases(system)}"
    assert sweeping or not missing, f"nothing merged from (fragment, learner): {missing}"
    assert sweeping or _all_here(system), f"a process is not back: {_phases(system)}"


def _take_over(scene: Scene, patience: float) -> None:
    """Stop the acting process of each shard with a standby, and check that the other takes over.

    It must open rounds and merge within a known time.
    """
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
        acts = after.machine is not None and after.machine.state.phase not in AWAY
        assert acts or system.finished, text
        checker.forget()
        _go_on(scene, SETTLE_SECONDS + patience)


def _keeps_pace(scene: Scene, learners: Sequence[str]) -> None:
    """Check that merges wait only for these learners with fast links, if they are a quorum."""
    options, system = scene.options, scene.system
    fast = [host.spec for name, host in system.learners.items() if name in learners]
    fast = [spec for spec in fast if _keeps_up(scene, spec)]
    if options.wait != "never" or len(fast) < options.quorum or is_ending(system):
        return
    allowed = merge_seconds_max(scene, fast)
    for fragment in range(options.fragments):
        seconds = scene.checker.seconds_without_merge(fragment)
        text = f"nothing merged into fragment {fragment} for {seconds:.1f} s"
        assert seconds <= allowed, f"{text}: at most {allowed:.1f}"


def merge_seconds_max(scene: Scene, fast: Sequence[LearnerSpec]) -> float:
    """Return the longest time without a merge of a fragment, if these learners keep up.

    A fragment is due once in H steps of the learner that determines the clock, and again if its
    round is abandoned. The round then waits for a slot, for the grace window and for its quorum.
    Before that, the clock may have to detect that this learner has stalled.
    """
    options, learners = scene.options, scene.learners
    step = max(spec.step_seconds * (1 + 7 * spec.variance) for spec in learners)
    way = max(spec.latency + spec.jitter for spec in fast)
    slowest = min(min(s.up_bytes_per_second, s.down_bytes_per_second) for s in fast)
    model = scene.system.model_bytes / slowest
    stalled = STANDS_SECONDS + STANDS_STEPS * step
    return (
        3 * (options.periods[1] + options.overlaps[1] + 4) * step
        + 12 * way
        + 3 * model
        + 2.0
        + stalled
    )


STALLS = 0.3
"""Share of the worlds in which one loop stalls after faults have ceased."""


def _stall_one(scene: Scene, patience: float) -> None:
    """Stall one loop for up to 300 steps: rounds continue meanwhile, and with it afterwards."""
    system, checker = scene.system, scene.checker
    choices = Choices(f"{scene.seed}/stands")
    if scene.options.wait != "never" or not choices.chance(STALLS) or not _runs(system):
        return
    names = [name for name in system.learners if not _is_waited_for(scene, name)]
    if not names:
        return
    learner = system.learners[choices.pick(names)]
    seconds = learner.spec.step_seconds * choices.log_uniform(10.0, 300.0)
    if learner.over or not learner.alive or _ends_within(scene, 3 * seconds):
        return
    checker.forget()
    learner.stall()
    system.run(until=system.now + seconds)
    _keeps_pace(scene, [name for name in system.learners if name != learner.name])
    learner.end_stall()
    checker.forget()
    _go_on(scene, patience)


def _runs(system: System) -> bool:
    """Whether every shard opens rounds."""
    return _all_here(system) and all(
        system.acting(shard).machine.state.phase == "running" for shard in range(len(system.shards))
    )


def _is_waited_for(scene: Scene, learner: str) -> bool:
    """Whether the others are no quorum without this learner."""
    shards = map(scene.system.acting, range(scene.options.shards))
    others = (shard.machine.state.members.keys() - {learner} for shard in shards)
    return min(map(len, others)) < scene.options.quorum


def _ends_within(scene: Scene, seconds: float) -> bool:
    """Whether the budget may be spent within this time.

    A learner that comes back too late is not in the closing sweep.
    """
    if not scene.ends:
        return False
    coordinator = scene.system.coordinator
    if coordinator is None:
        return True
    budget, clocks = scene.options.max_steps or 0, coordinator.state.clocks
    fastest = min(spec.step_seconds for spec in _specs(scene))
    return (budget - max(clocks.values(), default=0)) * 0.5 * fastest < seconds


def is_ending(system: System) -> bool:
    """Whether the budget is spent, as far as the coordinator knows."""
    coordinator = system.coordinator
    return coordinator is not None and coordinator.state.phase in ("ending", "finished")


def _all_here(system: System) -> bool:
    """Whether every process is alive, and every shard opens rounds."""
    return all(host.alive or host.over for host in system.hosts) and all(
        shard.machine is not None and shard.machine.state.phase not in AWAY
        for shard in map(system.acting, range(len(system.shards)))
    )


def _specs(scene: Scene) -> list[LearnerSpec]:
    """Return the specs of the learners."""
    return [host.spec for host in scene.system.learners.values()]


def keeps_up(scene: Scene, learner: str) -> bool:
    """Whether a learner's link carries its contributions and copies, with a 50 % reserve."""
    return _keeps_up(scene, scene.system.learners[learner].spec)


def _keeps_up(scene: Scene, spec: LearnerSpec) -> bool:
    system, options = scene.system, scene.options
    nbytes = system.model_bytes * CONTRIBUTED
    fastest = min(spec.step_seconds for spec in _specs(scene))
    rate = min(spec.up_bytes_per_second, spec.down_bytes_per_second)
    return rate * options.periods[0] * fastest > 1.5 * nbytes


def must_be_merged(scene: Scene, learner: str) -> bool:
    """Whether every fragment must merge contributions of a learner.

    In a third of all worlds this includes learners with slow uplinks, which are merged in turns. If
    late contributions are dropped, a learner that is always a little late is never merged. Nor is a
    device whose steps take longer than the history.
    """
    spec = scene.system.learners[learner].spec
    if scene.options.devices or scene.options.late == "drop" or not _fetches_in_time(scene, spec):
        return False
    if keeps_up(scene, learner):
        return True
    unlimited = replace(spec, up_bytes_per_second=float("inf"))
    patient = Choices(f"{scene.seed}/patient").chance(0.33)
    return patient and _keeps_up(scene, unlimited)


def _fetches_in_time(scene: Scene, spec: LearnerSpec) -> bool:
    """Whether a whole copy is usually still offered when a learner requests it.

    The next version replaces it a period later, so a more distant learner gets it only by luck.
    """
    round_trip = 2 * spec.latency + spec.jitter + scene.system.link_of_shards.jitter
    fastest = min(each.step_seconds for each in _specs(scene))
    return round_trip < scene.options.periods[0] * fastest


def pace(scene: Scene) -> float:
    """Return an upper bound of any learner's seconds per step, including waits."""
    options, learners = scene.options, scene.learners
    step = 1.5 * max(spec.step_seconds for spec in learners)
    if options.wait == "never":
        return step
    way = max(spec.latency + spec.jitter for spec in learners)
    return step + 12 * way + 3 * transfer_seconds(scene) / options.period


def transfer_seconds(scene: Scene) -> float:
    """Return an upper bound of the time of the whole model up one link and down another."""
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
