"""Parameter stores: how a learner's parameters are read and written at a step boundary.

`ParameterStore` is the seam for sharded models (FSDP2, tensor parallel). `ModuleStore` is a plain
module on one device. On CUDA nothing here but `read` makes the host wait for the device: a snapshot
is gathered on the training stream (a copy inside the device), travels to pinned memory on a
`SideStream`, and only the background thread waits for it; what is applied is uploaded on the side
stream, and the training stream, not the host, waits for that.

Shapes: N elements of a fragment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from decoupled_diloco.learner.learner_model import (
    give_buffers_memory,
    refuse_what_cannot_be_written,
)
from decoupled_diloco.learner.optimizers import WeightCopies
from decoupled_diloco.merge import (
    Fragment,
    Layout,
    cast_like,
    gather,
    layout_of,
    parameters_numel,
    scatter,
)
from decoupled_diloco.merge.fragments import Views, views_of
from decoupled_diloco.merge.layout import named_tensors

Values = Any
"""A fragment's values: fp32 [N] on the CPU, or what a store has in their place, as several ranks'
does. Whoever is not the store, nor made for it, only hands them on."""


class HostCopy(Protocol):
    """A fragment's parameters on their way to the host, or already there."""

    def values(self) -> Tensor:
        """fp32 [N] on the CPU; waits for the copy if need be, so call it in the background."""


class ParameterStore(Protocol):
    """The parameters of one learner, by fragments. Called at step boundaries, by the trainer."""

    @property
    def layout(self) -> Layout:
        """What there is to synchronise."""

    def snapshot(self, fragment: Fragment) -> HostCopy:
        """Copies a fragment as it is now."""

    def overwrite(self, fragment: Fragment, values: Values) -> None:
        """θ ← values (never written to again), rounded to θ's dtypes."""

    def combine(
        self, fragment: Fragment, values: Values, minus: HostCopy | None, keep: float
    ) -> None:
        """θ ← (θ − minus) + values, or without ``minus`` θ ← keep·θ + (1 − keep)·values.

        ``minus`` is a snapshot, or `Rounded`, the values that were written last. All are fp32 [N]
        on the CPU; the arithmetic is fp32, the result is rounded.
        """

    def prepare(self, values: Tensor) -> Tensor:
        """The values (fp32 [N] on the CPU) in memory from which they go to the device fastest.

        Called in the background, before they are staged.
        """


@dataclass(frozen=True)
class Copied:
    """A copy that is complete."""

    tensor: Values

    def values(self) -> Tensor:
        """See `HostCopy.values`."""
        copied: Tensor = self.tensor
        return copied


@dataclass(frozen=True)
class Rounded:
    """A published copy as the parameters had it when it was written: rounded to their dtypes."""

    fragment: Fragment
    layout: Layout
    published: Values

    def values(self) -> Tensor:
        """See `HostCopy.values`."""
        return cast_like(self.fragment, self.layout, self.published)


@dataclass(frozen=True)
class Copying:
    """A copy from CUDA that completes with an event."""

    pinned: Tensor
    event: torch.cuda.Event

    def values(self) -> Tensor:
        """See `HostCopy.values`."""
        self.event.synchronize()
        return self.pinned


