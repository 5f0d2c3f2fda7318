"""Start, watch, restart (with bounded backoff) and end the processes of a run."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass, field

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import FINAL_EXIT_CODES, PREEMPTED_EXIT_CODES
from decoupled_diloco.launch.placement import PlacedProcess, Placement
from decoupled_diloco.runtime import now
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.samples import (
    EndRequested,
    ProcessEnded,
    ProcessStarted,
    RestartScheduled,
)

logger = logging.getLogger(__name__)

RESTART_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Delays before successive restarts; the last one also applies to all further restarts."""

FAILURES_MAX = 5
"""A process that fails more often in a row stays down, unless its `Restarts` say otherwise."""

HEALTHY_SECONDS = 30.0
"""An end after a longer lifetime counts as the first one in a row."""

NOT_STARTED = 1
"""The exit code of a process that could not be started."""

TERMINATE_SECONDS = 3.0
"""Time from SIGTERM to SIGKILL. It is short: learners and shards end one after the other, and after
Ctrl-C the user waits for both."""


@dataclass(frozen=True)
class Restarts:
    """How often a process is restarted.

    Attributes:
        failures_max: Failures in a row; with one more, it stays down.
        preemptions_max: Preemptions in all; with one more, it stays down. None: no limit.
    """

    failures_max: int = FAILURES_MAX
    preemptions_max: int | None = None

    @classmethod
    def of_learners(cls, config: RunConfig) -> Restarts:
        """Return the limits of a run's learners."""
        learner = config.learner
        failures = FAILURES_MAX if learner.max_failures is None else learner.max_failures
        return cls(failures, learner.max_preemptions)


@dataclass
class Child:
    """A supervised process, with its restarts.

    Attributes:
        name: Its name in the run.
        arguments: Arguments of `ddiloco`.
        limits: How often it is restarted.
        process: The running process; `None` while it does not run.
        started_at: When it was last started.
        failures: Failures in a row.
        preemptions: How often it ended because it received SIGTERM, but not from this supervisor.
        ends: Ends of both kinds in a row.
        restart_at: When to start it again, if a restart is scheduled.
        restarts: Whether it is restarted after a failure.
        held: Whether it is kept down until `Supervisor.bring_back`.
        code: Exit code, or minus the signal, of the last process that ended.
        problem: Why its last start failed; empty if it was started.
    """

    name: str
    arguments: list[str]
    process: PlacedProcess | None = None
    started_at: float = 0.0
    limits: Restarts = Restarts()
    failures: int = 0
    preemptions: int = 0
    ends: int = 0
    restart_at: float | None = None
    restarts: bool = True
    held: bool = False
    code: int | None = None
    problem: str = ""

    @property
    def running(self) -> bool:
        return self.process is not None

    @property
    def down(self) -> bool:
        """Whether it has failed and will not be restarted; false if it is kept down on purpose."""
        ended = not (self.running or self.held) and self.restart_at is None
        return ended and self.code not in (None, 0)

    @property
    def done(self) -> bool:
        """Whether it has ended with exit code 0."""
        return not self.running and self.restart_at is None and self.code == 0


