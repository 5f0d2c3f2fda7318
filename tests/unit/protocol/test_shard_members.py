"""Live learners at a shard: greetings, incarnations, leases, leaving (rules 1, 10, 13)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.messages import (
    Accept,
    Ahead,
    ClockAdvanced,
    Connected,
    Evict,
    Heard,
    Hello,
    Holding,
    Leave,
    Lost,
    Progress,
    Published,
    Pull,
    Received,
    Reject,
    Reported,
    Send,
    Shifted,
    StepReport,
    Tick,
    Welcome,
)
from decoupled_diloco.protocol.syncer_state import LEASE_SECONDS, RECONNECT_SECONDS


def test_a_greeting_is_accepted_and_welcomed_with_the_copies(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=2, period=4)
    bench.greet("b")
    assert [order.learner for order in bench.orders(Accept)] == ["b"]
    assert bench.messages(Welcome) == [Welcome(0, 1, 0, 0, 0, news=2)]
    assert [message.fragment for message in bench.messages(Published)] == [0, 1]


def test_rule_10_an_older_incarnation_is_refused_for_good(shard_bench: Any) -> None:
    """Rule 10: another process has joined under this name."""
    bench = shard_bench("a")
    bench.greet("a", epoch=3)
    bench.greet("a", epoch=2)
    (refused,) = bench.orders(Reject)
    assert refused.final
    assert "incarnation 2 is older than incarnation 3" in refused.reason


def test_rule_10_the_same_incarnation_with_another_nonce_is_refused(shard_bench: Any) -> None:
    """Rule 10: two learners with one name; the second is refused."""
    bench = shard_bench("a")
    bench.greet("a", nonce="somebody else")
    (refused,) = bench.orders(Reject)
    assert refused.final
    assert "give each learner a different name" in refused.reason


def test_a_newer_incarnation_replaces_the_older_without_an_eviction(shard_bench: Any) -> None:
    bench = shard_bench("a", "b")
    bench.step("a")
    bench.greet("a", epoch=2)
    assert bench.orders(Accept)
    assert not bench.orders(Evict)
    assert bench.machine.state.members["a"].epoch == 2


def test_rule_13_a_lease_expires_only_in_a_tick(shard_bench: Any) -> None:
    """Rule 13: the inbox is drained before a lease expires."""
    bench = shard_bench("a", "b")
    bench.handle(Heard(("a",)), LEASE_SECONDS)
    assert "b" in bench.machine.state.members
    bench.handle(Tick(), LEASE_SECONDS)
    assert [order.learner for order in bench.orders(Evict)] == ["b"]


@pytest.mark.parametrize("arrival", [Heard(("a",)), Received("a", StepReport(1, 10, 1.0))])
def test_rule_13_any_received_byte_renews_the_lease(shard_bench: Any, arrival: object) -> None:
    """Rule 13: any byte received renews a lease."""
    bench = shard_bench("a", quorum=2)
    bench.handle(arrival, 6.0)
    bench.handle(Tick(), LEASE_SECONDS)
    assert not bench.orders(Evict)
    bench.handle(Tick(), bench.machine.deadline())
    assert bench.now == 6.0 + LEASE_SECONDS
    assert bench.orders(Evict)


def test_a_broken_connection_shortens_the_lease(shard_bench: Any) -> None:
    bench = shard_bench("a", "b")
    bench.handle(Heard(("a", "b")), 1.0)
    bench.handle(Lost("a"), 2.0)
    assert bench.machine.deadline() == 2.0 + RECONNECT_SECONDS
    bench.handle(Tick(), 2.0 + RECONNECT_SECONDS)
    assert [order.learner for order in bench.orders(Evict)] == ["a"]


def test_rule_13_a_late_tick_evicts_no_learner(shard_bench: Any) -> None:
    """Rule 13: a paused syncer must not evict all learners."""
    bench = shard_bench("a", "b")
    bench.handle(Tick(), LEASE_SECONDS + 100.0)
    assert not bench.orders(Evict)
    bench.handle(Tick(), bench.machine.deadline())
    assert len(bench.orders(Evict)) == 2, "no bytes have arrived since"


def test_rule_13_a_late_tick_gives_a_reconnecting_learner_time(shard_bench: Any) -> None:
    """Rule 13: while the shard was paused, no learner could connect to it either."""
    bench = shard_bench("a", "b")
    bench.handle(Lost("a"), 2.0)
    bench.handle(Tick(), bench.machine.deadline() + 100.0)
    assert not bench.orders(Evict)
    assert "a" in bench.machine.state.members
    bench.greet("a", step=1)
    assert not bench.orders(Evict)


def test_rule_13_a_deadline_in_the_past_is_not_a_late_tick(shard_bench: Any) -> None:
    """Rule 13: only a pause of the shard extends leases, not a window of length zero."""
    bench = shard_bench("a", "b", fragments=1, period=2)
    for learner in ("a", "b", "a", "b"):
        bench.step(learner, 1.0)
    for instant in range(2, 41):
        bench.handle(Heard(("a", "b")), float(instant))
        bench.handle(Tick())
    bench.machine.state.lease_check_at = bench.now - 30.0
    bench.handle(Heard(("b",)), bench.now + 0.1)
    bench.handle(Tick(), bench.now + 0.1)
    leases = [member.lease_until for member in bench.machine.state.members.values()]
    assert max(leases) <= bench.now + LEASE_SECONDS


def test_rule_13_arrivals_after_a_pause_do_not_hide_it(shard_bench: Any) -> None:
    """Rule 13: the inbox is drained first; the lateness counts from the missed tick."""
    bench = shard_bench("a", "b")
    bench.handle(Heard(("a",)), LEASE_SECONDS + 100.0)
    bench.handle(Tick(), LEASE_SECONDS + 100.0)
    assert not bench.orders(Evict)


def test_early_and_double_ticks_change_nothing(shard_bench: Any) -> None:
    bench = shard_bench("a", "b")
    for instant in (0.1, 0.1, 5.0, 5.0):
        assert bench.handle(Tick(), instant) == []


def test_when_the_leader_leaves_the_others_are_shifted_up(shard_bench: Any) -> None:
    bench = shard_bench("fast", "slow", quorum=1)
    for _ in range(5):
        bench.step("fast")
    bench.step("slow")
    bench.handle(Received("fast", Leave("enough")))
    assert bench.messages(Shifted) == [Shifted(4)]
    assert bench.machine.state.clock == 5
    bench.step("slow")
    assert bench.machine.state.clock == 6, "the next step advances the clock"


def test_with_fewer_than_k_live_learners_the_clock_stops(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", quorum=2)
    for _ in range(3):
        bench.step("a")
        bench.step("b")
    bench.handle(Received("a", Leave("enough")))
    assert not bench.messages(Shifted)
    bench.step("b")
    assert bench.machine.state.clock == 3


def test_rule_1_a_jump_moves_the_clock_at_once(shard_bench: Any) -> None:
    """Rule 1: t = max(t, K-th largest s_m), in one go; each due fragment is queued once."""
    bench = shard_bench("a", "b", fragments=4, period=4, overlap=1, quorum=2)
    bench.handle(Received("a", StepReport(99, 10, 1.0)), 1.0)
    assert not bench.orders(ClockAdvanced)
    bench.handle(Received("b", StepReport(90, 10, 1.0)), 2.0)
    assert [order.clock for order in bench.orders(ClockAdvanced)] == [90]
    assert bench.messages(Progress) == [Progress(90, 20)]
    state = bench.machine.state
    assert [round.tick for round in state.rounds.values()] == [87]
    assert state.queue == {0: 88, 1: 89, 2: 90}
    assert (state.previous_tick_at, state.ticked_at) == (0.0, 2.0)


@pytest.mark.parametrize("report", [StepReport(2**53, 10, 1.0), StepReport(1, 2**53, 1.0)])
def test_rule_1_an_impossible_report_removes_the_learner(
    shard_bench: Any, report: StepReport
) -> None:
    """Rule 1: a number alone moves neither the clock nor the budget."""
    bench = shard_bench("a", "b")
    bench.handle(Received("a", report))
    (evicted,) = bench.orders(Evict)
    assert "it reported" in evicted.reason
    assert bench.machine.state.clock == 0
    assert bench.machine.state.tokens == 0


def test_rule_1_an_impossible_greeting_is_refused(shard_bench: Any) -> None:
    """Rule 1: this also holds for the first message."""
    bench = shard_bench("a", "b")
    bench.greet("c", step=5, run_step=2**50)
    assert bench.orders(Reject)
    bench.greet("b", step=2**50)
    assert bench.orders(Reject)


def test_rule_10_versions_that_were_never_issued_are_ignored(shard_bench: Any) -> None:
    """Rule 10: of another shard's fragments, or so large that no next one fits."""
    bench = shard_bench("a", fragments=4, period=4, shards=2)
    held = (Holding(0, Version(1, 0)), Holding(1, Version(1, 0)), Holding(2, Version(1, 2**50)))
    bench.greet("b", held=held)
    member = bench.machine.state.members["b"]
    assert member.held == {0: Version(1, 0)}
    for holding in held[1:]:
        bench.handle(Received("b", holding))
    assert member.held == {0: Version(1, 0)}


