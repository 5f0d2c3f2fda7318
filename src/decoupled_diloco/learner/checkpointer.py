"""Take a learner's checkpoints: copy at a step boundary, write in a separate thread.

A step waits only for the copy to host memory. On a slow disk checkpoints become rarer. On a full
disk a checkpoint is lost. Both are logged or recorded, and training continues.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from decoupled_diloco.errors import ConfigError, DilocoError, StorageError, a_kind
from decoupled_diloco.learner.learner_checkpoint import (
    OPTIMIZER,
    CheckpointFolder,
    HeldFragment,
    KeptBeside,
    LearnerCheckpoint,
)
from decoupled_diloco.learner.optimizers import InnerOptimizers, Optimizers
from decoupled_diloco.learner.parameter_store import Values
from decoupled_diloco.merge import values_digest
from decoupled_diloco.protocol.messages import KeptFragment, Recovered
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.storage.files import names_in, size_of
from decoupled_diloco.storage.states import HostMemory, host_memory, on_host, pack
from decoupled_diloco.storage.weight_files import seal_of
from decoupled_diloco.tape.samples import CheckpointWritten, Sample

logger = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored: an optimizer, scheduler or data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return what it needs to continue from here, as nested plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Continue from a state that `state_dict` returned."""
        ...


@dataclass(frozen=True)
class Counted:
    """A learner's counters over its earlier incarnations."""

    steps: int = 0
    tokens: int = 0
    discarded_tokens: int = 0


@dataclass(frozen=True)
class Written:
    """The result of a checkpoint: its digest and size in bytes, or the problem."""

    digest: str
    nbytes: int
    problem: str = ""


