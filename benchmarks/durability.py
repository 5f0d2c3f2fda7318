"""What durability costs: the rate of commits with and without it, and steps with and without cuts.

One learner trains steps as short as they can be, a fragment is due at every step, and K = 1: the
shard merges as fast as it is fed. Runs with ``syncer.durable`` true and false go by turns, then
runs with a consistent cut every two seconds and without; the ratio of each pair is what counts.

With ``--worker`` the shard's merge worker alone is measured, in one process by turns: what a commit
takes with its journal record and its share of the checkpoints, and without.

    python benchmarks/durability.py
    python benchmarks/durability.py --worker
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from evidence import keep, run_to_its_end, spread

from decoupled_diloco.config import RunConfig
from decoupled_diloco.merge import digest, layout_of, make_outer
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.observe.tape import TapeReader
from decoupled_diloco.protocol.versions import Asking, Version
from decoupled_diloco.syncer.durable import ShardDisk
from decoupled_diloco.syncer.fragments import ShardTensors

ESTIMATE = (
    "a journal record is 0.9 MB for a fragment of 0.23 M parameters: about 1 ms to write and sync "
    "on an SSD beside 15 to 20 ms a round, and a checkpoint (22 MB) every 16 rounds about 30 ms: 5 "
    "to 10 % if the worker is the bottleneck, below 5 % where the learner's step is. A cut copies "
    "the learner's 29 MB at a boundary, about 10 ms: no change of the median step, p99 longer"
)
WORKER_ESTIMATE = (
    "a record is 0.5 bytes a parameter of the model (a fragment's gradient in fp32), a checkpoint "
    "of 12 bytes a parameter comes every 96 commits: 0.6 MB a commit for 1 M parameters, about 2 "
    "ms with the sync, 5 MB and 8 ms for 8 M; as long as the merge itself, so that 5 % are kept up "
    "to some 25 and 6 commits a second and shard"
)
FRAGMENTS = 8
WARMUP = 0.15
"""This share of a run's rounds and steps is left out: connections and memory are new."""


