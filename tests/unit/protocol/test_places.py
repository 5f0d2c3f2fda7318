"""Rule 23: at most ``cohort`` devices train at a time, drawn fairly and repeatably."""

from __future__ import annotations

from collections import Counter
from typing import Any

from decoupled_diloco.protocol import CoordinatorMachine, Options
from decoupled_diloco.protocol.messages import (
    Connected,
    Joining,
    Lost,
    PlaceGiven,
    PlaceLost,
    PlaceReturned,
    PlaceWanted,
    Received,
    Send,
    Tick,
)


class Run:
    """A coordinator with devices that are present from the start."""

    def __init__(self, *devices: str, **options: Any) -> None:
        values = {"participants": "own", "history": 4, "cohort": 1, "visit_seconds": 60.0}
        self.machine = CoordinatorMachine(Options(**{**values, **options}))
        self.now = 0.0
        self.connection = 0
        self.sent: list[Send] = []
        for device in devices:
            self.join(device)
        # Before the run begins, the seed of the initial weights is served first.
        self.machine.state.phase, self.machine.state.ready = "running", {0}

    def handle(self, event: Any) -> list[Send]:
        effects = self.machine.handle(self.now, event)
        self.machine.check()
        places = (PlaceGiven, PlaceLost)
        self.sent = [e for e in effects if isinstance(e, Send) and isinstance(e.message, places)]
        return self.sent

    def join(self, device: str) -> None:
        self.connection += 1
        self.handle(
            Connected(device, Joining(f"nonce-{device}", "learner", "f", ""), self.connection)
        )

    def wants(self, device: str, *, fresh: bool = False) -> list[tuple[str, str]]:
        sent = self.handle(Received(device, PlaceWanted(fresh), f"nonce-{device}"))
        return [(each.peer, type(each.message).__name__) for each in sent]

    def returns(self, device: str, number: int) -> list[str]:
        sent = self.handle(Received(device, PlaceReturned(number), f"nonce-{device}"))
        return [each.peer for each in sent]


def test_at_most_a_cohort_holds_a_place() -> None:
    run = Run("a", "b", "c", cohort=2)
    assert run.wants("a") == [("a", "PlaceGiven")]
    assert run.wants("b") == [("b", "PlaceGiven")]
    assert run.wants("c") == []
    assert run.returns("a", 1) == ["c"]


def test_a_device_that_is_away_keeps_its_place() -> None:
    """It trains alone and comes back."""
    run = Run("a", "b")
    run.wants("a")
    run.handle(Lost("a", "nonce-a"))
    assert run.wants("b") == []
    run.now = 20.0
    run.join("a")
    assert run.wants("a") == [("a", "PlaceGiven")]
    (sent,) = run.sent
    assert sent.message == PlaceGiven(1, 40.0)


def test_a_device_that_does_not_come_back_in_time_frees_its_place() -> None:
    run = Run("a", "b")
    run.wants("a")
    run.wants("b")
    run.handle(Lost("a", "nonce-a"))
    assert run.machine.deadline() == 60.0
    run.now = 60.0
    assert [(each.peer, each.message) for each in run.handle(Tick())] == [
        ("b", PlaceGiven(2, 60.0))
    ]


def test_a_device_that_stays_too_long_is_notified() -> None:
    run = Run("a")
    run.wants("a")
    run.now = 60.0
    assert [(each.peer, each.message) for each in run.handle(Tick())] == [("a", PlaceLost(1))]


def test_a_device_that_has_contributed_takes_part_in_the_next_draw() -> None:
    run = Run("a", "b")
    run.wants("a")
    run.wants("b")
    assert run.wants("a", fresh=True) == [("b", "PlaceGiven")], "b has had fewer places"


def test_a_device_that_has_left_is_not_drawn() -> None:
    run = Run("a", "b", "c")
    run.wants("a")
    run.wants("b")
    run.handle(Lost("b", "nonce-b"))
    assert run.returns("a", 1) == []
    assert run.wants("c") == [("c", "PlaceGiven")]


def test_the_draw_is_fair_and_states_how_it_was_made() -> None:
    """Each device gets as many places as any other, in an order that the seed determines."""
    names = [f"phone-{number}" for number in range(7)]
    orders = []
    for seed in (0, 0, 1):
        run, given = Run(*names, cohort=2, seed=seed), list[str]()
        for name in names:
            given += [peer for peer, _ in run.wants(name)]
        for _ in range(5 * len(names)):
            holder = given[len(given) - len(run.machine.places.held)]
            number = run.machine.places.held[holder].number
            given += run.returns(holder, number)
            why = run.sent[0].why
            assert f"drawn with seed {seed} among " in why
            given += [peer for peer, _ in run.wants(holder)]
        times = Counter(given)
        assert max(times.values()) - min(times[name] for name in names) <= 1
        orders.append(given)
    assert orders[0] == orders[1] != orders[2]


def test_a_uniform_draw_takes_no_account_of_earlier_places() -> None:
    """FedAvg: each round's devices are drawn uniformly at random."""
    names = [f"phone-{number}" for number in range(4)]
    run, given = Run(*names, draw="uniform"), Counter[str]()
    holder = run.wants(names[0])[0][0]
    for name in names[1:]:
        run.wants(name)
    for number in range(1, 401):
        given[holder] += 1
        run.machine.places.waiting.add(holder)
        holder = run.returns(holder, number)[0]
        assert "among 4 of 4 waiting devices, any of them" in run.sent[0].why
    assert max(given.values()) - min(given.values()) > 1
    assert all(70 <= given[name] <= 130 for name in names)
