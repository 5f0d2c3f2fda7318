"""Transfers of one learner's state to another that starts without any (rule 16).

*The learner's side.* A learner that starts with only the published copies requests a state provider
from the coordinator: a healthy learner that has applied the versions that were announced to it. It
copies the provider's optimizer state (and whatever else the provider shares), but never its
parameters. Those come from the published copies, so that none of the provider's unmerged training
is merged twice. The learner waits for a limited time: for an offer, for each chunk, and for a
number of providers. Then it starts with a fresh optimizer.

A provider copies its state at a step boundary at which it has applied these versions, and continues
to train. It uploads the copy from host memory to a shard, which relays it, because every network
permits that.

*The coordinator's side.*

```
         TransferWanted               StateOffered
 (joiner) ────────▶ asking provider ─────────▶ relayed        Trains: over
                       │  StateDeclined,          │
                       ▼  provider gone           ▼
                  TransferLost: the joiner asks again
```

Nothing here is durable: joiners repeat their requests to a restarted coordinator. The joiner's
timeouts limit everything. A provider's training loop never waits, and no process waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from decoupled_diloco.protocol.learner_state import LearnerState, Search, StateRequest
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    ChunkArrived,
    ChunkTaken,
    CloseRelay,
    CoordinatorEffect,
    CopyState,
    DropState,
    FetchState,
    ForgetState,
    Holding,
    LearnerEffect,
    Message,
    Note,
    NoTransfer,
    OpenRelay,
    RelayOn,
    RelayOpened,
    RelayState,
    Send,
    StateCopied,
    StateDeclined,
    StateOffered,
    StateUnwanted,
    StateWanted,
    Trains,
    TransferLost,
    TransferReady,
    TransferWanted,
)

OFFER_SECONDS = 30.0
"""How long a provider may take to reach a boundary at which it has applied the versions."""


STALL_SECONDS = 20.0
"""After this time without a chunk, a provider is abandoned: four of the transport's own stalls."""


DONORS_MAX = 3
"""After this number of failed providers, a fresh optimizer is faster."""


def receive(state: LearnerState, now: float, message: Message) -> list[LearnerEffect]:
    """Process a message of the coordinator about a transfer."""
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
            raise AssertionError(f"unexpected message from the coordinator: {message}")


def request_if_known(state: LearnerState, now: float) -> list[LearnerEffect]:
    """Request a provider as soon as every shard has announced its versions."""
    search = _search(state)
    if search is None or search.phase != "waiting":
        return []
    if any(view.latest is None for view in state.fragments):
        return []
    return _ask(state, search, now, "every fragment's newest version is known")


def reconnected(state: LearnerState, now: float) -> list[LearnerEffect]:
    """Repeat the state's requests, which a restarted coordinator has lost."""
    why, recovery = "the coordinator is back", state.recovery
    if state.ready:
        forgotten: list[LearnerEffect] = [
            ForgetState(learner, request.attempt, why)
            for learner, request in state.state_requests.items()
            if request.copied
        ]
        state.state_requests.clear()  # a joiner that still needs the state repeats its request
        gives = recovery is not None and recovery.gives
        return [*forgotten, Send(COORDINATOR, Trains(True), why)] if gives else forgotten
    search = _search(state)
    if search is None or search.phase != "asking":
        return request_if_known(state, now)
    return _ask(state, search, now, why)


def _ask(state: LearnerState, search: Search, now: float, why: str) -> list[LearnerEffect]:
    search.attempt += 1
    search.phase, search.until = "asking", now + OFFER_SECONDS + STALL_SECONDS
    search.named = None
    seen = tuple(
        Holding(index, view.latest.version)
        for index, view in enumerate(state.fragments)
        if view.latest is not None
    )
    return [Send(COORDINATOR, TransferWanted(search.attempt, seen, search.refused), why)]


def no_donor(state: LearnerState, message: NoTransfer) -> list[LearnerEffect]:
    """Abandon the search: no provider is available."""
    search = _search(state)
    if search is None or search.attempt != message.attempt:
        return []
    return _give_up(state, search, message.reason)


def named(state: LearnerState, now: float, message: TransferReady) -> list[LearnerEffect]:
    """Prepare to fetch a provider's copy that is ready."""
    search = _search(state)
    if search is None or search.phase != "asking" or search.attempt != message.attempt:
        return []
    search.phase, search.named, search.until = "copying", message, now + STALL_SECONDS
    return []  # `RelayOpened` follows


