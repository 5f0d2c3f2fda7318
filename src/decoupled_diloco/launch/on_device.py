"""A model and its batches on the device that trains; the host waits for none of the copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from decoupled_diloco.workloads.workload import Batch

ASYNCHRONOUS = ("cuda", "xpu")
"""Devices that copy to and from pinned memory while they compute."""


def placed(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on a device; a workload that has placed its model itself keeps its own choice."""
    return model.to(device) if home_of(model) == torch.device("cpu") else model


def home_of(model: nn.Module) -> torch.device | None:
    """The one device of a model's tensors; `None`: they are spread over several."""
    tensors: Iterable[Tensor] = chain(model.parameters(), model.buffers())
    devices = {each.device for each in tensors}
    return devices.pop() if len(devices) == 1 else None


def moved(batch: Batch, device: torch.device) -> Batch:
    """A batch with its CPU tensors on a device; the host does not wait for the copies.

    Looks into tuples, lists, mappings and dataclasses. An object with a ``to`` method, as Hugging
    Face's `BatchEncoding`, moves itself. Tensors that are on another device stay where they are.
    """
    match batch:
        case Tensor():
            if batch.device.type != "cpu" or device.type == "cpu":
                return batch
            if device.type in ASYNCHRONOUS and not batch.is_pinned():
                batch = batch.pin_memory()
            return batch.to(device, non_blocking=True)
        case str() | bytes() | nn.Module() | type():
            return batch
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    match batch:
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(moved(each, device) for each in batch))
        case tuple() | list():
            return type(batch)(moved(each, device) for each in batch)
        case Mapping():
            there = {key: moved(value, device) for key, value in batch.items()}
            return there if type(batch) is dict else type(batch)(there)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(batch):
        return _moved_fields(batch, device)
    return batch


def _moved_fields(batch: Any, device: torch.device) -> Any:
    """Not `dataclasses.replace`, which would call ``__post_init__`` again."""
    there = object.__new__(type(batch))
    for field in dataclasses.fields(batch):
        object.__setattr__(there, field.name, moved(getattr(batch, field.name), device))
    return there
