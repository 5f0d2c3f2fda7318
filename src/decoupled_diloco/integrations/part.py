"""What callbacks of all frameworks do: join a run, tell of steps, count what is taken, leave."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.launched import launched_as
from decoupled_diloco.learner.modules import Model
from decoupled_diloco.learner.optimizers import Optimizers
from decoupled_diloco.ranks.learner import Learner


class FrameworkPart:
    """A framework's part in a run.

    Args:
        framework: As messages name it.
        owns: Arguments of `Learner` that the framework has itself.
        syncer: See `Learner`. `None`: what the launcher has passed, without what the framework
            owns.
        options: Further arguments of `Learner`.

    Attributes:
        learner: From `begin` on.
        rounds: Global versions of fragments that the model has taken.

    Raises:
        ConfigError: An option is the framework's own.
    """

    def __init__(
        self,
        framework: str,
        owns: Collection[str],
        syncer: str | Sequence[str] | None,
        options: dict[str, Any],
    ) -> None:
        for name in owns:
            if options.get(name) is not None:
                raise ConfigError(f"{name}=: the {framework} has its own; leave it out")
        self._owns = {*owns, *(("checkpoint_every_seconds",) if "checkpoint" in owns else ())}
        self._syncer = syncer
        self._options = options
        self._versions: tuple[str, ...] = ()
        self.learner: Learner | None = None
        self.rounds = 0

    def begin(self, model: Model, optimizer: Optimizers | None, steps: int, tokens: int) -> None:
        """Joins the run.

        Args:
            model: What is trained.
            optimizer: The framework's, one or several, perhaps within wrappers of its own.
            steps: What earlier lives have made.
            tokens: What they were trained on.
        """
        syncer, options = self._syncer, self._options
        if syncer is None:
            launched = launched_as("learner")
            passed = {k: v for k, v in launched.arguments().items() if k not in self._owns}
            given = {name: value for name, value in options.items() if value is not None}
            syncer, options = launched.addresses(), {**passed, **given}
        self.learner = Learner(model, syncer, optimizer=optimizer, **options)
        if steps:
            told = self.learner.state_dict() | {"steps": steps, "tokens": tokens}
            self.learner.load_state_dict(told)
        self._versions = self.learner.versions

    def step(self, tokens: int, loss: float | None = None) -> bool:
        """One step of the optimizer is made; returns whether the run goes on."""
        assert self.learner is not None, "begin comes first"
        goes_on = self.learner.step(tokens, loss)
        versions = self.learner.versions
        self.rounds += sum(a != b for a, b in zip(versions, self._versions, strict=True))
        self._versions = versions
        return goes_on

    def measured(self) -> dict[str, float]:
        """What is logged."""
        assert self.learner is not None, "begin comes first"
        return {
            "diloco/run_step": self.learner.global_step,
            "diloco/tokens": self.learner.tokens,
            "diloco/discarded_tokens": self.learner.discarded_tokens,
            "diloco/rounds": self.rounds,
        }

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of a Trainer: they take no part in the run."""
        return self.__dict__ | {"learner": None}

    def end(self, error: BaseException | None = None) -> None:
        """Leaves the run; without an error the model has the final weights, if the run is over."""
        if self.learner is not None:
            self.learner.__exit__(None if error is None else type(error), error, None)
