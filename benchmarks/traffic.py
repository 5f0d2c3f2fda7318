"""Loss against traffic: inner optimizers, codecs with and without error feedback, both ways.

Runs in virtual time at equal speeds and equal tokens: the global batch is fixed, each of M learners
takes its share of it. Every run is one line of a file, and one that is there is not run again, so
the command can be stopped at any time, and several may work on different cells.

    python benchmarks/traffic.py --cells 'dp|M=4' --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from quality import SEQUENCES, SIZE

from decoupled_diloco.config import RunConfig
from decoupled_diloco.simulate.training import train_virtually
from decoupled_diloco.workloads import load_workload

REGIONS = 4
"""Data-parallel draws its batch from as many regions of the text as there are learners."""


@dataclass(frozen=True)
class Cell:
    """One system: how many learners (0: plain data-parallel), what inside, what on the wire."""

    learners: int
    inner: str
    rate: float
    steps: int = 600
    sync: dict[str, Any] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)

    def loss(self, seed: int) -> float:
        """The held-out loss of the run's weights, nats a byte."""
        if self.learners == 0:
            return self._plain(seed)
        config = RunConfig(
            run={"learners": self.learners, "budget_steps": self.steps, "seed": seed},
            sync={"fragments": 24, "period": 24, "overlap": 2, **self.sync},
            outer=self.outer,
            workload={"options": self._options(SEQUENCES // self.learners)},
        )
        with train_virtually(config) as run:
            return run.evaluate()["loss"]

    def _options(self, batch: int) -> dict[str, Any]:
        return {**SIZE, "batch_size": batch, "learning_rate": self.rate, "optimizer": self.inner}

    def _plain(self, seed: int) -> float:
        options = self._options(SEQUENCES // REGIONS)
        workload = load_workload("gpt", {**options, "seed": seed, "total_steps": self.steps})
        model = workload.model()
        optimizer = workload.optimizer(model)
        streams = [workload.batches(part, REGIONS) for part in range(REGIONS)]
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.rate * workload.schedule(step)
            batches = [next(stream) for stream in streams]
            inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
            workload.loss(model, (inputs, targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return workload.evaluate(model)["loss"]


def _cells() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for inner, rates in {"adamw": (4e-3, 8e-3, 1.6e-2), "muon": (8e-3, 1.6e-2, 3.2e-2)}.items():
        for rate in rates:
            cells[f"dp {inner} {rate:g}"] = Cell(0, inner, rate)
            for learners in (1, 4, 8):
                cells[f"M={learners} {inner} {rate:g}"] = Cell(learners, inner, rate)
    wires = {
        "int8": ("int8", "int8", None),
        "int4": ("int4", "int4", None),
        "e3m0": ("fp4-e3m0", "fp4-e3m0", None),
        "int2": ("int2", "int2", None),
        "int2 down int4": ("int2", "int4", None),
        "topk down int4": ("topk", "int4", None),
        "topk down int2": ("topk", "int2", None),
        "topk": ("topk", "topk", None),
        "topk-40 down int4": ("topk-40", "int4", None),
        "topk-160 down int4": ("topk-160", "int4", None),
        "int4 without feedback": ("int4", "int4", False),
        "int2 without feedback": ("int2", "int2", False),
        "topk down int4 without feedback": ("topk", "int4", False),
    }
    for inner, rate in {"adamw": 8e-3, "muon": 1.6e-2}.items():
        for name, (up, down, feedback) in wires.items():
            sync = {"uplink_codec": up, "downlink_codec": down, "error_feedback": feedback}
            cells[f"M=4 {inner} {rate:g} {name}"] = Cell(4, inner, rate, sync=sync)
    return cells | _often()


def _often() -> dict[str, Cell]:
    """Fewer bits more often: what counts is bits divided by period."""
    cells: dict[str, Cell] = {}
    wires = {"bf16": "bf16", "int4": "int4", "int2": "int4", "topk": "int4", "topk-160": "int4"}
    for period, (up, down) in product((2, 4, 8, 24, 72), wires.items()):
        sync = {
            "period": period,
            "overlap": min(2, period - 1),
            "alignment": "carry",
            "uplink_codec": up,
            "downlink_codec": down,
        }
        for lr, momentum in ((0.7, 0.5), (1.0, 0.0)):
            name = f"M=4 adamw 0.008 H={period} carry {up} {lr:g}/{momentum:g}"
            outer = {"lr": lr, "momentum": momentum}
            cells[name] = Cell(4, "adamw", 8e-3, sync=sync, outer=outer)
    return cells


CELLS = _cells()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", default=".", help="a regular expression that finds their names")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--kept", type=Path, default=Path("traffic.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in arguments.seeds:
        for name in [name for name in CELLS if re.search(arguments.cells, name)]:
            if (name, seed) in done(arguments.kept):
                continue
            begun = time.monotonic()
            loss = CELLS[name].loss(seed)
            row = {"cell": name, "seed": seed, "loss": loss}
            row["seconds"] = round(time.monotonic() - begun, 1)
            with arguments.kept.open("a") as file:
                print(json.dumps(row), file=file)
            print(row, flush=True)


def done(kept: Path) -> dict[tuple[str, int], float]:
    """The losses of the runs that a file has."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return {(row["cell"], row["seed"]): row["loss"] for row in map(json.loads, lines)}


if __name__ == "__main__":
    main()