def donor_lost(state: LearnerState, now: float, message: TransferLost) -> list[LearnerEffect]:
    """Search again: the provider left or declined."""
    search = _search(state)
    if search is None or search.attempt != message.attempt:
        return []
    return _another(state, search, now, message.donor, message.reason)


def chunk_arrived(state: LearnerState, now: float, event: ChunkArrived) -> list[LearnerEffect]:
    """Acknowledge a chunk, so that the relay may drop it."""
    search = _search(state)
    if search is None or search.phase != "copying" or search.attempt != event.attempt:
        return []
    search.until = now + STALL_SECONDS
    return [Send(COORDINATOR, ChunkTaken(event.attempt, event.chunk), "the chunk has arrived")]


def state_arrived(state: LearnerState, attempt: int) -> list[LearnerEffect]:
    """End the search: the copy is complete."""
    search = _search(state)
    if search is not None and search.phase == "copying" and search.attempt == attempt:
        search.phase, search.until = "found", None
    return []


def state_failed(state: LearnerState, now: float, attempt: int, reason: str) -> list[LearnerEffect]:
    """Search again: the copy could not be fetched."""
    search = _search(state)
    if search is None or search.phase != "copying" or search.attempt != attempt:
        return []
    assert search.named is not None
    return _another(state, search, now, search.named.donor, reason)


def patience_over(state: LearnerState, now: float) -> list[LearnerEffect]:
    """Search again, or stop, after too long without an offer or a chunk."""
    search = _search(state)
    if search is None or search.until is None or now < search.until:
        return []
    if search.phase == "asking" or search.named is None:
        return _give_up(state, search, "no learner offered its state in time")
    reason = f"no chunk within {STALL_SECONDS:g} s"
    drop = DropState(search.attempt, reason)
    return [drop, *_another(state, search, now, search.named.donor, reason)]


def _another(
    state: LearnerState, search: Search, now: float, donor: str, reason: str
) -> list[LearnerEffect]:
    note = Note(f"{donor or 'the state provider'} did not deliver its state", reason)
    search.refused = (*search.refused, donor) if donor else search.refused
    if search.attempt >= DONORS_MAX:
        return [note, *_give_up(state, search, f"{search.attempt} providers failed")]
    drop = [DropState(search.attempt, reason)] if search.phase == "copying" else []
    return [note, *drop, *_ask(state, search, now, reason)]


def _give_up(state: LearnerState, search: Search, reason: str) -> list[LearnerEffect]:
    effects: list[LearnerEffect] = []
    if search.phase == "copying":
        effects.append(DropState(search.attempt, reason))
    search.phase, search.until, search.named = "given up", None, None
    assert state.recovery is not None
    state.recovery.why = ": ".join(text for text in (state.recovery.why, reason) if text)
    return [*effects, Note("it starts with a fresh optimizer", reason)]


def _search(state: LearnerState) -> Search | None:
    return None if state.recovery is None else state.recovery.search


def wanted(state: LearnerState, now: float, message: StateWanted) -> list[LearnerEffect]:
    """Schedule a copy of this learner's state, for a boundary at which it has the versions."""
    reason = ""
    if not state.ready or state.step == 0 or state.leaving or state.ended:
        reason = "it is not training"
    if not state.shares_state:  # a request that no honest coordinator makes
        reason = "it shares no state in a run with secure sums or differential privacy"
    if reason:
        declined = StateDeclined(message.learner, message.attempt, reason)
        return [Send(COORDINATOR, declined, reason)]
    request = StateRequest(message.attempt, message.seen, now + OFFER_SECONDS)
    state.state_requests[message.learner] = request
    return []


def at_boundary(state: LearnerState, now: float) -> list[LearnerEffect]:
    """Copy the state for the waiting learners after a step, if the versions are applied."""
    effects: list[LearnerEffect] = []
    for learner, request in list(state.state_requests.items()):
        if request.copied:
            continue
        if all(_has_applied(state, holding) for holding in request.seen):
            request.copied = True
            effects.append(CopyState(learner, request.attempt, "it has applied the versions"))
        elif now >= request.until:
            del state.state_requests[learner]
            reason = f"it did not apply the versions within {OFFER_SECONDS:g} s"
            declined = StateDeclined(learner, request.attempt, reason)
            effects.append(Send(COORDINATOR, declined, reason))
    return effects


