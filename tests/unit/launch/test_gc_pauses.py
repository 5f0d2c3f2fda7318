"""Survivors of a full collection are set aside, and traversed again after much growth."""

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
    """One of two objects that refer to each other: only a collection can free them."""

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


def test_the_next_collection_traverses_only_newer_objects(survivors: Survivors) -> None:
    there = gc.get_freeze_count()
    assert there > 10_000, "the interpreter's own"
    kept = [[number] for number in range(1000)]
    gc.collect()
    assert gc.get_objects(generation=2) == []
    assert gc.get_freeze_count() >= there + len(kept)


def test_garbage_among_newer_objects_is_found(survivors: Survivors) -> None:
    before = Pair.alive
    pair()
    gc.collect()
    assert Pair.alive == before


def test_all_objects_are_traversed_again_after_much_growth(
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


def test_end_restores_the_default_collector() -> None:
    callbacks, thresholds = list(gc.callbacks), gc.get_threshold()
    survivors = Survivors()
    survivors.begin()
    survivors.end()
    assert (gc.callbacks, gc.get_threshold()) == (callbacks, thresholds)
    assert gc.get_freeze_count() == 0
