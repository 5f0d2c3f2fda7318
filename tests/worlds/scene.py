"""Draw the random world of a seed: a run on virtual machines, its faults and its checkers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from decoupled_diloco.config import RunConfig
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import Broadcast, CopyWanted, Merge, Persist, Send
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.workloads import Workload
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.drift import Drift
from decoupled_diloco_lab.simulate.hosts import CheckpointId, Host, LearnerHost, ParticipantHost
from decoupled_diloco_lab.simulate.spec import LearnerSpec, RelaySpec
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.simulate.virtual_disk import Loss
from worlds.apart_checker import ApartChecker
from worlds.bounds import Bounds
from worlds.checkers import Checker
from worlds.claim_checker import ClaimChecker
from worlds.data_checker import DataChecker, Drawn
from worlds.drawn import (
    CONTRIBUTED,
    Data,
    Standbys,
    random_budget,
    random_data,
    random_learners,
    random_limits,
    random_moments,
    random_options,
    random_parties,
    random_phases,
    random_relays,
    random_sizes,
    random_standbys,
    with_own_rounds,
    with_ranks,
    with_secure_sums,
    with_slow_links,
)
from worlds.faults import (
    Fault,
    random_faults,
    random_hardships,
    random_rank_faults,
    random_relay_faults,
    random_takeovers,
    strike,
)
from worlds.lineage import Lineage
from worlds.own_checker import OwnChecker
from worlds.quota_checker import QuotaChecker
from worlds.residuals import Residuals
from worlds.revision_checker import RevisionChecker
from worlds.shrink import Changes, Size

FAULTY_STEPS = 25.0
"""Time with faults, in steps."""

ENDLESS_STEPS = 10**9

ENDLESS = 0.02
"""Share of the worlds without an end, whose budget cannot be spent."""

GOES_ON = 0.04
"""Share of the worlds with an end in which progress is checked before the end."""

WEIGHTS = "initial.safetensors"

PARTICIPATION = {"reported": "active", "all": "all", "own": "async"}
WHEN = {"on_arrival": "on_arrival", "at_tau": "at_overlap"}
"""Settings that the machines' options call otherwise."""


@dataclass(frozen=True, slots=True)
class Mishaps:
    """Probabilities of small faults that may happen at any time; see `faults` for large ones.

    Attributes:
        spurious_ticks: An extra, early ``Tick`` follows an event of a shard.
        loss: The connection of a payload's range breaks on the way.
        corruption: A piece of a payload arrives corrupted.
        impatience: Payloads are tried at most twice.
        crash_after_persist: The coordinator's machine dies while it writes its state.
        crash_after_merge: A shard's machine loses its power while a merge is written.
        stalls: A learner's loop stalls in a step, for up to about 400 steps.
        slips: A shard's message to a learner is lost with the connection, and the learner
            reconnects before the shard notices.
        copies_slip: The same for a shard's request for a whole copy.
        poison: A step moves the parameters a million times too far. The next one takes it back.
        preempted: A learner that is killed receives SIGTERM before and flushes.
        clocks_leap: Clocks of processes jump ahead a few times.
        plans_late: Messages between the ranks of a learner take up to ten steps.
    """

    spurious_ticks: float = 0.0
    loss: float = 0.0
    corruption: float = 0.0
    impatience: float = 0.0
    crash_after_persist: float = 0.0
    crash_after_merge: float = 0.0
    stalls: float = 0.0
    slips: float = 0.0
    copies_slip: float = 0.0
    poison: float = 0.0
    preempted: float = 0.0
    clocks_leap: float = 0.0
    plans_late: float = 0.0


@dataclass
class Scene:
    """A random world before it runs.

    Attributes:
        seed: Determines everything.
        options: The method's settings.
        learners: Learners and observers.
        faults: The planned faults.
        mishaps: Probabilities of small faults.
        system: The run.
        ends: Whether its budget can be spent.
        goes_on: Whether progress is checked before the end.
        calm_at: When faults cease.
    """

    seed: int | str
    options: Options
    learners: list[LearnerSpec]
    faults: list[Fault]
    mishaps: Mishaps
    system: System
    ends: bool
    goes_on: bool
    calm_at: float
    lineage: Lineage
    residuals: Residuals
    checker: Checker
    bounds: Bounds
    claims: ClaimChecker
    data: DataChecker | None
    revisions: RevisionChecker

    @property
    def size(self) -> Size:
        """The parts that can be removed from it."""
        mishaps = tuple(f.name for f in fields(Mishaps) if getattr(self.mishaps, f.name))
        learners = tuple(spec.name for spec in self.learners)
        return Size(len(self.faults), learners, mishaps, self.calm_at)


