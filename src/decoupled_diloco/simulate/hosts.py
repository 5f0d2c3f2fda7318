"""The processes of a virtual run: what `launch` runs on a real machine, each on one of its own."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import Error
from decoupled_diloco.launch.on_device import placed
from decoupled_diloco.launch.processes import process_of
from decoupled_diloco.launch.roles import Cut, Seat, evaluate, learn
from decoupled_diloco.launch.shard_role import ShardRole
from decoupled_diloco.launch.termination import INTERRUPTED, Termination
from decoupled_diloco.learner.body_exchange import BodyExchange
from decoupled_diloco.learner.checkpoint import LearnerCheckpoint
from decoupled_diloco.learner.checkpointer import Written
from decoupled_diloco.learner.exchange import Capture, LearnerTensors
from decoupled_diloco.learner.learner import Learner
from decoupled_diloco.learner.observer import Observer
from decoupled_diloco.merge import body_digest, codec
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.protocol.effects import SendBody
from decoupled_diloco.runtime import now
from decoupled_diloco.runtime.disk import Disk
from decoupled_diloco.simulate.disk import SimulatedDisk, UnsyncedDisk, lose_power
from decoupled_diloco.simulate.host_tape import HostTape
from decoupled_diloco.simulate.network import Connection, Link, Way
from decoupled_diloco.simulate.run_stage import RunStage
from decoupled_diloco.simulate.runtime import VirtualProcess
from decoupled_diloco.simulate.spec import LearnerSpec
from decoupled_diloco.simulate.transport import Place, VirtualClient, VirtualServer
from decoupled_diloco.storage.claims import CLAIMS
from decoupled_diloco.syncer.fragments import ShardTensors
from decoupled_diloco.syncer.shard_lease import NO_STANDBY, NoStandby, ShardLease
from decoupled_diloco.workloads import Workload
from decoupled_diloco.workloads.divided import DataShare

GOODBYE_SECONDS = 1.0
"""How long the background of a learner that has ended may take to say goodbye."""


class Host(VirtualProcess):
    """A process that the launcher starts, and starts again.

    Attributes:
        code: How its last life ended, as `subprocess.Popen.returncode`.
        over: It has ended well, and is not started again.
        last_words: What its log would end with.
    """

    def __init__(self, system: RunStage, name: str, link: Link) -> None:
        super().__init__(name, system.clockwork, system.choices.fork(name))
        self.system = system
        self.link = link
        self.place: Place = system.streets.settle(self)
        self.code: int | None = None
        self.over = self.is_silent = False
        self.disk_is_full = self.storage_gone = False
        self.last_words = ""
        self._tapes: list[HostTape] = []

    def begin(self) -> None:
        """A new life."""
        assert not self.alive
        self._tapes.clear()
        self.boot(self._live, self._disk())
        assert self.loop is not None

    def _disk(self) -> Disk:
        if self.system.power is None:
            return UnsyncedDisk(self._trouble)
        return SimulatedDisk(self.system.folder, trouble=self._trouble)

    def _trouble(self, path: Path, needs_room: bool) -> None:
        if CLAIMS in path.parts:
            gone = self.storage_gone or self.choices.chance(self.system.storage_fails)
            if gone:
                code = self.choices.pick([errno.EIO, errno.EACCES, errno.ESTALE])
                raise OSError(code, os.strerror(code), str(path))
        elif needs_room and self.disk_is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    async def _live(self) -> None:
        code = 0
        try:
            await self.main()
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Error as error:
            if type(error) is Error:  # what the background tells of itself
                self.system.broken(self, error)
            self.last_words, code = f"{type(error).__name__}: {error}", error.exit_code
        except Exception as error:
            self.system.broken(self, error)
        await self.farewell()
        self.over = code == 0
        self._gone(code, silent=False)

    async def main(self) -> None:
        """What the process does."""
        raise NotImplementedError

    async def farewell(self) -> None:
        """What its other threads still do."""

    def terminate(self) -> None:
        """SIGTERM."""
        assert self.loop is not None
        if not self.loop.signalled(signal.SIGTERM):
            self._gone(-signal.SIGTERM, silent=False)

    def kill(self) -> None:
        """SIGKILL; or its machine is gone, and nobody is told."""
        self._gone(-signal.SIGKILL, silent=self.is_silent)

    def _gone(self, code: int, *, silent: bool) -> None:
        if not self.alive:
            return
        self.code = code
        self.crash()
        if code < 0:
            self.lose_tapes()
        assert isinstance(self.disk, UnsyncedDisk | SimulatedDisk)
        self.disk.close()
        if silent and self.system.power is not None and isinstance(self.disk, SimulatedDisk):
            lose_power(self.disk, self.system.power)
        self.place.forget()
        self.system.network.crashed(self, silent=silent)
        requests, self.place.requests = self.place.requests, {}
        for fail in requests.values():
            fail("the process is gone")
        self.system.ended(self)

    def lose_tapes(self) -> None:
        """Its tapes end as they are."""
        for tape in self._tapes:
            tape.lose()

    def close_tapes(self) -> None:
        """Its tapes are written as far as they go."""
        for tape in self._tapes:
            tape.close()

    def open_tape(
        self, folder: Path, who: str, header: Mapping[str, Any], *, file: str | None = None
    ) -> HostTape:
        """See `launch.processes.open_tape`."""
        system = self.system
        tape = HostTape(
            lambda now, event, did: system.record(self, who, now, event, did),
            system.tape_writer(who, header, file or who),
            system.bytes_factor,
        )
        self._tapes.append(tape)
        return tape

    def received(self, connection: Connection, message: Any) -> None:
        """See `Endpoint`."""
        assert self.loop is not None
        self.loop.run(self.place.received, connection, message)

    def lost(self, connection: Connection) -> None:
        """See `Endpoint`."""
        assert self.loop is not None
        self.loop.run(self.place.lost, connection)


class ShardHost(Host):
    """One process of a shard."""

    def __init__(self, system: RunStage, shard: int, *, standby: bool = False) -> None:
        super().__init__(system, process_of(shard, standby=standby), system.link_of_shards)
        self.shard = shard
        self.is_standby = standby
        self.role: ShardRole | None = None

    @property
    def machine(self) -> Any:
        """The shard's state machine, once it acts for its shard."""
        process = None if self.role is None else self.role.process
        return None if process is None else process.machine

    @property
    def coordinator(self) -> Any:
        """The coordinator's state machine, if it is here."""
        process = None if self.role is None else self.role.process
        return None if process is None or process.host is None else process.host.machine

    @property
    def shard_lease(self) -> ShardLease | NoStandby:
        """That by which it acts for its shard."""
        return NO_STANDBY if self.role is None else self.role.shard_lease

    @property
    def tensors(self) -> ShardTensors:
        """The fragments of the shard."""
        assert self.role is not None
        merging = self.role.acting._merging
        assert merging is not None, "the shard knows the model's layout"
        return merging.tensors

    @property
    def claim(self) -> int:
        """The number of its claim; 0: it has none."""
        return self.shard_lease.number

    def tick(self) -> None:
        """Has its machine look at the clock, too early."""
        process = None if self.role is None else self.role.process
        if self.alive and process is not None and self.loop is not None:
            self.loop.run(process._wake)

    def seconds_of(self, worker: str) -> float:
        """See `VirtualProcess`: the storage of claims may be slow."""
        return self.system.claim_seconds if worker == "claim" else super().seconds_of(worker)

    async def main(self) -> None:
        """Serves until the run is over."""
        system = self.system
        address = system.address_of(self)
        self.role = ShardRole(
            system.config,
            self.shard,
            addresses=system.addresses,
            folder=system.folder,
            standby=self.is_standby,
            server=lambda on_channel: VirtualServer(self.place, address, on_channel=on_channel),
            client=lambda: VirtualClient(self.place),
            open_tape=self.open_tape,
        )
        if not await self.role.run():
            raise KeyboardInterrupt


