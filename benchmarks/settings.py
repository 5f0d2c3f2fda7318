"""What the method's settings do to the loss: H, τ, P, M, outer optimizers, other models, long runs.

Each group is a folder and a table of all that was measured of it so far. Runs are in virtual time,
at equal tokens, each with its data-parallel or default pair on the same batches. Every run is one
line of a file, and one that is there is not run again.

    python benchmarks/settings.py rounds --seeds 1
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cells import Row, kept_parser, measured
from evidence import keep
from quality import SEQUENCES, SIZE, SYNCHRONOUS, interval, trained
from speeds import UNEQUAL, global_steps
from torch import Tensor

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.sync import bits_of
from decoupled_diloco.merge.outer import NesterovSGD
from decoupled_diloco.simulate import LearnerSpec
from decoupled_diloco.simulate.training import train_virtually
from decoupled_diloco.workloads import load_workload

STREAMING_OUTER = {"lr": 0.4, "momentum": 0.9}
RATES = {"adamw": 8e-3, "muon": 1.6e-2}


class Scheduled(NesterovSGD):
    """Nesterov's SGD, its rate or momentum linear over all rounds."""

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

    def state_dict(self) -> dict[str, Tensor]:  # a shard makes a new one for each outer step
        return {**super().state_dict(), "done": torch.tensor(self._done)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._done = int(state["done"])
        self.momentum = self.momentum or 0.9  # of 0 no buffer would be taken over
        super().load_state_dict({name: state[name] for name in state if name != "done"})


@dataclass(frozen=True)
class Cell:
    """One run: how many learners (data-parallel: regions), their batch, what is set.

    Attributes:
        against: The cell that it is compared with; empty: none.
        plain: Data-parallel training, without the method.
    """

    against: str = ""
    learners: int = 4
    batch: int = 0  # of each learner; 0: its share of the global batch
    steps: int = 600
    inner: str = "adamw"
    rate: float = 0.0  # 0: the tuned one
    plain: bool = False
    workload: str = "gpt"
    options: dict[str, Any] = field(default_factory=dict)
    speeds: tuple[float, ...] = ()  # seconds of a step of each learner; then steps are of all
    sync: dict[str, Any] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)  # what of `outer` changes, to what

    def config(self, seed: int) -> RunConfig:
        """The settings of the run."""
        size: dict[str, Any] = SIZE if self.workload != "vit" else {}
        inner = {"optimizer": self.inner, "learning_rate": self.rate or RATES[self.inner]}
        batch = self.batch or SEQUENCES // self.learners
        budget = {"budget_steps": self.steps}
        if self.speeds:
            budget = {"budget_tokens": self.steps * batch * size["context"]}
            size = {**size, "total_steps": global_steps(self.speeds, self.steps)}
        return RunConfig(
            run={"learners": self.learners, "seed": seed, **budget},
            sync={"fragments": 24, "period": 24, "overlap": 2, **self.sync},
            outer=self.outer,
            data={"leases": False},  # fixed parts, the same for data-parallel
            workload={
                "name": self.workload,
                "options": {**size, **inner, "batch_size": batch, **self.options},
            },
        )

    def measure(self, seed: int) -> Row:
        """Its evaluation at the end."""
        begun = time.monotonic()
        found = self._data_parallel(seed) if self.plain else self._decoupled(seed)
        return {**found, "seconds": round(time.monotonic() - begun, 1)}

    def _decoupled(self, seed: int) -> Row:
        config = self.config(seed)
        specs = [
            LearnerSpec(name, step_seconds=speed, variance=0.05, latency=0.05)
            for name, speed in zip(config.learner_ids, self.speeds, strict=bool(self.speeds))
        ]
        if not self.until:
            return train_virtually(config, specs).evaluate()
        rounds = self.steps // config.sync.period
        scheduled = partial(Scheduled, until=self.until, rounds=rounds)
        with patch(f"{NesterovSGD.__module__}.NesterovSGD", scheduled):  # it has no such option
            return train_virtually(config, specs).evaluate()

    def _data_parallel(self, seed: int) -> Row:
        told = self.config(seed).workload
        seeded = {**told.options, "seed": seed, "total_steps": self.steps}
        workload = load_workload(told.name, seeded)
        return trained(workload, self.steps, self.learners, self.learners)

    @property
    def less(self) -> float:
        """How many times fewer bytes than gradients in fp32 at every step, up and down."""
        if self.plain:
            return 1.0
        sync = self.config(0).sync
        merges = self.learners if sync.participants == "own" else 1
        bits = bits_of(sync.uplinks[0]) + merges * bits_of(sync.downlink_codec)
        return 64 * sync.period / bits


