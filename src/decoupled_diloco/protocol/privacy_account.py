"""The account of what each learner has revealed (rule 25). Functions of a shard's state.

A shard counts, for each fragment, the merges in which each learner took part. When a learner has
taken part in ``merges_max`` of a fragment, it is not asked for that fragment any more. It may train
on, with the published copies. How much ε a merge costs is computed elsewhere
(`privacy.accountant`), so that the machine only counts.

- A learner takes part in a merge at most once, because two contributions could change it by twice
  as much. A late contribution and the next one therefore go into different merges.
- A merge counts when it is ordered, and also if it fails. Its record on the disk has the account,
  so no version is published before it is accounted for.
- A restarted shard may find a copy at a learner that is newer than its disk. Each of the versions
  in between may contain any learner, so they count for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    Note,
    PrivacyAccounted,
    PrivacySpent,
    Send,
    SyncerEffect,
    Version,
)
from decoupled_diloco.protocol.syncer_state import Ask, FragmentState, SyncerState


def has_spent(options: Options, entry: FragmentState, learner: str) -> bool:
    """Return whether a learner may take part in no further merge of a fragment."""
    if options.merges_max is None:
        return False
    return entry.merges_of(learner) >= options.merges_max  # break: spent-learner-merged


def is_in_next(options: Options, entry: FragmentState, learner: str) -> bool:
    """Return whether a learner may not contribute to a fragment's next merge again."""
    once = options.merges_max is not None
    return once and learner in entry.delivered  # break: learner-merged-twice-at-once


def has_learners_left(state: SyncerState, options: Options, fragment: int) -> bool:
    """Return whether a round would have a quorum of learners that may still take part."""
    if options.merges_max is None:
        return True
    entry, stepping = state.fragments[fragment], state.stepping
    left = sum(not has_spent(options, entry, member.learner) for member in stepping)
    return left == len(stepping) or left >= options.quorum


def merges(
    state: SyncerState, options: Options, fragment: int, folded: Sequence[Ask]
) -> list[SyncerEffect]:
    """Count a merge for the learners in it, and notify those that have spent their ε with it."""
    if options.merges_max is None:
        return []
    entry = state.fragments[fragment]
    learners = dict.fromkeys(ask.learner for ask in folded)
    for learner in learners:
        entry.merges[learner] = entry.merges.get(learner, 0) + 1  # break: merge-not-accounted
    account = tuple((learner, entry.merges_of(learner)) for learner in learners)
    effects: list[SyncerEffect] = [PrivacyAccounted(fragment, account, "a merge is ordered")]
    for learner in learners:
        if has_spent(options, entry, learner):
            effects += _spent(state, options, fragment, learner)
    return effects


def _spent(state: SyncerState, options: Options, fragment: int, learner: str) -> list[SyncerEffect]:
    reason = reason_of(options, fragment)
    effects: list[SyncerEffect] = []
    if learner in state.members:
        effects.append(Send(learner, PrivacySpent(fragment, reason), reason))
    others = (p for p in state.fragments if p != fragment)
    if not any(has_spent(options, state.fragments[p], learner) for p in others):
        text = f"{learner} has spent its privacy budget and is merged no longer"
        effects.append(Note(text, reason, warns=True))
    return effects


def reason_of(options: Options, fragment: int) -> str:
    """Return why a learner is not asked for a fragment any more."""
    return (
        f"it took part in {options.merges_max} merges of fragment {fragment}, as many as "
        "[privacy.dp] allows"
    )


def restored(entry: FragmentState, known: Version | None, held: Version | None) -> None:
    """Count the versions that are missing on the disk for every learner.

    Args:
        entry: The fragment.
        known: Its version on the disk, whose account was restored; ``None``: there is none.
        held: Its version at a learner, from which it continues; ``None``: its initial weights.
    """
    missing = (0 if held is None else held.counter) - (0 if known is None else known.counter)
    entry.merges_unknown += max(0, missing)  # break: lost-merges-not-accounted
