"""Weights before and after a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.merge import gather, layout_of, make_outer, tensors_of
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.storage.weight_files import load_weights, save_weights
from decoupled_diloco.syncer.result import assemble, initial_values, read_layout, save_share
from decoupled_diloco.syncer.shard_tensors import ShardTensors


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(3)
    return Tied()


def plan_of(model: nn.Module) -> MergePlan:
    return MergePlan.make(
        layout_of(model),
        fragments=3,
        strategy="balanced",
        uplink="bf16",
        downlink="bf16",
        method="rda",
        weighting="tokens",
        outer=make_outer(),
    )


def shares(folder: Path, model: nn.Module, shards: int) -> MergePlan:
    plan = plan_of(model)
    own = tensors_of(model, plan.layout)
    for shard in range(shards):
        tensors = ShardTensors(plan, tuple(p for p in range(3) if p % shards == shard))
        for p in tensors.owned:
            tensors.install(p, gather(plan.fragments[p], own))
        save_share(folder, shard, tensors, {p: f"1.{p}" for p in tensors.owned})
    return plan


def test_shares_are_combined_into_the_model_with_tied_names_and_dtypes(
    tmp_path: Path, model: Tied
) -> None:
    plan = shares(tmp_path, model, shards=2)
    assert read_layout(tmp_path) == plan.layout
    loaded = load_weights(assemble(tmp_path, plan, 2))
    other = Tied()
    other.load_state_dict(loaded)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_a_missing_share_is_named(tmp_path: Path, model: Tied) -> None:
    plan = shares(tmp_path, model, shards=2)
    (tmp_path / "checkpoints" / "shard-1.safetensors").unlink()
    with pytest.raises(StorageError, match=r"shard-1\.safetensors"):
        assemble(tmp_path, plan, 2)
    with pytest.raises(StorageError, match="fragments \\[1\\] are missing from the shares"):
        assemble(tmp_path, plan, 1)


def test_a_file_that_is_not_a_share_is_rejected(tmp_path: Path) -> None:
    save_weights(tmp_path / "checkpoints" / "shard-0.safetensors", {"x": torch.zeros(2)})
    with pytest.raises(StorageError, match="is not a share of a result"):
        read_layout(tmp_path)


def test_initial_weights_come_from_a_file_by_name(
    tmp_path: Path, model: Tied, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(model)
    save_weights(tmp_path / "begin.safetensors", model.state_dict())
    own = tensors_of(model, plan.layout)
    loaded: list[Path] = []

    def load(path: Path) -> dict[str, torch.Tensor]:
        loaded.append(path)
        return load_weights(path)

    monkeypatch.setattr("decoupled_diloco.syncer.result.load_weights", load)
    values = dict(initial_values(tmp_path / "begin.safetensors", plan, range(3)))
    assert len(loaded) == 1, "the file is read once"
    for p, fragment in enumerate(plan.fragments):
        assert torch.equal(values[p], gather(fragment, own))


def test_initial_weights_of_another_model_are_rejected(tmp_path: Path, model: Tied) -> None:
    plan = plan_of(model)
    path = tmp_path / "begin.safetensors"
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_weights(path, {**state, "body.bias": torch.zeros(7)})
    with pytest.raises(ConfigError, match=r"'body\.bias' has shape \(7,\) .* \(4,\) in the model"):
        list(initial_values(path, plan, [0]))
    del state["body.weight"]
    save_weights(path, state)
    with pytest.raises(ConfigError, match=r"lacks 'body\.weight'"):
        list(initial_values(path, plan, [0]))
