"""Nested plain state (of optimizers, schedulers, data loaders) as tensors and JSON, never pickle.

`pack` splits a state into named tensors, for safetensors, and a JSON text with the position of
each; `unpack` restores the state. The JSON contains JSON's own types unchanged. Every other value
is an object with one key, which is its type:

```
{"dict": [[key, value], …]}   {"tuple": […]}   {"tensor": name}   {"array": name}
{"complex": name}   {"bytes": hex}   {"float": "inf" | "-inf" | "nan"}
{"dtype": name}   {"wrapper": [class, shape, strides, context, {attribute: tensor, …}]}
```

A *wrapper* is a tensor subclass around other tensors, such as quantized weights or the state of an
8-bit optimizer. Its class is looked up in the modules that the program has imported.
"""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError, StorageError, a_kind
from decoupled_diloco.merge import inside_of, is_wrapper, place_of
from decoupled_diloco.storage.files import NOT_JSON

DEPTH_MAX = 100
"""Maximum nesting: a deeper state is assumed to contain itself."""


def pack(state: Any) -> tuple[dict[str, Tensor], str]:
    """Split a state into tensors and JSON; the tensors are neither copied nor moved.

    A tensor that occurs more than once (the same memory, shape and strides) is stored once, and is
    one tensor again after `unpack`.

    Args:
        state: dicts (with text or integer keys), lists, tuples, numbers, `None`, text, bytes,
            tensors of any dtype and device, NumPy arrays and scalars.

    Returns:
        The tensors by name, and the JSON text.

    Raises:
        ConfigError: A value has another type; the message contains its position.

    Examples:
        >>> tensors, text = pack({"step": 3, 0: (torch.ones(2), float("inf"))})
        >>> text
        '{"dict": [["step", 3], [0, {"tuple": [{"tensor": "0"}, {"float": "inf"}]}]]}'
        >>> unpack(tensors, text)
        {'step': 3, 0: (tensor([1., 1.]), inf)}
    """
    packer = _Packer()
    text = json.dumps(packer.plain(state, "state", 0), allow_nan=False)
    return packer.tensors, text


def unpack(tensors: Mapping[str, Tensor], text: str) -> Any:
    """Restore a state from the output of `pack`.

    Raises:
        StorageError: The text is not an output of `pack`, or a tensor is missing.
    """
    try:
        return _unpacked(json.loads(text), tensors)
    except (RuntimeError, *NOT_JSON) as error:
        raise StorageError(f"a packed state cannot be read: {error!r}") from error


HostMemory = dict[str, Tensor]
"""The host memory of one copy of a state, by tensor name."""


def on_host(state: Any, memory: HostMemory | None = None) -> Any:
    """Copy a state: its tensors to the host, everything else by value.

    Args:
        memory: Memory of an earlier copy to overwrite, because new memory takes several times as
            long. Tensors of another shape or dtype are replaced. The default is new memory.
    """
    tensors, text = pack(state)
    memory = {} if memory is None else memory
    _fit(memory, tensors)
    for name, tensor in tensors.items():
        memory[name].copy_(tensor, non_blocking=tensor.is_cuda)
    # The copies of all tensors overlap. One wait per device is enough before the host reads them.
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return unpack(memory, text)


def host_memory(state: Any) -> Callable[[], HostMemory]:
    """Return a function that allocates memory for copies of a state, for another thread to call.

    The function does not keep the state's tensors alive.
    """
    tensors, _ = pack(state)
    kinds = {name: (t.shape, t.dtype, t.is_cuda) for name, t in tensors.items()}

    def allocate() -> HostMemory:
        # Writing zeros causes the page faults here and not during the copy.
        return {name: _empty(*kind).zero_() for name, kind in kinds.items()}

    return allocate


def _fit(memory: HostMemory, tensors: Mapping[str, Tensor]) -> None:
    """Replace tensors of another shape or dtype, and drop unused ones."""
    for name in memory.keys() - tensors.keys():
        del memory[name]
    for name, tensor in tensors.items():
        old = memory.get(name)
        if old is None or (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
            memory[name] = _empty(tensor.shape, tensor.dtype, tensor.is_cuda)


def _empty(shape: torch.Size, dtype: torch.dtype, pinned: bool) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)


