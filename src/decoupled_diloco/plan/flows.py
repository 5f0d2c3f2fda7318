"""Transfers that share links: every one gets its fair part, and what one cannot use the others do.

Rates are max-min fair: the link with the least for each of its transfers is filled first, then the
next one with what is left. Transfers of learners of one site that begin together are one `Flow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BINS_MAX = 20_000
"""The peak of a longer time is looked for in so many intervals at its end."""


@dataclass(slots=True, eq=False)
class Flow:
    """Some transfers that are alike.

    Attributes:
        key: What it is for.
        links: Numbers of the links that it occupies; none: it is over at once.
        count: How many transfers there are.
        left: Bytes that each still has to move.
        rate: Bytes a second of each.
    """

    key: Any
    links: tuple[int, ...]
    count: int
    left: float
    rate: float = 0.0


@dataclass(slots=True)
class Flows:
    """All transfers that are under way.

    Args:
        capacities: Bytes a second of each link.
    """

    capacities: Sequence[float]
    active: list[Flow] = field(default_factory=list)
    now: float = 0.0
    _stale: bool = False
    _times: list[float] = field(default_factory=lambda: [0.0])
    _moved: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._moved = [[0.0] for _ in self.capacities]

    def start(self, flow: Flow) -> None:
        """One more; `advance` was called until now."""
        self.active.append(flow)
        self._stale = True

    def next_end(self) -> float:
        """When the first of them is over, if nothing begins before."""
        if self._stale:
            self._share()
        return self.now + min(
            (f.left / f.rate for f in self.active if f.rate > 0), default=float("inf")
        )

    def advance(self, until: float) -> list[Flow]:
        """Moves bytes until then, at most until `next_end`; gives what is over."""
        seconds = until - self.now
        if seconds > 0:
            self._move(seconds)
        self.now = until
        done = [f for f in self.active if f.left <= 1e-9 * f.rate + 1e-6]
        if done:
            over = set(map(id, done))
            self.active = [f for f in self.active if id(f) not in over]
            self._stale = True
        return done

    def mean_and_peak(
        self, link: int, begin: float, end: float, bin_seconds: float
    ) -> tuple[float, float]:
        """What a link carried in a time, bytes a second: the mean, and the largest interval's."""
        count = min(BINS_MAX, max(1, round((end - begin) / bin_seconds)))
        edges = end - bin_seconds * np.arange(count, -1, -1)
        moved = np.interp(edges, self._times, self._moved[link])
        whole = np.interp([begin, end], self._times, self._moved[link])
        mean = (whole[1] - whole[0]) / (end - begin)
        return float(mean), float(np.diff(moved).max() / bin_seconds)

    def _move(self, seconds: float) -> None:
        """Takes from the transfers, and keeps what each link has carried so far."""
        carried = [moved[-1] for moved in self._moved]
        for flow in self.active:
            each = flow.rate * seconds
            flow.left -= each
            for link in flow.links:
                carried[link] += each * flow.count
        self._times.append(self.now + seconds)
        for moved, total in zip(self._moved, carried, strict=True):
            moved.append(total)

    def _share(self) -> None:
        """Max-min fair rates."""
        self._stale = False
        spare = dict(enumerate(self.capacities))
        waiting = list(self.active)
        while waiting:
            users: dict[int, int] = {}
            for flow in waiting:
                for link in flow.links:
                    users[link] = users.get(link, 0) + flow.count
            fair, tightest = min((max(spare[link], 0.0) / n, link) for link, n in users.items())
            for flow in (f for f in waiting if tightest in f.links):
                flow.rate = fair
                for link in flow.links:
                    spare[link] -= fair * flow.count
            waiting = [f for f in waiting if tightest not in f.links]
