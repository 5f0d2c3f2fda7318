"""`load_weights`: one way to use a run's weights that works for every model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import decoupled_diloco as dd
from decoupled_diloco.merge import layout_of
from decoupled_diloco.storage.weight_files import save_weights


class Tied(nn.Module):
    """A tied head, a frozen parameter and statistics, as in many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.lm_head.weight = self.wte.weight
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)


def written(folder: Path) -> tuple[Tied, Path]:
    model, file = Tied(), folder / "weights.safetensors"
    names = [name for spec in layout_of(model).tensors for name in (spec.name, *spec.aliases)]
    state = model.state_dict()
    save_weights(file, {name: state[name] for name in names})
    return model, file


@pytest.mark.parametrize("wrap", [lambda m: m, torch.compile, lambda m: m.to(torch.bfloat16)])
def test_tied_weights_are_loaded(tmp_path: Path, wrap: object) -> None:
    model, file = written(tmp_path)
    other = Tied()
    frozen = other.frozen.detach().clone()
    dd.load_weights(wrap(other), file)  # type: ignore[operator]
    assert other.lm_head.weight is other.wte.weight
    wanted = model.wte.weight.to(other.wte.weight.dtype)
    assert torch.equal(other.wte.weight, wanted)
    assert torch.equal(other.frozen, frozen.to(other.frozen.dtype)), "it is not in the file"


@pytest.mark.parametrize("name", ["wte.weight", "lm_head.weight"])
def test_either_of_two_tied_names_is_enough(tmp_path: Path, name: str) -> None:
    """As in a file that another program wrote."""
    state = {"norm.weight": torch.ones(4), "norm.bias": torch.zeros(4), name: torch.ones(8, 4)}
    save_file(state, tmp_path / "model.safetensors")
    model = Tied()
    dd.load_weights(model, tmp_path / "model.safetensors")
    assert torch.equal(model.lm_head.weight, torch.ones(8, 4))


def test_another_model_is_rejected_by_tensor_name(tmp_path: Path) -> None:
    _, file = written(tmp_path)
    model = Tied()
    model.more = nn.Linear(2, 2)
    with pytest.raises(
        dd.ConfigError, match=r"lacks 'more\.weight', which the model has: build th"
    ):
        dd.load_weights(model, file)
    model = Tied()
    model.norm = nn.BatchNorm1d(3)
    with pytest.raises(dd.ConfigError, match=r"has 'norm\.\w+' of shape \(4,\), but the model has"):
        dd.load_weights(model, file)
    with pytest.raises(dd.StorageError, match="does not exist"):
        dd.load_weights(model, tmp_path / "none.safetensors")
