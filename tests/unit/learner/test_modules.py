"""Parts of a model have the whole model's names."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.learner_model import JoinedParts, parts_of, plain
from decoupled_diloco.merge import layout_of


def part(first: str, *blocks: str) -> nn.Module:
    made = nn.Module()
    made.add_module(first, nn.Linear(2, 2))
    made.blocks = nn.ModuleDict({name: nn.BatchNorm1d(2) for name in blocks})
    made.register_buffer("angles", torch.arange(2.0), persistent=False)
    return made


def test_parts_have_the_names_of_the_whole() -> None:
    whole = part("embedding", "0", "1", "2")
    whole.head = nn.Linear(2, 2)
    parts = [part("embedding", "0"), part("head", "1", "2")]
    joined = plain(parts)
    assert isinstance(joined, JoinedParts)
    assert list(parts_of(joined)) == parts
    assert joined.state_dict().keys() == whole.state_dict().keys()
    names = {spec.name for spec in layout_of(whole).tensors}
    assert {spec.name for spec in layout_of(joined).tensors} == names
    joined.load_state_dict(whole.state_dict())
    inner = joined.get_submodule("blocks.2").running_var
    assert parts[1].get_submodule("blocks.2").running_var is inner
    assert parts[1].head.weight.equal(whole.head.weight)


def test_a_parameter_in_two_parts_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"parameter 'blocks.0.weight' is in several parts"):
        plain([part("embedding", "0"), part("head", "0")])


def test_one_part_is_the_model() -> None:
    model = nn.Linear(2, 2)
    assert plain([model]) is plain(model) is model
    assert parts_of(model) == (model,)
    assert isinstance(plain(nn.Sequential(OrderedDict(a=model))), nn.Sequential)
