"""Who may see the page: whoever shows the run's secret once, in the sign-in form.

The browser then holds a pass in a cookie, which scripts cannot read and other sites cannot send. It
is no secret of the run: an instant, and a code over it that only who knows the secret can make. So
a pass outlives a syncer that is started again, every shard knows it, and it ends with the secret.

Where certificates decide, a browser needs one, and where there is no secret it needs nothing else.
A server with neither listens on loopback alone. It lets everybody in, but only under a name of
loopback: a site elsewhere could give its own name the address of this machine.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import urlsplit

from aiohttp import web

from decoupled_diloco.transport.tls import names_of
from decoupled_diloco.transport.tokens import RequestRefusal, Tokens, is_loopback

PASS_SECONDS = 30 * 24 * 3600
"""How long a pass is good."""

ATTEMPTS_MAX = 5
"""Wrong secrets in a row from one address."""

ATTEMPT_SECONDS = 12.0
"""After so long one more may be tried."""

ADDRESSES_MAX = 1000
"""Addresses whose wrong attempts are remembered, the latest."""

FORM_BYTES_MAX = 4096


class Access:
    """Lets people in.

    Args:
        tokens: The secrets that the server knows; any of them will do.
        wall: Seconds since the Unix epoch.
    """

    def __init__(self, tokens: Tokens, wall: Callable[[], float] = time.time) -> None:
        self._tokens = tokens
        self._wall = wall
        self._key = tokens.derived_key(b"the live page")
        self._wrong: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def open(self) -> bool:
        """Whether there is no secret to show."""
        return self._tokens.open

    def check_origin(self, request: web.BaseRequest) -> None:
        """Refuses what another site makes a browser send.

        Raises:
            RequestRefusal: 403; 400 for what is no name of a host.
        """
        host = request.headers.get("Host", "")
        origin = request.headers.get("Origin")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            site = None if origin is None else urlsplit(origin).netloc
        except ValueError:
            raise RequestRefusal(400, "Host or Origin is no name of a host") from None
        if self.open and not is_loopback(name):
            raise RequestRefusal(
                403, f"this run has no secret, so its page is at 127.0.0.1 only, not at {name!r}"
            )
        if site is not None and site != host:
            raise RequestRefusal(403, f"the page answers no other site, and {origin!r} is one")

    def knows(self, request: web.BaseRequest) -> bool:
        """Whether a request shows a good pass."""
        if self._tokens.lacks_certificate(names_of(request.transport)):
            return False
        if self._tokens.without_secret:
            return True
        until, _, code = request.cookies.get(_cookie(request), "").partition(".")
        good = hmac.compare_digest(code.encode("utf-8", "replace"), self._code(until).encode())
        return good and until.isascii() and until.isdigit() and int(until[:15]) > self._wall()

    async def sign_in(self, request: web.BaseRequest, answer: web.StreamResponse) -> None:
        """Puts a pass into the answer, if the form shows a secret of the run.

        Raises:
            RequestRefusal: 401 for a wrong secret or no certificate, 429 after too many, 400 for no
                form.
        """
        if not 0 < (request.content_length or 0) <= FORM_BYTES_MAX:
            raise RequestRefusal(400, "sign in with the form of this page")
        names = names_of(request.transport)
        if self._tokens.lacks_certificate(names):
            raise RequestRefusal(
                401,
                "This run wants a certificate: give this browser one (ddiloco certificates add), "
                "or use ddiloco watch.",
            )
        try:
            form = await request.post()
        except (ValueError, LookupError):  # no text, or in an encoding that nobody knows
            raise RequestRefusal(400, "sign in with the form of this page") from None
        secret = form.get("secret", "")
        source = request.remote or ""
        self._limit(source)
        try:
            shown = secret.strip() if isinstance(secret, str) else ""
            self._tokens.recognize(f"Bearer {shown}", names)
        except RequestRefusal:
            self._count(source)
            raise RequestRefusal(
                401, "That is not the secret of this run: copy the whole text of its token file."
            ) from None
        self._wrong.pop(source, None)
        until = str(int(self._wall() + PASS_SECONDS))
        answer.set_cookie(
            _cookie(request),
            f"{until}.{self._code(until)}",
            max_age=PASS_SECONDS,
            path="/",
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )

    def _code(self, until: str) -> str:
        return hmac.new(self._key, until.encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def _limit(self, source: str) -> None:
        wrong = self._wrong_attempts(source)
        if wrong > ATTEMPTS_MAX - 1:
            seconds = int((wrong - ATTEMPTS_MAX + 1) * ATTEMPT_SECONDS) + 1
            raise RequestRefusal(
                429,
                f"Too many wrong secrets from here: try again in {seconds} s.",
                {"Retry-After": str(seconds)},
            )

    def _wrong_attempts(self, source: str) -> float:
        """How many are not forgotten yet."""
        count, at = self._wrong.get(source, (0.0, 0.0))
        return max(0.0, count - (self._wall() - at) / ATTEMPT_SECONDS)

    def _count(self, source: str) -> None:
        self._wrong[source] = (self._wrong_attempts(source) + 1, self._wall())
        self._wrong.move_to_end(source)
        while len(self._wrong) > ADDRESSES_MAX:
            self._wrong.popitem(last=False)


def _cookie(request: web.BaseRequest) -> str:
    """A name of its own for each port: a browser gives all ports of a host the same cookies."""
    try:
        port = urlsplit(f"//{request.headers.get('Host', '')}").port
    except ValueError:
        port = None
    return f"ddiloco-{port or 'page'}"
