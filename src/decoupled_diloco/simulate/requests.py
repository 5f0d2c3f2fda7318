"""Bodies in the virtual world: requests that the process of a server handles, piece by piece."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.simulate.network import STALL_SECONDS
from decoupled_diloco.simulate.runtime import VirtualProcess
from decoupled_diloco.transport.bodies import PREFIX
from decoupled_diloco.transport.ranges import Range, RangeSet, Window
from decoupled_diloco.transport.tokens import RequestRefusal, refusal_error

if TYPE_CHECKING:
    from decoupled_diloco.simulate.transport import VirtualClient, VirtualServer

PIECES = 4
"""A range of a body is moved in so many pieces at least; what has arrived is not sent again."""

PIECE_SECONDS = 1.0
"""No piece takes the whole link for longer: bodies on one link share it, and none stands still."""

Serve = Callable[["VirtualServer", "Request"], Coroutine[Any, Any, None]]


class Request:
    """One request of a client to a server, while it lasts.

    The server's side runs in the server's process. Whatever goes wrong, the client hears of it.
    """

    _numbers = itertools.count()

    def __init__(self, client: VirtualClient, address: str) -> None:
        self.address = address
        self.client = client.place
        self.target = client.place.world.find(address)
        self.principal, self.token = client.identity(address)
        loop = client.place.process.loop
        assert loop is not None
        self.answer: asyncio.Future[Any] = loop.create_future()
        self._life = client.place.process.life
        self._number = next(self._numbers)
        self._answers = False

    async def run(self, serve: Serve) -> Any:
        """Sends the request; returns what the server replies.

        Raises:
            RequestRefusal: The server refuses.
            TransportError: The connection broke.
        """
        self.target.requests[self._number] = self.fail

        def reach() -> None:
            server = self.target.servers.get(self.address)
            if server is None:
                self.fail("nobody listens there")
            else:
                server.handle(serve(server, self))

        try:
            self._carry(self.client.process, self.target.process, reach)
            return await self.answer
        finally:
            self.target.requests.pop(self._number, None)

    def reply(self, result: Any) -> None:
        """The server's answer is on its way; an exception is raised at the client."""

        def here() -> None:
            if self.answer.done():
                return
            if isinstance(result, Exception):
                self.answer.set_exception(result)
            else:
                self.answer.set_result(result)

        self._carry(self.target.process, self.client.process, here)

    def fail(self, reason: str) -> None:
        """The connection is lost: the client notices."""
        client = self.client.process

        def here() -> None:
            if not self.answer.done():
                self.answer.set_exception(TransportError(f"{self.address}: {reason}"))

        client.run(self._life, False, here, ())

    def rate(self, *, up: bool) -> float:
        """What the links carry at present, bytes a second."""
        sender, receiver = self._ends(up=up)
        return min(sender.link.up_bytes_per_second, receiver.link.down_bytes_per_second)

    def _ends(self, *, up: bool) -> tuple[VirtualProcess, VirtualProcess]:
        client, target = self.client.process, self.target.process
        return (client, target) if up else (target, client)

    async def piece(self, nbytes: int, share: float, *, up: bool) -> bool:
        """Moves so many bytes, a share of a range; whether they got there."""
        streets = self.client.world
        if streets.choices.chance(streets.loss * share):
            self.fail("the connection was lost")
            return False
        loop = self.target.process.loop
        assert loop is not None
        moved: asyncio.Future[bool] = loop.create_future()
        target, life = self.target.process, self.target.process.life

        def done(arrived: bool) -> None:
            def here() -> None:
                if not moved.done():
                    moved.set_result(arrived)

            target.run(life, False, here, ())
            if not arrived:
                self.fail("the connection was lost")

        self.client.network.transfer(
            *self._ends(up=up),
            nbytes,
            lambda: done(True),
            lambda: done(False),
            follows=up or self._answers,  # a body goes up right behind its request
        )
        self._answers = True
        return await moved

    def arrived(self, body: memoryview | Window, left: int, right: int) -> memoryview | bytes:
        """A piece of a body as it is when it arrives; a link corrupts its share of all bodies."""
        client, target = self.client.process.link, self.target.process.link
        whole = (1 - client.corruption) * (1 - target.corruption)
        corruption = 1 - whole ** ((right - left) / len(body))
        return self.client.world.arrived(body[left:right], corruption)

    def _carry(
        self, sender: VirtualProcess, receiver: VirtualProcess, then: Callable[[], None]
    ) -> None:
        network, lives = self.client.network, (sender.life, receiver.life)
        clockwork = network.clockwork

        def arrive(stalled: float) -> None:
            if not receiver.alive or receiver.life != lives[1]:
                self.fail("nobody answers")
            elif network.is_cut(sender, receiver):
                if stalled >= STALL_SECONDS:
                    self.fail(f"nothing moved for {STALL_SECONDS:g} s")
                else:
                    clockwork.after(1.0, arrive, stalled + 1.0)
            else:
                receiver.run(receiver.life, False, then, ())

        clockwork.after(network.delay(sender, receiver), arrive, 0.0)


