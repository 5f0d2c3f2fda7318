"""Late contributions, and how much a slow link is asked for (rule 4)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.effects import Drop, Expect, Fold, Merge, RoundFinished, Send
from decoupled_diloco.protocol.events import Heard, Lost, Received, Tick
from decoupled_diloco.protocol.messages import Draining, EndOrdered, Outcome, Pull
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.versions import Holding

DELIVERY_SECONDS = 2.0
"""The delivery window of one-fragment rounds: τ = 2 steps of a second."""


def tick_at(bench: Any, at: float) -> list[Any]:
    """A tick, by when everybody has been heard."""
    bench.told(Heard(tuple(bench.machine.state.members)), at)
    return list(bench.told(Tick()))


def merge_without(bench: Any, *fast: str, fragment: int = 0) -> None:
    """The next round of a fragment is merged with the fast ones alone."""
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
    """Of a and b, b's contribution to 1.1 is under way while so many versions are merged."""
    bench = shard_bench("a", "b", **{"fragments": 1, "period": 2, **options})
    for _ in range(versions):
        merge_without(bench, "a")
    return bench


@pytest.mark.parametrize("versions", [1, 2, 5])
def test_rule_4_a_late_body_goes_into_the_fragments_next_round(
    shard_bench: Any, versions: int
) -> None:
    """Rule 4: with the weight of its snapshot; at last it is told into which version."""
    bench = behind_by(shard_bench, versions)
    name = bench.ask("b")
    bench.body("b", steps=2, tokens=20)
    (fold,) = bench.orders(Fold)
    assert (fold.ask, fold.steps, fold.tokens, fold.discount) == (name, 2.0, 20.0, 1.0)
    assert fold.why == f"late by {versions} versions"
    assert not bench.messages(Outcome), "it is not known yet"
    merge_without(bench, "a")
    told = [o.message for o in bench.orders(Send) if isinstance(o.message, Outcome)]
    assert [(m.verdict, m.version) for m in told if m.ask == name] == [
        ("accepted", Version(1, versions + 1))
    ]
    (finished,) = bench.orders(RoundFinished)
    ages = {part.ask: part.age for part in finished.participants if part.state == "folded"}
    assert ages.pop(name) == versions
    assert list(ages.values()) == [0]


def test_rule_4_what_comes_while_a_round_merges_is_late_by_one(shard_bench: Any) -> None:
    """Rule 4: the worker has begun; it is folded behind it, into the next."""
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


def test_rule_4_late_drop_refuses_what_is_late(shard_bench: Any) -> None:
    """Rule 4: late = "drop": what is in time is not touched by it."""
    bench = behind_by(shard_bench, 1, late="drop")
    bench.body("b")
    assert bench.orders(Drop)
    assert not bench.orders(Fold)
    (outcome,) = bench.messages(Outcome)
    assert (outcome.verdict, outcome.reason) == ("refused", "late by 1 versions")


def test_rule_4_late_drop_takes_what_is_in_time(shard_bench: Any) -> None:
    bench = behind_by(shard_bench, 0, late="drop")
    for learner in "abab":
        bench.step(learner)
    bench.body("b")
    assert bench.orders(Fold)


@pytest.mark.parametrize(("versions", "taken"), [(2, True), (3, False)])
def test_rule_4_what_is_older_than_late_rounds_max_is_refused(
    shard_bench: Any, versions: int, taken: bool
) -> None:
    """Rule 4: older than so many versions, not as old."""
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


def test_rule_6_only_what_was_asked_for_before_the_merge_may_have_an_older_base(
    shard_bench: Any,
) -> None:
    """Rule 6: the base is that of the pull, however late the answer."""
    bench = behind_by(shard_bench, 1)
    bench.body("b", base=Version(1, 1))
    (outcome,) = bench.messages(Outcome)
    assert (outcome.verdict, outcome.reason) == ("behind", "its base 1.1 is not 1.0")


