"""The page at a shard's port: its few files, the sign-in, and the events that keep it up to date.

GET  /                the page, or the form to sign in; shards other than 0 lead to shard 0
GET  /page/NAME       a file of the page; nothing is fetched from anywhere else
GET  /page/events     what the page shows, as server-sent events
POST /page/sign-in    takes the run's secret once
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from aiohttp import web

from decoupled_diloco.config.addresses import alternatives, reached_by
from decoupled_diloco.observe.charts import DARK, LIGHT
from decoupled_diloco.page.access import Access
from decoupled_diloco.page.feed import Feed
from decoupled_diloco.transport.tokens import RequestRefusal

ROOT, PREFIX = "/", "/page/"
EVENTS, SIGN_IN, COLORS = "/page/events", "/page/sign-in", "/page/colors.css"

VIEWERS_MAX = 32
"""Pages that are kept up to date at once."""

HEARTBEAT_SECONDS = 10.0
"""After so long without news a viewer is told that the connection lives."""

STALL_SECONDS = 30.0
"""A viewer that takes nothing for so long is let go."""

RETRY_MILLISECONDS = 1000
"""After so long a browser dials again."""

FILES = {
    "page.css": ("decoupled_diloco.observe", "page.css", "text/css"),
    "live.css": ("decoupled_diloco.page", "static/live.css", "text/css"),
    "live.js": ("decoupled_diloco.page", "static/live.js", "text/javascript"),
    "charts.js": ("decoupled_diloco.page", "static/charts.js", "text/javascript"),
    "icon.svg": ("decoupled_diloco.page", "static/icon.svg", "image/svg+xml"),
}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

ALL_WATCH = (
    f"{VIEWERS_MAX} pages of this run are open, the limit: close one; ddiloco watch needs none"
)


class Site:
    """Answers browsers; a `Website`.

    Args:
        access: Who may see it.
        feed: What it shows; ``None``: this shard only leads to the first one.
        first: Where shard 0 is, as learners are told.
        ending: How the run stands, asked when the server stops; see `farewell`.
    """

    def __init__(
        self,
        access: Access,
        feed: Feed | None,
        first: str,
        ending: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._access, self._feed = access, feed
        self._first, self._ending = first, ending

    def serves(self, path: str) -> bool:
        return path == ROOT or path.startswith(PREFIX)

    def knows(self, request: web.BaseRequest) -> bool:
        return self._access.knows(request)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self._access.check_origin(request)
        path, method = request.rel_url.raw_path, request.method
        if (path, method) == (SIGN_IN, "POST"):
            return await self._sign_in(request)
        if method != "GET":
            raise RequestRefusal(405, f"{method} is not served here: use GET")
        if self._feed is None and path == ROOT:
            return self._elsewhere(request)
        if path == COLORS:
            return _text(_colors(), "text/css")
        if path.startswith(PREFIX) and (name := path.removeprefix(PREFIX)) in FILES:
            package, place, kind = FILES[name]
            return _text(_file(package, place), kind)
        if path not in (ROOT, EVENTS):
            raise RequestRefusal(404, f"there is no page at {path[:200]}")
        if not self._access.knows(request):
            if path == EVENTS:
                raise RequestRefusal(401, "sign in first")
            return _form("", 401)
        if path == ROOT:
            return _text(_file("decoupled_diloco.page", "static/index.html"), "text/html")
        return await self._events(request)

    async def _sign_in(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = web.Response(status=303, headers={**HEADERS, "Location": ROOT})
        try:
            await self._access.sign_in(request, answer)
        except RequestRefusal as refusal:
            return _form(refusal.text, refusal.status, refusal.headers)
        return answer

    def _elsewhere(self, request: web.BaseRequest) -> web.StreamResponse:
        """Leads to the shard that has the page, at the host that the browser has dialled."""
        here = f"{request.scheme}://{request.headers.get('Host', '')}"
        there = reached_by(alternatives(self._first)[0], here)
        return web.Response(status=303, headers={**HEADERS, "Location": f"{there}/"})

    async def _events(self, request: web.BaseRequest) -> web.StreamResponse:
        feed = self._feed
        if feed is None:
            raise RequestRefusal(404, "shard 0 has the page")
        if feed.viewers >= VIEWERS_MAX:
            raise RequestRefusal(503, ALL_WATCH)
        with feed.looked_at():
            response = web.StreamResponse(headers=HEADERS)
            response.content_type = "text/event-stream"
            await response.prepare(request)
            number = feed.number_in(request.headers.get("Last-Event-ID", ""))
            try:
                await _tell(feed, number, response)
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
            except ConnectionError:
                pass  # it looks no more
        return response

    async def farewell(self) -> None:
        """Tells all who look how the run stands."""
        if self._feed is not None:
            await self._feed.end(self._ending())


async def _tell(feed: Feed, number: int | None, response: web.StreamResponse) -> None:
    """Tells a viewer all that happens; nobody waits for it."""
    await response.write(f"retry: {RETRY_MILLISECONDS}\n\n".encode())
    while True:
        news = await feed.after(number, HEARTBEAT_SECONDS)
        events = [feed.event(message) for message in news] or [b": nothing new\n\n"]
        async with asyncio.timeout(STALL_SECONDS):
            await response.write(b"".join(events))
        if news:
            number = news[-1].number
            if news[-1].kind == "end":
                return


def _form(problem: str, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    page = _file("decoupled_diloco.page", "static/sign-in.html")
    told = f'<p class="problem" role="alert">{html.escape(problem)}</p>' if problem else ""
    return _text(page.replace("<!-- problem -->", told), "text/html", status, headers)


def _text(
    text: str, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    every = {**HEADERS, **(headers or {})}
    return web.Response(text=text, content_type=kind, charset="utf-8", status=status, headers=every)


def _file(package: str, place: str) -> str:
    return files(package).joinpath(place).read_text(encoding="utf-8")


def _colors() -> str:
    """The report's colours: light, dark, as the system prefers or as the reader chooses."""
    light, dark = (
        f"color-scheme: {{}}; {' '.join(f'--{name}: {color};' for name, color in colors.items())}"
        for colors in (LIGHT, DARK)
    )
    prefers_dark = "@media (prefers-color-scheme: dark)"
    return "\n".join(
        (
            f":root {{ {light.format('light dark')} }}",
            f"{prefers_dark} {{ :root {{ {dark.format('light dark')} }} }}",
            f":root:has(#colors-dark:checked) {{ {dark.format('dark')} }}",
            f"{prefers_dark} {{ :root:has(#colors-light:checked) {{ {light.format('light')} }} }}",
        )
    )
