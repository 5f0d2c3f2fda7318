"""A shard of the world: the real machine, with a disk and links of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoupled_diloco.protocol import SyncerMachine
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.syncer_memory import remembered
from decoupled_diloco.protocol.versions import Asking, Version
from outside.content import DIFFERENCES_KEPT, HEAR_SECONDS, Content, digest, plus
from outside.nodes import Connection, Contribution, Node

if TYPE_CHECKING:
    from outside.learner import Learner
    from outside.world import World


@dataclass
class Due:
    """What a shard expects at a path: an announcement and a body, in any order."""

    order: do.Expect | do.ExpectCopy
    announced: msg.Upload | msg.Copy | None = None
    body: Content | None = None


class Shard(Node):
    def __init__(self, world: World, index: int) -> None:
        super().__init__()
        self.world, self.index, self.name = world, index, f"shard {index}"
        self.stopped = False
        self.stored: dict[int, tuple[Version, Content]] = {}
        self.memory: ev.ShardMemory | None = None

    def begin(self) -> None:
        self.life += 1
        self.alive = True
        self.inbox, self.busy, self.alarm, self.frozen_until = [], False, None, 0.0
        self.machine = SyncerMachine(self.world.options, self.index)
        self.bound: dict[str, Connection] = {}
        self.greeting: dict[int, Connection] = {}
        self.due: dict[str, Due] = {}
        self.uploads: dict[str, tuple[Learner, int]] = {}
        self.paths: dict[tuple[str, int, object], str] = {}
        self.here: dict[tuple[int, str, Asking], Content] = {}
        self.folded: dict[int, list[Contribution]] = {p: [] for p in self.owned}
        self.current: dict[int, tuple[Version, Content]] = {}
        self.got: dict[int, Content] = {}
        self.bases: dict[tuple[int, Version], Content] = {}
        self.worker_free = 0.0
        if self.world.disk and self.stored:
            self.got = {p: content for p, (_, content) in self.stored.items()}
            copies = [ev.DurableCopy(p, v, digest(c)) for p, (v, c) in self.stored.items()]
            self.tell(ev.DiskRead(tuple(copies), self.memory))
        self.world.coordinator.admit(self)
        self.later(HEAR_SECONDS, self._hear)

    @property
    def owned(self) -> tuple[int, ...]:
        return self.world.options.owned(self.index)

    def crash(self, back_after: float) -> None:
        if not self.alive or self.world.coordinator.finished:
            return
        self.alive = False
        self.world.stats["shard crashed"] += 1
        self.world.coordinator.swept.discard(self.index)
        for contribution in self.world.contributions.values():
            if self.world.options.owner(contribution.fragment) == self.index:
                contribution.term_over = True
        for path in list(self.uploads):
            self._break_upload(path, "the shard is gone")
        for learner in self.world.learners:
            connection = learner.links.get(self.index)
            if connection is not None:
                connection.whole = connection.shard_has = False
                self.world.at(self.world.rng.uniform(0.0, 0.3), connection.learner_loses)
        self.world.at(back_after, self.begin)

    def _hear(self) -> None:
        heard = [name for name, link in self.bound.items() if link.whole and link.learner_has]
        if heard:
            self.tell(ev.Heard(tuple(heard)))
        self.later(HEAR_SECONDS, self._hear)

    def hears(self, link: Connection, message: Any) -> None:
        if isinstance(message, msg.Hello):
            self.greeting[link.number] = link
            self.tell(ev.Connected(message.learner, message, link.number))
        elif self.bound.get(link.learner.name) is not link:
            return
        else:
            if not isinstance(message, msg.Copy):
                self.tell(ev.Received(link.learner.name, message))
            if isinstance(message, msg.Upload | msg.Copy):
                self._announced(link.learner.name, message)

    def lost(self, link: Connection) -> None:
        if self.alive and self.bound.get(link.learner.name) is link:
            del self.bound[link.learner.name]
            self.tell(ev.Lost(link.learner.name))

    def _announced(self, learner: str, message: msg.Upload | msg.Copy) -> None:
        name = message.ask if isinstance(message, msg.Upload) else message.attempt
        path = self.paths.get((learner, message.fragment, name), "")
        if path in self.due:
            self.due[path].announced = message
            self._join(path)

    def uploading(self, path: str, learner: Learner, transfer: int) -> None:
        self.uploads[path] = (learner, transfer)

    def _break_upload(self, path: str, why: str) -> None:
        """Only what is still under way can be broken."""
        learner, transfer = self.uploads.pop(path)
        learner.upload_broken(transfer, why)

    def takes(self, path: str, body: Content) -> bool:
        """A body has come, whole. Whether it was expected."""
        self.uploads.pop(path, None)
        if path not in self.due:
            return False
        self.due[path].body = body
        self._join(path)
        return True

    def _join(self, path: str) -> None:
        due = self.due[path]
        if due.announced is None or due.body is None:
            return
        del self.due[path]
        match due.order, due.announced:
            case do.Expect() as order, msg.Upload() as upload:
                self._contribution(order, upload, due.body)
            case do.ExpectCopy() as order, msg.Copy():
                self.got[order.fragment] = due.body
                copied = (order.learner, order.fragment, order.attempt, digest(due.body))
                self.tell(ev.CopyArrived(*copied))
            case _:
                raise AssertionError(f"{due} does not go together")

    def _contribution(self, order: do.Expect, upload: msg.Upload, body: Content) -> None:
        key = (order.learner, order.fragment, order.ask)
        contribution = self.world.contributions[key]
        assert upload.digest == digest(body)
        if self.world.rng.random() < self.world.chances.spoiled:
            contribution.spoiled = True
            spoiled = (order.learner, order.fragment, order.ask, "by chance")
            self.tell(ev.BodyCorrupt(*spoiled))
            return
        assert contribution.arrived is None, f"{key} has arrived twice"
        contribution.arrived = self.world.now
        self.here[order.fragment, order.learner, order.ask] = body
        counters = (upload.base, upload.steps, upload.tokens)
        arrived = (order.learner, order.epoch, order.fragment, order.ask, *counters)
        self.tell(ev.BodyArrived(*arrived, nbytes=1, norm=1.0))

    def do(self, effect: Any) -> None:
        match effect:
            case do.Accept(connection, learner):
                self._bind(learner, self.greeting.pop(connection))
            case do.Reject(connection, reason, final):
                link = self.greeting.pop(connection)
                link.to_learner(msg.Refusal(reason, final))
                link.close_at_shard()
                self.world.stats["rejected"] += 1
            case do.Send(peer, message) if peer == COORDINATOR:
                self.world.at(0.0, self.world.coordinator.heard, self, message)
            case do.Send(learner, message):
                self._told(learner, message)
                if learner in self.bound:
                    self.bound[learner].to_learner(message)
            case do.Broadcast(message):
                for link in self.bound.values():
                    link.to_learner(message)
            case do.Evict(learner):
                self.world.stats["evicted"] += 1
                if learner in self.bound:
                    self.bound.pop(learner).close_at_shard()
            case do.Expect(path, learner, _, _, fragment, ask):
                self.due[path] = Due(effect)
                self.paths[learner, fragment, ask] = path
            case do.ExpectCopy(path, learner, fragment, attempt):
                self.due[path] = Due(effect)
                self.paths[learner, fragment, attempt] = path
            case do.Unexpect(path):
                self.due.pop(path, None)
                if path in self.uploads:
                    self._break_upload(path, "not expected any more")
            case do.Fold():
                self._fold(effect)
            case do.Drop(fragment, learner, ask):
                del self.here[fragment, learner, ask]
                self.world.contributions[learner, fragment, ask].dropped = True
            case do.Merge():
                self._merge_soon(effect)
            case do.Install(fragment, version):
                content = self.got[fragment]
                self.current[fragment] = (version, content)
                self.world.publish(fragment, version, content)
                self._store(fragment)
            case do.Stop():
                self.stopped = True
            case do.RoundOpened() | do.RoundFinished() | do.ClockAdvanced() | do.Note():
                self.world.stats[type(effect).__name__] += 1
            case _:
                raise AssertionError(f"an order that nobody carries out: {effect}")

    def _bind(self, learner: str, link: Connection) -> None:
        older = self.bound.get(learner)
        if older is not None:
            older.close_at_shard()
        self.bound[learner] = link

    def _told(self, learner: str, message: Any) -> None:
        if isinstance(message, msg.Outcome):
            key = (learner, message.fragment, message.ask)
            if key in self.world.contributions:
                self.world.contributions[key].told.append(message)

    def _fold(self, order: do.Fold) -> None:
        self.here.pop((order.fragment, order.learner, order.ask))
        contribution = self.world.contributions[order.learner, order.fragment, order.ask]
        assert not contribution.folded, f"{contribution} folded twice"
        contribution.folded = True
        self.folded[order.fragment].append(contribution)

    def _merge_soon(self, order: do.Merge) -> None:
        batch, self.folded[order.fragment] = self.folded[order.fragment], []
        assert batch, f"a merge of nothing: {order}"
        assert self.current[order.fragment][0] == order.base, f"{order} from another base"
        self.worker_free = max(self.worker_free, self.world.now) + self.world.merge_seconds
        self.later(self.worker_free - self.world.now, self._merge, order, batch)

    def _merge(self, order: do.Merge, batch: list[Contribution]) -> None:
        if self.world.rng.random() < self.world.chances.merge_fails:
            self.world.stats["merge failed"] += 1
            for contribution in batch:
                contribution.merge_failed = True
            self.tell(ev.MergeFailed(order.round, order.fragment, "by chance"))
            return
        base = new = self.current[order.fragment][1]
        for contribution in batch:
            new = plus(new, contribution.content)
        self.bases[order.fragment, order.version] = base
        self.current[order.fragment] = (order.version, new)
        self.world.publish(order.fragment, order.version, new)
        for contribution in batch:
            contribution.version = order.version
        self._store(order.fragment)
        self.world.stats["merged"] += 1
        self.tell(ev.Merged(order.round, order.fragment, digest(new)))

    def _store(self, fragment: int) -> None:
        self.stored[fragment] = self.current[fragment]
        self.memory = remembered(self.machine.state)

    def serves(self, order: do.Fetch) -> Content | None:
        """The whole if it is the newest, the difference if the version is recent; else nothing."""
        version, content = self.current.get(order.fragment, (None, {}))
        if version is None or not self.alive:
            return None
        if order.whole:
            return content if version == order.version else None
        known = [v for p, v in self.bases if p == order.fragment]
        if order.version not in known[-DIFFERENCES_KEPT:]:
            return None
        key = (order.fragment, order.version)
        return plus(self.world.published[key], self.bases[key], -1)
