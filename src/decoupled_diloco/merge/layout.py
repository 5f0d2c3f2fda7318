"""The layout: the tensors of a model that learners and syncers synchronize.

A `Layout` lists the trainable tensors in module order, then the buffers. Fragments are a function
of the layout alone, so two processes with the same fingerprint agree on every fragment.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, cast

import torch
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from decoupled_diloco.errors import ConfigError, ProtocolError
from decoupled_diloco.merge.memory import has_window, local_of, place_of

T = TypeVar("T")

Role = Literal["matrix", "embedding", "buffer", "single", "moment"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""Parameter dtypes that can be synchronized, by the name used in a layout."""

WHOLE_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}
"""Dtypes of constants, by the name used in a layout."""

WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Name components that torch.compile and activation checkpointing add to a module's tensors."""

CONSTANT_NUMEL_MAX = 64
"""Largest number of elements of a constant, which is sent within the layout."""

TENSORS_MAX = 1_000_000
"""Limit on tensors (and on excluded names) in a layout that a peer sends."""
LAYOUT_BYTES_MAX = 1 << 26
"""Limit on the JSON of a layout that a peer sends compressed."""
PLAIN_CHARACTERS_MAX = 100_000
COMPRESSED = "zlib:"
"""Prefix of compressed text, which is base64 of zlib's format."""
NAME_LENGTH_MAX = 1024
DIMENSIONS_MAX = 16
NUMEL_MAX = 2**48

Name = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH_MAX)]
Names = Annotated[tuple[Name, ...], Field(max_length=TENSORS_MAX)]
Size = Annotated[int, Strict(), Field(ge=1, le=NUMEL_MAX)]
Whole = Annotated[int, Strict()]


def _one_of(names: Iterable[str]) -> Any:
    return Field(pattern=f"^({'|'.join(names)})$")


@dataclass(frozen=True)
class TensorSpec:
    """One synchronized tensor.

    Args:
        name: Its name in the module; the first name of tied weights.
        shape: Its shape; every dimension >= 1.
        dtype: A key of `DTYPES`: the dtype in which the learner trains it.
        role: An `"embedding"` is merged by plain weighted mean, a `"matrix"` by the method of the
            run. A `"buffer"` is replaced by the weighted mean of the learners' values, a `"single"`
            buffer by the values of one learner. A `"moment"` is a tensor of the inner optimizer's
            state; see `Layout.with_moments`.
        aliases: The other names of a tied weight.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Name
    shape: Annotated[tuple[Size, ...], Field(max_length=DIMENSIONS_MAX)]
    dtype: Annotated[str, _one_of(DTYPES)]
    role: Role
    aliases: Names = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer: its values are merged, not its changes."""
        return self.role in ("buffer", "single")

    @property
    def is_moment(self) -> bool:
        """Whether it is a moment of the inner optimizer, and so not part of the model."""
        return self.role == "moment"

    @property
    def is_value(self) -> bool:
        """Whether its values are merged, and not its changes: a buffer or a moment."""
        return self.role in ("buffer", "single", "moment")


