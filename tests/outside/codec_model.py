"""A plain model of the payloads of the low-bit codecs, written from their docs.

It is pure Python. Numbers are floats, which represent every fp32 value and product exactly, and a
payload is bytes.
"""

from __future__ import annotations

import struct
from bisect import bisect
from collections.abc import Sequence
from functools import cache
from math import copysign, fsum, inf
from typing import NamedTuple

GROUP, CHUNK = 128, 4096
BITS = {"int8": 8, "int4": 4, "fp4-e3m0": 4, "int2": 2}
TOP = {"int8": 127, "int4": 7, "fp4-e3m0": 1}
"""The highest level of codecs whose scale comes from the largest element."""
WRITTEN = {"int8": {*range(256)} - {128}, "int4": {*range(15)}}
"""The codes that an encoder writes, if it does not use all of them."""
NO_SCALE = 2.0**-120
"""A smaller scale counts as 0."""
UNSURE = {"int8": 2**-12, "int4": 2**-12, "fp4-e3m0": 2**-8, "int2": 2**-12}
"""An element this near the middle of two levels, relative to their distance, may get either one."""
ROUNDING = 2.0**-18
"""Relative error of a sum over a group or chunk, because it is computed in fp32."""


class Group(NamedTuple):
    scale: float
    codes: list[int]


class Chunk(NamedTuple):
    a: float
    b: float
    indices: list[int]
    codes: list[int]


class Refused(Exception):
    """The indices of a chunk do not ascend."""


# sizes


def span(name: str) -> int:
    """Return the number of elements per record."""
    return GROUP if name in BITS else CHUNK


def kept(name: str) -> int:
    """Return the number of elements of a chunk that are sent: 80, or the number in the name."""
    return int(name.partition("-")[2] or 80)


def record_bytes(name: str) -> int:
    if name in BITS:
        return 2 + GROUP * BITS[name] // 8
    return 4 + 7 * kept(name) // 4