def draw(
    seed: int | str, folder: Path, changes: Changes | None = None, *, tapes: Path | None = None
) -> Scene:
    """Draw the world of a seed, with `changes` applied.

    Args:
        seed: Determines everything.
        folder: The run folder, which does not exist yet.
        changes: Parts that are removed or simplified.
        tapes: See `System`.
    """
    changes = changes or Changes()
    choices = Choices(seed)
    count = choices.integer(1, 4)
    if changes.secure or changes.quotas:
        count = choices.fork("members").integer(2, 6)
    options = random_options(choices.fork("options"), count)
    ends = choices.chance(1.0 - ENDLESS) and not changes.endless
    goes_on = not ends or choices.chance(GOES_ON)
    step = choices.log_uniform(0.5 if goes_on else 0.05, 2.0)
    budget = random_budget(choices, options, count)
    options = replace(options, max_steps=budget if ends else ENDLESS_STEPS)
    options = replace(options, phases=random_phases(choices.fork("phases"), options))
    options = replace(options, **changes.options)
    if changes.secure:
        options = with_secure_sums(choices.fork("secure"), options, count)
    elif not changes.options.keys() & {"participants", "grace_margin", "missed"}:
        options = with_own_rounds(choices.fork("own"), options, count)
    if "adapt" not in changes.options:
        options = replace(options, adapt=random_limits(choices.fork("limits"), options))
    sizes = random_sizes(choices.fork("sizes"), options.fragments)
    drawn = random_learners(choices.fork("learners"), count, step)
    parties = random_parties(choices.fork("parties"), count) if changes.quotas else []
    links = choices.fork("links")
    drawn = with_slow_links(links, drawn, options, sizes, waited_for=goes_on)
    data = random_data(choices.fork("data"))
    relays: list[RelaySpec] = []
    if options.devices:
        data = None  # each device has its own data, and one process
    elif changes.relays and not parties:  # a relay's sum has contributions of one party only
        drawn, relays = random_relays(choices.fork("relays"), drawn)
    moments = random_moments(choices.fork("moments")) if changes.moments else None
    if data is None and not options.devices and moments is None:  # moments need one rank
        drawn = with_ranks(choices.fork("ranks"), drawn)
    if options.secure:
        drawn = [replace(spec, sync_ranks=1) for spec in drawn]
    learners = [
        replace(spec, **changes.learners)
        for spec in drawn
        if spec.name not in changes.without_learners
    ]
    ranked = any(spec.ranks > 1 for spec in learners)
    if ranked:
        data = None  # only single-process learners can lease data
    standbys = random_standbys(choices.fork("standbys"))
    if changes.without_standbys:
        standbys = None
    mishaps = replace(_mishaps(choices), **changes.mishaps)
    folder.mkdir(parents=True)
    power = choices.fork("power")
    loses_power = power.chance(0.4)
    often = [0.0, 1.0, 2.0] if ranked else [0.0, 2.0, 10.0]
    checkpoints = choices.fork("checkpoints").pick(often) * step
    initial = _initial_weights(folder, sizes) if choices.fork("file").chance(0.2) else None
    config = config_of(
        options,
        folder,
        learners=count,
        checkpoint_seconds=checkpoints,
        hand_in_seconds=choices.fork("hand in").pick([0.0, 5.0]),
        standbys=standbys,
        data=data,
        initial=initial,
        parties=parties,
        moments=moments,
    )
    system = System(
        config,
        learners,
        folder,
        seed=seed,
        sizes=sizes,
        tapes=tapes,
        power=_loss(power) if loses_power else None,
        relays=relays,
    )
    scene = _watched(seed, options, learners, mishaps, system, ends, data)
    scene.goes_on = goes_on
    scene.calm_at = changes.faulty_seconds or FAULTY_STEPS * step
    _start_small_faults(scene, choices, standbys)
    faults = _faults(choices, scene, standbys)
    scene.faults = faults
    strike(system, _left(faults, scene, changes))
    return scene


