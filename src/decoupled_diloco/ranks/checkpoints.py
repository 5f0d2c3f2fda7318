"""Checkpoints of a learner of several ranks, as its leader orders them.

All ranks write the model and the state, each its own shards; when all of it is on the disk, the
leader writes what the run has to know: the published copies, and what was counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decoupled_diloco.learner.checkpoint import LearnerCheckpoint
from decoupled_diloco.learner.checkpointer import Checkpointer, Written
from decoupled_diloco.learner.sharded_state import causes
from decoupled_diloco.observe.samples import CheckpointWritten, Sample
from decoupled_diloco.ranks.store import RankedStore
from decoupled_diloco.runtime import now, runtime

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Ordered:
    """A checkpoint that the ranks are to write."""

    outline: LearnerCheckpoint
    tell: Callable[[Sample], None]
    future: Future[Written]


class LeaderCheckpointer(Checkpointer):
    """See the module.

    Args:
        store: By which the ranks are told.
        ranks: How many there are.
        arguments: As `Checkpointer` has them.
    """

    def __init__(self, store: RankedStore, ranks: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._store = store
        self._ranks = ranks
        self._ordered: dict[str, _Ordered] = {}

    def fits(self, run: str, fragment_numels: tuple[int, ...]) -> str:
        """See `Checkpointer.fits`."""
        if self.loaded is not None and self.loaded.beside is None:
            return "its checkpoint is of a learner of one process"
        return super().fits(run, fragment_numels)

    def restore(self) -> None:
        """See `Checkpointer.restore`; the ranks do it at the next boundary."""
        checkpoint = self.loaded
        assert checkpoint is not None
        self._store.order("restore", str(checkpoint.beside), checkpoint.ranks)
        for fragment, held in enumerate(checkpoint.fragments):
            self._store.adopt(fragment, held.published)
        self._restored(checkpoint)

    def take(
        self, outline: LearnerCheckpoint, tell: Callable[[Sample], None]
    ) -> Future[Written] | None:
        """See `Checkpointer.take`; of the boundary whose orders were given before."""
        if self.folder is None:
            return None
        self._taken_at = now()
        beside = self.folder.next_beside()
        self.writing = Future()
        whole = replace(outline, ranks=self._ranks, beside=beside)
        self._ordered[str(beside)] = _Ordered(whole, tell, self.writing)
        self._store.order("save", str(beside))
        return self.writing

    def saving(self, folder: str, writing: Future[Any], copy_seconds: float) -> None:
        """The ranks have begun to write: see `RankTensors`."""
        ordered = self._ordered.pop(folder)

        def written(done: Future[Any]) -> None:
            self._writer.submit(self._finish, ordered, done.exception(), copy_seconds)

        writing.add_done_callback(written)

    def _finish(self, ordered: _Ordered, error: BaseException | None, copy_seconds: float) -> None:
        checkpoint = ordered.outline
        if error is None:
            ordered.future.set_result(self._write(checkpoint, copy_seconds, ordered.tell))
            return
        problem = f"the ranks could not write {checkpoint.beside} ({causes(error)})"
        logger.error("%s: no checkpoint of %s this time", problem, self.learner)
        runtime().disk.remove_folder(Path(str(checkpoint.beside)))
        seconds = now() - self._taken_at
        ordered.tell(
            CheckpointWritten(checkpoint.steps, 0, copy_seconds, seconds, problem, checkpoint.cut)
        )
        ordered.future.set_result(Written("", 0, problem))
