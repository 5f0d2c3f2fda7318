"""What befalls a virtual world: faults as data, drawn from a seed or written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.learner_process import LearnerProcess
from decoupled_diloco.simulate.shard_process import ShardProcess
from decoupled_diloco.simulate.shell import Shell
from decoupled_diloco.simulate.world import World

Kind = Literal["crash", "vanish", "pause", "cut", "break", "slow", "leap", "unmount"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at: when it strikes, seconds.
        kind: ``crash`` (SIGKILL), ``vanish`` (power: nobody is told), ``pause`` (SIGSTOP),
            ``cut`` (the link is silent), ``break`` (connections are lost), ``slow`` (steps take
            longer; learners only), ``leap`` (its clock leaps ahead, once), ``unmount`` (the
            storage of its claims is out of its reach; shards with standbys only).
        process: whom it strikes: a learner's name, ``shard-0``, ``shard-0-standby``,
            ``coordinator``.
        seconds: how long it lasts, then it is undone; infinity: for good. How far a clock leaps.
        peer: the other end of a cut or break; empty: everybody.
        factor: how many times longer steps take.
    """

    at: float
    kind: Kind
    process: str
    seconds: float = 0.0
    peer: str = ""
    factor: float = 1.0


def strike(world: World, faults: Iterable[Fault]) -> None:
    """Plans the faults, and their end, in a world."""
    processes = {process.name: process for process in world.processes}
    for fault in faults:
        process = processes[fault.process]
        peers = [processes[fault.peer]] if fault.peer else _peers(world, process)
        world.clockwork.at(fault.at, _begin, world, fault, process, peers)
        if fault.seconds < float("inf"):
            world.clockwork.at(fault.at + fault.seconds, _end, world, fault, process, peers)


def _peers(world: World, process: Shell) -> list[Shell]:
    if isinstance(process, LearnerProcess):
        return [world.coordinator, *world.shard_processes]
    return [other for other in world.processes if other is not process]


def _begin(world: World, fault: Fault, process: Shell, peers: list[Shell]) -> None:
    match fault.kind:
        case "crash" if isinstance(process, LearnerProcess) and _is_told(world, process):
            process.told_to_go(process.choices.log_uniform(0.5, 30.0))
        case "crash" | "vanish":
            world.crash(process, silent=fault.kind == "vanish")
        case "pause":
            world.pause(process)
        case "cut":
            for peer in peers:
                world.cut(process, peer)
        case "break":
            for peer in peers:
                world.break_connections(process, peer)
        case "slow":
            if isinstance(process, LearnerProcess):
                process.slowness = fault.factor
        case "leap":
            process.leap(fault.seconds)
        case "unmount":
            assert isinstance(process, ShardProcess)
            process.storage_gone = True


def _is_told(world: World, process: LearnerProcess) -> bool:
    return bool(world.preempted) and process.choices.chance(world.preempted)


def _end(world: World, fault: Fault, process: Shell, peers: list[Shell]) -> None:
    match fault.kind:
        case "crash" | "vanish":
            world.restart(process)
        case "pause":
            world.resume(process)
        case "cut":
            for peer in peers:
                world.heal(process, peer)
        case "slow":
            if isinstance(process, LearnerProcess):
                process.slowness = 1.0
        case "unmount":
            assert isinstance(process, ShardProcess)
            process.storage_gone = False
        case "break" | "leap":
            pass


def random_faults(
    choices: Choices, learners: Sequence[str], shards: int, *, until: float, mean_seconds: float
) -> list[Fault]:
    """A Poisson process of faults; all of them are over at ``until``.

    Args:
        choices: where they are drawn from.
        learners: names of learners and observers that may be struck.
        shards: how many shards there are.
        until: when the last has ended, seconds.
        mean_seconds: mean time between two faults.
    """
    names = [f"shard-{shard}" for shard in range(shards)]
    kinds: list[Kind] = ["crash", "vanish", "pause", "cut", "break", "slow"]
    faults: list[Fault] = []
    at = choices.exponential(mean_seconds)
    while at < until:
        kind = choices.pick(kinds)
        share = choices.uniform(0.0, 1.0)
        process = choices.pick(learners)
        if share > 0.6 and kind != "slow":
            process = choices.pick(names) if share < 0.85 else "coordinator"
        peer = ""
        if kind in ("cut", "break") and process in learners and choices.chance(0.5):
            peer = choices.pick(names)
        lasts = min(choices.log_uniform(0.05, 40.0), until - at)
        faults.append(Fault(at, kind, process, lasts, peer, choices.log_uniform(1.5, 20.0)))
        at += choices.exponential(mean_seconds)
    return faults


def random_takeovers(
    choices: Choices, shards: int, *, until: float, mean_seconds: float
) -> list[Fault]:
    """A Poisson process of what makes a standby go on, or only believe that it should.

    Args:
        choices: where they are drawn from.
        shards: how many shards there are, each with a standby.
        until: when the last has ended, seconds.
        mean_seconds: mean time between two faults.
    """
    names = [f"shard-{shard}{end}" for shard in range(shards) for end in ("", "", "-standby")]
    kinds: list[Kind] = ["crash", "vanish", "pause", "pause", "unmount", "unmount", "cut", "break"]
    faults: list[Fault] = []
    at = choices.exponential(mean_seconds)
    while at < until:
        kind, process = choices.pick(kinds), choices.pick(names)
        peer = "coordinator" if kind in ("cut", "break") and choices.chance(0.5) else ""
        lasts = min(choices.log_uniform(0.05, 40.0), until - at)
        faults.append(Fault(at, kind, process, lasts, peer))
        at += choices.exponential(mean_seconds)
    return faults
