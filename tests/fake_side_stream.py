"""A side stream without CUDA, for what is built on `SideStream`: it copies, and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Reached:
    """An event of the past."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class FakeSideStream:
    """Copies at once.

    Attributes:
        down: Tensors that were brought to the host.
        up: Tensors that were brought to the device.
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
    """The meta device in the place of a GPU: what is computed where shows, values do not."""

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
    """Refuses operations on tensors of several devices: on a GPU the host would wait for them."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Looks at the tensors of an operation."""
        found = tree_leaves((args, kwargs or {}))
        devices = {each.device.type for each in found if isinstance(each, Tensor)}
        assert len(devices) < 2, f"{func} has tensors of {devices}"
        return func(*args, **(kwargs or {}))
