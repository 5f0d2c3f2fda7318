"""Late contributions, and the requests to a slow link (rule 4)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from decoupled_diloco.protocol import Options, Version
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Draining,
    Drop,
    EndOrdered,
    Expect,
    Fold,
    Heard,
    Holding,
    Lost,
    Merge,
    Outcome,
    Pull,
    Received,
    RoundFinished,
    Send,
    Tick,
)
from decoupled_diloco.protocol.participation import participation

DELIVERY_SECONDS = 2.0
"""The delivery window of one-fragment rounds: τ = 2 steps of a second."""


def tick_at(bench: Any, at: float) -> list[Any]:
    """Send a tick, after bytes from all learners."""
    bench.handle(Heard(tuple(bench.machine.state.members)), at)
    return list(bench.handle(Tick()))


def merge_without(bench: Any, *fast: str, fragment: int = 0) -> None:
    """Merge a fragment's next round with the fast learners alone."""
    while fragment not in bench.machine.state.rounds:
        for learner in bench.steps:
            bench.step(learner)
    merges = []
    for learner in fast:
        bench.body(learner, fragment)
        merges += bench.orders(Merge)
    if not merges:
        tick_at(bench, bench.machine.state.rounds[fragment].deliver_until)
        merges += bench.orders(Merge)
    assert [order.fragment for order in merges] == [fragment]
    bench.merged(fragment)


def behind_by(shard_bench: Any, versions: int, **options: Any) -> Any:
    """Of a and b, b's contribution to 1.1 is in progress while these versions are merged."""
    bench = shard_bench("a", "b", **{"fragments": 1, "period": 2, **options})
    for _ in range(versions):
        merge_without(bench, "a")
    return bench


@pytest.mark.parametrize("versions", [1, 2, 5])
def test_rule_4_a_late_payload_goes_into_the_fragments_next_round(
    shard_bench: Any, versions: int
) -> None:
    """Rule 4: with the weight of its snapshot; the outcome names the version."""
    bench = behind_by(shard_bench, versions)
    name = bench.ask("b")
    bench.body("b", steps=2, tokens=20)
    (fold,) = bench.orders(Fold)
    assert (fold.ask, fold.steps, fold.tokens, fold.discount) == (name, 2.0, 20.0, 1.0)
    assert fold.why == f"late by {versions} versions"
    assert not bench.messages(Outcome), "it is not known yet"
    merge_without(bench, "a")
    outcomes = [o.message for o in bench.orders(Send) if isinstance(o.message, Outcome)]
    assert [(m.verdict, m.version) for m in outcomes if m.ask == name] == [
        ("accepted", Version(1, versions + 1))
    ]
    (finished,) = bench.orders(RoundFinished)
    ages = {part.ask: part.age for part in finished.participants if part.state == "folded"}
    assert ages.pop(name) == versions
    assert list(ages.values()) == [0]


def test_rule_4_an_arrival_during_a_merge_is_late_by_one(shard_bench: Any) -> None:
    """Rule 4: the worker has started, so it is folded into the next round."""
    bench = shard_bench("a", "b", fragments=1, period=2)
    for learner in "abab":
        bench.step(learner)
    bench.body("a")
    tick_at(bench, DELIVERY_SECONDS)
    assert bench.orders(Merge)
    name = bench.ask("b")
    bench.body("b")
    assert [fold.why for fold in bench.orders(Fold)] == ["late by 1 versions"]
    bench.merged()
    (finished,) = bench.orders(RoundFinished)
    assert [part.learner for part in finished.participants] == ["a"]
    assert [ask.name for ask in bench.machine.state.fragments[0].folded] == [name]


def test_rule_4_late_drop_refuses_late_contributions(shard_bench: Any) -> None:
    """Rule 4: late = "drop": what is in time is not touched by it."""
    bench = behind_by(shard_bench, 1, late="drop")
    bench.body("b")
    assert bench.orders(Drop)
    assert not bench.orders(Fold)
    (outcome,) = bench.messages(Outcome)
    assert (outcome.verdict, outcome.reason) == ("refused", "late by 1 versions")


