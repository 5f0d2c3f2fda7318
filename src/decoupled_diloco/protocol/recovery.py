"""How a learner comes by its state when it joins: which way, in which order (rule 16).

A learner that has its own checkpoint goes on from it: model, optimizer, data position. It claims
the versions that the checkpoint was aligned with. A fragment whose published copy is still that one
keeps its local progress; every other is overwritten by the newer copy, never rebased, whatever
``missed`` and ``alignment`` say. For what the earlier life sent, before the checkpoint or after it,
may be merged in a newer version, or lie folded for the next one: a difference to the old copy would
be merged twice. Within a version it cannot be: what was made from it is in none yet, and while a
shard has something of a learner id that was made from the newest version it asks for nothing else.

Functions of the learner's state.
"""

from __future__ import annotations

from decoupled_diloco.protocol.effects import LearnerEffect, Ready, Recovered, Send
from decoupled_diloco.protocol.events import Began, KeptFragment
from decoupled_diloco.protocol.learner_state import LearnerState, Recovery
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.transfer.messages import Trains
from decoupled_diloco.protocol.transfer.state import Search

SHARD_PATIENCE_SECONDS = 10.0
"""A learner with its own checkpoint waits so long for the word of a shard that is out of reach;
then it trains on from what it has, as one would that loses a shard on the way."""


def began(state: LearnerState, now: float, event: Began) -> list[LearnerEffect]:
    """This process was let in; perhaps its own checkpoint is there."""
    state.recovery = Recovery(now, event.why, bool(event.kept))
    state.recovery.gives = event.gives
    if event.seeks_donor and not event.kept:
        state.recovery.search = Search()
    if event.kept:
        state.recovery.patient_until = now + SHARD_PATIENCE_SECONDS
    for own in event.kept:
        view = state.fragments[own.fragment]
        view.held, view.restored = own.version, True
        view.seals = {own.version: (own.digest, own.seal)}
        view.steps_before, view.tokens_before = -own.steps, -own.tokens
    return []


def deadline(state: LearnerState) -> float | None:
    """When to look again, though nothing has happened."""
    recovery = state.recovery
    if recovery is None:
        return None
    search = None if recovery.search is None else recovery.search.until
    instants = [instant for instant in (recovery.patient_until, search) if instant is not None]
    return min(instants, default=None)


def ready_if_complete(state: LearnerState, options: Options, now: float) -> list[LearnerEffect]:
    """Training may begin when every fragment is here, as new as the shards in reach have it."""
    recovery = state.recovery
    until = None if recovery is None else recovery.patient_until
    if recovery is not None and until is not None and now >= until:
        recovery.patient_until = None
    if any(view.newest is None for view in state.fragments):
        return []
    if recovery is not None and recovery.from_checkpoint and not _is_current(state, options):
        return []
    search = None if recovery is None else recovery.search
    if search is not None and search.phase not in ("found", "given up"):
        return []
    state.ready = True
    ready = Ready("every fragment is here")
    if recovery is None:
        return [ready]
    effects: list[LearnerEffect] = [_recovered(state, recovery, now), ready]
    if recovery.gives or recovery.search is not None:
        effects.append(Send(COORDINATOR, Trains(recovery.gives), "it has begun to train"))
    return effects


def kept(state: LearnerState) -> tuple[KeptFragment, ...]:
    """What a checkpoint of this boundary has of the fragments; nothing before all are held."""
    fragments = tuple(
        KeptFragment(
            index,
            view.held,
            state.steps_of(view),
            state.tokens_of(view),
            *view.seals.get(view.held, ("", "")),
        )
        for index, view in enumerate(state.fragments)
        if view.held is not None
    )
    return fragments if len(fragments) == len(state.fragments) else ()


def _is_current(state: LearnerState, options: Options) -> bool:
    assert state.recovery is not None
    patient = state.recovery.patient_until is not None
    for shard, link in enumerate(state.shards):
        if not link.linked and not patient:
            continue
        if link.news != 0:
            return False
        views = [state.fragments[index] for index in options.owned(shard)]
        if any(view.latest and view.newest and view.latest.version > view.newest for view in views):
            return False
    return True


def _recovered(state: LearnerState, recovery: Recovery, now: float) -> Recovered:
    kept = sum(view.restored and view.staged is None for view in state.fragments)
    seconds = now - recovery.began_at
    if recovery.from_checkpoint:
        overwritten = len(state.fragments) - kept
        return Recovered("checkpoint", seconds, kept, overwritten, recovery.why)
    search = recovery.search
    if search is not None and search.phase == "found":
        named = search.named
        assert named is not None
        how = "by a relay" if search.relayed else "from itself"
        return Recovered("donor", seconds, 0, len(state.fragments), how, named.donor, named.nbytes)
    return Recovered("published", seconds, 0, len(state.fragments), recovery.why)
