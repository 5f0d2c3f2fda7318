"""Links between processes of this machine that can be cut, slowed down and spoilt, in user space.

Each process dials the shards by a loopback address of its own (127.77.x.y), at which this module
listens with the shards' own ports and passes on what comes. A *wire* is one process's way to one
shard; all connections over it share its fate. TCP's own promise stays: what is lost comes later,
in order; only what is corrupt arrives as it was not sent.

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
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.network import resend_seconds

_T = TypeVar("_T")
Way = Literal["up", "down"]

PIECE_BYTES = 16 << 10
"""What is read at once, and lost or spoilt together."""

PIECES_MAX = 64
"""Pieces under way in one direction of a connection: a window of 1 MiB, as TCP's."""

NETWORK = "127.77"


@dataclass(eq=False)
class Wire:
    """One process's way to one shard."""

    process: str
    port: int
    choices: Choices
    delay_seconds: float = 0.0  # one way
    jitter_seconds: float = 0.0  # further delay of each piece, uniform between 0 and this
    # shares of what has to be sent again, of everything that strikes it
    losses: list[float] = field(default_factory=list)
    corruptions: list[float] = field(default_factory=list)  # shares of what is spoilt
    cuts: Counter[Way] = field(default_factory=Counter)  # how many cuts silence a direction
    pipes: set[Pipe] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def passes(self, way: Way) -> None:
        """Returns when nothing silences this direction."""
        while self.cuts[way] > 0:
            self.changed.clear()
            await self.changed.wait()

    def late_seconds(self) -> float:
        """How long a piece is under way."""
        seconds = self.delay_seconds + resend_seconds(_any(self.losses), self.choices)
        jitter = self.jitter_seconds
        return seconds + self.choices.uniform(0.0, jitter) if jitter else seconds

    def spoilt(self, piece: bytes) -> bytes:
        """The piece as it arrives: one byte of it is another one, if chance wants."""
        if not self.choices.chance(_any(self.corruptions)):
            return piece
        place = self.choices.integer(0, len(piece) - 1)
        return piece[:place] + bytes([piece[place] ^ 0x55]) + piece[place + 1 :]


class Pipe:
    """One connection over a wire: two streams, each passed on in order."""

    def __init__(self, wire: Wire, dialer: asyncio.StreamWriter) -> None:
        self.wire = wire
        self._writers = [dialer]

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Passes on what comes until both ends are done or the connection breaks."""
        wire, dialer = self.wire, self._writers[0]
        try:
            await wire.passes("up")
            far, acceptor = await asyncio.open_connection("127.0.0.1", wire.port)
            self._writers.append(acceptor)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry("up", reader, acceptor))
                group.create_task(self._carry("down", far, dialer))
        except* OSError:
            await wire.passes("down")  # the dialer hears of it as of anything else
            self.break_off()
        finally:
            for writer in self._writers:
                writer.close()

    def break_off(self) -> None:
        """Breaks the connection: both ends are told that it is reset."""
        for writer in self._writers:
            own = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # one end may be gone already
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _carry(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_MAX)
        clock = asyncio.get_running_loop().time

        async def deliver() -> None:
            while True:
                arrives_at, piece = await under_way.get()
                await asyncio.sleep(max(0.0, arrives_at - clock()))
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
                await under_way.put((arrives_at, self.wire.spoilt(piece) if piece else piece))


class Links:
    """All wires, and the thread that serves them. Its methods are called from other threads.

    Args:
        seed: What is lost or spoilt follows from it, as far as the order of things does.
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
        """What a process dials instead of these addresses, from now on."""
        return tuple(
            BETWEEN.join(self._wait(self._open(process, one)) for one in alternatives(address))
            for address in addresses
        )

    def host(self, process: str) -> str:
        """The loopback address that is a process's own."""
        if process not in self._names:
            self._names.append(process)
        high, low = divmod(self._names.index(process) + 1, 250)
        return f"{NETWORK}.{high}.{low + 1}"

    def wires(self, process: str | None = None, port: int | None = None) -> list[Wire]:
        """The wires of a process, to a port, or all."""
        return [
            wire
            for (name, to), wire in self._wires.items()
            if process in (None, name) and port in (None, to)
        ]

    def cut(self, wires: Iterable[Wire], *, up: bool, down: bool, change: int = 1) -> None:
        """Nothing passes any more in these directions; silently. A change of -1 takes it back."""
        cut = list(wires)

        def turn() -> None:
            for wire in cut:
                wire.cuts["up"] += change * up
                wire.cuts["down"] += change * down
                wire.changed.set()

        self._do(turn)

    def heal(self, wires: Iterable[Wire], *, up: bool, down: bool) -> None:
        self.cut(wires, up=up, down=down, change=-1)

    def break_connections(self, wires: Iterable[Wire]) -> None:
        """Connections are lost with what is under way; new ones can be made at once."""
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
    """The probability that at least one of several independent things happens."""
    none = 1.0
    for share in shares:
        none *= 1.0 - share
    return 1.0 - none
