"""The payload of a relay's sum: the state of an `Accumulator`, with its sums in the uplink codec.

    count i64 | weight, heaviest f64 | per segment: norm sum, single weight f64, kinds i64 | sums |
    single

All numbers are little-endian. `sums` is encoded by the fragment's uplink codec (its buffers in
fp32), after a division by the power of two next to the weight. That keeps every codec in its range,
and it is exact. `single` (fp32) are the buffers of one contribution, for buffers that have no mean;
without such buffers it is empty. The size depends only on the fragment.

Shapes:
    N  elements of a fragment
    S  segments of a fragment
    B  bytes of the payload
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from decoupled_diloco.errors import MergeError, ProtocolError
from decoupled_diloco.merge.accumulate import Accumulator
from decoupled_diloco.merge.codec import Body, as_bytes, digest
from decoupled_diloco.merge.fragments import parameters_numel
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.merge.published import encode_with_feedback

_HEAD = 3
_PER_SEGMENT = 3


def sum_nbytes(plan: MergePlan, fragment: int) -> int:
    """Return the size in bytes of the payload of a fragment's sum."""
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
    sums, trained = state["sums"], parameters_numel(plan.fragments[fragment], plan.layout)
    factor = _power_of_two(accumulator.weight)
    sums[:trained].div_(factor)
    scaled = tuple(residual / factor for residual in residuals)
    wire = plan.uplink_of(fragment)
    if plan.feedback is None:
        body, left = wire.encode(sums), None
    else:
        body, left = encode_with_feedback(sums, scaled, plan.feedback, wire)
        left = left * factor
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
    trained, wire = (
        parameters_numel(plan.fragments[fragment], plan.layout),
        plan.uplink_of(fragment),
    )
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
    sums[:trained].mul_(_power_of_two(weight))
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
    segments = plan.segments(fragment)
    start = next((s.start for s in segments if s.merge == "buffer"), segments[-1].stop)
    return segments[-1].stop - start


def _power_of_two(weight: float) -> float:
    return math.ldexp(1.0, math.frexp(weight)[1])
