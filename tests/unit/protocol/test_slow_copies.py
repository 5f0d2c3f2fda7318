"""A learner with a slow downlink: its requests, and the order of its fetches."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.copies import RETRY_SECONDS
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Apply,
    Asking,
    BodyEncoded,
    Decline,
    Draining,
    Ending,
    EndOrdered,
    Expect,
    Failed,
    Fetch,
    Finished,
    Fold,
    Heard,
    Holding,
    Leave,
    Lost,
    Merge,
    Outcome,
    Paused,
    Pull,
    Received,
    Relabel,
    Send,
    SendBody,
    StepReport,
    Swept,
    Tick,
)
from decoupled_diloco.protocol.rounds import CLOSING_SECONDS, COPY_SECONDS
from unit.protocol.conftest import fetch_of, merge_of

V0, V1, V2 = (Version(1, counter) for counter in range(3))


def step_without_copies(bench: Any, learner: str) -> list[Any]:
    """It reports a step, and holds nothing new."""
    bench.steps[learner] += 1
    step = bench.steps[learner]
    return list(bench.handle(Received(learner, StepReport(step, 10 * step, 1.0))))


def holding(bench: Any, learner: str, version: Version, fragment: int = 0) -> list[Any]:
    return list(bench.handle(Received(learner, Holding(fragment, version))))


def pulls_of(bench: Any, learner: str) -> list[Version]:
    """Return the bases of a learner's requests in the last event."""
    orders = [order for order in bench.orders(Send) if order.peer == learner]
    return [order.message.base for order in orders if isinstance(order.message, Pull)]


def ahead(shard_bench: Any, versions: int, **options: Any) -> Any:
    """a alone has made these versions of one fragment, due every 4 s; b holds the first.

    b has contributed nothing yet: it declined every request.
    """
    values = {"fragments": 1, "period": 4, "overlap": 2, "grace_margin": 0.0, **options}
    bench = shard_bench("a", "b", **values)
    holding(bench, "b", V0)
    for _ in range(versions):
        while 0 not in bench.machine.state.rounds:
            bench.now += 1.0
            bench.step("a")
        bench.body("a", at=bench.now + 0.1)
        bench.handle(Tick(), bench.now + 2.0)
        bench.merged()
    return bench


def requested_in_the_next_round(bench: Any) -> list[Version]:
    """Both step until the fragment is due again; return the base of b's request."""
    found: list[Version] = []
    while not found and 0 not in bench.machine.state.rounds:
        bench.now += 1.0
        step_without_copies(bench, "b")
        found += pulls_of(bench, "b")
        bench.step("a")
        found += pulls_of(bench, "b")
    return found


@pytest.mark.parametrize("versions", [1, 3])
def test_rule_6_a_learner_with_an_older_version_contributes_from_it(
    shard_bench: Any, versions: int
) -> None:
    """It would hardly ever hold the newest one; its contribution counts as late."""
    bench = ahead(shard_bench, versions)
    assert requested_in_the_next_round(bench) == [V0]
    bench.body("b", steps=9, tokens=90)
    (fold,) = bench.orders(Fold)
    assert fold.why.startswith(f"late by {versions} versions")
    bench.body("a")
    assert bench.orders(Merge)


def test_rule_4_a_learner_is_asked_once_per_version(shard_bench: Any) -> None:
    """Its next contribution from that version contains the first, so it would be merged twice."""
    bench = ahead(shard_bench, 1)
    assert requested_in_the_next_round(bench) == [V0]
    bench.body("b")
    bench.body("a")
    bench.merged()
    bench.now += 3.0
    for _ in range(2):
        assert requested_in_the_next_round(bench) == []
        bench.body("a")
        bench.handle(Tick(), bench.now + 2.0)
        bench.merged()
        bench.now += 3.0
    holding(bench, "b", V2)
    assert requested_in_the_next_round(bench) == [V2]


