"""The processes of a virtual run: the product's own `Shard` and `Learner`, each in its own host."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import nn

from decoupled_diloco.errors import Error
from decoupled_diloco.learner.checkpointer import Written
from decoupled_diloco.learner.learner import Learner
from decoupled_diloco.merge import digest
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.runtime.disk import Disk
from decoupled_diloco.simulate.disk import SimulatedDisk, lose_power
from decoupled_diloco.simulate.learner_process import LearnerSpec
from decoupled_diloco.simulate.network import Connection, Link, Way
from decoupled_diloco.simulate.runtime import VirtualProcess
from decoupled_diloco.simulate.transport import Place, VirtualClient, VirtualServer
from decoupled_diloco.syncer.shard import Shard

if TYPE_CHECKING:
    from decoupled_diloco.simulate.system import System

FAILED_SECONDS = 1.0
"""How long the launcher waits before it starts a process that has failed again."""


class UnsyncedDisk(Disk):
    """The machine's own; nobody waits for it: a killed process loses nothing that is written.

    Args:
        is_full: Whether there is no room for anything more.
    """

    def __init__(self, is_full: Callable[[], bool]) -> None:
        self._is_full = is_full
        self._handles: list[BinaryIO] = []

    def close(self) -> None:
        """Closes every file, as the end of a process does."""
        for file in self._handles:
            file.close()
        self._handles.clear()

    def open(self, path: Path) -> BinaryIO:
        """See `Disk`."""
        self._take_room(path)
        file = super().open(path)
        self._handles.append(file)
        return file

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        """See `Disk`."""
        self._take_room(Path(file.name))
        super().write(file, content)

    def fill(self, path: Path, fill: Callable[[Path], None]) -> None:
        """See `Disk`."""
        self._take_room(path)
        super().fill(path, fill)

    def put(self, path: Path, content: bytes | memoryview) -> None:
        """See `Disk`."""
        self._take_room(path)
        super().put(path, content)

    def _take_room(self, path: Path) -> None:
        if self._is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def sync_file(self, file: Any) -> None:
        """At once."""

    def sync(self, path: Path) -> None:
        """At once."""


class WatchedTape(TapeWriter):
    """Tells the world of every event and its effects, and writes no file."""

    def __init__(self, tell: Callable[[float, Any, Sequence[Any]], None]) -> None:
        self._tell_world = tell
        self._event: Any = None
        self.dropped = 0

    def event(self, now: float, event: Any) -> int:
        """See `TapeWriter`."""
        self._event = event
        return 0

    def effects(self, now: float, cause_seq: int, effects: Sequence[Any]) -> None:
        """See `TapeWriter`."""
        self._tell_world(now, self._event, effects)

    def sample(self, now: float, sample: Any) -> None:
        """Nobody looks."""

    def make_text(self, records: int) -> bool:
        """There is none."""
        return False

    def flush(self) -> None:
        """There is nothing."""

    def close(self) -> None:
        """There is nothing."""


class Host(VirtualProcess):
    """A process that the launcher would start, and start again."""

    def __init__(self, system: System, name: str, link: Link) -> None:
        super().__init__(name, system.clockwork, system.choices.fork(name))
        self.system = system
        self.link = link
        self.place: Place = system.streets.settle(self)
        self.over = False
        self.disk_is_full = False
        self.failures: list[str] = []

    # ---- lives

    def begin(self) -> None:
        """A new life."""
        if not self.alive and not self.over:
            self.boot(self._live, self._disk())

    def _disk(self) -> Disk:
        if self.system.power is None:
            return UnsyncedDisk(lambda: self.disk_is_full)
        return SimulatedDisk(self.system.folder, full=lambda _: self.disk_is_full)

    async def _live(self) -> None:
        try:
            await self.main()
            self.over = True
        except Error as error:
            if type(error) is Error:  # what the background tells of itself
                self.system.broken(self, error)
            self.failures.append(f"{type(error).__name__}: {error}")
            self.clockwork.after(FAILED_SECONDS, self.begin)
        except Exception as error:
            self.system.broken(self, error)
        self.end()

    async def main(self) -> None:
        """What the process does."""
        raise NotImplementedError

    def end(self, *, silent: bool = False) -> None:
        """The process is gone; ``silent``: with its machine, so that nobody is told."""
        if self.alive:
            self.crash()
            assert isinstance(self.disk, UnsyncedDisk | SimulatedDisk)
            self.disk.close()
            if silent and self.system.power is not None and isinstance(self.disk, SimulatedDisk):
                lose_power(self.disk, self.system.power)
            self.place.forget()
            self.system.network.crashed(self, silent=silent)
            requests, self.place.requests = self.place.requests, {}
            for fail in requests.values():
                fail("the process is gone")

    # ---- the network

    def received(self, connection: Connection, message: Any) -> None:
        """See `Endpoint`."""
        assert self.loop is not None
        self.loop.run(self.place.received, connection, message)

    def lost(self, connection: Connection) -> None:
        """See `Endpoint`."""
        assert self.loop is not None
        self.loop.run(self.place.lost, connection)


class ShardHost(Host):
    """One shard's process."""

    def __init__(self, system: System, shard: int) -> None:
        super().__init__(system, f"shard-{shard}", Link())
        self.shard = shard
        self.process: Shard | None = None

    @property
    def machine(self) -> Any:
        """The shard's state machine."""
        return None if self.process is None else self.process.machine

    async def main(self) -> None:
        """Serves until the run is over."""
        system, shard = self.system, self.shard

        def tape_of(who: str) -> WatchedTape:
            return WatchedTape(lambda now, event, effects: system.record(who, now, event, effects))

        def coordinator_tape(header: Mapping[str, Any]) -> TapeWriter:
            return tape_of("coordinator")

        self.process = Shard(
            system.config,
            shard,
            addresses=system.addresses,
            folder=system.folder,
            server=lambda on_channel: VirtualServer(
                self.place, system.addresses[shard], on_channel=on_channel
            ),
            client=VirtualClient(self.place),
            tape=tape_of(self.name),
            coordinator_tape=coordinator_tape if shard == 0 else None,
        )
        await self.process.run()
        assert self.process.finished, "nobody has told it to stop"


