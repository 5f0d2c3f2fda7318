"""A learner's own view of its leases: what it trained, what of it is durable, what it says."""

from __future__ import annotations

from decoupled_diloco.protocol.data_leases import learner as learner_leases
from decoupled_diloco.protocol.data_leases.messages import (
    DataReport,
    Lease,
    LeasesGiven,
    LeaseState,
)
from decoupled_diloco.protocol.data_leases.state import DataView
from decoupled_diloco.protocol.effects import Send

PERIOD = 100


def view_with(*leases: Lease) -> DataView:
    view = DataView(parts=8, want=2, linked=True)
    learner_leases.told(view, LeasesGiven(leases, ()))
    learner_leases.part_wanted(view, 0, None, 0)
    return view


def said(effects: list[object]) -> tuple[LeaseState, ...]:
    (message,) = [e.message for e in effects if isinstance(e, Send)]
    assert isinstance(message, DataReport)
    return message.leases


def test_an_answer_that_comes_twice_changes_nothing() -> None:
    view = view_with(Lease(1, 0, 0, 0))
    learner_leases.stepped(view, 1, 3, PERIOD)
    learner_leases.told(view, LeasesGiven((Lease(1, 0, 0, 0),), ()))
    assert view.leases[1].trained == 3


def test_batches_are_durable_up_to_the_step_that_every_fragment_has() -> None:
    view = view_with(Lease(1, 0, 0, 4))
    for step in range(1, 11):
        learner_leases.stepped(view, step, 2, PERIOD)
    learner_leases.merged(view, 10, 7)
    assert (view.leases[1].trained, view.leases[1].durable) == (24, 18)


def test_a_step_may_take_the_end_of_one_part_and_the_beginning_of_the_next() -> None:
    view = view_with(Lease(1, 0, 0, 0), Lease(2, 0, 1, 0))
    learner_leases.stepped(view, 1, 3, PERIOD)
    learner_leases.part_wanted(view, 1, 4, 1)
    effects = learner_leases.stepped(view, 2, 2, PERIOD)
    assert said(list(effects)) == (LeaseState(1, 4, 0, True, 0), LeaseState(2, 2, 0, False, 0))
    assert not learner_leases.merged(view, 2, 1)
    assert said(list(learner_leases.merged(view, 2, 2)))[0] == LeaseState(1, 4, 4, True, 0)


def test_without_a_lease_the_last_part_is_trained_again_and_told() -> None:
    view = view_with(Lease(1, 0, 0, 0))
    learner_leases.link(view, 0, linked=False)
    learner_leases.stepped(view, 1, 2, PERIOD)
    learner_leases.part_wanted(view, 1, 2, 0)
    assert view.repeating
    assert view.next_batch() == (Lease(1, 0, 0, 0), 0)
    learner_leases.stepped(view, 2, 2, PERIOD)
    (state,) = said(list(learner_leases.link(view, 2, linked=True)))
    assert (state.repeated, state.ended) == (2, False), "it goes on while it has nothing else"
    learner_leases.told(view, LeasesGiven((Lease(2, 0, 1, 0),), ()))
    assert view.leave
    learner_leases.part_wanted(view, 2, None, 0)
    assert view.next_batch() == (Lease(2, 0, 1, 0), 0)


def test_a_part_of_which_nothing_was_left_is_trained_again_from_its_beginning() -> None:
    """Its last holder had all of it durable and did not know that it was over."""
    view = view_with(Lease(1, 0, 0, 6))
    learner_leases.link(view, 0, linked=False)
    learner_leases.part_wanted(view, 0, 6, 0)
    assert view.repeating
    assert view.next_batch() == (Lease(1, 0, 0, 6), 0), "there is a batch to train"


def test_what_was_taken_back_is_left_and_its_last_batches_are_nobodys() -> None:
    view = view_with(Lease(1, 0, 0, 0))
    learner_leases.told(view, LeasesGiven((Lease(2, 0, 1, 0),), (1,)))
    assert view.leave
    learner_leases.part_wanted(view, 0, None, 1)
    learner_leases.stepped(view, 1, 1, PERIOD)
    assert view.leases[2].trained == 1
