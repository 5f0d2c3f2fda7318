"""The coordinator: joining, epochs and terms, beginning, ending (rules 10 to 12)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import CoordinatorMachine, Options
from decoupled_diloco.protocol.effects import (
    Admit,
    AdmitShard,
    AdoptLayout,
    Deny,
    DenyShard,
    Note,
    Persist,
    Send,
)
from decoupled_diloco.protocol.events import Connected, Joining, Lost, Received, Tick
from decoupled_diloco.protocol.messages import (
    Begin,
    EndOrdered,
    FinishOrdered,
    Progress,
    SeedFailed,
    SeedNamed,
    ShardHello,
    ShardReady,
    Swept,
)
from decoupled_diloco.protocol.peers import shard_of, shard_peer


class Bench:
    """A coordinator of two shards."""

    def __init__(self, **options: Any) -> None:
        from_file = options.pop("weights_from_file", False)
        self.options = Options(shards=2, **options)
        self.machine = CoordinatorMachine(self.options, weights_from_file=from_file)
        self.effects: list[Any] = []

    def told(self, event: Any) -> list[Any]:
        self.effects = self.machine.handle(0.0, event)
        self.machine.check()
        return self.effects

    def join(self, name: str, nonce: str = "n", role: Any = "learner", difference: str = "") -> Any:
        self.told(Connected(name, Joining(nonce, role, "layout", difference), 1))
        return next(e for e in self.effects if isinstance(e, Admit | Deny))

    def orders(self, kind: type) -> list[tuple[int, Any]]:
        return [
            (shard_of(effect.peer), effect.message)
            for effect in self.effects
            if isinstance(effect, Send) and isinstance(effect.message, kind)
        ]

    def begin(self) -> None:
        self.told(Connected("shard-0", ShardHello(0, "x")))
        self.told(Connected("shard-1", ShardHello(1, "x")))
        self.join("a")
        self.told(Received("shard-0", ShardReady(1)))
        self.told(Received("shard-1", ShardReady(1)))
        assert self.machine.state.phase == "running"


def test_the_first_learner_gives_the_layout_and_is_the_seed() -> None:
    bench = Bench()
    bench.told(Connected("shard-0", ShardHello(0, "x")))
    admitted = bench.join("a")
    assert admitted.epoch == 1
    assert [e for e in bench.effects if isinstance(e, AdoptLayout)]
    assert bench.orders(SeedNamed) == [(0, SeedNamed("a", 1, 1))]


def test_rule_10_epochs_and_terms_are_durable_before_anybody_hears_of_them() -> None:
    """Rule 10: from one authority, never from a clock."""
    bench = Bench()
    for event in (
        Connected("shard-0", ShardHello(0, "x")),
        Connected("a", Joining("n", "learner", "layout", ""), 1),
    ):
        kinds = [type(effect) for effect in bench.told(event)]
        told = next(i for i, kind in enumerate(kinds) if kind in (Admit, AdmitShard))
        assert Persist in kinds[:told]


def test_rule_10_a_new_process_gets_a_new_epoch_and_the_same_one_keeps_its_own() -> None:
    """Rule 10: the nonce tells one process from the next."""
    bench = Bench()
    assert bench.join("a", "n1").epoch == 1
    assert bench.join("a", "n1").epoch == 1
    bench.told(Lost("a", "n1"))
    assert bench.join("a", "n2").epoch == 2


def test_two_processes_under_one_id_at_once_are_one_too_many() -> None:
    bench = Bench()
    bench.join("a", "n1")
    denied = bench.join("a", "n2")
    assert isinstance(denied, Deny)
    assert denied.retry
    assert "another learner id" in denied.reason


@pytest.mark.parametrize("name", ["", "a/b", "../x", "-a", "a" * 65, "ü", "a b"])
def test_what_cannot_be_a_learner_id_is_refused(name: str) -> None:
    denied = Bench().join(name)
    assert isinstance(denied, Deny)
    assert not denied.retry


def test_another_layout_is_refused_with_the_first_differing_tensor() -> None:
    bench = Bench()
    bench.join("a")
    denied = bench.join("b", difference="wte.weight is (5, 4), the run's is (6, 4)")
    assert isinstance(denied, Deny)
    assert denied.reason.startswith("wte.weight")


def test_an_observer_needs_a_layout_and_no_epoch() -> None:
    bench = Bench()
    denied = bench.join("eye", role="observer")
    assert isinstance(denied, Deny)
    assert denied.retry
    bench.join("a")
    assert bench.join("eye", role="observer").epoch == 0


def test_a_seed_that_dies_is_replaced() -> None:
    bench = Bench()
    bench.told(Connected("shard-0", ShardHello(0, "x")))
    bench.join("a")
    bench.join("b")
    bench.told(Lost("a", "n"))
    assert bench.orders(SeedNamed) == [(0, SeedNamed("b", 1, 2))]
    bench.told(Received("shard-0", ShardReady(1)))
    assert bench.machine.state.ready == set(), "ready with the weights of the first seed"


def test_the_run_begins_when_every_shard_is_ready() -> None:
    bench = Bench()
    bench.told(Connected("shard-0", ShardHello(0, "x")))
    bench.told(Connected("shard-1", ShardHello(1, "x")))
    bench.join("a")
    bench.told(Received("shard-1", ShardReady(1)))
    assert not bench.orders(Begin)
    bench.told(Received("shard-0", ShardReady(1)))
    assert bench.orders(Begin) == [(0, Begin(1)), (1, Begin(1))]


def test_weights_from_the_runs_file_need_no_seed() -> None:
    bench = Bench(weights_from_file=True)
    bench.told(Connected("shard-0", ShardHello(0, "x")))
    bench.join("a")
    assert bench.orders(SeedNamed) == [(0, SeedNamed("", 0, 1))]


def test_a_restarted_shard_gets_a_new_term_and_hears_that_the_run_has_begun() -> None:
    bench = Bench()
    bench.begin()
    bench.told(Lost("shard-0"))
    bench.told(Connected("shard-0", ShardHello(0, "y")))
    (admitted,) = [e for e in bench.effects if isinstance(e, AdmitShard)]
    assert (admitted.term, admitted.begun) == (2, True)
    assert bench.orders(SeedNamed) == [(0, SeedNamed("a", 1, 1))]
    assert bench.orders(Begin) == [(0, Begin(1))]


def test_a_shard_that_connects_again_keeps_its_term() -> None:
    bench = Bench()
    bench.begin()
    bench.told(Connected("shard-0", ShardHello(0, "x")))
    (admitted,) = [e for e in bench.effects if isinstance(e, AdmitShard)]
    assert admitted.term == 1


@pytest.mark.parametrize(
    ("options", "progress"),
    [
        ({"budget_steps": 10}, [(0, Progress(12, 0)), (1, Progress(10, 0))]),
        ({"budget_tokens": 99}, [(0, Progress(1, 98)), (0, Progress(2, 99))]),
    ],
)
def test_the_budget_ends_the_run(options: Any, progress: list[tuple[int, Progress]]) -> None:
    bench = Bench(**options)
    bench.begin()
    *before, (last_shard, last) = progress
    for shard, message in before:
        bench.told(Received(shard_peer(shard), message))
        assert not bench.orders(EndOrdered)
    bench.told(Received(shard_peer(last_shard), last))
    assert bench.orders(EndOrdered) == [(0, EndOrdered()), (1, EndOrdered())]


def test_the_run_is_finished_when_every_shard_is_swept() -> None:
    bench = Bench(budget_steps=1)
    bench.begin()
    bench.told(Received("shard-0", Progress(1, 0)))
    bench.told(Received("shard-1", Progress(1, 0)))
    bench.told(Received("shard-0", Swept()))
    assert not bench.orders(FinishOrdered)
    bench.told(Received("shard-1", Swept()))
    assert bench.orders(FinishOrdered) == [(0, FinishOrdered()), (1, FinishOrdered())]
    bench.told(Connected("shard-0", ShardHello(0, "y")))
    assert bench.orders(FinishOrdered) == [(0, FinishOrdered())], "it started too late"


def test_a_coordinator_that_starts_again_goes_on_from_what_is_durable() -> None:
    bench = Bench()
    bench.begin()
    again = Bench()
    again.machine.restore(bench.machine.snapshot())
    assert again.join("a", "n").epoch == 1
    assert again.join("b", "n").epoch == 1
    again.told(Connected("shard-1", ShardHello(1, "x")))
    assert again.orders(Begin) == [(1, Begin(1))]


def test_a_coordinator_that_starts_again_names_a_new_seed() -> None:
    """The one that was named may never come back, and nobody would say so."""
    bench = Bench()
    bench.join("a")
    again = Bench()
    again.machine.restore(bench.machine.snapshot())
    again.told(Connected("shard-0", ShardHello(0, "x")))
    again.join("b")
    assert again.orders(SeedNamed) == [(0, SeedNamed("b", 1, 2))]


def test_every_name_has_the_lowest_free_number_and_keeps_it() -> None:
    bench = Bench()
    assert [bench.join(name).index for name in ("b", "a", "c")] == [0, 1, 2]
    bench.told(Lost("b", "n"))
    again = bench.join("b", "n2")
    assert (again.epoch, again.index, again.count) == (2, 0, 3)
    bench.told(Lost("a", "n"))
    assert bench.join("d").index == 3, "a name that is away keeps its number"
    assert bench.join("watcher", role="observer").index == 0
    assert bench.join("e").index == 4, "an observer takes no number"


def test_a_coordinator_that_starts_again_gives_no_number_twice() -> None:
    bench = Bench()
    for name in "ab":
        bench.join(name)
    again = Bench()
    again.machine.restore(bench.machine.snapshot())
    assert [again.join(name, "n2").index for name in ("c", "b", "a")] == [2, 1, 0]


def test_a_number_whose_record_was_lost_is_free() -> None:
    """Of two records in one write to the disk, the first may have survived alone."""
    bench = Bench()
    for name in "ab":
        bench.join(name)
    state = bench.machine.snapshot()
    del state.learners["a"]
    again = Bench()
    again.machine.restore(state)
    assert [again.join(name, "n2").index for name in ("c", "b", "d")] == [0, 1, 2]


def test_ticks_are_harmless() -> None:
    bench = Bench()
    assert bench.machine.deadline() is None
    assert bench.told(Tick()) == []


def test_rule_12_another_seed_is_named_when_one_fails() -> None:
    """Rule 12: one named set of initial weights, from whoever can deliver it."""
    bench = Bench()
    bench.told(Connected("shard-0", ShardHello(0, "x")))
    bench.told(Connected("shard-1", ShardHello(1, "x")))
    bench.join("a")
    bench.join("b")
    for attempt, seed in ((1, "b"), (2, "a")):
        bench.told(Received("shard-0", SeedFailed(attempt, "not finite")))
        assert bench.orders(SeedNamed) == [
            (0, SeedNamed(seed, 1, attempt + 1)),
            (1, SeedNamed(seed, 1, attempt + 1)),
        ]
        assert any(isinstance(effect, Note) for effect in bench.effects)
        assert not bench.told(Received("shard-1", SeedFailed(attempt, "not finite"))), (
            "known by now"
        )
    bench.told(Lost("b", "n"))
    bench.told(Received("shard-0", SeedFailed(3, "not finite")))
    assert bench.machine.state.seed == "a", "nobody else is here: the same again"


def test_who_has_been_replaced_is_turned_away_and_gets_no_term() -> None:
    bench = Bench()
    bench.begin()
    bench.told(Connected("shard-1", ShardHello(1, "y")))
    assert bench.machine.state.terms[1] == 2
    [denied] = bench.told(Connected("shard-1", ShardHello(1, "x")))
    assert isinstance(denied, DenyShard)
    assert denied.nonce == "x"
    assert "another process has taken its place" in denied.reason
    assert bench.machine.state.terms[1] == 2
    bench.told(Connected("shard-1", ShardHello(1, "y")))
    assert AdmitShard(1, 2, True, "the run is under way") in bench.effects, "it is the same process"


def test_an_older_claim_is_turned_away_even_if_it_greets_for_the_first_time() -> None:
    """It was paused between its claim and its greeting."""
    bench = Bench()
    bench.told(Connected("shard-1", ShardHello(1, "b", claim=2)))
    [denied] = bench.told(Connected("shard-1", ShardHello(1, "a", claim=1)))
    assert isinstance(denied, DenyShard)
    assert "claim 2 is newer than this process's, 1" in denied.reason
    bench.told(Connected("shard-1", ShardHello(1, "c", claim=3)))
    assert bench.machine.state.terms[1] == 2


def test_a_run_goes_on_without_the_standbys_that_it_had() -> None:
    """A process without a claim is one that nobody contends with; older claims stay void."""
    bench = Bench()
    bench.told(Connected("shard-1", ShardHello(1, "a", claim=2)))
    bench.told(Connected("shard-1", ShardHello(1, "b", claim=0)))
    assert bench.machine.state.terms[1] == 2
    assert isinstance(bench.told(Connected("shard-1", ShardHello(1, "c", claim=1)))[0], DenyShard)


def test_a_coordinator_that_is_restored_still_knows_who_was_replaced() -> None:
    bench = Bench()
    bench.told(Connected("shard-1", ShardHello(1, "a", claim=1)))
    bench.told(Connected("shard-1", ShardHello(1, "b", claim=2)))
    again = Bench()
    again.machine.restore(bench.machine.snapshot())
    for event in (
        Connected("shard-1", ShardHello(1, "a", claim=1)),
        Connected("shard-1", ShardHello(1, "a", claim=2)),
    ):
        assert isinstance(again.told(event)[0], DenyShard)


def test_only_so_many_former_processes_are_remembered() -> None:
    bench = Bench()
    for number in range(100):
        bench.told(Connected("shard-1", ShardHello(1, f"n{number}")))
    assert len(bench.machine.state.former[1]) == 16
    assert bench.machine.state.terms[1] == 100
