"""The event tape of a virtual world: the same files and records as those of real processes.

Nothing of the real machine is on it: instants are virtual, processes are numbered in the order in
which they start, and the wall clock begins at a fixed date. So the same seed gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.observe.open_files import open_files_allowed
from decoupled_diloco.observe.records import FOLDER_NAME, to_json
from decoupled_diloco.observe.samples import (
    BytesMoved,
    FaultEnded,
    FaultInjected,
    LinkState,
    LossMeasured,
    ProcessEnded,
    ProcessStarted,
    Sample,
    TookOver,
)
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.observe.versions import versions_of_bits
from decoupled_diloco.protocol import wire
from decoupled_diloco.protocol.coordinator import CoordinatorState
from decoupled_diloco.protocol.effects import Send
from decoupled_diloco.protocol.events import Connected, Lost, Received, StepFinished
from decoupled_diloco.protocol.peers import COORDINATOR, shard_of
from decoupled_diloco.protocol.shard_lease import Activate
from decoupled_diloco.simulate.coordinator_process import CoordinatorProcess
from decoupled_diloco.simulate.learner_process import LearnerProcess
from decoupled_diloco.simulate.scenario import Target
from decoupled_diloco.simulate.shard_process import ShardProcess
from decoupled_diloco.simulate.shell import Shell
from decoupled_diloco.simulate.world import World

EPOCH = 946_684_800.0
"""Where the wall clock of every virtual run begins: 2000-01-01, 00:00 UTC."""

LAUNCHER = "launcher"
CLAIMS = ".claims"
SIGKILL = 9
REFUSED = 3
"""Exit code of a learner that was expelled, as `ProtocolError` has it."""

_STATE = TypeAdapter(CoordinatorState)

STATS_SECONDS = 5.0
"""How often a learner says how many bytes it has moved."""


class VirtualTapes:
    """Writes what the processes of a world are told, order and measure.

    Args:
        folder: The run folder.
        world: What happens there is written from now on.
        settings: The run's public settings, for the start records.
        losses: Each learner's losses so far; a learner's last one belongs to its latest step.

    Raises:
        StorageError: A file cannot be written, here and in every method.
        ConfigError: This system does not allow so many open files.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        settings: Mapping[str, Any],
        losses: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        _allow_open_files(len(world.processes))
        self._folder = folder / FOLDER_NAME
        self._world = world
        self._settings = dict(settings)
        self._losses = losses or {}
        self._taken: dict[str, TookOver] = {}
        self._versions = versions_of_bits()
        self._processes = {process.name: process for process in world.processes}
        self._writers: dict[str, TapeWriter] = {}
        self._lives: dict[str, int] = {}
        self._written: dict[str, int] = {}
        self._control: dict[str, list[int]] = {}
        self._stats_at: dict[str, float] = {}
        self._started = 0
        self._launcher = self.open(LAUNCHER, {"machine": LAUNCHER})
        world.recorders.append(self._record)
        world.watchers.append(self)

    def open(self, who: str, header: Mapping[str, Any]) -> TapeWriter:
        """A new life's tape; the start record is written."""
        before = self._writers.pop(who, None)
        if before is not None:
            before.close()
        now = self._world.now
        shown = now + self._ahead(who)
        process = self._processes.get(who)
        writer = TapeWriter(
            self._folder / f"{who}.jsonl",
            f"shard-{process.shard}" if isinstance(process, ShardProcess) else who,
            {**header, "virtual": True, "versions": self._versions},
            clock=lambda: shown,
            wall=lambda: EPOCH + now,
            pid=self._lives.get(_process_of(who), 0),
        )
        self._writers[who] = writer
        self._written[who] = self._lives.get(_process_of(who), 0)
        return writer

    def sample(self, sample: Sample, who: str = LAUNCHER) -> None:
        """Writes a measurement of a process that has a tape."""
        self._writers[who].sample(self._world.now + self._ahead(who), sample)

    def _ahead(self, who: str) -> float:
        """How far a process's own clock has leapt; the launcher's is right."""
        process = self._processes.get(_process_of(who))
        return 0.0 if process is None else process.ahead_seconds

    def fault(self, kind: str, target: Target) -> None:
        """A fault begins."""
        self.sample(FaultInjected(kind, target.name, target.processes))

    def fault_ended(self, kind: str, target: Target) -> None:
        """A fault that lasted is undone."""
        self.sample(FaultEnded(kind, target.name, target.processes))

    def flush(self) -> None:
        """Brings everything to the files."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Ends every tape."""
        for process in self._world.learners.values():
            if process.alive and process.name in self._stats_at:
                self._bytes(process)
        for writer in self._writers.values():
            writer.close()

    # ---- lives

    def began(self, process: Shell) -> None:
        """See `world.Watcher`."""
        self._started += 1
        self._lives[process.name] = self._started
        self._stats_at.pop(process.name, None)
        if not isinstance(process, CoordinatorProcess):  # shard 0 hosts it
            self.sample(ProcessStarted(process.name, self._started))

    def ended(self, process: Shell, *, killed: bool) -> None:
        """See `world.Watcher`."""
        if process.name in self._stats_at:
            self._bytes(process)
        if isinstance(process, CoordinatorProcess):
            return
        refused = isinstance(process, LearnerProcess) and bool(process.expelled)
        code = REFUSED if refused else None if killed else 0
        self.sample(ProcessEnded(process.name, code, SIGKILL if code is None else None))

    # ---- records

    def _record(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        process = self._processes[_process_of(who)]
        if isinstance(process, LearnerProcess) and process.spec.role == "observer":
            return  # it tells what it measures, nothing else, as a real one does
        if self._written.get(who) != self._lives[process.name]:
            self.open(who, self._header(process) if who == process.name else _of_claims(process))
            self._control[who] = [0, 0]
            if taken := self._taken.pop(who, None):
                self.sample(taken, who)
        if who != process.name:
            self._claims(process, effects)
        writer = self._writers[who]
        writer.effects(now, writer.event(now, event), effects)
        if isinstance(process, LearnerProcess):
            self._learner(process, now, event, effects)

    def _claims(self, process: Shell, effects: Sequence[Any]) -> None:
        """That a process acts from now on comes first on its own tape, as in a real one."""
        assert isinstance(process, ShardProcess)
        for effect in effects:
            if isinstance(effect, Activate):
                self._taken[process.name] = TookOver(
                    process.name, process.shard, effect.number, effect.waited_seconds
                )

    def _header(self, process: Shell) -> dict[str, Any]:
        """What a replay of this life needs."""
        header: dict[str, Any] = {"settings": self._settings}
        match process:
            case ShardProcess():
                return {"machine": "shard", "shard": process.shard, **header}
            case CoordinatorProcess(durable=state):
                return {
                    "machine": "coordinator",
                    "weights_from_file": self._world.weights_from_file,
                    "state": None if state is None else _STATE.dump_python(state, mode="json"),
                    **header,
                }
            case LearnerProcess(machine=machine):
                return {
                    "machine": "learner",
                    "learner": machine.learner,
                    "epoch": machine.epoch,
                    "nonce": machine.nonce,
                    "role": machine.role,
                    **header,
                }
        raise AssertionError(process)

    def _learner(
        self, process: LearnerProcess, now: float, event: Any, effects: Sequence[Any]
    ) -> None:
        """What a learner measures beside the protocol."""
        who, control = process.name, self._control[process.name]
        self._stats_at.setdefault(who, now + STATS_SECONDS)
        for effect in effects:
            if type(effect) is Send and effect.peer != COORDINATOR:
                control[0] += _size(effect.message)
        match event:
            case StepFinished():
                losses, state = self._losses.get(who), process.machine.state
                if losses:
                    step = process.machine.global_step
                    self.sample(LossMeasured(state.step, step, state.tokens, losses[-1]), who)
            case Received(peer, message) if peer != COORDINATOR:
                control[1] += _size(message)
            case Connected(peer) | Lost(peer) if peer != COORDINATOR:
                self.sample(LinkState(shard_of(peer), isinstance(event, Connected)), who)
        if now >= self._stats_at[who]:
            self._stats_at[who] = now + STATS_SECONDS
            self._bytes(process)

    def _bytes(self, process: Shell) -> None:
        sent, received = self._control[process.name]
        moved = BytesMoved(sent, received, process.data_sent, process.data_received)
        self.sample(moved, process.name)


def _size(message: Any) -> int:
    """Bytes of a control message, without frames and pings."""
    return len(to_json(wire.encode(message)).encode())


def _allow_open_files(tapes: int) -> None:
    """Every process has a file of its own, as in a real run."""
    allowed = open_files_allowed(tapes)
    if allowed is not None:
        raise ConfigError(
            f"the tapes of {tapes} processes need as many open files, but this system allows "
            f"{allowed}: raise the limit with `ulimit -Hn`, or write no tape"
        )


def _process_of(who: str) -> str:
    """The process whose tape this is; of its claims it keeps one beside its own."""
    return who.removesuffix(CLAIMS)


def _of_claims(process: Shell) -> dict[str, Any]:
    """What a replay of a process's claims needs, as on a real tape."""
    assert isinstance(process, ShardProcess)
    assert process.shard_lease is not None
    machine = process.shard_lease.machine
    return {
        "machine": "lease",
        "waits": process.is_standby,
        "nonce": machine.nonce,
        "lease_seconds": machine.lease_seconds,
    }
