"""Draining a learner that was asked to stop (rule 17). Functions of both machines' states.

The learner stops stepping and reports to every shard which fragments have new training. Each of
them is due at once, before all others. In such a round, every live learner receives a request,
whether or not it would otherwise qualify: an outer step with the leaving learner alone would
overwrite the training of the others for nothing. A leaving learner thus costs the others one early
sync of its fragments and no step. An open round sends it a request at once and waits for its
payload. A round that is being merged makes its training stale, as always.

If learners open their rounds by themselves, only the leaving learner receives requests, for all
fragments at once. The training of the others is not overwritten then.

With fewer live learners than the quorum, nothing can be merged, and the learner is dismissed at
once. It never waits longer than its timeout. Whatever is in no version by then is lost.
"""

from __future__ import annotations

from decoupled_diloco.protocol import visits
from decoupled_diloco.protocol.copies import has_diverged
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    Draining,
    DrainRefused,
    LearnerEffect,
    Send,
    SyncerEffect,
    shard_peer,
)
from decoupled_diloco.protocol.participation import participation
from decoupled_diloco.protocol.privacy_account import has_spent, reason_of
from decoupled_diloco.protocol.syncer_state import Member, Round, SyncerState

ASKED_TO_STOP = "it was asked to stop"
"""The reason of a learner that received SIGTERM."""

DEPARTURES_MAX = 8
"""How often a learner's announcement to leave is accepted; each reconnection repeats it."""


def leaving(
    state: SyncerState, options: Options, owned: tuple[int, ...], member: Member, message: Draining
) -> list[SyncerEffect]:
    """Make the unmerged fragments of a leaving learner due at once."""
    if state.phase != "running":
        return []  # the closing sweep includes it, and before the run there is nothing to drain
    if state.members_stepping < options.clock_quorum:
        reason = f"only {state.members_stepping} learners are live, fewer than the quorum"
        return [Send(member.learner, DrainRefused(reason), reason)]
    fragments = frozenset(message.fragments) & frozenset(owned)
    spent = [p for p in fragments if has_spent(options, state.fragments[p], member.learner)]
    if spent:
        reason = reason_of(options, spent[0])
        return [Send(member.learner, DrainRefused(reason), reason)]
    member.departures += 1
    if member.departures > DEPARTURES_MAX:
        return []  # each announcement costs all learners a sync
    member.leaving_with = fragments - member.drained
    participation(options).leaves(state, member)
    return []


def was_asked(member: Member, fragment: int) -> None:
    """Mark a leaving learner's fragment as requested."""
    if member.leaving_with is not None:
        member.leaving_with -= {fragment}


def was_drained(member: Member, fragment: int) -> None:
    """Mark a leaving learner's fragment as drained."""
    if member.leaving_with is not None:
        member.drained.add(fragment)


def waits_for_leaver(state: SyncerState, round: Round) -> bool:
    """Return whether a round waits for a leaving learner, however long its upload takes."""
    member = state.members.get(round.leaver)
    going = member is not None and member.leaving_with is not None
    return going and state.fragments[round.fragment].owes(round.leaver)


def stop_requested(state: LearnerState, options: Options, why: str) -> list[LearnerEffect]:
    """Report to every connected shard what there is to drain."""
    state.leaving = why
    return [
        Send(shard_peer(shard), _leaving(state, options, shard), why)
        for shard, link in enumerate(state.shards)
        if link.linked and link.offset is not None
    ]


def welcomed(state: LearnerState, options: Options, shard: int) -> list[LearnerEffect]:
    """Repeat the report to a shard that has welcomed a leaving learner (again)."""
    if not state.leaving:
        return []
    return [Send(shard_peer(shard), _leaving(state, options, shard), state.leaving)]


def drained(state: LearnerState, options: Options) -> bool:
    """Return whether no connected shard could merge anything more of this learner."""
    for index, view in enumerate(state.fragments):
        link = state.shards[options.owner(index)]
        within_reach = link.linked and not link.dismissed and not link.finished
        accepted = view.sent is not None and view.sent.version is not None
        done = accepted or has_diverged(options, view)
        done = done or visits.is_unwanted(options, view)
        if within_reach and ((state.steps_of(view) > 0 and not done) or view.late):
            return False
    return True


def unmerged_tokens(state: LearnerState) -> int:
    """Return the tokens that are known to be in no version: the mean over all fragments."""
    unmerged = 0
    for view in state.fragments:
        taken = view.sent is not None and view.sent.version is not None
        merged = view.sent.taken.tokens if view.sent is not None and taken else 0
        unmerged += max(0, state.tokens_of(view) - merged)
    return unmerged // max(1, len(state.fragments))


def _leaving(state: LearnerState, options: Options, shard: int) -> Draining:
    views = {p: state.fragments[p] for p in options.owned(shard)}
    new = (p for p, v in views.items() if state.steps_of(v) > 0 and not has_diverged(options, v))
    return Draining(tuple(new), state.leaving)
