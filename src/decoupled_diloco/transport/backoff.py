"""Reconnecting: exponential backoff with full jitter."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from decoupled_diloco.errors import AccessError, TransportError
from decoupled_diloco.transport.base import Channel, Client

FLOOR_SECONDS = 0.1
CAP_SECONDS = 5.0


class Backoff:
    """Delays before attempts to reconnect.

    The n-th delay is uniform between `floor` and `min(cap, floor · 2^(n+1))`: full jitter spreads
    the learners that all lost the same shard, the cap keeps them from noticing its return late.

    Args:
        rng: Source of the jitter; inject a seeded one to repeat a run.
        floor: Least delay, seconds.
        cap: Largest delay, seconds.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        *,
        floor: float = FLOOR_SECONDS,
        cap: float = CAP_SECONDS,
    ) -> None:
        assert 0 < floor <= cap
        self._rng = rng or random.Random()
        self._floor = floor
        self._cap = cap
        self._ceiling = floor

    def next(self) -> float:
        """Return the next delay in seconds."""
        self._ceiling = min(self._cap, 2 * self._ceiling)
        return self._rng.uniform(self._floor, self._ceiling)

    def reset(self) -> None:
        """Start again at the floor, after a success."""
        self._ceiling = self._floor


async def reconnecting(
    client: Client,
    addresses: Sequence[str],
    role: str,
    principal: str,
    backoff: Backoff | None = None,
    *,
    on_failure: Callable[[TransportError, float], None] | None = None,
) -> Channel:
    """Connect, trying again with backoff for as long as nobody answers.

    Args:
        client: Who dials.
        addresses: Where to: the first of these that answers.
        role: As for `Client.connect`.
        principal: As for `Client.connect`.
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