def test_rule_4_who_is_under_way_is_asked_for_the_next_version_when_that_is_here(
    shard_bench: Any,
) -> None:
    """Rule 4: one under way for each fragment; in arrears with the next, and not forgotten."""
    bench = behind_by(shard_bench, 1)
    for learner in "abab":
        bench.step(learner)
    member = bench.machine.state.members["b"]
    assert bench.machine.state.fragments[0].asks["b"].base == Version(1, 0)
    assert member.arrears == {0}
    bench.body("b")
    (pull,) = bench.messages(Pull)
    assert (pull.base, member.arrears) == (Version(1, 1), set())
    bench.body("b")
    assert [fold.why for fold in bench.orders(Fold)] == ["delivered in time"]


def test_rule_4_what_is_late_counts_for_the_next_quorum(shard_bench: Any) -> None:
    """Rule 4: it waits for nothing but K learners of which it has something."""
    bench = shard_bench("a", "b", "c", fragments=1, period=2, quorum=2)
    merge_without(bench, "a", "b")
    bench.body("c")
    for learner in "abcabc":
        bench.step(learner)
    bench.body("a")
    tick_at(bench, bench.machine.state.rounds[0].deliver_until)
    assert bench.orders(Merge)


def slow(shard_bench: Any, fragments: int = 6, **options: Any) -> Any:
    """Two slots; every fragment had a round, and b has delivered nothing (nor been asked for 1)."""
    values = {"fragments": fragments, "period": fragments, "overlap": 2, **options}
    bench = shard_bench("a", "b", **values)
    for fragment in [*range(1, fragments), 0]:
        merge_without(bench, "a", fragment=fragment)
    return bench


def held_by(bench: Any, learner: str) -> tuple[Holding, ...]:
    held = bench.machine.state.members[learner].held
    return tuple(Holding(fragment, version) for fragment, version in held.items())


def asked_of(bench: Any, learner: str) -> list[int]:
    """The fragments that the last event has led to ask a learner for."""
    return [order.fragment for order in bench.orders(Expect) if order.learner == learner]


def test_rule_4_at_most_as_many_are_under_way_as_a_shard_has_slots(shard_bench: Any) -> None:
    """Rule 4: max(1, ⌈τ·P/H⌉); the rest is in arrears."""
    bench = slow(shard_bench)
    member = bench.machine.state.members["b"]
    assert member.under_way == {2, 3}
    assert member.arrears == {4, 5, 0}


def test_rule_4_who_is_in_arrears_sends_one_body_at_a_time(shard_bench: Any) -> None:
    """Rule 4: two at once would come half as fast, each."""
    bench = slow(shard_bench)
    bench.body("b", 2)
    assert asked_of(bench, "b") == [], "another one is under way"
    bench.body("b", 3)
    assert len(asked_of(bench, "b")) == 1
    for _ in range(2):
        bench.step("a")
        bench.step("b")
        assert asked_of(bench, "b") == []
    assert len(bench.machine.state.members["b"].under_way) == 1


def test_rule_4_who_was_in_arrears_sends_one_at_a_time_until_it_has_caught_up(
    shard_bench: Any,
) -> None:
    """Rule 4: its last arrears are under way: a second body would slow them down."""
    bench = slow(shard_bench, 4)
    bench.body("b", 2)
    bench.body("b", 3)
    member = bench.machine.state.members["b"]
    assert (member.under_way, member.arrears) == ({0}, set())
    bench.step("a")
    bench.step("b")
    assert (member.under_way, member.arrears) == ({0}, {1}), "it is in arrears anew"
    bench.body("b", 0)
    assert member.under_way == {1}
    bench.body("b", 1)
    bench.body("a", 1)
    bench.merged(1)
    for _ in range(2):
        bench.step("a")
        bench.step("b")
    assert member.under_way == {2, 3}, "it has caught up"


