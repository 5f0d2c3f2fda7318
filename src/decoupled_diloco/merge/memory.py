"""Inspect the memory of a tensor's elements, to recognize tied and writable tensors.

Most tensors are a window (data pointer, shape, strides) onto their own memory. Three kinds are not.
A DTensor has a local part. A *wrapper subclass* (quantized weights, 8-bit optimizer states)
computes with the tensors inside it and has data pointer 0. A sparse or meta tensor has no window.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this process: the local part of a DTensor, otherwise all."""
    # A lookup by name, because an import of DTensor takes a second that a plain model need not pay.
    to_local = getattr(tensor, "to_local", None)
    if to_local is not None:
        # Without gradients, to_local() returns its inner tensor. With gradients, and in detach() of
        # a DTensor, PyTorch dispatches an operation, which takes 0.1 ms.
        with torch.no_grad():
            tensor = to_local()
    return tensor.detach()


def has_window(tensor: Tensor) -> bool:
    """Return whether shape and strides select the elements in the tensor's own memory."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return False
    try:
        return not tensor.numel() or tensor.data_ptr() != 0
    except RuntimeError:  # a subclass without storage
        return False


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether the elements belong to tensors inside this one; False for a `DTensor`."""
    return hasattr(tensor, "__tensor_flatten__") and not (
        hasattr(tensor, "to_local") or has_window(tensor)
    )


def inside_of(wrapper: Tensor) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors inside a wrapper by attribute, and the context needed to rebuild it."""
    names, context = cast("Any", wrapper).__tensor_flatten__()
    return {name: getattr(wrapper, name) for name in names}, context


def place_of(tensor: Tensor) -> object:
    """Return a key that is equal for two tensors exactly if they have the same elements.

    The key is valid only while both tensors are referenced.
    """
    local = local_of(tensor)
    if local.numel() and has_window(local):
        return (local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride())
    if local.numel() and is_wrapper(local):
        tensors, _ = inside_of(local)
        return (type(local), tuple(map(place_of, tensors.values())))
    return id(tensor)  # no memory to compare: a meta tensor, or an empty part of a sharded one


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements may share memory, as in an expanded tensor.

    >>> overlaps_itself(torch.zeros(3, 1).expand(3, 2)), overlaps_itself(torch.zeros(3, 2).t())
    (True, False)
    """
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += (size - 1) * stride
    return False


def keeps_values(tensor: Tensor) -> bool:
    """Return whether a wrapper stores exactly the values of its dtype that are written to it.

    A quantized tensor rounds them, and some wrappers are not writable at all. The function writes
    to a copy and compares.
    """
    try:
        copy = local_of(tensor).clone()
        values = torch.linspace(-1.37, 2.11, copy.numel(), dtype=torch.float32, device="cpu")
        values = values.view(copy.shape).to(copy.device, copy.dtype)
        copy.copy_(values)
        return is_wrapper(copy) and torch.equal(torch.empty_like(values).copy_(copy), values)
    except Exception:  # a user's subclass may raise anything; it then counts as not writable
        return False