def nbytes(name: str, numel: int) -> int:
    return -(-numel // span(name)) * record_bytes(name)


# numbers


def fp32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return copysign(inf, value)


def bf16(two: bytes) -> float:
    return float(struct.unpack("<f", b"\0\0" + two)[0])


def bf16_steps(value: float) -> int:
    """Return the index of a bf16 value counted from 0, so that two neighbors differ by 1."""
    return int.from_bytes(struct.pack("<f", value)[2:], "little")


def bf16_below(value: float) -> float:
    """Return the largest bf16 that is not above a value ≥ 0."""
    low, high = 0, 0x7F80
    while high - low > 1:
        middle = (low + high) // 2
        if bf16(middle.to_bytes(2, "little")) <= value:
            low = middle
        else:
            high = middle
    return bf16(low.to_bytes(2, "little"))


def after(value: float) -> float:
    """Return the next bf16."""
    return bf16((bf16_steps(value) + 1).to_bytes(2, "little"))


def bf16_up(value: float) -> float:
    below = bf16_below(value)
    return below if below == value else after(below)


def bf16_near(value: float) -> float:
    """Return the nearest bf16, with ties to even."""
    below = bf16_below(value)
    above = after(below)
    twice = below + (2.0**128 if above == inf else above)
    if 2 * value == twice:
        return below if bf16_steps(below) % 2 == 0 else above
    return below if 2 * value < twice else above


# reading


def unpack(octets: bytes, bits: int) -> list[int]:
    """Unpack numbers with this number of bits, the first in the lowest bits."""
    number, mask = int.from_bytes(octets, "little"), (1 << bits) - 1
    return [number >> at & mask for at in range(0, 8 * len(octets), bits)]


def pack(numbers: Sequence[int], bits: int) -> bytes:
    number = sum(code << n * bits for n, code in enumerate(numbers))
    return number.to_bytes(len(numbers) * bits // 8, "little")


def level(name: str, code: int) -> float:
    """Return the level of a code."""
    match name:
        case "int8":
            return float(code - 256 if code >= 128 else code)
        case "int4":
            return float(code - 7)
        case "fp4-e3m0":
            size = 2.0 ** (code % 8 - 7) if code % 8 else 0.0
            return -size if code >= 8 else size
    return code - 1.5


def groups(name: str, body: bytes) -> list[Group]:
    size = record_bytes(name)
    records = [body[at : at + size] for at in range(0, len(body), size)]
    return [Group(bf16(record[:2]), unpack(record[2:], BITS[name])) for record in records]


def chunks(name: str, body: bytes) -> list[Chunk]:
    size, k = record_bytes(name), kept(name)
    cut = 4 + 3 * k // 2
    return [
        Chunk(bf16(r[:2]), bf16(r[2:4]), unpack(r[4:cut], 12), unpack(r[cut:], 2))
        for r in (body[at : at + size] for at in range(0, len(body), size))
    ]


def decode(name: str, body: bytes, numel: int) -> list[float]:
    """Return the fp32 values [N] of a payload."""
    assert len(body) == nbytes(name, numel)
    if name in BITS:
        levels = [level(name, code) for code in range(1 << BITS[name])]
        values = []
        for group in groups(name, body):
            products = [fp32(each * group.scale) for each in levels]
            values += [products[code] for code in group.codes]
        return values[:numel]
    values = []
    for chunk in chunks(name, body):
        values += decoded_chunk(chunk)
    return values[:numel]


def decoded_chunk(chunk: Chunk) -> list[float]:
    values = [0.0] * CHUNK
    before = -1
    for index, code in zip(chunk.indices, chunk.codes, strict=True):
        if index <= before:
            raise Refused(f"{index} after {before}")
        size = chunk.b if code & 2 else chunk.a
        values[index] = -size if code & 1 else size
        before = index
    return values


# writing


def parts(values: Sequence[float], size: int) -> list[list[float]]:
    """Split values into parts of one size, padded with zeros."""
    full = [*values, *[0.0] * (-len(values) % size)]
    return [full[at : at + size] for at in range(0, len(full), size)]


def scales(name: str, group: Sequence[float], count: int) -> set[float]:
    """Return the possible scales of a group: two if the rounding of a sum may matter.

    Args:
        count: The group's elements, without the zeros after them.
    """
    sizes = [abs(x) for x in group]
    if name != "int2":
        found = {bf16_up(fp32(max(sizes) * fp32(1 / TOP[name])))}
    else:
        exact = 1.25 * average(sizes[:count])
        found = {bf16_near(exact * (1 + part)) for part in (-ROUNDING, ROUNDING)}
    return {0.0 if scale < NO_SCALE else scale for scale in found}


def codes(name: str, x: float, scale: float) -> set[int]:
    """Return the possible codes of an element: of the nearest level, or one almost as near."""
    levels, of_level = by_level(name)
    ratio = x / scale
    at = bisect(levels, ratio)
    if at in (0, len(levels)):
        return of_level[levels[min(at, len(levels) - 1)]]
    low, high = levels[at - 1 : at + 1]
    if name == "fp4-e3m0":
        middle = 0.75 * max(low, high, key=abs)
    else:
        middle = (low + high) / 2
    if abs(ratio - middle) <= UNSURE[name] * (high - low):
        return of_level[low] | of_level[high]
    return of_level[low if ratio < middle else high]


@cache
def by_level(name: str) -> tuple[list[float], dict[float, set[int]]]:
    """Return the levels in ascending order, and the codes of each level."""
    found: dict[float, set[int]] = {}
    for code in WRITTEN.get(name, range(1 << BITS[name])):
        found.setdefault(level(name, code), set()).add(code)
    return sorted(found), found


def group_is_right(name: str, group: Sequence[float], record: Group, count: int) -> bool:
    """Whether a finite group of ``count`` elements may have this record."""
    if record.scale not in scales(name, group, count):
        return False
    if record.scale == 0:
        return True  # any codes decode to zero
    pairs = zip(group, record.codes, strict=True)
    return all(code in codes(name, x, record.scale) for x, code in pairs)


def chunk_is_right(name: str, chunk: Sequence[float], record: Chunk, count: int) -> bool:
    """Whether a finite chunk may have this record, whatever its number of elements is."""
    sizes = [abs(chunk[index]) for index in record.indices]
    if sorted(sizes) != sorted(map(abs, chunk))[-kept(name) :]:
        return False
    mean, pairs = average(sizes), list(zip(record.indices, record.codes, strict=True))
    above = [size for size, code in zip(sizes, record.codes, strict=True) if code & 2]
    rest = [size for size, code in zip(sizes, record.codes, strict=True) if not code & 2]
    return (
        all((chunk[index] < 0) == code & 1 for index, code in pairs)
        and all(size >= mean * (1 - ROUNDING) for size in above)
        and all(size <= mean * (1 + ROUNDING) for size in rest)
        and is_average(record.a, rest)
        and is_average(record.b, above)
    )


def is_average(value: float, sizes: Sequence[float]) -> bool:
    """Whether a value is the mean of sizes in bf16, or 0 if there are none."""
    exact = average(sizes) if sizes else 0.0
    return value in {bf16_near(exact * (1 + part)) for part in (-ROUNDING, ROUNDING)}


def average(sizes: Sequence[float]) -> float:
    return fsum(sizes) / len(sizes)
