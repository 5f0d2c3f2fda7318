"""Loss of a run of mixed parallelism against plain learners, at equal tokens, by paired seeds.

    python benchmarks/mixed.py                      # three seeds, some ten minutes on two cores

For each seed four runs: three plain learners, and a plain one, one of FSDP2 on two ranks and one of
tensor parallelism on two ranks, with the same model, batches, tokens and settings; each once
*synchronous* (every round has all three) and once *asynchronous*, where the slower learners are
asked less often. What is left over is scored on the held-out text.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from evidence import keep, spread

from decoupled_diloco import Learner
from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.storage.weights import load_weights
from decoupled_diloco.workloads import load_workload
from decoupled_diloco.workloads.divided import Parallelism, divided, share_of_data

ESTIMATE = (
    "synchronous: the same to rounding, less than 0.001 nats. Asynchronous: the slower learners "
    "train fewer of the tokens, so a difference as between two seeds of the order of rounds, some "
    "0.01 nats either way"
)
MIXED: tuple[Parallelism, ...] = ("plain", "fsdp", "tp")
PLAIN: tuple[Parallelism, ...] = ("plain", "plain", "plain")
SYNC: dict[str, dict[str, Any]] = {
    "synchronous": {"quorum": 3, "wait": "at_overlap", "apply": "at_tau"},
    "asynchronous": {"quorum": 1},
}


def options(seed: int) -> dict[str, Any]:
    """The model and its data."""
    small = {"layers": 2, "width": 64, "heads": 4, "context": 64, "batch_size": 8}
    return {**small, "total_steps": 300, "warmup_steps": 20, "seed": seed}


def train(address: str, token: str, index: int, kind: Parallelism, seed: int) -> None:
    """One rank of one learner, until the run is over."""
    torch.set_num_threads(1)
    if kind != "plain":
        dist.init_process_group("gloo")
    workload = load_workload("gpt", options(seed))
    model = workload.model()
    if kind != "plain":
        model = divided(model, workload, kind)
    share = share_of_data(kind)
    optimizer = workload.optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    with Learner(
        model, address, token=token, learner_id=f"learner-{index}", optimizer=optimizer
    ) as learner:
        for step, batch in enumerate(workload.batches(index, len(MIXED))):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * workload.schedule(step)
            own = tuple(each.chunk(share.parts)[share.part] for each in batch)
            loss = workload.loss(model, own)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if not learner.step(workload.tokens(own), loss.item()):
                break
    if kind != "plain":
        dist.destroy_process_group()


def run(seed: int, mode: str, kinds: tuple[Parallelism, ...], steps: int) -> dict[str, Any]:
    """One run: its loss, and the steps of each learner."""
    with tempfile.TemporaryDirectory() as name:
        folder, token = Path(name), Path(name) / "token"
        token.write_text("benchmark")
        workload = load_workload("gpt", options(seed))
        tokens = workload.tokens(next(workload.batches(0, len(kinds))))
        config = RunConfig(
            run={
                "learners": len(kinds),
                "budget_tokens": steps * len(kinds) * tokens,
                "evaluator": False,
                "folder": str(folder / "run"),
                "seed": seed,
            },
            sync={"fragments": 4, "period": 16, "overlap": 2, **SYNC[mode]},
            syncer={"token_file": str(token)},
            data={"leases": False},
            workload={"name": "gpt", "options": options(seed)},
        )
        local = LocalRun(config, absent=config.learner_ids)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            local.start()
            for index, kind in enumerate(kinds):
                told = [local.addresses[0], "benchmark", str(index), kind, str(seed)]
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                start = [sys.executable] if kind == "plain" else [*torchrun, "--nproc-per-node=2"]
                command = [*start, __file__, "--train", *told]
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
        told_steps = local.model.learners if local.model is not None else {}
        return {
            "loss": workload.evaluate(model)["loss"],
            "steps": {who: len(seen.steps_at) for who, seen in sorted(told_steps.items())},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of each learner, on average")
    parser.add_argument("--train", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        address, token, index, kind, seed = arguments.train
        train(address, token, int(index), kind, int(seed))
        return
    raw: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        for mode in SYNC:
            pair = {
                name: run(seed, mode, kinds, arguments.steps)
                for name, kinds in (("plain", PLAIN), ("mixed", MIXED))
            }
            raw.append({"seed": seed, "mode": mode, **pair})
            print(json.dumps(raw[-1]), flush=True)
    result = {}
    for mode in SYNC:
        own = [each for each in raw if each["mode"] == mode]
        result[mode] = {
            "loss of plain learners, nats": spread([each["plain"]["loss"] for each in own]),
            "mixed less plain, nats": spread(
                [each["mixed"]["loss"] - each["plain"]["loss"] for each in own]
            ),
        }
    keep(
        "mixed",
        estimate=ESTIMATE,
        config={"steps": arguments.steps, "options": options(0), "sync": SYNC},
        raw=raw,
        result=result,
        not_measured="larger models, GPUs, ranks on several machines",
    )


if __name__ == "__main__":
    main()
