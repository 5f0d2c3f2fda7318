"""A side stream without CUDA, for what is built on `SideStream`: it copies, and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


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
