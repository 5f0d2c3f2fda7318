"""Codecs that round elements to a few levels, in groups that share a scale.

A group has 128 elements. Its record holds the scale s in bf16, followed by one code of b bits per
element: b + 1/8 bits per element in total. The first element of each byte is in its lowest bits. A
vector's payload is the records of its groups, one after the other. A partial last group has a full
record, padded with zeros after its elements. An element decodes to the level of its code times s.
Levels have few enough bits that the product is exact in fp32, so every machine and device decodes
the same bits.

| name | b | code c | level | s | largest error of an element |
|---|---|---|---|---|---|
| int8 | 8 | -127 … 127 | c | max abs(x) / 127 | s/2 |
| int4 | 4 | 0 … 14 | c - 7 | max abs(x) / 7 | s/2 |
| fp4-e3m0 | 4 | 0 … 7 | 0, 2⁻⁶, 2⁻⁵ … 1 | max abs(x) | the larger of 0.336 · abs(x) and s/85 |
| | | 8 … 15 | the same, negative | | |
| int2 | 2 | 0 … 3 | c - 3/2 | 1.25 · mean abs(x) | unbounded; see *Error feedback* |

*The scale* is computed in fp32. It is rounded up to a bf16, so that no element exceeds the highest
level; for int2 it is rounded to the nearest bf16, and the mean excludes padding. A scale below
2⁻¹²⁰ becomes 0, and the group decodes to zeros. So no product is a denormal number, which some
machines flush to 0.

*A code* selects the nearest level. For fp4-e3m0, level 2ⁿ starts at 3/4 · 2ⁿ, and smaller values
become 0. An element very close to a boundary may get either level, because rounding in the
arithmetic can move it across. "Very close" means within 2⁻¹² of the distance between levels, or
2⁻⁸ for fp4-e3m0. The codes that are never written, -128 and 15, decode as if the table continued:
to levels -128 and 8.

*Error feedback* requires that a decoded group is closer to the original than zeros are. An int2
group of n elements satisfies ``‖x - dec‖² ≤ ‖x‖² - n · (mean abs(x))² / 2``.

*Non-finite values.* A group with a NaN or an infinity decodes to values of which none is finite,
and is rejected. The same may happen near the end of fp32's range: for an element above 3.37e38, or
for int2 a mean abs(x) above 2.6e36.

Sources: a scale per group is common to all low-bit formats. E3M0 is from Streaming DiLoCo (arXiv
2501.18512). Two bits with error feedback are from MuLoCo (arXiv 2505.23725).

Shapes:
    N  elements of a vector
    G  groups of 128 elements of one block
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoupled_diloco.merge.codec import add_built_in, bf16_of, is_aligned
from decoupled_diloco.merge.grouped import GroupedCodec

GROUP = 128
"""Number of elements that share a scale."""

SCALE_BYTES = 2

_SMALLEST = 2.0**-120
"""The smallest scale above 0: its product with any level is a normal number."""


class QuantizedCodec(GroupedCodec):
    """A codec with one scale per `GROUP` elements. The subclass defines the levels of the codes.

    Args:
        name: See `Codec.name`.
        bits: Number of bits per code: 2, 4 or 8.
    """

    def __init__(self, name: str, bits: int) -> None:
        super().__init__(name, GROUP, SCALE_BYTES + GROUP * bits // 8)
        self._bits = bits

    def _write(self, groups: Tensor, records: Tensor, elements: int) -> None:
        scale = self._scales(groups, elements)
        scale.masked_fill_(scale < _SMALLEST, 0)
        records[:, :SCALE_BYTES] = scale.view(torch.uint8).view(-1, SCALE_BYTES)
        inverse = scale.float().clamp_(min=_SMALLEST).reciprocal_().view(-1, 1)
        records[:, SCALE_BYTES:] = _packed(self._codes(groups * inverse), self._bits)

    def _read(self, records: Tensor, groups: Tensor) -> None:
        scale = bf16_of(records[:, :SCALE_BYTES])
        self._levels(records[:, SCALE_BYTES:], groups)
        groups.mul_(scale)

    def _scales(self, groups: Tensor, elements: int) -> Tensor:
        """Return the scales, bf16 [G], of groups, fp32 [G, 128], with this number of elements."""
        raise NotImplementedError

    def _codes(self, scaled: Tensor) -> Tensor:
        """Return the codes, int8 [G, 128], each below 2ᵇ as unsigned, of elements over their scale.

        The method may change `scaled`.
        """
        raise NotImplementedError

    def _levels(self, codes: Tensor, out: Tensor) -> None:
        """Write the levels, fp32 [G, 128], of packed codes, uint8 [G, bytes], to `out`."""
        raise NotImplementedError


class _Int(QuantizedCodec):
    """Integer levels from -top to top."""

    def __init__(self, name: str, bits: int) -> None:
        super().__init__(name, bits)
        self._top = 2 ** (bits - 1) - 1
        self._table = _table([code - self._top for code in range(2**bits)], bits)

    def _scales(self, groups: Tensor, elements: int) -> Tensor:
        return rounded_up(_largest(groups).mul_(1 / self._top))

    def _codes(self, scaled: Tensor) -> Tensor:
        # The conversion truncates, so adding 0.5 rounds to the nearest code.
        return scaled.add_(self._top + 0.5).to(torch.int8)

    def _levels(self, codes: Tensor, out: Tensor) -> None:
        _look_up(self._table, codes, out)


class _Int8(_Int):
    """Eight-bit levels without a table: the codes are the levels in two's complement."""

    def _codes(self, scaled: Tensor) -> Tensor:
        return scaled.round_().to(torch.int8)

    def _levels(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.int8))


