"""Transfers that share links with max-min fairness.

The link with the lowest rate per transfer is filled first, then the next one with what is left.
Transfers of one site's learners that start together are one `Flow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

BINS_MAX = 20_000
"""Most bins, at the end of the interval, in which the peak is searched."""

EVEN = 1e-9
"""Links are equally tight if their fair shares differ by less than this relative amount."""


@dataclass(slots=True, eq=False)
class Flow:
    """A group of identical transfers."""

    key: Any
    links: tuple[int, ...]  # numbers of the links that it occupies; if empty, it ends at once
    count: int  # number of transfers
    left: float  # bytes that each transfer still has to move
    rate: float = 0.0  # bytes per second of each transfer


@dataclass(slots=True)
class Flows:
    """All active transfers; `capacities` are the links' rates in bytes per second."""

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
        """Add a flow. Call `advance` to the current time first."""
        self._settle()
        self.active.append(flow)
        self._stale = True

    def next_end(self) -> float:
        """Return the time at which the first flow ends, if no other flow starts before."""
        if self._stale:
            self._share()
        moving = self._rates > 0
        if not moving.any():
            return float("inf")
        return self.now + float((self._left[moving] / self._rates[moving]).min())

    def advance(self, until: float) -> list[Flow]:
        """Move bytes until this time, at most until `next_end`; return the flows that ended."""
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
        """Write the remaining bytes back to the flows, before the arrays are rebuilt."""
        if not self._stale:
            for flow, left in zip(self.active, self._left.tolist(), strict=True):
                flow.left = left

    def mean_and_peak(
        self, link: int, begin: float, end: float, bin_seconds: float
    ) -> tuple[float, float]:
        """Return a link's mean rate, and the largest mean rate of one bin, in bytes per second."""
        count = min(BINS_MAX, max(1, round((end - begin) / bin_seconds)))
        edges = end - bin_seconds * np.arange(count, -1, -1)
        carried = [moved[link] for moved in self._moved]
        moved = np.interp(edges, self._times, carried)
        whole = np.interp([begin, end], self._times, carried)
        mean = (whole[1] - whole[0]) / (end - begin)
        return float(mean), float(np.diff(moved).max() / bin_seconds)

    def _move(self, seconds: float) -> None:
        """Subtract the moved bytes, and record how much each link has carried so far."""
        self._left -= self._rates * seconds
        self._times.append(self.now + seconds)
        self._moved.append(self._moved[-1] + self._carried * seconds)

    def _share(self) -> None:
        """Compute max-min fair rates; links that are equally tight are filled together."""
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
        """Return pairs of flow number and link number: which flow occupies which link."""
        pairs = [(number, link) for number, f in enumerate(self.active) for link in f.links]
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]
