"""Virtual links: latency, jitter, shared bandwidth, cuts, lost connections.

Control messages arrive in order on a connection and are lost when it breaks. A cut stalls the
traffic in flight, as with TCP. If it heals soon, everything arrives late but complete. If it lasts,
both ends lose the connection, each at its own time. Payloads use separate queues: a learner's
uplink and downlink are one queue each, first come, first served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.clockwork import Clockwork, Process

Way = Literal["up", "down"]

LOST_SECONDS = 10.0
"""Silence after which an end closes a connection: the transport's ten pings."""

STALL_SECONDS = 5.0
"""A transfer that moves no byte for this time is abandoned."""

RESEND_SECONDS = 0.2
"""Delay before lost data is sent again. It doubles with each further loss, as with TCP."""


@dataclass(slots=True)
class Moving:
    """A payload in flight on a link: when its last byte arrives, and the callback for that."""

    way: Way
    ends_at: float
    finish: Callable[[], None]


@dataclass(slots=True)
class Link:
    """The link between one process and all others."""

    latency: float = 0.0005
    jitter: float = 0.0
    up_bytes_per_second: float = float("inf")
    down_bytes_per_second: float = float("inf")
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    loss: float = 0.0
    corruption: float = 0.0
    moving: dict[int, Moving] = field(default_factory=dict)

    def stretch(self, way: Way, rate: float, clockwork: Clockwork) -> None:
        """Change the rate in one direction, also for payloads in flight.

        Args:
            way: The direction.
            rate: The new rate in bytes per second.
            clockwork: Virtual time.
        """
        now = clockwork.now
        before = self.up_bytes_per_second if way == "up" else self.down_bytes_per_second
        factor = before / rate
        if factor == 1.0:
            return

        def later(instant: float) -> float:
            return now + (instant - now) * factor if instant > now else instant

        if way == "up":
            self.up_bytes_per_second, self.up_free_at = rate, later(self.up_free_at)
        else:
            self.down_bytes_per_second, self.down_free_at = rate, later(self.down_free_at)
        # Callbacks cannot be canceled, so `finish` ignores one that comes before `ends_at`.
        for body in self.moving.values():
            if body.way == way:
                body.ends_at = later(body.ends_at)
                clockwork.at(body.ends_at, body.finish)


