"""`ElasticLoader`: what it accepts, and that a partition continues from any batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from decoupled_diloco.data import PARTITIONS_MAX, ElasticLoader, PartitionedData
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads import load_workload
from decoupled_diloco.workloads.data_partitions import PARTITION_BATCHES, WorkloadPartitions
from decoupled_diloco.workloads.workload import Workload


class Numbers(IterableDataset[int]):
    """The numbers of one partition."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.index, 100 * self.index + 10))


class StatefulLoader:
    """The interface of torchdata's ``StatefulDataLoader``: state of the loader, not of an iterator.

    Attributes:
        read: Numbers read, whether they were used or not.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.position = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 10:
            self.position += 1
            self.read += 1
            yield 100 * self.index + self.position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def flat(batches: Iterator[Any]) -> list[int]:
    return [int(item) for batch in batches for item in torch.as_tensor(batch).flatten()]


class Letters:
    """A custom source of data."""

    def __init__(self, partitions: int = 4) -> None:
        self.partitions = partitions

    def iter_partition(self, index: int, start_batch: int, epoch: int) -> Iterator[str]:
        return iter(f"{epoch}{index}{letter}" for letter in "abcdef"[start_batch:])


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def test_a_map_style_dataset_is_trained_once_in_an_epoch() -> None:
    loader = ElasticLoader(numbers(103), partitions=5, batch_size=4)
    assert loader.partitions == 5

    def items(epoch: int, loader: ElasticLoader = loader) -> list[int]:
        batches = (b for index in range(5) for (b,) in loader.iter_partition(index, 0, epoch))
        return [int(item) for batch in batches for item in batch]

    assert sorted(items(0)) == list(range(103))
    assert sorted(items(1)) == list(range(103))
    assert items(0) != items(1), "each epoch has another order"
    assert items(0) == items(0)
    other = ElasticLoader(numbers(103), partitions=5, batch_size=4, seed=1)
    assert items(0, other) != items(0), "each seed has another order"


def test_further_arguments_are_passed_to_the_data_loader() -> None:
    loader = ElasticLoader(
        numbers(12), partitions=2, batch_size=3, collate_fn=lambda items: len(items)
    )
    assert list(loader.iter_partition(0)) == [3, 3]


LOADERS = [
    ElasticLoader(numbers(103), partitions=5, batch_size=4),
    ElasticLoader(lambda index, epoch: DataLoader(Numbers(index), batch_size=3), partitions=5),
    ElasticLoader(lambda index, epoch: StatefulLoader(index), partitions=5),
    ElasticLoader(Letters()),
]


@pytest.mark.parametrize("loader", LOADERS, ids=["map", "stream", "stateful", "custom"])
def test_a_partition_continues_from_any_batch(loader: ElasticLoader) -> None:
    whole = [str(batch) for batch in loader.iter_partition(3, 0, 1)]
    assert len(whole) > 2
    assert [str(batch) for batch in loader.iter_partition(3, 2, 1)] == whole[2:]
    assert list(loader.iter_partition(3, len(whole), 1)) == []


def test_a_custom_source_is_recognized_by_its_members() -> None:
    assert isinstance(Letters(), PartitionedData)
    assert ElasticLoader(Letters(9)).partitions == 9
    assert list(ElasticLoader(Letters()).iter_partition(2, 4, 1)) == ["12e", "12f"]


def stream(index: int, epoch: int) -> Numbers:
    return Numbers(index)


MAP = {"partitions": 2, "batch_size": 4}


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (numbers(10), {"partitions": 2}, r"needs partitions= and batch_size= for a map-style"),
        (numbers(10), {"batch_size": 4}, r"needs partitions= and batch_size= for a map-style"),
        (numbers(10), {"partitions": 2, "batch_size": 0}, r"^batch_size=0 is out of range: pass 1"),
        (
            numbers(10),
            {"partitions": 4, "batch_size": 4},
            r"^partitions=4 is out of range: 10 items are 3 batches of 4: pass 1 to 3 partitions",
        ),
        (numbers(10), {"partitions": 0, "batch_size": 4}, r"^partitions=0 is out of range"),
        (numbers(0), {"partitions": 1, "batch_size": 4}, r"^partitions=1 is out of range: 0 items"),
        (
            numbers(10),
            {"partitions": 2, "batch_size": 4, "prefetch": 0},
            r"^prefetch=0 is out of range: pass 1 or more partitions",
        ),
        (numbers(10), {**MAP, "batch_size": "a"}, r"^batch_size='a' is not a whole number: pass 1"),
        (numbers(10), {**MAP, "seed": -1}, r"^seed=-1 is out of range: pass 0 or more$"),
        (numbers(10), {**MAP, "seed": "a"}, r"^seed='a' is not a whole number: pass 0 or more$"),
        (numbers(10), {**MAP, "prefetch": 1.5}, r"^prefetch=1.5 is not a whole number: pass 1 or"),
        (numbers(10), {**MAP, "partitions": True}, r"^partitions=True is not a whole number: pass"),
        (print, {"partitions": "a"}, r"^partitions='a' is not a whole number: pass 1 to 16777216$"),
        (
            numbers(10),
            {**MAP, "parts": 3},
            r"^parts= is not known .*: did you mean 'partitions'\?$",
        ),
        (numbers(10), {"parts": 3}, r"^parts= is not known to ElasticLoader, nor to torch"),
        (numbers(10), {**MAP, "ahead": 3}, r"^ahead= is not known .*: choose one of 'dataset', 'p"),
        (numbers(10), {**MAP, "leased": True}, r"^leased= is not known to ElasticLoader"),
        (numbers(10), {**MAP, "num_worker": 1}, r"did you mean 'num_workers'\?$"),
        (stream, {"partitions": 2, "leased": True}, r"^leased= is not known to ElasticLoader"),
        (numbers(10), {**MAP, "shuffle": True}, r"^shuffle= has no effect, because ElasticLoader"),
        (numbers(10), {**MAP, "batch_sampler": []}, r"^batch_sampler= has no effect, because El"),
        (stream, {}, r"^ElasticLoader\(function\) needs partitions="),
        (stream, {"partitions": 0}, rf"^partitions=0 is out of range: pass 1 to {PARTITIONS_MAX}"),
        (
            stream,
            {"partitions": PARTITIONS_MAX + 1},
            rf"^partitions={PARTITIONS_MAX + 1} is out of range: pass 1 to {PARTITIONS_MAX}",
        ),
        (stream, {"partitions": 2, "batch_size": 4}, r"^batch_size= has no effect with a function"),
        (stream, {"partitions": 2, "num_workers": 2}, r"^num_workers= has no effect with a funct"),
        (stream, {"partitions": 2, "seed": 3}, r"^seed= has no effect with a function"),
        (Letters(), {"partitions": 4}, r"^partitions= has no effect with a dataset with iter_part"),
        (Letters(), {"batch_size": 4}, r"^batch_size= has no effect with a dataset with iter_part"),
        (Letters(0), {}, r"^partitions=0 is out of range"),
        (Numbers(0), {"partitions": 2}, r"cannot split a Numbers: pass a map-style dataset"),
        (
            4,
            {"partitions": 2},
            r"cannot split an int: pass a map-style dataset \(with len\), a func",
        ),
    ],
)
def test_invalid_arguments_of_an_elastic_loader_are_rejected(
    dataset: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticLoader(dataset, **options)


def test_a_stateful_loader_is_not_read_from_the_beginning() -> None:
    made: list[StatefulLoader] = []

    def make(index: int, epoch: int) -> StatefulLoader:
        made.append(StatefulLoader(index))
        return made[-1]

    loader = ElasticLoader(make, partitions=3)
    loader.load_state_dict({"epoch": 0, "index": 2, "position": 6, "stream": {"position": 6}})
    assert flat(loader._opened(0, 2, 7)) == [207, 208, 209]
    assert made[-1].read == 4, "it continues from its state and skips one"
    assert flat(loader._opened(0, 2, 4)) == [204, 205, 206, 207, 208, 209], (
        "the position is before its state"
    )
    assert flat(loader._opened(1, 2, 0)) == list(range(200, 210)), (
        "the state belongs to another epoch"
    )


def test_batches_need_a_learner() -> None:
    loader = ElasticLoader(stream, partitions=3)
    assert loader.position == (-1, -1)
    with pytest.raises(ConfigError, match=r"has no learner: iterate over loader\.bind\(learner\)"):
        next(loader)


OPTIONS = {"corpus_bytes_max": 20_000, "context": 64, "batch_size": 4}


def test_the_text_is_trained_once_in_an_epoch() -> None:
    workload = load_workload("gpt", OPTIONS)
    data = WorkloadPartitions(workload, 7)
    text: torch.Tensor = workload.corpus.train  # type: ignore[attr-defined]
    windows = [
        bytes(row.tolist())
        for index in range(data.partitions)
        for inputs, _ in data.iter_partition(index, 0, 0)
        for row in inputs
    ]
    count = (len(text) - 1) // 64
    whole = bytes(text[: 64 * count].tolist())
    assert sorted(windows) == sorted(whole[64 * i : 64 * (i + 1)] for i in range(count))


def test_there_are_no_more_partitions_than_batches() -> None:
    workload = load_workload("gpt", OPTIONS)
    batches = WorkloadPartitions(workload, 1).iter_partition(0, 0, 0)
    assert WorkloadPartitions(workload, 10_000).partitions == sum(1 for _ in batches)


class Endless(Workload):
    """A workload with endless batches, named by partition and number."""

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[Any]:
        number = start
        while True:
            yield (part, parts, number)
            number += 1


def test_each_epoch_takes_the_next_of_endless_batches() -> None:
    data = WorkloadPartitions(Endless(), 3)  # type: ignore[abstract]
    assert data.partitions == 3
    first, second = list(data.iter_partition(1, 0, 0)), list(data.iter_partition(1, 0, 1))
    assert [number for _, _, number in first + second] == list(range(2 * PARTITION_BATCHES))
    assert list(data.iter_partition(1, 60, 1)) == second[60:]
