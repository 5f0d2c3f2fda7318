"""Quotas: each party's share of the weight of a merge is between its two limits.

A party's weight is the sum of the weights of its contributions to the merge, and its share is that
weight by the sum of all. The limited shares are the only numbers s with sum 1 of the form

    s = min(most, max(least, λ · share))

with one λ for all parties that take part. So parties that no limit holds keep their proportions,
and a merge within all limits does not change. All contributions of a party are multiplied by the
same factor, s / share.

If only some of the parties take part, their upper limits may be less than 1 in sum, and no such
numbers exist. Then the upper limits are multiplied by one factor until their sum is 1, and are the
shares. A party alone therefore has the share 1. Lower limits never conflict, because those of all
parties are at most 1 in sum. A merge waits for its quorum of learners only, never for a party.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

Weighting = Literal["tokens", "uniform"]


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one party.

    Attributes:
        party: Its name.
        learners: Names of its learners; a name that ends with "*" stands for all that begin so.
        least: Smallest share of a merge, 0 to 1.
        most: Largest share of a merge, 0 to 1.
    """

    party: str
    learners: tuple[str, ...]
    least: float = 0.0
    most: float = 1.0

    def has(self, learner: str) -> bool:
        """Whether a learner is of this party."""
        return is_one_of(self.learners, learner)


def matches(pattern: str, learner: str) -> bool:
    """Whether a name is that of a pattern, or begins as one that ends with "*"."""
    if pattern.endswith("*"):
        return learner.startswith(pattern[:-1])
    return learner == pattern


def is_one_of(patterns: Iterable[str], learner: str) -> bool:
    """Whether a name matches one of these patterns."""
    return any(matches(pattern, learner) for pattern in patterns)


def weight_of(weighting: Weighting, steps: float, tokens: float, discount: float) -> float:
    """Return the weight of a contribution in a merge, as the merge arithmetic computes it.

    >>> weight_of("tokens", 4.0, 800.0, 0.5), weight_of("uniform", 4.0, 800.0, 1.0)
    (80000.0, 1.0)
    """
    return discount * (tokens * (tokens / steps) if weighting == "tokens" else 1.0)


def party_of(quotas: Sequence[Quota], learner: str) -> str:
    """Return the party of a learner; empty without quotas."""
    return next((quota.party for quota in quotas if quota.has(learner)), "")


def factors(
    quotas: Sequence[Quota], weights: Iterable[tuple[str, float]]
) -> tuple[tuple[str, float], ...]:
    """Return the factor of the weights of each party in a merge; empty: nothing changes.

    Args:
        quotas: The limits of all parties.
        weights: The party and the weight of each contribution, greater than 0.

    >>> quotas = [Quota("a", ("a*",), 0.0, 0.5), Quota("b", ("b*",)), Quota("c", ("c*",))]
    >>> factors(quotas, [("a", 8.0), ("b", 1.0), ("c", 1.0)])
    (('a', 0.625), ('b', 2.5), ('c', 2.5))
    >>> factors(quotas, [("a", 1.0), ("b", 1.0)]), factors(quotas, [("a", 1.0)])
    ((), ())
    """
    if not quotas:
        return ()
    sums: defaultdict[str, list[float]] = defaultdict(list)
    for party, weight in weights:
        sums[party].append(weight)
    totals = {party: fsum(each) for party, each in sorted(sums.items())}
    total = fsum(totals.values())
    present = {quota.party: quota for quota in quotas if quota.party in totals}
    shares = {party: totals[party] / total for party in present}
    limited = _limited(present, shares)
    if limited == shares:
        return ()
    return tuple((party, limited[party] / shares[party]) for party in totals)


def _limited(present: Mapping[str, Quota], shares: Mapping[str, float]) -> dict[str, float]:
    most = fsum(quota.most for quota in present.values())
    if most <= 1:  # break: quota-of-absent-party-kept
        return {party: quota.most / most for party, quota in present.items()}

    def at(level: float) -> dict[str, float]:
        # break: share-above-limit
        return {p: min(q.most, max(q.least, level * shares[p])) for p, q in present.items()}

    if all(present[party].least <= share <= present[party].most for party, share in shares.items()):
        return dict(shares)
    # The sum grows with λ, and linearly between the values at which a party meets a limit.
    limits = ((q.least, q.most) for q in present.values())
    bounds = zip(limits, shares.values(), strict=True)
    levels = sorted({limit / share for pair, share in bounds for limit in pair})
    low, high = 0.0, levels[-1]
    for level in levels:
        if fsum(at(level).values()) >= 1:
            high = level
            break
        low = level
    below, above = fsum(at(low).values()), fsum(at(high).values())
    level = high if above == below else low + (1 - below) / (above - below) * (high - low)
    return at(level)
