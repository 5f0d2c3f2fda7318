"""The coordinator's leases: who may train what, and what becomes of it."""

from __future__ import annotations

import pytest

from decoupled_diloco.protocol.coordinator import CoordinatorMachine
from decoupled_diloco.protocol.data_leases.coordinator import (
    GRACE_SECONDS,
    HELD_MAX,
    LeaseBook,
    apply,
    copied,
)
from decoupled_diloco.protocol.data_leases.effects import Enter
from decoupled_diloco.protocol.data_leases.ledger import Leased, Repeated, Settled, TakenBack
from decoupled_diloco.protocol.data_leases.messages import (
    DataRefused,
    DataReport,
    Lease,
    LeasesGiven,
    LeaseState,
)
from decoupled_diloco.protocol.effects import Persist, Send
from decoupled_diloco.protocol.events import Connected, Joining, Lost, Received, Tick
from decoupled_diloco.protocol.options import Options


class Desk:
    """A coordinator, and learners that talk to it."""

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
        """What the coordinator answers, after everything it must have written before."""
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


def test_everybody_gets_parts_of_its_own(desk: Desk) -> None:
    assert numbers(desk.report("a")) == [(0, 0, 0), (0, 1, 0)]
    assert numbers(desk.report("b")) == [(0, 2, 0), (0, 3, 0)]
    assert numbers(desk.report("b", at(3, 0), at(4, 0), want=3)) == [(1, 0, 0)], "the next pass"


def test_an_answer_that_was_lost_is_given_again(desk: Desk) -> None:
    first = desk.report("a")
    entries = list(desk.entries)
    assert desk.report("a") == first
    assert desk.entries == entries


def test_a_part_is_settled_when_all_of_it_is_durable(desk: Desk) -> None:
    desk.report("a")
    assert numbers(desk.report("a", at(1, 5, 3, ended=True), at(2, 0))) == [(0, 2, 0)]
    answer = desk.report("a", at(1, 5, 5, ended=True), at(2, 0), at(3, 0))
    assert answer == LeasesGiven((), (1,))
    assert Settled(1, "a", 5) in desk.entries


def test_who_is_gone_for_long_loses_what_is_not_durable(desk: Desk) -> None:
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
        TakenBack(1, "a", 4, 7, "a is gone for 15 s"),
        TakenBack(2, "a", 0, 0, "a is gone for 15 s"),
    ]
    assert numbers(desk.report("b", at(3, 0), at(4, 0), want=4)) == [(0, 0, 4), (0, 1, 0)]
    assert desk.machine.deadline() is None


def test_who_comes_back_in_time_keeps_its_leases(desk: Desk) -> None:
    desk.report("a")
    desk.tell(Lost("a", "a-1"))
    desk.now = GRACE_SECONDS - 1
    desk.join("a")
    desk.now = 10 * GRACE_SECONDS
    desk.tell(Tick())
    assert desk.report("a", at(1, 3), at(2, 0)) is None
    assert not [e for e in desk.entries if isinstance(e, TakenBack)]


def test_a_new_process_goes_on_with_what_its_last_life_had(desk: Desk) -> None:
    desk.report("a")
    desk.report("a", at(1, 7, 4), at(2, 0))
    desk.tell(Lost("a", "a-1"))
    desk.join("a", life=2)
    assert numbers(desk.report("a", life=2)) == [(0, 0, 4), (0, 1, 0)]
    assert desk.report("a", at(1, 9, 9), life=1) is None, "the old process is not heard"


def test_who_learns_that_its_lease_is_gone_drops_it(desk: Desk) -> None:
    desk.report("a", want=1)
    desk.tell(Lost("a", "a-1"))
    desk.now = GRACE_SECONDS
    desk.tell(Tick())
    desk.report("b", want=1)
    desk.join("a")
    answer = desk.report("a", at(1, 9, 2), want=1)
    assert answer == LeasesGiven((Lease(3, 0, 1, 0),), (1,))


def test_what_is_trained_without_a_lease_is_entered_once(desk: Desk) -> None:
    desk.report("a", want=1)
    state = LeaseState(1, 5, 5, True, 3)
    desk.report("a", state, want=1)
    desk.report("a", state, want=1)
    assert [e for e in desk.entries if isinstance(e, (Repeated, Settled))] == [
        Repeated(1, "a", 3),
        Settled(1, "a", 5),
    ]


def test_who_ends_gives_back_everything(desk: Desk) -> None:
    desk.report("a")
    desk.report("a", at(1, 4, 4, ended=True), at(2, 2, 1), want=0)
    assert desk.entries[-2:] == [
        Settled(1, "a", 4),
        TakenBack(2, "a", 1, 2, "the learner returns it"),
    ]


def test_who_is_not_merged_for_long_holds_only_so_many(desk: Desk) -> None:
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
    assert "4 parts, those of b 5" in answer.reason


def test_data_without_parts_are_refused_and_describe_nothing(desk: Desk) -> None:
    assert isinstance(desk.report("a", parts=0), DataRefused)
    assert numbers(desk.report("b")) == [(0, 0, 0), (0, 1, 0)]


def test_a_pass_that_is_complete_leaves_nothing_behind(desk: Desk) -> None:
    desk.report("a", want=4)
    desk.report("a", *(at(n, 2, 2, ended=True) for n in range(1, 5)), want=1)
    book = desk.machine.state.data
    assert list(book.turns) == [1]
    assert book.turns[1].settled == 0


def test_the_entries_alone_lead_to_the_same_leases(desk: Desk) -> None:
    """Whatever a coordinator that starts again must know is in the ledger."""
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


def test_after_a_restart_everybody_has_its_grace_from_then_on(desk: Desk) -> None:
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


def test_parts_that_are_leased_name_their_start(desk: Desk) -> None:
    desk.report("a", want=1)
    assert desk.entries[-1] == Leased(1, 0, 0, 0, "a", 1)
