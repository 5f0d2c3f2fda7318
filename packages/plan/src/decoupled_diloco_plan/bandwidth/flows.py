"""Transfers that share links: every one gets its fair part, and what one cannot use the others do.

Rates are max-min fair: the link with the least for each of its transfers is filled first, then the
next one with what is left. Transfers of learners of one site that begin together are one `Flow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

BINS_MAX = 20_000
"""The peak of a longer time is looked for in so many intervals at its end."""

EVEN = 1e-9
"""Links whose fair shares differ by less are equally tight."""


@dataclass(slots=True, eq=False)
class Flow:
    """Some transfers that are alike."""

    key: Any
    links: tuple[int, ...]  # numbers of the links that it occupies; none: it is over at once
    count: int  # how many transfers there are
    left: float  # bytes that each still has to move
    rate: float = 0.0  # bytes a second of each


@dataclass(slots=True)
class Flows:
    """All transfers that are under way, on links that carry so many bytes a second each."""

    capacities: Sequence[float]
    active: list[Flow] = field(default_factory=list)
    now: float = 0.0
    _stale: bool = False
    _times: list[float] = field(default_factory=lambda: [0.0])
    _moved: list[Vector] = field(default_factory=list)
    _left: Vector = field(default_factory=lambda: np.zeros(0))
    _rates: Vector = field(default_factory=lambda: np.zeros(0))
    _carried: Vector = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        self._moved = [np.zeros(len(self.capacities))]
        self._carried = np.zeros(len(self.capacities))

    def start(self, flow: Flow) -> None:
        """One more; `advance` was called until now."""
        self._settle()
        self.active.append(flow)
        self._stale = True

    def next_end(self) -> float:
        """When the first of them is over, if nothing begins before."""
        if self._stale:
            self._share()
        moving = self._rates > 0
        if not moving.any():
            return float("inf")
        return self.now + float((self._left[moving] / self._rates[moving]).min())

    def advance(self, until: float) -> list[Flow]:
        """Moves bytes until then, at most until `next_end`; gives what is over."""
        if self._stale:
            self._share()
        seconds = until - self.now
        if seconds > 0:
            self._move(seconds)
        self.now = until
        over = self._left <= 1e-9 * self._rates + 1e-6
        if not over.any():
            return []
        self._settle()
        done = [flow for flow, gone in zip(self.active, over, strict=True) if gone]
        self.active = [flow for flow, gone in zip(self.active, over, strict=True) if not gone]
        self._stale = True
        return done

    def _settle(self) -> None:
        """Tells the transfers what they still have to move."""
        if not self._stale:
            for flow, left in zip(self.active, self._left.tolist(), strict=True):
                flow.left = left

    def mean_and_peak(
        self, link: int, begin: float, end: float, bin_seconds: float
    ) -> tuple[float, float]:
        """What a link carried in a time, bytes a second: the mean, and the largest interval's."""
        count = min(BINS_MAX, max(1, round((end - begin) / bin_seconds)))
        edges = end - bin_seconds * np.arange(count, -1, -1)
        carried = [moved[link] for moved in self._moved]
        moved = np.interp(edges, self._times, carried)
        whole = np.interp([begin, end], self._times, carried)
        mean = (whole[1] - whole[0]) / (end - begin)
        return float(mean), float(np.diff(moved).max() / bin_seconds)

    def _move(self, seconds: float) -> None:
        """Takes from the transfers, and keeps what each link has carried so far."""
        self._left -= self._rates * seconds
        self._times.append(self.now + seconds)
        self._moved.append(self._moved[-1] + self._carried * seconds)

    def _share(self) -> None:
        """Max-min fair rates; links that are equally tight are filled together."""
        self._stale = False
        counts = np.array([flow.count for flow in self.active], dtype=float)
        self._left = np.array([flow.left for flow in self.active])
        self._rates = np.zeros(len(self.active))
        users_of, links = self._uses()
        capacities = np.array(self.capacities, dtype=float)
        spare = capacities.copy()
        waiting = counts.copy()
        while waiting.any():
            users = np.bincount(links, waiting[users_of], len(spare))
            fair = np.divide(spare, users, out=np.full_like(spare, np.inf), where=users > 0)
            least = max(0.0, fair.min())
            filled = np.zeros(len(waiting), dtype=bool)
            filled[users_of[fair[links] <= least * (1 + EVEN)]] = True
            filled &= waiting > 0
            self._rates[filled] = least
            waiting[filled] = 0.0
            taken = np.bincount(links, (self._rates * counts)[users_of], len(spare))
            spare = np.maximum(capacities - taken, 0.0)
        carried = np.bincount(links, (self._rates * counts)[users_of], len(spare))
        self._carried = carried.astype(float)
        for flow, rate in zip(self.active, self._rates.tolist(), strict=True):
            flow.rate = rate

    def _uses(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which transfer occupies which link: their numbers, pair by pair."""
        pairs = [(number, link) for number, f in enumerate(self.active) for link in f.links]
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]
