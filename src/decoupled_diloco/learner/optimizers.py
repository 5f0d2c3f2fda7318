"""The inner optimizers of a training loop: what they wrap, when they step, which weights they keep.

A loop has one optimizer or several (a GAN; Muon beside AdamW). Frameworks put wrappers around them.
A wrapper that only forwards, as in Accelerate and Fabric, is removed. A wrapper that changes the
step, such as Lookahead and SAM, is itself the optimizer. It and those inside it are its *layers*.

*Copies of the weights.* Schedule-Free keeps z, Lookahead its slow weights, SAM the weights before
its first half step. If global weights were applied to the parameters alone, the next steps would
undo them. So a copy moves with its parameter: an apply that changes the parameter by δ changes the
copy by δ. The difference between copy and parameter, which the optimizer needs, stays the same
(`WeightCopies`). `register_weight_copies` registers where an optimizer keeps copies. Copies that
are not registered are rejected (`model.refuse_own_copies`).

*How copies are found.* A tensor is *suspected* if it has a parameter's shape and values near it.
This includes harmless tensors: averages of the weights that are only read at the end, the initial
weights that Prodigy keeps, a momentum that happens to be near the weights. So a suspicion is
tested: two copies of the optimizer, with one of its parameters, take steps with gradients of zero.
In one of them the parameter is displaced, as by an apply. If the displacement shrinks, the
optimizer undoes it. Only samples of the largest parameters are compared, so the search takes
milliseconds.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError, a_kind
from decoupled_diloco.merge import local_of, place_of

logger = logging.getLogger(__name__)

Optimizers = Any
"""A `torch.optim.Optimizer`, or several: a sequence, or a mapping of names."""

ON_HOST = "on_host"
"""Key in a saved state: names the tensors that were in host memory although the parameter was not.
"""


def is_optimizer(thing: Any) -> bool:
    """Return whether an object has ``step`` and ``param_groups``."""
    return hasattr(thing, "param_groups") and callable(getattr(thing, "step", None))


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside wrappers that only forward: they share its state and groups."""
    while True:
        inner: Any = getattr(optimizer, "optimizer", None)
        if not is_optimizer(inner) or inner is optimizer:
            return optimizer
        shared = (getattr(optimizer, "state", None), optimizer.param_groups)
        if shared[0] is not getattr(inner, "state", None) or shared[1] is not inner.param_groups:
            return optimizer
        optimizer = inner


def layers_of(optimizer: Any) -> list[Any]:
    """Return the optimizer and all optimizers in its attributes, the outer ones first."""
    found: list[Any] = []
    pending = [optimizer]
    while pending:
        each = pending.pop(0)
        if any(each is other for other in found):
            continue
        found.append(each)
        for value in list(getattr(each, "__dict__", {}).values()):
            inside = value.values() if isinstance(value, dict) else value
            things = list(inside) if isinstance(value, dict | list | tuple) else [value]
            pending += [thing for thing in things if is_optimizer(thing)]
    return found


def several(given: Optimizers) -> dict[str, Any]:
    """Return the optimizers by name, as they were passed; a single one has the name ``""``.

    Raises:
        ConfigError: An object is not an optimizer, or there is none.
    """
    named = {"": given}
    if isinstance(given, Mapping):
        named = {str(name): each for name, each in given.items()}
    elif isinstance(given, Sequence) and not isinstance(given, str):
        named = {str(number): each for number, each in enumerate(given)}
    if not named:
        raise ConfigError("optimizer= is empty: pass at least one optimizer, or leave it out")
    for name, each in named.items():
        if not hasattr(each, "param_groups"):
            key = name if isinstance(given, Sequence) else repr(name)
            place = f"optimizer[{key}]" if name else "optimizer"
            raise ConfigError(
                f"{place} is {a_kind(each)} without param_groups: pass the torch.optim "
                "optimizer of the training loop, or leave it out"
            )
    return named