def _pieces(start: int, stop: int, rate: float) -> list[Range]:
    step = max(1, -(-(stop - start) // PIECES))
    if step > rate * PIECE_SECONDS:
        step = max(1, int(rate * PIECE_SECONDS))
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]


class Put:
    """Writes the ranges of one body into the server's books."""

    digest = ""

    def __init__(self, client: VirtualClient, address: str, key: str, body: Window) -> None:
        self._client, self._address, self._key, self._body = client, address, key, body

    async def move(self, start: int, stop: int, resumed: bool) -> None:
        """See `Mover`."""

        async def serve(server: VirtualServer, request: Request) -> None:
            try:
                principal = server.authorize(request.principal, request.token)
                stream = server.bodies.open(
                    self._key, principal, (start, stop), len(self._body), resumed
                )
            except RequestRefusal as refusal:
                request.reply(refusal)
                return
            try:
                async with stream.receiving():
                    for left, right in _pieces(start, stop, request.rate(up=True)):
                        share = (right - left) / (stop - start)
                        if not await request.piece(right - left, share, up=True):
                            return
                        stream.write(request.arrived(self._body, left, right))
                        self._client.stats.data_bytes_sent += right - left
                        server.stats.data_bytes_received += right - left
                    stream.finish()
                    request.reply(None)
            except RequestRefusal as refusal:
                request.reply(refusal)

        await _ask(self._client, self._address, self._key, serve)

    async def gaps(self, start: int, stop: int) -> list[Range]:
        """See `Mover`."""

        async def serve(server: VirtualServer, request: Request) -> None:
            try:
                principal = server.authorize(request.principal, request.token)
                request.reply(server.bodies.state(self._key, principal))
            except RequestRefusal as refusal:
                request.reply(refusal)

        state, received = await _ask(self._client, self._address, self._key, serve)
        return [] if state == "arrived" else RangeSet(received).missing(start, stop)


class Get:
    """Reads the ranges of one offer."""

    def __init__(self, client: VirtualClient, address: str, key: str, out: Window) -> None:
        self.digest = ""
        self._client, self._address, self._key, self._out = client, address, key, out
        self._arrived = RangeSet()

    async def move(self, start: int, stop: int, resumed: bool) -> None:
        """See `Mover`."""

        async def serve(server: VirtualServer, request: Request) -> None:
            try:
                principal = server.authorize(request.principal, request.token)
                offer = server.bodies.look_up(self._key)
                if len(offer.body) != len(self._out):
                    text = f"the body has {len(offer.body)} bytes, {len(self._out)} are wanted"
                    request.reply(ProtocolError(f"GET {self._key}: {text}"))
                    return
                download = server.bodies.fetch(self._key, principal, (start, stop))
            except RequestRefusal as refusal:
                request.reply(refusal)
                return
            try:
                for left, right in _pieces(start, stop, request.rate(up=False)):
                    share = (right - left) / (stop - start)
                    if not await request.piece(right - left, share, up=False):
                        return
                    self._out[left:right] = request.arrived(offer.body, left, right)
                    self._arrived.add(left, right)
                    download.sent(right - left)
                    server.stats.data_bytes_sent += right - left
                    self._client.stats.data_bytes_received += right - left
                request.reply(offer.digest)
            finally:
                download.close()

        self.digest = await _ask(self._client, self._address, self._key, serve)

    async def gaps(self, start: int, stop: int) -> list[Range]:
        """See `Mover`."""
        return self._arrived.missing(start, stop)


async def _ask(client: VirtualClient, address: str, key: str, serve: Serve) -> Any:
    try:
        return await Request(client, address).run(serve)
    except RequestRefusal as refusal:
        raise refusal_error(refusal.status, refusal.text, f"{address}{PREFIX}{key}") from None