@dataclass(frozen=True)
class Constant:
    """A small integer buffer, such as `num_batches_tracked`, with the first learner's values.

    It is never merged, because integers have no meaningful mean. It is kept so that a run's weights
    include every tensor that the model loads.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Name
    shape: Annotated[tuple[Whole, ...], Field(max_length=DIMENSIONS_MAX)]
    dtype: Annotated[str, _one_of(WHOLE_DTYPES)]
    values: Annotated[tuple[Whole, ...], Field(max_length=CONSTANT_NUMEL_MAX)]

    def tensor(self) -> Tensor:
        return torch.tensor(self.values, dtype=WHOLE_DTYPES[self.dtype], device="cpu").reshape(
            self.shape
        )


@dataclass(frozen=True)
class Layout:
    """The synchronized tensors: parameters in module order, then buffers, then moments.

    Args:
        tensors: The synchronized tensors; at least one.
        excluded: Names of frozen parameters and other buffers. They are never synchronized; people
            can read them here.
        constants: Small integer buffers with the first learner's values.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    tensors: Annotated[tuple[TensorSpec, ...], Field(min_length=1, max_length=TENSORS_MAX)]
    excluded: Names = ()
    constants: Annotated[tuple[Constant, ...], Field(max_length=TENSORS_MAX)] = ()

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of `tensors` in hex: equal in all processes exactly if `tensors` is equal.

        It covers names, order, shapes, dtypes, roles and aliases. It omits `excluded` and
        `constants`, because local tensors may differ between learners.
        """
        text = json.dumps(self.to_json()["tensors"], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.tensors)

    def without_buffers(self) -> Layout:
        """Return the layout of the parameters alone, for a run whose buffers stay local."""
        kept = tuple(spec for spec in self.tensors if not spec.is_buffer)
        local = [spec.name for spec in self.tensors if spec.is_buffer]
        local += [constant.name for constant in self.constants]
        return Layout(kept, (*self.excluded, *local))

    @cached_property
    def trained(self) -> int:
        """The number of parameters, which come first."""
        return sum(not spec.is_value for spec in self.tensors)

    @cached_property
    def of_model(self) -> Layout:
        """The layout without moments: the tensors that the model has."""
        kept = tuple(spec for spec in self.tensors if not spec.is_moment)
        return self if len(kept) == len(self.tensors) else replace(self, tensors=kept)

    def with_moments(self, names: Sequence[str]) -> Layout:
        """Return the layout with one moment per name and parameter, in this order, at the end.

        Args:
            names: Each is a key in the optimizer's state, or several, separated by ``|``, of which
                a parameter has at most one.

        >>> spec = TensorSpec("weight", (2, 3), "bfloat16", "matrix")
        >>> [each.name for each in Layout((spec,)).with_moments(["exp_avg"]).tensors]
        ['weight', 'weight@exp_avg']
        """
        model = self.of_model
        moments = tuple(
            TensorSpec(f"{spec.name}@{name}", spec.shape, "float32", "moment")
            for name in names
            for spec in model.tensors[: model.trained]
        )
        return replace(model, tensors=model.tensors + moments) if moments else model

    def moment(self, index: int) -> tuple[int, tuple[str, ...]]:
        """Return the index of a moment's parameter, and its keys in the optimizer's state."""
        keys = self.tensors[index].name.rpartition("@")[2]
        return (index - len(self.of_model.tensors)) % self.trained, tuple(keys.split("|"))

    def describe_difference(self, other: Layout) -> str | None:
        """Describe the first difference as text, or return None if the fingerprints are equal.

        The text calls `self` "ours" and the other layout "theirs".
        """
        for index, (ours, theirs) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            for field in ("name", "shape", "dtype", "role", "aliases"):
                left, right = getattr(ours, field), getattr(theirs, field)
                if left != right:
                    subject = f"tensor {index}" + ("" if field == "name" else f" '{ours.name}'")
                    return f"{subject} differs in {field}: ours {left!r}, theirs {right!r}"
        own_count, other_count = len(self.tensors), len(other.tensors)
        if own_count == other_count:
            return None
        common = min(own_count, other_count)
        whose, longer = ("ours", self) if own_count > other_count else ("theirs", other)
        return (
            f"tensor {common} '{longer.tensors[common].name}' is only in {whose}: "
            f"ours has {own_count} tensors, theirs {other_count}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary for `json.dumps`; `from_json` is the inverse."""
        return cast("dict[str, Any]", _LAYOUT.dump_python(self, mode="json"))

    def to_text(self) -> str:
        """Return text for a message: JSON, compressed if it is long; `from_text` is the inverse.

        The names of ten thousand tensors are similar and compress to a fiftieth of their size.
        """
        text = json.dumps(self.to_json())
        if len(text) <= PLAIN_CHARACTERS_MAX:
            return text
        return COMPRESSED + base64.b64encode(zlib.compress(text.encode())).decode()

    @classmethod
    def from_text(cls, text: str | bytes) -> Layout:
        """Parse and validate JSON text, compressed or not.

        Raises:
            ProtocolError: The text is not JSON, exceeds the size limit of a layout, or contains
                data that `from_json` rejects.
        """
        if isinstance(text, str) and text.startswith(COMPRESSED):
            text = _decompressed(text.removeprefix(COMPRESSED))
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the layout is not JSON: {error!s:.100}") from None
        return cls.from_json(data)

    @classmethod
    def from_json(cls, data: object) -> Layout:
        """Parse and validate the output of `to_json`.

        Raises:
            ProtocolError: A key is missing or unknown, a value has the wrong type or exceeds the
                limits of this module, or a name occurs twice.
        """
        try:
            layout = _LAYOUT.validate_python(data)
            for constant in layout.constants:
                constant.tensor()  # raises if the values do not match shape and dtype
        except ValidationError as error:
            raise ProtocolError(_explained(error)) from None
        except (RuntimeError, OverflowError, ValueError) as error:
            raise ProtocolError(f"a constant of the layout is invalid: {error!s:.100}") from None
        problem = layout._contradiction()
        if problem:
            raise ProtocolError(problem)
        return layout

    def _contradiction(self) -> str:
        """Return a description of the first contradiction in the layout; empty if there is none."""
        roles = [2 * spec.is_moment + spec.is_buffer for spec in self.tensors]
        if roles != sorted(roles):
            return "layout.tensors has a parameter after a buffer, or either after a moment"
        if self.numel > NUMEL_MAX:
            return f"layout has {self.numel} elements, more than the limit of {NUMEL_MAX}"
        names = Counter(name for spec in self.tensors for name in (spec.name, *spec.aliases))
        names.update(constant.name for constant in self.constants)
        twice = [name for name, count in names.items() if count > 1]
        return f"layout names tensor '{twice[0]}' twice" if twice else ""


