"""The coordinator: joins, incarnations and terms, start and end (rules 10 to 12)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import CoordinatorMachine, Options
from decoupled_diloco.protocol.coordinator_state import Stopped
from decoupled_diloco.protocol.messages import (
    Admit,
    AdmitShard,
    AdoptLayout,
    Begin,
    Connected,
    Deny,
    DenyShard,
    EndOrdered,
    FinishOrdered,
    Joining,
    Lost,
    Note,
    Persist,
    Progress,
    Received,
    SeedFailed,
    SeedNamed,
    Send,
    ShardHello,
    ShardReady,
    StopWanted,
    Swept,
    Tick,
    shard_of,
    shard_peer,
)


class Bench:
    """A coordinator of two shards."""

    def __init__(self, **options: Any) -> None:
        from_file = options.pop("weights_from_file", False)
        self.options = Options(shards=2, **options)
        self.machine = CoordinatorMachine(self.options, weights_from_file=from_file)
        self.effects: list[Any] = []

    def handle(self, event: Any) -> list[Any]:
        self.effects = self.machine.handle(0.0, event)
        self.machine.check()
        return self.effects

    def join(self, name: str, nonce: str = "n", role: Any = "learner", difference: str = "") -> Any:
        self.handle(Connected(name, Joining(nonce, role, "layout", difference), 1))
        return next(e for e in self.effects if isinstance(e, Admit | Deny))

    def orders(self, kind: type) -> list[tuple[int, Any]]:
        return [
            (shard_of(effect.peer), effect.message)
            for effect in self.effects
            if isinstance(effect, Send) and isinstance(effect.message, kind)
        ]

    def begin(self) -> None:
        self.handle(Connected("shard-0", ShardHello(0, "x")))
        self.handle(Connected("shard-1", ShardHello(1, "x")))
        self.join("a")
        self.handle(Received("shard-0", ShardReady(1)))
        self.handle(Received("shard-1", ShardReady(1)))
        assert self.machine.state.phase == "running"


def test_the_first_learner_defines_the_layout_and_is_the_seed() -> None:
    bench = Bench()
    bench.handle(Connected("shard-0", ShardHello(0, "x")))
    admitted = bench.join("a")
    assert admitted.epoch == 1
    assert [e for e in bench.effects if isinstance(e, AdoptLayout)]
    assert bench.orders(SeedNamed) == [(0, SeedNamed("a", 1, 1))]


def test_rule_10_incarnations_and_terms_are_durable_before_they_are_sent() -> None:
    """Rule 10: from a single authority, never from a clock."""
    bench = Bench()
    for event in (
        Connected("shard-0", ShardHello(0, "x")),
        Connected("a", Joining("n", "learner", "layout", ""), 1),
    ):
        kinds = [type(effect) for effect in bench.handle(event)]
        sent = next(i for i, kind in enumerate(kinds) if kind in (Admit, AdmitShard))
        assert Persist in kinds[:sent]


def test_rule_10_each_process_has_its_own_incarnation() -> None:
    """Rule 10: the nonce distinguishes the processes."""
    bench = Bench()
    assert bench.join("a", "n1").epoch == 1
    assert bench.join("a", "n1").epoch == 1
    bench.handle(Lost("a", "n1"))
    assert bench.join("a", "n2").epoch == 2


def test_a_second_process_with_the_same_name_is_denied() -> None:
    bench = Bench()
    bench.join("a", "n1")
    denied = bench.join("a", "n2")
    assert isinstance(denied, Deny)
    assert denied.retry
    assert "another learner name" in denied.reason


@pytest.mark.parametrize("name", ["", "a/b", "../x", "-a", "a" * 65, "ü", "a b"])
def test_an_invalid_learner_name_is_refused(name: str) -> None:
    denied = Bench().join(name)
    assert isinstance(denied, Deny)
    assert not denied.retry


def test_another_layout_is_refused_with_the_first_differing_tensor() -> None:
    bench = Bench()
    bench.join("a")
    denied = bench.join("b", difference="wte.weight is (5, 4), the run's is (6, 4)")
    assert isinstance(denied, Deny)
    assert denied.reason.startswith("wte.weight")


def test_an_observer_needs_a_layout_and_no_incarnation() -> None:
    bench = Bench()
    denied = bench.join("eye", role="observer")
    assert isinstance(denied, Deny)
    assert denied.retry
    bench.join("a")
    assert bench.join("eye", role="observer").epoch == 0


def test_a_seed_that_dies_is_replaced() -> None:
    bench = Bench()
    bench.handle(Connected("shard-0", ShardHello(0, "x")))
    bench.join("a")
    bench.join("b")
    bench.handle(Lost("a", "n"))
    assert bench.orders(SeedNamed) == [(0, SeedNamed("b", 1, 2))]
    bench.handle(Received("shard-0", ShardReady(1)))
    assert bench.machine.state.ready == set(), "ready with the weights of the first seed"


def test_the_run_begins_when_every_shard_is_ready() -> None:
    bench = Bench()
    bench.handle(Connected("shard-0", ShardHello(0, "x")))
    bench.handle(Connected("shard-1", ShardHello(1, "x")))
    bench.join("a")
    bench.handle(Received("shard-1", ShardReady(1)))
    assert not bench.orders(Begin)
    bench.handle(Received("shard-0", ShardReady(1)))
    assert bench.orders(Begin) == [(0, Begin(1)), (1, Begin(1))]


def test_weights_from_the_runs_file_need_no_seed() -> None:
    bench = Bench(weights_from_file=True)
    bench.handle(Connected("shard-0", ShardHello(0, "x")))
    bench.join("a")
    assert bench.orders(SeedNamed) == [(0, SeedNamed("", 0, 1))]


def test_a_restarted_shard_gets_a_new_term_and_the_state_of_the_run() -> None:
    bench = Bench()
    bench.begin()
    bench.handle(Lost("shard-0"))
    bench.handle(Connected("shard-0", ShardHello(0, "y")))
    (admitted,) = [e for e in bench.effects if isinstance(e, AdmitShard)]
    assert (admitted.term, admitted.begun) == (2, True)
    assert bench.orders(SeedNamed) == [(0, SeedNamed("a", 1, 1))]
    assert bench.orders(Begin) == [(0, Begin(1))]


def test_a_reconnected_shard_keeps_its_term() -> None:
    bench = Bench()
    bench.begin()
    bench.handle(Connected("shard-0", ShardHello(0, "x")))
    (admitted,) = [e for e in bench.effects if isinstance(e, AdmitShard)]
    assert admitted.term == 1


@pytest.mark.parametrize(
    ("options", "progress"),
    [
        ({"max_steps": 10}, [(0, Progress(12, 0)), (1, Progress(10, 0))]),
        ({"max_tokens": 99}, [(0, Progress(1, 98)), (0, Progress(2, 99))]),
    ],
)
def test_the_budget_ends_the_run(options: Any, progress: list[tuple[int, Progress]]) -> None:
    bench = Bench(**options)
    bench.begin()
    *before, (last_shard, last) = progress
    for shard, message in before:
        bench.handle(Received(shard_peer(shard), message))
        assert not bench.orders(EndOrdered)
    bench.handle(Received(shard_peer(last_shard), last))
    assert bench.orders(EndOrdered) == [(0, EndOrdered()), (1, EndOrdered())]


def test_the_run_finishes_when_every_shard_has_been_swept() -> None:
    bench = Bench(max_steps=1)
    bench.begin()
    bench.handle(Received("shard-0", Progress(1, 0)))
    bench.handle(Received("shard-1", Progress(1, 0)))
    bench.handle(Received("shard-0", Swept()))
    assert not bench.orders(FinishOrdered)
    bench.handle(Received("shard-1", Swept()))
    assert bench.orders(FinishOrdered) == [(0, FinishOrdered()), (1, FinishOrdered())]
    bench.handle(Connected("shard-0", ShardHello(0, "y")))
    assert bench.orders(FinishOrdered) == [(0, FinishOrdered())], "it started too late"


def test_a_restarted_coordinator_continues_from_its_durable_state() -> None:
    bench = Bench()
    bench.begin()
    again = Bench()
    again.machine.restore(bench.machine.snapshot())
    assert again.join("a", "n").epoch == 1
    assert again.join("b", "n").epoch == 1
    again.handle(Connected("shard-1", ShardHello(1, "x")))
    assert again.orders(Begin) == [(1, Begin(1))]


def test_a_restarted_coordinator_names_a_new_seed() -> None:
    """The previous seed may never come back, and no message would report that."""
    bench = Bench()
    bench.join("a")
    again = Bench()
    again.machine.restore(bench.machine.snapshot())
    again.handle(Connected("shard-0", ShardHello(0, "x")))
    again.join("b")
    assert again.orders(SeedNamed) == [(0, SeedNamed("b", 1, 2))]


def test_every_name_has_the_lowest_free_number_and_keeps_it() -> None:
    bench = Bench()
    assert [bench.join(name).index for name in ("b", "a", "c")] == [0, 1, 2]
    bench.handle(Lost("b", "n"))
    again = bench.join("b", "n2")
    assert (again.epoch, again.index, again.count) == (2, 0, 3)
    bench.handle(Lost("a", "n"))
    assert bench.join("d").index == 3, "a name that is away keeps its number"
    assert bench.join("watcher", role="observer").index == 0
    assert bench.join("e").index == 4, "an observer takes no number"


def test_a_restarted_coordinator_assigns_no_number_twice() -> None:
    bench = Bench()
    for name in "ab":
        bench.join(name)
    again = Bench()
    again.machine.restore(bench.machine.snapshot())
    assert [again.join(name, "n2").index for name in ("c", "b", "a")] == [2, 1, 0]


def test_a_number_whose_record_was_lost_is_free() -> None:
    """Of two records in one write to the disk, only the first may have survived."""
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
    assert bench.handle(Tick()) == []


def test_rule_12_another_seed_is_named_when_one_fails() -> None:
    """Rule 12: one named set of initial weights, from any learner that can deliver it."""
    bench = Bench()
    bench.handle(Connected("shard-0", ShardHello(0, "x")))
    bench.handle(Connected("shard-1", ShardHello(1, "x")))
    bench.join("a")
    bench.join("b")
    for attempt, seed in ((1, "b"), (2, "a")):
        bench.handle(Received("shard-0", SeedFailed(attempt, "not finite")))
        assert bench.orders(SeedNamed) == [
            (0, SeedNamed(seed, 1, attempt + 1)),
            (1, SeedNamed(seed, 1, attempt + 1)),
        ]
        assert any(isinstance(effect, Note) for effect in bench.effects)
        assert not bench.handle(Received("shard-1", SeedFailed(attempt, "not finite"))), (
            "it is known already"
        )
    bench.handle(Lost("b", "n"))
    bench.handle(Received("shard-0", SeedFailed(3, "not finite")))
    assert bench.machine.state.seed == "a", "no other learner is present: the same again"


def test_a_replaced_process_is_rejected_without_a_term() -> None:
    bench = Bench()
    bench.begin()
    bench.handle(Connected("shard-1", ShardHello(1, "y")))
    assert bench.machine.state.terms[1] == 2
    [denied] = bench.handle(Connected("shard-1", ShardHello(1, "x")))
    assert isinstance(denied, DenyShard)
    assert denied.nonce == "x"
    assert "another process has replaced this one" in denied.reason
    assert bench.machine.state.terms[1] == 2
    bench.handle(Connected("shard-1", ShardHello(1, "y")))
    assert AdmitShard(1, 2, True, "the run is in progress") in bench.effects, (
        "it is the same process"
    )


def test_an_older_claim_is_rejected_even_on_its_first_greeting() -> None:
    """The process was paused between its claim and its greeting."""
    bench = Bench()
    bench.handle(Connected("shard-1", ShardHello(1, "b", claim=2)))
    [denied] = bench.handle(Connected("shard-1", ShardHello(1, "a", claim=1)))
    assert isinstance(denied, DenyShard)
    assert "claim 1 is older than claim 2" in denied.reason
    bench.handle(Connected("shard-1", ShardHello(1, "c", claim=3)))
    assert bench.machine.state.terms[1] == 2


def test_a_run_continues_without_its_former_standbys() -> None:
    """A process without a claim has no competitor; older claims stay void."""
    bench = Bench()
    bench.handle(Connected("shard-1", ShardHello(1, "a", claim=2)))
    bench.handle(Connected("shard-1", ShardHello(1, "b", claim=0)))
    assert bench.machine.state.terms[1] == 2
    assert isinstance(bench.handle(Connected("shard-1", ShardHello(1, "c", claim=1)))[0], DenyShard)


def test_a_restored_coordinator_remembers_replaced_processes() -> None:
    bench = Bench()
    bench.handle(Connected("shard-1", ShardHello(1, "a", claim=1)))
    bench.handle(Connected("shard-1", ShardHello(1, "b", claim=2)))
    again = Bench()
    again.machine.restore(bench.machine.snapshot())
    for event in (
        Connected("shard-1", ShardHello(1, "a", claim=1)),
        Connected("shard-1", ShardHello(1, "a", claim=2)),
    ):
        assert isinstance(again.handle(event)[0], DenyShard)


def test_the_number_of_remembered_processes_is_limited() -> None:
    bench = Bench()
    for number in range(100):
        bench.handle(Connected("shard-1", ShardHello(1, f"n{number}")))
    assert len(bench.machine.state.former[1]) == 16
    assert bench.machine.state.terms[1] == 100


def test_a_user_ends_the_run_like_a_budget() -> None:
    bench = Bench(max_steps=100)
    bench.handle(StopWanted("a hospital"))
    assert bench.effects == []
    assert "has not begun" in bench.machine.why_no_stop
    bench.begin()
    assert bench.machine.why_no_stop == ""
    bench.handle(StopWanted("a hospital"))
    assert [shard for shard, _ in bench.orders(EndOrdered)] == [0, 1]
    assert any(isinstance(effect, Persist) for effect in bench.effects)
    assert [e.text for e in bench.effects if isinstance(e, Note)] == [
        "a hospital has stopped the run at step 0"
    ]
    bench.handle(StopWanted("another"))
    assert bench.effects == []
    for shard in range(2):
        bench.handle(Received(shard_peer(shard), Swept()))
    assert len(bench.orders(FinishOrdered)) == 2


@pytest.mark.parametrize("later", [100, 200])
def test_a_stopped_run_continues_only_with_another_budget(later: int) -> None:
    """A coordinator that only restarts ends it; a resume with more steps continues it."""
    bench = Bench(max_steps=100)
    bench.begin()
    bench.handle(StopWanted("a hospital"))
    again = Bench(max_steps=later)
    again.machine.restore(bench.machine.snapshot())
    assert again.machine.state.phase == ("ending" if later == 100 else "running")
    again.handle(Connected("shard-0", ShardHello(0, "x")))
    assert len(again.orders(EndOrdered)) == (later == 100)
    assert again.machine.snapshot().stopped == (
        Stopped("a hospital", 100, None) if later == 100 else None
    )
