"""Data of one's own in parts: what fits, and that a part can be gone on with anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.leased import LeasedBatches, MapParts, PartedData, StreamParts
from decoupled_diloco.workloads import load_workload
from decoupled_diloco.workloads.base import Workload
from decoupled_diloco.workloads.parts import PART_BATCHES, WorkloadParts


class Numbers(IterableDataset[int]):
    """The numbers of one part."""

    def __init__(self, part: int) -> None:
        self.part = part

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.part, 100 * self.part + 10))


class StatefulLoader:
    """The interface of torchdata's ``StatefulDataLoader``: state of the loader, not of an iterator.

    Attributes:
        read: Numbers read, whether they were used or not.
    """

    def __init__(self, part: int) -> None:
        self.part = part
        self.position = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 10:
            self.position += 1
            self.read += 1
            yield 100 * self.part + self.position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def flat(batches: Iterator[Any]) -> list[int]:
    return [int(item) for batch in batches for item in torch.as_tensor(batch).flatten()]


def test_a_map_style_dataset_is_trained_once_in_a_pass() -> None:
    data = MapParts(TensorDataset(torch.arange(103)), parts=5, batch_size=4)

    def items(turn: int) -> list[int]:
        return [int(item) for part in range(5) for (x,) in data.open(part, 0, turn) for item in x]

    assert sorted(items(0)) == list(range(103))
    assert sorted(items(1)) == list(range(103))
    assert items(0) != items(1), "each pass is shuffled anew"
    assert items(0) == items(0)


def test_a_part_goes_on_where_it_was() -> None:
    sources: list[PartedData] = [
        MapParts(TensorDataset(torch.arange(103)), parts=5, batch_size=4),
        StreamParts(lambda part, turn: DataLoader(Numbers(part), batch_size=3), parts=5),
        StreamParts(lambda part, turn: StatefulLoader(part), parts=5),
    ]
    for data in sources:
        whole = [str(batch) for batch in data.open(3, 0, 1)]
        assert [str(batch) for batch in data.open(3, 2, 1)] == whole[2:]
        assert list(data.open(3, len(whole), 1)) == []


def test_more_parts_than_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="10 items, so 3 batches of 4: give 1 to 3 parts"):
        MapParts(TensorDataset(torch.arange(10)), parts=4, batch_size=4)


def test_data_without_a_length_are_no_map_style_dataset() -> None:
    with pytest.raises(ConfigError, match=r"Numbers without len: .* as StreamParts\(make"):
        MapParts(Numbers(0), parts=2, batch_size=4)


def test_a_stateful_loader_is_not_read_from_the_beginning() -> None:
    made: list[StatefulLoader] = []

    def make(part: int, turn: int) -> StatefulLoader:
        made.append(StatefulLoader(part))
        return made[-1]

    batches = LeasedBatches(StreamParts(make, parts=3))
    batches.load_state_dict({"turn": 0, "part": 2, "position": 6, "stream": {"position": 6}})
    assert flat(batches._opened(0, 2, 7)) == [207, 208, 209]
    assert made[-1].read == 4, "from its state on, one left out"
    assert flat(batches._opened(0, 2, 4)) == [204, 205, 206, 207, 208, 209], "before its state"
    assert flat(batches._opened(1, 2, 0)) == list(range(200, 210)), "another pass"


def test_batches_that_are_nobodys_say_so() -> None:
    batches = LeasedBatches(StreamParts(lambda part, turn: Numbers(part), parts=3))
    with pytest.raises(ConfigError, match=r"iterate over batches\.of\(learner\)"):
        next(batches)
    with pytest.raises(ConfigError, match="parts=0 of the data"):
        LeasedBatches(StreamParts(lambda part, turn: Numbers(part), parts=0))


def test_what_is_not_in_parts_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"the data are a int without parts: .* MapParts\("):
        LeasedBatches(4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="make=3 cannot be called: give a function of part"):
        StreamParts(3, parts=2)  # type: ignore[arg-type]


OPTIONS = {"corpus_bytes_max": 20_000, "context": 64, "batch_size": 4}


def test_the_text_is_trained_once_in_a_pass() -> None:
    workload = load_workload("gpt", OPTIONS)
    data = WorkloadParts(workload, 7)
    text: torch.Tensor = workload.corpus.train  # type: ignore[attr-defined]
    windows = [
        bytes(row.tolist())
        for part in range(data.parts)
        for inputs, _ in data.open(part, 0, 0)
        for row in inputs
    ]
    count = (len(text) - 1) // 64
    whole = bytes(text[: 64 * count].tolist())
    assert sorted(windows) == sorted(whole[64 * i : 64 * (i + 1)] for i in range(count))


def test_there_are_no_more_parts_than_batches() -> None:
    workload = load_workload("gpt", OPTIONS)
    batches = WorkloadParts(workload, 1).open(0, 0, 0)
    assert WorkloadParts(workload, 10_000).parts == sum(1 for _ in batches)


class Endless(Workload):
    """A workload whose batches have no end, named by part and number."""

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[Any]:
        number = start
        while True:
            yield (part, parts, number)
            number += 1


def test_of_endless_batches_each_pass_takes_the_next() -> None:
    data = WorkloadParts(Endless(), 3)  # type: ignore[abstract]
    assert data.parts == 3
    first, second = list(data.open(1, 0, 0)), list(data.open(1, 0, 1))
    assert [number for _, _, number in first + second] == list(range(2 * PART_BATCHES))
    assert list(data.open(1, 60, 1)) == second[60:]