def config_of(
    options: Options,
    folder: Path,
    *,
    learners: int,
    checkpoint_seconds: float = 0.0,
    hand_in_seconds: float = 0.0,
    standbys: Standbys | None = None,
    data: Data | None = None,
    initial: Path | None = None,
    parties: Sequence[dict[str, Any]] = (),
    moments: dict[str, Any] | None = None,
) -> RunConfig:
    """Return a run's settings, without those that would be ignored."""
    sync: dict[str, Any] = {
        "fragments": options.fragments,
        "sync_every": options.period,
        "overlap_steps": options.overlap,
        "quorum": options.quorum,
        "grace_margin": options.grace_margin,
        "participation": PARTICIPATION[options.participants],
        "wait": options.wait,
        "codec": {"uplink": tuple(name for name, _ in options.ladder) or options.uplink_codec},
        "merge": {"counter_cap_periods": options.counter_cap_periods},
        "late": {"policy": options.late},
        "apply": {
            "when": WHEN[options.apply],
            "alignment": options.alignment,
            "missed": options.missed,
        },
        "partition": {"scheme": "tensor", "phases": options.phases},
    }
    if moments is not None:
        sync["moments"] = moments
    if options.adapt is not None:
        limits = options.adapt
        sync["adapt"] = {
            "sync_every": limits.period,
            "overlap_steps": limits.overlap,
            "learner_share": limits.carried_by,
        }
    if options.chain > 1:
        sync["codec"]["downlink"] = "int4"
    if options.late_discount != 1.0:
        sync["late"] |= {"discount": options.late_discount, "discount_of": options.discount_of}
    if options.devices:
        sync["devices"] = {} if options.late == "drop" else {"history": options.history}
        if options.cohort is not None:
            sync["devices"] |= {"cohort": options.cohort, "visit_seconds": options.visit_seconds}
    if options.wait == "never":
        sync["merge"]["norm_gate"] = options.norm_gate
        if options.norm_gate:
            sync["merge"]["oversized"] = options.oversized
    if options.secure:
        del sync["late"], sync["codec"]["uplink"]
        sync["merge"].pop("norm_gate", None)
    if initial is not None:
        sync["initial_weights"] = initial
    syncer: dict[str, Any] = {"shards": options.shards}
    if standbys is not None:
        syncer |= {"standby": True, "lease_seconds": standbys.lease_seconds}
    leased: dict[str, Any] = {"elastic": data is not None}
    if data is not None:
        leased |= {"partitions": data.parts.parts, "prefetch": data.ahead}
    tables: dict[str, Any] = {
        "run": {
            "name": "world",
            "learners": learners,
            "max_steps": options.max_steps,
            "evaluator": False,
            "folder": folder,
            "checkpoint_interval_seconds": options.checkpoint_every_seconds,
        },
        "sync": sync,
        "syncer": syncer,
        "learner": {
            "checkpoint_interval_seconds": checkpoint_seconds,
            "flush_seconds": hand_in_seconds,
        },
        "data": leased,
        "trust": {"probation_periods": options.probation_periods},
        "workload": {},
    }
    tables["privacy"] = {"members": parties}
    if options.secure:
        tables["privacy"] |= {"secure_sums": True, "threshold": options.threshold}
    return RunConfig(**tables)


def _initial_weights(folder: Path, sizes: Sequence[int]) -> Path:
    path = folder / WEIGHTS
    save_file(
        {
            f"vectors.{n}": torch.full((size,), 0.5, dtype=torch.float32, device="cpu")
            for n, size in enumerate(sizes)
        },
        path,
    )
    return path


def _mishaps(choices: Choices) -> Mishaps:
    def often(name: str, *values: float) -> float:
        return choices.fork(name).pick(values)

    return Mishaps(
        spurious_ticks=often("ticks", 0.0, 0.1),
        loss=often("loss", 0.0, 0.0, 0.1, 0.5),
        corruption=often("corruption", 0.0, 0.0, 0.01),
        impatience=often("impatience", 0.0, 1.0),
        crash_after_persist=often("persist", 0.0, 0.0, 0.1),
        crash_after_merge=often("merge", 0.0, 0.0, 0.02),
        stalls=often("stalls", 0.0, 0.0, 0.0, 0.01),
        slips=often("slips", 0.0, 0.0, 0.005),
        copies_slip=often("copies slip", 0.0, 0.0, 0.3),
        poison=often("poison", 0.0, 0.0, 0.02),
        preempted=often("preempted", 0.0, 0.5),
        clocks_leap=often("leaps", 0.0, 0.0, 1.0),
        plans_late=often("plans", 0.0, 0.05),
    )


