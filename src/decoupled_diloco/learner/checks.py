"""What a model and its inner optimizer must not bring into a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.copy_search import suspects, undoes
from decoupled_diloco.learner.optimizers import Optimizers, layers_of, several
from decoupled_diloco.learner.weight_copies import WeightCopies
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

_FIX = "refresh it in after_apply=…, which says that this is taken care of"

_WAY_OUT = f"its own copy of the weights would undo what is applied; {_FIX}"


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


def refuse_own_copies(model: nn.Module, optimizer: Optimizers) -> None:
    """An optimizer that holds weights of its own would undo what is applied to the model.

    Refused are: a tensor of ``param_groups`` that is not a parameter of the model; an attribute of
    `OWN_COPIES` that is not empty; beside a parameter of lower precision, an fp32 state of its
    shape that is called like a master copy (``master_param``, ``fp32_param``, …) or has just its
    values; and any other tensor near to a parameter with which the optimizer undoes an apply
    (`copy_search`), unless it is registered (`weight_copies`). What wrappers wrap is checked, too.
    The state exists only once the optimizer has stepped.

    Args:
        model: The model.
        optimizer: One optimizer, or several in a sequence or a mapping.

    Raises:
        ConfigError: it has such a copy.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in named}
    narrow = {name: p for name, p in named if p.dtype.itemsize < 4}
    for each in several(optimizer).values():
        for layer in layers_of(each):
            _refuse_own_copies(names, narrow, layer)
        _refuse_what_undoes(names, each)


class OptimizerChecks:
    """When to look for an optimizer's own copies: in a few early steps, and when a state appears.

    Lookahead, for one, makes its slow weights at its k-th step. `due` costs a microsecond.

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
                    # One of each group: optimizers treat the parameters of a group alike.
                    of_groups = (group["params"][:1] for group in layer.param_groups[:4])
                    self._states += [(layer, p) for few in of_groups for p in few]
        self._keys = self._count_keys()

    def due(self) -> bool:
        """Whether to look now; call it once in each step."""
        self._steps += 1
        keys = self._count_keys()
        appeared, self._keys = keys != self._keys, keys
        return appeared or self._steps in self.AT_STEPS

    def _count_keys(self) -> int:
        return sum(len(layer.state.get(parameter) or ()) for layer, parameter in self._states)

    def look(self) -> None:
        """Refuses what `refuse_own_copies` does.

        Raises:
            ConfigError: it has such a copy.
        """
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
            f"{kind} keeps weights of its own in its {place} {suspect.key!r} (found beside "
            f"parameter {suspect.name!r}), which would undo what is applied: have them follow the "
            f"global weights with {fix} before the Learner, or {_FIX}"
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
                    "with parameters, a second network), put both into one module and give that "
                    "as the model: nn.ModuleDict({'model': model, 'loss': loss}). If it is a copy "
                    f"of the weights, {_FIX}"
                )
    for holder in (optimizer, getattr(optimizer, "_amp_stash", None)):
        for name in OWN_COPIES:
            # Only what is stored: a property of a wrapper may compute, or fail.
            if getattr(holder, "__dict__", {}).get(name):
                raise ConfigError(f"{kind} has {name!r}: {_WAY_OUT}")
    for name, parameter in narrow.items():
        for key, value in getattr(optimizer, "state", {}).get(parameter, {}).items():
            if _is_own_copy(key, value, parameter):
                raise ConfigError(f"{kind} keeps {name!r} in fp32 as {key!r}: {_WAY_OUT}")


def _is_own_copy(key: Any, value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor):
        return False
    if value.dtype is not torch.float32 or value.shape != parameter.shape:
        return False
    if _OWN_COPY_NAME.search(str(key).lower()):
        return True
    rounded = value.detach().to(parameter.device, parameter.dtype)
    return bool(parameter.any()) and torch.equal(rounded, parameter.detach())
