"""What can be seen of a server from here, step by step, without taking part in anything.

Name, TCP, `/healthz`, `/run`, a WebSocket that says nothing, round trips, and what the data plane
moves in either direction. Each step has a limit in seconds; the first that fails ends the look.
"""

from __future__ import annotations

import asyncio
import io
import json
import socket
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeVar

import aiohttp
from yarl import URL

from decoupled_diloco.transport.http_server import CONTROL, RUN
from decoupled_diloco.transport.probe import PROBE, PROBE_BYTES_MAX
from decoupled_diloco.transport.tls import Tls, hung_up_problem, require_used, tls_problem
from decoupled_diloco.transport.ways import proxy_for, way_to
from decoupled_diloco.units import KIB, MIB

NAME_SECONDS = 2.0
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 3.0
ANSWER_BYTES_MAX = 4 * MIB
ROUND_TRIPS = 10
ROUND_TRIPS_SECONDS = 1.0

RATE_SECONDS = 1.0
"""How long bytes are moved in one direction."""

RATE_BYTES_MAX = 16 * MIB
"""Moved in one direction at most: a fast link is known by then, and the server busy for no longer
than by a few bodies."""

FIRST_BYTES = 16 * KIB
SLOW_SECONDS = 0.2
"""Requests grow for as long as they take less, so that a slow link is not kept busy for long."""

FAR_SECONDS = 0.005
STREAMS_FAR = 8
"""Connections on a link with a longer round trip: one alone says little about what striped bodies
get there."""

Cause = Literal[
    "name",  # the host has no address
    "refused",  # nothing listens there
    "unreachable",  # no route, or a firewall that says so
    "timeout",  # nothing comes back from the host
    "silent",  # the connection is taken, and nothing is answered
    "tls",  # no agreement on encryption
    "stranger",  # something else answers
    "token",  # it does not accept the token
    "older",  # it does not know the question
    "busy",  # it answers others, and says so
    "broken",  # the connection broke
]

_T = TypeVar("_T")


class LookTrouble(Exception):
    """Why a look ended: the step that failed, the kind of failure, its words."""

    def __init__(self, step: str, cause: Cause, text: str) -> None:
        super().__init__(text)
        self.step, self.cause, self.text = step, cause, text


@dataclass
class Seen:
    """What was seen of one server; `None` where the look did not get so far."""

    address: str
    ip: str | None = None  # what its name stands for
    connect_seconds: float | None = None
    health: Mapping[str, Any] | None = None
    # of the server's wall clock, plus or minus half a second
    clock_ahead_seconds: float | None = None
    round_trips: tuple[float, ...] = ()  # of requests on an open connection, seconds
    run: Mapping[str, Any] | None = None  # what `/run` says: settings, addresses, layout
    principal: str = ""  # the id that the token is for; empty if it is the run's shared one
    upgraded: bool = False
    up_bytes_per_second: float | None = None
    down_bytes_per_second: float | None = None
    trouble: LookTrouble | None = None


async def look(
    address: str, token: str | None, seconds: float = 10.0, tls: Tls | None = None
) -> Seen:
    """Looks at a server as far as it lets us, for so many seconds at most.

    Raises:
        ConfigError: A file of ``tls`` cannot be used, or it would be ignored.
    """
    require_used(tls, address)
    context = None if tls is None else tls.new_context()
    shows = tls is not None and tls.certificate is not None
    seen = Seen(address)
    try:
        async with asyncio.timeout(seconds):
            await _find(seen)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(timeout=timeout) as session:
                await _Look(seen, session, token, context, shows).go()
    except TimeoutError:
        seen.trouble = LookTrouble("time", "silent", f"too slow: not done within {seconds:.1f} s")
    except LookTrouble as trouble:
        seen.trouble = trouble
    return seen


async def listens(address: str) -> LookTrouble | None:
    """Whether a TCP connection to a server can be had; what is in the way."""
    try:
        await _find(Seen(address))
    except LookTrouble as trouble:
        return trouble
    return None


