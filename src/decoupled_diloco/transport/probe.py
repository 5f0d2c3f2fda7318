"""Link measurement: requests whose bytes belong to no payload. See `HttpServer`.

GET /probe?bytes=N    N zero bytes
PUT /probe            the body is discarded; the answer follows after its last byte

Only a peer with a token may send them. Bytes and seconds per request are limited, so that a
measurement cannot fill a link for long. It touches neither the payloads nor their memory.
"""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from decoupled_diloco.transport.interface import PIECE_BYTES
from decoupled_diloco.transport.tokens import RequestRefusal

PROBE = "/probe"

PROBE_BYTES_MAX = 4 << 20
"""Limit of one request: a fifth of a second at 160 Mbit/s. A longer measurement repeats it."""

PROBE_SECONDS_MAX = 5.0
"""Limit of one request: longer than any measurement takes."""

PROBES_MAX = 16
"""Concurrent requests of all peers together, equal to the number of a transfer's stripes."""

_ZEROS = bytes(PIECE_BYTES)


class Probes:
    """Answers measurement requests."""

    def __init__(self) -> None:
        self._open = 0

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request.

        Raises:
            RequestRefusal: Wrong method or size, too slow, or above the limit of requests.
        """
        if request.method not in ("GET", "PUT"):
            raise RequestRefusal(405, f"{request.method} is not served: use GET or PUT")
        if self._open >= PROBES_MAX:
            raise RequestRefusal(
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
            request.transport.abort()  # The announced length can no longer be sent.
    except ConnectionError:
        pass  # The peer has measured enough.
    return response


async def _take(request: web.BaseRequest) -> web.StreamResponse:
    _check(request.content_length or 0)
    try:
        async with asyncio.timeout(PROBE_SECONDS_MAX):
            while await request.content.readany():
                pass
    except TimeoutError:
        raise RequestRefusal(408, f"a measurement may take {PROBE_SECONDS_MAX:g} s") from None
    except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, OSError) as error:
        raise RequestRefusal(400, f"the connection was lost: {error}") from None
    return web.Response(status=204)


def _check(count: int) -> None:
    if not 0 < count <= PROBE_BYTES_MAX:
        raise RequestRefusal(
            413, f"bytes={count} must be from 1 to {PROBE_BYTES_MAX}: split the measurement"
        )
