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

APPLY = Apply(3, Version(1, 2), "carry", 0, "it is in")
SNAPSHOT = Snapshot(4, Version(1, 1), 17, "it is due")


def test_only_what_belongs_to_the_boundary_is_in_it() -> None:
    plan = StepPlan.of([APPLY, SNAPSHOT, Release("all is back")])
    assert plan == StepPlan((APPLY, SNAPSHOT), hold=False)
    assert plan.applied == (3,)
    assert StepPlan.of([Hold("not yet")]).hold


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (2.5, 2.5),
        (-1.0, -1.0),
        *((x, LOSS_MAX) for x in (1e31, -1e31, math.inf, -math.inf, math.nan)),
    ],
)
def test_a_report_tells_the_loss_in_a_number_that_json_has(loss: float, told: float) -> None:
    said = with_loss(StepReport(3, 96, 0.5), loss)
    assert said == StepReport(3, 96, 0.5, loss=told)
    assert json.loads(json.dumps(encode(said), allow_nan=False))["loss"] == told
    other = Leave("told to")
    assert with_loss(other, loss) is other
