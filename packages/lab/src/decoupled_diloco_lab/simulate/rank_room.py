"""The rendezvous of one learner's virtual ranks, instead of torch.distributed.

As with real collectives, each rank's n-th call is matched with the n-th call of all other ranks. If
a rank dies, the pending collectives of the others fail. If a rank is paused or cut off, the others
wait.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decoupled_diloco.errors import StorageError, TransportError
from decoupled_diloco.ranks.rank_context import RankState, RankSurroundings
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.states import pack, unpack
from decoupled_diloco.transport.interface import OnChannel, Server
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.tls import TLSConfig
from decoupled_diloco.transport.tokens import Tokens
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.virtual_network import Network
from decoupled_diloco_lab.simulate.virtual_runtime import WORK_SECONDS, VirtualProcess
from decoupled_diloco_lab.simulate.virtual_transport import Place, VirtualClient, VirtualServer

LATE_FACTOR = 5000.0
"""Largest factor by which a late collective takes longer."""

POLL_SECONDS = 0.05
"""Interval between checks whether ranks that were cut off can reach one another again."""


@dataclass
class _Meeting:
    """One collective: the input of each rank, and the future on which it waits for the rest."""

    brought: dict[int, Any] = field(default_factory=dict)
    waiting: dict[int, asyncio.Future[dict[int, Any]]] = field(default_factory=dict)


class Room:
    """The ranks of one incarnation of a learner.

    Args:
        network: The virtual network, which may cut ranks off.
        choices: Source of random delays.
        seconds: Typical duration of a collective.
        late: Returns the probability that a collective takes up to `LATE_FACTOR` times longer.
    """

    def __init__(
        self,
        network: Network,
        choices: Choices,
        *,
        seconds: float,
        late: Callable[[], float],
    ) -> None:
        self.members: list[VirtualProcess] = []
        self._network = network
        self._choices = choices
        self._seconds, self._late = seconds, late
        self._counts: dict[tuple[str, int], int] = {}
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._gone = ""

    def enter(self, process: VirtualProcess) -> int:
        """Add a rank and return its number. All ranks must enter before one of them starts."""
        self.members.append(process)
        return len(self.members) - 1

    def bring(self, kind: str, rank: int, what: Any) -> asyncio.Future[dict[int, Any]]:
        """Contribute a rank's input to its next collective of a kind.

        Returns:
            A future of all ranks' inputs, done once all of them have contributed.
        """
        number = self._counts[kind, rank] = self._counts.get((kind, rank), 0) + 1
        loop = self.members[rank].loop
        assert loop is not None
        future: asyncio.Future[dict[int, Any]] = loop.create_future()
        # Retrieve the exception, so that asyncio does not log it if the rank has stopped waiting.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._gone:
            future.set_exception(TransportError(self._gone))
            return future
        meeting = self._meetings.setdefault((kind, number), _Meeting())
        meeting.brought[rank], meeting.waiting[rank] = what, future
        if len(meeting.brought) == len(self.members):
            del self._meetings[kind, number]
            self._deliver(meeting)
        return future

    def _deliver(self, meeting: _Meeting) -> None:
        """Deliver all inputs to all ranks, each after its own delay, once no rank is cut off."""
        clockwork = self.members[0].clockwork
        if self._is_cut():
            clockwork.after(POLL_SECONDS, self._deliver, meeting)
            return
        for rank, future in meeting.waiting.items():
            seconds = self._seconds * self._choices.uniform(0.5, 2.0)
            if self._choices.chance(self._late()):
                seconds *= self._choices.log_uniform(1.0, LATE_FACTOR)
            loop = self.members[rank].loop
            assert loop is not None
            loop.at(clockwork.now + seconds, False, _done, future, meeting.brought)

    def _is_cut(self) -> bool:
        leader, *others = self.members
        return any(self._network.is_cut(leader, other) for other in others)

    def left(self, rank: int) -> None:
        """Handle the end of a rank's process: fail all pending and later collectives."""
        self._gone = self._gone or f"a virtual collective: rank {rank} is gone"
        meetings, self._meetings = self._meetings, {}
        for meeting in meetings.values():
            for other, future in meeting.waiting.items():
                loop = self.members[other].loop
                if loop is not None and other != rank:
                    loop.at(loop.clockwork.now, False, _failed, future, self._gone)


