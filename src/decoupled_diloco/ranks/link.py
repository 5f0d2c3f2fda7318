"""The link between the leader and another carrier, by the same transport as to the syncer.

The leader asks over it, the carrier answers; a link that breaks is made again, and what was asked
meanwhile has failed, as if the syncer had been out of reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from decoupled_diloco.errors import ConfigError, TransportError
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.ranks.carrier import CarriedValues, Carrier, Document
from decoupled_diloco.ranks.redistribute import Sharding
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.transport.backoff import Backoff
from decoupled_diloco.transport.base import Channel, Client

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
        self.lost("the carrier has made it again")  # and has dropped what it was asked before
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
                each.set_exception(TransportError(f"the link to a carrier broke: {reason}"))


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
                            "to each other, or leave out carriers="
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