class WatchedExchange(BodyExchange):
    """A learner's bodies, of which its system is told."""

    def __init__(self, host: LearnerHost, **surroundings: Any) -> None:
        super().__init__(**surroundings)
        self._host = host

    async def send_body(self, effect: SendBody, capture: Capture) -> None:
        """See `BodyExchange`."""
        self._host.system.on_capture(self._host, effect, capture)
        await super().send_body(effect, capture)


CheckpointId = tuple[int, int, int | None]
"""A learner's checkpoint: the epoch of its process, its own steps, the run's checkpoint if any.

Steps alone do not identify it: a process that starts from an older checkpoint counts them again.
"""


def checkpoint_id(checkpoint: LearnerCheckpoint) -> CheckpointId:
    """What distinguishes a checkpoint from all others of its learner."""
    return checkpoint.epoch, checkpoint.steps, checkpoint.run_checkpoint


class VirtualLearner(Learner):
    """A `Learner` whose loop is a coroutine."""

    def __init__(self, host: LearnerHost, *arguments: Any, **named: Any) -> None:
        self.host = host
        self._exchange = partial(WatchedExchange, host)
        super().__init__(*arguments, **named, client=host.client)

    def _enter(self) -> None:
        """It joins in its own time."""

    def _tape_maker(self, tape: Any) -> Callable[[dict[str, Any]], TapeWriter]:
        return lambda header: self.host.open_tape(self.host.system.folder, self.name, header)

    async def joined(self) -> VirtualLearner:
        """Itself, once the run has let it in."""
        await self._join()
        return self

    def _keep(self, run_checkpoint: int | None) -> Future[Written] | None:
        outline = self._outline(run_checkpoint)
        if outline is not None:
            taken = checkpoint_id(outline)
            self.host.system.on_checkpoint(self.host.name, taken, self._not_trained)
        return super()._keep(run_checkpoint)

    @property
    def _not_trained(self) -> int:
        """Steps that the machine was told of, and that will not come."""
        return 0

    async def _take_step(self, tokens: int, loss: float | None) -> bool:
        self.host.stepped(loss)
        return await super()._take_step(tokens, loss)

    async def _finish(self) -> None:
        began = now()
        await super()._finish()
        self.host.waited_seconds = now() - began


