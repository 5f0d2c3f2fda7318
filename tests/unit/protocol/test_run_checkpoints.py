"""The coordinator's side of checkpoints: when one begins, and which numbers are believed."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.protocol import CoordinatorMachine, Options
from decoupled_diloco.protocol.features.checkpoint import raised
from decoupled_diloco.protocol.messages import (
    BeginCheckpoint,
    CheckpointWanted,
    Connected,
    DataReport,
    Joining,
    KeepCheckpoint,
    Lost,
    Note,
    PartSaved,
    Received,
    ShardHello,
    ShardReady,
)


class Bench:
    """A coordinator with one shard and one learner."""

    def __init__(self) -> None:
        self.machine = CoordinatorMachine(Options(shards=1))
        self.effects: list[Any] = []

    def handle(self, event: Any) -> None:
        self.effects = self.machine.handle(0.0, event)
        self.machine.check()

    def begin(self) -> None:
        self.handle(Connected("shard-0", ShardHello(0, "x")))
        self.handle(Connected("a", Joining("n", "learner", "layout", ""), 1))
        self.handle(Received("shard-0", ShardReady(1)))

    def begun(self) -> list[int]:
        return [effect.number for effect in self.effects if isinstance(effect, BeginCheckpoint)]


def test_a_checkpoint_on_demand_is_refused_with_a_reason() -> None:
    bench = Bench()
    assert bench.machine.why_no_checkpoint == "the run is gathering"
    bench.handle(CheckpointWanted())
    assert bench.begun() == []
    bench.begin()
    bench.handle(Lost("shard-0"))
    assert bench.machine.why_no_checkpoint == "shard-0 is away"
    bench.handle(CheckpointWanted())
    assert bench.begun() == []


def test_a_request_during_a_checkpoint_gets_that_one() -> None:
    bench = Bench()
    bench.begin()
    bench.handle(CheckpointWanted())
    assert bench.begun() == [1]
    bench.handle(CheckpointWanted())
    assert bench.begun() == []
    assert bench.machine.checkpoints.open is not None
    bench.handle(Received("shard-0", PartSaved(1, "d", 3)))
    bench.handle(Received("a", PartSaved(1, "e", 4), "n"))
    assert [effect.number for effect in bench.effects if isinstance(effect, KeepCheckpoint)] == [1]
    bench.handle(CheckpointWanted())
    assert bench.begun() == [2]


def test_the_next_checkpoint_has_a_higher_number_than_a_false_one() -> None:
    bench = Bench()
    bench.begin()
    bench.handle(CheckpointWanted())
    bench.handle(Received("shard-0", PartSaved(900, "d", 3)))
    assert bench.machine.checkpoints.open is None
    assert bench.machine.checkpoints.given_up == (
        1,
        "shard-0 received checkpoint 900, which never began",
    )
    assert any(isinstance(effect, Note) for effect in bench.effects)
    bench.handle(CheckpointWanted())
    assert bench.begun() == [901]


def test_returning_to_a_checkpoint_reuses_no_lease_number() -> None:
    bench = Bench()
    bench.begin()
    bench.handle(Received("a", DataReport(4, 1, ()), "n"))
    part = bench.machine.snapshot()
    bench.handle(Received("a", DataReport(4, 3, ()), "n"))
    newest = bench.machine.snapshot()
    assert (part.data.leases, newest.data.leases) == (1, 3)
    back = raised(part, newest)
    assert back.data.holders == part.data.holders
    assert back.data.entries == part.data.entries
    assert back.data.leases == 3
