"""What survives a full collection is put aside, and looked at again once there is much more."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from decoupled_diloco.launch.gc_pauses import GROWTH, Survivors


@pytest.fixture
def survivors() -> Iterator[Survivors]:
    survivors = Survivors()
    survivors.begin()
    yield survivors
    survivors.end()
    gc.collect()


class Pair:
    """One of two that refer to each other: garbage that only a collection finds."""

    alive = 0

    def __init__(self) -> None:
        self.other: Pair | None = None
        Pair.alive += 1

    def __del__(self) -> None:
        Pair.alive -= 1


def pair() -> Pair:
    one, other = Pair(), Pair()
    one.other, other.other = other, one
    return one


def test_the_next_collection_looks_at_newer_objects_alone(survivors: Survivors) -> None:
    there = gc.get_freeze_count()
    assert there > 10_000, "the interpreter's own"
    kept = [[number] for number in range(1000)]
    gc.collect()
    assert gc.get_objects(generation=2) == []
    assert gc.get_freeze_count() >= there + len(kept)


def test_garbage_among_the_newer_ones_is_found(survivors: Survivors) -> None:
    before = Pair.alive
    pair()
    gc.collect()
    assert Pair.alive == before


def test_what_was_put_aside_is_looked_at_again_once_there_is_much_more(
    survivors: Survivors, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Pair.alive
    old = pair()
    gc.collect()
    del old
    blocks = GROWTH * sys.getallocatedblocks() // 2
    monkeypatch.setattr("decoupled_diloco.launch.gc_pauses.sys.getallocatedblocks", lambda: blocks)
    for _ in range(3):
        gc.collect()
    assert Pair.alive == before + 2, "it was put aside"
    blocks *= 3
    gc.collect()
    gc.collect()
    assert Pair.alive == before
    assert gc.get_freeze_count() > 0, "from then on newer objects alone again"


def test_at_the_end_python_does_as_it_does_of_itself() -> None:
    callbacks, thresholds = list(gc.callbacks), gc.get_threshold()
    survivors = Survivors()
    survivors.begin()
    survivors.end()
    assert (gc.callbacks, gc.get_threshold()) == (callbacks, thresholds)
    assert gc.get_freeze_count() == 0
