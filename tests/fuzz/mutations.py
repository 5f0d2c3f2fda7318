"""Create hostile inputs from valid ones, as from a broken disk, another version or an attacker.

Every choice comes from one `random.Random`, so target, seed and number determine an input.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

Mutate = Callable[[random.Random, Sequence[bytes]], bytes]
"""Creates one input from a target's valid samples."""

DEPTHS = (2, 90, 900, 990, 1010, 5_000)
NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "-0.0", "1.5", "-1", "0", "1"),
    *(str(2**31), str(2**53), str(2**53 + 1), str(2**63), str(2**64), str(-(2**63))),
    *("9" * 400, "-" + "9" * 400, "9" * 5_000),
)
TEXTS = (
    *("", "\0", "\ud800", "é", "\u202e", "../../etc/passwd", "NaN", "1e999", "9" * 5_000, "[", "%"),
    *("x" * 2_000, "learner-0", "coordinator", "shard-0", "float32", "torch", "nn", "__class__"),
)
TOKENS = (
    b"\0",
    b"\xff\xff\xff\xff",
    b"\xed\xa0\x80",
    b"\r\n",
    b"\n",
    b"\x80",
    b'"',
    b"{",
    b"[" * 999,
)
SIZES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)


def any_bytes(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """Return a sample with a few flips, truncations, splices, repetitions or changed lengths."""
    data = bytearray(rng.choice(samples))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        _OPERATIONS[rng.randrange(len(_OPERATIONS))](rng, data, samples)
    return bytes(data)


def _flip(rng: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(rng: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _remove(rng: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    begin = rng.randrange(len(data) + 1)
    del data[begin : begin + rng.choice((1, 2, 8, 64, 512))]


def _insert(rng: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    begin = rng.randrange(len(data) + 1)
    data[begin:begin] = rng.choice((*TOKENS, rng.randbytes(rng.choice((1, 4, 64)))))


def _repeat(rng: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    begin = rng.randrange(len(data) + 1)
    piece = data[begin : begin + rng.choice((1, 4, 32, 256))]
    data[begin:begin] = piece * rng.choice((1, 2, 16))


def _splice(rng: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    other = rng.choice(samples)
    begin, end = rng.randrange(len(data) + 1), rng.randrange(len(other) + 1)
    data[begin:] = other[end:]


def _length(rng: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    width = rng.choice((2, 4, 8))
    begin = rng.choice((0, 4, 8, 16, rng.randrange(len(data) + 1)))
    number = (rng.choice(SIZES) + rng.choice((-1, 0, 0, 1))) % 2 ** (8 * width)
    data[begin : begin + width] = number.to_bytes(width, rng.choice(("little", "big")))


def _digits(rng: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    """Replace a number in text by another one."""
    places = [at for at, octet in enumerate(data) if 48 <= octet <= 57]
    if places:
        begin = end = rng.choice(places)
        while end < len(data) and 48 <= data[end] <= 57:
            end += 1
        data[begin:end] = rng.choice(NUMBERS).encode()


_OPERATIONS = (_flip, _flip, _cut, _remove, _insert, _repeat, _splice, _length, _digits)


class Raw(str):
    """Text that is written into the JSON unquoted."""


def any_json(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """Return a JSON sample with a few changed values. Sometimes the result is not valid JSON."""
    value = mutated(rng, json.loads(rng.choice(samples)))
    data = dumped(value)
    return any_bytes(rng, [data]) if rng.random() < 0.15 else data


def mutated(rng: random.Random, value: Any) -> Any:
    """Return a JSON value with a few changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = _changed(rng, value)
    return value


def _changed(rng: random.Random, value: Any) -> Any:
    """Change one place in a value. Inner places are more likely than the whole value."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return _changed_in(rng, value, key)
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        if rng.random() < 0.1:
            return [*value[:place], *value[place:] * rng.choice((2, 20))]
        return [*value[:place], _changed(rng, value[place]), *value[place + 1 :]]
    return rng.choice(_VALUES)(rng, value)


def _changed_in(rng: random.Random, value: dict[str, Any], key: str) -> dict[str, Any]:
    how = rng.random()
    if how < 0.1:
        return {name: each for name, each in value.items() if name != key}
    if how < 0.2:
        return {**value, rng.choice(TEXTS): rng.choice(list(value.values()))}
    if how < 0.25:
        return {rng.choice((name, name, "type")): each for name, each in value.items()}
    return {**value, key: _changed(rng, value[key])}


def _deep(rng: random.Random, value: Any) -> Any:
    depth = rng.choice(DEPTHS)
    opened, closed = rng.choice((("[", "]"), ('{"a":', "}"), ('{"dict":[["a",', "]]}")))
    return Raw(opened * depth + "1" + (closed * depth if rng.random() < 0.9 else ""))


_VALUES: tuple[Callable[[random.Random, Any], Any], ...] = (
    lambda rng, value: Raw(rng.choice(NUMBERS)),
    lambda rng, value: Raw(rng.choice(NUMBERS)),
    lambda rng, value: rng.choice(TEXTS),
    lambda rng, value: rng.choice((None, True, False, [], {}, [[]], [None], {"type": "x"})),
    lambda rng, value: [value] * rng.choice((1, 3, 10)),
    lambda rng, value: {"type": value},
    _deep,
    # Text that contains JSON is changed inside.
    lambda rng, value: _inside(rng, value),
)


def _inside(rng: random.Random, value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Raw) and is_json(value):
        return dumped(mutated(rng, json.loads(value))).decode("utf-8", "replace")
    return value + 1 if isinstance(value, int) else str(value)


def dumped(value: Any) -> bytes:
    """Encode JSON with `Raw` texts unquoted."""
    return _text(value).encode("utf-8", "surrogatepass")


def _text(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    return json.dumps(value)


def any_lines(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """Return a sample of JSON lines, some of them changed, repeated, removed or reordered."""
    lines = rng.choice(samples).splitlines()
    for _ in range(rng.choice((1, 2, 5))):
        place = rng.randrange(len(lines))
        how = rng.random()
        if how < 0.75:
            lines[place] = any_json(rng, [lines[place]]) if is_json(lines[place]) else b"{"
        elif how < 0.85:
            lines.insert(rng.randrange(len(lines)), lines[place])
        elif len(lines) > 1:
            del lines[place]
    data = b"\n".join(lines) + b"\n"
    return any_bytes(rng, [data]) if rng.random() < 0.2 else data


DEPTH_KEPT = 60
"""JSON that is deeper was created here, and it is not changed again."""


def is_json(text: str | bytes) -> bool:
    """Whether a text is a JSON list or object that can be changed inside."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
    if data[:1] not in (b"[", b"{") or any(each * DEPTH_KEPT in data for each in (b"[", b'{"a":')):
        return False
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
