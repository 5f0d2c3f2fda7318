"""Contributions that reach a shard through relays (rule 22)."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.protocol.messages import (
    Asking,
    BodyCorrupt,
    Collect,
    Collected,
    Connected,
    Drop,
    DropSum,
    Expect,
    Fold,
    FoldSum,
    Leave,
    Lost,
    Merge,
    Outcome,
    Received,
    RelayHello,
    RoundFinished,
    Send,
    SumCorrupt,
    SumOutcome,
    Unexpect,
    relay_peer,
)
from decoupled_diloco.protocol.quotas import Quota
from unit.protocol.shard_rounds import Site, outcomes, states, tick_at


def test_a_request_names_the_relay_of_its_learner(shard_bench: Any) -> None:
    site = Site(shard_bench, "a0", "b0")
    asks = site.bench.machine.state.fragments[0].asks
    assert {name: ask.relay for name, ask in asks.items()} == {
        "direct": "",
        "a0": "site-a",
        "b0": "site-b",
    }


def test_the_shard_decides_and_the_relay_folds(shard_bench: Any) -> None:
    site = Site(shard_bench, "a0")
    site.body("a0")
    (fold,) = site.bench.orders(Fold)
    assert (fold.learner, fold.steps, fold.tokens, fold.relay) == ("a0", 1.0, 10.0, "site-a")


def test_a_refused_payload_is_dropped_at_its_relay(shard_bench: Any) -> None:
    site = Site(shard_bench, "a0")
    site.body("a0", tokens=0)
    assert [drop.relay for drop in site.bench.orders(Drop)] == ["site-a"]
    assert outcomes(site.bench) == [("a0", "refused")]


def test_a_relayed_contribution_counts_for_the_quorum_when_its_sum_is_here(
    shard_bench: Any,
) -> None:
    """Nothing is merged that a relay could still lose."""
    site = Site(shard_bench, "a0", quorum=2)
    site.body("direct")
    ask = site.body("a0")
    assert not site.bench.orders(Merge)
    site.sum("site-a", ask)
    assert site.bench.orders(FoldSum)
    assert site.bench.orders(Merge)


def test_a_round_waits_for_a_sum_until_its_delivery_window_is_over(shard_bench: Any) -> None:
    site = Site(shard_bench, "a0")
    ask = site.body("a0")
    site.body("direct")
    assert not site.bench.orders(Merge), "the sum of site-a is awaited"
    tick_at(site.bench, 3.0)
    assert site.bench.orders(Merge)
    site.bench.merged()
    assert states(site.bench.orders(RoundFinished)[0]) == {"direct": "folded", "a0": "late"}
    site.sum("site-a", ask)
    assert site.bench.machine.state.fragments[0].folded[0].learner == "a0", "for the next round"


def test_a_learner_receives_its_outcome_when_the_sum_is_merged(shard_bench: Any) -> None:
    site = Site(shard_bench, "a0", "a1")
    asks = [site.body(name) for name in ("a0", "a1")]
    assert not site.bench.messages(Outcome)
    site.body("direct")
    site.sum("site-a", *asks)
    assert not site.bench.messages(Outcome)
    site.bench.merged()
    assert set(outcomes(site.bench)) == {(n, "accepted") for n in ("direct", "a0", "a1")}
    assert site.to_relays(SumOutcome) == {"relay:site-a": SumOutcome(0, 1, "merged", "")}


def test_relays_learn_when_a_round_collects_and_when_it_requests_nothing_more(
    shard_bench: Any,
) -> None:
    site = Site(shard_bench)
    bench = site.bench
    for relay in ("site-a", "site-b"):
        bench.handle(Connected(relay_peer(relay), RelayHello(relay, relay)))
    bench.body("direct")
    bench.merged()
    notified: dict[type, set[str]] = {Collect: set(), Collected: set()}
    for _ in range(2):
        sends = [effect for effect in bench.step("direct") if isinstance(effect, Send)]
        for kind, peers in notified.items():
            peers |= {order.peer for order in sends if isinstance(order.message, kind)}
    assert all(peers == {"relay:site-a", "relay:site-b"} for peers in notified.values())


def test_without_a_delivery_window_relays_wait_for_a_quorum(shard_bench: Any) -> None:
    """When the quorum is complete, the round waits for no other learner, so relays send at once."""
    site = Site(shard_bench, "a0", "a1", quorum=2, overlap=0)
    site.body("a0")
    assert not site.to_relays(Collect)
    site.body("a1" if "a1" in site.bench.machine.state.fragments[0].asks else "direct")
    assert site.to_relays(Collect) == {"relay:site-a": Collect(0, 1, 0.0)}


def test_a_sum_is_accepted_only_as_a_whole(shard_bench: Any) -> None:
    """One of its requests is void, so the others are requested again."""
    site = Site(shard_bench, "a0", "a1")
    asks = [site.body(name) for name in ("a0", "a1")]
    site.sum("site-a", *asks, Asking(1, 999))
    assert not site.bench.orders(FoldSum)
    assert [drop.number for drop in site.bench.orders(DropSum)] == [1]
    assert outcomes(site.bench) == [("a0", "abandoned"), ("a1", "abandoned")]
    assert {order.learner for order in site.bench.orders(Expect)} == {"a0", "a1"}
    assert site.to_relays(SumOutcome)["relay:site-a"].verdict == "void"


def test_a_sum_is_accepted_once(shard_bench: Any) -> None:
    site = Site(shard_bench, "a0")
    ask = site.body("a0")
    site.sum("site-a", ask)
    assert site.bench.orders(FoldSum)
    site.sum("site-a", ask, number=2)
    assert site.bench.orders(DropSum)
    assert len(site.bench.machine.state.fragments[0].folded) == 1


def test_a_relay_cannot_send_what_another_relay_has(shard_bench: Any) -> None:
    site = Site(shard_bench, "a0", "b0")
    ask = site.body("b0")
    site.sum("site-a", ask)
    assert site.bench.orders(DropSum)
    site.sum("site-b", ask)
    assert site.bench.orders(FoldSum)


def test_what_a_lost_relay_had_is_requested_again(shard_bench: Any) -> None:
    site = Site(shard_bench, "a0", "a1")
    site.body("a0")
    for learner in ("a0", "a1"):
        site.bench.handle(Lost(learner))
    site.bench.handle(Lost(relay_peer("site-a")))
    assert outcomes(site.bench) == [("a0", "abandoned")]
    site.greet("a0", "")
    assert [(order.learner, order.relay) for order in site.bench.orders(Expect)] == [("a0", "")]


def test_a_request_on_another_way_is_void_after_a_reconnection(shard_bench: Any) -> None:
    """The learner sends its payload to the address that it had when it was requested."""
    site = Site(shard_bench, "a0")
    ask = site.bench.machine.state.fragments[0].asks["a0"]
    site.bench.handle(Lost("a0"))
    site.greet("a0", "", asks=(ask.name,))
    assert [(o.path, o.relay) for o in site.bench.orders(Unexpect)] == [(ask.path, "site-a")]
    assert [order.relay for order in site.bench.orders(Expect)] == [""]


def test_a_relayed_contribution_outlives_its_learner(shard_bench: Any) -> None:
    """As a contribution that is folded at the shard does."""
    site = Site(shard_bench, "a0")
    ask = site.body("a0")
    site.bench.handle(Received("a0", Leave("done")))
    assert "a0" not in site.bench.machine.state.members
    site.sum("site-a", ask)
    assert site.bench.orders(FoldSum)


def test_a_corrupt_sum_is_requested_again(shard_bench: Any) -> None:
    site = Site(shard_bench, "a0")
    ask = site.body("a0")
    site.bench.handle(SumCorrupt("site-a", 0, 1, (ask,), "its digest is wrong"))
    assert outcomes(site.bench) == [("a0", "abandoned")]
    assert site.bench.requested() == ["a0"]


def test_a_payload_that_is_corrupt_at_its_relay_is_refused(shard_bench: Any) -> None:
    site = Site(shard_bench, "a0")
    ask = site.bench.machine.state.fragments[0].asks["a0"].name
    site.bench.handle(BodyCorrupt("a0", 0, ask, "NaN", False))
    assert outcomes(site.bench) == [("a0", "unfit")]


def test_a_sum_of_a_relay_behind_another_one_moves_its_requests_there(shard_bench: Any) -> None:
    site = Site(shard_bench, "a0", "b0")
    a, b = site.body("a0"), site.body("b0")
    site.sum("site-b", b, at="site-a")
    (fold,) = site.bench.orders(FoldSum)
    assert (fold.relay, fold.at) == ("site-b", "site-a")
    site.sum("site-a", a, b, number=4)
    assert {ask.learner for ask in site.bench.machine.state.fragments[0].folded} == {"a0", "b0"}
    site.body("direct")
    site.bench.merged()
    assert site.to_relays(SumOutcome) == {
        "relay:site-a": SumOutcome(0, 4, "merged", ""),
        "relay:site-b": SumOutcome(0, 1, "merged", ""),
    }


def test_a_relay_waits_for_the_sums_of_the_relays_behind_it(shard_bench: Any) -> None:
    """`Collected` reaches it once all of the round's contributions behind it are in a sum."""
    site = Site(shard_bench, "a0", "b0", top="top")
    asks = [site.body(name) for name in ("a0", "b0")]
    (round,) = site.bench.machine.state.rounds.values()
    assert round.collecting == ("top",), "the window is over, and the other relays know it"
    site.sum("site-a", asks[0], at="top")
    assert not site.to_relays(Collected)
    site.sum("site-b", asks[1], at="top")
    assert set(site.to_relays(Collected)) == {"relay:top"}


