"""Runs in virtual time, one per cell of a table and seed, and plain training loops."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import harmonic_mean
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from downstream import abilities
from evidence import ABOUT, keep, options
from torch import Tensor, nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.plugins import registered
from decoupled_diloco.config.sync import bits_of
from decoupled_diloco.merge.outer import NesterovSGD
from decoupled_diloco.protocol.messages import Apply, RoundFinished, StepFinished
from decoupled_diloco.workloads import Workload, load_workload
from decoupled_diloco.workloads.gpt import GptWorkload
from decoupled_diloco_lab.simulate import LearnerSpec
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.simulate.training import virtual_run
from decoupled_diloco_lab.study.functions import train_plainly
from decoupled_diloco_lab.study.statistics import interval as student

Row = dict[str, Any]
Of = TypeVar("Of")

SIZE = {"layers": 4, "width": 64, "heads": 4, "context": 128, "eval_batches": 32}
SEQUENCES = 32
"""Sequences in the global batch."""

LEARNERS = 4
CHECKPOINT_SECONDS = 60.0
"""Interval of the learners' checkpoints in runs with failures."""

LONGEST = 10
"""How many times as long as a run without failures one with failures may last."""

RATES = {"adamw": 8e-3, "muon": 1.6e-2}
"""Tuned inner learning rates."""


class Watch:
    """Counts from the tape: discarded tokens, rounds, their participants, and ages."""

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.rounds = 0
        self.discarded: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.folded: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Count one event and its effects."""
        if isinstance(event, StepFinished):
            self.tokens[process] += event.tokens
        for effect in effects:
            if isinstance(effect, Apply):
                self.discarded[process] += effect.discarded_tokens
            elif isinstance(effect, RoundFinished) and effect.verdict == "merged":
                self.rounds += 1
                folded = [p for p in effect.participants if p.state == "folded"]
                self.folded.update(p.learner for p in folded)
                self.ages.update(p.age for p in folded)

    def discarded_percent(self, names: Sequence[str]) -> float:
        """Return the share of discarded tokens; an overwritten fragment counts for 1/P."""
        discarded = sum(self.discarded[name] for name in names) / self.fragments
        return 100 * discarded / sum(self.tokens[name] for name in names)

    def participation_percent(self, names: Sequence[str]) -> float:
        """Return the mean share of all merged rounds with contributions of these learners."""
        return 100 * sum(self.folded[name] for name in names) / (self.rounds * len(names))


def trained(workload: Workload, steps: int, parts: int, of: int) -> nn.Module:
    """Return the model after a plain training loop over some parts of the data."""
    model = workload.model()
    train_plainly(workload, model, steps, range(parts), of)
    return model


class Scheduled(NesterovSGD):
    """Nesterov SGD whose rate or momentum changes linearly over all rounds."""

    def __init__(
        self, lr: float, momentum: float, *others: Any, until: Row, rounds: int, **more: Any
    ) -> None:
        super().__init__(lr, momentum, *others, **more)
        self._from = {name: getattr(self, name) for name in until}
        self._until = until
        self._rounds = rounds
        self._done = 0

    def step(self, master: Tensor, gradient: Tensor) -> None:
        part = min(1.0, self._done / (self._rounds - 1))
        for name, end in self._until.items():
            setattr(self, name, self._from[name] + part * (end - self._from[name]))
        self._done += 1
        super().step(master, gradient)

    def state_dict(self) -> dict[str, Tensor]:  # a shard makes a new optimizer for each outer step
        return {**super().state_dict(), "done": torch.tensor(self._done)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._done = int(state["done"])
        self.momentum = self.momentum or 0.9  # with momentum 0 the buffer would not be loaded
        super().load_state_dict({name: state[name] for name in state if name != "done"})


def global_steps(speeds: Sequence[float], steps: int) -> int:
    """Return the fastest learner's steps while all learners together take this number."""
    return round(steps / sum(min(speeds) / speed for speed in speeds))


def tokens_per_step(workload: Workload, learners: int) -> float:
    """Return the tokens of a step of all learners: the mean of several, as utterances differ."""
    parts = (islice(workload.batches(part, learners), 16) for part in range(learners))
    return learners * statistics.fmean(workload.tokens(batch) for part in parts for batch in part)


@dataclass(frozen=True)
class Cell:
    """One run: number of learners (data-parallel: regions), batch and settings.

    Attributes:
        against: Cell that it is compared with; empty: none.
        plain: Data-parallel training, without the method.
        parts: Parts of the data that plain training takes; 0: all learners' parts.
        batch: Batch per learner; 0: its share of the global batch.
        rate: Inner learning rate; 0: the tuned one.
        speeds: Seconds per step of each learner; `steps` then counts those of all learners.
        until: Final values of entries in `outer` that change over the run.
        chaos: Mean seconds between two failures of the same learner, and until it is back. A step
            takes a second, and the run ends after as many tokens as without failures. The learning
            rate falls over the steps that learners need if they are away that often.
        sites: Sites with relays.
        privacy: The table of this name.
    """

    against: str = ""
    learners: int = LEARNERS
    batch: int = 0
    steps: int = 600
    inner: str = "adamw"
    rate: float = 0.0
    plain: bool = False
    parts: int = 0
    workload: str = "gpt"
    options: dict[str, Any] = field(default_factory=dict)
    speeds: tuple[float, ...] = ()
    chaos: tuple[float, ...] = ()
    sync: dict[str, Any] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)
    sites: tuple[dict[str, Any], ...] = ()
    privacy: dict[str, Any] = field(default_factory=dict)

    def config(self, seed: int) -> RunConfig:
        """Return the settings of the run."""
        size: dict[str, Any] = {} if self.workload in ("speech", "vit") else SIZE
        inner = {"optimizer": self.inner, "learning_rate": self.rate or RATES[self.inner]}
        batch = self.batch or SEQUENCES // self.learners
        budget = {"max_steps": self.steps}
        learner: dict[str, Any] = {}
        if self.speeds:
            budget = {"max_tokens": self.steps * batch * size["context"]}
            size = {**size, "total_steps": global_steps(self.speeds, self.steps)}
        if self.chaos:
            between, repair = self.chaos
            size = {**size, "total_steps": round(self.steps * (1 + repair / between))}
            workload = load_workload(self.workload, {**size, "batch_size": batch, **self.options})
            budget = {"max_tokens": round(self.steps * tokens_per_step(workload, self.learners))}
            learner = {"checkpoint_interval_seconds": CHECKPOINT_SECONDS}
        return RunConfig(
            run={"learners": self.learners, "seed": seed, **budget},
            sync={"fragments": 24, "sync_every": 24, "overlap_steps": 2, **self.sync},
            outer=self.outer,
            learner=learner,
            sites=self.sites,
            privacy=self.privacy,
            # Fixed parts, so that plain training gets the same batches. After a failure, a learner
            # would train those since its checkpoint again, so runs with failures have leases.
            data={"elastic": bool(self.chaos)},
            workload={
                "name": self.workload,
                "options": {**size, **inner, "batch_size": batch, **self.options},
            },
        )

    def measure(self, seed: int) -> Row:
        """Return its final evaluation."""
        begun = time.monotonic()
        workload, model, found = self._plain(seed) if self.plain else self._decoupled(seed)
        found |= workload.evaluate(model)
        if isinstance(workload, GptWorkload):
            found |= abilities(workload, model)
        return {**found, "seconds": round(time.monotonic() - begun, 1)}

    def _decoupled(self, seed: int) -> tuple[Workload, nn.Module, Row]:
        config = self.config(seed)
        specs = [
            LearnerSpec(name, step_seconds=speed, variance=0.05, latency=0.05)
            for name, speed in zip(config.learner_ids, self.speeds, strict=bool(self.speeds))
        ]
        if not self.until:
            return self._trained(config, specs, seed)
        rounds = self.steps // config.sync.sync_every
        scheduled = partial(Scheduled, until=self.until, rounds=rounds)
        with patch(f"{NesterovSGD.__module__}.NesterovSGD", scheduled):  # there is no such setting
            return self._trained(config, specs, seed)

    def _trained(
        self, config: RunConfig, specs: list[LearnerSpec], seed: int
    ) -> tuple[Workload, nn.Module, Row]:
        with virtual_run(config, specs) as run:
            system = run.system
            system.checks = False  # they take a fifth of the time
            if self.chaos:
                self._plan_failures(system, seed)
            run.train()
            found: Row = {}
            if self.chaos:
                found["goodput"] = 100 * self.steps / system.now
            if config.outer.average is not None:
                found["average_loss"] = run.evaluate(average=True)["loss"]
            return run.workload, run.model(), found

    def _plan_failures(self, system: System, seed: int) -> None:
        between, repair = self.chaos
        choices = Choices(seed)
        for host in system.learners.values():
            at = choices.exponential(between)
            while at < LONGEST * self.steps:
                system.clockwork.at(at, system.crash, host)
                system.clockwork.at(at + repair, system.restart, host)
                at += repair + choices.exponential(between)

    def _plain(self, seed: int) -> tuple[Workload, nn.Module, Row]:
        settings = self.config(seed).workload
        seeded = {**settings.options, "seed": seed, "total_steps": self.steps}
        workload = load_workload(settings.name, seeded)
        model = trained(workload, self.steps, self.parts or self.learners, self.learners)
        return workload, model, {}

    @property
    def less(self) -> float | None:
        """Reduction of traffic relative to fp32 gradients in every step, uplink and downlink.

        None with merged moments, whose traffic depends on the optimizer.
        """
        if "moments" in self.sync:
            return None
        if self.plain:
            return 1.0
        sync = self.config(0).sync
        merges = self.learners if sync.participation == "async" else 1
        bits = bits_of(sync.codec.uplinks[0]) + merges * bits_of(sync.codec.downlink)
        period: float = sync.sync_every
        if sync.schedule is not None:
            periods = registered("schedule", sync.schedule)
            period = harmonic_mean(periods(step, self.steps) for step in range(self.steps))
        return 64 * period / bits


def interval(values: Sequence[float]) -> dict[str, float]:
    """Return mean and 95 % interval (Student's t)."""
    if len(values) < 2:
        return {"mean": values[0]}
    return dict(zip(("mean", "low", "high"), student(values), strict=True))


def mean_of(rows: list[Row], name: str) -> Any:
    """Return the mean of a column, or of each of its entries if it has several."""
    if not isinstance(rows[0][name], dict):
        return statistics.mean(row[name] for row in rows)
    return {key: statistics.mean(row[name][key] for row in rows) for key in rows[0][name]}


def gap_percent(rows: list[Row], others: list[Row]) -> dict[str, float]:
    """Return by how many percent the losses exceed those of other runs with the same seeds."""
    pairs = zip(rows, others, strict=True)
    return interval([100 * (one["loss"] / other["loss"] - 1) for one, other in pairs])


def measured(
    kept: Path, cells: Iterable[str], seeds: Sequence[int], measure: Callable[[str, int], Row]
) -> dict[str, list[Row]]:
    """Return the rows of each cell, one per seed; runs recorded in the file are not repeated."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    done = {(row["cell"], row["seed"]): row for row in map(json.loads, lines)}
    names = list(cells)
    for seed in seeds:
        for cell in names:
            if (cell, seed) not in done:
                done[cell, seed] = row = {"cell": cell, "seed": seed, **measure(cell, seed)}
                with kept.open("a") as file:
                    print(json.dumps(row), file=file)
                print(row, flush=True)
    return {cell: [done[cell, seed] for seed in seeds] for cell in names}


def compare(
    folder: str,
    cells: Mapping[str, Of],
    measure: Callable[[Of, int, int], Row],
    summary: Callable[[str, dict[str, list[Row]]], Row],
    *,
    steps: int,
    config: dict[str, Any],
    size: dict[str, Any] = SIZE,
) -> None:
    """Run a whole benchmark: measure each cell with each seed, and save a summary.

    Runs recorded in the file of ``--kept`` are not repeated, so the command can be stopped and
    repeated.

    Args:
        folder: Name of the results folder.
        cells: The cells, by name.
        measure: Runs one cell with a seed for a number of steps.
        summary: Summarizes a cell; it receives the rows of all cells.
        steps: Steps of each run, unless the command line sets them.
        config: Additional settings to save.
        size: Options of the model to save.
    """
    arguments = options(
        seeds=[1, 2, 3], kept=Path(f"{folder}.jsonl"), steps=steps, name=folder, cells="."
    )
    torch.set_num_threads(1)
    rows = measured(
        arguments.kept,
        [name for name in cells if re.search(arguments.cells, name)],
        arguments.seeds,
        lambda name, seed: measure(cells[name], seed, arguments.steps),
    )
    kept = keep(
        arguments.name,
        of="" if arguments.name in ABOUT else folder,
        config={"steps": arguments.steps, "seeds": arguments.seeds, **size, **config},
        raw=[row for each in rows.values() for row in each],
        result={name: summary(name, rows) for name in rows},
    )
    print(kept)


def compare_with(
    folder: str,
    cells: Mapping[str, Cell],
    reference: Callable[[str], str],
    *,
    steps: int,
    config: dict[str, Any],
) -> None:
    """Run a whole benchmark whose result is each cell's loss and its gap to a reference cell.

    Args:
        folder: See `compare`.
        cells: See `compare`.
        reference: Returns the name of the cell that a cell is compared with.
        steps: See `compare`.
        config: See `compare`.
    """

    def summary(name: str, rows: dict[str, list[Row]]) -> Row:
        own, other = rows[name], reference(name)
        found: Row = {"loss": mean_of(own, "loss"), "losses": [row["loss"] for row in own]}
        if other in rows and other != name:
            found["gap_percent"] = gap_percent(own, rows[other])
        return found

    def measure(cell: Cell, seed: int, steps: int) -> Row:
        return replace(cell, steps=steps).measure(seed)

    compare(folder, cells, measure, summary, steps=steps, config=config)
