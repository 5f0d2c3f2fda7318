"""The rendezvous of a learner's virtual ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError, TransportError
from decoupled_diloco.runtime import runtime
from decoupled_diloco.runtime.disk import Disk
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.clockwork import Clockwork
from decoupled_diloco_lab.simulate.rank_room import Room, RoomGroup
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.simulate.virtual_network import Network
from decoupled_diloco_lab.simulate.virtual_runtime import VirtualProcess

Work = Callable[[RoomGroup], Coroutine[Any, Any, Any]]


class Ranks:
    """Processes in a room, and the result of each."""

    def __init__(self, size: int) -> None:
        self.clockwork = Clockwork()
        self.network = Network(self.clockwork, Choices(0))
        self.room = Room(self.network, Choices(1), seconds=0.01, late=lambda: 0.0)
        self.ranks = [VirtualProcess(f"rank-{n}", self.clockwork, Choices(n)) for n in range(size)]
        self.results: dict[int, Any] = {}
        for rank in self.ranks:
            self.room.enter(rank)

    def begin(self, work: Work) -> None:
        for number, rank in enumerate(self.ranks):
            rank.boot(lambda number=number: self._run(number, work), Disk())

    async def _run(self, number: int, work: Work) -> None:
        try:
            self.results[number] = await work(RoomGroup(self.room, number))
        except TransportError as error:
            self.results[number] = str(error)

    def go(self, until: float) -> None:
        while self.clockwork.next is not None and self.clockwork.next <= until:
            self.clockwork.step()


async def twice(group: RoomGroup) -> list[Any]:
    first = await group.exchanged({"rank": group.rank})
    return [first, await group.exchanged({"rank": 10 * group.rank})]


def test_each_rank_receives_the_documents_of_all_ranks() -> None:
    ranks = Ranks(3)
    ranks.begin(twice)
    ranks.go(1.0)
    sent = [[{"rank": 0}, {"rank": 1}, {"rank": 2}], [{"rank": 0}, {"rank": 10}, {"rank": 20}]]
    assert ranks.results == dict.fromkeys(range(3), sent)


async def swap(group: RoomGroup) -> list[float]:
    given = torch.tensor([10.0 * group.rank, 10.0 * group.rank + 1])
    out = torch.empty(2)
    await group.all_to_all(out, given, [1, 1], [1, 1])
    return list(out.tolist())


def test_all_to_all_delivers_each_rank_its_parts() -> None:
    ranks = Ranks(2)
    ranks.begin(swap)
    ranks.go(1.0)
    assert ranks.results == {0: [0.0, 10.0], 1: [1.0, 11.0]}


def test_other_ranks_wait_for_one_that_is_cut_off() -> None:
    ranks = Ranks(2)
    ranks.network.cut(ranks.ranks[0], ranks.ranks[1])
    ranks.begin(twice)
    ranks.go(5.0)
    assert not ranks.results
    ranks.network.heal(ranks.ranks[0], ranks.ranks[1])
    ranks.go(10.0)
    assert ranks.results.keys() == {0, 1}


async def alone(group: RoomGroup) -> Any:
    if group.rank == 1:
        await asyncio.sleep(60.0)
    return await group.exchanged({})


def test_the_death_of_a_rank_fails_the_collectives_of_the_others() -> None:
    ranks = Ranks(3)
    ranks.begin(alone)
    ranks.go(1.0)
    ranks.ranks[1].crash()
    ranks.room.left(1)
    ranks.go(2.0)
    assert ranks.results == dict.fromkeys((0, 2), "a virtual collective: rank 1 is gone")


async def in_order(group: RoomGroup) -> list[Any]:
    strand, done = runtime().strand("test"), []

    async def work(number: int) -> int:
        await asyncio.sleep(1.0 / number)
        done.append(number)
        return number

    futures = [strand.submit(lambda number=number: work(number)) for number in (1, 2, 3)]
    last = await runtime().outcome(futures[-1])
    return [last, *done]


def test_a_strand_runs_coroutines_in_order() -> None:
    ranks = Ranks(1)
    ranks.begin(in_order)
    ranks.go(10.0)
    assert ranks.results == {0: [3, 1, 2, 3]}


def test_settings_that_divide_a_model_are_rejected_in_virtual_time(tmp_path: Path) -> None:
    config = RunConfig(
        run={"learners": 1, "max_steps": 4},
        learner={"ranks": 2, "parallelism": "ddp"},
        data={"elastic": False},
    )
    with pytest.raises(ConfigError, match="would be ignored"):
        System(config, [], tmp_path)
