"""Loss with one harmful learner among eight, with scores, with robust merge rules, and without.

Eight equal learners in virtual time. One trains on shuffled labels, or sends its contributions with
flipped signs, ten times as large, or noise of their norm instead. The reference is a run of the
seven honest learners.

    python benchmarks/trust.py --steps 144 --seeds 4 5 6 --cells 'honest$|protection|exclude|weigh'
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from virtual import RATES, SIZE, Row, compare, gap_percent, interval, mean_of

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.sync import ROBUST_RULES
from decoupled_diloco.protocol.messages import Scored
from decoupled_diloco.workloads import Workload, workload_of
from decoupled_diloco_lab.simulate import LearnerSpec
from decoupled_diloco_lab.simulate.training import virtual_run

LEARNERS, PERIOD = 8, 12
MODEL = {**SIZE, "layers": 2, "width": 32, "context": 64}
INNER = {"batch_size": 4, "learning_rate": RATES["adamw"]}
HARMS = ("labels", "flip", "scale", "noise")
REFERENCE = "seven honest"


@dataclass(frozen=True)
class Cell:
    """One run: what the last learner does, and what limits its harm.

    Attributes:
        harm: What it does; "absent": it does not take part; "": it is honest.
        rule: The merge rule.
        act: What a low score does.
    """

    harm: str
    rule: str = "rda"
    act: str = "off"


HONEST = {
    REFERENCE: Cell("absent"),
    "eight honest": Cell(""),
    "eight honest, exclude": Cell("", act="exclude"),
} | {f"{REFERENCE}, {rule}": Cell("absent", rule) for rule in ROBUST_RULES}

CELLS = HONEST | {
    f"{harm}, {name}": Cell(harm, *settings)
    for harm in HARMS
    for name, settings in {
        "no protection": ("rda", "off"),
        "mean": ("mean", "off"),
        "exclude": ("rda", "exclude"),
        "weigh": ("rda", "weigh"),
        "median": ("median", "off"),
        "trimmed-mean": ("trimmed-mean", "off"),
        "geometric-median": ("geometric-median", "off"),
    }.items()
}


class Shuffled:
    """A workload that trains on shuffled labels."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._random = torch.Generator().manual_seed(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def loss(self, model: torch.nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        order = torch.randperm(labels.numel(), generator=self._random)
        return self._workload.loss(model, (inputs, labels.flatten()[order].view_as(labels)))


class Harmful:
    """A merge plan that changes a contribution before it is encoded."""

    def __init__(self, plan: Any, harm: str, random: torch.Generator) -> None:
        self._plan, self._harm, self._random = plan, harm, random

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def encode(self, d: Tensor, *others: Any) -> Any:
        if self._harm == "flip":
            d = -d
        elif self._harm == "scale":
            d = 10 * d
        elif self._harm == "noise":
            noise = torch.randn(d.shape, generator=self._random)
            d = noise * (d.norm() / noise.norm())
        return self._plan.encode(d, *others)


def measure(cell: Cell, seed: int, steps: int) -> Row:
    """Return the loss of one run, and the number of scores that lowered a learner's weight."""
    config = RunConfig(
        run={
            "learners": LEARNERS,
            "max_steps": steps,
            "seed": seed,
            "evaluate_interval_seconds": float(PERIOD),
        },
        sync={"sync_every": PERIOD, "fragments": PERIOD, "merge": {"rule": cell.rule}},
        trust={"act": cell.act} | ({"score_every": 2} if cell.act != "off" else {}),
        data={"elastic": False},
        workload={"options": {**MODEL, "total_steps": steps, **INNER}},
    )
    *honest, last = config.learner_ids
    names = honest if cell.harm == "absent" else [*honest, last]
    specs = [LearnerSpec(name, step_seconds=1.0, variance=0.05, latency=0.05) for name in names]
    if cell.act != "off":
        specs.append(replace(specs[0], name="evaluator", role="observer"))
    lowered = {"honest": 0, "harmful": 0}

    def watch(process: str, now: float, event: Any, effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, Scored) and effect.weight < 1.0:
                lowered["harmful" if effect.learner == last else "honest"] += 1

    random, begun = torch.Generator().manual_seed(seed), time.monotonic()
    with virtual_run(config, specs, recorder=watch) as run:
        if cell.harm == "labels":
            workload = workload_of(config)
            bad: Any = Shuffled(workload)
            run.system.workload = lambda host: bad if host.name == last else workload
        elif cell.harm in HARMS:

            def harm(host: Any, order: Any, capture: Any) -> None:
                if host.name == last:
                    harmful = Harmful(capture.plan, cell.harm, random)
                    object.__setattr__(capture, "plan", harmful)  # it is frozen

            run.system.on_capture = harm
        run.system.checks = False
        run.train()
        loss = run.evaluate()["loss"]
    seconds = round(time.monotonic() - begun, 1)
    return {"loss": loss, "lowered": lowered, "seconds": seconds}


def summary(name: str, rows: dict[str, list[Row]]) -> Row:
    """Return means over the seeds, and the paired difference from seven honest learners.

    ``gap_of_harm_percent``: from seven honest learners with the same rule.
    """
    own, same_rule = rows[name], f"{REFERENCE}, {CELLS[name].rule}"
    return {
        "mean_loss": mean_of(own, "loss"),
        "loss": interval([row["loss"] for row in own]),
        "gap_to_reference_percent": gap_percent(own, rows[REFERENCE]),
        "gap_of_harm_percent": gap_percent(own, rows.get(same_rule, rows[REFERENCE])),
        "lowered": mean_of(own, "lowered"),
    }


if __name__ == "__main__":
    config = {**MODEL, **INNER, "learners": LEARNERS, "period": PERIOD}
    compare("trust", CELLS, measure, summary, steps=192, config=config)
