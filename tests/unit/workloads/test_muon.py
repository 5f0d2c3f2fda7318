"""One optimizer with Muon for hidden matrices and AdamW for everything else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads import Workload, load_workload

OPTIONS = {"layers": 1, "width": 16, "heads": 2, "context": 8, "batch_size": 2, "seed": 1}


def gpt(optimizer: str) -> Workload:
    return load_workload(
        "gpt", {**OPTIONS, "optimizer": optimizer, "corpus_bytes_max": 20_000, "total_steps": 9}
    )


def train(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    workload.loss(model, next(workload.batches(0, 1))).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_updates_equal_torchs_muon_on_hidden_matrices_and_adamw_elsewhere() -> None:
    workload = gpt("muon")
    ours, theirs = workload.model(), workload.model()
    named = dict(theirs.named_parameters())
    hidden = [n for n, p in named.items() if p.ndim == 2 and n.startswith("blocks.")]
    rest = [n for n in named if n not in hidden]
    assert {"embedding.weight", "head.weight"} <= set(rest)
    rate, decay = workload.options.learning_rate, workload.options.weight_decay
    scaled = "match_rms_adamw"
    muon = torch.optim.Muon(
        [named[n] for n in hidden], lr=rate, weight_decay=decay, adjust_lr_fn=scaled
    )
    groups = [
        {"params": [named[n] for n in rest if named[n].ndim >= 2], "weight_decay": decay},
        {"params": [named[n] for n in rest if named[n].ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=rate, betas=workload.options.betas)
    optimizer = workload.optimizer(ours)
    for _ in range(3):
        train(workload, ours, optimizer)
        workload.loss(theirs, next(workload.batches(0, 1))).backward()
        muon.step()
        adamw.step()
        theirs.zero_grad()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_it_continues_from_its_state_and_follows_a_schedule() -> None:
    workload = gpt("muon")
    model = workload.model()
    optimizer = workload.optimizer(model)
    train(workload, model, optimizer)
    other = copy.deepcopy(model)
    restored = workload.optimizer(other)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, restored):
        for group in each.param_groups:
            group["lr"] = 1e-4
    train(workload, model, optimizer)
    train(workload, other, restored)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(model)
    train(workload, model, optimizer)
    for ours, theirs in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(ours, theirs), "a rate of 0 moves nothing"


def test_an_older_torch_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    workload = gpt("muon")
    with pytest.raises(ConfigError, match=r'optimizer = "muon" needs torch 2\.9 or newer'):
        workload.optimizer(workload.model())
