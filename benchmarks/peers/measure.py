"""decoupled-diloco beside what people use instead, on CPU: two workers, one link, the same model.

Every system trains the byte-level GPT of `decoupled_diloco.workloads` with the same data, batch,
inner optimizer, period H and outer optimizer, in two network namespaces (see `links`), one thread
for each worker. Each run is bounded in time; what it did until then is its result.

    python benchmarks/peers/environments.py                       # once: the peers' packages
    python benchmarks/peers/measure.py --wan-tool PATH --repeats 3
    python benchmarks/peers/measure.py --list                     # the cells, and what is done
    python benchmarks/peers/measure.py --only '^(none|ddp|ours-bf16) 0.87M clean'

A line of ``--kept`` is a run; what is there is not run again, so the command can be repeated after
it was stopped. Needs root (namespaces); links with delay and loss need the tool.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from common import MODELS, Task
from environments import INTO
from links import ADDRESSES, LINKS, Sites, joined, unavailable
from systems import SYSTEMS, Start, environment_of, python_of

Row = dict[str, Any]

WORKERS = 2
PERIOD = 24
OVERLAP = 2
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.5}
WARM_PERIODS = 1
"""Before the measured part of a run: whole periods, so that no first exchange is in it."""

PARAMETERS = {"0.87M": 0.87e6, "25M": 25.5e6}
SECONDS_MAX = {"0.87M": 240.0, "25M": 600.0}
POLL_SECONDS = 0.1
TIMEOUT_SECONDS_MIN = 30.0


@dataclass(frozen=True)
class Cell:
    """One system in one setting."""

    system: str
    model: str
    link: str

    def __str__(self) -> str:
        return f"{self.system} {self.model} {self.link}"


def cells() -> list[Cell]:
    """In the order in which a repetition takes them: those to be compared follow each other."""
    return [Cell(system, model, link) for model in MODELS for link in LINKS for system in SYSTEMS]


@dataclass
class Run:
    """A run that goes on: its processes and its folder."""

    cell: Cell
    folder: Path
    sites: Sites
    environments: Path
    started: dict[str, subprocess.Popen[bytes]]

    def start(self, name: str, start: Start) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.started[name] = subprocess.Popen(
                [*self.sites.command(start.site), *start.command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment_of(start),
                cwd=self.folder,
                start_new_session=True,
            )

    def workers(self) -> list[subprocess.Popen[bytes]]:
        return [process for name, process in self.started.items() if name.startswith("worker")]

    def wait(self, deadline: float) -> bool:
        """Until all workers have ended; whether they have by then."""
        while any(process.poll() is None for process in self.workers()):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def end(self) -> None:
        """Ends what is left: every process in the namespaces, launchers' children as well."""
        for site in (0, 1):
            command = ["ip", "netns", "pids", self.sites.space(site)]
            listed = subprocess.run(command, check=False, capture_output=True, text=True)
            for pid in map(int, listed.stdout.split()):
                _kill(pid)
        for process in self.started.values():
            _kill(process.pid)
            process.wait()

    def logs(self) -> dict[str, str]:
        """The ends of what the processes have said."""
        paths = sorted(self.folder.glob("*.log"))
        return {path.stem: path.read_text(errors="replace")[-1500:] for path in paths}


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def tasks_of(cell: Cell, folder: Path, steps: int) -> list[Task]:
    link = LINKS[cell.link]
    exchange = PARAMETERS[cell.model] * 32 / ((link.mbit or 1000.0) * 1e6)
    return [
        Task(
            system=cell.system,
            folder=str(folder),
            worker=worker,
            workers=WORKERS,
            model=cell.model,
            steps=steps,
            period=PERIOD,
            **OUTER,
            fragments=PERIOD,
            overlap=OVERLAP,
            slowdown=1.0,
            timeout_seconds=max(TIMEOUT_SECONDS_MIN, 20 * exchange),
            addresses=ADDRESSES,
            centre=ADDRESSES[0],
        )
        for worker in range(WORKERS)
    ]


