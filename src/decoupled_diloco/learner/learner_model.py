"""A learner's model: one module under canonical names, and checks of what must not happen to it.

- `plain` and `JoinedParts`: the module inside wrappers, or several stages as one module.
- `refuse_*` and `OptimizerChecks`: reject models and inner optimizers that a run cannot train.
- `ModelGuard`: a learner reads and writes the tensors that the model had at the join. If a
  parameter is replaced, untied, unfrozen, cast or moved afterwards, training continues with a
  tensor that the run never receives. Nothing else would fail, so each step compares the modules'
  tensors with those at the join. A comparison takes less than a microsecond per tensor. If a model
  has more than `SLICE` tensors and modules, each step compares the next slice of them.
- `LastWeights`: frameworks load the best checkpoint, or averaged weights, when training has ended.
  If a learner then submitted its model's weights, old weights would be merged as if they had been
  trained since.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import starmap
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook

from decoupled_diloco.errors import ConfigError, a_kind
from decoupled_diloco.learner.optimizers import (
    InnerOptimizers,
    Optimizers,
    WeightCopies,
    layers_of,
    several,
    suspects,
    undoes,
)
from decoupled_diloco.merge import (
    Layout,
    is_finite,
    is_wrapper,
    keeps_values,
    local_of,
    overlaps_itself,
)
from decoupled_diloco.merge.layout import unwrapped_name
from decoupled_diloco.merge.plan import MergePlan

Model = nn.Module | Sequence[nn.Module]
"""A model, or a rank's parts of one: several stages of a pipeline."""


class JoinedParts(nn.Module):
    """Parts of one model as one module, under the whole model's names.

    Attributes:
        parts: The original modules, which train.

    Raises:
        ConfigError: Two parts have a parameter with the same name.
    """

    parts: tuple[nn.Module, ...]

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        # Not as child modules: the parameters' names would begin with the number of the part.
        self.__dict__["parts"] = tuple(parts)
        _graft(self, parts, "")


