"""Comparison of decoupled-diloco with other systems on CPU: two workers, one link, the same model.

Every system trains the byte-level GPT of `decoupled_diloco.workloads` with the same data, batch,
inner optimizer, period H and outer optimizer. The workers are in two network namespaces (see
`links`), with one thread each. Each run has a time limit; its progress until then is its result.

    python benchmarks/peers/environments.py                       # once: the peers' packages
    python benchmarks/peers/measure.py --wan-tool PATH --repeats 3
    python benchmarks/peers/measure.py --list                     # the cells, and which are done
    python benchmarks/peers/measure.py --only '^(none|ddp|ours-bf16) 0.87M clean speed'

Each line of ``--kept`` is a run. Recorded runs are not repeated, so the command can be stopped and
repeated. It needs root (namespaces), and the tool for links with delay and loss.
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import MODELS, Task
from environments import INTO
from links import ADDRESSES, LINKS, joined, unavailable
from peer_run import FAULTS, Row, Run
from peer_systems import HERE, SYSTEMS

sys.path.insert(0, str(HERE.parent))

from evidence import keep, options

from decoupled_diloco_lab.study.statistics import Equivalence, tost

PERIOD = 24
FRAGMENTS = 24
OVERLAP = 2
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5
"""All systems use momentum 0.5, not 0.9, because the runs have few outer steps."""

PARAMETERS = {"tiny": 0.04e6, "0.24M": 0.24e6, "0.87M": 0.87e6, "25M": 25.5e6}
PERIODS = {
    "speed": 5,
    "paced": 5,
    "loss": 25,
    "slow": 5,
    **dict.fromkeys(FAULTS, 20),
    "lose-worker": 8,
    "lose-paced": 8,
}
"""Periods per run of each kind; "speed", "paced" and "slow" are timed after the first period."""

WORKERS = {**dict.fromkeys(PERIODS, 2), "paced": 4, "lose-worker": 4, "lose-paced": 4}
PACE_SECONDS = 0.7
"""A step of four workers together computes for 0.7 s, half of the time of two cores."""

LOSS_MODEL = "0.24M"
"""The model of the runs whose losses are compared; their seed is the number of the repetition."""

MARGIN = 0.005
"""Largest relative difference between two losses that count as equivalent."""

TARGET_LOSSES = {"paced": 2.3, "lose-paced": 2.0}
"""The loss whose time is noted: of paced workers, which take the same time on any machine. The
second one is reached only after a worker was lost."""

PERIODS_OF_LARGE = 3
SLOWDOWN = 4.0
SECONDS_MAX = {
    "speed": 150.0,
    "paced": 240.0,
    "slow": 150.0,
    "loss": 300.0,
    **dict.fromkeys(FAULTS, 300.0),
}
"""Time limit of a run, which ends it with its progress as the result; doubled for the large model.
"""

TIMEOUT_SECONDS_MIN = 30.0
"""Timeout of an exchange in torchft's example; slow links use a longer one."""


@dataclass(frozen=True)
class Cell:
    """One system in one setting; `kind` is a key of `PERIODS`."""

    system: str
    model: str
    link: str
    kind: str

    @property
    def large(self) -> bool:
        """Whether its steps take so long that it runs fewer of them."""
        return self.model == "25M"

    def __str__(self) -> str:
        return f"{self.system} {self.model} {self.link} {self.kind}"


def cells(models: Iterable[str]) -> list[Cell]:
    """Return the cells in the order of a repetition: cells to be compared follow each other."""
    settings = [(LOSS_MODEL, "clean", "loss")] if LOSS_MODEL in models else []
    models = [model for model in models if model != LOSS_MODEL]
    settings += [(model, link, "speed") for model in models for link in LINKS]
    small = [model for model in models if model != "25M"]
    settings += [(model, link, "paced") for model in small for link in LINKS]
    settings += [
        (model, "clean", kind)
        for model in small
        for kind in PERIODS
        if kind not in ("speed", "paced", "loss")
    ]
    return [Cell(system, *each) for each in settings for system in SYSTEMS]


def tasks_of(cell: Cell, folder: Path, slowdown: float, seed: int) -> list[Task]:
    """Return the tasks of all workers, which alternate between the sites."""
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
            seed=seed,
            steps=(PERIODS_OF_LARGE if cell.large else PERIODS[cell.kind]) * PERIOD,
            period=PERIOD,
            outer_lr=OUTER_LR,
            outer_momentum=OUTER_MOMENTUM,
            fragments=FRAGMENTS,
            overlap=OVERLAP,
            slowdown=slowdown * (SLOWDOWN if cell.kind == "slow" and worker == 1 else 1.0),
            pace_seconds=PACE_SECONDS if cell.kind in TARGET_LOSSES else 0.0,
            snapshots=cell.kind in FAULTS,
            timeout_seconds=max(TIMEOUT_SECONDS_MIN, 20 * exchange_seconds),
            addresses=tuple(ADDRESSES[n % len(ADDRESSES)] for n in range(workers)),
            center=ADDRESSES[0],
        )
        for worker in range(workers)
    ]