@dataclass(frozen=True)
class Group:
    """The cells of one folder."""

    cells: dict[str, Cell]
    estimate: str
    not_measured: str = "larger models, other texts"


def _wire(up: str, down: str = "", period: int = 24) -> dict[str, Any]:
    return {"uplink_codec": up, "downlink_codec": down or up, "period": period}


def _longer() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for inner in RATES:
        dp = f"{inner}: data-parallel"
        cell = Cell(dp, steps=1800, inner=inner)
        cells[dp] = replace(cell, against="", plain=True)
        wires = {
            "bf16": _wire("bf16"),
            "int4": _wire("int4"),
            "int2 up, int4 down": _wire("int2", "int4"),
            "int2": _wire("int2"),
            "int2, H = 48": _wire("int2", period=48),
            "top-k up, int4 down": _wire("topk", "int4"),
            "top-k": _wire("topk"),
            "int2, H = 144": _wire("int2", period=144),
        }
        for name, sync in wires.items():
            cells[f"{inner}: {name}"] = replace(cell, sync=sync)
        sparse = {**wires["top-k up, int4 down"], "feedback_decay": 0.95}
        name = f"{inner}: top-k up, int4 down, 1 / 0, β = 0.95"  # as SparseLoCo
        alone = {"lr": 1.0, "momentum": 0.0}
        cells[name] = replace(cell, sync=sparse, outer=alone)
        cells[f"{inner}: mean"] = replace(cell, sync={"merge": "mean"})
        cells[f"{inner}: 1 / 0"] = replace(cell, outer=alone)
        cells[f"{inner}: mean, 1 / 0"] = replace(cell, sync={"merge": "mean"}, outer=alone)
        less = {"lr": 0.7, "momentum": 0.0}
        cells[f"{inner}: 0.7 / 0"] = replace(cell, outer=less)
        cells[f"{inner}: mean, 0.7 / 0"] = replace(cell, sync={"merge": "mean"}, outer=less)
        for name in ("int4", "int2", "int2, H = 48", "int2, H = 144"):
            cells[f"{inner}: mean, {name}"] = replace(cell, sync={**wires[name], "merge": "mean"})
        rising = replace(cell, outer=less, until={"momentum": 0.9})
        cells[f"{inner}: momentum from 0 to 0.9"] = rising
        for factor in (0.7, 1.4):
            name = f"{inner}: {factor:g} times the inner rate"
            cells[name] = replace(cell, rate=factor * RATES[inner])
        for learners in (1, 8):
            dp = f"{inner}: M = {learners}, data-parallel"
            here = replace(cell, learners=learners, against=dp)
            cells[dp] = replace(here, against="", plain=True)
            cells[f"{inner}: M = {learners}"] = here
    return cells


def _learners() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for inner in RATES:
        for learners in (1, 2, 4, 8, 16):
            for batch, which in ((0, "32 in all"), (8, "8 of each")):
                if batch * learners == SEQUENCES:
                    continue
                name = f"{inner}: M = {learners}, batch {which}"
                dp = f"{name}, data-parallel"
                steps = 600 * SEQUENCES // (learners * (batch or SEQUENCES // learners))
                cell = Cell(dp, learners=learners, batch=batch, steps=steps, inner=inner)
                cells[dp] = replace(cell, against="", plain=True)
                cells[name] = cell
                if inner == "muon" and not batch:
                    cells[f"{name}, mean"] = replace(cell, sync={"merge": "mean"})
    return cells


def _schedule() -> dict[str, Cell]:
    default = "H = 24, τ = 2, P = 24"
    cells = {default: Cell()}
    for period in (8, 48, 96, 200):
        cells[f"H = {period}"] = Cell(default, sync={"period": period})
    often = {"period": 8}
    cells["H = 8, carry"] = Cell(default, sync={**often, "alignment": "carry"})
    mean = {**often, "merge": "mean"}
    cells["H = 8, mean"] = Cell(default, sync=mean)
    mean["alignment"] = "carry"
    cells["H = 8, mean, carry, 1 / 0"] = Cell(
        default, sync=mean, outer={"lr": 1.0, "momentum": 0.0}
    )
    for overlap in (2, 6, 12, 23):  # links take no time here: what has come has to wait
        late = {"overlap": overlap, "apply": "at_tau"}
        cells[f"applied {overlap} steps later"] = Cell(default, sync=late)
        carried = {**late, "alignment": "carry"}
        cells[f"applied {overlap} steps later, carry"] = Cell(default, sync=carried)
    for fragments in (1, 4):
        cells[f"P = {fragments}"] = Cell(default, sync={"fragments": fragments})
    return cells


OUTERS = (
    *((0.7, 0.5), (0.4, 0.5), (1.0, 0.5)),
    *((1.0, 0.0), (0.7, 0.0)),
    *((0.5, 0.7), (0.15, 0.9), (0.4, 0.9), (0.7, 0.9)),
)

SCHEDULES = (("momentum", 0.0, 0.9), ("momentum", 0.9, 0.0), ("lr", 1.0, 0.4), ("lr", 0.4, 1.0))


def _rounds() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for steps, period in ((600, 24), (600, 8), (1800, 8)):
        rounds = f"{steps // period} rounds of H = {period}"
        default = f"{rounds}: 0.7 / 0.5"
        for lr, momentum in OUTERS:
            name = f"{rounds}: {lr:g} / {momentum:g}"
            outer, sync = {"lr": lr, "momentum": momentum}, {"period": period}
            against = default if name != default else ""
            cells[name] = Cell(against, steps=steps, sync=sync, outer=outer)
        for of, start, end in SCHEDULES:
            settings = {"lr": 0.7, "momentum": 0.5, of: start}
            name = f"{rounds}: {of} from {start:g} to {end:g}"
            cells[name] = Cell(default, steps=steps, sync=sync, outer=settings, until={of: end})
    return cells


ALL_AT_ONCE = {
    "fragments": 1,
    "overlap": 0,
    "quorum": 2,
    "grace_margin": 0.0,
    "wait": "at_overlap",
    "weighting": "uniform",
}
"""As torchft's DiLoCo: two learners wait for each other and average all of the model."""


def _merges() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for momentum in (0.5, 0.9):
        default = f"0.7 / {momentum:g}: mean, all at once"
        outer = {"lr": 0.7, "momentum": momentum}
        cell = Cell(default, learners=2, steps=240, outer=outer)
        mean = {"merge": "mean"}
        cells[default] = replace(cell, against="", sync={**ALL_AT_ONCE, **mean})
        cells[f"0.7 / {momentum:g}: RDA, all at once"] = replace(cell, sync=ALL_AT_ONCE)
        cells[f"0.7 / {momentum:g}: mean, in 24 parts"] = replace(cell, sync=mean)
        cells[f"0.7 / {momentum:g}: RDA, in 24 parts"] = cell
    return cells


def _models() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    kinds = {
        "mixture of experts": Cell(workload="moe", options={"expert_hidden": 128}),
        "vision": Cell(workload="vit", steps=360, rate=4e-3, sync={"fragments": 12}),
    }
    for kind, cell in kinds.items():
        for learners in (4, 8):
            name = f"{kind}, M = {learners}"
            dp = f"{name}: data-parallel"
            here = replace(cell, against=dp, learners=learners)
            streaming = {**cell.sync, **SYNCHRONOUS, "quorum": learners}
            cells[dp] = replace(here, against="", plain=True)
            cells[f"{name}: decoupled"] = here
            cells[f"{name}: Streaming DiLoCo"] = replace(
                here, sync=streaming, outer=STREAMING_OUTER
            )
    return cells


def _variants() -> dict[str, Cell]:
    alone = {"participants": "own", "grace_margin": 0.0, "missed": "rebase", "alignment": "carry"}
    alone |= {"late_rounds_max": 128}
    delayed = {"optimizer": "delayed-nesterov", "options": {"every": 4}}
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "the default": ({}, {}),
        "delayed Nesterov, every = 4": ({}, delayed),
        "own rounds, Nesterov": (alone, {}),
        "own rounds, delayed Nesterov": (alone, delayed),
        "own rounds, Nesterov, a quarter of the rate": (alone, {"lr": 0.175}),
        "own rounds, no momentum, rate 1/4": (alone, {"lr": 0.25, "momentum": 0.0}),
    }
    cells: dict[str, Cell] = {}
    for speed, speeds in {"1, 1, 2, 4": UNEQUAL, "equal": (1.0,) * 4}.items():
        default = f"{speed}: {next(iter(kinds))}"
        for kind, (sync, outer) in kinds.items():
            name = f"{speed}: {kind}"
            cells[name] = Cell(
                default if name != default else "",
                steps=1536,
                batch=8,
                speeds=speeds,
                sync=sync,
                outer=outer,
            )
    return cells


