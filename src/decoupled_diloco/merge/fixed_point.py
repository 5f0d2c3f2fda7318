"""Contributions as integers, whose sums are exact (rule 24).

A learner multiplies its contribution by its own weight and rounds it to integers. Everything that a
merge needs is then a sum: of w·v (mean), or of w·φ(v) and w·‖v‖ (RDA). Integers modulo 2^b can be
masked, and their sums do not depend on the order. The merge itself is that of `accumulate`.

For each contribution, with a = w / max w in (0, 1], and a public bound B for each segment:

    element of an RDA segment     a · v/‖v‖
    element of any other segment  a · v/B, clipped so that ‖v‖ ≤ B

rounded to a multiple of 2^-(bits - 1), modulo 2^b. The bounds come from the mean norms of earlier
merges, which are public, so a much larger contribution is clipped. A buffer is sent as its change
from the published copy, because a change needs fewer bits than a value.

With differential privacy, the bounds are settings, nothing but the elements may depend on the
contribution, and their norm is at most a: they are rounded toward zero, and no norms are sent.

The payload is ``scalars | elements``, little-endian:

    scalars   int64 modulo 2^64: a, then a·min(1, ‖v‖/B) for each segment (0 with differential
              privacy), then for each buffer segment whether its values are whole numbers and
              whether they form a unit vector
    elements  b / 8 bytes each

Shapes:
    N  elements of a fragment
    S  segments of a fragment
    F  scalars: 1 + S + 2 times the number of buffer segments
    B  bytes of a payload
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError, MergeError, ProtocolError
from decoupled_diloco.merge.accumulate import Accumulator
from decoupled_diloco.merge.blocks import blocks_of, is_finite, norm_of
from decoupled_diloco.merge.codec import Body, as_bytes
from decoupled_diloco.merge.fragments import Segment

MODULUS_BITS_MAX = 32
"""The largest b: sums are computed in int32, which wraps around."""

BITS_MAX = 24
"""More bits than the 24 of fp32's mantissa would hold noise."""

BITS_MIN = 8

SCALAR_BITS = 32
"""Bits of the fraction of a scalar. 2^30 learners fit into 64 bits."""

BOUND_FACTOR = 8.0
"""A bound is at least this multiple of the last mean norm: a contribution may be so much larger."""

FIRST_BOUND = 0.1
"""The least first bound of an element that changes, where no norm is known yet."""

FIRST_BOUND_OF_BUFFERS = 1024.0
"""The least first bound of an element of a buffer, such as a counter of batches."""

_UNIT_TOLERANCE = 1e-3

NOISE_REACH = 12.0
"""Standard deviations of noise for which a sum has room: one in 10^32 elements exceeds them."""

_NORM_ERROR = 2.0**-19
"""The most by which `norm_of` is too small, relative to the norm."""