class _Packer:
    """Collects the tensors of one state."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[object, str] = {}

    def plain(self, value: Any, where: str, depth: int) -> Any:
        """Return the JSON of a value; ``where`` is its position in the state, for messages."""
        if depth > DEPTH_MAX:
            raise ConfigError(
                f"{where[:80]}… is nested more than {DEPTH_MAX} levels deep, or contains itself"
            )
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, np.generic):
            return {"array": self._keep(torch.from_numpy(_known(np.asarray(value), where)))}
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, where, depth + 1)
        if type(value) is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if type(value) is bytes:
            return {"bytes": value.hex()}
        if isinstance(value, np.ndarray):
            return {"array": self._keep(torch.from_numpy(_known(value, where)))}
        return self._collection(value, where, depth + 1)

    def _collection(self, value: Any, where: str, depth: int) -> Any:
        if type(value) is list:
            return [self.plain(item, f"{where}[{i}]", depth) for i, item in enumerate(value)]
        if type(value) in (tuple, torch.Size):
            return {"tuple": self.plain(list(value), where, depth)}
        if type(value) not in (dict, OrderedDict):
            raise ConfigError(
                f"{where} is {a_kind(value)}, which cannot be saved without pickle: "
                "state_dict() must return dicts, lists, tuples, numbers, text, bytes, tensors and "
                "arrays"
            )
        for key in value:
            if type(key) not in (str, int):
                raise ConfigError(f"{where} has the key {key!r}: keys must be text or integers")
        return {"dict": [[k, self.plain(v, f"{where}[{k!r}]", depth)] for k, v in value.items()]}

    def _tensor(self, tensor: Tensor, where: str, depth: int) -> Any:
        if is_wrapper(tensor):
            return {"wrapper": self._wrapper(tensor.detach(), where, depth)}
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = f"{tensor.layout} {tensor.dtype} tensor on {tensor.device}"
            raise ConfigError(f"{where} is a {kind}, which cannot be saved: convert it to dense")
        tensor = tensor.detach()
        if tensor.is_complex():
            return {"complex": self._keep(torch.view_as_real(tensor.resolve_conj()))}
        return {"tensor": self._keep(tensor)}

    def _wrapper(self, tensor: Tensor, where: str, depth: int) -> list[Any]:
        kind = type(tensor)
        name = f"{kind.__module__}:{kind.__qualname__}"
        if _wrapper_class(name) is not kind:
            raise ConfigError(
                f"{where} is a {kind.__qualname__}, which cannot be saved: define this tensor "
                "subclass at the top level of a module, with __tensor_flatten__ and "
                "__tensor_unflatten__"
            )
        inside, context = inside_of(tensor)
        return [
            name,
            list(tensor.shape),
            list(tensor.stride()),
            self.plain(context, f"{where}'s context", depth),
            {key: self._tensor(each, f"{where}.{key}", depth) for key, each in inside.items()},
        ]

    def _keep(self, tensor: Tensor) -> str:
        name = self._names.setdefault(place_of(tensor), str(len(self.tensors)))
        # `place_of` is valid only while the tensor lives: this reference keeps its memory in use,
        # so that no later tensor can get the same place.
        self.tensors.setdefault(name, tensor)
        return name


def _known(array: np.ndarray, where: str) -> np.ndarray:
    """Return an array that `torch.from_numpy` accepts: a copy if it is read-only or not C-ordered.

    Raises:
        ConfigError: PyTorch has no such dtype.
    """
    try:
        if array.dtype.kind == "c":
            raise TypeError
        torch.from_numpy(np.empty(0, array.dtype))
    except TypeError:
        raise ConfigError(
            f"{where} is a NumPy array of {array.dtype}, which cannot be saved: use real numbers"
        ) from None
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return _KINDS[kind](content, tensors)


def _wrapper_class(name: str) -> Any:
    """Return the tensor subclass of a name; None if the program has not imported it."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    is_tensor = isinstance(found, type) and issubclass(found, Tensor)
    return found if is_tensor and hasattr(found, "__tensor_unflatten__") else None


def _wrapped(content: list[Any], tensors: Mapping[str, Tensor]) -> Tensor:
    name, shape, strides, context, inside = content
    kind = _wrapper_class(name)
    if kind is None:
        raise StorageError(
            f"{name} is not imported: import its module before the Learner is created"
        )
    parts = {key: _unpacked(each, tensors) for key, each in inside.items()}
    context = _unpacked(context, tensors)
    try:
        made: Tensor = kind.__tensor_unflatten__(parts, context, torch.Size(shape), tuple(strides))
    except Exception as error:  # a user's subclass may raise anything
        raise StorageError(f"{name} cannot be restored from its state: {error!r:.200}") from error
    return made


_KINDS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "dict": lambda pairs, tensors: {key: _unpacked(item, tensors) for key, item in pairs},
    "tuple": lambda items, tensors: tuple(_unpacked(item, tensors) for item in items),
    "tensor": lambda name, tensors: tensors[name],
    "complex": lambda name, tensors: torch.view_as_complex(tensors[name]),
    "array": lambda name, tensors: _array(tensors[name]),
    "bytes": lambda text, tensors: bytes.fromhex(text),
    "dtype": lambda name, tensors: _dtype(name),
    "wrapper": _wrapped,
    "float": lambda text, tensors: float(text),
}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return found


def _array(tensor: Tensor) -> Any:
    """Return a copy as a NumPy array, or as a NumPy scalar if it has no dimensions."""
    array = tensor.numpy().copy()
    return array if array.ndim else array[()]
