"""Bodies of a learner: contributions and copies to the shards, published copies from them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError, MergeError, ProtocolError, TransportError
from decoupled_diloco.learner.exchange import Capture, LearnerTensors, verified
from decoupled_diloco.learner.store import Copied, HostCopy, Values
from decoupled_diloco.merge import as_bytes, values_digest
from decoupled_diloco.merge.plan import MergePlan, values_of
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.runtime import Monitor, runtime
from decoupled_diloco.transport.base import Client

_T = TypeVar("_T")

FETCHES_PER_SHARD = 4
"""Copies on their way from or to one shard at once: a joiner with many fragments takes them in
turn, each over as many connections as the link rewards, in bounded memory."""


class _InWorker(Protocol):
    def __call__(self, task: Callable[[], _T], /) -> Awaitable[_T]: ...


def with_digest(values: Tensor) -> tuple[Tensor, str]:
    """The same values, and what a shard is told of them."""
    return values, values_digest(values)


def fetched_nbytes(effect: do.Fetch, plan: MergePlan) -> int:
    """The size of what is fetched.

    Raises:
        ProtocolError: the shard announced a size that no difference of this fragment has.
    """
    fragment = effect.fragment
    if effect.whole:
        return plan.whole_nbytes(fragment)
    sizes = plan.downlink_sizes(fragment)
    nbytes = effect.nbytes or sizes[-1]
    if nbytes not in sizes:
        raise ProtocolError(
            f"fragment {fragment}: difference_nbytes={nbytes} was announced, {sizes[0]} to "
            f"{sizes[-1]} are possible"
        )
    return nbytes


class BodyExchange:
    """Carries out what is ordered about bodies, and tells what has become of it.

    Args:
        client: The transport's client.
        address_of: Where a shard is.
        reaches: Whether a shard is connected.
        tensors: The learner's fragments.
        changed: The lock that the training thread shares.
        told: Tells the machine.
        say: Sends a message to a shard.
        in_worker: Runs a task in the worker.
    """

    def __init__(
        self,
        *,
        client: Callable[[], Client],
        address_of: Callable[[int], str],
        reaches: Callable[[int], bool],
        tensors: Callable[[], LearnerTensors],
        changed: Monitor,
        told: Callable[[fact.LearnerEvent], None],
        say: Callable[[int, say.Message], None],
        in_worker: _InWorker,
    ) -> None:
        self._client = client
        self._address_of = address_of
        self._reaches = reaches
        self._tensors = tensors
        self._changed = changed
        self._told = told
        self._say = say
        self._in_worker = in_worker
        self._gates: defaultdict[int, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(FETCHES_PER_SHARD)
        )

    async def start(self) -> None:
        """The client is there, and nothing is ordered yet."""

    async def close(self) -> None:
        """Nothing more is ordered; the client is still there."""

    async def send_body(self, effect: do.SendBody, capture: Capture) -> None:
        """Encodes a contribution, tells its digest, and delivers it."""

        def encoded() -> tuple[Tensor, str, Tensor | None]:
            body, digest, left = capture.encode(effect.codec)
            return capture.packed(body, effect.codec), digest, left

        try:
            ready = isinstance(capture.copy, Copied)  # otherwise `values` waits for the device
            body, digest, left = await self._computed(effect.fragment, encoded, in_place=ready)
            self._encoded(effect, digest, left)
            await self._put(effect.shard, effect.path, body)
        except (ConfigError, TransportError, ProtocolError) as error:
            self._told(fact.UploadFailed(effect.fragment, effect.ask, str(error)))

    async def _computed(
        self, fragment: int, task: Callable[[], _T], *, in_place: bool = True
    ) -> _T:
        numel = self._tensors().plan.fragments[fragment].numel
        if in_place and runtime().works_in_place(numel):
            return task()
        return await self._in_worker(task)

    def _encoded(self, effect: do.SendBody, digest: str, residual: Values | None) -> None:
        with self._changed:
            # break: encoding-loss-not-noted
            self._tensors().encoded(effect.fragment, effect.ask, residual)
            self._told(fact.BodyEncoded(effect.fragment, effect.ask, digest))

    async def send_copy(self, effect: do.SendCopy, copy: HostCopy) -> None:
        """Delivers a whole fragment that a shard has asked for."""
        values, announced = await self._in_worker(lambda: with_digest(copy.values()))
        self._say(effect.shard, say.Copy(effect.fragment, effect.attempt, announced))
        try:
            async with self._gates[effect.shard]:
                await self._put(effect.shard, effect.path, as_bytes(values))
        except (TransportError, ProtocolError) as error:
            self._told(fact.CopyFailed(effect.shard, effect.fragment, effect.attempt, str(error)))

    async def _put(self, shard: int, url: str, body: Tensor) -> None:
        await self._client().put(url, body.numpy().data, base=self._address_of(shard))

    async def fetch(self, effect: do.Fetch) -> None:
        """Gets a published copy, checks and stages it."""
        tensors, fragment = self._tensors(), effect.fragment
        plan = tensors.plan
        numel = plan.fragments[fragment].numel

        def decoded(body: Tensor) -> Tensor:
            if effect.whole:
                # break: whole-copy-unverified
                values = verified(values_of(body, numel), fragment, effect.digest)
                return tensors.store.prepare(values)
            return tensors.next_values(fragment, body, effect.digest)

        try:
            if not self._reaches(effect.shard):
                raise TransportError("its shard is out of reach")  # or another run is there
            nbytes = fetched_nbytes(effect, plan)
            async with self._gates[effect.shard]:
                body = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                base = self._address_of(effect.shard)
                await self._client().get(effect.path, body.numpy().data, base=base)
                values = await self._computed(fragment, lambda: decoded(body))
        except (TransportError, ProtocolError, MergeError) as error:
            # break: failed-fetch-unreported
            self._told(fact.FetchFailed(fragment, effect.version, str(error)))
            return
        with self._changed:
            tensors.stage(fragment, values)
            self._told(fact.Fetched(fragment, effect.version))
