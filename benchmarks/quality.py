"""Loss at equal tokens: Decoupled DiLoCo, Streaming DiLoCo, data-parallel, one learner alone.

The global batch B is fixed, each of M learners takes B/M, all take the same number of steps, in the
virtual world at equal speeds; paired seeds. First the inner learning rate is tuned for each system
on a seed that is not counted afterwards.

    python benchmarks/quality.py --steps 600 --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from evidence import keep

from decoupled_diloco.config import RunConfig
from decoupled_diloco.simulate.training import train_virtually
from decoupled_diloco.workloads import Workload, load_workload

ESTIMATE = (
    "data-parallel best; Decoupled M=4 5 to 9 % worse at 600 steps (an earlier prototype: 8.8 %), "
    "Streaming with its own outer rate 0.4/0.9 a few % worse still, with 0.7/0.5 within 1 % of "
    "Decoupled; one learner alone at B/M about 15 % worse than data-parallel"
)
SEQUENCES = 32
LEARNERS = 4
SIZE = {"layers": 4, "width": 64, "heads": 4, "context": 128, "eval_batches": 32}
SYNCHRONOUS = {
    "quorum": LEARNERS,
    "grace_margin": 0.0,
    "wait": "at_overlap",
    "apply": "at_tau",
    "merge": "mean",
    "alignment": "blend",
    "blend_alpha": 0.5,
}

System = Callable[[float, int, int], float]


def config(
    rate: float,
    seed: int,
    steps: int,
    *,
    learners: int,
    batch: int,
    sync: Any,
    outer: Any,
) -> RunConfig:
    return RunConfig(
        run={"learners": learners, "budget_steps": steps, "seed": seed},
        sync={"fragments": 24, "period": 24, "overlap": 2, **sync},
        outer=outer,
        data={"leases": False},  # fixed parts, which `plain` trains too: paired seeds, same batches
        workload={"options": _options(rate, batch)},
    )


def _options(rate: float, batch: int) -> dict[str, Any]:
    return {**SIZE, "batch_size": batch, "learning_rate": rate}


def virtual(rate: float, seed: int, steps: int, **settings: Any) -> float:
    return train_virtually(config(rate, seed, steps, **settings)).evaluate()["loss"]


def decoupled(rate: float, seed: int, steps: int) -> float:
    return virtual(
        rate, seed, steps, learners=LEARNERS, batch=SEQUENCES // LEARNERS, sync={}, outer={}
    )


def decoupled_mean(rate: float, seed: int, steps: int) -> float:
    sync = {"merge": "mean"}
    return virtual(
        rate, seed, steps, learners=LEARNERS, batch=SEQUENCES // LEARNERS, sync=sync, outer={}
    )


def streaming(rate: float, seed: int, steps: int) -> float:
    outer = {"lr": 0.4, "momentum": 0.9}
    batch = SEQUENCES // LEARNERS
    return virtual(rate, seed, steps, learners=LEARNERS, batch=batch, sync=SYNCHRONOUS, outer=outer)


def streaming_our_outer(rate: float, seed: int, steps: int) -> float:
    batch = SEQUENCES // LEARNERS
    return virtual(rate, seed, steps, learners=LEARNERS, batch=batch, sync=SYNCHRONOUS, outer={})


def decoupled_alone(rate: float, seed: int, steps: int) -> float:
    return virtual(rate, seed, steps, learners=1, batch=SEQUENCES, sync={}, outer={})


def plain(rate: float, seed: int, steps: int, batch: int, parts: int) -> float:
    """The loss of an ordinary training loop; with several parts, data-parallel over them."""
    options = _options(rate, batch)
    workload = load_workload("gpt", {**options, "seed": seed, "total_steps": steps})
    return trained(workload, steps, parts, LEARNERS)["loss"]


def trained(workload: Workload, steps: int, parts: int, of: int) -> dict[str, float]:
    """The evaluation after an ordinary training loop over some of the data's parts."""
    model = workload.model()
    optimizer = workload.optimizer(model)
    streams = [workload.batches(part, of) for part in range(parts)]
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * workload.schedule(step)
        for stream in streams:
            (workload.loss(model, next(stream)) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return workload.evaluate(model)


def data_parallel(rate: float, seed: int, steps: int) -> float:
    return plain(rate, seed, steps, SEQUENCES // LEARNERS, LEARNERS)


def alone_at_b_over_m(rate: float, seed: int, steps: int) -> float:
    return plain(rate, seed, steps, SEQUENCES // LEARNERS, 1)


SYSTEMS: dict[str, System] = {
    "data-parallel (= one learner at batch B)": data_parallel,
    "decoupled M=4": decoupled,
    "decoupled M=4, mean": decoupled_mean,
    "streaming M=4, outer 0.4/0.9": streaming,
    "streaming M=4, outer 0.7/0.5": streaming_our_outer,
    "decoupled M=1 at batch B": decoupled_alone,
    "one learner alone at batch B/M": alone_at_b_over_m,
}


RATE_OF = {
    "decoupled M=4, mean": "decoupled M=4",
    "decoupled M=1 at batch B": "data-parallel (= one learner at batch B)",
}
"""Systems that take the inner rate of another one instead of a search of their own."""


def interval(gaps: list[float]) -> dict[str, float]:
    """Mean and 95 % interval (Student's t) of paired gaps."""
    mean = statistics.mean(gaps)
    if len(gaps) < 2:
        return {"mean": mean}
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}[len(gaps)]
    half = t * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[4e-3, 8e-3, 1.6e-2])
    parser.add_argument("--name", default="quality")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    raw: list[dict[str, Any]] = []

    def measure(name: str, rate: float, seed: int) -> float:
        begun = time.monotonic()
        loss = SYSTEMS[name](rate, seed, arguments.steps)
        seconds = round(time.monotonic() - begun, 1)
        row = {"system": name, "rate": rate, "seed": seed, "loss": loss, "seconds": seconds}
        raw.append(row)
        print(row, flush=True)
        return loss

    names = list(SYSTEMS)
    best = {
        name: min(arguments.rates, key=lambda rate, name=name: measure(name, rate, 0))
        for name in names
        if name not in RATE_OF
    }
    best |= {name: best[other] for name, other in RATE_OF.items()}
    losses = {n: [measure(n, best[n], seed) for seed in arguments.seeds] for n in names}
    reference = losses[names[0]]
    result = {
        name: {
            "inner_rate": best[name],
            "loss": values,
            "mean_loss": statistics.mean(values),
            "gap_to_data_parallel_percent": interval(
                [100 * (x / y - 1) for x, y in zip(values, reference, strict=True)]
            ),
            "gap_of_decoupled_percent": interval(
                [100 * (x / y - 1) for x, y in zip(losses[names[1]], values, strict=True)]
            ),
        }
        for name, values in losses.items()
    }
    folder = keep(
        arguments.name,
        estimate=ESTIMATE,
        config={**vars(arguments), **SIZE, "sequences": SEQUENCES, "learners": LEARNERS},
        raw=raw,
        result=result,
        not_measured="larger models, longer runs, several texts, learners of unequal speed",
    )
    print(folder)


if __name__ == "__main__":
    main()