class Checkpointer:
    """Takes a learner's checkpoints and restores them.

    Args:
        learner: The learner's id.
        model: The learner's model.
        stateful: Name to object; the inner optimizer's name is ``"optimizer"``.
        folder: The folder of the checkpoints; `None`: take none.
        every_seconds: Seconds between checkpoints, for `due`; 0: `due` is never true.

    Attributes:
        writing: The checkpoint that is being written, or the last one.
        loaded: The newest checkpoint of an earlier incarnation, until `restore` or `forget`.
        counted: The counters of earlier incarnations.
        changing: Whether the parameters are inconsistent: in an optimizer step or in a boundary.

    Raises:
        ConfigError: An object has no state, or its state cannot be saved.
        StorageError: The folder cannot be read.
    """

    def __init__(
        self,
        learner: str,
        model: torch.nn.Module,
        stateful: Mapping[str, Any],
        folder: CheckpointFolder | None,
        every_seconds: float,
    ) -> None:
        self.learner = learner
        self.folder = folder
        self.counted = Counted()
        self._model = model
        self._stateful = dict(stateful)
        self._every_seconds = every_seconds
        for name, thing in self._stateful.items():
            require_stateful(name, thing)
        if folder is not None:
            self._require_model_kept()
        self.loaded = folder.newest() if folder is not None else None
        self._taken_at = now()
        self._writer = runtime().worker("ddiloco-checkpoint")
        self.writing: Future[Written] | None = None
        self._spare: list[HostMemory] = []
        self._prepared = folder is None or not every_seconds
        self.changing = False
        self._unhook: Callable[[], None] = lambda: None
        optimizers = self._stateful.get(OPTIMIZER)
        if isinstance(optimizers, InnerOptimizers):
            self._unhook = optimizers.on_step(
                lambda _: self._change(False), lambda: self._change(True)
            )

    def _require_model_kept(self) -> None:
        """Reject a model whose state cannot be saved, before the first checkpoint fails."""
        try:
            pack(dict(self._model.state_dict()))
        except ConfigError as error:
            raise ConfigError(
                f"checkpoint= cannot save the model: {error}. If a restart builds that buffer "
                "again, register it with persistent=False"
            ) from error

    def _change(self, changing: bool) -> None:
        self.changing = changing

    def fits(self, run: str, fragment_numels: tuple[int, ...]) -> str:
        """Return why this learner cannot continue from `loaded`; empty if it can."""
        checkpoint = self.loaded
        if checkpoint is None:
            return "it has no checkpoint of its own"
        if checkpoint.learner != self.learner:
            return f"its checkpoint belongs to learner {checkpoint.learner!r}"
        if checkpoint.run != run:
            return "its checkpoint is of another run"
        numels = tuple(held.published.numel() for held in checkpoint.fragments)
        if numels and numels != fragment_numels:
            return "its checkpoint divides the model into other fragments"
        return ""

    def fitting(self, run: str, fragment_numels: tuple[int, ...]) -> LearnerCheckpoint | str:
        """Return the checkpoint to begin with, or the reason why there is none.

        If there is none, `loaded` is dropped.
        """
        problem, checkpoint = self.fits(run, fragment_numels), self.loaded
        if not problem and checkpoint is not None:
            try:
                held = tuple(map(self.with_published, checkpoint.fragments))
            except StorageError as error:
                problem = f"its checkpoint cannot be read: {error}"
            else:
                self.loaded = replace(checkpoint, fragments=held)
                return self.loaded
        if checkpoint is not None:
            logger.warning("%s does not use its checkpoint: %s", self.learner, problem)
        self.forget()
        return problem

    def with_published(self, held: HeldFragment) -> HeldFragment:
        """Return the fragment with its published copy and residual in memory.

        Raises:
            StorageError: The copy cannot be read, or its digest is wrong.
        """
        if not isinstance(held.published, KeptBeside):
            return held
        values = held.published.read()
        if values_digest(values) != held.digest:
            raise StorageError(
                f"the published copy of fragment {held.published.fragment} in "
                f"{held.published.folder} is corrupt"
            )
        residual = tuple(left.read() for left in held.residual)
        return replace(held, published=values, residual=residual)

    def forget(self) -> None:
        """Free the memory of `loaded`."""
        self.loaded = None

    def restore(self) -> None:
        """Restore the model, the optimizer and all stateful objects from `loaded`.

        Raises:
            ConfigError: They do not fit.
        """
        checkpoint = self.loaded
        assert checkpoint is not None
        if checkpoint.beside is not None:
            from decoupled_diloco.learner.sharded_state import ShardedState  # torch's, and slow

            ShardedState(self._model, self._stateful).load(checkpoint.beside, checkpoint.ranks)
            self._restored(checkpoint)
            return
        if set(checkpoint.state) != set(self._stateful):
            raise ConfigError(
                f"the checkpoint in {self._place} has the state of {sorted(checkpoint.state)}, "
                f"this learner has {sorted(self._stateful)}: pass the same stateful objects, or "
                "another folder"
            )
        try:
            whole = bool(checkpoint.fragments)
            # break: model-not-restored
            self._model.load_state_dict(dict(checkpoint.model), strict=whole)
            for name, thing in self._stateful.items():
                thing.load_state_dict(checkpoint.state[name])
        except DilocoError:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the checkpoint in {self._place} does not fit this learner ({error}): build the "
                "same model and objects, or pass another folder"
            ) from error
        self._restored(checkpoint)

    def _restored(self, checkpoint: LearnerCheckpoint) -> None:
        steps, tokens = checkpoint.alone  # the machine counts these itself
        self.counted = Counted(
            checkpoint.steps - steps, checkpoint.tokens - tokens, checkpoint.discarded_tokens
        )
        self.forget()

    def adopt(self, provider: str, state: Mapping[str, Any]) -> None:
        """Load the shared states for which this learner has an object of the same name.

        Args:
            provider: The learner that shared them, for messages.
            state: Name to state.

        Raises:
            ConfigError: A state does not fit its object.
        """
        for name in sorted(state.keys() & self._stateful.keys()):
            try:
                self._stateful[name].load_state_dict(state[name])
            except DilocoError:
                raise
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"the {name} of {provider} does not fit this learner's ({error}): build the "
                    "same in every learner, or leave it out of StateSharing(objects=…)"
                ) from error

    @property
    def _place(self) -> Path | None:
        return None if self.folder is None else self.folder.path

    @property
    def due(self) -> bool:
        """Whether the interval has passed and the previous checkpoint is written."""
        if self.folder is None or not self._every_seconds:
            return False
        if self.writing is not None and not self.writing.done():
            return False
        return now() - self._taken_at >= self._every_seconds

    def take(
        self, outline: LearnerCheckpoint, record: Callable[[Sample], None]
    ) -> Future[Written] | None:
        """Copy everything at this step boundary, and write it in the writer's thread.

        Args:
            outline: All but `LearnerCheckpoint.model` and `LearnerCheckpoint.state`. The writer
                fills in missing digests of the published copies.
            record: Called by the writer with the measurements.

        Returns:
            The result, once the checkpoint is written or has failed; `None` without a folder.

        Raises:
            ConfigError: A stateful object's state cannot be saved.
        """
        if self.folder is None:
            return None
        started = self._taken_at = now()
        memory = self._spare.pop() if self._spare else {}
        copy = on_host(self._state(), memory)  # break: checkpoint-not-copied
        whole = replace(outline, model=copy["model"], state=copy["state"])
        copy_seconds = now() - started
        self.writing = self._writer.submit(self._write_from, memory, whole, copy_seconds, record)
        return self.writing

    def prepare(self) -> None:
        """Let the writer allocate memory for the first copy; call it when a step is finished."""
        if not self._prepared:
            self._prepared = True
            ready = host_memory(self._state())
            self._writer.submit(lambda: self._spare.append(ready()))

    def _state(self) -> dict[str, Any]:
        state = {name: thing.state_dict() for name, thing in self._stateful.items()}
        return {"model": dict(self._model.state_dict()), "state": state}

    def _write_from(
        self,
        memory: HostMemory,
        checkpoint: LearnerCheckpoint,
        copy_seconds: float,
        record: Callable[[Sample], None],
    ) -> Written:
        """Write, then keep the memory for the next copy; one is enough, as `due` waits for it."""
        try:
            return self._write(checkpoint, copy_seconds, record)
        finally:
            self._spare[:] = [memory]

    def _write(
        self, checkpoint: LearnerCheckpoint, copy_seconds: float, record: Callable[[Sample], None]
    ) -> Written:
        assert self.folder is not None
        started, nbytes, seal, problem = now(), 0, "", ""
        try:
            path = self.folder.save(_with_digests(checkpoint))
            nbytes, seal = size_of(path), seal_of(path)
            if checkpoint.beside is not None:
                nbytes += sum(map(size_of, names_in(checkpoint.beside)))
        except (DilocoError, OSError) as error:
            problem = str(error)
            logger.error("%s lost a checkpoint and continues training: %s", self.learner, error)
        seconds = now() - started
        of_run = checkpoint.run_checkpoint
        record(CheckpointWritten(checkpoint.steps, nbytes, copy_seconds, seconds, problem, of_run))
        return Written(seal, nbytes, problem)

    def forget_checkpoints(self, keep: tuple[int, ...], before: int) -> None:
        """Delete this learner's parts of unneeded checkpoints of the run, in the writer's thread.

        Args:
            keep: Numbers of the run's checkpoints that are needed.
            before: Delete only parts of checkpoints with a smaller number.
        """
        if self.folder is not None:
            needed = {*keep, self._reading}  # break: checkpoint-in-use-deleted
            with contextlib.suppress(RuntimeError):  # the writer is closed
                self._writer.submit(
                    self.folder.forget_checkpoints, lambda n: n < before and n not in needed
                )

    @property
    def _reading(self) -> int | None:
        """The checkpoint of the run from which this learner is about to continue."""
        return None if self.loaded is None else self.loaded.run_checkpoint

    def close(self) -> None:
        """Take no more checkpoints; the one that is being written is completed."""
        self._unhook()  # the optimizer may outlive many learners in one process
        self._writer.shutdown(wait=False)


