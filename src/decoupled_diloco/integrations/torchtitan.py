"""torchtitan's `Trainer` as a learner.

```python
from decoupled_diloco.integrations.torchtitan import DiLoCoTrainer

trainer = DiLoCoTrainer(config, "http://syncer:7070", auth_token=auth_token, name="learner-0")
trainer.train()
trainer.close()
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.integrations.callback_base import FrameworkPart
from decoupled_diloco.learner.option_groups import (
    Observability,
    StateSharing,
    SyncerConnection,
    Timeouts,
)
from decoupled_diloco.participants import Learner
from decoupled_diloco.transport.tls import TLSConfig

try:
    from torchtitan.distributed.utils import dist_sum
    from torchtitan.train import Trainer
except ImportError as error:
    raise ConfigError(
        f"torchtitan cannot be imported ({error}): run pip install -e '.[torchtitan]' in the clone"
    ) from error


class DiLoCoMixin:
    """Makes a class of torchtitan trainers learners of a run.

    `DiLoCoTrainer` is the result for torchtitan's `Trainer`. For a subclass of it, write
    ``class Mine(DiLoCoMixin, Another)``.

    It joins when training begins. The model takes the run's weights, even if torchtitan has just
    loaded a checkpoint; the checkpoint's optimizers, schedules, step and data are kept. Training
    stops when the run's budget is spent, or at torchtitan's ``training.steps``. If the run is over
    then, the model has the final weights, and torchtitan's checkpointer writes them.

    A step is a step of the optimizer. Tokens are torchtitan's count (``ntokens_seen``), also with
    gradient accumulation. All ranks are one learner: FSDP2, tensor parallel or a pipeline, as in
    torchtitan's ``parallelism``.

    Args:
        config: torchtitan's configuration (``JobConfig``).
        syncer: See `Learner`, as for the following arguments.
        name: Name of this learner in the run, the same after each restart.
        auth_token: The run's auth token.
        tls: Certificates for a syncer at ``https://``.
        timeouts: How long to wait for the syncer.
        state_sharing: The state that a new learner gets from another one.
        observability: Experiment tracker, metrics endpoint and event tape.
        sync_ranks: How many ranks exchange data with the syncer.

    Raises:
        ConfigError: In ``train``; see `Learner`.
    """

    def __init__(
        self,
        config: Any,
        syncer: str | Sequence[str] | SyncerConnection | None = None,
        *,
        name: str | None = None,
        auth_token: str | None = None,
        tls: TLSConfig | None = None,
        timeouts: Timeouts | None = None,
        state_sharing: StateSharing | None = None,
        observability: Observability | None = None,
        sync_ranks: int | Literal["hosts", "all"] | None = None,
    ) -> None:
        self._part = FrameworkPart(
            syncer,
            name=name,
            auth_token=auth_token,
            tls=tls,
            timeouts=timeouts,
            state_sharing=state_sharing or StateSharing(()),
            observability=observability,
            sync_ranks=sync_ranks,
        )
        self._loss: float | None = None
        self._goes_on = True
        base: Any = super()
        base.__init__(config)
        self._log = self._trainer.metrics_processor.log
        self._trainer.metrics_processor.log = self._logged

    @property
    def _trainer(self) -> Any:
        """This object without a type, because torchtitan has no types."""
        return self

    @property
    def learner(self) -> Learner | None:
        """The learner; ``None`` before training begins."""
        return self._part.learner

    @property
    def rounds(self) -> int:
        """Number of global versions of fragments that the model has received."""
        return self._part.rounds

    def train(self) -> None:
        """Train as torchtitan's ``train`` does, and leave the run at the end."""
        base: Any = super()
        try:
            base.train()
        except BaseException as error:
            self._part.end(error)
            raise
        self._part.end()
        if self.learner is not None and self.learner.ended:
            self._trainer.checkpointer.save(self._trainer.step, last_step=True)

    def should_continue_training(self) -> bool:
        """Return whether another step follows, for torchtitan, which calls it before each step."""
        if self.learner is None:  # the first call: torchtitan has just loaded its checkpoint
            self._join()
        base: Any = super()
        return bool(base.should_continue_training()) and self._goes_on

    def train_step(self, data_iterator: Any) -> None:
        """Train one step of the optimizer as torchtitan does, and report it to the learner."""
        base: Any = super()
        before = self._trainer.ntokens_seen
        base.train_step(data_iterator)
        tokens = self._trainer.ntokens_seen - before
        self._goes_on = self._part.step(self._loss, tokens)
        self._loss = None

    def _join(self) -> None:
        trainer = self._trainer
        tokens = trainer.ntokens_seen  # of this rank
        if trainer.parallel_dims.dp_cp_enabled:
            count = torch.tensor(tokens, dtype=torch.int64, device=trainer.device)
            tokens = dist_sum(count, trainer.parallel_dims.get_optional_mesh("loss"))
        optimizers = trainer.optimizers.optimizers
        # Not torchtitan's container of optimizers: reading its state makes a step of each of them.
        self._part.begin(trainer.model_parts, list(optimizers), trainer.step, int(tokens))

    def _logged(self, step: int, loss: float, *numbers: Any, **named: Any) -> None:
        """Log a step's metrics with those of the run, and keep the loss for the step's report."""
        trainer = self._trainer
        if not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage:
            self._loss = float(loss)
        extra = (named.pop("extra_metrics", None) or {}) | self._part.measured()
        self._log(step, loss, *numbers, extra_metrics=extra, **named)


class DiLoCoTrainer(DiLoCoMixin, Trainer):  # type: ignore[misc]
    """torchtitan's `Trainer` as a learner: see `DiLoCoMixin`."""
