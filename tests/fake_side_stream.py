"""A side stream without CUDA, which copies at once and counts, for code built on `SideStream`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Reached:
    """An event that has already completed."""

    def synchronize(self) -> None:
        """Return at once."""


class FakeSideStream:
    """Copies at once.

    Attributes:
        down: Number of tensors copied to the host.
        up: Number of tensors copied to the device.
    """

    def __init__(self) -> None:
        self.down = self.up = 0

    def mark(self) -> Any:
        """See `SideStream.mark`."""
        return Reached()

    def download(self, tensors: Sequence[Tensor], after: Any) -> tuple[list[Tensor], Any]:
        """See `SideStream.download`."""
        self.down += len(tensors)
        return [each.clone() for each in tensors], Reached()

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `SideStream.upload`."""
        self.up += len(tensors)
        return [each.clone() for each in tensors]


class MetaSideStream(FakeSideStream):
    """Uses the meta device instead of a GPU, to check devices but not values."""

    def download(self, tensors: Sequence[Tensor], after: Any) -> tuple[list[Tensor], Any]:
        """See `SideStream.download`."""
        assert all(each.is_meta for each in tensors)
        self.down += len(tensors)
        return [torch.zeros(each.shape, dtype=each.dtype) for each in tensors], Reached()

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `SideStream.upload`."""
        self.up += len(tensors)
        return [torch.empty_like(each, device="meta") for each in tensors]


class OnOneDevice(TorchDispatchMode):
    """Rejects operations on tensors of several devices, for which the host would wait on a GPU."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Check the devices of an operation's tensors."""
        found = tree_leaves((args, kwargs or {}))
        devices = {each.device.type for each in found if isinstance(each, Tensor)}
        assert len(devices) < 2, f"{func} has tensors of {devices}"
        return func(*args, **(kwargs or {}))
