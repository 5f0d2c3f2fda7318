"""One run: its processes, faults, supervisor and results.

A supervisor, as every cluster has one, restarts failed or killed processes after `RESTART_SECONDS`.
It is the same for all systems.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from common import Task
from links import Sites
from peer_systems import Start, environment_of

Row = dict[str, Any]
Step = tuple[float, int, int, float]
"""Time of its end, step number, process id of the worker, and loss."""

RESTART_SECONDS = 5.0
POLL_SECONDS = 0.1
LOG_CHARACTERS = 3000


@dataclass(frozen=True)
class Fault:
    """A process is killed (SIGKILL) at `at_period`, or the link is cut for `cut_seconds`."""

    kills: str = ""
    cut_seconds: float = 0.0
    at_period: float = 2.5
    for_ever: bool = False  # the killed process is not restarted


FAULTS = {
    "kill-worker": Fault("worker-1"),
    "kill-center": Fault("center"),
    "lose-worker": Fault("worker-3", for_ever=True),
    "lose-paced": Fault("worker-3", for_ever=True),
    "cut": Fault(cut_seconds=60.0),
}
"""A system without a center loses worker 0 instead; with DDP this is rank 0 and the rendezvous."""


@dataclass
class Run:
    """A run in progress, at two sites and in a folder."""

    folder: Path
    sites: Sites
    tasks: list[Task]
    starts: dict[str, Start]
    deadline: float
    fault: Fault | None = None
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    killed: set[str] = field(default_factory=set)
    fault_begun: float = 0.0
    fault_over: bool = False

    def carry_out(self) -> bool:
        """Run until every worker has succeeded or time is up; return whether all succeeded."""
        try:
            for name in self.starts:
                self._start(name)
            return self._watch()
        finally:
            self._end()

    def _watch(self) -> bool:
        due: dict[str, float] = {}
        while (now := time.monotonic()) < self.deadline:
            self._inject_fault(now)
            codes = {
                name: process.poll()
                for name, process in self.processes.items()
                if name not in self.lost
            }
            workers = [code for name, code in codes.items() if name.startswith("worker")]
            if all(code == 0 for code in workers):
                return True
            failed = [name for name, code in codes.items() if code not in (None, 0)]
            if failed and self.fault is None:
                return False
            for name in failed:
                due.setdefault(name, now + RESTART_SECONDS)
            for name in [name for name, instant in due.items() if now > instant]:
                del due[name]
                self.restarts[name] = self.restarts.get(name, 0) + 1
                self._start(name)
            time.sleep(POLL_SECONDS)
        return False

    @property
    def lost(self) -> set[str]:
        """The killed processes that are not restarted."""
        return self.killed if self.fault and self.fault.for_ever else set()

    def _inject_fault(self, now: float) -> None:
        """Start or end the fault when it is due."""
        if self.fault is None or self.fault_over:
            return
        if not self.fault_begun and self._reached(self.fault.at_period):
            self.fault_begun = now
            if self.fault.kills:
                self.kill(self.fault.kills)
            else:
                self.sites.cut()
        elif self.fault_begun and now > self.fault_begun + self.fault.cut_seconds:
            self.fault_over = True
            if not self.fault.kills:
                self.sites.heal()

    def _reached(self, period: float) -> bool:
        steps = [self._steps(task) for task in self.tasks]
        return all(each and each[-1][1] >= period * self.tasks[0].period for each in steps)

    def _steps(self, task: Task) -> list[Step]:
        """Return the steps of all incarnations of a worker; step 0 is the start of one."""
        path, found = self.folder / f"worker-{task.worker}.steps", []
        for line in path.read_text().splitlines() if path.exists() else []:
            what, instant, pid, *loss = line.split()
            if what != "end":
                step = 0 if what == "begin" else int(what)
                found.append((float(instant), step, int(pid), float(*loss or ["inf"])))
        return found

    def _start(self, name: str) -> None:
        start = self.starts[name]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.sites.command(start.site), *start.command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment_of(start),
                cwd=self.folder,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process and its descendants; to worker 0 if there is no center."""
        name = name if name in self.processes else "worker-0"
        self.killed.add(name)
        family = [self.processes[name].pid]
        for parent in family:
            for path in Path(f"/proc/{parent}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    family += [int(child) for child in path.read_text().split()]
        for pid in family:
            _kill(pid)

    def _end(self) -> None:
        """Kill all processes in the namespaces, including children of launchers."""
        for site in (0, 1):
            command = ["ip", "netns", "pids", self.sites.space(site)]
            listed = subprocess.run(command, check=False, capture_output=True, text=True)
            for pid in map(int, listed.stdout.split()):
                _kill(pid)
        for process in self.processes.values():
            _kill(process.pid)
            process.wait()

    def summary(self, ended: bool, warm_periods: int, target: float) -> Row:
        """Summarize the workers' files and the interfaces' counters.

        Args:
            ended: Whether all workers succeeded.
            warm_periods: Periods that are not timed.
            target: Loss whose time is noted: the first worker's mean over a period.
        """
        steps = [self._steps(task) for task in self.tasks]
        results = [_result(self.folder / f"worker-{task.worker}.json") for task in self.tasks]
        lost = [f"worker-{task.worker}" in self.lost for task in self.tasks]
        finished = ended and all(r or gone for r, gone in zip(results, lost, strict=True))
        row: Row = {"finished": finished, "steps": [_last(each) for each in steps]}
        if self.fault_begun:
            dead = {task.worker for task in self.tasks if f"worker-{task.worker}" in self.killed}
            until = time.monotonic()
            row |= effect(steps, self.fault_begun, until, [bool(r) for r in results], dead)
            row["restarts"] = self.restarts
        elif all(len(each) > 2 for each in steps):
            warm = warm_periods * self.tasks[0].period if row["finished"] else 0
            row |= self._speed([[instant for instant, *_ in each[warm:]] for each in steps])
        row["seconds_to_target"] = seconds_to(target, steps[0], self.tasks[0].period)
        row |= {"losses": [result.get("loss") for result in results], "results": results}
        if not row["finished"]:
            row["logs"] = self.logs()
        return row

    def _speed(self, windows: list[list[float]]) -> Row:
        gaps = [[after - before for before, after in pairwise(each)] for each in windows]
        begin, end = max(each[0] for each in windows), min(each[-1] for each in windows)
        rates = [len(each) / sum(each) for each in gaps]
        return {
            "rate": min(rates),
            "rates": rates,
            "medians": [median(each) for each in gaps],
            "gaps": [max(each) for each in gaps],
            "sent_per_step": [n / min(map(len, gaps)) for n in self.sites.passed(begin, end)],
        }

    def logs(self) -> dict[str, str]:
        """Return the ends of the processes' logs."""
        paths = sorted(self.folder.glob("*.log"))
        return {path.stem: path.read_text(errors="replace")[-LOG_CHARACTERS:] for path in paths}


def effect(
    steps: list[list[Step]], begun: float, until: float, finished: list[bool], dead: set[int]
) -> dict[str, Any]:
    """Return the effect of a fault on each worker.

    Args:
        steps: Steps of each worker.
        begun: Time of the fault.
        until: End of the run, or its time limit.
        finished: Whether each worker finished.
        dead: The workers that were killed.

    Returns:
        For each worker, the longest time without a step after the fault, the steps in the minute
        after
        it, and for killed workers the seconds until their first step.
    """
    found: dict[str, Any] = {"gaps": [], "steps_in_minute": [], "back_seconds": []}
    for worker, each in enumerate(steps):
        ended = [instant for instant, step, *_ in each if step]
        before = [instant for instant in ended if instant <= begun]
        after = [instant for instant in ended if instant > begun]
        marks = [*before[-1:], *after, *([] if finished[worker] else [until])]
        found["gaps"].append(max((b - a for a, b in pairwise(marks)), default=None))
        found["steps_in_minute"].append(sum(instant <= begun + 60.0 for instant in after))
        found["back_seconds"].append(after[0] - begun if worker in dead and after else None)
    return found


def seconds_to(target: float, steps: list[Step], period: int) -> float | None:
    """Return the seconds from a worker's start until its mean loss over a period is the target."""
    taken = [step for step in steps if step[1]]
    for end in range(period, len(taken) + 1):
        if sum(loss for *_, loss in taken[end - period : end]) <= target * period:
            return taken[end - 1][0] - steps[0][0]
    return None


def _last(steps: list[Step]) -> int:
    return max((step for _, step, *_ in steps), default=0)


def _result(path: Path) -> Row:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