class _E3M0(QuantizedCodec):
    """A sign bit and three exponent bits: codes 1 to 7 are 2⁻⁶ to 1, and 9 to 15 the negatives."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 4)
        magnitudes = [0.0, *(2.0**power for power in range(-6, 1))]
        self._table = _table([*magnitudes, *(-m for m in magnitudes)], 4)

    def _scales(self, groups: Tensor, elements: int) -> Tensor:
        return rounded_up(_largest(groups))

    def _codes(self, scaled: Tensor) -> Tensor:
        # x is nearest to 2ⁿ from 3/4 · 2ⁿ on, so the exponent of 4/3 · x is n. It is biased by 127:
        # 120 … 127 are the codes 0 … 7. The cast to bf16 keeps the exponent in bits 7 to 14.
        bits = scaled.mul_(4 / 3).bfloat16().view(torch.int16)
        codes = (bits & 0x7FFF).bitwise_right_shift_(7).clamp_(120, 127).sub_(120)
        codes.bitwise_or_(bits.bitwise_right_shift_(12).bitwise_and_(8))
        return codes.to(torch.int8)

    def _levels(self, codes: Tensor, out: Tensor) -> None:
        _look_up(self._table, codes, out)


class _Int2(QuantizedCodec):
    """Two levels per sign, scaled by the mean: the smallest error for a normal distribution."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 2)
        self._table = _table([-1.5, -0.5, 0.5, 1.5], 2)

    def _scales(self, groups: Tensor, elements: int) -> Tensor:
        # Zeros after a partial group would make its scale so small that feedback takes long.
        return groups.abs().sum(1).mul_(1.25 / elements).bfloat16()

    def _codes(self, scaled: Tensor) -> Tensor:
        return scaled.add_(2).to(torch.int8).clamp_(0, 3)  # |x| ≤ 128 · mean |x|

    def _levels(self, codes: Tensor, out: Tensor) -> None:
        _look_up(self._table, codes, out)


def rounded_up(scale: Tensor) -> Tensor:
    """Return the smallest bf16 that is not below a nonnegative fp32 number; NaN for NaN."""
    near = scale.bfloat16()
    return (near.view(torch.int16) + (near.float() < scale)).view(torch.bfloat16)


def _largest(groups: Tensor) -> Tensor:
    """Return the largest absolute value of each group: NaN if any element is NaN."""
    return torch.maximum(groups.amax(1), groups.amin(1).neg_())


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, int8 [G, 128], into the lowest bytes of integers [G, 128·b/8]."""
    if bits == 8:
        return codes.view(torch.uint8)
    if bits == 4:
        pairs = codes.view(torch.int16)
        return (pairs >> 4).bitwise_or_(pairs)
    fours = codes.view(torch.int32)
    twos = (fours >> 6).bitwise_or_(fours)
    return (twos >> 12).bitwise_or_(twos)


def _table(levels: Sequence[float], bits: int) -> Tensor:
    """Return the levels of the codes in each byte, fp32 [256, 8/b], as one wide element per byte.

    One lookup of a wide element then decodes all codes of a byte.
    """
    shifts = range(0, 8, bits)
    rows = [[levels[byte >> shift & 2**bits - 1] for shift in shifts] for byte in range(256)]
    wide = {2: torch.float64, 4: torch.complex128}.get(8 // bits, torch.float32)
    return torch.tensor(rows, dtype=torch.float32, device="cpu").view(wide).view(-1)


def _look_up(table: Tensor, codes: Tensor, out: Tensor) -> None:
    """Write the levels, fp32 [G, 128], of packed codes, uint8 [G, bytes], to `out`."""
    table, places = table.to(out.device), codes.to(torch.int32).view(-1)
    if is_aligned(out, table.dtype):
        torch.index_select(table, 0, places, out=out.view(-1).view(table.dtype))
    else:
        out.view(-1).copy_(table.index_select(0, places).view(torch.float32))


add_built_in(_Int8("int8", 8))
add_built_in(_Int("int4", 4))
add_built_in(_E3M0("fp4-e3m0"))
add_built_in(_Int2("int2"))
