"""Loss of a mixed-parallelism run compared with plain learners, at equal tokens, by paired seeds.

    python benchmarks/mixed.py                      # three seeds, about ten minutes on two cores

Each seed has four runs. Two have three plain learners. Two have a plain learner, one with FSDP2 on
two ranks and one with tensor parallelism on two ranks. Model, batches, tokens and settings are the
same. Each kind runs once *synchronous* (every round has all three learners) and once *asynchronous*
(slower learners take part less often). The final weights are scored on held-out text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from bench_runs import TOKEN, called, calling
from evidence import keep, options, spread

from decoupled_diloco import Learner
from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.storage.weight_files import load_weights
from decoupled_diloco.workloads import load_workload
from decoupled_diloco.workloads.rank_split import Parallelism, divided, share_of_data

MIXED: tuple[Parallelism, ...] = ("plain", "fsdp", "tp")
PLAIN: tuple[Parallelism, ...] = ("plain", "plain", "plain")
SYNC: dict[str, dict[str, Any]] = {
    "synchronous": {"quorum": 3, "wait": "at_overlap", "apply": {"when": "at_overlap"}},
    "asynchronous": {"quorum": 1},
}


def settings(seed: int) -> dict[str, Any]:
    """Return the options of the model and its data."""
    small = {"layers": 2, "width": 64, "heads": 4, "context": 64, "batch_size": 8}
    return {**small, "total_steps": 300, "warmup_steps": 20, "seed": seed}


def train(address: str, index: int, kind: Parallelism, seed: int) -> None:
    """Run one rank of one learner until the run is over."""
    torch.set_num_threads(1)
    if kind != "plain":
        dist.init_process_group("gloo")
    workload = load_workload("gpt", settings(seed))
    model = workload.model()
    if kind != "plain":
        model = divided(model, workload, kind)
    share = share_of_data(kind)
    optimizer = workload.optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    with Learner(
        model, address, auth_token=TOKEN, name=f"learner-{index}", optimizer=optimizer
    ) as learner:
        for step, batch in enumerate(workload.batches(index, len(MIXED))):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * workload.schedule(step)
            own = tuple(each.chunk(share.parts)[share.part] for each in batch)
            loss = workload.loss(model, own)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if not learner.step(loss.item(), tokens=workload.tokens(own)):
                break
    if kind != "plain":
        dist.destroy_process_group()


def run(seed: int, mode: str, kinds: tuple[Parallelism, ...], steps: int) -> dict[str, Any]:
    """Return the loss of one run, and the steps of each learner."""
    with tempfile.TemporaryDirectory() as name:
        folder, token = Path(name), Path(name) / "token"
        token.write_text(TOKEN)
        workload = load_workload("gpt", settings(seed))
        tokens = workload.tokens(next(workload.batches(0, len(kinds))))
        config = RunConfig(
            run={
                "learners": len(kinds),
                "max_tokens": steps * len(kinds) * tokens,
                "evaluator": False,
                "folder": str(folder / "run"),
                "seed": seed,
            },
            sync={"fragments": 4, "sync_every": 16, "overlap_steps": 2, **SYNC[mode]},
            syncer={"token_file": str(token)},
            data={"elastic": False},
            workload={"name": "gpt", "options": settings(seed)},
        )
        local = LocalRun(config, absent=config.learner_ids)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            local.start()
            for index, kind in enumerate(kinds):
                torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
                own = calling(train, local.addresses[0], index, kind, seed)
                command = [sys.executable, *([] if kind == "plain" else torchrun), *own]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                processes.append(subprocess.Popen(command, env=environment))
            outcome = local.wait(lambda: None)
            assert outcome.finished, outcome.reason
            assert not any(process.wait(60) for process in processes)
        finally:
            for process in processes:
                process.kill()
            local.close()
        model = workload.model()
        model.load_state_dict(load_weights(cast("Path", outcome.weights)), strict=False)
        logs = local.model.learners if local.model is not None else {}
        return {
            "loss": workload.evaluate(model)["loss"],
            "steps": {name: len(log.steps_at) for name, log in sorted(logs.items())},
        }


def main() -> None:
    arguments = options(seeds=3, steps=300)
    raw: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        for mode in SYNC:
            kinds = {"plain": PLAIN, "mixed": MIXED}
            pair = {name: run(seed, mode, each, arguments.steps) for name, each in kinds.items()}
            raw.append({"seed": seed, "mode": mode, **pair})
            print(json.dumps(raw[-1]), flush=True)
    result = {}
    for mode in SYNC:
        pairs = [(row["plain"]["loss"], row["mixed"]["loss"]) for row in raw if row["mode"] == mode]
        result[mode] = {
            "loss of plain learners, nats": spread(plain for plain, _ in pairs),
            "mixed less plain, nats": spread(mixed - plain for plain, mixed in pairs),
        }
    config = {"steps": arguments.steps, "options": settings(0), "sync": SYNC}
    keep("mixed", config=config, raw=raw, result=result)


if __name__ == "__main__":
    called() or main()
