"""What a model and its inner optimizer must not bring into a run."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge import (
    Layout,
    is_finite,
    is_wrapper,
    keeps_values,
    local_of,
    overlaps_itself,
)

OWN_COPIES = (
    "fp32_from_fp16_groups",
    "fp32_from_fp16_params",
    "fp32_groups_flat_partition",
    "master_params",
    "single_partition_of_fp32_groups",
)
"""Attributes in which wrappers (apex, DeepSpeed, Megatron) keep fp32 weights of their own."""

_OWN_COPY_NAME = re.compile(r"master|^(fp32|float32|main)_?(p|param|params|weight|weights|copy)$")

_WAY_OUT = (
    "its own copy of the weights would undo what is applied. Refresh it in after_apply=…, which "
    "says that this is taken care of"
)


LAYOUT_CHARACTERS_MAX = 900_000
"""A layout travels in one control message of at most 1 MiB, with the run's settings beside it."""


def layout_text(layout: Layout) -> str:
    """The layout as the text that a join carries.

    Raises:
        ConfigError: the model has too many tensors for one control message.
    """
    text = layout.to_text()
    if len(text) > LAYOUT_CHARACTERS_MAX:
        raise ConfigError(
            f"the names and shapes of the model's {len(layout.tensors)} trainable tensors take "
            f"{len(text)} characters compressed, {LAYOUT_CHARACTERS_MAX} fit into one message: "
            "stack small tensors (experts, say) into one, freeze some, or shorten their names"
        )
    return text


def refuse_what_cannot_be_written(model: nn.Module) -> None:
    """Refuse tensors whose values a learner could not read or replace.

    Raises:
        ConfigError: A trainable parameter or a buffer has no values yet, or a trainable parameter
            has a form that does not keep the exact values written into it. The first is named.
    """
    parameters = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    for kind, tensors in (("parameter", parameters), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if is_lazy(tensor):
                raise ConfigError(
                    f"{kind} {name!r} of a lazy module has no shape yet: run the model once on a "
                    "batch (a dry run) before creating the Learner"
                )
            if local_of(tensor).is_meta:
                raise ConfigError(
                    f"{kind} {name!r} is on the meta device: give it memory and values "
                    "(module.to_empty(device=…), then its initialization) before the Learner"
                )
    for name, parameter in model.named_parameters():
        problem = _unwritable(local_of(parameter)) if parameter.requires_grad else ""
        if problem:
            raise ConfigError(f"trainable parameter {name!r} {problem}")


def _unwritable(tensor: Tensor) -> str:
    """Say why values written into a tensor would not be kept exactly; empty if they are."""
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}: make it dense, or freeze it"
    if is_wrapper(tensor):
        if keeps_values(tensor):
            return ""
        return (
            f"is a {type(tensor).__name__}, a tensor subclass that does not keep values exactly: "
            "freeze it, or train an ordinary tensor"
        )
    if tensor.is_inference():
        return "was made in inference mode: make it outside of torch.inference_mode()"
    if overlaps_itself(tensor):
        return (
            "has several elements in one place of memory (it is expanded): replace it with "
            "nn.Parameter(parameter.detach().clone(memory_format=torch.contiguous_format))"
        )
    return ""


def refuse_what_is_not_finite(model: nn.Module) -> None:
    """A learner whose weights are NaN or infinite has nothing to bring into a run.

    Raises:
        ConfigError: names the first such tensor.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_finite(local_of(parameter)):
            raise ConfigError(
                f"the model's {name!r} has NaN or infinite values: correct its initialization, or "
                "the checkpoint that it was loaded from"
            )


def refuse_own_copies(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that holds weights of its own would undo what is applied to the model.

    Three things are looked at: a tensor of ``param_groups`` that is no parameter of the model; an
    attribute of `OWN_COPIES` that is not empty; and, beside a parameter of lower precision, an fp32
    state of its shape that is called like a master copy (``master_param``, ``fp32_param``, …) or
    has just its values. The state exists only once the optimizer has stepped.

    Raises:
        ConfigError: it has such a copy.
    """
    kind = type(optimizer).__name__
    own = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise ConfigError(
                    f"group {number} of {kind} holds a tensor of shape {tuple(parameter.shape)} "
                    f"that is not a parameter of the model: {_WAY_OUT}"
                )
    for holder in (optimizer, getattr(optimizer, "_amp_stash", None)):
        for name in OWN_COPIES:
            # Only what is stored: a property of a wrapper may compute, or fail.
            if getattr(holder, "__dict__", {}).get(name):
                raise ConfigError(f"{kind} has {name!r}: {_WAY_OUT}")
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if _is_own_copy(key, value, parameter):
                raise ConfigError(f"{kind} keeps {name!r} in fp32 as {key!r}: {_WAY_OUT}")


def _is_own_copy(key: Any, value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or parameter.dtype.itemsize >= 4:
        return False
    if value.dtype is not torch.float32 or value.shape != parameter.shape:
        return False
    if _OWN_COPY_NAME.search(str(key).lower()):
        return True
    rounded = value.detach().to(parameter.device, parameter.dtype)
    return bool(parameter.any()) and torch.equal(rounded, parameter.detach())
