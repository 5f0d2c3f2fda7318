"""The two commands that this distribution adds to `ddiloco`."""

from __future__ import annotations

from decoupled_diloco_plan.bandwidth.command import plan
from decoupled_diloco_plan.goodput.command import goodput

__all__ = ["goodput", "plan"]
