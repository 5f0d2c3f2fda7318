"""The inner optimizers of a training loop: what they wrap, when they step, what they keep.

A loop has one optimizer or several (a GAN; Muon beside AdamW). Frameworks put wrappers around them.
A wrapper that only forwards, as Accelerate's and Fabric's do, is removed. A wrapper that adds
something of its own, as Lookahead and SAM do, is itself the optimizer, and what it wraps is within.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError

logger = logging.getLogger(__name__)

Optimizers = Any
"""A `torch.optim.Optimizer`, or several: a sequence, or a mapping of names."""

ON_HOST = "on_host"
"""Key of an optimizer's saved state: which tensors were in host memory beside a device's."""


def is_optimizer(thing: Any) -> bool:
    """Whether it steps parameters in groups."""
    return hasattr(thing, "param_groups") and callable(getattr(thing, "step", None))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer within wrappers that share its state and its groups, and so only forward."""
    while True:
        inner: Any = getattr(optimizer, "optimizer", None)
        if not is_optimizer(inner) or inner is optimizer:
            return optimizer
        shared = (getattr(optimizer, "state", None), optimizer.param_groups)
        if shared[0] is not getattr(inner, "state", None) or shared[1] is not inner.param_groups:
            return optimizer
        optimizer = inner


def layers_of(optimizer: Any) -> list[Any]:
    """The optimizer and all optimizers that its attributes hold, the outer ones first."""
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
    """Name to optimizer as they were given; a single one has the name ``""``.

    Raises:
        ConfigError: Something in it is not an optimizer.
    """
    named = {"": given}
    if isinstance(given, Mapping):
        named = {str(name): each for name, each in given.items()}
    elif isinstance(given, Sequence):
        named = {str(number): each for number, each in enumerate(given)}
    if not named:
        raise ConfigError("optimizer= is empty: give at least one optimizer, or leave it out")
    for name, each in named.items():
        if not hasattr(each, "param_groups"):
            place = f"optimizer[{name!r}]" if name else "optimizer"
            raise ConfigError(
                f"{place} is a {type(each).__name__} without param_groups: give the torch.optim "
                "optimizer of the training loop, or leave it out"
            )
    return named


class InnerOptimizers:
    """All inner optimizers of a learner as one object with a state.

    Args:
        given: One optimizer, or several in a sequence or a mapping; wrappers are removed.

    Attributes:
        named: Name to optimizer. A single optimizer has the name ``""``.

    Raises:
        ConfigError: Something in it is not an optimizer.
    """

    def __init__(self, given: Optimizers) -> None:
        self.named = {name: unwrapped(each) for name, each in several(given).items()}

    @property
    def all(self) -> tuple[Any, ...]:
        """The optimizers."""
        return tuple(self.named.values())

    def layers(self) -> list[Any]:
        """All optimizers, and all within them."""
        return [layer for each in self.all for layer in layers_of(each)]

    def state_dict(self) -> dict[str, Any]:
        """The state of the only optimizer, or of each by its name."""
        states = {name: _kept(each) for name, each in self.named.items()}
        return states.get("", states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`; no tensor changes its dtype.

        Raises:
            ValueError: It is of other optimizers.
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
        """Each optimizer with its part of a `state_dict`.

        Raises:
            ValueError: It is of other optimizers.
        """
        if "" in self.named:
            if "param_groups" not in state and all(_is_state(each) for each in state.values()):
                raise ValueError(
                    f"the state is of the optimizers {sorted(state)}, this learner has one"
                )
            return [(self.named[""], state)]
        if state.keys() != self.named.keys():
            kept = "one optimizer" if _is_state(state) else f"the optimizers {sorted(state)}"
            raise ValueError(f"the state is of {kept}, this learner has {sorted(self.named)}")
        return [(each, state[name]) for name, each in self.named.items()]

    @contextmanager
    def in_training_mode(self) -> Iterator[bool]:
        """Within it optimizers that have two modes, as Schedule-Free's, are in that of training.

        Between the modes they change the parameters. Gives whether one was in the other mode.
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
        """Calls ``after`` with an optimizer's number when its step has ended.

        A step within a step is a part of it: Lookahead's is not over when its inner optimizer's
        is. ``step`` of a class that torch cannot hook is replaced on the instance.

        Returns:
            What ends it.
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
    """Refuses a state with other parameter groups.

    Raises:
        ValueError: It has them.
    """
    if not _is_state(state):
        return
    saved = [len(group.get("params", ())) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        raise ValueError(
            f"the state of the optimizer has groups of {saved} parameters, {_name(optimizer)} has "
            f"{own}: add the same groups in the same order (add_param_group) before the Learner"
        )


def _of_another_kind(optimizer: Any, missing: Sequence[Any]) -> str:
    return (
        f"the state is of another kind of optimizer than {_name(optimizer)}: it lacks "
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
        # An exception skips a layer's end, so whatever is not outside of this one is over.
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
            return  # Someone has replaced it since; theirs calls ours.
        if own is None:
            del layer.step
        else:
            layer.step = own

    return restore


def _kept(optimizer: Any) -> dict[str, Any]:
    """An optimizer's state, with a note of what it keeps in host memory beside a device's."""
    state: dict[str, Any] = optimizer.state_dict()
    if not (_is_state(state) and isinstance(state.get("state"), Mapping)):
        return state
    on_host = {}
    for number, parameter in _numbered(optimizer, state):
        kept = state["state"].get(number)
        if parameter.device.type == "cpu" or not isinstance(kept, Mapping):
            continue
        # torch puts "step" itself where the settings of the group want it.
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
    """The numbers that a state has for parameters, with those of the optimizer."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        yield from zip(saved.get("params", ()), group["params"], strict=False)


@contextmanager
def exact(
    optimizers: Sequence[Any], on_host: Sequence[Mapping[str, Sequence[str]]] = ()
) -> Iterator[None]:
    """Within it, these optimizers load a state as it was saved.

    `torch.optim.Optimizer.load_state_dict` casts every floating tensor to the dtype of its
    parameter, and moves it to the parameter's device.

    Args:
        optimizers: Those that load; what is within them, too.
        on_host: Of each, the keys of the tensors that belong into host memory, by number.
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
    """The saved value where the loaded one is; the loaded one itself if its dtype is right."""
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