def test_rule_4_who_is_late_with_one_fragment_is_asked_for_no_second_one(
    shard_bench: Any,
) -> None:
    """Rule 4: it has room for another body, and arrears: it sends one at a time."""
    bench = shard_bench("a", "b", fragments=2, period=2, overlap=2)
    for fragment in (1, 0, 1):
        merge_without(bench, "a", fragment=fragment)
    bench.decline("b", fragment=0)
    merge_without(bench, "a", fragment=0)
    bench.decline("b", fragment=0)
    member = bench.machine.state.members["b"]
    assert (member.under_way, member.arrears) == ({1}, set())
    merge_without(bench, "a", fragment=1)
    assert (member.under_way, member.arrears) == ({1}, {1})
    merge_without(bench, "a", fragment=0)
    assert (member.under_way, member.arrears) == ({1}, {0, 1})


@pytest.mark.parametrize("moved_on", [True, False])
def test_rule_4_who_takes_a_newer_version_while_it_is_asked_keeps_its_turn(
    shard_bench: Any, moved_on: bool
) -> None:
    """The fragment that has not heard it for longest would else hear it last."""
    bench = slow(shard_bench, 4)
    bench.body("b", 2)
    bench.body("b", 3)
    member, entry = bench.machine.state.members["b"], bench.machine.state.fragments[0]
    assert (member.under_way, member.arrears) == ({0}, set())
    asked = entry.asks["b"].base
    if moved_on:
        bench.told(Received("b", Holding(0, Version(1, asked.counter - 1))))
    bench.decline("b", "behind", fragment=0)
    assert (0 in asked_of(bench, "b")) is moved_on


def test_rule_17_who_goes_is_asked_however_busy_its_link_is(shard_bench: Any) -> None:
    """It has no time to send one body after the other at its shard's pleasure."""
    bench = shard_bench("a", "b", fragments=4, period=4, overlap=1)
    for fragment in (1, 2):
        merge_without(bench, "a", fragment=fragment)
    assert bench.machine.state.members["b"].under_way == {2}
    bench.told(Received("b", Draining((0,), "told to go")))
    assert asked_of(bench, "b") == [0]


def test_rule_4_who_connects_anew_is_asked_over_the_new_connection(shard_bench: Any) -> None:
    """Its old one is dead, though the shard has not noticed: a pull over that is lost for good."""
    bench = slow(shard_bench)
    member = bench.machine.state.members["b"]
    bench.greet("b", step=member.step, run_step=member.run_step, held=held_by(bench, "b"))
    sent = [type(order).__name__ for order in bench.effects]
    assert asked_of(bench, "b"), "what it was asked before is void, and it is in arrears"
    assert sent.index("Accept") < sent.index("Expect")


def test_rule_4_nobody_waits_for_a_slow_link_because_a_body_came_wrong(shard_bench: Any) -> None:
    """K = 1: with its delivery window over a round that has nothing asks again."""
    bench = shard_bench("a", "b", fragments=1, period=4)
    merge_without(bench, "a")
    assert "b" in bench.machine.state.fragments[0].asks
    while 0 not in bench.machine.state.rounds:
        bench.step("a")
    bench.spoil("a", "its digest is wrong")
    assert bench.asked() == []
    tick_at(bench, bench.now + DELIVERY_SECONDS)
    assert "a" in bench.asked()
    bench.body("a")
    assert bench.orders(Merge)


def test_rule_4_a_free_link_is_asked_outside_of_any_round(shard_bench: Any) -> None:
    """Rule 4: at once: a slow link is always busy."""
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


def test_rule_4_what_is_asked_outside_of_a_round_is_waited_for_by_none(shard_bench: Any) -> None:
    """Rule 4: the fragment's next round takes what is there, and merges without the rest."""
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
    """Delivers these bodies of b, and then whatever it is asked for; in which order that is."""
    order = list(first)
    for fragment in order:
        bench.body("b", fragment, at=bench.now + 0.1)
        order += asked_of(bench, "b")
    return order[len(first) :]


