"""Max-min fair shares of links."""

from __future__ import annotations

import pytest

from decoupled_diloco_plan.bandwidth.flows import Flow, Flows


def test_a_single_transfer_gets_the_whole_link() -> None:
    flows = Flows([100.0])
    flows.start(Flow("a", (0,), 1, 500.0))
    assert flows.next_end() == pytest.approx(5.0)
    assert [f.key for f in flows.advance(5.0)] == ["a"]


def test_capacity_that_one_transfer_cannot_use_goes_to_the_others() -> None:
    """Link 0 limits a; b and the two transfers of c share the rest of link 1."""
    flows = Flows([10.0, 100.0])
    a, b, c = Flow("a", (0, 1), 1, 1e3), Flow("b", (1,), 1, 1e3), Flow("c", (1,), 2, 1e3)
    for flow in (a, b, c):
        flows.start(flow)
    flows.next_end()
    assert (a.rate, b.rate, c.rate) == (10.0, 30.0, 30.0)


def test_transfers_get_faster_when_another_ends() -> None:
    flows = Flows([100.0])
    flows.start(Flow("short", (0,), 1, 100.0))
    flows.start(Flow("long", (0,), 1, 300.0))
    assert [f.key for f in flows.advance(flows.next_end())] == ["short"]
    assert flows.now == pytest.approx(2.0)
    assert flows.next_end() == pytest.approx(4.0)


def test_traffic_is_counted_on_its_link() -> None:
    flows = Flows([100.0, 50.0])
    flows.start(Flow("a", (0,), 1, 200.0))
    flows.advance(flows.next_end())
    flows.advance(10.0)
    assert flows.mean_and_peak(0, 0.0, 10.0, 1.0) == pytest.approx((20.0, 100.0))
    assert flows.mean_and_peak(1, 0.0, 10.0, 1.0) == (0.0, 0.0)
