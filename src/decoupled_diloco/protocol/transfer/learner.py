"""A learner's side of transfers (rule 16): looking for a donor, and being one.

A learner that begins with nothing but the published copies asks the coordinator for a healthy
learner that has seen the versions that it itself has been told of, and takes that one's optimizer
state (and whatever else it gives away), never its parameters: those come from the published copies,
so that nothing unmerged of the donor's is merged twice. It waits, but not for ever: so long for an
offer, so long for each chunk, and for so many donors. Then it begins with a fresh optimizer.

A donor copies at a step boundary at which it holds the versions named, trains on, and serves the
copy from the host's memory.
"""

from __future__ import annotations

from typing import assert_never

from decoupled_diloco.protocol.effects import LearnerEffect, Note, Send
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.messages import Message
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.transfer.effects import (
    CopyState,
    DropState,
    FetchState,
    ForgetState,
    RelayState,
)
from decoupled_diloco.protocol.transfer.events import (
    ChunkArrived,
    StateArrived,
    StateCopied,
    StateFailed,
    StateNotCopied,
    TransferEvent,
)
from decoupled_diloco.protocol.transfer.messages import (
    ChunkTaken,
    NoTransfer,
    RelayOpened,
    RelayWanted,
    StateDeclined,
    StateOffered,
    StateUnwanted,
    StateWanted,
    Trains,
    TransferLost,
    TransferReady,
    TransferWanted,
)
from decoupled_diloco.protocol.transfer.state import Giving, Search
from decoupled_diloco.protocol.versions import Holding

OFFER_SECONDS = 30.0
"""How long a donor may take to come to a step boundary at which it has seen the versions."""

STALL_SECONDS = 20.0
"""A donor that brings no chunk for so long is given up: four of the transport's own stalls."""

DONORS_MAX = 3
"""After so many donors in vain, a fresh optimizer is the faster way."""


def handle(state: LearnerState, now: float, event: TransferEvent) -> list[LearnerEffect]:
    """What the shell says of a transfer."""
    match event:
        case StateCopied():
            return copied(state, event)
        case StateNotCopied():
            return not_copied(state, event)
        case ChunkArrived():
            return chunk_arrived(state, now, event)
        case StateArrived(attempt):
            return state_arrived(state, attempt)
        case StateFailed(attempt, reason):
            return state_failed(state, now, attempt, reason)
        case _:
            assert_never(event)


def told(state: LearnerState, now: float, message: Message) -> list[LearnerEffect]:
    """What the coordinator says of a transfer."""
    match message:
        case NoTransfer():
            return no_donor(state, message)
        case TransferReady():
            return named(state, now, message)
        case TransferLost():
            return donor_lost(state, now, message)
        case StateWanted():
            return wanted(state, now, message)
        case StateUnwanted():
            return unwanted(state, message)
        case RelayOpened():
            return relay_opened(state, now, message)
        case _:
            raise AssertionError(f"the coordinator does not say this to a learner: {message}")


def look(state: LearnerState, now: float) -> list[LearnerEffect]:
    """Asks for a donor as soon as every shard has told of its versions."""
    search = _search(state)
    if search is None or search.phase != "waiting":
        return []
    if any(view.latest is None for view in state.fragments):
        return []
    return _ask(state, search, now, "every fragment's newest version is known")


def asked_again(state: LearnerState, now: float) -> list[LearnerEffect]:
    """The coordinator is there (again): it has forgotten what it was asked."""
    why, recovery = "the coordinator is there again", state.recovery
    if state.ready:
        forgotten: list[LearnerEffect] = [
            ForgetState(learner, giving.attempt, why)
            for learner, giving in state.givings.items()
            if giving.copied
        ]
        state.givings.clear()  # whoever still wants one asks again, and nobody else would say so
        gives = recovery is not None and recovery.gives
        return [*forgotten, Send(COORDINATOR, Trains(True), why)] if gives else forgotten
    search = _search(state)
    if search is None or search.phase != "asking":
        return look(state, now)
    return _ask(state, search, now, why)


