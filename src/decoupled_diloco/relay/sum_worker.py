"""A relay's tensor work: fold its children's payloads, and send their sums."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from decoupled_diloco.errors import MergeError, ProtocolError, StorageError, TransportError
from decoupled_diloco.merge import digest as digest_of
from decoupled_diloco.merge.accumulate import Accumulator
from decoupled_diloco.merge.fixed_point import write
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.merge.sum_payload import write_sum
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Done, Failed
from decoupled_diloco.runtime import runtime
from decoupled_diloco.shell.driver import executes
from decoupled_diloco.storage.files import exists
from decoupled_diloco.storage.vector_ranges import RESIDUAL, summed
from decoupled_diloco.storage.weight_files import load_metadata, load_weights, save_weights
from decoupled_diloco.syncer.contributions import Contributions

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class KeptResiduals:
    """The residuals of a relay's sums, in memory and in one file for each fragment.

    A file is removed durably before its residual goes into a sum. So a relay that is killed while a
    sum is in progress loses this residual, and never sends it twice.

    Args:
        folder: For the files.
        run: Id of the run. Files of another run are ignored.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run
        self._held: dict[int, Tensor] = {}

    def take(self, fragment: int, numel: int) -> tuple[Tensor, ...]:
        """Remove and return a fragment's residual, fp32 [N], if there is one."""
        held, path = self._held.pop(fragment, None), self._path(fragment)
        try:
            if not exists(path):
                return () if held is None else (held,)
            if held is None:
                held = self._read(path, numel)
        except StorageError as error:
            logger.warning("a residual of an earlier sum is dropped: %s", error)
        try:
            runtime().disk.remove(path)
            runtime().disk.sync(self._folder)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", path, error.strerror or error)
        return () if held is None else (held,)

    def keep(self, fragment: int, residuals: tuple[Tensor, ...]) -> None:
        """Keep residuals, fp32 [N] each, in addition to the one that is kept."""
        if not residuals:
            return
        before = (self._held[fragment],) if fragment in self._held else ()
        held = self._held[fragment] = summed((*before, *residuals))
        try:
            save_weights(self._path(fragment), {RESIDUAL: held}, {"run": self._run})
        except StorageError as error:
            logger.warning("a restart of this relay would lose a residual: %s", error)

    def _read(self, path: Path, numel: int) -> Tensor | None:
        if load_metadata(path).get("run") != self._run:
            return None
        values = load_weights(path).get(RESIDUAL)
        return values if values is not None and values.numel() == numel else None

    def _path(self, fragment: int) -> Path:
        return self._folder / f"residual-{fragment}.safetensors"


@dataclass
class SumUnderWay:
    """The residuals that a sum took, and the one that it leaves."""

    taken: tuple[Tensor, ...]
    leaves: Tensor | None


class RelayTensors(Contributions):
    """The tensors of a relay.

    A sum's codec leaves out a residual, which goes into the next sum of the fragment (rule 19). If
    the sum is void, the residual that it took is kept instead. If it is invalid, or its outcome is
    unknown, neither is kept: one of them may be what made it invalid, or be merged already.

    Args:
        plan: The run's layout, fragments, codecs and merge method.
        residuals: What earlier sums left out.
    """

    def __init__(self, plan: MergePlan, residuals: KeptResiduals) -> None:
        super().__init__(plan, tuple(range(len(plan.fragments))))
        self.residuals = residuals
        self._under_way: dict[tuple[int, int], SumUnderWay] = {}

    def take_sum(self, fragment: int, number: int) -> tuple[Tensor, str]:
        """Encode what was folded, and forget it.

        Returns:
            The payload, uint8 [B], and its digest.

        Raises:
            MergeError: The sums are not finite.
        """
        if self.plan.secure is not None:
            body = write(self.plan.secure, self._masked_total.pop(fragment))
            return body, digest_of(body.numpy().data)
        taken = self.residuals.take(fragment, self.plan.fragments[fragment].numel)
        accumulator = self._folded(fragment)
        assert isinstance(accumulator, Accumulator), "a custom merge rule has no sums"
        self._under_way[fragment, number] = entry = SumUnderWay(taken, None)
        try:
            body, digest, entry.leaves = write_sum(self.plan, fragment, accumulator, taken)
        finally:
            self.forget_folded(fragment)
        return body, digest

    def settle(self, fragment: int, number: int, verdict: messages.SumVerdict) -> None:
        """Keep the residual that remains of a sum; see `messages.SettleSum`."""
        entry = self._under_way.pop((fragment, number), None)
        if entry is None:
            return
        if verdict == "merged" and entry.leaves is not None:
            self.residuals.keep(fragment, (entry.leaves,))
        elif verdict == "void":
            self.residuals.keep(fragment, entry.taken)


class SumUplink(Protocol):
    """The connection to a shard, as far as sums need it."""

    def send(self, shard: int, message: messages.Message) -> None:
        """Send a shard a message, if it is connected."""

    async def put_sum(self, order: messages.SendSum, body: Tensor) -> None:
        """Send the payload of a sum."""


class SumWorker:
    """Executes a relay's orders about tensors, in their order, in one worker thread.

    Args:
        tensors: The relay's tensors.
        uplink: The connections to the shards.
    """

    def __init__(self, tensors: RelayTensors, uplink: SumUplink) -> None:
        self.tensors = tensors
        self._uplink = uplink
        self._executor = runtime().worker("merge")

    async def run(self, task: Callable[[], _T]) -> _T:
        """Run a function in the worker's thread, after all earlier ones."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, task)

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    @executes(messages.Fold)
    async def _fold(self, order: messages.Fold) -> None:
        counts = (order.steps, order.tokens, order.scale, order.discount)
        await self.run(partial(self.tensors.fold, order.fragment, order.ask, *counts))

    @executes(messages.Drop)
    async def _drop(self, order: messages.Drop) -> None:
        await self.run(partial(self.tensors.drop, order.fragment, order.ask))

    @executes(messages.ForgetFolded)
    async def _forget(self, order: messages.ForgetFolded) -> None:
        await self.run(partial(self.tensors.forget_folded, order.fragment))

    @executes(messages.SettleSum)
    async def _settle(self, order: messages.SettleSum) -> None:
        settle = partial(self.tensors.settle, order.fragment, order.number, order.verdict)
        await self.run(settle)

    @executes(messages.SendSum)
    async def _send_sum(self, order: messages.SendSum) -> Done | Failed:
        fragment, number = order.fragment, order.number
        try:
            body, digest = await self.run(partial(self.tensors.take_sum, fragment, number))
            announced = messages.Sum(fragment, number, order.asks, digest)
            self._uplink.send(order.shard, announced)
            await self._uplink.put_sum(order, body)
        except (TransportError, ProtocolError, MergeError) as error:
            return Failed(order, str(error))
        return Done(order)