def _has_applied(state: LearnerState, holding: Holding) -> bool:
    if not 0 <= holding.fragment < len(state.fragments):
        return False
    held = state.fragments[holding.fragment].held
    return held is not None and held >= holding.version


def copied(
    state: LearnerState, learner: str, attempt: int, copy: StateCopied
) -> list[LearnerEffect]:
    """Offer the copy, which is in host memory."""
    request = state.state_requests.get(learner)
    if request is None or request.attempt != attempt:
        return [ForgetState(learner, attempt, "it is no longer needed")]
    offered = StateOffered(learner, attempt, copy.head_nbytes, copy.nbytes, copy.digest)
    return [Send(COORDINATOR, offered, "a copy is ready")]


def not_copied(state: LearnerState, learner: str, attempt: int, reason: str) -> list[LearnerEffect]:
    """Decline, because the state could not be copied or delivered."""
    if state.state_requests.pop(learner, None) is None:
        return []
    return [Send(COORDINATOR, StateDeclined(learner, attempt, reason), reason)]


def relay_opened(state: LearnerState, now: float, message: RelayOpened) -> list[LearnerEffect]:
    """Start the upload or the download over a relay that a shard has opened."""
    why = "a shard relays it"
    request = state.state_requests.get(message.learner)
    if request is not None and request.attempt == message.attempt:
        return [RelayState(message.learner, message.attempt, message.path, why)]
    search = _search(state)
    if search is None or search.phase != "copying" or search.attempt != message.attempt:
        return []
    ready = search.named
    assert ready is not None
    search.until = now + STALL_SECONDS
    sizes = (ready.head_nbytes, ready.nbytes)
    return [FetchState(ready.donor, ready.attempt, *sizes, ready.digest, message.path, why)]


def unwanted(state: LearnerState, message: StateUnwanted) -> list[LearnerEffect]:
    """Drop a copy that is no longer needed."""
    request = state.state_requests.get(message.learner)
    if request is None or request.attempt != message.attempt:
        return []
    del state.state_requests[message.learner]
    return [ForgetState(message.learner, message.attempt, "it is no longer needed")]


# The coordinator's side


HEAD_BYTES_MAX = 256 << 20
"""Largest head: it contains names, plain values, and a digest per chunk."""


STATE_BYTES_MAX = 1 << 42
"""Largest state: a relay counts at most a million chunks of it."""


@dataclass(slots=True)
class StateTransfer:
    """The transfer to one learner; ``path`` is that of its relay, if there is one."""

    donor: str
    attempt: int
    path: str = ""


