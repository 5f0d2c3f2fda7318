"""Payloads of a learner: contributions and copies to the shards, published copies from them.

The background's event loop runs this module; encoding and decoding run in its worker.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError, MergeError, ProtocolError, TransportError
from decoupled_diloco.learner.exchange import Capture, verified
from decoupled_diloco.learner.masked_sums import MaskedSums
from decoupled_diloco.learner.parameter_store import Copied, HostCopy, Values
from decoupled_diloco.learner.shared import Context
from decoupled_diloco.merge import as_bytes, digest, parameters_numel, values_digest
from decoupled_diloco.merge.plan import MergePlan, values_of
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Done, Failed, average_path
from decoupled_diloco.runtime import runtime
from decoupled_diloco.shell.driver import executes
from decoupled_diloco.transport.payload_store import body_url

_T = TypeVar("_T")

FETCHES_PER_SHARD = 4
"""Copies in transit from or to one shard at the same time. The limit bounds the memory of a new
learner with many fragments; each copy may use several connections."""


def with_digest(values: Tensor) -> tuple[Tensor, str]:
    """Return the same values, and their digest for the shard."""
    return values, values_digest(values)


def fetched_nbytes(effect: messages.Fetch, plan: MergePlan) -> int:
    """Return the size of a copy or difference to fetch, in bytes.

    Raises:
        ProtocolError: The shard announced a size that is not possible for this fragment.
    """
    fragment = effect.fragment
    if effect.whole:
        return plan.whole_nbytes(fragment)
    sizes = plan.downlink_sizes(fragment)
    nbytes = effect.nbytes or sizes[-1]
    if nbytes not in sizes:
        raise ProtocolError(
            f"fragment {fragment}: a shard announced difference_nbytes={nbytes}, but only "
            f"{sizes[0]} to {sizes[-1]} are possible"
        )
    return nbytes


class BodyExchange:
    """Executes orders about payloads, and reports the results to the machine.

    Args:
        context: The background around it.
    """

    def __init__(self, context: Context) -> None:
        self._here = context
        self.secure = MaskedSums(context)
        self._gates: defaultdict[int, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(FETCHES_PER_SHARD)
        )
        self._averages: dict[int, tuple[messages.Version | None, Tensor]] = {}

    async def start(self) -> None:
        """Prepare: the client exists, and no order has arrived yet."""

    async def close(self) -> None:
        """Clean up: no more orders arrive, and the client is still open."""

    @executes(messages.SendBody)
    async def send_body(self, effect: messages.SendBody, capture: Capture) -> None:
        """Encode a contribution, report its digest to the machine, and deliver it.

        With secure sums, it only begins with the first step.
        """
        if self._here.machine.options.secure:
            await self.secure.begin(effect, capture)
        else:
            await self._send_encoded(effect, capture)

    async def _send_encoded(self, effect: messages.SendBody, capture: Capture) -> None:
        def encoded() -> tuple[Tensor, str, Tensor | None]:
            body, digest, left = capture.encode(effect.codec)
            # A relay does not know the buffers of the base.
            sent = capture.packed(body, effect.codec) if effect.packed else body
            return sent, digest, left

        try:
            ready = isinstance(capture.copy, Copied)  # otherwise `values` waits for the device
            body, digest, left = await self._computed(effect.fragment, encoded, in_place=ready)
            self._encoded(effect, digest, left)
            await self._put(effect.shard, effect.path, body)
        except (ConfigError, TransportError, ProtocolError) as error:
            self._here.deliver(Failed(effect, str(error)))

    async def change_of(self, capture: Capture) -> tuple[Tensor, Tensor]:
        """Return a contribution, fp32 [N], and the published copy that it was made from."""
        return await self._here.in_worker(capture.change), capture.published

    @executes(messages.TakeStep)
    async def take_step(self, step: messages.TakeStep) -> None:
        """Answer a step of a secure sum; deliver the masked contribution."""
        try:
            body = await self.secure.take(step)
            if body is not None:
                announced = digest(body.numpy().data)
                self._here.deliver(messages.BodyEncoded(step.fragment, step.ask, announced))
                await self._put(step.shard, self.secure.path(step), body)
        except (TransportError, ProtocolError, MergeError) as error:
            self._here.deliver(Failed(step, str(error)))

    async def _computed(
        self, fragment: int, task: Callable[[], _T], *, in_place: bool = True
    ) -> _T:
        numel = self._here.tensors.plan.fragments[fragment].numel
        if in_place and runtime().works_in_place(numel):
            return task()
        return await self._here.in_worker(task)

    def _encoded(self, effect: messages.SendBody, digest: str, residual: Values | None) -> None:
        with self._here.changed:
            # break: encoding-loss-not-noted
            self._here.tensors.encoded(effect.fragment, effect.ask, residual)
            self._here.deliver(messages.BodyEncoded(effect.fragment, effect.ask, digest))

    @executes(messages.SendCopy)
    async def send_copy(self, effect: messages.SendCopy, copy: HostCopy) -> None:
        """Deliver a whole fragment that a shard has requested."""
        values, announced = await self._here.in_worker(lambda: with_digest(copy.values()))
        self._here.send(effect.shard, messages.Copy(effect.fragment, effect.attempt, announced))
        try:
            async with self._gates[effect.shard]:
                await self._put(effect.shard, effect.path, as_bytes(values))
        except (TransportError, ProtocolError) as error:
            self._here.deliver(Failed(effect, str(error)))

    async def _put(self, shard: int, url: str, body: Tensor) -> None:
        await self._here.client.put(url, body.numpy().data, base=self._here.address_of(shard))

    @executes(messages.Fetch)
    async def fetch(self, effect: messages.Fetch) -> None:
        """Fetch a published copy, verify its digest and stage it."""
        tensors, fragment = self._here.tensors, effect.fragment
        plan = tensors.plan
        numel = plan.fragments[fragment].numel

        def decoded(body: Tensor) -> Tensor:
            if effect.whole:
                # break: whole-copy-unverified
                values = verified(values_of(body, numel), fragment, effect.digest)
                return tensors.store.prepare(values)
            return tensors.next_values(fragment, body, effect.digest)

        try:
            if not self._here.reaches(effect.shard):
                # Do not use the address: another run may use it by now.
                raise TransportError("its shard is unreachable")
            nbytes = fetched_nbytes(effect, plan)
            async with self._gates[effect.shard]:
                body = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                base = self._here.address_of(effect.shard)
                await self._here.client.get(effect.path, body.numpy().data, base=base)
                values = await self._computed(fragment, lambda: decoded(body))
        except (TransportError, ProtocolError, MergeError) as error:
            # break: failed-fetch-unreported
            self._here.deliver(Failed(effect, str(error)))
            return
        # One lock for both: the machine's version must match the staged values.
        with self._here.changed:
            tensors.stage(fragment, values)
            self._here.deliver(Done(effect))

    async def averages(self) -> list[Tensor]:
        """Fetch the newest average of each fragment's parameters, fp32.

        Raises:
            TransportError, ProtocolError: One of them cannot be fetched.
        """
        fragments = range(len(self._here.tensors.plan.fragments))
        return list(await asyncio.gather(*map(self._average, fragments)))

    async def _average(self, fragment: int) -> Tensor:
        plan, machine = self._here.tensors.plan, self._here.machine
        numel = parameters_numel(plan.fragments[fragment], plan.layout)
        held, shard = machine.state.fragments[fragment].held, machine.options.owner(fragment)
        # A shard offers an average before the version with it, and limits repeated downloads.
        if (known := self._averages.get(fragment)) is not None and known[0] == held:
            return known[1]
        values = torch.empty(numel, dtype=torch.float32, device="cpu")
        if numel:
            async with self._gates[shard]:
                if not self._here.reaches(shard):
                    raise TransportError(f"shard {shard} is unreachable")
                url, base = body_url(average_path(fragment)), self._here.address_of(shard)
                await self._here.client.get(url, as_bytes(values).numpy().data, base=base)
        self._averages[fragment] = held, values
        return values
