"""A scripted learner: it tells a shard what a learner tells, and takes its time over everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.versions import Asking, Holding

if TYPE_CHECKING:
    from outside.test_own_rounds import Schedule


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
        """A new life. ``since``: up to which step a fragment is sent; ``sent``: and what."""
        self.epoch, self.life, self.step = self.epoch + 1, self.life + 1, 0
        self.alive, self.stands, self.free = True, False, 0.0
        self.held: dict[int, Version] = {}
        self.since: dict[int, int] = {}
        self.sent: dict[int, tuple[Version, Asking, int]] = {}
        self.waits: dict[int, msg.Pull] = {}
        self.sending: set[Asking] = set()
        self.fetching: set[int] = set()
        self.connect()
        self.after(self.jump * self.seconds, self.steps)

    def after(self, seconds: float, call: Callable[..., None], *values: Any) -> None:
        """Not in a later life."""
        life = self.life
        self.world.at(seconds, lambda: call(*values) if self.life == life else None)

    def connect(self) -> None:
        if not self.alive or self.connected:
            return
        self.connected = True
        self.world.count += 1
        held = tuple(Holding(p, version) for p, version in self.held.items())
        values = (self.epoch, f"{self.name} {self.epoch}", "learner", self.step, 0, None, held)
        hello = msg.Hello(self.name, *values, tuple(self.sending))  # type: ignore[arg-type]
        self.world.tell(ev.Connected(self.name, hello, self.world.count))

    def say(self, message: Any) -> None:
        if self.connected:
            self.world.tell(ev.Received(self.name, message))

    def steps(self) -> None:
        if self.stands:
            return
        self.step += self.jump
        report = msg.StepReport(self.step, 10 * self.step, self.seconds)
        if self.connected and self.rng.random() < 0.2:
            self.world.tell(ev.Reported(((self.name, report),)))
        else:
            self.say(report)
        self.after(self.jump * self.seconds, self.steps)

    def hears(self, message: Any) -> None:
        match message if self.connected else None:
            case msg.Published(fragment=p) if p not in self.fetching:
                self.fetching.add(p)
                self.after(self.down * self.rng.uniform(0.5, 1.5), self.takes, p)
            case msg.Pull():
                self.after(0.01, self.answers, message)
            case msg.Outcome(fragment=p, ask=ask, verdict=verdict) if verdict != "accepted":
                if p in self.sent and self.sent[p][1] == ask:
                    self.since[p] = self.sent.pop(p)[2]
            case msg.Welcome(asks=asks):
                self.sending &= set(asks)
            case msg.Ending():
                self.stands = True

    def takes(self, p: int) -> None:
        """The newest copy is here."""
        self.fetching.discard(p)
        self.held[p] = Version(1, self.world.model.newest[p])
        self.since.setdefault(p, self.step)
        self.say(Holding(p, self.held[p]))
        if p in self.waits:
            self.answers(self.waits.pop(p))

    def answers(self, pull: msg.Pull) -> None:
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
            self.declines(pull, do.NOTHING_NEW)
        elif self.connected:
            steps = self.step - self.since[p]
            self.sent[p], self.since[p] = (held, pull.ask, self.since[p]), self.step
            self.sending.add(pull.ask)
            self.free = max(self.free, self.world.now) + self.up * self.rng.uniform(0.5, 1.5)
            self.say(msg.Upload(p, pull.ask, held, steps, 10 * steps, "d"))
            self.after(self.free - self.world.now, self.delivers, pull, steps)

    def declines(self, pull: msg.Pull, reason: str) -> None:
        self.say(msg.Decline(pull.fragment, pull.ask, reason == do.NOTHING_NEW, reason))

    def delivers(self, pull: msg.Pull, steps: int) -> None:
        """Over a way of its own, be it connected or not, unless it is not expected any more."""
        self.sending.discard(pull.ask)
        if (self.name, pull.fragment, pull.ask) in self.world.void:
            return
        if self.rng.random() < 0.03:
            self.world.tell(ev.BodyCorrupt(self.name, pull.fragment, pull.ask, "truncated"))
        else:
            body = (pull.fragment, pull.ask, pull.base, steps, 10 * steps, 100)
            self.world.tell(ev.BodyArrived(self.name, self.epoch, *body))

    def goes(self, how: str) -> None:
        if not self.alive or (how in ("leaves", "drains") and not self.connected):
            return
        if how == "drains":
            self.stands = True
            fragments = [p for p, step in self.since.items() if step < self.step]
            self.say(msg.Draining(tuple(fragments), "told to go"))
            self.after(self.rng.uniform(0.0, 20.0), self.goes, "leaves")
            return
        connected, self.connected = self.connected, False
        if how == "leaves":
            self.world.tell(ev.Received(self.name, msg.Leave("enough")))
        elif connected:
            self.world.tell(ev.Lost(self.name))
        if how == "breaks":
            self.after(self.rng.choice([0.1, 1.0, 2.5, 6.0]), self.connect)
        else:
            self.life, self.alive = self.life + 1, False
            self.after(self.rng.uniform(0.5, 30.0), self.join)
