"""The norm gate: a contribution much larger than expected is not merged unchanged.

The limit is ``median + k · MAD`` over the fragment's last norms of all learners, each scaled to the
contribution's number of steps. In s steps, training moves parameters by between √s (a random walk)
and s (a straight line). The larger scaling is used, so that neither a learner that was away nor one
that has just joined exceeds the limit for its steps. MAD is the median absolute deviation, at least
a tenth of the median, because equal norms reveal little about the next one. The first norms of a
fragment reveal less, so this share is larger for them: with three norms, the limit is 3.7 times
their median.

A learner's own past can raise its limit: its data or batches may make its updates larger than those
of the others. The limit then is as far above its own usual size. A usual size of more than three
medians counts as a fault: it does not raise the limit, and what exceeds the limit is clipped to the
usual norm of the fragment. The first contributions to a fragment, which have no limit yet, are then
divided by this size. An honest learner may be larger once, so a single size counts as a fault only
above six medians.

Norms above the limit are recorded as well. One bad learner among many does not move a median, and
if all norms grow (a higher learning rate), the limit follows.

An arriving contribution is refused, or folded with the believed tokens, and clipped if its norm is
too large (rules 6 and 13).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import BodyArrived, Verdict
from decoupled_diloco.protocol.syncer_state import Ask, Sample, SyncerState

SAMPLES_MAX = 32
"""Norms recorded per fragment."""


SAMPLES_MIN = 3
"""Minimum number of norms for a limit: one bad one does not move their median far."""


SAMPLES_FULL = 8
"""With fewer norms, the limit is higher."""


DEVIATION_MIN = 0.1
"""The smallest MAD, as a share of the median."""


OWN_MAX = 8
"""Own sizes recorded per learner."""


OWN_MIN = 3
"""With fewer own sizes, a learner's past is ignored."""


OWN_SIZE_MAX = 3.0
"""A larger usual size, in medians of its fragments, does not raise a learner's limit."""


SIZE_MAX = 1e6
"""Upper limit of a recorded size, so that it is a finite number."""


def grown(norm: float, since: int, steps: int) -> float:
    """Return the largest norm in another number of steps that is consistent with this one.

    >>> grown(1.0, 10, 40), grown(1.0, 40, 10)
    (4.0, 0.5)
    """
    ratio = steps / since
    return float(norm * (ratio if ratio >= 1 else ratio**0.5))


def norm_limit(
    samples: Sequence[Sample], own: Sequence[float], steps: int, k: float
) -> tuple[float, float] | None:
    """Return the largest norm that is merged unchanged, and the usual norm.

    ``None``: no limit applies (yet).

    Args:
        samples: The fragment's last contributions, of all learners.
        own: The learner's own last sizes, in usual norms.
        steps: Number of steps of the new contribution, at least 1.
        k: MADs above the median; 0: no limit.

    >>> norm_limit([(1.0, 24)] * 8, [], 24, 10.0), norm_limit([(1.0, 24)] * 4, [], 24, 10.0)
    ((2.0, 1.0), (3.0, 1.0))
    >>> norm_limit([(1.0, 24)] * 8, [2.5] * 3, 24, 10.0)
    (5.0, 1.0)
    """
    if k == 0 or len(samples) < SAMPLES_MIN:
        return None
    norms = [grown(norm, since, steps) for norm, since in samples]
    middle = median(norms)
    deviation = median(abs(norm - middle) for norm in norms)
    few = max(1.0, SAMPLES_FULL / len(norms))
    limit = middle + k * max(deviation, few * DEVIATION_MIN * middle)
    if len(own) >= OWN_MIN and median(own) <= OWN_SIZE_MAX:
        limit = max(limit, (1 + k * DEVIATION_MIN) * median(own) * middle)
    return limit, middle


def faulty_size(own: Sequence[float]) -> float | None:
    """Return a learner's usual size if it is too large for an honest learner.

    >>> faulty_size([4.0]), faulty_size([4.0, 4.0]), faulty_size([10.0])
    (None, 4.0, 10.0)
    """
    size = median(own or [1.0])
    most = OWN_SIZE_MAX if len(own) > 1 else 2 * OWN_SIZE_MAX
    return size if size > most else None


def remember(samples: list[Sample], norm: float, steps: int) -> None:
    """Record a contribution's norm."""
    samples.append((norm, steps))
    del samples[:-SAMPLES_MAX]


def remember_own(own: list[float], norm: float, usual: float) -> None:
    """Record a learner's own size."""
    own.append(min(SIZE_MAX, norm / usual) if usual > 0 else 1.0)
    del own[:-OWN_MAX]


# Decisions about a contribution (rules 6 and 13)


def problem_of(
    state: SyncerState, options: Options, ask: Ask, event: BodyArrived
) -> tuple[Verdict, str]:
    """Return the verdict on a contribution, and why it is not folded; empty: it is."""
    if event.base != ask.base:
        return "behind", f"its base {event.base} is not {ask.base}"
    if event.steps < 1 or event.tokens < 1:
        return "refused", f"{event.tokens} tokens in {event.steps} steps"
    age = age_of(state, ask)
    if age > 0 and options.late == "drop":
        return "refused", f"late by {age} versions"
    if age > options.age_max:
        return "refused", f"late by {age} versions, more than {options.age_max}"
    return "accepted", ""


def age_of(state: SyncerState, ask: Ask) -> int:
    """Return by how many versions a contribution is late if it arrives now."""
    entry, round = state.fragments[ask.fragment], state.rounds.get(ask.fragment)
    assert entry.version is not None
    merging = round is not None and round.settled_at is not None
    return entry.version.counter - ask.base.counter + merging  # break: arrival-during-merge-on-time


def tokens_believed(state: SyncerState, event: BodyArrived) -> int:
    """Return the tokens that count: those reported and possible in its steps (rule 13)."""
    known = state.identities[event.learner]
    reported = max(1, known.tokens + known.earlier_tokens)
    # break: tokens-beyond-reports
    return min(reported, state.tokens_believed(event.tokens, event.steps))


def gate_scale(state: SyncerState, options: Options, event: BodyArrived) -> tuple[float, str]:
    """Return the gate's scale for a contribution (0: refused) and the reason."""
    norms, own = state.fragments[event.fragment].norms, state.identities[event.learner].sizes
    size = faulty_size(own)
    found = norm_limit(norms, own, event.steps, options.norm_gate)
    # Recorded whatever the decision: if all norms grow, the limit must follow.
    remember(norms, event.norm, event.steps)
    if found is None:
        if size is None:
            return (1.0, "")
        target = event.norm / size
        text = f"norm={event.norm:.3g}, and its norms are usually {size:.3g} times those of others"
    else:
        limit, usual = found
        remember_own(own, event.norm, usual)
        if event.norm <= limit:
            return (1.0, "")
        target = limit if size is None else usual  # break: oversized-learner-granted
        text = (
            f"norm={event.norm:.3g} in {event.steps} steps exceeds the limit of {limit:.3g}; "
            f"the usual norm of this fragment is {usual:.3g}"
        )
    if options.oversized == "clip":
        return (target / event.norm, f"clipped: {text}")
    return (0.0, text)
