"""How many connections a body is spread over: as many as the link rewards.

On a long link with a little loss one connection fills a fraction of it and sixteen nearly all; on
loopback and in a machine room one is best. The controller measures the rate at each count and
climbs while doubling pays; it has no clock and no sockets of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
        """Return the number of connections for a body of `nbytes`.

        Args:
            nbytes: Size of the body.
            rtt: Round trip in seconds, None if it is not known.
        """
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
