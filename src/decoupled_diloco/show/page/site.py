"""The page at a shard's port: its files, the sign-in, and the events that keep it up to date.

GET  /                the page, or the sign-in form; shards other than 0 redirect to shard 0
GET  /page/NAME       a file of the page; the page loads nothing from other hosts
GET  /page/events     the page's content, as server-sent events
POST /page/sign-in    accepts the run's secret

`Access` controls admission. A viewer enters the run's secret once, in the sign-in form. The browser
then holds a pass in a cookie, which scripts cannot read and other sites cannot send. The pass does
not contain the secret: it is an expiry time, the name that the secret proves, and a code that only
a process with the secret can compute. A pass therefore survives a restart of the syncer, is valid
at every shard, and becomes invalid when the secret changes.

If client certificates are required, a browser needs one; without a secret it needs nothing else. A
server with neither listens on loopback only. It answers every request to a loopback name, and no
others, because another site could resolve its own name to this machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import html
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from decoupled_diloco.config.addresses import alternatives, reached_by
from decoupled_diloco.show.charts import DARK, LIGHT
from decoupled_diloco.show.page.feed import Feed
from decoupled_diloco.transport.tls import names_of
from decoupled_diloco.transport.tokens import RequestRefusal, Tokens, is_loopback

ROOT, PREFIX = "/", "/page/"
EVENTS, SIGN_IN, COLORS = "/page/events", "/page/sign-in", "/page/colors.css"

VIEWERS_MAX = 32
"""Maximum number of open pages."""

HEARTBEAT_SECONDS = 10.0
"""Interval of comments that keep an idle connection alive."""

STALL_SECONDS = 30.0
"""A viewer that receives nothing for this time is disconnected."""

RETRY_MILLISECONDS = 1000
"""Delay before a browser reconnects."""

FILES = {
    "page.css": ("decoupled_diloco.show", "page.css", "text/css"),
    "live.css": ("decoupled_diloco.show.page", "static/live.css", "text/css"),
    "live.js": ("decoupled_diloco.show.page", "static/live.js", "text/javascript"),
    "icon.svg": ("decoupled_diloco.show.page", "static/icon.svg", "image/svg+xml"),
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

ALL_WATCH = f"{VIEWERS_MAX} pages of this run are open, the limit: close one, or use ddiloco watch"


PASS_SECONDS = 30 * 24 * 3600
"""Validity of a pass."""

ATTEMPTS_MAX = 5
"""Consecutive wrong secrets allowed from one address."""

ATTEMPT_SECONDS = 12.0
"""Interval after which one more attempt is allowed."""

ADDRESSES_MAX = 1000
"""Number of addresses whose wrong attempts are remembered, newest first."""

FORM_BYTES_MAX = 4096


class Site:
    """Answers browsers; a `Website`.

    Args:
        access: Access control.
        feed: Returns the content of the page for the names that a viewer has proved; ``None``: this
            shard redirects to shard 0.
        first: Address of shard 0 for learners.
        ending: Returns the state of the run when the server stops; see `shut_down`.
    """

    def __init__(
        self,
        access: Access,
        feed: Callable[[tuple[str, ...]], Feed] | None,
        first: str,
        ending: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._access, self._feed = access, feed
        self._feeds = set[Feed]()
        self._first, self._ending = first, ending

    def serves(self, path: str) -> bool:
        return path == ROOT or path.startswith(PREFIX)

    def is_authenticated(self, request: web.BaseRequest) -> bool:
        return self._access.is_authenticated(request)

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
            raise RequestRefusal(404, f"path={path[:200]} is not a page")
        if not self._access.is_authenticated(request):
            if path == EVENTS:
                raise RequestRefusal(401, "sign in first")
            return _form("", 401)
        if path == ROOT:
            return _text(_file("decoupled_diloco.show.page", "static/index.html"), "text/html")
        return await self._events(request)

    async def _sign_in(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = web.Response(status=303, headers={**HEADERS, "Location": ROOT})
        try:
            await self._access.sign_in(request, answer)
        except RequestRefusal as refusal:
            return _form(refusal.text, refusal.status, refusal.headers)
        return answer

    def _elsewhere(self, request: web.BaseRequest) -> web.StreamResponse:
        """Redirect to the shard that has the page, at the host name that the browser used."""
        here = f"{request.scheme}://{request.headers.get('Host', '')}"
        there = reached_by(alternatives(self._first)[0], here)
        return web.Response(status=303, headers={**HEADERS, "Location": f"{there}/"})

    async def _events(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._feed is None:
            raise RequestRefusal(404, "shard 0 has the page")
        feed = self._feed(self._access.names(request))
        self._feeds.add(feed)
        if feed.viewers >= VIEWERS_MAX:
            raise RequestRefusal(503, ALL_WATCH)
        with feed.viewed():
            response = web.StreamResponse(headers=HEADERS)
            response.content_type = "text/event-stream"
            await response.prepare(request)
            number = feed.number_in(request.headers.get("Last-Event-ID", ""))
            try:
                await _send_all(feed, number, response)
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
            except ConnectionError:
                pass  # the viewer has disconnected
        return response

    async def shut_down(self) -> None:
        """Send the final state of the run to all viewers."""
        await asyncio.gather(*(feed.end(self._ending()) for feed in self._feeds))


async def _send_all(feed: Feed, number: int | None, response: web.StreamResponse) -> None:
    """Send all messages to one viewer; a slow viewer delays no other."""
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
    page = _file("decoupled_diloco.show.page", "static/sign-in.html")
    alert = f'<p class="problem" role="alert">{html.escape(problem)}</p>' if problem else ""
    return _text(page.replace("<!-- problem -->", alert), "text/html", status, headers)


def _text(
    text: str, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    every = {**HEADERS, **(headers or {})}
    return web.Response(text=text, content_type=kind, charset="utf-8", status=status, headers=every)


def _file(package: str, place: str) -> str:
    return files(package).joinpath(place).read_text(encoding="utf-8")


def _colors() -> str:
    """Return the report's colors: light, dark, by system preference or as chosen."""
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


