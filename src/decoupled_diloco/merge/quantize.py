"""Codecs that round elements to a few levels, in groups that share a scale.

A group is 128 elements. Its record holds the scale s, in bf16, and then a code of b bits an
element, the first element of each byte in its lowest bits: b + 1/8 bits an element in all. A
vector's body is its groups' records, one after the other; a last group that is not full has a whole
record, with zeros behind its elements. An element decodes to its code's level times s. Levels have
so few bits that the product is exact in fp32, so every machine and device decodes the same bits.

| name | b | code c | level | s | largest error of an element |
|---|---|---|---|---|---|
| int8 | 8 | -127 … 127 | c | max abs(x) / 127 | s/2 |
| int4 | 4 | 0 … 14 | c - 7 | max abs(x) / 7 | s/2 |
| fp4-e3m0 | 4 | 0 … 7 | 0, 2⁻⁶, 2⁻⁵ … 1 | max abs(x) | the larger of 0.336 · abs(x) and s/85 |
| | | 8 … 15 | the same, negative | | |
| int2 | 2 | 0 … 3 | c - 3/2 | 1.25 · mean abs(x) | none: a group loses less than it has |

*The scale* is computed in fp32. It is rounded up to a bf16, so that no element is above the highest
level, for int2 to the nearest. One below 2⁻¹²⁰ is 0, and the group decodes to zeros: no product is
a denormal number, which some machines take for 0.

*A code* is that of the nearest level; for fp4-e3m0, 2ⁿ is taken from 3/4 · 2ⁿ on, and 0 below all
of these. So near a border that arithmetic with few bits does not tell the sides apart, an element
may get either level: nearer than 2⁻¹² of the levels' distance, for fp4-e3m0 2⁻⁸. Codes that are
never written, -128 and 15, are read as the table goes on, as -128 and 8.

*Error feedback* needs a group to be nearer to what it stands for than nothing is. An int2 group
keeps ``‖x - dec‖² ≤ ‖x‖² - 128 · (mean abs(x))² / 2``, zeros behind the elements counted.

*Not finite.* A group with NaN or an infinity in it decodes to values of which none is finite, and
is refused. So may be one that comes near the end of fp32's range: with an element above 3.37e38,
for int2 with a mean abs(x) above 2.6e36.

Sources: groups with a scale of their own are what all low-bit formats do; E3M0 is Streaming
DiLoCo's (arXiv 2501.18512); two bits with error feedback MuLoCo's (2505.23725).

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
"""Elements that share a scale."""

SCALE_BYTES = 2

_SMALLEST = 2.0**-120
"""The smallest scale but 0: all that it is multiplied by gives normal numbers."""


class QuantizedCodec(GroupedCodec):
    """A codec of groups of `GROUP` elements with a scale; what a code means is the subclass's.

    Args:
        name: See `Codec.name`.
        bits: Of a code: 2, 4 or 8.
    """

    def __init__(self, name: str, bits: int) -> None:
        super().__init__(name, GROUP, SCALE_BYTES + GROUP * bits // 8)
        self._bits = bits

    def _write(self, groups: Tensor, records: Tensor) -> None:
        scale = self._scales(groups)
        scale.masked_fill_(scale < _SMALLEST, 0)
        records[:, :SCALE_BYTES] = scale.view(torch.uint8).view(-1, SCALE_BYTES)
        inverse = scale.float().clamp_(min=_SMALLEST).reciprocal_().view(-1, 1)
        records[:, SCALE_BYTES:] = _packed(self._codes(groups * inverse), self._bits)

    def _read(self, records: Tensor, groups: Tensor) -> None:
        scale = bf16_of(records[:, :SCALE_BYTES])
        self._levels(records[:, SCALE_BYTES:], groups)
        groups.mul_(scale)

    def _scales(self, groups: Tensor) -> Tensor:
        """The scales, bf16 [G], of groups fp32 [G, 128]."""
        raise NotImplementedError

    def _codes(self, scaled: Tensor) -> Tensor:
        """The codes, int8 [G, 128], each below 2ᵇ as unsigned, of elements over their scale.

        The elements may be changed.
        """
        raise NotImplementedError

    def _levels(self, codes: Tensor, out: Tensor) -> None:
        """Writes the levels, fp32 [G, 128], of packed codes, uint8 [G, bytes]."""
        raise NotImplementedError


class _Int(QuantizedCodec):
    """Whole numbers from -top to top."""

    def __init__(self, name: str, bits: int) -> None:
        super().__init__(name, bits)
        self._top = 2 ** (bits - 1) - 1
        self._table = _table([code - self._top for code in range(2**bits)], bits)

    def _scales(self, groups: Tensor) -> Tensor:
        return rounded_up(_largest(groups).mul_(1 / self._top))

    def _codes(self, scaled: Tensor) -> Tensor:
        return scaled.add_(self._top + 0.5).to(torch.int8)  # truncates: the nearest

    def _levels(self, codes: Tensor, out: Tensor) -> None:
        _look_up(self._table, codes, out)


class _Int8(_Int):
    """As int4, without a table: the codes are the numbers themselves, in two's complement."""

    def _codes(self, scaled: Tensor) -> Tensor:
        return scaled.round_().to(torch.int8)

    def _levels(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.int8))


