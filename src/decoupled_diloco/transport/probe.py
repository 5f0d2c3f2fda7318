"""Measuring a link: bytes to fetch and to send that belong to no body. See `HttpServer`.

GET /probe?bytes=N    N zero bytes
PUT /probe            whatever comes is thrown away; the answer comes after the last byte

Only who has a token may ask, for so many bytes and seconds at a time, so that a measurement cannot
fill a link for long; it touches neither the bodies nor their memory.
"""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from decoupled_diloco.transport.base import PIECE_BYTES
from decoupled_diloco.transport.tokens import TokenRefusal

PROBE = "/probe"

PROBE_BYTES_MAX = 4 << 20
"""Of one request: a fifth of a second at 160 Mbit/s; who wants to measure more asks again."""

PROBE_SECONDS_MAX = 5.0
"""Of one request: longer than any measurement takes."""

PROBES_MAX = 16
"""Requests at once, of all peers together: as many as a transfer's stripes."""

_ZEROS = bytes(PIECE_BYTES)


class Probes:
    """Answers the requests of measurements."""

    def __init__(self) -> None:
        self._open = 0

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request.

        Raises:
            Refusal: it is of another method or size, too slow, or one too many.
        """
        if request.method not in ("GET", "PUT"):
            raise TokenRefusal(405, f"{request.method} is not served: use GET or PUT")
        if self._open >= PROBES_MAX:
            raise TokenRefusal(
                429, f"{self._open} measurements are under way, the limit: try again"
            )
        self._open += 1
        try:
            return await (_give(request) if request.method == "GET" else _take(request))
        finally:
            self._open -= 1


async def _give(request: web.BaseRequest) -> web.StreamResponse:
    text = request.rel_url.query.get("bytes", "")
    count = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
    _check(count)
    response = web.StreamResponse()
    response.content_length = count
    try:
        async with asyncio.timeout(PROBE_SECONDS_MAX):
            await response.prepare(request)
            for start in range(0, count, PIECE_BYTES):
                await response.write(_ZEROS[: min(PIECE_BYTES, count - start)])
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # What was promised can no longer be answered otherwise.
    except ConnectionError:
        pass  # Who measures has seen enough.
    return response


async def _take(request: web.BaseRequest) -> web.StreamResponse:
    _check(request.content_length or 0)
    try:
        async with asyncio.timeout(PROBE_SECONDS_MAX):
            while await request.content.readany():
                pass
    except TimeoutError:
        raise TokenRefusal(408, f"a measurement may take {PROBE_SECONDS_MAX:g} s") from None
    except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, OSError) as error:
        raise TokenRefusal(400, f"the connection broke: {error}") from None
    return web.Response(status=204)


def _check(count: int) -> None:
    if not 0 < count <= PROBE_BYTES_MAX:
        raise TokenRefusal(413, f"a measurement moves 1 to {PROBE_BYTES_MAX} bytes, not {count}")
