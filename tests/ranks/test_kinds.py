"""A learner with any kind of parallelism trains the same as a single-process learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import long_after
from decoupled_diloco.transport.payload_store import BodyBooks
from ranks.rank_learners import (
    FRAGMENTS,
    ROUNDS,
    TOLERANCE,
    History,
    ranks,
    recorded,
    several_sync_ranks,
    system_in,
)
from ranks.rank_program import BATCH, HALF, INTERLEAVED, THOROUGH, Job


def trained(
    folder: Path, kind: str, world: int, merged: History, **options: Any
) -> tuple[dict[int, Any], Any]:
    """Run one learner; return the versions of each fragment and the learner's final state."""
    with system_in(folder) as system:
        with ranks(Job(kind, system.addresses[0], "one", folder, **options), world) as learner:
            learner.require_success()
            assert all("learner 0 of 1\n" in learner.log(rank) for rank in range(world))
        system.wait_finished()
    return {p: list(v) for p, v in merged.items()}, torch.load(folder / "one.pt")


def alone(folder: Path, **options: Any) -> dict[int, list[Tensor]]:
    """Return the versions of a single-process learner."""
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
    long_after(
        4,
        [
            ("ddp", 2),
            ("fsdp", 3),
            ("fsdp_tp", 4),
            ("pipeline", 3),
            ("fsdp", 2),
            ("ddp", 1),
            ("fsdp", 1),
            ("tp", 1),
            ("hsdp", 4),
            ("tp", 2),
            ("pipeline 1F1B", 3),
            (INTERLEAVED, 2),
        ],
    ),
)
def test_versions_equal_those_of_a_single_process_learner(
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


@pytest.mark.long
@pytest.mark.parametrize(("kind", "world"), [("fsdp", 3), ("ddp", 2), ("fsdp", 1)])
def test_versions_of_a_thorough_loop_equal_those_of_a_single_process_learner(
    kind: str,
    world: int,
    thorough: dict[int, list[Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut, _ = trained(tmp_path, kind, world, recorded(monkeypatch), manner=THOROUGH)
    assert_the_same(thorough, cut)


@pytest.mark.long
def test_training_in_bf16_stays_close_to_a_single_process_learner(
    plain: dict[int, list[Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, _ = trained(tmp_path, "fsdp", 2, recorded(monkeypatch), manner=HALF)
    for fragment, versions in plain.items():
        change = float((versions[ROUNDS - 1] - versions[0]).norm())
        difference = float((versions[ROUNDS - 1] - cut[fragment][ROUNDS - 1]).norm())
        assert 0 < difference < 0.05 * change


@pytest.mark.parametrize(
    ("kind", "world", "sync_ranks"),
    long_after(
        1, [("fsdp", 3, 2), ("ddp", 2, "all"), ("fsdp_tp", 4, "all"), ("pipeline", 3, "all")]
    ),
)
def test_several_sync_ranks_publish_the_same_as_one(
    kind: str,
    world: int,
    sync_ranks: Any,
    plain: dict[int, list[Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = several_sync_ranks(monkeypatch, sync_ranks)
    parts: list[Any] = []
    opened = BodyBooks.open

    def counted(
        books: BodyBooks, key: str, process: str, part: Any, *rest: Any, **named: Any
    ) -> Any:
        parts.append((process, part))
        return opened(books, key, process, part, *rest, **named)

    monkeypatch.setattr(BodyBooks, "open", counted)
    cut, end = trained(tmp_path, kind, world, recorded(monkeypatch), **options)
    assert_the_same(plain, cut)
    assert end["tokens"] == end["steps"] * BATCH * 4
    assert {process for process, _ in parts} == {"one"}, "the syncer sees more than one learner"
    count = world if sync_ranks == "all" else sync_ranks
    assert len({start for _, (start, _) in parts}) >= count, "payloads are not split"
