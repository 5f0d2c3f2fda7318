"""What late contributions cost in loss: folded into the next round, dropped, or discounted.

Four equal learners in virtual time. One of them has an uplink on which a fragment takes 0.5, 1 or 3
periods, and in one more row three of them have one of half a period. Every run trains the same
number of tokens; seeds are paired. A run that is done is kept, so that the command can be repeated
after it was stopped.

    python benchmarks/late.py --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from evidence import keep
from quality import SIZE, interval

from decoupled_diloco.config import RunConfig
from decoupled_diloco.merge import layout_of
from decoupled_diloco.protocol.effects import Apply, RoundFinished
from decoupled_diloco.simulate import LearnerSpec
from decoupled_diloco.simulate.training import train_virtually
from decoupled_diloco.workloads import load_workload

ESTIMATE = (
    "a learner whose uploads take half a period delivers two fragments of 24 in a period, so one "
    "learner of four is nearly missing: loss 0.5 to 1.5 % above that of four whole ones, whatever "
    "becomes of the late bodies; next against drop within 0.3 %, the discount between them; three "
    "slow learners 2 to 4 % above, and there next 0.5 % better than drop"
)
LEARNERS = 4
BATCH = 8
RATE = 8e-3
PERIOD = 24
REFERENCE = "nobody is slow"
RULES: dict[str, dict[str, Any]] = {
    "next": {"late": "next"},
    "discount 0.5": {"late": "next", "late_discount": 0.5},
    "drop": {"late": "drop"},
}


def cells() -> dict[str, tuple[float, int, dict[str, Any]]]:
    """Name of each row: the periods that an upload takes, how many learners are slow, settings."""
    rows: dict[str, tuple[float, int, dict[str, Any]]] = {REFERENCE: (0.0, 0, {})}
    for periods, slow in ((0.5, 1), (1.0, 1), (3.0, 1), (0.5, 3)):
        for rule, settings in RULES.items():
            rows[f"{periods:g} periods, {slow} slow, {rule}"] = (periods, slow, settings)
    return rows


class Watch:
    """Counts what the tape says: rounds, who is in them, how late, what was overwritten."""

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.rounds = 0
        self.discarded: Counter[str] = Counter()
        self.folded: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Looks at one event."""
        for effect in effects:
            if isinstance(effect, Apply):
                self.discarded[who] += effect.discarded_tokens
            elif isinstance(effect, RoundFinished) and effect.verdict == "merged":
                self.rounds += 1
                folded = [p for p in effect.participants if p.state == "folded"]
                self.folded.update(p.learner for p in folded)
                self.ages.update(p.age for p in folded)


def fragment_nbytes(config: RunConfig) -> float:
    """Bytes of a mean fragment's body."""
    workload = load_workload("gpt", {**SIZE, "batch_size": BATCH, "learning_rate": RATE})
    numel = sum(spec.numel for spec in layout_of(workload.model()).tensors)
    return 2.0 * numel / config.sync.fragments


def measure(
    periods: float, slow: int, sync: dict[str, Any], seed: int, steps: int
) -> dict[str, Any]:
    """One run: its loss and what the tape says of it."""
    config = RunConfig(
        run={"learners": LEARNERS, "budget_steps": steps, "seed": seed},
        sync={"period": PERIOD, **sync},
        workload={
            "options": {
                **SIZE,
                "total_steps": steps,
                "batch_size": BATCH,
                "learning_rate": RATE,
            }
        },
    )
    names = config.learner_ids
    rate = fragment_nbytes(config) / (periods * PERIOD) if periods else float("inf")
    specs = [
        LearnerSpec(
            name,
            step_seconds=1.0,
            variance=0.05,
            latency=0.05,
            up_bytes_per_second=rate if LEARNERS - slow <= number else float("inf"),
        )
        for number, name in enumerate(names)
    ]
    watch = Watch(config.sync.fragments)
    begun = time.monotonic()
    run = train_virtually(config, specs, recorder=watch)
    late = names[-1]
    return {
        "seed": seed,
        "loss": run.evaluate()["loss"],
        "tokens": run.tokens,
        "rounds": watch.rounds,
        "bodies_of_the_last": watch.folded[late],
        "bodies_of_the_first": watch.folded[names[0]],
        "ages": dict(sorted(watch.ages.items())),
        "discarded_percent_of_the_last": 100
        * watch.discarded[late]
        / watch.fragments
        / (run.tokens / LEARNERS),
        "seconds": round(time.monotonic() - begun, 1),
    }


def summary(rows: list[dict[str, Any]], default: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, and the paired difference to the reference."""
    gaps = [100 * (x["loss"] / y["loss"] - 1) for x, y in zip(rows, default, strict=True)]
    return {
        "mean_loss": statistics.mean(row["loss"] for row in rows),
        "loss": interval([row["loss"] for row in rows]),
        "gap_to_reference_percent": interval(gaps),
        "bodies_of_the_last": statistics.mean(row["bodies_of_the_last"] for row in rows),
        "bodies_of_the_first": statistics.mean(row["bodies_of_the_first"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=384, help="of each learner")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--name", default="late")
    parser.add_argument("--kept", type=Path, default=Path("late.jsonl"), help="runs that are done")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = arguments.kept.read_text().splitlines() if arguments.kept.exists() else []
    done = {(row["cell"], row["seed"]): row for row in map(json.loads, lines)}
    for seed in arguments.seeds:
        for name, (periods, slow, sync) in cells().items():
            if (name, seed) in done:
                continue
            row = {"cell": name, **measure(periods, slow, sync, seed, arguments.steps)}
            done[name, seed] = row
            with arguments.kept.open("a") as file:
                print(json.dumps(row), file=file)
            print(row, flush=True)
    by_cell = {name: [done[name, seed] for seed in arguments.seeds] for name in cells()}
    folder = keep(
        arguments.name,
        estimate=ESTIMATE,
        config={
            **{key: str(value) for key, value in vars(arguments).items()},
            **SIZE,
            "batch_size": BATCH,
            "inner_rate": RATE,
            "period": PERIOD,
            "variance": 0.05,
            "latency_seconds": 0.05,
        },
        raw=list(done.values()),
        result={name: summary(rows, by_cell[REFERENCE]) for name, rows in by_cell.items()},
        not_measured="larger models, longer runs, other periods and alignments, links whose speed "
        "changes",
    )
    print(folder)


if __name__ == "__main__":
    main()
