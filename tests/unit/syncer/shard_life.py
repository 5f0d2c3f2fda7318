"""A shard's tensors and its disk, over several processes of the shard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from decoupled_diloco.merge import digest, layout_of, make_outer
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.messages import Asking
from decoupled_diloco.syncer.durable import Durable, ShardDisk
from decoupled_diloco.syncer.shard_tensors import ShardTensors

FRAGMENTS = (0, 1)


def tensors_of_a_shard() -> ShardTensors:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    plan = MergePlan.make(
        layout_of(model),
        fragments=2,
        strategy="balanced",
        uplink="bf16",
        downlink="bf16",
        method="rda",
        weighting="tokens",
        outer=make_outer("nesterov", 0.7, 0.5),
    )
    return ShardTensors(replace(plan, average=0.6), FRAGMENTS)


class Life:
    """One process of a shard, with its disk."""

    def __init__(self, folder: Path, identity: str = "run layout", claim: int = 0) -> None:
        self.tensors = tensors_of_a_shard()
        self.disk = ShardDisk(folder, identity, self.tensors, claim=claim)
        self.versions = {p: Version(1, 0) for p in FRAGMENTS}
        self.rounds = 0

    def begin(self) -> Life:
        for p in FRAGMENTS:
            self.tensors.install(p, torch.linspace(-1, 1, self.numel(p)))
        self.disk.installed(self.versions)
        return self

    def numel(self, fragment: int) -> int:
        return self.tensors.plan.fragments[fragment].numel

    def merge(self, fragment: int) -> None:
        """Run a round in which one learner sends a contribution that no other round has."""
        self.rounds += 1
        rng = torch.Generator().manual_seed(self.rounds)
        body = self.tensors.plan.uplink.encode(torch.randn(self.numel(fragment), generator=rng))
        ask = Asking(1, self.rounds)
        self.tensors.verify(fragment, ask, body, digest(body))
        self.tensors.fold(fragment, ask, 1, 1)
        version = Version(1, self.versions[fragment].counter + 1)
        self.disk.merge(fragment, version)
        self.versions[fragment] = version

    def values(self) -> list[Tensor]:
        entries = [self.tensors.fragments[p] for p in FRAGMENTS]
        state = [value for e in entries for _, value in sorted(e.outer.state_dict().items())]
        return [t.clone() for e in entries for t in (e.master, e.published)] + state

    def durable(self) -> dict[int, Durable]:
        fragments = self.tensors.fragments
        return {p: Durable(v, digest(fragments[p].published)) for p, v in self.versions.items()}
