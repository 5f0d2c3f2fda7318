"""The merge plan: how a run's tensors are partitioned, encoded and merged.

Learners and shards build it from the same layout and the same settings. They therefore agree on the
fragment of each element and on the size of every payload without exchanging either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.merge.accumulate import Accumulator
from decoupled_diloco.merge.codec import Body, BuffersExact, Codec, as_bytes, codec
from decoupled_diloco.merge.fixed_point import FixedPoint
from decoupled_diloco.merge.fragments import (
    Buffers,
    Fragment,
    MergeMethod,
    Segment,
    Strategy,
    buffer_sizes,
    mapped,
    moment_sizes,
    parameters_numel,
    partition,
    segments,
    with_moments,
)
from decoupled_diloco.merge.layout import Layout
from decoupled_diloco.merge.outer import Averaged, BuffersBehind, OuterOptimizer
from decoupled_diloco.merge.packing import packed_sizes
from decoupled_diloco.merge.published import encode_with_feedback
from decoupled_diloco.merge.rules import FindMomentum, FragmentMerge, RuleAccumulator


def token_weight(tokens: float, steps: float) -> float:
    """Return the weight of a contribution: quantity times quality of its training.

    `w = tokens · (tokens / steps)`. `tokens` measures the quantity of training. `tokens / steps`,
    the batch size, measures its quality: a larger batch has less gradient noise.

    Examples:
        >>> token_weight(tokens=800, steps=4)
        160000.0
        >>> token_weight(tokens=0, steps=0)
        0.0

    Source:
        Decoupled DiLoCo (arXiv 2604.21428), Algorithm 2. The paper leaves `steps = 0` undefined.
    """
    assert tokens >= 0, f"tokens={tokens} is negative"
    assert steps >= 0, f"steps={steps} is negative"
    if tokens == 0 or steps == 0:
        return 0.0
    return float(tokens) * (tokens / steps)


@dataclass(frozen=True)
class MomentPlan:
    """How the moments of the inner optimizer are sent.

    Attributes:
        every: A contribution has moments if its base has a multiple of this number as its counter.
        codec: Their codec.
        names: See `Layout.with_moments`.
    """

    every: int
    codec: Codec
    names: tuple[str, ...]


@dataclass(frozen=True)
class MergePlan:
    """The fragments of a run, their merge method and their wire formats."""

    layout: Layout
    # P fragments; every synchronized element is in exactly one of them
    fragments: tuple[Fragment, ...]
    uplink: Codec
    downlink: Codec
    method: str  # as `sync.merge.rule`: `"rda"`, `"mean"`, or a name for `rule_named`
    weighting: str  # `"tokens"`: quantity times quality; `"uniform"`: equal weights
    outer: Callable[[int], OuterOptimizer]  # creates the outer optimizer of N parameters
    buffers: Buffers = "mean"  # merged by the `"mean"`, or taken from `"one"` learner
    # β of error feedback: the share of the residual sent with the next contribution; None: no
    # error feedback
    feedback: float | None = None
    # outer optimizers of the fragments that do not use `outer`
    other_outers: Mapping[int, Callable[[int], OuterOptimizer]] = field(default_factory=dict)
    secure: FixedPoint | None = None  # the format of masked contributions, with secure sums
    coarser: tuple[Codec, ...] = ()  # codecs that a shard may select instead of `uplink`
    trim: float = 0.0  # share of the weight that a trimmed mean leaves out at each end
    moments: MomentPlan | None = None  # how the layout's moments are sent; None: it has none
    average: float | None = None  # decay of the average that the outer optimizers keep; None: none

    @classmethod
    def make(
        cls,
        layout: Layout,
        *,
        fragments: int,
        strategy: Strategy,
        uplink: str,
        downlink: str,
        method: str,
        weighting: str,
        outer: Callable[[int], OuterOptimizer],
        buffers: Buffers = "mean",
        modules: Sequence[Sequence[str]] = (),
        other_outers: Mapping[int, Callable[[int], OuterOptimizer]] | None = None,
        feedback: float | None = None,
        coarser: Sequence[str] = (),
        trim: float = 0.0,
        moments: MomentPlan | None = None,
    ) -> MergePlan:
        """Create a plan from a layout and settings.

        Args:
            layout: The model's layout; the plan adds its moments.
            modules: If not empty, the modules of each fragment: see `mapped`.

        Raises:
            ConfigError: The layout cannot be split into this many fragments, the modules do not
                match the model, or a codec is unknown.
        """
        model = layout.of_model
        parts = mapped(model, modules) if modules else partition(model, fragments, strategy)
        whole = model if moments is None else model.with_moments(moments.names)
        return cls(
            layout=whole,
            fragments=parts if moments is None else with_moments(parts, whole),
            uplink=codec(uplink),
            downlink=codec(downlink),
            method=method,
            weighting=weighting,
            outer=outer,
            buffers=buffers,
            other_outers=other_outers or {},
            feedback=feedback,
            coarser=tuple(map(codec, coarser)),
            trim=trim,
            moments=moments,
        )

    def weight(self, tokens: float, steps: float) -> float:
        """Return the weight of a contribution with these counters."""
        return token_weight(tokens, steps) if self.weighting == "tokens" else 1.0

    def accumulator(
        self,
        fragment: int,
        buffer: Tensor | None = None,
        momentum: FindMomentum = lambda: None,
    ) -> FragmentMerge:
        """Return an empty accumulator for one merge of a fragment.

        Args:
            buffer: Memory that the accumulator may use, fp32 [N].
            momentum: Returns that of the fragment's parameters; own rules may use it.

        Raises:
            ConfigError: The run has a custom merge rule that this process has not loaded.
        """
        numel, cut = self.fragments[fragment].numel, self.segments(fragment)
        if self._merge_method == "own":
            return RuleAccumulator(self.method, numel, cut, self.trim, momentum)
        return Accumulator(numel, cut, buffer=buffer)

    @property
    def _merge_method(self) -> MergeMethod:
        return "mean" if self.method == "mean" else "rda" if self.method == "rda" else "own"

    def segments(self, fragment: int) -> tuple[Segment, ...]:
        """Return the ranges of a fragment that are merged as one vector, with their methods."""
        found = segments(self.fragments[fragment], self.layout, self._merge_method, self.buffers)
        if self.secure is None:
            return found
        # The direction of one number is its sign. A sum of signs with public weights has each sign.
        return tuple(
            replace(s, merge="mean") if s.merge == "rda" and s.stop - s.start == 1 else s
            for s in found
        )

    def codec_of(self, fragment: int, parameters: Codec) -> Codec:
        """Return the codec of a fragment: `parameters` for its parameters, fp32 for its buffers.

        Its moments have their own codec.
        """
        part = self.fragments[fragment]
        numel = parameters_numel(part, self.layout)
        if numel == part.numel:
            return parameters
        return BuffersExact(
            parameters,
            numel,
            buffer_sizes(part, self.layout),
            None if self.moments is None else self.moments.codec,
            moment_sizes(part, self.layout),
        )

    def encode(
        self, d: Tensor, residuals: Sequence[Tensor], uplink: Codec
    ) -> tuple[Tensor, Tensor | None]:
        """Encode a contribution; return its payload and its residual [N], if it has one.

        Args:
            d: The contribution, fp32 [N]; changed in place with error feedback.
            residuals: The residuals of earlier contributions; their sum is used.
            uplink: The codec of the contribution.
        """
        if (feedback := self.feedback_of(uplink)) is not None:
            return encode_with_feedback(d, residuals, feedback, uplink)
        for residual in residuals:  # of an inexact codec before
            d.add_(residual, alpha=self.feedback or 0.0)
        return uplink.encode(d), None

    def feedback_of(self, uplink: Codec) -> float | None:
        """Return β for a codec; None for an exact one, which needs no memory for residuals."""
        return None if uplink.is_exact else self.feedback

    def outer_of(self, fragment: int) -> OuterOptimizer:
        """Create an outer optimizer for a fragment."""
        part = self.fragments[fragment]
        numel = parameters_numel(part, self.layout)
        outer = None
        if numel:
            outer = self.other_outers.get(fragment, self.outer)(numel)
            if self.average is not None:
                outer = Averaged(outer, self.average)
            if numel == part.numel:
                return outer
        values = None if self.moments is None else self.moments_start(fragment)
        return BuffersBehind(outer, numel, values)

    def uplink_of(self, fragment: int, name: str = "") -> Codec:
        """Return the codec of a contribution.

        Args:
            name: The name of the codec; the run's uplink codec if empty.

        Raises:
            ConfigError: No codec has that name.
        """
        return self.codec_of(fragment, codec(name) if name else self.uplink)

    def downlink_of(self, fragment: int) -> Codec:
        """Return the codec of a published difference."""
        return self.codec_of(fragment, self.downlink)

    def uplink_nbytes(self, fragment: int) -> int:
        """Return the size in bytes of a contribution's payload, not packed."""
        if self.secure is not None:
            return self.secure.nbytes(self.segments(fragment))
        return self.uplink_of(fragment).nbytes(self.fragments[fragment].numel)

    def uplink_sizes(self, fragment: int, name: str = "") -> range:
        """Return the sizes in bytes that a contribution's payload can have, packed or not."""
        if self.secure is not None:
            nbytes = self.uplink_nbytes(fragment)
            return range(nbytes, nbytes + 1)
        return packed_sizes(self.uplink_of(fragment, name), self.fragments[fragment].numel)

    def downlink_sizes(self, fragment: int) -> range:
        """Return the sizes in bytes that a published difference can have, packed or not."""
        return packed_sizes(self.downlink_of(fragment), self.fragments[fragment].numel)

    def buffers_of(self, fragment: int, values: Tensor) -> Tensor:
        """Return the buffers after the parameters, as a view of a fragment's values [N]."""
        start = parameters_numel(self.fragments[fragment], self.layout)
        return values[start : self.moments_start(fragment)]

    def moments_start(self, fragment: int) -> int:
        """Return the number of elements before a fragment's moments."""
        part = self.fragments[fragment]
        return part.numel - sum(moment_sizes(part, self.layout))

    def sends_moments(self, version: int) -> bool:
        """Return whether a contribution from a version has moments.

        Args:
            version: The counter of the version.
        """
        return self.moments is not None and version % self.moments.every == 0

    def whole_nbytes(self, fragment: int) -> int:
        """Return the size in bytes of a whole published copy, which is sent in fp32."""
        return 4 * self.fragments[fragment].numel


def values_of(body: Body, numel: int) -> Tensor:
    """Copy the payload of a whole fragment into a new tensor, fp32 [N].

    Raises:
        ProtocolError: The payload has the wrong size.
    """
    octets = as_bytes(body)
    if octets.numel() != 4 * numel:
        raise ProtocolError(f"the payload has {octets.numel()} bytes, {4 * numel} are needed")
    values = torch.empty(numel, dtype=torch.float32, device="cpu")
    as_bytes(values).copy_(octets)
    return values
