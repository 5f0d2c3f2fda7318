"""A relay's tensor work: fold its children's payloads, and send their sums."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor

from decoupled_diloco.errors import MergeError, ProtocolError, TransportError
from decoupled_diloco.merge.accumulate import Accumulator
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.merge.sum_payload import write_sum
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Done, Failed
from decoupled_diloco.runtime import runtime
from decoupled_diloco.shell.driver import executes
from decoupled_diloco.syncer.contributions import Contributions

_T = TypeVar("_T")


@dataclass
class SumUnderWay:
    """The residuals that a sum took, and the one that it leaves."""

    taken: tuple[Tensor, ...]
    leaves: Tensor | None


class RelayTensors(Contributions):
    """The tensors of a relay.

    A sum's codec leaves out a residual, which goes into the next sum of the fragment (rule 19). If
    the sum is void, the residual that it took is kept instead.

    Args:
        plan: The run's layout, fragments, codecs and merge method.
    """

    def __init__(self, plan: MergePlan) -> None:
        super().__init__(plan, tuple(range(len(plan.fragments))))
        self.residuals: dict[int, tuple[Tensor, ...]] = {}
        self._under_way: dict[tuple[int, int], SumUnderWay] = {}

    def take_sum(self, fragment: int, number: int) -> tuple[Tensor, str]:
        """Encode what was folded, and forget it.

        Returns:
            The payload, uint8 [B], and its digest.

        Raises:
            MergeError: The sums are not finite.
        """
        taken = self.residuals.pop(fragment, ())
        accumulator = self._accumulators[fragment]
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
        if entry is None or verdict == "invalid":
            return
        left = entry.taken
        if verdict == "merged":
            left = () if entry.leaves is None else (entry.leaves,)
        if left:
            self.residuals[fragment] = self.residuals.get(fragment, ()) + left


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
