"""A learner whose published copies come slowly: what it is asked for, and what it fetches first."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.effects import (
    Apply,
    Expect,
    Fetch,
    Fold,
    Merge,
    Relabel,
    Send,
    SendBody,
)
from decoupled_diloco.protocol.events import (
    BodyEncoded,
    FetchFailed,
    Heard,
    Lost,
    MergeFailed,
    Paused,
    Received,
    Tick,
)
from decoupled_diloco.protocol.learner_fragments import RETRY_SECONDS
from decoupled_diloco.protocol.messages import (
    Decline,
    Draining,
    Ending,
    EndOrdered,
    Finished,
    Leave,
    Outcome,
    Pull,
    StepReport,
    Swept,
)
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.syncer_rounds import CLOSING_SECONDS, COPY_SECONDS
from decoupled_diloco.protocol.versions import Asking, Holding

V0, V1, V2 = (Version(1, counter) for counter in range(3))


def step_without_copies(bench: Any, learner: str) -> list[Any]:
    """It reports a step, and holds nothing new."""
    bench.steps[learner] += 1
    step = bench.steps[learner]
    return list(bench.told(Received(learner, StepReport(step, 10 * step, 1.0))))


def holding(bench: Any, learner: str, version: Version, fragment: int = 0) -> list[Any]:
    return list(bench.told(Received(learner, Holding(fragment, version))))


def pulls_of(bench: Any, learner: str) -> list[Version]:
    """From which versions the last event has led to ask a learner for something."""
    orders = [order for order in bench.orders(Send) if order.peer == learner]
    return [order.message.base for order in orders if isinstance(order.message, Pull)]


def ahead(shard_bench: Any, versions: int, **options: Any) -> Any:
    """a alone has made so many versions of one fragment, due every 4 s; b holds the first.

    b has made nothing of it yet: it was declined whenever it was asked.
    """
    values = {"fragments": 1, "period": 4, "overlap": 2, "grace_margin": 0.0, **options}
    bench = shard_bench("a", "b", **values)
    holding(bench, "b", V0)
    for _ in range(versions):
        while 0 not in bench.machine.state.rounds:
            bench.now += 1.0
            bench.step("a")
        bench.body("a", at=bench.now + 0.1)
        bench.told(Tick(), bench.now + 2.0)
        bench.merged()
    return bench


def asked_in_the_next_round(bench: Any) -> list[Version]:
    """Both step until the fragment is due again; from what b is asked to have made something."""
    found: list[Version] = []
    while not found and 0 not in bench.machine.state.rounds:
        bench.now += 1.0
        step_without_copies(bench, "b")
        found += pulls_of(bench, "b")
        bench.step("a")
        found += pulls_of(bench, "b")
    return found


@pytest.mark.parametrize("versions", [1, 3])
def test_rule_6_who_holds_an_older_version_is_asked_for_what_it_made_from_that(
    shard_bench: Any, versions: int
) -> None:
    """It would hardly ever hold the newest one; what it made is late as a late body is."""
    bench = ahead(shard_bench, versions)
    assert asked_in_the_next_round(bench) == [V0]
    bench.body("b", steps=9, tokens=90)
    (fold,) = bench.orders(Fold)
    assert fold.why.startswith(f"late by {versions} versions")
    bench.body("a")
    assert bench.orders(Merge)


def test_rule_4_it_is_asked_once_from_each_version(shard_bench: Any) -> None:
    """Nothing is merged twice: what it makes next from that version holds the first as well."""
    bench = ahead(shard_bench, 1)
    assert asked_in_the_next_round(bench) == [V0]
    bench.body("b")
    bench.body("a")
    bench.merged()
    bench.now += 3.0
    for _ in range(2):
        assert asked_in_the_next_round(bench) == []
        bench.body("a")
        bench.told(Tick(), bench.now + 2.0)
        bench.merged()
        bench.now += 3.0
    holding(bench, "b", V2)
    assert asked_in_the_next_round(bench) == [V2]


def test_rule_4_nobody_waits_for_who_has_nothing_to_contribute_from(shard_bench: Any) -> None:
    """K = 1: the round is over with the delivery window."""
    bench = ahead(shard_bench, 1)
    asked_in_the_next_round(bench)
    bench.body("b")
    bench.body("a")
    bench.merged()
    bench.now += 3.0
    asked_in_the_next_round(bench)
    assert "b" not in bench.machine.state.rounds[0].turned
    bench.body("a")
    assert bench.orders(Merge)


def test_rule_3_with_all_in_the_quorum_it_is_asked_once_it_holds_the_version(
    shard_bench: Any,
) -> None:
    """K = M waits for all, however slow their copies."""
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
    bench.told(Tick(), bench.now + 5.0)
    bench.body("a")
    assert not bench.orders(Merge)
    holding(bench, "b", V1)
    assert pulls_of(bench, "b") == [V1]
    bench.body("b")
    assert bench.orders(Merge)


def test_rule_3_a_copy_that_was_published_just_now_is_on_its_way(shard_bench: Any) -> None:
    """A fragment that was due while its round was open is asked for at once, of everybody."""
    bench = shard_bench("a", "b", fragments=1, period=4, overlap=2, grace_margin=0.0)
    for _ in range(8):
        bench.now += 1.0
        bench.step("a")
        bench.step("b")
    bench.body("a")
    bench.body("b")
    bench.merged()
    assert sorted(bench.asked()) == ["a", "b"]


def test_rule_10_not_from_a_version_of_an_earlier_life_of_the_shard(shard_bench: Any) -> None:
    """What became of it is not known: it may be in the newest version."""
    bench = ahead(shard_bench, 1)
    holding(bench, "b", Version(0, 0))
    assert asked_in_the_next_round(bench) == []


def test_rule_4_arrears_that_nothing_can_be_made_of_hold_nothing_up(shard_bench: Any) -> None:
    """A learner that waits for its copies sends as many bodies at once as any other."""
    bench = shard_bench("a", "b", fragments=3, period=3, overlap=2)
    bench.step("b")
    member = bench.machine.state.members["b"]
    assert member.under_way == {1}
    bench.machine.state.fragments[0].made["b"] = V0
    member.arrears.add(0)
    bench.step("b")
    assert member.under_way == {1, 2}


def test_rule_4_who_is_in_arrears_is_asked_once_it_holds_a_newer_copy(shard_bench: Any) -> None:
    bench = ahead(shard_bench, 1)
    bench.machine.state.fragments[0].made["b"] = V0
    bench.machine.state.members["b"].arrears.add(0)
    holding(bench, "b", V1)
    assert pulls_of(bench, "b") == [V1]
    (expect,) = bench.orders(Expect)
    assert expect.round == 0


def test_rule_8_nothing_is_kept_of_who_has_gone(shard_bench: Any) -> None:
    bench = ahead(shard_bench, 1)
    asked_in_the_next_round(bench)
    bench.body("b")
    bench.told(Received("b", Leave("it is done")))
    bench.body("a")
    bench.told(Tick(), bench.now + 2.0)
    bench.merged()
    assert list(bench.machine.state.fragments[0].made) == ["a"]


@pytest.mark.parametrize(("versions", "base"), [(2, V0), (3, None)])
def test_rule_4_not_from_a_version_older_than_what_may_be_late(
    shard_bench: Any, versions: int, base: Version | None
) -> None:
    bench = ahead(shard_bench, versions, late_rounds_max=2)
    assert asked_in_the_next_round(bench) == ([] if base is None else [base])


def test_rule_4_with_late_drop_only_what_was_made_from_the_newest_version(
    shard_bench: Any,
) -> None:
    bench = ahead(shard_bench, 1, late="drop")
    assert asked_in_the_next_round(bench) == []
    bench.body("a")
    bench.told(Tick(), bench.now + 2.0)
    bench.merged()
    bench.now += 3.0
    holding(bench, "b", V2)
    assert asked_in_the_next_round(bench) == [V2]


def test_rule_8_what_a_failed_merge_has_lost_may_come_again_from_the_same_version(
    shard_bench: Any,
) -> None:
    bench = ahead(shard_bench, 1)
    asked_in_the_next_round(bench)
    bench.body("b")
    bench.body("a")
    bench.told(MergeFailed(bench.machine.state.rounds[0].number, 0, "the disk is full"))
    bench.told(Tick(), bench.now + 2.0)
    assert pulls_of(bench, "b") == [V0]


def test_rule_4_a_failed_merge_does_not_undo_what_was_folded_behind_it(shard_bench: Any) -> None:
    """b has contributed from 1.1 meanwhile: asked again it would contribute the same twice."""
    bench = shard_bench("a", "b", fragments=1, period=2)
    for _ in range(2):
        bench.step("a")
        bench.step("b")
    bench.body("a")
    bench.told(Tick(), 2.0)
    bench.merged()
    for _ in range(2):
        bench.step("a")
        bench.step("b")
    bench.body("b")
    assert bench.asked() == ["b"], "what it made from 1.0 is here: now from 1.1"
    bench.body("a")
    if bench.machine.state.rounds[0].settled_at is None:
        bench.told(Tick(), 5.0)
    bench.body("b")
    bench.told(MergeFailed(bench.machine.state.rounds[0].number, 0, "the disk is full"))
    bench.told(Tick(), 8.0)
    assert bench.asked() == ["a"]


def test_rule_17_who_goes_is_asked_for_what_it_has(shard_bench: Any) -> None:
    """It has no time to fetch the newest copy first."""
    bench = ahead(shard_bench, 1)
    step_without_copies(bench, "b")
    bench.told(Received("b", Draining((0,), "told to go")))
    assert pulls_of(bench, "b") == [V0]


def test_rule_12_the_closing_sweep_asks_for_what_was_made_from_an_older_version(
    shard_bench: Any,
) -> None:
    bench = ahead(shard_bench, 1)
    bench.told(Received(COORDINATOR, EndOrdered()))
    assert pulls_of(bench, "b") == [V0]
    bench.body("b")
    assert bench.orders(Fold)


def ended_without_a_copy(shard_bench: Any) -> Any:
    """The sweep asks b from 1.1, which it is fetching: what it made from 1.0 is in that."""
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
    bench.told(Received(COORDINATOR, EndOrdered()))
    assert sorted(bench.asked()) == ["a", "b"]
    bench.body("a")
    return bench


def wait(bench: Any, seconds: float) -> None:
    """Everybody is heard meanwhile, so that no lease runs out."""
    until = bench.now + seconds
    while bench.now < until:
        bench.told(Heard(("a", "b")), min(until, bench.now + 5.0))
        bench.told(Tick())


def test_rule_12_the_sweep_waits_for_a_copy_that_is_on_its_way(shard_bench: Any) -> None:
    bench = ended_without_a_copy(shard_bench)
    wait(bench, 5 * CLOSING_SECONDS)
    assert "b" in bench.machine.state.fragments[0].asks
    holding(bench, "b", V1)
    wait(bench, CLOSING_SECONDS - 5.0)
    assert "b" in bench.machine.state.fragments[0].asks
    wait(bench, 5.0)
    assert "b" not in bench.machine.state.fragments[0].asks, "it holds it, and does not answer"


def test_rule_12_the_sweep_waits_for_a_copy_so_long_at_most(shard_bench: Any) -> None:
    bench = ended_without_a_copy(shard_bench)
    wait(bench, COPY_SECONDS - 5.0)
    assert "b" in bench.machine.state.fragments[0].asks
    assert bench.machine.deadline() <= bench.now + 5.0
    wait(bench, 5.0)
    reasons = [message.reason for message in bench.messages(Outcome)]
    assert reasons == ["1.1 is not with it after 600 s"]
    assert not bench.messages(Swept)


def test_rule_12_a_loop_that_stood_before_the_end_is_not_fetching(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", fragments=1, period=2, overlap=1)
    for _ in range(2):
        bench.step("a")
        bench.step("b")
    bench.body("a")
    bench.body("b")
    bench.merged()
    wait(bench, CLOSING_SECONDS)
    bench.step("a")
    bench.told(Received(COORDINATOR, EndOrdered()))
    bench.body("a")
    wait(bench, CLOSING_SECONDS)
    assert bench.orders(Merge)


def pull(ask: int, base: Version, tick: int = 4) -> Pull:
    return Pull(0, Asking(1, ask), base, tick, "bf16", "carry", "/up", False, ())


def behind(learner_bench: Any, steps: int = 4) -> Any:
    """It holds 1.0 and has made some steps; 1.1 is told of, and is on its way."""
    bench = learner_bench(fragments=1, period=4)
    bench.told(Paused())
    for _ in range(steps):
        bench.step()
    bench.publish(V1, V0)
    assert bench.orders(Fetch)
    return bench


def test_rule_6_it_contributes_from_the_version_that_it_holds(learner_bench: Any) -> None:
    bench = behind(learner_bench)
    bench.step()
    bench.hear(pull(1, V0, 8))
    bench.step()
    (body,) = bench.orders(SendBody)
    assert (body.base, body.steps) == (V0, 6)


@pytest.mark.parametrize("verdict", [None, "accepted"])
def test_rule_4_it_contributes_once_from_a_version_that_is_not_the_newest(
    learner_bench: Any, verdict: Any
) -> None:
    """What it has sent may be in the newer one, and is in its parameters still."""
    bench = behind(learner_bench)
    bench.hear(pull(1, V0))
    bench.step()
    bench.told(BodyEncoded(0, Asking(1, 1), "digest"))
    if verdict:
        bench.hear(Outcome(0, Asking(1, 1), verdict, "because", V2))
    bench.hear(pull(2, V0, 8))
    (decline,) = [o.message for o in bench.effects if isinstance(o.message, Decline)]
    assert decline.reason == "what I made from 1.0 is sent already"
    assert not decline.nothing_new
    bench.step()
    assert not bench.orders(SendBody)


def test_rule_12_the_closing_pull_of_an_older_version_is_answered_before_the_newer_one_is_taken(
    learner_bench: Any,
) -> None:
    """A loop that stood has both waiting for it; what it made is asked for in no other way."""
    bench = behind(learner_bench)
    bench.hear(Ending())
    bench.hear(Pull(0, Asking(1, 1), V0, 4, "bf16", "carry", "/up", True, ()))
    bench.fetched(V1)
    bench.step()
    (body,) = bench.orders(SendBody)
    assert (body.base, body.steps) == (V0, 5)
    (applied,) = bench.orders(Apply)
    assert (applied.version, applied.mode) == (V1, "overwrite"), "there is nothing to carry"


def test_rule_7_in_the_end_what_was_trained_since_the_snapshot_is_carried(
    learner_bench: Any,
) -> None:
    bench = behind(learner_bench)
    bench.hear(pull(1, V0))
    bench.step()
    bench.hear(Ending())
    bench.fetched(V1)
    bench.step()
    (applied,) = bench.orders(Apply)
    assert (applied.version, applied.mode) == (V1, "carry")


def test_rule_16_what_an_earlier_life_may_have_sent_is_not_contributed_again(
    learner_bench: Any,
) -> None:
    bench = behind(learner_bench)
    bench.machine.state.fragments[0].restored = True
    bench.hear(pull(1, V0))
    assert [o.message.reason for o in bench.effects if isinstance(o.message, Decline)] == [
        "what I made from 1.0 is sent already"
    ]


def test_rule_4_what_was_refused_may_be_sent_again(learner_bench: Any) -> None:
    bench = behind(learner_bench)
    bench.hear(pull(1, V0))
    bench.step()
    bench.hear(Outcome(0, Asking(1, 1), "refused", "its digest is wrong", None))
    bench.hear(pull(2, V0, 8))
    bench.step()
    (body,) = bench.orders(SendBody)
    assert (body.base, body.steps) == (V0, 6)


def fetching(learner_bench: Any, fragments: int, **options: Any) -> Any:
    """A learner of many fragments that holds 1.0 of each; two copies may come at a time."""
    values = {"fragments": fragments, "period": fragments, "overlap": 2, **options}
    bench = learner_bench(**values)
    bench.told(Paused())
    assert bench.machine.state.ready
    return bench


def test_rule_5_as_many_copies_come_at_a_time_as_a_shard_has_slots(learner_bench: Any) -> None:
    """All at once would come so slowly that each is superseded before it is here."""
    bench = fetching(learner_bench, 4)
    fetched = []
    for fragment in (3, 1, 0, 2):
        bench.publish(V1, V0, fragment)
        fetched += [order.fragment for order in bench.orders(Fetch)]
    assert fetched == [3, 1]
    bench.fetched(V1, 1)
    assert [order.fragment for order in bench.orders(Fetch)] == [0], "in the order of news"
    bench.fetched(V1, 3)
    assert [order.fragment for order in bench.orders(Fetch)] == [2]


def fetches(bench: Any) -> list[tuple[int, Version, bool]]:
    """What the last event has led to fetch: the fragment, its version, and whether whole."""
    return [(order.fragment, order.version, order.whole) for order in bench.orders(Fetch)]


def test_rule_5_what_was_superseded_in_its_turn_is_next(learner_bench: Any) -> None:
    """Behind all others it could be superseded in each of its turns, and never come."""
    bench = fetching(learner_bench, 4)
    for fragment in (3, 1, 0, 2):
        bench.publish(V1, V0, fragment)
    bench.publish(V2, V1, 3)
    bench.told(FetchFailed(3, V1, "superseded"))
    assert fetches(bench) == [(3, V2, True)]


def test_rule_5_what_failed_before_it_was_told_of_the_newer_one_is_next(learner_bench: Any) -> None:
    bench = fetching(learner_bench, 5)
    for fragment in (3, 1, 0, 2, 4):
        bench.publish(V1, V0, fragment)
    bench.told(FetchFailed(3, V1, "superseded"))
    assert fetches(bench) == [(3, V1, True)]
    bench.told(FetchFailed(3, V1, "superseded"))
    assert fetches(bench) == [(0, V1, False)]
    bench.publish(V2, V1, 3)
    assert not fetches(bench), "there is no room"
    bench.fetched(V1, 1)
    assert fetches(bench) == [(3, V2, True)]


def test_rule_5_a_copy_that_cannot_be_had_makes_room_for_the_next(learner_bench: Any) -> None:
    """The whole one is tried at once, and again a second later: then it is next."""
    bench = fetching(learner_bench, 5)
    for fragment in (3, 1, 0, 2, 4):
        bench.publish(V1, V0, fragment)
    bench.told(FetchFailed(3, V1, "no such thing"))
    assert fetches(bench) == [(3, V1, True)]
    bench.told(FetchFailed(3, V1, "no such thing"))
    assert fetches(bench) == [(0, V1, False)]
    bench.told(Tick(), bench.now + RETRY_SECONDS)
    assert not fetches(bench), "there is no room"
    bench.fetched(V1, 1)
    assert fetches(bench) == [(3, V1, True)]
    bench.fetched(V1, 3)
    assert fetches(bench) == [(2, V1, False)]


def test_rule_5_what_waits_is_fetched_in_its_newest_version(learner_bench: Any) -> None:
    """And keeps its place: a fragment that is told of often does not starve."""
    bench = fetching(learner_bench, 4)
    for fragment in (0, 1, 2, 3):
        bench.publish(V1, V0, fragment)
    bench.publish(V2, V1, 2)
    assert not bench.orders(Fetch)
    bench.fetched(V1, 0)
    (fetch,) = bench.orders(Fetch)
    assert (fetch.fragment, fetch.version, fetch.whole) == (2, V2, True)


def test_rule_5_what_is_renamed_while_it_waits_is_not_fetched(learner_bench: Any) -> None:
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


def test_rule_12_a_copy_that_comes_after_the_link_is_gone_is_taken(learner_bench: Any) -> None:
    """What it has sent is in that copy: nothing is discarded, and nothing is counted twice."""
    bench = learner_bench(fragments=1, period=4, overlap=1)
    for _ in range(4):
        bench.step()
    bench.hear(Ending())
    bench.hear(Pull(0, Asking(1, 1), V0, 4, "bf16", "overwrite", "/up", True, ()))
    bench.told(Paused())
    assert bench.orders(SendBody)
    bench.hear(Outcome(0, Asking(1, 1), "accepted", "because", V1))
    bench.publish(V1, V0)
    bench.hear(Finished())
    bench.told(Lost("shard-0"))
    bench.told(Paused())
    assert not bench.orders(Apply), "the copy may still come"
    bench.fetched(V1)
    bench.told(Paused())
    (applied,) = bench.orders(Apply)
    assert (applied.version, applied.discarded_tokens) == (V1, 0)


def test_rule_12_what_was_merged_is_not_discarded_though_its_copy_never_comes(
    learner_bench: Any,
) -> None:
    bench = learner_bench(fragments=1, period=4, overlap=1)
    for _ in range(4):
        bench.step()
    bench.hear(Ending())
    bench.hear(Pull(0, Asking(1, 1), V0, 4, "bf16", "overwrite", "/up", True, ()))
    bench.told(Paused())
    bench.hear(Outcome(0, Asking(1, 1), "accepted", "because", V1))
    bench.hear(Finished())
    bench.told(Lost("shard-0"))
    bench.told(Paused())
    (applied,) = bench.orders(Apply)
    assert (applied.version, applied.discarded_tokens) == (V0, 0)


def test_rule_16_who_joins_fetches_everything_at_once(learner_bench: Any) -> None:
    """Nothing is superseded for it: it does not train yet."""
    bench = learner_bench(begin=False, fragments=4, period=4, overlap=1)
    fetched = []
    for fragment in range(4):
        bench.publish(V0, None, fragment)
        fetched += [order.fragment for order in bench.orders(Fetch)]
    assert fetched == [0, 1, 2, 3]
