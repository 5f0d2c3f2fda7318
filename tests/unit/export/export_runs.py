"""Run folders in the state in which a run leaves them, created without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from decoupled_diloco.config import RunConfig, dump_config, load_config
from decoupled_diloco.config.method import options_of, plan_of, public_text
from decoupled_diloco.merge import digest, gather, layout_of, scatter, tensors_of
from decoupled_diloco.protocol.coordinator_state import CoordinatorState
from decoupled_diloco.protocol.messages import Asking, Version
from decoupled_diloco.storage.coordinator_states import CoordinatorStates
from decoupled_diloco.syncer.durable import ShardDisk, identity_of_shard
from decoupled_diloco.syncer.result import assemble, save_share
from decoupled_diloco.syncer.shard_tensors import ShardTensors
from decoupled_diloco.workloads import load_workload

SMALL: dict[str, dict[str, Any]] = {
    "gpt": {
        "layers": 2,
        "width": 32,
        "heads": 2,
        "context": 32,
        "eval_batches": 1,
        "corpus_bytes_max": 100_000,
    },
    "speech": {"layers": 1, "width": 32, "heads": 2, "batch_size": 4, "eval_utterances": 20},
    "vit": {"layers": 1, "width": 32, "heads": 2, "batch_size": 8},
}
SMALL["moe"] = {**SMALL["gpt"], "experts": 3, "expert_hidden": 24}
SHARDS = 2


def run_folder(
    folder: Path,
    name: str = "gpt",
    *,
    missing: int | None = None,
    outer: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Write the files of a finished run; return the model with its weights.

    With ``missing``, the run has not finished: this shard has not written its share.
    """
    config = RunConfig(
        run={"name": "small", "folder": folder, "learners": 1, "max_steps": 8},
        sync={"fragments": 4, "sync_every": 4, "overlap_steps": 1},
        outer=outer or {},
        syncer={"shards": SHARDS},
        workload={"name": name, "options": {**SMALL.get(name, {}), **options}},
    )
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(dump_config(config))
    state = {"clocks": {"0": 8, "1": 9}, "learners": {}}
    CoordinatorStates(folder, "n").write({"state": state})
    model = load_workload(name, config.workload_options()).model()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    _hand_in(folder, config, model, missing)
    return model


def _hand_in(folder: Path, config: RunConfig, model: nn.Module, missing: int | None) -> None:
    plan = plan_of(layout_of(model), config)
    own = tensors_of(model, plan.layout)
    for shard in range(SHARDS):
        tensors = ShardTensors(plan, tuple(p for p in range(4) if p % SHARDS == shard))
        for p in tensors.owned:
            tensors.install(p, gather(plan.fragments[p], own))
        if shard != missing:
            save_share(folder, shard, tensors, {p: f"1.{p}" for p in tensors.owned})
    if missing is None:
        assemble(folder, plan, SHARDS)


def keep_durable(folder: Path, phase: str, merges: int = 1) -> Tensor:
    """Add the durable state of a continued run's shards; return its parameters as one row."""
    config = load_config(folder / "run.toml")
    model = load_workload(config.workload.name, config.workload_options()).model()
    layout, options = layout_of(model), options_of(config)
    plan = plan_of(layout, config)
    own = tensors_of(model, layout)
    for shard in range(SHARDS):
        tensors = ShardTensors(plan, options.owned(shard))
        disk = ShardDisk(
            folder / "durable" / f"shard-{shard}", identity_of_shard(config, layout), tensors
        )
        for p in tensors.owned:
            tensors.install(p, gather(plan.fragments[p], own).clone())
        disk.installed(dict.fromkeys(tensors.owned, Version(1, 0)))
        for p in tensors.owned:
            for merge in range(merges):
                contribution = plan.uplink.encode(torch.full_like(tensors.whole(p), 0.5))
                ask = Asking(1, p)
                tensors.verify(p, ask, contribution, digest(contribution))
                tensors.fold(p, ask, 1, 1)
                disk.merge(p, Version(1, 1 + merge), {"clock": 11 + shard})
            scatter(plan.fragments[p], tensors.whole(p), own)
        disk.close()
    state = TypeAdapter(CoordinatorState).dump_python(CoordinatorState(), mode="json")
    document = {
        "state": state | {"phase": phase},
        "layout": json.dumps(layout.to_json()),
        "settings": public_text(config),
    }
    states = CoordinatorStates(folder, "n")
    states.read()
    states.write(document)
    return torch.cat([tensor.reshape(-1) for tensor in own])
