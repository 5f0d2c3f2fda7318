"""The processes of a virtual run: those of `launch`, each on its own virtual machine."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.addresses import alternatives
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.launch.on_device import placed
from decoupled_diloco.launch.processes import process_of
from decoupled_diloco.launch.relay_role import RelayRole
from decoupled_diloco.launch.roles import Cut, Seat, evaluate, learn
from decoupled_diloco.launch.shard_role import ShardRole
from decoupled_diloco.launch.termination import INTERRUPTED, Termination
from decoupled_diloco.learner.checkpointer import Written
from decoupled_diloco.learner.exchange import Capture, LearnerTensors
from decoupled_diloco.learner.learner_checkpoint import LearnerCheckpoint
from decoupled_diloco.learner.learner_model import Model
from decoupled_diloco.learner.membership import Membership, Waits
from decoupled_diloco.learner.option_groups import Observability, SyncerConnection
from decoupled_diloco.learner.party import Solo
from decoupled_diloco.merge import body_digest, codec
from decoupled_diloco.participants import Learner, Loss, Observer, Tokens
from decoupled_diloco.protocol.messages import SendBody
from decoupled_diloco.ranks.rank_party import LeaderRank
from decoupled_diloco.ranks.rank_process import RankSeat
from decoupled_diloco.runtime import now
from decoupled_diloco.runtime.disk import Disk
from decoupled_diloco.storage.claims import CLAIMS
from decoupled_diloco.syncer.shard_lease import NO_STANDBY, NoStandby, ShardLease
from decoupled_diloco.syncer.shard_tensors import ShardTensors
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.workloads import Workload
from decoupled_diloco.workloads.rank_split import DataShare
from decoupled_diloco_lab.simulate.host_tape import HostTape
from decoupled_diloco_lab.simulate.run_stage import RunStage
from decoupled_diloco_lab.simulate.spec import LearnerSpec, RelaySpec
from decoupled_diloco_lab.simulate.virtual_disk import SimulatedDisk, UnsyncedDisk, lose_power
from decoupled_diloco_lab.simulate.virtual_network import Connection, Link, Way
from decoupled_diloco_lab.simulate.virtual_runtime import VirtualProcess
from decoupled_diloco_lab.simulate.virtual_transport import Place, VirtualClient, VirtualServer

GOODBYE_SECONDS = 1.0
"""Time for the background of a learner that has ended to close its connections."""


class Host(VirtualProcess):
    """A process that the launcher starts and restarts.

    Attributes:
        code: Exit code of its last incarnation, as `subprocess.Popen.returncode`.
        over: Whether it has ended well, so that it is not started again.
        last_words: The last line of its log.
    """

    def __init__(self, system: RunStage, name: str, link: Link) -> None:
        super().__init__(name, system.clockwork, system.choices.fork(name))
        self.system = system
        self.link = link
        self.place: Place = system.directory.settle(self)
        self.code: int | None = None
        self.over = self.is_silent = False
        self.disk_is_full = self.storage_gone = False
        self.last_words = ""
        self._tapes: list[HostTape] = []

    def begin(self) -> None:
        """Start a new incarnation."""
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
        except DilocoError as error:
            if type(error) is DilocoError:  # not a subclass: an unexpected error of the background
                self.system.broken(self, error)
            self.last_words, code = f"{type(error).__name__}: {error}", error.exit_code
        except Exception as error:
            self.system.broken(self, error)
        await self.finish_background()
        self.over = code == 0
        self._gone(code, silent=False)

    async def main(self) -> None:
        """Run the process."""
        raise NotImplementedError

    async def finish_background(self) -> None:
        """Wait until its other threads have finished."""

    def terminate(self) -> None:
        """Send SIGTERM."""
        assert self.loop is not None
        if not self.loop.signalled(signal.SIGTERM):
            self._gone(-signal.SIGTERM, silent=False)

    def kill(self) -> None:
        """Send SIGKILL. If `is_silent`, its machine dies, too, and no peer receives a reset."""
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
        """End its tapes without the records that it had not yet written."""
        for tape in self._tapes:
            tape.lose()

    def close_tapes(self) -> None:
        """Write and close its tapes."""
        for tape in self._tapes:
            tape.close()

    def open_tape(
        self, folder: Path, process: str, header: Mapping[str, Any], *, file: str | None = None
    ) -> HostTape:
        """See `launch.processes.open_tape`."""
        system = self.system
        tape = HostTape(
            lambda now, event, did: system.record(self, process, now, event, did),
            system.tape_writer(process, header, file or process),
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
        """The coordinator's state machine, if this process hosts it."""
        process = None if self.role is None else self.role.process
        return None if process is None or process.host is None else process.host.machine

    @property
    def shard_lease(self) -> ShardLease | NoStandby:
        """The leadership lease by which it acts for its shard."""
        return NO_STANDBY if self.role is None else self.role.shard_lease

    @property
    def tensors(self) -> ShardTensors:
        """The fragments of the shard."""
        assert self.role is not None
        return self.role.acting.parts.result().worker.tensors

    @property
    def claim(self) -> int:
        """The fencing number of its lease; 0: it has none."""
        return self.shard_lease.number

    def tick(self) -> None:
        """Send its machine a `Tick` before its deadline."""
        process = None if self.role is None else self.role.process
        if self.alive and process is not None and self.loop is not None:
            self.loop.run(process.driver.tick)

    def seconds_of(self, worker: str) -> float:
        """See `VirtualProcess`: the storage of leases may be slow."""
        return self.system.claim_seconds if worker == "claim" else super().seconds_of(worker)

    async def main(self) -> None:
        """Serve until the run is over."""
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