def test_rule_4_late_drop_accepts_timely_contributions(shard_bench: Any) -> None:
    bench = behind_by(shard_bench, 0, late="drop")
    for learner in "abab":
        bench.step(learner)
    bench.body("b")
    assert bench.orders(Fold)


@pytest.mark.parametrize(("versions", "taken"), [(2, True), (3, False)])
def test_rule_4_a_contribution_older_than_late_rounds_max_is_refused(
    shard_bench: Any, versions: int, taken: bool
) -> None:
    """Rule 4: only if it is older; the limit itself is allowed."""
    bench = behind_by(shard_bench, versions, late_rounds_max=2)
    bench.body("b")
    assert bool(bench.orders(Fold)) is taken
    assert bool(bench.orders(Drop)) is not taken
    reasons = [message.reason for message in bench.messages(Outcome)]
    assert reasons == ([] if taken else ["late by 3 versions, more than 2"])


@pytest.mark.parametrize(("versions", "discount"), [(0, 1.0), (1, 0.5), (3, 0.125)])
def test_rule_4_late_discount_counts_once_for_each_version(
    shard_bench: Any, versions: int, discount: float
) -> None:
    bench = behind_by(shard_bench, versions, late_discount=0.5)
    for learner in "abab":
        bench.step(learner)
    bench.body("b")
    assert [fold.discount for fold in bench.orders(Fold)] == [discount]


def test_rule_6_only_requests_from_before_the_merge_may_have_an_older_base(
    shard_bench: Any,
) -> None:
    """Rule 6: the base is that of the request, however late the answer."""
    bench = behind_by(shard_bench, 1)
    bench.body("b", base=Version(1, 1))
    (outcome,) = bench.messages(Outcome)
    assert (outcome.verdict, outcome.reason) == ("behind", "its base 1.1 is not 1.0")


def test_rule_4_a_late_learner_is_asked_for_the_next_version_after_its_delivery(
    shard_bench: Any,
) -> None:
    """Rule 4: one in progress per fragment; the next one enters the backlog."""
    bench = behind_by(shard_bench, 1)
    for learner in "abab":
        bench.step(learner)
    member = bench.machine.state.members["b"]
    assert bench.machine.state.fragments[0].asks["b"].base == Version(1, 0)
    assert member.backlog == {0}
    bench.body("b")
    (pull,) = bench.messages(Pull)
    assert (pull.base, member.backlog) == (Version(1, 1), set())
    bench.body("b")
    assert [fold.why for fold in bench.orders(Fold)] == ["delivered in time"]


def test_rule_4_late_contributions_count_for_the_next_quorum(shard_bench: Any) -> None:
    """Rule 4: it waits only for contributions of K learners."""
    bench = shard_bench("a", "b", "c", fragments=1, period=2, quorum=2)
    merge_without(bench, "a", "b")
    bench.body("c")
    for learner in "abcabc":
        bench.step(learner)
    bench.body("a")
    tick_at(bench, bench.machine.state.rounds[0].deliver_until)
    assert bench.orders(Merge)


def slow(shard_bench: Any, fragments: int = 6, **options: Any) -> Any:
    """Two slots; every fragment had a round, and b has delivered nothing."""
    values = {"fragments": fragments, "period": fragments, "overlap": 2, **options}
    bench = shard_bench("a", "b", **values)
    for fragment in [*range(1, fragments), 0]:
        merge_without(bench, "a", fragment=fragment)
    return bench


def held_by(bench: Any, learner: str) -> tuple[Holding, ...]:
    held = bench.machine.state.members[learner].held
    return tuple(Holding(fragment, version) for fragment, version in held.items())


def requests_to(bench: Any, learner: str) -> list[int]:
    """Return the fragments that the last event requested from a learner."""
    return [order.fragment for order in bench.orders(Expect) if order.learner == learner]


def test_rule_4_requests_in_progress_are_limited_by_the_slots(shard_bench: Any) -> None:
    """Rule 4: max(1, ⌈τ·P/H⌉); the rest is in the backlog."""
    bench = slow(shard_bench)
    member = bench.machine.state.members["b"]
    assert member.under_way == {2, 3}
    assert member.backlog == {4, 5, 0}


