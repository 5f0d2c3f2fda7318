"""Faults of a virtual world as data, drawn from a seed or written by hand."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.hosts import Host, LearnerHost, ParticipantHost
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.simulate.virtual_network import Way

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
        at: When it happens, in seconds.
        kind: ``crash``: SIGKILL. ``vanish``: power failure, so that peers receive no reset.
            ``pause``: SIGSTOP. ``cut``: the link is silent. ``break``: connections are lost.
            ``slip``: connections are lost, but the other end does not notice. ``slow``: steps take
            longer. ``stall``: the training loop stalls, and the background continues. ``choke``:
            the link is slower. ``fill``: the disk is full. ``leap``: the clock jumps ahead once.
            ``unmount``: the storage of leadership leases is out of reach (shards with standbys
            only). ``lose``: the process is killed, and its disk is empty when it comes back. Slow,
            stall and choke apply to learners only.
        process: The process that it hits: a learner's name, ``shard-0``, ``shard-0-standby``.
        seconds: Duration, after which it is undone; infinity: never. For ``leap``, the distance.
        peer: The other end of a cut, break or slip; empty: all peers.
        factor: How many times longer steps take, or slower the link is.
        way: The slower direction of a link.
        rank: The rank of a multi-rank learner that is killed, paused or cut off. It is cut off from
            the syncer or, with the learner itself as ``peer``, from rank 0. 0: the whole learner.
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
    """Plan the start and the end of faults."""
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
            raise AssertionError(f"kind={fault.kind!r} cannot be applied to one rank: {fault}")


def _peers(system: System, host: Host) -> list[Host]:
    if isinstance(host, ParticipantHost):
        return [*system.shard_processes]
    return [other for other in system.hosts if other is not host]


def _begin(system: System, fault: Fault, host: Host, peers: list[Host]) -> None:
    match fault.kind:
        case "crash" if isinstance(host, LearnerHost) and host.choices.chance(system.preempted):
            system.request_stop(host, host.choices.log_uniform(0.5, 30.0), signal.SIGTERM)
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
            host.stall()
        case "choke" if isinstance(host, ParticipantHost):
            host.slow_link(fault.factor, fault.way)


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
            host.end_stall()
        case "choke" if isinstance(host, ParticipantHost):
            host.slow_link(1.0, fault.way)
        case _:
            pass  # the other kinds are over at once


def random_faults(
    choices: Choices, learners: Sequence[str], shards: int, *, until: float, mean_seconds: float
) -> list[Fault]:
    """Draw a Poisson process of faults, all of which end by ``until``.

    Args:
        choices: The random stream.
        learners: Names of learners and observers that may be hit.
        shards: Number of shards.
        until: End of the last fault, in seconds.
        mean_seconds: Mean time between two faults.
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
    """Draw a Poisson process of faults that delay or disconnect a process without ending it.

    A loop stalls for up to about 400 steps. Or a link needs up to 50 steps for a payload, up or
    down, sometimes from the moment of a shard's power failure. Or a learner reconnects before a
    shard notices the loss of the old connection, often several times in a row. Or a shard's disk is
    full.

    Args:
        choices: The random stream.
        learners: Learners that may be hit. Observers have no loop and do not use their uplink.
        shards: Number of shards.
        body_bytes: Mean size of a contribution.
        until: End of the last fault, in seconds.
        mean_seconds: Mean time between two faults.
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
    """Draw a Poisson process of faults of single ranks of multi-rank learners.

    Each learner, or one of its ranks, is killed once more when it may have a checkpoint.

    Args:
        choices: The random stream.
        learners: The multi-rank learners.
        until: End of the last fault, in seconds.
        mean_seconds: Mean time between two faults.
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


def random_relay_faults(
    choices: Choices, relays: Sequence[str], *, until: float, mean_seconds: float
) -> list[Fault]:
    """Draw a Poisson process of faults of relays and of their connections.

    Args:
        choices: The random stream.
        relays: Names of the relays.
        until: End of the last fault, in seconds.
        mean_seconds: Mean time between two faults.
    """
    kinds: list[Kind] = ["crash", "vanish", "pause", "cut", "break", "slip", "fill"]
    faults: list[Fault] = []
    at = choices.exponential(mean_seconds)
    while at < until:
        kind = choices.pick(kinds)
        peer = "shard-0" if kind in ("cut", "break", "slip") and choices.chance(0.3) else ""
        lasts = min(choices.log_uniform(0.05, 40.0), until - at)
        faults.append(Fault(at, kind, choices.pick(relays), lasts, peer))
        at += choices.exponential(mean_seconds)
    return faults


def random_takeovers(
    choices: Choices, shards: int, *, until: float, mean_seconds: float
) -> list[Fault]:
    """Draw a Poisson process of faults that cause a takeover, or an attempt at one.

    Args:
        choices: The random stream.
        shards: Number of shards, each with a standby.
        until: End of the last fault, in seconds.
        mean_seconds: Mean time between two faults.
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
