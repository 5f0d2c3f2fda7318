"""Hugging Face's `Trainer` as a learner.

```python
from decoupled_diloco.integrations.transformers import synchronize

trainer = Trainer(model, arguments, train_dataset=dataset)
synchronize(trainer, "http://syncer:7070", auth_token=auth_token, name="learner-0")
trainer.train()
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

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
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise ConfigError(
        "Hugging Face transformers is not installed: "
        "run pip install -e '.[transformers]' in the clone"
    ) from error


class DiLoCoCallback(TrainerCallback):
    """Makes a `Trainer` a learner of a run.

    It joins when training begins. The model takes the run's weights, even if the Trainer has just
    resumed from a checkpoint; the checkpoint's optimizer, schedule and position in the data are
    kept. Training stops when the run's budget is spent or after ``max_steps``, whichever is first.
    So set ``max_steps`` larger than the budget. If the run is over then, the model has the final
    weights.

    With ``load_best_model_at_end`` the model has the Trainer's best weights instead. The Trainer
    loads them after this learner has left, so the run receives the trained weights.

    Steps are the Trainer's. Tokens are counted from the model's inputs, without padding. Only
    trainable parameters are synchronized: with PEFT, only the adapter.

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
        ConfigError: In `Trainer.train`; see `Learner`.
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
        self._loss: float | None = None

    @property
    def learner(self) -> Learner | None:
        """The learner; ``None`` before training begins."""
        return self._part.learner

    @property
    def rounds(self) -> int:
        """Number of global versions of fragments that the model has received."""
        return self._part.rounds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Join the run.

        Raises:
            ConfigError: The Trainer uses DeepSpeed or FSDP; see also `Learner`.
        """
        for name in ("deepspeed", "fsdp"):
            if getattr(args, name, None):
                raise ConfigError(
                    f"{name}= in the TrainingArguments cannot be combined with a learner, because "
                    "it keeps the weights outside of the model: use DDP, or FSDP2 in a custom loop "
                    "(docs/how-to/many-gpus.md)"
                )
        tokens = int(state.num_input_tokens_seen)
        self._part.begin(given["model"], given["optimizer"], state.global_step, tokens)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> TrainerControl:
        """Report one step of the optimizer."""
        if not self._part.step(self._loss):
            control.should_training_stop = True
        self._loss = None
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Leave the run if training ends here, before the Trainer loads its best checkpoint."""
        if control.should_training_stop:
            self._part.end()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Add the run's metrics, and report the loss with the next step."""
        if self.learner is None:
            return
        logs: dict[str, Any] = given["logs"]
        if "train_runtime" in logs:  # the last log; the Trainer then loads its best checkpoint
            self._part.end()
        if "loss" in logs:
            self._loss = float(logs["loss"])
        logs |= self._part.measured()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Leave the run; if it is over, the model has the final weights afterwards."""
        self._part.end()


def synchronize(
    trainer: Trainer,
    syncer: str | Sequence[str] | SyncerConnection | None = None,
    *,
    name: str | None = None,
    auth_token: str | None = None,
    tls: TLSConfig | None = None,
    timeouts: Timeouts | None = None,
    state_sharing: StateSharing | None = None,
    observability: Observability | None = None,
    sync_ranks: int | Literal["hosts", "all"] | None = None,
) -> DiLoCoCallback:
    """Make a Trainer a learner: add a `DiLoCoCallback` before all its other callbacks.

    The other callbacks (Weights & Biases, TensorBoard) then report the run's metrics as well. The
    arguments after ``trainer`` are those of `DiLoCoCallback`.

    Args:
        trainer: The Trainer, before its training starts.
    """
    callback = DiLoCoCallback(
        syncer,
        name=name,
        auth_token=auth_token,
        tls=tls,
        timeouts=timeouts,
        state_sharing=state_sharing,
        observability=observability,
        sync_ranks=sync_ranks,
    )
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback
