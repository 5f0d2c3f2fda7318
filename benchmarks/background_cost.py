"""Time that a learner's background threads take from the training thread.

Each learner is a separate process. It trains in blocks of time of three kinds, in turns:

- "on": it calls `Learner.step`.
- "preempting": the same, and background threads may preempt the training thread when they wake up,
  as threads usually may.
- "off": it does not call `step`, so the background is idle.

All learners change over at the same times. Linux reports how long a thread ran, and how long it
waited for a core. For the rest of a step's time the thread was blocked: another thread of its
process held the GIL or the learner's lock.

    python benchmarks/background_cost.py                         # all four cases
    python benchmarks/background_cost.py --case "four, large"
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_runs import TOKEN, a_syncer, answer, called, start
from evidence import keep, options, spread
from torch import nn

from decoupled_diloco import Learner, Observability, Timeouts

LAYERS, WIDTH = 12, 512
"""3.15 M parameters: 24 fragments of 131 k, 263 kB each on the wire."""


@dataclass(frozen=True)
class Case:
    """Number of learners, and the work per step: batch of large operations, count of small ones."""

    learners: int
    batch: int
    small: int


CASES = {
    "one, large": Case(1, 1350, 0),
    "one, small": Case(1, 16, 130_000),
    "four, large": Case(4, 675, 0),
    "four, small": Case(4, 16, 65_000),
}
"""About 0.3 s per step if each core has no more learners than its share."""

KINDS = ("on", "preempting", "off")
SETTLE = 2
"""Steps that are left out at the start of a block."""


class Clocks:
    """Times of the calling thread: wall clock, CPU, waiting for a core; in seconds."""

    def __init__(self) -> None:
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def read(self) -> tuple[float, float, float]:
        """Return the current values of all three."""
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
    """Return a model, and a function that trains it for one step; all steps have equal work."""
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
    """Train through the blocks; return a row per step, in microseconds."""
    torch.set_num_threads(1)
    case, me = CASES[name], f"learner-{number}"
    model, train = work_of(case)
    for _ in range(3):
        train()
    own = {"auth_token": TOKEN, "name": me, "timeouts": Timeouts(join=60.0)}
    with (
        tempfile.TemporaryDirectory() as folder,
        Learner(
            model,
            address,
            observability=Observability(event_tape=Path(folder) / f"{me}.jsonl"),
            **own,
        ) as learner,
    ):
        return {"rows": list(steps_of(learner, train, case, blocks, seconds))}


def steps_of(
    learner: Learner, train: Callable[[], None], case: Case, blocks: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield a row per step, without the steps at the start of a block."""
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
    """Allow or forbid other threads of this process to preempt this one when they wake up."""
    policy = os.SCHED_OTHER if may else os.SCHED_BATCH
    for thread in (int(path.name) for path in Path("/proc/self/task").iterdir()):
        if thread != threading.get_native_id():
            with suppress(ProcessLookupError):
                os.sched_setscheduler(thread, policy, os.sched_param(0))


def versions_of(learner: Learner) -> int:
    """Return the number of versions that the parameters have taken, over all fragments."""
    return sum(int(version.rpartition(".")[2]) for version in learner.versions)


WALL, RAN, QUEUED, STILL = range(4)
"""Indices into the result of `spent`."""


def spent(begun: tuple[float, ...], done: tuple[float, ...]) -> list[int]:
    """Return microseconds of wall clock, running, queued for a core, and blocked."""
    wall, ran, queued = (after - before for before, after in zip(begun, done, strict=True))
    return [round(1e6 * each) for each in (wall, ran, queued, wall - ran - queued)]


def summarise(raw: list[dict[str, Any]]) -> dict[str, Any]:
    """Return milliseconds per step; the spread is over the learners' blocks."""
    blocks = [block for learner in raw for block in blocks_of(learner["rows"])]
    rows = [row for learner in raw for row in learner["rows"]]

    def of(kind: str, key: str, place: int) -> dict[str, float]:
        return spread(block[kind][key][place] / 1e3 for block in blocks)

    def more(place: int) -> list[float]:
        return [
            (block["on"]["work"][place] - block["off"]["work"][place]) / 1e3 for block in blocks
        ]

    lost = [
        (block["on"]["inside"][RAN] + block["on"]["inside"][STILL]) / 1e3 + still
        for block, still in zip(blocks, more(STILL), strict=True)
    ]
    step = statistics.median(row["work"][WALL] for row in rows if row["kind"] == "off")
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
        "work_more_still_ms": spread(more(STILL)),
        "work_more_ran_ms": spread(more(RAN)),
        "others_ran_ms": of("on", "others", 0),
        "collector_ms": of("on", "collector", 0),
        **{
            f"versions_a_step{name}": spread(block[kind]["versions"][0] for block in blocks)
            for name, kind in {"": "on", "_if_preempting": "preempting"}.items()
        },
        "lost_ms": spread(lost),
    }


def blocks_of(rows: list[dict[str, Any]]) -> list[dict[str, dict[str, list[float]]]]:
    """Return the means of each block, by kind."""
    found = []
    for number in sorted({row["block"] for row in rows}):
        mine = [row for row in rows if row["block"] == number]
        kinds = {kind: [row for row in mine if row["kind"] == kind] for kind in KINDS}
        if all(kinds.values()):
            found.append({kind: means(some) for kind, some in kinds.items()})
    return found


def means(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the mean of each column, always as a list."""

    def of(key: str) -> list[float]:
        lists = [row[key] if isinstance(row[key], list) else [row[key]] for row in rows]
        return [statistics.fmean(each) for each in zip(*lists, strict=True)]

    return {key: of(key) for key in ("work", "inside", "others", "collector", "versions")}


def main() -> None:
    arguments = options(case=str, blocks=5, seconds=6.0, name="background")
    raw, result = {}, {}
    for name in [arguments.case] if arguments.case else CASES:
        case = CASES[name]
        tables = {
            "run": {"learners": case.learners},
            "sync": {"fragments": 24},
            "syncer": {"shards": 2},
        }
        with a_syncer(tables) as syncer:
            own = arguments.blocks, arguments.seconds
            learners = [start(measure, name, syncer.address, n, *own) for n in range(case.learners)]
            raw[name] = [answer(learner) for learner in learners]
        result[name] = summarise(raw[name])
        print(name, json.dumps(result[name], indent=1), flush=True)
    config = vars(arguments) | {"cases": {name: vars(case) for name, case in CASES.items()}}
    keep(arguments.name, of="background", config=config, raw=raw, result=result)


if __name__ == "__main__":
    called() or main()
