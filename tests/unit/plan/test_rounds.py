"""Rounds on links, compared with values computed by hand."""

from __future__ import annotations

import math

import pytest

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.case import Case, Format, Model, demand, demands
from decoupled_diloco_plan.bandwidth.network import HUB, SPREAD, Link, Network, Site, equal_sites
from decoupled_diloco_plan.bandwidth.predict import predict, relay_seconds
from decoupled_diloco_plan.bandwidth.round_periods import simulate
from decoupled_diloco_plan.bandwidth.search import evaluate
from decoupled_diloco_plan.bandwidth.steady_state import Rounds

BF16 = Format("bf16", 16.0)
MODEL = Model(24e6, 12, 1.0)
MORE = 1 + measured.TRAFFIC_OVERHEAD


def hub(rate: float, latency: float = 0.0, learners: int = 4, shared: bool = True) -> Network:
    link = Link(rate, rate, latency, shared)
    return Network((Site("here", learners, link),), HUB, Link(math.inf, math.inf))


def run(network: Network, model: Model = MODEL, **options: object) -> Rounds:
    setting = Options(**options)  # type: ignore[arg-type]
    return simulate(
        Case(model, setting, network, link_share=1.0, step_overhead=0.0, handling_seconds=0.0)
    )


def test_a_round_is_two_transfers_six_latencies_and_a_merge() -> None:
    rate, latency = 1e7, 0.05
    rounds = run(hub(rate, latency), fragments=24, period=24, overlap=2)
    payload = 1e6 * 2 * MORE * 4 / rate
    core = 4 * measured.fold_seconds(1e6) + measured.merge_seconds(1e6)
    assert rounds.merge_seconds == pytest.approx(2 * latency + payload + core, rel=1e-6)
    assert rounds.broadcast_seconds == pytest.approx(3 * latency + payload, rel=1e-6)
    assert rounds.delay_steps == 2
    assert rounds.kept == 1.0
    assert rounds.compute == pytest.approx(1.0)


def far_sites(latency: float, relay: bool, *upstreams: str, rate: float = 1e7) -> Network:
    """Sites of four learners, each behind one link. The hub is fast."""
    link = Link(rate, rate, latency)
    sites = tuple(
        Site(f"s{i}", 4, link, relay=relay, upstream=upstream)
        for i, upstream in enumerate(upstreams)
    )
    return Network(sites, HUB, Link(math.inf, math.inf), relay_rate=4e7)


def test_a_relay_adds_transfers_inside_its_site_and_one_round_trip() -> None:
    latency, payload = 0.05, 1e6 * 2 * MORE
    rounds = run(far_sites(latency, True, ""))
    inside, fold = 4 * payload / 4e7, measured.fold_seconds(1e6)
    merge = 2 * latency + inside + 2 * latency + fold + payload / 1e7
    core = fold + measured.merge_seconds(1e6)
    assert rounds.merge_seconds == pytest.approx(merge + core, rel=1e-6)
    assert rounds.broadcast_seconds == pytest.approx(3 * latency + payload / 1e7 + inside, rel=1e-6)
    case = Case(MODEL, Options(), far_sites(latency, True, ""), link_share=1.0)
    transfers, trips = relay_seconds(case)
    assert transfers == pytest.approx(2 * inside / MORE)
    assert trips == pytest.approx(2 * latency)


def test_a_link_with_a_relay_carries_one_payload_instead_of_one_per_learner() -> None:
    """The links inside the sites carry those of all learners."""
    flat, tree = run(far_sites(0.01, False, "", "")), run(far_sites(0.01, True, "", ""))
    assert len(tree.traffic) == len(flat.traffic) + 4
    for without, with_relays in zip(flat.traffic, tree.traffic, strict=False):
        assert with_relays.mean == pytest.approx(without.mean / 4, rel=0.01)
        assert not with_relays.is_inside
    for each in tree.traffic[len(flat.traffic) :]:
        assert each.is_inside
        assert each.mean == pytest.approx(4 * 2e6 * MORE, rel=0.01)
    case = Case(MODEL, Options(), far_sites(0.01, True, "", ""), link_share=1.0)
    rates = {(t.place, t.direction): t.mean / t.capacity for t in tree.traffic}
    assert {key: pytest.approx(rate, rel=0.01) for key, rate in rates.items()} == demands(case)


def test_a_relay_behind_another_one_uses_the_others_link_only_through_sums() -> None:
    """Three sites in a chain: each link carries one copy and one sum per round."""
    pair = Case(MODEL, Options(), far_sites(0.01, True, "", "s0"), link_share=1.0)
    rates = {(t.place, t.direction): t.mean / t.capacity for t in simulate(pair).traffic}
    assert {key: pytest.approx(rate, rel=0.01) for key, rate in rates.items()} == demands(pair)
    rounds = run(far_sites(0.01, True, "", "s0", "s1"))
    traffic = {(t.place, t.direction): t.mean / (2e6 * MORE) for t in rounds.traffic}
    assert traffic["hub", "up"] == pytest.approx(1.0, rel=0.01)
    assert [traffic[f"s{i}", "down"] for i in range(3)] == pytest.approx([1.0] * 3, rel=0.01)
    assert [traffic[f"s{i}", "up"] for i in range(3)] == pytest.approx([1.0] * 3, rel=0.01)
    assert rounds.kept == 1.0
    flat = run(far_sites(0.01, False, "", "s0", "s1", rate=1e8))
    traffic = {(t.place, t.direction): t.mean / (2e6 * MORE) for t in flat.traffic}
    assert traffic["s0", "up"] == pytest.approx(12.0, rel=0.01), "the links are a chain, too"


def test_sites_with_and_without_a_relay_share_rounds() -> None:
    link = Link(1e8, 1e8, 0.01)
    sites = (Site("a", 4, link, relay=True), Site("b", 2, Link(1e8, 1e8, 0.01, shared=False)))
    rounds = run(Network(sites, "a"))
    assert rounds.participation == pytest.approx((1.0, 1.0), abs=0.01)
    traffic = {(t.place, t.direction): t.mean / (2e6 * MORE) for t in rounds.traffic}
    assert traffic["a", "up"] == traffic["b", "down"] == pytest.approx(2.0, rel=0.01)
    assert traffic["inside a", "up"] == pytest.approx(4.0, rel=0.01)


def test_a_slow_network_inside_a_site_is_a_limit() -> None:
    link = Link(1e9, 1e9)
    network = Network(
        (Site("a", 8, link, relay=True),), HUB, Link(math.inf, math.inf), relay_rate=1e7
    )
    case = Case(MODEL, Options(), network, link_share=1.0)
    assert demand(case) == pytest.approx(8 * 2e6 * MORE / 1e7, rel=0.01)
    assert evaluate(case).binds == "the uplink inside a, which is full"


def test_traffic_equals_the_bytes_of_the_rounds() -> None:
    rounds = run(hub(1e8), fragments=24, period=24)
    up, down = rounds.traffic[:2]
    assert up.mean == pytest.approx(4 * 2e6 * MORE, rel=0.02)
    assert down.mean == pytest.approx(up.mean, rel=0.02)
    assert up.peak >= up.mean * 0.999


def test_learners_that_never_wait_lose_rounds_instead_of_steps() -> None:
    """The link carries 40 % of the traffic; a learner that still fetches a copy cannot answer."""
    rate = 0.4 * 4 * 2e6 * MORE
    network = hub(rate)
    case = Case(MODEL, Options(), network, link_share=1.0)
    assert demand(case) == pytest.approx(2.5)
    rounds = run(network)
    assert rounds.compute == pytest.approx(1.0)
    assert 0.32 < rounds.kept <= 0.4


def test_learners_that_wait_lose_steps_instead_of_rounds() -> None:
    """DiLoCo: H steps, then an upload and a download at the link's rate."""
    network = hub(1e7)
    rounds = run(network, fragments=1, period=10, overlap=0, quorum=4, wait="at_overlap")
    payload = 24e6 * 2 * MORE * 4 / 1e7
    core = measured.merge_seconds(24e6) + 4 * measured.fold_seconds(24e6)
    assert rounds.kept == 1.0
    assert rounds.compute == pytest.approx(10 / (10 + 2 * payload + core), rel=1e-6)


def test_a_syncer_at_a_site_needs_more_of_its_link_than_a_spread_one() -> None:
    sites = equal_sites(4, 4, Link(1e9, 1e9))
    setting = Options(shards=4)
    spread = demand(Case(MODEL, setting, Network(sites, SPREAD), link_share=1.0))
    one = demand(Case(MODEL, setting, Network(sites, "site-0"), link_share=1.0))
    assert one == pytest.approx(2 * spread)


def test_separate_links_equal_one_shared_link_with_their_sum() -> None:
    shared = run(hub(4e7, learners=4))
    own = run(hub(1e7, learners=4, shared=False))
    assert own.merge_seconds == pytest.approx(shared.merge_seconds)


def test_the_grace_window_is_the_protocols() -> None:
    setting = Options(grace_margin=0.5, overlap=3)
    found = predict(Case(MODEL, setting, hub(1e8), link_share=1.0))
    r = found.rounds
    slack = 3 * r.step_seconds - (r.quorum_seconds + r.merge_seconds + r.broadcast_seconds)
    assert found.grace.slack == pytest.approx(slack)
    assert found.grace.seconds == pytest.approx(0.5 * slack)


