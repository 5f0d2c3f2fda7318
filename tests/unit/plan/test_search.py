"""The search finds a setting, or names the limiting resource."""

from __future__ import annotations

import pytest

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco_plan.bandwidth.case import (
    Case,
    Model,
    step_seconds_of,
    wire_format,
)
from decoupled_diloco_plan.bandwidth.compare import TARGETS, compare_systems, needs
from decoupled_diloco_plan.bandwidth.network import Link, Network, Site, equal_sites
from decoupled_diloco_plan.bandwidth.plan_options import PlanOptions
from decoupled_diloco_plan.bandwidth.published_tables import NETWORKS, Reach, wall_clock
from decoupled_diloco_plan.bandwidth.search import propose

MODEL = Model(12e9, 48, 1.0)
BF16 = (wire_format("bf16"), wire_format("bf16"))
AIM = PlanOptions(utilization=0.95)


def four(gbit: float, latency: float = 0.02) -> Network:
    rate = gbit * 1e9 / 8
    return Network(equal_sites(4, 4, Link(rate, rate, latency)))


def test_a_wide_link_supports_the_papers_period_without_a_limit() -> None:
    slower = Model(12e9, 48, 4.0)
    found = propose(slower, four(100.0), AIM)
    assert found.reached
    assert found.case.options.period == 24
    assert found.binds == ""


def test_a_narrow_link_needs_a_longer_period_and_is_named() -> None:
    found = propose(MODEL, four(0.5), AIM)
    o = found.case.options
    assert found.reached
    assert found.prediction.utilization >= 0.95
    assert found.prediction.rounds.delay_steps <= o.overlap
    assert o.period > 24
    assert "link of site-" in found.binds
    shorter = propose(MODEL, four(1.0), AIM).case.options.period
    assert shorter < o.period


def test_a_fragment_is_due_in_every_step_and_there_is_slack() -> None:
    """As in the paper. Whole layers, and fragments below 1 MiB, allow fewer fragments."""
    found = propose(MODEL, four(2.0), AIM)
    o = found.case.options
    assert o.fragments == o.period
    assert o.overlap <= o.period / 12
    assert found.prediction.grace.slack > 0
    whole = propose(
        MODEL, four(2.0), PlanOptions(utilization=0.95, partition="layer-strided")
    ).case.options
    assert whole.fragments <= 50
    small = propose(Model(2**20, 4, 1.0), four(10.0), AIM).case.options
    assert (small.period, small.fragments) == (24, 2)


def test_a_setting_for_many_sites_is_found() -> None:
    """Each shard's rounds must be small enough to finish in time."""
    rate = 2e9 / 8
    sites = Network(equal_sites(8, 8, Link(rate, rate, 0.03)))
    found = propose(Model(1e9, 24, 0.3), sites, AIM)
    assert found.reached


def test_fewer_bits_are_tried_before_a_longer_period() -> None:
    wide = propose(MODEL, four(2.0), PlanOptions(utilization=0.95, up="bf16", down="bf16"))
    both = propose(MODEL, four(2.0), AIM)
    assert (both.case.up.name, both.case.down.name) == ("int4", "int4")
    assert both.case.options.period < wide.case.options.period


def test_given_options_are_kept() -> None:
    given = PlanOptions(utilization=0.9, period=768, fragments=16, overlap=40, shards=4)
    found = propose(MODEL, four(2.0), given)
    o = found.case.options
    assert (o.period, o.fragments, o.overlap, o.shards) == (768, 16, 40, 4)


@pytest.mark.long
def test_if_no_setting_reaches_the_aim_the_best_names_the_limit() -> None:
    found = propose(MODEL, four(0.01), AIM)
    assert not found.reached
    assert found.prediction.utilization < 0.5, "only its local shard is near"
    assert "link of site-" in found.binds
    above = propose(MODEL, four(100.0), PlanOptions(utilization=0.999))
    assert not above.reached
    assert "Learner.step" in above.binds


def test_latency_can_be_the_limit() -> None:
    quick = Model(1e6, 4, 0.01)
    found = propose(quick, four(10.0, latency=2.0), PlanOptions(utilization=0.95, period=24))
    assert not found.reached
    assert "latency" in found.binds


