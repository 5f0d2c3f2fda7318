"""A learner's checkpoints in an object store; `learner_checkpoint` describes the files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path, PurePath

from decoupled_diloco.errors import DilocoError, StorageError
from decoupled_diloco.learner.learner_checkpoint import (
    OWN,
    CheckpointFolder,
    LearnerCheckpoint,
    delete_file,
    number_of,
    run_checkpoint_of,
)
from decoupled_diloco.storage.files import size_of
from decoupled_diloco.storage.object_store import Objects, temporary_folder

READ_BYTES = 1 << 20
"""Bytes of a file that are read at a time."""


class StoredCheckpoints(CheckpointFolder):
    """The checkpoints of one learner in an object store.

    A checkpoint is written to a local file first, and then uploaded by the same thread, so a step
    waits for neither. If the store is slow, checkpoints become rarer. If it is unreachable, they
    are lost and training continues.

    Args:
        address: The store.
        learner: The learner's name, a folder of the store.
        keep: Number of ordinary checkpoints to keep in the store, at least 1.

    Raises:
        ConfigError: The store refuses this process, or obstore is not installed.
    """

    def __init__(self, address: str, learner: str, keep: int = 2) -> None:
        super().__init__(temporary_folder(self), keep=1)
        self._objects, self._learner, self._keep_stored = Objects(address), learner, keep

    def save(self, checkpoint: LearnerCheckpoint) -> Path:
        """See `CheckpointFolder.save`; the checkpoint is in the store when this returns."""
        path = super().save(checkpoint)
        try:
            with path.open("rb") as source:
                pieces = iter(lambda: source.read(READ_BYTES), b"")
                self._objects.upload(self._name(path), pieces, size_of(path))
        except OSError as error:
            raise StorageError(f"{path} cannot be uploaded: {error.strerror or error}") from error
        stored = self._stored()
        ordinary = [each for each in stored if run_checkpoint_of(each) is None]
        unneeded = [self._name(each) for each in ordinary[: -self._keep_stored]]
        with contextlib.suppress(DilocoError):  # the next checkpoint tries again
            self._objects.delete(unneeded)
        return path

    def newest(self) -> LearnerCheckpoint | None:
        """See `CheckpointFolder.newest`.

        Raises:
            ConfigError: The store refuses this process.
            StorageError: The store is unreachable.
        """
        for path in reversed(self._stored()):
            # An error of the store is raised here: to start from an older checkpoint, or without
            # one, would lose what a later attempt finds.
            try:
                with path.open("wb") as target:
                    self._objects.download(self._name(path), target)
                found = self._first_whole([path])
            except FileNotFoundError:
                continue  # deleted meanwhile
            finally:
                delete_file(path)  # the tensors are in memory
            if found is not None:
                return found
        return None

    def forget_checkpoints(self, unneeded: Callable[[int], bool]) -> None:
        """See `CheckpointFolder.forget_checkpoints`."""
        super().forget_checkpoints(unneeded)
        with contextlib.suppress(DilocoError):
            numbers = {self._name(path): run_checkpoint_of(path) for path in self._stored()}
            of_run = [name for name, n in numbers.items() if n is not None and unneeded(n)]
            self._objects.delete(of_run)

    def _next_number(self) -> int:
        stored = max(map(number_of, self._stored()), default=0)
        return max(super()._next_number(), stored + 1)

    def _stored(self) -> list[Path]:
        """Return where the checkpoints of the store are or would be here, ascending by number."""
        names = (PurePath(each.name).name for each in self._objects.listed(self._learner))
        return sorted((self.path / name for name in names if OWN.fullmatch(name)), key=number_of)

    def _name(self, path: Path) -> str:
        return f"{self._learner}/{path.name}"
