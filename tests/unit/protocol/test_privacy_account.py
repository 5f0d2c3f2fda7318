"""A shard counts the merges in which a learner took part, and stops at the limit (rule 25)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Options, SyncerMachine, Version
from decoupled_diloco.protocol.first_copies import SETTLE_SECONDS
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Began,
    Connected,
    CopyArrived,
    CopyWanted,
    DiskRead,
    Draining,
    DrainRefused,
    DurableCopy,
    EndOrdered,
    Hello,
    Holding,
    Merge,
    Note,
    PrivacySpent,
    Received,
    SeedNamed,
    ShardAdmitted,
    StateDeclined,
    StateWanted,
    Tick,
    Trains,
)
from decoupled_diloco.protocol.syncer_state import remembered

ONE = {"fragments": 1, "period": 1}


def round_of(bench: Any, *learners: str) -> list[str]:
    """All learners step; those that are asked deliver. Return these, and merge."""
    asked = []
    for learner in learners:
        bench.step(learner, at=bench.now + 0.1)
    for learner in learners:
        if bench.ask(learner).number:
            asked.append(learner)
            bench.body(learner)
    if bench.orders(Merge):
        bench.merged()
    return asked


def test_each_merge_counts_once_for_each_learner_in_it(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", merges_max=10, quorum=2, **ONE)
    entry = bench.machine.state.fragments[0]
    assert round_of(bench, "a", "b") == ["a", "b"]
    assert entry.merges == {"a": 1, "b": 1}
    assert round_of(bench, "a", "b") == ["a", "b"]
    assert entry.merges == {"a": 2, "b": 2}
    assert entry.merges_of("c") == 0, "a learner that was in no merge"


def test_a_learner_at_its_limit_is_not_asked_and_the_others_continue(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", merges_max=3, quorum=1, **ONE)
    entry = bench.machine.state.fragments[0]
    entry.merges["a"] = 2
    bench.step("a")
    bench.body("a")
    spent = bench.messages(PrivacySpent)
    assert [each.fragment for each in spent] == [0]
    assert "3 merges of fragment 0" in spent[0].reason
    (note,) = bench.orders(Note)
    assert note.text == "a has spent its privacy budget and is merged no longer"
    assert note.warns
    bench.merged()
    assert entry.merges == {"a": 3}
    for number in (1, 2, 3):
        assert round_of(bench, "a", "b") == ["b"]
        assert entry.merges == {"a": 3, "b": number}
    assert round_of(bench, "a", "b") == [], "no learner is left, and nothing is merged"


def test_a_learner_that_spent_its_budget_does_not_delay_the_end(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", merges_max=1, quorum=1, **ONE)
    round_of(bench, "a", "b")
    bench.machine.state.fragments[0].merges["b"] = 0
    bench.step("a")
    bench.handle(Received(COORDINATOR, EndOrdered()))
    bench.holds("a")
    bench.holds("b")
    assert not bench.ask("a").number
    bench.body("b")
    bench.merged()
    assert bench.machine.state.phase == "swept"


def test_the_end_comes_if_all_learners_have_spent_their_budgets(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", merges_max=1, quorum=2, **ONE)
    assert round_of(bench, "a", "b") == ["a", "b"]
    assert round_of(bench, "a", "b") == []
    bench.handle(Received(COORDINATOR, EndOrdered()))
    assert bench.machine.state.phase == "swept"


def test_a_late_contribution_and_the_next_one_are_in_different_merges(shard_bench: Any) -> None:
    """Two contributions in one merge could change it by twice the clip."""
    bench = shard_bench("a", "b", merges_max=10, quorum=1, fragments=1, period=4, overlap=2)
    for _ in range(4):
        bench.step("b")
        bench.step("a")
    assert bench.ask("a").number
    bench.body("b")
    bench.handle(Tick(), at=100.0)
    assert bench.orders(Merge), "a's contribution is late"
    bench.merged()
    bench.body("a")
    entry = bench.machine.state.fragments[0]
    assert entry.delivered == {"a": 1}
    for _ in range(4):
        bench.step("b", at=bench.now + 1)
        bench.step("a", at=bench.now)
    assert bench.ask("b").number
    assert not bench.ask("a").number, "its late contribution is in the next merge"
    bench.body("b")
    bench.merged()
    assert entry.merges == {"a": 1, "b": 2}


def test_without_privacy_nothing_is_counted_and_both_are_merged(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", quorum=2, **ONE)
    for _ in range(3):
        assert round_of(bench, "a", "b") == ["a", "b"]
    assert bench.machine.state.fragments[0].merges == {}
    assert not remembered(bench.machine.state).merges


def test_a_leaving_learner_without_budget_is_dismissed_at_once(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", merges_max=1, quorum=1, **ONE)
    round_of(bench, "a", "b")
    bench.step("a")
    bench.handle(Received("a", Draining((0,), "asked to stop")))
    (refused,) = bench.messages(DrainRefused)
    assert "1 merges of fragment 0" in refused.reason


def restarted(bench: Any, *, disk: bool, held: int) -> Any:
    """A new process of the shard, and a learner that holds this version of the only fragment."""
    entry = bench.machine.state.fragments[0]
    machine = SyncerMachine(bench.machine.options, 0)
    assert entry.version is not None
    if disk:
        copy = DurableCopy(0, entry.version, entry.digest)
        machine.handle(0.0, DiskRead((copy,), remembered(bench.machine.state)))
    machine.handle(0.0, Received(COORDINATOR, ShardAdmitted(2, True)))
    held_copy = Holding(0, Version(1, held), "digest")
    greeting = Hello("a", 1, "a-1", "learner", 5, 5, 5, (held_copy,))
    machine.handle(0.0, Connected("a", greeting, 1))
    orders = machine.handle(SETTLE_SECONDS, Tick())
    wanted = [e.message for e in orders if isinstance(getattr(e, "message", None), CopyWanted)]
    for message in wanted:
        machine.handle(SETTLE_SECONDS, CopyArrived("a", 0, message.attempt, "digest"))
    assert machine.state.phase == "running"
    return machine


def test_a_restarted_shard_continues_the_account(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", merges_max=10, quorum=2, **ONE)
    for _ in range(3):
        round_of(bench, "a", "b")
    machine = restarted(bench, disk=True, held=3)
    entry = machine.state.fragments[0]
    assert entry.merges == {"a": 3, "b": 3}
    assert entry.merges_unknown == 0


@pytest.mark.parametrize(("disk", "missing"), [(True, 2), (False, 5)])
def test_versions_that_are_missing_on_the_disk_count_for_all(
    shard_bench: Any, disk: bool, missing: int
) -> None:
    bench = shard_bench("a", "b", merges_max=10, quorum=2, **ONE)
    for _ in range(3):
        round_of(bench, "a", "b")
    machine = restarted(bench, disk=disk, held=5)
    entry = machine.state.fragments[0]
    assert entry.merges_of("a") == 5
    assert entry.merges_of("new") == entry.merges_unknown == missing
    again = SyncerMachine(Options(merges_max=10, **ONE), 0)
    copy = DurableCopy(0, Version(2, 5), "digest")
    again.handle(0.0, DiskRead((copy,), remembered(machine.state)))
    assert again.state.fragments[0].merges_of("new") == missing, "it is durable, too"


def test_a_learner_logs_once_that_its_budget_is_spent(learner_bench: Any) -> None:
    bench = learner_bench(merges_max=1)
    bench.receive(PrivacySpent(0, "it took part in 1 merges"))
    (note,) = bench.orders(Note)
    assert note.warns
    assert "privacy budget is spent" in note.text
    bench.receive(PrivacySpent(0, "it took part in 1 merges"))
    assert not bench.orders(Note)


@pytest.mark.parametrize("options", [{}, {"merges_max": 5}, {"threshold": 2}])
def test_no_learner_shares_the_state_of_its_optimizer(
    learner_bench: Any, options: dict[str, Any]
) -> None:
    """It has seen the data without noise, and the state would pass through a shard."""
    bench, shares = learner_bench(begin=False, **options), not options
    bench.handle(Began((), "it starts", gives=True, seeks_donor=True))
    bench.step()
    recovery = bench.machine.state.recovery
    assert recovery is not None
    assert recovery.gives == shares
    assert (recovery.search is None) == (not shares)
    assert all(not each.gives for each in bench.messages(Trains)) or shares
    bench.machine.state.ready = True
    bench.handle(Received(COORDINATOR, StateWanted("b", 1, ())))
    assert bool(bench.machine.state.state_requests) == shares
    assert bool(bench.messages(StateDeclined)) != shares


def test_the_seed_starts_without_an_account(shard_bench: Any) -> None:
    bench = shard_bench("a", merges_max=1, **ONE)
    bench.handle(Received(COORDINATOR, SeedNamed("a", 1, 1)))
    assert bench.machine.state.fragments[0].merges_of("a") == 0
