"""The virtual process of one learner (or observer): its training loop and its background."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never, cast

from decoupled_diloco.protocol.checkpoints.effects import ForgetCheckpoints, TakeCheckpoint
from decoupled_diloco.protocol.checkpoints.events import CheckpointHeard, PartWritten
from decoupled_diloco.protocol.data_leases.events import DataClosed
from decoupled_diloco.protocol.draining import drained
from decoupled_diloco.protocol.effects import (
    Apply,
    EndTraining,
    Expelled,
    Fetch,
    Hold,
    LearnerEffect,
    Note,
    Ready,
    Recovered,
    Relabel,
    Release,
    RunOver,
    Send,
    SendBody,
    SendCopy,
    Snapshot,
)
from decoupled_diloco.protocol.events import (
    Began,
    BodyEncoded,
    Connected,
    CopyFailed,
    DrainAsked,
    Fetched,
    FetchFailed,
    Lost,
    Paused,
    Received,
    StepFinished,
    UploadFailed,
)
from decoupled_diloco.protocol.learner import LearnerMachine
from decoupled_diloco.protocol.messages import (
    Admitted,
    Copy,
    FromLearner,
    Hello,
    Join,
    JoinRefused,
    Leave,
    Role,
    StepReport,
)
from decoupled_diloco.protocol.peers import COORDINATOR, shard_of, shard_peer
from decoupled_diloco.protocol.transfer.effects import (
    CopyState,
    DropState,
    FetchState,
    ForgetState,
    RelayState,
)
from decoupled_diloco.simulate.bodies import Body, LearnerBodies
from decoupled_diloco.simulate.learner_disk import LearnerDisk
from decoupled_diloco.simulate.leased_loop import LeasedLoop
from decoupled_diloco.simulate.network import Connection, Link, Way
from decoupled_diloco.simulate.shell import REDIAL_SECONDS, Shell
from decoupled_diloco.simulate.transfers import VirtualDonations

if TYPE_CHECKING:
    from decoupled_diloco.simulate.world import World


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """One learner of a virtual world.

    Attributes:
        name: its id.
        step_seconds: mean duration of an inner step.
        variance: standard deviation of a step's duration, as a share of the mean.
        latency: one way to every shard and the coordinator, seconds.
        jitter: further delay, uniform between zero and this, seconds.
        up_bytes_per_second: shared by all its uploads.
        down_bytes_per_second: shared by all its downloads.
        tokens_per_step: what one inner step trains.
        joins_at: when its process starts, seconds; infinity: only when somebody starts it.
        shared_link: name of a link that it shares with every learner that names it too: their
            bodies queue behind each other. The first one's bandwidths count.
        role: observers follow the published copies and no more.
    """

    name: str
    step_seconds: float = 1.0
    variance: float = 0.0
    latency: float = 0.001
    jitter: float = 0.0
    up_bytes_per_second: float = float("inf")
    down_bytes_per_second: float = float("inf")
    tokens_per_step: int = 8
    joins_at: float = 0.0
    role: Role = "learner"
    shared_link: str = ""


class LearnerProcess(Shell):
    """Runs one `LearnerMachine`: the loop steps, everything else happens between."""

    machine: LearnerMachine
    bodies: LearnerBodies

    def __init__(self, world: World, spec: LearnerSpec) -> None:
        super().__init__(world, spec.name)
        self.spec = spec
        own = Link(spec.latency, spec.jitter, spec.up_bytes_per_second, spec.down_bytes_per_second)
        self.link = (
            world.shared_links.setdefault(spec.shared_link, own) if spec.shared_link else own
        )
        self.slowness = 1.0
        self.still = self._stands = False
        self.stood_until = float("-inf")
        self.is_observer = spec.role == "observer"
        self.over = False
        self.expelled = ""
        self.shards: dict[int, Connection] = {}
        self.hosts = {shard.shard: shard for shard in world.shards}
        self.joined = self.stepping = self.stopped = self.held = False
        self.epoch = 0
        self.disk = LearnerDisk(self)
        self.transfers = VirtualDonations(self)
        self.patience: float | None = None
        self.loop: LeasedLoop | None = None
        self.cut_taken = False

    @property
    def at_boundary(self) -> bool:
        """Whether the loop stands between two steps, so that there is time to apply."""
        return not self.stepping

    def begin(self) -> None:
        """Starts with nothing but the model."""
        super().begin()
        self.shards.clear()
        self.joined = self.stepping = self.stopped = self.held = False
        self.still = self._stands = False
        self.patience = None
        self.expelled = ""
        if not self.spec.shared_link:
            self.link.up_free_at = self.link.down_free_at = 0.0
        self.dial_coordinator()

    def reborn(self) -> LearnerMachine:
        """See `Shell`."""
        old = self.machine
        machine = LearnerMachine(old.options, old.learner, old.epoch, old.nonce, old.role)
        machine.restore(old.snapshot())
        return machine

    @property
    def cut(self) -> int:
        """See `Endpoint`."""
        return 0 if self.machine is None else self.machine.state.checkpoint

    def hear_cut(self, cut: int) -> None:
        """See `Endpoint`."""
        if self.machine is not None and cut > self.machine.state.checkpoint_heard:
            self.tell(CheckpointHeard(cut))

    # ---- joining

    def coordinator_reached(self, connection: Connection) -> None:
        """See `Shell`."""
        connection.send(self, Join(self.name, f"{self.name}-{self.life}", self.spec.role, ""))

    def received(self, connection: Connection, message: Any) -> None:
        """A message of the coordinator or of a shard."""
        if isinstance(message, Admitted):
            if not self.joined:
                self._join(message.epoch)
            self.tell(Connected(COORDINATOR))
        elif isinstance(message, JoinRefused):
            pass  # the coordinator closes the connection, which dials again
        elif connection is self.coordinator_link:
            self.tell(Received(COORDINATOR, message))
        else:
            shard = next((s for s, c in self.shards.items() if c is connection), None)
            if shard is not None:
                self.tell(Received(shard_peer(shard), message))

    def _join(self, epoch: int) -> None:
        self.joined, self.epoch = True, epoch
        nonce = f"{self.name}-{self.life}"
        options = self.world.options
        self.machine = LearnerMachine(options, self.name, epoch, nonce, self.spec.role)
        self.bodies = self.world.bodies.learner(self.name, epoch, self.spec.tokens_per_step)
        if not self.is_observer:
            self.transfers.begin()
            seeks = self.choices.fork("donor").chance(self.world.donors)
            self.tell(Began(self.disk.recover(), seeks_donor=seeks, gives=True))
        data = None if self.is_observer else self.world.data
        self.loop = None if data is None else LeasedLoop(self, data)
        for shard in range(options.shards):
            self._dial(shard)

    def _dial(self, shard: int, turn: int = 0) -> None:
        hosts = self.world.hosts(shard)

        def opened(connection: Connection) -> None:
            if not connection.open[self.name]:
                failed()
                return
            self.shards[shard], self.hosts[shard] = connection, hosts[turn]
            self.tell(Connected(shard_peer(shard)))

        def failed() -> None:
            if turn + 1 < len(hosts):
                self._dial(shard, turn + 1)
            else:
                self.later(self.choices.uniform(*REDIAL_SECONDS), self._dial, shard)

        if not self.expelled and not self.over:
            self.world.network.dial(self, hosts[turn], opened, failed)

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        if connection is self.coordinator_link:
            self.coordinator_lost()
            self.tell(Lost(COORDINATOR))
            return
        for shard, mine in list(self.shards.items()):
            if mine is connection:
                del self.shards[shard]
                self.tell(Lost(shard_peer(shard)))
                self.later(self.choices.uniform(*REDIAL_SECONDS), self._dial, shard)

    # ---- the training loop

    def _begin_training(self) -> None:
        self._at_boundary(Paused())
        if self.loop is not None:
            self.loop.open()
        self._start_step()

    def _at_boundary(self, event: StepFinished | Paused) -> None:
        """Its part of a cut comes before anything newer is applied."""
        self.tell(event)
        if self.cut_taken:
            self.cut_taken = False
            self.tell(Paused())

    def _start_step(self) -> None:
        if self.held or self.stopped or self.stepping or self.is_observer or self.leaving:
            return
        if self.loop is not None and not self.loop.draw():
            return  # before its first lease; the answer begins the loop
        self.stepping = True
        if self.choices.chance(self.world.stalls):
            self.stand_still()
            self.later(self.spec.step_seconds * self.choices.log_uniform(3, 400), self.step_again)
        seconds = self.spec.step_seconds * self.slowness
        if self.spec.variance:
            seconds *= max(0.1, self.choices.normal(1.0, self.spec.variance))
        clockwork = self.world.clockwork
        clockwork.timer(self, clockwork.now + seconds, self._finish_step)

    def stand_still(self) -> None:
        """The loop stands in its present step (an evaluation, a checkpoint); all else goes on."""
        self.still = self.alive

    def step_again(self) -> None:
        """The loop goes on."""
        if self.still:
            self.still, self.stood_until = False, self.now
        if self._stands:
            self._stands = False
            self.later(0.0, self._finish_step)

    def choke(self, factor: float, way: Way) -> None:
        """Its link carries so many times less than it should, up or down; 1: as it should."""
        spec = self.spec
        rate = spec.up_bytes_per_second if way == "up" else spec.down_bytes_per_second
        if rate < float("inf"):
            self.link.stretch(way, rate / factor, self.world.clockwork)

    def _finish_step(self) -> None:
        if self.still:
            self._stands = True
            return
        self.stepping = False
        if self.world.inbox_seconds and not (self.recorders or self.world.checks):
            self._finish_step_of_many()
            return
        self._at_boundary(self._step())
        if self.alive and self.machine is not None:
            self.disk.at_boundary()
            if self.patience is not None:
                self._hand_in()
            self._start_step()

    def _step(self) -> StepFinished:
        tokens = self.bodies.step()
        return StepFinished(tokens) if self.loop is None else self.loop.finished(tokens)

    def _finish_step_of_many(self) -> None:
        """As `tell`, by the shortest way: with thousands of learners this is nearly all."""
        world, life, machine = self.world, self.life, self.machine
        if machine is None:
            return
        world.events += 1
        for effect in machine.handle(self.clock, self._step()):
            if type(effect) is Send and type(effect.message) is StepReport:
                shard = shard_of(effect.peer)
                connection = self.shards.get(shard)
                if connection is not None and connection.open[self.name]:
                    self.hosts[shard].post(connection, effect.message)
            elif self.alive and self.life == life:
                self.carry_out(effect)
        if self.cut_taken and self.alive and self.life == life:
            self.cut_taken = False
            self.tell(Paused())
        if self.alive and self.life == life:
            if machine.state.retrying:
                self._plan_tick(False)
            self._start_step()

    def after(self, event: Any) -> None:
        """While the loop stands still, every event may bring something to do."""
        idle = self.held or self.stopped or self.is_observer or self.leaving
        if idle and not isinstance(event, Paused | StepFinished) and self.machine.state.ready:
            self._at_boundary(Paused())
        if self.leaving and self.alive and drained(self.machine.state, self.world.options):
            self._go()
        elif self.loop is not None and isinstance(event, Received) and event.peer == COORDINATOR:
            self.later(0.0, self._start_first_step)

    def _start_first_step(self) -> None:
        if self.machine is not None and self.machine.state.data is not None:
            self._start_step()

    # ---- orders

    def carry_out(self, effect: LearnerEffect) -> None:
        """Carries one order out."""
        match effect:
            case Send(peer, message) if peer == COORDINATOR:
                if self.coordinator_link is not None:
                    self.coordinator_link.send(self, message)
            case Send(peer, message):
                if shard_of(peer) in self.shards:
                    self._say(shard_of(peer), cast("Any", message))
            case Snapshot(fragment, base, step):
                self.bodies.snapshot(fragment, base, step)
            case Apply(fragment, version, mode, discarded):
                assert self.at_boundary, "parameters change at step boundaries only"
                self.bodies.apply(fragment, version, mode, discarded)
            case Relabel(fragment, version):
                self.bodies.relabel(fragment, version)
            case SendBody():
                self._send_body(effect)
            case SendCopy():
                self._send_copy(effect)
            case Fetch():
                self._fetch(effect)
            case Hold():
                self.held = True
            case Release():
                self.held = False
                self.later(0.0, self._start_step)
            case Ready():
                self.later(0.0, self._begin_training)
            case EndTraining():
                self.stopped = True
            case RunOver():
                self._run_over()
            case Expelled(reason):
                self.expelled = reason
                self.world.expelled(self, reason)
            case CopyState() | RelayState() | ForgetState() | FetchState() | DropState():
                self.transfers.carry_out(effect)
            case TakeCheckpoint(number):
                self.cut_taken = True
                self.world.cuts.learners[number, self.name] = self.disk.part()
                seconds = self.world.cut_seconds
                self.later(
                    self.choices.uniform(0.0, seconds), self.tell, PartWritten(number, "", 0)
                )
            case Recovered() | ForgetCheckpoints() | Note():
                pass
            case _:
                assert_never(effect)

    @property
    def leaving(self) -> bool:
        """Whether it steps no more, and hands in what it has."""
        return self.machine is not None and bool(self.machine.state.leaving)

    def told_to_go(self, seconds: float) -> None:
        """SIGTERM: at the next boundary it hands in what it has, within so many seconds, and goes.

        Who has not begun to train goes at once. Its supervisor starts it again.
        """
        if not self.alive or self.paused or self.machine is None or not self.machine.state.ready:
            self.world.crash(self)
        elif self.patience is None:
            self.patience = seconds
            if not self.stepping:
                self._hand_in()

    def _hand_in(self) -> None:
        assert self.patience is not None
        if not self.leaving:
            self.later(self.patience, self._go)
            self.tell(DrainAsked("told to go"))

    def _go(self) -> None:
        if self.alive:
            if self.world.checkpoints:
                self.disk.keep()
            self.leave("told to go")
            self.world.clockwork.after(self.choices.uniform(0.5, 5.0), self.world.restart, self)

    def leave(self, reason: str) -> None:
        """Says goodbye, as a loop that ends of itself does; the process is gone then."""
        if self.loop is not None:
            self.loop = None
            self.tell(DataClosed())
        if not self.alive:
            return  # that was the last that it had to say
        for connection in list(self.shards.values()):
            connection.send(self, Leave(reason))
        self.end()

    def _run_over(self) -> None:
        self.over = True
        self.world.left(self)
        self.leave("the run is over")

    def _say(self, shard: int, message: FromLearner | Hello) -> None:
        connection = self.shards[shard]
        if self.world.inbox_seconds and isinstance(message, StepReport):
            if connection.open[self.name]:
                self.hosts[shard].post(connection, message)
        else:
            connection.send(self, message)

    def _send_body(self, order: SendBody) -> None:
        body = self.bodies.encode(
            order.fragment, order.base, order.steps, order.tokens, order.codec
        )
        self.later(0.0, self.tell, BodyEncoded(order.fragment, order.ask, body.digest))
        failure = UploadFailed(order.fragment, order.ask, "lost")
        self._put(order.shard, order.path, body, failure)

    def _send_copy(self, order: SendCopy) -> None:
        body = self.bodies.copy(order.fragment, order.version)
        if order.shard in self.shards:
            announcement = Copy(order.fragment, order.attempt, body.digest)
            self.shards[order.shard].send(self, announcement)
        failure = CopyFailed(order.shard, order.fragment, order.attempt, "lost")
        self._put(order.shard, order.path, body, failure)

    def _put(self, shard: int, path: str, body: Body, failure: UploadFailed | CopyFailed) -> None:
        target = self.hosts[shard]
        clockwork, life = self.world.clockwork, self.life

        def failed() -> None:
            if self.life == life:
                clockwork.arrive(self, clockwork.now, self.tell, failure)

        def done() -> None:
            if not target.arrived(path, body):
                failed()

        self.world.network.transfer(self, target, body.nbytes, done, failed)

    def _fetch(self, order: Fetch) -> None:
        target = self.hosts[order.shard]
        clockwork, network = self.world.clockwork, self.world.network
        life = self.life

        def fail(reason: str) -> None:
            if self.life == life:
                event = FetchFailed(order.fragment, order.version, reason)
                clockwork.arrive(self, clockwork.now, self.tell, event)

        def ask() -> None:
            if not (target.alive and target.listens):
                fail("refused")
            elif target.paused or network.is_cut(self, target):
                clockwork.after(5.0, fail, "no answer")
            else:
                body = target.served(order.path)
                if body is None:
                    fail("gone")
                else:
                    network.transfer(
                        target, self, body.nbytes, lambda: stage(body), lambda: fail("lost")
                    )

        def stage(body: Body) -> None:
            spoiled = self.choices.chance(max(self.world.spoil, self.link.corruption))
            good = not spoiled and self.bodies.stage(
                order.fragment, order.version, body, whole=order.whole, digest=order.digest
            )
            if good:
                self.tell(Fetched(order.fragment, order.version))
            else:
                fail("another digest")

        clockwork.after(network.delay(self, target), ask)
