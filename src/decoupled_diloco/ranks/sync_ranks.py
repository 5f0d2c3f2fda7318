"""The ranks that carry a learner's fragments to the syncer and back: its *carriers*.

The leader, rank 0, asks (`CarriedExchange`, on its background's event loop). Each carrier does the
same to its own range of a fragment (`Carrier`: encode, send, fetch, decode, keep) and answers with
the digests of its blocks; no rank ever has more of a fragment. A fragment's values (a copy of the
parameters, a published copy) have a number by which all know them. The syncer never learns how many
carriers a learner has: all use the learner's name.

The leader asks the others over a link (`LeaderLink`, `CarrierLink`) by the same transport as to the
syncer. A link that breaks is made again, and what was asked meanwhile has failed, as if the syncer
had been out of reach.

Host memory of one of W carriers: 4·N/W bytes for what it holds of the published copies, and what is
in flight.

Source: rule 18 of the method's description (`docs/how-to/many-gpus.md`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
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
from decoupled_diloco.merge.packing import packed, unpacked
from decoupled_diloco.merge.plan import MergePlan, values_of
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Done, Failed
from decoupled_diloco.ranks.rank_context import RankSurroundings
from decoupled_diloco.ranks.rank_store import CarriedValues, Handle, RankedStore
from decoupled_diloco.ranks.redistribute import Sharding
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.storage.vector_ranges import RESIDUAL, Ranges, keep_ranges, kept_range, summed
from decoupled_diloco.transport.backoff import Backoff
from decoupled_diloco.transport.interface import Channel, Client, Server

Document = dict[str, Any]

_ERRORS: dict[str, type[DilocoError]] = {
    kind.__name__: kind for kind in (ConfigError, ProtocolError, StorageError, TransportError)
}


class Carrier:
    """See the module; used by one event loop.

    Args:
        plan: The run's.
        ranges: Of each fragment the range that this carrier has.
        number: Which of the carriers it is.
        values: What it holds.
        client: The transport's client.
        in_worker: Runs what takes long.
    """

    def __init__(
        self,
        plan: MergePlan,
        ranges: Sequence[tuple[int, int]],
        number: int,
        values: CarriedValues,
        client: Callable[[], Client],
        in_worker: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._plan = plan
        self._ranges = ranges
        self._number = number
        self._values = values
        self._client = client
        self._in_worker = in_worker
        self._bodies: dict[int, tuple[Tensor, int, int]] = {}

    async def answer(self, asked: Document) -> Document:
        """Does what the leader asks; says what went wrong, if it is an error of ours."""
        try:
            match asked["do"]:
                case "encode":
                    return await self._encode(asked)
                case "copy":
                    return await self._copy(asked)
                case "put":
                    return await self._put(asked)
                case "drop":
                    self._bodies.pop(asked["job"], None)
                    return {}
                case "fetch":
                    return await self._fetch(asked)
                case "keep":
                    return await self._keep(asked)
                case "adopt":
                    return await self._adopt(asked)
                case _:
                    raise AssertionError(f"no order of this version: {asked}")
        except DilocoError as error:
            return {"error": str(error), "kind": type(error).__name__}

    def drop_all(self) -> None:
        """Nobody will ask for what was made."""
        self._bodies.clear()

    async def _value(self, number: int) -> Tensor:
        return await asyncio.wrap_future(self._values.future(number))

    async def _encode(self, asked: Document) -> Document:
        """A contribution: the copy less the published one from which it was trained (rule 6)."""
        plan, fragment = self._plan, asked["fragment"]
        start, stop = self._ranges[fragment]
        theta, published = await self._value(asked["copy"]), await self._value(asked["published"])
        residuals = [await self._value(number) for number in asked["residuals"]]
        whole = plan.fragments[fragment]
        uplink = plan.uplink_of(fragment, asked["codec"])
        if stop - start < whole.numel and not is_cuttable(uplink):
            raise ConfigError(
                f"codec {uplink.name!r} cannot be split among sync ranks: set sync_ranks=1"
            )

        def encode() -> tuple[Tensor, bytes, Tensor | None]:
            part = clipped(whole, start, stop)
            d = contribution(part, plan.layout, theta, published)
            body, residual = plan.encode(d, residuals, uplink)
            digests = block_digests(body, uplink)
            # A fragment with buffers is not cut, so this carrier has all of them.
            return packed(body, plan.buffers_of(fragment, published), uplink), digests, residual

        body, digests, residual = await self._in_worker(encode)
        if residual is not None:
            self._values.put(asked["leaves"], residual)
        first = uplink.nbytes(start) if start else 0
        is_cut = stop - start < whole.numel
        total = uplink.nbytes(whole.numel) if is_cut else body.numel()
        self._bodies[asked["job"]] = body, first, total
        return {"digests": digests.hex()}

    async def _copy(self, asked: Document) -> Document:
        """The values themselves, as a shard wants them whole."""
        start, _ = self._ranges[asked["fragment"]]
        values = await self._value(asked["values"])
        digests = await self._in_worker(lambda: block_digests(values, codec("fp32")))
        total = self._plan.whole_nbytes(asked["fragment"])
        self._bodies[asked["job"]] = as_bytes(values), 4 * start, total
        return {"digests": digests.hex()}

    async def _put(self, asked: Document) -> Document:
        body, first, total = self._bodies.pop(asked["job"])
        url, base = asked["url"], asked["base"]
        await self._client().put(url, _view(body), base=base, first=first, total=total)
        return {"sent": body.numel()}

    async def _fetch(self, asked: Document) -> Document:
        """A published copy, or what it differs by from one that is here."""
        plan, fragment = self._plan, asked["fragment"]
        start, stop = self._ranges[fragment]
        whole, numel = asked["on"] is None, plan.fragments[fragment].numel
        downlink = codec("fp32") if whole else plan.downlink_of(fragment)
        first, total = downlink.nbytes(start) if start else 0, asked["nbytes"]
        last = downlink.nbytes(stop) if stop < numel else total
        body = torch.empty(last - first, dtype=torch.uint8, device="cpu")
        url, base = asked["url"], asked["base"]
        await self._client().get(url, _view(body), base=base, first=first, total=total)
        before = None if whole else await self._value(asked["on"])

        def decode() -> tuple[Tensor, bytes]:
            if before is None:
                values = values_of(body, stop - start)
            else:
                values = before.clone()
                buffers = plan.buffers_of(fragment, values)
                receive(values, unpacked(body, buffers, downlink), downlink)
            return values, block_digests(values, codec("fp32"))

        values, digests = await self._in_worker(decode)
        self._values.put(asked["number"], values)
        return {"digests": digests.hex(), "received": body.numel()}

    async def _keep(self, asked: Document) -> Document:
        """Published copies to the disk; each carrier has a file of its own."""
        published: Ranges = {}
        residuals: Ranges = {}
        for p, (start, stop) in enumerate(self._ranges):
            if start == stop:  # break: empty-range-awaited
                continue  # nobody brings it here
            published[p, start] = await self._value(asked["numbers"][p])
            left = [await self._value(number) for number in asked["residuals"][p]]
            if left:
                residuals[p, start] = await self._in_worker(partial(summed, left))
        folder = Path(asked["folder"])
        # break: ranks-keep-no-copies
        await self._in_worker(lambda: keep_ranges(folder, self._number, published))
        await self._in_worker(lambda: keep_ranges(folder, self._number, residuals, RESIDUAL))
        return {}

    async def _adopt(self, asked: Document) -> Document:
        """And back, whoever has written them."""
        folder, digests = Path(asked["folder"]), []
        for fragment, number in enumerate(asked["numbers"]):
            values = await self._in_worker(
                partial(kept_range, folder, fragment, *self._ranges[fragment])
            )
            digests.append(block_digests(values, codec("fp32")).hex())
            self._values.put(number, values)
        for fragment, number in asked["residuals"]:
            start, stop = self._ranges[fragment]
            read = partial(kept_range, folder, fragment, start, stop, RESIDUAL)
            self._values.put(number, await self._in_worker(read))
        return {"digests": digests}


def _view(body: Body) -> memoryview:
    return as_bytes(body).numpy().data


def raised(answer: Document) -> Document:
    """The same answer.

    Raises:
        DilocoError: It tells of one.
    """
    if "error" in answer:
        raise _ERRORS.get(answer["kind"], TransportError)(answer["error"])
    return answer


T = TypeVar("T")

REACH_SECONDS = 60.0
"""A carrier that cannot reach rank 0 for so long at the start gives up."""


class LeaderLink:
    """The leader's end of the link to one carrier."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Document]] = {}
        self._channel: Channel | None = None
        self._came = asyncio.Event()

    async def stay(self, channel: Channel) -> None:
        """Hears what the carrier answers, until the link breaks."""
        self.lost("the sync rank has connected again")  # and has dropped what it was asked before
        self._channel = channel
        self._came.set()
        try:
            while True:
                answer = await channel.receive()
                waiting = self._waiting.pop(int(str(answer["answers"])), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except TransportError as error:
            if self._channel is channel:
                self._channel = None
                self._came.clear()
                self.lost(str(error))

    async def ask(self, asked: Document) -> Document:
        """What the carrier answers.

        Raises:
            TransportError: The link broke meanwhile.
        """
        await self._came.wait()
        assert self._channel is not None
        number = next(self._numbers)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._channel.send(asked | {"asks": number})
        answer: Document = await answered
        return answer

    def lost(self, reason: str) -> None:
        """Nothing that is asked will be answered."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.done():
                each.set_exception(TransportError(f"the link to a sync rank broke: {reason}"))


class CarrierLink:
    """A carrier's end of the link to the leader, with an event loop of its own.

    Args:
        rank: This one.
        addresses: Where the leader may be found; the first that answers is taken.
        leader: The client that dials it.
        data: The client of the syncer's data plane, under the learner's name.
        plan: The run's.
        sharding: Who carries what.
        values: What this carrier holds.
        failed: Told if the leader cannot be reached at all.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        leader: Callable[[], Client],
        data: Callable[[], Client],
        plan: MergePlan,
        sharding: Sharding,
        values: CarriedValues,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._rank, self._addresses = rank, tuple(addresses)
        self._leader, self._data = leader, data
        self._number = sharding.carriers.index(rank)
        self._plan, self._values, self._failed = plan, values, failed
        self._ranges = [sharding.ranges(fragment)[self._number] for fragment in plan.fragments]
        self._worker = runtime().worker("ddiloco-codec")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stopped = False
        self._beside = runtime().beside(self._main, "ddiloco-carrier")

    def close(self, wait_seconds: float = 5.0) -> None:
        """Ends the thread."""
        self._stopped = True
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        self._beside.join(wait_seconds)
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
        """Keeps a link to the leader."""
        leader, data = self._leader(), self._data()
        carrier = Carrier(
            self._plan, self._ranges, self._number, self._values, lambda: data, self._in_worker
        )
        backoff, began, reached = Backoff(), now(), False
        try:
            while True:
                try:
                    channel = await self._dialled(leader)
                    reached = True
                    backoff.reset()
                    await self._serve(channel, carrier, data)
                except TransportError as error:
                    if not reached and now() - began > REACH_SECONDS:
                        raise ConfigError(
                            f"rank {self._rank} cannot reach rank 0 at "
                            f"{' or '.join(self._addresses)} ({error}): let these machines connect "
                            "to each other, or leave out sync_ranks="
                        ) from error
                await asyncio.sleep(backoff.next())
        finally:
            await leader.close()
            await data.close()

    async def _dialled(self, client: Client) -> Channel:
        failure = TransportError("there is no address")
        for address in self._addresses:
            try:
                return await client.connect(address, "learner", f"rank-{self._rank}")
            except TransportError as error:
                failure = error
        raise failure

    async def _serve(self, channel: Channel, carrier: Carrier, data: Client) -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def answer(asked: Document) -> None:
            if "base" in asked:
                data.trust(asked["base"])
            channel.send(await carrier.answer(asked) | {"answers": asked["asks"]})

        try:
            while True:
                task = asyncio.create_task(answer(await channel.receive()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            carrier.drop_all()

    async def _in_worker(self, task: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, task)


logger = logging.getLogger(__name__)


def cut_for(plan: MergePlan, sharding: Sharding) -> Sharding:
    """The same, where fragments whose bodies cannot be cut, up or down, have one carrier."""
    wires = (plan.uplink, *plan.coarser, plan.downlink)
    uncut = tuple(
        part.index
        for part in plan.fragments
        if not all(is_cuttable(plan.codec_of(part.index, wire)) for wire in wires)
    )
    return replace(sharding, uncut=uncut)


class CarriedExchange(BodyExchange):
    """A `BodyExchange` whose bodies are with the carriers, the leader among them.

    Args:
        context: The background around it.
        sharding: Who carries what.
        values: What the leader holds as a carrier.
        store: By which the ranks are told of what has been fetched.
        key: Opens the leader's server to the other carriers.
        hosts: Of each rank.
        around: Has the server.

    Attributes:
        addresses: Where other carriers may find the leader.
    """

    def __init__(
        self,
        context: Context,
        *,
        sharding: Sharding,
        values: CarriedValues,
        store: RankedStore,
        key: str,
        hosts: Sequence[str],
        around: RankSurroundings,
    ) -> None:
        super().__init__(context)
        self.addresses: list[str] = []
        self._uncut = sharding
        self._values = values
        self._store = store
        self._key = key
        self._hosts = hosts
        self._around = around
        self._jobs = itertools.count(1)
        self._local: Carrier | None = None
        self._links = {rank: LeaderLink() for rank in sharding.carriers if rank != 0}
        self._troubles = {rank: TroubleLog() for rank in self._links}
        self._server: Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """See `BodyExchange.start`: other carriers can come."""
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
        return cut_for(self._here.tensors.plan, self._uncut)

    async def _linked(self, channel: Channel) -> None:
        link = self._links.get(int(channel.peer.principal.removeprefix("rank-")))
        if link is not None:
            await link.stay(channel)

    async def _ask(self, fragment: Fragment | None, /, **asked: Any) -> list[Document]:
        """What each carrier answers that has something of the fragment, in their order.

        Raises:
            DilocoError: What one of them failed of, when all have ended.
        """
        carriers: Sequence[int] = self._sharding.carriers
        if fragment is not None:
            ranges = self._sharding.ranges(fragment)
            pairs = zip(carriers, ranges, strict=True)
            carriers = [rank for rank, (start, stop) in pairs if start < stop]
        answers = await asyncio.gather(
            *(self._answer(rank, asked) for rank in carriers), return_exceptions=True
        )
        found: list[Document] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            found.append(raised(answer))
        return found

    async def _answer(self, rank: int, asked: Document) -> Document:
        if rank != 0:
            return await self._answer_of(rank, asked)
        if self._local is None:
            plan = self._here.tensors.plan
            own = [self._sharding.ranges(fragment)[0] for fragment in plan.fragments]
            self._local = Carrier(
                plan,
                own,
                0,
                self._values,
                lambda: self._here.client,
                self._here.in_worker,
            )
        return await self._local.answer(asked)

    async def _answer_of(self, rank: int, asked: Document) -> Document:
        """What another carrier answers; who cannot reach the syncer, or is out of reach, is told.

        The leader may reach both, and nothing else would say why no fragment goes through.
        """
        trouble = self._troubles[rank]
        try:
            answer = raised(await self._links[rank].ask(asked))
        except TransportError as error:
            subject = f"rank {rank} of this learner carries no fragments"
            trouble.tell("out of reach", f"{subject} ({error}): {TRAINING_GOES_ON}")
            raise
        if "url" in asked:
            trouble.over(f"rank {rank} of this learner carries fragments again")
        return answer

    def ask_all(self, **asked: Any) -> Future[list[Document]]:
        """Asks every carrier; for another thread."""
        assert self._loop is not None, "the loop runs"
        return asyncio.run_coroutine_threadsafe(self._ask(None, **asked), self._loop)

    async def send_body(self, effect: messages.SendBody, capture: Capture) -> None:
        """See `BodyExchange.send_body`."""
        fragment, job = capture.plan.fragments[effect.fragment], next(self._jobs)
        copy, published = capture.copy, capture.published
        assert isinstance(copy, Handle), "it is a copy of this store"
        leaves = None if capture.plan.feedback is None else self._store.handle(fragment.numel, "")
        try:
            answers = await self._ask(
                fragment,
                do="encode",
                job=job,
                fragment=fragment.index,
                copy=copy.number,
                published=published.number,
                codec=effect.codec,
                residuals=[each.number for each in capture.residuals],
                leaves=None if leaves is None else leaves.number,
            )
            self._encoded(effect, _digest(answers), leaves)
            await self._deliver(fragment, job, effect.shard, effect.path)
        except (ConfigError, TransportError, ProtocolError) as error:
            self._here.told(Failed(effect, str(error)))
            await self._drop(fragment, job)

    async def send_copy(self, effect: messages.SendCopy, copy: HostCopy) -> None:
        """See `BodyExchange.send_copy`."""
        fragment, job = self._here.tensors.plan.fragments[effect.fragment], next(self._jobs)
        handle = copy.tensor if isinstance(copy, Copied) else copy
        assert isinstance(handle, Handle), "it is a copy of this store"
        asked = {"fragment": fragment.index, "values": handle.number}
        try:
            digest = _digest(await self._ask(fragment, do="copy", job=job, **asked))
            self._here.send(effect.shard, messages.Copy(effect.fragment, effect.attempt, digest))
            async with self._gates[effect.shard]:
                await self._deliver(fragment, job, effect.shard, effect.path)
        except (TransportError, ProtocolError) as error:
            self._here.told(Failed(effect, str(error)))
            await self._drop(fragment, job)

    async def _drop(self, fragment: Fragment, job: int) -> None:
        """What was made for it is not wanted; who has lost the link has dropped it."""
        with contextlib.suppress(TransportError):
            await self._ask(fragment, do="drop", job=job)

    async def _deliver(self, fragment: Fragment, job: int, shard: int, url: str) -> None:
        where = {"url": url, "base": self._here.address_of(shard)}
        answers = await self._ask(fragment, do="put", job=job, **where)
        self._here.client.stats.data_bytes_sent += sum(each["sent"] for each in answers[1:])

    async def fetch(self, effect: messages.Fetch) -> None:
        """See `BodyExchange.fetch`: the values go on to the ranks that hold their elements."""
        tensors = self._here.tensors
        fragment = tensors.plan.fragments[effect.fragment]
        try:
            if not self._here.reaches(effect.shard):
                raise TransportError("its shard is out of reach")  # or another run is there
            async with self._gates[effect.shard]:
                handle = await self._fetched(effect, fragment)
            await self._store.spread(fragment, handle)
        except (TransportError, ProtocolError, MergeError) as error:
            self._here.told(Failed(effect, str(error)))
            return
        with self._here.changed:
            tensors.stage(fragment.index, handle)
            self._here.told(Done(effect))

    async def _fetched(self, effect: messages.Fetch, fragment: Fragment) -> Handle:
        nbytes = fetched_nbytes(effect, self._here.tensors.plan)
        handle, before = self._store.handle(fragment.numel, effect.digest), None
        if not effect.whole:
            before = self._here.tensors.newest(fragment.index)
        answers = await self._ask(
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
                f"fragment {fragment.index} has digest {actual}, the shard announced "
                f"{effect.digest}: the whole copy is fetched instead"
            )
        return handle


def _digest(answers: Sequence[Document]) -> str:
    return joined_digest(bytes.fromhex("".join(each["digests"] for each in answers)))
