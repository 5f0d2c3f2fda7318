"""How a joining learner obtains its state: from which source, in which order (rule 16).

A learner with its own checkpoint continues from it: model, optimizer and data position. It claims
the versions with which the checkpoint was aligned. A fragment whose published copy is still that
version keeps its local progress. Every other fragment is overwritten by the newer copy, never
rebased, whatever ``missed`` and ``alignment`` are. The reason: what the earlier incarnation sent,
before or after the checkpoint, may be merged in a newer version or folded for the next one. A
difference to the old copy would then be merged twice. Within a version this cannot happen: no
version contains yet what was made from it, and while a shard has a learner's contribution from the
newest version, it requests no other.

Functions of the learner's state.
"""

from __future__ import annotations

from decoupled_diloco.protocol.learner_state import LearnerState, Recovery, Search
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Began,
    KeptFragment,
    LearnerEffect,
    Ready,
    Recovered,
    Send,
    Trains,
)

SHARD_PATIENCE_SECONDS = 10.0
"""How long a learner with its own checkpoint waits for an unreachable shard.

It then trains on from what it has, like a learner that loses a shard during the run.
"""


def began(state: LearnerState, options: Options, now: float, event: Began) -> list[LearnerEffect]:
    """Start the recovery after admission, from the learner's own checkpoint if it has one."""
    state.recovery = Recovery(now, event.why, bool(event.kept))
    # The state of an optimizer reveals a learner's data to its receiver, and to shard 0.
    shares = options.merges_max is None and not options.secure  # break: private-state-shared
    state.shares_state = shares
    state.recovery.gives = event.gives and shares
    if event.seeks_donor and not event.kept and shares:
        state.recovery.search = Search()
    if event.kept:
        state.recovery.patient_until = now + SHARD_PATIENCE_SECONDS
    state.step, state.tokens = event.steps_alone, event.tokens_alone
    for link in state.shards:
        link.last_message_step = state.step
    for own in event.kept:
        view = state.fragments[own.fragment]
        view.held, view.again = own.version, own.again
        # A device that has left in order has only its published copies, and what it trained since.
        view.restored = own.steps > 0 or not options.devices
        view.seals = {own.version: (own.digest, own.seal)}
        # May be negative: this incarnation counts from what it has trained alone, usually 0, and
        # the kept steps still count.
        view.steps_before, view.tokens_before = state.step - own.steps, state.tokens - own.tokens
    return []


def deadline(state: LearnerState) -> float | None:
    """Return when the recovery needs a ``Tick``, if no other event occurs."""
    recovery = state.recovery
    if recovery is None:
        return None
    search = None if recovery.search is None else recovery.search.until
    instants = [instant for instant in (recovery.patient_until, search) if instant is not None]
    return min(instants, default=None)


def ready_if_complete(state: LearnerState, options: Options, now: float) -> list[LearnerEffect]:
    """Let training start when every fragment is as new as the reachable shards have it."""
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
    ready = Ready("every fragment has arrived")
    if recovery is None:
        return [ready]
    recovered = _recovered(state, recovery, now)
    if options.probation_periods and recovered.way == "published":
        # In the first period, the optimizers of all learners are fresh.
        state.is_fresh = max(link.clock for link in state.shards) >= options.period
    effects: list[LearnerEffect] = [recovered, ready]
    if recovery.gives or recovery.search is not None:
        effects.append(Send(COORDINATOR, Trains(recovery.gives), "it has started to train"))
    return effects


def kept(state: LearnerState) -> tuple[KeptFragment, ...]:
    """Return what a checkpoint of this boundary stores per fragment, once all are held."""
    fragments = tuple(
        KeptFragment(
            index,
            view.held,
            state.steps_of(view),
            state.tokens_of(view),
            *view.seals.get(view.held, ("", "")),
            again=view.again,
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
        if link.news != 0:  # None: no welcome yet
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
        return Recovered(
            "donor", seconds, 0, len(state.fragments), "by a relay", named.donor, named.nbytes
        )
    return Recovered("published", seconds, 0, len(state.fragments), recovery.why)
