"""The ranks that move a learner's fragments to the syncer and back: its *sync ranks*.

The leader, rank 0, sends requests (`SyncRankExchange`, on its background's event loop). Each sync
rank executes them for its own range of a fragment (`SyncRank`: encode, send, fetch, decode, keep).
It answers with the digests of its blocks. No rank ever has more of a fragment. A fragment's values
(a copy of the parameters, or a published copy) have a number that is the same on all ranks. The
syncer cannot see how many sync ranks a learner has, because all use the learner's name.

The leader reaches the other sync ranks over links (`LeaderLink`, `SyncRankLink`), which use the
same transport as connections to the syncer. A broken link is opened again. Requests that were
pending have failed then, as if the syncer had been unreachable.

Host memory of one of W sync ranks: 4·N/W bytes per fragment for its range of the published copy,
and the data in flight.

Source: rule 18 of the method's description (`docs/how-to/many-gpus.md`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from decoupled_diloco.errors import (
    ConfigError,
    DilocoError,
    MergeError,
    ProtocolError,
    StorageError,
    TransportError,
)
from decoupled_diloco.learner.connections import TRAINING_GOES_ON, TroubleLog
from decoupled_diloco.learner.exchange import Capture
from decoupled_diloco.learner.parameter_store import Copied, HostCopy
from decoupled_diloco.learner.payloads import BodyExchange, fetched_nbytes
from decoupled_diloco.learner.shared import Context
from decoupled_diloco.merge import (
    Body,
    Fragment,
    as_bytes,
    block_digests,
    clipped,
    codec,
    contribution,
    is_cuttable,
    joined_digest,
    receive,
)
from decoupled_diloco.merge.blocks import squares_of
from decoupled_diloco.merge.packing import packed, unpacked
from decoupled_diloco.merge.plan import MergePlan, values_of
from decoupled_diloco.privacy.dp import Mechanism
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Done, Failed
from decoupled_diloco.ranks.rank_context import RankSurroundings
from decoupled_diloco.ranks.rank_store import Handle, RankedStore, SyncRankValues
from decoupled_diloco.ranks.redistribute import Sharding
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.storage.vector_ranges import RESIDUAL, Ranges, keep_ranges, kept_range, summed
from decoupled_diloco.transport.backoff import Backoff
from decoupled_diloco.transport.interface import Channel, Client, Server

Document = dict[str, Any]

_ERRORS: dict[str, type[DilocoError]] = {
    kind.__name__: kind for kind in (ConfigError, ProtocolError, StorageError, TransportError)
}


class SyncRank:
    """Executes the leader's requests for its ranges; used by one event loop.

    Args:
        plan: The run's merge plan.
        ranges: Its range of each fragment.
        number: Its index among the sync ranks; names its files.
        values: The values of its ranges.
        client: Returns the client of the syncer's data plane.
        in_worker: Runs a function that takes long in a worker thread.
    """

    def __init__(
        self,
        plan: MergePlan,
        ranges: Sequence[tuple[int, int]],
        number: int,
        values: SyncRankValues,
        client: Callable[[], Client],
        in_worker: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._plan = plan
        self._ranges = ranges
        self._number = number
        self._values = values
        self._client = client
        self._in_worker = in_worker
        self._payloads: dict[int, tuple[Tensor, int, int]] = {}

    async def answer(self, request: Document) -> Document:
        """Execute a request and return the answer, which may be a `DilocoError`; see `raised`."""
        try:
            match request["do"]:
                case "measure":
                    return await self._measure(request)
                case "encode":
                    return await self._encode(request)
                case "copy":
                    return await self._copy(request)
                case "put":
                    return await self._put(request)
                case "drop":
                    self._payloads.pop(request["job"], None)
                    return {}
                case "fetch":
                    return await self._fetch(request)
                case "keep":
                    return await self._keep(request)
                case "adopt":
                    return await self._adopt(request)
                case _:
                    raise AssertionError(f"unknown request: {request}")
        except DilocoError as error:
            return {"error": str(error), "kind": type(error).__name__}

    def drop_all(self) -> None:
        """Delete all encoded payloads: the leader will not request them any more."""
        self._payloads.clear()

    async def _value(self, number: int) -> Tensor:
        return await asyncio.wrap_future(self._values.future(number))

    async def _change(self, request: Document) -> tuple[Callable[[], Tensor], Tensor]:
        """Return what computes a contribution, and the published copy it was trained from.

        The contribution is the copy minus the published copy (rule 6).
        """
        theta = await self._value(request["copy"])
        published = await self._value(request["published"])
        plan, fragment = self._plan, request["fragment"]
        part = clipped(plan.fragments[fragment], *self._ranges[fragment])
        return lambda: contribution(part, plan.layout, theta, published), published

    async def _measure(self, request: Document) -> Document:
        """Return the squared norm of a contribution's range, as text: it may not be finite."""
        change, _ = await self._change(request)
        return {"squares": (await self._in_worker(lambda: squares_of(change()))).hex()}

    async def _encode(self, request: Document) -> Document:
        """Encode a contribution, scaled."""
        plan, fragment = self._plan, request["fragment"]
        start, stop = self._ranges[fragment]
        change, published = await self._change(request)
        residuals = [await self._value(number) for number in request["residuals"]]
        whole = plan.fragments[fragment]
        uplink = plan.uplink_of(fragment, request["codec"])
        if stop - start < whole.numel and not is_cuttable(uplink):
            raise ConfigError(
                f"codec {uplink.name!r} cannot be split among sync ranks: set sync_ranks=1"
            )

        def encode() -> tuple[Tensor, bytes, Tensor | None]:
            d = change()
            if request["scale"] != 1.0:  # break: ranks-do-not-clip
                d.mul_(request["scale"])
            body, residual = plan.encode(d, residuals, uplink)
            digests = block_digests(body, uplink)
            # A fragment with buffers is not split, so this sync rank has all of them.
            return packed(body, plan.buffers_of(fragment, published), uplink), digests, residual

        body, digests, residual = await self._in_worker(encode)
        if residual is not None:
            self._values.put(request["leaves"], residual)
        first = uplink.nbytes(start) if start else 0
        is_split = stop - start < whole.numel
        total = uplink.nbytes(whole.numel) if is_split else body.numel()
        self._payloads[request["job"]] = body, first, total
        return {"digests": digests.hex()}

    async def _copy(self, request: Document) -> Document:
        """Prepare the values themselves as a payload, for a shard that requests a whole copy."""
        start, _ = self._ranges[request["fragment"]]
        values = await self._value(request["values"])
        digests = await self._in_worker(lambda: block_digests(values, codec("fp32")))
        total = self._plan.whole_nbytes(request["fragment"])
        self._payloads[request["job"]] = as_bytes(values), 4 * start, total
        return {"digests": digests.hex()}

    async def _put(self, request: Document) -> Document:
        body, first, total = self._payloads.pop(request["job"])
        url, base = request["url"], request["base"]
        await self._client().put(url, _view(body), base=base, first=first, total=total)
        return {"sent": body.numel()}

    async def _fetch(self, request: Document) -> Document:
        """Fetch a published copy, or its difference to a copy that this sync rank has."""
        plan, fragment = self._plan, request["fragment"]
        start, stop = self._ranges[fragment]
        whole, numel = request["on"] is None, plan.fragments[fragment].numel
        downlink = codec("fp32") if whole else plan.downlink_of(fragment)
        first, total = downlink.nbytes(start) if start else 0, request["nbytes"]
        last = downlink.nbytes(stop) if stop < numel else total
        body = torch.empty(last - first, dtype=torch.uint8, device="cpu")
        url, base = request["url"], request["base"]
        await self._client().get(url, _view(body), base=base, first=first, total=total)
        before = None if whole else await self._value(request["on"])

        def decode() -> tuple[Tensor, bytes]:
            if before is None:
                values = values_of(body, stop - start)
            else:
                values = before.clone()  # the earlier copy is still in use under its own number
                buffers = plan.buffers_of(fragment, values)
                receive(values, unpacked(body, buffers, downlink), downlink)
            return values, block_digests(values, codec("fp32"))

        values, digests = await self._in_worker(decode)
        self._values.put(request["number"], values)
        return {"digests": digests.hex(), "received": body.numel()}

    async def _keep(self, request: Document) -> Document:
        """Write published copies and residuals to the disk, into a separate file per sync rank."""
        published: Ranges = {}
        residuals: Ranges = {}
        for p, (start, stop) in enumerate(self._ranges):
            if start == stop:  # break: empty-range-awaited
                continue  # no values for an empty range ever arrive
            published[p, start] = await self._value(request["numbers"][p])
            left = [await self._value(number) for number in request["residuals"][p]]
            if left:
                residuals[p, start] = await self._in_worker(partial(summed, left))
        folder = Path(request["folder"])
        # break: ranks-keep-no-copies
        await self._in_worker(lambda: keep_ranges(folder, self._number, published))
        await self._in_worker(lambda: keep_ranges(folder, self._number, residuals, RESIDUAL))
        return {}

    async def _adopt(self, request: Document) -> Document:
        """Read published copies and residuals; other sync ranks may have written the ranges."""
        folder, digests = Path(request["folder"]), []
        for fragment, number in enumerate(request["numbers"]):
            values = await self._in_worker(
                partial(kept_range, folder, fragment, *self._ranges[fragment])
            )
            digests.append(block_digests(values, codec("fp32")).hex())
            self._values.put(number, values)
        for fragment, number in request["residuals"]:
            start, stop = self._ranges[fragment]
            read = partial(kept_range, folder, fragment, start, stop, RESIDUAL)
            self._values.put(number, await self._in_worker(read))
        return {"digests": digests}


