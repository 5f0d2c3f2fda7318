"""The payload of a relay's sum: the state of an `Accumulator`, with its sums in the uplink codec.

    count i64 | weight, heaviest f64 | per segment: norm sum, single weight f64, kinds i64 | sums |
    single

All numbers are little-endian. `sums` is encoded by the fragment's uplink codec (its buffers in
fp32), after an exact scaling by powers of two: a division by the weight, and for RDA segments a
multiplication by the mean norm, because their sums are of unit directions. So all segments have
values about as large as those of one contribution. A codec with blocks needs that: a block may
extend over segments, and its largest value determines its resolution. `single` (fp32) are the
buffers of one contribution, for buffers that have no mean; without such buffers it is empty. The
size depends only on the fragment.

Shapes:
    N  elements of a fragment
    S  segments of a fragment
    B  bytes of the payload
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decoupled_diloco.errors import MergeError, ProtocolError
from decoupled_diloco.merge.accumulate import Accumulator, buffers_of
from decoupled_diloco.merge.codec import Body, as_bytes, digest
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.merge.published import encode_with_feedback

_HEAD = 3
_PER_SEGMENT = 3


def sum_nbytes(plan: MergePlan, fragment: int) -> int:
    """Return the size in bytes of the payload of a fragment's sum."""
    if plan.secure is not None:
        return plan.uplink_nbytes(fragment)  # a sum of masked contributions looks like one of them
    numel = plan.fragments[fragment].numel
    numbers = _HEAD + _PER_SEGMENT * len(plan.segments(fragment))
    return 8 * numbers + plan.uplink_of(fragment).nbytes(numel) + 4 * _single_numel(plan, fragment)


def write_sum(
    plan: MergePlan, fragment: int, accumulator: Accumulator, residuals: tuple[Tensor, ...]
) -> tuple[Tensor, str, Tensor | None]:
    """Encode what was folded.

    Args:
        plan: The run's plan.
        fragment: The fragment.
        accumulator: Its accumulator, with at least one contribution; its sums are changed.
        residuals: What earlier sums left out, fp32 [N] each, in units of the sums.

    Returns:
        The payload, uint8 [B], its digest, and with error feedback (rule 19) what this payload
        leaves out, fp32 [N].

    Raises:
        MergeError: The sums are not finite.
    """
    state = accumulator.state_dict()
    sums, wire = state["sums"], plan.uplink_of(fragment)
    scales = _scales(plan, fragment, accumulator.weight, state["norm_sums"].tolist())
    _multiply(sums, scales)
    if (feedback := plan.feedback_of(wire)) is None:
        body, left = wire.encode(sums), None
    else:
        scaled = tuple(residual.clone() for residual in residuals)
        for residual in scaled:
            _multiply(residual, scales)
        body, left = encode_with_feedback(sums, scaled, feedback, wire)
        _multiply(left, scales, inverse=True)
    head = (state["count"], state["weight"], state["heaviest"])
    per_segment = (state["norm_sums"], state["single_weights"], state["kinds"])
    parts = [as_bytes(part) for part in (*head, *per_segment, body, state["single"])]
    whole = torch.cat(parts)
    return whole, digest(whole.numpy().data), left


def read_sum(plan: MergePlan, fragment: int, body: Body, announced: str) -> Accumulator:
    """Decode a payload.

    Raises:
        ProtocolError: The digest or the size is wrong.
        MergeError: The sums are not finite, or contradict each other.
    """
    octets = as_bytes(body)
    actual = digest(octets.numpy().data)
    if actual != announced:
        raise ProtocolError(f"digest={actual}, but {announced} was announced")
    if octets.numel() != sum_nbytes(plan, fragment):
        raise ProtocolError(
            f"the sum has {octets.numel()} bytes, {sum_nbytes(plan, fragment)} are needed"
        )
    numel, segments = plan.fragments[fragment].numel, plan.segments(fragment)
    wire = plan.uplink_of(fragment)
    numbers = octets[: 8 * (_HEAD + _PER_SEGMENT * len(segments))].clone()
    integers, floats = numbers.view(torch.int64), numbers.view(torch.float64)
    per_segment = [
        slice(_HEAD + i * len(segments), _HEAD + (i + 1) * len(segments))
        for i in range(_PER_SEGMENT)
    ]
    weight = float(floats[1])
    if not (math.isfinite(weight) and weight > 0):
        raise MergeError(f"the sum has weight {weight}, which is not positive and finite")
    start = numbers.numel()
    sums = wire.decode(octets[start : start + wire.nbytes(numel)], numel)
    norm_sums = floats[per_segment[0]].tolist()
    if not all(math.isfinite(each) and each >= 0 for each in norm_sums):
        raise MergeError("the sum has a norm that is negative or not finite")
    _multiply(sums, _scales(plan, fragment, weight, norm_sums), inverse=True)
    single = octets[start + wire.nbytes(numel) :].clone().view(torch.float32)
    empty = Accumulator(numel, segments).state_dict()
    return Accumulator.from_state_dict(
        {
            **empty,
            "sums": sums,
            "count": integers[:1],
            "weight": floats[1:2],
            "heaviest": floats[2:3],
            "norm_sums": floats[per_segment[0]],
            "single_weights": floats[per_segment[1]],
            "kinds": integers[per_segment[2]],
            "single": single,
        }
    )


def _single_numel(plan: MergePlan, fragment: int) -> int:
    return len(buffers_of(plan.segments(fragment)))


def _scales(
    plan: MergePlan, fragment: int, weight: float, norm_sums: Sequence[float]
) -> list[tuple[slice, float]]:
    """Return factors, powers of two, for segments that are not buffers."""
    scales = []
    for segment, norm_sum in zip(plan.segments(fragment), norm_sums, strict=True):
        elements = slice(segment.start, segment.stop)
        if segment.merge in ("rda", "mean"):
            scales.append((elements, 1 / _power_of_two(weight)))
        if segment.merge == "moment" and norm_sum > 0:
            scales.append((elements, 1 / _power_of_two(norm_sum)))
        if segment.merge == "rda" and norm_sum > 0:
            scales.append((elements, _power_of_two(norm_sum / weight)))
    return scales


def _multiply(
    vector: Tensor, scales: Sequence[tuple[slice, float]], *, inverse: bool = False
) -> None:
    """Multiply elements of a vector, in place."""
    for elements, scale in scales:
        vector[elements].mul_(1 / scale if inverse else scale)


def _power_of_two(value: float) -> float:
    return math.ldexp(1.0, math.frexp(value)[1])
