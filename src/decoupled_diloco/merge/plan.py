"""A run's tensors as both sides cut and encode them: one object made from the layout and settings.

Learners and shards build it from the same layout and the same settings, so they agree on which
element belongs to which fragment, and on the size of every body, without exchanging either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.merge.accumulate import Accumulator
from decoupled_diloco.merge.codec import Body, BuffersExact, Codec, as_bytes, codec
from decoupled_diloco.merge.fragments import (
    Buffers,
    Fragment,
    MergeMethod,
    Segment,
    Strategy,
    buffer_sizes,
    mapped,
    parameters_numel,
    partition,
    segments,
)
from decoupled_diloco.merge.layout import Layout
from decoupled_diloco.merge.outer import BuffersBehind, OuterOptimizer
from decoupled_diloco.merge.packing import packed_sizes
from decoupled_diloco.merge.published import encode_with_feedback
from decoupled_diloco.merge.rules import FragmentMerge, RuleAccumulator


def token_weight(tokens: float, steps: float) -> float:
    """Weight a contribution by quantity times quality of its training.

    `w = tokens · (tokens / steps)`: `tokens` is how much was learnt from (quantity), and
    `tokens / steps`, the batch size, is how little noise each step had (quality).

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
class MergePlan:
    """What to merge, how, and in which wire formats."""

    layout: Layout
    # P fragments; every synchronised element is in exactly one of them
    fragments: tuple[Fragment, ...]
    uplink: Codec
    downlink: Codec
    method: str  # `"rda"`, `"mean"`, or the user's rule as `"module:function"`
    weighting: str  # `"tokens"`: quantity times quality; `"uniform"`: all the same
    outer: Callable[[int], OuterOptimizer]  # makes the outer optimizer of N parameters
    buffers: Buffers = "mean"  # by the `"mean"`, or from `"one"` learner
    # β: so much of what a codec left out goes with the next contribution; None: it is lost
    feedback: float | None = None
    # fragments whose outer optimizer is another one
    other_outers: Mapping[int, Callable[[int], OuterOptimizer]] = field(default_factory=dict)
    coarser: tuple[Codec, ...] = ()  # that a learner may be told to send in, in uplink's place

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
    ) -> MergePlan:
        """Cuts the layout and looks the codecs up.

        Args:
            modules: If there are any, they say what is in which fragment: see `mapped`.

        Raises:
            ConfigError: more fragments than can be cut, modules that do not fit the model, or an
                unknown codec.
        """
        return cls(
            layout=layout,
            fragments=(
                mapped(layout, modules) if modules else partition(layout, fragments, strategy)
            ),
            uplink=codec(uplink),
            downlink=codec(downlink),
            method=method,
            weighting=weighting,
            outer=outer,
            buffers=buffers,
            other_outers=other_outers or {},
            feedback=feedback,
            coarser=tuple(map(codec, coarser)),
        )

    def weight(self, tokens: float, steps: float) -> float:
        """The weight of a contribution with these counters."""
        return token_weight(tokens, steps) if self.weighting == "tokens" else 1.0

    def accumulator(self, fragment: int, buffer: Tensor | None = None) -> FragmentMerge:
        """An empty accumulator for one round of a fragment; ``buffer``: memory to use, fp32 [N].

        Raises:
            ConfigError: the run has a custom merge rule that this process has not loaded.
        """
        numel, cut = self.fragments[fragment].numel, self.segments(fragment)
        if self._merge_method == "own":
            return RuleAccumulator(self.method, numel, cut)
        return Accumulator(numel, cut, buffer=buffer)

    @property
    def _merge_method(self) -> MergeMethod:
        return "mean" if self.method == "mean" else "rda" if self.method == "rda" else "own"

    def segments(self, fragment: int) -> tuple[Segment, ...]:
        """What of a fragment is merged as one vector, and how."""
        return segments(self.fragments[fragment], self.layout, self._merge_method, self.buffers)

    def codec_of(self, fragment: int, parameters: Codec) -> Codec:
        """The codec of a fragment: that of its parameters, and its buffers as they are."""
        part = self.fragments[fragment]
        numel = parameters_numel(part, self.layout)
        if numel == part.numel:
            return parameters
        return BuffersExact(parameters, numel, buffer_sizes(part, self.layout))

    def encode(
        self, d: Tensor, residuals: Sequence[Tensor], uplink: Codec
    ) -> tuple[Tensor, Tensor | None]:
        """A contribution, fp32 [N], as its body, and with error feedback its residual [N].

        Args:
            d: Changed in place with error feedback.
            residuals: Of earlier ones, to be added up.
        """
        if self.feedback is None:
            return uplink.encode(d), None
        return encode_with_feedback(d, residuals, self.feedback, uplink)

    def outer_of(self, fragment: int) -> OuterOptimizer:
        """A new outer optimizer of a fragment."""
        part = self.fragments[fragment]
        numel = parameters_numel(part, self.layout)
        make = self.other_outers.get(fragment, self.outer)
        if numel == part.numel:
            return make(numel)
        return BuffersBehind(make(numel) if numel else None, numel)

    def uplink_of(self, fragment: int, name: str = "") -> Codec:
        """The codec of a contribution: that of a name, or the run's.

        Raises:
            ConfigError: there is none of that name.
        """
        return self.codec_of(fragment, codec(name) if name else self.uplink)

    def downlink_of(self, fragment: int) -> Codec:
        """The codec of a published difference."""
        return self.codec_of(fragment, self.downlink)

    def uplink_nbytes(self, fragment: int) -> int:
        """Size of a contribution's body, not packed."""
        return self.uplink_of(fragment).nbytes(self.fragments[fragment].numel)

    def uplink_sizes(self, fragment: int, name: str = "") -> range:
        """The sizes that a contribution's body can have, packed or not."""
        return packed_sizes(self.uplink_of(fragment, name), self.fragments[fragment].numel)

    def downlink_sizes(self, fragment: int) -> range:
        """The sizes that a published difference's body can have, packed or not."""
        return packed_sizes(self.downlink_of(fragment), self.fragments[fragment].numel)

    def buffers_of(self, fragment: int, values: Tensor) -> Tensor:
        """The buffers behind the parameters, a view of a fragment's values [N]."""
        return values[parameters_numel(self.fragments[fragment], self.layout) :]

    def whole_nbytes(self, fragment: int) -> int:
        """Size of a whole published copy's body: fp32."""
        return 4 * self.fragments[fragment].numel


def values_of(body: Body, numel: int) -> Tensor:
    """A whole fragment's body as fp32 [N] in memory of its own."""
    octets = as_bytes(body)
    if octets.numel() != 4 * numel:
        raise ProtocolError(f"the body has {octets.numel()} bytes, {4 * numel} are needed")
    values = torch.empty(numel, dtype=torch.float32, device="cpu")
    as_bytes(values).copy_(octets)
    return values
