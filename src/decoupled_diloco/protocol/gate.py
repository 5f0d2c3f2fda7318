"""The norm gate: a contribution much larger than its fragment's last ones is not merged as it is.

The limit is ``median + k · MAD`` of the last norms, each brought to the contribution's number of
steps. Training moves parameters somewhere between √s (a random walk) and s (a straight line) in s
steps; the larger of the two is taken, so that neither a learner that was away nor one that has just
joined is ever refused for its steps. MAD is the median absolute deviation, at least a tenth of the
median, because norms that are all alike say little about the next one.

Norms that were refused are remembered as well: one bad learner among many does not move a median,
and when all become larger (a higher learning rate) the limit follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SAMPLES_MAX = 32
"""How many norms of a fragment are remembered."""

SAMPLES_MIN = 8
"""With fewer nothing is refused."""

DEVIATION_MIN = 0.1
"""The smallest MAD, as a share of the median."""

Sample = tuple[float, int]
"""Norm and steps of a contribution."""


def grown(norm: float, since: int, steps: int) -> float:
    """The largest norm that this one can be taken for in another number of steps.

    >>> grown(1.0, 10, 40), grown(1.0, 40, 10)
    (4.0, 0.5)
    """
    ratio = steps / since
    return float(norm * (ratio if ratio >= 1 else ratio**0.5))


def norm_limit(samples: Sequence[Sample], steps: int, k: float) -> float | None:
    """The largest norm that is merged as it is; ``None``: there is no limit (yet).

    Args:
        samples: Of the fragment's last contributions.
        steps: How many steps the new one is of, at least 1.
        k: Of MADs above the median; 0: no limit.

    >>> norm_limit([(1.0, 24)] * 8, 24, 10.0), norm_limit([(1.0, 24)] * 7, 24, 10.0)
    (2.0, None)
    """
    if k == 0 or len(samples) < SAMPLES_MIN:
        return None
    norms = [grown(norm, since, steps) for norm, since in samples]
    middle = median(norms)
    deviation = median(abs(norm - middle) for norm in norms)
    return middle + k * max(deviation, DEVIATION_MIN * middle)


def remember(samples: list[Sample], norm: float, steps: int) -> None:
    """Takes a contribution's norm in."""
    samples.append((norm, steps))
    del samples[:-SAMPLES_MAX]