def test_rule_4_no_round_waits_for_a_learner_without_a_base(shard_bench: Any) -> None:
    """K = 1: the round ends with the delivery window."""
    bench = ahead(shard_bench, 1)
    requested_in_the_next_round(bench)
    bench.body("b")
    bench.body("a")
    bench.merged()
    bench.now += 3.0
    requested_in_the_next_round(bench)
    assert "b" not in bench.machine.state.rounds[0].turned
    bench.body("a")
    assert bench.orders(Merge)


def test_rule_3_with_k_equal_m_a_learner_is_asked_once_it_holds_the_version(
    shard_bench: Any,
) -> None:
    """K = M waits for all learners, however slow their copies."""
    bench = shard_bench("a", "b", fragments=1, period=4, overlap=2, quorum=2)
    for _ in range(4):
        bench.now += 1.0
        bench.step("a")
        bench.step("b")
    bench.body("a")
    bench.body("b")
    bench.merged()
    for _ in range(4):
        bench.now += 1.0
        bench.step("a")
        step_without_copies(bench, "b")
    assert "b" not in bench.machine.state.rounds[0].turned
    bench.handle(Tick(), bench.now + 5.0)
    bench.body("a")
    assert not bench.orders(Merge)
    holding(bench, "b", V1)
    assert pulls_of(bench, "b") == [V1]
    bench.body("b")
    assert bench.orders(Merge)


def test_rule_3_a_learner_is_about_to_hold_a_copy_published_just_now(shard_bench: Any) -> None:
    """A fragment that was due while its round was open is requested at once, from all learners."""
    bench = shard_bench("a", "b", fragments=1, period=4, overlap=2, grace_margin=0.0)
    for _ in range(8):
        bench.now += 1.0
        bench.step("a")
        bench.step("b")
    bench.body("a")
    bench.body("b")
    bench.merged()
    assert sorted(bench.requested()) == ["a", "b"]


def test_rule_10_no_contribution_from_a_version_of_an_earlier_term(shard_bench: Any) -> None:
    """Its outcome is not known: it may be in the newest version."""
    bench = ahead(shard_bench, 1)
    holding(bench, "b", Version(0, 0))
    assert requested_in_the_next_round(bench) == []


def test_rule_4_a_backlog_without_a_base_blocks_nothing(shard_bench: Any) -> None:
    """A learner that waits for its copies sends as many payloads at once as any other."""
    bench = shard_bench("a", "b", fragments=3, period=3, overlap=2)
    bench.step("b")
    member = bench.machine.state.members["b"]
    assert member.under_way == {1}
    bench.machine.state.fragments[0].made["b"] = V0
    member.backlog.add(0)
    bench.step("b")
    assert member.under_way == {1, 2}


def test_rule_4_a_backlog_is_requested_once_a_newer_copy_is_held(shard_bench: Any) -> None:
    bench = ahead(shard_bench, 1)
    bench.machine.state.fragments[0].made["b"] = V0
    bench.machine.state.members["b"].backlog.add(0)
    holding(bench, "b", V1)
    assert pulls_of(bench, "b") == [V1]
    (expect,) = bench.orders(Expect)
    assert expect.round == 0


def test_rule_8_no_state_of_a_departed_learner_is_kept(shard_bench: Any) -> None:
    bench = ahead(shard_bench, 1)
    requested_in_the_next_round(bench)
    bench.body("b")
    bench.handle(Received("b", Leave("it has ended")))
    bench.body("a")
    bench.handle(Tick(), bench.now + 2.0)
    bench.merged()
    assert list(bench.machine.state.fragments[0].made) == ["a"]


@pytest.mark.parametrize(("versions", "base"), [(2, V0), (3, None)])
def test_rule_4_no_contribution_from_a_version_beyond_the_age_limit(
    shard_bench: Any, versions: int, base: Version | None
) -> None:
    bench = ahead(shard_bench, versions, late_rounds_max=2)
    assert requested_in_the_next_round(bench) == ([] if base is None else [base])


