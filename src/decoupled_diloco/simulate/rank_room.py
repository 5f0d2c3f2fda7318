"""Where the virtual ranks of one learner meet, in the place of torch.distributed.

Every rank's n-th exchange is one with the n-th of all others, as collectives are; a rank that dies
fails what the others wait for, and one that is stopped or cut off has them wait.
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
from decoupled_diloco.ranks.surroundings import RankState, RankSurroundings
from decoupled_diloco.runtime import runtime
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.network import Network
from decoupled_diloco.simulate.runtime import WORK_SECONDS, VirtualProcess
from decoupled_diloco.simulate.transport import Place, VirtualClient, VirtualServer
from decoupled_diloco.storage.states import pack, unpack
from decoupled_diloco.transport.base import OnChannel, Server
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.tls import Tls
from decoupled_diloco.transport.tokens import Tokens

LATE_FACTOR = 5000.0

LOOK_SECONDS = 0.05
"""How often it is looked whether ranks that are cut off from one another are so no longer."""


@dataclass
class _Meeting:
    """One collective: what each rank has brought, and where it waits for the rest."""

    brought: dict[int, Any] = field(default_factory=dict)
    waiting: dict[int, asyncio.Future[dict[int, Any]]] = field(default_factory=dict)


class Room:
    """The ranks of one life of a learner.

    Args:
        network: That of the world.
        choices: Where delays are drawn from.
        seconds: How long a collective takes.
        late: That it takes up to `LATE_FACTOR` times longer.
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
        """The next rank's number; all ranks enter before one of them begins."""
        self.members.append(process)
        return len(self.members) - 1

    def bring(self, kind: str, rank: int, what: Any) -> asyncio.Future[dict[int, Any]]:
        """A rank's part of its next collective of a kind; done when all have brought theirs."""
        number = self._counts[kind, rank] = self._counts.get((kind, rank), 0) + 1
        loop = self.members[rank].loop
        assert loop is not None
        future: asyncio.Future[dict[int, Any]] = loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is heard
        if self._gone:
            future.set_exception(TransportError(self._gone))
            return future
        meeting = self._meetings.setdefault((kind, number), _Meeting())
        meeting.brought[rank], meeting.waiting[rank] = what, future
        if len(meeting.brought) == len(self.members):
            del self._meetings[kind, number]
            self._hand_out(meeting)
        return future

    def _hand_out(self, meeting: _Meeting) -> None:
        """Everybody gets everything, as soon as all reach one another; each in its own time."""
        clockwork = self.members[0].clockwork
        if self._apart():
            clockwork.after(LOOK_SECONDS, self._hand_out, meeting)
            return
        for rank, future in meeting.waiting.items():
            seconds = self._seconds * self._choices.uniform(0.5, 2.0)
            if self._choices.chance(self._late()):
                seconds *= self._choices.log_uniform(1.0, LATE_FACTOR)
            loop = self.members[rank].loop
            assert loop is not None
            loop.at(clockwork.now + seconds, False, _done, future, meeting.brought)

    def _apart(self) -> bool:
        leader, *others = self.members
        return any(self._network.is_cut(leader, other) for other in others)

    def left(self, rank: int) -> None:
        """A rank's process is gone: nobody waits for it any more."""
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
    """In virtual time it is the world that looks who hangs."""

    place = ""

    def close(self) -> None:
        pass


class RoomGroup:
    """A rank's `Collectives` in a room."""

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
        parts = [part.clone() for part in torch.split(given, given_sizes)]
        brought = await self._room.bring("bodies", self.rank, parts)
        received = [brought[rank][self.rank] for rank in range(self.size)]
        assert [part.numel() for part in received] == out_sizes, "ranks move different fragments"
        out.copy_(torch.cat(received))


class RoomState:
    """In the place of torch.distributed.checkpoint: each rank has a file of its own.

    Args:
        room: Where it is known that all have written.
        rank: This one.
        module: Its part of the model.
        stateful: Name to object.
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
    """A virtual rank's.

    Args:
        room: Where it meets the others.
        rank: This one.
        place: Its sockets.
        limits: Of its client.
    """

    def __init__(self, room: Room, rank: int, place: Place, limits: Limits) -> None:
        self.group = RoomGroup(room, rank)
        self._room, self._rank, self._place, self._limits = room, rank, place, limits

    def sharded_state(self, module: nn.Module, stateful: Mapping[str, Any]) -> RankState:
        """See `RankSurroundings`."""
        return RoomState(self._room, self._rank, module, stateful)

    def host(self) -> str:
        """See `RankSurroundings`: all are on one."""
        return "virtual"

    def client(
        self,
        principal: str,
        token: str | None,
        trusted: Sequence[str] = (),
        tls: Tls | None = None,
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
