"""Bearer tokens and certificates, and the principals that they identify."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence

from decoupled_diloco.errors import AccessError, ConfigError, ProtocolError, TransportError, a_kind

ROLES = ("learner", "observer", "shard", "relay")
PRINCIPAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")


_SECRET = re.compile(r"[ -~]+")
_HOW_TO_READ = (
    "pass the content of the run's token file, as "
    "auth_token=Path('runs/homelab/token').read_text(), or omit it if the run has no token"
)

_WRONG_TOKEN = (
    "the token does not belong to this run: a syncer that started a new run has a new secret: read "
    "its token file again"
)
_NO_CERTIFICATE = (
    "the syncer requires a certificate signed by its client_ca_cert: pass one with its key "
    "(--cert, --key, or TLSConfig(cert=…, key=…))"
)
SHARDS = "shard-*"
"""Certificate name that covers every shard, so that all shards may share one file."""

_NO_TOKEN = "the syncer requires the run's secret: pass its token file (--auth-token-file)"


class RequestRefusal(Exception):
    """A request answered with an HTTP status and a sentence; never leaves the transport."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})


class Tokens:
    """The tokens that a server accepts.

    There are three modes, from the most open to the strictest: no token (loopback only); one run
    token, which every participant shares and which allows any principal; one token per principal.

    Args:
        run_token: The shared token.
        principals: One token for each principal.
        certificates: Whether a certificate that names the principal is required. With
            certificates a token is optional.
        relays: With one token per principal: the principals that each relay may represent.

    Raises:
        ConfigError: Both kinds are set, a token is empty, or two principals share one token.
    """

    def __init__(
        self,
        run_token: str | None = None,
        principals: Mapping[str, str] | None = None,
        *,
        certificates: bool = False,
        relays: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        if run_token is not None and principals is not None:
            raise ConfigError(
                "both a run token and tokens per principal are set: keep one of the two"
            )
        self._certificates = certificates
        self._relays = dict(relays or {})
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
        """Whether a required certificate is missing (`names=None`: the peer presented none)."""
        return self._certificates and names is None

    @property
    def without_secret(self) -> bool:
        """Whether no token is configured: the server is open, or only certificates decide."""
        return self._no_token

    @property
    def _no_token(self) -> bool:
        return self._run_token is None and self._principals is None

    def derived_key(self, purpose: bytes) -> bytes:
        """Return a key that depends on all these secrets and does not reveal them."""
        values = [self._run_token or "", *sorted((self._principals or {}).values())]
        return hmac.digest("\n".join(values).encode("utf-8", "replace"), purpose, "sha256")

    def check_bind(self, host: str) -> None:
        """Reject an open server on an address that other machines can reach.

        Raises:
            ConfigError: No auth token is set, and `host` is not a loopback address.
        """
        if self.open and not is_loopback(host):
            raise ConfigError(
                f"host={host!r} cannot be used without an auth token, because other machines can "
                "reach it: set an auth token, or bind to 127.0.0.1"
            )

    def authorize(
        self, authorization: str | None, principal: str, names: Sequence[str] | None = None
    ) -> str:
        """Return the principal if the `Authorization` header and the certificate allow it.

        Args:
            names: Names in the peer's certificate; None if it presented none.

        Raises:
            RequestRefusal: 401 without a valid token or certificate, 403 if it belongs to another
                principal, 400 for an invalid name.
        """
        if not PRINCIPAL.fullmatch(principal):
            raise RequestRefusal(
                400,
                f"principal {principal[:140]!r} is not a valid name: use 1 to 128 letters, digits, "
                "'.', '_', ':', '@' or '-'",
            )
        bound = self.recognize(authorization, names)
        if self._certificates and not _speaks_for(names or (), principal):
            known = [name for name in names or () if PRINCIPAL.fullmatch(name)]
            raise RequestRefusal(
                403,
                f"this certificate names {', '.join(names or ()) or 'no principal'}, not "
                f"{principal!r}: use your own certificate",
                {"X-Principal": known[0] if known else ""},  # The owner may see its own name.
            )
        if bound not in (None, principal) and principal not in self._relays.get(bound or "", ()):
            raise RequestRefusal(
                403,
                f"this token belongs to {bound!r}, not to {principal!r}: use your own token",
                {"X-Principal": bound or ""},  # The owner may see its own name.
            )
        return principal

    def represents(self, relay: str, principal: str, names: Sequence[str] | None) -> str:
        """Return why a relay may not represent a principal; empty if it may.

        With certificates, the relay's certificate names the principal too. With one token for all,
        every relay may represent everyone.

        Args:
            relay: The authenticated principal of the relay.
            principal: The process that it represents.
            names: Names in its certificate; None if it presented none.
        """
        if self._certificates and not _speaks_for(names or (), principal):
            return (
                f"the certificate of relay {relay!r} does not name {principal!r}: run ddiloco "
                f"certs renew FOLDER {relay} --represents {principal}, and restart the relay"
            )
        if self._principals is not None and principal not in self._relays.get(relay, ()):
            return (
                f"relay {relay!r} may not represent {principal!r}: list it among the site's "
                "learners in [[sites]]"
            )
        return ""

    def recognize(
        self, authorization: str | None, names: Sequence[str] | None = None
    ) -> str | None:
        """Admit a peer with any valid token; return the token's principal, None for the run token.

        Raises:
            RequestRefusal: 401 without a valid token, or without a required certificate.
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
                raise RequestRefusal(401, _WRONG_TOKEN)
            return None
        bound = self._bound(token)
        if bound is None:
            raise RequestRefusal(401, "the token is unknown to this run: check the token file")
        return bound

    def _bound(self, token: str) -> str | None:
        """Compare with every token, so that the time reveals nothing."""
        found = None
        for principal, known in (self._principals or {}).items():
            if _same(token, known):
                found = principal
        return found


def read_secret(token: str | None) -> str | None:
    r"""Return the token as it is sent: without the surrounding whitespace that files end with.

    >>> read_secret("s3cret\n")
    's3cret'

    Raises:
            ConfigError: It is empty or has invalid characters; the message does not repeat it.
    """
    if token is None:
        return None
    if not isinstance(token, str):
        raise ConfigError(f"auth_token= is {a_kind(token)}, not a string: {_HOW_TO_READ}")
    stripped = token.strip()
    if not stripped:
        raise ConfigError(f"the token is empty: {_HOW_TO_READ}")
    if not is_secret(stripped):
        raise ConfigError(
            f"the token ({len(stripped)} characters) has characters that are not printable ASCII: "
            f"{_HOW_TO_READ}"
        )
    return stripped


def is_secret(token: str) -> bool:
    """Whether a header can carry it."""
    return _SECRET.fullmatch(token) is not None


def bearer(token: str | None) -> str | None:
    """Return the `Authorization` header for a token."""
    return None if token is None else f"Bearer {token}"


def check_role(role: str) -> None:
    """Reject an unknown role."""
    if role not in ROLES:
        raise RequestRefusal(400, f"role {role[:40]!r} is unknown: use one of {', '.join(ROLES)}")


def refusal_error(status: int, reason: str, target: str) -> Exception:
    """Return the client's error for a rejected request: some are final, some worth a retry."""
    if status in (401, 403):
        return AccessError(f"{target}: {reason}")
    if status in (409, 429) or status >= 500:
        return TransportError(f"{target}: {reason} ({status})")
    return ProtocolError(f"{target}: {reason} ({status})")


def is_loopback(host: str) -> bool:
    """Whether an address to bind to can be reached only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _speaks_for(names: Sequence[str], principal: str) -> bool:
    return principal in names or (SHARDS in names and principal.startswith(SHARDS[:-1]))


def _same(left: str, right: str) -> bool:
    """Compare in constant time, as bytes because `compare_digest` rejects non-ASCII text."""
    return hmac.compare_digest(left.encode("utf-8", "replace"), right.encode("utf-8", "replace"))
