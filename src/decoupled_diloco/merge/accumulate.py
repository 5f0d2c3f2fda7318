"""Merge contributions as they arrive, in memory that does not grow with the number of learners.

A fragment's flat vector is divided into segments (see `fragments.segments`). For each segment the
accumulator keeps only sums, so a contribution can be freed as soon as it is folded in:

    mean   sum w,  sum w·v                   result = sum w·v / sum w
    RDA    sum w,  sum w·‖v‖,  sum w·φ(v)    result = r · u / max(‖u‖, ε)
           with φ(v) = v/‖v‖, φ(0) = 0,  r = sum w·‖v‖ / sum w,  u = sum w·φ(v) / sum w

RDA merges length and direction separately. The updates of different learners are nearly orthogonal,
so the plain mean of M updates is shorter than each of them by 1/√M. RDA keeps the mean length. The
paper uses φ(u) where this module uses u/max(‖u‖, ε). When directions cancel, u is small and its
direction is noise, and a full-length step along noise would do harm.

All state is a sum over learners, so accumulators can be combined in any tree. (A segment that is
taken from one learner comes from the one with the largest weight: a maximum can be combined, too.)

A buffer is merged by the mean of its values, with four exceptions. The mean is invalid if all
contributions are integers (a counter, a mask), if all are unit vectors (a direction), or if one is
not finite. The mean is unnecessary if all contributions are equal, and rounding would change them.
In these cases the result is the buffer of the finite contribution with the largest weight.

A moment of the inner optimizer is merged by the mean of its values, too. It is absent (NaN) in some
contributions, which do not count for it:

    moment  sum w of those that have it, sum w·v        result = sum w·v / sum w, or NaN without any

Shapes:
    N  elements of one fragment
    S  segments of one fragment
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor

from decoupled_diloco.errors import MergeError
from decoupled_diloco.merge.blocks import blocks_of, is_finite, norm_of, same_bits, squares_of
from decoupled_diloco.merge.fragments import Segment, SegmentMerge

EPSILON = 1e-3

_MERGES: tuple[SegmentMerge, ...] = get_args(SegmentMerge)

_ALIKE, _WHOLE, _UNIT, _FINITE = 1, 2, 4, 8
"""Flags for the properties that all contributions to a buffer share."""

_UNIT_TOLERANCE = 1e-3


class Accumulator:
    """The running merge of one fragment.

    Args:
        numel: N, the elements of the fragment.
        segments: Segments that cover `0 … N-1` without gaps, in order.
        epsilon: ε in (0, 1). Below this length the merged direction of an RDA segment counts as
            noise and the result shrinks with it. 1e-3 does not affect even 10⁵ orthogonal learners.
        buffer: [N], fp32, any content: memory for the sums, owned by the accumulator from now on.
            Reused memory saves the page faults of a new allocation, which cost more than a fold.

    Attributes:
        count: Number of learners folded in (not messages: combining adds the counts).
        weight: Sum of their weights.

    Source:
        Decoupled DiLoCo, RDA, in the "mean of norms" reading; ε is our addition.
    """

    def __init__(
        self,
        numel: int,
        segments: Sequence[Segment],
        epsilon: float = EPSILON,
        buffer: Tensor | None = None,
    ) -> None:
        problem = _segments_problem(numel, segments)
        assert problem is None, problem
        assert buffer is None or buffer.shape == (numel,)
        assert 0 < epsilon < 1, f"epsilon={epsilon} is not in (0, 1)"
        self.numel = numel
        self.segments = tuple(segments)
        self.epsilon = epsilon
        self.count = 0
        self.weight = 0.0
        self._buffer = buffer
        self._sums: Tensor | None = None
        self._norm_sums = [0.0] * len(self.segments)
        self._heaviest = 0.0
        self._kinds = [_ALIKE | _WHOLE | _UNIT | _FINITE] * len(self.segments)
        # A negative value marks a contribution that is not finite, so that any finite one wins.
        self._single_weights = [0.0] * len(self.segments)
        own = buffers_of(segments)
        self._buffers_start, self._buffers_stop = own.start, own.stop
        self._single: Tensor | None = None

    def add(self, vector: Tensor, weight: float, norms: Sequence[float] | None = None) -> None:
        """Fold one whole contribution in. If this raises, the accumulator is unchanged.

        Args:
            vector: [N], fp32.
            weight: w > 0, finite.
            norms: The S segment norms ‖v‖, if they are already known; values for mean segments are
                ignored. The caller then guarantees that the vector is finite.

        Raises:
            MergeError: The size or dtype is wrong, the weight is not positive and finite, or a
                value is not finite.
        """
        _check_vector(vector, self.numel)
        if norms is None:
            contribution = Contribution(self.numel, self.segments)
            contribution.add(0, vector)
            self.add_contribution(contribution, weight)
            return
        _check_norms(norms, len(self.segments))
        self._fold([(0, vector)], weight, norms)

    def add_contribution(self, contribution: Contribution, weight: float) -> None:
        """Fold in a complete contribution that arrived in parts, over the same segments.

        Raises:
            MergeError: Parts are missing, or the weight is not positive and finite.
        """
        assert contribution.segments == self.segments, "the contribution has other segments"
        self._fold(contribution.parts, weight, contribution.norms)

    def combine(self, other: Accumulator) -> None:
        """Add another accumulator's sums to this one, as in a tree of aggregators.

        Raises:
            MergeError: The other accumulator has different segments or a different epsilon.
        """
        if (self.segments, self.epsilon) != (other.segments, other.epsilon):
            raise MergeError(
                f"accumulators do not match: N={self.numel}, S={len(self.segments)}, "
                f"epsilon={self.epsilon} here and N={other.numel}, S={len(other.segments)}, "
                f"epsilon={other.epsilon} there: build both from one partition and configuration"
            )
        if other._sums is not None and self._sums is None:
            self._sums_like(other._sums).copy_(other._sums)
            self._kinds, self._single_weights = other._kinds[:], other._single_weights[:]
            self._single = None if other._single is None else other._single.clone()
        elif other._sums is not None:
            self._combine_sums(other, heavier=other._heaviest > self._heaviest)
        self._heaviest = max(self._heaviest, other._heaviest)
        self._norm_sums = [a + b for a, b in zip(self._norm_sums, other._norm_sums, strict=True)]
        self.weight += other.weight
        self.count += other.count

    def scale(self, factor: float) -> None:
        """Multiply the weights of all that was folded in.

        Args:
            factor: Greater than 0, finite.
        """
        assert 0 < factor < math.inf, f"factor={factor}"
        if self._sums is not None:
            for segment in self.segments:
                if segment.merge != "one":
                    sums = self._sums[segment.start : segment.stop]
                    _scale(sums, factor, sums)
        self._norm_sums = [factor * each for each in self._norm_sums]
        # A negative rank is -1/w; see `_fold_buffer`.
        self._single_weights = [
            rank * factor if rank >= 0 else rank / factor for rank in self._single_weights
        ]
        self._heaviest *= factor
        self.weight *= factor

    def result(self, out: Tensor | None = None) -> Tensor:
        """Return the merged vector. The sums are kept, so more contributions can be added.

        Args:
            out: [N], fp32, to fill; a new one if None.

        Raises:
            MergeError: No contribution was folded in, or the result is not finite.
        """
        if self._sums is None or self.weight <= 0:
            raise MergeError("nothing to merge: the weights sum to 0, so no contribution counts")
        if out is None:
            out = torch.empty_like(self._sums)
        _check_vector(out, self.numel)
        for index, (segment, norm_sum) in enumerate(
            zip(self.segments, self._norm_sums, strict=True)
        ):
            if segment.merge == "buffer" and not self._has_a_mean(index):
                out[segment.start : segment.stop] = self._single_of(segment)
                continue
            sums = self._sums[segment.start : segment.stop]
            if segment.merge == "moment":
                # Without a contribution, the sums are NaN, and so is the result.
                _scale(sums, 1 / (norm_sum or 1.0), out[segment.start : segment.stop])
                continue
            scale = 1.0 if segment.merge == "one" else 1 / self.weight
            if segment.merge == "rda":
                direction_length = norm_of(sums) / self.weight
                scale *= norm_sum / self.weight / max(direction_length, self.epsilon)
            _scale(sums, scale, out[segment.start : segment.stop])
        if not is_finite(out[: self._trained]):
            raise MergeError(
                f"the merge of {self.count} contributions overflowed fp32: "
                "their values or weights are too large"
            )
        return out

    @property
    def lengths(self) -> tuple[float, float]:
        """Two lower bounds of Σ w·‖v‖: from the norms of RDA segments, and from mean segments."""
        means = [
            squares_of(self._sums[segment.start : segment.stop])
            for segment in self.segments
            if segment.merge == "mean" and self._sums is not None
        ]
        norms = math.fsum(
            each * each
            for each, segment in zip(self._norm_sums, self.segments, strict=True)
            if segment.merge == "rda"
        )
        return math.sqrt(norms), math.sqrt(math.fsum(means))

    @property
    def moment_weight(self) -> float:
        """The largest weight with which a moment counts, at most `weight` in a valid sum."""
        return max(
            (
                each
                for each, segment in zip(self._norm_sums, self.segments, strict=True)
                if segment.merge == "moment"
            ),
            default=0.0,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors, for safetensors; the sums are shared, not copied."""
        sums = (
            torch.zeros(self.numel, dtype=torch.float32, device="cpu")
            if self._sums is None
            else self._sums
        )
        bounds = [(segment.start, segment.stop) for segment in self.segments]
        return {
            "sums": sums,
            "norm_sums": torch.tensor(self._norm_sums, dtype=torch.float64, device="cpu"),
            "weight": torch.tensor([self.weight], dtype=torch.float64, device="cpu"),
            "count": torch.tensor([self.count], dtype=torch.int64, device="cpu"),
            "epsilon": torch.tensor([self.epsilon], dtype=torch.float64, device="cpu"),
            "heaviest": torch.tensor([self._heaviest], dtype=torch.float64, device="cpu"),
            "single": torch.empty(0, dtype=torch.float32, device="cpu")
            if self._single is None
            else self._single,
            "single_weights": torch.tensor(self._single_weights, dtype=torch.float64, device="cpu"),
            "kinds": torch.tensor(self._kinds, dtype=torch.int64, device="cpu"),
            "segment_bounds": torch.tensor(bounds, dtype=torch.int64, device="cpu"),
            "segment_merge": torch.tensor(
                [_MERGES.index(s.merge) for s in self.segments], dtype=torch.int64, device="cpu"
            ),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Accumulator:
        """Restore and validate the output of `state_dict`; the sums are shared, not copied.

        Raises:
            MergeError: A tensor is missing, unknown, of the wrong type or shape, not finite, or
                contradicts the others.
        """
        _check_state(state)
        merges = [_MERGES[index] for index in state["segment_merge"].tolist()]
        segments = tuple(
            Segment(start, stop, merge)
            for (start, stop), merge in zip(state["segment_bounds"].tolist(), merges, strict=True)
        )
        problem = _segments_problem(state["sums"].numel(), segments)
        if problem is not None:
            raise MergeError(f"accumulator state: {problem}")
        accumulator = cls(state["sums"].numel(), segments, float(state["epsilon"]))
        accumulator.count, accumulator.weight = int(state["count"]), float(state["weight"])
        if accumulator.count:
            accumulator._sums = state["sums"]
        accumulator._norm_sums = state["norm_sums"].tolist()
        accumulator._heaviest = float(state["heaviest"])
        accumulator._kinds = state["kinds"].tolist()
        accumulator._single_weights = state["single_weights"].tolist()
        if accumulator.count and accumulator._buffers_start < accumulator._buffers_stop:
            if state["single"].numel() != accumulator._buffers_stop - accumulator._buffers_start:
                raise MergeError("accumulator state: 'single' and the buffers differ in size")
            accumulator._single = state["single"]
        if not is_finite(state["sums"][: accumulator._trained]):
            raise MergeError("accumulator state: 'sums' holds a value that is not finite")
        return accumulator

    def _fold(
        self, parts: Sequence[tuple[int, Tensor]], weight: float, norms: Sequence[float]
    ) -> None:
        """Add w·v to mean segments and (w/‖v‖)·v to RDA segments, part by part."""
        if not (math.isfinite(weight) and weight > 0):
            raise MergeError(
                f"weight={weight} is not positive and finite: leave such a contribution out"
            )
        # A contribution covers every element. The first one therefore overwrites the sums, which
        # hold arbitrary memory until then, instead of paying for a pass that zeroes them.
        first = self._sums is None
        sums = self._sums_like(parts[0][1])
        for part_start, part in parts:
            for index, start, stop in _overlaps(self.segments, part_start, part.numel()):
                is_rda = self.segments[index].merge == "rda"
                target, values = sums[start:stop], part[start - part_start : stop - part_start]
                if self.segments[index].merge == "one":
                    if weight > self._heaviest:
                        target.copy_(values)
                    continue
                if self.segments[index].merge in ("buffer", "moment"):
                    continue
                if is_rda and norms[index] == 0:  # φ(0) = 0
                    if first:  # break: first-norm-zero-keeps-memory
                        target.zero_()
                    continue
                factor = weight / norms[index] if is_rda else weight
                if first:
                    _scale(values, factor, target)
                else:
                    _add_scaled(target, values, factor)
        for index, segment in enumerate(self.segments):
            if segment.merge == "rda":
                self._norm_sums[index] += weight * norms[index]
            elif segment.merge == "buffer":
                self._fold_buffer(index, _values_of(parts, segment), weight, first=first)
            elif segment.merge == "moment":
                self._fold_moment(index, _values_of(parts, segment), weight, first=first)
        self._heaviest = max(self._heaviest, weight)
        self.weight += weight
        self.count += 1

    @property
    def _trained(self) -> int:
        """The number of elements before the buffers: these must be finite."""
        behind = (s.start for s in self.segments if s.is_value)
        return next(behind, self.numel)

    def _has_a_mean(self, index: int) -> bool:
        return self._kinds[index] == _FINITE

    def _single_of(self, segment: Segment) -> Tensor:
        """Return memory for the values of the best single contribution to a buffer."""
        if self._single is None:
            assert self._sums is not None
            own = slice(self._buffers_start, self._buffers_stop)
            self._single = torch.empty_like(self._sums[own])
        start = segment.start - self._buffers_start
        return self._single[start : start + segment.stop - segment.start]

    def _fold_buffer(self, index: int, values: Tensor, weight: float, *, first: bool) -> None:
        assert self._sums is not None
        segment = self.segments[index]
        sums, single = self._sums[segment.start : segment.stop], self._single_of(segment)
        kinds = _kinds_of(values)
        if first or same_bits(values, single):
            kinds |= _ALIKE
        self._kinds[index] &= kinds
        if first:
            _scale(values, weight, sums)
        elif self._kinds[index] & _FINITE:
            _add_scaled(sums, values, weight)
        if not is_finite(sums):
            # The sum of large finite values, such as a mask's, can overflow, too.
            self._kinds[index] &= ~_FINITE
            sums.zero_()
        rank = weight if kinds & _FINITE else -1 / weight
        if first or rank > self._single_weights[index]:
            single.copy_(values)
            self._single_weights[index] = rank

    def _fold_moment(self, index: int, values: Tensor, weight: float, *, first: bool) -> None:
        assert self._sums is not None
        segment = self.segments[index]
        sums = self._sums[segment.start : segment.stop]
        if not is_finite(values):
            if first:
                sums.fill_(math.nan)
        else:
            # `_norm_sums` has the weights of those that have it: a moment has no norm.
            if self._norm_sums[index] == 0:
                _scale(values, weight, sums)
            else:
                _add_scaled(sums, values, weight)
            self._norm_sums[index] += weight

    def _combine_buffer(self, index: int, other: Accumulator) -> None:
        assert self._sums is not None
        assert other._sums is not None
        segment = self.segments[index]
        single, theirs = self._single_of(segment), other._single_of(segment)
        self._kinds[index] &= other._kinds[index]
        if not same_bits(single, theirs):
            self._kinds[index] &= ~_ALIKE
        sums = self._sums[segment.start : segment.stop]
        sums.add_(other._sums[segment.start : segment.stop])
        if not is_finite(sums):
            self._kinds[index] &= ~_FINITE
            sums.zero_()
        if other._single_weights[index] > self._single_weights[index]:
            single.copy_(theirs)
            self._single_weights[index] = other._single_weights[index]

    def _combine_sums(self, other: Accumulator, *, heavier: bool) -> None:
        """Add sums; a segment taken from one learner keeps the values of the heavier one."""
        sums = other._sums
        assert self._sums is not None
        assert sums is not None
        for index, segment in enumerate(self.segments):
            target, values = (x[segment.start : segment.stop] for x in (self._sums, sums))
            if segment.merge == "buffer":
                self._combine_buffer(index, other)
            elif segment.merge == "moment":
                if self._norm_sums[index] == 0:
                    target.copy_(values)
                elif other._norm_sums[index] > 0:
                    target.add_(values)
            elif segment.merge != "one":
                target.add_(values)
            elif heavier:
                target.copy_(values)

    def _sums_like(self, vector: Tensor) -> Tensor:
        """Return the sums; new ones hold arbitrary values and must be written before a read."""
        if self._sums is None:
            self._sums = self._buffer
        if self._sums is None:
            self._sums = torch.empty(self.numel, dtype=torch.float32, device=vector.device)
        return self._sums


class Contribution:
    """One learner's contribution to one fragment, received in slices in any order.

    A direction requires the norm of the whole segment. The squared norms of the slices are
    therefore summed first, and `Accumulator.add_contribution` folds the slices in afterwards. Until
    then the slices are kept by reference.

    Attributes:
        parts: (start, slice) pairs received, in order of arrival.
    """

    def __init__(self, numel: int, segments: Sequence[Segment]) -> None:
        self.numel = numel
        self.segments = tuple(segments)
        self.parts: list[tuple[int, Tensor]] = []
        self._squares = [0.0] * len(self.segments)
        self._squares_of_means = 0.0

    def add(self, start: int, part: Tensor) -> None:
        """Add the slice `start … start + len(part) - 1`.

        Args:
            start: The index of its first element in the fragment.
            part: [n], fp32, n >= 1; the caller must not change it until it is folded in.

        Raises:
            MergeError: The slice lies outside the fragment, overlaps another slice, or holds a
                value that is not finite.
        """
        stop = start + part.numel()
        _check_vector(part, part.numel())
        if not 0 <= start < stop <= self.numel:
            raise MergeError(f"slice {start}:{stop} lies outside the fragment's 0:{self.numel}")
        for other, earlier in self.parts:
            if start < other + earlier.numel() and other < stop:
                raise MergeError(
                    f"slice {start}:{stop} overlaps slice {other}:{other + earlier.numel()}, "
                    "which arrived before: send every element once"
                )
        squares, of_means = list(self._squares), self._squares_of_means
        for index, low, high in _overlaps(self.segments, start, part.numel()):
            values = part[low - start : high - start]
            merge = self.segments[index].merge
            if self.segments[index].is_value:  # it has no norm, and may be infinite
                continue
            square = squares_of(values)
            finite = math.isfinite(square)
            if merge == "rda":
                squares[index] += square
                finite = math.isfinite(squares[index])
            elif merge in ("mean", "own"):
                of_means += square
                finite = math.isfinite(of_means)
            if not finite:
                raise MergeError(f"elements {low}:{high} hold a value that is not finite")
        self._squares, self._squares_of_means = squares, of_means
        self.parts.append((start, part))

    @property
    def complete(self) -> bool:
        return sum(part.numel() for _, part in self.parts) == self.numel

    @property
    def norms(self) -> tuple[float, ...]:
        """The S segment norms; 0 for mean segments, whose merge does not use a norm."""
        self._require_complete()
        return tuple(math.sqrt(square) for square in self._squares)

    def whole(self) -> Tensor:
        """Return all elements as one vector, fp32 [N].

        Raises:
            MergeError: Parts are missing.
        """
        self._require_complete()
        parts = [part for _, part in sorted(self.parts, key=lambda each: each[0])]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def norm(self) -> float:
        """The norm of all received slices, mean segments included and buffers excluded."""
        return math.sqrt(math.fsum(self._squares) + self._squares_of_means)

    def _require_complete(self) -> None:
        if not self.complete:
            arrived = sum(part.numel() for _, part in self.parts)
            raise MergeError(
                f"contribution has {arrived} of {self.numel} elements: parts are missing"
            )

    def scale(self, factor: float) -> None:
        """Multiply the elements of parameters, without changing the caller's slices."""
        buffers = [segment for segment in self.segments if segment.is_value]
        parts = []
        for start, part in self.parts:
            scaled = part * factor
            for _, low, high in _overlaps(buffers, start, part.numel()):
                scaled[low - start : high - start] = part[low - start : high - start]
            parts.append((start, scaled))
        self.parts = parts
        self._squares = [square * factor * factor for square in self._squares]
        self._squares_of_means *= factor * factor


def merge(
    vectors: Sequence[Tensor],
    weights: Sequence[float],
    segments: Sequence[Segment],
    epsilon: float = EPSILON,
) -> Tensor:
    """Merge vectors that are all available at once.

    Args:
        vectors: M >= 1 vectors [N], fp32.
        weights: M weights, > 0 and finite.

    Examples:
        >>> rda = [Segment(0, 2, "rda")]
        >>> merge([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])], [1, 1], rda)
        tensor([0.7071, 0.7071])
    """
    accumulator = Accumulator(segments[-1].stop, segments, epsilon)
    for vector, weight in zip(vectors, weights, strict=True):
        accumulator.add(vector, weight)
    return accumulator.result()


def buffers_of(segments: Sequence[Segment]) -> range:
    """Return the elements from the first buffer that is merged by a mean to the last buffer."""
    start = next((s.start for s in segments if s.merge == "buffer"), None)
    stop = next((s.start for s in segments if s.merge == "moment"), segments[-1].stop)
    return range(stop if start is None else start, stop)


def _values_of(parts: Sequence[tuple[int, Tensor]], segment: Segment) -> Tensor:
    """Return a segment's values from the parts of a contribution; a view if one part has all."""
    for start, part in parts:
        if start <= segment.start and segment.stop <= start + part.numel():
            return part[segment.start - start : segment.stop - start]
    values = torch.empty(
        segment.stop - segment.start, dtype=torch.float32, device=parts[0][1].device
    )
    for start, part in parts:
        for _, low, high in _overlaps([segment], start, part.numel()):
            values[low - segment.start : high - segment.start] = part[low - start : high - start]
    return values


def _kinds_of(values: Tensor) -> int:
    """Return those of the flags `_WHOLE`, `_UNIT` and `_FINITE` that apply to the values."""
    if not is_finite(values):
        return 0
    kinds = _FINITE
    if torch.equal(values, values.round()):
        kinds |= _WHOLE
    if values.numel() > 1 and abs(norm_of(values) - 1) < _UNIT_TOLERANCE:
        kinds |= _UNIT
    return kinds


def _add_scaled(sums: Tensor, values: Tensor, factor: float) -> None:
    """Add factor·values; in fp64 if the factor is near the limits of fp32."""
    if 1e-30 < factor < 1e30:
        sums.add_(values, alpha=factor)
        return
    for sums_block, block in zip(blocks_of(sums), blocks_of(values), strict=True):
        sums_block.add_((block.double() * factor).float())


def _scale(values: Tensor, factor: float, out: Tensor) -> None:
    """Write factor·values to `out`; in fp64 under the same condition as `_add_scaled`."""
    if 1e-30 < factor < 1e30:
        torch.mul(values, factor, out=out)
        return
    for out_block, block in zip(blocks_of(out), blocks_of(values), strict=True):
        out_block.copy_(block.double() * factor)


def _overlaps(
    segments: Sequence[Segment], start: int, numel: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the index of each segment that the slice overlaps, and the overlap's start and stop."""
    stop = start + numel
    for index, segment in enumerate(segments):
        low, high = max(start, segment.start), min(stop, segment.stop)
        if low < high:
            yield index, low, high


def _check_vector(vector: Tensor, numel: int) -> None:
    if vector.dtype != torch.float32 or vector.dim() != 1:
        raise MergeError(
            f"vector is {str(vector.dtype).removeprefix('torch.')} of shape {tuple(vector.shape)}: "
            "merging takes flat float32 vectors"
        )
    if vector.numel() != numel:
        raise MergeError(f"vector has {vector.numel()} elements, the fragment has {numel}")


def _check_norms(norms: Sequence[float], count: int) -> None:
    if len(norms) != count:
        raise MergeError(f"{len(norms)} norms were given for {count} segments")
    for index, norm in enumerate(norms):
        if not (math.isfinite(norm) and norm >= 0):
            raise MergeError(f"norm {norm} of segment {index} is not finite and at least 0")


def _segments_problem(numel: int, segments: Sequence[Segment]) -> str | None:
    """Return a description of the first fault in a fragment's segments, or None."""
    if not segments or segments[0].start != 0 or segments[-1].stop != numel:
        return f"segments do not cover 0:{numel}"
    if any(segment.start >= segment.stop for segment in segments):
        return "a segment is empty"
    for before, after in pairwise(segments):
        if before.stop != after.start:
            return f"segments have a gap or overlap between {before.stop} and {after.start}"
    return None


def _check_state(state: Mapping[str, Tensor]) -> None:
    """Raise MergeError unless the state has the tensors, shapes and ranges of `state_dict`."""
    count = state["segment_merge"].numel() if "segment_merge" in state else 0
    expected = {
        "sums": (torch.float32, None),
        "norm_sums": (torch.float64, (count,)),
        "weight": (torch.float64, (1,)),
        "count": (torch.int64, (1,)),
        "epsilon": (torch.float64, (1,)),
        "heaviest": (torch.float64, (1,)),
        "single": (torch.float32, None),
        "single_weights": (torch.float64, (count,)),
        "kinds": (torch.int64, (count,)),
        "segment_bounds": (torch.int64, (count, 2)),
        "segment_merge": (torch.int64, (count,)),
    }
    if state.keys() != expected.keys():
        raise MergeError(f"accumulator state has {sorted(state)}, expected {sorted(expected)}")
    for name, (dtype, shape) in expected.items():
        tensor = state[name]
        if tensor.dtype != dtype or (tensor.dim() != 1 if shape is None else tensor.shape != shape):
            raise MergeError(f"accumulator state: '{name}' is {tensor.dtype} {tuple(tensor.shape)}")
        values_may_be_infinite = name in ("sums", "single")  # of buffers
        if dtype.is_floating_point and not (values_may_be_infinite or is_finite(tensor)):
            raise MergeError(f"accumulator state: '{name}' holds a value that is not finite")
    known = (state["segment_merge"] >= 0) & (state["segment_merge"] < len(_MERGES))
    if not bool(known.all()):
        raise MergeError("accumulator state: 'segment_merge' has an unknown merge method")
    weight, contributors = float(state["weight"]), int(state["count"])
    in_range = contributors >= 0 and (weight > 0) == (contributors > 0) and weight >= 0
    if not (in_range and 0 < float(state["epsilon"]) < 1 and bool((state["norm_sums"] >= 0).all())):
        raise MergeError(
            f"accumulator state: weight={weight}, count={contributors}, "
            f"epsilon={float(state['epsilon'])} and the norm sums contradict each other"
        )
