"""Reconnecting: exponential backoff with full jitter."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from decoupled_diloco.errors import AccessError, TransportError
from decoupled_diloco.runtime import runtime
from decoupled_diloco.transport.interface import Channel, Client

FLOOR_SECONDS = 0.1
CAP_SECONDS = 5.0
BRISK_CAP_SECONDS = 0.75
BRISK_SECONDS = 300.0
"""Time after a loss during which a peer is dialed at most `BRISK_CAP_SECONDS` apart.

A restarted peer is found at once; a peer that is gone for longer receives fewer attempts."""


class Backoff:
    """Delays before attempts to reconnect.

    The n-th delay is uniform between `floor` and `min(cap, floor · 2^(n+1))`. Full jitter spreads
    the learners that all lost the same shard. The cap bounds how late they notice its return.

    Args:
        brisk_seconds: While the sum of the delays is below this, none exceeds `BRISK_CAP_SECONDS`.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        *,
        floor: float = FLOOR_SECONDS,
        cap: float = CAP_SECONDS,
        brisk_seconds: float = 0.0,
    ) -> None:
        assert 0 < floor <= cap
        self._rng = rng or runtime().rng()
        self._floor = floor
        self._cap = cap
        self._brisk_seconds = brisk_seconds
        self._ceiling, self._waited = floor, 0.0

    def next(self) -> float:
        """Return the next delay in seconds."""
        brisk = self._waited < self._brisk_seconds
        cap = min(self._cap, BRISK_CAP_SECONDS) if brisk else self._cap
        self._ceiling = min(cap, 2 * self._ceiling)
        delay = self._rng.uniform(self._floor, self._ceiling)
        self._waited += delay
        return delay

    def reset(self) -> None:
        """Start again at the floor, after a success."""
        self._ceiling, self._waited = self._floor, 0.0


async def reconnecting(
    client: Client,
    addresses: Sequence[str],
    role: str,
    principal: str,
    backoff: Backoff | None = None,
    *,
    on_failure: Callable[[TransportError, float], None] | None = None,
) -> Channel:
    """Connect, and retry with backoff while no address answers.

    Args:
        backoff: Kept by the caller between losses, so that a server that accepts and then drops
            the connection is not dialed in a tight loop. Call its `reset` when the channel works.
        on_failure: Receives each failure and the delay before the next attempt.

    Raises:
        AccessError: The server denies access; another attempt would not help.
    """
    backoff = backoff or Backoff()
    while True:
        for address in addresses:
            try:
                return await client.connect(address, role, principal)
            except AccessError:
                raise
            except TransportError as error:
                failure = error
        delay = backoff.next()
        if on_failure is not None:
            on_failure(failure, delay)
        await asyncio.sleep(delay)
