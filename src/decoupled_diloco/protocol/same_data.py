"""Detect learners that train on the same data (not a rule of the method: a warning for people).

Nearly every program fixes its seed. Two learners of such a program see the same batches, and the
second one adds less than half of its worth. Two signs reveal it:

* Their random generators have equal states after equally many steps of their own. This sign does
  not depend on when they started. The coordinator compares the states.
* Their contributions to one round are nearly parallel (`merge.sketch`). In the first steps of a
  training, and for very simple models, this can happen with different data too. A warning therefore
  needs several rounds in a row, over several periods H. Each shard compares the contributions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from decoupled_diloco.protocol.messages import CoordinatorEffect, Note, SameData, Send, SyncerEffect
from decoupled_diloco.protocol.syncer_state import Ask, Twin

ROUNDS_MIN = 5
"""Number of rounds in a row with a nearly parallel contribution that cannot be chance."""

PERIODS_MIN = 4
"""Number of periods H over which these rounds must extend."""

FIX = (
    "a learner with the same data adds little: give each learner different data, for example by "
    "seed = 1337 + learner.index"
)


def same_data(one: str, other: str, why: str) -> Note:
    """Return the warning, with the same text wherever it is logged."""
    first, second = sorted((one, other))
    text = f"{first} and {second} seem to train on the same data"
    return Note(text, f"{why}: {FIX}", warns=True)


def drawn(
    known: dict[str, str], present: Collection[str], learner: str, states: Sequence[str]
) -> list[CoordinatorEffect]:
    """Compare the states of a learner's generators with those of all others.

    Args:
        known: For each state, the learner that last sent it; changed.
        present: The connected learners. Others may have been this one, under another name.
        learner: The learner that sent the states.
        states: Those of the generators that it uses in every step.
    """
    others = dict.fromkeys(known[state] for state in states if state in known)
    known |= dict.fromkeys(states, learner)
    other = next((each for each in others if each != learner and each in present), None)
    if other is None:
        return []
    why = "their random generators have the same state"
    return [
        same_data(other, learner, why),
        Send(learner, SameData(other, why), why),
        Send(other, SameData(learner, why), why),
    ]


def noticed(
    twins: dict[str, Twin], folded: Sequence[Ask], tick: int, period: int
) -> list[SyncerEffect]:
    """Count a round that is about to be merged, and warn once per pair.

    Args:
        twins: The known pairs, by learner; changed.
        folded: The contributions of the round.
        tick: The round's.
        period: H.
    """
    learners = sorted({ask.learner for ask in folded})
    if len(learners) < 2:
        return []
    partner: dict[str, str] = {}
    for ask in folded:
        for other in sorted(set(ask.alike) & set(learners) - {ask.learner}):
            partner.setdefault(ask.learner, other)
            partner.setdefault(other, ask.learner)
    effects: list[SyncerEffect] = []
    for name in learners:
        if name not in partner:
            twins.pop(name, None)  # only consecutive rounds count
            continue
        twin = twins.setdefault(name, Twin(partner[name], 0, tick))
        twin.other, twin.rounds = partner[name], twin.rounds + 1
        is_long = twin.rounds >= ROUNDS_MIN and tick - twin.since >= PERIODS_MIN * period
        if is_long and not twin.is_reported:
            twin.is_reported = True
            effects += _warn(twins, name, twin)
    return effects


def _warn(twins: Mapping[str, Twin], name: str, twin: Twin) -> list[SyncerEffect]:
    why = f"their contributions to {twin.rounds} rounds in a row are nearly equal"
    effects: list[SyncerEffect] = [Send(name, SameData(twin.other, why), why)]
    other = twins.get(twin.other)
    if other is None or other.other != name or not other.is_reported:
        effects.append(same_data(name, twin.other, why))
    return effects