def test_a_round_waits_for_both_contributions_of_a_learner(shard_bench: Any) -> None:
    """A learner can have a late one on its way and a new one at its relay."""
    site = Site(shard_bench, "a0")
    site.body("a0")
    site.body("direct")
    tick_at(site.bench, 3.0)
    site.bench.merged()
    late = site.bench.machine.state.fragments[0].relayed[0].name
    for _ in range(2):
        for learner in ("direct", "a0"):
            site.bench.step(learner)
    new = site.body("a0")
    site.sum("site-a", late)
    assert site.bench.machine.state.rounds[0].awaited >= {"a0"}
    site.sum("site-a", new, number=2)
    assert site.bench.machine.state.rounds[0].awaited == {"direct"}


def test_a_merge_names_the_factors_of_the_parties(shard_bench: Any) -> None:
    quotas = (Quota("direct", ("direct",), 0.75), Quota("a", ("a*",)))
    site = Site(shard_bench, "a0", quotas=quotas)
    site.body("direct")
    ask = site.body("a0")
    assert [fold.party for fold in site.bench.orders(Fold)] == ["a"]
    site.sum("site-a", ask)
    (order,) = site.bench.orders(FoldSum)
    assert order.party == "a"
    (merge,) = site.bench.orders(Merge)
    assert merge.factors == (("a", 0.5), ("direct", 1.5))
    assert merge.why.endswith("; a's weight times 0.5, direct's weight times 1.5")


def test_a_sum_of_two_parties_with_limits_is_refused(shard_bench: Any) -> None:
    quotas = (Quota("x", ("a0", "direct"), 0.0, 0.6), Quota("y", ("a1",)))
    site = Site(shard_bench, "a0", "a1", quotas=quotas)
    asks = [site.body(name) for name in ("a0", "a1")]
    site.sum("site-a", *asks)
    (drop,) = site.bench.orders(DropSum)
    assert drop.why == "it mixes x and y, whose shares are limited"
    assert not site.bench.orders(FoldSum)
