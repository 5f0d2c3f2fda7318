"""Cost of a durable commit for the shard's merge worker: journal record and checkpoints.

Only the merge worker is measured, in one process, in turns: commits with journal records and their
share of the checkpoints, and commits without.

    python benchmarks/durability.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from evidence import keep, options, spread

from decoupled_diloco.merge import body_digest, layout_of, make_outer
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.protocol.messages import Asking, Version
from decoupled_diloco.syncer.durable import ShardDisk
from decoupled_diloco.syncer.shard_tensors import ShardTensors

FRAGMENTS = 8


class Worker:
    """A shard's merge worker with one learner: verify, fold, merge."""

    def __init__(self, parameters: int, folder: Path | None) -> None:
        side = round((parameters / FRAGMENTS) ** 0.5)
        layers = (torch.nn.Linear(side, side, bias=False) for _ in range(FRAGMENTS))
        plan = MergePlan.make(
            layout_of(torch.nn.Sequential(*layers)),
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
        codec = plan.codec_of(0, plan.uplink)
        self.body = codec.encode(torch.randn(numel) * 1e-3)
        self.digest = body_digest(self.body, codec)
        self.disk = None if folder is None else ShardDisk(folder, "measured", self.tensors)
        if self.disk is not None:
            self.disk.installed({p: Version(1, 0) for p in range(FRAGMENTS)})
        self.rounds = 0

    def seconds_per_commit(self, rounds: int) -> float:
        """Return the mean seconds per round."""
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


def main() -> None:
    pairs = options(pairs=4).pairs
    torch.set_num_threads(1)
    raw: dict[str, list[tuple[float, float]]] = {}
    result = {}
    for parameters in (1_000_000, 2_000_000, 8_000_000):
        size = f"{parameters / 1e6:g} M"
        with tempfile.TemporaryDirectory() as name:
            durable, plain = Worker(parameters, Path(name)), Worker(parameters, None)
            found = raw[size] = []
            for _ in range(pairs):
                found.append((durable.seconds_per_commit(96), plain.seconds_per_commit(96)))
                print(parameters, found[-1], flush=True)
        name = f"{size} parameters in {FRAGMENTS} fragments"
        result[f"{name}: ms per commit, durable"] = spread(1e3 * a for a, _ in found)
        result[f"{name}: ms per commit, not durable"] = spread(1e3 * b for _, b in found)
        result[f"{name}: ms of durability per commit"] = spread(1e3 * (a - b) for a, b in found)
        rates = [0.05 / (a - b) for a, b in found if a > b]
        result[f"{name}: commits per second at which this is 5 %"] = spread(rates)
    keep("durability_worker", config={"pairs": pairs, "rounds": 96}, raw=raw, result=result)


if __name__ == "__main__":
    main()
