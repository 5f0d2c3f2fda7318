"""Rules for worlds with standbys and with clock jumps; see `checkers`.

Leadership leases alone are not enough, because a clock jump lets two processes act at once. So the
checker verifies the effects on others. A replaced process gets no term and publishes nothing new.
Every copy that any learner takes later contains what a learner has taken before.

*Takeover.* If nothing else fails, the other process has installed its fragments at most

    A = 1.1·L + L/8 + 8·s + 11 + 5 + 6·(r + 2·w) + 2·2 + 1

seconds after the last sign of life of the acting process.

* L is the lease, which is claimed after it expires, up to an eighth of it late.
* s is the one-way delay of the storage.
* Learners close a silent connection after 11 s, after trying it for 5 s.
* r is the longest backoff (5 s), before the coordinator is dialed and before learners come back.
* w is the one-way delay with jitter.
* 2: a restored shard waits for holders of newer copies, once more if one must deliver its own.

The next commit comes as late after that as any other commit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from decoupled_diloco.protocol.copies import BURNT, NOT_TAKEN, STARTS_AGAIN
from decoupled_diloco.protocol.first_copies import SETTLE_SECONDS
from decoupled_diloco.protocol.messages import (
    Activate,
    AdmitShard,
    Apply,
    BodyArrived,
    Broadcast,
    Connected,
    Evict,
    Fetch,
    Heard,
    Published,
    Received,
    Relabel,
    Reported,
    ShardHello,
    Version,
)
from decoupled_diloco.protocol.syncer_state import LEASE_SECONDS
from decoupled_diloco.syncer.shard_lease import ShardLease
from decoupled_diloco.transport.backoff import CAP_SECONDS
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.simulate.virtual_network import LOST_SECONDS, STALL_SECONDS


class ClaimChecker:
    """Checks one world. It raises `AssertionError` at the event that breaks a rule.

    Attributes:
        takeovers: Number of leases after the first one of each shard.
        clocks_leap: Whether clocks may jump in this world, so that two processes may act at once.
    """

    def __init__(self, system: System, *, clocks_leap: bool = False) -> None:
        self.system = system
        self.disks_are_lost = False
        self.clocks_leap = clocks_leap
        self.takeovers = 0
        self._processes = {process.name: process for process in system.shard_processes}
        self._claims: dict[int, int] = {}
        self._contents: dict[int, set[str]] = defaultdict(set)
        self._taken: dict[tuple[int, int], tuple[Version, str]] = {}
        self._held: dict[tuple[str, int, int], Version] = {}
        self._received: dict[tuple[str, str], float] = {}
        system.recorders.append(self)

    def __call__(self, host_name: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Check one event that a state machine has handled."""
        if host_name in self._processes:
            self._note_received(host_name, event)
        for effect in effects:
            match effect:
                case AdmitShard(shard):
                    assert isinstance(event, Connected)
                    assert isinstance(event.greeting, ShardHello)
                    newest = self._claims.get(shard, 0)
                    assert event.greeting.claim >= newest, f"{event} admitted after claim {newest}"
                    self._claims[shard] = event.greeting.claim
                case Activate(number):
                    self._activated(host_name.removesuffix(".claims"), number)
                case Broadcast(Published() as message):
                    self._published(host_name, message)
                case Evict(learner, reason) if _is_silent(reason) and not self.clocks_leap:
                    silent = self.system.now - self._received.get((host_name, learner), 0.0)
                    text = f"{host_name} evicts {learner}, which sent something {silent:.1f} s ago"
                    assert silent >= LEASE_SECONDS / 2, text
                case Fetch(_, fragment, version, digest=digest):
                    self._fetched(fragment, version, digest)
                case Apply(fragment, version, why=why):
                    self._applied(host_name, fragment, version, why)
                case Relabel(fragment, version, why, staged=False):
                    self._applied(host_name, fragment, version, why)

    def _note_received(self, host_name: str, event: Any) -> None:
        match event:
            case Heard(learners):
                names = learners
            case Received(learner) | BodyArrived(learner):
                names = (learner,)
            case Connected(learner):
                names = (learner,)
            case Reported(reports):
                names = tuple(learner for learner, _ in reports)
            case _:
                return
        for name in names:
            self._received[host_name, name] = self.system.now

    def _activated(self, host_name: str, number: int) -> None:
        process = self._processes[host_name]
        self.takeovers += number > 1
        for other in self.system.hosts_of(process.shard):
            shard_lease = other.shard_lease
            acts = other is not process and other.alive and isinstance(shard_lease, ShardLease)
            held = (
                isinstance(shard_lease, ShardLease)
                and acts
                and shard_lease.machine.holds(self.system.now + other.ahead_seconds)
            )
            assert not held or self.clocks_leap, f"{host_name} and {other.name} act at once"

    def _published(self, host_name: str, message: Published) -> None:
        contents = self._contents[message.fragment]
        if self.system.is_replaced(self._processes[host_name]) and contents:
            text = f"{host_name} was replaced, but publishes {message.version}"
            assert message.digest in contents, text
        contents.add(message.digest)

    def _fetched(self, fragment: int, version: Version, digest: str) -> None:
        """Check that copies fetched as the newest form one history across all terms."""
        if self.disks_are_lost:
            return
        before, content = self._taken.setdefault((fragment, version.counter), (version, digest))
        text = f"fragment {fragment}: {version} has other bits than {before}, which was fetched"
        assert content == digest, text

    def _applied(self, host_name: str, fragment: int, version: Version, why: str) -> None:
        place = (host_name, self.system.participants[host_name].life, fragment)
        before = self._held.get(place)
        # At the end, the copy that is held overwrites contributions that no version has merged.
        again = version == before and why in (NOT_TAKEN, STARTS_AGAIN, BURNT)
        forward = before is None or version > before
        assert forward or again, f"{host_name} applies {version} after {before}"
        self._held[place] = version


def _is_silent(reason: str) -> bool:
    return "no data arrived" in reason


def takeover_seconds_max(system: System) -> float:
    """Return A, the longest time from the last sign of life to the takeover; see the module."""
    lease, storage = system.config.syncer.lease_seconds, system.claim_seconds
    way = max(host.link.latency + host.link.jitter for host in system.hosts) + 0.001
    claimed = 1.1 * lease + lease / 8 + 8 * storage
    parted = LOST_SECONDS + 1.0 + STALL_SECONDS
    back = 6 * (CAP_SECONDS + 2 * way)
    return claimed + parted + back + 2 * SETTLE_SECONDS + 1.0
