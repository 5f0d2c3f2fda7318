"""How a shard and a learner follow their links: what they measure, and the newest plan (rule 20).

A shard times each body; a learner times each published copy that it fetches. What the shard tells
the coordinator of it, and what that makes of it, is in `revisions`. Functions of the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from decoupled_diloco.protocol.adapt import SMOOTHING, arrived, body_seconds
from decoupled_diloco.protocol.effects import (
    Broadcast,
    Fetch,
    LearnerEffect,
    Note,
    Send,
    SyncerEffect,
)
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.membership import Member
from decoupled_diloco.protocol.messages import CopyTook
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.peers import COORDINATOR, shard_peer
from decoupled_diloco.protocol.revisions import Revision, demand_of
from decoupled_diloco.protocol.rounds import Ask
from decoupled_diloco.protocol.syncer_state import SyncerState
from decoupled_diloco.protocol.versions import Version


class Revised(Protocol):
    """A state that knows of revisions: the one that holds, and those that will."""

    revision: Revision | None
    next_revisions: tuple[Revision, ...]


def newest_of(state: Revised) -> Revision | None:
    """The newest that is heard of."""
    return state.next_revisions[-1] if state.next_revisions else state.revision


def hear(state: Revised, revision: Revision) -> bool:
    """A revision is heard of; whether it is a newer one."""
    newest = newest_of(state)
    newer = newest is None or revision.number > newest.number
    if newer:
        state.next_revisions = (*state.next_revisions, revision)
    return newer


def is_due(state: Revised, tick: int) -> bool:
    """Whether the next revision holds at a tick."""
    # break: revision-early
    return bool(state.next_revisions) and state.next_revisions[0].tick <= tick


def follow(state: Revised, options: Options) -> Options:
    """The settings of the next revision, which holds now."""
    state.revision, *later = state.next_revisions
    state.next_revisions = tuple(later)
    return options.revised(state.revision)


def welcome(state: SyncerState, learner: str) -> list[SyncerEffect]:
    """Who comes is told of all revisions that hold or will."""
    known = (*([] if state.revision is None else [state.revision]), *state.next_revisions)
    # break: late-learner-lacks-revision
    return [Send(learner, revision, "H and τ follow the links") for revision in known]


def pass_on(state: SyncerState, revision: Revision) -> list[SyncerEffect]:
    """The coordinator has told a shard of a revision."""
    # break: revision-not-passed-on
    return [Broadcast(revision, "the coordinator says so")] if hear(state, revision) else []


def body_is_here(
    state: SyncerState, options: Options, now: float, member: Member, ask: Ask
) -> list[SyncerEffect]:
    """What a body tells of its learner's link; it may be asked for another codec.

    One that was asked for in an earlier codec tells nothing of the present one.
    """
    began_at, step = ask.announced_at, state.step_seconds
    if not (options.ladder or options.adapt) or began_at is None or not step:
        return []
    ladder = options.rungs
    if (ask.codec or options.uplink_codec) != ladder[member.uplink.rung][0]:
        return []
    member.needs.answer.update(now - ask.asked_at, SMOOTHING)
    allowed = body_seconds(options.overlap, options.period, options.fragments, step)
    choice = arrived(member.uplink, ladder, began_at, now, allowed)
    if choice is None:
        return []
    text = f"{member.learner} sends in {choice.codec} from now on, it was {choice.before}"
    return [Note(text, choice.why)]


def copy_took(member: Member, message: CopyTook) -> list[SyncerEffect]:
    """What a copy tells of a learner's link."""
    member.needs.copy.update(max(0.0, message.seconds), SMOOTHING)
    return []


def tell_demand(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """At a tick a shard says what its learners' links need."""
    if options.adapt is None:
        return []
    links, ladder = [], dict(options.rungs)
    for member in state.stepping:
        seconds = _body_takes(state, options, ladder, now, member) if member.connected else None
        if seconds is not None:
            copy, answer = float(member.needs.copy), float(member.needs.answer)
            back = copy if options.apply == "at_tau" else 0.0  # else a late copy is taken late
            links.append((max(seconds, copy), answer + back))
    demand = demand_of(links, options.adapt.carried_by, state.step_seconds)
    return [] if demand is None else [Send(COORDINATOR, demand, "a tick")]


def _body_takes(
    state: SyncerState, options: Options, ladder: Mapping[str, float], now: float, member: Member
) -> float | None:
    """Seconds of a learner's body in the coarsest codec: as they took, or longer by now."""
    uplink, bits = member.uplink, min(ladder.values())
    per_bit = uplink.per_bit.value
    known = None if per_bit is None else per_bit * bits
    between = state.step_seconds * options.period / options.fragments
    for fragment in member.under_way:
        ask = state.fragments[fragment].asks[member.learner]
        if ask.announced_at is not None:
            since = now - max(ask.announced_at, uplink.free_at)
            so_far = since * bits / ladder.get(ask.codec or options.uplink_codec, bits)
            if so_far > (between if known is None else known):
                known = so_far
    return known


def fetches_begin(state: LearnerState, now: float, effects: Sequence[LearnerEffect]) -> None:
    """Copies are fetched from now on."""
    for effect in effects:
        if isinstance(effect, Fetch):
            state.fragments[effect.fragment].fetched_from = now


def copy_is_here(
    state: LearnerState, options: Options, now: float, index: int, version: Version
) -> list[LearnerEffect]:
    """A copy has come; who joins fetches all of them at once, which tells nothing."""
    view, shard = state.fragments[index], options.owner(index)
    if options.adapt is None or view.fetching != version or not state.ready or not state.step:
        return []
    link = state.shards[shard]
    seconds = now - max(view.fetched_from, *(each.copy_at for each in state.shards))
    link.copy_at = now
    if view.fetch_whole:  # of so many differences, about
        seconds /= options.chain + 1
    return [Send(shard_peer(shard), CopyTook(index, seconds), "a copy is here")]