def test_rule_4_with_late_drop_only_contributions_from_the_newest_version(
    shard_bench: Any,
) -> None:
    bench = ahead(shard_bench, 1, late="drop")
    assert requested_in_the_next_round(bench) == []
    bench.body("a")
    bench.handle(Tick(), bench.now + 2.0)
    bench.merged()
    bench.now += 3.0
    holding(bench, "b", V2)
    assert requested_in_the_next_round(bench) == [V2]


def test_rule_8_after_a_failed_merge_the_same_base_may_be_used_again(
    shard_bench: Any,
) -> None:
    bench = ahead(shard_bench, 1)
    requested_in_the_next_round(bench)
    bench.body("b")
    bench.body("a")
    bench.handle(Failed(merge_of(bench.machine.state.rounds[0].number, 0), "the disk is full"))
    bench.handle(Tick(), bench.now + 2.0)
    assert pulls_of(bench, "b") == [V0]


def test_rule_4_a_failed_merge_does_not_undo_later_folds(shard_bench: Any) -> None:
    """b has contributed from 1.1 meanwhile: a second request would merge it twice."""
    bench = shard_bench("a", "b", fragments=1, period=2)
    for _ in range(2):
        bench.step("a")
        bench.step("b")
    bench.body("a")
    bench.handle(Tick(), 2.0)
    bench.merged()
    for _ in range(2):
        bench.step("a")
        bench.step("b")
    bench.body("b")
    assert bench.requested() == ["b"], "its contribution from 1.0 has arrived: now from 1.1"
    bench.body("a")
    if bench.machine.state.rounds[0].settled_at is None:
        bench.handle(Tick(), 5.0)
    bench.body("b")
    bench.handle(Failed(merge_of(bench.machine.state.rounds[0].number, 0), "the disk is full"))
    bench.handle(Tick(), 8.0)
    assert bench.requested() == ["a"]


def test_rule_17_a_leaving_learner_contributes_from_an_older_version(shard_bench: Any) -> None:
    """It has no time to fetch the newest copy first."""
    bench = ahead(shard_bench, 1)
    step_without_copies(bench, "b")
    bench.handle(Received("b", Draining((0,), "asked to stop")))
    assert pulls_of(bench, "b") == [V0]


def test_rule_12_the_closing_sweep_accepts_an_older_base(
    shard_bench: Any,
) -> None:
    bench = ahead(shard_bench, 1)
    bench.handle(Received(COORDINATOR, EndOrdered()))
    assert pulls_of(bench, "b") == [V0]
    bench.body("b")
    assert bench.orders(Fold)


def ended_without_a_copy(shard_bench: Any) -> Any:
    """The sweep asks b from 1.1, which it is fetching: its contribution from 1.0 is in that."""
    bench = shard_bench("a", "b", fragments=1, period=2, overlap=1)
    for _ in range(2):
        bench.step("a")
        bench.step("b")
    bench.body("a")
    bench.body("b")
    bench.merged()
    bench.now = 10.0
    bench.step("a")
    step_without_copies(bench, "b")
    bench.handle(Received(COORDINATOR, EndOrdered()))
    assert sorted(bench.requested()) == ["a", "b"]
    bench.body("a")
    return bench


def wait(bench: Any, seconds: float) -> None:
    """Let time pass with bytes from all learners, so that no lease expires."""
    until = bench.now + seconds
    while bench.now < until:
        bench.handle(Heard(("a", "b")), min(until, bench.now + 5.0))
        bench.handle(Tick())


def test_rule_12_the_sweep_waits_for_a_copy_in_transit(shard_bench: Any) -> None:
    bench = ended_without_a_copy(shard_bench)
    wait(bench, 5 * CLOSING_SECONDS)
    assert "b" in bench.machine.state.fragments[0].asks
    holding(bench, "b", V1)
    wait(bench, CLOSING_SECONDS - 5.0)
    assert "b" in bench.machine.state.fragments[0].asks
    wait(bench, 5.0)
    assert "b" not in bench.machine.state.fragments[0].asks, "it holds it, and does not answer"


