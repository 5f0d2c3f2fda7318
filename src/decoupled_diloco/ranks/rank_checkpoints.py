"""Checkpoints of a multi-rank learner, as its leader orders them.

All ranks write the model and the state, each rank its own shards. Sync ranks write their ranges of
the published copies. When all of these files are on disk, the leader writes the checkpoint itself,
with the learner's counters and versions.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decoupled_diloco.errors import DilocoError, StorageError
from decoupled_diloco.learner.checkpointer import Checkpointer, Written
from decoupled_diloco.learner.learner_checkpoint import HeldFragment, LearnerCheckpoint
from decoupled_diloco.learner.sharded_state import causes, spread_out
from decoupled_diloco.merge import joined_digest
from decoupled_diloco.ranks.rank_store import RankedStore
from decoupled_diloco.ranks.sync_ranks import Document, SyncRankExchange
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.storage.vector_ranges import RESIDUAL, keep_ranges, summed
from decoupled_diloco.tape.samples import CheckpointWritten, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Ordered:
    """A checkpoint that the ranks were asked to write."""

    outline: LearnerCheckpoint
    report: Callable[[Sample], None]
    future: Future[Written]
    published: Future[list[Document]]


class LeaderCheckpointer(Checkpointer):
    """See the module.

    Args:
        store: Sends orders to the ranks.
        ranks: The number of ranks.
        arguments: The arguments of `Checkpointer`.

    Attributes:
        exchange: Sends requests to the sync ranks.
    """

    exchange: SyncRankExchange

    def __init__(
        self,
        store: RankedStore,
        ranks: int,
        *arguments: Any,
    ) -> None:
        super().__init__(*arguments)
        self._store = store
        self._ranks = ranks
        self._wanted: Future[Written] | None = None
        self._ordered: dict[str, _Ordered] = {}
        self._resharded: Path | None = None
        self._adopting: Future[list[Document]] = Future()
        self._adopted: list[Document] = []
        self._read: int | None = None

    def _require_model_kept(self) -> None:
        """Verify nothing: torch.distributed.checkpoint keeps the model of several ranks."""

    def fits(self, run: str, fragment_numels: tuple[int, ...]) -> str:
        """See `Checkpointer.fits`; converts a single-process learner's checkpoint for all ranks."""
        problem, checkpoint = super().fits(run, fragment_numels), self.loaded
        if problem or checkpoint is None or checkpoint.beside is not None:
            return problem
        assert self.folder is not None
        self._resharded = folder = self.folder.next_beside()
        try:
            spread_out(checkpoint, self._model, self._stateful, folder)
            held = checkpoint.fragments
            keep_ranges(folder, 0, {(p, 0): each.published for p, each in enumerate(held)})
            left = {(p, 0): summed(held[p].residual) for p in checkpoint.with_residual}
            keep_ranges(folder, 0, left, RESIDUAL)
        except DilocoError as error:
            return f"its checkpoint is of a single-process learner: {error}"
        self.loaded = replace(checkpoint, beside=folder, ranks=1, model={}, state={})
        return ""

    def with_published(self, held: HeldFragment) -> HeldFragment:
        """See `Checkpointer.with_published`; returns handles of values that sync ranks read."""
        numel = held.published.numel()
        residual = tuple(self._store.handle(numel, "") for _ in held.residual)
        published = self._store.handle(numel, held.digest)
        return replace(held, published=published, residual=residual)

    def fitting(self, run: str, fragment_numels: tuple[int, ...]) -> LearnerCheckpoint | str:
        """See `Checkpointer.fitting`; the sync ranks begin to read their published copies.

        They begin now because the next downloads may be differences to these copies.
        """
        found = super().fitting(run, fragment_numels)
        if not isinstance(found, str):
            folder, numbers = str(found.beside), _numbers(found)
            left = [(p, found.fragments[p].residual[0].number) for p in found.with_residual]
            self._adopting = self.exchange.request_all(
                do="adopt", folder=folder, numbers=numbers, residuals=left
            )
            self._read = found.run_checkpoint
        return found

    @property
    def _reading(self) -> int | None:
        """See `Checkpointer`; the ranks read the checkpoint at a later boundary."""
        return super()._reading if self._read is None else self._read

    def raise_failure(self) -> None:
        """Raise the error if a sync rank could not read what it kept; else `read` would hang."""
        if self._adopting.done():
            self._adopting.result()

    async def read(self) -> None:
        """Wait until the sync ranks have read what they kept; call it before `restore`."""
        self._adopted = await runtime().outcome(self._adopting)

    def restore(self) -> None:
        """See `Checkpointer.restore`; the ranks restore their state at the next boundary."""
        checkpoint = self.loaded
        assert checkpoint is not None
        folder, answers = str(checkpoint.beside), self._adopted
        for fragment, held in enumerate(checkpoint.fragments):
            blocks = bytes.fromhex("".join(each["digests"][fragment] for each in answers))
            if joined_digest(blocks) != held.digest:
                raise StorageError(
                    f"{folder}: the published copy of fragment {fragment} is corrupted: delete "
                    "this folder and the file with the same number; the previous checkpoint is "
                    "then used"
                )
        self._store.order("restore", folder, checkpoint.ranks)
        for fragment, held in enumerate(checkpoint.fragments):
            self._store.adopt(fragment, held.published)
        self._restored(checkpoint)

    def want(self) -> Future[Written]:
        """Request a checkpoint at the end of the next step that is planned."""
        self._wanted = self._wanted or Future()
        return self._wanted

    @property
    def due(self) -> bool:
        """See `Checkpointer.due`."""
        return self._wanted is not None or super().due

    def take(
        self, outline: LearnerCheckpoint, report: Callable[[Sample], None]
    ) -> Future[Written] | None:
        """See `Checkpointer.take`; the ranks copy their state at the boundary being planned."""
        if self.folder is None:
            return None
        self._read = None  # all ranks have read it before their first step
        if self._resharded is not None:
            runtime().disk.remove_folder(self._resharded)
            self._resharded = None
        self._taken_at = now()
        beside = self.folder.next_beside()
        self.writing = Future()
        whole = replace(outline, ranks=self._ranks, beside=beside, fragments=_named(outline))
        folder = str(beside)
        left = [[each.number for each in held.residual] for held in whole.fragments]
        published = self.exchange.request_all(
            do="keep", folder=folder, numbers=_numbers(whole), residuals=left
        )
        self._ordered[folder] = _Ordered(whole, report, self.writing, published)
        self._store.order("save", folder)
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self.writing.add_done_callback(lambda done: wanted.set_result(done.result()))
        return self.writing

    def saving(self, folder: str, writing: Future[Any], copy_seconds: float) -> None:
        """Finish a checkpoint when the ranks have written it; see `RankTensors.saving`."""
        ordered = self._ordered.pop(folder)

        def finish(done: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the learner has left: the writer is closed
                self._writer.submit(self._finish, ordered, done.exception(), copy_seconds)

        # Both must be complete: the leader's file may only name files that exist.
        ordered.published.add_done_callback(lambda _: writing.add_done_callback(finish))

    def _finish(self, ordered: _Ordered, error: BaseException | None, copy_seconds: float) -> None:
        checkpoint = ordered.outline
        try:
            ordered.published.result()
        except (DilocoError, CancelledError) as lost:
            error = error or lost
        if error is None:
            ordered.future.set_result(self._write(checkpoint, copy_seconds, ordered.report))
            return
        problem = f"the ranks could not write {checkpoint.beside} ({causes(error)})"
        logger.error("%s lost a checkpoint and continues training: %s", self.learner, problem)
        runtime().disk.remove_folder(Path(str(checkpoint.beside)))
        seconds = now() - self._taken_at
        ordered.report(
            CheckpointWritten(
                checkpoint.steps, 0, copy_seconds, seconds, problem, checkpoint.run_checkpoint
            )
        )
        ordered.future.set_result(Written("", 0, problem))


def _numbers(checkpoint: LearnerCheckpoint) -> list[int]:
    return [held.published.number for held in checkpoint.fragments]


def _named(outline: LearnerCheckpoint) -> tuple[HeldFragment, ...]:
    """Return the fragments with all digests; the sync ranks reported the missing ones."""
    return tuple(
        held if held.digest else replace(held, digest=held.published.digest)
        for held in outline.fragments
    )
