"""Who gives its optimizer's state to a learner that begins with none (rule 16): the coordinator's.

```
         TransferWanted            StateOffered              RelayWanted, or no address
 (joiner) ────────▶ asking donor ─────────▶ named ──────────────▶ relayed
                       │  StateDeclined, donor gone │                │
                       └──────────▶ TransferLost: the joiner asks again ◀┘     Trains: over
```
Nothing of it is durable: a coordinator that starts again is asked again. The joiner's patience
bounds everything; a donor's training loop is never waited for, nor waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from decoupled_diloco.protocol.effects import CoordinatorEffect, Send
from decoupled_diloco.protocol.messages import Message
from decoupled_diloco.protocol.transfer.effects import CloseRelay, OpenRelay, RelayOn
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

HEAD_BYTES_MAX = 256 << 20
"""No head is larger: it holds names, plain values, and a digest for each chunk."""

STATE_BYTES_MAX = 1 << 42
"""No state is larger: what a relay counts is a million chunks of it."""


@dataclass(slots=True)
class StateTransfer:
    """One learner's way to a state; ``path``: of its relay, if there is one."""

    donor: str
    attempt: int
    offered: StateOffered | None = None
    path: str = ""


@dataclass(slots=True)
class Transfers:
    """Who trains, and who is being given what; ``relays`` counts them, for names of their own."""

    training: set[str] = field(default_factory=set)
    transfers: dict[str, StateTransfer] = field(default_factory=dict)
    relays: int = 0

    def told(
        self, learner: str, message: Message, present: Mapping[str, bool], clock: int
    ) -> list[CoordinatorEffect]:
        """A learner says something of a transfer."""
        match message:
            case TransferWanted():
                return self.wanted(learner, message, present, clock)
            case StateOffered():
                return self.offered(learner, message)
            case StateDeclined(joiner, attempt, reason):
                return self.declined(learner, joiner, attempt, reason)
            case RelayWanted(attempt):
                return self.relay_wanted(learner, attempt)
            case ChunkTaken(attempt, chunk):
                return self.chunk_taken(learner, attempt, chunk)
            case Trains(gives):
                return self.trains(learner, gives=gives)
            case _:
                raise AssertionError(f"a learner does not say this to the coordinator: {message}")

    def wanted(
        self, joiner: str, message: TransferWanted, present: Mapping[str, bool], clock: int
    ) -> list[CoordinatorEffect]:
        """A learner asks for a donor: the first by name that is present and gives to nobody."""
        effects = self._over(joiner, "it asks anew")
        if clock == 0:
            return [*effects, _none(joiner, message.attempt, "the run has only begun")]
        busy = {transfer.donor for transfer in self.transfers.values()}
        others = [n for n in sorted(self.training - {joiner}) if present.get(n)]
        free = [n for n in others if n not in message.refused and n not in busy]
        if not free:
            reason = "no other learner is there that trains" if not others else "nobody is left"
            return [*effects, _none(joiner, message.attempt, reason)]
        self.transfers[joiner] = StateTransfer(free[0], message.attempt)
        request = StateWanted(joiner, message.attempt, message.seen)
        return [*effects, Send(free[0], request, f"{joiner} begins with nothing")]

    def offered(self, donor: str, message: StateOffered) -> list[CoordinatorEffect]:
        """A donor's copy is ready."""
        transfer = self._of(donor, message.learner, message.attempt)
        if transfer is None:
            unwanted = StateUnwanted(message.learner, message.attempt)
            return [Send(donor, unwanted, "it is not waited for any more")]
        if not 0 < message.head_nbytes <= HEAD_BYTES_MAX or message.nbytes > STATE_BYTES_MAX:
            sizes = f"a head of {message.head_nbytes} bytes and a state of {message.nbytes}"
            reason = f"{sizes} cannot be given: at most {HEAD_BYTES_MAX} and {STATE_BYTES_MAX}"
            return self.declined(donor, message.learner, message.attempt, reason)
        transfer.offered = message
        named = TransferReady(
            donor,
            message.attempt,
            message.head_nbytes,
            message.nbytes,
            message.digest,
            message.address,
            message.key,
        )
        effects: list[CoordinatorEffect] = [Send(message.learner, named, "its copy is ready")]
        if not message.address:
            effects += self._open_relay(message.learner, transfer, "its donor does not listen")
        return effects

    def declined(
        self, donor: str, joiner: str, attempt: int, reason: str
    ) -> list[CoordinatorEffect]:
        """A donor cannot."""
        if self._of(donor, joiner, attempt) is None:
            return []
        lost = Send(joiner, TransferLost(donor, attempt, reason), reason)
        return [*self._over(joiner, reason, tell_donor=False), lost]

    def relay_wanted(self, joiner: str, attempt: int) -> list[CoordinatorEffect]:
        """The donor is out of the learner's reach."""
        transfer = self.transfers.get(joiner)
        if transfer is None or transfer.attempt != attempt or transfer.offered is None:
            reason = "it is not known here: ask again"
            return [Send(joiner, TransferLost("", attempt, reason), reason)]
        if transfer.path:
            return []
        return self._open_relay(joiner, transfer, "it cannot reach its donor")

    def chunk_taken(self, joiner: str, attempt: int, chunk: int) -> list[CoordinatorEffect]:
        """There is room in the relay again."""
        transfer = self.transfers.get(joiner)
        if transfer is None or transfer.attempt != attempt or not transfer.path:
            return []
        return [RelayOn(transfer.path, chunk, f"{joiner} has it")]

    def trains(self, learner: str, *, gives: bool) -> list[CoordinatorEffect]:
        """A learner has begun to train: it needs no donor, and may be one."""
        if gives:
            self.training.add(learner)
        return self._over(learner, f"{learner} trains")

    def gone(self, learner: str) -> list[CoordinatorEffect]:
        """A learner is gone: as one that is given to, or as one that gives."""
        self.training.discard(learner)
        effects = self._over(learner, f"{learner} is gone")
        for joiner, transfer in list(self.transfers.items()):
            if transfer.donor == learner:
                effects += self.declined(learner, joiner, transfer.attempt, f"{learner} is gone")
        return effects

    def _of(self, donor: str, joiner: str, attempt: int) -> StateTransfer | None:
        transfer = self.transfers.get(joiner)
        mine = transfer is not None and (transfer.donor, transfer.attempt) == (donor, attempt)
        return transfer if mine else None

    def _open_relay(
        self, joiner: str, transfer: StateTransfer, why: str
    ) -> list[CoordinatorEffect]:
        offered = transfer.offered
        assert offered is not None
        self.relays += 1
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

    def _over(self, joiner: str, why: str, *, tell_donor: bool = True) -> list[CoordinatorEffect]:
        transfer = self.transfers.pop(joiner, None)
        if transfer is None:
            return []
        effects: list[CoordinatorEffect] = []
        if transfer.path:
            effects.append(CloseRelay(transfer.path, why))
        if tell_donor:
            unwanted = StateUnwanted(joiner, transfer.attempt)
            effects.append(Send(transfer.donor, unwanted, why))
        return effects


def _none(joiner: str, attempt: int, reason: str) -> CoordinatorEffect:
    return Send(joiner, NoTransfer(reason, attempt), reason)