@dataclass(frozen=True)
class FixedPoint:
    """The number format of a run's integers.

    Attributes:
        bits: Bits of one contribution's element, with its sign.
        modulus_bits: b, a multiple of 8: sums are modulo 2^b.
    """

    bits: int
    modulus_bits: int

    @classmethod
    def of(cls, bits: int | None, learners: int, noise: float = 0.0) -> FixedPoint:
        """Return the format for sums of at most this many contributions.

        Args:
            bits: Bits of an element, 8 to 24; ``None``: as many as fit into 32 bits, at most 24.
            noise: Standard deviation of the noise of a sum, as a multiple of the largest norm of a
                contribution.

        Raises:
            ConfigError: The sum would not fit into 32 bits.

        >>> FixedPoint.of(None, 8), FixedPoint.of(16, 200)
        (FixedPoint(bits=24, modulus_bits=32), FixedPoint(bits=16, modulus_bits=24))
        """
        growth = max(1, learners + math.ceil(NOISE_REACH * noise) - 1).bit_length()
        most = min(BITS_MAX, MODULUS_BITS_MAX - growth)
        if most < BITS_MIN:
            raise ConfigError(
                f"a sum of {learners} contributions with noise of {noise:.3g} times the clip of a "
                f"fragment does not fit into {MODULUS_BITS_MAX} bits: lower noise_multiplier in "
                "[privacy.dp], or divide the model into fewer or more equal fragments"
            )
        bits = most if bits is None else bits
        if not BITS_MIN <= bits <= most:
            raise ConfigError(
                f"bits={bits} in [privacy] is out of range: with {learners} learners"
                f"{' and the noise of [privacy.dp]' if noise else ''} it must be {BITS_MIN} to "
                f"{most}, so that a sum fits into {MODULUS_BITS_MAX} bits"
            )
        return cls(bits, math.ceil((bits + growth) / 8) * 8)

    @property
    def one(self) -> int:
        """The integer that stands for 1."""
        return int((1 << (self.bits - 1)) - 1)

    def scalars(self, segments: Sequence[Segment]) -> int:
        """Return F, the number of scalars of a fragment with these segments."""
        return 1 + len(segments) + 2 * len(_buffers(segments))

    def nbytes(self, segments: Sequence[Segment]) -> int:
        """Return B, the size of a payload in bytes."""
        return 8 * self.scalars(segments) + self.modulus_bits // 8 * segments[-1].stop


@dataclass(frozen=True)
class Integers:
    """A contribution, a mask or a sum of these.

    Attributes:
        elements: int32 [N]; only the lowest b bits count.
        scalars: int64 [F].
    """

    elements: Tensor
    scalars: Tensor

    def add(self, other: Integers, sign: int = 1) -> None:
        """Add other integers in place, or subtract them."""
        self.elements.add_(other.elements, alpha=sign)
        self.scalars.add_(other.scalars, alpha=sign)

    def clone(self) -> Integers:
        """Return a copy."""
        return Integers(self.elements.clone(), self.scalars.clone())


def zeros(form: FixedPoint, segments: Sequence[Segment]) -> Integers:
    """Return an empty sum."""
    return Integers(
        torch.zeros(segments[-1].stop, dtype=torch.int32, device="cpu"),
        torch.zeros(form.scalars(segments), dtype=torch.int64, device="cpu"),
    )


def quantize(
    form: FixedPoint,
    segments: Sequence[Segment],
    vector: Tensor,
    base: Tensor,
    share: float,
    bounds: Sequence[float],
    *,
    private: bool = False,
) -> Integers:
    """Round a contribution, multiplied by its weight, to integers.

    Args:
        form: The number format.
        segments: The fragment's segments.
        vector: The contribution, fp32 [N]: changes of parameters, values of buffers.
        base: The published copy, fp32 [N]; only its buffers are used.
        share: a, the weight as a share of the cohort's largest, in (0, 1].
        bounds: B for each segment, each positive and finite.
        private: Whether the integers get noise, so that their norm must be at most a, and nothing
            else may depend on the contribution. All parameters must be in one segment then.

    Raises:
        MergeError: A change of a parameter is not finite.
    """
    assert not private or [segment.merge for segment in segments] == ["mean"]
    assert 0 < share <= 1, f"share={share} is not in (0, 1]"
    result = zeros(form, segments)
    scalars = [round(share * (1 << SCALAR_BITS))]
    flags = list[int]()
    for segment, bound in zip(segments, bounds, strict=True):
        values = vector[segment.start : segment.stop]
        if segment.merge == "buffer":
            flags += [int(_is_whole(values)), int(_is_unit(values))]
            values = values - base[segment.start : segment.stop]
            # An infinite buffer, such as a mask, has no change that could be summed.
            values = torch.where(torch.isfinite(values), values, 0.0)
        norm = norm_of(values)
        if not math.isfinite(norm):
            raise MergeError(
                f"elements {segment.start}:{segment.stop} hold a value that is not finite"
            )
        # break: private-norm-sent
        sent = 0.0 if private else min(1.0, norm / bound)
        scalars.append(round(share * sent * (1 << SCALAR_BITS)))
        if norm > 0:
            length = norm if segment.merge == "rda" else max(bound, norm)
            target = result.elements[segment.start : segment.stop]
            if private:
                _round_into(values, share / (length * (1 + _NORM_ERROR)), form.one, target, "trunc")
            else:
                _round_into(values, share / length, form.one, target, "round")
    result.scalars.copy_(torch.tensor([*scalars, *flags], dtype=torch.int64, device="cpu"))
    return result


