"""Hugging Face's `Trainer` as a learner.

```python
from decoupled_diloco.integrations.transformers import synchronize

trainer = Trainer(model, arguments, train_dataset=dataset)
synchronize(trainer, "http://syncer:7070", token=token, learner_id="learner-0")
trainer.train()
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.integrations.part import FrameworkPart
from decoupled_diloco.learner.counting import TokenCounter
from decoupled_diloco.ranks.learner import Learner

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
        "pip install 'decoupled-diloco[transformers]' (in a clone: "
        "pip install -e '.[transformers]')"
    ) from error


class DilocoCallback(TrainerCallback):
    """Makes a `Trainer` a learner of a run.

    It joins when training begins: the model takes the run's weights, also if the Trainer has just
    resumed from a checkpoint, whose optimizer, schedule and position in the data stay. Training
    stops when the run's budget is spent or ``max_steps`` are made, whichever is first; so give
    ``max_steps`` more than the budget. If the run is over then, the model has its final weights.

    With ``load_best_model_at_end`` the model has the Trainer's best weights instead: they are
    loaded after this learner has left, so the run gets what was trained.

    Steps are the Trainer's. Tokens are counted (`TokenCounter`), so accumulation and padding need
    no help. Only what is trained is synchronized: of a PEFT model, the adapter.

    Args:
        syncer: See `Learner`.
        options: Further arguments of `Learner`, but not ``checkpoint`` and ``stateful``: the
            Trainer keeps its own checkpoints.

    Raises:
        ConfigError: An option is the Trainer's own; in `Trainer.train`, see `Learner`.
    """

    def __init__(self, syncer: str | Sequence[str] | None = None, **options: Any) -> None:
        self._part = FrameworkPart(
            "Trainer", ("checkpoint", "stateful", "optimizer"), syncer, options
        )
        self._counter: TokenCounter | None = None
        self._loss: float | None = None

    @property
    def learner(self) -> Learner | None:
        """The learner, from the beginning of training on."""
        return self._part.learner

    @property
    def rounds(self) -> int:
        """Global versions of fragments that the model has taken."""
        return self._part.rounds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Joins the run."""
        for name in ("deepspeed", "fsdp"):
            if getattr(args, name, None):
                raise ConfigError(
                    f"{name}= in the TrainingArguments: it keeps the weights elsewhere than in the "
                    "model. Use DDP, or FSDP2 in a loop of your own (docs/how-to/many-gpus.md)"
                )
        tokens = int(state.num_input_tokens_seen)
        if self._counter is not None:
            self._counter.close()  # of an earlier `train`, which was interrupted or begins again
        self._part.begin(given["model"], given["optimizer"], state.global_step, tokens)
        self._counter = TokenCounter(given["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> TrainerControl:
        """One step of the optimizer is made."""
        assert self._counter is not None
        if not self._part.step(self._counter.take(), self._loss):
            control.should_training_stop = True
        self._loss = None
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Leaves the run if training ends here: before the Trainer loads its best checkpoint."""
        if control.should_training_stop:
            self._end()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Adds the run's numbers; the loss goes to the run with the next step."""
        if self.learner is None:
            return
        logs: dict[str, Any] = given["logs"]
        if "train_runtime" in logs:  # The last ones; the best checkpoint is loaded after them.
            self._end()
        if "loss" in logs:
            self._loss = float(logs["loss"])
        logs |= self._part.measured()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Leaves the run; if it is over, the model has the final weights afterwards."""
        self._end()

    def _end(self) -> None:
        if self._counter is not None:
            self._counter.close()
        self._part.end()


def synchronize(
    trainer: Trainer, syncer: str | Sequence[str] | None = None, **options: Any
) -> DilocoCallback:
    """Makes a Trainer a learner: adds a `DilocoCallback` before all others.

    So its numbers are in what the others report (Weights & Biases, TensorBoard).

    Args:
        trainer: Its training has not begun.
        syncer: See `Learner`.
        options: See `DilocoCallback`.
    """
    callback = DilocoCallback(syncer, **options)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback
