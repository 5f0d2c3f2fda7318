"""Learners that train on the same data are named, to people and to themselves."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import CoordinatorMachine, LearnerMachine, Options
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Asking,
    Connected,
    Joining,
    Lost,
    Note,
    RandomDrawn,
    RandomNumbers,
    Received,
    SameData,
    Send,
    Version,
)
from decoupled_diloco.protocol.same_data import PERIODS_MIN, ROUNDS_MIN, noticed
from decoupled_diloco.protocol.syncer_state import Ask, Twin

PERIOD = 8


def ask(learner: str, *alike: str) -> Ask:
    version = Version(1, 0)
    return Ask(Asking(1, 1), 0, learner, 1, "", version, 0.0, 1, final=False, alike=alike)


def rounds(*contributions: tuple[Ask, ...], every: int = PERIOD) -> list[Any]:
    """Return the warnings of these rounds, ``every`` steps apart."""
    twins: dict[str, Twin] = {}
    sent = [
        effect
        for n, folded in enumerate(contributions)
        for effect in noticed(twins, folded, n * every, PERIOD)
    ]
    return [each.text if isinstance(each, Note) else (each.peer, each.message) for each in sent]


def test_a_pair_is_named_once_after_several_rounds_over_several_periods() -> None:
    both = (ask("a"), ask("b", "a"))
    assert rounds(*[both] * PERIODS_MIN) == []
    sent = rounds(*[both] * (PERIODS_MIN + 20))
    assert sent[1] == "a and b seem to train on the same data"
    assert [each for each in sent if isinstance(each, str)] == [sent[1]]
    assert [each[0] for each in sent if not isinstance(each, str)] == ["a", "b"]
    assert rounds(*[both] * (ROUNDS_MIN + 2), every=1) == [], (
        "many fragments, but no time has passed"
    )


def test_the_order_of_arrival_does_not_matter() -> None:
    orders = [(ask("a"), ask("b", "a")), (ask("b"), ask("a", "b"))] * PERIODS_MIN
    assert "a and b seem to train on the same data" in rounds(*orders)


def test_one_round_of_different_directions_resets_the_count() -> None:
    alike, different = (ask("a"), ask("b", "a")), (ask("a"), ask("b"))
    assert rounds(*[*[alike] * PERIODS_MIN, different] * 3) == []


def test_one_round_alone_proves_nothing() -> None:
    alike, alone = (ask("a"), ask("b", "a")), (ask("b"),)
    sent = rounds(*[alike, alone] * (PERIODS_MIN + 1))
    assert "a and b seem to train on the same data" in sent


def test_two_of_many_are_named_and_the_others_are_not() -> None:
    folded = (ask("a"), ask("c"), ask("b", "a"), ask("d"))
    sent = rounds(*[folded] * (PERIODS_MIN + 2))
    assert [each for each in sent if isinstance(each, str)] == [
        "a and b seem to train on the same data"
    ]


def test_a_late_contribution_is_not_compared_with_its_own_learner() -> None:
    assert rounds(*[(ask("a"), ask("a", "a"))] * 20) == []


class Coordinator:
    def __init__(self) -> None:
        self.machine = CoordinatorMachine(Options())

    def join(self, name: str) -> None:
        self.machine.handle(0.0, Connected(name, Joining("n", "learner", "layout", ""), 1))

    def drew(self, name: str, *states: str) -> list[Any]:
        return self.machine.handle(0.0, Received(name, RandomNumbers(states), "n"))


def test_learners_with_equal_random_states_are_named_however_late_one_joins() -> None:
    coordinator = Coordinator()
    for name in "ab":
        coordinator.join(name)
    assert coordinator.drew("a", "torch:1", "numpy:2") == []
    assert coordinator.drew("b", "torch:3") == []
    coordinator.join("c")
    note, *sends = coordinator.drew("c", "numpy:2")
    assert isinstance(note, Note)
    assert note.warns
    assert note.text == "a and c seem to train on the same data"
    assert "seed = 1337 + learner.index" in note.why
    assert [send.peer for send in sends] == ["c", "a"]


def test_a_departed_learner_may_have_been_this_one() -> None:
    coordinator = Coordinator()
    coordinator.join("host-1")
    coordinator.drew("host-1", "torch:1")
    coordinator.machine.handle(0.0, Lost("host-1", "n"))
    coordinator.join("host-2")
    assert coordinator.drew("host-2", "torch:1") == []
    assert coordinator.drew("host-2", "torch:1") == [], "nor with itself"


@pytest.mark.parametrize("peer", ["shard-0", COORDINATOR])
def test_a_learner_logs_it_once(peer: str) -> None:
    learner = LearnerMachine(Options(), "b", 1, "n")
    message = Received(peer, SameData("a", "their random generators have the same state"))
    (note,) = learner.handle(0.0, message)
    assert isinstance(note, Note)
    assert (note.text, note.warns) == ("a and b seem to train on the same data", True)
    assert learner.handle(0.0, message) == []


def test_a_learner_sends_its_random_states_to_the_coordinator() -> None:
    learner = LearnerMachine(Options(), "b", 1, "n")
    (send,) = learner.handle(0.0, RandomDrawn(("torch:1",)))
    assert isinstance(send, Send)
    assert (send.peer, send.message) == (COORDINATOR, RandomNumbers(("torch:1",)))
