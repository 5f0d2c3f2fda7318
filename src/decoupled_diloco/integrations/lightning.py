"""Lightning's `Trainer` as a learner.

```python
from decoupled_diloco.integrations.lightning import DiLoCoCallback

diloco = DiLoCoCallback("http://syncer:7070", auth_token=auth_token, name="learner-0")
trainer = L.Trainer(max_steps=-1, callbacks=[diloco])
trainer.fit(module, loader)
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.integrations.callback_base import FrameworkPart
from decoupled_diloco.learner.loops import counted, warn_uncounted
from decoupled_diloco.learner.option_groups import (
    Observability,
    StateSharing,
    SyncerConnection,
    Timeouts,
)
from decoupled_diloco.participants import Learner
from decoupled_diloco.transport.tls import TLSConfig

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ConfigError(
        "Lightning is not installed: run pip install -e '.[lightning]' in the clone"
    ) from error


class DiLoCoCallback(Callback):
    """Makes a Lightning `Trainer` a learner of a run.

    It joins when training begins. The module takes the run's weights, even if the Trainer has just
    resumed from a checkpoint; the checkpoint's optimizer, schedules and loops are kept. Training
    stops when the run's budget is spent, or at the Trainer's ``max_steps`` or ``max_epochs``. If
    the run is over then, the module has the final weights.

    A step is a step of the optimizer, with any number of accumulated batches. With several
    optimizers (manual optimization), each batch in which one of them steps is a step. Tokens are
    counted in the batches (`loops.counted`). Several devices are one learner: DDP, and
    `ModelParallelStrategy` (FSDP2, tensor parallel).

    Args:
        syncer: See `Learner`, as for the following arguments.
        name: Name of this learner in the run, the same after each restart.
        auth_token: The run's auth token.
        tls: Certificates for a syncer at ``https://``.
        timeouts: How long to wait for the syncer.
        state_sharing: The state that a new learner gets from another one.
        observability: Experiment tracker, metrics endpoint and event tape.
        sync_ranks: How many ranks exchange data with the syncer.

    Raises:
        ConfigError: In `Trainer.fit`; see `Learner`.
    """

    def __init__(
        self,
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
            state_sharing=state_sharing,
            observability=observability,
            sync_ranks=sync_ranks,
        )
        self._tokens = self._before = 0
        self._steps = 0
        # Only a resumed one is set. It differs from `trainer.global_step`, which counts the steps
        # of each optimizer.
        self._made: int | None = None

    @property
    def learner(self) -> Learner | None:
        """The learner; ``None`` before training begins."""
        return self._part.learner

    @property
    def rounds(self) -> int:
        """Number of global versions of fragments that the module has received."""
        return self._part.rounds

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run."""
        self._steps = trainer.global_step
        several: Any = trainer.optimizers
        optimizers = several[0] if len(several) == 1 else (several or None)
        steps = self._steps if self._made is None else self._made
        self._part.begin(pl_module, optimizers, steps, self._before)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch, and report the step if the batch was its last one."""
        found = tokens_of(batch)
        if found is None:
            warn_uncounted(pl_module, "the batch has no tensor")
        self._tokens += 1 if found is None else int(found)
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        untyped: Any = trainer  # its type lacks the attributes that its logging adds
        logs = self._steps % max(1, untyped.log_every_n_steps) == 0
        loss = outputs.get("loss") if logs and isinstance(outputs, Mapping) else None
        value = float(loss) if isinstance(loss, Tensor) else None
        if not self._part.step(value, self._tokens):
            trainer.should_stop = True
        self._tokens = 0
        if logs:
            numbers = {name: float(each) for name, each in self._part.measured().items()}
            pl_module.log_dict(numbers, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run; if it is over, the module has the final weights afterwards."""
        self._part.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the run at once."""
        self._part.end(exception)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters for the Trainer's checkpoints."""
        if self.learner is None:
            return {"tokens": 0}
        return {"tokens": self.learner.tokens, "steps": self.learner.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue to count from a `state_dict`."""
        self._before = int(state_dict["tokens"])
        self._made = state_dict.get("steps")


def tokens_of(batch: Any) -> Tensor | int | None:
    """Return the tokens, or samples, of a batch; see `loops.counted`."""
    return counted((batch,), {})
