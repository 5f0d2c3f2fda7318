"""Parameter stores: read and write a learner's parameters at a step boundary.

`ParameterStore` is the interface that sharded models (FSDP2, tensor parallel) implement.
`ModuleStore` is for a plain module on one device. On CUDA the training thread never waits for the
device. A snapshot is gathered on the training stream, which copies inside the device. A
`SideStream` then copies it to pinned memory, and only the background thread waits for that.
Values to apply are uploaded on the side stream. The training stream waits for them, not the host.

Shapes: N elements of a fragment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.learner_model import (
    give_buffers_memory,
    refuse_what_cannot_be_written,
)
from decoupled_diloco.learner.optimizers import Moments, StatePart, WeightCopies
from decoupled_diloco.merge import (
    Fragment,
    Layout,
    cast_like,
    gather,
    layout_of,
    parameters_numel,
    scatter,
)
from decoupled_diloco.merge.fragments import Views, clipped, views_of
from decoupled_diloco.merge.layout import named_tensors

Values = Any
"""A fragment's values: fp32 [N] on the CPU, or a handle of the store, as with several ranks. Code
outside of the store and its helpers only passes them on."""


class HostCopy(Protocol):
    """A copy of a fragment's parameters on the host, which may still be in progress."""

    def values(self) -> Tensor:
        """Return fp32 [N] on the CPU. It may wait for the copy, so call it in the background."""


class ParameterStore(Protocol):
    """The parameters of one learner, by fragments; the trainer uses it at step boundaries."""

    @property
    def layout(self) -> Layout:
        """The tensors to synchronize."""

    def admit(self, layout: Layout) -> None:
        """Take the layout of the run, which may add moments to the store's own.

        Raises:
            ConfigError: The store cannot synchronize moments.
        """

    def snapshot(self, fragment: Fragment) -> HostCopy:
        """Copy a fragment as it is now."""

    def overwrite(self, fragment: Fragment, values: Values) -> None:
        """Set θ ← values, rounded to θ's dtypes; the values are never written to again."""

    def combine(
        self, fragment: Fragment, values: Values, minus: HostCopy | None, keep: float
    ) -> None:
        """Set θ ← (θ − minus) + values, or without ``minus`` θ ← keep·θ + (1 − keep)·values.

        ``minus`` is a snapshot, or `Rounded`, the values that were written last. All are fp32 [N]
        on the CPU. The arithmetic is fp32; the result is rounded to θ's dtypes. Buffers are set to
        their values.
        """

    def prepare(self, values: Tensor) -> Tensor:
        """Return the values (fp32 [N] on the CPU) in memory that uploads to the device fastest.

        The background calls it before the values are staged.
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
    """A published copy as the parameters held it after it was written: rounded to their dtypes."""

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
        ConfigError: Nothing is trainable, a dtype is not supported, or a tensor has no values.
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

    def admit(self, layout: Layout) -> None:
        """See `ParameterStore.admit`."""
        if layout.of_model is not layout:
            raise ConfigError(
                "[sync.moments] of the run merges the moments of the inner optimizer, but this "
                "learner has none: pass optimizer= to Learner, or take [sync.moments] out"
            )

    def _tensors_of(self, fragment: Fragment) -> Sequence[Tensor]:
        """Return the layout's tensors, with the fragment's buffers as the module has them now."""
        # A module may replace a buffer with a new tensor. Only the fragment's buffers are read
        # again, because a model may have ten thousand of them.
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
        theta[trained:].copy_(new[trained:])  # buffers are not trained, so nothing is carried
        scatter(fragment, theta, tensors, views)

    def prepare(self, values: Tensor) -> Tensor:
        """See `ParameterStore.prepare`: pinned memory for CUDA."""
        return values if self._side is None else values.pin_memory()

    def _reference(self, minus: HostCopy) -> Tensor:
        """Return what to subtract, on the parameters' device; the host neither waits nor rounds."""
        if isinstance(minus, Rounded):
            # break: rebase-keeps-rounding
            return cast_like(minus.fragment, minus.layout, self._upload(minus.published))
        if isinstance(minus, Copying):
            # No wait for its event: the side stream uploads after its own download has ended.
            return self._upload(minus.pinned)
        return self._upload(minus.values())

    def _upload(self, values: Tensor) -> Tensor:
        return values if self._side is None else self._side.upload([values])[0]


class FollowedStore:
    """A parameter store that lets the optimizers' copies of the weights follow each write.

    Args:
        store: The store that reads and writes the parameters.
        parameters: Name to parameter; tied ones under all of their names.
        copies: The copies that follow.
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

    def admit(self, layout: Layout) -> None:
        """See `ParameterStore.admit`."""
        self._store.admit(layout)

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


@dataclass(frozen=True)
class CopiedWithMoments:
    """Copies of a fragment's tensors of the model, and of its moments."""

    model: HostCopy
    moments: HostCopy

    def values(self) -> Tensor:
        """See `HostCopy.values`."""
        return torch.cat([self.model.values(), self.moments.values()])


