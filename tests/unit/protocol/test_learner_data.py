"""A learner's view of its leases: what it trained, what is durable, what it reports."""

from __future__ import annotations

from decoupled_diloco.protocol.features import partitions as learner_leases
from decoupled_diloco.protocol.learner_state import DataView
from decoupled_diloco.protocol.messages import DataReport, Lease, LeasesGiven, LeaseState, Send

PERIOD = 100


def view_with(*leases: Lease) -> DataView:
    view = DataView(parts=8, want=2, linked=True)
    learner_leases.answered(view, LeasesGiven(leases, ()))
    learner_leases.part_wanted(view, 0, None, 0)
    return view


def reported(effects: list[object]) -> tuple[LeaseState, ...]:
    (message,) = [e.message for e in effects if isinstance(e, Send)]
    assert isinstance(message, DataReport)
    return message.leases


def test_a_repeated_answer_changes_nothing() -> None:
    view = view_with(Lease(1, 0, 0, 0))
    learner_leases.stepped(view, 1, 3, PERIOD)
    learner_leases.answered(view, LeasesGiven((Lease(1, 0, 0, 0),), ()))
    assert view.leases[1].trained == 3


def test_batches_are_durable_up_to_the_step_that_every_fragment_has() -> None:
    view = view_with(Lease(1, 0, 0, 4))
    for step in range(1, 11):
        learner_leases.stepped(view, step, 2, PERIOD)
    learner_leases.merged(view, 10, 7)
    assert (view.leases[1].trained, view.leases[1].durable) == (24, 18)


def test_a_step_may_span_two_partitions() -> None:
    view = view_with(Lease(1, 0, 0, 0), Lease(2, 0, 1, 0))
    learner_leases.stepped(view, 1, 3, PERIOD)
    learner_leases.part_wanted(view, 1, 4, 1)
    effects = learner_leases.stepped(view, 2, 2, PERIOD)
    assert reported(list(effects)) == (LeaseState(1, 4, 0, True, 0), LeaseState(2, 2, 0, False, 0))
    assert not learner_leases.merged(view, 2, 1)
    assert reported(list(learner_leases.merged(view, 2, 2)))[0] == LeaseState(1, 4, 4, True, 0)


def test_without_a_lease_the_last_partition_is_repeated_and_reported() -> None:
    view = view_with(Lease(1, 0, 0, 0))
    learner_leases.link(view, 0, linked=False)
    learner_leases.stepped(view, 1, 2, PERIOD)
    learner_leases.part_wanted(view, 1, 2, 0)
    assert view.repeating
    assert view.next_batch() == (Lease(1, 0, 0, 0), 0)
    learner_leases.stepped(view, 2, 2, PERIOD)
    (state,) = reported(list(learner_leases.link(view, 2, linked=True)))
    assert (state.repeated, state.ended) == (2, False), "it continues while it has nothing else"
    learner_leases.answered(view, LeasesGiven((Lease(2, 0, 1, 0),), ()))
    assert view.leave
    learner_leases.part_wanted(view, 2, None, 0)
    assert view.next_batch() == (Lease(2, 0, 1, 0), 0)


def test_an_exhausted_partition_is_repeated_from_its_start() -> None:
    """Its last holder had all of it durable, and did not know that it had ended."""
    view = view_with(Lease(1, 0, 0, 6))
    learner_leases.link(view, 0, linked=False)
    learner_leases.part_wanted(view, 0, 6, 0)
    assert view.repeating
    assert view.next_batch() == (Lease(1, 0, 0, 6), 0), "there is a batch to train"


def test_a_revoked_lease_is_left_and_its_last_batches_do_not_count() -> None:
    view = view_with(Lease(1, 0, 0, 0))
    learner_leases.answered(view, LeasesGiven((Lease(2, 0, 1, 0),), (1,)))
    assert view.leave
    learner_leases.part_wanted(view, 0, None, 1)
    learner_leases.stepped(view, 1, 1, PERIOD)
    assert view.leases[2].trained == 1
