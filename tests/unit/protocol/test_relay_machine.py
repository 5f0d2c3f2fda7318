"""The state machine of a relay: when it sends the sum of what its children have sent."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.messages import (
    Asking,
    BodyArrived,
    Collect,
    Collected,
    Connected,
    Done,
    Drop,
    DropSum,
    Expect,
    Failed,
    Fold,
    FoldSum,
    ForgetFolded,
    Lost,
    Received,
    Send,
    SendSum,
    SettleSum,
    SumArrived,
    SumCorrupt,
    SumOutcome,
    Tick,
    Unexpect,
)
from decoupled_diloco.protocol.relay_machine import RelayMachine
from unit.protocol.conftest import Bench


class RelayBench(Bench):
    """A relay that is connected to one shard."""

    def __init__(self) -> None:
        super().__init__(RelayMachine())
        self.handle(Connected("shard-0"))

    def receive(self, message: Any, at: float | None = None) -> list[Any]:
        return self.handle(Received("shard-0", message), at)

    def expect(self, number: int) -> Asking:
        ask = Asking(1, number)
        self.receive(Expect(f"/up/{number}", f"child-{number}", 1, 1, 0, ask, "", ""))
        return ask

    def fold(self, ask: Asking, at: float | None = None) -> list[Any]:
        return self.receive(Fold(0, f"child-{ask.number}", ask, 1.0, 8.0, ""), at)

    def sent(self) -> list[tuple[Asking, ...]]:
        return [order.asks for order in self.orders(SendSum)]


@pytest.fixture
def bench() -> RelayBench:
    return RelayBench()


def test_a_report_of_a_payload_goes_to_the_shard_of_its_fragment(bench: RelayBench) -> None:
    ask = bench.expect(1)
    fact = BodyArrived("child-1", 1, 0, ask, Version(1, 0), 1, 8, 100)
    bench.handle(fact)
    assert bench.orders(Send) == [Send("shard-0", fact, "its shard decides")]


def test_a_sum_is_sent_once_nothing_more_can_follow(bench: RelayBench) -> None:
    bench.receive(Collect(0, 1, 10.0))
    one, two = bench.expect(1), bench.expect(2)
    bench.fold(one)
    assert not bench.sent(), "child-2 owes its payload"
    bench.fold(two)
    assert not bench.sent(), "the round may request more"
    bench.receive(Collected(0, 1))
    assert bench.sent() == [(one, two)]


def test_a_payload_that_is_dropped_or_void_is_not_waited_for(bench: RelayBench) -> None:
    one, two, three = (bench.expect(number) for number in (1, 2, 3))
    bench.fold(one)
    bench.receive(Drop(0, "child-2", two, "refused"))
    assert not bench.sent()
    bench.receive(Unexpect(f"/up/{three.number}", "child-3 left"))
    assert bench.sent() == [(one,)]


def test_a_sum_is_sent_when_it_would_otherwise_be_late(bench: RelayBench) -> None:
    bench.receive(Collect(0, 1, 10.0), at=0.0)
    one, two = bench.expect(1), bench.expect(2)
    bench.fold(one, at=1.0)
    assert bench.machine.deadline() == 5.0, "half of the window, before the first upload"
    bench.handle(Tick(), at=5.0)
    assert bench.sent() == [(one,)]
    bench.handle(Done(bench.orders(SendSum)[0]), at=6.0)
    bench.receive(Collect(0, 2, 10.0), at=20.0)
    three = bench.expect(3)
    bench.fold(three, at=21.0)
    assert bench.machine.deadline() == 29.0, "an upload takes a second"
    bench.fold(two, at=22.0)
    bench.receive(Collected(0, 2))
    assert bench.sent() == [(three, two)]


def test_late_payloads_wait_for_each_other_as_long_again(bench: RelayBench) -> None:
    """Otherwise each payload after the window would cross the long link alone."""
    bench.receive(Collect(0, 1, 10.0), at=0.0)
    asks = [bench.expect(number) for number in (1, 2, 3)]
    bench.fold(asks[0], at=1.0)
    bench.handle(Tick(), at=5.0)
    bench.handle(Done(bench.orders(SendSum)[0]), at=5.5)
    bench.fold(asks[1], at=6.0)
    assert not bench.sent()
    bench.fold(asks[2], at=7.0)
    assert not bench.sent(), "its round may request more"
    bench.receive(Collected(0, 1))
    assert bench.sent() == [(asks[1], asks[2])]


def test_the_sums_of_a_fragment_follow_each_other(bench: RelayBench) -> None:
    first, second = bench.expect(1), bench.expect(2)
    bench.fold(first)
    bench.receive(Drop(0, "child-2", second, ""))
    (order,) = bench.orders(SendSum)
    third = bench.expect(3)
    bench.fold(third)
    assert not bench.sent()
    bench.receive(SumOutcome(0, 1, "merged", ""))  # may overtake the answer to the upload
    bench.handle(Done(order))
    assert [(o.number, o.asks) for o in bench.orders(SendSum)] == [(2, (third,))]


def test_a_sum_that_could_not_be_sent_is_reported(bench: RelayBench) -> None:
    ask = bench.expect(1)
    bench.fold(ask)
    (order,) = bench.orders(SendSum)
    bench.handle(Failed(order, "the connection broke"))
    (report,) = bench.orders(Send)
    assert report.message == SumCorrupt("", 0, 1, (ask,), "the connection broke")


def test_a_residual_is_settled_by_the_outcome(bench: RelayBench) -> None:
    ask = bench.expect(1)
    bench.fold(ask)
    bench.receive(SumOutcome(0, 1, "void", "a request is not open"))
    assert bench.orders(SettleSum) == [SettleSum(0, 1, "void", "a request is not open")]


def test_the_outcome_of_a_sum_is_unknown_if_its_shard_is_lost(bench: RelayBench) -> None:
    bench.fold(bench.expect(1))
    bench.handle(Lost("shard-0"))
    (order,) = bench.orders(SettleSum)
    assert order.verdict == "unknown"


def test_what_a_lost_shard_requested_is_forgotten(bench: RelayBench) -> None:
    one, two = bench.expect(1), bench.expect(2)
    bench.fold(one)
    bench.handle(Lost("shard-0"))
    assert [order.fragment for order in bench.orders(ForgetFolded)] == [0]
    assert not bench.machine.state.fragments
    bench.handle(Connected("shard-0"))
    bench.handle(BodyArrived("child-2", 1, 0, two, Version(1, 0), 1, 8, 100))
    assert not bench.effects, "its request is void"


def test_a_sum_may_be_the_first_that_a_relay_hears_of_a_fragment(bench: RelayBench) -> None:
    """The round has opened before the relay's connection."""
    bench.handle(Connected("shard-1", shards=2))
    arrived = SumArrived("inner", 3, 1, (Asking(1, 7),), 100)
    bench.handle(arrived)
    assert [(order.peer, order.message) for order in bench.orders(Send)] == [("shard-1", arrived)]
    bench.handle(Lost("shard-1"))
    bench.handle(SumArrived("inner", 3, 2, (Asking(1, 8),), 100))
    assert [order.number for order in bench.orders(DropSum)] == [2]


def test_a_sum_of_a_relay_behind_it_goes_into_its_own(bench: RelayBench) -> None:
    mine, others = bench.expect(1), (Asking(1, 7), Asking(1, 8))
    arrived = SumArrived("inner", 0, 3, others, 100)
    bench.handle(arrived)
    assert bench.orders(Send)[0].message == arrived
    bench.fold(mine)
    assert not bench.sent(), "the shard has not decided about the sum"
    bench.receive(FoldSum(0, "inner", 3, "", ""))
    assert bench.sent() == [(mine, *others)]
