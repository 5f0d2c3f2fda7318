"""Measurements of the links at shards and learners, and the revisions that follow (rule 20).

A shard times each payload; a learner times each published copy that it fetches. `adapt` computes
what a shard reports to the coordinator and which revision results. Functions of the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from decoupled_diloco.protocol.adapt import SMOOTHING, arrived, body_seconds, demand_of
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Broadcast,
    CopyTook,
    Fetch,
    LearnerEffect,
    Note,
    Revision,
    Send,
    SyncerEffect,
    Version,
    shard_peer,
)
from decoupled_diloco.protocol.syncer_state import Ask, Member, SyncerState


class Revised(Protocol):
    """A state with schedule revisions: the one that applies, and the next ones."""

    revision: Revision | None
    next_revisions: tuple[Revision, ...]


def newest_of(state: Revised) -> Revision | None:
    """Return the newest known revision."""
    return state.next_revisions[-1] if state.next_revisions else state.revision


def record(state: Revised, revision: Revision) -> bool:
    """Record a revision, and return whether it is newer than the known ones."""
    newest = newest_of(state)
    newer = newest is None or revision.number > newest.number
    if newer:
        state.next_revisions = (*state.next_revisions, revision)
    return newer


def is_due(state: Revised, tick: int) -> bool:
    """Return whether the next revision applies at a tick."""
    # break: revision-early
    return bool(state.next_revisions) and state.next_revisions[0].tick <= tick


def follow(state: Revised, options: Options) -> Options:
    """Switch to the next revision, and return its settings."""
    state.revision, *later = state.next_revisions
    state.next_revisions = tuple(later)
    return options.revised(state.revision)


def welcome(state: SyncerState, learner: str) -> list[SyncerEffect]:
    """Send a connecting learner all revisions that apply or will apply."""
    known = (*([] if state.revision is None else [state.revision]), *state.next_revisions)
    # break: late-learner-lacks-revision
    return [Send(learner, revision, "H and τ were revised") for revision in known]


def pass_on(state: SyncerState, revision: Revision) -> list[SyncerEffect]:
    """Forward a new revision from the coordinator to the learners."""
    # break: revision-not-passed-on
    return [Broadcast(revision, "the coordinator decided it")] if record(state, revision) else []


def payload_arrived(
    state: SyncerState, options: Options, now: float, member: Member, ask: Ask
) -> list[SyncerEffect]:
    """Measure a learner's uplink by a payload, and change its codec if necessary."""
    began_at, step = ask.announced_at, state.step_seconds
    if not (options.ladder or options.adapt) or began_at is None or not step:
        return []
    ladder = options.rungs
    if (ask.codec or options.uplink_codec) != ladder[member.uplink.rung][0]:
        # It says nothing about the present codec, but the next payload may have queued behind it.
        member.uplink.free_at = now
        return []
    member.needs.answer.update(now - ask.asked_at, SMOOTHING)
    allowed = body_seconds(options.overlap, options.period, options.fragments, step)
    choice = arrived(member.uplink, ladder, began_at, now, allowed)
    if choice is None:
        return []
    text = f"{member.learner} now sends in {choice.codec} (before: {choice.before})"
    return [Note(text, choice.why)]


def copy_took(member: Member, message: CopyTook) -> list[SyncerEffect]:
    """Measure a learner's downlink by a copy."""
    member.needs.copy.update(max(0.0, message.seconds), SMOOTHING)
    return []


def report_demand(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Report at a tick what the learners' links need."""
    if options.adapt is None:
        return []
    links, ladder = [], dict(options.rungs)
    for member in state.stepping:
        seconds = _body_takes(state, options, ladder, now, member) if member.connected else None
        if seconds is not None:
            copy, answer = float(member.needs.copy), float(member.needs.answer)
            # With ``on_arrival``, a late copy is applied late, so τ need not cover the way back.
            back = copy if options.apply == "at_tau" else 0.0
            links.append((max(seconds, copy), answer + back))
    demand = demand_of(links, options.adapt.carried_by, state.step_seconds)
    return [] if demand is None else [Send(COORDINATOR, demand, "a tick")]


def _body_takes(
    state: SyncerState, options: Options, ladder: Mapping[str, float], now: float, member: Member
) -> float | None:
    """Return the seconds per payload in the coarsest codec: as measured, or longer by now."""
    uplink, bits = member.uplink, min(ladder.values())
    per_bit = uplink.per_bit.value
    known = None if per_bit is None else per_bit * bits
    between = state.step_seconds * options.period / options.fragments
    for fragment in member.under_way:
        ask = state.fragments[fragment].asks[member.learner]
        if ask.announced_at is not None:
            since = now - max(ask.announced_at, uplink.free_at)
            so_far = since * bits / ladder.get(ask.codec or options.uplink_codec, bits)
            # An upload that stalls must count before it ends, or a dead link would look fast.
            if so_far > (between if known is None else known):
                known = so_far
    return known


def fetches_begin(state: LearnerState, now: float, effects: Sequence[LearnerEffect]) -> None:
    """Record when fetches start."""
    for effect in effects:
        if isinstance(effect, Fetch):
            state.fragments[effect.fragment].fetched_from = now


def copy_arrived(
    state: LearnerState, options: Options, now: float, index: int, version: Version
) -> list[LearnerEffect]:
    """Report how long a copy took. A joiner fetches all copies at once and is ignored."""
    view, shard = state.fragments[index], options.owner(index)
    if options.adapt is None or view.fetching != version or not state.ready or not state.step:
        return []
    link = state.shards[shard]
    seconds = now - max(view.fetched_from, *(each.copy_at for each in state.shards))
    link.copy_at = now
    if view.fetch_whole:  # a whole copy is about this number of differences long
        seconds /= options.chain + 1
    return [Send(shard_peer(shard), CopyTook(index, seconds), "a copy has arrived")]
