"""The loss of a step as a number, read without waiting for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError


class StepLosses:
    """Turns what a program passes as ``loss=`` into numbers.

    A tensor on a GPU is copied to the host in the background of the device. Its number is returned
    by a later `read`, usually the next, because the training thread must not wait for the device.
    While one copy is under way, further losses are skipped.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._copied: torch.Event | None = None

    def read(self, loss: Any) -> float | None:
        """The number to report with this step, or ``None``: there is none yet.

        Args:
            loss: A number or a tensor with one element; NaN and infinity are allowed.

        Raises:
            ConfigError: It is neither.
        """
        if loss is None or type(loss) is float:
            return loss
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ConfigError(
                    f"loss has {loss.numel()} elements: give one number, such as loss.mean()"
                )
            loss = loss.detach().reshape(())
            if loss.device.type != "cpu":
                return self._later(loss)
        try:
            if isinstance(loss, str | bytes):
                raise TypeError
            return float(loss)
        except (TypeError, ValueError):
            raise ConfigError(
                f"loss={loss!r} is not a number: give the step's loss as a number or as a tensor "
                "with one element"
            ) from None

    def _later(self, loss: Tensor) -> float | None:
        found = None
        if self._copied is not None:
            assert self._copy is not None
            if not self._copied.query():
                return None
            found = float(self._copy)
        if self._copy is None:
            pinned = loss.device.type in ("cuda", "xpu")
            self._copy = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=pinned)
        self._copy.copy_(loss, non_blocking=True)
        self._copied = torch.Event(loss.device)
        self._copied.record()
        return found