@dataclass(slots=True)
class Transfers:
    """Learners that train, and the transfers in progress.

    ``relays`` counts the relays, so that each has its own name.
    """

    training: set[str] = field(default_factory=set)
    transfers: dict[str, StateTransfer] = field(default_factory=dict)
    relays: int = 0

    def receive(
        self, learner: str, message: Message, present: Mapping[str, bool], clock: int
    ) -> list[CoordinatorEffect]:
        """Process a learner's message about a transfer."""
        match message:
            case TransferWanted():
                return self.wanted(learner, message, present, clock)
            case StateOffered():
                return self.offered(learner, message)
            case StateDeclined(joiner, attempt, reason):
                return self.declined(learner, joiner, attempt, reason)
            case ChunkTaken(attempt, chunk):
                return self.chunk_taken(learner, attempt, chunk)
            case Trains(gives):
                return self.trains(learner, gives=gives)
            case _:
                raise AssertionError(f"unexpected message from a learner: {message}")

    def wanted(
        self, joiner: str, message: TransferWanted, present: Mapping[str, bool], clock: int
    ) -> list[CoordinatorEffect]:
        """Choose a provider: the first by name that is present and not sharing already."""
        effects = self._over(joiner, "it repeats its request")
        if clock == 0:
            return [*effects, _none(joiner, message.attempt, "the run has only begun")]
        busy = {transfer.donor for transfer in self.transfers.values()}
        others = [n for n in sorted(self.training - {joiner}) if present.get(n)]
        free = [n for n in others if n not in message.refused and n not in busy]
        if not free:
            reason = "no other learner is training" if not others else "no provider is left"
            return [*effects, _none(joiner, message.attempt, reason)]
        self.transfers[joiner] = StateTransfer(free[0], message.attempt)
        request = StateWanted(joiner, message.attempt, message.seen)
        return [*effects, Send(free[0], request, f"{joiner} starts without state")]

    def offered(self, donor: str, message: StateOffered) -> list[CoordinatorEffect]:
        """Open a relay for a provider's copy that is ready."""
        transfer = self._of(donor, message.learner, message.attempt)
        if transfer is None:
            unwanted = StateUnwanted(message.learner, message.attempt)
            return [Send(donor, unwanted, "it is no longer needed")]
        if not 0 < message.head_nbytes <= HEAD_BYTES_MAX or message.nbytes > STATE_BYTES_MAX:
            sizes = f"head_nbytes={message.head_nbytes} and nbytes={message.nbytes}"
            reason = f"{sizes} must be 1 to {HEAD_BYTES_MAX} and 0 to {STATE_BYTES_MAX}"
            return self.declined(donor, message.learner, message.attempt, reason)
        attempt, nbytes = message.attempt, message.nbytes
        ready = TransferReady(donor, attempt, message.head_nbytes, nbytes, message.digest)
        why = "its copy is ready"
        return [
            Send(message.learner, ready, why),
            *self._open_relay(message.learner, transfer, message, why),
        ]

    def declined(
        self, donor: str, joiner: str, attempt: int, reason: str
    ) -> list[CoordinatorEffect]:
        """End a transfer whose provider cannot deliver, and notify the joiner."""
        if self._of(donor, joiner, attempt) is None:
            return []
        lost = Send(joiner, TransferLost(donor, attempt, reason), reason)
        return [*self._over(joiner, reason, notify_donor=False), lost]

    def chunk_taken(self, joiner: str, attempt: int, chunk: int) -> list[CoordinatorEffect]:
        """Let the relay receive more, because the joiner has fetched a chunk."""
        transfer = self.transfers.get(joiner)
        if transfer is None or transfer.attempt != attempt or not transfer.path:
            return []
        return [RelayOn(transfer.path, chunk, f"{joiner} has it")]

    def trains(self, learner: str, *, gives: bool) -> list[CoordinatorEffect]:
        """Record a learner that has started to train: it needs no provider, and may be one."""
        if gives:
            self.training.add(learner)
        return self._over(learner, f"{learner} trains")

    def gone(self, learner: str) -> list[CoordinatorEffect]:
        """End the transfers to and from a learner that has left."""
        self.training.discard(learner)
        effects = self._over(learner, f"{learner} has left")
        for joiner, transfer in list(self.transfers.items()):
            if transfer.donor == learner:
                effects += self.declined(learner, joiner, transfer.attempt, f"{learner} has left")
        return effects

    def _of(self, donor: str, joiner: str, attempt: int) -> StateTransfer | None:
        transfer = self.transfers.get(joiner)
        mine = transfer is not None and (transfer.donor, transfer.attempt) == (donor, attempt)
        return transfer if mine else None

    def _open_relay(
        self, joiner: str, transfer: StateTransfer, offered: StateOffered, why: str
    ) -> list[CoordinatorEffect]:
        self.relays += 1  # makes the path unique: chunks of an earlier relay must not mix in
        transfer.path = f"/relay/{joiner}/{transfer.donor}/{self.relays}"
        opened = RelayOpened(joiner, transfer.attempt, transfer.path)
        return [
            OpenRelay(
                joiner,
                transfer.donor,
                transfer.attempt,
                transfer.path,
                offered.head_nbytes,
                offered.nbytes,
                why,
            ),
            Send(transfer.donor, opened, why),
            Send(joiner, opened, why),
        ]

    def _over(self, joiner: str, why: str, *, notify_donor: bool = True) -> list[CoordinatorEffect]:
        transfer = self.transfers.pop(joiner, None)
        if transfer is None:
            return []
        effects: list[CoordinatorEffect] = []
        if transfer.path:
            effects.append(CloseRelay(transfer.path, why))
        if notify_donor:
            unwanted = StateUnwanted(joiner, transfer.attempt)
            effects.append(Send(transfer.donor, unwanted, why))
        return effects


def _none(joiner: str, attempt: int, reason: str) -> CoordinatorEffect:
    return Send(joiner, NoTransfer(reason, attempt), reason)
