"""The coordinator's data leases: which learner trains what, and what becomes durable."""

from __future__ import annotations

import pytest

from decoupled_diloco.protocol.coordinator_machine import CoordinatorMachine
from decoupled_diloco.protocol.features.partitions import (
    GRACE_SECONDS,
    HELD_MAX,
    LeaseBook,
    apply,
    copied,
)
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    Connected,
    DataRefused,
    DataReport,
    Enter,
    Joining,
    Lease,
    Leased,
    LeasesGiven,
    LeaseState,
    Lost,
    Persist,
    Received,
    Repeated,
    Send,
    Settled,
    TakenBack,
    Tick,
)


class Desk:
    """A coordinator and the learners that talk to it."""

    def __init__(self) -> None:
        self.machine = CoordinatorMachine(Options(fragments=2, period=2))
        self.now = 0.0
        self.entries: list[object] = []

    def tell(self, event: object) -> list[object]:
        effects = self.machine.handle(self.now, event)  # type: ignore[arg-type]
        self.machine.check()
        self.entries += [effect.entry for effect in effects if isinstance(effect, Enter)]
        return list(effects)

    def join(self, name: str, life: int = 1) -> list[object]:
        return self.tell(Connected(name, Joining(f"{name}-{life}", "learner", "layout", ""), 1))

    def report(
        self, name: str, *states: LeaseState, want: int = 2, life: int = 1, parts: int = 4
    ) -> object:
        """Return the coordinator's answer, after everything that must be durable before it."""
        effects = self.tell(Received(name, DataReport(parts, want, states), f"{name}-{life}"))
        answers = [effect.message for effect in effects if isinstance(effect, Send)]
        assert not any(isinstance(e, Enter) for e in effects[len(effects) - len(answers) :])
        return answers[0] if answers else None


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    for name in "ab":
        desk.join(name)
    return desk


def numbers(answer: object) -> list[tuple[int, int, int]]:
    assert isinstance(answer, LeasesGiven)
    return [(lease.turn, lease.part, lease.start) for lease in answer.leases]


def at(lease: int, trained: int, durable: int = 0, *, ended: bool = False) -> LeaseState:
    return LeaseState(lease, trained, durable, ended, 0)


def test_each_learner_gets_its_own_partitions(desk: Desk) -> None:
    assert numbers(desk.report("a")) == [(0, 0, 0), (0, 1, 0)]
    assert numbers(desk.report("b")) == [(0, 2, 0), (0, 3, 0)]
    assert numbers(desk.report("b", at(3, 0), at(4, 0), want=3)) == [(1, 0, 0)], "the next epoch"


def test_a_lost_answer_is_repeated(desk: Desk) -> None:
    first = desk.report("a")
    entries = list(desk.entries)
    assert desk.report("a") == first
    assert desk.entries == entries


def test_a_partition_is_settled_when_all_of_it_is_durable(desk: Desk) -> None:
    desk.report("a")
    assert numbers(desk.report("a", at(1, 5, 3, ended=True), at(2, 0))) == [(0, 2, 0)]
    answer = desk.report("a", at(1, 5, 5, ended=True), at(2, 0), at(3, 0))
    assert answer == LeasesGiven((), (1,))
    assert Settled(1, "a", 5) in desk.entries


def test_a_learner_away_for_long_loses_what_is_not_durable(desk: Desk) -> None:
    desk.report("a")
    desk.report("a", at(1, 7, 4), at(2, 0))
    desk.tell(Lost("a", "a-1"))
    desk.now = GRACE_SECONDS - 1
    desk.tell(Tick())
    assert desk.machine.deadline() == GRACE_SECONDS
    assert numbers(desk.report("b")) == [(0, 2, 0), (0, 3, 0)], "they are still a's"
    desk.now = GRACE_SECONDS
    desk.tell(Tick())
    assert [e for e in desk.entries if isinstance(e, TakenBack)] == [
        TakenBack(1, "a", 4, 7, "a was away for 15 s"),
        TakenBack(2, "a", 0, 0, "a was away for 15 s"),
    ]
    assert numbers(desk.report("b", at(3, 0), at(4, 0), want=4)) == [(0, 0, 4), (0, 1, 0)]
    assert desk.machine.deadline() is None


def test_a_learner_back_in_time_keeps_its_leases(desk: Desk) -> None:
    desk.report("a")
    desk.tell(Lost("a", "a-1"))
    desk.now = GRACE_SECONDS - 1
    desk.join("a")
    desk.now = 10 * GRACE_SECONDS
    desk.tell(Tick())
    assert desk.report("a", at(1, 3), at(2, 0)) is None
    assert not [e for e in desk.entries if isinstance(e, TakenBack)]


