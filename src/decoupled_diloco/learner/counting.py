"""How much a model was trained on, seen where it is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TokenCounter:
    """Counts what a model is given while it trains: tokens that are no padding, or samples.

    Of each call: the ones in ``attention_mask``; without one, the elements of ``input_ids``;
    without these, of the first tensor: its elements if they are whole numbers in rows, as tokens
    are, else its length. Evaluation is not counted. All calls of a step
    count, so gradient accumulation needs no help.

    Args:
        model: Is hooked until `close`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._count: Tensor | int = 0
        self._hook = model.register_forward_pre_hook(self._called, with_kwargs=True)

    def _called(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module.training:
            self._count = self._count + counted(given, named)

    def take(self) -> int:
        """The count since it was taken last, at least 1. Waits for the device, if it is one."""
        count, self._count = int(self._count), 0
        return max(1, count)

    def close(self) -> None:
        """Counts no more."""
        self._hook.remove()


def counted(given: tuple[Any, ...], named: dict[str, Any]) -> Tensor | int:
    """What one call is trained on.

    >>> import torch
    >>> counted((torch.zeros(4, 7),), {})
    4
    >>> counted((), {"input_ids": torch.zeros(4, 7)})
    28
    >>> counted((torch.zeros(4, 7, dtype=torch.int64),), {})
    28
    """
    mask, tokens = named.get("attention_mask"), named.get("input_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:  # A mask of more dimensions is of pairs.
        return mask.detach().sum()
    if isinstance(tokens, Tensor):
        return tokens.numel()
    tensors = (each for each in (*given, *named.values()) if isinstance(each, Tensor))
    first = next((each for each in tensors if each.ndim), None)
    if first is None:
        return 1
    are_tokens = first.ndim == 2 and first.dtype in (torch.int32, torch.int64)
    return first.numel() if are_tokens else len(first)