def test_rule_12_the_sweep_waits_for_a_copy_for_a_limited_time(shard_bench: Any) -> None:
    bench = ended_without_a_copy(shard_bench)
    wait(bench, COPY_SECONDS - 5.0)
    assert "b" in bench.machine.state.fragments[0].asks
    assert bench.machine.deadline() <= bench.now + 5.0
    wait(bench, 5.0)
    reasons = [message.reason for message in bench.messages(Outcome)]
    assert reasons == ["it did not receive 1.1 within 600 s"]
    assert not bench.messages(Swept)


def test_rule_12_a_loop_that_stalled_before_the_end_is_not_fetching(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=2, overlap=1)
    for _ in range(2):
        bench.step("a")
        bench.step("b")
    bench.body("a")
    bench.body("b")
    bench.merged()
    wait(bench, CLOSING_SECONDS)
    bench.step("a")
    bench.handle(Received(COORDINATOR, EndOrdered()))
    bench.body("a")
    wait(bench, CLOSING_SECONDS)
    assert bench.orders(Merge)


def pull(ask: int, base: Version, tick: int = 4) -> Pull:
    return Pull(0, Asking(1, ask), base, tick, "bf16", "carry", "/up", False, ())


def behind(learner_bench: Any, steps: int = 4) -> Any:
    """It holds 1.0 and has taken steps; 1.1 is announced and in transit."""
    bench = learner_bench(fragments=1, period=4)
    bench.handle(Paused())
    for _ in range(steps):
        bench.step()
    bench.publish(V1, V0)
    assert bench.orders(Fetch)
    return bench


def test_rule_6_a_learner_contributes_from_the_version_that_it_holds(learner_bench: Any) -> None:
    bench = behind(learner_bench)
    bench.step()
    bench.receive(pull(1, V0, 8))
    bench.step()
    (body,) = bench.orders(SendBody)
    assert (body.base, body.steps) == (V0, 6)


@pytest.mark.parametrize("verdict", [None, "accepted"])
def test_rule_4_a_learner_contributes_once_from_an_older_version(
    learner_bench: Any, verdict: Any
) -> None:
    """Its contribution may be in the newer version, and is still in its parameters."""
    bench = behind(learner_bench)
    bench.receive(pull(1, V0))
    bench.step()
    bench.handle(BodyEncoded(0, Asking(1, 1), "digest"))
    if verdict:
        bench.receive(Outcome(0, Asking(1, 1), verdict, "because", V2))
    bench.receive(pull(2, V0, 8))
    (decline,) = [o.message for o in bench.effects if isinstance(o.message, Decline)]
    assert decline.reason == "my contribution from 1.0 is already sent"
    assert not decline.nothing_new
    bench.step()
    assert not bench.orders(SendBody)


def test_rule_12_a_closing_request_is_answered_before_a_newer_copy_is_applied(
    learner_bench: Any,
) -> None:
    """A stalled loop finds both waiting; its training is requested in no other way."""
    bench = behind(learner_bench)
    bench.receive(Ending())
    bench.receive(Pull(0, Asking(1, 1), V0, 4, "bf16", "carry", "/up", True, ()))
    bench.fetched(V1)
    bench.step()
    (body,) = bench.orders(SendBody)
    assert (body.base, body.steps) == (V0, 5)
    (applied,) = bench.orders(Apply)
    assert (applied.version, applied.mode) == (V1, "overwrite"), "there is nothing to carry"


def test_rule_7_at_the_end_training_since_the_snapshot_is_carried(
    learner_bench: Any,
) -> None:
    bench = behind(learner_bench)
    bench.receive(pull(1, V0))
    bench.step()
    bench.receive(Ending())
    bench.fetched(V1)
    bench.step()
    (applied,) = bench.orders(Apply)
    assert (applied.version, applied.mode) == (V1, "carry")


