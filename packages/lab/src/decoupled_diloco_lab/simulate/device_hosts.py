"""Devices in virtual time: learners that are disconnected most of the time (rule 23).

A `DeviceHost` is the process of one device. It uses the real `Device` and, during a visit, the real
`Learner`, over a virtual link. Between its visits it has no connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.device import Device
from decoupled_diloco.errors import TransportError
from decoupled_diloco.learner.option_groups import Checkpointing, SyncerConnection, Timeouts
from decoupled_diloco.workloads import Batch, Workload
from decoupled_diloco_lab.simulate.hosts import GOODBYE_SECONDS, LearnerHost, VirtualLearner
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System

PATIENCE_SECONDS = 1e9
"""How long a device waits for its place."""


@dataclass(frozen=True)
class Habits:
    """When a device is present, and what it does then.

    Attributes:
        steps: Inner steps per visit, at least 1.
        online: The share of time that it is connected, on average, greater than 0 to 1. After a
            visit, which includes the wait for a place, it is away for an exponential time of the
            mean that results in this share.
        alone: Whether it trains while it is away, and contributes at its next visit.
    """

    steps: int = 10
    online: float = 1.0
    alone: bool = False

    def away_seconds(self, present_seconds: float) -> float:
        """Return the mean time away after a visit of this length."""
        return present_seconds * (1 / self.online - 1)


@dataclass
class DeviceCounts:
    """What one device has done: its visits, and for how long it was present."""

    visits: int = 0
    present_seconds: float = 0.0


class VirtualDevice(Device):
    """A `Device` whose visits are coroutines."""

    def __init__(self, host: LearnerHost, model: torch.nn.Module, **named: Any) -> None:
        self._host = host
        super().__init__(model, SyncerConnection(host.system.addresses, host.client), **named)

    async def arrive(self) -> VirtualLearner:
        """Begin a visit, and return the learner."""
        self._begin_visit()
        addresses = self._connection.addresses
        learner = VirtualLearner(self._host, self._model, addresses, **self._arguments())
        self._host.participant = learner
        await learner.joined()
        self._joined(learner)
        return learner

    async def leave(self, learner: VirtualLearner) -> None:
        """End a visit: send what was trained, and leave."""
        await learner.__aexit__(None, None, None)
        await asyncio.sleep(GOODBYE_SECONDS)
        self._left(learner)


class DeviceSystem(System):
    """A virtual run whose learners are devices.

    Args:
        config: The run's settings, with ``[sync.devices]``.
        learners: The links and speeds of the devices; observers are allowed.
        habits: Returns when a device is present.
        folder: The run folder.
        named: See `System`.
    """

    def __init__(
        self,
        config: RunConfig,
        learners: Iterable[LearnerSpec],
        folder: Path,
        *,
        habits: Callable[[LearnerSpec], Habits],
        **named: Any,
    ) -> None:
        self._habits = habits
        super().__init__(config, learners, folder, **named)

    def _make_hosts(self, learners: Iterable[LearnerSpec]) -> None:
        specs = list(learners)
        super()._make_hosts(specs)
        for spec in specs:
            if spec.role == "learner":
                device = DeviceHost(self, spec, self._habits(spec))
                self.participants[spec.name] = self.learners[spec.name] = device

    @property
    def devices(self) -> list[DeviceHost]:
        """The devices, in the order of their specs."""
        return [host for host in self.learners.values() if isinstance(host, DeviceHost)]


class DeviceHost(LearnerHost):
    """One device's process; between visits, it has no connection.

    Attributes:
        habits: When it is present.
        counts: What it has done.
    """

    system: DeviceSystem

    def __init__(self, system: DeviceSystem, spec: LearnerSpec, habits: Habits) -> None:
        super().__init__(system, spec)
        self.habits = habits
        self.counts = DeviceCounts()

    async def main(self) -> None:
        """Visit the run again and again until it is over."""
        self.participant, self.waited_seconds = None, None
        self._steps = self.choices.fork(f"steps of life {self.life}")
        rng = self.choices.fork(f"habits of life {self.life}")
        torch.manual_seed(0)
        workload = self.system.workload(self)
        model = workload.model()
        device = VirtualDevice(
            self,
            model,
            name=self.name,
            checkpoint=Checkpointing(self.system.folder / "learners", 0.0),
            optimizer=workload.optimizer(model),
            timeouts=Timeouts(join=PATIENCE_SECONDS, flush=600.0),
        )
        training = _Training(self, workload, model, device)
        if self.habits.online < 1.0:
            # So that not all devices come at once at the start, as many at any time.
            usual = self.habits.steps * self.spec.step_seconds
            await asyncio.sleep(rng.exponential(self.habits.away_seconds(usual)))
        while not self.system.finished:
            began = self.clockwork.now
            try:
                learner = await device.arrive()
            except TransportError:  # the run is ending
                await asyncio.sleep(GOODBYE_SECONDS)
                continue
            if not self.habits.alone:
                await training.run(learner)
            await device.leave(learner)
            present = self.clockwork.now - began
            self.counts.visits += 1
            self.counts.present_seconds += present
            if learner.budget_reached:
                return
            if self.habits.alone:
                await training.run(None)
                device.save()
            if self.habits.online < 1.0:
                await asyncio.sleep(rng.exponential(self.habits.away_seconds(present)))


class _Training:
    def __init__(
        self, host: DeviceHost, workload: Workload, model: torch.nn.Module, device: Device
    ) -> None:
        self._host, self._workload, self._model = host, workload, model
        self._device, self._optimizer = device, device._optimizer
        config = host.system.config
        self._batches: Iterator[Batch] = workload.batches(host.index, config.run.learners)

    async def run(self, learner: VirtualLearner | None) -> None:
        """Train for one visit; ``None``: train alone."""
        for _ in range(self._host.habits.steps):
            await self._host._pace()
            batch = next(self._batches)
            loss = self._workload.loss(self._model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()  # type: ignore[union-attr]
            self._optimizer.zero_grad()  # type: ignore[union-attr]
            tokens = self._workload.tokens(batch)
            if learner is None:
                self._device.step(tokens=tokens)
            elif not await learner._take_step(loss.detach(), tokens):
                return