def measure(cell: Cell, arguments: Namespace, repeat: int) -> Row:
    """Carry out one run, from the first process to the last."""
    system = SYSTEMS[cell.system]
    python = system.python(arguments.environments)
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as name,
        joined("ddpeers", LINKS[cell.link], arguments.wan_tool) as sites,
    ):
        seed = repeat if cell.kind == "loss" else 0
        tasks = tasks_of(cell, Path(name), arguments.slowdown, seed)
        starts = {f"worker-{task.worker}": system.worker(task, python) for task in tasks}
        if system.center is not None:
            starts = {"center": system.center(tasks[0], python), **starts}
        deadline = time.monotonic() + SECONDS_MAX[cell.kind] * (1 + cell.large)
        run = Run(Path(name), sites, tasks, starts, deadline, FAULTS.get(cell.kind))
        row = run.summary(run.carry_out(), warm_periods=1, target=TARGET_LOSSES.get(cell.kind, 0.0))
        if arguments.logs:
            row["logs"] = run.logs()
    return {**row, "seconds": round(time.monotonic() - begun, 1)}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Group the rows by kind of run, then by model and link, then by system."""
    grouped: dict[str, dict[str, dict[str, list[Row]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for row in rows:
        system, model, link, kind = row["cell"].split(" ")
        grouped[kind][f"{model} {link}"][system].append(row)
    found: dict[str, Any] = {
        kind: {
            where: {
                system: _timed(each, systems.get("none", []))
                if kind not in FAULTS
                else _faulty(each)
                for system, each in systems.items()
            }
            for where, systems in settings.items()
        }
        for kind, settings in grouped.items()
    }
    for where, systems in grouped["loss"].items():
        for system, gap in gaps_of(systems).items():
            found["loss"][where][system]["gap"] = asdict(gap) | {"equivalent": gap.equivalent}
    return found


def gaps_of(systems: dict[str, list[Row]]) -> dict[str, Equivalence]:
    """Compare the loss of each system with that of the peer whose mean loss is the lowest."""
    losses = {
        system: [row["losses"][0] for row in sorted(rows, key=lambda row: row["repeat"])]
        for system, rows in systems.items()
        if all(row["finished"] for row in rows)
    }
    peers = [system for system in losses if SYSTEMS[system].environment]
    if not peers:
        return {}
    best = min(peers, key=lambda system: statistics.mean(losses[system]))
    return {
        system: tost((system, each), (best, losses[best]), MARGIN)
        for system, each in losses.items()
        if system != best and len(each) == len(losses[best]) > 1
    }


def _timed(rows: list[Row], alone: list[Row]) -> dict[str, Any]:
    """Return the slowest worker's rate relative to no communication in the same repeat."""
    rates = {row["repeat"]: row["rate"] for row in alone if "rate" in row}
    timed = [row for row in rows if "rate" in row]
    found: dict[str, Any] = {
        "finished": sum(row["finished"] for row in rows),
        "runs": len(rows),
        "steps": [min(row["steps"]) for row in rows],
        "rate": [row["rate"] for row in timed],
        "percent_of_none": [
            100 * row["rate"] / rates[row["repeat"]] for row in timed if row["repeat"] in rates
        ],
        "seconds_of_all_steps": [
            max(steps / rate for steps, rate in zip(row["steps"], row["rates"], strict=True))
            for row in timed
        ],
        "longest_gap_seconds": [max(row["gaps"]) for row in timed],
        "seconds_to_target": [row.get("seconds_to_target") for row in timed],
        "bytes_per_step": [sum(row["sent_per_step"]) / len(row["steps"]) for row in timed],
    }
    losses = [loss for row in rows for loss in row["losses"][:1] if loss is not None]
    return found | ({"loss": statistics.mean(losses)} if losses else {})


def _faulty(rows: list[Row]) -> dict[str, Any]:
    """Return the seconds without a step of each worker, and when a killed worker stepped again."""
    return {
        "finished": sum(row["finished"] for row in rows),
        "runs": len(rows),
        **{
            name: [row[name] for row in rows if name in row]
            for name in ("gaps", "steps_in_minute", "back_seconds", "seconds_to_target")
        },
    }


def main() -> None:
    arguments = options(
        only="",  # regular expression for the cells' names
        repeats=1,  # repetitions of all cells, in turns
        models=list(MODELS)[1:],
        environments=INTO,
        wan_tool=Path,
        slowdown=1.0,  # factor on all workers' steps
        kept=Path("peers.jsonl"),
        list=False,  # list the cells without running them
        logs=False,  # also keep the logs of successful runs
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    if missing := unavailable():
        sys.exit(f"links are not available: {missing}")
    lines = arguments.kept.read_text().splitlines() if arguments.kept.exists() else []
    done = {(row["cell"], row["repeat"]) for row in map(json.loads, lines)}
    chosen = [cell for cell in cells(arguments.models) if re.search(arguments.only, str(cell))]
    for repeat in range(arguments.repeats):
        for cell in chosen:
            if arguments.list:
                print(repeat, cell, "done" if (str(cell), repeat) in done else "")
            elif (str(cell), repeat) not in done:
                row = {"cell": str(cell), "repeat": repeat, **measure(cell, arguments, repeat)}
                with arguments.kept.open("a") as file:
                    print(json.dumps(row), file=file)
                shown = {name: value for name, value in row.items() if name != "results"}
                print(json.dumps(shown), flush=True)
    if not arguments.list:
        rows = [json.loads(line) for line in arguments.kept.read_text().splitlines()]
        for row in rows:
            row.pop("logs", None)
        outer = [OUTER_LR, OUTER_MOMENTUM]
        own = {"period": PERIOD, "fragments": FRAGMENTS, "overlap": OVERLAP, "outer": outer}
        config = {"workers": WORKERS, **own, "models": MODELS, "periods": PERIODS}
        print(keep("peers", config=config, raw=rows, result=summary(rows)))


if __name__ == "__main__":
    main()
