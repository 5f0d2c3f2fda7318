"""Checkpoints of a learner of several ranks, as its leader orders them.

All ranks write the model and the state, each its own shards; when all of it is on the disk, the
leader writes what the run has to know. Published copies are kept by the carriers, each its ranges.
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
from decoupled_diloco.ranks.sync_ranks import CarriedExchange, Document
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.storage.vector_ranges import RESIDUAL, keep_ranges, summed
from decoupled_diloco.tape.samples import CheckpointWritten, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Ordered:
    """A checkpoint that the ranks are to write."""

    outline: LearnerCheckpoint
    tell: Callable[[Sample], None]
    future: Future[Written]
    published: Future[list[Document]]


class LeaderCheckpointer(Checkpointer):
    """See the module.

    Args:
        store: By which the ranks are told.
        ranks: How many there are.
        arguments: As `Checkpointer` has them.

    Attributes:
        exchange: Asks the carriers.
    """

    exchange: CarriedExchange

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
        self._for_all: Path | None = None
        self._adopting: Future[list[Document]] = Future()
        self._adopted: list[Document] = []
        self._read: int | None = None

    def _require_model_kept(self) -> None:
        """Nothing: torch.distributed.checkpoint keeps the model of several ranks."""

    def fits(self, run: str, fragment_numels: tuple[int, ...]) -> str:
        """See `Checkpointer.fits`; that of a learner of one process is written anew, for all."""
        problem, checkpoint = super().fits(run, fragment_numels), self.loaded
        if problem or checkpoint is None or checkpoint.beside is not None:
            return problem
        assert self.folder is not None
        self._for_all = self.folder.next_beside()
        try:
            spread_out(checkpoint, self._model, self._stateful, self._for_all)
            held = checkpoint.fragments
            keep_ranges(self._for_all, 0, {(p, 0): each.published for p, each in enumerate(held)})
            left = {(p, 0): summed(held[p].residual) for p in checkpoint.with_residual}
            keep_ranges(self._for_all, 0, left, RESIDUAL)
        except DilocoError as error:
            return f"its checkpoint is of a learner of one process: {error}"
        self.loaded = replace(checkpoint, beside=self._for_all, ranks=1, model={}, state={})
        return ""

    def with_published(self, held: HeldFragment) -> HeldFragment:
        """See `Checkpointer.with_published`: the carriers will have it."""
        numel = held.published.numel()
        residual = tuple(self._store.handle(numel, "") for _ in held.residual)
        published = self._store.handle(numel, held.digest)
        return replace(held, published=published, residual=residual)

    def fitting(self, run: str, fragment_numels: tuple[int, ...]) -> LearnerCheckpoint | str:
        """See `Checkpointer.fitting`; the carriers begin to read, since differences come to it."""
        found = super().fitting(run, fragment_numels)
        if not isinstance(found, str):
            folder, numbers = str(found.beside), _numbers(found)
            left = [(p, found.fragments[p].residual[0].number) for p in found.with_residual]
            self._adopting = self.exchange.ask_all(
                do="adopt", folder=folder, numbers=numbers, residuals=left
            )
            self._read = found.run_checkpoint
        return found

    @property
    def _reading(self) -> int | None:
        """See `Checkpointer`: the ranks read it at a boundary to come."""
        return super()._reading if self._read is None else self._read

    def raise_failure(self) -> None:
        """What the carriers have kept, and cannot read, would be waited for in vain."""
        if self._adopting.done():
            self._adopting.result()

    async def read(self) -> None:
        """Waits until the carriers have read what they have kept, before `restore`."""
        self._adopted = await runtime().outcome(self._adopting)

    def restore(self) -> None:
        """See `Checkpointer.restore`; the ranks do it at the next boundary."""
        checkpoint = self.loaded
        assert checkpoint is not None
        folder, answers = str(checkpoint.beside), self._adopted
        for fragment, held in enumerate(checkpoint.fragments):
            blocks = bytes.fromhex("".join(each["digests"][fragment] for each in answers))
            if joined_digest(blocks) != held.digest:
                raise StorageError(
                    f"{folder}: the published copy of fragment {fragment} is not what was written: "
                    "delete it and the file of the same number, and the one before is used"
                )
        self._store.order("restore", folder, checkpoint.ranks)
        for fragment, held in enumerate(checkpoint.fragments):
            self._store.adopt(fragment, held.published)
        self._restored(checkpoint)

    def want(self) -> Future[Written]:
        """Orders a checkpoint for the end of the next step that is planned."""
        self._wanted = self._wanted or Future()
        return self._wanted

    @property
    def due(self) -> bool:
        """See `Checkpointer.due`."""
        return self._wanted is not None or super().due

    def take(
        self, outline: LearnerCheckpoint, tell: Callable[[Sample], None]
    ) -> Future[Written] | None:
        """See `Checkpointer.take`; of the boundary whose orders were given before."""
        if self.folder is None:
            return None
        self._read = None  # All ranks have read it: their first step came after.
        if self._for_all is not None:
            runtime().disk.remove_folder(self._for_all)
            self._for_all = None
        self._taken_at = now()
        beside = self.folder.next_beside()
        self.writing = Future()
        whole = replace(outline, ranks=self._ranks, beside=beside, fragments=_named(outline))
        folder = str(beside)
        left = [[each.number for each in held.residual] for held in whole.fragments]
        published = self.exchange.ask_all(
            do="keep", folder=folder, numbers=_numbers(whole), residuals=left
        )
        self._ordered[folder] = _Ordered(whole, tell, self.writing, published)
        self._store.order("save", folder)
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self.writing.add_done_callback(lambda done: wanted.set_result(done.result()))
        return self.writing

    def saving(self, folder: str, writing: Future[Any], copy_seconds: float) -> None:
        """The ranks have begun to write: see `RankTensors`."""
        ordered = self._ordered.pop(folder)

        def finish(done: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the learner has left meanwhile
                self._writer.submit(self._finish, ordered, done.exception(), copy_seconds)

        ordered.published.add_done_callback(lambda _: writing.add_done_callback(finish))

    def _finish(self, ordered: _Ordered, error: BaseException | None, copy_seconds: float) -> None:
        checkpoint = ordered.outline
        try:
            ordered.published.result()
        except (DilocoError, CancelledError) as lost:
            error = error or lost
        if error is None:
            ordered.future.set_result(self._write(checkpoint, copy_seconds, ordered.tell))
            return
        problem = f"the ranks could not write {checkpoint.beside} ({causes(error)})"
        logger.error("%s: no checkpoint of %s this time", problem, self.learner)
        runtime().disk.remove_folder(Path(str(checkpoint.beside)))
        seconds = now() - self._taken_at
        ordered.tell(
            CheckpointWritten(
                checkpoint.steps, 0, copy_seconds, seconds, problem, checkpoint.run_checkpoint
            )
        )
        ordered.future.set_result(Written("", 0, problem))


def _numbers(checkpoint: LearnerCheckpoint) -> list[int]:
    return [held.published.number for held in checkpoint.fragments]


def _named(outline: LearnerCheckpoint) -> tuple[HeldFragment, ...]:
    """The fragments with all digests, as the carriers had them."""
    return tuple(
        held if held.digest else replace(held, digest=held.published.digest)
        for held in outline.fragments
    )
