"""A scripted learner, which sends a shard a learner's messages with random delays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from decoupled_diloco.protocol import Version, messages
from decoupled_diloco.protocol.messages import Asking, Holding

if TYPE_CHECKING:
    from outside.own_schedule import Schedule


class Learner:
    def __init__(self, world: Schedule, name: str) -> None:
        self.world, self.name = world, name
        rng = self.rng = world.rng
        self.seconds = rng.choice([1.0, 1.0, 0.4, rng.uniform(0.3, 4.0)])
        self.jump = rng.choice([1, 1, 1, 2, 5, 9])
        slow = rng.choice([0.0, 0.02, 0.3, 2.0, 8.0])
        self.up, self.down = slow * rng.uniform(0.5, 1.5), rng.choice([0.0, 0.1, slow, 3.0])
        self.epoch = self.life = 0
        self.alive = self.connected = False

    def join(self) -> None:
        """Start a new incarnation.

        ``since`` is the step up to which a fragment has been sent, and ``sent`` the contribution.
        """
        self.epoch, self.life, self.step = self.epoch + 1, self.life + 1, 0
        self.alive, self.stopped, self.free = True, False, 0.0
        self.held: dict[int, Version] = {}
        self.since: dict[int, int] = {}
        self.sent: dict[int, tuple[Version, Asking, int]] = {}
        self.waits: dict[int, messages.Pull] = {}
        self.sending: set[Asking] = set()
        self.fetching: set[int] = set()
        self.connect()
        self.after(self.jump * self.seconds, self.steps)

    def after(self, seconds: float, call: Callable[..., None], *values: Any) -> None:
        """Call a function later, unless this incarnation has ended by then."""
        life = self.life
        self.world.at(seconds, lambda: call(*values) if self.life == life else None)

    def connect(self) -> None:
        if not self.alive or self.connected:
            return
        self.connected = True
        self.world.count += 1
        held = tuple(Holding(p, version) for p, version in self.held.items())
        values = (self.epoch, f"{self.name} {self.epoch}", "learner", self.step, 0, None, held)
        hello = messages.Hello(self.name, *values, tuple(self.sending))  # type: ignore[arg-type]
        self.world.handle(messages.Connected(self.name, hello, self.world.count))

    def send(self, message: Any) -> None:
        if self.connected:
            self.world.handle(messages.Received(self.name, message))

    def steps(self) -> None:
        if self.stopped:
            return
        self.step += self.jump
        report = messages.StepReport(self.step, 10 * self.step, self.seconds)
        if self.connected and self.rng.random() < 0.2:
            self.world.handle(messages.Reported(((self.name, report),)))
        else:
            self.send(report)
        self.after(self.jump * self.seconds, self.steps)

    def receives(self, message: Any) -> None:
        match message if self.connected else None:
            case messages.Published(fragment=p) if p not in self.fetching:
                self.fetching.add(p)
                self.after(self.down * self.rng.uniform(0.5, 1.5), self.takes, p)
            case messages.Pull():
                self.after(0.01, self.answers, message)
            case messages.Outcome(fragment=p, ask=ask, verdict=verdict) if verdict != "accepted":
                if p in self.sent and self.sent[p][1] == ask:
                    self.since[p] = self.sent.pop(p)[2]
            case messages.Welcome(asks=asks):
                self.sending &= set(asks)
            case messages.Ending():
                self.stopped = True

    def takes(self, p: int) -> None:
        """Take the newest copy, which has arrived."""
        self.fetching.discard(p)
        self.held[p] = Version(1, self.world.model.newest[p])
        self.since.setdefault(p, self.step)
        self.send(Holding(p, self.held[p]))
        if p in self.waits:
            self.answers(self.waits.pop(p))

    def answers(self, pull: messages.Pull) -> None:
        p, held = pull.fragment, self.held.get(pull.fragment, Version(0, 0))
        if held < pull.base:
            self.waits[p] = pull
        elif held > pull.base:
            self.declines(pull, "behind")
        elif self.rng.random() < 0.02:
            self.declines(pull, "no room for it")
        elif p in self.sent and self.sent[p][0] == held:
            self.declines(pull, "sent already")
        elif self.since[p] >= self.step:
            self.declines(pull, messages.NOTHING_NEW)
        elif self.connected:
            steps = self.step - self.since[p]
            self.sent[p], self.since[p] = (held, pull.ask, self.since[p]), self.step
            self.sending.add(pull.ask)
            self.free = max(self.free, self.world.now) + self.up * self.rng.uniform(0.5, 1.5)
            self.send(messages.Upload(p, pull.ask, held, steps, 10 * steps, "d"))
            self.after(self.free - self.world.now, self.delivers, pull, steps)

    def declines(self, pull: messages.Pull, reason: str) -> None:
        self.send(messages.Decline(pull.fragment, pull.ask, reason == messages.NOTHING_NEW, reason))

    def delivers(self, pull: messages.Pull, steps: int) -> None:
        """Deliver a payload, independent of the connection, unless it is no longer expected."""
        self.sending.discard(pull.ask)
        if (self.name, pull.fragment, pull.ask) in self.world.void:
            return
        if self.rng.random() < 0.03:
            self.world.handle(messages.BodyCorrupt(self.name, pull.fragment, pull.ask, "truncated"))
        else:
            body = (pull.fragment, pull.ask, pull.base, steps, 10 * steps, 100)
            self.world.handle(messages.BodyArrived(self.name, self.epoch, *body))

    def goes(self, how: str) -> None:
        if not self.alive or (how in ("leaves", "drains") and not self.connected):
            return
        if how == "drains":
            self.stopped = True
            fragments = [p for p, step in self.since.items() if step < self.step]
            self.send(messages.Draining(tuple(fragments), "asked to stop"))
            self.after(self.rng.uniform(0.0, 20.0), self.goes, "leaves")
            return
        connected, self.connected = self.connected, False
        if how == "leaves":
            self.world.handle(messages.Received(self.name, messages.Leave("enough")))
        elif connected:
            self.world.handle(messages.Lost(self.name))
        if how == "breaks":
            self.after(self.rng.choice([0.1, 1.0, 2.5, 6.0]), self.connect)
        else:
            self.life, self.alive = self.life + 1, False
            self.after(self.rng.uniform(0.5, 30.0), self.join)
