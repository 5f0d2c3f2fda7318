"""Notices learners that train on the same data (no rule of the method: a warning for people).

Nearly every program fixes its seed. Two learners of such a program see the same batches, and the
second is worth less than half. Two signs give it away:

* Their generators of random numbers are in one state after equally many steps of their own. This
  sign does not depend on when they have started. The coordinator compares.
* Their contributions to one round are nearly parallel (`merge.sketch`). In the first steps of a
  training, and for very simple models, this can be so for different data too. So a warning needs
  several rounds in a row, over several periods H. Each shard compares.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from decoupled_diloco.protocol.effects import CoordinatorEffect, Note, Send, SyncerEffect
from decoupled_diloco.protocol.messages import SameData
from decoupled_diloco.protocol.rounds import Ask

ROUNDS_MIN = 5
"""So many rounds in a row with another contribution, all nearly parallel to one, are no chance."""

PERIODS_MIN = 4
"""And they must be so many periods H apart."""

FIX = (
    "a learner that repeats another one's data adds little: give each learner its own, for example "
    "seed = 1337 + learner.index"
)


@dataclass(slots=True)
class Twin:
    """A learner whose contributions are nearly parallel to another one's.

    Attributes:
        other: The other learner.
        rounds: How many rounds in a row.
        since: The tick of the first of them.
        is_told: Whether people were warned.
    """

    other: str
    rounds: int
    since: int
    is_told: bool = False


def same_data(one: str, other: str, why: str) -> Note:
    """The warning; it is in the same words wherever it is logged."""
    first, second = sorted((one, other))
    text = f"{first} and {second} seem to train on the same data"
    return Note(text, f"{why}: {FIX}", warns=True)


def drawn(
    known: dict[str, str], present: Collection[str], learner: str, states: Sequence[str]
) -> list[CoordinatorEffect]:
    """Compares the states of a learner's generators with those of all others.

    Args:
        known: The learner that has told a state last, by state; changed.
        present: The learners that are connected. Others may have been this one, by another name.
        learner: Which learner tells them.
        states: Of the generators that it draws from in every step.
    """
    others = dict.fromkeys(known[state] for state in states if state in known)
    known |= dict.fromkeys(states, learner)
    other = next((each for each in others if each != learner and each in present), None)
    if other is None:
        return []
    why = "they draw the same random numbers in every step"
    return [
        same_data(other, learner, why),
        Send(learner, SameData(other, why), why),
        Send(other, SameData(learner, why), why),
    ]


def noticed(
    twins: dict[str, Twin], folded: Sequence[Ask], tick: int, period: int
) -> list[SyncerEffect]:
    """Counts a round that is about to be merged; warns once of each pair.

    Args:
        twins: What is known so far, by learner; changed.
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
            twins.pop(name, None)
            continue
        twin = twins.setdefault(name, Twin(partner[name], 0, tick))
        twin.other, twin.rounds = partner[name], twin.rounds + 1
        is_long = twin.rounds >= ROUNDS_MIN and tick - twin.since >= PERIODS_MIN * period
        if is_long and not twin.is_told:
            twin.is_told = True
            effects += _warn(twins, name, twin)
    return effects


def _warn(twins: Mapping[str, Twin], name: str, twin: Twin) -> list[SyncerEffect]:
    why = f"their contributions to {twin.rounds} rounds in a row are nearly equal"
    told: list[SyncerEffect] = [Send(name, SameData(twin.other, why), why)]
    other = twins.get(twin.other)
    if other is None or other.other != name or not other.is_told:
        told.append(same_data(name, twin.other, why))
    return told
