"""How much a learner's contributions count: probation and scores (rule 26).

*Probation*. A learner that joins a run in progress with a fresh inner optimizer is on probation for
its first steps. Its contributions then have weight 0: a shard requests, verifies and discards them,
and the learner drops their training with the next copy. They do not count for a quorum. The learner
reports how it started, so a shard that restarts decides as before.

*Scores*. An evaluator measures, from time to time, by how much each learner's own contributions
lower the held-out loss of the copies that they were made from. A learner's score is the median of
its last gains, in gains of the median learner: 1 is usual, and 0 does not help. What counts is each
learner's share of a merge, alone. Without one of eight contributions, the merged step is hardly
worse, so the differences between honest learners would be as large as the harm of a bad one.

With ``"exclude"``, a low score gives a learner weight 0. Its contributions are still scored, so it
counts again if they help. Fewer than half of the learners are excluded, so the median is that of an
honest one. With ``"weigh"``, its weight falls with its score, but never to 0.

All shards receive the same gains. They are in a shard's memory on its disk.

Functions of the shard's state.
"""

from __future__ import annotations

from math import isfinite
from statistics import median

from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import Gains, Note, Scored, SyncerEffect
from decoupled_diloco.protocol.syncer_state import Score, SyncerState

SAMPLES_MAX = 3
"""A score is the median of this many gains."""


SAMPLES_MIN = 2
"""With fewer gains, a score has no effect."""


SAMPLE_MAX = 2.0
"""Limit of a gain, in gains of the median learner. Of two gains, the median is the mean."""


SPREAD_FACTOR = 3.0
"""Gains count if their median exceeds this multiple of their median deviation."""


LEARNERS_MIN = 3
"""With fewer learners, the median may be that of a bad one."""


RECOVERED = 2.0
"""An excluded learner counts again above this multiple of the limit."""


WEIGHT_MIN = 0.01
"""The least weight of a learner that is not excluded. With it, it counts for a quorum."""


def weight_of(state: SyncerState, options: Options, learner: str) -> tuple[float, str]:
    """Return the factor on the weight of a learner's contributions, 0 to 1, and why it is not 1."""
    member = state.members[learner]
    if member.is_fresh and member.step < options.probation_steps:  # break: probation-ignored
        left = options.probation_steps - member.step
        return 0.0, f"on probation for {left} more steps, because its optimizer started fresh"
    return _weight(options, state.scores.get(learner))


def _weight(options: Options, standing: Score | None) -> tuple[float, str]:
    if standing is None or len(standing.samples) < SAMPLES_MIN:
        return 1.0, ""
    score, limit = standing.score, options.score_limit
    if options.trust == "exclude" and standing.excluded:  # break: exclusion-ignored
        return 0.0, f"excluded until its score exceeds {RECOVERED * limit:g}; it is {score:.2f}"
    if options.trust == "weigh" and score < 2 * limit:
        weight = max(WEIGHT_MIN, score / (2 * limit))
        return weight, f"its weight is {weight:.2g} of the usual, because its score is {score:.2f}"
    return 1.0, ""


def scored(
    state: SyncerState, options: Options, evaluator: str, message: Gains
) -> list[SyncerEffect]:
    """Update the scores by new gains, and decide what the learners' contributions count.

    Gains say nothing while chance decides them: if the learners' gains differ by as much as the
    median one, as near the end of a run.
    """
    gains = {name: gain for name, gain in message.gains if name in state.identities}
    if options.trust == "off" or evaluator not in state.observers:  # break: anyone-scores
        return []
    if len(gains) < LEARNERS_MIN or not all(map(isfinite, gains.values())):
        return []
    usual = median(gains.values())
    spread = median(abs(gain - usual) for gain in gains.values())
    if usual <= SPREAD_FACTOR * spread:
        return []
    for name, gain in gains.items():
        samples = state.scores.setdefault(name, Score()).samples
        samples.append(max(-SAMPLE_MAX, min(SAMPLE_MAX, gain / usual)))
        del samples[:-SAMPLES_MAX]
    effects: list[SyncerEffect] = []
    for name in sorted(gains, key=lambda name: state.scores[name].score):
        standing = state.scores[name]
        if options.trust == "exclude":
            effects += _exclude_or_return(state, options, name, standing)
        weight, why = _weight(options, standing)
        few = "" if len(standing.samples) >= SAMPLES_MIN else "it has only one gain"
        why = why or few or "it counts in full"
        effects.append(Scored(name, gains[name], standing.score, weight, why))
    return effects


def _exclude_or_return(
    state: SyncerState, options: Options, name: str, standing: Score
) -> list[SyncerEffect]:
    limit, score, before = options.score_limit, standing.score, standing.excluded
    if standing.excluded:
        standing.excluded = score <= RECOVERED * limit
    elif len(standing.samples) >= SAMPLES_MIN and score < limit:
        excluded = sum(each.excluded for each in state.scores.values())
        standing.excluded = 2 * (excluded + 1) < len(state.scores)  # break: all-excluded
    if standing.excluded == before:
        return []
    what = "is excluded" if standing.excluded else "counts again"
    why = f"its score is {score:.2f}; a contribution as good as that of the median learner has 1"
    return [Note(f"{name} {what}", why, warns=standing.excluded)]