def measure(cell: Cell, arguments: argparse.Namespace) -> Row:
    """One run, from the first process to the last."""
    system, limit = SYSTEMS[cell.system], SECONDS_MAX[cell.model]
    with (
        tempfile.TemporaryDirectory() as name,
        joined("ddpeers", LINKS[cell.link], arguments.wan_tool) as sites,
    ):
        run = Run(cell, Path(name), sites, arguments.environments, {})
        tasks = tasks_of(cell, run.folder, arguments.periods * PERIOD)
        python = python_of(system, arguments.environments)
        begun = time.monotonic()
        try:
            if system.centre is not None:
                run.start("centre", system.centre(tasks[0], python))
            for task in tasks:
                run.start(f"worker-{task.worker}", system.worker(task, python))
            ended = run.wait(begun + limit)
        finally:
            run.end()
        time.sleep(0.3)  # one more sample of the counters
        row = summary(run, tasks, ended)
        row["seconds"] = round(time.monotonic() - begun, 1)
        if arguments.logs:
            row["logs"] = run.logs()
    return row


def summary(run: Run, tasks: list[Task], ended: bool) -> Row:
    """What the workers' files and the interfaces' counters say."""
    steps = [list(_ends(run.folder / f"worker-{task.worker}.steps")) for task in tasks]
    results = [_result(run.folder / f"worker-{task.worker}.json") for task in tasks]
    if not all(len(each) > 2 for each in steps):
        return {"finished": False, "steps": [len(each) - 1 for each in steps], "logs": run.logs()}
    finished = ended and all(results)
    warm = WARM_PERIODS * PERIOD if finished else 0
    windows = [each[warm:] for each in steps]
    gaps = [[after - before for before, after in pairwise(each)] for each in windows]
    begin, end = max(each[0] for each in windows), min(each[-1] for each in windows)
    sent = run.sites.passed(begin, end)
    row: Row = {
        "finished": finished,
        "steps": [len(each) - 1 for each in steps],
        "rates": [len(each) / sum(each) for each in gaps],
        "medians": [median(each) for each in gaps],
        "gaps": [max(each) for each in gaps],
        "sent_per_step": [each / min(map(len, gaps)) for each in sent],
        "losses": [result.get("loss") for result in results],
        "results": results,
    }
    row["rate"] = min(row["rates"])
    if not finished:
        row["logs"] = run.logs()
    return row


def _ends(path: Path) -> Iterator[float]:
    """When a worker began, and when each of its steps ended."""
    for line in path.read_text().splitlines() if path.exists() else []:
        what, instant, _ = line.split()
        if what != "end":
            yield float(instant)


def _result(path: Path) -> Row:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="REGEX", help="of the cells' names")
    parser.add_argument("--repeats", type=int, default=1, help="of all cells, by turns")
    parser.add_argument(
        "--periods", type=int, default=5, help="of 24 steps; the first is not timed"
    )
    parser.add_argument("--environments", type=Path, default=INTO)
    parser.add_argument("--wan-tool", type=Path)
    parser.add_argument("--kept", type=Path, default=Path("peers.jsonl"))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--logs", action="store_true", help="keep them for good runs too")
    arguments = parser.parse_args()
    missing = unavailable()
    if missing:
        sys.exit(f"no links here: {missing}")
    lines = arguments.kept.read_text().splitlines() if arguments.kept.exists() else []
    done = {(row["cell"], row["repeat"]) for row in map(json.loads, lines)}
    chosen = [cell for cell in cells() if re.search(arguments.only, str(cell))]
    for repeat in range(arguments.repeats):
        for cell in chosen:
            if arguments.list:
                print(repeat, cell, "done" if (str(cell), repeat) in done else "")
            elif (str(cell), repeat) not in done:
                row = {"cell": str(cell), "repeat": repeat, **measure(cell, arguments)}
                with arguments.kept.open("a") as file:
                    print(json.dumps(row), file=file)
                print(json.dumps({k: v for k, v in row.items() if k != "results"}), flush=True)


if __name__ == "__main__":
    main()
