"""A step boundary's orders as data."""

from __future__ import annotations

import json
import math

import pytest

from decoupled_diloco.learner.shared import StepPlan, with_loss
from decoupled_diloco.protocol.messages import (
    LOSS_MAX,
    Apply,
    Hold,
    Leave,
    Release,
    Snapshot,
    StepReport,
    Version,
)
from decoupled_diloco.protocol.wire import encode

APPLY = Apply(3, Version(1, 2), "carry", 0, "it has arrived")
SNAPSHOT = Snapshot(4, Version(1, 1), 17, "it is due")


def test_a_plan_has_only_orders_of_the_boundary() -> None:
    plan = StepPlan.of([APPLY, SNAPSHOT, Release("all have arrived")])
    assert plan == StepPlan((APPLY, SNAPSHOT), hold=False)
    assert plan.applied == (3,)
    assert StepPlan.of([Hold("not yet")]).hold


@pytest.mark.parametrize(
    ("loss", "reported"),
    [
        (2.5, 2.5),
        (-1.0, -1.0),
        *((x, LOSS_MAX) for x in (1e31, -1e31, math.inf, -math.inf, math.nan)),
    ],
)
def test_a_reported_loss_is_a_number_that_json_can_represent(loss: float, reported: float) -> None:
    report = with_loss(StepReport(3, 96, 0.5), loss)
    assert report == StepReport(3, 96, 0.5, loss=reported)
    assert json.loads(json.dumps(encode(report), allow_nan=False))["loss"] == reported
    other = Leave("asked to stop")
    assert with_loss(other, loss) is other
