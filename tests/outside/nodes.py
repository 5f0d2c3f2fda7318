"""What a world consists of: links, processes, who begins and ends the run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.versions import Asking, Version
from outside.content import Content

if TYPE_CHECKING:
    from outside.learner import Learner
    from outside.shard import Shard
    from outside.world import World


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
