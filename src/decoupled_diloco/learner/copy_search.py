"""Finds weights that an optimizer keeps beside the parameters, and undo what is applied to them.

A tensor is *suspected* if it has a parameter's shape and values near it. Averages of the weights
that are only read at the end, the initial weights that Prodigy keeps, and a momentum that happens
to be near the weights are suspected as well, and harm nothing. So a suspicion is tested: two copies
of the optimizer, with one of its parameters, take steps with gradients of zero. In one of them the
parameter is displaced, as by an apply. If the displacement shrinks, the optimizer undoes it.

Only samples of the largest parameters are compared, so the search takes milliseconds.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoupled_diloco.learner.optimizers import is_optimizer, layers_of
from decoupled_diloco.merge import local_of, place_of

logger = logging.getLogger(__name__)

COMPARED_PARAMETERS = 8
"""Of each group and state key."""

SAMPLED_ELEMENTS = 4096
"""Of each tensor."""

NEAR = 0.5
"""A copy is at most so far away, in units of the parameter's own spread around its mean."""

PROBED_ELEMENTS = 1 << 22
"""Above this number of parameter elements, an optimizer is not copied."""

KEPT = 0.95
"""An optimizer that leaves less of a displacement undoes it."""


@dataclass(frozen=True)
class Suspect:
    """A tensor that may be weights.

    Attributes:
        layer: The optimizer that keeps it.
        key: Its state key, or its attribute.
        name: The parameter that it is near to.
        parameter: That parameter itself.
        in_state: Whether it is in the state of the parameter.
    """

    layer: Any
    key: str
    name: str
    parameter: Tensor
    in_state: bool


def suspects(names: Mapping[int, str], optimizer: Any) -> Iterator[Suspect]:
    """What an optimizer keeps near to a parameter, at most one for each of its keys.

    Args:
        names: The names of the model's parameters, by their ids.
        optimizer: The optimizer, with all that it wraps.
    """
    for layer in layers_of(optimizer):
        yield from _in_state(names, layer)
        yield from _in_attributes(names, layer)


def _in_state(names: Mapping[int, str], layer: Any) -> Iterator[Suspect]:
    state: Any = getattr(layer, "state", None)
    found: set[str] = set()
    for group in layer.param_groups if isinstance(state, Mapping) else ():
        kept: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for parameter in group["params"]:
            for key, value in _tensors(state.get(parameter)):
                if value.shape == parameter.shape and id(parameter) in names:
                    kept[key].append((parameter, value))
        for key, pairs in kept.items():
            pairs.sort(key=lambda pair: -pair[0].numel())
            near = (p for p, value in pairs[:COMPARED_PARAMETERS] if _is_near(value, p))
            if key not in found and (parameter := next(near, None)) is not None:
                found.add(key)
                yield Suspect(layer, key, names[id(parameter)], parameter, in_state=True)


def _in_attributes(names: Mapping[int, str], layer: Any) -> Iterator[Suspect]:
    skipped = ("state", "param_groups", "defaults")
    own = [p for group in layer.param_groups for p in group["params"] if id(p) in names]
    by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for parameter in own:
        by_shape[parameter.shape].append(parameter)
    for key, value in list(getattr(layer, "__dict__", {}).items()):
        if key in skipped or is_optimizer(value):
            continue
        found = sorted((t for _, t in _tensors(value)), key=lambda t: -t.numel())
        for tensor in found[:COMPARED_PARAMETERS]:
            several = by_shape.get(tensor.shape, ())
            near = next((p for p in several if _is_near(tensor, p)), None)
            if near is not None:
                yield Suspect(layer, key, names[id(near)], near, in_state=False)
                break