def _view(body: Body) -> memoryview:
    return as_bytes(body).numpy().data


def raised(answer: Document) -> Document:
    """Return the same answer.

    Raises:
        DilocoError: The answer contains an error.
    """
    if "error" in answer:
        raise _ERRORS.get(answer["kind"], TransportError)(answer["error"])
    return answer


T = TypeVar("T")

REACH_SECONDS = 60.0
"""A sync rank that cannot reach rank 0 within this time after its start fails."""


class LeaderLink:
    """The leader's end of the link to one sync rank."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Document]] = {}
        self._channel: Channel | None = None
        self._came = asyncio.Event()

    async def stay(self, channel: Channel) -> None:
        """Receive answers on a channel of the sync rank until the channel breaks."""
        # A sync rank that connects again has dropped the requests of its earlier channel.
        self.lost("the sync rank has connected again")
        self._channel = channel
        self._came.set()
        try:
            while True:
                answer = await channel.receive()
                waiting = self._waiting.pop(int(str(answer["answers"])), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except TransportError as error:
            if self._channel is channel:  # otherwise a newer channel has replaced it
                self._channel = None
                self._came.clear()
                self.lost(str(error))

    async def request(self, request: Document) -> Document:
        """Send a request and return the sync rank's answer; waits for the link if it is down.

        Raises:
            TransportError: The link broke before the answer.
        """
        await self._came.wait()
        assert self._channel is not None
        number = next(self._numbers)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._channel.send(request | {"request": number})
        answer: Document = await answered
        return answer

    def lost(self, reason: str) -> None:
        """Fail all pending requests: they will not be answered."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.done():
                each.set_exception(TransportError(f"the link to a sync rank broke: {reason}"))


