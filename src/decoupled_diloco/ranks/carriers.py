"""The leader and the carriers of a learner: what the background of rank 0 has them all do.

Carriers talk to the syncer's data plane under the learner's name; it never learns how many they
are.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import Any

from decoupled_diloco.errors import (
    ConfigError,
    MergeError,
    ProtocolError,
    TransportError,
)
from decoupled_diloco.learner.body_exchange import BodyExchange, fetched_nbytes
from decoupled_diloco.learner.exchange import Capture
from decoupled_diloco.learner.joining import TRAINING_GOES_ON
from decoupled_diloco.learner.store import Copied, HostCopy
from decoupled_diloco.learner.trouble import TroubleLog
from decoupled_diloco.merge import Fragment, is_cuttable, joined_digest
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.ranks.carrier import CarriedValues, Carrier, Document, raised
from decoupled_diloco.ranks.link import LeaderLink
from decoupled_diloco.ranks.redistribute import Sharding
from decoupled_diloco.ranks.store import Handle, RankedStore
from decoupled_diloco.ranks.surroundings import RankSurroundings
from decoupled_diloco.transport.base import Channel, Server

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
        sharding: Who carries what.
        values: What the leader holds as a carrier.
        store: By which the ranks are told of what has been fetched.
        key: Opens the leader's server to the other carriers.
        hosts: Of each rank.
        around: Has the server.
        surroundings: As `BodyExchange` has them.

    Attributes:
        addresses: Where other carriers may find the leader.
    """

    def __init__(
        self,
        *,
        sharding: Sharding,
        values: CarriedValues,
        store: RankedStore,
        key: str,
        hosts: Sequence[str],
        around: RankSurroundings,
        **surroundings: Any,
    ) -> None:
        super().__init__(**surroundings)
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
        return cut_for(self._tensors().plan, self._uncut)

    async def _linked(self, channel: Channel) -> None:
        link = self._links.get(int(channel.peer.principal.removeprefix("rank-")))
        if link is not None:
            await link.stay(channel)

    async def _ask(self, fragment: Fragment | None, /, **asked: Any) -> list[Document]:
        """What each carrier answers that has something of the fragment, in their order.

        Raises:
            Error: What one of them failed of, when all have ended.
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
            plan = self._tensors().plan
            own = [self._sharding.ranges(fragment)[0] for fragment in plan.fragments]
            self._local = Carrier(plan, own, 0, self._values, self._client, self._in_worker)
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

    async def send_body(self, effect: do.SendBody, capture: Capture) -> None:
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
            self._told(fact.UploadFailed(effect.fragment, effect.ask, str(error)))
            await self._drop(fragment, job)

    async def send_copy(self, effect: do.SendCopy, copy: HostCopy) -> None:
        """See `BodyExchange.send_copy`."""
        fragment, job = self._tensors().plan.fragments[effect.fragment], next(self._jobs)
        handle = copy.tensor if isinstance(copy, Copied) else copy
        assert isinstance(handle, Handle), "it is a copy of this store"
        asked = {"fragment": fragment.index, "values": handle.number}
        try:
            digest = _digest(await self._ask(fragment, do="copy", job=job, **asked))
            self._say(effect.shard, say.Copy(effect.fragment, effect.attempt, digest))
            async with self._gates[effect.shard]:
                await self._deliver(fragment, job, effect.shard, effect.path)
        except (TransportError, ProtocolError) as error:
            self._told(fact.CopyFailed(effect.shard, effect.fragment, effect.attempt, str(error)))
            await self._drop(fragment, job)

    async def _drop(self, fragment: Fragment, job: int) -> None:
        """What was made for it is not wanted; who has lost the link has dropped it."""
        with contextlib.suppress(TransportError):
            await self._ask(fragment, do="drop", job=job)

    async def _deliver(self, fragment: Fragment, job: int, shard: int, url: str) -> None:
        where = {"url": url, "base": self._address_of(shard)}
        answers = await self._ask(fragment, do="put", job=job, **where)
        self._client().stats.data_bytes_sent += sum(each["sent"] for each in answers[1:])

    async def fetch(self, effect: do.Fetch) -> None:
        """See `BodyExchange.fetch`: the values go on to the ranks that hold their elements."""
        tensors = self._tensors()
        fragment = tensors.plan.fragments[effect.fragment]
        try:
            if not self._reaches(effect.shard):
                raise TransportError("its shard is out of reach")  # or another run is there
            async with self._gates[effect.shard]:
                handle = await self._fetched(effect, fragment)
            await self._store.spread(fragment, handle)
        except (TransportError, ProtocolError, MergeError) as error:
            self._told(fact.FetchFailed(fragment.index, effect.version, str(error)))
            return
        with self._changed:
            tensors.stage(fragment.index, handle)
            self._told(fact.Fetched(fragment.index, effect.version))

    async def _fetched(self, effect: do.Fetch, fragment: Fragment) -> Handle:
        nbytes = fetched_nbytes(effect, self._tensors().plan)
        handle, before = self._store.handle(fragment.numel, effect.digest), None
        if not effect.whole:
            before = self._tensors().newest(fragment.index)
        answers = await self._ask(
            fragment,
            do="fetch",
            number=handle.number,
            fragment=fragment.index,
            on=None if before is None else before.number,
            nbytes=nbytes,
            url=effect.path,
            base=self._address_of(effect.shard),
        )
        self._client().stats.data_bytes_received += sum(each["received"] for each in answers[1:])
        actual = _digest(answers)
        if actual != effect.digest:  # break: wrong-part-accepted
            raise MergeError(
                f"fragment {fragment.index} has digest {actual}, the shard announced "
                f"{effect.digest}: the whole copy is fetched instead"
            )
        return handle


def _digest(answers: Sequence[Document]) -> str:
    return joined_digest(bytes.fromhex("".join(each["digests"] for each in answers)))