class RelayHost(Host):
    """The process of a relay."""

    def __init__(self, system: RunStage, spec: RelaySpec) -> None:
        rates = (spec.up_bytes_per_second, spec.down_bytes_per_second)
        super().__init__(system, spec.name, Link(spec.latency, 0.0, *rates))
        self.spec = spec
        self.role: RelayRole | None = None

    @property
    def machine(self) -> Any:
        """Its state machine, once it runs."""
        process = None if self.role is None else self.role.process
        return None if process is None else process.machine

    async def main(self) -> None:
        """Serve until the run is over."""
        system = self.system
        address = system.address_of(self)
        self.role = RelayRole(
            system.config,
            self.name,
            upstream=_each_alone(system.addresses_from(self.spec.upstream)),
            folder=system.folder,
            server=lambda on_channel: VirtualServer(self.place, address, on_channel=on_channel),
            client=lambda principal: VirtualClient(self.place, principal=principal),
            open_tape=self.open_tape,
        )
        if not await self.role.run():
            raise KeyboardInterrupt


def _each_alone(addresses: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one for each in addresses for one in alternatives(each))


CheckpointId = tuple[int, int, int | None]
"""Identifies a learner's checkpoint: the epoch (incarnation) of its process, its own steps, and the
number of the run's checkpoint, if any.

Steps alone do not identify it, because a process that starts from an older checkpoint counts them
again.
"""


def checkpoint_id(checkpoint: LearnerCheckpoint) -> CheckpointId:
    """Return the identifier of a checkpoint among those of its learner."""
    return checkpoint.epoch, checkpoint.steps, checkpoint.run_checkpoint


class VirtualLearner(Learner):
    """A `Learner` whose loop is a coroutine, so it joins after its constructor.

    Args:
        host: Its process.
        model: See `Learner`.
        syncer: See `Learner`.
        seat: Its context in a multi-rank learner.
        named: See `Learner`.
    """

    def __init__(
        self,
        host: ParticipantHost,
        model: Model,
        syncer: tuple[str, ...],
        seat: RankSeat | None = None,
        **named: Any,
    ) -> None:
        self._host, self._seat = host, seat
        if seat is None or seat.leads:
            named["observability"] = replace(
                named.get("observability") or Observability(), event_tape=self._tape
            )
            super().__init__(model, SyncerConnection(syncer, host.client), **named)
        else:
            super().__init__(model, syncer, **named)
        if isinstance(host, LearnerHost):
            _watch(host, self.party)

    def _tape(self, header: dict[str, Any]) -> TapeWriter:
        return self._host.open_tape(self._host.system.folder, self.name, header)

    def _seat_of(self, *arguments: Any) -> RankSeat | None:
        return self._seat

    def _enter(self) -> None:
        """Do nothing: `joined` joins the run."""

    async def joined(self) -> VirtualLearner:
        """Join the run and return the learner itself."""
        await self._party.join()
        return self

    @property
    def party(self) -> Solo | LeaderRank:
        """Its party: a single process, or rank 0 of several."""
        assert isinstance(self._party, Solo | LeaderRank)
        return self._party

    @property
    def membership(self) -> Membership:
        """Its membership of the run."""
        return self.party.membership

    async def _take_step(self, loss: Loss, tokens: Tokens | None) -> bool:
        """See `Learner`."""
        if isinstance(self._host, LearnerHost):
            self._host.stepped(None if loss is None else float(loss))
        return await super()._take_step(loss, tokens)


