"""The virtual process of one syncer shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never, cast

from decoupled_diloco.protocol.checkpoints.effects import ForgetCheckpoints, TakeCheckpoint
from decoupled_diloco.protocol.checkpoints.events import CheckpointHeard, PartWritten
from decoupled_diloco.protocol.effects import (
    Accept,
    Broadcast,
    ClockAdvanced,
    Drop,
    Evict,
    Expect,
    ExpectCopy,
    Fold,
    Install,
    LoadWeights,
    Merge,
    Note,
    Reject,
    RoundFinished,
    RoundOpened,
    Send,
    Stop,
    SyncerEffect,
    Unexpect,
)
from decoupled_diloco.protocol.events import (
    BodyArrived,
    BodyCorrupt,
    Connected,
    CopyArrived,
    CopyCorrupt,
    DiskRead,
    DurableCopy,
    Heard,
    Lost,
    Merged,
    MergeFailed,
    Received,
    Reported,
    ShardMemory,
    WeightsLoaded,
)
from decoupled_diloco.protocol.messages import (
    Copy,
    CopyWanted,
    Hello,
    JoinRefused,
    Refusal,
    ShardHello,
    StepReport,
    Swept,
    Upload,
)
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.syncer import SyncerMachine
from decoupled_diloco.protocol.syncer_memory import remembered
from decoupled_diloco.protocol.versions import Asking, Version
from decoupled_diloco.simulate.bodies import Body, ShardBodies
from decoupled_diloco.simulate.claims import VirtualTenure
from decoupled_diloco.simulate.cuts import ShardPart
from decoupled_diloco.simulate.network import Connection
from decoupled_diloco.simulate.shard_disk import Kept, VirtualShardDisk
from decoupled_diloco.simulate.shell import Shell

if TYPE_CHECKING:
    from decoupled_diloco.simulate.world import World

HEARD_SECONDS = 2.0
"""How often a shard tells its machine whose pings have come in."""


@dataclass(slots=True)
class Expected:
    """A body that may come, and the halves of it that have come."""

    learner: str
    epoch: int
    order: Expect | ExpectCopy
    announced: Upload | Copy | None = None
    body: Body | None = None


class ShardProcess(Shell):
    """Runs one `SyncerMachine`, with its merge worker and its data plane.

    Where shards have standbys it first waits for its claim: until then it has no machine, and
    does not listen.

    Args:
        world: Where it lives.
        shard: Which shard it is of.
        primary: The process that it is the standby of; their disk is the same.
    """

    machine: SyncerMachine
    bodies: ShardBodies

    def __init__(self, world: World, shard: int, primary: ShardProcess | None = None) -> None:
        super().__init__(world, f"shard-{shard}" + ("" if primary is None else "-standby"))
        self.shard = shard
        self.is_standby = primary is not None
        self.shard_lease: VirtualTenure | None = None
        self.claim = 0
        self.storage_gone = False
        self.finished = False
        self.bound: dict[str, Connection] = {}
        self.who: dict[int, tuple[str, int]] = {}
        self.expected: dict[str, Expected] = {}
        self.paths: dict[tuple[Any, ...], str] = {}
        self.inboxes: dict[float, list[tuple[Connection, StepReport, int]]] = {}
        self.bodies_here: dict[Asking, Body] = {}
        self.worker_free_at = 0.0
        owned = world.options.owned(shard)
        self.disk: VirtualShardDisk = VirtualShardDisk(owned) if primary is None else primary.disk
        self.disk_is_full = False
        self.exact = False
        self.newest: dict[int, DurableCopy] = {}

    def begin(self) -> None:
        """Starts with nothing but its disk, at once or when it has its claim."""
        super().begin()
        self.shard_lease, self.claim = None, 0
        claims = self.world.claims[self.shard]
        if claims is None:
            self.act(0)
            return
        self.listens = False
        self.shard_lease = VirtualTenure(self, claims, waits=self.is_standby)
        self.shard_lease.begin()

    def act(self, claim: int) -> None:
        """This process acts for its shard, by this claim."""
        self.claim, self.listens = claim, True
        self.bound.clear()
        self.who.clear()
        self.expected.clear()
        self.paths.clear()
        self.bodies_here.clear()
        self.worker_free_at = 0.0
        self.newest = {}
        options = self.world.options
        self.machine = SyncerMachine(options, self.shard)
        self.bodies = self.world.bodies.shard(self.shard, options.owned(self.shard))
        self._recover()
        self.dial_coordinator()
        self.later(HEARD_SECONDS, self._hear)

    def reborn(self) -> SyncerMachine:
        """See `Shell`."""
        machine = SyncerMachine(self.world.options, self.shard)
        machine.restore(self.machine.snapshot())
        return machine

    # ---- its claim

    def tell(self, event: Any) -> None:
        """See `Shell`; who does not hold its claim any more does nothing."""
        if self.shard_lease is None or self.shard_lease.holds():
            super().tell(event)

    def leap(self, seconds: float) -> None:
        """See `Shell`."""
        super().leap(seconds)
        if self.shard_lease is not None and self.alive:
            self.shard_lease.leapt()

    def replaced(self, why: str) -> None:
        """Another process acts for the shard, or may: this one ends, and is started again."""
        shard_lease = self.shard_lease
        assert shard_lease is not None, f"{self.name} has no standby: {why}"
        if self.alive:
            self.end()
            shard_lease.leave(finished=False)
            self.world.replaced(self)

    def stand_down(self) -> None:
        """The run is over: there is nothing to wait for."""
        self.finished = True
        self.end()

    # ---- what arrives

    @property
    def cut(self) -> int:
        """See `Endpoint`."""
        return 0 if self.machine is None else self.machine.state.checkpoint

    def hear_cut(self, cut: int) -> None:
        """See `Endpoint`."""
        if cut > self.cut:
            self.tell(CheckpointHeard(cut))

    def coordinator_reached(self, connection: Connection) -> None:
        """See `Shell`."""
        connection.send(self, ShardHello(self.shard, f"{self.name}-{self.life}", "", self.claim))

    def received(self, connection: Connection, message: Any) -> None:
        """A message of the coordinator or of a learner."""
        if isinstance(message, JoinRefused):
            self.replaced(message.reason)
        elif connection is self.coordinator_link:
            self.tell(Received(COORDINATOR, message))
        elif isinstance(message, Hello):
            self.tell(Connected(message.learner, message, connection.number))
        elif connection.number in self.who:
            learner, _ = self.who[connection.number]
            if self.bound.get(learner) is not connection:
                return
            self.tell(Received(learner, message))
            if isinstance(message, Upload | Copy):
                self._announced(learner, message)

    def post(self, connection: Connection, report: StepReport) -> None:
        """A learner sends a step report to a shard that looks into its inbox now and then."""
        clockwork, seconds = self.world.clockwork, self.world.inbox_seconds
        arrives_at = clockwork.now + connection.delay()
        instant = connection.arrives(self, (arrives_at // seconds + 1) * seconds)
        inbox = self.inboxes.get(instant)
        if inbox is None:
            inbox = self.inboxes[instant] = []
            clockwork.at(instant, self._look_into_inbox, instant)
        inbox.append((connection, report, connection.other(self).cut))

    def _look_into_inbox(self, instant: float) -> None:
        inbox = self.inboxes.pop(instant)
        who, bound = self.who, self.bound
        reports = []
        if self.alive and not self.paused:
            self.hear_cut(max(cut for _, _, cut in inbox))
        for connection, report, cut in inbox:
            if self.paused or connection.is_stalled_to(self):
                connection.deliver(self, report, cut)
            elif connection.open[self.name] and not connection.broken:
                learner = who[connection.number][0] if connection.number in who else ""
                if bound.get(learner) is connection:
                    reports.append((learner, report))
        if self.alive and reports:
            self.tell(Reported(tuple(reports)))

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        if connection is self.coordinator_link:
            self.coordinator_lost()
            return
        learner, _ = self.who.pop(connection.number, ("", 0))
        if learner and self.bound.get(learner) is connection:
            del self.bound[learner]
            self.tell(Lost(learner))

    def _hear(self) -> None:
        heard = [
            learner
            for learner, connection in self.bound.items()
            if not connection.other(self).paused
            and connection.other(self).alive
            and not self.world.network.is_silent(connection.other(self), self)
        ]
        self.later(HEARD_SECONDS, self._hear)
        if heard:
            self.tell(Heard(tuple(heard)))

    # ---- bodies that come in

    def arrived(self, path: str, body: Body) -> bool:
        """A body is here whole; ``False``: nobody expects it."""
        expected = self.expected.get(path)
        if expected is None or expected.body is not None:
            return False
        expected.body = body
        self._join(path, expected)
        return True

    def _announced(self, learner: str, message: Upload | Copy) -> None:
        path = self.paths.get(_key(learner, message))
        if path is not None and path in self.expected:
            self.expected[path].announced = message
            self._join(path, self.expected[path])

    def _no_longer_expected(self, path: str) -> None:
        expected = self.expected.pop(path, None)
        if expected is not None:
            self.paths.pop(_key(expected.learner, expected.order), None)

    def _join(self, path: str, expected: Expected) -> None:
        announced, body, order = expected.announced, expected.body, expected.order
        if announced is None or body is None:
            return
        self._no_longer_expected(path)
        wrong = "another digest" if announced.digest != body.digest else ""
        link = self.world.learners[expected.learner].link
        spoiled = self.choices.chance(max(self.world.spoil, link.corruption))
        wrong = "spoiled" if spoiled else wrong
        if isinstance(announced, Upload):
            assert isinstance(order, Expect)
            if wrong:
                self.tell(BodyCorrupt(expected.learner, order.fragment, order.ask, wrong))
                return
            self.world.keep_body(self.shard, path, body)
            self.bodies_here[order.ask] = body
            self.tell(
                BodyArrived(
                    learner=expected.learner,
                    epoch=expected.epoch,
                    fragment=order.fragment,
                    ask=order.ask,
                    base=announced.base,
                    steps=announced.steps,
                    tokens=announced.tokens,
                    nbytes=body.nbytes,
                    norm=self._norm(order.fragment, body),
                )
            )
        else:
            assert isinstance(order, ExpectCopy)
            place = (expected.learner, order.fragment, order.attempt)
            if wrong:
                self.tell(CopyCorrupt(*place, wrong))
            else:
                self.world.keep_body(self.shard, path, body)
                digest = self.bodies.receive_copy(order.fragment, body)
                self.tell(CopyArrived(*place, digest))

    def served(self, path: str) -> Body | None:
        """What a GET of this path gives at this moment."""
        if self.machine is None:
            return None
        kind, fragment, term_counter = path.strip("/").split("/")
        entry = self.machine.state.fragments[int(fragment)]
        if entry.version is None or str(entry.version) != term_counter:
            return None
        give = self.bodies.whole if kind == "whole" else self.bodies.difference
        return give(int(fragment), entry.version)

    # ---- orders

    def carry_out(self, effect: SyncerEffect) -> None:
        """Carries one order out."""
        match effect:
            case Accept(number, learner, epoch):
                self._bind(number, learner, epoch)
            case Reject(number, reason, final):
                connection = self.connections.get(number)
                if connection is not None:
                    connection.send(self, Refusal(reason, final))
                    connection.close(self)
            case Send(peer, message) if peer == COORDINATOR:
                self._report(message)
            case Send(learner, message):
                if learner in self.bound:
                    self._send(learner, cast("Any", message))
            case Broadcast(message):
                for connection in self.bound.values():
                    connection.send(self, message)
            case Expect(path, learner) | ExpectCopy(path, learner):
                if learner in self.bound:
                    epoch = self.who[self.bound[learner].number][1]
                    self.expected[path] = Expected(learner, epoch, effect)
                    self.paths[_key(learner, effect)] = path
            case Unexpect(path):
                self._no_longer_expected(path)
            case Fold(ask=ask):
                self._in_order(self.bodies.fold, effect, self.bodies_here.pop(ask))
            case Drop(ask=ask):
                del self.bodies_here[ask]
            case Merge():
                self._work(self._merge, effect)
            case Install(fragment, version):
                digest = self.bodies.install(fragment, version)
                assert digest == self.machine.state.fragments[fragment].digest
                self._keep(fragment, version, digest)
            case LoadWeights():
                self._work(self._load)
            case Evict(learner):
                bound = self.bound.pop(learner, None)
                if bound is not None:
                    self.who.pop(bound.number, None)
                    bound.close(self)
            case Stop():
                self.finished = True
                self.world.finished_shards.add(self.shard)
                if self.shard_lease is not None:
                    self.shard_lease.leave(finished=True)
                self.end()
            case TakeCheckpoint(number):
                self._work(self._take_part, number, remembered(self.machine.state))
            case RoundOpened() | RoundFinished() | ClockAdvanced() | ForgetCheckpoints() | Note():
                pass
            case _:
                assert_never(effect)

    def _report(self, message: Any) -> None:
        if isinstance(message, Swept) and self.shard_lease and self.shard_lease.confirm() != "ours":
            self.replaced("its share of the result cannot be handed in")
        elif self.coordinator_link is not None:
            self.coordinator_link.send(self, message)

    def _send(self, learner: str, message: Any) -> None:
        connection, world = self.bound[learner], self.world
        slips = world.copies_slip if isinstance(message, CopyWanted) else world.slips
        if self.choices.chance(slips):
            connection.slip(connection.other(self))
        connection.send(self, message)

    def _bind(self, number: int, learner: str, epoch: int) -> None:
        older = self.bound.pop(learner, None)
        if older is not None:
            self.who.pop(older.number, None)
            older.close(self)
        connection = self.connections.get(number)
        if connection is not None:
            self.bound[learner] = connection
            self.who[number] = (learner, epoch)

    def _work(self, function: Any, *arguments: Any) -> None:
        """One after the other, as the merge worker would."""
        start = max(self.now, self.worker_free_at)
        self.worker_free_at = start + self.world.merge_seconds
        self.world.clockwork.arrive(self, self.worker_free_at, function, *arguments)

    def _in_order(self, function: Any, *arguments: Any) -> None:
        """After what the worker has been given so far; it takes no time itself."""
        if self.worker_free_at <= self.now:
            function(*arguments)
        else:
            self.world.clockwork.arrive(self, self.worker_free_at, function, *arguments)

    def _merge(self, order: Merge) -> None:
        if self.choices.chance(self.world.merge_fails):
            self._failed(order, "the worker failed")
            return
        if self.disk_is_full:
            self._failed(order, "the disk is full")
            return
        if self.shard_lease is not None and self.shard_lease.confirm() != "ours":
            self._not_ours(self.shard_lease, order)
            return
        digest = self.bodies.merge(order.fragment, order.version, order.base)
        self._keep(order.fragment, order.version, digest)
        if self.choices.chance(self.world.crash_after_merge):
            self.world.lose_power(self)
        if self.alive:
            self._told_of(Merged(order.round, order.fragment, digest))

    def _not_ours(self, shard_lease: VirtualTenure, order: Merge) -> None:
        if shard_lease.confirm() == "unknown":
            self._failed(order, "the storage of the claims is out of reach")
        else:
            self.replaced("there is a newer claim")

    def _failed(self, order: Merge, reason: str) -> None:
        self.bodies.forget_folded(order.fragment)
        self.tell(MergeFailed(order.round, order.fragment, reason))

    def _told_of(self, merged: Merged) -> None:
        """What the disk has is told of once the storage has been asked again, if it can be."""
        if self.shard_lease is None:
            self.tell(merged)
            return
        asked_at = self.now + self.shard_lease.claims.delay()
        self.worker_free_at = max(self.worker_free_at, asked_at)
        self.world.clockwork.arrive(self, asked_at, self._confirmed, self.shard_lease, merged)

    def _confirmed(self, shard_lease: VirtualTenure, merged: Merged) -> None:
        if shard_lease.confirm() == "ours":
            self.tell(merged)
        else:
            self.replaced("its claim cannot be confirmed")

    def _take_part(self, number: int, memory: ShardMemory) -> None:
        if self.shard_lease is not None and self.shard_lease.confirm() != "ours":
            self.tell(PartWritten(number, "", 0, "its claim cannot be confirmed"))
            return
        kept = {p: Kept(copy, self.bodies.keep(p)) for p, copy in self.newest.items()}
        self.world.cuts.shards[number, self.shard] = ShardPart(kept, memory)
        self.tell(PartWritten(number, "", 0))

    def _norm(self, fragment: int, body: Body) -> float:
        poisoned = self.choices.chance(self.world.poison)
        return self.bodies.norm(fragment, body) * (1e6 if poisoned else 1.0)

    def _keep(self, fragment: int, version: Version, digest: str) -> None:
        """Brings a version to the disk, before anybody hears of it."""
        self.newest[fragment] = DurableCopy(fragment, version, digest)
        if not self.choices.chance(self.world.disk_lies):
            kept = Kept(DurableCopy(fragment, version, digest), self.bodies.keep(fragment))
            self.disk.keep(self.claim, kept, remembered(self.machine.state))

    def _recover(self) -> None:
        if self.choices.chance(self.world.disk_lost):
            self.disk.clear()
        files = self.disk.read()
        for fragment, kept in files.fragments.items():
            assert self.bodies.recover(fragment, kept.content) == kept.copy.digest
        if files.fragments:
            copies = tuple(kept.copy for kept in files.fragments.values())
            self.tell(DiskRead(copies, files.memory, self.exact))
            self.exact = False

    def _load(self) -> None:
        owned = self.world.options.owned(self.shard)
        self.tell(WeightsLoaded(tuple((p, self.bodies.load(p)) for p in owned)))


def _key(learner: str, of: Expect | ExpectCopy | Upload | Copy) -> tuple[Any, ...]:
    """What an order to expect a body and the body's announcement have in common."""
    if isinstance(of, Expect | Upload):
        return (learner, of.fragment, "contribution", of.ask)
    return (learner, of.fragment, "copy", of.attempt)