class InnerOptimizers:
    """All inner optimizers of a learner as one object with a state.

    Args:
        given: One optimizer, or several in a sequence or a mapping; wrappers are removed.

    Attributes:
        given: The optimizers with their wrappers, as the program passed them.
        named: Name to optimizer. A single optimizer has the name ``""``.

    Raises:
        ConfigError: An object is not an optimizer.
    """

    def __init__(self, given: Optimizers) -> None:
        self.given = given
        self.named = {name: unwrapped(each) for name, each in several(given).items()}

    @property
    def all(self) -> tuple[Any, ...]:
        """The optimizers without wrappers, in order."""
        return tuple(self.named.values())

    def layers(self) -> list[Any]:
        """Return all optimizers, and all optimizers inside them."""
        return [layer for each in self.all for layer in layers_of(each)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a single optimizer, or name to state of several."""
        states = {name: _kept(each) for name, each in self.named.items()}
        return states.get("", states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; no tensor changes its dtype.

        Raises:
            ValueError: It belongs to other optimizers.
        """
        for optimizer, each in self.paired(state):
            _require_groups(optimizer, each)
            settings = getattr(optimizer, "defaults", {}).keys()
            for group in optimizer.param_groups:
                settings &= group.keys()
            with exact([optimizer], [each.get(ON_HOST, {})]):
                try:
                    optimizer.load_state_dict({k: v for k, v in each.items() if k != ON_HOST})
                except KeyError as error:
                    raise ValueError(_of_another_kind(optimizer, [error.args[0]])) from error
            missing = [key for group in optimizer.param_groups for key in settings - group.keys()]
            if missing:
                raise ValueError(_of_another_kind(optimizer, missing))

    def paired(self, state: Mapping[str, Any]) -> list[tuple[Any, Mapping[str, Any]]]:
        """Return each optimizer with its part of a `state_dict`.

        Raises:
            ValueError: It belongs to other optimizers.
        """
        if "" in self.named:
            if "param_groups" not in state and all(_is_state(each) for each in state.values()):
                raise ValueError(
                    f"the state belongs to the optimizers {sorted(state)}, but this learner has one"
                )
            return [(self.named[""], state)]
        if state.keys() != self.named.keys():
            kept = "one optimizer" if _is_state(state) else f"the optimizers {sorted(state)}"
            raise ValueError(
                f"the state belongs to {kept}, but this learner has {sorted(self.named)}"
            )
        return [(each, state[name]) for name, each in self.named.items()]

    @contextmanager
    def in_training_mode(self) -> Iterator[bool]:
        """Put optimizers with two modes, such as Schedule-Free, into training mode in the block.

        A change of the mode changes the parameters. Yields whether any optimizer was in evaluation
        mode; these return to it after the block.
        """
        evaluating = [layer for layer in self.layers() if _evaluates(layer)]
        for layer in evaluating:
            layer.train()
        try:
            yield bool(evaluating)
        finally:
            for layer in evaluating:
                layer.eval()

    def on_step(
        self, after: Callable[[int], None], before: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """Call ``after`` with an optimizer's number at the end of each of its steps.

        An inner step is a part of the outer step: a step of Lookahead is not over when its inner
        optimizer's step is. If torch cannot hook a class, ``step`` is replaced on the instance.

        Args:
            after: Called with the optimizer's number, 0 or more, when its step has ended.
            before: Called when a step, or a step inside it, begins.

        Returns:
            A function that removes the hooks.
        """
        ends = [
            _hooked(layers_of(each), partial(after, number), before)
            for number, each in enumerate(self.all)
        ]
        return partial(_call_all, ends)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _require_groups(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Reject a state with other parameter groups.

    Raises:
        ValueError: The groups differ.
    """
    if not _is_state(state):
        return
    saved = [len(group.get("params", ())) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        raise ValueError(
            f"the state of the optimizer has groups of {saved} parameters, {_name(optimizer)} has "
            f"{own}: add the same groups in the same order (add_param_group) before creating the "
            "Learner"
        )


def _of_another_kind(optimizer: Any, missing: Sequence[Any]) -> str:
    return (
        f"the state belongs to another class of optimizer than {_name(optimizer)}: it lacks "
        f"{sorted(set(map(str, missing)))}"
    )


def _name(optimizer: Any) -> str:
    return type(optimizer).__name__


def _is_state(state: Any) -> bool:
    return isinstance(state, Mapping) and "param_groups" in state


def _hooked(
    layers: list[Any], after: Callable[[], None], before: Callable[[], None]
) -> Callable[[], None]:
    active: list[int] = []
    ends: list[Callable[[], None]] = []

    def begin(number: int) -> None:
        # If an exception left a step, its `end` was not called. So only outer layers stay active.
        active[:] = [*(other for other in active if other < number), number]
        before()

    def end(number: int) -> None:
        active[:] = [other for other in active if other < number]
        if not active:
            after()

    for number, layer in enumerate(layer for layer in layers if is_optimizer(layer)):
        if getattr(type(layer).step, "hooked", False):
            hooks = (
                layer.register_step_pre_hook(lambda *_, number=number: begin(number)),
                layer.register_step_post_hook(lambda *_, number=number: end(number)),
            )
            ends += [hook.remove for hook in hooks]
        else:
            ends.append(_replaced_step(layer, number, begin, end))
    return partial(_call_all, ends)


def _replaced_step(
    layer: Any, number: int, begin: Callable[[int], None], end: Callable[[int], None]
) -> Callable[[], None]:
    own = layer.__dict__.get("step")
    inner = layer.step

    def step(*given: Any, **named: Any) -> Any:
        begin(number)
        result = inner(*given, **named)
        end(number)
        return result

    layer.step = step

    def restore() -> None:
        if layer.__dict__.get("step") is not step:
            return  # it was replaced again, and the new one calls this one
        if own is None:
            del layer.step
        else:
            layer.step = own

    return restore


def _kept(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's state, with `ON_HOST` for tensors that are in host memory."""
    state: dict[str, Any] = optimizer.state_dict()
    if not (_is_state(state) and isinstance(state.get("state"), Mapping)):
        return state
    on_host = {}
    for number, parameter in _numbered(optimizer, state):
        kept = state["state"].get(number)
        if parameter.device.type == "cpu" or not isinstance(kept, Mapping):
            continue
        # torch itself puts "step" on the device that the group's settings require.
        keys = [key for key, value in kept.items() if key != "step" and _is_on_host(value)]
        if keys:
            on_host[str(number)] = keys
    return {**state, ON_HOST: on_host} if on_host else state


def _evaluates(layer: Any) -> bool:
    if not (callable(getattr(layer, "train", None)) and callable(getattr(layer, "eval", None))):
        return False
    groups = layer.param_groups
    own = getattr(layer, "train_mode", None)
    return (groups[0].get("train_mode", own) if groups else own) is False


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _numbered(optimizer: Any, state: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yield the numbers of parameters in a state, each with the optimizer's parameter."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        yield from zip(saved.get("params", ()), group["params"], strict=False)


@contextmanager
def exact(
    optimizers: Sequence[Any], on_host: Sequence[Mapping[str, Sequence[str]]] = ()
) -> Iterator[None]:
    """Let these optimizers load states in the block without a change of dtype or device.

    Otherwise, `torch.optim.Optimizer.load_state_dict` casts each floating tensor to the dtype of
    its parameter, and moves it to the parameter's device.

    Args:
        optimizers: The optimizers that load; optimizers inside them are included.
        on_host: For each optimizer: parameter number to the keys of tensors in host memory.
    """
    hooks = []
    for number, optimizer in enumerate(optimizers):
        host = on_host[number] if number < len(on_host) else {}
        for layer in layers_of(optimizer):
            if not hasattr(layer, "_optimizer_load_state_dict_pre_hooks"):
                continue
            loading = _Loading(host)
            hooks += [
                layer.register_load_state_dict_pre_hook(loading.begin),
                layer.register_load_state_dict_post_hook(loading.end, prepend=True),
            ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Loading:
    def __init__(self, on_host: Mapping[str, Sequence[str]]) -> None:
        self._on_host = on_host
        self._saved: Mapping[str, Any] = {}

    def begin(self, optimizer: Any, state: dict[str, Any]) -> None:
        self._saved = state

    def end(self, optimizer: Any) -> None:
        saved, self._saved = self._saved, {}
        for number, parameter in _numbered(optimizer, saved):
            kept = saved["state"].get(number)
            loaded = optimizer.state.get(parameter)
            if not (isinstance(kept, Mapping) and isinstance(loaded, dict)):
                continue
            host = self._on_host.get(str(number), ())
            for key in loaded.keys() & kept.keys():
                loaded[key] = _as_saved(kept[key], loaded[key], key in host)


def _as_saved(saved: Any, loaded: Any, on_host: bool) -> Any:
    """Return the saved value on the loaded one's device, or the loaded one if it is correct."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        device = torch.device("cpu") if on_host else loaded.device
        same = saved.dtype == loaded.dtype and device == loaded.device
        return loaded if same else saved.to(device=device, copy=True)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _as_saved(saved.get(key), each, on_host) for key, each in loaded.items()}
    if type(loaded) in (list, tuple) and isinstance(saved, list | tuple):
        pairs = zip(saved, loaded, strict=False)
        return type(loaded)(_as_saved(*pair, on_host) for pair in pairs)
    return loaded


COMPARED_PARAMETERS = 8
"""Number of parameters to compare per group and state key."""

SAMPLED_ELEMENTS = 4096
"""Largest number of elements to compare per tensor."""

NEAR = 0.5
"""Largest distance of a suspected copy, in units of the parameter's spread around its mean."""

PROBED_ELEMENTS = 1 << 22
"""Above this number of elements in several parameters, an optimizer is not copied and tested."""

KEPT = 0.95
"""An optimizer that keeps a smaller share of a displacement undoes it."""


@dataclass(frozen=True)
class Suspect:
    """A tensor that may be a copy of the weights.

    Attributes:
        layer: The optimizer that keeps it.
        key: Its state key, or its attribute.
        name: Name of the parameter near its values.
        parameter: That parameter.
        in_state: Whether it is in the optimizer's state for the parameter.
    """

    layer: Any
    key: str
    name: str
    parameter: Tensor
    in_state: bool


def suspects(names: Mapping[int, str], optimizer: Any) -> Iterator[Suspect]:
    """Yield the tensors of an optimizer that are near to a parameter, at most one for each key.

    Args:
        names: ``id`` to name of the model's parameters.
        optimizer: The optimizer; optimizers inside it are included.
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
            same_shape = by_shape.get(tensor.shape, ())
            near = next((p for p in same_shape if _is_near(tensor, p)), None)
            if near is not None:
                yield Suspect(layer, key, names[id(near)], near, in_state=False)
                break


def _tensors(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors in a value, each with the keys that lead to it."""
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
        return False  # it is the parameter itself, so it already follows
    stride = -(-own.numel() // SAMPLED_ELEMENTS)
    here = own.reshape(-1)[::stride].double()
    there = kept.reshape(-1)[::stride].to(here.device).double()
    spread = (here - here.mean()).norm()
    # Without a spread (the initial ones and zeros of norms and biases) many tensors would be near.
    return bool((spread > 1e-9 * here.norm()) & ((here - there).norm() <= NEAR * spread))


def undoes(optimizer: Any, suspect: Suspect) -> bool | None:
    """Test whether the optimizer undoes a displacement; `None` if it cannot be tested."""
    chosen = [suspect.parameter]
    if not suspect.in_state:  # an attribute may match the groups' parameters by position
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
    """Return the share of a displacement that is left after some steps; 1 is all of it."""
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
    whole = left = 0.0
    for number in range(len(chosen)):
        moved = (start_displaced[number] - start[number]).double()
        remains = (end_displaced[number].detach() - end[number].detach()).double()
        whole += float((moved * moved).sum())
        left += float((moved * remains).sum())
    return left / whole if whole else float("nan")


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
    """Return a copy of an optimizer and its layers, with copies of the chosen parameters only."""
    layers = layers_of(optimizer)
    # As in `copy.deepcopy`: id of an object to its copy. Parameters not chosen become None,
    # so no copy of the whole model is made.
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
            elif key != "step":  # replaced by a schedule; it would step the original optimizer
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
    """Return a copy of a group without weight decay, which would shrink a displacement as well."""
    settings = {key: copy.deepcopy(each) for key, each in group.items() if key != "params"}
    settings |= {key: 0.0 for key in settings if str(key).startswith("weight_decay")}
    parameters = [memo[id(each)] for each in group["params"]]
    return {**settings, "params": [each for each in parameters if each is not None]}


Copies = Callable[[Any], Iterable[tuple[Tensor, Tensor]]]
"""Returns an optimizer's pairs of a parameter and its copy."""

KEYS_OF_ANY = frozenset(
    ("lookahead_slow_buff", "slow_buffer", "slow_buff", "slow_param", "slow_params", "old_p")
)
"""State keys under which implementations of Lookahead, Ranger and SAM keep weights."""

_KEYS = {"schedulefree": frozenset(("x", "y", "z"))}
"""Name of a package, or of a class with its module, to state keys."""

_COPIES: dict[str, Copies] = {}


def register_weight_copies(kind: type | str, *keys: str, copies: Copies | None = None) -> None:
    """Let the copies of the weights in an optimizer follow the global weights.

        dd.register_weight_copies(MyLookahead, "slow")    # optimizer.state[parameter]["slow"]

    Args:
        kind: The optimizer's class, or its full name, or the name of its package.
        keys: Keys in its state for tensors with the parameter's shape.
        copies: For copies outside of the state: receives the optimizer, and returns pairs of a
            parameter and its copy. It is called at every apply.

    Raises:
        ConfigError: There are neither ``keys`` nor ``copies``.
    """
    if not keys and copies is None:
        raise ConfigError(
            f"register_weight_copies({_full_name(kind)}): pass the state keys of the copies, or "
            "copies="
        )
    _KEYS[_full_name(kind)] = _KEYS.get(_full_name(kind), frozenset()) | frozenset(keys)
    if copies is not None:
        _COPIES[_full_name(kind)] = copies


def _full_name(kind: type | str) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _names_of(optimizer: Any) -> Iterator[str]:
    for kind in type(optimizer).__mro__:
        name = _full_name(kind)
        yield name
        yield from (name[:end] for end, letter in enumerate(name) if letter == ".")


class WeightCopies:
    """The registered copies of some optimizers.

    Args:
        optimizers: The optimizers; those inside them are included.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._states: list[tuple[Any, frozenset[str]]] = []
        self._others: list[Callable[[], Iterable[tuple[Tensor, Tensor]]]] = []
        for optimizer in optimizers:
            layers = layers_of(optimizer)
            names = {name for layer in layers for name in _names_of(layer)}
            keys = KEYS_OF_ANY.union(*(_KEYS[name] for name in names if name in _KEYS))
            # A wrapper may keep its copies in the state of what it wraps.
            self._states += [(layer, keys) for layer in layers if hasattr(layer, "state")]
            for layer in layers:
                found = [_COPIES[name] for name in _names_of(layer) if name in _COPIES]
                self._others += [partial(give, layer) for give in found[:1]]

    def known(self, layer: Any, key: str) -> bool:
        """Return whether a layer's state keeps a registered copy under this key."""
        return any(each is layer and key in keys for each, keys in self._states)

    def registered_elsewhere(self) -> bool:
        """Return whether there are registered copies outside of a state."""
        return bool(self._others)

    def of(self, parameters: Iterable[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
        """Return parameters with their copies, without parameters that have none."""
        elsewhere: dict[int, list[Tensor]] = {}
        for give in self._others:
            for parameter, kept in give():
                elsewhere.setdefault(id(parameter), []).append(kept)
        found, parameters = [], list(parameters)
        states = [each for each in self._states if _may_keep(*each, parameters)]
        if not states and not elsewhere:
            return []
        for parameter in parameters:
            copies = list(elsewhere.get(id(parameter), ()))
            for layer, keys in states:
                kept = layer.state.get(parameter)
                if isinstance(kept, Mapping):
                    copies += [v for k, v in kept.items() if k in keys and _fits(v, parameter)]
            distinct = {id(copy): copy for copy in copies}
            if distinct:
                found.append((parameter, list(distinct.values())))
        return found

    @contextmanager
    def following(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Change the copies after the block as much as the block changed these parameters."""
        before = [(p, p.detach().clone(), copies) for p, copies in self.of(parameters)]
        yield
        with torch.no_grad():
            for parameter, old, copies in before:
                for copy in copies:
                    wide = torch.promote_types(copy.dtype, parameter.dtype)
                    change = parameter.detach().to(wide) - old.to(wide)
                    copy.copy_((copy.to(wide) + change.to(copy.device)).to(copy.dtype))

    @torch.no_grad()
    def reset(self, parameters: Iterable[Tensor]) -> None:
        """Set the copies to these parameters, for example after loading another learner's state."""
        for parameter, copies in self.of(parameters):
            for kept in copies:
                kept.copy_(parameter.detach())


def _may_keep(layer: Any, keys: frozenset[str], parameters: list[Tensor]) -> bool:
    """Return whether a layer's state for any of these parameters has one of the keys."""
    # Called at each apply for all parameters of a fragment, so without Python loops.
    kept = list(filter(None, map(layer.state.get, parameters)))
    if not set(map(type, kept)) <= {dict}:
        return True
    return not keys.isdisjoint(chain.from_iterable(kept))


def _fits(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value is not parameter


@dataclass(frozen=True, eq=False)
class StatePart:
    """Elements ``start <= i < stop`` of a moment.

    Attributes:
        parameter: Its parameter.
        keys: Its possible keys in an optimizer's state.
    """

    parameter: Tensor
    keys: tuple[str, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def _divided(parts: Sequence[StatePart], flat: Tensor) -> Iterator[tuple[StatePart, Tensor]]:
    """Yield each part with its elements of a flat tensor [N]."""
    return zip(parts, torch.split(flat, [each.numel for each in parts]), strict=True)


class Moments:
    """The moments of a learner's optimizers that the run merges.

    An optimizer creates its state in its first step. What is written before is kept until then.
    Adam divides its moments by what it has averaged so far, which it derives from a count of its
    steps. Received moments are averages of many steps. With the count of a new optimizer, the first
    steps would be several times too long, so the count becomes that of the run.

    Args:
        optimizers: The inner optimizers.

    Attributes:
        has_stepped: Whether `stepped` has been called.
    """

    def __init__(self, optimizers: InnerOptimizers) -> None:
        self._optimizers = optimizers
        self._layers = [each for each in optimizers.layers() if hasattr(each, "state")]
        self._waiting: dict[StatePart, Tensor] = {}
        self._received: dict[int, Tensor] = {}
        self.has_stepped = False

    def read(self, parts: Sequence[StatePart], out: Tensor) -> None:
        """Copy moments; those that do not exist are left out.

        Args:
            parts: The parts, one after the other in `out`.
            out: [N], fp32, on any device.
        """
        for part, target in _divided(parts, out):
            moment = self._moment(part)
            if moment is not None:
                target.copy_(moment.detach().reshape(-1)[part.start : part.stop])

    @torch.no_grad()
    def write(self, parts: Sequence[StatePart], values: Tensor) -> None:
        """Set moments to values, except those that are NaN; those without a state wait for it.

        Args:
            parts: The parts, one after the other in `values`.
            values: [N], fp32, on the CPU.
        """
        for part, own in _divided(parts, values):
            moment = self._moment(part)
            if moment is None:
                if not self.has_stepped:
                    self._waiting[part] = own
                continue
            known = ~own.isnan()
            if not bool(known.any()):
                continue
            if not self.has_stepped:
                self._received[id(part.parameter)] = part.parameter
            flat = moment.reshape(-1)  # a copy if the moment is not contiguous
            target = flat[part.start : part.stop]
            target.copy_(torch.where(known.to(flat.device), own.to(flat.device), target))
            if flat.data_ptr() != moment.data_ptr():
                moment.copy_(flat.view(moment.shape))

    def stepped(self, parts: Iterable[StatePart], run_step: int) -> None:
        """Write what has waited; call this after the first step that follows a join.

        Args:
            parts: All moments of the run.
            run_step: The run's step, for the counts of steps.

        Raises:
            ConfigError: No parameter has one of the moments.
        """
        if self.has_stepped:
            return
        self._require(list(parts))
        waiting, self._waiting = self._waiting, {}
        for part, values in waiting.items():
            self.write([part], values)
        self.has_stepped = True
        for parameter in self._received.values():
            for layer in self._layers:
                state = layer.state.get(parameter)
                count = state.get("step") if isinstance(state, Mapping) else None
                if isinstance(count, Tensor):
                    count.clamp_(min=run_step)
                elif isinstance(count, int):
                    state["step"] = max(count, run_step)
        self._received = {}

    def _moment(self, part: StatePart) -> Tensor | None:
        for layer in self._layers:
            state = layer.state.get(part.parameter)
            for key in part.keys if isinstance(state, Mapping) else ():
                if _fits(state.get(key), part.parameter):
                    found: Tensor = state[key]
                    return found
        return None

    def _require(self, parts: list[StatePart]) -> None:
        missing = {part.keys for part in parts}
        for part in parts:
            if part.keys in missing and self._moment(part) is not None:
                missing.discard(part.keys)
        if not missing:
            return
        known: dict[str, None] = {}
        for layer in self._layers:
            for parameter, state in layer.state.items():
                fitting = (key for key, value in state.items() if _fits(value, parameter))
                known |= dict.fromkeys(map(str, fitting))
        kinds = ", ".join(type(each).__name__ for each in self._optimizers.all)
        fix = f"set names={list(known)}" if known else "take [sync.moments] out"
        raise ConfigError(
            f"names in [sync.moments] has {'|'.join(min(missing))!r}, but no parameter has such a "
            f"tensor of its shape in the state of {kinds}: {fix}"
        )
