"""Who gives its state to whom: the coordinator's part, and both learners'."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import CoordinatorMachine, LearnerMachine, Options, Version
from decoupled_diloco.protocol.effects import Ready, Recovered, Send
from decoupled_diloco.protocol.events import (
    Began,
    Connected,
    Fetched,
    Joining,
    Lost,
    Received,
    StepFinished,
    Tick,
)
from decoupled_diloco.protocol.messages import Progress, Published, Welcome
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.transfer.effects import (
    CloseRelay,
    CopyState,
    DropState,
    FetchState,
    ForgetState,
    OpenRelay,
    RelayOn,
    RelayState,
)
from decoupled_diloco.protocol.transfer.events import (
    ChunkArrived,
    StateArrived,
    StateCopied,
    StateFailed,
)
from decoupled_diloco.protocol.transfer.learner import DONORS_MAX, OFFER_SECONDS, STALL_SECONDS
from decoupled_diloco.protocol.transfer.messages import (
    ChunkTaken,
    NoTransfer,
    RelayOpened,
    RelayWanted,
    StateDeclined,
    StateOffered,
    StateUnwanted,
    StateWanted,
    Trains,
    TransferLost,
    TransferReady,
    TransferWanted,
)
from decoupled_diloco.protocol.versions import Holding

SEEN = (Holding(0, Version(1, 3)),)


class Hall:
    """A coordinator with learners that are let in."""

    def __init__(self, *training: str, joiner: str = "joiner", clock: int = 5) -> None:
        self.machine = CoordinatorMachine(Options(fragments=1, period=4))
        for number, name in enumerate([*training, joiner]):
            self.machine.handle(0.0, Connected(name, Joining(name, "learner", "f", ""), number))
        for name in training:
            self.said(name, Trains(True))
        self.machine.handle(0.0, Received("shard-0", Progress(clock, 8)))

    def said(self, who: str, message: Any) -> list[Any]:
        """Somebody says something; what is sent, and the other orders."""
        effects = self.machine.handle(0.0, Received(who, message, who))
        self.machine.check()
        return [(e.peer, e.message) if isinstance(e, Send) else e for e in effects]


def test_the_first_by_name_that_trains_gives_and_to_one_at_a_time() -> None:
    hall = Hall("b", "a")
    assert hall.said("joiner", TransferWanted(1, SEEN)) == [("a", StateWanted("joiner", 1, SEEN))]
    hall.machine.handle(0.0, Connected("other", Joining("other", "learner", "f", ""), 9))
    assert hall.said("other", TransferWanted(1, SEEN)) == [("b", StateWanted("other", 1, SEEN))]
    offered = StateOffered("joiner", 1, 10, 100, "digest", "http://a:1", "key")
    named = TransferReady("a", 1, 10, 100, "digest", "http://a:1", "key")
    assert hall.said("a", offered) == [("joiner", named)]
    assert hall.said("joiner", Trains(True)) == [("a", StateUnwanted("joiner", 1))]


def test_nobody_gives_where_the_run_has_only_begun_or_nobody_else_trains() -> None:
    ((who, message),) = Hall("a", clock=0).said("joiner", TransferWanted(1, SEEN))
    assert (who, message) == ("joiner", NoTransfer("the run has only begun", 1))
    assert Hall().said("joiner", TransferWanted(1, SEEN)) == [
        ("joiner", NoTransfer("no other learner is there that trains", 1))
    ]
    assert Hall("a").said("joiner", TransferWanted(2, SEEN, ("a",))) == [
        ("joiner", NoTransfer("nobody is left", 2))
    ]


def test_who_does_not_listen_is_relayed_a_few_chunks_at_a_time() -> None:
    hall = Hall("a")
    hall.said("joiner", TransferWanted(1, SEEN))
    _, opened, *told = hall.said("a", StateOffered("joiner", 1, 10, 100, "digest", ""))
    path = "/relay/joiner/a/1"
    assert opened == OpenRelay("joiner", "a", 1, path, 10, 100, "its donor does not listen")
    assert told == [(who, RelayOpened("joiner", 1, path)) for who in ("a", "joiner")]
    assert hall.said("joiner", ChunkTaken(1, 3)) == [RelayOn(path, 3, "joiner has it")]
    assert hall.said("joiner", RelayWanted(1)) == [], "it is there already"
    assert hall.said("joiner", Trains(False)) == [
        CloseRelay(path, "joiner trains"),
        ("a", StateUnwanted("joiner", 1)),
    ]


def test_a_donor_that_goes_or_declines_is_told_to_the_joiner() -> None:
    hall = Hall("a", "b")
    hall.said("joiner", TransferWanted(1, SEEN))
    effects = hall.machine.handle(0.0, Lost("a", "a"))
    (effect,) = [each for each in effects if isinstance(each, Send)]
    assert effect == Send("joiner", TransferLost("a", 1, "a is gone"), "a is gone")
    assert hall.said("joiner", TransferWanted(2, SEEN, ("a",))) == [
        ("b", StateWanted("joiner", 2, SEEN))
    ]
    assert hall.said("b", StateDeclined("joiner", 2, "busy")) == [
        ("joiner", TransferLost("b", 2, "busy"))
    ]
    assert hall.said("b", StateOffered("joiner", 2, 1, 1, "", "")) == [
        ("b", StateUnwanted("joiner", 2))
    ], "an offer that comes too late"


@pytest.mark.parametrize("sizes", [(0, 100), (10, 2**53), (2**53, 100)])
def test_sizes_that_no_state_has_are_declined_before_a_relay_reckons_with_them(
    sizes: tuple[int, int],
) -> None:
    hall = Hall("a")
    hall.said("joiner", TransferWanted(1, SEEN))
    ((who, lost),) = hall.said("a", StateOffered("joiner", 1, *sizes, "digest", ""))
    assert (who, lost.donor, lost.attempt) == ("joiner", "a", 1)
    assert f"a head of {sizes[0]} bytes and a state of {sizes[1]} cannot be given" in lost.reason


class Joiner:
    """A learner that begins with nothing, every copy fetched."""

    def __init__(self) -> None:
        self.machine = LearnerMachine(Options(fragments=1, period=4), "joiner", 1, "nonce")
        self.now = 0.0
        self.told(Began(why="it has no checkpoint of its own", seeks_donor=True, gives=True))
        self.told(Connected(COORDINATOR))
        self.told(Connected("shard-0"))
        self.told(Received("shard-0", Welcome(0, 1, 3, 0, 3, 1)))
        copy = Published(0, Version(1, 3), None, "digest", "", "/w", 3)
        self.first = self.told(Received("shard-0", copy))
        assert not self.told(Fetched(0, Version(1, 3))), "it waits for its donor"

    def told(self, event: Any, at: float | None = None) -> list[Any]:
        """Tells the machine a fact."""
        self.now = self.now if at is None else at
        effects = self.machine.handle(self.now, event)
        self.machine.check()
        return effects

    def named(self, attempt: int, donor: str = "a", address: str = "http://a:1") -> list[Any]:
        """A donor is named."""
        return self.told(
            Received(COORDINATOR, TransferReady(donor, attempt, 10, 100, "d", address, "key"))
        )


def messages(effects: list[Any]) -> list[Any]:
    return [
        effect.message
        for effect in effects
        if isinstance(effect, Send) and effect.peer == COORDINATOR
    ]


def test_a_joiner_names_the_versions_that_it_was_told_of() -> None:
    assert messages(Joiner().first) == [TransferWanted(1, SEEN)]


def test_a_joiner_begins_once_the_state_is_here() -> None:
    joiner = Joiner()
    (fetch,) = joiner.named(1)
    assert fetch == FetchState("a", 1, 10, 100, "d", "http://a:1", "", "a serves it", "key")
    joiner.told(ChunkArrived(1, 0, 10), at=STALL_SECONDS - 1)
    joiner.told(Tick(), at=STALL_SECONDS + 1)
    recovered, ready, trains = joiner.told(StateArrived(1))
    assert isinstance(recovered, Recovered)
    assert isinstance(ready, Ready)
    assert (recovered.way, recovered.donor, recovered.nbytes) == ("donor", "a", 100)
    assert recovered.seconds == STALL_SECONDS + 1
    assert trains.message == Trains(True)


def test_a_donor_out_of_reach_is_relayed_and_the_relay_told_what_is_here() -> None:
    joiner = Joiner()
    joiner.named(1)
    assert messages(joiner.told(StateFailed(1, "no route"))) == [RelayWanted(1)]
    (fetch,) = joiner.told(Received(COORDINATOR, RelayOpened("joiner", 1, "/relay")))
    assert fetch.path == "/relay"
    assert messages(joiner.told(ChunkArrived(1, 2, 10))) == [ChunkTaken(1, 2)]


@pytest.mark.parametrize("how", ["lost", "stalls", "corrupt"])
def test_another_takes_over_with_a_fresh_copy(how: str) -> None:
    joiner = Joiner()
    joiner.named(1, address="")
    joiner.told(Received(COORDINATOR, RelayOpened("joiner", 1, "/relay")))
    if how == "lost":
        effects = joiner.told(Received(COORDINATOR, TransferLost("a", 1, "a is gone")))
    elif how == "stalls":
        effects = joiner.told(Tick(), at=STALL_SECONDS)
    else:
        effects = joiner.told(StateFailed(1, "another digest"))
    assert any(isinstance(effect, DropState) for effect in effects)
    assert messages(effects) == [TransferWanted(2, SEEN, ("a",))]
    assert not joiner.told(StateArrived(1)), "what belongs to the first asking is void"
    (fetch,) = joiner.named(2, "b")
    assert (fetch.donor, fetch.attempt) == ("b", 2)


def test_a_joiner_does_not_wait_for_ever() -> None:
    joiner = Joiner()
    for attempt in range(1, DONORS_MAX):
        joiner.told(Received(COORDINATOR, TransferLost(f"d{attempt}", attempt, "gone")))
    effects = joiner.told(Received(COORDINATOR, TransferLost("d", DONORS_MAX, "gone")))
    assert [e.way for e in effects if isinstance(e, Recovered)] == ["published"]
    silent = Joiner()
    deadline = silent.machine.deadline()
    assert deadline == OFFER_SECONDS + STALL_SECONDS
    effects = silent.told(Tick(), at=deadline)
    (recovered,) = [e for e in effects if isinstance(e, Recovered)]
    assert recovered.why.endswith("nobody has offered its state in time")


def test_a_coordinator_that_has_forgotten_is_asked_again() -> None:
    joiner = Joiner()
    assert messages(joiner.told(Connected(COORDINATOR))) == [TransferWanted(2, SEEN)]


def test_a_donor_copies_at_a_boundary_at_which_it_has_seen_the_versions(
    learner_bench: Any,
) -> None:
    bench = learner_bench()
    bench.step()
    seen = (Holding(0, Version(1, 1)),)
    bench.told(Received(COORDINATOR, StateWanted("joiner", 1, seen)))
    assert not [e for e in bench.step() if isinstance(e, CopyState)], "it holds 1.0"
    bench.publish(Version(1, 1), Version(1, 0))
    bench.fetched(Version(1, 1))
    (copy,) = [e for e in bench.step() if isinstance(e, CopyState)]
    assert (copy.learner, copy.attempt) == ("joiner", 1)
    assert not [e for e in bench.step() if isinstance(e, CopyState)], "once"
    effects = bench.told(StateCopied("joiner", 1, 10, 100, "d", ""))
    assert messages(effects) == [StateOffered("joiner", 1, 10, 100, "d", "")]
    effects = bench.told(Received(COORDINATOR, RelayOpened("joiner", 1, "/relay")))
    assert effects == [RelayState("joiner", 1, "/relay", "a shard relays it")]
    effects = bench.told(Received(COORDINATOR, StateUnwanted("joiner", 1)))
    assert [type(effect) for effect in effects] == [ForgetState]


def test_a_donor_does_not_keep_copies_for_a_coordinator_that_has_forgotten_them(
    learner_bench: Any,
) -> None:
    bench = learner_bench()
    bench.step()
    bench.told(Received(COORDINATOR, StateWanted("joiner", 1, ())))
    bench.step()
    bench.told(StateCopied("joiner", 1, 10, 100, "d", ""))
    (forget,) = bench.told(Connected(COORDINATOR))
    assert isinstance(forget, ForgetState)
    assert not bench.machine.state.givings


def test_a_donor_that_is_behind_for_too_long_declines(learner_bench: Any) -> None:
    bench = learner_bench()
    bench.step()
    bench.told(Received(COORDINATOR, StateWanted("joiner", 1, (Holding(0, Version(9, 9)),))))
    effects = bench.told(StepFinished(8), bench.now + OFFER_SECONDS)
    (declined,) = messages(effects)
    assert isinstance(declined, StateDeclined)


def test_who_has_not_trained_gives_nothing(learner_bench: Any) -> None:
    bench = learner_bench()
    (declined,) = messages(bench.told(Received(COORDINATOR, StateWanted("joiner", 1, ()))))
    assert declined == StateDeclined("joiner", 1, "it does not train, or no more")
