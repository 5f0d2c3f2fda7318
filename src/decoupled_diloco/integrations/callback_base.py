"""Common code of all frameworks' callbacks: join a run, report steps, count rounds, leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from decoupled_diloco.learner.launched import launched_as
from decoupled_diloco.learner.learner_model import Model
from decoupled_diloco.learner.optimizers import Optimizers
from decoupled_diloco.learner.option_groups import (
    Observability,
    ParticipantOptions,
    StateSharing,
    SyncerConnection,
    Timeouts,
    chosen,
)
from decoupled_diloco.participants import Learner
from decoupled_diloco.transport.tls import TLSConfig


class FrameworkPart:
    """A framework's participation in a run.

    Args:
        syncer: See `Learner`. ``None``: the launcher's address. The launcher's checkpoint options
            are not used, because the framework takes checkpoints itself.
        name: See `Learner`, as for the following arguments.

    Attributes:
        learner: The learner; ``None`` before `begin`.
        rounds: Number of global versions of fragments that the model has received.
    """

    def __init__(
        self,
        syncer: str | Sequence[str] | SyncerConnection | None,
        *,
        name: str | None = None,
        auth_token: str | None = None,
        tls: TLSConfig | None = None,
        timeouts: Timeouts | None = None,
        state_sharing: StateSharing | None = None,
        observability: Observability | None = None,
        sync_ranks: int | Literal["hosts", "all"] | None = None,
    ) -> None:
        self._syncer, self._state_sharing = syncer, state_sharing
        self._options = ParticipantOptions(
            name,
            auth_token,
            tls,
            chosen("timeouts", timeouts, Timeouts),
            chosen("observability", observability, Observability),
            sync_ranks,
        )
        self._versions: tuple[str, ...] = ()
        self.learner: Learner | None = None
        self.rounds = 0

    def begin(self, model: Model, optimizer: Optimizers | None, steps: int, tokens: int) -> None:
        """Join the run.

        Args:
            model: The model that is trained.
            optimizer: The framework's optimizer, or several; they may have its wrappers.
            steps: Steps of earlier incarnations.
            tokens: Tokens of earlier incarnations.
        """
        syncer, options = self._syncer, self._options
        if syncer is None:
            syncer, options = launched_as("learner").fill(options)
        self.learner = Learner(
            model,
            syncer,
            name=options.name,
            auth_token=options.auth_token,
            tls=options.tls,
            optimizer=optimizer,
            timeouts=options.timeouts,
            state_sharing=self._state_sharing,
            observability=options.observability,
            sync_ranks=options.sync_ranks,
        )
        if steps:
            counted = self.learner.state_dict() | {"steps": steps, "tokens": tokens}
            self.learner.load_state_dict(counted)
        self._versions = self.learner.versions

    def step(self, loss: float | None = None, tokens: int | None = None) -> bool:
        """Finish one step of the optimizer; return whether the run continues."""
        assert self.learner is not None, "begin comes first"
        goes_on = self.learner.step(loss, tokens=tokens)
        versions = self.learner.versions
        self.rounds += sum(a != b for a, b in zip(versions, self._versions, strict=True))
        self._versions = versions
        return goes_on

    def measured(self) -> dict[str, float]:
        """Return the metrics to log."""
        assert self.learner is not None, "begin comes first"
        return {
            "diloco/run_step": self.learner.global_step,
            "diloco/tokens": self.learner.tokens,
            "diloco/discarded_tokens": self.learner.discarded_tokens,
            "diloco/rounds": self.rounds,
        }

    def __getstate__(self) -> dict[str, Any]:
        """Leave the learner out: copies and pickles of a Trainer do not participate in the run."""
        return self.__dict__ | {"learner": None}

    def end(self, error: BaseException | None = None) -> None:
        """Leave the run; without an error, the model has the final weights if the run has ended."""
        if self.learner is not None:
            self.learner.__exit__(None if error is None else type(error), error, None)
