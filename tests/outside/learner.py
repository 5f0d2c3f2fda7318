"""A learner of the world: the real machine, and a loop that steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from decoupled_diloco.protocol import LearnerMachine
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.peers import COORDINATOR, shard_of, shard_peer
from decoupled_diloco.protocol.versions import Version
from outside.content import TOKENS_A_STEP, Content, digest, ill, plus, size, steps
from outside.nodes import Connection, Contribution, Node, Spec, Wire
from outside.shard import Shard

if TYPE_CHECKING:
    from outside.world import World


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