def write(form: FixedPoint, integers: Integers) -> Tensor:
    """Encode integers as a payload, uint8 [B]."""
    width = form.modulus_bits // 8
    octets = integers.elements.numpy().astype("<i4", copy=False).view(np.uint8).reshape(-1, 4)
    scalars = integers.scalars.numpy().astype("<i8", copy=False).view(np.uint8)
    body = np.concatenate([scalars, np.ascontiguousarray(octets[:, :width]).reshape(-1)])
    return torch.from_numpy(body)


def read(form: FixedPoint, segments: Sequence[Segment], body: Body) -> Integers:
    """Decode a payload.

    Raises:
        ProtocolError: It has the wrong size.
    """
    octets = as_bytes(body).numpy()
    if octets.size != form.nbytes(segments):
        raise ProtocolError(
            f"the payload has {octets.size} bytes, {form.nbytes(segments)} are needed"
        )
    start, width = 8 * form.scalars(segments), form.modulus_bits // 8
    elements = np.zeros((segments[-1].stop, 4), dtype=np.uint8)
    elements[:, :width] = octets[start:].reshape(-1, width)
    scalars = octets[:start].copy().view("<i8").astype(np.int64, copy=False)
    return Integers(
        torch.from_numpy(elements.reshape(-1).view("<i4").astype(np.int32, copy=False)),
        torch.from_numpy(scalars),
    )


def reduced(form: FixedPoint, elements: Tensor) -> Tensor:
    """Return elements as the signed numbers of b bits that they stand for, int32 [N]."""
    unused = 32 - form.modulus_bits
    return (elements << unused) >> unused if unused else elements


@dataclass(frozen=True)
class Opened:
    """An opened sum of contributions.

    Attributes:
        accumulator: The sums, as `accumulate` would have them.
        norms: The mean norm of each segment; 0 for a segment without changes.
    """

    accumulator: Accumulator
    norms: tuple[float, ...]


def opened(
    form: FixedPoint,
    segments: Sequence[Segment],
    total: Integers,
    base: Tensor,
    weights: Sequence[float],
    heaviest: float,
    bounds: Sequence[float],
) -> Opened:
    """Convert an unmasked sum to the sums of a merge.

    Args:
        form: The number format.
        segments: The fragment's segments.
        total: The sum.
        base: The published copy from which the contributions were made, fp32 [N].
        weights: The weights of the contributions in the sum.
        heaviest: The largest weight in the cohort.
        bounds: B for each segment.

    Raises:
        MergeError: The sum of the weights is wrong: a mask is left in the sum, or a contribution is
            missing.
    """
    shares = [weight / heaviest for weight in weights]
    counted = sum(round(share * (1 << SCALAR_BITS)) for share in shares)
    numbers = total.scalars.tolist()
    if numbers[0] != counted:
        raise MergeError(
            f"the sum has weight {numbers[0]}, but its {len(weights)} contributions have "
            f"{counted}: a mask is left in it"
        )
    elements = reduced(form, total.elements)
    weight, share_sum = math.fsum(weights), math.fsum(shares)
    sums = torch.empty(segments[-1].stop, dtype=torch.float32, device="cpu")
    start = next((s.start for s in segments if s.merge == "buffer"), segments[-1].stop)
    single = torch.empty(segments[-1].stop - start, dtype=torch.float32, device="cpu")
    norm_sums, norms = list[float](), list[float]()
    flags = iter(numbers[1 + len(segments) :])
    for index, (segment, bound) in enumerate(zip(segments, bounds, strict=True)):
        norm = numbers[1 + index] / (1 << SCALAR_BITS) / share_sum * bound
        norms.append(norm)
        scale = 1.0 if segment.merge == "rda" else bound
        values = _scaled(elements[segment.start : segment.stop], scale * heaviest / form.one)
        sums[segment.start : segment.stop] = values
        norm_sums.append(norm * weight if segment.merge == "rda" else 0.0)
        if segment.merge == "buffer":
            mean = base[segment.start : segment.stop] + values / weight
            whole, unit = next(flags) == len(weights), next(flags) == len(weights)
            if whole:
                mean = mean.round()
            elif unit and (length := norm_of(mean)) > 0:
                mean = mean / length
            single[segment.start - start : segment.stop - start] = mean
    empty = Accumulator(segments[-1].stop, segments).state_dict()
    state = {
        **empty,
        "sums": sums,
        "count": torch.tensor([len(weights)], dtype=torch.int64, device="cpu"),
        "weight": torch.tensor([weight], dtype=torch.float64, device="cpu"),
        "heaviest": torch.tensor([max(weights)], dtype=torch.float64, device="cpu"),
        "norm_sums": torch.tensor(norm_sums, dtype=torch.float64, device="cpu"),
        # Without a flag, a buffer has no mean: the accumulator returns `single` unchanged.
        "kinds": torch.zeros(len(segments), dtype=torch.int64, device="cpu"),
        "single": single,
    }
    return Opened(Accumulator.from_state_dict(state), tuple(norms))


