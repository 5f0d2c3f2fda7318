"""What befalls a virtual world: faults as data, drawn from a seed or written by hand."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.hosts import Host, LearnerHost, ParticipantHost
from decoupled_diloco.simulate.network import Way
from decoupled_diloco.simulate.spec import LearnerSpec
from decoupled_diloco.simulate.system import System

Kind = Literal[
    "crash",
    "vanish",
    "pause",
    "cut",
    "break",
    "slip",
    "slow",
    "stall",
    "choke",
    "fill",
    "leap",
    "unmount",
    "lose",
]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at: when it strikes, seconds.
        kind: ``crash`` (SIGKILL), ``vanish`` (power: nobody is told), ``pause`` (SIGSTOP),
            ``cut`` (the link is silent), ``break`` (connections are lost), ``slip`` (so they are,
            but the other end is not told), ``slow`` (steps take longer), ``stall`` (the loop
            stands, all else goes on), ``choke`` (the link carries less), ``fill`` (its disk is
            full), ``leap`` (its clock leaps ahead, once), ``unmount`` (the storage of its claims is
            out of its reach; shards with standbys only), ``lose`` (it is killed, and its disk is
            empty when it comes back). Slow, stall and choke befall learners only.
        process: whom it strikes: a learner's name, ``shard-0``, ``shard-0-standby``.
        seconds: how long it lasts, then it is undone; infinity: for good. How far a clock leaps.
        peer: the other end of a cut, break or slip; empty: everybody.
        factor: how many times longer steps take, or less the link carries.
        way: which way a link carries less.
        rank: of a learner of several ranks the one that is killed, stopped or cut off, from the
            syncer or, with the learner itself as ``peer``, from rank 0; 0: all of it.
    """

    at: float
    kind: Kind
    process: str
    seconds: float = 0.0
    peer: str = ""
    factor: float = 1.0
    way: Way = "up"
    rank: int = 0


def strike(system: System, faults: Iterable[Fault]) -> None:
    """Plans the faults, and their end."""
    hosts = {host.name: host for host in system.hosts}
    for fault in faults:
        host = hosts[fault.process]
        if fault.rank:
            system.clockwork.at(fault.at, _strike_rank, system, fault, host)
            continue
        peers = [hosts[fault.peer]] if fault.peer else _peers(system, host)
        system.clockwork.at(fault.at, _begin, system, fault, host, peers)
        if fault.seconds < float("inf"):
            system.clockwork.at(fault.at + fault.seconds, _end, system, fault, host, peers)


def _strike_rank(system: System, fault: Fault, learner: Host) -> None:
    assert isinstance(learner, LearnerHost)
    rank = learner.rank(fault.rank)
    if rank is None or not rank.alive:
        return
    peers: list[Host] = [learner] if fault.peer else [*system.shard_processes]
    match fault.kind:
        case "crash":
            rank.kill()
        case "pause":
            system.pause(rank)
            system.clockwork.after(fault.seconds, system.resume, rank)
        case "cut":
            for peer in peers:
                system.cut(rank, peer)
                system.clockwork.after(fault.seconds, system.heal, rank, peer)
        case _:
            raise AssertionError(f"no fault of one rank: {fault}")


def _peers(system: System, host: Host) -> list[Host]:
    if isinstance(host, ParticipantHost):
        return [*system.shard_processes]
    return [other for other in system.hosts if other is not host]


def _begin(system: System, fault: Fault, host: Host, peers: list[Host]) -> None:
    match fault.kind:
        case "crash" if isinstance(host, LearnerHost) and host.choices.chance(system.preempted):
            system.tell_to_go(host, host.choices.log_uniform(0.5, 30.0), signal.SIGTERM)
        case "crash" | "vanish" | "lose":
            system.crash(host, silent=fault.kind == "vanish")
            if fault.kind == "lose":
                system.lose_disk(host)
        case "pause":
            system.pause(host)
        case "cut":
            for peer in peers:
                system.cut(host, peer)
        case "break":
            for peer in peers:
                system.break_connections(host, peer)
        case "slip":
            for peer in peers:
                system.network.slip(host, peer)
        case "fill":
            host.disk_is_full = True
        case "leap":
            host.leap(fault.seconds)
        case "unmount":
            host.storage_gone = True
        case "slow" if isinstance(host, LearnerHost):
            host.slowness = fault.factor
        case "stall" if isinstance(host, LearnerHost):
            host.stand_still()
        case "choke" if isinstance(host, ParticipantHost):
            host.choke(fault.factor, fault.way)


