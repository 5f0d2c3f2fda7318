"""Plans of small models, for tests of payloads."""

from __future__ import annotations

from typing import Any

from torch import nn

from decoupled_diloco.merge import layout_of, make_outer
from decoupled_diloco.merge.plan import MergePlan


def plan_of(model: nn.Module, codec: str = "fp32", method: str = "rda", **more: Any) -> MergePlan:
    """One fragment, and an outer step that takes the merged change as it is."""
    return MergePlan.make(
        layout_of(model),
        fragments=1,
        strategy="balanced",
        uplink=codec,
        downlink="fp32",
        method=method,
        weighting="tokens",
        outer=make_outer("sgd", 1.0, 0.0),
        **more,
    )