def test_rule_4_what_has_not_heard_a_learner_for_longest_is_asked_first(
    shard_bench: Any,
) -> None:
    """Rule 4: so every fragment hears everybody equally often; never counts as longest."""
    bench = slow(shard_bench)
    assert served(bench, 2, 3) == [0, 4, 5]
    for fragment in [1, 2, 3, 4, 5, 0] * 2:
        merge_without(bench, "a", fragment=fragment)
    assert bench.machine.state.members["b"].under_way == {1, 2}
    assert served(bench, 1, 2) == [3, 0, 4, 5, 1, 2], "as they were heard"


def test_rule_4_a_round_that_lacks_its_quorum_comes_first(shard_bench: Any) -> None:
    """Rule 4: before what has not heard the learner for longer."""
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
    assert (member.under_way, member.arrears) == ({1, 2}, {0, 3, 4, 5})
    bench.body("b", 1)
    bench.body("b", 2)
    assert asked_of(bench, "b") == [3], "the window of 0 is not over: nobody waits for it yet"


def test_rule_4_a_pull_of_arrears_tells_what_comes_next(shard_bench: Any) -> None:
    """Rule 4: in the order of their turns, as many as may be snapshotted in vain."""
    bench = slow(shard_bench, 8)
    bench.body("b", 2)
    order = [3, 0, 4, 5, 6, 7]
    for delivered, asked in pairwise(order):
        bench.body("b", delivered)
        (pull,) = bench.messages(Pull)
        rest = order[order.index(asked) + 1 :]
        assert (pull.fragment, pull.coming) == (asked, tuple(rest[:2])), "two slots: two"


def test_rule_4_who_has_no_arrears_is_told_of_nothing_to_come(shard_bench: Any) -> None:
    bench = shard_bench("a", fragments=4, period=4)
    bench.step("a")
    assert [pull.coming for pull in bench.messages(Pull)] == [()]


@pytest.mark.parametrize("how", ["decline", "spoil"])
def test_rule_4_a_link_is_free_as_well_when_what_was_asked_for_will_not_come(
    shard_bench: Any, how: str
) -> None:
    bench = slow(shard_bench)
    bench.body("b", 2)
    getattr(bench, how)("b", "truncated", 3)
    assert asked_of(bench, "b") == [0]


def test_rule_4_what_is_being_merged_is_not_asked_for_against_the_version_before(
    shard_bench: Any,
) -> None:
    """Rule 4: it would be late before it is asked for."""
    bench = shard_bench("a", "b", fragments=4, period=4, overlap=2)
    for fragment in (1, 2, 3):
        merge_without(bench, "a", fragment=fragment)
    bench.step("a")
    bench.step("b")
    bench.body("a", 0)
    assert [order.fragment for order in bench.orders(Merge)] == [0], "b was not asked for it"
    assert bench.machine.state.members["b"].arrears == {0}
    bench.body("b", 2)
    bench.body("b", 3)
    assert asked_of(bench, "b") == []


def test_rule_4_who_is_away_is_asked_for_nothing(shard_bench: Any) -> None:
    """Its connection is broken: the pull would reach nobody, and the body came by another way."""
    bench = slow(shard_bench)
    bench.body("b", 2)
    bench.told(Lost("b"))
    bench.body("b", 3)
    assert asked_of(bench, "b") == []


def test_rule_4_a_round_is_not_given_up_while_who_is_in_arrears_may_deliver(
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
    assert bench.machine.state.members["b"].arrears == {2}
    bench.body("a", 2)
    tick_at(bench, 2.0)
    assert not bench.orders(RoundFinished)
    bench.body("b", 1)
    assert asked_of(bench, "b") == [2]
    bench.body("b", 2)
    assert [order.fragment for order in bench.orders(Merge)] == [2]


def test_rule_12_arrears_are_for_while_learners_train(shard_bench: Any) -> None:
    """Rule 12: the closing rounds ask everybody for everything: an asking before has no use."""
    bench = slow(shard_bench)
    bench.told(Received(COORDINATOR, EndOrdered()))
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
