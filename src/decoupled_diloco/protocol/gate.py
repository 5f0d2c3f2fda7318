"""The norm gate: a contribution much larger than can be expected is not merged as it is.

What can be expected says the fragment's last norms, of all learners: ``median + k · MAD``, each
brought to the contribution's number of steps. Training moves parameters somewhere between √s (a
random walk) and s (a straight line) in s steps; the larger of the two is taken, so that neither a
learner that was away nor one that has just joined is ever above the limit for its steps. MAD is the
median absolute deviation, at least a tenth of the median, because norms that are all alike say
little about the next one.

And the learner's own past: one whose data or batches make its updates larger than the others' goes
on as it did. Its limit is as much above its own usual size, though that counts for ten times the
median at most, so that a liar cannot raise its limit as it likes.

Norms above the limit are remembered as well: one bad learner among many does not move a median, and
when all become larger (a higher learning rate) the limit follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SAMPLES_MAX = 32
"""How many norms of a fragment are remembered."""

SAMPLES_MIN = 8
"""With fewer there is no limit."""

DEVIATION_MIN = 0.1
"""The smallest MAD, as a share of the median."""

OWN_MAX = 8
"""How many of a learner's own sizes are remembered."""

OWN_MIN = 3
"""With fewer its own past says nothing."""

OWN_SIZE_MAX = 10.0
"""A learner's usual size, in medians of its fragments, counts for so much at most."""

Sample = tuple[float, int]
"""Norm and steps of a contribution."""


def grown(norm: float, since: int, steps: int) -> float:
    """The largest norm that this one can be taken for in another number of steps.

    >>> grown(1.0, 10, 40), grown(1.0, 40, 10)
    (4.0, 0.5)
    """
    ratio = steps / since
    return float(norm * (ratio if ratio >= 1 else ratio**0.5))


def norm_limit(
    samples: Sequence[Sample], own: Sequence[float], steps: int, k: float
) -> tuple[float, float] | None:
    """The largest norm that is merged as it is, and the usual one; ``None``: no limit (yet).

    Args:
        samples: Of the fragment's last contributions, of all learners.
        own: The learner's own last sizes, in usual norms.
        steps: How many steps the new one is of, at least 1.
        k: Of MADs above the median; 0: no limit.

    >>> norm_limit([(1.0, 24)] * 8, [], 24, 10.0), norm_limit([(1.0, 24)] * 7, [], 24, 10.0)
    ((2.0, 1.0), None)
    >>> norm_limit([(1.0, 24)] * 8, [2.5] * 3, 24, 10.0)
    (5.0, 1.0)
    """
    if k == 0 or len(samples) < SAMPLES_MIN:
        return None
    norms = [grown(norm, since, steps) for norm, since in samples]
    middle = median(norms)
    deviation = median(abs(norm - middle) for norm in norms)
    limit = middle + k * max(deviation, DEVIATION_MIN * middle)
    if len(own) >= OWN_MIN:
        limit = max(limit, (1 + k * DEVIATION_MIN) * median(own) * middle)
    return limit, middle


def remember(samples: list[Sample], norm: float, steps: int) -> None:
    """Takes a contribution's norm in."""
    samples.append((norm, steps))
    del samples[:-SAMPLES_MAX]


def remember_own(own: list[float], norm: float, usual: float) -> None:
    """Takes a learner's own size in."""
    own.append(min(OWN_SIZE_MAX, norm / usual) if usual > 0 else 1.0)
    del own[:-OWN_MAX]