_LAYOUT = TypeAdapter(Layout)


def _decompressed(text: str) -> bytes:
    try:
        packed = base64.b64decode(text, validate=True)
        unpacker = zlib.decompressobj()
        # The limit bounds the memory: a few kilobytes from a peer could expand to gigabytes.
        plain = unpacker.decompress(packed, LAYOUT_BYTES_MAX)
    except (ValueError, zlib.error) as error:
        raise ProtocolError(f"the layout cannot be decompressed: {error!s:.100}") from None
    if not unpacker.eof:
        raise ProtocolError(
            f"the layout is truncated, or has more than {LAYOUT_BYTES_MAX} bytes decompressed"
        )
    return plain


def _explained(error: ValidationError) -> str:
    """Return the position and description of the first fault in a layout."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    return f"layout{where} is {first['input']!r:.40}: {first['msg']}"


def layout_of(module: nn.Module) -> Layout:
    """Return the layout of a module.

    - Trainable parameters come first, in module order, under their names without wrappers. Tied
      weights, found by storage, are one tensor: the first name is its name, the others are aliases.
      If any of the names belongs to an `nn.Embedding`, the tensor's role is `"embedding"`.
    - Buffers of the state dict with a floating-point dtype follow. Those of a parametrization are
      taken from a single learner.
    - Small integer buffers are constants.
    - Frozen parameters, other buffers and empty tensors are excluded.

    The tensors' values do not matter: learners with different buffer values have the same layout.

    Raises:
        ConfigError: No parameter is trainable, a trainable parameter has an unsupported dtype, or
            two parameters share only a part of their storage.
    """
    tied = _tied(unwrapped(module.named_parameters(remove_duplicate=False)))
    _refuse_overlap(tied)
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
    if not tensors:
        raise ConfigError(
            f"{type(module).__name__} has no trainable parameter among {len(tied)}: "
            "set requires_grad=True on the parameters to train"
        )
    buffers, constants, local = _buffers_of(module)
    return Layout((*tensors, *buffers), (*excluded, *local), constants)


def _buffers_of(module: nn.Module) -> tuple[list[TensorSpec], tuple[Constant, ...], list[str]]:
    """Return the buffers to merge, the constants, and the names of the buffers that stay local."""
    saved = dict(unwrapped(module.state_dict(keep_vars=True).items())).keys()
    single = _reparametrizing(module)
    merged: list[TensorSpec] = []
    constants: list[Constant] = []
    local: list[str] = []
    for names, buffer in _tied(unwrapped(module.named_buffers(remove_duplicate=False))):
        shape, dtype = tuple(buffer.shape), str(buffer.dtype).removeprefix("torch.")
        if not saved.isdisjoint(names) and buffer.numel() and _is_merged(buffer):
            role: Role = "buffer" if single.isdisjoint(names) else "single"
            merged.append(TensorSpec(names[0], shape, dtype, role, tuple(names[1:])))
        elif names[0] in saved and dtype in WHOLE_DTYPES and _is_small(buffer):
            values = tuple(int(value) for value in buffer.reshape(-1).tolist())
            constants += [Constant(name, shape, dtype, values) for name in names]
        else:
            local += names
    return merged, tuple(constants), local


def _is_merged(buffer: Tensor) -> bool:
    if buffer.dtype not in DTYPES.values():
        return False
    return buffer.is_meta or has_window(local_of(buffer))


def _reparametrizing(module: nn.Module) -> set[str]:
    """Return the names of buffers from which a parameter is computed, which a mean would break.

    They belong to a parametrization, or to a hook that has renamed a parameter to `…_orig`, such as
    `torch.nn.utils.spectral_norm` or pruning.
    """
    found: dict[str, None] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        place = f"{prefix}." if prefix else ""
        if isinstance(child, ParametrizationList):
            found |= {place + name: None for name, _ in child.named_buffers()}
        renamed = [key.removesuffix("orig") for key in child._parameters if key.endswith("_orig")]
        found |= {place + key: None for key in child._buffers if key.startswith(tuple(renamed))}
    return {name for name, _ in unwrapped(found.items())}


def _is_small(buffer: Tensor) -> bool:
    return has_window(buffer) and buffer.numel() <= CONSTANT_NUMEL_MAX


def tensors_of(module: nn.Module, layout: Layout) -> list[Tensor]:
    """Return the module's tensors in the order of the layout, for `gather` and `scatter`.

    A module has no moments, so tensors of a layout with moments end before them.

    Raises:
        ConfigError: The module's layout differs; the message describes the first difference.
    """
    own, layout = layout_of(module), layout.of_model
    if not any(spec.is_buffer for spec in layout.tensors):
        own = own.without_buffers()
    difference = layout.describe_difference(own)
    if difference is not None:
        raise ConfigError(
            f"the model does not match the layout (ours: layout, theirs: model): {difference}"
        )
    by_name = named_tensors(module)
    return [by_name[spec.name] for spec in layout.tensors]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by the names that a layout uses."""
    named: dict[str, Tensor] = dict(unwrapped(module.named_parameters(remove_duplicate=False)))
    return named | dict(unwrapped(module.named_buffers(remove_duplicate=False)))


