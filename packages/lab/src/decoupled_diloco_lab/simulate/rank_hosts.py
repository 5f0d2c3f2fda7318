"""A multi-rank learner on virtual machines: rank 0, which is also the head process, and the others.

As on a real machine, the other ranks start and end with each incarnation of rank 0. Sometimes one
is out of reach when rank 0 dies. It then lives on for a while as a remnant of that incarnation.
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
from decoupled_diloco.learner.checkpointer import all_stateful
from decoupled_diloco.learner.option_groups import ParticipantOptions
from decoupled_diloco.merge import body_digest, codec, gather
from decoupled_diloco.participants import Learner
from decoupled_diloco.ranks.rank_process import RankSeat, seated
from decoupled_diloco.workloads import Workload
from decoupled_diloco.workloads.rank_split import DataShare
from decoupled_diloco_lab.simulate.drift import Stage, Vectors
from decoupled_diloco_lab.simulate.hosts import (
    Host,
    LearnerHost,
    ParticipantHost,
    VirtualLearner,
    checkpoint_id,
)
from decoupled_diloco_lab.simulate.rank_room import Room, RoomSurroundings
from decoupled_diloco_lab.simulate.run_stage import RunStage
from decoupled_diloco_lab.simulate.spec import LearnerSpec

OUT_OF_REACH = 0.3
"""Probability that a rank lives on for a while when rank 0 dies."""

EXCHANGE_SECONDS = 0.002
"""Duration of the ranks' collectives, as a share of a step."""


def cut_of(spec: LearnerSpec, rank: int, model: torch.nn.Module) -> Cut:
    """Return the part of the model that a rank trains: all of it, or its stage.

    All ranks take the same batches.
    """
    assert isinstance(model, Vectors)
    if spec.staged and len(model.vectors) >= spec.ranks:
        model = Stage(model, rank, spec.ranks)
    return Cut(model, spec.ranks, DataShare())


async def _seated(
    model: torch.nn.Module, named: Mapping[str, Any], around: RoomSurroundings
) -> RankSeat:
    """Meet the other ranks with the arguments of a `Learner`, before its constructor."""
    options = ParticipantOptions(
        named["name"],
        timeouts=named["timeouts"],
        observability=named["observability"],
        sync_ranks=named["sync_ranks"],
        checkpoint=named["checkpoint"],
    )
    objects = all_stateful(named["optimizer"], options.checkpoint.state)
    return await seated(model, options, named["state_sharing"], objects, around)


class RankHost(ParticipantHost):
    """The process of a rank other than rank 0.

    Attributes:
        model: Its part of the model.
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
        """Always ``None``: only rank 0 has a state machine."""
        return None

    @property
    def links(self) -> Mapping[int, Any]:
        """Always empty: only rank 0 is connected to the shards."""
        return {}

    async def main(self) -> None:
        """Train its part until the run is over."""
        torch.manual_seed(0)
        system, index = self.system, self.leader.index
        await learn(
            system.config,
            index,
            self.seat(system.workload(self)),
            Termination(),
            syncer=system.addresses_from(self.spec.relay),
            folder=system.folder,
            token=None,
        )

    def divide(self, config: RunConfig, index: int, workload: Workload, model: Any) -> Cut:
        """See `Seat`."""
        return cut_of(self.spec, self.rank, model)

    async def _learner(
        self, model: torch.nn.Module, syncer: tuple[str, ...], **named: Any
    ) -> Learner:
        self.model = model
        around = RoomSurroundings(self.leader.room, self.rank, self.place, self.system.limits)
        named["sync_ranks"] = self.spec.sync_ranks
        seat = await _seated(model, named, around)
        return await VirtualLearner(self, model, syncer, seat, **named).joined()

    async def _pace(self) -> None:
        spec = self.spec
        seconds = spec.step_seconds * self.leader.slowness
        await asyncio.sleep(seconds * max(0.1, self._steps.normal(1.0, spec.variance)))

    def _gone(self, code: int, *, silent: bool) -> None:
        if self.alive:
            super()._gone(code, silent=silent)
            self.leader.rank_ended(self, code)


class RankedHost(LearnerHost):
    """Rank 0 of a multi-rank learner.

    Attributes:
        others: The other ranks of its present incarnation.
        room: The rendezvous of all its ranks.
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
        """Start a new incarnation with new ranks."""
        self._lives += 1
        system, spec, life = self.system, self.spec, self._lives
        self.room = Room(
            system.network,
            self.choices.fork(f"room {life}"),
            seconds=EXCHANGE_SECONDS * spec.step_seconds,
            late=lambda: system.plans_late,
        )
        self.others = [RankHost(system, self, rank, life) for rank in range(1, spec.ranks)]
        # All ranks must be members before one starts: the room's size is fixed then.
        for host in (self, *self.others):
            self.room.enter(host)
        system.rank_hosts += self.others
        super().begin()
        for other in self.others:
            other.begin()

    def divide(self, config: RunConfig, index: int, workload: Workload, model: Any) -> Cut:
        """See `Seat`."""
        return cut_of(self.spec, 0, model)

    async def _learner(
        self, model: torch.nn.Module, syncer: tuple[str, ...], **named: Any
    ) -> Learner:
        self.model = model
        around = RoomSurroundings(self.room, 0, self.place, self.system.limits)
        named["sync_ranks"] = self.spec.sync_ranks
        seat = await _seated(model, named, around)
        leader = self.participant = VirtualLearner(self, model, syncer, seat, **named)
        loaded = leader.party.boundary.checkpointer.loaded
        self.loaded = None if loaded is None else checkpoint_id(loaded)
        return await leader.joined()

    def bits_of(self, fragment: int, counter: int | None = None) -> str | None:
        """See `LearnerHost`: ``None`` until it has closed; several ranks have no moments.

        Before that, its parameters may lag behind its state machine.
        """
        leader = self.participant
        assert isinstance(leader, VirtualLearner)
        if not leader.party.closed:
            return None
        plan = leader.membership.shared.tensors.plan
        named: dict[str, torch.Tensor] = {}
        for model in (self.model, *(other.model for other in self.others)):
            assert model is not None
            named |= dict(model.named_parameters())
        tensors = [named[spec.name].detach() for spec in plan.layout.tensors]
        return body_digest(gather(plan.fragments[fragment], tensors), codec("fp32"))

    def rank_ended(self, host: RankHost, code: int) -> None:
        """Handle the end of another rank: after a crash, the head ends the rest after a while."""
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
                continue  # after a clean end, the other ranks end by themselves
            if self.choices.chance(OUT_OF_REACH):
                self.clockwork.after(self.choices.log_uniform(0.05, 30.0), other.kill)
            else:
                other.kill()