def _done(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _failed(future: asyncio.Future[Any], reason: str) -> None:
    if not future.done():
        future.set_exception(TransportError(reason))


class _Exchange:
    """See `group.Exchange`."""

    def __init__(self, brought: asyncio.Future[dict[int, Any]]) -> None:
        self._brought = brought

    async def wait(self) -> list[dict[str, Any]]:
        documents = await self._brought
        return [json.loads(documents[rank]) for rank in sorted(documents)]


class _Unwatched:
    """Stands in for the watchdog: in virtual time the simulation itself detects hangs."""

    place = ""

    def close(self) -> None:
        pass


class RoomGroup:
    """The `Collectives` of a rank in a room."""

    def __init__(self, room: Room, rank: int) -> None:
        self.rank, self.size = rank, len(room.members)
        self.watch = _Unwatched()
        self._room = room

    def exchange(self, document: dict[str, Any]) -> _Exchange:
        """See `Collectives`."""
        text = json.dumps(document, separators=(",", ":"))
        return _Exchange(self._room.bring("boundary", self.rank, text))

    async def exchanged(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        """See `Collectives`."""
        return await self.exchange(document).wait()

    async def all_to_all(
        self, out: Tensor, given: Tensor, out_sizes: list[int], given_sizes: list[int]
    ) -> None:
        """See `Collectives`."""
        # Copy: the caller may overwrite its tensor before the other ranks have read it.
        parts = [part.clone() for part in torch.split(given, given_sizes)]
        brought = await self._room.bring("bodies", self.rank, parts)
        received = [brought[rank][self.rank] for rank in range(self.size)]
        assert [part.numel() for part in received] == out_sizes, "ranks exchange other fragments"
        out.copy_(torch.cat(received))


class RoomState:
    """A sharded checkpoint with one file per rank, instead of torch.distributed.checkpoint.

    Args:
        room: The rendezvous at which the ranks learn that all of them have written.
        rank: This rank.
        module: Its part of the model.
        stateful: Other objects with a ``state_dict``, by name.
    """

    def __init__(
        self, room: Room, rank: int, module: nn.Module, stateful: Mapping[str, Any]
    ) -> None:
        self._room, self._rank = room, rank
        self._module, self._objects = module, dict(stateful)

    def save(self, folder: Path) -> Future[Any]:
        """See `ShardedState.save`."""
        state = {name: thing.state_dict() for name, thing in self._objects.items()}
        tensors, text = pack({"model": dict(self._module.state_dict()), "objects": state})
        # Copy now: training changes the tensors before the file is written.
        copies = {name: each.detach().clone() for name, each in tensors.items()}
        done: Future[Any] = Future()

        async def write() -> None:
            await asyncio.sleep(WORK_SECONDS)
            problem = ""
            try:
                file = folder / self._name
                surroundings.disk.make_folder(folder)
                surroundings.disk.fill(
                    file, lambda path: torch.save({"tensors": copies, "text": text}, path)
                )
                surroundings.disk.sync(file)
                surroundings.disk.sync(folder)
            except OSError as error:
                problem = str(error)
            try:
                problems = await self._room.bring("checkpoints", self._rank, problem)
            except TransportError as error:
                done.set_exception(error)
                return
            found = [text for text in problems.values() if text]
            if found:
                done.set_exception(StorageError(found[0]))
            else:
                done.set_result(None)

        surroundings = runtime()
        asyncio.get_running_loop().create_task(write())
        return done

    def load(self, folder: Path, ranks: int) -> None:
        """See `ShardedState.load`."""
        assert ranks == len(self._room.members), "virtual learners keep their number of ranks"
        kept = torch.load(folder / self._name, weights_only=True, map_location="cpu")
        state = unpack(kept["tensors"], kept["text"])
        self._module.load_state_dict(state["model"])
        for name, thing in self._objects.items():
            thing.load_state_dict(state["objects"][name])

    @property
    def _name(self) -> str:
        return f"rank-{self._rank}.pt"


class RoomSurroundings(RankSurroundings):
    """The process context of a virtual rank.

    Args:
        room: The rendezvous of the learner's ranks.
        rank: This rank.
        place: Its sockets.
        limits: The transport limits of its client.
    """

    def __init__(self, room: Room, rank: int, place: Place, limits: Limits) -> None:
        self.group = RoomGroup(room, rank)
        self._room, self._rank, self._place, self._limits = room, rank, place, limits

    def sharded_state(self, module: nn.Module, stateful: Mapping[str, Any]) -> RankState:
        """See `RankSurroundings`."""
        return RoomState(self._room, self._rank, module, stateful)

    def host(self) -> str:
        """See `RankSurroundings`: all ranks are on one host."""
        return "virtual"

    def client(
        self,
        principal: str,
        token: str | None,
        trusted: Sequence[str] = (),
        tls: TLSConfig | None = None,
        *,
        within: bool = False,
    ) -> VirtualClient:
        """See `RankSurroundings`."""
        return VirtualClient(self._place, token=token, limits=self._limits, principal=principal)

    def server(self, hosts: Sequence[str], key: str, on_channel: OnChannel) -> Server:
        """See `RankSurroundings`."""
        address = self._place.world.address(self._place.process.name)
        tokens = Tokens(run_token=key)
        return VirtualServer(self._place, address, on_channel=on_channel, tokens=tokens)

    def addresses(self, server: Server) -> list[str]:
        """See `RankSurroundings`."""
        return [server.address]
