"""`Device` takes part in a run although it is disconnected most of the time (rule 23).

```python
device = Device(model, syncer, name="phone-7", checkpoint="state", optimizer=optimizer)
with device.visit() as learner:         # fetches what is new, and waits for its turn to train
    for batch in batches:
        loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
        if not learner.step(loss):
            break
# left: the contribution is with the syncer, or the next visit sends it
```

A device is a `Learner` for the time of a visit, and its checkpoint in between. It may also train
while it is away: `Device.step` and `Device.train` count the steps, `Device.save` writes them to the
disk, and the next visit sends them first.

**On the disk**, in the folder of ``checkpoint=``, per parameter of an fp32 model with AdamW:

| what | bytes per parameter | why |
|---|---|---|
| the model | 4 | it has training that no process has received yet |
| the inner optimizer | 8 | its state never leaves the device |
| the published copy, its version, digest and seal | 4 | a visit fetches differences to it |
| the residual, with error feedback | 4 | the next contribution contains it |

and the counters: steps and tokens in all, since the last visit, and of each fragment since its
version, and how many contributions from this version are folded. The newest two checkpoints are
kept. A file ``visiting`` exists during a visit. If it exists before one, the last visit broke off.
The residuals are then dropped, because a contribution may contain them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config.addresses import is_url
from decoupled_diloco.errors import (
    AccessError,
    ConfigError,
    NotJoinedError,
    RunEndedError,
    StorageError,
    TransportError,
)
from decoupled_diloco.learner.arguments import checkpointer_of, require_model
from decoupled_diloco.learner.checkpointer import all_stateful
from decoupled_diloco.learner.launched import launched_as
from decoupled_diloco.learner.learner_checkpoint import CheckpointFolder, LearnerCheckpoint
from decoupled_diloco.learner.loops import StepTokens
from decoupled_diloco.learner.optimizers import Optimizers
from decoupled_diloco.learner.option_groups import (
    Checkpointing,
    Observability,
    ParticipantOptions,
    PartyFiles,
    StateSharing,
    SyncerConnection,
    Timeouts,
    chosen,
)
from decoupled_diloco.participants import Learner, Loss, Tokens
from decoupled_diloco.runtime import runtime
from decoupled_diloco.transport.tls import TLSConfig

logger = logging.getLogger(__name__)

VISITING = "visiting"
"""Name of the file that exists during a visit."""

PATIENCE = Timeouts(join=3600.0, disconnect=60.0, flush=600.0)
"""A device waits a minute for the syncer, because it can train alone; an hour for its place; and
ten minutes for its contribution."""


class Device:
    """A learner that is disconnected most of the time, such as a phone.

    The run needs the table ``[sync.devices]``. The constructor does not connect. If the folder has
    a checkpoint of this device, it restores the model, the optimizer and the objects in ``state``.

    Args:
        model: See `Learner`. A device has one process.
        syncer: See `Learner`.
        name: Name of this device in the run, the same at each visit: 1 to 64 letters, digits,
            ``.``, ``_``, ``-``. It is required, unless a launcher has passed it to this program.
        checkpoint: Folder, or `Checkpointing` for more state; see the module for what is in it. It
            is required, unless a launcher has passed it.
        auth_token: See `Learner`.
        tls: See `Learner`.
        optimizer: See `Learner`. Its state stays on the device.
        timeouts: Default: wait a minute without a connection (``disconnect``), an hour for a place
            (``join``), and ten minutes until the contribution is sent (``flush``).
        observability: See `Learner`.
        party: See `Learner`. The device checks at each visit that the syncer has the same parties.

    Raises:
        ConfigError: ``name`` or ``checkpoint`` is missing, or an argument is not valid, or the
            checkpoint does not fit the model or the optimizer.
        StorageError: The checkpoints cannot be read.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        syncer: str | Sequence[str] | SyncerConnection | None = None,
        *,
        name: str | None = None,
        checkpoint: str | Path | Checkpointing | None = None,
        auth_token: str | None = None,
        tls: TLSConfig | None = None,
        optimizer: Optimizers | None = None,
        timeouts: Timeouts | None = None,
        observability: Observability | None = None,
        party: PartyFiles | None = None,
    ) -> None:
        require_model(model, stages=False)
        given = ParticipantOptions(
            name,
            auth_token,
            tls,
            timeouts or PATIENCE,
            observability or Observability(),
            checkpoint=Checkpointing.of(checkpoint),
            party=chosen("party", party, PartyFiles),
        )
        if syncer is None:
            syncer, given = launched_as("learner").fill(given)
        if given.name is None or given.checkpoint.folder is None:
            missing = "name" if given.name is None else "checkpoint"
            raise ConfigError(
                f"Device() has no {missing}: pass name=, the same at each visit, and checkpoint=, "
                "the folder for what it keeps between visits"
            )
        if is_url(str(given.checkpoint.folder)):
            raise ConfigError(
                f"checkpoint={str(given.checkpoint.folder)!r} is not a folder: pass one on this "
                "device, which keeps its training while it has no connection"
            )
        self._model, self._optimizer, self._options = model, optimizer, given
        self._connection = SyncerConnection.of(syncer)
        self._objects = all_stateful(optimizer, given.checkpoint.state)
        self._folder = CheckpointFolder(Path(given.checkpoint.folder) / given.name)
        self._counter = StepTokens(model)
        self._learner: Learner | None = None
        self._unsaved = (0, 0)
        self._counted = (0, 0)
        self._has_weights = False
        self._restore()

    def _restore(self) -> None:
        checkpointer = checkpointer_of(self._options, self._model, self._objects)
        try:
            kept = checkpointer.loaded
            if kept is not None and kept.learner != self.name:
                raise ConfigError(
                    f"checkpoint={str(self._folder.path)!r} belongs to device {kept.learner!r}: "
                    "pass another folder or its name"
                )
            if kept is not None:
                self._counted, self._has_weights = (kept.steps, kept.tokens), True
                checkpointer.restore()
        finally:
            checkpointer.close()

    @property
    def name(self) -> str:
        """This device's name in the run."""
        return self._options.participant_name

    @property
    def steps(self) -> int:
        """Steps of this device in all visits and between them."""
        if self._learner is not None:
            return self._learner.steps
        return self._counted[0] + self._unsaved[0]

    @property
    def tokens(self) -> int:
        """Tokens of this device in all visits and between them."""
        if self._learner is not None:
            return self._learner.tokens
        return self._counted[1] + self._unsaved[1]

    @contextmanager
    def visit(self) -> Iterator[Learner]:
        """Join the run, for the time of a ``with`` block, as a `Learner`.

        At its start, the visit sends what the device has trained alone, fetches what is new (a
        chain of differences, if its copies are recent enough), and waits for a place if the run has
        a ``cohort``. The block may train with `Learner.step`. If it does not, the device keeps its
        place while it trains alone. At its end, the visit sends the training of the block and
        leaves. It does not wait until the contribution is merged, except with ``policy="drop"``.

        If the connection breaks, or the block raises an exception, everything that the syncer has
        not confirmed is in the device's checkpoint, and the next visit sends it.

        Yields:
            The learner; it is closed at the end of the block.

        Raises:
            ConfigError: The model differs from the run's, the run has no ``[sync.devices]``, or the
                block is inside another visit of this device.
            AccessError: The syncer rejects the auth token.
            StorageError: The checkpoint cannot be written.
            TransportError: A limit of ``timeouts`` has passed, or the run has ended. If the syncer
                is unreachable, the device can train alone and visit later.
        """
        self._begin_visit()
        with self._join() as learner:
            self._joined(learner)
            try:
                yield learner
            finally:
                self._learner = None
        self._left(learner)

    def _join(self) -> Learner:
        try:
            return Learner(self._model, self._connection, **self._arguments())
        except (AccessError, RunEndedError):
            raise  # a later visit would fail, too
        except TransportError as error:
            if isinstance(error, NotJoinedError):
                runtime().disk.remove(self._mark)  # its residuals are not sent
            advice = "has no weights of the run yet: visit the run later"
            if self._has_weights:
                advice = "can continue alone with Device.train() or step(), and visit later"
            raise TransportError(f"{error}. Device {self.name!r} {advice}") from error

    @property
    def _mark(self) -> Path:
        return self._folder.path / VISITING

    def _begin_visit(self) -> None:
        """Mark the visit. If the last one broke off, drop the residuals that it may have sent."""
        if self._learner is not None:
            raise ConfigError(f"device {self.name!r} is on a visit: end it before the next one")
        self.save()
        disk = runtime().disk
        disk.make_folder(self._folder.path)
        if disk.exists(self._mark):  # break: broken-visit-keeps-residuals
            newest = self._folder.newest()
            if newest is not None and newest.with_residual:
                kept = tuple(replace(held, residual=()) for held in newest.fragments)
                self._folder.save(replace(newest, fragments=kept))
        else:
            disk.put(self._mark, b"")

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of this device's learners."""
        options = self._options
        return {
            "name": options.name,
            "auth_token": options.auth_token,
            "tls": options.tls,
            "optimizer": self._optimizer,
            "checkpoint": options.checkpoint,
            "timeouts": options.timeouts,
            "state_sharing": StateSharing(()),  # the optimizer's state never leaves the device
            "observability": options.observability,
            "party": options.party,
        }

    def _joined(self, learner: Learner) -> None:
        if "devices" not in learner.run_config["sync"]:
            raise ConfigError(
                "the run has no [sync.devices], so it would lose what a device trains alone: add "
                "this table to the run's file, or use dd.Learner"
            )
        self._learner = learner

    def _left(self, learner: Learner) -> None:
        """Continue alone, from the checkpoint that the learner has written."""
        self._learner = None
        self._counted, self._has_weights = (learner.steps, learner.tokens), True
        self._counter.forget()
        runtime().disk.remove(self._mark)

    def step(self, loss: Loss = None, *, tokens: Tokens | None = None) -> None:
        """Count one inner step that the device has trained alone, after ``optimizer.step()``.

        During a visit, call `Learner.step` instead.

        Args:
            loss: Ignored; it lets a loop call both methods in the same way.
            tokens: See `Learner.step`.

        Raises:
            ConfigError: The device has never visited the run, so it does not have the run's
                weights; or it is on a visit; or ``tokens`` is not valid.
        """
        if self._learner is not None:
            raise ConfigError(
                f"Device.step() called on a visit of {self.name!r}: call step() of the learner"
            )
        if not self._has_weights:
            raise ConfigError(
                f"device {self.name!r} has no weights of the run yet: visit the run first"
            )
        steps, trained = self._unsaved
        self._unsaved = steps + 1, trained + self._counter.read(tokens)

    def train(
        self, step: Callable[[], Loss], steps: int, *, tokens: int | None = None
    ) -> list[float]:
        """Train alone for a number of steps, then `save`.

            device.train(lambda: train_on(next(batches)), steps=50)

        Args:
            step: Makes one step of the inner optimizer, and returns the loss or ``None``.
            steps: How often to call it, at least 1.
            tokens: Tokens (or samples) of one step. Default: see `Learner.step`.

        Returns:
            The losses that ``step`` has returned.

        Raises:
            ConfigError: ``steps`` is below 1; see also `step`.
            StorageError: See `save`.
        """
        if steps < 1:
            raise ConfigError(f"train(steps={steps}) is out of range: pass at least 1 step")
        losses: list[float] = []
        for _ in range(steps):
            loss = step()
            self.step(loss, tokens=tokens)
            if loss is not None:
                losses.append(loss.item() if isinstance(loss, torch.Tensor) else float(loss))
        self.save()
        return losses

    def save(self) -> None:
        """Write what the device has trained alone to its disk; does nothing if there is nothing.

        A visit begins with it. Call it also before the device may lose power.

        Raises:
            StorageError: The checkpoint cannot be written. The earlier one is unchanged.
        """
        steps, tokens = self._unsaved
        if not steps:
            return
        newest = self._folder.newest()
        if newest is None:
            raise StorageError(
                f"{self._folder.path} has no checkpoint any more: visit the run for the newest "
                "weights; what was trained since is lost"
            )
        self._folder.save(self._with_training(newest, steps, tokens))
        self._counted = newest.steps + steps, newest.tokens + tokens
        self._unsaved = (0, 0)

    def _with_training(
        self, newest: LearnerCheckpoint, steps: int, tokens: int
    ) -> LearnerCheckpoint:
        alone = newest.alone
        return replace(
            newest,
            steps=newest.steps + steps,
            tokens=newest.tokens + tokens,
            alone=(alone[0] + steps, alone[1] + tokens),
            fragments=tuple(
                replace(held, steps=held.steps + steps, tokens=held.tokens + tokens)
                for held in newest.fragments
            ),
            model=dict(self._model.state_dict()),
            state={name: thing.state_dict() for name, thing in self._objects.items()},
            run_checkpoint=None,
        )

    def close(self) -> None:
        """Write what is not saved yet, and free the counter of tokens."""
        self.save()
        self._counter.close()
