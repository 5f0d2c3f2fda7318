"""A world of its own for the two machines: real decisions, virtual time, and lineage for weights.

Written from the rules and from the docstrings of messages, events, effects and options alone: the
project's own simulator and its shells were not looked at. Contents say which training is in them:
an atom is one step of one life of one learner, a fragment of the parameters counts atoms, a
contribution is a snapshot less the copy that it started from, and a merge adds contributions. An
atom that counts two in a published copy was merged twice; one that counts less than none was
undone.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from decoupled_diloco.protocol import LearnerMachine, Options, SyncerMachine
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.peers import COORDINATOR, shard_of, shard_peer
from decoupled_diloco.protocol.syncer_memory import remembered
from decoupled_diloco.protocol.versions import Asking, Version

TOKENS_A_STEP = 8
HEAR_SECONDS = 1.0  # how often a shard is told whose bytes have come
DIFFERENCES_KEPT = 4  # of so many newest versions a shard still serves the difference

Content = dict[tuple[int, int, int], int]  # (learner, epoch, step) -> change of the count there


def plus(a: Content, b: Content, sign: int = 1) -> Content:
    out = dict(a)
    for key, value in b.items():
        total = out.get(key, 0) + sign * value
        if total:
            out[key] = total
        else:
            del out[key]
    return out


def steps(learner: int, epoch: int, first: int, last: int) -> Content:
    if last < first:
        return {}
    return {(learner, epoch, first): 1, (learner, epoch, last + 1): -1}


def ranges(content: Content) -> Iterator[tuple[int, int, int, int, int]]:
    """(learner, epoch, first, last, count) of every range whose count is not 0."""
    ends = sorted(content.items())
    count = 0
    for (key, change), (following, _) in itertools.pairwise([*ends, ((0, 0, 0), 0)]):
        count += change
        if count:
            yield *key, following[2] - 1, count


def size(content: Content) -> int:
    return sum((last - first + 1) * count for _, _, first, last, count in ranges(content))


def ill(content: Content) -> list[tuple[int, int, int, int, int]]:
    """What is in it more than once, or less than not at all."""
    return [found for found in ranges(content) if found[4] != 1]


def missing(part: Content, whole: Content) -> list[tuple[int, int, int, int, int]]:
    """What of a part is not in the whole; both count each atom once at most."""
    both = plus(part, whole)
    twice = {(a, b, c): n for (a, b, c), n in plus(both, whole, -1).items()}  # = part
    inside = Counter[tuple[int, int, int]]()
    covered = [r for r in ranges(whole) if r[4] > 0]
    for learner, epoch, first, last, _ in ranges(twice):
        for other, other_epoch, a, b, _ in covered:
            if (other, other_epoch) == (learner, epoch):
                for key, change in steps(learner, epoch, max(a, first), min(b, last)).items():
                    inside[key] += change
    return list(ranges(plus(part, {k: v for k, v in inside.items() if v}, -1)))


def digest(content: Content) -> str:
    return str(hash(frozenset(content.items())))


@dataclass
class Spec:
    """One learner: seconds for a step, and for a body of size one on its links."""

    step: float = 1.0
    upload: float = 0.02
    download: float = 0.02
    latency: float = 0.005
    joins: float = 0.0
    jitter: float = 0.0


@dataclass
class Chances:
    """Of things that go wrong by themselves, each time."""

    spoiled: float = 0.0
    upload_fails: float = 0.0
    fetch_fails: float = 0.0
    merge_fails: float = 0.0


@dataclass
class Contribution:
    """The life of one, as the world saw it."""

    learner: str
    fragment: int
    ask: Asking
    epoch: int
    content: Content
    sent: float
    arrived: float | None = None
    folded: bool = False
    dropped: bool = False
    version: Version | None = None
    told: list[msg.Outcome] = field(default_factory=list)
    heard: list[msg.Outcome] = field(default_factory=list)
    spoiled: bool = False
    failed: bool = False
    merge_failed: bool = False
    term_over: bool = False


class Wire:
    """A rate that transfers share evenly."""

    def __init__(self, world: World, seconds: float) -> None:
        self.world, self.seconds = world, seconds
        self.left: dict[int, tuple[float, Callable[[], None]]] = {}
        self.since = self.busy = 0.0
        self.numbers = itertools.count()
        self.plan = 0

    def start(self, amount: float, done: Callable[[], None]) -> int:
        self._move()
        number = next(self.numbers)
        self.left[number] = (amount, done)
        self._plan()
        return number

    def stop(self, number: int) -> bool:
        self._move()
        found = self.left.pop(number, None) is not None
        self._plan()
        return found

    def stop_all(self) -> None:
        self._move()
        self.left.clear()
        self._plan()

    def busy_seconds(self) -> float:
        """For how long at least one transfer was under way, until now."""
        self._move()
        return self.busy

    def _move(self) -> None:
        passed, self.since = self.world.now - self.since, self.world.now
        if self.left:
            self.busy += passed
            share = passed / (self.seconds * len(self.left))
            self.left = {n: (amount - share, done) for n, (amount, done) in self.left.items()}

    def _plan(self) -> None:
        self.plan += 1
        if self.left:
            least = min(amount for amount, _ in self.left.values())
            self.world.at(max(0.0, least) * self.seconds * len(self.left), self._end, self.plan)

    def _end(self, plan: int) -> None:
        if plan != self.plan:
            return
        self._move()
        over = [n for n, (amount, _) in self.left.items() if amount <= 1e-9]
        ended = [self.left.pop(n)[1] for n in over]
        self._plan()
        for done in ended:
            done()


class World:
    def __init__(
        self,
        options: Options,
        specs: list[Spec],
        *,
        seed: int = 0,
        sizes: list[float] | None = None,
        merge_seconds: float = 0.01,
        chances: Chances | None = None,
        disk: bool = True,
        check_every: int = 1,
    ) -> None:
        self.options, self.seed, self.rng = options, seed, random.Random(seed)
        self.now, self.heap, self.order = 0.0, [], itertools.count()
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]]
        self.sizes = sizes or [1.0] * options.fragments
        self.merge_seconds, self.chances, self.disk = merge_seconds, chances or Chances(), disk
        self.check_every, self.events = check_every, 0
        self.watchers: list[Callable[[Node, Any, list[Any]], None]] = []
        self.published: dict[tuple[int, Version], Content] = {}
        self.contributions: dict[tuple[str, int, Asking], Contribution] = {}
        self.stats: Counter[str] = Counter()
        self.connections = itertools.count(1)
        self.shards = [Shard(self, s) for s in range(options.shards)]
        self.learners = [Learner(self, i, spec) for i, spec in enumerate(specs)]
        self.coordinator = Coordinator(self)
        for shard in self.shards:
            self.at(0.0, shard.begin)
        for learner in self.learners:
            self.at(learner.spec.joins, learner.begin)

    def at(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (self.now + delay, next(self.order), call, args))

    def run(self, until: float) -> None:
        while self.heap and self.heap[0][0] <= until and not self.over:
            self.now, _, call, args = heapq.heappop(self.heap)
            call(*args)
        if not self.over:
            self.now = until

    def end(self, within: float) -> None:
        """Order the end, and see it come."""
        self.coordinator.end()
        self.run(self.now + within)
        assert self.over, f"no end within {within} s: swept {self.coordinator.swept}"

    @property
    def over(self) -> bool:
        return self.coordinator.finished and all(shard.stopped for shard in self.shards)

    def publish(self, fragment: int, version: Version, content: Content) -> None:
        assert not ill(content), f"t={self.now:.2f} {fragment} {version}: {ill(content)[:3]}"
        known = self.published.setdefault((fragment, version), content)
        assert known == content, f"t={self.now:.2f} {fragment} {version} names two contents"


class Coordinator:
    """Epochs, terms, who gives the first weights, begin, end and finish."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.terms: Counter[int] = Counter()
        self.epochs: Counter[str] = Counter()
        self.attempt = 0
        self.seed: msg.SeedNamed | None = None
        self.ready: set[int] = set()
        self.swept: set[int] = set()
        self.begun = self.ending = self.finished = False

    def admit(self, shard: Shard) -> None:
        self.terms[shard.index] += 1
        shard.tell(ev.Received(COORDINATOR, msg.ShardAdmitted(self.terms[shard.index], self.begun)))
        if self.seed is not None and not self.begun:
            shard.tell(ev.Received(COORDINATOR, self.seed))
        if self.begun:
            shard.tell(ev.Received(COORDINATOR, msg.Begin(self.attempt)))
        if self.ending:
            shard.tell(ev.Received(COORDINATOR, msg.EndOrdered()))
        if self.finished:
            shard.tell(ev.Received(COORDINATOR, msg.FinishOrdered()))

    def name_seed(self) -> None:
        """Of those that are there, one gives its weights."""
        here = [learner for learner in self.world.learners if learner.alive]
        if self.begun or not here:
            return
        self.attempt += 1
        self.ready = set()
        chosen = self.world.rng.choice(here)
        self.seed = msg.SeedNamed(chosen.name, chosen.epoch, self.attempt)
        self.order(self.seed)

    def joined(self, learner: Learner) -> None:
        named = [x for x in self.world.learners if self.seed and x.name == self.seed.learner]
        if not (self.seed and named[0].alive and named[0].epoch == self.seed.epoch):
            self.name_seed()

    def heard(self, shard: Shard, message: msg.FromShard) -> None:
        match message:
            case msg.ShardReady(attempt) if attempt == self.attempt:
                self.ready.add(shard.index)
                if self.begun:
                    shard.tell(ev.Received(COORDINATOR, msg.Begin(self.attempt)))
                elif len(self.ready) == len(self.world.shards):
                    self.begun = True
                    self.order(msg.Begin(self.attempt))
            case msg.SeedFailed(attempt) if attempt == self.attempt:
                self.world.at(0.1, self.name_seed)
            case msg.Progress(clock):
                budget = self.world.options.budget_steps
                if budget is not None and clock >= budget and not self.ending:
                    self.end()
            case msg.Swept() if shard.alive:
                self.swept.add(shard.index)
                if len(self.swept) == len(self.world.shards) and not self.finished:
                    self.finished = True
                    self.order(msg.FinishOrdered())

    def end(self) -> None:
        self.ending = True
        self.order(msg.EndOrdered())

    def order(self, message: msg.ToShard) -> None:
        for shard in self.world.shards:
            if shard.alive:
                shard.tell(ev.Received(COORDINATOR, message))


class Node:
    """What has a machine: it is told events, one at a time, and its orders are carried out."""

    world: World
    machine: Any
    name: str

    def __init__(self) -> None:
        self.alive, self.life = False, 0
        self.inbox: list[Any] = []
        self.busy = False
        self.alarm: float | None = None
        self.frozen_until = 0.0

    def freeze(self, seconds: float) -> None:
        """The whole process stands still; what comes meanwhile waits, in order."""
        self.frozen_until = max(self.frozen_until, self.world.now + seconds)

    def later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """Unless this life is over by then."""
        self.world.at(delay, self._if_still, self.life, call, args)

    def _if_still(self, life: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive or life != self.life:
            return
        if self.frozen_until > self.world.now:
            self.world.at(self.frozen_until - self.world.now, self._if_still, life, call, args)
        else:
            call(*args)

    def tell(self, event: Any) -> None:
        """Events that come of carrying out orders wait until all orders are carried out."""
        if self.frozen_until > self.world.now:
            self.later(self.frozen_until - self.world.now, self.tell, event)
            return
        self.inbox.append(event)
        if self.busy:
            return
        self.busy = True
        while self.inbox and self.alive:
            self._handle(self.inbox.pop(0))
        self.inbox.clear()
        self.busy = False

    def _handle(self, event: Any) -> None:
        effects = self.machine.handle(self.world.now, event)
        self.world.events += 1
        if self.world.events % self.world.check_every == 0:
            self.machine.check()
        for effect in effects:
            if self.alive:
                self.do(effect)
        for watcher in self.world.watchers:
            watcher(self, event, effects)
        if self.alive:
            self.after(event)
            self._arm()

    def _arm(self) -> None:
        deadline = self.machine.deadline()
        if deadline is not None and deadline != self.alarm:
            self.alarm = deadline
            self.later(max(0.0, deadline - self.world.now), self._ring, deadline)

    def _ring(self, deadline: float) -> None:
        if self.machine.deadline() == deadline:
            self.alarm = None
            self.tell(ev.Tick())

    def after(self, event: Any) -> None:
        pass

    def do(self, effect: Any) -> None:
        raise NotImplementedError


class Connection:
    """A control link: messages in order, each way; breaks lose what is on the way."""

    def __init__(self, learner: Learner, shard: Shard) -> None:
        self.world, self.learner, self.shard = learner.world, learner, shard
        self.number = next(self.world.connections)
        self.learner_has = self.shard_has = True
        self.whole = True
        self.last = {"up": 0.0, "down": 0.0}

    def _arrival(self, way: str) -> float:
        spec = self.learner.spec
        takes = spec.latency + self.world.rng.uniform(0.0, spec.jitter)
        self.last[way] = max(self.last[way], self.world.now + takes)
        return self.last[way] - self.world.now

    def to_shard(self, message: Any) -> None:
        if self.learner_has:
            self.world.at(self._arrival("up"), self._at_shard, message, self.shard.life)

    def to_learner(self, message: Any) -> None:
        if self.shard_has:
            self.world.at(self._arrival("down"), self._at_learner, message)

    def _at_shard(self, message: Any, life: int) -> None:
        if self.whole and self.shard_has and self.shard.alive and self.shard.life == life:
            self.shard.later(0.0, self.shard.hears, self, message)

    def _at_learner(self, message: Any) -> None:
        if self.whole and self.learner_has and self.learner.alive:
            self.learner.later(0.0, self.learner.hears, self, message)

    def cut(self, learner_after: float | None, shard_after: float | None) -> None:
        """Each side finds out after so many seconds; None: never by itself."""
        self.whole = False
        if learner_after is not None:
            self.world.at(learner_after, self.learner_loses)
        if shard_after is not None:
            self.world.at(shard_after, self.shard_loses)

    def learner_loses(self) -> None:
        if self.learner_has:
            self.learner_has = False
            self.learner.lost(self)

    def shard_loses(self) -> None:
        if self.shard_has:
            self.shard_has = False
            self.shard.lost(self)

    def close_at_shard(self) -> None:
        """The shard has closed it: the learner is told, after what was sent before."""
        self.shard_has = False
        self.world.at(self._arrival("down"), self.learner_loses)


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


class Learner(Node):
    def __init__(self, world: World, index: int, spec: Spec) -> None:
        super().__init__()
        self.world, self.index, self.spec, self.name = world, index, spec, f"l{index}"
        self.up, self.down = Wire(world, spec.upload), Wire(world, spec.download)
        self.still_until = 0.0
        self.ever_done = 0
        self.expelled = False
        self.links: dict[int, Connection] = {}
        self.transfers: dict[int, tuple[do.SendBody | do.SendCopy, Shard]] = {}

    def begin(self) -> None:
        if self.world.coordinator.finished:
            return
        world, options = self.world, self.world.options
        self.life += 1
        self.alive = True
        self.inbox, self.busy, self.alarm, self.frozen_until = [], False, None, 0.0
        world.coordinator.epochs[self.name] += 1
        self.epoch = world.coordinator.epochs[self.name]
        self.machine = LearnerMachine(options, self.name, self.epoch, f"{self.name}.{self.epoch}")
        self.links = {}
        self.done = 0
        self.theta: list[tuple[Content, int]] = [({}, 0)] * options.fragments
        self.held: list[tuple[Version, Content] | None] = [None] * options.fragments
        self.staged: list[tuple[Version, Content] | None] = [None] * options.fragments
        self.snapshots: dict[int, tuple[Version, Content, Content]] = {}
        self.sent: dict[int, Content] = {}
        self.transfers = {}
        self.training = self.waiting = self.ended = self.run_over = False
        self.tell(ev.Began())
        self.tell(ev.Connected(COORDINATOR))
        for shard in world.shards:
            self._dial(shard)
        world.coordinator.joined(self)

    def crash(self, back_after: float, silent: bool = False) -> None:
        if not self.alive:
            return
        self.world.stats["learner crashed"] += 1
        self.alive = False
        self.up.stop_all()
        self.down.stop_all()
        for link in self.links.values():
            link.learner_has = link.whole = False
            if not silent:
                self.world.at(self.world.rng.uniform(0.0, 0.3), link.shard_loses)
        self.world.at(back_after, self.begin)

    def leave(self, patience: float) -> None:
        """Told to end: its loop steps no more, and after a while the process is gone."""
        if self.alive and self.training and not self.ended:
            self.world.stats["told to go"] += 1
            self.ended = True
            self.tell(ev.DrainAsked("by chance"))
            self.later(patience, self.crash, 10.0)

    def _dial(self, shard: Shard) -> None:
        if shard.index in self.links or self.run_over:
            return
        if not shard.alive or shard.frozen_until > self.world.now:
            self.later(self.world.rng.uniform(0.1, 1.0), self._dial, shard)
            return
        self.links[shard.index] = Connection(self, shard)
        self.tell(ev.Connected(shard_peer(shard.index)))

    def lost(self, link: Connection) -> None:
        if self.alive and self.links.get(link.shard.index) is link:
            del self.links[link.shard.index]
            self.tell(ev.Lost(shard_peer(link.shard.index)))
            self.later(self.world.rng.uniform(0.05, 1.0), self._dial, link.shard)

    def hears(self, link: Connection, message: Any) -> None:
        if self.links.get(link.shard.index) is link:
            if isinstance(message, msg.Outcome):
                key = (self.name, message.fragment, message.ask)
                if key in self.world.contributions:
                    self.world.contributions[key].heard.append(message)
            self.tell(ev.Received(shard_peer(link.shard.index), message))

    def parameters(self, fragment: int) -> Content:
        content, counted = self.theta[fragment]
        return plus(content, steps(self.index, self.epoch, counted + 1, self.done))

    def _step(self) -> None:
        stands_until = max(self.still_until, self.frozen_until)
        if stands_until > self.world.now:
            self.later(stands_until - self.world.now, self._step)
            return
        if self.ended or self.waiting or not self.training:
            return
        self.done += 1
        self.ever_done += 1
        self.tell(ev.StepFinished(TOKENS_A_STEP))
        if not (self.ended or self.waiting):
            self._step_later()

    def _step_later(self) -> None:
        jitter = self.world.rng.uniform(-self.spec.jitter, self.spec.jitter)
        self.later(self.spec.step * (1.0 + jitter), self._step)

    def after(self, event: Any) -> None:
        """A loop that stands at a boundary asks again whenever something has happened."""
        standing = self.training and (self.ended or self.waiting)
        if standing and not isinstance(event, ev.Paused) and self.still_until <= self.world.now:
            self.inbox.append(ev.Paused())

    def do(self, effect: Any) -> None:
        match effect:
            case do.Send(peer, message) if peer != COORDINATOR:
                if shard_of(peer) in self.links:
                    self.links[shard_of(peer)].to_shard(message)
            case do.Snapshot(fragment, base):
                held = self.held[fragment]
                assert held is not None
                assert held[0] == base, f"{effect} but {held[0]} is held"
                self.snapshots[fragment] = (base, self.parameters(fragment), held[1])
            case do.SendBody():
                self._send_body(effect)
            case do.SendCopy():
                self._send_copy(effect)
            case do.Fetch():
                self.later(self.spec.latency, self._fetch, effect)
            case do.Apply(fragment, version, mode):
                self._apply(fragment, version, mode)
            case do.Relabel(fragment, version, _, staged):
                self._relabel(fragment, version, staged)
            case do.Ready():
                self.training = True
                self.later(0.0, self.tell, ev.Paused())
                self._step_later()
            case do.Hold():
                self.waiting = True
            case do.Release():
                self.waiting = False
                self._step_later()
            case do.EndTraining():
                self.ended = True
            case do.RunOver():
                self.run_over = True
                self.later(0.0, self._go)
            case do.Expelled():
                self.expelled = True
                self.world.stats["expelled"] += 1
                self.later(0.0, self.crash, 5.0)
            case do.Send() | do.Recovered() | do.Note():
                self.world.stats[type(effect).__name__] += 1
            case _:
                raise AssertionError(f"an order that nobody carries out: {effect}")

    def _go(self) -> None:
        self.alive = False
        for link in self.links.values():
            link.learner_has = False
            self.world.at(self.spec.latency, link.shard_loses)

    def _send_body(self, order: do.SendBody) -> None:
        base, parameters, copy = self.snapshots[order.fragment]
        assert base == order.base, f"{self.name} {order}: the snapshot is of {base}"
        content = plus(parameters, copy, -1)
        assert not ill(content), f"{self.name} {order}: {ill(content)[:3]}"
        assert size(content) == order.steps, f"{self.name} {order}: {size(content)} steps in it"
        assert order.tokens == order.steps * TOKENS_A_STEP
        key = (self.name, order.fragment, order.ask)
        if key not in self.world.contributions:
            new = Contribution(*key, self.epoch, content, self.world.now)
            self.world.contributions[key] = new
        self.sent[order.fragment] = parameters
        self.later(0.001, self._encoded, order, content)

    def _encoded(self, order: do.SendBody, content: Content) -> None:
        self.tell(ev.BodyEncoded(order.fragment, order.ask, digest(content)))
        self._travel(order, content)

    def _send_copy(self, order: do.SendCopy) -> None:
        if order.version is None:
            content = self.parameters(order.fragment)
        else:
            known = [c for c in (self.held[order.fragment], self.staged[order.fragment]) if c]
            content = next(c for v, c in known if v == order.version)
        if order.shard in self.links:
            copy = msg.Copy(order.fragment, order.attempt, digest(content))
            self.links[order.shard].to_shard(copy)
        self._travel(order, content)

    def _travel(self, order: do.SendBody | do.SendCopy, content: Content) -> None:
        shard = self.world.shards[order.shard]
        if not shard.alive:
            self._failed(order, "the shard is gone")
            return
        amount = self.world.sizes[order.fragment]
        life = shard.life

        def delivered() -> None:
            self.transfers.pop(number, None)
            self.later(self.spec.latency, self._delivered, order, shard, life, content)

        number = self.up.start(amount, delivered)
        self.transfers[number] = (order, shard)
        shard.uploading(order.path, self, number)
        if self.world.rng.random() < self.world.chances.upload_fails:
            self.later(amount * self.spec.upload * 0.5, self.upload_broken, number, "by chance")

    def _delivered(
        self, order: do.SendBody | do.SendCopy, shard: Shard, life: int, content: Content
    ) -> None:
        if shard.frozen_until > self.world.now:
            wait = shard.frozen_until - self.world.now
            self.later(wait, self._delivered, order, shard, life, content)
        elif not shard.alive or shard.life != life:
            self._failed(order, "the shard is gone")
        elif not shard.takes(order.path, content):
            self._failed(order, "not expected")

    def upload_broken(self, transfer: int, why: str) -> None:
        if self.alive and self.up.stop(transfer):
            order, shard = self.transfers.pop(transfer)
            shard.uploads.pop(order.path, None)
            self.later(self.spec.latency, self._failed, order, why)

    def _failed(self, order: do.SendBody | do.SendCopy, why: str) -> None:
        self.world.stats["upload failed"] += 1
        if isinstance(order, do.SendBody):
            key = (self.name, order.fragment, order.ask)
            self.world.contributions[key].failed = True
            self.tell(ev.UploadFailed(order.fragment, order.ask, why))
        else:
            self.tell(ev.CopyFailed(order.shard, order.fragment, order.attempt, why))

    def _fetch(self, order: do.Fetch) -> None:
        content = self.world.shards[order.shard].serves(order)
        if content is None or self.world.rng.random() < self.world.chances.fetch_fails:
            self.world.stats["fetch failed"] += 1
            self.tell(ev.FetchFailed(order.fragment, order.version, "not to be had"))
            return
        amount = self.world.sizes[order.fragment]
        self.down.start(amount, lambda: self.later(0.0, self._fetched, order, content))

    def _fetched(self, order: do.Fetch, content: Content) -> None:
        if not order.whole:
            newest = self.staged[order.fragment] or self.held[order.fragment]
            assert newest is not None
            content = plus(newest[1], content)
        if digest(content) != order.digest:
            self.world.stats["fetched something else"] += 1
            self.tell(ev.FetchFailed(order.fragment, order.version, "another digest"))
            return
        self.staged[order.fragment] = (order.version, content)
        self.tell(ev.Fetched(order.fragment, order.version))

    def _apply(self, fragment: int, version: Version, mode: str) -> None:
        staged, held = self.staged[fragment], self.held[fragment]
        if staged is None:
            staged = held  # in the end what no version has taken is not kept
        assert staged is not None
        assert staged[0] == version, f"{self.name} {fragment}: {staged[0]} is staged, not {version}"
        new = staged[1]
        assert new == self.world.published[fragment, version], f"{fragment} {version} differs"
        own = self.parameters(fragment)
        self.world.stats[f"apply {mode}"] += 1
        if mode == "carry":
            new = plus(new, plus(own, self.sent[fragment], -1))
        elif mode == "rebase":
            assert held is not None
            new = plus(new, plus(own, held[1], -1))
        else:
            assert mode == "overwrite", mode
        assert not ill(new), f"t={self.world.now:.2f} {self.name} {fragment} {mode}: {ill(new)[:3]}"
        self.theta[fragment] = (new, self.done)
        self.held[fragment], self.staged[fragment] = staged, None
        self.sent.pop(fragment, None)
        self.snapshots.pop(fragment, None)

    def _relabel(self, fragment: int, version: Version, staged: bool) -> None:
        copies = self.staged if staged else self.held
        copy = copies[fragment]
        assert copy is not None, f"{self.name} {fragment}: no copy to relabel"
        copies[fragment] = (version, copy[1])
        if not staged:
            self.sent.pop(fragment, None)