class _E3M0(QuantizedCodec):
    """A sign and three bits of exponent: codes 1 to 7 are 2⁻⁶ to 1, and 8 more their negatives."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 4)
        magnitudes = [0.0, *(2.0**power for power in range(-6, 1))]
        self._table = _table([*magnitudes, *(-m for m in magnitudes)], 4)

    def _scales(self, groups: Tensor) -> Tensor:
        return rounded_up(_largest(groups))

    def _codes(self, scaled: Tensor) -> Tensor:
        # Of 4/3 of a number the exponent is that of the nearest power of two. 127 is that of 1.
        bits = scaled.mul_(4 / 3).bfloat16().view(torch.int16)
        codes = (bits & 0x7FFF).bitwise_right_shift_(7).clamp_(120, 127).sub_(120)
        codes.bitwise_or_(bits.bitwise_right_shift_(12).bitwise_and_(8))
        return codes.to(torch.int8)

    def _levels(self, codes: Tensor, out: Tensor) -> None:
        _look_up(self._table, codes, out)


class _Int2(QuantizedCodec):
    """Two levels of each sign, scaled by the mean: the least error for a normal distribution."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 2)
        self._table = _table([-1.5, -0.5, 0.5, 1.5], 2)

    def _scales(self, groups: Tensor) -> Tensor:
        return groups.abs().sum(1).mul_(1.25 / GROUP).bfloat16()

    def _codes(self, scaled: Tensor) -> Tensor:
        return scaled.add_(2).to(torch.int8).clamp_(0, 3)  # |x| ≤ 128 · mean |x|

    def _levels(self, codes: Tensor, out: Tensor) -> None:
        _look_up(self._table, codes, out)


def rounded_up(scale: Tensor) -> Tensor:
    """The smallest bf16 that is not below a number, fp32, not negative; NaN of NaN."""
    near = scale.bfloat16()
    return (near.view(torch.int16) + (near.float() < scale)).view(torch.bfloat16)


def _largest(groups: Tensor) -> Tensor:
    """The largest absolute value of each group: NaN if one is."""
    return torch.maximum(groups.amax(1), groups.amin(1).neg_())


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes, int8 [G, 128], as [G, 128·b/8] integers whose lowest byte has them packed."""
    if bits == 8:
        return codes.view(torch.uint8)
    if bits == 4:
        pairs = codes.view(torch.int16)
        return (pairs >> 4).bitwise_or_(pairs)
    fours = codes.view(torch.int32)
    twos = (fours >> 6).bitwise_or_(fours)
    return (twos >> 12).bitwise_or_(twos)


def _table(levels: Sequence[float], bits: int) -> Tensor:
    """The levels of all codes of each byte, fp32 [256, 8/b], as one wide element for each byte."""
    shifts = range(0, 8, bits)
    rows = [[levels[byte >> shift & 2**bits - 1] for shift in shifts] for byte in range(256)]
    wide = {2: torch.float64, 4: torch.complex128}.get(8 // bits, torch.float32)
    return torch.tensor(rows, dtype=torch.float32, device="cpu").view(wide).view(-1)


def _look_up(table: Tensor, codes: Tensor, out: Tensor) -> None:
    """Writes the levels, fp32 [G, 128], of packed codes, uint8 [G, bytes]."""
    table, places = table.to(out.device), codes.to(torch.int32).view(-1)
    if is_aligned(out, table.dtype):
        torch.index_select(table, 0, places, out=out.view(-1).view(table.dtype))
    else:
        out.view(-1).copy_(table.index_select(0, places).view(torch.float32))


add_built_in(_Int8("int8", 8))
add_built_in(_Int("int4", 4))
add_built_in(_E3M0("fp4-e3m0"))
add_built_in(_Int2("int2"))