class Endpoint(Process):
    """A process that has connections."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.link = Link()
        self.connections: dict[int, Connection] = {}
        self.listens = True
        self.data_sent = self.data_received = 0

    @property
    def cut(self) -> int:
        """Number of the consistent cut (checkpoint) that its messages belong to."""
        return 0

    def receive_cut(self, cut: int) -> None:
        """Handle the cut of a message just before the message itself is received."""

    def accepted(self, connection: Connection) -> None:
        """Handle a new connection to this process."""

    def received(self, connection: Connection, message: Any) -> None:
        """Handle a message that has arrived."""

    def lost(self, connection: Connection) -> None:
        """Handle the loss of a connection that this end did not close."""


class Connection:
    """One control connection between a dialer and an acceptor."""

    def __init__(self, network: Network, number: int, dialer: Endpoint, acceptor: Endpoint) -> None:
        self.network = network
        self.number = number
        self.ends = (dialer, acceptor)
        self.open = {dialer.name: True, acceptor.name: True}
        self.broken = False
        self._arrives_at = {dialer.name: 0.0, acceptor.name: 0.0}
        self._stalled: list[tuple[Endpoint, Any]] = []
        dialer.connections[number] = self
        acceptor.connections[number] = self

    def other(self, end: Endpoint) -> Endpoint:
        """Return the process at the other end."""
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def send(self, sender: Endpoint, message: Any) -> None:
        """Send a message, or do nothing if this end has been closed."""
        if self.open[sender.name]:
            self._carry(self.other(sender), self._arrived, (sender.cut, message))

    def delay(self) -> float:
        """Draw a one-way delay, in seconds."""
        a, b = self.ends
        if a.link.jitter or b.link.jitter or a.link.loss or b.link.loss:
            return self.network.delay(a, b)
        return a.link.latency + b.link.latency

    def arrives(self, end: Endpoint, instant: float) -> float:
        """Return when a message for ``end`` arrives: not before earlier messages."""
        earlier = self._arrives_at[end.name]
        if instant < earlier:
            return earlier
        self._arrives_at[end.name] = instant
        return instant

    def deliver(self, end: Endpoint, message: Any, cut: int = 0) -> None:
        """Deliver a message of a cut to this end, or stall it if the link is cut."""
        self._reach(end, self._arrived, (cut, message))

    def is_stalled_to(self, end: Endpoint) -> bool:
        """Whether traffic to this end is stalled at present."""
        waiting = any(to is end for to, _ in self._stalled)
        return waiting or self.network.is_silent(self.other(end), end)

    def close(self, closer: Endpoint) -> None:
        """Close this end. Messages that it has sent still arrive, followed by the end itself."""
        if self.open[closer.name]:
            self.open[closer.name] = False
            closer.connections.pop(self.number, None)
            self._carry(self.other(closer), self._ended, None)

    def reset(self) -> None:
        """Break the connection: all traffic in flight is lost."""
        self.broken = True
        self._stalled.clear()
        for end in self.ends:
            delay = self.network.delay(*self.ends)
            self.network.clockwork.arrive(
                end, self.network.clockwork.now + delay, self._ended, end, None
            )

    def vanish(self, end: Endpoint) -> None:
        """Close one end after silence. The other end notices by itself."""
        if self.open[end.name]:
            self.open[end.name] = False
            end.connections.pop(self.number, None)
            end.lost(self)
            self._carry(self.other(end), self._ended, None)

    def slip(self, end: Endpoint) -> None:
        """Let only one end lose the connection, as when its address changes.

        Traffic in flight is lost. The other end keeps the connection until a long silence, or until
        the same peer opens a new one.
        """
        if self.broken or not self.open[end.name]:
            return
        self.broken = True
        self._stalled.clear()
        clockwork, other = self.network.clockwork, self.other(end)
        clockwork.arrive(end, clockwork.now, self._ended, end, None)
        clockwork.timer(other, self.network.silence_ends_at(), self.vanish, other)

    def heal(self) -> None:
        """Deliver stalled messages in order after a cut."""
        stalled, self._stalled = self._stalled, []
        for end, (function, message) in stalled:
            self._reach(end, function, message)  # stalls it again if this direction is still cut

    def _carry(self, end: Endpoint, function: Callable[..., None], message: Any) -> None:
        clockwork = self.network.clockwork
        instant = self.arrives(end, clockwork.now + self.delay())
        clockwork.at(instant, self._reach, end, function, message)

    def _reach(self, end: Endpoint, function: Callable[..., None], message: Any) -> None:
        if self.broken or not self.open[end.name]:
            return
        if self.is_stalled_to(end):
            self._stalled.append((end, (function, message)))
            return
        end.run(end.life, False, function, (end, message))

    def _arrived(self, end: Endpoint, marked: tuple[int, Any]) -> None:
        if self.open[end.name] and not self.broken:
            cut, message = marked
            if cut:
                end.receive_cut(cut)
            end.received(self, message)

    def _ended(self, end: Endpoint, _: Any) -> None:
        if self.open[end.name]:
            self.open[end.name] = False
            end.connections.pop(self.number, None)
            end.lost(self)


def resend_seconds(loss: float, choices: Choices) -> float:
    """Draw the additional delay of a message that may be lost repeatedly."""
    seconds, wait = 0.0, RESEND_SECONDS
    while choices.chance(loss):
        seconds, wait = seconds + wait, 2 * wait
    return seconds


class Network:
    """All links and connections of one virtual run."""

    def __init__(self, clockwork: Clockwork, choices: Choices) -> None:
        self.clockwork = clockwork
        self.choices = choices
        self.cuts: dict[tuple[str, str], float] = {}
        self._connections = self._bodies = 0

    def delay(self, a: Endpoint, b: Endpoint) -> float:
        """Draw the one-way delay between two processes, in seconds."""
        seconds = a.link.latency + b.link.latency
        jitter = a.link.jitter + b.link.jitter
        if a.link.loss or b.link.loss:
            seconds += resend_seconds(1 - (1 - a.link.loss) * (1 - b.link.loss), self.choices)
        return seconds + self.choices.uniform(0.0, jitter) if jitter else seconds

    def dial(
        self,
        dialer: Endpoint,
        target: Endpoint,
        opened: Callable[[Connection], None],
        failed: Callable[[], None],
    ) -> None:
        """Open a connection.

        One of the two callbacks runs later, unless this incarnation of the dialer ends before.
        """
        clockwork, way = self.clockwork, self.delay(dialer, target)
        life = dialer.life

        def reach() -> None:
            if not dialer.alive or dialer.life != life:
                return
            if self.is_cut(dialer, target) or (target.alive and target.paused and target.listens):
                clockwork.timer(dialer, clockwork.now + STALL_SECONDS, failed)
            elif not (target.alive and target.listens):
                clockwork.timer(dialer, clockwork.now + way, failed)
            else:
                self._connections += 1
                connection = Connection(self, self._connections, dialer, target)
                target.accepted(connection)
                clockwork.arrive(dialer, clockwork.now + way, opened, connection)

        clockwork.after(way, reach)

    def crashed(self, process: Endpoint, *, silent: bool) -> None:
        """Close the connections of a dead process.

        Its peers receive the end at once, from its kernel. If ``silent`` (its host is dead, too),
        they notice only the silence.
        """
        for connection in list(process.connections.values()):
            if silent:
                connection.open[process.name] = False
                other = connection.other(process)
                self.clockwork.timer(other, self.silence_ends_at(), connection.vanish, other)
            else:
                connection.close(process)
        process.connections.clear()

    def paused(self, process: Endpoint) -> None:
        """Let the peers of a paused process close their connections if the pause lasts."""
        for connection in list(process.connections.values()):
            other = connection.other(process)
            life = process.life

            # Default arguments bind the loop's present values.
            def close_silent(
                connection: Connection = connection, other: Endpoint = other, life: int = life
            ) -> None:
                if process.paused and process.life == life:
                    connection.vanish(other)

            self.clockwork.timer(other, self.silence_ends_at(), close_silent)

    def silence_ends_at(self) -> float:
        """Draw when an end that receives nothing from now on closes its connection."""
        return self.clockwork.now + LOST_SECONDS + self.choices.uniform(0.0, 1.0)

    def is_cut(self, a: Endpoint, b: Endpoint) -> bool:
        """Whether at least one direction between two processes is cut, which stops TCP."""
        return bool(self.cuts) and (self.is_silent(a, b) or self.is_silent(b, a))

    def is_silent(self, sender: Endpoint, receiver: Endpoint) -> bool:
        """Whether this direction is cut."""
        return bool(self.cuts) and (sender.name, receiver.name) in self.cuts

    def cut(self, a: Endpoint, b: Endpoint, *, back: bool = True) -> None:
        """Cut the direction from ``a`` to ``b`` and, if ``back``, the other direction, too."""
        self._silence(a, b)
        if back:
            self._silence(b, a)

    def _silence(self, sender: Endpoint, receiver: Endpoint) -> None:
        way = (sender.name, receiver.name)
        if way in self.cuts:
            return
        since = self.cuts[way] = self.clockwork.now
        for connection in list(receiver.connections.values()):
            if connection.other(receiver) is not sender:
                continue

            def close_silent(connection: Connection = connection) -> None:
                # Compare the start: the cut may have healed, and another one begun, meanwhile.
                if self.cuts.get(way) == since:
                    connection.vanish(receiver)

            self.clockwork.timer(receiver, self.silence_ends_at(), close_silent)

    def heal(self, a: Endpoint, b: Endpoint, *, back: bool = True) -> None:
        """Heal the direction from ``a`` to ``b`` and, if ``back``, the other direction, too."""
        ways = [(a.name, b.name), *([(b.name, a.name)] if back else [])]
        if not [way for way in ways if self.cuts.pop(way, None) is not None]:
            return
        seen = {**a.connections, **b.connections}
        for connection in seen.values():
            if {end.name for end in connection.ends} == {a.name, b.name}:
                connection.heal()

    def reset(self, a: Endpoint, b: Endpoint) -> None:
        """Break every connection between two processes. They may connect again at once."""
        for connection in list(a.connections.values()):
            if connection.other(a) is b:
                connection.reset()

    def slip(self, end: Endpoint, other: Endpoint) -> None:
        """Let one end lose its connections to another process, which does not notice."""
        for connection in list(end.connections.values()):
            if connection.other(end) is other:
                connection.slip(end)

    def transfer(
        self,
        sender: Endpoint,
        receiver: Endpoint,
        nbytes: int,
        done: Callable[[], None],
        failed: Callable[[], None],
        *,
        follows: bool = False,
    ) -> None:
        """Move a payload over the links of two processes.

        Args:
            sender: The process that sends it.
            receiver: The process that receives it.
            nbytes: Its size.
            done: Called at the receiver when all of it has arrived.
            failed: Called if it cannot arrive. The caller must bind it to the learner's process,
                which may be the sender or the receiver.
            follows: It directly follows a piece that has just arrived, and so adds no
                latency.
        """
        clockwork, now = self.clockwork, self.clockwork.now
        # A slow peer does not occupy a fast link: other payloads pass meanwhile, as with TCP.
        sent = max(now, sender.link.up_free_at) + nbytes / sender.link.up_bytes_per_second
        received = max(now, receiver.link.down_free_at)
        received += nbytes / receiver.link.down_bytes_per_second
        end = max(sent, received)
        if sender.link.up_bytes_per_second < float("inf"):
            sender.link.up_free_at = sent
        if receiver.link.down_bytes_per_second < float("inf"):
            receiver.link.down_free_at = received
        lives = (sender.life, receiver.life)
        sender.data_sent += nbytes
        number, bottleneck = self._bodies, _bottleneck(sender.link, receiver.link)
        self._bodies += 1

        def finish() -> None:
            body = bottleneck.moving.get(number)
            if body is not None and clockwork.now >= body.ends_at:
                del bottleneck.moving[number]
                arrive(0.0)

        def arrive(stalled: float) -> None:
            if (sender.life, receiver.life) != lives or not (sender.alive and receiver.alive):
                failed()
            elif self.is_cut(sender, receiver):
                if stalled >= STALL_SECONDS:
                    failed()
                else:
                    clockwork.after(1.0, arrive, stalled + 1.0)
            else:
                receiver.data_received += nbytes
                receiver.run(receiver.life, False, done, ())

        way: Way = "up" if bottleneck is sender.link else "down"
        ends_at = end if follows else end + self.delay(sender, receiver)
        bottleneck.moving[number] = Moving(way, ends_at, finish)
        clockwork.at(ends_at, finish)


def _bottleneck(sender: Link, receiver: Link) -> Link:
    """Return the slower of the two links that a payload passes."""
    is_up = sender.up_bytes_per_second <= receiver.down_bytes_per_second
    return sender if is_up else receiver