class VirtualObserver(Observer):
    """An `Observer` whose loop is a coroutine."""

    def __init__(self, host: EvaluatorHost, *arguments: Any, **named: Any) -> None:
        self.host = host
        super().__init__(*arguments, **named, client=host.client)

    def _enter(self) -> None:
        """It joins in its own time."""

    def _tape_maker(self, tape: Any) -> Callable[[dict[str, Any]], TapeWriter]:
        system, host = self.host.system, self.host
        return lambda header: HostTape(
            lambda now, event, did: system.record(host, host.name, now, event, did), None, 1.0
        )

    async def joined(self) -> VirtualObserver:
        """Itself, once the run has let it in."""
        await self._join()
        return self


class ParticipantHost(Host):
    """A process that takes part in a run: a learner's, or an evaluator's."""

    def __init__(self, system: RunStage, spec: LearnerSpec) -> None:
        super().__init__(system, spec.name, system.link_of(spec))
        self.spec = spec
        self.participant: VirtualLearner | VirtualObserver | None = None

    @property
    def machine(self) -> Any:
        """The machine that takes part, once the run has let it in."""
        shared = None if self.participant is None else self.participant._background.shared
        return None if shared is None else shared.machine

    @property
    def tensors(self) -> LearnerTensors:
        """The fragments of who takes part."""
        assert self.participant is not None
        return self.participant._shared.tensors

    @property
    def links(self) -> Mapping[int, Any]:
        """The shards that it is connected to."""
        return {} if self.participant is None else self.participant._background.links.channels

    def client(self) -> VirtualClient:
        """What dials the syncer."""
        return VirtualClient(self.place, limits=self.system.limits)

    def seat(self, workload: Workload) -> Seat:
        """Where its role takes part from."""
        return Seat(
            self._learner,
            self._observer,
            lambda config: workload,
            self.divide,
            self._pace,
            self.open_tape,
            lambda workload: placed(workload.model(), self.system.device),
        )

    def divide(self, config: RunConfig, index: int, workload: Workload, model: Any) -> Cut:
        """See `Seat`."""
        return Cut(model, 1, DataShare())

    async def _learner(self, *arguments: Any, **named: Any) -> Learner:
        raise NotImplementedError

    async def _observer(self, *arguments: Any, **named: Any) -> Observer:
        raise NotImplementedError

    async def _pace(self) -> None:
        """What it does takes no time."""

    async def farewell(self) -> None:
        """See `Host`."""
        if self.participant is not None:
            await asyncio.sleep(GOODBYE_SECONDS)

    def choke(self, factor: float, way: Way) -> None:
        """Its link carries so much less than it should."""
        spec = self.spec
        rate = spec.up_bytes_per_second if way == "up" else spec.down_bytes_per_second
        if rate < float("inf"):
            self.link.stretch(way, rate / factor, self.clockwork)

    def stand_still(self) -> None:
        """Its training loop stands; who has none does not mind."""

    def step_again(self) -> None:
        """Its training loop goes on."""