@dataclass
class Supervisor:
    """Supervises child processes, and records their starts and ends on the launcher's tape."""

    placement: Placement
    tape: TapeWriter
    children: dict[str, Child] = field(default_factory=dict)
    stopping: bool = False

    def start(
        self,
        name: str,
        arguments: list[str],
        *,
        held: bool = False,
        limits: Restarts = Restarts(),
    ) -> None:
        """Start ``ddiloco ARGUMENTS`` under a name; ``held``: only when `bring_back` is called."""
        child = Child(name, arguments, held=held, limits=limits)
        self.children[name] = child
        if not held:
            self._spawn(child)

    def _spawn(self, child: Child) -> None:
        child.restart_at, child.started_at, child.problem = None, now(), ""
        try:
            child.process = self.placement.start(child.name, child.arguments)
        except OSError as error:
            # A limit on processes, memory or descriptors, or a full disk: a later try may succeed.
            child.code, child.problem = NOT_STARTED, f"it cannot be started: {error}"
            logger.warning("%s cannot be started: %s", child.name, error)
            self._failed(child)
            return
        self._sample(ProcessStarted(child.name, child.process.pid))

    def _sample(
        self, sample: ProcessStarted | ProcessEnded | EndRequested | RestartScheduled
    ) -> None:
        self.tape.sample(now(), sample)
        self.tape.flush()

    def poll(self) -> None:
        """Record the children that have ended, and restart those that are due."""
        for child in self.children.values():
            if child.process is not None and (code := child.process.poll()) is not None:
                self._ended(child, code)
            if child.restart_at is not None and now() >= child.restart_at and not self.stopping:
                self._spawn(child)

    def _ended(self, child: Child, code: int) -> None:
        child.process, child.code = None, code
        by_signal = -code if code < 0 else None
        self._sample(ProcessEnded(child.name, None if by_signal else code, by_signal))
        if code != 0:
            self._failed(child)

    def _failed(self, child: Child) -> None:
        """Schedule the child's restart, or leave it down after too many failures or preemptions."""
        if self.stopping or not child.restarts or child.held:
            return
        limits, again = child.limits, now() - child.started_at <= HEALTHY_SECONDS
        child.ends = child.ends + 1 if again else 1
        if child.code in PREEMPTED_EXIT_CODES:
            child.preemptions += 1
            most = limits.preemptions_max
            if most is not None and child.preemptions > most:
                logger.error("%s stays down: it was preempted %d times", child.name, most + 1)
                return
        else:
            child.failures = child.failures + 1 if again else 1
            if child.code in FINAL_EXIT_CODES or child.failures > limits.failures_max:
                logger.error("%s stays down: %s", child.name, self.last_words(child.name))
                return
        delay = RESTART_SECONDS[min(child.ends, len(RESTART_SECONDS)) - 1]
        child.restart_at = now() + delay
        self._sample(RestartScheduled(child.name, delay))

    def last_words(self, name: str) -> str:
        """Return why a process could not be started, or the last line of its log."""
        return self.children[name].problem or self.placement.last_words(name)

    def retire(self) -> None:
        """Restart no process from now on."""
        for child in self.children.values():
            child.restarts, child.restart_at = False, None

    def kill(self, name: str, *, restart: bool) -> bool:
        """Send SIGKILL, and return whether the process was running.

        Args:
            name: The child.
            restart: Whether it is restarted then.
        """
        child = self.children[name]
        child.restarts = restart
        if child.process is None:
            return False
        child.process.kill()
        return True

    def take_down(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End a process on purpose and keep it down until `bring_back`; this is not a failure.

        After a SIGTERM the process may take any time to end.
        """
        child = self.children[name]
        child.held, child.restart_at = True, None
        if child.process is not None:
            child.process.send_signal(number)
            if number == signal.SIGTERM:
                self._sample(EndRequested((name,)))

    def bring_back(self, name: str) -> bool:
        """Start a process that was taken down; return ``False`` if it has not ended yet."""
        child = self.children[name]
        if child.process is not None:
            return False
        child.held = False
        if child.restarts and not self.stopping:
            self._spawn(child)
        return True

    def stop(self, names: list[str] | None = None, extra_seconds: float = 0.0) -> None:
        """Ask children to stop, all at once, and kill those that take too long.

        Args:
            names: Names of the children. Default: all.
            extra_seconds: Time in addition to `TERMINATE_SECONDS`, for the learners' flush.
        """
        self.stopping = self.stopping or names is None
        chosen = [c for n, c in self.children.items() if names is None or n in names]
        asked = []
        for child in chosen:
            child.restarts, child.restart_at = False, None
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)
                asked.append(child.name)
        if asked:  # after the signals, so that an error of the tape leaves no child running
            self._sample(EndRequested(tuple(asked)))
        deadline = now() + TERMINATE_SECONDS + extra_seconds
        while any(child.running for child in chosen) and now() < deadline:
            time.sleep(0.05)
            self.poll()
        for child in chosen:
            if child.process is not None:
                logger.warning("%s does not end: killing it", child.name)
                child.process.kill()
                child.process.wait()
        self.poll()
        if self.stopping:
            self.placement.close()