def test_rule_4_a_learner_with_a_backlog_sends_one_payload_at_a_time(shard_bench: Any) -> None:
    """Rule 4: two at once would each arrive half as fast."""
    bench = slow(shard_bench)
    bench.body("b", 2)
    assert requests_to(bench, "b") == [], "another one is in progress"
    bench.body("b", 3)
    assert len(requests_to(bench, "b")) == 1
    for _ in range(2):
        bench.step("a")
        bench.step("b")
        assert requests_to(bench, "b") == []
    assert len(bench.machine.state.members["b"].under_way) == 1


def test_rule_4_a_learner_sends_one_payload_at_a_time_until_it_has_caught_up(
    shard_bench: Any,
) -> None:
    """Rule 4: the end of its backlog is in progress: a second payload would slow it down."""
    bench = slow(shard_bench, 4)
    bench.body("b", 2)
    bench.body("b", 3)
    member = bench.machine.state.members["b"]
    assert (member.under_way, member.backlog) == ({0}, set())
    bench.step("a")
    bench.step("b")
    assert (member.under_way, member.backlog) == ({0}, {1}), "it has a backlog again"
    bench.body("b", 0)
    assert member.under_way == {1}
    bench.body("b", 1)
    bench.body("a", 1)
    bench.merged(1)
    for _ in range(2):
        bench.step("a")
        bench.step("b")
    assert member.under_way == {2, 3}, "it has caught up"


def test_rule_4_a_late_fragment_blocks_other_requests(
    shard_bench: Any,
) -> None:
    """Rule 4: it has a free slot and a backlog, so it sends one at a time."""
    bench = shard_bench("a", "b", fragments=2, period=2, overlap=2)
    for fragment in (1, 0, 1):
        merge_without(bench, "a", fragment=fragment)
    bench.decline("b", fragment=0)
    merge_without(bench, "a", fragment=0)
    bench.decline("b", fragment=0)
    member = bench.machine.state.members["b"]
    assert (member.under_way, member.backlog) == ({1}, set())
    merge_without(bench, "a", fragment=1)
    assert (member.under_way, member.backlog) == ({1}, {1})
    merge_without(bench, "a", fragment=0)
    assert (member.under_way, member.backlog) == ({1}, {0, 1})


@pytest.mark.parametrize("moved_on", [True, False])
def test_rule_4_a_newer_version_during_a_request_keeps_the_turn(
    shard_bench: Any, moved_on: bool
) -> None:
    """Otherwise, it would have no turn before its next round."""
    bench = slow(shard_bench, 4)
    bench.body("b", 2)
    bench.body("b", 3)
    member, entry = bench.machine.state.members["b"], bench.machine.state.fragments[0]
    assert (member.under_way, member.backlog) == ({0}, set())
    asked = entry.asks["b"].base
    if moved_on:
        bench.handle(Received("b", Holding(0, Version(1, asked.counter - 1))))
    bench.decline("b", "behind", fragment=0)
    assert (0 in member.backlog) is moved_on


def test_rule_17_a_leaving_learner_is_asked_however_busy_its_link_is(shard_bench: Any) -> None:
    """It has no time to send one payload after the other."""
    bench = shard_bench("a", "b", fragments=4, period=4, overlap=1)
    for fragment in (1, 2):
        merge_without(bench, "a", fragment=fragment)
    assert bench.machine.state.members["b"].under_way == {2}
    bench.handle(Received("b", Draining((0,), "asked to stop")))
    assert requests_to(bench, "b") == [0]


def test_rule_4_a_reconnected_learner_is_asked_over_the_new_connection(shard_bench: Any) -> None:
    """The old connection is dead, though the shard has not noticed: requests over it are lost."""
    bench = slow(shard_bench)
    member = bench.machine.state.members["b"]
    bench.greet("b", step=member.step, run_step=member.run_step, held=held_by(bench, "b"))
    sent = [type(order).__name__ for order in bench.effects]
    assert requests_to(bench, "b"), "its earlier requests are void, and it has a backlog"
    assert sent.index("Accept") < sent.index("Expect")


