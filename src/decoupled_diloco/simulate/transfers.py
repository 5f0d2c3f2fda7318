"""How a state passes from one virtual learner to another: chunk by chunk, if both are alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

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
)

if TYPE_CHECKING:
    from decoupled_diloco.simulate.learner_process import LearnerProcess

CHUNKS = 4
CHUNK_BYTES = 1000


class VirtualDonations:
    """What one learner gives and takes; chunks take random time, and sometimes do not come."""

    def __init__(self, learner: LearnerProcess) -> None:
        self._learner = learner
        self._choices = learner.world.choices.fork(f"{learner.name}/transfers")
        self.copies: set[tuple[str, int]] = set()
        self.fetching: FetchState | None = None

    def begin(self) -> None:
        """A new life has nothing."""
        self.copies.clear()
        self.fetching = None

    def carry_out(
        self, effect: CopyState | RelayState | ForgetState | FetchState | DropState
    ) -> None:
        """Carries one order out."""
        match effect:
            case CopyState(learner, attempt):
                self._learner.later(self._choices.uniform(0.0, 2.0), self._copied, learner, attempt)
            case ForgetState(learner, attempt):
                self.copies.discard((learner, attempt))
            case FetchState():
                self.fetching = effect
                self._next(effect, 0)
            case DropState(attempt):
                if self.fetching is not None and self.fetching.attempt == attempt:
                    self.fetching = None
            case RelayState():
                pass
            case _:
                assert_never(effect)

    def _copied(self, learner: str, attempt: int) -> None:
        if self._choices.chance(0.1):
            self._learner.tell(StateNotCopied(learner, attempt, "no memory"))
            return
        self.copies.add((learner, attempt))
        address = self._choices.pick(["", "direct"])
        nbytes = CHUNKS * CHUNK_BYTES
        self._learner.tell(StateCopied(learner, attempt, 10, nbytes, "digest", address))

    def _next(self, effect: FetchState, chunk: int) -> None:
        seconds = self._choices.log_uniform(0.01, 3.0) + (self._choices.chance(0.02) * 60.0)
        self._learner.later(seconds, self._arrived, effect, chunk)

    def _arrived(self, effect: FetchState, chunk: int) -> None:
        learner = self._learner
        if self.fetching is not effect:
            return
        donor = learner.world.learners[effect.donor]
        key = (learner.name, effect.attempt)
        unreachable = not effect.path and self._choices.chance(0.1)
        if not donor.alive or key not in donor.transfers.copies or unreachable:
            if not effect.path:
                self.fetching = None
                learner.tell(StateFailed(effect.attempt, "unreachable"))
            return  # by a relay, nothing comes any more
        learner.tell(ChunkArrived(effect.attempt, chunk, CHUNK_BYTES))
        if self.fetching is not effect:
            return
        if chunk < CHUNKS:
            self._next(effect, chunk + 1)
        else:
            self.fetching = None
            learner.tell(StateArrived(effect.attempt))
