"""Bearer tokens and certificates, and the principals they stand for."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence

from decoupled_diloco.errors import AccessError, ConfigError, ProtocolError, TransportError

ROLES = ("learner", "observer", "shard")
PRINCIPAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")


_SECRET = re.compile(r"[ -~]+")
_HOW_TO_READ = (
    "give the text of the run's token file, as token=Path('runs/homelab/token').read_text(), or "
    "leave it out if the run has none"
)

_STRANGER = (
    "the token is not this run's: a syncer that began a new run has a new secret: read its token "
    "file again"
)
_NO_CERTIFICATE = (
    "the syncer wants a certificate that its client_authority has signed: give one and its key "
    "(--certificate, --key, or Tls(certificate=…, key=…))"
)
SHARDS = "shard-*"
"""A name in a certificate that stands for every shard: all of them may have one file."""

_NO_TOKEN = "the syncer wants the run's secret: give its token file (--token-file)"


class RequestRefusal(Exception):
    """A request that is answered with an HTTP status and a sentence; never leaves the transport."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})


class Tokens:
    """The tokens a server accepts.

    Three kinds, strictest last: none at all (open; loopback only), one run token that every
    participant shares and under which any principal may be claimed, one token per principal.

    Args:
        run_token: The one token.
        principals: One token for each principal.
        certificates: Whether a certificate that names the principal is needed, too. Alone, it is
            enough.

    Raises:
        ConfigError: both kinds at once, an empty token, or one token for two principals.
    """

    def __init__(
        self,
        run_token: str | None = None,
        principals: Mapping[str, str] | None = None,
        *,
        certificates: bool = False,
    ) -> None:
        if run_token is not None and principals is not None:
            raise ConfigError(
                "both a run token and tokens per principal are set: keep one of the two"
            )
        self._certificates = certificates
        self._run_token = run_token
        self._principals = dict(principals) if principals is not None else None
        values = [run_token] if run_token is not None else list((principals or {}).values())
        if any(not value.strip() for value in values):
            raise ConfigError("a token is empty: remove it or give it a value")
        if len(set(values)) < len(values):
            raise ConfigError("two principals have the same token: give each its own")

    @property
    def open(self) -> bool:
        return self._no_token and not self._certificates

    def lacks_certificate(self, names: Sequence[str] | None) -> bool:
        """Whether a peer whose certificate names these (None: it has shown none) needs one."""
        return self._certificates and names is None

    @property
    def without_secret(self) -> bool:
        """Whether no token is known: the server is open, or certificates alone decide."""
        return self._no_token

    @property
    def _no_token(self) -> bool:
        return self._run_token is None and self._principals is None

    def derived_key(self, purpose: bytes) -> bytes:
        """A key that only who knows all these secrets can make, and that does not tell them."""
        values = [self._run_token or "", *sorted((self._principals or {}).values())]
        return hmac.digest("\n".join(values).encode("utf-8", "replace"), purpose, "sha256")

    def check_bind(self, host: str) -> None:
        """Refuse to be open on an address that others can reach.

        Raises:
            ConfigError: no token, and `host` is not a loopback address.
        """
        if self.open and not is_loopback(host):
            raise ConfigError(
                f"host={host!r} without a token would let anyone who can reach it into the run: "
                "set a token, or bind to 127.0.0.1"
            )

    def authorize(
        self, authorization: str | None, principal: str, names: Sequence[str] | None = None
    ) -> str:
        """Return the principal, if the `Authorization` header and the certificate allow it.

        Args:
            names: What the peer's certificate names; None: it has shown none.

        Raises:
            RequestRefusal: 401 without a good token or certificate, 403 for another principal's,
                400 for a bad name.
        """
        if not PRINCIPAL.fullmatch(principal):
            raise RequestRefusal(
                400,
                f"principal {principal[:140]!r} is not a name: use 1 to 128 letters, digits, "
                "'.', '_', ':', '@' or '-'",
            )
        bound = self.recognize(authorization, names)
        if self._certificates and not _speaks_for(names or (), principal):
            known = [name for name in names or () if PRINCIPAL.fullmatch(name)]
            raise RequestRefusal(
                403,
                f"this certificate is that of {', '.join(names or ()) or 'nobody'}, not of "
                f"{principal!r}: use your own certificate",
                {"X-Principal": known[0] if known else ""},  # Its owner may know.
            )
        if bound not in (None, principal):
            raise RequestRefusal(
                403,
                f"this token belongs to {bound!r}, not to {principal!r}: use your own token",
                {"X-Principal": bound or ""},  # Its owner may know.
            )
        return principal

    def recognize(
        self, authorization: str | None, names: Sequence[str] | None = None
    ) -> str | None:
        """Let a peer in that holds any of the tokens; whose it is, if it is not the run's.

        Raises:
            RequestRefusal: 401 without a good token, or without a certificate where one is needed.
        """
        if self.lacks_certificate(names):
            raise RequestRefusal(401, _NO_CERTIFICATE)
        if self._no_token:
            return None
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise RequestRefusal(401, _NO_TOKEN)
        if self._run_token is not None:
            if not _same(token, self._run_token):
                raise RequestRefusal(401, _STRANGER)
            return None
        bound = self._bound(token)
        if bound is None:
            raise RequestRefusal(401, "the token is not known to this run: check the token file")
        return bound

    def _bound(self, token: str) -> str | None:
        """Compare with every token, so that the time tells nothing."""
        found = None
        for principal, known in (self._principals or {}).items():
            if _same(token, known):
                found = principal
        return found


def read_secret(token: str | None) -> str | None:
    r"""The token as it is shown: without the white space around it, which files end with.

    >>> read_secret("s3cret\n")
    's3cret'

    Raises:
        ConfigError: it is empty, or has what no token has; the message does not repeat it.
    """
    if token is None:
        return None
    if not isinstance(token, str):
        raise ConfigError(f"token= is a {type(token).__name__}, not a text: {_HOW_TO_READ}")
    stripped = token.strip()
    if not stripped:
        raise ConfigError(f"the token is empty: {_HOW_TO_READ}")
    if not _SECRET.fullmatch(stripped):
        raise ConfigError(
            f"the token of {len(stripped)} characters has some that are no printable ASCII: "
            f"{_HOW_TO_READ}"
        )
    return stripped


def bearer(token: str | None) -> str | None:
    """The `Authorization` header that shows a token."""
    return None if token is None else f"Bearer {token}"


def check_role(role: str) -> None:
    """Refuse a role that does not exist."""
    if role not in ROLES:
        raise RequestRefusal(400, f"role {role[:40]!r} is unknown: use one of {', '.join(ROLES)}")


def refusal_error(status: int, reason: str, target: str) -> Exception:
    """Return the error that a refusal is for the client: some are final, some worth a retry."""
    if status in (401, 403):
        return AccessError(f"{target}: {reason}")
    if status in (409, 429) or status >= 500:
        return TransportError(f"{target}: {reason} ({status})")
    return ProtocolError(f"{target}: {reason} ({status})")


def is_loopback(host: str) -> bool:
    """Whether an address to bind to can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _speaks_for(names: Sequence[str], principal: str) -> bool:
    return principal in names or (SHARDS in names and principal.startswith(SHARDS[:-1]))


def _same(left: str, right: str) -> bool:
    """Compare in constant time; `compare_digest` refuses non-ASCII text, so bytes."""
    return hmac.compare_digest(left.encode("utf-8", "replace"), right.encode("utf-8", "replace"))