def _loss(choices: Choices) -> Loss:
    return Loss(
        choices,
        names=choices.pick([0.0, 0.5, 1.0]),
        writes=choices.pick([0.0, 0.5, 1.0]),
        torn=choices.pick([0.0, 0.5]),
        zeros=choices.pick([0.0, 0.5]),
    )


def _watched(
    seed: int | str,
    options: Options,
    learners: list[LearnerSpec],
    mishaps: Mishaps,
    system: System,
    ends: bool,
    data: Data | None,
) -> Scene:
    lineage, residuals = Lineage(system), Residuals(system)
    watch_checkpoints(system, lineage, residuals)
    checker = None if data is None else DataChecker(system, lineage, data.parts)
    drawn: dict[str, Drawn] = {}
    poison = system.choices.fork("poison")

    def workload(host: ParticipantHost) -> Workload:
        if checker is None or not isinstance(host, LearnerHost):
            made = Drift(system.sizes, host.spec.tokens_per_step)
        else:
            parts = checker.parts
            mine = drawn[host.name] = Drawn(host, parts, checker.trained)
            made = Drift(system.sizes, host.spec.tokens_per_step, parts.batches, mine.take)
        if host.spec.ranks == 1:  # otherwise all ranks would have to be poisoned in the same step
            made.poisoned = lambda: system.now < scene.calm_at and poison.chance(mishaps.poison)
        return made

    def stepped(host: LearnerHost) -> None:
        if host.name in drawn:
            drawn[host.name].train()

    system.workload, system.on_step = workload, stepped
    scene = Scene(
        seed,
        options,
        learners,
        [],
        mishaps,
        system,
        ends,
        not ends,
        0.0,
        lineage,
        residuals,
        Checker(system),
        Bounds(system),
        ClaimChecker(system, clocks_leap=mishaps.clocks_leap > 0),
        checker,
        RevisionChecker(system),
    )
    OwnChecker(system)
    ApartChecker(system)
    QuotaChecker(system)
    return scene


def watch_checkpoints(system: System, lineage: Lineage, residuals: Residuals) -> None:
    """Record the contents of each learner's checkpoint, for incarnations that start from it."""

    def kept(process: str, taken: CheckpointId, untrained: int) -> None:
        lineage.checkpoint(process, taken, untrained)
        residuals.checkpoint(process, taken)

    system.on_checkpoint = kept


def _start_small_faults(scene: Scene, choices: Choices, standbys: Standbys | None) -> None:
    """Let small faults happen until the time of faults is over."""
    system, mishaps = scene.system, scene.mishaps
    system.directory.loss, system.directory.corruption = mishaps.loss, mishaps.corruption
    if mishaps.impatience:
        system.limits = Limits(retries=1)
    system.stalls, system.preempted = mishaps.stalls, mishaps.preempted
    system.plans_late = mishaps.plans_late
    if standbys is not None:
        system.claim_seconds = standbys.storage_seconds
        system.storage_fails = standbys.storage_fails
    system.link_of_shards.jitter = choices.fork("orders").pick([0.0, 0.0, 0.0, 0.3])
    _tick_early(scene, choices.fork("ticks"))
    _strike_at_writes(scene, choices.fork("writes"))
    _slip(scene, choices.fork("slips"))
    system.clockwork.at(scene.calm_at, _end_small_faults, system)


def _end_small_faults(system: System) -> None:
    system.directory.clear_faults()
    system.stalls = system.plans_late = 0.0


