"""Weights that an optimizer keeps beside the parameters, and how they follow the global weights.

Schedule-Free keeps z, Lookahead its slow weights, SAM the weights before its first half step. If
global weights were applied to the parameters alone, the next steps would undo them. So a copy moves
with its parameter: an apply that changes the parameter by δ changes the copy by δ. What the copy is
for, its difference from the parameter, stays.

`register_weight_copies` says where an optimizer keeps them. Copies that are not registered are
refused (`checks.refuse_own_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.optimizers import layers_of

Copies = Callable[[Any], Iterable[tuple[Tensor, Tensor]]]
"""Gives an optimizer's pairs of a parameter and its copy."""

KEYS_OF_ANY = frozenset(
    ("lookahead_slow_buff", "slow_buffer", "slow_buff", "slow_param", "slow_params", "old_p")
)
"""State keys under which implementations of Lookahead, Ranger and SAM keep weights."""

_KEYS = {"schedulefree": frozenset(("x", "y", "z"))}
"""State keys by the class's name with its module, or by a package."""

_COPIES: dict[str, Copies] = {}


def register_weight_copies(kind: type | str, *keys: str, copies: Copies | None = None) -> None:
    """Has the weights that an optimizer keeps follow the global weights.

        dd.register_weight_copies(MyLookahead, "slow")    # optimizer.state[parameter]["slow"]

    Args:
        kind: The optimizer's class, or its full name, or the name of its package.
        keys: Keys of its state, of tensors with the parameter's shape.
        copies: For copies that are elsewhere: given the optimizer, gives pairs of a parameter and
            its copy. It is called at every apply.

    Raises:
        ConfigError: There are neither keys nor copies.
    """
    if not keys and copies is None:
        raise ConfigError(
            f"register_weight_copies({_full_name(kind)}): give the state keys of the copies, or "
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
        optimizers: With all that they wrap.
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
        """Whether a layer's state keeps a registered copy under this key."""
        return any(each is layer and key in keys for each, keys in self._states)

    def registered_elsewhere(self) -> bool:
        """Whether there are registered copies that are not in a state."""
        return bool(self._others)

    def of(self, parameters: Iterable[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
        """These parameters' copies, without the parameters that have none."""
        elsewhere: dict[int, list[Tensor]] = {}
        for give in self._others:
            for parameter, copy in give():
                elsewhere.setdefault(id(parameter), []).append(copy)
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
        """Within it these parameters are changed, and after it their copies as much."""
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
        """Makes the copies equal to these parameters: another learner's state has come."""
        for parameter, copies in self.of(parameters):
            for copy in copies:
                copy.copy_(parameter.detach())


def _may_keep(layer: Any, keys: frozenset[str], parameters: list[Tensor]) -> bool:
    """Whether a layer's state of any of these parameters has one of the keys."""
    # At each apply, of each of a fragment's parameters: so all of the work is done in C.
    kept = list(filter(None, map(layer.state.get, parameters)))
    if not set(map(type, kept)) <= {dict}:
        return True
    return not keys.isdisjoint(chain.from_iterable(kept))


def _fits(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value is not parameter
