"""The tokens of a step: a number from the program, or a count of what its model is called with."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError

logger = logging.getLogger(__name__)

DEPTH_MAX = 4
"""Tensors are found in tuples, lists, mappings and dataclasses nested at most so deep."""

_UNCOUNTED: WeakSet[nn.Module] = WeakSet()
"""Models for which the warning has been logged: one warning per model, not one per epoch."""


def whole_tokens(tokens: Any) -> int:
    """The tokens of a step as a whole number; a fraction is rounded to the nearest.

    Args:
        tokens: An int, a float, a NumPy number or a tensor with one element; 0 or more. A tensor on
            a GPU is waited for.

    Raises:
        ConfigError: It is negative, NaN, infinite, or not a number.

    >>> import torch
    >>> whole_tokens(0), whole_tokens(12.0), whole_tokens(torch.tensor(5))
    (0, 12, 5)
    """
    if type(tokens) is int and tokens >= 0:  # the usual case: a step must cost next to nothing
        return tokens
    number = tokens
    if hasattr(tokens, "item") and hasattr(tokens, "shape"):  # a tensor, or a number of NumPy's
        number = tokens.item() if math.prod(tokens.shape) == 1 else None
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number) or number < 0:
        raise ConfigError(
            f"tokens={tokens!r} is not a valid number of tokens: give the step's tokens as one "
            "number, 0 or more"
        )
    rounded: int = round(number)
    return rounded


class TokenCounter:
    """Counts what a model is called with while it trains: tokens without padding, or samples.

    Of each call it counts the ones in ``attention_mask``; without one, the elements of
    ``input_ids``; without these, of the first tensor: its elements if it has rows of whole numbers,
    as tokens are, otherwise its length. Tensors may be inside a mapping, a tuple, a list or a
    dataclass. Calls in evaluation mode are not counted. All calls of a step count, so gradient
    accumulation needs no help.

    Args:
        model: It has a hook until `close`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._count: Tensor | int | None = None
        self._hook = model.register_forward_pre_hook(self._called, with_kwargs=True)

    def _called(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found = counted(given, named) if module.training else None
        if found is not None:
            self._count = found if self._count is None else self._count + found

    def take(self) -> int:
        """The count since the last `take`; a count on a GPU is waited for.

        If nothing could be counted, it is 1, with one warning for each model.
        """
        count, self._count = self._count, None
        if count is None:
            warn_uncounted(
                self._model,
                "the model was not called through model(...) in training mode with a tensor",
            )
            return 1
        return int(count)

    def close(self) -> None:
        """Removes the hook."""
        self._hook.remove()


def warn_uncounted(model: nn.Module, why: str) -> None:
    """Logs, once for each model, that the tokens of its steps cannot be counted."""
    if model in _UNCOUNTED:
        return
    _UNCOUNTED.add(model)
    logger.warning(
        "the tokens of a step cannot be counted (%s), so each such step counts as 1 token: a "
        "budget in tokens and the weights of unequal learners are wrong; pass tokens= to "
        "learner.step, learner.batches or learner.following",
        why,
    )


def counted(given: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor | int | None:
    """The tokens, or samples, of one call; ``None`` if it has no tensor.

    >>> import torch
    >>> counted((torch.zeros(4, 7),), {})
    4
    >>> counted((), {"input_ids": torch.zeros(4, 7)})
    28
    >>> counted(((torch.zeros(4, 7, dtype=torch.int64), 3),), {})
    28
    """
    tensors = list(_tensors((*given, named), "", DEPTH_MAX))
    by_name = {name: each for name, each in reversed(tensors) if name}
    mask, tokens = by_name.get("attention_mask"), by_name.get("input_ids")
    if mask is not None and mask.ndim == 2:  # A mask of more dimensions is of pairs.
        return mask.detach().sum()
    if tokens is not None:
        return tokens.numel()
    first = next((each for _, each in tensors if each.ndim), None)
    if first is None:
        return None
    whole = not (first.dtype.is_floating_point or first.dtype.is_complex)
    are_tokens = first.ndim == 2 and whole and first.dtype != torch.bool
    return first.numel() if are_tokens else len(first)


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value with their names, in order."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth == 0:
        return
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, str(key), depth - 1)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, "", depth - 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name), field.name, depth - 1)
