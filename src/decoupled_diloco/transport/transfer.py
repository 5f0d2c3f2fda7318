"""Moves one body as ranges over several connections, and resumes what fails.

Both clients use it. It is told how to move one range and how to learn which bytes are still
missing; it plans the ranges, keeps every connection busy, retries with backoff and measures.

It spreads a body over as many connections as the link rewards. On a long link with a little loss
one connection fills a fraction of it and sixteen nearly all; on loopback and in a machine room one
is best. `StripeController` measures the rate at each count and climbs while doubling pays.
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
from decoupled_diloco.transport.ranges import Range

COUNTS = (1, 2, 4, 8, 16, 32)
SMALL_BYTES = 256 << 10
"""Below this a body is over before a second connection would help."""
LOCAL_RTT_SECONDS = 0.002
GAIN = 1.15
"""What doubling the count must gain to be worth the connections."""
FULL = 1.05
"""A link on which doubling gains less than this is taken to be full."""
PROBE_EVERY = 16
"""Transfers between two tries of a neighbouring count."""
EMA_WEIGHT = 0.4


@dataclass
class StripeController:
    """Chooses the stripe count for one peer and one direction.

    Use: `count = choose(nbytes, rtt)`, move the body, `observe(count, nbytes, seconds)`.
    """

    count: int = 1
    rates: dict[int, float] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)
    _since_probe: int = 0
    _probe_up: bool = True
    _started: bool = False

    def choose(self, nbytes: int, rtt: float | None) -> int:
        """Return the number of connections for a body; `rtt` is None if it is not known."""
        if nbytes < SMALL_BYTES:
            return 1
        if not self._started:
            self._started = True
            self.count = starting_count(rtt)
        ceiling = min(_ceiling(rtt), max(1, nbytes // (SMALL_BYTES // 2)))
        return max(count for count in COUNTS if count <= min(self._candidate(), ceiling))

    def observe(self, count: int, nbytes: int, seconds: float) -> None:
        """Take in how fast a body went; small bodies say nothing and are ignored."""
        if nbytes < SMALL_BYTES or seconds <= 0:
            return
        rate, seen = nbytes / seconds, self._seen.get(count, 0)
        self._seen[count] = seen + 1
        if seen == 0:
            return  # Cold: connections begin with slow start, buffers with page faults.
        before = self.rates.get(count, rate)
        self.rates[count] = (1 - EMA_WEIGHT) * before + EMA_WEIGHT * rate
        if count == self.count:
            self._since_probe += 1
        else:
            self._since_probe = 0
            self._probe_up = count < self.count
        self._settle()

    def _candidate(self) -> int:
        """Return the count to use next: the best known, or a neighbour that is due for a try."""
        if self.count not in self.rates:
            return self.count
        up, down = 2 * self.count, self.count // 2
        if up <= COUNTS[-1] and up not in self.rates:
            return up
        if self._since_probe < PROBE_EVERY:
            return self.count
        full = self.rates.get(up, 0.0) <= FULL * self.rates[self.count]
        if full and down >= 1 and down not in self.rates:
            return down  # More gains nothing at all, so fewer may do as well.
        if self._probe_up and up <= COUNTS[-1]:
            return up
        return max(down, 1)

    def _settle(self) -> None:
        """Move to a neighbour that has proved better, or as good with fewer connections."""
        here = self.rates.get(self.count)
        if here is None:
            return
        up, down = self.rates.get(2 * self.count), self.rates.get(self.count // 2)
        if up is not None and up >= GAIN * here:
            self.count *= 2
        elif down is not None and here < GAIN * down:
            self.count //= 2


def starting_count(rtt: float | None) -> int:
    """Return a first guess from the round trip: the longer the link, the more one loss costs."""
    if rtt is None or rtt < 0.005:
        return 1
    return 4 if rtt < 0.02 else 16


def _ceiling(rtt: float | None) -> int:
    return 2 if rtt is not None and rtt < LOCAL_RTT_SECONDS else COUNTS[-1]


RANGE_BYTES_MIN = 128 << 10
"""The last ranges are this small, so that no connection is left alone with much to do."""


class Mover(Protocol):
    """Moves the ranges of one body."""

    async def move(self, start: int, stop: int, resumed: bool) -> None:
        """Move the bytes from start to stop; `resumed`: after an earlier attempt.

        Raises TransportError if trying again may help; anything else is final.
        """

    async def gaps(self, start: int, stop: int) -> list[Range]:
        """Find what a failed attempt left out between start and stop."""


@dataclass
class Slots:
    """Connections to one server beyond the first of each transfer.

    A transfer takes what is free when it begins, never waits for more, and has one connection in
    any case. Waiting could block for ever: transfers that queue for the server's memory would
    hold the connections that the one which has memory needs to finish.
    """

    free: int

    def take(self, wanted: int) -> int:
        """Return how many of the wanted connections there are, now taken."""
        taken = min(wanted, self.free)
        self.free -= taken
        return taken


@dataclass
class Transfer:
    """One body on its way."""

    nbytes: int
    mover: Mover
    retries_max: int  # attempts in a row that may fail without a byte of progress
    rng: random.Random
    slots: Slots  # bounds the connections of all transfers to this server
    first: int = 0  # where in the body it begins, if it is a part
    retries: int = field(default=0)
    resumed: bool = False  # bytes may have been moved before

    async def run(self, controller: StripeController, rtt: float | None) -> tuple[int, float]:
        """Move everything; return the stripe count used and the seconds it took."""
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
        """Move one range, resuming until it is whole or attempts stop helping."""
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
                if _size(missing) < before:
                    failures = 1
                    backoff.reset()
                if failures > self.retries_max or not retryable(error):
                    raise
            self.retries += 1
            resumed = True
            await asyncio.sleep(backoff.next())


def retryable(error: TransportError) -> bool:
    """Whether trying again may help: a refusal (a subclass) does not change its mind."""
    return type(error) is TransportError


def plan(nbytes: int, count: int) -> list[Range]:
    """Return the ranges of a body for `count` connections, in the order in which to begin them.

    One connection gets one range. Several take ranges from a common queue, so that one which
    suffers a loss takes fewer; each range is half of an equal share of what is left, because few
    large ranges save round trips and small last ones let all connections end together.

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
    """Run all; the first failure cancels the rest and is raised as it is."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _size(ranges: list[Range]) -> int:
    return sum(stop - start for start, stop in ranges)
