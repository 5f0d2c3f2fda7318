"""`ElasticLoader` with real learners: each item once per epoch, and errors of `bind`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from decoupled_diloco import Checkpointing, Learner
from decoupled_diloco.data import ElasticLoader
from decoupled_diloco.errors import ConfigError
from integration.real_system import Model, System, patient, until

Make = Callable[..., System]
ITEMS, SIZE = 48, 4
BATCHES = ITEMS // SIZE


def loader_of(partitions: int = 4) -> ElasticLoader:
    return ElasticLoader(TensorDataset(torch.arange(ITEMS)), partitions=partitions, batch_size=SIZE)


def running(make: Make) -> System:
    system = make(run={"learners": 1, "max_steps": 100_000}, sync={"quorum": 1})
    system.start()
    return system


def taken(loader: ElasticLoader, learner: Learner) -> list[int]:
    """Take the next batch, train it in a step, and return its items."""
    (batch,) = next(loader)
    assert learner.step(tokens=len(batch))
    items: list[int] = batch.tolist()
    return items


def test_an_epoch_has_all_items(make: Make) -> None:
    """A partition is repeated only if the next one has not arrived in time."""
    system = running(make)
    loader = loader_of()
    trained: dict[tuple[int, int], list[int]] = {}
    with system.learner(Model(), "a") as learner:
        assert loader.bind(learner) is loader

        def step() -> bool:
            items = taken(loader, learner)
            trained.setdefault(loader.position, []).extend(items)
            return loader.position[0] > 0

        until(step, "the next epoch begins")
    first = {index: items for (epoch, index), items in trained.items() if epoch == 0}
    assert first.keys() == {0, 1, 2, 3}
    assert {item for items in first.values() for item in items} == set(range(ITEMS))


def test_two_learners_train_different_partitions(make: Make) -> None:
    system = running(make)
    seen: list[set[tuple[int, int]]] = [set(), set()]
    with system.learner(Model(), "a") as a, system.learner(Model(), "b") as b:
        loaders = [loader_of().bind(each) for each in (a, b)]
        for _ in range(2 * BATCHES):
            for places, loader, learner in zip(seen, loaders, (a, b), strict=True):
                taken(loader, learner)
                places.add(loader.position)
    assert all(seen)
    assert not seen[0] & seen[1]


def test_a_restart_continues_inside_a_partition(make: Make, tmp_path: Path) -> None:
    system = running(make)
    items: list[int] = []
    places = set()
    for batches in (1, 2):
        loader = loader_of()
        kept = Checkpointing(tmp_path, state={"data": loader})
        with system.learner(Model(), "a", checkpoint=kept, timeouts=patient(flush=30.0)) as learner:
            loader.bind(learner)
            for _ in range(batches):
                items += taken(loader, learner)
                places.add(loader.position)
    [(epoch, index)] = places
    whole = [item for (batch,) in loader.iter_partition(index, 0, epoch) for item in batch.tolist()]
    assert items == whole


def test_a_learner_has_one_loader(make: Make) -> None:
    system = running(make)
    with system.learner(Model(), "a") as learner:
        loader_of().bind(learner)
        with pytest.raises(ConfigError, match="'a' has an ElasticLoader already: use one per lea"):
            loader_of().bind(learner)


def test_all_learners_have_the_same_number_of_partitions(make: Make) -> None:
    system = running(make)
    with system.learner(Model(), "a") as a, system.learner(Model(), "b") as b:
        taken(loader_of().bind(a), a)
        with pytest.raises(ConfigError, match="must equal the run's 4"):
            next(loader_of(partitions=3).bind(b))