def test_a_new_process_continues_the_leases_of_its_predecessor(desk: Desk) -> None:
    desk.report("a")
    desk.report("a", at(1, 7, 4), at(2, 0))
    desk.tell(Lost("a", "a-1"))
    desk.join("a", life=2)
    assert numbers(desk.report("a", life=2)) == [(0, 0, 4), (0, 1, 0)]
    assert desk.report("a", at(1, 9, 9), life=1) is None, "messages of the old process are ignored"


def test_a_learner_drops_a_lease_that_has_ended(desk: Desk) -> None:
    desk.report("a", want=1)
    desk.tell(Lost("a", "a-1"))
    desk.now = GRACE_SECONDS
    desk.tell(Tick())
    desk.report("b", want=1)
    desk.join("a")
    answer = desk.report("a", at(1, 9, 2), want=1)
    assert answer == LeasesGiven((Lease(3, 0, 1, 0),), (1,))


def test_repeated_training_is_entered_once(desk: Desk) -> None:
    desk.report("a", want=1)
    state = LeaseState(1, 5, 5, True, 3)
    desk.report("a", state, want=1)
    desk.report("a", state, want=1)
    assert [e for e in desk.entries if isinstance(e, (Repeated, Settled))] == [
        Repeated(1, "a", 3),
        Settled(1, "a", 5),
    ]


def test_a_learner_that_ends_returns_all_leases(desk: Desk) -> None:
    desk.report("a")
    desk.report("a", at(1, 4, 4, ended=True), at(2, 2, 1), want=0)
    assert desk.entries[-2:] == [
        Settled(1, "a", 4),
        TakenBack(2, "a", 1, 2, "the learner returned it"),
    ]


def test_the_number_of_unmerged_leases_is_limited(desk: Desk) -> None:
    states: tuple[LeaseState, ...] = ()
    for _ in range(HELD_MAX + 10):
        answer = desk.report("a", *states, want=1)
        if answer is None:
            break
        assert isinstance(answer, LeasesGiven)
        states = tuple(at(s.lease, 1, ended=True) for s in states)
        states += tuple(at(lease.number, 1, ended=True) for lease in answer.leases)
    assert len(desk.machine.state.data.holders["a"]) == HELD_MAX


def test_other_data_are_refused(desk: Desk) -> None:
    desk.report("a")
    answer = desk.report("b", parts=5)
    assert isinstance(answer, DataRefused)
    assert "partitions=5 of b must equal" in answer.reason


def test_data_without_partitions_are_refused_and_describe_nothing(desk: Desk) -> None:
    assert isinstance(desk.report("a", parts=0), DataRefused)
    assert numbers(desk.report("b")) == [(0, 0, 0), (0, 1, 0)]


def test_a_complete_epoch_leaves_no_state_behind(desk: Desk) -> None:
    desk.report("a", want=4)
    desk.report("a", *(at(n, 2, 2, ended=True) for n in range(1, 5)), want=1)
    book = desk.machine.state.data
    assert list(book.turns) == [1]
    assert book.turns[1].settled == 0


def test_the_entries_alone_lead_to_the_same_leases(desk: Desk) -> None:
    """The ledger contains everything that a restarted coordinator needs."""
    desk.report("a")
    desk.report("b", want=3)
    desk.report("a", at(1, 6, 6, ended=True), at(2, 3, 2))
    desk.tell(Lost("b", "b-1"))
    desk.now = GRACE_SECONDS
    desk.tell(Tick())
    book = LeaseBook()
    for entry in desk.entries:
        apply(book, entry)  # type: ignore[arg-type]
    ours = copied(desk.machine.state.data)
    assert (book.turns, book.leases, book.opened) == (ours.turns, ours.leases, ours.opened)
    assert {n: set(mine) for n, mine in book.holders.items()} == {"a": {2, 6}}


def test_after_a_restart_the_grace_period_starts_again(desk: Desk) -> None:
    desk.report("a")
    state = desk.machine.snapshot()
    desk.machine = CoordinatorMachine(desk.machine.options)
    desk.machine.restore(state)
    desk.now = 100.0
    desk.join("b")
    assert desk.machine.deadline() == 100.0 + GRACE_SECONDS
    desk.join("a")
    assert desk.machine.deadline() is None


def test_the_join_of_a_newer_process_is_durable_before_its_leases(desk: Desk) -> None:
    desk.report("a")
    desk.tell(Lost("a", "a-1"))
    effects = desk.join("a", life=2)
    kinds = [type(effect) for effect in effects]
    assert kinds.index(Persist) < kinds.index(Enter)


def test_leased_partitions_name_their_start(desk: Desk) -> None:
    desk.report("a", want=1)
    assert desk.entries[-1] == Leased(1, 0, 0, 0, "a", 1)
