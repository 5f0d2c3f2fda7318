"""Learners of unequal speed at equal tokens: what alignment, missed and participants change.

Four learners whose steps take 4, 4, 2 and 1 seconds of virtual time, 8 cells of settings, paired
seeds; and four equal learners with the same tokens.

    python benchmarks/speeds.py --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from evidence import keep
from quality import SIZE, interval

from decoupled_diloco.config import RunConfig
from decoupled_diloco.protocol.effects import Apply, RoundFinished
from decoupled_diloco.protocol.events import StepFinished
from decoupled_diloco.simulate import LearnerSpec
from decoupled_diloco.simulate.training import train_virtually

ESTIMATE = (
    "discarded with the defaults 15 to 20 % of all tokens: the fast learner 4 % (one step of 24 in "
    "flight), the slow ones half (one step of six in flight, and rounds that they miss); carry "
    "takes 4 to 5 points off, rebase 10, participants=all 8 to 12, carry with rebase leaves below "
    "1 %. Loss: rebase, carry and all each 0 to 1 % better than the default, together 1 to 2 %. "
    "Four equal learners 0 to 5 % worse at equal tokens, since they take half as many global steps "
    "and outer rounds"
)
UNEQUAL = (4.0, 4.0, 2.0, 1.0)
EQUAL = (1.0, 1.0, 1.0, 1.0)
BATCH = 8
RATE = 8e-3
CLASSES = {4.0: "quarter", 2.0: "half", 1.0: "full"}
DEFAULT = "overwrite, overwrite, reported"
REFERENCE = "four equal learners, defaults"


class Watch:
    """Counts what the tape says: discarded tokens, rounds, who is in them."""

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.rounds = 0
        self.discarded: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.folded: Counter[str] = Counter()

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Looks at one event."""
        if isinstance(event, StepFinished):
            self.tokens[who] += event.tokens
        for effect in effects:
            if isinstance(effect, Apply):
                self.discarded[who] += effect.discarded_tokens
            elif isinstance(effect, RoundFinished) and effect.verdict == "merged":
                self.rounds += 1
                self.folded.update(p.learner for p in effect.participants if p.state == "folded")

    def discarded_percent(self, names: Sequence[str]) -> float:
        """An overwritten fragment is one of P parts, so its tokens count 1/P."""
        discarded = sum(self.discarded[name] for name in names) / self.fragments
        return 100 * discarded / sum(self.tokens[name] for name in names)

    def participation_percent(self, names: Sequence[str]) -> float:
        """Mean share of all merged rounds that the contributions of these learners are in."""
        return 100 * sum(self.folded[name] for name in names) / (self.rounds * len(names))


def global_steps(speeds: Sequence[float], steps: int) -> int:
    """Steps of the fastest learner while all together take so many."""
    return round(steps / sum(min(speeds) / speed for speed in speeds))


def measure(speeds: Sequence[float], sync: dict[str, str], seed: int, steps: int) -> dict[str, Any]:
    """One run: its loss and what the tape says of it."""
    schedule = {"total_steps": global_steps(speeds, steps)}
    config = RunConfig(
        run={
            "learners": len(speeds),
            "budget_tokens": steps * BATCH * SIZE["context"],
            "seed": seed,
        },
        sync=sync,
        workload={"options": {**SIZE, **schedule, "batch_size": BATCH, "learning_rate": RATE}},
    )
    specs = [
        LearnerSpec(name, step_seconds=speed, variance=0.05, latency=0.05)
        for name, speed in zip(config.learner_ids, speeds, strict=True)
    ]
    watch = Watch(config.sync.fragments)
    begun = time.monotonic()
    run = train_virtually(config, specs, recorder=watch)
    classes = {CLASSES[s]: [x.name for x in specs if x.step_seconds == s] for s in sorted(speeds)}
    return {
        "seed": seed,
        "loss": run.evaluate()["loss"],
        "tokens": dict(watch.tokens),
        "rounds": watch.rounds,
        "clock": run.world.shards[0].machine.state.clock,
        "discarded_percent": watch.discarded_percent(config.learner_ids),
        "discarded_percent_of": {k: watch.discarded_percent(v) for k, v in classes.items()},
        "participation_percent": {k: watch.participation_percent(v) for k, v in classes.items()},
        "seconds": round(time.monotonic() - begun, 1),
    }


def cells() -> dict[str, tuple[Sequence[float], dict[str, str]]]:
    """Name, speeds and settings of each row; the default first, the reference last."""
    rows: dict[str, tuple[Sequence[float], dict[str, str]]] = {}
    for participants, missed, alignment in product(
        ("reported", "all"), ("overwrite", "rebase"), ("overwrite", "carry")
    ):
        sync = {"missed": missed, "alignment": alignment, "participants": participants}
        rows[f"{missed}, {alignment}, {participants}"] = (UNEQUAL, sync)
    return rows | {REFERENCE: (EQUAL, {})}


def summary(rows: list[dict[str, Any]], default: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, and the paired difference to the default."""

    def mean_of(key: str) -> dict[str, float]:
        return {name: statistics.mean(row[key][name] for row in rows) for name in rows[0][key]}

    gaps = [100 * (x["loss"] / y["loss"] - 1) for x, y in zip(rows, default, strict=True)]
    return {
        "mean_loss": statistics.mean(row["loss"] for row in rows),
        "loss": interval([row["loss"] for row in rows]),
        "gap_to_default_percent": interval(gaps),
        "discarded_percent": statistics.mean(row["discarded_percent"] for row in rows),
        "discarded_percent_of": mean_of("discarded_percent_of"),
        "participation_percent": mean_of("participation_percent"),
        "rounds": statistics.mean(row["rounds"] for row in rows),
        "global_steps": statistics.mean(row["clock"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1536, help="of all learners together")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--name", default="speeds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in cells()}
    for seed in arguments.seeds:
        for name, (speeds, sync) in cells().items():
            row = measure(speeds, sync, seed, arguments.steps)
            measured[name].append(row)
            print({"cell": name, **row}, flush=True)
    folder = keep(
        arguments.name,
        estimate=ESTIMATE,
        config={
            **vars(arguments),
            **SIZE,
            "batch_size": BATCH,
            "inner_rate": RATE,
            "step_seconds": UNEQUAL,
            "variance": 0.05,
            "latency_seconds": 0.05,
        },
        raw=[{"cell": name, **row} for name, rows in measured.items() for row in rows],
        result={name: summary(rows, measured[DEFAULT]) for name, rows in measured.items()},
        not_measured="inner rates tuned for each cell, larger models, longer runs, learners whose "
        "batches differ too",
    )
    print(folder)


if __name__ == "__main__":
    main()