def test_rule_4_a_corrupted_payload_does_not_make_a_round_wait_for_a_slow_link(
    shard_bench: Any,
) -> None:
    """K = 1: after its delivery window, a round without contributions asks again."""
    bench = shard_bench("a", "b", fragments=1, period=4)
    merge_without(bench, "a")
    assert "b" in bench.machine.state.fragments[0].asks
    while 0 not in bench.machine.state.rounds:
        bench.step("a")
    bench.corrupt("a", "its digest is wrong")
    assert bench.requested() == []
    tick_at(bench, bench.now + DELIVERY_SECONDS)
    assert "a" in bench.requested()
    bench.body("a")
    assert bench.orders(Merge)


def test_rule_4_a_free_link_gets_a_request_outside_of_any_round(shard_bench: Any) -> None:
    """Rule 4: at once, so that a slow link is always busy."""
    bench = slow(shard_bench)
    bench.body("b", 2)
    assert not bench.machine.state.rounds
    bench.holds("b")
    bench.body("b", 3)
    (expect,) = bench.orders(Expect)
    (pull,) = bench.messages(Pull)
    assert (expect.learner, expect.round) == ("b", 0)
    assert pull.base == Version(1, 1), "against the newest version"
    assert pull.tick == bench.machine.state.clock


def test_rule_4_no_round_waits_for_a_request_outside_of_rounds(shard_bench: Any) -> None:
    """Rule 4: the fragment's next round merges what has arrived, without the rest."""
    bench = slow(shard_bench)
    bench.body("b", 2)
    bench.body("b", 3)
    (fragment,) = bench.machine.state.members["b"].under_way
    while fragment not in bench.machine.state.rounds:
        for other in list(bench.machine.state.rounds):
            bench.body("a", other)
            bench.merged(other)
        bench.step("a")
    bench.body("a", fragment)
    assert [order.fragment for order in bench.orders(Merge)] == [fragment]


def served(bench: Any, *first: int) -> list[int]:
    """Deliver these payloads of b and then all that it is asked for; return the order."""
    order = list(first)
    for fragment in order:
        bench.body("b", fragment, at=bench.now + 0.1)
        order += requests_to(bench, "b")
    return order[len(first) :]


def test_rule_4_the_fragment_that_is_trained_longest_comes_first(shard_bench: Any) -> None:
    """Rule 4: 4 and 5 were overwritten a moment ago; 1 and 2 are due soon, and will be."""
    bench = slow(shard_bench)
    assert served(bench, 2, 3) == [0, 1, 2, 4, 5]


def test_rule_4_all_fragments_get_equally_many_contributions(shard_bench: Any) -> None:
    """Rule 4: a fragment that arrived twice more than another one waits for it."""
    bench = slow(shard_bench)
    bench.machine.state.members["b"].uploads[0] += 2
    assert served(bench, 2, 3) == [1, 2, 4, 5, 0]


def test_rule_4_a_discarded_contribution_also_takes_its_turn(shard_bench: Any) -> None:
    """Otherwise the learner sends the same fragment again and again until it is due."""
    bench = slow(shard_bench, probation_periods=9)
    bench.machine.state.members["b"].is_fresh = True
    order = [2, 3]
    for fragment in order:
        bench.body("b", fragment, at=bench.now + 0.1)
        (outcome,) = bench.messages(Outcome)
        assert "on probation" in outcome.reason
        order += requests_to(bench, "b")
        assert len(order) < 20, f"it sends {order}"
    assert sorted(set(order[2:])) == [0, 1, 2, 4, 5]


def test_rule_4_a_shard_requests_in_advance_what_is_due_soon() -> None:
    due = {1: {4, 5}, 2: {4, 5, 6, 7}}
    for shards, fragments in due.items():
        options = Options(fragments=24, period=24, overlap=2, shards=shards)
        assert participation(options).due_soon(options, 3) == fragments
    waits = Options(fragments=24, period=24, overlap=2, wait="at_overlap")
    assert participation(waits).due_soon(waits, 3) == set(), "synchronous rounds need H steps"


