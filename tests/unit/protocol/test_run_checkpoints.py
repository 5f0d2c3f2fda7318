"""The coordinator's side of the consistent checkpoints: when one begins, whose numbers are
believed."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.protocol import CoordinatorMachine, Options
from decoupled_diloco.protocol.checkpoints.coordinator import raised
from decoupled_diloco.protocol.checkpoints.effects import BeginCheckpoint, KeepCheckpoint
from decoupled_diloco.protocol.checkpoints.events import CheckpointWanted
from decoupled_diloco.protocol.checkpoints.messages import PartSaved
from decoupled_diloco.protocol.data_leases.messages import DataReport
from decoupled_diloco.protocol.effects import Note
from decoupled_diloco.protocol.events import Connected, Joining, Lost, Received
from decoupled_diloco.protocol.messages import ShardHello, ShardReady


class Bench:
    """A coordinator with one shard and one learner."""

    def __init__(self) -> None:
        self.machine = CoordinatorMachine(Options(shards=1))
        self.effects: list[Any] = []

    def told(self, event: Any) -> None:
        self.effects = self.machine.handle(0.0, event)
        self.machine.check()

    def begin(self) -> None:
        self.told(Connected("shard-0", ShardHello(0, "x")))
        self.told(Connected("a", Joining("n", "learner", "layout", ""), 1))
        self.told(Received("shard-0", ShardReady(1)))

    def begun(self) -> list[int]:
        return [effect.number for effect in self.effects if isinstance(effect, BeginCheckpoint)]


def test_a_checkpoint_on_demand_is_refused_in_words_while_there_is_nothing_to_checkpoint() -> None:
    bench = Bench()
    assert bench.machine.why_no_checkpoint == "the run is gathering"
    bench.told(CheckpointWanted())
    assert bench.begun() == []
    bench.begin()
    bench.told(Lost("shard-0"))
    assert bench.machine.why_no_checkpoint == "shard-0 is away"
    bench.told(CheckpointWanted())
    assert bench.begun() == []


def test_who_asks_while_a_checkpoint_is_under_way_gets_that_one() -> None:
    bench = Bench()
    bench.begin()
    bench.told(CheckpointWanted())
    assert bench.begun() == [1]
    bench.told(CheckpointWanted())
    assert bench.begun() == []
    assert bench.machine.checkpoints.open is not None
    bench.told(Received("shard-0", PartSaved(1, "d", 3)))
    bench.told(Received("a", PartSaved(1, "e", 4), "n"))
    assert [effect.number for effect in bench.effects if isinstance(effect, KeepCheckpoint)] == [1]
    bench.told(CheckpointWanted())
    assert bench.begun() == [2]


def test_a_checkpoint_that_was_never_begun_is_a_lie_and_the_next_one_is_beyond_it() -> None:
    bench = Bench()
    bench.begin()
    bench.told(CheckpointWanted())
    bench.told(Received("shard-0", PartSaved(900, "d", 3)))
    assert bench.machine.checkpoints.open is None
    assert bench.machine.checkpoints.given_up == (
        1,
        "shard-0 was told of checkpoint 900, which was never begun",
    )
    assert any(isinstance(effect, Note) for effect in bench.effects)
    bench.told(CheckpointWanted())
    assert bench.begun() == [901]


def test_going_back_gives_no_lease_number_out_again() -> None:
    bench = Bench()
    bench.begin()
    bench.told(Received("a", DataReport(4, 1, ()), "n"))
    part = bench.machine.snapshot()
    bench.told(Received("a", DataReport(4, 3, ()), "n"))
    newest = bench.machine.snapshot()
    assert (part.data.leases, newest.data.leases) == (1, 3)
    back = raised(part, newest)
    assert back.data.holders == part.data.holders
    assert back.data.entries == part.data.entries
    assert back.data.leases == 3