class MomentStore:
    """A parameter store for the model's tensors and for moments of the inner optimizer.

    A moment that the optimizer does not have is NaN in a snapshot, and is not written.

    Args:
        store: The store of the model's tensors.
        parameters: Name to parameter; tied ones under all of their names.
        moments: The moments; None: those of the run are ignored, as by an observer.
    """

    def __init__(
        self, store: ParameterStore, parameters: Mapping[str, Tensor], moments: Moments | None
    ) -> None:
        self._store = store
        self._parameters = parameters
        self._moments = moments
        self._run = store.layout
        self._parts: dict[int, tuple[Fragment, Fragment, list[StatePart]]] = {}
        self._device = parameters[store.layout.tensors[0].name].device
        self._side: SideStream | None = None

    @property
    def layout(self) -> Layout:
        """See `ParameterStore.layout`."""
        return self._store.layout

    def admit(self, layout: Layout) -> None:
        """See `ParameterStore.admit`."""
        self._run = layout
        self._store.admit(layout.of_model)
        if self._has_moments and self._device.type == "cuda":
            self._side = SideStream(self._device)

    @property
    def _has_moments(self) -> bool:
        return self._run.of_model is not self._run

    @property
    def awaits_step(self) -> bool:
        """Whether the run merges moments, and `stepped` has not been called yet."""
        return self._has_moments and self._moments is not None and not self._moments.has_stepped

    def snapshot(self, fragment: Fragment) -> HostCopy:
        """See `ParameterStore.snapshot`."""
        model, parts = self._split(fragment)
        copy = self._store.snapshot(model)
        if model is fragment:
            return copy
        numel = fragment.numel - model.numel
        flat = torch.full((numel,), math.nan, dtype=torch.float32, device=self._device)
        if self._moments is not None:
            self._moments.read(parts, flat)
        if self._side is None:
            return Copied(torch.cat([copy.values(), flat]))
        (pinned,), event = self._side.download([flat], self._side.mark())
        return CopiedWithMoments(copy, Copying(pinned, event))

    def overwrite(self, fragment: Fragment, values: Values) -> None:
        """See `ParameterStore.overwrite`."""
        model, parts = self._split(fragment)
        self._store.overwrite(model, values[: model.numel])
        if self._moments is not None and parts:
            self._moments.write(parts, values[model.numel :])

    def combine(
        self, fragment: Fragment, values: Values, minus: HostCopy | None, keep: float
    ) -> None:
        """See `ParameterStore.combine`; moments are set, as buffers are."""
        model, parts = self._split(fragment)
        if isinstance(minus, CopiedWithMoments):
            minus = minus.model
        elif isinstance(minus, Rounded):
            minus = Rounded(model, self._run, minus.published[: model.numel])
        elif isinstance(minus, Copied):
            minus = Copied(minus.tensor[: model.numel])
        self._store.combine(model, values[: model.numel], minus, keep)
        if self._moments is not None and parts:
            self._moments.write(parts, values[model.numel :])

    def prepare(self, values: Tensor) -> Tensor:
        """See `ParameterStore.prepare`."""
        return self._store.prepare(values)

    def stepped(self, fragments: Iterable[Fragment], run_step: int) -> None:
        """See `Moments.stepped`."""
        assert self._moments is not None, "an observer takes no steps"
        self._moments.stepped((p for each in fragments for p in self._split(each)[1]), run_step)

    def _split(self, fragment: Fragment) -> tuple[Fragment, list[StatePart]]:
        """Return a fragment without its moments, and its moments."""
        known = self._parts.get(fragment.index)
        if known is None or known[0] is not fragment:
            parts, specs = [], self._run.tensors
            for piece in fragment.pieces:
                if specs[piece.tensor].is_moment:
                    owner, keys = self._run.moment(piece.tensor)
                    parameter = self._parameters[specs[owner].name]
                    parts.append(StatePart(parameter, keys, piece.start, piece.stop))
            model = fragment
            if parts:
                model = clipped(fragment, 0, fragment.numel - sum(each.numel for each in parts))
            known = self._parts[fragment.index] = (fragment, model, parts)
        return known[1], known[2]


class SideStream:
    """A CUDA stream for transfers; see the module. Several threads may use it.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """Return an event that is reached after all work queued so far on this thread's stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def download(
        self, tensors: Sequence[Tensor], after: torch.cuda.Event
    ) -> tuple[list[Tensor], torch.cuda.Event]:
        """Start to copy tensors of the device to pinned memory.

        Args:
            tensors: Tensors on the device.
            after: The event after which the copies start.

        Returns:
            The copies, and the event of their end. A thread that waits for the event sleeps.
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
                # Otherwise the allocator could reuse this memory on the training stream too early.
                each.record_stream(self._stream)
            done.record(self._stream)
        return copies, done

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the same tensors on the device; this thread's stream waits for the copies.

        Args:
            tensors: Tensors in pinned memory; others are first copied there. Tensors that are
                already on the device are returned unchanged.
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
