"""Cost of the lab: eight learners of a study in one process, and eight plain loops in turn.

Both train the same batches with the same inner optimizer, with one thread, each in a new process.
The times are processor times, so other work on the machine counts little.

    python benchmarks/lab_speed.py --steps 48 --steps_large 6
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

import torch
from evidence import keep, options, spread

from decoupled_diloco.workloads.gpt import GptOptions, GptWorkload
from decoupled_diloco_lab.study import Study
from decoupled_diloco_lab.study.functions import train_plainly

LEARNERS = 8
SIZES: dict[str, dict[str, Any]] = {
    "0.87M": {"layers": 4, "width": 128, "heads": 4, "batch_size": 8},
    "25M": {"layers": 8, "width": 512, "heads": 8, "batch_size": 2},
}


def measure(size: str, case: str, steps: int) -> dict[str, Any]:
    """Return the processor time and the peak memory of one case, in this process."""
    torch.set_num_threads(1)
    workload = GptWorkload(GptOptions(**SIZES[size], eval_batches=1))
    study = Study(
        model=workload.model,
        batches=lambda learner, learners, seed: workload.batches(learner, learners),
        loss=workload.loss,
        evaluation=lambda: [next(workload.batches(0, LEARNERS))],
        learners=LEARNERS,
        steps=steps,
        seeds=1,
        inner=workload.optimizer,
        device="cpu",
    )
    begun, cpu = time.perf_counter(), time.process_time()
    if case == "study":
        study.run("decoupled")
    else:
        for part in range(LEARNERS):
            model = workload.model()
            train_plainly(workload, model, steps, range(part, part + 1), LEARNERS)
    return {
        "size": size,
        "case": case,
        "steps": steps,
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "seconds": round(time.perf_counter() - begun, 3),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Measure both cases of both sizes in turn, and save the ratios.

    Runs recorded in the file of ``--kept`` are not repeated.
    """
    given = options(
        steps=48, steps_large=6, repeats=3, repeats_large=2, kept=Path("lab_speed.jsonl")
    )
    wanted = [
        (size, case, steps)
        for size, steps, repeats in zip(
            SIZES,
            (given.steps, given.steps_large),
            (given.repeats, given.repeats_large),
            strict=True,
        )
        for _ in range(repeats)
        for case in ("plain", "study")
    ]
    lines = given.kept.read_text().splitlines() if given.kept.exists() else []
    rows = list(map(json.loads, lines))
    # A new process for each case: the peak memory of a process never falls.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for each in wanted[len(rows) :]:
            rows.append(pool.apply(measure, each))
            with given.kept.open("a") as file:
                print(json.dumps(rows[-1]), file=file)
            print(rows[-1], flush=True)
    result = {size: summary([row for row in rows if row["size"] == size]) for size in SIZES}
    config = {**SIZES, "learners": LEARNERS, "steps": given.steps, "steps_large": given.steps_large}
    keep("lab", config=config, raw=rows, result=result)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of the ratios of one size, and the peak memory."""
    plain, study = ([row for row in rows if row["case"] == case] for case in ("plain", "study"))
    pairs = zip(plain, study, strict=True)
    return {
        "steps": plain[0]["steps"],
        "step_seconds": spread(row["cpu_seconds"] / LEARNERS / row["steps"] for row in plain),
        "ratio": spread(own["cpu_seconds"] / other["cpu_seconds"] for other, own in pairs),
        "peak_mib": {"plain": plain[0]["peak_mib"], "study": study[0]["peak_mib"]},
    }


if __name__ == "__main__":
    main()