def _watch(host: LearnerHost, watched: Solo | LeaderRank) -> None:
    """Report captures, checkpoints, and the wait at the end to the system, by wrapping methods."""
    bodies = watched.membership.background.bodies
    boundary, ending = watched.boundary, watched.ending
    send_body, keep, finish = bodies.send_body, boundary.keep, ending.finish

    async def sends(effect: SendBody, capture: Capture) -> None:
        host.system.on_capture(host, effect, capture)
        await send_body(effect, capture)

    def keeps(run_checkpoint: int | None = None) -> Future[Written] | None:
        outline = boundary.outline(run_checkpoint)
        if outline is not None:
            taken = checkpoint_id(outline)
            host.system.on_checkpoint(host.name, taken, boundary.untrained[0])
        return keep(run_checkpoint)

    async def finishes(party: Waits) -> None:
        began = now()
        await finish(party)
        host.waited_seconds = now() - began

    if isinstance(watched, Solo):
        bodies.send_body = sends  # type: ignore[method-assign]
    boundary.keep = keeps  # type: ignore[method-assign]
    ending.finish = finishes  # type: ignore[method-assign]


class VirtualObserver(Observer):
    """An `Observer` whose loop is a coroutine, so it joins after its constructor."""

    def __init__(
        self, host: EvaluatorHost, model: torch.nn.Module, syncer: tuple[str, ...], **named: Any
    ) -> None:
        def tape(header: dict[str, Any]) -> HostTape:
            record = partial(host.system.record, host, host.name)
            return HostTape(record, None, 1.0)

        super().__init__(model, SyncerConnection(syncer, host.client), event_tape=tape, **named)

    def _enter(self) -> None:
        """Do nothing: `joined` joins the run."""

    async def joined(self) -> VirtualObserver:
        """Join the run and return the observer itself."""
        await self._join()
        return self

    @property
    def membership(self) -> Membership:
        """Its membership of the run."""
        return self._membership


class ParticipantHost(Host):
    """A process that takes part in a run: a learner or an evaluator."""

    def __init__(self, system: RunStage, spec: LearnerSpec) -> None:
        super().__init__(system, spec.name, system.link_of(spec))
        self.spec = spec
        self.participant: VirtualLearner | VirtualObserver | None = None

    @property
    def machine(self) -> Any:
        """Its state machine, once it has joined the run."""
        shared = None if self.participant is None else self.participant.membership.background.shared
        return None if shared is None else shared.machine

    @property
    def tensors(self) -> LearnerTensors:
        """The fragments of the participant."""
        assert self.participant is not None
        return self.participant.membership.shared.tensors

    @property
    def links(self) -> Mapping[int, Any]:
        """Its connections to the shards."""
        return (
            {}
            if self.participant is None
            else self.participant.membership.background.links.channels
        )

    def client(self) -> VirtualClient:
        """Create a client that dials the syncer."""
        return VirtualClient(self.place, limits=self.system.limits)

    def seat(self, workload: Workload) -> Seat:
        """Return the process context of its role."""
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
        """Wait for the duration of a step: none by default."""

    async def finish_background(self) -> None:
        """See `Host`."""
        if self.participant is not None:
            await asyncio.sleep(GOODBYE_SECONDS)

    def slow_link(self, factor: float, way: Way) -> None:
        """Divide the rate of its link in one direction by a factor."""
        spec = self.spec
        rate = spec.up_bytes_per_second if way == "up" else spec.down_bytes_per_second
        if rate < float("inf"):
            self.link.stretch(way, rate / factor, self.clockwork)

    def stall(self) -> None:
        """Stall its training loop, if it has one."""

    def end_stall(self) -> None:
        """End the stall of its training loop, if it has one."""


