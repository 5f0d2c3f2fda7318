"""Messages, events and effects as JSON and back, checked field by field.

Each value is one JSON object: ``{"type": "StepReport", "step": 3, …}``. Decoding does not trust its
input. Unknown types and fields, missing fields, wrong types, numbers out of range, and texts or
lists that are too long raise a `ProtocolError` that names the field.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal, TypeVar, cast

from decoupled_diloco.errors import ProtocolError

INTEGER_MAX = 2**53
TEXT_CHARACTERS_MAX = 1 << 20
ITEMS_MAX = 1 << 16

_PLAIN = frozenset({str, int, float, bool, type(None)})

_T = TypeVar("_T")
Json = dict[str, Any]
_Decoder = Callable[[Any, str], Any]


def encode(value: object) -> Json:
    """Encode a dataclass of this package as a JSON object.

    >>> from decoupled_diloco.protocol.messages import Progress
    >>> encode(Progress(3, 96))
    {'type': 'Progress', 'clock': 3, 'tokens': 96}
    """
    kind = cast("Any", type(value))
    fields = {name: _plain(getattr(value, name)) for name in _names(kind)}
    for name, default in _rare(kind):
        if getattr(value, name) == default:
            del fields[name]
    return {"type": kind.__name__, **fields}


def numbered(message: object, checkpoint: int) -> Json:
    """Encode a message as JSON with its sender's checkpoint number.

    >>> from decoupled_diloco.protocol.messages import Ending
    >>> numbered(Ending(), 3), numbered(Ending(), 0)
    ({'type': 'Ending', 'checkpoint': 3}, {'type': 'Ending'})
    """
    data = encode(message)
    if checkpoint:
        data["checkpoint"] = checkpoint
    return data


def number_of(data: Json) -> int:
    """Remove the checkpoint number from a message and return it.

    Raises:
        ProtocolError: It is not an integer from 0 to 2^53.
    """
    return _integer(data.pop("checkpoint", 0), "checkpoint")


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return encode(value)


@cache
def _rare(cls: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Return the fields that are left out if they have their defaults (`messages.RARE`)."""
    return tuple((f.name, f.default) for f in dataclasses.fields(cls) if f.metadata.get("rare"))


@cache
def _names(cls: type[Any]) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


def decode(data: object, classes: Iterable[type[_T]]) -> _T:
    """Decode a JSON object as one of these dataclasses.

    Args:
        data: The result of ``json.loads``.
        classes: The allowed classes.

    Returns:
        The value.

    Raises:
        ProtocolError: The object is none of them, or a field is invalid; the message names the
            field.
    """
    return cast("_T", _union(tuple(classes))(data, "message"))


@cache
def _union(classes: tuple[type, ...]) -> _Decoder:
    by_name = {cls.__name__: cls for cls in classes}

    def decoder(data: Any, where: str) -> Any:
        if not isinstance(data, dict):
            raise ProtocolError(f"{where} is {type(data).__name__}, expected an object")
        name = data.get("type")
        if not isinstance(name, str) or name not in by_name:
            raise ProtocolError(f"{where} has type {_shown(name)}, expected {sorted(by_name)}")
        return _object(by_name[name])(data, name)

    return decoder


@cache
def _object(cls: type) -> _Decoder:
    hints = typing.get_type_hints(cls)
    fields = {name: _field(hints[name]) for name in _names(cls)}
    optional = {f.name for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}

    def decoder(data: Any, where: str) -> Any:
        unknown = data.keys() - fields.keys() - {"type"}
        missing = fields.keys() - data.keys() - optional
        if unknown or missing:
            # Truncated, so that a peer cannot fill the log.
            raise ProtocolError(
                f"{where}: unknown fields {sorted(map(str, unknown))[:5]}, "
                f"missing {sorted(missing)[:5]}"
            )
        return cls(
            **{name: f(data[name], f"{where}.{name}") for name, f in fields.items() if name in data}
        )

    return decoder


def _field(hint: Any) -> _Decoder:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin in (typing.Union, types.UnionType):
        rest = [a for a in arguments if a is not type(None)]
        if len(rest) < len(arguments):
            inner = _field(rest[0]) if len(rest) == 1 else _union(tuple(rest))
            return lambda value, where: None if value is None else inner(value, where)
        return _union(tuple(rest))
    if dataclasses.is_dataclass(hint):
        return _union((cast("type", hint),))
    return {int: _integer, float: _number, str: _text, bool: _boolean}[hint]


def _literal(allowed: tuple[Any, ...]) -> _Decoder:
    def decoder(value: Any, where: str) -> Any:
        if value not in allowed:
            raise ProtocolError(f"{where} is {_shown(value)}, expected one of {allowed}")
        return value

    return decoder


def _tuple(arguments: tuple[Any, ...]) -> _Decoder:
    variadic = len(arguments) == 2 and arguments[1] is Ellipsis
    items = [_field(a) for a in (arguments[:1] if variadic else arguments)]

    def decoder(value: Any, where: str) -> Any:
        if not isinstance(value, list) or len(value) > ITEMS_MAX:
            raise ProtocolError(f"{where} must be a list of at most {ITEMS_MAX} items")
        if not variadic and len(value) != len(items):
            raise ProtocolError(f"{where} has {len(value)} items, expected {len(items)}")
        decoders = items * len(value) if variadic else items
        return tuple(
            d(v, f"{where}[{i}]") for i, (d, v) in enumerate(zip(decoders, value, strict=True))
        )

    return decoder


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):  # bool is a subclass of int
        raise ProtocolError(f"{where} is {type(value).__name__}, expected an integer")
    if not 0 <= value <= INTEGER_MAX:
        raise ProtocolError(f"{where}={str(value)[:40]} must be 0 to 2^53")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ProtocolError(f"{where} is {type(value).__name__}, expected a number")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ProtocolError(f"{where}={str(value)[:40]} must be finite")
    return number


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > TEXT_CHARACTERS_MAX:
        raise ProtocolError(f"{where} must be a text of at most {TEXT_CHARACTERS_MAX} characters")
    return value


def _boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError(f"{where} is {type(value).__name__}, expected true or false")
    return value


def _shown(value: Any) -> str:
    """Return the start of a plain value, or the type of one that may be deeply nested."""
    plain = isinstance(value, (str, int, float)) or value is None
    return repr(str(value)[:40]) if plain else type(value).__name__
