"""A shard's tensor work: one worker thread, in the order of the orders."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from decoupled_diloco.errors import MergeError, ProtocolError, StorageError
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Done, Failed, ForgetCheckpoints, Made, TakeCheckpoint
from decoupled_diloco.protocol.syncer_machine import SyncerMachine
from decoupled_diloco.protocol.syncer_state import Ask, merges_remembered, remembered
from decoupled_diloco.protocol.wire import decode, encode
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.shell.driver import Driver, at_decision, executes
from decoupled_diloco.storage.files import size_of
from decoupled_diloco.syncer.audit_trail import AuditTrail, SignedRecord
from decoupled_diloco.syncer.coordinator import RETRY_SECONDS
from decoupled_diloco.syncer.data_plane import Downloads
from decoupled_diloco.syncer.durable import ShardDisk
from decoupled_diloco.syncer.payload_archive import Payloads
from decoupled_diloco.syncer.result import initial_values, save_share
from decoupled_diloco.syncer.run_checkpoints import forget_checkpoints, part_file
from decoupled_diloco.syncer.secure_sums import SecureSums
from decoupled_diloco.syncer.shard_lease import NoStandby, ShardLease
from decoupled_diloco.syncer.shard_tensors import PublishedCopy, ShardTensors

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

MEMORY_SECONDS = 1.0
"""Greatest age of the learners' data in a merge's record; learners send them again after a restart.
"""


class Worker:
    """Folds, merges and installs, and writes what must be on disk before it is announced.

    Args:
        driver: The driver of the shard's machine.
        tensors: The shard's fragments.
        disk: The durable state, if the shard has one.
        payloads: The recorder of payloads, if they are recorded.
        folder: The run folder.
        initial_weights: The run's file of initial weights, if it has one.
        downloads: Offers the published copies.
        relays: Sends a message to a relay.
        shard_lease: The leadership lease of this process.
        secure: What was received for secure sums, in a run with these.
        trail: The shard's audit trail, if it writes one.
    """

    def __init__(
        self,
        driver: Driver[messages.SyncerEvent, messages.SyncerEffect],
        tensors: ShardTensors,
        *,
        disk: ShardDisk | None,
        payloads: Payloads | None,
        folder: Path,
        initial_weights: Path | None,
        downloads: Downloads,
        relays: Callable[[str, messages.Message], None],
        shard_lease: ShardLease | NoStandby,
        secure: SecureSums | None = None,
        trail: AuditTrail | None = None,
    ) -> None:
        self.tensors = tensors
        self.disk = disk
        self._machine: SyncerMachine = driver.machine
        self._executor = runtime().worker("merge")
        self._payloads = payloads
        self._folder = folder
        self._initial_weights = initial_weights
        self._downloads = downloads
        self._relays = relays
        self._shard_lease = shard_lease
        self._secure = secure
        self.trail = trail
        if disk is not None and trail is not None:
            disk.before_checkpoint = trail.settle
        self._remembered_at, self._remembered = -math.inf, dict[str, Any]()

    async def run(self, task: Callable[[], _T]) -> _T:
        """Run a function in the worker's thread, after all earlier ones."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, task)

    def close(self) -> None:
        """End the thread, and close the disk."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        if self.disk is not None:
            self.disk.close()
        if self.trail is not None:
            self.trail.close()

    @executes(messages.Fold)
    def _fold(self, order: messages.Fold) -> Coroutine[Any, Any, None]:
        counts = (order.steps, order.tokens, order.scale, order.discount)
        if not order.relay:
            fold = partial(self.tensors.fold, order.fragment, order.ask, *counts)
            return self.run(partial(fold, party=order.party))
        # Now, so that no later message overtakes it.
        self._relays(order.relay, replace(order, relay="", party=""))
        note = self.tensors.folded_at_relay
        return self.run(partial(note, order.fragment, order.ask, *counts))

    @executes(messages.Drop)
    def _drop(self, order: messages.Drop) -> Coroutine[Any, Any, None] | None:
        if order.relay:
            self._relays(order.relay, replace(order, relay=""))
            return None
        return self.run(partial(self.tensors.drop, order.fragment, order.ask))

    @executes(messages.ForgetSum)
    def _forget(self, order: messages.ForgetSum) -> Coroutine[Any, Any, None]:
        assert self._secure is not None, "only a secure sum is forgotten"
        self._secure.forget(order.fragment)
        return self.run(partial(self.tensors.forget_folded, order.fragment))

    @executes(messages.Merge)
    async def _merge(self, order: messages.Merge) -> Done | Failed | None:
        number, fragment = order.round, order.fragment
        tensors, disk = self.tensors, self.disk
        memory, trail = self._memory(), self.trail
        asks = tuple(self._machine.state.rounds[fragment].folded)
        # Before anything is awaited: the next round's claims may follow.
        opening = None if self._secure is None else self._secure.opening(fragment)

        def merge() -> PublishedCopy:
            if opening is not None:
                tensors.open_sum(fragment, opening)
            if trail is not None:
                copy = _merge_audited(tensors, disk, trail, order, asks, memory)
            elif disk is None:
                copy = tensors.merge(fragment, order.factors)
            else:
                # break: published-before-disk
                copy = disk.merge(fragment, order.version, memory, order.factors)
            return tensors.published(fragment, order.version, copy)

        fenced = self._shard_lease.fenced(merge)

        def merge_or_forget() -> PublishedCopy:
            try:
                return fenced()
            finally:
                tensors.forget_folded(fragment)

        try:
            published = await self.run(merge_or_forget)
        except (MergeError, ProtocolError, StorageError) as error:
            logger.warning("round %d of fragment %d: %s", number, fragment, error)
            # break: failed-merge-unreported
            return Failed(order, str(error))
        self._downloads.offer(fragment, order.version, published)
        return Done(order, Made(published.digest, clip=tensors.adapted_clip(fragment)))

    def _memory(self) -> dict[str, Any]:
        """Return the memory for a merge's record; with many learners it is refreshed rarely."""
        at = now()
        if at >= self._remembered_at + MEMORY_SECONDS:
            self._remembered_at, self._remembered = at, encode(remembered(self._machine.state))
        state = self._machine.state
        # The account of merges is never cached: it must contain the merge that is recorded.
        fresh = encode(messages.ShardMemory(state.clock, 0, merges=merges_remembered(state)))
        return self._remembered | {name: fresh[name] for name in {"clock", "merges"} & fresh.keys()}

    @at_decision(messages.Install)
    def _install(self, order: messages.Install) -> None:
        """Install at the instant of the decision: its other orders contain the copy's URL."""
        tensors, fragment = self.tensors, order.fragment
        tensors.install_received(fragment, order.digest)
        tensors.installed(fragment, order.version)
        copy = PublishedCopy(
            torch.empty(0, dtype=torch.float32, device="cpu"),
            tensors.whole(fragment),
            order.digest,
            average=tensors.average(fragment),
        )
        self._downloads.offer(fragment, order.version, copy)

    @executes(messages.Install)
    def _keep(self, order: messages.Install, _: None) -> Coroutine[Any, Any, None] | None:
        begins = self._machine.state.phase == "ready"
        is_last = order.fragment == self._machine.owned[-1]
        return self.keep_installed() if is_last and self.disk is not None and not begins else None

    async def keep_installed(self, then: Callable[[], None] | None = None) -> None:
        """Write the current state of all fragments to disk.

        Args:
            then: Called after the write. With it, a failed write is tried again until it succeeds;
                without it, the next merge tries again.
        """
        disk = self.disk
        assert disk is not None
        while True:
            versions = {p: f.version for p, f in self._machine.state.fragments.items() if f.version}
            memory = encode(remembered(self._machine.state))
            try:
                await self.run(partial(disk.installed, versions, memory))
                break
            except StorageError as error:
                logger.error("%s: merges wait until it can be written", error)
            if then is None:
                return
            await asyncio.sleep(RETRY_SECONDS)
        if then is not None:
            then()

    @executes(TakeCheckpoint)
    def _checkpoint(self, order: TakeCheckpoint) -> Coroutine[Any, Any, Done | Failed]:
        return self._take_checkpoint(order, encode(remembered(self._machine.state)))

    async def _take_checkpoint(
        self, order: TakeCheckpoint, memory: dict[str, Any]
    ) -> Done | Failed:
        """Write this shard's part as of the end of the worker's queue; rounds continue."""
        disk = self.disk
        if disk is None:
            return Failed(order, "no checkpoint is written with syncer.persist=false")
        # Through the worker's queue, so that the part has every merge before the order and none
        # after it. The write needs no queue: the part's tensors never change.
        part = await self.run(lambda: disk.part(memory))
        path = part_file(self._folder, order.number, self._machine.shard)
        try:
            write = self._shard_lease.fenced(partial(part.write, path))
            digest = await asyncio.to_thread(write)
            return Done(order, Made(digest, size_of(path)))
        except OSError as error:
            return Failed(order, str(error))

    @executes(ForgetCheckpoints)
    async def _forget_checkpoints(self, order: ForgetCheckpoints) -> None:
        await asyncio.to_thread(forget_checkpoints, self._folder, order.keep, order.before)

    @executes(messages.LoadWeights)
    async def _load_weights(self, order: messages.LoadWeights) -> Done:
        path, payloads, tensors = self._initial_weights, self._payloads, self.tensors
        assert path is not None
        values_of = initial_values(path, tensors.plan, tensors.owned)
        kept = values_of if payloads is None else payloads.keep_file(values_of)
        digests = await self.run(lambda: tuple((p, tensors.install(p, v)) for p, v in kept))
        return Done(order, messages.WeightsLoaded(digests))

    async def save_share(self, then: Callable[[], None]) -> None:
        """Write this shard's share of the result, then call ``then``."""
        versions = {p: str(f.version) for p, f in self._machine.state.fragments.items()}
        save = partial(save_share, self._folder, self._machine.shard, self.tensors, versions)
        await self.run(self._shard_lease.fenced(save))
        if self.disk is not None:
            self.disk.memory = encode(remembered(self._machine.state))
            await self.run(self.disk.finish)
        then()

    async def recover(self, term: int) -> messages.DiskRead | None:
        """Restore the state of an earlier process from disk; ``None`` if none can be restored."""
        disk, payloads = self.disk, self._payloads
        assert disk is not None
        found = await self.run(disk.recover)
        if found and payloads is not None:
            await self.run(lambda: payloads.keep_recovered(term))
        for problem in disk.problems:
            logger.warning("%s", problem)
        copies = [messages.DurableCopy(p, d.version, d.digest) for p, d in sorted(found.items())]
        if not copies:
            return None
        memory = None if disk.memory is None else decode(disk.memory, [messages.ShardMemory])
        return messages.DiskRead(tuple(copies), memory, disk.is_exact)


def _merge_audited(
    tensors: ShardTensors,
    disk: ShardDisk | None,
    trail: AuditTrail,
    order: messages.Merge,
    asks: Sequence[Ask],
    memory: dict[str, Any],
) -> PublishedCopy:
    """Merge, and add the record to the trail as soon as the merge is durable."""
    lines: list[SignedRecord] = []

    def audit(digest: str) -> dict[str, Any]:
        lines.append(trail.merged(order, asks, digest))
        return lines[-1].json

    if disk is None:
        copy = tensors.merge(order.fragment, order.factors)
        audit(copy.digest)
    else:
        copy = disk.merge(order.fragment, order.version, memory, order.factors, audit)
    trail.keep(lines[-1])  # break: merge-not-in-trail
    return copy
