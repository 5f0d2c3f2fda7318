"""The bare state machines of a run, for thousands of learners: no shells, no tensors, no disk.

Learners, shards and coordinator are the real state machines, connected by virtual links. A payload
is only a size and a name for its content. Learners may die, come back, stall or be cut off. Shards
and the coordinator run from beginning to end. `system` simulates all other faults, and the shells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.coordinator_machine import CoordinatorMachine
from decoupled_diloco.protocol.learner_machine import LearnerMachine
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Done,
    Failed,
    Joining,
    Made,
    ShardHello,
    Tick,
    Version,
    WeightsLoaded,
    is_shard_peer,
    shard_of,
    shard_peer,
)
from decoupled_diloco.protocol.syncer_machine import SyncerMachine
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.stage import Recorder, Stage
from decoupled_diloco_lab.simulate.virtual_network import Connection, Endpoint, Link

LAYOUT = "the same everywhere"

HEARTBEAT_SECONDS = 1.0
REDIAL_SECONDS = (0.1, 1.5)
NO_ANSWER_SECONDS = 5.0

WIRE_BYTES = 0.5
"""Size of a contribution or a difference (bf16) relative to a whole copy (fp32)."""


class Body(NamedTuple):
    """A placeholder for tensors: their size and a name for their content."""

    nbytes: float
    digest: str


class Bare(Endpoint):
    """A state machine and its connections."""

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
        """Set a timer for this incarnation."""
        self.clockwork.timer(self, self.now + seconds, function, *arguments)

    def handle(self, event: Any) -> None:
        """Pass one event to the state machine and carry out the orders that follow."""
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
            # An earlier order may have ended this process.
            if self.alive and self.life == life:
                self.carry_out(effect)
        if self.alive and self.life == life:
            self.after(event)
            self._plan_tick()

    def begin(self) -> None:
        """Start a new process."""
        raise NotImplementedError

    def carry_out(self, effect: Any) -> None:
        """Carry out one order."""
        raise NotImplementedError

    def after(self, event: Any) -> None:
        """Do what follows an event without an order."""

    def _plan_tick(self) -> None:
        deadline = self.machine.deadline()
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._tick_at = deadline
            self.clockwork.timer(self, deadline, self._wake, deadline)

    def _wake(self, planned: float) -> None:
        # Timers cannot be canceled: one that no longer matches was replaced by an earlier one.
        if self._tick_at != planned or self.machine is None:
            return
        self._tick_at = None
        deadline = self.machine.deadline()
        if deadline is not None and deadline > self.now:
            self._plan_tick()
        else:
            self.handle(Tick())


class BareCoordinator(Bare):
    """The coordinator. It can always reach the shards."""

    def __init__(self, crowd: Crowd) -> None:
        super().__init__(crowd, "coordinator")
        self.guests: dict[int, messages.Join] = {}

    def begin(self) -> None:
        """Start. The run's initial weights come from a file."""
        self.start()
        self.machine = CoordinatorMachine(self.crowd.options, weights_from_file=True)

    def greeted(self, shard: int) -> None:
        """Handle the greeting of a shard."""
        self.handle(
            messages.Connected(shard_peer(shard), ShardHello(shard, f"shard-{shard}", claim=0))
        )

    def received(self, connection: Connection, message: Any) -> None:
        """See `Endpoint`."""
        if isinstance(message, messages.Join):
            self.guests[connection.number] = message
            learner, joining = message.learner, Joining(message.nonce, message.role, LAYOUT, "")
            self.handle(messages.Connected(learner, joining, connection.number))
        elif (guest := self.guests.get(connection.number)) is not None:
            self.handle(messages.Received(guest.learner, message, guest.nonce))

    def lost(self, connection: Connection) -> None:
        """See `Endpoint`."""
        guest = self.guests.pop(connection.number, None)
        if guest is not None and guest.role == "learner":
            self.handle(messages.Lost(guest.learner, guest.nonce))

    def carry_out(self, effect: Any) -> None:
        """See `Bare`."""
        match effect:
            case messages.Admit(number, _, epoch):
                self._answer(number, messages.Admitted(epoch, "", LAYOUT, ()))
            case messages.Deny(number, reason, retry):
                self._answer(number, messages.JoinRefused(reason, retry))
                self.guests.pop(number, None)
            case messages.Send(peer, message) if is_shard_peer(peer):
                self._order(shard_of(peer), messages.Received(COORDINATOR, message))
            case messages.Send(peer, message):
                for number, guest in self.guests.items():
                    if guest.learner == peer:
                        self._answer(number, message)
            case messages.AdmitShard(shard, term, begun):
                self._order(
                    shard, messages.Received(COORDINATOR, messages.ShardAdmitted(term, begun))
                )
                self._order(shard, messages.Received(COORDINATOR, messages.LayoutSet(LAYOUT)))
            case _:
                pass  # a simulated crowd has no disk

    def _order(self, shard: int, event: Any) -> None:
        target = self.crowd.shards[shard]
        self.clockwork.arrive(target, self.now, target.handle, event)

    def _answer(self, number: int, message: Any) -> None:
        connection = self.connections.get(number)
        if connection is not None:
            connection.send(self, message)