def test_rule_16_contributions_of_an_earlier_incarnation_are_not_repeated(
    learner_bench: Any,
) -> None:
    bench = behind(learner_bench)
    bench.machine.state.fragments[0].restored = True
    bench.receive(pull(1, V0))
    assert [o.message.reason for o in bench.effects if isinstance(o.message, Decline)] == [
        "my contribution from 1.0 is already sent"
    ]


def test_rule_4_a_refused_contribution_may_be_sent_again(learner_bench: Any) -> None:
    bench = behind(learner_bench)
    bench.receive(pull(1, V0))
    bench.step()
    bench.receive(Outcome(0, Asking(1, 1), "refused", "its digest is wrong", None))
    bench.receive(pull(2, V0, 8))
    bench.step()
    (body,) = bench.orders(SendBody)
    assert (body.base, body.steps) == (V0, 6)


def fetching(learner_bench: Any, fragments: int, **options: Any) -> Any:
    """Return a learner that holds 1.0 of many fragments; two copies may be fetched at a time."""
    values = {"fragments": fragments, "period": fragments, "overlap": 2, **options}
    bench = learner_bench(**values)
    bench.handle(Paused())
    assert bench.machine.state.ready
    return bench


def test_rule_5_the_number_of_fetches_equals_the_slots(learner_bench: Any) -> None:
    """All at once would arrive so slowly that each is superseded before."""
    bench = fetching(learner_bench, 4)
    fetched = []
    for fragment in (3, 1, 0, 2):
        bench.publish(V1, V0, fragment)
        fetched += [order.fragment for order in bench.orders(Fetch)]
    assert fetched == [3, 1]
    bench.fetched(V1, 1)
    assert [order.fragment for order in bench.orders(Fetch)] == [0], (
        "in the order of the announcements"
    )
    bench.fetched(V1, 3)
    assert [order.fragment for order in bench.orders(Fetch)] == [2]


def fetches(bench: Any) -> list[tuple[int, Version, bool]]:
    """Return the fetches of the last event: fragment, version, and whether whole."""
    return [(order.fragment, order.version, order.whole) for order in bench.orders(Fetch)]


def test_rule_5_a_superseded_fetch_comes_next(learner_bench: Any) -> None:
    """Behind all others, it could be superseded in each of its turns and never arrive."""
    bench = fetching(learner_bench, 4)
    for fragment in (3, 1, 0, 2):
        bench.publish(V1, V0, fragment)
    bench.publish(V2, V1, 3)
    bench.handle(Failed(fetch_of(3, V1), "superseded"))
    assert fetches(bench) == [(3, V2, True)]


def test_rule_5_a_fetch_that_failed_before_the_newer_announcement_comes_next(
    learner_bench: Any,
) -> None:
    bench = fetching(learner_bench, 5)
    for fragment in (3, 1, 0, 2, 4):
        bench.publish(V1, V0, fragment)
    bench.handle(Failed(fetch_of(3, V1), "superseded"))
    assert fetches(bench) == [(3, V1, True)]
    bench.handle(Failed(fetch_of(3, V1), "superseded"))
    assert fetches(bench) == [(0, V1, False)]
    bench.publish(V2, V1, 3)
    assert not fetches(bench), "no slot is free"
    bench.fetched(V1, 1)
    assert fetches(bench) == [(3, V2, True)]


def test_rule_5_a_failed_fetch_frees_its_slot(learner_bench: Any) -> None:
    """The whole copy is tried at once, and again a second later."""
    bench = fetching(learner_bench, 5)
    for fragment in (3, 1, 0, 2, 4):
        bench.publish(V1, V0, fragment)
    bench.handle(Failed(fetch_of(3, V1), "no such thing"))
    assert fetches(bench) == [(3, V1, True)]
    bench.handle(Failed(fetch_of(3, V1), "no such thing"))
    assert fetches(bench) == [(0, V1, False)]
    bench.handle(Tick(), bench.now + RETRY_SECONDS)
    assert not fetches(bench), "no slot is free"
    bench.fetched(V1, 1)
    assert fetches(bench) == [(3, V1, True)]
    bench.fetched(V1, 3)
    assert fetches(bench) == [(2, V1, False)]


