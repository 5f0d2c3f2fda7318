"""What a shard does with tensors: one worker, in the order of the orders, and what follows."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import torch

from decoupled_diloco.errors import MergeError, StorageError
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol.checkpoints.events import PartWritten
from decoupled_diloco.protocol.syncer import SyncerMachine
from decoupled_diloco.protocol.syncer_memory import remembered
from decoupled_diloco.protocol.wire import decode, encode
from decoupled_diloco.runtime import now
from decoupled_diloco.storage.files import size_of
from decoupled_diloco.syncer.bodies import Downloads, InWorker
from decoupled_diloco.syncer.checkpoints import part_file
from decoupled_diloco.syncer.coordinator import RETRY_SECONDS
from decoupled_diloco.syncer.durable import ShardDisk
from decoupled_diloco.syncer.fragments import PublishedCopy, ShardTensors
from decoupled_diloco.syncer.payloads import Payloads
from decoupled_diloco.syncer.result import initial_values, save_share
from decoupled_diloco.syncer.shard_lease import NoStandby, ShardLease

logger = logging.getLogger(__name__)

MEMORY_SECONDS = 1.0
"""How old what a merge's record remembers of learners may be: they tell it again."""


class Merging:
    """Folds, merges, installs, and writes what must be on the disk before anybody hears of it.

    Args:
        machine: The shard's; it is only looked at.
        tensors: Its fragments.
        disk: Where they are durable, if they are.
        payloads: Where bodies are recorded, if they are.
        folder: The run's.
        initial_weights: The run's file of them, if it has one.
        downloads: Takes what is published.
        shard_lease: By which this process acts.
        spawn: Runs a coroutine in the process's loop.
        in_worker: Runs a task in the worker.
        handle: Tells the machine what has become of an order.
    """

    def __init__(
        self,
        machine: SyncerMachine,
        tensors: ShardTensors,
        *,
        disk: ShardDisk | None,
        payloads: Payloads | None,
        folder: Path,
        initial_weights: Path | None,
        downloads: Downloads,
        shard_lease: ShardLease | NoStandby,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        in_worker: InWorker,
        handle: Callable[[fact.SyncerEvent], None],
    ) -> None:
        self.tensors = tensors
        self.disk = disk
        self._machine = machine
        self._payloads = payloads
        self._folder = folder
        self._initial_weights = initial_weights
        self._downloads = downloads
        self._shard_lease = shard_lease
        self._spawn = spawn
        self._in_worker = in_worker
        self._handle = handle
        self._remembered_at, self._remembered = -math.inf, dict[str, Any]()

    def carry_out(self, effect: do.Fold | do.Drop | do.Merge | do.Install | do.LoadWeights) -> None:
        """Carries an order out."""
        tensors = self.tensors
        match effect:
            case do.Fold(fragment, _, ask, steps, tokens, _, scale, discount):
                fold = partial(tensors.fold, fragment, ask, steps, tokens, scale, discount)
                self._spawn(self._work(fold))
            case do.Drop(ask=ask):
                self._spawn(self._work(partial(tensors.drop, ask)))
            case do.Merge():
                self._spawn(self._merge(effect))
            case do.Install():
                self._install(effect)
            case do.LoadWeights():
                self._spawn(self._load_weights())
            case _:
                assert_never(effect)

    async def _work(self, task: Callable[[], None]) -> None:
        await self._in_worker(task)

    async def _merge(self, effect: do.Merge) -> None:
        number, fragment = effect.round, effect.fragment
        tensors, disk = self.tensors, self.disk
        memory = self._memory()

        def merge() -> PublishedCopy:
            if disk is None:
                copy = tensors.merge(fragment)
            else:
                copy = disk.merge(fragment, effect.version, memory)  # break: published-before-disk
            return tensors.published(fragment, effect.version, copy)

        fenced = self._shard_lease.fenced(merge)

        def merge_or_forget() -> PublishedCopy:
            try:
                return fenced()
            finally:
                tensors.forget_folded(fragment)

        try:
            published = await self._in_worker(merge_or_forget)
        except (MergeError, StorageError) as error:
            logger.warning("round %d of fragment %d: %s", number, fragment, error)
            # break: failed-merge-unreported
            self._handle(fact.MergeFailed(number, fragment, str(error)))
            return
        self._downloads.offer(fragment, effect.version, published)
        self._handle(fact.Merged(number, fragment, published.digest))

    def _memory(self) -> dict[str, Any]:
        """What a merge's record remembers; with thousands of learners it is made now and then."""
        at = now()
        if at >= self._remembered_at + MEMORY_SECONDS:
            self._remembered_at, self._remembered = at, encode(remembered(self._machine.state))
        return self._remembered | {"clock": self._machine.state.clock}

    def _install(self, effect: do.Install) -> None:
        tensors, fragment = self.tensors, effect.fragment
        tensors.install_received(fragment, effect.digest)
        tensors.installed(fragment, effect.version)
        copy = PublishedCopy(
            torch.empty(0, dtype=torch.float32, device="cpu"),
            tensors.whole(fragment),
            effect.digest,
        )
        self._downloads.offer(fragment, effect.version, copy)
        begins = self._machine.state.phase == "ready"
        if fragment == self._machine.owned[-1] and self.disk is not None and not begins:
            self._spawn(self.keep_installed())

    async def keep_installed(self, then: Callable[[], None] | None = None) -> None:
        """Writes what all fragments are now; with something to do ``then``, until it can."""
        disk = self.disk
        assert disk is not None
        while True:
            versions = {p: f.version for p, f in self._machine.state.fragments.items() if f.version}
            memory = encode(remembered(self._machine.state))
            try:
                await self._in_worker(partial(disk.installed, versions, memory))
                break
            except StorageError as error:
                logger.error("%s: nothing is merged until it can", error)
            if then is None:
                return
            await asyncio.sleep(RETRY_SECONDS)
        if then is not None:
            then()

    async def take_checkpoint(self, number: int, memory: dict[str, Any]) -> None:
        """The part is what the worker has when this has come through its queue; rounds go on."""
        disk = self.disk
        if disk is None:
            self._handle(PartWritten(number, "", 0, "syncer.durable=false keeps nothing"))
            return
        part = await self._in_worker(lambda: disk.part(memory))
        path = part_file(self._folder, number, self._machine.shard)
        try:
            write = self._shard_lease.fenced(partial(part.write, path))
            digest = await asyncio.to_thread(write)
            self._handle(PartWritten(number, digest, size_of(path)))
        except (StorageError, OSError) as error:
            self._handle(PartWritten(number, "", 0, str(error)))

    async def _load_weights(self) -> None:
        path, payloads, tensors = self._initial_weights, self._payloads, self.tensors
        assert path is not None
        values_of = initial_values(path, tensors.plan, tensors.owned)
        kept = values_of if payloads is None else payloads.keep_file(values_of)
        digests = await self._in_worker(lambda: tuple((p, tensors.install(p, v)) for p, v in kept))
        self._handle(fact.WeightsLoaded(digests))

    async def save_share(self) -> None:
        """Writes this shard's share of the result."""
        versions = {p: str(f.version) for p, f in self._machine.state.fragments.items()}
        save = partial(save_share, self._folder, self._machine.shard, self.tensors, versions)
        await self._in_worker(self._shard_lease.fenced(save))
        if self.disk is not None:
            self.disk.memory = encode(remembered(self._machine.state))
            await self._in_worker(self.disk.finish)

    async def recover(self, term: int) -> fact.DiskRead | None:
        """Reads what an earlier life has left on the disk; ``None``: nothing of use."""
        disk, payloads = self.disk, self._payloads
        assert disk is not None
        found = await self._in_worker(disk.recover)
        if found and payloads is not None:
            await self._in_worker(lambda: payloads.keep_recovered(term))
        for problem in disk.problems:
            logger.warning("%s", problem)
        copies = [fact.DurableCopy(p, d.version, d.digest) for p, d in sorted(found.items())]
        if not copies:
            return None
        memory = None if disk.memory is None else decode(disk.memory, [fact.ShardMemory])
        return fact.DiskRead(tuple(copies), memory, disk.is_exact)
