"""User-space proxy links that can be cut, slowed down or corrupted, between local processes.

Each process dials the shards at its own loopback address (127.77.x.y). This module listens there
on the shards' ports and forwards the traffic. A *wire* is the path from one process to one shard.
A fault on a wire applies to all connections over it. TCP's guarantee holds: lost data arrives
later, in order. Only corrupted data arrives with different bytes.

    links = Links(seed=0)
    addresses = links.dial("learner-0", ("http://127.0.0.1:7070",))
    links.cut(links.wires("learner-0"), up=True, down=True)
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from decoupled_diloco.config.addresses import BETWEEN, alternatives, url_of
from decoupled_diloco.errors import TransportError
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.virtual_network import resend_seconds

_T = TypeVar("_T")
Way = Literal["up", "down"]

PIECE_BYTES = 16 << 10
"""Size of one read. Each piece is delayed, lost or corrupted as a unit."""

PIECES_MAX = 64
"""Pieces in flight in one direction of a connection: 1 MiB, the size of a TCP window."""

NETWORK = "127.77"


@dataclass(eq=False)
class Wire:
    """The path from one process to one shard."""

    process: str
    port: int
    choices: Choices
    delay_seconds: float = 0.0  # one way
    jitter_seconds: float = 0.0  # further delay of each piece, uniform between 0 and this
    losses: list[float] = field(default_factory=list)  # share to resend, one per active fault
    corruptions: list[float] = field(default_factory=list)  # share corrupted, one per active fault
    cuts: Counter[Way] = field(default_factory=Counter)  # active cuts per direction
    pipes: set[Pipe] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def passes(self, way: Way) -> None:
        """Wait until no cut blocks this direction."""
        while self.cuts[way] > 0:
            self.changed.clear()
            await self.changed.wait()

    def late_seconds(self) -> float:
        """Draw the transit time of one piece."""
        seconds = self.delay_seconds + resend_seconds(_any(self.losses), self.choices)
        jitter = self.jitter_seconds
        return seconds + self.choices.uniform(0.0, jitter) if jitter else seconds

    def corrupted(self, piece: bytes) -> bytes:
        """Return the piece as it arrives: one random byte may be changed."""
        if not self.choices.chance(_any(self.corruptions)):
            return piece
        place = self.choices.integer(0, len(piece) - 1)
        return piece[:place] + bytes([piece[place] ^ 0x55]) + piece[place + 1 :]


class Pipe:
    """One connection over a wire: two streams, each forwarded in order."""

    def __init__(self, wire: Wire, dialer: asyncio.StreamWriter) -> None:
        self.wire = wire
        self._writers = [dialer]

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Forward data until both ends have closed or the connection breaks."""
        wire, dialer = self.wire, self._writers[0]
        try:
            await wire.passes("up")
            far, acceptor = await asyncio.open_connection("127.0.0.1", wire.port)
            self._writers.append(acceptor)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry("up", reader, acceptor))
                group.create_task(self._carry("down", far, dialer))
        except* OSError:
            await wire.passes("down")  # a cut also hides the reset from the dialer
            self.break_off()
        finally:
            for writer in self._writers:
                writer.close()

    def break_off(self) -> None:
        """Break the connection: both ends receive a TCP reset."""
        for writer in self._writers:
            own = writer.get_extra_info("socket")
            # A linger time of 0 makes close() send RST instead of FIN.
            with contextlib.suppress(OSError):  # one end may be closed already
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _carry(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_MAX)
        clock = asyncio.get_running_loop().time

        async def deliver() -> None:
            while True:
                arrives_at, piece = await in_flight.get()
                await asyncio.sleep(max(0.0, arrives_at - clock()))
                # The cut is checked at arrival, so a cut also holds back what is already in flight.
                await self.wire.passes(way)
                if not piece:
                    writer.write_eof()
                    return
                writer.write(piece)
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            piece = b"-"
            while piece:
                piece = await reader.read(PIECE_BYTES)
                arrives_at = clock() + self.wire.late_seconds()
                await in_flight.put((arrives_at, self.wire.corrupted(piece) if piece else piece))


class Links:
    """All wires and the thread that serves them. Other threads call its methods.

    Args:
        seed: Determines which pieces are lost or corrupted, for the same order of events.
    """

    def __init__(self, seed: int) -> None:
        self._choices = Choices(f"{seed}/links")
        self._wires: dict[tuple[str, int], Wire] = {}
        self._names: list[str] = []
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()

    def dial(self, process: str, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Open the wires of a process and return the addresses that it must dial instead."""
        return tuple(
            BETWEEN.join(self._wait(self._open(process, one)) for one in alternatives(address))
            for address in addresses
        )

    def host(self, process: str) -> str:
        """Return the loopback address reserved for a process."""
        if process not in self._names:
            self._names.append(process)
        high, low = divmod(self._names.index(process) + 1, 250)
        return f"{NETWORK}.{high}.{low + 1}"

    def wires(self, process: str | None = None, port: int | None = None) -> list[Wire]:
        """Return the wires of a process, or to a port, or both; all wires by default."""
        return [
            wire
            for (name, to), wire in self._wires.items()
            if process in (None, name) and port in (None, to)
        ]

    def cut(self, wires: Iterable[Wire], *, up: bool, down: bool, change: int = 1) -> None:
        """Silently block these directions. ``change=-1`` removes one earlier cut."""
        cut = list(wires)

        def update() -> None:
            for wire in cut:
                wire.cuts["up"] += change * up
                wire.cuts["down"] += change * down
                wire.changed.set()

        self._do(update)

    def heal(self, wires: Iterable[Wire], *, up: bool, down: bool) -> None:
        self.cut(wires, up=up, down=down, change=-1)

    def break_connections(self, wires: Iterable[Wire]) -> None:
        """Break all connections and lose the data in flight. New connections work at once."""
        pipes = [pipe for wire in wires for pipe in list(wire.pipes)]

        def break_all() -> None:
            for pipe in pipes:
                pipe.break_off()

        self._do(break_all)

    def close(self) -> None:
        if self._thread.is_alive():
            self._wait(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _open(self, process: str, address: str) -> str:
        port = urlsplit(address).port
        assert port is not None, "a shard's address names its port"
        host = self.host(process)
        wire = Wire(process, port, self._choices.fork(f"{process}/{port}"))
        try:
            server = await asyncio.start_server(self._accepting(wire), host, port)
        except OSError as error:
            raise TransportError(
                f"the links of {process} cannot listen on {host}:{port} "
                f"({error.strerror or error}): a scenario with links needs Linux's loopback network"
            ) from error
        self._wires[process, port] = wire
        self._servers.append(server)
        return url_of(host, port)

    def _accepting(self, wire: Wire) -> Callable[..., None]:
        async def serve(pipe: Pipe, reader: asyncio.StreamReader) -> None:
            wire.pipes.add(pipe)
            try:
                await pipe.run(reader)
            finally:
                wire.pipes.discard(pipe)

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(serve(Pipe(wire, writer), reader))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return accept

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _do(self, work: Callable[[], object]) -> None:
        async def once() -> None:
            work()

        self._wait(once())

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _any(shares: Iterable[float]) -> float:
    """Return the probability that at least one of several independent events happens."""
    none = 1.0
    for share in shares:
        none *= 1.0 - share
    return 1.0 - none