class EvaluatorHost(ParticipantHost):
    """The process of an evaluator."""

    async def main(self) -> None:
        """Follows the run until it is over."""
        self.participant = None
        system = self.system
        await evaluate(
            system.config,
            self.seat(system.workload(self)),
            syncer=system.addresses,
            folder=system.folder,
            token=None,
        )

    async def _observer(self, *arguments: Any, **named: Any) -> Observer:
        observer = self.participant = VirtualObserver(self, *arguments, **named)
        return await observer.joined()


class LearnerHost(ParticipantHost):
    """One learner's process: its training loop, and the background beside it.

    Attributes:
        slowness: How many times longer a step takes.
        stands: Its loop stands in its present step.
        stood_until: When it did last.
        stepping: It is within a step.
        loaded: The checkpoint from which its present process started, if any.
        waited_seconds: How long it has waited for the end, by its own clock, once it has.
        losses: Of its steps so far, those of all lives.
        model: What its present life trains.
    """

    def __init__(self, system: RunStage, spec: LearnerSpec) -> None:
        super().__init__(system, spec)
        self.index = int(spec.name.rpartition("-")[2])
        self.slowness = 1.0
        self.stands = False
        self.stood_until = float("-inf")
        self.loaded: CheckpointId | None = None
        self.waited_seconds: float | None = None
        self.losses: list[float] = []
        self.termination = Termination()
        self.model: torch.nn.Module | None = None
        self._goes = asyncio.Event()

    def rank(self, number: int) -> Host | None:
        """One of its processes that is there; 0: this one."""
        return None if number else self

    def bits_of(self, fragment: int) -> str | None:
        """The digest of a fragment's parameters, if they are those of its machine's boundary."""
        tensors = self.tensors
        values = tensors.store.snapshot(tensors.plan.fragments[fragment]).values()
        return body_digest(values, codec("fp32"))

    def stand_still(self) -> None:
        """See `ParticipantHost`."""
        self.stands = True

    def step_again(self) -> None:
        """See `ParticipantHost`."""
        if self.stands:
            self.stands, self.stood_until = False, self.clockwork.now
            self._goes.set()

    def terminate(self) -> None:
        """See `Host`: whoever has not begun to train goes at once."""
        assert self.loop is not None
        if not self.loop.run(self.termination.told):
            self._gone(INTERRUPTED, silent=False)

    async def main(self) -> None:
        """Trains until the run is over, or it is told to go."""
        self.participant, self.waited_seconds = None, None
        self.termination, self.stands = Termination(), False
        self._steps = self.choices.fork(f"steps of life {self.life}")
        torch.manual_seed(0)
        system = self.system
        await learn(
            system.config,
            self.index,
            self.seat(system.workload(self)),
            self.termination,
            syncer=system.addresses,
            folder=system.folder,
            token=None,
        )

    async def _learner(self, *arguments: Any, **named: Any) -> Learner:
        learner = self.participant = VirtualLearner(self, *arguments, **named)
        self.model = arguments[0]
        loaded = learner._checkpointer.loaded
        self.loaded = None if loaded is None else checkpoint_id(loaded)
        return await learner.joined()

    async def _pace(self) -> None:
        spec = self.spec
        seconds = spec.step_seconds * self.slowness
        if spec.variance:
            seconds *= max(0.1, self._steps.normal(1.0, spec.variance))
        if self._steps.chance(self.system.stalls):
            self.stand_still()
            stall = spec.step_seconds * self._steps.log_uniform(3, 400)
            self.loop.at(self.clockwork.now + stall, False, self.step_again)  # type: ignore[union-attr]
        await asyncio.sleep(seconds)
        while self.stands:
            self._goes = asyncio.Event()
            await self._goes.wait()

    def stepped(self, loss: float | None) -> None:
        """A step is finished, but for the exchange."""
        if loss is not None:
            self.losses.append(loss)
        self.system.on_step(self)