def run(number: int, steps: int, *, durable: bool, cuts_every: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        config = RunConfig(
            run={
                "name": f"durability-{number}",
                "folder": str(Path(name) / "run"),
                "learners": 1,
                "budget_steps": steps,
                "evaluator": False,
                "checkpoint_every_seconds": cuts_every,
            },
            sync={"fragments": 8, "period": 8, "overlap": 1, "quorum": 1},
            syncer={"shards": 1, "port": 0, "durable": durable},
            workload={
                "name": "paced",
                "options": {
                    "step_seconds": 0.01,
                    "width": 192,
                    "layers": 4,
                    "context": 16,
                    "batch_size": 1,
                },
            },
        )
        run_to_its_end(config)
        return measured(list(TapeReader(Path(config.run.folder))))


def measured(records: list[Any]) -> dict[str, Any]:
    merged = [r.at for r in records if r.type == "RoundFinished" and r.data["verdict"] == "merged"]
    merged = merged[int(WARMUP * len(merged)) :]
    at = [r.at for r in records if r.type == "StepFinished"]
    steps = [after - before for before, after in pairwise(at[int(WARMUP * len(at)) :])]
    return {
        "commits": len(merged),
        "commits_per_second": (len(merged) - 1) / (merged[-1] - merged[0]),
        "cuts": sum(r.type == "KeepCheckpoint" for r in records),
        "step_seconds_median": statistics.median(steps),
        "step_seconds_mean": statistics.fmean(steps),
        "step_seconds_p99": statistics.quantiles(steps, n=100)[98],
        "step_seconds_longest": max(steps),
    }


def ratios(pairs: list[tuple[dict[str, Any], dict[str, Any]]], what: str) -> list[float]:
    return [with_it[what] / without[what] for with_it, without in pairs]


class Worker:
    """A shard's merge worker with one learner: verify, fold, merge."""

    def __init__(self, parameters: int, folder: Path | None) -> None:
        side = round((parameters / FRAGMENTS) ** 0.5)
        model = torch.nn.Sequential(
            *(torch.nn.Linear(side, side, bias=False) for _ in range(FRAGMENTS))
        )
        plan = MergePlan.make(
            layout_of(model),
            fragments=FRAGMENTS,
            strategy="balanced",
            uplink="bf16",
            downlink="bf16",
            method="rda",
            weighting="tokens",
            outer=make_outer("nesterov", 0.7, 0.5),
        )
        self.tensors = ShardTensors(plan, tuple(range(FRAGMENTS)))
        numel = plan.fragments[0].numel
        for fragment in range(FRAGMENTS):
            self.tensors.install(fragment, torch.randn(numel))
        self.body = plan.codec_of(0, plan.uplink).encode(torch.randn(numel) * 1e-3)
        self.digest = digest(self.body)
        self.disk = None if folder is None else ShardDisk(folder, "measured", self.tensors)
        if self.disk is not None:
            self.disk.installed({p: Version(1, 0) for p in range(FRAGMENTS)})
        self.rounds = 0

    def seconds_per_commit(self, rounds: int) -> float:
        """Mean seconds of some rounds."""
        begun = time.perf_counter()
        for _ in range(rounds):
            self.rounds += 1
            fragment = self.rounds % FRAGMENTS
            ask = Asking(1, self.rounds)
            self.tensors.verify(fragment, ask, self.body, self.digest)
            self.tensors.fold(fragment, ask, 1, 1)
            if self.disk is None:
                self.tensors.merge(fragment)
            else:
                self.disk.merge(fragment, Version(1, self.rounds))
        return (time.perf_counter() - begun) / rounds


def measure_worker(pairs: int) -> None:
    torch.set_num_threads(1)
    raw: dict[str, list[tuple[float, float]]] = {}
    for parameters in (1_000_000, 2_000_000, 8_000_000):
        with tempfile.TemporaryDirectory() as name:
            durable, plain = Worker(parameters, Path(name)), Worker(parameters, None)
            found = raw[f"{parameters / 1e6:g} M"] = []
            for _ in range(pairs):
                found.append((durable.seconds_per_commit(96), plain.seconds_per_commit(96)))
                print(parameters, found[-1], flush=True)
    result = {}
    for size, found in raw.items():
        name = f"{size} parameters in {FRAGMENTS} fragments"
        result[f"{name}: ms a commit, durable"] = spread([1e3 * a for a, _ in found])
        result[f"{name}: ms a commit, not durable"] = spread([1e3 * b for _, b in found])
        result[f"{name}: ms of durability a commit"] = spread([1e3 * (a - b) for a, b in found])
        rates = [0.05 / (a - b) for a, b in found if a > b]
        result[f"{name}: commits a second at which that is 5 %"] = spread(rates)
    keep(
        "durability_worker",
        estimate=WORKER_ESTIMATE,
        config={"pairs": pairs, "rounds": 96},
        raw=raw,
        result=result,
        not_measured="a slow or a network disk; more than one contribution a round",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--cuts-every", type=float, default=2.0)
    parser.add_argument("--worker", action="store_true")
    arguments = parser.parse_args()
    if arguments.worker:
        measure_worker(arguments.pairs)
        return
    journal, cuts = [], []
    for number in range(arguments.pairs):
        sides: dict[str, dict[str, Any]] = {}
        orders = ("durable", "not", "cuts")
        for case in orders if number % 2 == 0 else reversed(orders):
            every = arguments.cuts_every if case == "cuts" else 0.0
            sides[case] = run(number, arguments.steps, durable=case != "not", cuts_every=every)
            print(case, sides[case], flush=True)
        journal.append((sides["durable"], sides["not"]))
        cuts.append((sides["cuts"], sides["durable"]))
    result = {
        "commits per second, durable": spread([a["commits_per_second"] for a, _ in journal]),
        "commits per second, not durable": spread([b["commits_per_second"] for _, b in journal]),
        "commit rate, durable over not": spread(ratios(journal, "commits_per_second")),
        "cuts taken in a run": spread([float(a["cuts"]) for a, _ in cuts]),
        "commit rate, with cuts over without": spread(ratios(cuts, "commits_per_second")),
        "mean step, with cuts over without": spread(ratios(cuts, "step_seconds_mean")),
        "median step, with cuts over without": spread(ratios(cuts, "step_seconds_median")),
        "p99 step, with cuts over without": spread(ratios(cuts, "step_seconds_p99")),
        "longest step with cuts, seconds": spread([a["step_seconds_longest"] for a, _ in cuts]),
        "longest step without, seconds": spread([b["step_seconds_longest"] for _, b in cuts]),
    }
    keep(
        "durability",
        estimate=ESTIMATE,
        config=vars(arguments),
        raw={"durable and not": journal, "cuts and none": cuts},
        result=result,
        not_measured="a machine without other work: one case alone differed fourfold from run to "
        "run, so that these ratios bound little; several learners in a round; a slow or a network "
        "disk; larger models",
    )


if __name__ == "__main__":
    main()
