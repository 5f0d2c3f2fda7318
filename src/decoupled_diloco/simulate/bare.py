"""The bare state machines of a run, for thousands of learners: no shells, no tensors, no disk.

Learners, shards and coordinator are the real machines; between them are the virtual links. A body
is its size and a name for what is in it. Learners may die, come back, stand still or be cut off;
shards and the coordinator are there from the beginning to the end. Everything else that may befall
a run, and everything that shells do, is in `system`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.coordinator import CoordinatorMachine
from decoupled_diloco.protocol.events import Joining
from decoupled_diloco.protocol.messages import ShardHello
from decoupled_diloco.protocol.peers import COORDINATOR, is_shard_peer, shard_of, shard_peer
from decoupled_diloco.protocol.syncer import SyncerMachine
from decoupled_diloco.protocol.versions import Version
from decoupled_diloco.simulate.network import Connection, Endpoint

if TYPE_CHECKING:
    from decoupled_diloco.simulate.crowd import Crowd

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
