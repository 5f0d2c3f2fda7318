"""A training loop in turns with and without `learner.step()`, so that one run measures both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from decoupled_diloco.workloads import load_workload

Timed = Sequence[tuple[int, float]]
"""Block and seconds of each step."""

SETTLE = 3
"""Steps that are left out at the start of a block."""


def gpt_loop(
    options: dict[str, Any],
    wrapped: Callable[[Any], Any] = lambda model: model,
    of: int = 1,
    part: int = 0,
) -> tuple[nn.Module, Callable[[], int]]:
    """Return a GPT, and a function that trains it for one step and returns the tokens."""
    workload = load_workload("gpt", {**options, "total_steps": 10**6})
    model = wrapped(workload.model())
    optimizer, batches = workload.optimizer(model), workload.batches(part, of)

    def train() -> int:
        batch = next(batches)
        workload.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return workload.tokens(batch)

    return model, train


def by_turns(train: Callable[[], int], learner: Any, blocks: int, steps: int) -> dict[str, Any]:
    """Run blocks of steps in turns with and without the learner; return the seconds per step."""
    found: dict[str, Any] = {"attached": [], "detached": [], "inside": []}
    found["cpu_seconds"] = {"attached": 0.0, "detached": 0.0}
    for block in range(2 * blocks):
        kind = "detached" if block % 2 else "attached"
        cpu = time.process_time()
        for number in range(steps):
            begun = time.perf_counter()
            tokens = train()
            inside = time.perf_counter()
            if kind == "attached":
                learner.step(tokens=tokens)
            done = time.perf_counter()
            if number >= SETTLE:
                found[kind].append((block // 2, done - begun))
                found["inside"] += [done - inside] if kind == "attached" else []
        found["cpu_seconds"][kind] += time.process_time() - cpu
    return found


def of_blocks(timed: Timed) -> list[list[float]]:
    """Return the seconds of each block's steps."""
    blocks: dict[int, list[float]] = {}
    for block, seconds in timed:
        blocks.setdefault(block, []).append(seconds)
    return list(blocks.values())


def medians(timed: Timed) -> list[float]:
    """Return the median of each block."""
    return [statistics.median(each) for each in of_blocks(timed)]


def throughput_percent(raw: dict[str, Any]) -> list[float]:
    """Return the throughput relative to the loop without the learner, by block."""
    pairs = zip(medians(raw["attached"]), medians(raw["detached"]), strict=True)
    return [100 * detached / attached for attached, detached in pairs]