def _tensors(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Floating tensors within it, each with the keys that lead to it."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.ndim:
            yield key, value
        return
    if depth > 3:
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for part, each in items:
        name = part if isinstance(part, str) else "…"
        yield from _tensors(each, f"{key}.{name}" if key else name, depth + 1)


@torch.no_grad()
def _is_near(value: Tensor, parameter: Tensor) -> bool:
    own, kept = local_of(parameter), local_of(value)
    if own.numel() < 2 or own.shape != kept.shape or own.is_meta or kept.is_meta:
        return False
    if place_of(own) == place_of(kept):  # a wrapper subclass has no storage to compare
        return False  # It is the parameter, so it follows.
    stride = -(-own.numel() // SAMPLED_ELEMENTS)
    here = own.reshape(-1)[::stride].double()
    there = kept.reshape(-1)[::stride].to(here.device).double()
    spread = (here - here.mean()).norm()
    # Ones and zeros, as biases and norms begin, are near to many things.
    return bool((spread > 1e-9 * here.norm()) & ((here - there).norm() <= NEAR * spread))


def undoes(optimizer: Any, suspect: Suspect) -> bool | None:
    """Whether the optimizer undoes a displacement of the parameter; `None`: it cannot be tested."""
    chosen = [suspect.parameter]
    if not suspect.in_state:  # Attributes may go with the groups' parameters by position.
        chosen = [p for group in suspect.layer.param_groups for p in group["params"]]
    size = sum(local_of(each).numel() for each in chosen)
    if size > PROBED_ELEMENTS and len(chosen) > 1:
        return None
    steps = 128 if size <= 1 << 17 else 24
    for with_closure in (False, True):
        try:
            with torch.random.fork_rng(devices=[]):
                kept = _displacement_left(optimizer, chosen, steps, with_closure)
        except Exception as error:
            logger.debug("the copy of %s took no step: %r", type(optimizer).__name__, error)
            continue
        return None if kept != kept else kept < KEPT
    return None


def _displacement_left(
    optimizer: Any, chosen: list[Tensor], steps: int, with_closure: bool
) -> float:
    """How much of a displacement is left after some steps: 1 is all."""
    noise = [torch.randn_like(local_of(each)) * local_of(each).std() / 4 for each in chosen]
    ends = []
    for displaced in (False, True):
        torch.manual_seed(0)
        twin, parameters = _twin(optimizer, chosen)
        with torch.no_grad():
            for parameter, each in zip(parameters, noise, strict=True):
                if displaced:
                    parameter.add_(each)
        starts = [parameter.detach().clone() for parameter in parameters]
        for _ in range(steps):
            _step(twin, parameters, with_closure)
        ends.append((starts, parameters))
    (start, end), (start_displaced, end_displaced) = ends
    asked = left = 0.0
    for number in range(len(chosen)):
        moved = (start_displaced[number] - start[number]).double()
        remains = (end_displaced[number].detach() - end[number].detach()).double()
        asked += float((moved * moved).sum())
        left += float((moved * remains).sum())
    return left / asked if asked else float("nan")


def _step(twin: Any, parameters: list[Tensor], with_closure: bool) -> None:
    def closure() -> Tensor:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return torch.zeros((), dtype=torch.float32, device="cpu")

    closure()
    if with_closure:
        type(twin).step(twin, closure)
    else:
        type(twin).step(twin)


def _twin(optimizer: Any, chosen: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """A copy of an optimizer and all that it wraps, with copies of some parameters only."""
    layers = layers_of(optimizer)
    memo: dict[int, Any] = {}
    for layer in layers:
        for group in layer.param_groups:
            for parameter in group["params"]:
                memo[id(parameter)] = None
    own: list[Tensor] = [torch.nn.Parameter(local_of(each).clone()) for each in chosen]
    memo |= {id(given): copied for given, copied in zip(chosen, own, strict=True)}
    twins = [object.__new__(type(layer)) for layer in layers]
    memo |= {id(layer): twin for layer, twin in zip(layers, twins, strict=True)}
    for layer in layers:
        if isinstance(state := getattr(layer, "state", None), Mapping) and id(state) not in memo:
            kept = {
                copied: _copied(state[given], memo)
                for given, copied in zip(chosen, own, strict=True)
                if given in state
            }
            memo[id(state)] = defaultdict(dict, kept)
        if id(layer.param_groups) not in memo:
            memo[id(layer.param_groups)] = [_group(each, memo) for each in layer.param_groups]
    for layer, twin in zip(layers, twins, strict=True):
        for key, value in vars(layer).items():
            if key.endswith("_hooks"):
                vars(twin)[key] = OrderedDict()
            elif key != "step":  # A schedule's; it would step the optimizer itself.
                vars(twin)[key] = copy.deepcopy(value, memo)
    return twins[0], own


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return local_of(value).clone()
    if isinstance(value, dict):
        return {key: _copied(each, memo) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each, memo) for each in value)
    return copy.deepcopy(value, memo)


def _group(group: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """A group's settings without weight decay, which would shrink a displacement as well."""
    settings = {key: copy.deepcopy(each) for key, each in group.items() if key != "params"}
    settings |= {key: 0.0 for key in settings if str(key).startswith("weight_decay")}
    parameters = [memo[id(each)] for each in group["params"]]
    return {**settings, "params": [each for each in parameters if each is not None]}
