"""A learner of several ranks on virtual machines: rank 0, which is its head, too, and the others.

As on a real machine the others are started with each life of rank 0, and end with it; sometimes one
is out of its reach as it dies, and goes on for a while as what is left of an earlier life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.rank_processes import GRACE_SECONDS
from decoupled_diloco.launch.roles import Cut, learn
from decoupled_diloco.launch.termination import Termination
from decoupled_diloco.learner.learner import Learner
from decoupled_diloco.merge import body_digest, codec, gather
from decoupled_diloco.ranks.follower import FollowerRank
from decoupled_diloco.ranks.leader import LeaderRank
from decoupled_diloco.ranks.seat import seated
from decoupled_diloco.simulate.drift import Stage, Vectors
from decoupled_diloco.simulate.hosts import (
    Host,
    LearnerHost,
    ParticipantHost,
    VirtualLearner,
    checkpoint_id,
)
from decoupled_diloco.simulate.rank_room import Room, RoomSurroundings
from decoupled_diloco.simulate.run_stage import RunStage
from decoupled_diloco.simulate.spec import LearnerSpec
from decoupled_diloco.workloads import Workload
from decoupled_diloco.workloads.divided import DataShare

OUT_OF_REACH = 0.3
"""That a rank lives on for a while as rank 0 dies."""

EXCHANGE_SECONDS = 0.002
"""How long the ranks' collectives take, as a share of a step."""


def cut_of(spec: LearnerSpec, rank: int, model: torch.nn.Module) -> Cut:
    """What a rank trains: all of the model, or its stage; all take the same batches."""
    assert isinstance(model, Vectors)
    if spec.staged and len(model.vectors) >= spec.ranks:
        model = Stage(model, rank, spec.ranks)
    return Cut(model, spec.ranks, DataShare())


class VirtualLeader(VirtualLearner, LeaderRank):
    """Rank 0, whose loop is a coroutine."""

    @property
    def _not_trained(self) -> int:
        return self._untrained[0]


class VirtualFollower(FollowerRank):
    """Any other rank, whose loop is a coroutine."""

    def _enter(self) -> None:
        """It joins in its own time."""

    async def joined(self) -> VirtualFollower:
        """Itself, once the run has let the learner in."""
        await self._join()
        return self


class RankHost(ParticipantHost):
    """The process of a rank that is not the first.

    Attributes:
        model: What it has of the model.
    """

    def __init__(self, system: RunStage, leader: RankedHost, rank: int, life: int) -> None:
        Host.__init__(self, system, f"{leader.name}-rank-{rank}-{life}", leader.link)
        self.spec = leader.spec
        self.participant = None
        self.leader = leader
        self.rank = rank
        self.model: torch.nn.Module | None = None
        self._steps = self.choices.fork("steps")

    @property
    def machine(self) -> Any:
        """None: rank 0 has the one machine."""
        return None

    @property
    def links(self) -> Mapping[int, Any]:
        """None: rank 0 has them."""
        return {}

    async def main(self) -> None:
        """Trains its part until the run is over."""
        torch.manual_seed(0)
        system, index = self.system, self.leader.index
        await learn(
            system.config,
            index,
            self.seat(system.workload(self)),
            Termination(),
            syncer=system.addresses,
            folder=system.folder,
            token=None,
        )

    def divide(self, config: RunConfig, index: int, workload: Workload, model: Any) -> Cut:
        """See `Seat`."""
        return cut_of(self.spec, self.rank, model)

    async def _learner(self, model: torch.nn.Module, *arguments: Any, **named: Any) -> Learner:
        self.model = model
        around = RoomSurroundings(self.leader.room, self.rank, self.place, self.system.limits)
        named["carriers"] = self.spec.carriers
        seat = await seated(model, named, around)
        return await VirtualFollower(model, *arguments, **named, seat=seat).joined()

    async def _pace(self) -> None:
        spec = self.spec
        seconds = spec.step_seconds * self.leader.slowness
        await asyncio.sleep(seconds * max(0.1, self._steps.normal(1.0, spec.variance)))

    def _gone(self, code: int, *, silent: bool) -> None:
        if self.alive:
            super()._gone(code, silent=silent)
            self.leader.rank_ended(self, code)


class RankedHost(LearnerHost):
    """Rank 0 of a learner of several.

    Attributes:
        others: The other ranks of its present life.
        room: Where they meet.
    """

    room: Room

    def __init__(self, system: RunStage, spec: LearnerSpec) -> None:
        super().__init__(system, spec)
        self.others: list[RankHost] = []
        self._lives = 0

    def rank(self, number: int) -> Host | None:
        """See `LearnerHost`."""
        ranks: list[Host] = [self, *self.others]
        return ranks[number] if number < len(ranks) else None

    def begin(self) -> None:
        """A new life, with ranks of its own."""
        self._lives += 1
        system, spec, life = self.system, self.spec, self._lives
        self.room = Room(
            system.network,
            self.choices.fork(f"room {life}"),
            seconds=EXCHANGE_SECONDS * spec.step_seconds,
            late=lambda: system.plans_late,
        )
        self.others = [RankHost(system, self, rank, life) for rank in range(1, spec.ranks)]
        for host in (self, *self.others):
            self.room.enter(host)
        system.rank_hosts += self.others
        super().begin()
        for other in self.others:
            other.begin()

    def divide(self, config: RunConfig, index: int, workload: Workload, model: Any) -> Cut:
        """See `Seat`."""
        return cut_of(self.spec, 0, model)

    async def _learner(self, model: torch.nn.Module, *arguments: Any, **named: Any) -> Learner:
        self.model = model
        around = RoomSurroundings(self.room, 0, self.place, self.system.limits)
        named["carriers"] = self.spec.carriers
        seat = await seated(model, named, around)
        leader = self.participant = VirtualLeader(self, model, *arguments, **named, seat=seat)
        loaded = leader._checkpointer.loaded
        self.loaded = None if loaded is None else checkpoint_id(loaded)
        return await leader.joined()

    def bits_of(self, fragment: int) -> str | None:
        """See `LearnerHost`: until it has closed its parameters are behind its machine."""
        leader = self.participant
        assert isinstance(leader, VirtualLeader)
        if not leader._closed:
            return None
        plan = leader._shared.tensors.plan
        named: dict[str, torch.Tensor] = {}
        for model in (self.model, *(other.model for other in self.others)):
            assert model is not None
            named |= dict(model.named_parameters())
        tensors = [named[spec.name].detach() for spec in plan.layout.tensors]
        return body_digest(gather(plan.fragments[fragment], tensors), codec("fp32"))

    def rank_ended(self, host: RankHost, code: int) -> None:
        """Another rank's process is gone: the head ends what is left after a while."""
        if host not in self.others:
            return
        self.room.left(host.rank)
        if code != 0 and self.alive:
            life, after = self.life, self.choices.uniform(0.0, GRACE_SECONDS)
            self.clockwork.after(after, self._end_with, life, code)

    def _end_with(self, life: int, code: int) -> None:
        if self.life == life:
            self._gone(code, silent=False)

    def _gone(self, code: int, *, silent: bool) -> None:
        if not self.alive:
            return
        super()._gone(code, silent=silent)
        self.room.left(0)
        for other in self.others:
            if code == 0:
                continue  # it ends by itself
            if self.choices.chance(OUT_OF_REACH):
                self.clockwork.after(self.choices.log_uniform(0.05, 30.0), other.kill)
            else:
                other.kill()
