"""The live page at a real server, and a plain client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from decoupled_diloco.show.page.feed import Feed
from decoupled_diloco.show.page.site import Access, Site
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.tokens import Tokens


class Wall:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 1_000_000_000.0

    def __call__(self) -> float:
        return self.seconds


async def no_channel(channel: Channel) -> None:
    """Handle no channel; no learner connects."""


@asynccontextmanager
async def served(
    tokens: Tokens, wall: Wall | None = None, feed: Feed | None = None, first: str = "http://h:1"
) -> AsyncIterator[str]:
    access = Access(tokens, wall or Wall())
    feed_of = None if feed is None else lambda names: feed
    site = Site(access, feed_of, first, lambda: {"how": "stopped", "step": 0, "folder": "run"})
    server = HttpServer(tokens=tokens, on_channel=no_channel, website=site)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


def browser() -> aiohttp.ClientSession:
    """A client that keeps cookies of numeric hosts, as browsers do, and follows no redirects."""
    return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))


def quiet() -> Feed:
    """A feed whose process sends nothing."""
    return Feed({}, ("cat",))
