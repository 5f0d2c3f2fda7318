"""Tensor subclasses that wrap another tensor, as in packages for quantized weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map


class Wrapped(Tensor):
    """Computes with the tensor inside it and has no storage itself."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], {"dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Tensor], context: Any, *_: Any) -> Wrapped:
        assert context["dtype"] == tensors["inner"].dtype
        return cls(tensors["inner"])

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = tree_map(lambda t: t.inner if isinstance(t, Wrapped) else t, (args, kwargs or {}))
        out = tree_map(
            lambda t: cls(t) if isinstance(t, Tensor) else t, function(*plain[0], **plain[1])
        )
        return return_and_correct_aliasing(function, args, kwargs or {}, out)


class Rounding(Wrapped):
    """Rounds to integers when it is written, as a coarse quantization."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(function, types, args, kwargs)
        if function is torch.ops.aten.copy_.default and isinstance(args[0], Rounding):
            args[0].inner.round_()
        return out
