"""Reconnecting: exponential backoff with full jitter."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from decoupled_diloco.errors import AccessError, TransportError
from decoupled_diloco.runtime import runtime
from decoupled_diloco.transport.base import Channel, Client

FLOOR_SECONDS = 0.1
CAP_SECONDS = 5.0
BRISK_CAP_SECONDS = 0.75
BRISK_SECONDS = 300.0
"""For so long after a loss a peer is dialled at most `BRISK_CAP_SECONDS` apart, so that one that is
started again is found at once; one that is gone for longer is left in peace."""


class Backoff:
    """Delays before attempts to reconnect.

    The n-th delay is uniform between `floor` and `min(cap, floor · 2^(n+1))`: full jitter spreads
    the learners that all lost the same shard, the cap keeps them from noticing its return late.

    Args:
        brisk_seconds: Until the delays come to so much, none is above `BRISK_CAP_SECONDS`.
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
    """Connect, trying again with backoff for as long as there is no answer.

    Args:
        backoff: Kept by the caller between losses, so that a server that accepts and drops at
            once is not hammered: call its `reset` when the channel has proved useful.
        on_failure: Told each failure and the delay before the next attempt.

    Raises:
        AccessError: the server refuses; trying again would not help.
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