def unequal(*steps: float, rate: float = 1e8) -> Network:
    link = Link(rate, rate)
    sites = tuple(Site(f"s{i}", 1, link, step) for i, step in enumerate(steps))
    return Network(sites, HUB, Link(math.inf, math.inf))


def test_a_quorum_of_one_has_the_pace_of_the_fastest_and_its_window_includes_the_slow() -> None:
    """The paper's four fast and four slow learners, 18 % apart."""
    network = unequal(1.0, 1.0, 1.18, 1.18)
    one = run(network, quorum=1, overlap=3, grace_margin=0.8)
    assert one.step_seconds == pytest.approx(1.0)
    assert one.participation == (1.0, 1.0, 1.0, 1.0)
    full = run(network, quorum=4, overlap=3)
    assert full.step_seconds == pytest.approx(1.18)
    assert full.compute == one.compute == pytest.approx(1.0)
    assert one.pace_seconds == pytest.approx(4 / (2 / 1.0 + 2 / 1.18))


def test_without_a_window_a_slow_learner_is_in_fewer_rounds_but_misses_no_fragment_twice() -> None:
    found = run(unequal(1.0, 5.0), quorum=1, grace_margin=0.0)
    fast, slow = found.participation
    assert fast == 1.0
    assert 0.35 <= slow <= 0.65
    both = run(unequal(1.0, 1.0), quorum=1)
    up = [sum(t.mean for t in r.traffic if t.place == "s1") for r in (found, both)]
    assert up[0] < up[1], "missed rounds do not use the link"


def test_a_new_learner_fetches_the_whole_copy_with_the_free_bandwidth() -> None:
    found = predict(Case(MODEL, Options(), hub(1e9, learners=1), link_share=1.0))
    assert found.join_seconds == pytest.approx(4 * 24e6 / (1e9 - 2e6 * MORE), rel=1e-3)


def test_memory_is_the_most_that_a_shard_needs_plus_payloads_in_transit() -> None:
    found = predict(Case(MODEL, Options(shards=2), hub(1e9), link_share=1.0))
    assert found.memory_bytes == pytest.approx(0.28e9 + 26 * 12e6 + 4 * 2 * 1e6 * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quorum": 5}, "quorum=5 exceeds learners=4"),
        ({"fragments": 0}, "fragments=0 is out of range"),
        ({"period": 2, "fragments": 2, "overlap": 2}, "overlap=2 must be below period=2"),
        ({"shards": 25}, "shards=25 exceeds fragments=24"),
        ({"grace_margin": 1.0}, "grace_margin=1 is out of range"),
    ],
)
def test_invalid_settings_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(hub(1e8), **options)


def test_invalid_links_and_sites_are_rejected() -> None:
    with pytest.raises(ConfigError, match="up=-1 of a link is out of range"):
        Link(-1.0, 1.0)
    with pytest.raises(ConfigError, match="latency_seconds=-1"):
        Link(1.0, 1.0, -1.0)
    with pytest.raises(ConfigError, match="learners of site 'a'=0"):
        Site("a", 0, Link(1.0, 1.0))
    with pytest.raises(ConfigError, match="no site is given"):
        Network(())
    with pytest.raises(ConfigError, match="learners=2 is below sites=3"):
        equal_sites(3, 2, Link(1.0, 1.0))
    with pytest.raises(ConfigError, match="step_seconds of site 'a'=0"):
        Site("a", 1, Link(1.0, 1.0), 0.0)
    with pytest.raises(ConfigError, match="site names are not unique"):
        Network((Site("a", 1, Link(1.0, 1.0)), Site("a", 1, Link(1.0, 1.0))))
    with pytest.raises(ConfigError, match="site 'a' has a relay and 'own' links"):
        Site("a", 2, Link(1.0, 1.0, shared=False), relay=True)
    one, link = Site("a", 1, Link(1.0, 1.0)), Link(1.0, 1.0)
    with pytest.raises(ConfigError, match="'b' is behind 'a', which is not an earlier site with a"):
        Network((one, Site("b", 1, link, relay=True, upstream="a")))
    with pytest.raises(ConfigError, match="'b' is behind 'c', which is not an earlier site"):
        Network((one, Site("b", 1, link, upstream="c")))
    with pytest.raises(ConfigError, match="relay_rate=0 is out of range"):
        Network((one,), relay_rate=0.0)
    with pytest.raises(ConfigError, match="link_share=2"):
        Case(MODEL, Options(), hub(1e8), link_share=2.0)