def test_rule_15_an_observer_is_not_counted(shard_bench: Any) -> None:
    """Rule 15: it is not a member, and opens or closes no round."""
    bench = shard_bench("a")
    hello = Hello("eye", 0, "n", "observer", 0, 0, None, ())
    bench.handle(Connected(hello.learner, hello, 99))
    assert bench.orders(Accept)
    assert "eye" not in bench.machine.state.members
    assert "eye" in bench.machine.state.observers
    bench.handle(Lost("eye"))
    assert not bench.machine.state.observers


def test_a_learner_that_was_away_continues_its_run_steps(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", quorum=2)
    bench.handle(Lost("a"))
    bench.handle(Tick(), RECONNECT_SECONDS)
    bench.step("b")
    bench.greet("a", step=5, run_step=5)
    assert bench.messages(Welcome) == [Welcome(0, 1, 0, 5, 5, news=24)]
    assert bench.machine.state.clock == 1, "b is the second largest"


@pytest.mark.parametrize(("wait", "clock"), [("at_overlap", 7), ("never", 0)])
def test_rule_1_waiting_learners_have_the_same_run_step_at_all_shards(
    shard_bench: Any, wait: str, clock: int
) -> None:
    """No learner moves the clock further than another one is."""
    bench = shard_bench("a", "b", quorum=2, wait=wait)
    bench.handle(Received("a", Ahead(2**60)))
    assert bench.machine.state.clock == 0, "b is the second largest"
    bench.handle(Received("b", Ahead(7)))
    assert bench.machine.state.clock == clock


def test_a_returning_learner_may_take_part_before_its_next_step(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=1, quorum=2)
    bench.handle(Lost("a"))
    bench.handle(Tick(), RECONNECT_SECONDS)
    bench.step("b")
    bench.greet("a", step=1, run_step=1)
    assert {order.peer for order in bench.orders(Send) if isinstance(order.message, Pull)} == {
        "a",
        "b",
    }


def test_a_first_report_without_a_duration_is_not_a_duration_of_zero(shard_bench: Any) -> None:
    bench = shard_bench("a", "b")
    bench.step("a", seconds=2.0)
    bench.step("b", seconds=0.0)
    assert bench.machine.state.step_seconds == 2.0


def test_reports_that_arrive_together_equal_single_reports(shard_bench: Any) -> None:
    reports = [("a", 1), ("b", 1), ("a", 2), ("c", 1), ("gone", 7)]
    together, apart = (
        shard_bench("a", "b", "c", fragments=2, period=2, quorum=2) for _ in range(2)
    )
    received = [(name, StepReport(step, 8 * step, 0.5)) for name, step in reports]
    together.handle(Reported(tuple(received)), 1.0)
    for learner, report in received:
        apart.handle(Received(learner, report), 1.0)

    assert together.machine.state.clock == apart.machine.state.clock == 1
    assert together.machine.state.tokens == apart.machine.state.tokens == 8 * (2 + 1 + 1)
    members = [
        [replace(member, under_way=set()) for member in bench.machine.state.members.values()]
        for bench in (together, apart)
    ]
    assert members[0] == members[1]
    opened_at_once = set(apart.machine.state.fragments[1].asks)
    assert opened_at_once <= set(together.machine.state.fragments[1].asks) == {"a", "b", "c"}


def test_a_learner_that_became_slower_and_left_leaves_no_step_time_behind(shard_bench: Any) -> None:
    """ξ_step is that of the fastest live learner, whatever a departed one reported."""
    bench = shard_bench("a", "b", fragments=2, period=50, quorum=2)
    bench.step("a", 1.0, seconds=1.2)
    bench.step("a", 2.0, seconds=1.3)
    assert bench.machine.state.step_seconds == 1.2, "recomputed at the next tick"
    bench.handle(Received("a", Leave("done")), 3.0)
    assert bench.machine.state.step_seconds == 0.0, "no remaining learner has reported one"


def test_a_round_names_the_learner_that_completed_its_quorum(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", "c", fragments=1, period=1, quorum=2)
    for name in ("a", "b", "c"):
        bench.step(name)
    round = bench.machine.state.rounds[0]
    first, second = list(bench.machine.state.fragments[0].asks)[:2]
    assert round.quorum_learner == second
    assert {first, second} < {"a", "b", "c"}