def _ask(state: LearnerState, search: Search, now: float, why: str) -> list[LearnerEffect]:
    search.attempt += 1
    search.phase, search.until = "asking", now + OFFER_SECONDS + STALL_SECONDS
    search.named, search.relayed = None, False
    seen = tuple(
        Holding(index, view.latest.version)
        for index, view in enumerate(state.fragments)
        if view.latest is not None
    )
    return [Send(COORDINATOR, TransferWanted(search.attempt, seen, search.refused), why)]


def no_donor(state: LearnerState, message: NoTransfer) -> list[LearnerEffect]:
    """Nobody can give."""
    search = _search(state)
    if search is None or search.attempt != message.attempt:
        return []
    return _give_up(state, search, message.reason)


def named(state: LearnerState, now: float, message: TransferReady) -> list[LearnerEffect]:
    """A donor's copy is ready."""
    search = _search(state)
    if search is None or search.phase != "asking" or search.attempt != message.attempt:
        return []
    search.phase, search.named, search.until = "copying", message, now + STALL_SECONDS
    if not message.address:
        return []  # the relay is being opened
    return [_fetch(message, "", f"{message.donor} serves it")]


def _fetch(message: TransferReady, path: str, why: str) -> FetchState:
    return FetchState(
        message.donor,
        message.attempt,
        message.head_nbytes,
        message.nbytes,
        message.digest,
        message.address,
        path,
        why,
        message.key,
    )


def donor_lost(state: LearnerState, now: float, message: TransferLost) -> list[LearnerEffect]:
    """The donor is gone, or declines."""
    search = _search(state)
    if search is None or search.attempt != message.attempt:
        return []
    return _another(state, search, now, message.donor, message.reason)


def chunk_arrived(state: LearnerState, now: float, event: ChunkArrived) -> list[LearnerEffect]:
    """The copy goes on; a relay may forget what is here."""
    search = _search(state)
    if search is None or search.phase != "copying" or search.attempt != event.attempt:
        return []
    search.until = now + STALL_SECONDS
    if not search.relayed:
        return []
    return [Send(COORDINATOR, ChunkTaken(event.attempt, event.chunk), "it is here")]


def state_arrived(state: LearnerState, attempt: int) -> list[LearnerEffect]:
    """The copy is whole."""
    search = _search(state)
    if search is not None and search.phase == "copying" and search.attempt == attempt:
        search.phase, search.until = "found", None
    return []


def state_failed(state: LearnerState, now: float, attempt: int, reason: str) -> list[LearnerEffect]:
    """The copy cannot be had this way: by a relay, then from another."""
    search = _search(state)
    if search is None or search.phase != "copying" or search.attempt != attempt:
        return []
    assert search.named is not None
    if search.relayed:
        return _another(state, search, now, search.named.donor, reason)
    search.until = now + STALL_SECONDS
    return [Send(COORDINATOR, RelayWanted(attempt), reason)]


def patience_over(state: LearnerState, now: float) -> list[LearnerEffect]:
    """No offer, or no chunk, for too long."""
    search = _search(state)
    if search is None or search.until is None or now < search.until:
        return []
    if search.phase == "asking" or search.named is None:
        return _give_up(state, search, "nobody has offered its state in time")
    reason = f"no chunk within {STALL_SECONDS:g} s"
    drop = DropState(search.attempt, reason)
    return [drop, *_another(state, search, now, search.named.donor, reason)]


def _another(
    state: LearnerState, search: Search, now: float, donor: str, reason: str
) -> list[LearnerEffect]:
    note = Note(f"{donor or 'the donor'} gives no state", reason)
    search.refused = (*search.refused, donor) if donor else search.refused
    if search.attempt >= DONORS_MAX:
        return [note, *_give_up(state, search, f"{search.attempt} donors in vain")]
    drop = [DropState(search.attempt, reason)] if search.phase == "copying" else []
    return [note, *drop, *_ask(state, search, now, reason)]


