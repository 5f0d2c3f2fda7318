"""Make torchtitan accept the CPU, although it requires an accelerator; import this first.

This module replaces the functions of ``torch.cuda`` that torchtitan uses: device names, memory
sizes, and sums that gloo supports. Everything else is torchtitan itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch._utils
from torch.distributed.fsdp import FSDPModule


def nothing(*arguments: Any) -> None:
    """Do nothing: the CPU has no such state."""


CPU = SimpleNamespace(
    current_device=lambda: 0,
    empty_cache=nothing,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=nothing,
    set_device=nothing,
    synchronize=nothing,
)

with mock.patch.multiple(
    torch._utils,
    _get_available_device_type=lambda: "cpu",
    _get_device_module=lambda kind: CPU,
):
    import torchtitan.train  # noqa: F401

_set_factor = FSDPModule.set_gradient_divide_factor


def set_factor(self: FSDPModule, factor: float) -> None:
    """Make FSDP2 scale separately: unlike NCCL, gloo has no sum with a factor."""
    _set_factor(self, factor)
    self.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = set_factor  # type: ignore[method-assign]
