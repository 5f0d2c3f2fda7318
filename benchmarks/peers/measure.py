"""decoupled-diloco beside what people use instead, on CPU: two workers, one link, the same model.

Every system trains the byte-level GPT of `decoupled_diloco.workloads` with the same data, batch,
inner optimizer, period H and outer optimizer, in two network namespaces (see `links`), one thread
for each worker. Each run is bounded in time; what it did until then is its result.

    python benchmarks/peers/environments.py                       # once: the peers' packages
    python benchmarks/peers/measure.py --wan-tool PATH --repeats 3
    python benchmarks/peers/measure.py --list                     # the cells, and what is done
    python benchmarks/peers/measure.py --only '^(none|ddp|ours-bf16) 0.87M clean speed'

A line of ``--kept`` is a run; what is there is not run again, so the command can be repeated after
it was stopped. Needs root (namespaces); links with delay and loss need the tool.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common import MODELS, Task
from environments import INTO
from faults import FAULTS, SLOWDOWN
from links import ADDRESSES, LINKS, joined, unavailable
from run import Row, Run
from summary import ESTIMATE, NOT_MEASURED, summary
from systems import HERE, SYSTEMS, python_of

sys.path.insert(0, str(HERE.parent))

from evidence import keep

PERIOD = 24
FRAGMENTS = 24
OVERLAP = 2
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5
"""Momentum 0.5 and not 0.9 for every system, because runs have so few outer steps."""

PARAMETERS = {"tiny": 0.04e6, "0.87M": 0.87e6, "25M": 25.5e6}
PERIODS = {"speed": 5, "loss": 25, "slow": 5, **dict.fromkeys(FAULTS, 20), "lose-worker": 8}
"""How long a run of each kind is: "speed" and "slow" are timed after the first period."""

WORKERS = {**dict.fromkeys(PERIODS, 2), "lose-worker": 4}

PERIODS_OF_LARGE = 3
SECONDS_MAX = {"speed": 150.0, "slow": 150.0, "loss": 300.0, **dict.fromkeys(FAULTS, 300.0)}
"""Then a run is ended, and what it did is its result; twice as long for the large model."""

TIMEOUT_SECONDS_MIN = 30.0
"""What torchft's example gives an exchange; more where the link needs more."""


@dataclass(frozen=True)
class Cell:
    """One system in one setting; `kind` is one of `PERIODS`."""

    system: str
    model: str
    link: str
    kind: str

    @property
    def large(self) -> bool:
        """Whether its steps take so long that it gets fewer."""
        return self.model == "25M"

    def __str__(self) -> str:
        return f"{self.system} {self.model} {self.link} {self.kind}"


def cells(models: Iterable[str]) -> list[Cell]:
    """In the order in which a repetition takes them: those to be compared follow each other."""
    settings = [(model, link, "speed") for model in models for link in LINKS]
    settings += [
        (model, "clean", kind)
        for model in models
        for kind in PERIODS
        if model != "25M" and kind != "speed"
    ]
    return [Cell(system, *each) for each in settings for system in SYSTEMS]


def tasks_of(cell: Cell, folder: Path, slowdown: float) -> list[Task]:
    """Of all workers; the sites take turns."""
    workers = WORKERS[cell.kind]
    rate = (LINKS[cell.link].mbit or 1000.0) * 1e6
    exchange_seconds = PARAMETERS[cell.model] * 32 / rate
    return [
        Task(
            system=cell.system,
            folder=str(folder),
            worker=worker,
            workers=workers,
            model=cell.model,
            steps=(PERIODS_OF_LARGE if cell.large else PERIODS[cell.kind]) * PERIOD,
            period=PERIOD,
            outer_lr=OUTER_LR,
            outer_momentum=OUTER_MOMENTUM,
            fragments=FRAGMENTS,
            overlap=OVERLAP,
            slowdown=slowdown * (SLOWDOWN if cell.kind == "slow" and worker == 1 else 1.0),
            snapshots=cell.kind in FAULTS,
            timeout_seconds=max(TIMEOUT_SECONDS_MIN, 20 * exchange_seconds),
            addresses=tuple(ADDRESSES[n % len(ADDRESSES)] for n in range(workers)),
            centre=ADDRESSES[0],
        )
        for worker in range(workers)
    ]


def measure(cell: Cell, arguments: argparse.Namespace) -> Row:
    """One run, from the first process to the last."""
    system = SYSTEMS[cell.system]
    python = python_of(system, arguments.environments)
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as name,
        joined("ddpeers", LINKS[cell.link], arguments.wan_tool) as sites,
    ):
        tasks = tasks_of(cell, Path(name), arguments.slowdown)
        starts = {f"worker-{task.worker}": system.worker(task, python) for task in tasks}
        if system.centre is not None:
            starts = {"centre": system.centre(tasks[0], python), **starts}
        deadline = time.monotonic() + SECONDS_MAX[cell.kind] * (1 + cell.large)
        run = Run(Path(name), sites, tasks, starts, deadline, FAULTS.get(cell.kind))
        row = run.summary(run.carry_out(), warm_periods=1)
        if arguments.logs:
            row["logs"] = run.logs()
    return {**row, "seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="REGEX", help="of the cells' names")
    parser.add_argument("--repeats", type=int, default=1, help="of all cells, by turns")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS)[1:])
    parser.add_argument("--environments", type=Path, default=INTO)
    parser.add_argument("--wan-tool", type=Path)
    parser.add_argument("--slowdown", type=float, default=1.0, help="of all workers' steps")
    parser.add_argument("--kept", type=Path, default=Path("peers.jsonl"))
    parser.add_argument("--list", action="store_true", help="the cells; nothing is run")
    parser.add_argument("--logs", action="store_true", help="keep those of good runs too")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces go as well
    missing = unavailable()
    if missing:
        sys.exit(f"no links here: {missing}")
    lines = arguments.kept.read_text().splitlines() if arguments.kept.exists() else []
    done = {(row["cell"], row["repeat"]) for row in map(json.loads, lines)}
    chosen = [cell for cell in cells(arguments.models) if re.search(arguments.only, str(cell))]
    for repeat in range(arguments.repeats):
        for cell in chosen:
            if arguments.list:
                print(repeat, cell, "done" if (str(cell), repeat) in done else "")
            elif (str(cell), repeat) not in done:
                row = {"cell": str(cell), "repeat": repeat, **measure(cell, arguments)}
                with arguments.kept.open("a") as file:
                    print(json.dumps(row), file=file)
                shown = {name: value for name, value in row.items() if name != "results"}
                print(json.dumps(shown), flush=True)
    if not arguments.list:
        rows = [json.loads(line) for line in arguments.kept.read_text().splitlines()]
        for row in rows:
            row.pop("logs", None)
        folder = keep(
            "peers",
            estimate=ESTIMATE,
            config={
                "workers": WORKERS,
                "period": PERIOD,
                "fragments": FRAGMENTS,
                "overlap": OVERLAP,
                "outer": [OUTER_LR, OUTER_MOMENTUM],
                "models": MODELS,
                "periods": PERIODS,
            },
            raw=rows,
            result=summary(rows),
            not_measured=NOT_MEASURED,
        )
        print(folder)


if __name__ == "__main__":
    main()
