"""What a learner that is told to go drains first (rule 17). Functions of both machines' states.

It stops stepping and tells every shard of which fragments it has something new. Each of them is due
at once, ahead of what else is due, and in such a round everybody who is live is asked, whether it
qualifies otherwise or not: an outer step with the one who goes alone would overwrite what the
others have trained for nothing. So a learner that goes costs the others one sync of its fragments
ahead of time, and no step. An open round asks it at once, and waits for what it sends; one that is
being merged makes what it has stale, as ever.

Where learners open their rounds by themselves it alone is asked, for all fragments at once: what
the others have trained is not overwritten then.

Where fewer learners than the quorum are live nothing can be merged: it is dismissed at once. It
waits no longer than it was given; what is not in a version by then is lost with it.
"""

from __future__ import annotations

from decoupled_diloco.protocol.effects import LearnerEffect, Send, SyncerEffect
from decoupled_diloco.protocol.learner_fragments import is_apart
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.membership import Member
from decoupled_diloco.protocol.messages import Draining, DrainRefused
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.peers import shard_peer
from decoupled_diloco.protocol.rounds import Round
from decoupled_diloco.protocol.syncer_state import SyncerState

LEAVINGS_MAX = 8
"""Who connects anew says again that it goes; so often it is heard."""


def leaving(
    state: SyncerState, options: Options, owned: tuple[int, ...], member: Member, message: Draining
) -> list[SyncerEffect]:
    """A learner is about to go: what it has something new of is due at once."""
    if state.phase != "running":
        return []  # the closing sweep asks everyone, and before that there is nothing to drain
    if state.members_stepping < options.quorum:
        reason = f"{state.members_stepping} learners are live, fewer than the quorum"
        return [Send(member.learner, DrainRefused(reason), reason)]
    member.leavings += 1
    if member.leavings > LEAVINGS_MAX:
        return []  # who says so again and again would have everybody asked again and again
    member.leaving_with = frozenset(message.fragments) & frozenset(owned) - member.drained
    if options.participants == "own":
        member.arrears |= member.leaving_with
        return []
    first = [p for p in sorted(member.leaving_with) if p not in state.rounds]
    rest = {p: tick for p, tick in state.queue.items() if p not in first}
    state.queue = dict.fromkeys(first, state.clock) | rest
    state.again -= set(first)
    return []


def leaver_of(state: SyncerState, options: Options, fragment: int) -> str:
    """A learner for whose sake a fragment's round is opened; empty: there is none."""
    if options.participants == "own":
        return ""
    for member in state.members.values():
        if member.leaving_with is not None and fragment in member.leaving_with:
            return member.learner
    return ""


def was_asked(member: Member, fragment: int) -> None:
    """A learner is asked for a fragment: if it is about to go, this is what it has waited for."""
    if member.leaving_with is not None:
        member.leaving_with -= {fragment}


def was_heard(member: Member, fragment: int) -> None:
    """A learner that is about to go has drained what it had of a fragment: that is all."""
    if member.leaving_with is not None:
        member.drained.add(fragment)


def waits_for_leaver(state: SyncerState, round: Round) -> bool:
    """Whether a round waits for one that is about to go, however long its upload takes."""
    member = state.members.get(round.leaver)
    going = member is not None and member.leaving_with is not None
    return going and round.leaver in state.fragments[round.fragment].asks


def told_to_go(state: LearnerState, options: Options, why: str) -> list[LearnerEffect]:
    """Tells every shard in reach what there is to drain."""
    state.leaving = why
    return [
        Send(shard_peer(shard), _leaving(state, options, shard), why)
        for shard, link in enumerate(state.shards)
        if link.linked and link.offset is not None
    ]


def welcomed(state: LearnerState, options: Options, shard: int) -> list[LearnerEffect]:
    """A shard has (again) welcomed this learner: if it is about to go, the shard must know."""
    if not state.leaving:
        return []
    return [Send(shard_peer(shard), _leaving(state, options, shard), state.leaving)]


def drained(state: LearnerState, options: Options) -> bool:
    """Whether nothing is left that a shard in reach could still take."""
    for index, view in enumerate(state.fragments):
        link = state.shards[options.owner(index)]
        within_reach = link.linked and not link.dismissed and not link.finished
        done = is_apart(options, view) or (view.sent is not None and view.sent.version is not None)
        if within_reach and ((state.steps_of(view) > 0 and not done) or view.late):
            return False
    return True


def unmerged_tokens(state: LearnerState) -> int:
    """Tokens that are in no version, as far as is known: the mean over all fragments."""
    unmerged = 0
    for view in state.fragments:
        taken = view.sent is not None and view.sent.version is not None
        merged = view.sent.taken.tokens if view.sent is not None and taken else 0
        unmerged += max(0, state.tokens_of(view) - merged)
    return unmerged // max(1, len(state.fragments))


def _leaving(state: LearnerState, options: Options, shard: int) -> Draining:
    views = {p: state.fragments[p] for p in options.owned(shard)}
    new = (p for p, v in views.items() if state.steps_of(v) > 0 and not is_apart(options, v))
    return Draining(tuple(new), state.leaving)
