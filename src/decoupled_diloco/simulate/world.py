"""A deterministic virtual world: the real state machines, virtual time, virtual links.

It decides nothing that the protocol decides. Its processes carry out effects and report facts, as
the real shells do; everything random comes from one seed, so that a run can be repeated exactly.

    world = World(Options(quorum=2), [LearnerSpec("a"), LearnerSpec("b")], seed=7)
    world.run(until=100.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from decoupled_diloco.protocol.options import Options
from decoupled_diloco.simulate.bodies import Bodies, Body, NoBodies
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.claims import Standbys, VirtualClaims
from decoupled_diloco.simulate.clockwork import Clockwork
from decoupled_diloco.simulate.coordinator_process import CoordinatorProcess
from decoupled_diloco.simulate.cuts import WorldCuts
from decoupled_diloco.simulate.learner_process import LearnerProcess, LearnerSpec
from decoupled_diloco.simulate.leased_loop import VirtualData
from decoupled_diloco.simulate.network import Endpoint, Link, Network
from decoupled_diloco.simulate.shard_process import ShardProcess
from decoupled_diloco.simulate.shell import Shell


class Watcher(Protocol):
    """Told of the lives of processes: what a launcher would see."""

    def began(self, process: Shell) -> None:
        """A new life begins."""

    def ended(self, process: Shell, *, killed: bool) -> None:
        """A life ends: it was killed, or of itself."""


Recorder = Callable[[str, float, Any, Sequence[Any]], None]
"""Called as ``recorder(who, now, event, effects)`` for every event that a machine has handled."""


@dataclass(frozen=True, slots=True)
class Mishaps:
    """Probabilities of small things that go wrong all the time; see `faults` for big ones.

    Attributes:
        spurious_ticks: of an extra, early ``Tick`` after each event.
        spoil: that a body is wrong when it arrives.
        merge_fails: that the merge worker fails.
        crash_after_persist: that the coordinator dies right after it has written its state.
        crash_after_merge: that a shard loses its power right after a merge is on its disk.
        stalls: that a learner's loop stands in a step, for up to some four hundred steps.
        slips: that what a shard tells a learner is lost, with the connection, and the learner
            connects anew before the shard knows.
        copies_slip: the same of a shard that asks for a whole copy.
        poison: that a contribution looks a million times too large.
        disk_lies: that a shard's disk says that it has a version and has not.
        disk_lost: that a shard that starts again finds its disk empty.
        checkpoints: that a learner's checkpoint is on its disk, at each of its steps.
        checkpoint_lost: that a learner that starts again finds none.
        donors: that a learner without a checkpoint looks for a donor of its optimizer's state.
        preempted: that a learner that is struck down is told before, and hands in what it has.
    """

    spurious_ticks: float = 0.0
    spoil: float = 0.0
    merge_fails: float = 0.0
    crash_after_persist: float = 0.0
    crash_after_merge: float = 0.0
    stalls: float = 0.0
    slips: float = 0.0
    copies_slip: float = 0.0
    poison: float = 0.0
    disk_lies: float = 0.0
    disk_lost: float = 0.0
    checkpoints: float = 0.0
    checkpoint_lost: float = 0.0
    preempted: float = 0.0
    donors: float = 0.0


class World:
    """One virtual run.

    Args:
        options: the settings of the method.
        learners: learners and observers.
        seed: every random choice follows from it.
        bodies: the tensor side; lineage without tensors by default.
        fragment_bytes: size of each fragment's fp32 copy, for `NoBodies`.
        recorder: the event tape.
        mishaps: what goes wrong all the time.
        weights_from_file: the initial weights come from the run's file, not from a learner.
        merge_seconds: how long the merge worker takes.
        checks: assert every invariant of a machine after each of its events; that looks at all
            learners each time, so it is left out where there are thousands.
        inbox_seconds: how often a shard looks into its inbox for step reports; 0: each at once.
        data: what the learners lease; ``None``: they need no data.
        standbys: each shard has a second process that can act for it; ``None``: none has.
    """

    def __init__(
        self,
        options: Options,
        learners: Iterable[LearnerSpec],
        *,
        seed: int | str = 0,
        bodies: Bodies | None = None,
        fragment_bytes: Sequence[int] | None = None,
        recorder: Recorder | None = None,
        mishaps: Mishaps | None = None,
        weights_from_file: bool = False,
        merge_seconds: float = 0.002,
        checks: bool = True,
        inbox_seconds: float = 0.0,
        data: VirtualData | None = None,
        standbys: Standbys | None = None,
    ) -> None:
        mishaps = mishaps or Mishaps()
        self.options = options
        self.choices = Choices(seed)
        self.clockwork = Clockwork()
        self.network = Network(self.clockwork, self.choices.fork("network"))
        sizes = list(fragment_bytes or [1000] * options.fragments)
        self.bodies: Bodies = NoBodies(sizes) if bodies is None else bodies
        self.weights_from_file = weights_from_file
        self.merge_seconds = merge_seconds
        self.checks = checks
        self.inbox_seconds = inbox_seconds
        self.data = data
        self.spurious_ticks = mishaps.spurious_ticks
        self.spoil = mishaps.spoil
        self.merge_fails = mishaps.merge_fails
        self.crash_after_persist = mishaps.crash_after_persist
        self.crash_after_merge = mishaps.crash_after_merge
        self.stalls = mishaps.stalls
        self.slips, self.copies_slip = mishaps.slips, mishaps.copies_slip
        self.poison = mishaps.poison
        self.disk_lies, self.disk_lost = mishaps.disk_lies, mishaps.disk_lost
        self.checkpoints, self.checkpoint_lost = mishaps.checkpoints, mishaps.checkpoint_lost
        self.preempted, self.donors = mishaps.preempted, mishaps.donors
        self.cuts = WorldCuts()
        self.cut_seconds = 0.3
        self.events = 0
        self.finished_shards: set[int] = set()
        self.may_restart: Callable[[Shell], bool] = lambda process: True
        self.swaps = False
        self.recorders: list[Recorder] = [] if recorder is None else [recorder]
        self.watchers: list[Watcher] = []
        self.keep_body: Callable[[int, str, Body], None] = lambda shard, path, body: None
        self.shared_links: dict[str, Link] = {}
        self.coordinator = CoordinatorProcess(self)
        self.claims = [self._claims(standbys, shard) for shard in range(options.shards)]
        self.shards = [ShardProcess(self, shard) for shard in range(options.shards)]
        self.standbys = (
            [] if standbys is None else [ShardProcess(self, p.shard, p) for p in self.shards]
        )
        self.learners = {spec.name: LearnerProcess(self, spec) for spec in learners}
        self.clockwork.at(0.0, self.coordinator.begin)
        for shard in self.shard_processes:
            self.clockwork.at(0.0, shard.begin)
        for learner in self.learners.values():
            if learner.spec.joins_at < float("inf"):
                self.clockwork.at(learner.spec.joins_at, self.restart, learner)

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self.clockwork.now

    @property
    def finished(self) -> bool:
        """Whether every shard has stopped of itself."""
        return len(self.finished_shards) == len(self.shards)

    @property
    def processes(self) -> list[Shell]:
        """Every process, dead or alive."""
        return [self.coordinator, *self.shard_processes, *self.learners.values()]

    @property
    def shard_processes(self) -> list[ShardProcess]:
        """Every process of every shard."""
        return [*self.shards, *self.standbys]

    def hosts(self, shard: int) -> list[ShardProcess]:
        """The processes of a shard: one, or two that may act in each other's place."""
        return self.shard_processes[shard :: len(self.shards)]

    def acting(self, shard: int) -> ShardProcess:
        """Which of a shard's processes acts for it, or was the last to do so."""
        return max(self.hosts(shard), key=lambda process: process.claim)

    def is_replaced(self, process: ShardProcess) -> bool:
        """Whether somebody has made a newer claim than the one by which a process acts."""
        claims = self.claims[process.shard]
        return claims is not None and process.claim < claims.newest

    def _claims(self, standbys: Standbys | None, shard: int) -> VirtualClaims | None:
        if standbys is None:
            return None
        return VirtualClaims(standbys, self.choices.fork(f"claims of shard-{shard}"))

    def run(
        self, *, until: float | None = None, events: int | None = None, finish: bool = True
    ) -> str:
        """Lets time pass until one of the limits is reached.

        Args:
            until: virtual instant, seconds.
            events: number of events that machines have handled, all in all.
            finish: stop when the run is over.

        Returns:
            Why it stopped: ``"until"``, ``"events"``, ``"finished"`` or ``"nothing left"``.
        """
        clockwork, finished, shards = self.clockwork, self.finished_shards, len(self.shards)
        while True:
            if finish and len(finished) == shards:
                return "finished"
            if events is not None and self.events >= events:
                return "events"
            instant = clockwork.next
            if instant is None:
                return "nothing left"
            if until is not None and instant > until:
                clockwork.now = max(clockwork.now, until)
                return "until"
            clockwork.step()

    # ---- what may be done to it

    def crash(self, process: Shell, *, silent: bool = False) -> None:
        """SIGKILL; ``silent``: the host is gone, so that nobody is told."""
        process.end(silent=silent, killed=True)

    def lose_power(self, process: Shell) -> None:
        """A host goes down, now or within moments, and comes up again."""
        if process.choices.chance(0.3):
            self._go_down(process)
        else:
            self.clockwork.after(process.choices.log_uniform(1e-4, 1.0), self._go_down, process)

    def _go_down(self, process: Shell) -> None:
        self.crash(process, silent=True)
        self.clockwork.after(process.choices.log_uniform(0.05, 15.0), self._supervise, process)

    def restart(self, process: Shell) -> None:
        """A process that is dead starts again, as a new one."""
        over = isinstance(process, LearnerProcess) and process.over
        finished = isinstance(process, ShardProcess) and process.finished
        if not (process.alive or over or finished):
            process.begin()

    def pause(self, process: Shell) -> None:
        """SIGSTOP."""
        if process.alive and not process.paused:
            process.paused = True
            self.network.paused(process)

    def resume(self, process: Shell) -> None:
        """SIGCONT."""
        process.wake()

    def cut(self, a: Endpoint, b: Endpoint, *, back: bool = True) -> None:
        """Nothing passes from one process to another, nor, if ``back``, the other way."""
        self.network.cut(a, b, back=back)

    def heal(self, a: Endpoint, b: Endpoint, *, back: bool = True) -> None:
        """The one process hears the other again, and, if ``back``, the other the one."""
        self.network.heal(a, b, back=back)

    def break_connections(self, a: Endpoint, b: Endpoint) -> None:
        """Connections between the two are lost with what is under way."""
        self.network.reset(a, b)

    # ---- told by the processes

    def began(self, process: Shell) -> None:
        """A process has started."""
        for watcher in self.watchers:
            watcher.began(process)

    def ended(self, process: Shell, *, killed: bool) -> None:
        """A process is about to be gone."""
        for watcher in self.watchers:
            watcher.ended(process, killed=killed)

    def expelled(self, process: LearnerProcess, reason: str) -> None:
        """A shard refused the learner for good; its supervisor starts a new process."""
        self.clockwork.after(0.0, self.crash, process)
        self.clockwork.after(1.0, self._supervise, process)

    def replaced(self, process: ShardProcess) -> None:
        """A shard's process has lost its claim; its supervisor starts a new one."""
        self.clockwork.after(1.0, self._supervise, process)

    def _supervise(self, process: Shell) -> None:
        if self.may_restart(process):
            self.restart(process)

    def left(self, process: LearnerProcess) -> None:
        """A learner has seen the end of the run."""