class Access:
    """Access control of the page.

    Args:
        tokens: The server's secrets; any of them is accepted.
        wall: Returns seconds since the Unix epoch.
    """

    def __init__(self, tokens: Tokens, wall: Callable[[], float] = time.time) -> None:
        self._tokens = tokens
        self._wall = wall
        self._key = tokens.derived_key(b"the live page")
        self._wrong: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def open(self) -> bool:
        """Whether the page requires no secret."""
        return self._tokens.open

    def check_origin(self, request: web.BaseRequest) -> None:
        """Reject requests that another site caused.

        Raises:
            RequestRefusal: 403; 400 if Host or Origin is not valid.
        """
        host = request.headers.get("Host", "")
        origin = request.headers.get("Origin")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            site = None if origin is None else urlsplit(origin).netloc
        except ValueError:
            raise RequestRefusal(400, "Host or Origin is not a valid host name") from None
        # Against DNS rebinding: another site's name may resolve to this machine.
        if self.open and not is_loopback(name):
            raise RequestRefusal(
                403, f"this run has no secret, so its page is only at 127.0.0.1, not at {name!r}"
            )
        if site is not None and site != host:
            raise RequestRefusal(403, f"the page rejects requests from other sites: {origin!r}")

    def is_authenticated(self, request: web.BaseRequest) -> bool:
        """Whether a request has a valid pass."""
        if self._tokens.lacks_certificate(names_of(request.transport)):
            return False
        if self._tokens.without_secret:
            return True
        until, code, name = self._pass_of(request)
        expected = self._code(until, name).encode()
        good = hmac.compare_digest(code.encode("utf-8", "replace"), expected)
        # Cut to 15 digits, because int() of a long text from a browser is slow.
        return good and until.isascii() and until.isdigit() and int(until[:15]) > self._wall()

    def names(self, request: web.BaseRequest) -> tuple[str, ...]:
        """Return the names that an authenticated viewer has proved; empty: the run's own token."""
        name = "" if self._tokens.without_secret else self._pass_of(request)[2]
        return (*([name] if name else []), *(names_of(request.transport) or ()))

    @staticmethod
    def _pass_of(request: web.BaseRequest) -> tuple[str, str, str]:
        """Return the expiry, the code and the name in a pass; a name may contain dots."""
        until, _, rest = request.cookies.get(_cookie(request), "").partition(".")
        code, _, name = rest.partition(".")
        return until, code, name

    async def sign_in(self, request: web.BaseRequest, answer: web.StreamResponse) -> None:
        """Add a pass to the answer if the form contains a secret of the run.

        Raises:
            RequestRefusal: 401 for a wrong secret or a missing certificate, 429 after too many
                attempts, 400 without a valid form.
        """
        if not 0 < (request.content_length or 0) <= FORM_BYTES_MAX:
            raise RequestRefusal(400, "sign in with the form of this page")
        names = names_of(request.transport)
        if self._tokens.lacks_certificate(names):
            raise RequestRefusal(
                401,
                "This run requires a client certificate: install one in this browser "
                "(ddiloco certs add), or use ddiloco watch.",
            )
        try:
            form = await request.post()
        except (ValueError, LookupError):  # not text, or an unknown encoding
            raise RequestRefusal(400, "sign in with the form of this page") from None
        secret = form.get("secret", "")
        source = request.remote or ""
        self._limit(source)  # before the comparison, so that guessing is slow
        try:
            token = secret.strip() if isinstance(secret, str) else ""
            name = self._tokens.recognize(f"Bearer {token}", names) or ""
        except RequestRefusal:
            self._count(source)
            raise RequestRefusal(
                401, "This is not the secret of this run: copy the content of its token file."
            ) from None
        self._wrong.pop(source, None)
        until = str(int(self._wall() + PASS_SECONDS))
        answer.set_cookie(
            _cookie(request),
            f"{until}.{self._code(until, name)}.{name}",
            max_age=PASS_SECONDS,
            path="/",
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )

    def _code(self, until: str, name: str) -> str:
        text = f"{until}.{name}".encode("utf-8", "replace")
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()

    def _limit(self, source: str) -> None:
        wrong = self._wrong_attempts(source)
        if wrong > ATTEMPTS_MAX - 1:
            seconds = int((wrong - ATTEMPTS_MAX + 1) * ATTEMPT_SECONDS) + 1
            raise RequestRefusal(
                429,
                f"Too many wrong secrets from this address: try again in {seconds} s.",
                {"Retry-After": str(seconds)},
            )

    def _wrong_attempts(self, source: str) -> float:
        """Return the number of recent wrong attempts; they expire over time."""
        count, at = self._wrong.get(source, (0.0, 0.0))
        return max(0.0, count - (self._wall() - at) / ATTEMPT_SECONDS)

    def _count(self, source: str) -> None:
        self._wrong[source] = (self._wrong_attempts(source) + 1, self._wall())
        self._wrong.move_to_end(source)
        while len(self._wrong) > ADDRESSES_MAX:
            self._wrong.popitem(last=False)


def _cookie(request: web.BaseRequest) -> str:
    """Return a name for each port, because a browser sends cookies to all ports of a host."""
    try:
        port = urlsplit(f"//{request.headers.get('Host', '')}").port
    except ValueError:
        port = None
    return f"ddiloco-{port or 'page'}"
