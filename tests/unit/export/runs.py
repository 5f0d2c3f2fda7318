"""Run folders as a run leaves them, made without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.config.method import plan_of, public_text, read_public
from decoupled_diloco.merge import gather, layout_of, tensors_of
from decoupled_diloco.syncer.fragments import ShardTensors
from decoupled_diloco.syncer.result import assemble, save_share
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
    "vit": {"layers": 1, "width": 32, "heads": 2, "batch_size": 8},
}
SMALL["moe"] = {**SMALL["gpt"], "experts": 3, "expert_hidden": 24}
SHARDS = 2


def run_folder(
    folder: Path, name: str = "gpt", *, missing: int | None = None, **options: Any
) -> nn.Module:
    """Writes what a finished run leaves; returns the model with its weights.

    With ``missing``, the run has not finished: this shard has not handed in its share.
    """
    config = RunConfig(
        run={"name": "small", "folder": folder, "learners": 1, "budget_steps": 8},
        sync={"fragments": 4, "period": 4, "overlap": 1},
        syncer={"shards": SHARDS},
        workload={"name": name, "options": {**SMALL.get(name, {}), **options}},
    )
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(dump_config(config))
    clocks = {"state": {"clocks": {"0": 8, "1": 9}}}
    (folder / "coordinator.json").write_text(json.dumps(clocks))
    model = load_workload(name, config.workload_options()).model()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    _hand_in(folder, config, model, missing)
    return model


def _hand_in(folder: Path, config: RunConfig, model: nn.Module, missing: int | None) -> None:
    plan = plan_of(layout_of(model), read_public(public_text(config)))
    own = tensors_of(model, plan.layout)
    for shard in range(SHARDS):
        tensors = ShardTensors(plan, tuple(p for p in range(4) if p % SHARDS == shard))
        for p in tensors.owned:
            tensors.install(p, gather(plan.fragments[p], own))
        if shard != missing:
            save_share(folder, shard, tensors, {p: f"1.{p}" for p in tensors.owned})
    if missing is None:
        assemble(folder, plan, SHARDS)
