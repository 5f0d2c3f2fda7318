"""Contents of fragments and contributions: which training is in them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

TOKENS_A_STEP = 8
HEAR_SECONDS = 1.0  # how often a shard is told whose bytes have come
DIFFERENCES_KEPT = 4  # of so many newest versions a shard still serves the difference

Content = dict[tuple[int, int, int], int]  # (learner, epoch, step) -> change of the count there


def plus(a: Content, b: Content, sign: int = 1) -> Content:
    out = dict(a)
    for key, value in b.items():
        total = out.get(key, 0) + sign * value
        if total:
            out[key] = total
        else:
            del out[key]
    return out


def steps(learner: int, epoch: int, first: int, last: int) -> Content:
    if last < first:
        return {}
    return {(learner, epoch, first): 1, (learner, epoch, last + 1): -1}


def ranges(content: Content) -> Iterator[tuple[int, int, int, int, int]]:
    """(learner, epoch, first, last, count) of every range whose count is not 0."""
    ends = sorted(content.items())
    count = 0
    for (key, change), (following, _) in itertools.pairwise([*ends, ((0, 0, 0), 0)]):
        count += change
        if count:
            yield *key, following[2] - 1, count


def size(content: Content) -> int:
    return sum((last - first + 1) * count for _, _, first, last, count in ranges(content))


def ill(content: Content) -> list[tuple[int, int, int, int, int]]:
    """What is in it more than once, or less than not at all."""
    return [found for found in ranges(content) if found[4] != 1]


def missing(part: Content, whole: Content) -> list[tuple[int, int, int, int, int]]:
    """What of a part is not in the whole; both count each atom once at most."""
    both = plus(part, whole)
    twice = {(a, b, c): n for (a, b, c), n in plus(both, whole, -1).items()}  # = part
    inside = Counter[tuple[int, int, int]]()
    covered = [r for r in ranges(whole) if r[4] > 0]
    for learner, epoch, first, last, _ in ranges(twice):
        for other, other_epoch, a, b, _ in covered:
            if (other, other_epoch) == (learner, epoch):
                for key, change in steps(learner, epoch, max(a, first), min(b, last)).items():
                    inside[key] += change
    return list(ranges(plus(part, {k: v for k, v in inside.items() if v}, -1)))


def digest(content: Content) -> str:
    return str(hash(frozenset(content.items())))
