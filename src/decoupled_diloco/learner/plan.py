"""What is done to the parameters at one step boundary, as data.

One process decides, by its `LearnerMachine`; every rank of a sharded learner can then do the same
at the same step, because a plan is a JSON object that can be broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from decoupled_diloco.protocol.effects import Apply, Hold, LearnerEffect, Snapshot
from decoupled_diloco.protocol.wire import decode, encode


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The orders of one boundary.

    Attributes:
        orders: What to apply, then what to snapshot, in this order.
        hold: Do not start the next step yet (synchronous baselines only).
    """

    orders: tuple[Apply | Snapshot, ...] = ()
    hold: bool = False

    @classmethod
    def of(cls, effects: Iterable[LearnerEffect]) -> StepPlan:
        """The part of a machine's answer that belongs to the boundary.

        >>> StepPlan.of([Hold("not back yet")])
        StepPlan(orders=(), hold=True)
        """
        effects = list(effects)
        return cls(
            tuple(effect for effect in effects if isinstance(effect, (Apply, Snapshot))),
            any(isinstance(effect, Hold) for effect in effects),
        )

    @property
    def applied(self) -> tuple[int, ...]:
        """The fragments whose global weights are taken."""
        return tuple(order.fragment for order in self.orders if isinstance(order, Apply))

    def to_json(self) -> dict[str, Any]:
        """As plain values, for a broadcast to the other ranks."""
        return {"orders": [encode(order) for order in self.orders], "hold": self.hold}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepPlan:
        """The plan from `to_json`.

        Raises:
            ProtocolError: an order is none of this version's.
        """
        kinds: tuple[type[Any], ...] = (Apply, Snapshot)
        orders = [cast("Apply | Snapshot", decode(order, kinds)) for order in data["orders"]]
        return cls(tuple(orders), bool(data["hold"]))
