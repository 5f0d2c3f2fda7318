"""One learner of each kind of parallelism trains what a plain one trains."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoupled_diloco.syncer.fragments import ShardTensors
from decoupled_diloco.transport.bodies import BodyBooks
from integration.system import System
from ranks.learners import ranks
from ranks.program import BATCH, HALF, INTERLEAVED, THOROUGH, Job

FRAGMENTS, ROUNDS = 3, 5
SYNCHRONOUS = {
    "fragments": FRAGMENTS,
    "period": 4,
    "overlap": 1,
    "quorum": 1,
    "wait": "at_overlap",
    "apply": "at_tau",  # while it waits for one fragment, another must not come a step early
}
TOLERANCE = 1e-6
"""Of the fragment's norm: sums over ranks have another order than those of one process."""

History = dict[int, list[Tensor]]


def recorded(patch: pytest.MonkeyPatch) -> History:
    """Every version of every fragment, as the shard merges it."""
    found: History = defaultdict(list)
    commit = ShardTensors.commit

    def committed(self: ShardTensors, fragment: int, *arguments: Any) -> None:
        commit(self, fragment, *arguments)
        found[fragment].append(self.whole(fragment).clone())

    patch.setattr(ShardTensors, "commit", committed)
    return found


@contextmanager
def system_in(folder: Path, **tables: Any) -> Iterator[System]:
    run = {"learners": 1, "budget_steps": 4 * (ROUNDS + 1), **tables.pop("run", {})}
    system = System(folder / "run", run=run, sync={**SYNCHRONOUS, **tables.pop("sync", {})})
    system.start()
    try:
        yield system
    finally:
        system.close()


def trained(
    folder: Path, kind: str, world: int, merged: History, **options: Any
) -> tuple[dict[int, Any], Any]:
    """A run of one learner: the versions of each fragment, and what the learner has at its end."""
    with system_in(folder) as system:
        with ranks(Job(kind, system.addresses[0], "one", folder, **options), world) as learner:
            learner.ends_well()
            assert all("learner 0 of 1\n" in learner.log(rank) for rank in range(world))
        system.wait_finished()
    return {p: list(v) for p, v in merged.items()}, torch.load(folder / "one.pt")


def alone(folder: Path, **options: Any) -> dict[int, list[Tensor]]:
    """What a learner of one process publishes."""
    with pytest.MonkeyPatch.context() as patch:
        return trained(folder, "plain", 1, recorded(patch), **options)[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Tensor]]:
    """See `alone`."""
    return alone(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def thorough(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Tensor]]:
    """See `alone`."""
    return alone(tmp_path_factory.mktemp("thorough"), manner=THOROUGH)


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("ddp", 2),
        ("fsdp", 2),
        ("ddp", 1),
        ("fsdp", 1),
        ("tp", 1),
        ("fsdp", 3),
        ("hsdp", 4),
        ("tp", 2),
        ("fsdp_tp", 4),
        ("pipeline", 3),
        ("pipeline 1F1B", 3),
        (INTERLEAVED, 2),
    ],
)
def test_it_publishes_what_a_plain_learner_does(
    kind: str,
    world: int,
    plain: dict[int, list[Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut, end = trained(tmp_path, kind, world, recorded(monkeypatch))
    assert_the_same(plain, cut)
    assert end["tokens"] == end["steps"] * BATCH * 4


def assert_the_same(plain: dict[int, list[Tensor]], cut: dict[int, list[Tensor]]) -> None:
    assert plain.keys() == cut.keys() == set(range(FRAGMENTS))
    for fragment, versions in plain.items():
        assert min(len(versions), len(cut[fragment])) >= ROUNDS
        pairs = zip(versions[:ROUNDS], cut[fragment][:ROUNDS], strict=True)
        for number, (ours, theirs) in enumerate(pairs):
            difference = float((ours - theirs).norm() / ours.norm())
            assert difference <= TOLERANCE, f"fragment {fragment}, round {number}: {difference}"


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp", 3), ("fsdp", 1)])
def test_a_thorough_loop_publishes_what_a_plain_learner_does(
    kind: str,
    world: int,
    thorough: dict[int, list[Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut, _ = trained(tmp_path, kind, world, recorded(monkeypatch), manner=THOROUGH)
    assert_the_same(thorough, cut)


def test_what_computes_in_bf16_stays_close_to_a_plain_learner(
    plain: dict[int, list[Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, _ = trained(tmp_path, "fsdp", 2, recorded(monkeypatch), manner=HALF)
    for fragment, versions in plain.items():
        change = float((versions[ROUNDS - 1] - versions[0]).norm())
        difference = float((versions[ROUNDS - 1] - cut[fragment][ROUNDS - 1]).norm())
        assert 0 < difference < 0.05 * change


BLOCK = 128
"""Elements that have a digest of their own: the model is so small."""


def several_carriers(patch: pytest.MonkeyPatch, carriers: Any = "all") -> dict[str, Any]:
    """A job's options; syncer and ranks have the same blocks."""
    patch.setattr(sys.modules["decoupled_diloco.merge.codec"], "DIGEST_NUMEL", BLOCK)
    return {"carriers": carriers, "block": BLOCK}


@pytest.mark.parametrize(
    ("kind", "world", "carriers"),
    [("ddp", 2, "all"), ("fsdp", 3, 2), ("fsdp_tp", 4, "all"), ("pipeline", 3, "all")],
)
def test_several_carriers_do_what_one_does(
    kind: str,
    world: int,
    carriers: Any,
    plain: dict[int, list[Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = several_carriers(monkeypatch, carriers)
    parts: list[Any] = []
    opened = BodyBooks.open

    def counted(books: BodyBooks, key: str, who: str, part: Any, *rest: Any, **named: Any) -> Any:
        parts.append((who, part))
        return opened(books, key, who, part, *rest, **named)

    monkeypatch.setattr(BodyBooks, "open", counted)
    cut, end = trained(tmp_path, kind, world, recorded(monkeypatch), **options)
    assert_the_same(plain, cut)
    assert end["tokens"] == end["steps"] * BATCH * 4
    assert {who for who, _ in parts} == {"one"}, "the syncer knows one learner"
    count = world if carriers == "all" else carriers
    assert len({start for _, (start, _) in parts}) >= count, "and gets its bodies in parts"