@dataclass(slots=True)
class Awaited:
    """An expected payload. Its announcement and its bytes may arrive in either order."""

    learner: str
    epoch: int
    order: messages.Expect | messages.ExpectCopy
    announced: Any = None
    body: Body | None = None


class BareShard(Bare):
    """One shard. Its merge worker takes no time, and it never loses state."""

    def __init__(self, crowd: Crowd, shard: int) -> None:
        super().__init__(crowd, f"shard-{shard}")
        self.shard = shard
        self.over = False
        self.bound: dict[str, Connection] = {}
        self.peers: dict[int, tuple[str, int]] = {}
        self.expected: dict[str, Awaited] = {}
        self.paths: dict[tuple[Any, ...], str] = {}
        self.differences: dict[int, deque[messages.Published]] = {}
        self.inboxes: dict[float, list[tuple[Connection, messages.StepReport]]] = {}

    def begin(self) -> None:
        """Start the shard."""
        self.start()
        self.machine = SyncerMachine(self.crowd.options, self.shard)
        self.later(HEARTBEAT_SECONDS, self._check_heartbeats)
        self.crowd.coordinator.greeted(self.shard)

    def received(self, connection: Connection, message: Any) -> None:
        """See `Endpoint`."""
        if isinstance(message, messages.Hello):
            self.handle(messages.Connected(message.learner, message, connection.number))
        elif connection.number in self.peers:
            learner, _ = self.peers[connection.number]
            if self.bound.get(learner) is connection:
                self.handle(messages.Received(learner, message))
                if isinstance(message, messages.Upload | messages.Copy):
                    self._announced(learner, message)

    def post(self, connection: Connection, report: messages.StepReport) -> None:
        """Send a learner's step report to the inbox, which is read every `inbox_seconds`."""
        seconds = self.crowd.inbox_seconds
        arrives_at = self.now + connection.delay()
        instant = connection.arrives(self, (arrives_at // seconds + 1) * seconds)
        inbox = self.inboxes.get(instant)
        if inbox is None:
            inbox = self.inboxes[instant] = []
            self.clockwork.at(instant, self._read_inbox, instant)
        inbox.append((connection, report))

    def _read_inbox(self, instant: float) -> None:
        reports = []
        for connection, report in self.inboxes.pop(instant):
            if connection.is_stalled_to(self):
                connection.deliver(self, report)
            elif connection.open[self.name] and not connection.broken:
                learner = self.peers.get(connection.number, ("", 0))[0]
                if self.bound.get(learner) is connection:
                    reports.append((learner, report))
        if self.alive and reports:
            self.handle(messages.Reported(tuple(reports)))

    def lost(self, connection: Connection) -> None:
        """See `Endpoint`."""
        learner, _ = self.peers.pop(connection.number, ("", 0))
        if learner and self.bound.get(learner) is connection:
            del self.bound[learner]
            self.handle(messages.Lost(learner))

    def _check_heartbeats(self) -> None:
        reachable = tuple(
            learner
            for learner, connection in self.bound.items()
            if (other := connection.other(self)).alive
            and not other.paused
            and not self.crowd.network.is_silent(other, self)
        )
        self.later(HEARTBEAT_SECONDS, self._check_heartbeats)
        if reachable:
            self.handle(messages.Heard(reachable))

    def arrived(self, path: str, body: Body) -> bool:
        """Take a complete payload; return False if it is not expected."""
        expected = self.expected.get(path)
        if expected is None or expected.body is not None:
            return False
        expected.body = body
        self._join(path, expected)
        return True

    def _announced(self, learner: str, message: messages.Upload | messages.Copy) -> None:
        path = self.paths.get(_key(learner, message))
        if path is not None and path in self.expected:
            self.expected[path].announced = message
            self._join(path, self.expected[path])

    def _join(self, path: str, expected: Awaited) -> None:
        announced, order = expected.announced, expected.order
        if announced is None or expected.body is None:
            return
        self._no_longer_expected(path)
        if isinstance(order, messages.Expect):
            self.handle(
                messages.BodyArrived(
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
            self.handle(messages.CopyArrived(*place, expected.body.digest))

    def _no_longer_expected(self, path: str) -> None:
        expected = self.expected.pop(path, None)
        if expected is not None:
            self.paths.pop(_key(expected.learner, expected.order), None)

    def served(self, path: str) -> Body | None:
        """Return the payload that a GET of this path returns now, or ``None``."""
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
            case messages.Accept(number, learner, epoch):
                self._bind(number, learner, epoch)
            case messages.Reject(number, reason, final):
                connection = self.connections.get(number)
                if connection is not None:
                    connection.send(self, messages.Refusal(reason, final))
                    connection.close(self)
            case messages.Send(peer, message) if peer == COORDINATOR:
                coordinator = self.crowd.coordinator
                event = messages.Received(shard_peer(self.shard), message)
                self.clockwork.arrive(coordinator, self.now, coordinator.handle, event)
            case messages.Send(learner, message):
                if learner in self.bound:
                    self.bound[learner].send(self, message)
            case messages.Broadcast(message):
                if isinstance(message, messages.Published) and message.difference:
                    self._offer(message)
                for connection in self.bound.values():
                    connection.send(self, message)
            case messages.Expect(path, learner) | messages.ExpectCopy(path, learner):
                if learner in self.bound:
                    epoch = self.peers[self.bound[learner].number][1]
                    self.expected[path] = Awaited(learner, epoch, effect)
                    self.paths[_key(learner, effect)] = path
            case messages.Unexpect(path):
                self._no_longer_expected(path)
            case messages.Merge(fragment=fragment, version=version):
                made = Done(effect, Made(_digest(fragment, version)))
                self.clockwork.arrive(self, self.now, self.handle, made)
            case messages.LoadWeights():
                owned = self.crowd.options.owned(self.shard)
                loaded = tuple((p, _digest(p, None)) for p in owned)
                done = Done(effect, WeightsLoaded(loaded))
                self.clockwork.arrive(self, self.now, self.handle, done)
            case messages.Evict(learner):
                bound = self.bound.pop(learner, None)
                if bound is not None:
                    self.peers.pop(bound.number, None)
                    bound.close(self)
            case messages.Stop():
                self.over = True
                self.crowd.ended(self)
            case _:
                pass  # a simulated crowd has no disk, and folding takes no time

    def _offer(self, message: messages.Published) -> None:
        kept = deque[messages.Published](maxlen=self.crowd.options.chain + 1)
        self.differences.setdefault(message.fragment, kept).append(message)

    def _bind(self, number: int, learner: str, epoch: int) -> None:
        older = self.bound.pop(learner, None)
        if older is not None:
            self.peers.pop(older.number, None)
            older.close(self)
        connection = self.connections.get(number)
        if connection is not None:
            self.bound[learner] = connection
            self.peers[number] = (learner, epoch)


def _digest(fragment: int, version: Version | None) -> str:
    """Return a name for the content of a version."""
    return f"{fragment}/{version}"


def _key(learner: str, of: Any) -> tuple[Any, ...]:
    """Return a key that an order to expect a payload shares with the payload's announcement."""
    if isinstance(of, messages.Expect | messages.Upload):
        return (learner, of.fragment, "contribution", of.ask)
    return (learner, of.fragment, "copy", of.attempt)


class BareLearner(Bare):
    """A learner's state machine, and a training loop that only takes time.

    Attributes:
        slowness: Factor by which a step takes longer.
        over: Whether it has received the end of the run.
    """

    def __init__(self, crowd: Crowd, spec: LearnerSpec) -> None:
        super().__init__(crowd, spec.name)
        self.spec = spec
        self.link = crowd.link_of(spec)
        self.slowness = 1.0
        self.over = False
        self._reset()

    def _reset(self) -> None:
        self.shards: dict[int, Connection] = {}
        self.coordinator: Connection | None = None
        self.stepping = self.stopped = self.held = self.stalled = self._waits = False

    def begin(self) -> None:
        """Start a new process, which has only the model."""
        self.start()
        self.machine, self._tick_at = None, None
        self._reset()
        self._dial_coordinator()

    def _dial_coordinator(self) -> None:
        def opened(connection: Connection) -> None:
            self.coordinator = connection
            nonce = f"{self.name}-{self.life}"
            connection.send(self, messages.Join(self.name, nonce, self.spec.role, ""))

        def failed() -> None:
            self.later(self.choices.uniform(*REDIAL_SECONDS), self._dial_coordinator)

        self.crowd.network.dial(self, self.crowd.coordinator, opened, failed)

    def received(self, connection: Connection, message: Any) -> None:
        """See `Endpoint`."""
        if isinstance(message, messages.Admitted):
            if self.machine is None:
                self._join(message.epoch)
            self.handle(messages.Connected(COORDINATOR))
        elif connection is self.coordinator:
            self.handle(messages.Received(COORDINATOR, message))
        else:
            shard = next((s for s, c in self.shards.items() if c is connection), None)
            if shard is not None:
                self.handle(messages.Received(shard_peer(shard), message))

    def _join(self, epoch: int) -> None:
        nonce = f"{self.name}-{self.life}"
        options = self.crowd.options
        self.machine = LearnerMachine(options, self.name, epoch, nonce, self.spec.role)
        if self.spec.role == "learner":
            self.handle(messages.Began(()))
        for shard in range(options.shards):
            self._dial(shard)

    def _dial(self, shard: int) -> None:
        def opened(connection: Connection) -> None:
            self.shards[shard] = connection
            self.handle(messages.Connected(shard_peer(shard)))

        def failed() -> None:
            self.later(self.choices.uniform(*REDIAL_SECONDS), self._dial, shard)

        if not self.over:
            self.crowd.network.dial(self, self.crowd.shards[shard], opened, failed)

    def lost(self, connection: Connection) -> None:
        """See `Endpoint`."""
        if connection is self.coordinator:
            self.coordinator = None
            self.handle(messages.Lost(COORDINATOR))
            self.later(self.choices.uniform(*REDIAL_SECONDS), self._dial_coordinator)
        for shard, mine in list(self.shards.items()):
            if mine is connection:
                del self.shards[shard]
                self.handle(messages.Lost(shard_peer(shard)))
                self.later(self.choices.uniform(*REDIAL_SECONDS), self._dial, shard)

    def stall(self) -> None:
        """Stall the training loop in its present step. The background continues."""
        self.stalled = self.alive

    def end_stall(self) -> None:
        """End a stall of the training loop."""
        self.stalled = False
        if self._waits:
            self._waits = False
            self.later(0.0, self._finish_step)

    def _begin_training(self) -> None:
        self.handle(messages.Paused())
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
        if self.stalled:
            self._waits = True
            return
        self.stepping = False
        self.handle(messages.StepFinished(self.spec.tokens_per_step))
        if self.alive:
            self._start_step()

    def after(self, event: Any) -> None:
        """While the loop waits at a boundary, apply what an event may have made ready."""
        idle = self.held or self.stopped or self.spec.role == "observer"
        boundary = isinstance(event, messages.Paused | messages.StepFinished)
        if idle and not boundary and self.machine.state.ready:
            self.handle(messages.Paused())

    def carry_out(self, effect: Any) -> None:
        """See `Bare`."""
        match effect:
            case messages.Send(peer, message) if peer == COORDINATOR:
                if self.coordinator is not None:
                    self.coordinator.send(self, message)
            case messages.Send(peer, message):
                self._send_to(shard_of(peer), message)
            case messages.SendBody():
                self._send_body(effect)
            case messages.SendCopy():
                pass  # the weights come from a file: no shard requests a copy
            case messages.Fetch():
                self._fetch(effect)
            case messages.Hold():
                self.held = True
            case messages.Release():
                self.held = False
                self.later(0.0, self._start_step)
            case messages.Ready():
                self.later(0.0, self._begin_training)
            case messages.EndTraining():
                self.stopped = True
            case messages.RunOver():
                self.over = True
                self.leave("the run is over")
            case _:
                pass  # the rest concerns tensors, which do not exist here

    def leave(self, reason: str) -> None:
        """Send a last message to all shards and end the process."""
        for connection in list(self.shards.values()):
            connection.send(self, messages.Leave(reason))
        self.end()

    def end(self, *, silent: bool = False) -> None:
        """End the process; ``silent``: with its machine, so its peers receive no reset."""
        if self.alive:
            self.crash()
            self.crowd.network.crashed(self, silent=silent)

    def _send_to(self, shard: int, message: Any) -> None:
        connection = self.shards.get(shard)
        if connection is None:
            return
        if self.crowd.inbox_seconds and type(message) is messages.StepReport:
            if connection.open[self.name]:
                self.crowd.shards[shard].post(connection, message)
        else:
            connection.send(self, message)

    def _send_body(self, order: messages.SendBody) -> None:
        digest = f"{self.name}-{self.life}/{order.fragment}/{order.ask}"
        share = self.crowd.wire_bytes.get(order.codec, WIRE_BYTES)
        body = Body(share * self.crowd.fragment_bytes[order.fragment], digest)
        self.later(0.0, self.handle, messages.BodyEncoded(order.fragment, order.ask, digest))
        target, life = self.crowd.shards[order.shard], self.life

        def failed() -> None:
            if self.life == life:
                event = Failed(order, "lost")
                self.clockwork.arrive(self, self.now, self.handle, event)

        def done() -> None:
            if not target.arrived(order.path, body):
                failed()

        self.crowd.network.transfer(self, target, round(body.nbytes), done, failed)

    def _fetch(self, order: messages.Fetch) -> None:
        target, network, life = self.crowd.shards[order.shard], self.crowd.network, self.life

        def fail(reason: str) -> None:
            if self.life == life:
                event = Failed(order, reason)
                self.clockwork.arrive(self, self.now, self.handle, event)

        def request() -> None:
            body = target.served(order.path)
            if network.is_cut(self, target):
                self.clockwork.after(NO_ANSWER_SECONDS, fail, "no answer")
            elif body is None:
                fail("gone")
            else:
                done = Done(order)
                network.transfer(
                    target,
                    self,
                    round(body.nbytes),
                    lambda: self.handle(done),
                    lambda: fail("lost"),
                )

        self.clockwork.after(network.delay(self, target), request)


class Crowd(Stage):
    """One run of bare state machines.

    Args:
        options: The settings of the method.
        specs: Learners and observers.
        seed: Determines every random choice.
        fragment_bytes: Size of each fragment's fp32 copy.
        inbox_seconds: Interval at which a shard reads its inbox of step reports; 0: it handles
            each report at once.
        checks: Assert every invariant of a state machine after each of its events. Each check
            visits all learners, which is too slow for thousands of them.
        recorders: Called for every event that a state machine has handled.

    Attributes:
        finished: Whether every shard has ended.
        wire_bytes: Size of a contribution relative to a whole copy, for each codec that learners
            choose from.
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
        # There are no tensors and no disk, so a checkpoint of the run is not possible.
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
        """Handle the end of a shard."""
        self.finished = all(each.over for each in self.shards)

    def crash(self, learner: Any, *, silent: bool = False) -> None:
        """See `System`; for learners."""
        learner.end(silent=silent)

    def restart(self, learner: Any) -> None:
        """See `System`; for learners."""
        if not (learner.alive or learner.over):
            learner.begin()

    def request_stop(self, learner: Any, seconds: float, number: Any) -> None:
        """See `System`: it leaves at once, without a flush."""
        if learner.alive:
            learner.leave("its loop has ended")

    def sample(self, sample: Any) -> None:
        """Ignore the sample: a simulated crowd has no tape."""
