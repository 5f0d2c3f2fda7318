"""What a model synchronises: its trainable tensors, as learners and syncers agree on them.

A `Layout` lists them in module order. Fragments are a function of the layout alone, so who agrees
on its fingerprint agrees on every fragment.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError, ProtocolError

Role = Literal["matrix", "embedding"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""Parameter dtypes that can be synchronised, by the name used in a layout."""

TENSORS_MAX = 1_000_000
"""Bound on tensors (and on excluded names) in a layout that a peer sends."""
NAME_LENGTH_MAX = 1024
DIMENSIONS_MAX = 16
NUMEL_MAX = 2**48


@dataclass(frozen=True)
class TensorSpec:
    """One synchronised tensor.

    Args:
        name: Its name in the module; for tied weights the first of them.
        shape: Its shape; every dimension >= 1.
        dtype: A key of `DTYPES`: the dtype in which the learner trains it.
        role: `"embedding"` is merged by plain weighted mean, `"matrix"` by the method of the run.
        aliases: The other names of a tied weight.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The synchronised tensors of a model, in module order.

    Args:
        tensors: What is synchronised; at least one.
        excluded: Names of frozen parameters and buffers: listed for people, never synchronised.
    """

    tensors: tuple[TensorSpec, ...]
    excluded: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of `tensors`: the same in every process, different if anything differs.

        Names, order, shapes, dtypes, roles and aliases count. `excluded` does not: what stays local
        to a learner may differ between learners.
        """
        text = json.dumps(self.to_json()["tensors"], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def numel(self) -> int:
        """Number of synchronised elements."""
        return sum(spec.numel for spec in self.tensors)

    def describe_difference(self, other: Layout) -> str | None:
        """Say in words what differs first, or None if the fingerprints are equal.

        Args:
            other: The layout compared with; called "theirs" in the answer, `self` is "ours".

        Returns:
            A sentence naming the first differing tensor and both values.
        """
        for index, (ours, theirs) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            for field in ("name", "shape", "dtype", "role", "aliases"):
                mine, his = getattr(ours, field), getattr(theirs, field)
                if mine != his:
                    subject = f"tensor {index}" + ("" if field == "name" else f" '{ours.name}'")
                    return f"{subject} differs in {field}: ours {mine!r}, theirs {his!r}"
        mine, his = len(self.tensors), len(other.tensors)
        if mine == his:
            return None
        common = min(mine, his)
        whose, longer = ("ours", self) if mine > his else ("theirs", other)
        return (
            f"tensor {common} '{longer.tensors[common].name}' is only in {whose}: "
            f"ours has {mine} tensors, theirs {his}"
        )

    def to_json(self) -> dict[str, Any]:
        """Give a plain dictionary that `json.dumps` takes; `from_json` is the way back."""
        return {
            "tensors": [
                {
                    "name": spec.name,
                    "shape": list(spec.shape),
                    "dtype": spec.dtype,
                    "role": spec.role,
                    "aliases": list(spec.aliases),
                }
                for spec in self.tensors
            ],
            "excluded": list(self.excluded),
        }

    @classmethod
    def from_json(cls, data: object) -> Layout:
        """Read what `to_json` wrote, trusting nothing.

        Args:
            data: The parsed JSON, from a peer or a file.

        Returns:
            An equal layout.

        Raises:
            ProtocolError: A key is missing or unknown, a value has the wrong type or lies beyond
                the bounds of this module, or a name occurs twice.
        """
        fields = _fields(data, "layout", {"tensors", "excluded"})
        tensors = tuple(
            _tensor_spec(item, f"layout.tensors[{index}]")
            for index, item in enumerate(_list(fields["tensors"], "layout.tensors", TENSORS_MAX))
        )
        _require(len(tensors) >= 1, "layout.tensors is empty: at least one tensor is needed")
        layout = cls(tensors, _names(fields["excluded"], "layout.excluded"))
        _require(
            layout.numel <= NUMEL_MAX,
            f"layout has {layout.numel} elements, more than the limit of {NUMEL_MAX}",
        )
        seen: set[str] = set()
        for name in (n for spec in tensors for n in (spec.name, *spec.aliases)):
            _require(name not in seen, f"layout names tensor '{name}' twice")
            seen.add(name)
        return layout


def layout_of(module: nn.Module) -> Layout:
    """List what a module would synchronise.

    Trainable parameters in module order; tied weights are one tensor by storage: the first name
    wins, the others are its aliases, and if any of them belongs to an `nn.Embedding` the tensor's
    role is `"embedding"`. Frozen parameters, buffers and parameters without elements are excluded.

    Args:
        module: Any module; on any device, the meta device included.

    Returns:
        The layout.

    Raises:
        ConfigError: Nothing is trainable, a trainable parameter has a dtype that is not supported,
            or two parameters share only a part of their storage.
    """
    tied = _tied_parameters(module)
    embeddings = _embedding_names(module)
    tensors: list[TensorSpec] = []
    excluded: list[str] = []
    for names, parameter in tied:
        if not parameter.requires_grad or parameter.numel() == 0:
            excluded += names
            continue
        role: Role = "embedding" if embeddings.intersection(names) else "matrix"
        dtype = _dtype_name(names[0], parameter.dtype)
        tensors.append(TensorSpec(names[0], tuple(parameter.shape), dtype, role, tuple(names[1:])))
    excluded += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    if not tensors:
        raise ConfigError(
            f"{type(module).__name__} has no trainable parameter among {len(tied)}: "
            "set requires_grad=True on what should be trained"
        )
    return Layout(tuple(tensors), tuple(excluded))


def tensors_of(module: nn.Module, layout: Layout) -> list[nn.Parameter]:
    """Give the module's parameters in the order of `layout.tensors`, for `gather` and `scatter`.

    Raises:
        ConfigError: The module has another layout; the message names the first difference.
    """
    difference = layout.describe_difference(layout_of(module))
    if difference is not None:
        raise ConfigError(
            f"the model does not fit the layout (ours; theirs is the model): {difference}"
        )
    by_name = dict(module.named_parameters(remove_duplicate=False))
    return [by_name[spec.name] for spec in layout.tensors]


def _tied_parameters(module: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Group parameter names by storage, in module order; a trainable one represents its group."""
    groups: dict[object, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        key = _storage_key(parameter)
        names, first = groups.get(key, ([], parameter))
        groups[key] = ([*names, name], first if first.requires_grad else parameter)
    _refuse_overlap(groups.values())
    return list(groups.values())


def _storage_key(parameter: Tensor) -> object:
    """Identify the elements a parameter stands for, so that equal keys mean tied weights."""
    if parameter.numel() == 0 or parameter.device.type == "meta":
        return id(parameter)
    return (parameter.device, parameter.data_ptr(), tuple(parameter.shape), parameter.stride())


def _refuse_overlap(groups: Collection[tuple[list[str], nn.Parameter]]) -> None:
    """Refuse parameters that share some memory without being the same tensor."""
    extents = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + _extent_bytes(p), names[0])
        for names, p in groups
        if p.numel() and p.device.type != "meta"
    )
    for (device, _, stop, name), (device_next, start, _, name_next) in pairwise(extents):
        if device == device_next and start < stop:
            raise ConfigError(
                f"parameters '{name}' and '{name_next}' share a part of their storage: "
                "tie whole tensors of one shape, or give each its own storage"
            )