def _graft(target: nn.Module, parts: Sequence[nn.Module], place: str) -> None:
    children: dict[str, list[nn.Module]] = {}
    for part in parts:
        for name, parameter in part.named_parameters(recurse=False):
            if name in target._parameters:
                raise ConfigError(
                    f"parameter {place + name!r} is in several parts of the model: give each stage "
                    "of a rank other parameters"
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
    """Describe the devices of a model's parameters; the first one's name follows a comma.

    If ``CUDA_VISIBLE_DEVICES`` renumbers a GPU, the machine's number is in brackets:
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
    """Return the modules that train: the model itself, or its parts."""
    if isinstance(model, JoinedParts):
        return model.parts
    return (model,) if isinstance(model, nn.Module) else model


def plain(model: Model) -> nn.Module:
    """Return the module inside wrappers (`torch.compile`, DDP, Fabric), as the run names it."""
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
    """Replace buffers that cannot be written in place with copies that can.

    Those are expanded buffers, which have several elements in one place, and buffers that were
    created in inference mode.
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
    """Return a copy with memory for each element."""
    with torch.inference_mode(False):
        return buffer.detach().clone(memory_format=torch.contiguous_format)


OWN_COPIES = (
    "fp32_from_fp16_groups",
    "fp32_from_fp16_params",
    "fp32_groups_flat_partition",
    "master_params",
    "single_partition_of_fp32_groups",
)
"""Attributes in which wrappers (apex, DeepSpeed, Megatron) keep separate fp32 weights."""

_OWN_COPY_NAME = re.compile(r"master|^(fp32|float32|main)_?(p|param|params|weight|weights|copy)$")

_FIX = (
    "register it (dd.register_weight_copies), or refresh it in a callback of "
    "learner.on_weights_updated"
)

_UNDONE = f"this copy of the weights would undo each global update; {_FIX}"


LAYOUT_CHARACTERS_MAX = 900_000
"""A layout travels in one control message of at most 1 MiB, together with the run's settings."""


def layout_text(layout: Layout) -> str:
    """Return the layout as text for a join message.

    Raises:
        ConfigError: The model has too many tensors for one control message.
    """
    text = layout.to_text()
    if len(text) > LAYOUT_CHARACTERS_MAX:
        raise ConfigError(
            f"the names and shapes of the model's {len(layout.tensors)} trainable tensors take "
            f"{len(text)} characters compressed, at most {LAYOUT_CHARACTERS_MAX} fit into one "
            "message: stack small tensors (such as experts) into one, freeze some, or shorten "
            "their names"
        )
    return text


def refuse_what_cannot_be_written(model: nn.Module) -> None:
    """Reject tensors whose values a learner cannot read or replace.

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
                    "(module.to_empty(device=…), then initialize it) before creating the Learner"
                )
    for name, parameter in model.named_parameters():
        problem = _unwritable(local_of(parameter)) if parameter.requires_grad else ""
        if problem:
            raise ConfigError(f"trainable parameter {name!r} {problem}")


def _unwritable(tensor: Tensor) -> str:
    """Return why a tensor would not keep written values exactly; empty if it does."""
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}: make it dense, or freeze it"
    if is_wrapper(tensor):
        if keeps_values(tensor):
            return ""
        return (
            f"is {a_kind(tensor)}, a tensor subclass that does not keep values exactly: "
            "freeze it, or train an ordinary tensor"
        )
    if tensor.is_inference():
        return "was created in inference mode: create it outside of torch.inference_mode()"
    if overlaps_itself(tensor):
        return (
            "has several elements in one place of memory (it is expanded): replace it with "
            "nn.Parameter(parameter.detach().clone(memory_format=torch.contiguous_format))"
        )
    return ""


def refuse_what_is_not_finite(model: nn.Module) -> None:
    """Reject a model with NaN or infinite weights, which must not enter a merge.

    Raises:
        ConfigError: A trainable parameter is not finite; the first is named.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_finite(local_of(parameter)):
            raise ConfigError(
                f"the model's {name!r} has NaN or infinite values: correct its initialization, or "
                "the checkpoint that it was loaded from"
            )


def refuse_own_copies(model: nn.Module, optimizer: Optimizers) -> None:
    """Reject an optimizer that keeps a separate copy of the weights, which would undo an apply.

    An optimizer is rejected for any of these:

    - a tensor in ``param_groups`` that is not a parameter of the model;
    - an attribute in `OWN_COPIES` that is not empty;
    - for a parameter of lower precision, an fp32 state of its shape that has the name of a master
      copy (``master_param``, ``fp32_param``, …) or has the parameter's values;
    - any other tensor near to a parameter with which the optimizer undoes an apply (`optimizers`),
      unless it is registered.

    Optimizers inside wrappers are checked as well. The state exists only after the first step.

    Args:
        model: The model.
        optimizer: One optimizer, or several in a sequence or a mapping.

    Raises:
        ConfigError: An optimizer has such a copy.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in named}
    narrow = {name: p for name, p in named if p.dtype.itemsize < 4}
    for each in several(optimizer).values():
        for layer in layers_of(each):
            _refuse_own_copies(names, narrow, layer)
        _refuse_what_undoes(names, each)


class OptimizerChecks:
    """Decides when to check an optimizer: in a few early steps, and when a state appears.

    For example, Lookahead creates its slow weights in its k-th step. `due` takes a microsecond.

    Args:
        model: The model.
        optimizer: As in `refuse_own_copies`.
    """

    AT_STEPS = (1, 2, 10, 100, 1000)

    def __init__(self, model: nn.Module, optimizer: Optimizers) -> None:
        self._model = model
        self._optimizer = optimizer
        self._steps = 0
        self._states: list[tuple[Any, Tensor]] = []
        for each in several(optimizer).values():
            for layer in layers_of(each):
                if isinstance(getattr(layer, "state", None), Mapping):
                    # One per group is enough: optimizers treat all parameters of a group alike.
                    of_groups = (group["params"][:1] for group in layer.param_groups[:4])
                    self._states += [(layer, p) for few in of_groups for p in few]
        self._keys = self._count_keys()

    def due(self) -> bool:
        """Return whether to call `check` now; call this once in each step."""
        self._steps += 1
        keys = self._count_keys()
        appeared, self._keys = keys != self._keys, keys
        return appeared or self._steps in self.AT_STEPS

    def _count_keys(self) -> int:
        return sum(len(layer.state.get(parameter) or ()) for layer, parameter in self._states)

    def check(self) -> None:
        """See `refuse_own_copies`."""
        refuse_own_copies(self._model, self._optimizer)


def _refuse_what_undoes(names: Mapping[int, str], optimizer: Any) -> None:
    copies = WeightCopies([optimizer])
    for suspect in suspects(names, optimizer):
        known = copies.known(suspect.layer, suspect.key) or (
            not suspect.in_state and copies.registered_elsewhere()
        )
        if known or undoes(optimizer, suspect) is False:
            continue
        kind, place = type(suspect.layer).__name__, "state" if suspect.in_state else "attribute"
        fix = f"dd.register_weight_copies({kind}, {suspect.key!r})"
        if not suspect.in_state:
            fix = f"dd.register_weight_copies({kind}, copies=…)"
        raise ConfigError(
            f"{kind} keeps separate weights in its {place} {suspect.key!r} (found beside "
            f"parameter {suspect.name!r}), which would undo each global update: let them follow "
            f"the global weights with {fix} before creating the Learner, or {_FIX}"
        )


def _refuse_own_copies(
    names: Mapping[int, str], narrow: Mapping[str, Tensor], optimizer: Any
) -> None:
    """See `refuse_own_copies`; ``narrow`` has the parameters of lower precision by name."""
    kind = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"group {number} of {kind} holds a tensor of shape {tuple(parameter.shape)} "
                    "that is not a parameter of the model. If another module trains it (a loss "
                    "with parameters, a second network), put both into one module and pass that "
                    "as the model: nn.ModuleDict({'model': model, 'loss': loss}). If it is a copy "
                    f"of the weights, {_FIX}"
                )
    for holder in (optimizer, getattr(optimizer, "_amp_stash", None)):
        for name in OWN_COPIES:
            # Only stored attributes: a wrapper's property may compute something, or fail.
            if getattr(holder, "__dict__", {}).get(name):
                raise ConfigError(f"{kind} has {name!r}: {_UNDONE}")
    for name, parameter in narrow.items():
        for key, value in getattr(optimizer, "state", {}).get(parameter, {}).items():
            if _is_own_copy(key, value, parameter):
                raise ConfigError(f"{kind} keeps {name!r} in fp32 as {key!r}: {_UNDONE}")


def _is_own_copy(key: Any, value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor):
        return False
    if value.dtype is not torch.float32 or value.shape != parameter.shape:
        return False
    if _OWN_COPY_NAME.search(str(key).lower()):
        return True
    rounded = value.detach().to(parameter.device, parameter.dtype)
    return bool(parameter.any()) and torch.equal(rounded, parameter.detach())


logger = logging.getLogger(__name__)

SLICE = 512

_FORM = attrgetter("dtype", "device", "requires_grad")
_BUFFER_FORM = attrgetter("shape", "dtype", "device")

_NEW_LEARNER = "change the model before the Learner is created, or close it and create a new one"


_MISSING = object()

_Entry = tuple[dict[str, Any], str, object]
"""A table, a key of it, and the default value if the key is missing."""


@dataclass
class _Slice:
    """Some keys of the modules' tables, with the values that they had at the join."""

    tables: list[dict[str, Any]]
    sizes: list[int]
    entries: list[_Entry]
    held: list[Any]
    parameters: list[Tensor]
    forms: list[Any]

    def is_unchanged(self) -> bool:
        # No Python loops: this is on the path of every step.
        if list(map(len, self.tables)) != self.sizes:
            return False
        if not all(map(is_, starmap(dict.get, self.entries), self.held)):
            return False
        return list(map(_FORM, self.parameters)) == self.forms


@dataclass
class _Buffer:
    """A synchronized buffer: its place in the module, and its form at the join."""

    name: str
    table: dict[str, Tensor | None]
    key: str
    tensor: Tensor
    form: Any


class ModelGuard:
    """Compares a model with its form at the join.

    Args:
        model: The module that `plain` returns.
        layout: The tensors that the run synchronizes.
        buffers_in_place: Whether a buffer must remain the same tensor. Otherwise a module may
            replace it with another tensor of the same form.
        settle: Called before a difference is reported, to undo a temporary one: after an
            evaluation, the modules of FSDP2 hold other parameters.

    Attributes:
        compares_buffers: Whether the run synchronizes buffers.
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
        synchronized = {spec.name for spec in layout.tensors if spec.is_buffer}
        self._buffers = [each for each in _buffers_of(model) if each.name in synchronized]

    def check(self) -> None:
        """Compare the next slice, and all synchronized buffers.

        Raises:
            ConfigError: Something differs; the message names it and the fix.
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
            "register it with persistent=False, or set sync.merge.buffers = 'local'"
        )

    def _explain(self) -> None:
        """Raise an error for the first difference; only log parameters that were frozen.

        Raises:
            ConfigError: A parameter was removed, replaced, cast, moved, unfrozen or added.
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
                    "parameter %r was frozen after the learner joined; training continues, and the "
                    "run's values are still applied to it",
                    name,
                )

    def _problem(self, name: str, joined: Tensor, now: Tensor | None) -> str:
        """Return what is wrong with a parameter, as text; empty if nothing is."""
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
            if not isinstance(table, dict):  # the tables of a ScriptModule are views of C++ objects
                continue
            tables.append(table)
            for key in table:
                if len(entries) == SLICE:  # also inside a table: a list may hold many experts
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


SAMPLED_ELEMENTS = 64
"""Number of sampled elements of each of two parameters."""


class LastWeights:
    """A sample of the weights at the last step boundary.

    `mark` takes microseconds, and does not wait for a GPU; `replaced` may wait.

    Args:
        parameters: The model's parameters. The largest trainable one is sampled, and the last one
            that has more than one dimension.
        optimizers: The optimizers that train them; ``None``: any optimizer of this process may.
    """

    def __init__(self, parameters: Iterable[Tensor], optimizers: InnerOptimizers | None) -> None:
        trained = [each for each in parameters if each.requires_grad and each.numel()]
        largest = max(trained, key=lambda each: each.numel())
        last = next((each for each in reversed(trained) if each.ndim > 1), trained[-1])
        self._samples = [_Sample(each) for each in dict.fromkeys((largest, last))]
        self._stepped = False
        self.close: Callable[[], None]
        if optimizers is None:
            self.close = register_optimizer_step_post_hook(self._note).remove
        else:
            self.close = optimizers.on_step(self._note)

    def _note(self, *_: object) -> None:
        self._stepped = True

    def mark(self) -> None:
        """Sample the weights of this boundary."""
        self._stepped = False
        for sample in self._samples:
            sample.take()

    def replaced(self) -> bool:
        """Return whether the weights changed since `mark` without a step of an optimizer."""
        return not self._stepped and any(sample.differs() for sample in self._samples)


class _Sample:
    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self._view = self._kept = parameter
        self._pointer: int | None = None
        self.take()

    def _refresh_view(self) -> bool:
        """Return whether the view of the parameter was still valid; if not, create a new one."""
        if self._pointer == self._parameter.data_ptr():
            return True
        local = local_of(self._parameter)
        self._view = local.reshape(-1)[:: max(1, local.numel() // SAMPLED_ELEMENTS)]
        self._view = self._view[:SAMPLED_ELEMENTS]
        # The view of a tensor that is not contiguous is a copy, so it is never valid again.
        self._pointer = self._parameter.data_ptr() if local.is_contiguous() else None
        return False

    def take(self) -> None:
        if self._refresh_view():
            self._kept.copy_(self._view)
        else:
            self._kept = self._view.clone()

    def differs(self) -> bool:
        self._refresh_view()
        now = self._view.to(self._kept.device)
        return now.shape != self._kept.shape or bool((now != self._kept).any())


class TrainedModel:
    """The program's model and inner optimizers, as a learner reads and writes them.

    Args:
        model: The model as passed to `Learner`.
        optimizers: The inner optimizers, if the program passed them.
        layout: The tensors that the run synchronizes.
        buffers_in_place: See `ModelGuard`.
        settle: Undoes temporary changes of a framework to the parameters; see `ModelGuard`.

    Attributes:
        given: The model that trains, with its wrappers.
        module: The module that `plain` returns; the run uses its names.
        copies: Weights that the inner optimizers keep, which follow the global weights.
        last: A sample of the weights of the last boundary; ``None`` with several ranks.
    """

    def __init__(
        self,
        model: Model,
        optimizers: InnerOptimizers | None,
        layout: Layout,
        *,
        buffers_in_place: bool = False,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.module = plain(model)
        self.given = model if isinstance(model, nn.Module) else self.module
        self.optimizers = optimizers
        self.copies: WeightCopies | None = None
        self.last: LastWeights | None = None
        self._plan: MergePlan | None = None
        self._callbacks: list[Callable[[tuple[str, ...]], None]] = []
        self._settle = settle
        self._checks: OptimizerChecks | None = None
        if optimizers is not None:
            self.copies = WeightCopies(several(optimizers.given).values())
            self._checks = OptimizerChecks(self.given, optimizers.given)
        self.guard = ModelGuard(
            self.module, layout, buffers_in_place=buffers_in_place, settle=settle
        )

    def admit(self, plan: MergePlan, merges_buffers: bool) -> None:
        """Take the run's settings, once this learner has joined.

        Args:
            plan: How the run splits the tensors into fragments.
            merges_buffers: Whether the run merges the model's buffers.
        """
        self._plan = plan
        self.guard.compares_buffers = merges_buffers

    def check_optimizer(self) -> None:
        """Check the optimizer for copies of the weights, if due; call this once in each step.

        Raises:
            ConfigError: It has some; see `refuse_own_copies`.
        """
        if self._checks is not None and self._checks.due():
            self._settle()
            self._checks.check()

    def following(self) -> AbstractContextManager[None]:
        """Let the optimizers' copies follow what the block writes to the parameters."""
        if self.copies is None:
            return nullcontext()
        self._settle()
        return self.copies.following(self.given.parameters())

    def applied(self, fragments: tuple[int, ...]) -> None:
        """Call the callbacks of `on_updated` if global weights were applied."""
        if fragments and self._callbacks:
            assert self._plan is not None, "weights are applied only after the join"
            tensors = self._plan.layout.tensors
            pieces = (piece for p in fragments for piece in self._plan.fragments[p].pieces)
            specs = (tensors[piece.tensor] for piece in pieces)
            names = dict.fromkeys(spec.name for spec in specs if not spec.is_moment)
            for callback in self._callbacks:
                callback(tuple(names))

    def on_updated(self, callback: Callable[[tuple[str, ...]], None]) -> None:
        """See `Learner.on_weights_updated`."""
        self._checks = None
        self._callbacks.append(callback)
        assert self._plan is not None, "the learner has joined"
        callback(tuple(tensor.name for tensor in self._plan.layout.of_model.tensors))

    def close(self) -> None:
        """Remove the hook from the optimizers."""
        if self.last is not None:
            self.last.close()