def test_rule_4_a_round_that_lacks_its_quorum_comes_first(shard_bench: Any) -> None:
    """Rule 4: before fragments that have waited longer."""
    bench = shard_bench("a", "b", fragments=6, period=6, overlap=2, quorum=2)
    for _ in range(6):
        bench.step("a")
        bench.step("b")
    for fragment in (1, 2):
        bench.body("a", fragment)
    tick_at(bench, DELIVERY_SECONDS)
    tick_at(bench, 2 * DELIVERY_SECONDS)
    member, rounds = bench.machine.state.members["b"], bench.machine.state.rounds
    assert {p for p, round in rounds.items() if not round.delivery_over} == {0, 5}
    assert (member.under_way, member.backlog) == ({1, 2}, {0, 3, 4, 5})
    bench.body("b", 1)
    bench.body("b", 2)
    assert requests_to(bench, "b") == [3], "the window of 0 is not over: it is not urgent yet"


def test_rule_4_a_backlog_request_lists_the_next_fragments(shard_bench: Any) -> None:
    """Rule 4: in the order of their turns, at most as many as there are slots."""
    bench = slow(shard_bench, 8)
    bench.body("b", 2)
    order = [3, 0, 1, 2, 4, 5, 6, 7]
    for delivered, asked in pairwise(order):
        bench.body("b", delivered)
        (pull,) = bench.messages(Pull)
        rest = order[order.index(asked) + 1 :]
        assert (pull.fragment, pull.coming) == (asked, tuple(rest[:2])), "two slots: two"


def test_rule_4_without_a_backlog_a_request_lists_no_next_fragments(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=4, period=4)
    bench.step("a")
    assert [pull.coming for pull in bench.messages(Pull)] == [()]


@pytest.mark.parametrize("how", ["decline", "corrupt"])
def test_rule_4_a_failed_request_also_frees_the_link(shard_bench: Any, how: str) -> None:
    bench = slow(shard_bench)
    bench.body("b", 2)
    getattr(bench, how)("b", "truncated", 3)
    assert requests_to(bench, "b") == [0]


def test_rule_4_a_fragment_being_merged_is_not_requested_against_the_old_version(
    shard_bench: Any,
) -> None:
    """Rule 4: the contribution would be late before it is requested."""
    bench = shard_bench("a", "b", fragments=4, period=4, overlap=2)
    for fragment in (1, 2, 3):
        merge_without(bench, "a", fragment=fragment)
    bench.step("a")
    bench.step("b")
    bench.body("a", 0)
    assert [order.fragment for order in bench.orders(Merge)] == [0], "b was not asked for it"
    assert bench.machine.state.members["b"].backlog == {0}
    bench.body("b", 2)
    bench.body("b", 3)
    assert requests_to(bench, "b") == []


def test_rule_4_a_disconnected_learner_gets_no_request(shard_bench: Any) -> None:
    """Its control connection is broken, though its payload arrived by another one."""
    bench = slow(shard_bench)
    bench.body("b", 2)
    bench.handle(Lost("b"))
    bench.body("b", 3)
    assert requests_to(bench, "b") == []


def test_rule_4_a_round_is_not_abandoned_while_a_backlog_may_deliver(
    shard_bench: Any,
) -> None:
    """Rule 4: its link is busy with other fragments; it can still deliver this one."""
    bench = shard_bench("a", "b", fragments=4, period=4, overlap=1, quorum=2)
    for _ in range(2):
        for learner in "ab":
            bench.step(learner)
    bench.body("a", 1)
    tick_at(bench, 1.0)
    assert set(bench.machine.state.rounds) == {1, 2}
    assert bench.machine.state.members["b"].backlog == {2}
    bench.body("a", 2)
    tick_at(bench, 2.0)
    assert not bench.orders(RoundFinished)
    bench.body("b", 1)
    assert requests_to(bench, "b") == [2]
    bench.body("b", 2)
    assert [order.fragment for order in bench.orders(Merge)] == [2]


def test_rule_12_the_sweep_ignores_the_backlog(shard_bench: Any) -> None:
    """Rule 12: the closing rounds request everything from all learners."""
    bench = slow(shard_bench)
    bench.handle(Received(COORDINATOR, EndOrdered()))
    pulls = bench.messages(Pull)
    for fragment in (0, 1):
        for learner in "ab":
            bench.decline(learner, fragment=fragment)
            pulls += bench.messages(Pull)
    assert set(bench.machine.state.rounds) == {2, 3}
    for fragment in (2, 3):
        bench.body("b", fragment)
        pulls += bench.messages(Pull)
    assert len(pulls) > 4
    assert all(pull.final for pull in pulls)