def _extent_bytes(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _embedding_names(module: nn.Module) -> set[str]:
    """Names of the parameters that an embedding module owns."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, nn.Embedding | nn.EmbeddingBag)
        for name, _ in child.named_parameters(recurse=False)
    }


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    for known, candidate in DTYPES.items():
        if candidate == dtype:
            return known
    raise ConfigError(
        f"parameter '{name}' has dtype {str(dtype).removeprefix('torch.')}, supported are "
        f"{', '.join(DTYPES)}: convert or freeze it"
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ProtocolError(message)


def _fields(data: object, where: str, keys: set[str]) -> Mapping[str, object]:
    _require(isinstance(data, dict), f"{where} is a {type(data).__name__}, not an object")
    fields = cast("dict[object, object]", data)
    _require(
        fields.keys() == keys,
        f"{where} has keys {sorted(map(str, fields))!s:.80}, expected exactly {sorted(keys)}",
    )
    return cast("dict[str, object]", data)


def _list(data: object, where: str, length_max: int) -> list[object]:
    _require(isinstance(data, list), f"{where} is a {type(data).__name__}, not a list")
    items = cast("list[object]", data)
    _require(len(items) <= length_max, f"{where} has {len(items)} items, the limit is {length_max}")
    return items


def _name(data: object, where: str) -> str:
    _require(isinstance(data, str), f"{where} is a {type(data).__name__}, not a string")
    name = cast("str", data)
    _require(
        1 <= len(name) <= NAME_LENGTH_MAX,
        f"{where} has {len(name)} characters, allowed are 1 to {NAME_LENGTH_MAX}",
    )
    return name


def _names(data: object, where: str) -> tuple[str, ...]:
    return tuple(
        _name(item, f"{where}[{i}]") for i, item in enumerate(_list(data, where, TENSORS_MAX))
    )


def _tensor_spec(data: object, where: str) -> TensorSpec:
    fields = _fields(data, where, {"name", "shape", "dtype", "role", "aliases"})
    shape = _list(fields["shape"], f"{where}.shape", DIMENSIONS_MAX)
    for size in shape:
        is_size = isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= NUMEL_MAX
        _require(is_size, f"{where}.shape has {size!r:.40}, allowed are 1 to {NUMEL_MAX}")
    dtype, role = fields["dtype"], fields["role"]
    _require(
        isinstance(dtype, str) and dtype in DTYPES,
        f"{where}.dtype is {dtype!r:.40}, supported are {', '.join(DTYPES)}",
    )
    _require(
        isinstance(role, str) and role in get_args(Role),
        f"{where}.role is {role!r:.40}, allowed are {', '.join(get_args(Role))}",
    )
    return TensorSpec(
        name=_name(fields["name"], f"{where}.name"),
        shape=tuple(cast("list[int]", shape)),
        dtype=cast("str", dtype),
        role=cast("Role", role),
        aliases=_names(fields["aliases"], f"{where}.aliases"),
    )
