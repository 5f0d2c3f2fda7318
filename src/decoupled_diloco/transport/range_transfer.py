"""Transfer of one payload as ranges over several connections, with resumption after failures.

Both clients use it. A `Mover` moves one range and reports which bytes are still missing. The
transfer plans the ranges, keeps every connection busy, retries with backoff and measures the rate.

A payload uses as many connections as the link rewards. On a long link with a little loss, one
connection reaches a fraction of the capacity, and sixteen reach nearly all of it. On loopback and
inside a data center one connection is best. `StripeController` measures the rate at each count and
increases the count while doubling pays.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from decoupled_diloco.errors import TransportError
from decoupled_diloco.runtime import now
from decoupled_diloco.transport.backoff import Backoff
from decoupled_diloco.transport.byte_ranges import Range

COUNTS = (1, 2, 4, 8, 16, 32)
SMALL_BYTES = 256 << 10
"""Below this size a payload is complete before a second connection would help."""
LOCAL_RTT_SECONDS = 0.002
GAIN = 1.15
"""Factor in rate that a doubled count must reach to be kept."""
FULL = 1.05
"""If doubling the count gains less than this factor, the link counts as full."""
PROBE_EVERY = 16
"""Transfers between two trials of a neighboring count."""
EMA_WEIGHT = 0.4


@dataclass
class StripeController:
    """Chooses the stripe count for one peer and one direction.

    Use: `count = choose(nbytes, rtt)`, move the payload, `observe(count, nbytes, seconds)`.
    """

    count: int = 1
    rates: dict[int, float] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)
    _since_probe: int = 0
    _probe_up: bool = True
    _started: bool = False

    def choose(self, nbytes: int, rtt: float | None) -> int:
        """Return the number of connections for a payload; `rtt` is None if it is unknown."""
        if nbytes < SMALL_BYTES:
            return 1
        if not self._started:
            self._started = True
            self.count = starting_count(rtt)
        ceiling = min(_ceiling(rtt), max(1, nbytes // (SMALL_BYTES // 2)))
        return max(count for count in COUNTS if count <= min(self._candidate(), ceiling))

    def observe(self, count: int, nbytes: int, seconds: float) -> None:
        """Record the rate of a payload; small payloads are ignored because they are too noisy."""
        if nbytes < SMALL_BYTES or seconds <= 0:
            return
        rate, seen = nbytes / seconds, self._seen.get(count, 0)
        self._seen[count] = seen + 1
        if seen == 0:
            return  # A cold measurement: connections are in slow start, buffers cause page faults.
        before = self.rates.get(count, rate)
        self.rates[count] = (1 - EMA_WEIGHT) * before + EMA_WEIGHT * rate
        if count == self.count:
            self._since_probe += 1
        else:
            self._since_probe = 0
            self._probe_up = count < self.count
        self._settle()

    def _candidate(self) -> int:
        """Return the count to use next: the best known, or a neighbor that is due for a trial."""
        if self.count not in self.rates:
            return self.count
        up, down = 2 * self.count, self.count // 2
        if up <= COUNTS[-1] and up not in self.rates:
            return up
        if self._since_probe < PROBE_EVERY:
            return self.count
        full = self.rates.get(up, 0.0) <= FULL * self.rates[self.count]
        if full and down >= 1 and down not in self.rates:
            return down  # More connections gain nothing, so fewer may be just as fast.
        if self._probe_up and up <= COUNTS[-1]:
            return up
        return max(down, 1)

    def _settle(self) -> None:
        """Move to a neighboring count that is faster, or as fast with fewer connections."""
        here = self.rates.get(self.count)
        if here is None:
            return
        up, down = self.rates.get(2 * self.count), self.rates.get(self.count // 2)
        if up is not None and up >= GAIN * here:
            self.count *= 2
        elif down is not None and here < GAIN * down:
            self.count //= 2


def starting_count(rtt: float | None) -> int:
    """Return an initial count from the round-trip time: on a longer link, one loss costs more."""
    if rtt is None or rtt < 0.005:
        return 1
    return 4 if rtt < 0.02 else 16


def _ceiling(rtt: float | None) -> int:
    return 2 if rtt is not None and rtt < LOCAL_RTT_SECONDS else COUNTS[-1]


RANGE_BYTES_MIN = 128 << 10
"""Smallest range. The last ranges are small, so that all connections finish almost together."""


class Mover(Protocol):
    """Moves the ranges of one payload."""

    async def move(self, start: int, stop: int, resumed: bool) -> None:
        """Move the bytes from start to stop; `resumed` is true after an earlier attempt.

        Raises TransportError if another attempt may help; any other error is final.
        """

    async def gaps(self, start: int, stop: int) -> list[Range]:
        """Return the ranges between start and stop that a failed attempt did not move."""


@dataclass
class Slots:
    """Connections to one server beyond the first connection of each transfer.

    A transfer always has one connection. It takes the free ones when it begins and never waits for
    more. Waiting could deadlock: transfers that wait for the server's memory would hold the
    connections that the transfer with memory needs to finish.
    """

    free: int

    def take(self, requested: int) -> int:
        """Take up to `requested` free connections, and return their number."""
        taken = min(requested, self.free)
        self.free -= taken
        return taken


@dataclass
class Transfer:
    """One payload in transit."""

    nbytes: int
    mover: Mover
    retries_max: int  # consecutive attempts that may fail without a byte of progress
    rng: random.Random
    slots: Slots  # bounds the connections of all transfers to this server
    first: int = 0  # offset in the payload, if this is a part of it
    retries: int = field(default=0)
    resumed: bool = False  # bytes may have been moved before

    async def run(self, controller: StripeController, rtt: float | None) -> tuple[int, float]:
        """Move everything; return the stripe count and the duration in seconds."""
        extra = self.slots.take(controller.choose(self.nbytes, rtt) - 1)
        ranges = deque(
            (self.first + start, self.first + stop) for start, stop in plan(self.nbytes, 1 + extra)
        )
        started = now()
        try:
            if extra == 0:
                await self._work(ranges)
            else:
                await all_or_none([self._work(ranges) for _ in range(1 + extra)])
        finally:
            self.slots.free += extra
        seconds = now() - started
        if self.retries == 0:
            controller.observe(1 + extra, self.nbytes, seconds)
        return 1 + extra, seconds

    async def _work(self, ranges: deque[Range]) -> None:
        while ranges:
            start, stop = ranges.popleft()
            await self._persist(start, stop)

    async def _persist(self, start: int, stop: int) -> None:
        """Move one range, resuming until it is complete or attempts no longer help."""
        backoff = Backoff(self.rng)
        missing, failures, resumed = [(start, stop)], 0, self.resumed
        while missing:
            before = _size(missing)
            try:
                if resumed:
                    missing = await self.mover.gaps(start, stop)
                for left, right in missing:
                    await self.mover.move(left, right, resumed)
                return
            except TransportError as error:
                failures += 1
                if _size(missing) < before:  # progress: only attempts without any count
                    failures = 1
                    backoff.reset()
                if failures > self.retries_max or not retryable(error):
                    raise
            self.retries += 1
            resumed = True
            await asyncio.sleep(backoff.next())


def retryable(error: TransportError) -> bool:
    """Whether another attempt may help; a rejection (a subclass) is final."""
    return type(error) is TransportError


def plan(nbytes: int, count: int) -> list[Range]:
    """Return the ranges of a payload for `count` connections, in the order in which to begin them.

    One connection gets one range. Several connections take ranges from a common queue, so that a
    connection that suffers a loss takes fewer. Each range is half of an equal share of the rest: a
    few large ranges save round trips, and small last ranges let all connections finish together.

    >>> plan(10, 1)
    [(0, 10)]
    >>> [stop - start >> 10 for start, stop in plan(4 << 20, 4)][::4]
    [512, 300, 175, 128, 128]
    """
    ranges, start = [], 0
    while start < nbytes:
        share = -(-(nbytes - start) // (2 * count)) if count > 1 else nbytes
        stop = min(nbytes, start + max(share, RANGE_BYTES_MIN))
        ranges.append((start, stop))
        start = stop
    return ranges


async def all_or_none(work: list[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first failure cancels the rest and is raised unchanged."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _size(ranges: list[Range]) -> int:
    return sum(stop - start for start, stop in ranges)