def _owner_of(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


class ModuleStore:
    """A plain module, all of its trainable parameters on one device.

    Args:
        module: The model; its parameters are changed in place.

    Raises:
        ConfigError: nothing is trainable, a dtype is not supported, or a tensor has no values.
    """

    def __init__(self, module: nn.Module) -> None:
        refuse_what_cannot_be_written(module)
        give_buffers_memory(module)
        self._layout = layout_of(module)
        named = named_tensors(module)
        self._tensors = [named[spec.name] for spec in self._layout.tensors]
        self._buffers = {
            number: (_owner_of(module, spec.name), spec.name.rpartition(".")[2])
            for number, spec in enumerate(self._layout.tensors)
            if spec.is_buffer
        }
        self._views: dict[int, Views | None] = {}
        self._device = self._tensors[0].device
        self._side = SideStream(self._device) if self._device.type == "cuda" else None

    @property
    def layout(self) -> Layout:
        """See `ParameterStore.layout`."""
        return self._layout

    def _tensors_of(self, fragment: Fragment) -> Sequence[Tensor]:
        """The layout's tensors, those of the fragment as the module has them now."""
        # Only the fragment's buffers are looked up: a module may put a new tensor in the place of
        # a buffer, and a model may have ten thousand of them.
        for number in self._buffers and fragment.tensors:
            if number in self._buffers:
                owner, name = self._buffers[number]
                self._tensors[number] = getattr(owner, name)
        return self._tensors

    def _views_of(self, fragment: Fragment) -> tuple[Sequence[Tensor], Views | None]:
        tensors, index = self._tensors_of(fragment), fragment.index
        self._views[index] = views_of(fragment, tensors, self._views.get(index))
        return tensors, self._views[index]

    def snapshot(self, fragment: Fragment) -> HostCopy:
        """See `ParameterStore.snapshot`."""
        tensors, views = self._views_of(fragment)
        flat = torch.empty(fragment.numel, dtype=torch.float32, device=self._device)
        gather(fragment, tensors, flat, views)
        if self._side is None:
            return Copied(flat)
        (pinned,), event = self._side.download([flat], self._side.mark())
        return Copying(pinned, event)

    def overwrite(self, fragment: Fragment, values: Tensor) -> None:
        """See `ParameterStore.overwrite`."""
        scatter(fragment, self._upload(values), *self._views_of(fragment))

    def combine(
        self, fragment: Fragment, values: Tensor, minus: HostCopy | None, keep: float
    ) -> None:
        """See `ParameterStore.combine`."""
        theta = torch.empty(fragment.numel, dtype=torch.float32, device=self._device)
        tensors, views = self._views_of(fragment)
        gather(fragment, tensors, theta, views)
        new = self._upload(values)
        if minus is not None:
            theta.sub_(self._reference(minus)).add_(new)
        else:
            theta.mul_(keep).add_(new, alpha=1 - keep)
        trained = parameters_numel(fragment, self._layout)
        # break: buffers-carried
        theta[trained:].copy_(new[trained:])  # a mean of buffers leaves nothing to carry
        scatter(fragment, theta, tensors, views)

    def prepare(self, values: Tensor) -> Tensor:
        """See `ParameterStore.prepare`: pinned memory for CUDA."""
        return values if self._side is None else values.pin_memory()

    def _reference(self, minus: HostCopy) -> Tensor:
        """What is subtracted, where the parameters are; the host neither waits nor rounds."""
        if isinstance(minus, Rounded):
            # break: rebase-keeps-rounding
            return cast_like(minus.fragment, minus.layout, self._upload(minus.published))
        if isinstance(minus, Copying):  # It left on the stream on which it comes back.
            return self._upload(minus.pinned)
        return self._upload(minus.values())

    def _upload(self, values: Tensor) -> Tensor:
        return values if self._side is None else self._side.upload([values])[0]


class FollowedStore:
    """A parameter store whose writes are followed by the optimizers' copies.

    Args:
        store: The store.
        parameters: Name to parameter, tied ones under all of their names.
        copies: What follows.
    """

    def __init__(
        self, store: ParameterStore, parameters: Mapping[str, Tensor], copies: WeightCopies
    ) -> None:
        self._store = store
        self._copies = copies
        self._parameters = [
            [parameters[name] for name in (spec.name, *spec.aliases) if name in parameters]
            for spec in store.layout.tensors
        ]

    @property
    def layout(self) -> Layout:
        """See `ParameterStore.layout`."""
        return self._store.layout

    def snapshot(self, fragment: Fragment) -> HostCopy:
        """See `ParameterStore.snapshot`."""
        return self._store.snapshot(fragment)

    def overwrite(self, fragment: Fragment, values: Values) -> None:
        """See `ParameterStore.overwrite`."""
        with self._copies.following(self._written(fragment)):
            self._store.overwrite(fragment, values)

    def combine(
        self, fragment: Fragment, values: Values, minus: HostCopy | None, keep: float
    ) -> None:
        """See `ParameterStore.combine`."""
        with self._copies.following(self._written(fragment)):
            self._store.combine(fragment, values, minus, keep)

    def prepare(self, values: Tensor) -> Tensor:
        """See `ParameterStore.prepare`."""
        return self._store.prepare(values)

    def _written(self, fragment: Fragment) -> list[Tensor]:
        numbers = dict.fromkeys(fragment.tensors)
        return [parameter for number in numbers for parameter in self._parameters[number]]


class SideStream:
    """See the module; safe to use from several threads.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """Is reached when the device has done what this thread's stream was given up to now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def download(
        self, tensors: Sequence[Tensor], after: torch.cuda.Event
    ) -> tuple[list[Tensor], torch.cuda.Event]:
        """Begins to copy tensors of the device to pinned memory.

        Args:
            after: The copies begin when it is reached.

        Returns:
            The copies, and the event of their end. A thread that waits for it sleeps.
        """
        copies = [
            torch.empty(each.shape, dtype=each.dtype, device="cpu", pin_memory=True)
            for each in tensors
        ]
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for copy, each in zip(copies, tensors, strict=True):
                copy.copy_(each, non_blocking=True)
                each.record_stream(self._stream)
            done.record(self._stream)
        return copies, done

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors on the device; this thread's stream waits for them, the host does not.

        Args:
            tensors: In pinned memory; what is not is copied there first. What is on the device
                already is given back.
        """
        training = torch.cuda.current_stream(self._device)
        found = []
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for each in tensors:
                source = each if each.is_cuda or each.is_pinned() else each.pin_memory()
                found.append(source.to(self._device, non_blocking=True))
        training.wait_stream(self._stream)
        for before, after in zip(tensors, found, strict=True):
            if after is not before:
                after.record_stream(training)
        return found
