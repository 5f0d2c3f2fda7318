"""A whole run in virtual time: the product's own processes on virtual machines and links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.clockwork import Clockwork
from decoupled_diloco.simulate.disk import Loss
from decoupled_diloco.simulate.hosts import Host, LearnerHost, ShardHost
from decoupled_diloco.simulate.learner_process import LearnerSpec
from decoupled_diloco.simulate.network import Network
from decoupled_diloco.simulate.transport import Streets
from decoupled_diloco.transport.base import Limits

Recorder = Callable[[str, float, Any, Sequence[Any]], None]


class System:
    """One virtual run.

    Args:
        config: The run's settings.
        learners: Its learners.
        folder: The run folder.
        seed: Every random choice follows from it.
        sizes: Elements of each fragment.
        checkpoint_seconds: How often learners keep checkpoints; 0: never.
        power: What a machine that loses its power loses of what nobody waited for; ``None``:
            nothing.
        checks: Assert every invariant of a machine after each of its events.
    """

    def __init__(
        self,
        config: RunConfig,
        learners: Iterable[LearnerSpec],
        folder: Path,
        *,
        seed: int | str = 0,
        sizes: Sequence[int] | None = None,
        checkpoint_seconds: float = 0.0,
        power: Loss | None = None,
        checks: bool = True,
    ) -> None:
        self.config = config
        self.folder = folder
        self.choices = Choices(seed)
        self.clockwork = Clockwork()
        self.network = Network(self.clockwork, self.choices.fork("network"))
        self.streets = Streets(self.network, self.choices.fork("bodies"))
        self.sizes = list(sizes or [8] * config.sync.fragments)
        self.checkpoint_seconds = checkpoint_seconds
        self.checkpoints = folder / "checkpoints" if checkpoint_seconds else None
        self.power = power
        self.checks = checks
        self.options = options_of(config)
        self.limits = Limits()
        self.events = 0
        self.recorders: list[Recorder] = []
        self.error: BaseException | None = None
        self.on_checkpoint: Callable[[str, int], None] = lambda who, steps: None
        shards = range(config.syncer.shards)
        self.addresses = tuple(self.streets.address(f"shard-{shard}", 7070) for shard in shards)
        self.shards = [ShardHost(self, shard) for shard in shards]
        self.learners = {spec.name: LearnerHost(self, spec) for spec in learners}
        for shard in self.shards:
            self.clockwork.at(0.0, shard.begin)
        for learner in self.learners.values():
            self.clockwork.at(learner.spec.joins_at, learner.begin)

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self.clockwork.now

    @property
    def hosts(self) -> list[Host]:
        """Every process, dead or alive."""
        return [*self.shards, *self.learners.values()]

    @property
    def finished(self) -> bool:
        """Whether every shard has ended of itself."""
        return all(shard.over for shard in self.shards)

    def record(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """A machine has handled an event."""
        self.events += 1
        try:
            if self.checks:
                self._check(who)
            for recorder in self.recorders:
                recorder(who, now, event, effects)
        except AssertionError as error:
            self.error = self.error or error

    def _check(self, who: str) -> None:
        machine: Any
        if who == "coordinator":
            host = self.shards[0].process and self.shards[0].process.host
            machine = host and host.machine
        elif who.startswith("shard-"):
            machine = self.shards[int(who[6:])].machine
        else:
            machine = self.learners[who].machine
        if machine is not None:
            machine.check()

    def broken(self, host: Host, error: Exception) -> None:
        """The code of a process has failed in a way that it must not."""
        self.error = self.error or error

    # ---- what may be done to it

    preempted = 0.0

    @property
    def coordinator(self) -> ShardHost:
        """The process that hosts it."""
        return self.shards[0]

    @property
    def shard_processes(self) -> list[ShardHost]:
        """Every process of every shard."""
        return self.shards

    @property
    def processes(self) -> list[Host]:
        """Every process, dead or alive."""
        return self.hosts

    def acting(self, shard: int) -> ShardHost:
        """Which process acts for a shard."""
        return self.shards[shard]

    def is_replaced(self, host: ShardHost) -> bool:
        """Whether somebody else acts for its shard."""
        return False

    def crash(self, host: Host, *, silent: bool = False) -> None:
        """SIGKILL; ``silent``: the machine is gone, so that nobody is told."""
        host.end(silent=silent)

    def restart(self, host: Host) -> None:
        """A process that is dead starts again."""
        host.begin()

    def pause(self, host: Host) -> None:
        """SIGSTOP."""
        if host.alive and not host.paused:
            host.paused = True
            self.network.paused(host)

    def resume(self, host: Host) -> None:
        """SIGCONT."""
        host.wake()

    def cut(self, a: Host, b: Host, *, back: bool = True) -> None:
        """Nothing passes from one process to another, nor, if ``back``, the other way."""
        self.network.cut(a, b, back=back)

    def heal(self, a: Host, b: Host, *, back: bool = True) -> None:
        """The one process hears the other again, and, if ``back``, the other the one."""
        self.network.heal(a, b, back=back)

    def break_connections(self, a: Host, b: Host) -> None:
        """Connections between the two are lost with what is under way."""
        self.network.reset(a, b)

    # ---- time

    def run(self, *, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Lets time pass.

        Raises:
            AssertionError: Something does not hold.
        """
        clockwork = self.clockwork
        while (instant := clockwork.next) is not None and instant <= until and not stop():
            clockwork.step()
            if self.error is not None:
                raise self.error
        clockwork.now = max(clockwork.now, until) if not stop() else clockwork.now

    def close(self) -> None:
        """Lets go of what the processes held."""
        for host in self.hosts:
            for loop in host.graves:
                loop.bury()