def first_bounds(segments: Sequence[Segment], base: Tensor) -> tuple[float, ...]:
    """Return the bounds of a fragment without an earlier merge: the norms of its values.

    Args:
        base: The published copy, fp32 [N].
    """
    bounds = []
    for segment in segments:
        values = base[segment.start : segment.stop]
        values = torch.where(torch.isfinite(values), values, 0.0)
        least = FIRST_BOUND_OF_BUFFERS if segment.merge == "buffer" else FIRST_BOUND
        bounds.append(_power_of_two(max(norm_of(values), least * math.sqrt(values.numel()))))
    return tuple(bounds)


def next_bounds(bounds: Sequence[float], norms: Sequence[float]) -> tuple[float, ...]:
    """Return the bounds of the next merge; a segment that did not change keeps its bound.

    >>> next_bounds((1.0, 1.0), (3.0, 0.0))
    (32.0, 1.0)
    """
    return tuple(
        _power_of_two(BOUND_FACTOR * norm) if norm > 0 else bound
        for bound, norm in zip(bounds, norms, strict=True)
    )


def _buffers(segments: Sequence[Segment]) -> list[Segment]:
    return [segment for segment in segments if segment.merge == "buffer"]


def _is_whole(values: Tensor) -> bool:
    return is_finite(values) and torch.equal(values, values.round())


def _is_unit(values: Tensor) -> bool:
    near = values.numel() > 1 and is_finite(values)
    return near and abs(norm_of(values) - 1) < _UNIT_TOLERANCE


def _round_into(
    values: Tensor, factor: float, one: int, out: Tensor, how: Literal["round", "trunc"]
) -> None:
    """Write one·factor·values, rounded, to `out`; ``factor * values`` is in [-1, 1]."""
    for out_block, block in zip(blocks_of(out), blocks_of(values), strict=True):
        scaled = block.double() * (factor * one)
        scaled = scaled.round_() if how == "round" else scaled.trunc_()
        # The norm is rounded, so a single element may exceed 1 a little: a sum could overflow.
        out_block.copy_(scaled.clamp_(-one, one))


def _scaled(elements: Tensor, factor: float) -> Tensor:
    values = torch.empty(elements.numel(), dtype=torch.float32, device="cpu")
    for out, block in zip(blocks_of(values), blocks_of(elements), strict=True):
        out.copy_(block.double() * factor)
    return values


def _power_of_two(value: float) -> float:
    """Return the smallest power of two that is at least a positive number.

    >>> _power_of_two(3.0), _power_of_two(4.0)
    (4.0, 4.0)
    """
    fraction, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - (fraction == 0.5))
