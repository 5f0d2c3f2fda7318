"""Notice when a model's tensors are no longer those with which its learner joined.

A learner reads and writes the tensors that the model had at the join. If a parameter is replaced,
untied, unfrozen, cast or moved afterwards, training goes on with a tensor that the run never sees.
Nothing fails by itself, so each step compares what the modules hold with what they held.

Cost: a comparison takes less than a microsecond for each tensor. Of a model with more than
`SLICE` tensors and modules, each step compares one slice, the next step the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import starmap
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.modules import is_writable, writable_copy
from decoupled_diloco.merge.layout import Layout, unwrapped_name

logger = logging.getLogger(__name__)

SLICE = 512

_FORM = attrgetter("dtype", "device", "requires_grad")
_BUFFER_FORM = attrgetter("shape", "dtype", "device")

_NEW_LEARNER = "change the model before the Learner is created, or close it and create a new one"


_MISSING = object()

_Entry = tuple[dict[str, Any], str, object]
"""A table, a key of it, and what stands for the value where the key is gone."""


@dataclass
class _Slice:
    """Some of the modules' tables: what they held at the join under some of their keys."""

    tables: list[dict[str, Any]]
    sizes: list[int]
    entries: list[_Entry]
    held: list[Any]
    parameters: list[Tensor]
    forms: list[Any]

    def is_unchanged(self) -> bool:
        # Both sides of each comparison run in C: this is on the path of every step.
        if list(map(len, self.tables)) != self.sizes:
            return False
        if not all(map(is_, starmap(dict.get, self.entries), self.held)):
            return False
        return list(map(_FORM, self.parameters)) == self.forms


@dataclass
class _Buffer:
    """A synchronised buffer: where it is, and its form at the join."""

    name: str
    table: dict[str, Tensor | None]
    key: str
    tensor: Tensor
    form: Any


class ModelGuard:
    """Compares a model with itself at the join.

    Args:
        model: The model under the names that count.
        layout: What the run synchronises of it.
        buffers_in_place: Whether a buffer must stay the same tensor. Otherwise a module may put
            another tensor of the same form in its place.
        settle: Called before a difference is reported, to undo one that is only for a while: after
            an evaluation FSDP2 holds other parameters.

    Attributes:
        compares_buffers: Whether the run synchronises buffers.
    """

    compares_buffers = True

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        *,
        buffers_in_place: bool = False,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._settle = settle
        self._frozen: set[str] = set()
        self._model = model
        self._in_place = buffers_in_place
        self._names = _tensors_by_name(model)
        self._forms = {name: _FORM(tensor) for name, tensor in self._names.items()}
        self._slices = list(_slices_of(model))
        self._next = 0
        synchronised = {spec.name for spec in layout.tensors if spec.is_buffer}
        self._buffers = [each for each in _buffers_of(model) if each.name in synchronised]

    def check(self) -> None:
        """Compare the next slice, and all buffers that are synchronised.

        Raises:
            ConfigError: Something differs; the message names it and says what to do.
        """
        piece = self._slices[self._next]
        self._next = (self._next + 1) % len(self._slices)
        if not piece.is_unchanged():
            self._settle()
            self._explain()
            piece.forms = list(map(_FORM, piece.parameters))  # frozen, or as at the join again
        for buffer in self._buffers if self.compares_buffers else ():
            tensor = buffer.table.get(buffer.key)
            if tensor is not buffer.tensor or tensor.shape != buffer.form[0]:
                self._check_buffer(buffer, tensor)

    def _check_buffer(self, buffer: _Buffer, tensor: Tensor | None) -> None:
        if tensor is None:
            problem = "was removed" if buffer.key not in buffer.table else "became None"
        elif _BUFFER_FORM(tensor) != buffer.form:
            problem = (
                f"changed from {_described(buffer.form)} to {_described(_BUFFER_FORM(tensor))}"
            )
        elif self._in_place:
            problem = "was replaced by another tensor"
        else:
            if not is_writable(tensor):
                tensor = buffer.table[buffer.key] = writable_copy(tensor)
            buffer.tensor = tensor
            return
        raise ConfigError(
            f"buffer {buffer.name!r} {problem} after the learner joined, and the run still "
            "synchronizes the old one: keep its shape and dtype and write into it in place, or "
            "register it with persistent=False, or set sync.buffers = 'local'"
        )

    def _explain(self) -> None:
        """Name the first difference.

        Raises:
            ConfigError: There is one that would be a wrong exchange.
        """
        now = _tensors_by_name(self._model)
        for name, tensor in self._names.items():
            problem = self._problem(name, tensor, now.get(name))
            if problem:
                raise ConfigError(f"parameter {name!r} {problem}: {_NEW_LEARNER}")
        for name in now.keys() - self._names.keys():
            raise ConfigError(
                f"parameter {name!r} was added after the learner joined and is not synchronized: "
                f"{_NEW_LEARNER}"
            )
        for name, tensor in self._names.items():
            if self._forms[name] != _FORM(tensor) and name not in self._frozen:
                self._frozen.add(name)
                logger.warning(
                    "parameter %r was frozen after the learner joined; training goes on, and the "
                    "run's values are still applied to it",
                    name,
                )

    def _problem(self, name: str, joined: Tensor, now: Tensor | None) -> str:
        """What is wrong with a parameter, in words; empty if nothing is."""
        if now is None:
            return "was removed after the learner joined"
        if now is not joined:
            tied = [other for other, tensor in self._names.items() if tensor is joined]
            if len(tied) > 1:
                other = next(each for each in tied if each != name)
                return f"was replaced or untied from {other!r} after the learner joined"
            return "was replaced by another tensor after the learner joined"
        dtype, device, trained = self._forms[name]
        if now.dtype != dtype:
            return f"was cast from {dtype} to {now.dtype} after the learner joined"
        if now.device != device:
            return f"was moved from {device} to {now.device} after the learner joined"
        if now.requires_grad and not trained:
            return "was unfrozen after the learner joined and is not synchronized"
        return ""


def _tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {unwrapped_name(name): tensor for name, tensor in named}


def _slices_of(model: nn.Module) -> Iterator[_Slice]:
    tables: list[dict[str, Any]] = []
    entries: list[_Entry] = []
    for module in model.modules():
        for table in (module._parameters, module._modules):
            if not isinstance(table, dict):  # a ScriptModule's are views of something in C++
                continue
            tables.append(table)
            for key in table:
                if len(entries) == SLICE:  # also within a table: a list has thousands of experts
                    yield _slice_of(tables, entries)
                    tables, entries = [table], []
                entries.append((table, key, _MISSING))
    yield _slice_of(tables, entries)


def _slice_of(tables: list[dict[str, Any]], entries: list[_Entry]) -> _Slice:
    held = [table[key] for table, key, _ in entries]
    parameters = [each for each in held if isinstance(each, Tensor)]
    forms = list(map(_FORM, parameters))
    return _Slice(tables, list(map(len, tables)), entries, held, parameters, forms)


def _buffers_of(model: nn.Module) -> Iterator[_Buffer]:
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is not None:
                name = unwrapped_name(f"{prefix}.{key}" if prefix else key)
                yield _Buffer(name, module._buffers, key, tensor, _BUFFER_FORM(tensor))


def _described(form: Any) -> str:
    shape, dtype, device = form
    return f"{dtype} {tuple(shape)} on {device}"