def _end(system: System, fault: Fault, host: Host, peers: list[Host]) -> None:
    match fault.kind:
        case "crash" | "vanish" | "lose":
            system.restart(host)
        case "pause":
            system.resume(host)
        case "cut":
            for peer in peers:
                system.heal(host, peer)
        case "fill":
            host.disk_is_full = False
        case "unmount":
            host.storage_gone = False
        case "slow" if isinstance(host, LearnerHost):
            host.slowness = 1.0
        case "stall" if isinstance(host, LearnerHost):
            host.step_again()
        case "choke" if isinstance(host, ParticipantHost):
            host.choke(1.0, fault.way)
        case _:
            pass  # what happens at once is over


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
            process = choices.pick(names) if share < 0.85 else names[0]
        peer = ""
        if kind in ("cut", "break") and process in learners and choices.chance(0.5):
            peer = choices.pick(names)
        lasts = min(choices.log_uniform(0.05, 40.0), until - at)
        faults.append(Fault(at, kind, process, lasts, peer, choices.log_uniform(1.5, 20.0)))
        at += choices.exponential(mean_seconds)
    return faults


def random_hardships(
    choices: Choices,
    learners: Sequence[LearnerSpec],
    shards: int,
    *,
    body_bytes: float,
    until: float,
    mean_seconds: float,
) -> list[Fault]:
    """A Poisson process of what makes a process late, or lose touch, without ending it.

    Its loop stands for up to some four hundred steps; its link carries a body in up to fifty steps,
    up or down, sometimes from the moment on at which a shard loses its power; it connects anew
    before a shard knows that the old connection is gone, often several times in a row. Or the disk
    of a shard is full.

    Args:
        choices: where they are drawn from.
        learners: who may be struck; observers have no loop, and no uplink that is used.
        shards: how many shards there are.
        body_bytes: the mean size of a contribution.
        until: when the last has ended, seconds.
        mean_seconds: mean time between two of them.
    """
    names = [f"shard-{shard}" for shard in range(shards)]
    kinds: list[Kind] = ["stall", "stall", "choke", "choke", "slip", "slip", "fill"]
    faults: list[Fault] = []
    at = choices.exponential(mean_seconds)
    while at < until:
        kind, learner = choices.pick(kinds), choices.pick(learners)
        name, step_seconds = learner.name, learner.step_seconds
        rest = until - at
        if kind == "stall":
            lasts = min(step_seconds * choices.log_uniform(3.0, 400.0), rest)
            faults.append(Fault(at, kind, name, lasts))
        elif kind == "choke":
            way: Way = choices.pick(["up", "down"])
            rate = learner.up_bytes_per_second if way == "up" else learner.down_bytes_per_second
            seconds = choices.log_uniform(1.0, 50.0) * step_seconds
            factor = max(1.0, rate * seconds / body_bytes)
            lasts = min(choices.log_uniform(5.0, 60.0), rest)
            faults.append(Fault(at, kind, name, lasts, factor=factor, way=way))
            if choices.chance(0.3):
                away = min(choices.log_uniform(0.05, 10.0), rest)
                faults.append(Fault(at, "vanish", choices.pick(names), away))
        elif kind == "fill":
            lasts = min(choices.log_uniform(0.5, 60.0), rest)
            faults.append(Fault(at, kind, choices.pick(names), lasts))
        else:
            peer = choices.pick(["", *names])
            for _ in range(choices.integer(1, 3)):
                faults.append(Fault(at, kind, name, peer=peer))
                at += choices.log_uniform(0.1, 10.0)
        at += choices.exponential(mean_seconds)
    return [fault for fault in faults if fault.at < until]


def random_rank_faults(
    choices: Choices, learners: Sequence[LearnerSpec], *, until: float, mean_seconds: float
) -> list[Fault]:
    """A Poisson process of what befalls one rank of a learner of several.

    Each learner, or one of its ranks, is killed once more when it may have a checkpoint.

    Args:
        choices: where they are drawn from.
        learners: those of several ranks.
        until: when the last has ended, seconds.
        mean_seconds: mean time between two faults.
    """
    kinds: list[Kind] = ["crash", "pause", "cut", "cut"]
    faults: list[Fault] = []
    at = choices.exponential(mean_seconds)
    while at < until:
        learner, kind = choices.pick(learners), choices.pick(kinds)
        peer = learner.name if kind == "cut" and choices.chance(0.5) else ""
        lasts = min(choices.log_uniform(0.05, 40.0), until - at)
        rank = choices.integer(1, learner.ranks - 1)
        faults.append(Fault(at, kind, learner.name, lasts, peer, rank=rank))
        at += choices.exponential(mean_seconds)
    for learner in learners:
        at, rank = choices.uniform(0.6, 1.0) * until, choices.integer(0, learner.ranks - 1)
        faults.append(Fault(at, "crash", learner.name, min(1.0, until - at), rank=rank))
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
        peer = "shard-0" if kind in ("cut", "break") and choices.chance(0.5) else ""
        peer = "" if process.startswith(peer) else peer
        lasts = min(choices.log_uniform(0.05, 40.0), until - at)
        faults.append(Fault(at, kind, process, lasts, peer))
        at += choices.exponential(mean_seconds)
    return faults