def _give_up(state: LearnerState, search: Search, reason: str) -> list[LearnerEffect]:
    effects: list[LearnerEffect] = []
    if search.phase == "copying":
        effects.append(DropState(search.attempt, reason))
    search.phase, search.until, search.named = "given up", None, None
    assert state.recovery is not None
    state.recovery.why = ": ".join(text for text in (state.recovery.why, reason) if text)
    return [*effects, Note("it begins with a fresh optimizer", reason)]


def _search(state: LearnerState) -> Search | None:
    return None if state.recovery is None else state.recovery.search


def wanted(state: LearnerState, now: float, message: StateWanted) -> list[LearnerEffect]:
    """Another learner needs this one's state: at a boundary at which it has seen the versions."""
    if not state.ready or state.step == 0 or state.leaving or state.ended:
        reason = "it does not train, or no more"
        declined = StateDeclined(message.learner, message.attempt, reason)
        return [Send(COORDINATOR, declined, reason)]
    state.givings[message.learner] = Giving(message.attempt, message.seen, now + OFFER_SECONDS)
    return []


def at_boundary(state: LearnerState, now: float) -> list[LearnerEffect]:
    """A step is finished: is it time to copy?"""
    effects: list[LearnerEffect] = []
    for learner, giving in list(state.givings.items()):
        if giving.copied:
            continue
        if all(_has_seen(state, holding) for holding in giving.seen):
            giving.copied = True
            effects.append(CopyState(learner, giving.attempt, "it has seen the versions named"))
        elif now >= giving.until:
            del state.givings[learner]
            reason = f"it has not seen the versions named within {OFFER_SECONDS:g} s"
            declined = StateDeclined(learner, giving.attempt, reason)
            effects.append(Send(COORDINATOR, declined, reason))
    return effects


def _has_seen(state: LearnerState, holding: Holding) -> bool:
    if not 0 <= holding.fragment < len(state.fragments):
        return False
    held = state.fragments[holding.fragment].held
    return held is not None and held >= holding.version


def copied(state: LearnerState, event: StateCopied) -> list[LearnerEffect]:
    """The copy is on the host."""
    giving = state.givings.get(event.learner)
    if giving is None or giving.attempt != event.attempt:
        return [ForgetState(event.learner, event.attempt, "it is not wanted any more")]
    offered = StateOffered(
        event.learner,
        event.attempt,
        event.head_nbytes,
        event.nbytes,
        event.digest,
        event.address,
        event.key,
    )
    return [Send(COORDINATOR, offered, "a copy is ready")]


def not_copied(state: LearnerState, event: StateNotCopied) -> list[LearnerEffect]:
    """It could not be copied or delivered."""
    if state.givings.pop(event.learner, None) is None:
        return []
    declined = StateDeclined(event.learner, event.attempt, event.reason)
    return [Send(COORDINATOR, declined, event.reason)]


def relay_opened(state: LearnerState, now: float, message: RelayOpened) -> list[LearnerEffect]:
    """A shard relays: the donor delivers there, the other one fetches from there."""
    why = "a shard relays it"
    giving = state.givings.get(message.learner)
    if giving is not None and giving.attempt == message.attempt:
        return [RelayState(message.learner, message.attempt, message.path, why)]
    search = _search(state)
    if search is None or search.phase != "copying" or search.attempt != message.attempt:
        return []
    assert search.named is not None
    search.relayed, search.until = True, now + STALL_SECONDS
    return [_fetch(search.named, message.path, why)]


def unwanted(state: LearnerState, message: StateUnwanted) -> list[LearnerEffect]:
    """The copy is not needed any more."""
    giving = state.givings.get(message.learner)
    if giving is None or giving.attempt != message.attempt:
        return []
    del state.givings[message.learner]
    return [ForgetState(message.learner, message.attempt, "it is not wanted any more")]
