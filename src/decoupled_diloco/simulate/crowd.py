"""The bare state machines of a run, for thousands of learners: no shells, no tensors, no disk.

Learners, shards and coordinator are the real machines; between them are the virtual links. A body
is its size and a name for what is in it. Learners may die, come back, stand still or be cut off;
shards and the coordinator are there from the beginning to the end. Everything else that may befall
a run, and everything that shells do, is in `system`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.coordinator import CoordinatorMachine
from decoupled_diloco.protocol.events import Joining
from decoupled_diloco.protocol.learner import LearnerMachine
from decoupled_diloco.protocol.messages import ShardHello
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.peers import COORDINATOR, is_shard_peer, shard_of, shard_peer
from decoupled_diloco.protocol.syncer import SyncerMachine
from decoupled_diloco.protocol.versions import Version
from decoupled_diloco.simulate.network import Connection, Endpoint, Link
from decoupled_diloco.simulate.spec import LearnerSpec
from decoupled_diloco.simulate.stage import Recorder, Stage

LAYOUT = "the same everywhere"

HEARD_SECONDS = 1.0
REDIAL_SECONDS = (0.1, 1.5)
NO_ANSWER_SECONDS = 5.0

WIRE_BYTES = 0.5
"""Of a contribution or a difference, for each of a whole copy: bf16 and fp32."""


class Body(NamedTuple):
    """What stands for tensors: their size, and a name for their content."""

    nbytes: float
    digest: str


class Bare(Endpoint):
    """A machine and its connections."""

    def __init__(self, crowd: Crowd, name: str) -> None:
        super().__init__(name)
        self.crowd = crowd
        self.clockwork = crowd.clockwork
        self.choices = crowd.choices.fork(name)
        self.machine: Any = None
        self._tick_at: float | None = None

    @property
    def now(self) -> float:
        """Virtual time, seconds."""
        return self.clockwork.now

    def later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """A timer of this life."""
        self.clockwork.timer(self, self.now + seconds, function, *arguments)

    def tell(self, event: Any) -> None:
        """One fact for the machine, and everything that follows."""
        crowd, life, machine = self.crowd, self.life, self.machine
        if machine is None:
            return
        effects = machine.handle(self.now, event)
        crowd.events += 1
        if crowd.checks:
            machine.check()
        for recorder in crowd.recorders:
            recorder(self.name, self.now, event, effects)
        for effect in effects:
            if self.alive and self.life == life:
                self.carry_out(effect)
        if self.alive and self.life == life:
            self.after(event)
            self._plan_tick()

    def begin(self) -> None:
        """A new process."""
        raise NotImplementedError

    def carry_out(self, effect: Any) -> None:
        """Carries one order out."""
        raise NotImplementedError

    def after(self, event: Any) -> None:
        """What follows of itself."""

    def _plan_tick(self) -> None:
        deadline = self.machine.deadline()
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._tick_at = deadline
            self.clockwork.timer(self, deadline, self._wake, deadline)

    def _wake(self, planned: float) -> None:
        if self._tick_at != planned or self.machine is None:
            return
        self._tick_at = None
        deadline = self.machine.deadline()
        if deadline is not None and deadline > self.now:
            self._plan_tick()
        else:
            self.tell(fact.Tick())


class BareCoordinator(Bare):
    """The coordinator; shards are in reach at all times."""

    def __init__(self, crowd: Crowd) -> None:
        super().__init__(crowd, "coordinator")
        self.guests: dict[int, say.Join] = {}

    def begin(self) -> None:
        """Starts; the run's weights come from a file."""
        self.start()
        self.machine = CoordinatorMachine(self.crowd.options, weights_from_file=True)

    def greeted(self, shard: int) -> None:
        """A shard is there."""
        self.tell(fact.Connected(shard_peer(shard), ShardHello(shard, f"shard-{shard}", claim=0)))

    def received(self, connection: Connection, message: Any) -> None:
        """See `Endpoint`."""
        if isinstance(message, say.Join):
            self.guests[connection.number] = message
            who, role = message.learner, message.role
            self.tell(
                fact.Connected(who, Joining(message.nonce, role, LAYOUT, ""), connection.number)
            )
        elif (guest := self.guests.get(connection.number)) is not None:
            self.tell(fact.Received(guest.learner, message, guest.nonce))

    def lost(self, connection: Connection) -> None:
        """See `Endpoint`."""
        guest = self.guests.pop(connection.number, None)
        if guest is not None and guest.role == "learner":
            self.tell(fact.Lost(guest.learner, guest.nonce))

    def carry_out(self, effect: Any) -> None:
        """See `Bare`."""
        match effect:
            case do.Admit(number, _, epoch):
                self._answer(number, say.Admitted(epoch, "", LAYOUT, ()))
            case do.Deny(number, reason, retry):
                self._answer(number, say.JoinRefused(reason, retry))
                self.guests.pop(number, None)
            case do.Send(peer, message) if is_shard_peer(peer):
                self._order(shard_of(peer), fact.Received(COORDINATOR, message))
            case do.Send(peer, message):
                for number, guest in self.guests.items():
                    if guest.learner == peer:
                        self._answer(number, message)
            case do.AdmitShard(shard, term, begun):
                self._order(shard, fact.Received(COORDINATOR, say.ShardAdmitted(term, begun)))
                self._order(shard, fact.Received(COORDINATOR, say.LayoutSet(LAYOUT)))
            case _:
                pass  # nothing is kept

    def _order(self, shard: int, event: Any) -> None:
        target = self.crowd.shards[shard]
        self.clockwork.arrive(target, self.now, target.tell, event)

    def _answer(self, number: int, message: Any) -> None:
        connection = self.connections.get(number)
        if connection is not None:
            connection.send(self, message)


