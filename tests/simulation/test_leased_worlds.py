"""Leased data in virtual worlds, with scripted faults and with deliberate breaks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.protocol.features.partitions import GRACE_SECONDS
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import Leased, Repeated, TakenBack
from decoupled_diloco_lab.simulate.drift import Drift
from decoupled_diloco_lab.simulate.hosts import LearnerHost, ParticipantHost
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from deliberate_breaks import Break
from simulation.breaks import DATA_LEASES, DURABLE_TOO_EARLY
from worlds.data_checker import DataChecker, Drawn, Parts
from worlds.drawn import Data
from worlds.lineage import Lineage
from worlds.scene import ENDLESS_STEPS, config_of

OPTIONS = Options(fragments=4, period=4, overlap=1, shards=2, max_steps=ENDLESS_STEPS)
PARTS = Parts(6, 36)
A, B, C = (LearnerSpec(f"learner-{number}", joins_at=0.1) for number in range(3))

Begin = Callable[..., tuple[System, DataChecker]]


def lease_to(system: System, checker: DataChecker) -> None:
    """Record the batches that learners train."""
    drawn: dict[str, Drawn] = {}

    def workload(host: ParticipantHost) -> Drift:
        assert isinstance(host, LearnerHost)
        mine = drawn[host.name] = Drawn(host, checker.parts, checker.trained)
        return Drift(system.sizes, 1, checker.parts.batches, mine.take)

    system.workload, system.on_step = workload, lambda host: drawn[host.name].train()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start runs with leased data, and close them after the test."""
    with ExitStack() as stack:

        def begun(
            *learners: LearnerSpec, parts: Parts = PARTS, ahead: int = 2
        ) -> tuple[System, DataChecker]:
            data = Data(parts, ahead)
            config = config_of(OPTIONS, tmp_path, learners=len(learners), data=data)
            system = System(config, learners, tmp_path, seed=1)
            stack.callback(system.close)
            lineage = Lineage(system)
            system.on_checkpoint = lineage.checkpoint
            checker = DataChecker(system, lineage, parts)
            lease_to(system, checker)
            return system, checker

        yield begun


def entries(checker: DataChecker, kind: type) -> list[Any]:
    return [entry for entry in checker._ledger() if isinstance(entry, kind)]


def test_without_faults_every_partition_is_trained_exactly_once(begin: Begin) -> None:
    system, checker = begin(A, B)
    system.run(until=400.0)
    checker.check_accounts()
    account = checker.account()
    assert len(account.turns) > 3
    assert all(account.count(turn, "durable") == 6 for turn in sorted(account.turns)[:-4])
    assert not account.repeats
    batches = [(b.turn, b.part, b.index) for b in checker.trained]
    assert len(batches) == len(set(batches)) > 300


def test_the_partitions_of_a_dead_learner_go_to_others(begin: Begin) -> None:
    system, checker = begin(A, B)
    system.run(until=50.0)
    system.crash(system.learners[B.name], silent=True)
    turns = set(system.coordinator.state.data.turns)
    checker.check_progress(200.0)
    back = entries(checker, TakenBack)
    assert back
    assert {entry.learner for entry in back} == {B.name}
    account = checker.account()
    assert all(account.count(turn, "durable") == 6 for turn in turns)
    durable = {entry.lease: entry.durable for entry in back}
    for repeat in account.repeats:
        assert repeat.learner == B.name
        assert repeat.end - repeat.first <= 2 * OPTIONS.period + 4, "more than was in flight"
    assert len(durable) <= 5


def test_a_learner_that_joins_gets_partitions_and_returns_them_when_it_leaves(begin: Begin) -> None:
    system, checker = begin(A, B, replace(C, joins_at=60.0))
    system.run(until=100.0)
    assert {entry.learner for entry in entries(checker, Leased)} == {A.name, B.name, C.name}
    system.request_stop(system.learners[C.name], 3.0, signal.SIGTERM)
    system.run(until=103.0)
    assert not system.learners[C.name].alive
    assert C.name not in system.coordinator.state.data.holders, "at once, without a grace time"
    checker.check_progress(200.0)


def test_leases_survive_the_coordinator(begin: Begin) -> None:
    system, checker = begin(A, B)
    system.run(until=50.0)
    system.crash(system.shards[0])
    system.run(until=53.0)
    system.restart(system.shards[0])
    system.run(until=60.0 + GRACE_SECONDS)
    assert not entries(checker, TakenBack), "all learners have come back in time"
    checker.check_progress(200.0)
    checker.check_accounts()


def test_learners_repeat_batches_while_the_coordinator_is_down_and_report_them(
    begin: Begin,
) -> None:
    system, checker = begin(A, B, ahead=1)
    system.run(until=50.0)
    steps = system.learners[A.name].machine.state.step
    system.crash(system.shards[0])
    system.run(until=170.0)
    assert system.learners[A.name].machine.state.step >= steps + 115, "it has waited"
    system.restart(system.shards[0])
    system.run(until=190.0)
    repeats = entries(checker, Repeated)
    assert {entry.learner for entry in repeats} == {A.name, B.name}
    reported = sum(entry.batches for entry in repeats)
    repeated = sum(batch.repeat for batch in checker.trained)
    assert reported == repeated > 50
    checker.check_progress(200.0)
    checker.check_accounts()


def troubled(begin: Begin, batches: int) -> None:
    """Run distant learners whose reports and answers cross, one of which dies in a partition."""
    far = [replace(each, latency=1.5) for each in (A, B)]
    system, checker = begin(*far, parts=Parts(6, batches))
    system.run(until=100.0)
    system.crash(system.learners[B.name], silent=True)
    system.run(until=400.0)
    checker.check_accounts()


@pytest.mark.parametrize("batches", [6, 120])
def test_the_ledger_of_a_troubled_world_adds_up(begin: Begin, batches: int) -> None:
    troubled(begin, batches)


@pytest.mark.parametrize("each", DATA_LEASES, ids=[each.mark for each in DATA_LEASES])
def test_the_checker_notices_a_deliberate_break(begin: Begin, each: Break) -> None:
    with each.broken(), pytest.raises(AssertionError):
        troubled(begin, 120)


def test_the_checker_notices_batches_that_are_durable_too_early(begin: Begin) -> None:
    system, _ = begin(A, B)
    with (
        DURABLE_TOO_EARLY.broken(),
        pytest.raises(AssertionError, match="has not merged the durable step"),
    ):
        system.run(until=400.0)
