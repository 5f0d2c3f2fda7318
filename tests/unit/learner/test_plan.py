"""A step boundary's orders as data that other ranks can follow."""

from __future__ import annotations

import json

import pytest

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.learner.plan import StepPlan
from decoupled_diloco.protocol.effects import Apply, Hold, Release, Snapshot
from decoupled_diloco.protocol.messages import Version

APPLY = Apply(3, Version(1, 2), "carry", 0, "it is in")
SNAPSHOT = Snapshot(4, Version(1, 1), 17, "it is due")


def test_only_what_belongs_to_the_boundary_is_in_it() -> None:
    plan = StepPlan.of([APPLY, SNAPSHOT, Release("all is back")])
    assert plan == StepPlan((APPLY, SNAPSHOT), hold=False)
    assert plan.applied == (3,)
    assert StepPlan.of([Hold("not yet")]).hold


def test_it_travels_as_json() -> None:
    plan = StepPlan((APPLY, SNAPSHOT), hold=True)
    assert StepPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ProtocolError, match="type 'Hold'"):
        StepPlan.from_json({"orders": [{"type": "Hold", "why": ""}], "hold": False})