GROUPS = {
    "variants": Group(
        _variants(),
        "speeds 1, 1, 2, 4: own rounds with plain Nesterov diverge or end 20 % worse, for "
        "momentum grows with each of four merges a period; with delayed Nesterov 3 % worse than "
        "the default, which averages four before each outer step; delayed Nesterov in ordinary "
        "rounds 2 % worse",
    ),
    "longer": Group(
        _longer(),
        "gap to data-parallel in bf16 4.5 % with AdamW, 3.5 % with Muon; int4 0 to 0.3 % more; two "
        "bits both ways 1 %, at H = 48 4 %, at H = 144 20 %; top-k both ways 10 %. Then, to make "
        "the gap smaller: a mean 1 % worse, 1/0 equal, both 1 % worse; 0.7 times the inner rate "
        "0.5 % better, 1.4 times 1 % worse. Once one seed of Muon's mean was 3 % better than RDA: "
        "two bits and H = 48 cost that 2 %, H = 144 10 %. Rising momentum 2 % better, "
        "with Muon 1 %. M = 1 0 to 0.5 % over "
        "data-parallel, M = 8 7 %",
    ),
    "learners": Group(
        _learners(),
        "one global batch: M = 1 1 % over data-parallel, M = 4 7 %, M = 8 12 %, M = 16 20 %; Muon "
        "two thirds of that; one batch for each learner and equal tokens, so fewer steps: M = 2 "
        "3 %, M = 8 9 %, M = 16 12 % over data-parallel in as many steps",
    ),
    "schedule": Group(
        _schedule(),
        "H = 8 3 % lower, 48 5 % higher, 96 12 %, 200 25 %; τ = 6 2 % higher, 12 5 %, 23 12 %, "
        "half of that where steps are carried; P makes no difference",
    ),
    "rounds": Group(
        _rounds(),
        "0.7/0.9 18 % worse than 0.7/0.5 with 25 rounds, 5 % with 75, equal with 225; 0.4/0.9 "
        "10 %, 2 % and 1 % better; 1/0 equal with 25, 1 and 2 % worse with more. Schedules: "
        "momentum that rises 5 % worse, for the last rounds overshoot, one that falls 4 % worse; a "
        "rate that falls 0.5 % worse, one that rises 0.5 % better, for little is left to correct",
    ),
    "merges": Group(
        _merges(),
        "with momentum 0.9 RDA, whose steps are longer than a mean's, 3 % worse than the mean; "
        "parts or all at once 1 % apart; with 0.5 all within 1 %",
    ),
    "models": Group(
        _models(),
        "mixture of experts: as the dense model, 8 % over data-parallel at M = 4 and 13 % at "
        "M = 8; Streaming DiLoCo with its outer rate 4 % worse; images: 10 to 30 % of a small loss",
    ),
}


def main() -> None:
    options = kept_parser("settings")
    options.add_argument("group", choices=GROUPS)
    options.add_argument("--cells", default=".", help="a regular expression that finds their names")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    group = GROUPS[arguments.group]
    names = [name for name in group.cells if re.search(arguments.cells, name)]
    measured(
        arguments.kept, names, arguments.seeds, lambda name, seed: group.cells[name].measure(seed)
    )
    rows = kept_rows(arguments.kept, group.cells)
    keep(
        arguments.group,
        estimate=group.estimate,
        config={"sequences": SEQUENCES, **SIZE},
        raw=[row for each in rows.values() for row in each],
        result={name: summary(group.cells[name], name, rows) for name in rows},
        not_measured=group.not_measured,
    )


def kept_rows(kept: Path, cells: dict[str, Cell]) -> dict[str, list[Row]]:
    """All that was measured of each cell: those that decide have more seeds than the others."""
    lines = sorted(map(json.loads, kept.read_text().splitlines()), key=lambda row: row["seed"])
    found = {name: [row for row in lines if row["cell"] == name] for name in cells}
    return {name: rows for name, rows in found.items() if rows}


def summary(cell: Cell, name: str, rows: dict[str, list[Row]]) -> dict[str, Any]:
    """Mean loss, and the gap to the cell that it is compared with, paired by seeds."""
    found: dict[str, Any] = {
        "less": cell.less,
        "loss": statistics.mean(row["loss"] for row in rows[name]),
        "seeds": len(rows[name]),
    }
    if "accuracy" in rows[name][0]:
        found["accuracy"] = statistics.mean(row["accuracy"] for row in rows[name])
    others = {row["seed"]: row["loss"] for row in rows.get(cell.against, [])}
    pairs = [(row["loss"], others[row["seed"]]) for row in rows[name] if row["seed"] in others]
    if pairs and cell.against != name:
        found["gap_percent"] = interval([100 * (loss / other - 1) for loss, other in pairs])
    return found


if __name__ == "__main__":
    main()