def test_rule_5_a_queued_fetch_gets_the_newest_version(learner_bench: Any) -> None:
    """It keeps its place: a fragment with frequent announcements does not starve."""
    bench = fetching(learner_bench, 4)
    for fragment in (0, 1, 2, 3):
        bench.publish(V1, V0, fragment)
    bench.publish(V2, V1, 2)
    assert not bench.orders(Fetch)
    bench.fetched(V1, 0)
    (fetch,) = bench.orders(Fetch)
    assert (fetch.fragment, fetch.version, fetch.whole) == (2, V2, True)


def test_rule_5_a_copy_renamed_in_the_queue_is_not_fetched(learner_bench: Any) -> None:
    """Its values are here already."""
    bench = fetching(learner_bench, 3)
    for fragment in (0, 1, 2):
        bench.publish(V1, V0, fragment)
    renamed = Version(2, 1)
    bench.publish(renamed, V0, 2, difference="")
    assert bench.orders(Relabel)
    bench.fetched(V1, 0)
    assert not bench.orders(Fetch)


def test_rule_5_shards_do_not_share_their_slots(learner_bench: Any) -> None:
    bench = fetching(learner_bench, 4, shards=2, overlap=1)
    fetched = []
    for fragment in (0, 2, 1, 3):
        bench.publish(V1, V0, fragment)
        fetched += [order.fragment for order in bench.orders(Fetch)]
    assert fetched == [0, 1]


def test_rule_12_a_copy_that_arrives_after_the_link_broke_is_applied(learner_bench: Any) -> None:
    """It contains the contribution: nothing is discarded, and nothing is counted twice."""
    bench = learner_bench(fragments=1, period=4, overlap=1)
    for _ in range(4):
        bench.step()
    bench.receive(Ending())
    bench.receive(Pull(0, Asking(1, 1), V0, 4, "bf16", "overwrite", "/up", True, ()))
    bench.handle(Paused())
    assert bench.orders(SendBody)
    bench.receive(Outcome(0, Asking(1, 1), "accepted", "because", V1))
    bench.publish(V1, V0)
    bench.receive(Finished())
    bench.handle(Lost("shard-0"))
    bench.handle(Paused())
    assert not bench.orders(Apply), "the copy may still come"
    bench.fetched(V1)
    bench.handle(Paused())
    (applied,) = bench.orders(Apply)
    assert (applied.version, applied.discarded_tokens) == (V1, 0)


def test_rule_12_merged_training_is_not_discarded_without_its_copy(
    learner_bench: Any,
) -> None:
    bench = learner_bench(fragments=1, period=4, overlap=1)
    for _ in range(4):
        bench.step()
    bench.receive(Ending())
    bench.receive(Pull(0, Asking(1, 1), V0, 4, "bf16", "overwrite", "/up", True, ()))
    bench.handle(Paused())
    bench.receive(Outcome(0, Asking(1, 1), "accepted", "because", V1))
    bench.receive(Finished())
    bench.handle(Lost("shard-0"))
    bench.handle(Paused())
    (applied,) = bench.orders(Apply)
    assert (applied.version, applied.discarded_tokens) == (V0, 0)


def test_rule_16_a_joining_learner_fetches_everything_at_once(learner_bench: Any) -> None:
    """It does not train yet, so nothing is superseded for it."""
    bench = learner_bench(begin=False, fragments=4, period=4, overlap=1)
    fetched = []
    for fragment in range(4):
        bench.publish(V0, None, fragment)
        fetched += [order.fragment for order in bench.orders(Fetch)]
    assert fetched == [0, 1, 2, 3]