def _tick_early(scene: Scene, choices: Choices) -> None:
    """Send early ticks, which must not affect the state machines."""
    system, share = scene.system, scene.mishaps.spurious_ticks
    shards = {host.name: host for host in system.shard_processes}

    def on_event(process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if process in shards and system.now < scene.calm_at and choices.chance(share):
            shards[process].tick()

    if share:
        system.recorders.append(on_event)


def _strike_at_writes(scene: Scene, choices: Choices) -> None:
    """Let machines lose their power while something is being written to their disks."""
    system, mishaps = scene.system, scene.mishaps
    shares = {Persist: mishaps.crash_after_persist, Merge: mishaps.crash_after_merge}
    shards = {host.name: host for host in system.shard_processes}

    def on_event(process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        for effect in effects:
            if system.now < scene.calm_at and choices.chance(shares.get(type(effect), 0.0)):
                host = system.acting(0) if process == "coordinator" else shards[process]
                system.clockwork.after(choices.uniform(0.0, 0.01), lose_power, host)

    def lose_power(host: Host) -> None:
        system.crash(host, silent=True)
        system.clockwork.after(choices.log_uniform(0.05, 10.0), system.restart, host)

    if any(shares.values()):
        system.recorders.append(on_event)


def _slip(scene: Scene, choices: Choices) -> None:
    """Let messages of shards to learners be lost with the connection, unnoticed by the shard."""
    system, mishaps = scene.system, scene.mishaps
    shards = {host.name: host for host in system.shard_processes}

    def on_event(process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if process not in shards or system.now >= scene.calm_at:
            return
        for effect in effects:
            if type(effect) is Send:
                copies = isinstance(effect.message, CopyWanted)
                share = mishaps.copies_slip if copies else mishaps.slips
                slip(effect.peer, process, share)
            elif type(effect) is Broadcast:
                for name in system.learners:
                    slip(name, process, mishaps.slips)

    def slip(learner: str, shard: str, share: float) -> None:
        if learner in system.learners and choices.chance(share):
            system.network.slip(system.learners[learner], shards[shard])

    if mishaps.slips or mishaps.copies_slip:
        system.recorders.append(on_event)


def _faults(choices: Choices, scene: Scene, standbys: Standbys | None) -> list[Fault]:
    system, until = scene.system, scene.calm_at
    names, shards = list(system.participants), len(system.shards)
    often = choices.fork("often").pick([4.0, 10.0, 30.0]) * until / 60
    drawn = partial(random_faults, until=until, mean_seconds=often)
    faults = drawn(choices.fork("faults"), names, shards)
    if choices.fork("hard").chance(0.5) and system.learners:
        faults += random_hardships(
            choices.fork("hardships"),
            [host.spec for host in system.learners.values()],
            shards,
            body_bytes=CONTRIBUTED * system.model_bytes / len(system.sizes),
            until=until,
            mean_seconds=often,
        )
    ranked = [host.spec for host in system.learners.values() if host.spec.ranks > 1]
    if ranked:
        faults += random_rank_faults(
            choices.fork("rank faults"), ranked, until=until, mean_seconds=often
        )
    if standbys is not None:
        takeovers = choices.fork("takeovers")
        faults += random_takeovers(takeovers, shards, until=until, mean_seconds=2 * often)
    if system.relays:
        relays = choices.fork("relay faults")
        faults += random_relay_faults(
            relays, [host.name for host in system.relays], until=until, mean_seconds=often
        )
    if scene.mishaps.clocks_leap:
        faults += _leaps(choices.fork("leaps"), [host.name for host in system.hosts], until)
    return faults + _away(choices.fork("away"), scene)


def _away(choices: Choices, scene: Scene) -> list[Fault]:
    """Cut one learner off for more steps than may count, in some worlds."""
    options, until = scene.system.options, scene.calm_at
    specs = [host.spec for host in scene.system.learners.values()]
    if len(specs) < 2 or not choices.chance(0.4):
        return []
    spec = choices.pick(specs)
    steps = options.counter_cap_periods * options.periods[1] * choices.uniform(1.2, 3.0)
    seconds = min(spec.step_seconds * steps, 0.9 * until)
    return [Fault(choices.uniform(0.0, until - seconds), "cut", spec.name, seconds)]


def _leaps(choices: Choices, names: Sequence[str], until: float) -> list[Fault]:
    return [
        Fault(choices.uniform(0.0, until), "leap", choices.pick(names), choices.log_uniform(1, 100))
        for _ in range(choices.integer(1, 4))
    ]


def _left(faults: Sequence[Fault], scene: Scene, changes: Changes) -> list[Fault]:
    """Return the faults that are not removed and whose processes are not removed."""
    names = {"", *(host.name for host in scene.system.hosts)}
    return [
        fault
        for number, fault in enumerate(faults)
        if number not in changes.without_faults
        and {fault.process, fault.peer} <= names
        and fault.at < scene.calm_at
    ]


def heal(scene: Scene) -> None:
    """End all faults and start all processes that are down."""
    system = scene.system
    _end_small_faults(system)
    system.storage_fails = system.preempted = 0.0
    for host in system.hosts:
        host.storage_gone = host.disk_is_full = False
        system.resume(host)
        for other in system.hosts:
            system.heal(host, other)
        if isinstance(host, ParticipantHost):
            host.end_stall()
            host.slow_link(1.0, "up")
            host.slow_link(1.0, "down")
        if isinstance(host, LearnerHost):
            host.slowness = 1.0
        system.restart(host)
    for rank in system.rank_hosts:
        system.resume(rank)
        for other in system.hosts:
            system.heal(rank, other)
