"""A learner's model as one module under the names that count."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge import overlaps_itself

Model = nn.Module | Sequence[nn.Module]
"""A model, or the parts of one that a rank has: several stages of a pipeline."""


class JoinedParts(nn.Module):
    """Parts of one model, under the whole model's names.

    Attributes:
        parts: They themselves, which train.

    Raises:
        ConfigError: Two parts have a parameter of one name.
    """

    parts: tuple[nn.Module, ...]

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.__dict__["parts"] = tuple(parts)  # as children their names would begin with a number
        _graft(self, parts, "")


def _graft(target: nn.Module, parts: Sequence[nn.Module], place: str) -> None:
    children: dict[str, list[nn.Module]] = {}
    for part in parts:
        for name, parameter in part.named_parameters(recurse=False):
            if name in target._parameters:
                raise ConfigError(
                    f"parameter {place + name!r} is in several parts of the model: give each of a "
                    "rank's stages its own"
                )
            target.register_parameter(name, parameter)
        for name, buffer in part.named_buffers(recurse=False):
            kept = name not in part._non_persistent_buffers_set
            target.register_buffer(name, buffer, persistent=kept)
        for name, child in part.named_children():
            children.setdefault(name, []).append(child)
    for name, found in children.items():
        whole = found[0]
        if len(found) > 1:
            whole = nn.Module()
            _graft(whole, found, f"{place}{name}.")
        target.add_module(name, whole)


def device_text(model: nn.Module) -> str:
    """The device of a model's parameters for people, the first one's name after a comma.

    A GPU that the process counts otherwise than its machine has the machine's number in brackets:
    ``"cuda:0 (GPU 3), NVIDIA H100 80GB HBM3"``.

    >>> device_text(nn.Linear(2, 2, device="cpu"))
    'cpu'
    """
    devices = dict.fromkeys(parameter.device for parameter in model.parameters())
    text = " + ".join(map(_numbered, devices))
    with suppress(AttributeError, AssertionError, RuntimeError):  # a device without names
        first = next(iter(devices))
        if first.type != "cpu":
            text += f", {torch.get_device_module(first).get_device_name(first)}"
    return text


def _numbered(device: torch.device) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if device.type != "cuda" or device.index is None or device.index >= len(visible):
        return str(device)
    number = visible[device.index].strip()
    return str(device) if number in ("", str(device.index)) else f"{device} (GPU {number})"


def parts_of(model: Model) -> Sequence[nn.Module]:
    """The modules that train: the model itself, or its parts."""
    if isinstance(model, JoinedParts):
        return model.parts
    return (model,) if isinstance(model, nn.Module) else model


def plain(model: Model) -> nn.Module:
    """The module that wrappers (`torch.compile`, DDP, Fabric) were put around: its names count."""
    if not isinstance(model, nn.Module):
        parts = [plain(part) for part in model]
        return parts[0] if len(parts) == 1 else JoinedParts(parts)
    while True:
        inner = getattr(model, "_orig_mod", getattr(model, "_original_module", None))
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def give_buffers_memory(module: nn.Module) -> None:
    """Replace buffers that cannot be written in place by copies that can.

    Expanded buffers have several elements in one place; inference mode makes the others.
    """
    copies: dict[int, Tensor] = {}  # a tied buffer stays tied
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not is_writable(buffer):
                if id(buffer) not in copies:
                    copies[id(buffer)] = writable_copy(buffer)
                owner._buffers[name] = copies[id(buffer)]


def is_writable(buffer: Tensor) -> bool:
    """Return whether each element can be written in place."""
    if buffer.is_inference():
        return False
    return buffer.layout is not torch.strided or not overlaps_itself(buffer)


def writable_copy(buffer: Tensor) -> Tensor:
    """Give a copy with memory for each element."""
    with torch.inference_mode(False):
        return buffer.detach().clone(memory_format=torch.contiguous_format)