def _with_digests(checkpoint: LearnerCheckpoint) -> LearnerCheckpoint:
    fragments = tuple(
        held if held.digest else replace(held, digest=values_digest(held.published))
        for held in checkpoint.fragments
    )
    return replace(checkpoint, fragments=fragments)


def held_fragment(
    kept: KeptFragment, published: Values, residual: tuple[Values, ...]
) -> HeldFragment:
    """Return a fragment of a checkpoint's outline; the writer fills in a missing digest."""
    numbers = (kept.version, kept.digest, kept.seal, kept.steps, kept.tokens)
    return HeldFragment(*numbers, published, residual, kept.again)


def all_stateful(optimizer: Optimizers | None, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inner optimizers and the program's objects with a state, by name.

    Raises:
        ConfigError: The optimizer has no state, or an object has the name of the optimizer.
    """
    optimizers = None if optimizer is None else InnerOptimizers(optimizer)
    objects = dict(state)
    if OPTIMIZER in objects:
        raise ConfigError(
            f"Checkpointing(state=…) has {OPTIMIZER!r}: pass the inner optimizer as optimizer="
        )
    return objects if optimizers is None else {OPTIMIZER: optimizers, **objects}


def log_recovery(learner: str, recovered: Recovered) -> None:
    """Log the source of a learner's initial state."""
    logger.info(
        "%s starts after %.1f s from %s: its progress continues in %d of %d fragments (%s)",
        learner,
        recovered.seconds,
        recovered.donor or recovered.way,
        recovered.kept,
        recovered.kept + recovered.overwritten,
        recovered.why,
    )


def require_stateful(name: str, thing: Any) -> None:
    """Reject an object without a state, or with a state that cannot be saved.

    Raises:
        ConfigError: The object is rejected.
    """
    if not isinstance(thing, Stateful):
        raise ConfigError(
            f"{_argument(name)} is {a_kind(thing)} without state_dict and "
            "load_state_dict: add both methods, or leave it out"
        )
    try:
        pack(thing.state_dict())
    except ConfigError as error:
        raise ConfigError(f"{_argument(name)}: {error}") from error


def _argument(name: str) -> str:
    return "optimizer=" if name == OPTIMIZER else f"Checkpointing(state=…)[{name!r}]"
