"""Checks of a server from this machine, step by step, without taking part in the run.

The steps are: name, TCP, `/healthz`, `/run`, an idle WebSocket, round trips, and the rate of the
data plane in both directions. Each step has a time limit; the first failure ends the check.
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

from decoupled_diloco.transport.http_client import (
    close_session,
    encryption_problem,
    new_session,
    read_answer,
)
from decoupled_diloco.transport.http_server import CONTROL, RUN
from decoupled_diloco.transport.probe import PROBE, PROBE_BYTES_MAX
from decoupled_diloco.transport.routing import proxy_for, way_to
from decoupled_diloco.transport.tls import TLSConfig, require_used
from decoupled_diloco.units import KIB, MIB

NAME_SECONDS = 2.0
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 3.0
ANSWER_BYTES_MAX = 4 * MIB
ROUND_TRIPS = 10
ROUND_TRIPS_SECONDS = 1.0

RATE_SECONDS = 1.0
"""Duration of the rate measurement in one direction."""

RATE_BYTES_MAX = 16 * MIB
"""Maximum bytes in one direction. They are enough to measure a fast link, and keep the server busy
for no longer than a few payloads do."""

FIRST_BYTES = 16 * KIB
SLOW_SECONDS = 0.2
"""Requests grow while they take less than this, so that a slow link is not kept busy for long."""

FAR_SECONDS = 0.005
STREAMS_FAR = 8
"""Connections on a link with a longer round trip, where the rate of a single one says little about
striped payloads."""

Cause = Literal[
    "name",  # the host has no address
    "refused",  # nothing listens on the port
    "unreachable",  # no route, or a firewall that rejects
    "timeout",  # no reply from the host
    "silent",  # the connection is accepted, but nothing answers
    "tls",  # the TLS handshake failed
    "stranger",  # another program answers
    "token",  # the token is rejected
    "older",  # an older version that does not support the request
    "busy",  # the server is busy with other measurements
    "broken",  # the connection was lost
]

_T = TypeVar("_T")


class LookTrouble(Exception):
    """Why a check ended: the step that failed, the kind of failure, and a description."""

    def __init__(self, step: str, cause: Cause, text: str) -> None:
        super().__init__(text)
        self.step, self.cause, self.text = step, cause, text


@dataclass
class Seen:
    """Results of the checks of one server; `None` for steps that were not reached."""

    address: str
    ip: str | None = None  # the address that its name resolves to
    connect_seconds: float | None = None
    health: Mapping[str, Any] | None = None
    # offset of the server's wall clock, with an error of half a second
    clock_ahead_seconds: float | None = None
    round_trips: tuple[float, ...] = ()  # of requests on an open connection, seconds
    run: Mapping[str, Any] | None = None  # answer of `/run`: settings, addresses, layout
    principal: str = ""  # the principal of the token; empty for the run's shared token
    upgraded: bool = False
    up_bytes_per_second: float | None = None
    down_bytes_per_second: float | None = None
    trouble: LookTrouble | None = None


async def check_server(
    address: str, token: str | None, seconds: float = 10.0, tls: TLSConfig | None = None
) -> Seen:
    """Check a server as far as it allows, for at most `seconds`.

    Raises:
        ConfigError: A file of ``tls`` cannot be used, or ``tls`` would be ignored.
    """
    require_used(tls, address)
    context = None if tls is None else tls.new_context()
    shows = tls is not None and tls.cert is not None
    seen = Seen(address)
    try:
        async with asyncio.timeout(seconds):
            await _find(seen)
            session = new_session()
            try:
                await _HttpChecks(seen, session, token, context, shows).run()
            finally:
                await close_session(session)
    except TimeoutError:
        seen.trouble = LookTrouble("time", "silent", f"too slow: not done within {seconds:.1f} s")
    except LookTrouble as trouble:
        seen.trouble = trouble
    return seen


async def listens(address: str) -> LookTrouble | None:
    """Try to open a TCP connection to a server, and return the failure, if any."""
    try:
        await _find(Seen(address))
    except LookTrouble as trouble:
        return trouble
    return None


async def _find(seen: Seen) -> None:
    """Check the name and TCP."""
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
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or too long label
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


class _HttpChecks:
    """The checks over HTTP."""

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
        self._context, self._shown = context, context if shows else None
        # A unique name: with a learner's name it could be mistaken for that learner.
        self._headers = {"X-Principal": f"doctor-{uuid.uuid4().hex[:8]}", "X-Role": "observer"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    async def run(self) -> None:
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
        """Run one step, and classify its failure."""
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
            raise LookTrouble(name, "broken", reason or f"status {error.status}") from None
        except aiohttp.ClientResponseError as error:
            raise LookTrouble(
                name, "stranger", f"the server does not speak HTTP: {error.message}"
            ) from None
        except (aiohttp.ClientError, OSError, OverflowError, ValueError, RecursionError) as error:
            problem = await encryption_problem(error, self._url, self._seen.address, self._shown)
            if problem is not None:
                raise LookTrouble(name, "tls", str(problem)) from None
            kind: Cause = "stranger" if name == "health" else "broken"
            raise LookTrouble(name, kind, str(error) or type(error).__name__) from None

    def _get(self, path: str, headers: Mapping[str, str] | None = None) -> Any:
        """Send a GET; redirects are not followed, so that the token reaches only this server."""
        url = self._url.join(URL(path))
        return self._session.get(url, allow_redirects=False, **self._way(headers or {}))

    def _way(self, headers: Mapping[str, str]) -> dict[str, Any]:
        return way_to(self._url, headers, self._context)

    async def _health(self) -> None:
        before = time.time()
        async with self._get("/healthz") as response:
            text, after = await _text(response), time.time()
            health = json.loads(text) if response.status == 200 else None
            date = response.headers.get("Date")
        if not isinstance(health, dict) or "shard" not in health:
            what = f"status {response.status}" if health is None else "not a shard's health"
            raise LookTrouble("health", "stranger", what)
        self._seen.health = health
        if date is not None:
            # The header has whole seconds; its mean error is half a second.
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
            raise LookTrouble("run", "older", f"status {response.status}: {text[:200]}")
        run = json.loads(text)
        _require(isinstance(run, dict), "the answer is not a JSON object")
        self._seen.run = run

    async def _upgrade(self) -> None:
        """Open a control connection, and close it before any message."""
        async with self._session.ws_connect(
            self._url.with_path(CONTROL), autoping=True, **self._way(self._headers)
        ):
            self._seen.upgraded = True

    async def _rate(self, move: Callable[[int], Awaitable[None]], streams: int) -> float:
        """Return the bytes per second over `streams` connections."""
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
            self._url.with_path(PROBE), data=body, **self._way(self._headers)
        ) as response:
            await _require_status(response, 204)

    async def _receive(self, count: int) -> None:
        async with self._get(f"{PROBE}?bytes={count}", self._headers) as response:
            await _require_status(response, 200)
            async for _ in response.content.iter_any():
                pass


async def _text(response: aiohttp.ClientResponse) -> str:
    """Return the answer of an arbitrary server as text."""
    answer = await read_answer(response, ANSWER_BYTES_MAX)
    if answer is None:
        raise ValueError(f"the answer exceeds {ANSWER_BYTES_MAX} bytes")
    return answer.decode(errors="replace")


class _Busy(Exception):
    """The server is at its limit of concurrent measurements."""


async def _require_status(response: aiohttp.ClientResponse, status: int) -> None:
    if response.status == 429:
        raise _Busy(await _text(response))
    _require(response.status == status, "" if response.ok else await _text(response))


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)