def unwrapped(named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield each pair with its name stripped of the wrappers of the model's parts."""
    for name, thing in named:
        yield unwrapped_name(name), thing


def unwrapped_name(name: str) -> str:
    """Return a tensor's name without the wrappers of the model's parts.

    >>> unwrapped_name("blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    for each in WRAPPED:
        name = name.replace(each, "")
    return name


def _tied(named: Iterable[tuple[str, Tensor]]) -> list[tuple[list[str], Tensor]]:
    """Group names by storage, in module order; a trainable tensor represents its group."""
    groups: dict[object, tuple[list[str], Tensor]] = {}
    for name, tensor in named:
        key = place_of(tensor)
        names, first = groups.get(key, ([], tensor))
        groups[key] = ([*names, name], first if first.requires_grad else tensor)
    return list(groups.values())


def _refuse_overlap(groups: Collection[tuple[list[str], Tensor]]) -> None:
    """Raise ConfigError if two parameters share some memory but are not the same tensor."""
    held = [(names[0], local_of(parameter)) for names, parameter in groups]
    extents = sorted(
        (str(local.device), local.data_ptr(), local.data_ptr() + _extent_bytes(local), name)
        for name, local in held
        if local.numel() and has_window(local)
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
    """Return the names of the parameters that an embedding module owns."""
    found = {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, nn.Embedding | nn.EmbeddingBag)
        for name, parameter in child.named_parameters(recurse=False)
    }
    return {name for name, _ in unwrapped(found.items())}


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    for known, candidate in DTYPES.items():
        if candidate == dtype:
            return known
    raise ConfigError(
        f"parameter '{name}' has dtype {str(dtype).removeprefix('torch.')}, supported dtypes are "
        f"{', '.join(DTYPES)}: convert or freeze it"
    )
