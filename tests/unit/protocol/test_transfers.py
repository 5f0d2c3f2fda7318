"""State transfers: the coordinator's side, and both learners'."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import CoordinatorMachine, LearnerMachine, Options, Version
from decoupled_diloco.protocol.features.state_transfer import (
    DONORS_MAX,
    OFFER_SECONDS,
    STALL_SECONDS,
)
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Began,
    ChunkArrived,
    ChunkTaken,
    CloseRelay,
    Connected,
    CopyState,
    Done,
    DropState,
    Failed,
    FetchState,
    ForgetState,
    Holding,
    Joining,
    Lost,
    NoTransfer,
    OpenRelay,
    Progress,
    Published,
    Ready,
    Received,
    Recovered,
    RelayOn,
    RelayOpened,
    RelayState,
    Send,
    StateCopied,
    StateDeclined,
    StateOffered,
    StateUnwanted,
    StateWanted,
    StepFinished,
    Tick,
    Trains,
    TransferLost,
    TransferReady,
    TransferWanted,
    Welcome,
)
from unit.protocol.conftest import fetch_of

SEEN = (Holding(0, Version(1, 3)),)


def fetch_state(attempt: int) -> FetchState:
    """Return the order that an answer contains; a learner reads only these fields."""
    return FetchState("", attempt, 0, 0, "", "", "")


class Hall:
    """A coordinator with admitted learners."""

    def __init__(self, *training: str, joiner: str = "joiner", clock: int = 5) -> None:
        self.machine = CoordinatorMachine(Options(fragments=1, period=4))
        for number, name in enumerate([*training, joiner]):
            self.machine.handle(0.0, Connected(name, Joining(name, "learner", "f", ""), number))
        for name in training:
            self.sent(name, Trains(True))
        self.machine.handle(0.0, Received("shard-0", Progress(clock, 8)))

    def sent(self, process: str, message: Any) -> list[Any]:
        """A learner sends a message; return what is sent, and the other orders."""
        effects = self.machine.handle(0.0, Received(process, message, process))
        self.machine.check()
        return [(e.peer, e.message) if isinstance(e, Send) else e for e in effects]


def test_the_first_training_learner_by_name_shares_with_one_at_a_time() -> None:
    hall = Hall("b", "a")
    assert hall.sent("joiner", TransferWanted(1, SEEN)) == [("a", StateWanted("joiner", 1, SEEN))]
    hall.machine.handle(0.0, Connected("other", Joining("other", "learner", "f", ""), 9))
    assert hall.sent("other", TransferWanted(1, SEEN)) == [("b", StateWanted("other", 1, SEEN))]
    named = TransferReady("a", 1, 10, 100, "digest")
    first, *_ = hall.sent("a", StateOffered("joiner", 1, 10, 100, "digest"))
    assert first == ("joiner", named)
    assert hall.sent("joiner", Trains(True))[-1] == ("a", StateUnwanted("joiner", 1))


def test_no_provider_at_the_start_or_without_other_learners() -> None:
    ((process, message),) = Hall("a", clock=0).sent("joiner", TransferWanted(1, SEEN))
    assert (process, message) == ("joiner", NoTransfer("the run has only begun", 1))
    assert Hall().sent("joiner", TransferWanted(1, SEEN)) == [
        ("joiner", NoTransfer("no other learner is training", 1))
    ]
    assert Hall("a").sent("joiner", TransferWanted(2, SEEN, ("a",))) == [
        ("joiner", NoTransfer("no provider is left", 2))
    ]


def test_a_shard_relays_a_few_chunks_at_a_time() -> None:
    hall = Hall("a")
    hall.sent("joiner", TransferWanted(1, SEEN))
    _, opened, *opened_messages = hall.sent("a", StateOffered("joiner", 1, 10, 100, "digest"))
    path = "/relay/joiner/a/1"
    assert opened == OpenRelay("joiner", "a", 1, path, 10, 100, "its copy is ready")
    assert opened_messages == [
        (process, RelayOpened("joiner", 1, path)) for process in ("a", "joiner")
    ]
    assert hall.sent("joiner", ChunkTaken(1, 3)) == [RelayOn(path, 3, "joiner has it")]
    assert hall.sent("joiner", Trains(False)) == [
        CloseRelay(path, "joiner trains"),
        ("a", StateUnwanted("joiner", 1)),
    ]


def test_the_joiner_is_notified_when_its_provider_leaves_or_declines() -> None:
    hall = Hall("a", "b")
    hall.sent("joiner", TransferWanted(1, SEEN))
    effects = hall.machine.handle(0.0, Lost("a", "a"))
    (effect,) = [each for each in effects if isinstance(each, Send)]
    assert effect == Send("joiner", TransferLost("a", 1, "a has left"), "a has left")
    assert hall.sent("joiner", TransferWanted(2, SEEN, ("a",))) == [
        ("b", StateWanted("joiner", 2, SEEN))
    ]
    assert hall.sent("b", StateDeclined("joiner", 2, "busy")) == [
        ("joiner", TransferLost("b", 2, "busy"))
    ]
    assert hall.sent("b", StateOffered("joiner", 2, 1, 1, "")) == [
        ("b", StateUnwanted("joiner", 2))
    ], "an offer that arrives too late"


@pytest.mark.parametrize("sizes", [(0, 100), (10, 2**53), (2**53, 100)])
def test_impossible_sizes_are_declined_before_a_relay_uses_them(
    sizes: tuple[int, int],
) -> None:
    hall = Hall("a")
    hall.sent("joiner", TransferWanted(1, SEEN))
    ((peer, lost),) = hall.sent("a", StateOffered("joiner", 1, *sizes, "digest"))
    assert (peer, lost.donor, lost.attempt) == ("joiner", "a", 1)
    assert f"head_nbytes={sizes[0]} and nbytes={sizes[1]} must be" in lost.reason


class Joiner:
    """A learner that starts without state, with every copy fetched."""

    def __init__(self) -> None:
        self.machine = LearnerMachine(Options(fragments=1, period=4), "joiner", 1, "nonce")
        self.now = 0.0
        self.handle(Began(why="it has no checkpoint", seeks_donor=True, gives=True))
        self.handle(Connected(COORDINATOR))
        self.handle(Connected("shard-0"))
        self.handle(Received("shard-0", Welcome(0, 1, 3, 0, 3, 1)))
        copy = Published(0, Version(1, 3), None, "digest", "", "/w", 3)
        self.first = self.handle(Received("shard-0", copy))
        assert not self.handle(Done(fetch_of(0, Version(1, 3)))), "it waits for its provider"

    def handle(self, event: Any, at: float | None = None) -> list[Any]:
        """Pass a fact to the machine."""
        self.now = self.now if at is None else at
        effects = self.machine.handle(self.now, event)
        self.machine.check()
        return effects

    def named(self, attempt: int, donor: str = "a") -> list[Any]:
        """Name a provider and open its relay."""
        assert not self.handle(Received(COORDINATOR, TransferReady(donor, attempt, 10, 100, "d")))
        return self.handle(Received(COORDINATOR, RelayOpened("joiner", attempt, "/relay")))


def messages(effects: list[Any]) -> list[Any]:
    return [
        effect.message
        for effect in effects
        if isinstance(effect, Send) and effect.peer == COORDINATOR
    ]


def test_a_joiner_lists_the_announced_versions() -> None:
    assert messages(Joiner().first) == [TransferWanted(1, SEEN)]


def test_a_joiner_starts_once_the_state_has_arrived() -> None:
    joiner = Joiner()
    (fetch,) = joiner.named(1)
    assert fetch == FetchState("a", 1, 10, 100, "d", "/relay", "a shard relays it")
    joiner.handle(ChunkArrived(1, 0, 10), at=STALL_SECONDS - 1)
    joiner.handle(Tick(), at=STALL_SECONDS + 1)
    recovered, ready, trains = joiner.handle(Done(fetch_state(1)))
    assert isinstance(recovered, Recovered)
    assert isinstance(ready, Ready)
    assert (recovered.way, recovered.donor, recovered.nbytes) == ("donor", "a", 100)
    assert recovered.seconds == STALL_SECONDS + 1
    assert trains.message == Trains(True)


def test_the_relay_receives_acknowledgements() -> None:
    joiner = Joiner()
    joiner.named(1)
    assert messages(joiner.handle(ChunkArrived(1, 2, 10))) == [ChunkTaken(1, 2)]


@pytest.mark.parametrize("how", ["lost", "stalls", "corrupt"])
def test_another_provider_takes_over_with_a_fresh_copy(how: str) -> None:
    joiner = Joiner()
    joiner.named(1)
    if how == "lost":
        effects = joiner.handle(Received(COORDINATOR, TransferLost("a", 1, "a has left")))
    elif how == "stalls":
        effects = joiner.handle(Tick(), at=STALL_SECONDS)
    else:
        effects = joiner.handle(Failed(fetch_state(1), "another digest"))
    assert any(isinstance(effect, DropState) for effect in effects)
    assert messages(effects) == [TransferWanted(2, SEEN, ("a",))]
    assert not joiner.handle(Done(fetch_state(1))), "answers to the first request are void"
    (fetch,) = joiner.named(2, "b")
    assert (fetch.donor, fetch.attempt) == ("b", 2)


def test_a_joiner_does_not_wait_forever() -> None:
    joiner = Joiner()
    for attempt in range(1, DONORS_MAX):
        joiner.handle(Received(COORDINATOR, TransferLost(f"d{attempt}", attempt, "gone")))
    effects = joiner.handle(Received(COORDINATOR, TransferLost("d", DONORS_MAX, "gone")))
    assert [e.way for e in effects if isinstance(e, Recovered)] == ["published"]
    silent = Joiner()
    deadline = silent.machine.deadline()
    assert deadline == OFFER_SECONDS + STALL_SECONDS
    effects = silent.handle(Tick(), at=deadline)
    (recovered,) = [e for e in effects if isinstance(e, Recovered)]
    assert recovered.why.endswith("no learner offered its state in time")


def test_a_restarted_coordinator_is_asked_again() -> None:
    joiner = Joiner()
    assert messages(joiner.handle(Connected(COORDINATOR))) == [TransferWanted(2, SEEN)]


def test_a_provider_copies_at_a_boundary_with_the_versions_applied(
    learner_bench: Any,
) -> None:
    bench = learner_bench()
    bench.step()
    seen = (Holding(0, Version(1, 1)),)
    bench.handle(Received(COORDINATOR, StateWanted("joiner", 1, seen)))
    assert not [e for e in bench.step() if isinstance(e, CopyState)], "it holds 1.0"
    bench.publish(Version(1, 1), Version(1, 0))
    bench.fetched(Version(1, 1))
    (copy,) = [e for e in bench.step() if isinstance(e, CopyState)]
    assert (copy.learner, copy.attempt) == ("joiner", 1)
    assert not [e for e in bench.step() if isinstance(e, CopyState)], "once"
    effects = bench.handle(Done(CopyState("joiner", 1, ""), StateCopied(10, 100, "d")))
    assert messages(effects) == [StateOffered("joiner", 1, 10, 100, "d")]
    effects = bench.handle(Received(COORDINATOR, RelayOpened("joiner", 1, "/relay")))
    assert effects == [RelayState("joiner", 1, "/relay", "a shard relays it")]
    effects = bench.handle(Received(COORDINATOR, StateUnwanted("joiner", 1)))
    assert [type(effect) for effect in effects] == [ForgetState]


def test_a_provider_drops_copies_that_a_restarted_coordinator_does_not_know(
    learner_bench: Any,
) -> None:
    bench = learner_bench()
    bench.step()
    bench.handle(Received(COORDINATOR, StateWanted("joiner", 1, ())))
    bench.step()
    bench.handle(Done(CopyState("joiner", 1, ""), StateCopied(10, 100, "d")))
    (forget,) = bench.handle(Connected(COORDINATOR))
    assert isinstance(forget, ForgetState)
    assert not bench.machine.state.state_requests


def test_a_provider_that_is_behind_for_too_long_declines(learner_bench: Any) -> None:
    bench = learner_bench()
    bench.step()
    bench.handle(Received(COORDINATOR, StateWanted("joiner", 1, (Holding(0, Version(9, 9)),))))
    effects = bench.handle(StepFinished(8), bench.now + OFFER_SECONDS)
    (declined,) = messages(effects)
    assert isinstance(declined, StateDeclined)


def test_a_learner_that_has_not_trained_shares_nothing(learner_bench: Any) -> None:
    bench = learner_bench()
    (declined,) = messages(bench.handle(Received(COORDINATOR, StateWanted("joiner", 1, ()))))
    assert declined == StateDeclined("joiner", 1, "it is not training")