class SyncRankLink:
    """A sync rank's end of the link to the leader, with an event loop in a separate thread.

    Args:
        rank: This rank.
        addresses: Possible addresses of the leader; the first that answers is used.
        leader: Creates the client that connects to the leader.
        data: Creates the client of the syncer's data plane, which has the learner's name.
        plan: The run's merge plan.
        sharding: Which ranks are sync ranks, and their ranges.
        values: The values of this sync rank's ranges.
        failed: Receives an error that ends the link, such as an unreachable leader.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        leader: Callable[[], Client],
        data: Callable[[], Client],
        plan: MergePlan,
        sharding: Sharding,
        values: SyncRankValues,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._rank, self._addresses = rank, tuple(addresses)
        self._leader, self._data = leader, data
        self._number = sharding.sync_ranks.index(rank)
        self._plan, self._values, self._failed = plan, values, failed
        self._ranges = [sharding.ranges(fragment)[self._number] for fragment in plan.fragments]
        self._worker = runtime().worker("ddiloco-codec")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stopped = False
        self._thread = runtime().beside(self._main, "ddiloco-sync-rank")

    def close(self, wait_seconds: float = 5.0) -> None:
        """Stop the thread and wait for it, for at most ``wait_seconds``."""
        self._stopped = True
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(wait_seconds)
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._stopped:
            return
        work = [self._stop.wait(), runtime().program_ended(), self._stay()]
        tasks = [self._loop.create_task(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for error in (task.exception() for task in done):
                if error is not None:
                    self._failed(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stay(self) -> None:
        """Keep a link to the leader: connect, answer, and connect again.

        Raises:
            ConfigError: The first connection did not succeed within `REACH_SECONDS`.
        """
        leader, data = self._leader(), self._data()
        sync_rank = SyncRank(
            self._plan, self._ranges, self._number, self._values, lambda: data, self._in_worker
        )
        backoff, began, reached = Backoff(), now(), False
        try:
            while True:
                try:
                    channel = await self._dialed(leader)
                    reached = True
                    backoff.reset()
                    await self._serve(channel, sync_rank, data)
                except TransportError as error:
                    if not reached and now() - began > REACH_SECONDS:
                        raise ConfigError(
                            f"rank {self._rank} cannot reach rank 0 at "
                            f"{' or '.join(self._addresses)} ({error}): allow connections between "
                            "these machines, or leave out sync_ranks="
                        ) from error
                await asyncio.sleep(backoff.next())
        finally:
            await leader.close()
            await data.close()

    async def _dialed(self, client: Client) -> Channel:
        failure = TransportError("rank 0 sent no address")
        for address in self._addresses:
            try:
                return await client.connect(address, "learner", f"rank-{self._rank}")
            except TransportError as error:
                failure = error
        raise failure

    async def _serve(self, channel: Channel, sync_rank: SyncRank, data: Client) -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def answer(request: Document) -> None:
            if "base" in request:
                data.trust(request["base"])
            channel.send(await sync_rank.answer(request) | {"answers": request["request"]})

        try:
            while True:
                task = asyncio.create_task(answer(await channel.receive()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            sync_rank.drop_all()

    async def _in_worker(self, task: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, task)


logger = logging.getLogger(__name__)


def sharding_for(plan: MergePlan, sharding: Sharding) -> Sharding:
    """Return a sharding that has one sync rank for fragments that a codec cannot split."""
    wires = (plan.uplink, *plan.coarser, plan.downlink)
    unsplit = tuple(
        part.index
        for part in plan.fragments
        if not all(is_cuttable(plan.codec_of(part.index, wire)) for wire in wires)
    )
    return replace(sharding, unsplit=unsplit)


class SyncRankExchange(BodyExchange):
    """A `BodyExchange` whose payloads are on the sync ranks, which include the leader.

    Args:
        context: The background's context.
        sharding: Which ranks are sync ranks, and their ranges.
        values: The values of the leader's ranges.
        store: Orders all ranks to fetch new values.
        key: The key of the leader's server, for the other sync ranks.
        hosts: The host of each rank.
        around: Provides the server.

    Attributes:
        addresses: Possible addresses of the leader, for the other sync ranks.
    """

    def __init__(
        self,
        context: Context,
        *,
        sharding: Sharding,
        values: SyncRankValues,
        store: RankedStore,
        key: str,
        hosts: Sequence[str],
        around: RankSurroundings,
    ) -> None:
        super().__init__(context)
        self.addresses: list[str] = []
        self._given_sharding = sharding
        self._values = values
        self._store = store
        self._key = key
        self._hosts = hosts
        self._around = around
        self._jobs = itertools.count(1)
        self._local: SyncRank | None = None
        self._links = {rank: LeaderLink() for rank in sharding.sync_ranks if rank != 0}
        self._troubles = {rank: TroubleLog() for rank in self._links}
        self._server: Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """See `BodyExchange.start`; also starts the server for the other sync ranks."""
        self._loop = asyncio.get_running_loop()
        if self._links:
            self._server = self._around.server(self._hosts, self._key, self._linked)
            await self._server.start()
            self.addresses = self._around.addresses(self._server)

    async def close(self) -> None:
        """See `BodyExchange.close`."""
        for link in self._links.values():
            link.lost("this learner is closing")
        if self._server is not None:
            await self._server.stop()

    @cached_property
    def _sharding(self) -> Sharding:
        return sharding_for(self._here.tensors.plan, self._given_sharding)

    async def _linked(self, channel: Channel) -> None:
        link = self._links.get(int(channel.peer.principal.removeprefix("rank-")))
        if link is not None:
            await link.stay(channel)

    async def _request(self, fragment: Fragment | None, /, **request: Any) -> list[Document]:
        """Send a request to all sync ranks with a range of the fragment; return the answers.

        Answers are in the order of the sync ranks. Without a fragment, all sync ranks receive it.

        Raises:
            DilocoError: The first error, after all sync ranks have answered or failed.
        """
        sync_ranks: Sequence[int] = self._sharding.sync_ranks
        if fragment is not None:
            ranges = self._sharding.ranges(fragment)
            pairs = zip(sync_ranks, ranges, strict=True)
            sync_ranks = [rank for rank, (start, stop) in pairs if start < stop]
        answers = await asyncio.gather(
            *(self._answer(rank, request) for rank in sync_ranks), return_exceptions=True
        )
        found: list[Document] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            found.append(raised(answer))
        return found

    async def _answer(self, rank: int, request: Document) -> Document:
        if rank != 0:
            return await self._answer_of(rank, request)
        if self._local is None:
            plan = self._here.tensors.plan
            own = [self._sharding.ranges(fragment)[0] for fragment in plan.fragments]
            self._local = SyncRank(
                plan,
                own,
                0,
                self._values,
                lambda: self._here.client,
                self._here.in_worker,
            )
        return await self._local.answer(request)

    async def _answer_of(self, rank: int, request: Document) -> Document:
        """Return another sync rank's answer; log a broken connection to the leader or the syncer.

        The leader itself may still reach the syncer. Without this log line, a user would not see
        why no fragment is synced.
        """
        trouble = self._troubles[rank]
        try:
            answer = raised(await self._links[rank].request(request))
        except TransportError as error:
            subject = f"rank {rank} of this learner syncs no fragments"
            trouble.warn("out of reach", f"{subject} ({error}): {TRAINING_GOES_ON}")
            raise
        if "url" in request:
            trouble.over(f"rank {rank} of this learner syncs fragments again")
        return answer

    def request_all(self, **request: Any) -> Future[list[Document]]:
        """Send a request to every sync rank; may be called from any other thread."""
        assert self._loop is not None, "call start() first"
        return asyncio.run_coroutine_threadsafe(self._request(None, **request), self._loop)

    async def change_of(self, capture: Capture) -> tuple[Tensor, Tensor]:
        """See `BodyExchange.change_of`; the leader is the only sync rank."""
        copy, published = capture.copy, capture.published
        assert isinstance(copy, Handle), "the copy is not of a RankedStore"
        assert len(self._given_sharding.sync_ranks) == 1, "other ranks have a part of the values"
        theta = await asyncio.wrap_future(self._values.future(copy.number))
        base = await asyncio.wrap_future(self._values.future(published.number))
        part, layout = capture.plan.fragments[capture.fragment], capture.plan.layout
        d = await self._here.in_worker(lambda: contribution(part, layout, theta, base))
        return d, base

    async def _send_encoded(self, effect: messages.SendBody, capture: Capture) -> None:
        """See `BodyExchange.send_body`."""
        fragment, job = capture.plan.fragments[effect.fragment], next(self._jobs)
        copy, published = capture.copy, capture.published
        assert isinstance(copy, Handle), "the copy is not of a RankedStore"
        names = {
            "fragment": fragment.index,
            "copy": copy.number,
            "published": published.number,
        }
        try:
            uplink = capture.plan.uplink_of(effect.fragment, effect.codec)
            has_residual = capture.plan.feedback_of(uplink) is not None
            leaves = self._store.handle(fragment.numel, "") if has_residual else None
            answers = await self._request(
                fragment,
                do="encode",
                job=job,
                **names,
                scale=await self._scale(fragment, capture.mechanism, names),
                codec=effect.codec,
                residuals=[each.number for each in capture.residuals],
                leaves=None if leaves is None else leaves.number,
            )
            self._encoded(effect, _digest(answers), leaves)
            await self._deliver(fragment, job, effect.shard, effect.path)
        except (ConfigError, TransportError, ProtocolError) as error:
            self._here.deliver(Failed(effect, str(error)))
            await self._drop(fragment, job)

    async def _scale(
        self, fragment: Fragment, mechanism: Mechanism | None, names: Document
    ) -> float:
        """Return the factor that clips a contribution, from the norms of the sync ranks' ranges."""
        if mechanism is None:
            return 1.0
        answers = await self._request(fragment, do="measure", **names)
        norm = math.sqrt(math.fsum(float.fromhex(each["squares"]) for each in answers))
        # A shard refuses a contribution that is not finite.
        return mechanism.scale_of(norm, fragment.numel) if math.isfinite(norm) else 1.0

    async def send_copy(self, effect: messages.SendCopy, copy: HostCopy) -> None:
        """See `BodyExchange.send_copy`."""
        fragment, job = self._here.tensors.plan.fragments[effect.fragment], next(self._jobs)
        handle = copy.tensor if isinstance(copy, Copied) else copy
        assert isinstance(handle, Handle), "the copy is not of a RankedStore"
        request = {"fragment": fragment.index, "values": handle.number}
        try:
            digest = _digest(await self._request(fragment, do="copy", job=job, **request))
            self._here.send(effect.shard, messages.Copy(effect.fragment, effect.attempt, digest))
            async with self._gates[effect.shard]:
                await self._deliver(fragment, job, effect.shard, effect.path)
        except (TransportError, ProtocolError) as error:
            self._here.deliver(Failed(effect, str(error)))
            await self._drop(fragment, job)

    async def _drop(self, fragment: Fragment, job: int) -> None:
        """Have the sync ranks delete a payload; one with a broken link has already deleted it."""
        with contextlib.suppress(TransportError):
            await self._request(fragment, do="drop", job=job)

    async def _deliver(self, fragment: Fragment, job: int, shard: int, url: str) -> None:
        where = {"url": url, "base": self._here.address_of(shard)}
        answers = await self._request(fragment, do="put", job=job, **where)
        self._here.client.stats.data_bytes_sent += sum(each["sent"] for each in answers[1:])

    async def fetch(self, effect: messages.Fetch) -> None:
        """See `BodyExchange.fetch`; afterwards every rank fetches its part of the values."""
        tensors = self._here.tensors
        fragment = tensors.plan.fragments[effect.fragment]
        try:
            if not self._here.reaches(effect.shard):
                raise TransportError("its shard is unreachable")  # or it serves another run
            async with self._gates[effect.shard]:
                handle = await self._fetched(effect, fragment)
            await self._store.spread(fragment, handle)
        except (TransportError, ProtocolError, MergeError) as error:
            self._here.deliver(Failed(effect, str(error)))
            return
        with self._here.changed:
            tensors.stage(fragment.index, handle)
            self._here.deliver(Done(effect))

    async def _fetched(self, effect: messages.Fetch, fragment: Fragment) -> Handle:
        nbytes = fetched_nbytes(effect, self._here.tensors.plan)
        handle, before = self._store.handle(fragment.numel, effect.digest), None
        if not effect.whole:
            before = self._here.tensors.newest(fragment.index)
        answers = await self._request(
            fragment,
            do="fetch",
            number=handle.number,
            fragment=fragment.index,
            on=None if before is None else before.number,
            nbytes=nbytes,
            url=effect.path,
            base=self._here.address_of(effect.shard),
        )
        self._here.client.stats.data_bytes_received += sum(each["received"] for each in answers[1:])
        actual = _digest(answers)
        if actual != effect.digest:  # break: wrong-part-accepted
            raise MergeError(
                f"fragment {fragment.index} has digest {actual}, but the shard announced "
                f"{effect.digest}: the whole copy is fetched instead"
            )
        return handle


def _digest(answers: Sequence[Document]) -> str:
    return joined_digest(bytes.fromhex("".join(each["digests"] for each in answers)))
