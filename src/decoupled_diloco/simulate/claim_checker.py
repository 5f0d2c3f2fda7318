"""What must hold where shards have standbys, and where clocks leap; see `checkers`.

Claims alone are not enough: a clock that leaps makes two processes act at once. So it is looked at
what others take over: whoever was replaced gets no term and tells nothing new, and what a learner
has taken is in whatever any learner takes later.

*Takeover.* From the last sign of life of the process that acts, nothing else being wrong, the other
one is at work (its fragments installed) within

    A = 1.1·L + L/8 + 8·s + 11 + 5 + 6·(r + 2·w) + 2·2 + 1

seconds. L: the lease, after which it is claimed, an eighth of it late; s: the storage, one way;
learners part from who is silent after 11 s, and try it first for 5 s; r: the longest backoff
(5 s), before the coordinator is dialled and before learners come back; w: one way with jitter;
2: a restored shard waits for holders of newer copies, once more if one must deliver its own. The
next commit comes as late after that as any does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from decoupled_diloco.protocol.effects import AdmitShard, Apply, Broadcast, Evict, Fetch, Relabel
from decoupled_diloco.protocol.events import BodyArrived, Connected, Heard, Received, Reported
from decoupled_diloco.protocol.learner_fragments import NOT_TAKEN
from decoupled_diloco.protocol.membership import LEASE_SECONDS
from decoupled_diloco.protocol.messages import Published, ShardHello
from decoupled_diloco.protocol.shard_lease import Activate
from decoupled_diloco.protocol.syncer_fill import SETTLE_SECONDS
from decoupled_diloco.protocol.versions import Version
from decoupled_diloco.simulate.network import LOST_SECONDS, STALL_SECONDS
from decoupled_diloco.simulate.system import System
from decoupled_diloco.syncer.shard_lease import ShardLease
from decoupled_diloco.transport.backoff import CAP_SECONDS


class ClaimChecker:
    """Watches one world; raises `AssertionError` at the event that breaks a rule.

    Attributes:
        takeovers: how many claims were made after the first of a shard.
        clocks_leap: clocks may leap in this world, so that two may act at once.
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
        self._heard: dict[tuple[str, str], float] = {}
        system.recorders.append(self)

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """One event that a machine has handled."""
        if who in self._processes:
            self._note_heard(who, event)
        for effect in effects:
            match effect:
                case AdmitShard(shard):
                    assert isinstance(event, Connected)
                    assert isinstance(event.greeting, ShardHello)
                    newest = self._claims.get(shard, 0)
                    assert event.greeting.claim >= newest, f"{event} is let in after claim {newest}"
                    self._claims[shard] = event.greeting.claim
                case Activate(number):
                    self._activated(who.removesuffix(".claims"), number)
                case Broadcast(Published() as message):
                    self._published(who, message)
                case Evict(learner, reason) if _is_silent(reason) and not self.clocks_leap:
                    silent = self.system.now - self._heard.get((who, learner), 0.0)
                    text = f"{who} evicts {learner}, which it has heard {silent:.1f} s ago"
                    assert silent >= LEASE_SECONDS / 2, text
                case Fetch(_, fragment, version, digest=digest):
                    self._fetched(fragment, version, digest)
                case Apply(fragment, version, why=why):
                    self._applied(who, fragment, version, why)
                case Relabel(fragment, version, why, staged=False):
                    self._applied(who, fragment, version, why)

    def _note_heard(self, who: str, event: Any) -> None:
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
            self._heard[who, name] = self.system.now

    def _activated(self, who: str, number: int) -> None:
        process = self._processes[who]
        self.takeovers += number > 1
        for other in self.system.hosts_of(process.shard):
            shard_lease = other.shard_lease
            acts = other is not process and other.alive and isinstance(shard_lease, ShardLease)
            held = (
                isinstance(shard_lease, ShardLease)
                and acts
                and shard_lease.machine.holds(self.system.now + other.ahead_seconds)
            )
            assert not held or self.clocks_leap, f"{who} and {other.name} act at once"

    def _published(self, who: str, message: Published) -> None:
        contents = self._contents[message.fragment]
        if self.system.is_replaced(self._processes[who]) and contents:
            text = f"{who} was replaced, and tells of {message.version}"
            assert message.digest in contents, text
        contents.add(message.digest)

    def _fetched(self, fragment: int, version: Version, digest: str) -> None:
        """Of what is taken as the newest there is one history, whatever the terms."""
        if self.disks_are_lost:
            return
        before, content = self._taken.setdefault((fragment, version.counter), (version, digest))
        text = f"fragment {fragment}: {before} was taken, and {version} has other bits"
        assert content == digest, text

    def _applied(self, who: str, fragment: int, version: Version, why: str) -> None:
        place = (who, self.system.participants[who].life, fragment)
        before = self._held.get(place)
        # In the end what no version has taken makes way for the copy that is held.
        again = version == before and why == NOT_TAKEN
        forward = before is None or version > before
        assert forward or again, f"{who}: {version} is taken after {before}"
        self._held[place] = version


def _is_silent(reason: str) -> bool:
    return "nothing was heard" in reason


def takeover_seconds_max(system: System) -> float:
    """A: the seconds from the last sign of life until the other process is at work; see above."""
    lease, storage = system.config.syncer.lease_seconds, system.claim_seconds
    way = max(host.link.latency + host.link.jitter for host in system.hosts) + 0.001
    claimed = 1.1 * lease + lease / 8 + 8 * storage
    parted = LOST_SECONDS + 1.0 + STALL_SECONDS
    back = 6 * (CAP_SECONDS + 2 * way)
    return claimed + parted + back + 2 * SETTLE_SECONDS + 1.0