async def _find(seen: Seen) -> None:
    """Name and TCP."""
    try:
        url = URL(seen.address)
    except ValueError as error:
        raise LookTrouble("name", "name", f"{seen.address!r}: {error}") from None
    url = proxy_for(url) or url
    host, port = url.host or "", url.port or 80
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(NAME_SECONDS):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise LookTrouble("name", "name", f"{host!r}: no name server answers") from None
    except (OSError, UnicodeError) as error:  # No name has an empty part, or one that long.
        reason = getattr(error, "strerror", None) or error
        raise LookTrouble("name", "name", f"{host!r}: {reason}") from None
    seen.ip = str(found[0][4][0])
    begun = time.monotonic()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        text = f"no answer from {host}:{port} within {CONNECT_SECONDS:g} s"
        raise LookTrouble("connect", "timeout", text) from None
    except ConnectionRefusedError:
        raise LookTrouble("connect", "refused", f"nothing listens on {host}:{port}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise LookTrouble("connect", "unreachable", f"{host}:{port}: {reason}") from None
    seen.connect_seconds = time.monotonic() - begun
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


class _Look:
    """The steps over HTTP."""

    def __init__(
        self,
        seen: Seen,
        session: aiohttp.ClientSession,
        token: str | None,
        context: ssl.SSLContext | None,
        shows: bool,
    ) -> None:
        self._seen = seen
        self._session = session
        self._url = URL(seen.address).origin()
        self._way, self._shown = way_to(self._url, context), context if shows else None
        # A name of its own: under a learner's, it could be taken for it.
        self._headers = {"X-Principal": f"doctor-{uuid.uuid4().hex[:8]}", "X-Role": "observer"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    async def go(self) -> None:
        await self._step("health", self._health)
        await self._step("round trip", self._round_trips)
        await self._step("run", self._run)
        await self._step("control", self._upgrade)
        streams = STREAMS_FAR if min(self._seen.round_trips, default=0.0) > FAR_SECONDS else 1
        up = await self._step("up", lambda: self._rate(self._send, streams))
        self._seen.up_bytes_per_second = up
        down = await self._step("down", lambda: self._rate(self._receive, streams))
        self._seen.down_bytes_per_second = down

    async def _step(self, name: str, work: Callable[[], Awaitable[_T]]) -> _T:
        """Gives whatever goes wrong a name."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await work()
        except TimeoutError:
            text = f"no answer within {ANSWER_SECONDS:g} s"
            raise LookTrouble(name, "silent", text) from None
        except _Busy as busy:
            raise LookTrouble(name, "busy", str(busy)) from None
        except aiohttp.WSServerHandshakeError as error:
            reason = error.headers.get("X-Reason") if error.headers else None
            raise LookTrouble(name, "broken", reason or f"it answered {error.status}") from None
        except aiohttp.ClientResponseError as error:
            raise LookTrouble(
                name, "stranger", f"it does not speak HTTP: {error.message}"
            ) from None
        except (aiohttp.ClientError, OSError, OverflowError, ValueError, RecursionError) as error:
            problem = tls_problem(error, self._seen.address)
            if isinstance(error, ConnectionResetError | aiohttp.ServerDisconnectedError):
                problem = await hung_up_problem(self._url, self._seen.address, self._shown)
            if problem is not None:
                raise LookTrouble(name, "tls", str(problem)) from None
            kind: Cause = "stranger" if name == "health" else "broken"
            raise LookTrouble(name, kind, str(error) or type(error).__name__) from None

    def _get(self, path: str, headers: Mapping[str, str] | None = None) -> Any:
        """A redirection is an answer like any other: the token goes to this server only."""
        url = self._url.join(URL(path))
        return self._session.get(url, headers=headers, allow_redirects=False, **self._way)

    async def _health(self) -> None:
        before = time.time()
        async with self._get("/healthz") as response:
            text, after = await _text(response), time.time()
            health = json.loads(text) if response.status == 200 else None
            date = response.headers.get("Date")
        if not isinstance(health, dict) or "shard" not in health:
            what = f"it answered {response.status}" if health is None else "no shard's health"
            raise LookTrouble("health", "stranger", what)
        self._seen.health = health
        if date is not None:
            # The header counts whole seconds: half a second off in the mean.
            theirs = parsedate_to_datetime(date).timestamp() + 0.5
            self._seen.clock_ahead_seconds = theirs - (before + after) / 2

    async def _round_trips(self) -> None:
        seconds: list[float] = []
        until = time.monotonic() + ROUND_TRIPS_SECONDS
        while len(seconds) < ROUND_TRIPS and (not seconds or time.monotonic() < until):
            begun = time.monotonic()
            async with self._get("/healthz") as response:
                await response.read()
            seconds.append(time.monotonic() - begun)
        self._seen.round_trips = tuple(seconds)

    async def _run(self) -> None:
        for _ in range(2):
            async with self._get(RUN, self._headers) as response:
                text = await _text(response)
                owner = response.headers.get("X-Principal")
            if response.status != 403 or owner is None:
                break
            self._headers["X-Principal"] = self._seen.principal = owner
        if response.status in (401, 403):
            raise LookTrouble("run", "token", text)
        if response.status != 200:
            raise LookTrouble("run", "older", f"it answered {response.status}: {text[:200]}")
        run = json.loads(text)
        _require(isinstance(run, dict), "the answer is no JSON object")
        self._seen.run = run

    async def _upgrade(self) -> None:
        """Opens a control connection and closes it before a word is said."""
        async with self._session.ws_connect(
            self._url.with_path(CONTROL), headers=self._headers, autoping=True, **self._way
        ):
            self._seen.upgraded = True

    async def _rate(self, move: Callable[[int], Awaitable[None]], streams: int) -> float:
        """Bytes a second over so many connections."""
        begun, moved = time.monotonic(), FIRST_BYTES
        await move(FIRST_BYTES)
        if (seconds := time.monotonic() - begun) > SLOW_SECONDS:
            return FIRST_BYTES / seconds

        async def stream() -> None:
            nonlocal moved
            size = FIRST_BYTES
            while moved < RATE_BYTES_MAX and time.monotonic() < begun + RATE_SECONDS:
                started = time.monotonic()
                await move(size)
                moved += size
                if time.monotonic() - started < SLOW_SECONDS:
                    size = min(2 * size, PROBE_BYTES_MAX)

        await asyncio.gather(*(stream() for _ in range(streams)))
        return moved / (time.monotonic() - begun)

    async def _send(self, count: int) -> None:
        body = io.BytesIO(bytes(count))
        async with self._session.put(
            self._url.with_path(PROBE), data=body, headers=self._headers, **self._way
        ) as response:
            await _require_status(response, 204)

    async def _receive(self, count: int) -> None:
        async with self._get(f"{PROBE}?bytes={count}", self._headers) as response:
            await _require_status(response, 200)
            async for _ in response.content.iter_any():
                pass


async def _text(response: aiohttp.ClientResponse) -> str:
    """An answer of a server that may be anything."""
    pieces = bytearray()
    async for piece in response.content.iter_any():
        pieces += piece
        _require(len(pieces) <= ANSWER_BYTES_MAX, "its answer does not end")
    return pieces.decode(errors="replace")


class _Busy(Exception):
    """The server has as many measurements under way as it lets be."""


async def _require_status(response: aiohttp.ClientResponse, status: int) -> None:
    if response.status == 429:
        raise _Busy(await _text(response))
    _require(response.status == status, "" if response.ok else await _text(response))


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)
