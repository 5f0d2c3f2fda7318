"""Leased data in virtual worlds: faults by hand, and a core that is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from decoupled_diloco.protocol.data_leases import coordinator as leases
from decoupled_diloco.protocol.data_leases import learner as learner_leases
from decoupled_diloco.protocol.data_leases.coordinator import GRACE_SECONDS
from decoupled_diloco.protocol.data_leases.ledger import Leased, Repeated, TakenBack
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.simulate.data_checker import DataChecker
from decoupled_diloco.simulate.learner_process import LearnerSpec
from decoupled_diloco.simulate.leased_loop import NumberedParts, VirtualData
from decoupled_diloco.simulate.world import World

OPTIONS = Options(fragments=4, period=4, overlap=1, shards=2)


def world_of(*learners: LearnerSpec, parts: int = 6, ahead: int = 2) -> tuple[World, DataChecker]:
    data = VirtualData(NumberedParts(parts, 12), ahead)
    world = World(OPTIONS, learners, seed=1, data=data)
    return world, DataChecker(world)


TWO = (LearnerSpec("a", joins_at=0.1), LearnerSpec("b", joins_at=0.1))


def entries(world: World, kind: type) -> list[Any]:
    return [entry for entry in world.coordinator.ledger if isinstance(entry, kind)]


def test_without_faults_every_part_is_trained_once_and_nothing_is_repeated() -> None:
    world, checker = world_of(*TWO)
    world.run(until=400.0)
    checker.check_accounts()
    account = checker.account()
    assert len(account.turns) > 3
    assert all(account.count(turn, "durable") == 6 for turn in sorted(account.turns)[:-4])
    assert not account.repeats
    batches = [(b.turn, b.part, b.index) for b in world.data.trained] if world.data else []
    assert len(batches) == len(set(batches)) > 300


def test_the_parts_of_a_dead_learner_go_to_others() -> None:
    world, checker = world_of(*TWO)
    world.run(until=50.0)
    world.crash(world.learners["b"], silent=True)
    turns = set(world.coordinator.machine.state.data.turns)
    checker.check_progress(200.0)
    back = entries(world, TakenBack)
    assert back
    assert {entry.learner for entry in back} == {"b"}
    account = checker.account()
    assert all(account.count(turn, "durable") == 6 for turn in turns)
    durable = {entry.lease: entry.durable for entry in back}
    for repeat in account.repeats:
        assert repeat.learner == "b"
        assert repeat.end - repeat.first <= 2 * OPTIONS.period + 4, "more than was in flight"
    assert len(durable) <= 5


def test_who_joins_gets_parts_and_who_leaves_gives_them_back() -> None:
    world, checker = world_of(*TWO, LearnerSpec("c", joins_at=60.0))
    world.run(until=100.0)
    assert {entry.learner for entry in entries(world, Leased)} == {"a", "b", "c"}
    world.learners["c"].leave("its loop has ended")
    world.run(until=101.0)
    assert "c" not in world.coordinator.machine.state.data.holders, "at once, without any grace"
    checker.check_progress(200.0)


def test_leases_survive_the_coordinator() -> None:
    world, checker = world_of(*TWO)
    world.run(until=50.0)
    world.crash(world.coordinator)
    world.run(until=53.0)
    world.restart(world.coordinator)
    world.run(until=60.0 + GRACE_SECONDS)
    assert not entries(world, TakenBack), "everybody has come back in time"
    checker.check_progress(200.0)
    checker.check_accounts()


def test_nobody_waits_while_the_coordinator_is_away_and_repeats_are_told() -> None:
    world, checker = world_of(*TWO, ahead=1)
    world.run(until=50.0)
    steps = world.learners["a"].machine.state.step
    world.crash(world.coordinator)
    world.run(until=170.0)
    assert world.learners["a"].machine.state.step >= steps + 115, "it has waited"
    world.restart(world.coordinator)
    world.run(until=190.0)
    repeats = entries(world, Repeated)
    assert {entry.learner for entry in repeats} == {"a", "b"}
    assert world.data is not None
    told = sum(entry.batches for entry in repeats)
    made = sum(batch.repeat for batch in world.data.trained)
    assert told == made > 50
    checker.check_progress(200.0)
    checker.check_accounts()


def broken_merged(data: Any, step: int, durable_step: int) -> Any:
    return RIGHT_MERGED(data, step, step)


def broken_next(book: Any, learner: str, epoch: int) -> Any:
    entry = RIGHT_NEXT(book, learner, epoch)
    return replace(entry, start=entry.start + 1) if entry.start else entry


def broken_back(book: Any, learner: str, reason: str, **more: Any) -> Any:
    for number, held in book.holders.get(learner, {}).items():
        book.holders[learner][number] = replace(held, durable=held.trained)
    return RIGHT_BACK(book, learner, reason, **more)


RIGHT_MERGED = learner_leases.merged
RIGHT_NEXT, RIGHT_BACK = leases._next, leases.take_back

BREAKS: list[tuple[Any, str, Callable[..., Any], int]] = [
    (leases, "_next", broken_next, 40),  # a part is gone on with one batch too late
    (leases, "take_back", broken_back, 40),  # what was trained passes for durable
]


def troubled(longest: int) -> None:
    """Learners far away whose reports and answers cross, and one dies in the midst of a part."""
    data = VirtualData(NumberedParts(6, longest), 2)
    far = [LearnerSpec(name, latency=1.5, joins_at=0.1) for name in "ab"]
    world = World(OPTIONS, far, seed=1, data=data)
    checker = DataChecker(world)
    world.run(until=100.0)
    world.crash(world.learners["b"], silent=True)
    world.run(until=400.0)
    checker.check_accounts()


@pytest.mark.parametrize("longest", [2, 40])
def test_a_troubled_world_adds_up(longest: int) -> None:
    troubled(longest)


@pytest.mark.parametrize(("module", "name", "broken", "longest"), BREAKS)
def test_checkers_catch_a_core_that_is_broken(
    module: Any,
    name: str,
    broken: Callable[..., Any],
    longest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(AssertionError):
        troubled(longest)


def test_checkers_catch_what_is_called_durable_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoupled_diloco.protocol.data_leases.learner.merged", broken_merged)
    world, _ = world_of(*TWO)
    with pytest.raises(AssertionError, match="has not merged step"):
        world.run(until=400.0)