@dataclass(slots=True)
class Awaited:
    """A body that is expected, and what has come of it."""

    learner: str
    epoch: int
    order: do.Expect | do.ExpectCopy
    announced: Any = None
    body: Body | None = None


class BareShard(Bare):
    """One shard: its merge worker takes no time, and what it is told is never lost."""

    def __init__(self, crowd: Crowd, shard: int) -> None:
        super().__init__(crowd, f"shard-{shard}")
        self.shard = shard
        self.over = False
        self.bound: dict[str, Connection] = {}
        self.who: dict[int, tuple[str, int]] = {}
        self.expected: dict[str, Awaited] = {}
        self.paths: dict[tuple[Any, ...], str] = {}
        self.differences: dict[int, deque[say.Published]] = {}
        self.inboxes: dict[float, list[tuple[Connection, say.StepReport]]] = {}

    def begin(self) -> None:
        """Starts."""
        self.start()
        self.machine = SyncerMachine(self.crowd.options, self.shard)
        self.later(HEARD_SECONDS, self._hear)
        self.crowd.coordinator.greeted(self.shard)

    def received(self, connection: Connection, message: Any) -> None:
        """See `Endpoint`."""
        if isinstance(message, say.Hello):
            self.tell(fact.Connected(message.learner, message, connection.number))
        elif connection.number in self.who:
            learner, _ = self.who[connection.number]
            if self.bound.get(learner) is connection:
                self.tell(fact.Received(learner, message))
                if isinstance(message, say.Upload | say.Copy):
                    self._announced(learner, message)

    def post(self, connection: Connection, report: say.StepReport) -> None:
        """A learner sends a step report to a shard that looks into its inbox now and then."""
        seconds = self.crowd.inbox_seconds
        arrives_at = self.now + connection.delay()
        instant = connection.arrives(self, (arrives_at // seconds + 1) * seconds)
        inbox = self.inboxes.get(instant)
        if inbox is None:
            inbox = self.inboxes[instant] = []
            self.clockwork.at(instant, self._look_into_inbox, instant)
        inbox.append((connection, report))

    def _look_into_inbox(self, instant: float) -> None:
        reports = []
        for connection, report in self.inboxes.pop(instant):
            if connection.is_stalled_to(self):
                connection.deliver(self, report)
            elif connection.open[self.name] and not connection.broken:
                learner = self.who.get(connection.number, ("", 0))[0]
                if self.bound.get(learner) is connection:
                    reports.append((learner, report))
        if self.alive and reports:
            self.tell(fact.Reported(tuple(reports)))

    def lost(self, connection: Connection) -> None:
        """See `Endpoint`."""
        learner, _ = self.who.pop(connection.number, ("", 0))
        if learner and self.bound.get(learner) is connection:
            del self.bound[learner]
            self.tell(fact.Lost(learner))

    def _hear(self) -> None:
        heard = tuple(
            learner
            for learner, connection in self.bound.items()
            if (other := connection.other(self)).alive
            and not other.paused
            and not self.crowd.network.is_silent(other, self)
        )
        self.later(HEARD_SECONDS, self._hear)
        if heard:
            self.tell(fact.Heard(heard))

    def arrived(self, path: str, body: Body) -> bool:
        """A body is here whole; ``False``: nobody expects it."""
        expected = self.expected.get(path)
        if expected is None or expected.body is not None:
            return False
        expected.body = body
        self._join(path, expected)
        return True

    def _announced(self, learner: str, message: say.Upload | say.Copy) -> None:
        path = self.paths.get(_key(learner, message))
        if path is not None and path in self.expected:
            self.expected[path].announced = message
            self._join(path, self.expected[path])

    def _join(self, path: str, expected: Awaited) -> None:
        announced, order = expected.announced, expected.order
        if announced is None or expected.body is None:
            return
        self._no_longer_expected(path)
        if isinstance(order, do.Expect):
            self.tell(
                fact.BodyArrived(
                    learner=expected.learner,
                    epoch=expected.epoch,
                    fragment=order.fragment,
                    ask=order.ask,
                    base=announced.base,
                    steps=announced.steps,
                    tokens=announced.tokens,
                    nbytes=round(expected.body.nbytes),
                    norm=float(announced.steps),
                )
            )
        else:
            place = (expected.learner, order.fragment, order.attempt)
            self.tell(fact.CopyArrived(*place, expected.body.digest))

    def _no_longer_expected(self, path: str) -> None:
        expected = self.expected.pop(path, None)
        if expected is not None:
            self.paths.pop(_key(expected.learner, expected.order), None)

    def served(self, path: str) -> Body | None:
        """What a GET of this path gives at this moment."""
        kind, fragment, version = path.strip("/").split("/")
        nbytes = self.crowd.fragment_bytes[int(fragment)]
        if kind == "whole":
            newest = self.machine.state.fragments[int(fragment)]
            return Body(nbytes, newest.digest) if str(newest.version) == version else None
        offered = self.differences.get(int(fragment), ())
        digest = next((each.digest for each in offered if each.difference == path), None)
        return None if digest is None else Body(WIRE_BYTES * nbytes, digest)

    def carry_out(self, effect: Any) -> None:
        """See `Bare`."""
        match effect:
            case do.Accept(number, learner, epoch):
                self._bind(number, learner, epoch)
            case do.Reject(number, reason, final):
                connection = self.connections.get(number)
                if connection is not None:
                    connection.send(self, say.Refusal(reason, final))
                    connection.close(self)
            case do.Send(peer, message) if peer == COORDINATOR:
                coordinator = self.crowd.coordinator
                said = fact.Received(shard_peer(self.shard), message)
                self.clockwork.arrive(coordinator, self.now, coordinator.tell, said)
            case do.Send(learner, message):
                if learner in self.bound:
                    self.bound[learner].send(self, message)
            case do.Broadcast(message):
                if isinstance(message, say.Published) and message.difference:
                    self._offer(message)
                for connection in self.bound.values():
                    connection.send(self, message)
            case do.Expect(path, learner) | do.ExpectCopy(path, learner):
                if learner in self.bound:
                    epoch = self.who[self.bound[learner].number][1]
                    self.expected[path] = Awaited(learner, epoch, effect)
                    self.paths[_key(learner, effect)] = path
            case do.Unexpect(path):
                self._no_longer_expected(path)
            case do.Merge(number, fragment, version):
                event = fact.Merged(number, fragment, _digest(fragment, version))
                self.clockwork.arrive(self, self.now, self.tell, event)
            case do.LoadWeights():
                owned = self.crowd.options.owned(self.shard)
                loaded = tuple((p, _digest(p, None)) for p in owned)
                self.clockwork.arrive(self, self.now, self.tell, fact.WeightsLoaded(loaded))
            case do.Evict(learner):
                bound = self.bound.pop(learner, None)
                if bound is not None:
                    self.who.pop(bound.number, None)
                    bound.close(self)
            case do.Stop():
                self.over = True
                self.crowd.ended(self)
            case _:
                pass  # nothing is kept, and folding costs nothing

    def _offer(self, message: say.Published) -> None:
        kept = deque[say.Published](maxlen=self.crowd.options.chain + 1)
        self.differences.setdefault(message.fragment, kept).append(message)

    def _bind(self, number: int, learner: str, epoch: int) -> None:
        older = self.bound.pop(learner, None)
        if older is not None:
            self.who.pop(older.number, None)
            older.close(self)
        connection = self.connections.get(number)
        if connection is not None:
            self.bound[learner] = connection
            self.who[number] = (learner, epoch)


def _digest(fragment: int, version: Version | None) -> str:
    """A name for the content of a version."""
    return f"{fragment}/{version}"


def _key(learner: str, of: Any) -> tuple[Any, ...]:
    """What an order to expect a body and the body's announcement have in common."""
    if isinstance(of, do.Expect | say.Upload):
        return (learner, of.fragment, "contribution", of.ask)
    return (learner, of.fragment, "copy", of.attempt)


class BareLearner(Bare):
    """A learner's machine, and a loop that takes so long for each step.

    Attributes:
        slowness: How many times longer a step takes.
        over: It has seen the end of the run, or its process is gone for good.
    """

    def __init__(self, crowd: Crowd, spec: LearnerSpec) -> None:
        super().__init__(crowd, spec.name)
        self.spec = spec
        self.link = crowd.link_of(spec)
        self.slowness = 1.0
        self.over = False
        self._fresh()

    def _fresh(self) -> None:
        self.shards: dict[int, Connection] = {}
        self.coordinator: Connection | None = None
        self.stepping = self.stopped = self.held = self.stands = self._waits = False

    def begin(self) -> None:
        """A new process, with nothing but the model."""
        self.start()
        self.machine, self._tick_at = None, None
        self._fresh()
        self._dial_coordinator()

    def _dial_coordinator(self) -> None:
        def opened(connection: Connection) -> None:
            self.coordinator = connection
            nonce = f"{self.name}-{self.life}"
            connection.send(self, say.Join(self.name, nonce, self.spec.role, ""))

        def failed() -> None:
            self.later(self.choices.uniform(*REDIAL_SECONDS), self._dial_coordinator)

        self.crowd.network.dial(self, self.crowd.coordinator, opened, failed)

    def received(self, connection: Connection, message: Any) -> None:
        """See `Endpoint`."""
        if isinstance(message, say.Admitted):
            if self.machine is None:
                self._join(message.epoch)
            self.tell(fact.Connected(COORDINATOR))
        elif connection is self.coordinator:
            self.tell(fact.Received(COORDINATOR, message))
        else:
            shard = next((s for s, c in self.shards.items() if c is connection), None)
            if shard is not None:
                self.tell(fact.Received(shard_peer(shard), message))

    def _join(self, epoch: int) -> None:
        nonce = f"{self.name}-{self.life}"
        options = self.crowd.options
        self.machine = LearnerMachine(options, self.name, epoch, nonce, self.spec.role)
        if self.spec.role == "learner":
            self.tell(fact.Began(()))
        for shard in range(options.shards):
            self._dial(shard)

    def _dial(self, shard: int) -> None:
        def opened(connection: Connection) -> None:
            self.shards[shard] = connection
            self.tell(fact.Connected(shard_peer(shard)))

        def failed() -> None:
            self.later(self.choices.uniform(*REDIAL_SECONDS), self._dial, shard)

        if not self.over:
            self.crowd.network.dial(self, self.crowd.shards[shard], opened, failed)

    def lost(self, connection: Connection) -> None:
        """See `Endpoint`."""
        if connection is self.coordinator:
            self.coordinator = None
            self.tell(fact.Lost(COORDINATOR))
            self.later(self.choices.uniform(*REDIAL_SECONDS), self._dial_coordinator)
        for shard, mine in list(self.shards.items()):
            if mine is connection:
                del self.shards[shard]
                self.tell(fact.Lost(shard_peer(shard)))
                self.later(self.choices.uniform(*REDIAL_SECONDS), self._dial, shard)

    def stand_still(self) -> None:
        """The loop stands in its present step; all else goes on."""
        self.stands = self.alive

    def step_again(self) -> None:
        """The loop goes on."""
        self.stands = False
        if self._waits:
            self._waits = False
            self.later(0.0, self._finish_step)

    def _begin_training(self) -> None:
        self.tell(fact.Paused())
        self._start_step()

    def _start_step(self) -> None:
        if self.held or self.stopped or self.stepping or self.spec.role == "observer":
            return
        self.stepping = True
        seconds = self.spec.step_seconds * self.slowness
        if self.spec.variance:
            seconds *= max(0.1, self.choices.normal(1.0, self.spec.variance))
        self.clockwork.timer(self, self.now + seconds, self._finish_step)

    def _finish_step(self) -> None:
        if self.stands:
            self._waits = True
            return
        self.stepping = False
        self.tell(fact.StepFinished(self.spec.tokens_per_step))
        if self.alive:
            self._start_step()

    def after(self, event: Any) -> None:
        """While the loop stands at a boundary, every event may bring something to apply."""
        idle = self.held or self.stopped or self.spec.role == "observer"
        boundary = isinstance(event, fact.Paused | fact.StepFinished)
        if idle and not boundary and self.machine.state.ready:
            self.tell(fact.Paused())

    def carry_out(self, effect: Any) -> None:
        """See `Bare`."""
        match effect:
            case do.Send(peer, message) if peer == COORDINATOR:
                if self.coordinator is not None:
                    self.coordinator.send(self, message)
            case do.Send(peer, message):
                self._say(shard_of(peer), message)
            case do.SendBody():
                self._send_body(effect)
            case do.SendCopy():
                pass  # the weights come from a file: no shard asks for a copy
            case do.Fetch():
                self._fetch(effect)
            case do.Hold():
                self.held = True
            case do.Release():
                self.held = False
                self.later(0.0, self._start_step)
            case do.Ready():
                self.later(0.0, self._begin_training)
            case do.EndTraining():
                self.stopped = True
            case do.RunOver():
                self.over = True
                self.leave("the run is over")
            case _:
                pass  # tensors: there are none

    def leave(self, reason: str) -> None:
        """Says goodbye; the process is gone then."""
        for connection in list(self.shards.values()):
            connection.send(self, say.Leave(reason))
        self.end()

    def end(self, *, silent: bool = False) -> None:
        """The process is gone; ``silent``: with its machine, so that nobody is told."""
        if self.alive:
            self.crash()
            self.crowd.network.crashed(self, silent=silent)

    def _say(self, shard: int, message: Any) -> None:
        connection = self.shards.get(shard)
        if connection is None:
            return
        if self.crowd.inbox_seconds and type(message) is say.StepReport:
            if connection.open[self.name]:
                self.crowd.shards[shard].post(connection, message)
        else:
            connection.send(self, message)

    def _send_body(self, order: do.SendBody) -> None:
        digest = f"{self.name}-{self.life}/{order.fragment}/{order.ask}"
        share = self.crowd.wire_bytes.get(order.codec, WIRE_BYTES)
        body = Body(share * self.crowd.fragment_bytes[order.fragment], digest)
        self.later(0.0, self.tell, fact.BodyEncoded(order.fragment, order.ask, digest))
        target, life = self.crowd.shards[order.shard], self.life

        def failed() -> None:
            if self.life == life:
                event = fact.UploadFailed(order.fragment, order.ask, "lost")
                self.clockwork.arrive(self, self.now, self.tell, event)

        def done() -> None:
            if not target.arrived(order.path, body):
                failed()

        self.crowd.network.transfer(self, target, round(body.nbytes), done, failed)

    def _fetch(self, order: do.Fetch) -> None:
        target, network, life = self.crowd.shards[order.shard], self.crowd.network, self.life

        def fail(reason: str) -> None:
            if self.life == life:
                event = fact.FetchFailed(order.fragment, order.version, reason)
                self.clockwork.arrive(self, self.now, self.tell, event)

        def ask() -> None:
            body = target.served(order.path)
            if network.is_cut(self, target):
                self.clockwork.after(NO_ANSWER_SECONDS, fail, "no answer")
            elif body is None:
                fail("gone")
            else:
                done = fact.Fetched(order.fragment, order.version)
                network.transfer(
                    target,
                    self,
                    round(body.nbytes),
                    lambda: self.tell(done),
                    lambda: fail("lost"),
                )

        self.clockwork.after(network.delay(self, target), ask)


class Crowd(Stage):
    """One run of bare machines.

    Args:
        options: The settings of the method.
        specs: Learners and observers.
        seed: Every random choice follows from it.
        fragment_bytes: Size of each fragment's fp32 copy.
        inbox_seconds: How often a shard looks into its inbox for step reports; 0: each at once.
        checks: Assert every invariant of a machine after each of its events; that looks at all
            learners each time, so it is left out where there are thousands.
        recorders: Told of every event that a machine has handled.

    Attributes:
        finished: Whether every shard has ended.
        wire_bytes: Of a contribution for each of a copy, by the codecs that learners choose from.
    """

    def __init__(
        self,
        options: Options,
        specs: Iterable[LearnerSpec],
        seed: int | str = 0,
        *,
        fragment_bytes: Sequence[float] = (),
        inbox_seconds: float = 0.0,
        checks: bool = True,
        recorders: Sequence[Recorder] = (),
    ) -> None:
        super().__init__(seed)
        # Nothing is kept of which a checkpoint of the run could be made.
        self.options = replace(options, checkpoint_every_seconds=0.0)
        self.fragment_bytes = fragment_bytes or [1000.0] * options.fragments
        self.wire_bytes = {name: bits / 32 for name, bits in options.ladder}
        self.inbox_seconds, self.checks = inbox_seconds, checks
        self.recorders = list(recorders)
        self.finished = False
        self._shared_links: dict[str, Link] = {}
        self.coordinator = BareCoordinator(self)
        self.shards = [BareShard(self, shard) for shard in range(options.shards)]
        self.learners = {spec.name: BareLearner(self, spec) for spec in specs}
        for process in (self.coordinator, *self.shards):
            self.clockwork.at(0.0, process.begin)
        for learner in self.learners.values():
            if learner.spec.joins_at < float("inf"):
                self.clockwork.at(learner.spec.joins_at, self.restart, learner)

    @property
    def participants(self) -> dict[str, BareLearner]:
        """See `System`."""
        return self.learners

    @property
    def shard_processes(self) -> list[BareShard]:
        """See `System`."""
        return self.shards

    @property
    def hosts(self) -> list[Bare]:
        """See `System`."""
        return [*self.shards, *self.learners.values()]

    def link_of(self, spec: LearnerSpec) -> Link:
        """See `System`."""
        own = Link(spec.latency, spec.jitter, spec.up_bytes_per_second, spec.down_bytes_per_second)
        return self._shared_links.setdefault(spec.shared_link, own) if spec.shared_link else own

    def ended(self, shard: BareShard) -> None:
        """A shard has ended of itself."""
        self.finished = all(each.over for each in self.shards)

    def crash(self, learner: Any, *, silent: bool = False) -> None:
        """See `System`; for learners."""
        learner.end(silent=silent)

    def restart(self, learner: Any) -> None:
        """See `System`; for learners."""
        if not (learner.alive or learner.over):
            learner.begin()

    def tell_to_go(self, learner: Any, seconds: float, number: Any) -> None:
        """See `System`: at once, and it hands nothing in."""
        if learner.alive:
            learner.leave("its loop has ended")

    def sample(self, sample: Any) -> None:
        """There is no tape."""
