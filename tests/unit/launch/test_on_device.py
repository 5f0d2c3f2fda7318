"""Moving the model and its batches to a device; "meta" represents the device."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from decoupled_diloco.launch.on_device import home_of, moved, placed

META = torch.device("meta")
CPU = torch.device("cpu")


def values() -> Tensor:
    return torch.ones(2, 3)


class Pair(NamedTuple):
    inputs: Tensor
    label: str


@dataclass(frozen=True)
class Example:
    inputs: Tensor
    name: str
    more: dict[str, Tensor] = field(default_factory=dict)
    seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        assert self.inputs.device == CPU, "a batch that is moved is not built again"


class Encoding(UserDict[str, Tensor]):
    """Has a ``to`` method, as Hugging Face's `BatchEncoding`."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: each.to(device) for name, each in self.items()})


def devices_of(batch: Any) -> set[str]:
    match batch:
        case Tensor():
            return {batch.device.type}
        case PackedSequence():
            return {batch.data.device.type}
        case Example():
            return devices_of(batch.inputs) | devices_of(batch.more)
        case tuple() | list():
            return set().union(*(devices_of(each) for each in batch))
        case dict() | UserDict():
            return set().union(*(devices_of(each) for each in batch.values()))
    return set()


@pytest.mark.parametrize(
    "batch",
    [
        values(),
        (values(), [values(), None]),
        {"a": values(), "b": {"c": (values(), 3)}},
        OrderedDict(a=values()),
        Pair(values(), "cat"),
        Example(values(), "cat", {"mask": values()}),
        Encoding(input_ids=values()),
        pack_sequence([values()]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_every_tensor_of_a_batch_moves_to_the_device(batch: Any) -> None:
    there = moved(batch, META)
    assert type(there) is type(batch)
    assert devices_of(there) == {"meta"}
    assert devices_of(batch) == {"cpu"}, "the batch itself is left as it was"


def test_other_objects_than_tensors_are_returned_unchanged() -> None:
    text, model = "cat", nn.Linear(1, 1)
    there = moved((text, 3, None, model), META)
    assert there == (text, 3, None, model)
    assert moved(Pair(values(), text), META).label == text
    assert moved(Example(values(), text), META).name == text


def test_on_the_cpu_nothing_is_copied() -> None:
    given = values()
    assert moved((given,), CPU)[0] is given


def test_a_tensor_on_another_device_stays_there() -> None:
    assert moved(torch.empty(2, device=META), CPU).device == META


def test_a_model_moves_to_the_device_unless_the_workload_has_placed_it() -> None:
    model = nn.BatchNorm1d(3)
    assert home_of(placed(model, META)) == META
    assert home_of(placed(nn.Linear(1, 1, device=META), CPU)) == META
    spread = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device=META))
    assert home_of(placed(spread, META)) is None
    assert spread[0].weight.device == CPU