def test_an_invalid_aim_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"utilization=1\.2 is out of range"):
        propose(MODEL, four(1.0), PlanOptions(utilization=1.2))


def test_if_all_wait_the_slowest_learner_sets_the_pace() -> None:
    slow = Site("slow", 1, Link(1e12, 1e12), 2.0)
    network = Network((*equal_sites(3, 3, Link(1e12, 1e12)), slow))
    share = {s.system: s for s in compare_systems(Case(MODEL, Options(shards=24), network))}
    assert share["diloco"].utilization == pytest.approx(1.25 / 2, rel=1e-3)
    assert share["decoupled"].utilization > 0.99
    assert share["decoupled"].step_seconds == pytest.approx(4 / 3.5, rel=0.01)


def test_the_systems_are_in_the_published_order() -> None:
    """Four regions, 12B, a few Gbit/s: data-parallel is not feasible."""
    found = propose(MODEL, four(3.0), AIM).case
    results = compare_systems(Case(MODEL, found.options, four(3.0), found.up, found.down))
    share = {s.system: s.utilization for s in results}
    assert share["data-parallel"] < share["diloco"] <= share["streaming"] < share["decoupled"]
    assert share["decoupled"] / share["data-parallel"] > 20


def test_the_bandwidth_of_a_target_reaches_it() -> None:
    model = Model(1e9, 24, 1.0)
    setting = Options(shards=4)
    found = needs(Case(model, setting, four(10.0, latency=0.0)))
    for system in ("data-parallel", "diloco", "streaming", "decoupled"):
        rates = [n.gbit_per_second for n in found if n.system == system]
        assert len(rates) == len(TARGETS)
        assert None not in rates
        assert rates == sorted(rates)  # type: ignore[type-var]
    top = next(n for n in found if n.system == "diloco" and n.utilization == 0.9)
    assert top.gbit_per_second is not None
    there = four(top.gbit_per_second, latency=0.0)
    share = {s.system: s.utilization for s in compare_systems(Case(model, setting, there))}[
        "diloco"
    ]
    assert 0.9 <= share < 0.91


def test_the_wall_clock_is_that_of_scaling_laws() -> None:
    """By hand for 10B, a trillion tokens, 1024 chips of 300 TFLOP/s, M = 4, H = 30."""
    found = wall_clock(
        params=10e9,
        tokens=1e12,
        tokens_per_step=4e6,
        chips=1024,
        flops_per_chip=3e14,
        learners=4,
        period=30,
        between=NETWORKS["low"],
    )
    steps = 1e12 / 4e6
    assert found.compute == pytest.approx(6 * 10e9 * 1e12 / (1024 * 3e14))
    assert found.within == pytest.approx((320e9 / 400e9 * (1 - 4 / 1024) + 1e-4) * steps)
    assert found.between == pytest.approx((320e9 / 10e9 * (1 - 1 / 1024) + 1e-2) * steps / 30)
    assert found.total == found.compute + found.within + found.between
    with pytest.raises(ConfigError, match="learners=8 exceeds chips=4"):
        wall_clock(
            params=1e9,
            tokens=1e9,
            tokens_per_step=1e6,
            chips=4,
            flops_per_chip=1e14,
            learners=8,
            period=1,
            between=Reach(1e9, 0.0),
        )


def test_the_ideal_step_time() -> None:
    assert step_seconds_of(10e9, 1e6, 100, 6e14) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="chips=0 is out of range"):
        step_seconds_of(1e9, 1e6, 0, 1e14)


def test_wire_formats_are_codecs_or_bits() -> None:
    assert wire_format("fp32").bits == 32.0
    assert wire_format("3 bits").bits == 3.0
    assert wire_format("int4").bits == 4.125
    assert wire_format("topk-160").bits == 0.5546875
    with pytest.raises(ConfigError, match=r"'int9' is unknown.*written as '4bit'"):
        wire_format("int9")
    with pytest.raises(ConfigError, match="64 bits is out of range"):
        wire_format("64bit")