class Vectors(nn.Module):
    """A model of one vector for each fragment."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])


class VirtualLearner(Learner):
    """A `Learner` whose loop is a coroutine."""

    on_checkpoint: Callable[[int], None] = staticmethod(lambda steps: None)

    def _enter(self) -> None:
        """It joins in its own time."""

    def _tape_maker(self, tape: Any) -> Callable[[dict[str, Any]], TapeWriter]:
        return lambda header: tape

    def checkpoint(self, cut: int | None = None) -> Future[Written] | None:
        """See `Learner`."""
        self.on_checkpoint(self.steps)
        return super().checkpoint(cut)

    join = Learner._join
    take_step = Learner._step
    end = Learner._close


class LearnerHost(Host):
    """One learner's process: its training loop, and the background beside it."""

    def __init__(self, system: System, spec: LearnerSpec) -> None:
        link = Link(spec.latency, spec.jitter, spec.up_bytes_per_second, spec.down_bytes_per_second)
        super().__init__(system, spec.name, link)
        self.spec = spec
        self.slowness = 1.0
        self.stands = False
        self.goes = asyncio.Event()
        self.loaded_steps = 0
        self.waited_seconds: float | None = None
        self.learner: VirtualLearner | None = None

    @property
    def machine(self) -> Any:
        """The learner's state machine, once the run has let it in."""
        shared = None if self.learner is None else self.learner._background.shared
        return None if shared is None else shared.machine

    def bits_of(self, fragment: int) -> str:
        """The digest of a fragment's parameters as they are."""
        assert self.learner is not None
        tensors = self.learner._shared.tensors
        return digest(tensors.store.read(tensors.plan.fragments[fragment]))

    # ---- what befalls it

    def stand_still(self) -> None:
        """Its loop stands; all else goes on."""
        self.stands = True

    def step_again(self) -> None:
        """Its loop goes on."""
        self.stands = False
        self.goes.set()

    def choke(self, factor: float, way: Way) -> None:
        """Its link carries so much less than it should."""
        spec = self.spec
        rate = spec.up_bytes_per_second if way == "up" else spec.down_bytes_per_second
        self.link.stretch(way, rate / factor, self.clockwork)

    # ---- what it does

    async def main(self) -> None:
        """Trains until the run is over."""
        self.learner, self.waited_seconds = None, None
        system, name = self.system, self.name
        torch.manual_seed(0)
        model = Vectors(system.sizes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        tape = WatchedTape(lambda now, event, effects: system.record(name, now, event, effects))
        learner = self.learner = VirtualLearner(
            model,
            system.addresses,
            learner_id=name,
            optimizer=optimizer,
            checkpoint=system.checkpoints,
            checkpoint_every_seconds=system.checkpoint_seconds,
            join_timeout=None,
            client=lambda: VirtualClient(self.place, limits=system.limits),
            tape=tape,  # type: ignore[arg-type]
        )
        learner.on_checkpoint = partial(system.on_checkpoint, name)
        loaded = learner._checkpointer.loaded
        self.loaded_steps = 0 if loaded is None else loaded.steps
        await learner.join()
        rng = random.Random(f"{name} {self.life}")
        while True:
            await self._train(model, rng)
            if not await learner.take_step(self.spec.tokens_per_step, 1.0):
                break
        stopped_at = self.clockwork.now
        await learner.end()
        self.waited_seconds = self.clockwork.now - stopped_at
        await asyncio.sleep(1.0)  # until the background has said goodbye

    async def _train(self, model: Vectors, rng: random.Random) -> None:
        spec = self.spec
        seconds = max(0.1, rng.gauss(1.0, spec.variance)) * spec.step_seconds * self.slowness
        await asyncio.sleep(seconds)
        while self.stands:
            self.goes = asyncio.Event()
            await self.goes.wait()
        with torch.no_grad():
            for vector in model.vectors:
                vector.add_(rng.uniform(-0.01, 0.01))
