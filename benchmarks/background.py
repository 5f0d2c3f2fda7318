"""What the background of a learner takes from the thread that trains.

Each learner is a process of its own. It trains in blocks of time, of three kinds by turns: it tells
its `Learner` of its steps; it does so, and the background's threads may take the core from it when
they wake up, as threads usually may; it does not, so that no background has anything to do. All
learners change over at the same moments. Of a thread Linux tells how long it ran, and how long it
waited for a core. The rest of a step's time it stood still, because another thread of its process
held what it needed: the interpreter's lock, or the learner's own.

    python benchmarks/background.py                         # all four cases
    python benchmarks/background.py --case "four, large"
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from evidence import keep, spread
from torch import nn

from decoupled_diloco import Learner
from decoupled_diloco.config import RunConfig, dump_config

ESTIMATE = (
    "a step's background (a report to each of two shards, one fragment of 131 k elements up, one "
    "down) runs 3 ms of Python in 30 turns of 0.1 ms, and 2 ms without the lock. One learner on a "
    "free core: inside step() 0.7 ms, of them 0.1 ms standing still; large operations meet a held "
    "lock seldom, 0.3 ms a step; small ones give the lock away at each operation and get it back "
    "after the turn, 2 to 3 ms a step. Four learners on two cores: a holder that has lost its core "
    "keeps the lock for a slice of 3 ms, so inside step() 1 to 3 ms, p99 10 ms, and outside it "
    "1 ms (large) to 5 ms (small)"
)
LAYERS, WIDTH = 12, 512
"""3.15 M parameters: 24 fragments of 131 k, 263 kB on the wire."""


@dataclass(frozen=True)
class Case:
    """How many learners, and the work of one step: large operations, and small ones."""

    learners: int
    batch: int
    small: int


CASES = {
    "one, large": Case(1, 1350, 0),
    "one, small": Case(1, 16, 130_000),
    "four, large": Case(4, 675, 0),
    "four, small": Case(4, 16, 65_000),
}
"""About 0.3 s a step, where each core has no more learners than its share."""

PORT = 7341
SHARDS = 2
KINDS = ("on", "preempting", "off")
SETTLE = 2
"""Steps at the beginning of a block that are left out."""


def run_config(case: Case, folder: Path) -> RunConfig:
    return RunConfig(
        run={
            "learners": case.learners,
            "budget_steps": 10**7,
            "evaluator": False,
            "folder": str(folder / "run"),
        },
        sync={"fragments": 24, "period": 24, "overlap": 2},
        syncer={
            "host": "127.0.0.1",
            "port": PORT,
            "shards": SHARDS,
            "token_file": str(folder / "token"),
        },
    )


class Clocks:
    """What the calling thread has spent: seconds of the wall, of a core, of waiting for a core."""

    def __init__(self) -> None:
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def read(self) -> tuple[float, float, float]:
        """All three, of this moment."""
        _, queued, _ = os.pread(self._file, 80, 0).split()
        return time.perf_counter(), time.thread_time(), int(queued) * 1e-9


class Collections:
    """Seconds of Python's cycle collector in this process."""

    def __init__(self) -> None:
        self.seconds = self._begun = 0.0
        gc.callbacks.append(self._called)

    def _called(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._begun


def work_of(case: Case) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and one step of its training: the same work each time."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch, little = torch.randn(case.batch, WIDTH), torch.zeros(16)

    def train() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for number in range(case.small):
            little.add_(1.0 if number % 2 else -1.0)

    return model, train


def measure(name: str, address: str, number: int, blocks: int, seconds: float) -> dict[str, Any]:
    """Trains through the blocks; a row for each step, in microseconds."""
    torch.set_num_threads(1)
    case = CASES[name]
    model, train = work_of(case)
    for _ in range(3):
        train()
    me = f"learner-{number}"
    with (
        tempfile.TemporaryDirectory() as folder,
        Learner(
            model,
            address,
            token="benchmark",
            learner_id=me,
            tape=Path(folder) / f"{me}.jsonl",
            join_timeout=60,
        ) as learner,
    ):
        rows = list(steps_of(learner, train, case, blocks, seconds))
    return {"rows": rows}


def steps_of(
    learner: Learner, train: Callable[[], None], case: Case, blocks: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """A row for each step; those at the beginning of a block are left out."""
    clocks, collections = Clocks(), Collections()
    first = last = int(time.time() // seconds) + 1
    steps = 0
    while (block := int(time.time() // seconds)) < first + len(KINDS) * blocks:
        steps, last = steps + 1 if block == last else 0, block
        kind = KINDS[block % len(KINDS)]
        if steps == 0:
            let_others_preempt(kind == "preempting")
        process, collected, held = time.process_time(), collections.seconds, versions_of(learner)
        begun = clocks.read()
        train()
        trained = clocks.read()
        if kind != "off":
            learner.step(tokens=case.batch)
        done = clocks.read()
        others = time.process_time() - process - (done[1] - begun[1])
        if steps >= SETTLE and block >= first:
            yield {
                "block": (block - first) // len(KINDS),
                "kind": kind,
                "work": spent(begun, trained),
                "inside": spent(trained, done),
                "others": round(1e6 * others),
                "collector": round(1e6 * (collections.seconds - collected)),
                "versions": versions_of(learner) - held,
            }


def let_others_preempt(may: bool) -> None:
    """Whether this process's other threads may take the core from this one when they wake up."""
    policy = os.SCHED_OTHER if may else os.SCHED_BATCH
    for thread in (int(path.name) for path in Path("/proc/self/task").iterdir()):
        if thread != threading.get_native_id():
            with suppress(ProcessLookupError):
                os.sched_setscheduler(thread, policy, os.sched_param(0))


def versions_of(learner: Learner) -> int:
    """How many versions the parameters have taken, over all fragments."""
    return sum(int(version.rpartition(".")[2]) for version in learner.versions)


WALL, RAN, QUEUED, STILL = range(4)
"""Places in what `spent` tells."""


def spent(begun: tuple[float, ...], done: tuple[float, ...]) -> list[int]:
    """Microseconds: of the wall, of the core, in the core's queue, standing still."""
    wall, ran, queued = (after - before for before, after in zip(begun, done, strict=True))
    return [round(1e6 * each) for each in (wall, ran, queued, wall - ran - queued)]


def summarise(raw: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds a step; the spread is that of the learners' blocks."""
    blocks = [block for learner in raw for block in blocks_of(learner["rows"])]
    rows = [row for learner in raw for row in learner["rows"]]
    step = statistics.median(row["work"][WALL] for row in rows if row["kind"] == "off")

    def of(kind: str, key: str, place: int) -> dict[str, float]:
        return spread([block[kind][key][place] / 1e3 for block in blocks])

    def more(place: int) -> list[float]:
        return [block["on"]["work"][place] - block["off"]["work"][place] for block in blocks]

    lost = [
        (block["on"]["inside"][RAN] + block["on"]["inside"][STILL] + still) / 1e3
        for block, still in zip(blocks, more(STILL), strict=True)
    ]
    return {
        "step_ms": step / 1e3,
        "steps": sum(row["kind"] == "on" for row in rows),
        "inside_ms": of("on", "inside", WALL),
        "inside_ran_ms": of("on", "inside", RAN),
        "inside_queued_ms": of("on", "inside", QUEUED),
        "inside_still_ms": of("on", "inside", STILL),
        "inside_if_preempting_ms": of("preempting", "inside", WALL),
        "inside_if_preempting_queued_ms": of("preempting", "inside", QUEUED),
        "inside_if_preempting_still_ms": of("preempting", "inside", STILL),
        "work_ms": of("on", "work", WALL),
        "work_if_preempting_ms": of("preempting", "work", WALL),
        "work_more_still_ms": spread([each / 1e3 for each in more(STILL)]),
        "work_more_ran_ms": spread([each / 1e3 for each in more(RAN)]),
        "others_ran_ms": of("on", "others", 0),
        "collector_ms": of("on", "collector", 0),
        "versions_a_step": spread([block["on"]["versions"][0] for block in blocks]),
        "versions_a_step_if_preempting": spread(
            [block["preempting"]["versions"][0] for block in blocks]
        ),
        "lost_ms": spread(lost),
    }


def blocks_of(rows: list[dict[str, Any]]) -> list[dict[str, dict[str, list[float]]]]:
    """The means of each block, for each kind."""
    found = []
    for number in sorted({row["block"] for row in rows}):
        mine = [row for row in rows if row["block"] == number]
        kinds = {kind: [row for row in mine if row["kind"] == kind] for kind in KINDS}
        if all(kinds.values()):
            found.append({kind: means(some) for kind, some in kinds.items()})
    return found


def means(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Of each column, as a list even where it is one number."""

    def of(key: str) -> list[float]:
        lists = [row[key] if isinstance(row[key], list) else [row[key]] for row in rows]
        return [statistics.fmean(each) for each in zip(*lists, strict=True)]

    return {key: of(key) for key in ("work", "inside", "others", "collector", "versions")}


@contextmanager
def syncer(case: Case, folder: Path) -> Any:
    """The shards, each in a process of its own."""
    (folder / "token").write_text("benchmark")
    (folder / "run.toml").write_text(dump_config(run_config(case, folder)))
    serve = [sys.executable, "-m", "decoupled_diloco.cli", "syncer", str(folder / "run.toml")]
    with (folder / "shards.log").open("wb") as log:
        shards = [
            subprocess.Popen([*serve, "--shard", str(number)], stdout=log, stderr=log)
            for number in range(SHARDS)
        ]
    try:
        yield f"http://127.0.0.1:{PORT}"
    finally:
        for shard in shards:
            shard.terminate()
        for shard in shards:
            shard.wait()


def run_case(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    case = CASES[name]
    command = [sys.executable, __file__, "--measure", "--case", name]
    command += ["--blocks", str(arguments.blocks), "--seconds", str(arguments.seconds)]
    with tempfile.TemporaryDirectory() as folder, syncer(case, Path(folder)) as address:
        learners = [
            subprocess.Popen(
                [*command, "--address", address, "--number", str(number)], stdout=subprocess.PIPE
            )
            for number in range(case.learners)
        ]
        told = [learner.communicate()[0] for learner in learners]
    return [json.loads(each) for each in told]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--blocks", type=int, default=5, help="of each kind")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a block")
    parser.add_argument("--name", default="background", help="folder of the results")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        told = arguments.case, arguments.address, arguments.number
        print(json.dumps(measure(*told, arguments.blocks, arguments.seconds)))
        return
    raw, result = {}, {}
    for name in [arguments.case] if arguments.case else CASES:
        raw[name] = run_case(name, arguments)
        result[name] = summarise(raw[name])
        print(name, json.dumps(result[name], indent=1), flush=True)
    keep(
        arguments.name,
        estimate=ESTIMATE,
        config=vars(arguments) | {"cases": {name: vars(case) for name, case in CASES.items()}},
        raw=raw,
        result=result,
        not_measured="CUDA, where most operations only wait in a queue of the device; more than "
        "two cores; models whose digests take milliseconds",
    )


if __name__ == "__main__":
    main()
