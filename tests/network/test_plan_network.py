"""The prediction of `ddiloco plan` for a link with a set rate, against a real run over it."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

import pytest

from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco_plan.bandwidth.case import Case, Model
from decoupled_diloco_plan.bandwidth.inputs import model_of
from decoupled_diloco_plan.bandwidth.network import HUB, Link, Network, Site
from decoupled_diloco_plan.bandwidth.round_periods import simulate
from network.conftest import Saturated
from network.network_runs import LEARNERS, merged, step_times
from network.network_spaces import unavailable

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "namespaces are available"),
]

WARM, LAST = 24, 8


@pytest.mark.long
def test_the_number_of_rounds_on_a_slow_link(saturated: Saturated) -> None:
    """A third of what is due, or more rounds without all learners.

    A busy machine answers late, hence the wide margins.
    """
    pace = saturated.step_seconds
    steps = step_times(saturated.folder, "learner-0")
    typical = median(b - a for a, b in pairwise(steps))
    if typical > 1.25 * pace:
        pytest.skip(
            f"the machine is too busy for the pace: a step of {pace} s took {typical:.2f} s, so "
            "the link is not what a round waits for"
        )
    begin, end = steps[WARM], steps[-LAST]
    kept = sum(begin < at <= end for at in merged(saturated.folder)) / (len(steps) - LAST - WARM)

    found, rate = model_of(saturated.config), saturated.mbit * 1e6 / 8
    # tbf delays packets by up to 0.2 s.
    near = Site("near", LEARNERS, Link(rate, rate, 0.2))
    network = Network((near,), HUB, Link(math.inf, math.inf))
    model = Model(found["params"], found["layers"] or 1, pace)
    plan = simulate(Case(model, Options(fragments=8, period=8, overlap=2), network))
    assert 0.2 < plan.kept < 0.4, "the link carries about a third of it"
    assert plan.kept - 0.12 <= kept <= 2 * plan.kept