class EvaluatorHost(ParticipantHost):
    """The process of an evaluator."""

    async def main(self) -> None:
        """Follow the run until it is over."""
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
    """One learner's process: its training loop and its background.

    Attributes:
        slowness: Factor by which a step takes longer.
        stalled: Whether its loop is stalled in its present step.
        stalled_until: End of its last stall.
        loaded: The checkpoint from which its present process started, if any.
        waited_seconds: How long it waited for the end by its own clock; ``None`` before.
        losses: The losses of all its steps, over all incarnations.
        model: The model of its present incarnation.
    """

    def __init__(self, system: RunStage, spec: LearnerSpec) -> None:
        super().__init__(system, spec)
        self.index = int(spec.name.rpartition("-")[2])
        self.slowness = 1.0
        self.stalled = False
        self.stalled_until = float("-inf")
        self.loaded: CheckpointId | None = None
        self.waited_seconds: float | None = None
        self.losses: list[float] = []
        self.termination = Termination()
        self.model: torch.nn.Module | None = None
        self._unstalled = asyncio.Event()

    def rank(self, number: int) -> Host | None:
        """Return the process of a rank, or ``None``; rank 0 is this process."""
        return None if number else self

    def bits_of(self, fragment: int, counter: int | None = None) -> str | None:
        """Return a fragment's digest, or ``None`` if its parameters lag behind the machine.

        Args:
            fragment: Index of the fragment.
            counter: The counter of the version that it holds. If this version merges no moments,
                those of the held copy take the place of the optimizer's, which continue.
        """
        tensors = self.tensors
        values = tensors.store.snapshot(tensors.plan.fragments[fragment]).values()
        if counter is not None and not tensors.plan.sends_moments(counter - 1):
            held = tensors.published[fragment]
            assert held is not None, f"fragment {fragment} has version {counter}, but no copy"
            start = tensors.plan.moments_start(fragment)
            values[start:] = held[start:]
        return body_digest(values, codec("fp32"))

    def stall(self) -> None:
        """See `ParticipantHost`."""
        self.stalled = True

    def end_stall(self) -> None:
        """See `ParticipantHost`."""
        if self.stalled:
            self.stalled, self.stalled_until = False, self.clockwork.now
            self._unstalled.set()

    def terminate(self) -> None:
        """See `Host`: a learner that has not begun to train ends at once."""
        assert self.loop is not None
        if not self.loop.run(self.termination.request_stop):
            self._gone(INTERRUPTED, silent=False)

    async def main(self) -> None:
        """Train until the run is over or the learner is asked to stop."""
        self.participant, self.waited_seconds = None, None
        self.termination, self.stalled = Termination(), False
        self._steps = self.choices.fork(f"steps of life {self.life}")
        torch.manual_seed(0)
        system = self.system
        await learn(
            system.config,
            self.index,
            self.seat(system.workload(self)),
            self.termination,
            syncer=system.addresses_from(self.spec.relay),
            folder=system.folder,
            token=None,
        )

    async def _learner(self, *arguments: Any, **named: Any) -> Learner:
        learner = self.participant = VirtualLearner(self, *arguments, **named)
        self.model = arguments[0]
        loaded = learner.party.boundary.checkpointer.loaded
        self.loaded = None if loaded is None else checkpoint_id(loaded)
        return await learner.joined()

    async def _pace(self) -> None:
        spec = self.spec
        seconds = spec.step_seconds * self.slowness
        if spec.variance:
            seconds *= max(0.1, self._steps.normal(1.0, spec.variance))
        if self._steps.chance(self.system.stalls):
            self.stall()
            seconds_stalled = spec.step_seconds * self._steps.log_uniform(3, 400)
            self.loop.at(self.clockwork.now + seconds_stalled, False, self.end_stall)  # type: ignore[union-attr]
        await asyncio.sleep(seconds)
        # A loop, because another stall may begin between the event and this coroutine's next turn.
        while self.stalled:
            self._unstalled = asyncio.Event()
            await self._unstalled.wait()

    def stepped(self, loss: float | None) -> None:
        """Handle the end of a step, before its exchange."""
        if loss is not None:
            self.losses.append(loss)
        self.system.on_step(self)
