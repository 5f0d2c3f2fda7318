"""A shard's global step: the K-th largest run step of the live learners (rule 1).

The paper's "K new reports since the last round" would tick M times per step with K = 1. Here one
tick is one unit of t, whoever's step it is, and the clock never goes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest, nsmallest


def kth_largest(values: Iterable[int], k: int) -> int | None:
    """The k-th largest of the values; ``None`` if there are fewer than k.

    >>> kth_largest([5, 9, 7], 2), kth_largest([5], 2)
    (7, None)
    """
    largest = nlargest(k, values)
    return largest[-1] if len(largest) == k else None


def advanced(clock: int, run_steps: Iterable[int], quorum: int) -> int:
    """The clock after these run steps: max(t, K-th largest s_m); it stands while fewer are live.

    >>> advanced(4, [6, 5, 3], 2), advanced(4, [6], 2)
    (5, 4)
    """
    reached = kth_largest(run_steps, quorum)
    return clock if reached is None else max(clock, reached)


def shift_after_leave(clock: int, run_steps: Iterable[int], quorum: int) -> int:
    """By how much the remaining learners move up, so that the clock does not stall.

    Without it the clock would stand until the slower ones had caught up with the one that left.

    >>> shift_after_leave(10, [7, 4], 1), shift_after_leave(10, [7], 2)
    (3, 0)
    """
    reached = kth_largest(run_steps, quorum)
    return 0 if reached is None else max(0, clock - reached)


def reached_at(instants: Iterable[float], quorum: int) -> float | None:
    """When the clock reaches a step that the learners reach at these instants; ``None``: never.

    The K-th largest run step is at least t from the K-th earliest of these instants on.

    >>> reached_at([3.0, 1.0, 2.0], 2), reached_at([3.0], 2)
    (2.0, None)
    """
    earliest = nsmallest(quorum, instants)
    return earliest[-1] if len(earliest) == quorum else None


def stands(live: int, quorum: int) -> bool:
    """Whether the clock stands with so many live learners, whatever steps they make.

    >>> stands(1, 2), stands(2, 2)
    (True, False)
    """
    return kth_largest(range(live), quorum) is None
