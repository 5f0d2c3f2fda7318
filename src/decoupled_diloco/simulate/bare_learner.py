"""A bare learner: its machine, and a loop that takes so long for each step; see `bare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.learner import LearnerMachine
from decoupled_diloco.protocol.peers import COORDINATOR, shard_of, shard_peer
from decoupled_diloco.simulate.bare import (
    NO_ANSWER_SECONDS,
    REDIAL_SECONDS,
    WIRE_BYTES,
    Bare,
    Body,
)
from decoupled_diloco.simulate.network import Connection
from decoupled_diloco.simulate.spec import LearnerSpec

if TYPE_CHECKING:
    from decoupled_diloco.simulate.crowd import Crowd


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
