"""One run: its processes, their supervisor, and what they left behind."""

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
from faults import RESTART_SECONDS, Fault, Step, effect, steps_of
from links import Sites
from systems import Start, environment_of

Row = dict[str, Any]

POLL_SECONDS = 0.1
LOG_CHARACTERS = 3000


@dataclass
class Run:
    """A run that goes on, in two sites and a folder."""

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
        """Until every worker has ended well, or the time is over; which of both."""
        try:
            for name in self.starts:
                self._start(name)
            return self._watch()
        finally:
            self._end()

    def _watch(self) -> bool:
        due: dict[str, float] = {}
        while (now := time.monotonic()) < self.deadline:
            self._let_it_happen(now)
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
        """Who was killed and is not started again."""
        return self.killed if self.fault and self.fault.for_ever else set()

    def _let_it_happen(self, now: float) -> None:
        """The fault begins, or ends, if it is time."""
        if self.fault is None or self.fault_over:
            return
        if not self.fault_begun and self._reached(self.fault.at_period):
            self.fault_begun = now
            self.fault.begin(self)
        elif self.fault_begun and now > self.fault_begun + self.fault.seconds:
            self.fault_over = True
            self.fault.end(self)

    def _reached(self, period: float) -> bool:
        steps = [self._steps(task) for task in self.tasks]
        return all(each and each[-1][1] >= period * self.tasks[0].period for each in steps)

    def _steps(self, task: Task) -> list[Step]:
        return steps_of(self.folder / f"worker-{task.worker}.steps")

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
        """SIGKILL to a process and all that it has started; worker 0 where there is no centre."""
        name = name if name in self.processes else "worker-0"
        self.killed.add(name)
        for pid in _family(self.processes[name].pid):
            _kill(pid)

    def _end(self) -> None:
        """Ends what is left: every process in the namespaces, launchers' children as well."""
        for site in (0, 1):
            command = ["ip", "netns", "pids", self.sites.space(site)]
            listed = subprocess.run(command, check=False, capture_output=True, text=True)
            for pid in map(int, listed.stdout.split()):
                _kill(pid)
        for process in self.processes.values():
            _kill(process.pid)
            process.wait()

    def summary(self, ended: bool, warm_periods: int) -> Row:
        """What the workers' files and the interfaces' counters say."""
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
            row |= self._speed([[instant for instant, _, _ in each[warm:]] for each in steps])
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
        """The ends of what the processes have said."""
        paths = sorted(self.folder.glob("*.log"))
        return {path.stem: path.read_text(errors="replace")[-LOG_CHARACTERS:] for path in paths}


def _last(steps: list[Step]) -> int:
    return max((step for _, step, _ in steps), default=0)


def _result(path: Path) -> Row:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _family(pid: int) -> list[int]:
    """A process and everything below it."""
    found = [pid]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in path.read_text().split()]
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
