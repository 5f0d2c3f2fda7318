"""Properties of plans for every model and link."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco_plan.bandwidth.case import Case, Model, demand
from decoupled_diloco_plan.bandwidth.flows import Flow, Flows
from decoupled_diloco_plan.bandwidth.network import HUB, Link, Network, Site
from decoupled_diloco_plan.bandwidth.published_tables import SYSTEMS, schedule_of, utilization
from decoupled_diloco_plan.bandwidth.round_periods import simulate

steps = st.floats(0.01, 30.0)


@given(
    system=st.sampled_from(sorted(SYSTEMS)),
    layers=st.integers(1, 40),
    period=st.integers(1, 60),
    step=steps,
    gbit=st.floats(0.01, 2000.0),
)
@settings(max_examples=60, deadline=None)
def test_more_bandwidth_is_never_worse_and_a_share_is_a_share(
    system: str, layers: int, period: int, step: float, gbit: float
) -> None:
    each = SYSTEMS[system]
    schedule = schedule_of(each, layers, period if each.periodic else 1)
    slow = utilization(schedule, step, 1.0 / gbit)
    fast = utilization(schedule, step, 0.5 / gbit)
    assert 0.0 < slow <= fast + 1e-9
    assert fast <= 1.0 + 1e-9


@given(
    layers=st.integers(1, 30), period=st.integers(1, 40), step=steps, factor=st.floats(0.01, 100.0)
)
@settings(max_examples=40, deadline=None)
def test_only_the_ratio_of_compute_and_traffic_counts(
    layers: int, period: int, step: float, factor: float
) -> None:
    schedule = schedule_of(SYSTEMS["streaming-overlap"], layers, period)
    one = utilization(schedule, step, 0.3 * step)
    other = utilization(schedule, step * factor, 0.3 * step * factor)
    assert math.isclose(one, other, rel_tol=1e-6)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 2), st.floats(1.0, 1e3)), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_every_byte_arrives_and_no_link_carries_more_than_it_can(
    sizes: list[tuple[int, float]],
) -> None:
    capacities = [10.0, 30.0, 90.0]
    flows = Flows(capacities)
    for number, (link, nbytes) in enumerate(sizes):
        flows.start(Flow(number, (link, (link + 1) % 3), 1, nbytes))
    over = 0
    while over < len(sizes):
        end = flows.next_end()
        for link, capacity in enumerate(capacities):
            used = sum(f.rate * f.count for f in flows.active if link in f.links)
            assert used <= capacity * (1 + 1e-9)
        over += len(flows.advance(end))
    for link in range(3):
        mean, _ = flows.mean_and_peak(link, 0.0, flows.now, flows.now)
        wanted = sum(n for first, n in sizes if link in (first, (first + 1) % 3))
        assert math.isclose(mean * flows.now, wanted, rel_tol=1e-6)


@given(
    params=st.floats(1e6, 1e10),
    step=st.floats(0.1, 5.0),
    period=st.integers(4, 30),
    fragments=st.integers(1, 12),
    learners=st.integers(1, 6),
    used=st.floats(0.05, 6.0),
)
@settings(max_examples=40, deadline=None)
def test_rounds_never_exceed_the_link_nor_what_is_due(
    params: float, step: float, period: int, fragments: int, learners: int, used: float
) -> None:
    """A link that carries a share of the demand keeps about that share of rounds, never more."""
    rate = 1e9
    setting = Options(fragments=fragments, period=period, overlap=2)
    model = Model(params, 8, step)

    def network(rate: float) -> Network:
        site = Site("here", learners, Link(rate, rate))
        return Network((site,), HUB, Link(math.inf, math.inf))

    rate *= demand(Case(model, setting, network(rate))) / used
    rounds = simulate(Case(model, setting, network(rate)))
    assert 0.0 <= rounds.kept <= min(1.0, 1 / used) + 0.15
    assert 0.0 < rounds.compute <= 1.0
    for t in rounds.traffic:
        assert t.mean <= t.capacity * (1 + 1e-6)
        assert t.peak <= t.capacity * (1 + 1e-6) or t.capacity == math.inf
