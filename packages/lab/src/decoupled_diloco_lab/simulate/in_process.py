"""Base class of clients that reach their servers without sockets."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from typing import Protocol

from yarl import URL

from decoupled_diloco.runtime import runtime
from decoupled_diloco.transport.byte_ranges import Window
from decoupled_diloco.transport.interface import Channel, Stats, TransferStats
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.payload_store import PREFIX
from decoupled_diloco.transport.range_transfer import Mover, Slots, StripeController, Transfer


class DigestedMover(Mover, Protocol):
    """A `Mover` that also returns the digest of the payload that it fetches."""

    digest: str


class BodyClient(ABC):
    """A `Client` except for dialing and for moving a range of a payload.

    Args:
        token: The auth token that it presents.
        limits: Its limits; default: the transport's.
        rng: Randomness of its retries; default: the runtime's.
        principal: The name under which it acts at addresses that it has not dialed.
    """

    scheme = ""
    """URL scheme of its servers' addresses."""

    certificate_ends_at: float | None = None
    """Always ``None``: traffic within one process is not encrypted."""

    def __init__(
        self,
        *,
        token: str | None = None,
        limits: Limits | None = None,
        rng: random.Random | None = None,
        principal: str = "",
    ) -> None:
        self.stats = Stats()
        self._token = token
        self._limits = limits or Limits()
        self._rng = rng or runtime().rng()
        self._base = ""
        self._principal = principal
        self._principals: dict[str, str] = {}
        self._channels: set[Channel] = set()

    @abstractmethod
    def putting(self, address: str, key: str, body: Window) -> DigestedMover:
        """Return a mover that uploads a payload to a server."""

    @abstractmethod
    def getting(self, address: str, key: str, out: Window) -> DigestedMover:
        """Return a mover that downloads a payload that a server offers."""

    def identity(self, address: str) -> tuple[str, str | None]:
        """Return the principal and the auth token of this client at an address."""
        principal = self._principals.get(address, self._principals.get(self._base, self._principal))
        return principal, self._token

    def trust(self, address: str) -> None:  # noqa: B027  # not abstract: subclasses need none
        """See `Client.trust`: every address within one process is trusted."""

    async def put(
        self,
        url: str,
        body: memoryview,
        *,
        base: str = "",
        first: int = 0,
        total: int | None = None,
    ) -> TransferStats:
        part = Window(body, first, total)
        return await self._run(self.putting(*self._resolve(url, base), part), part)

    async def get(
        self, url: str, out: memoryview, *, base: str = "", first: int = 0, total: int | None = None
    ) -> TransferStats:
        part = Window(out, first, total)
        return await self._run(self.getting(*self._resolve(url, base), part), part)

    @abstractmethod
    async def size(self, url: str, *, base: str = "") -> int:
        """See `Client`."""

    async def close(self) -> None:
        for channel in self._channels:
            channel.shut("the client closes")
        await asyncio.sleep(0)

    def _dials(self, address: str, principal: str) -> None:
        self._base = address
        self._principals[address] = principal

    def _keep(self, channel: Channel) -> None:
        # Drop closed channels here, so that a client that redials for days does not keep them.
        self._channels = {each for each in self._channels if not each.closed} | {channel}

    def _resolve(self, url: str, base: str) -> tuple[str, str]:
        target = URL(url, encoded=True)
        key = target.raw_path.removeprefix(PREFIX)
        if target.is_absolute():
            return str(target.origin()), key
        assert base or self._base, f"call connect() first, or pass base for relative url={url!r}"
        return base or self._base, key

    async def _run(self, mover: DigestedMover, part: Window) -> TransferStats:
        nbytes, retries = len(part.view), self._limits.retries
        transfer = Transfer(nbytes, mover, retries, self._rng, Slots(0), part.first)
        count, seconds = await transfer.run(StripeController(), 0.0)
        return TransferStats(nbytes, seconds, count, transfer.retries, self.scheme, mover.digest)
