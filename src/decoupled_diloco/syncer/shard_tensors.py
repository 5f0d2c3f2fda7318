"""The tensors of one shard: master, published copy, outer optimizer and accumulators.

This is pure arithmetic on the orders of `SyncerMachine`. Both the shard process and the virtual
world use it. It is not thread-safe: one worker calls it, in the order of the orders.

Host memory per owned parameter:

- State: 12 bytes (master, published copy, momentum), and 4 more with an average of the master.
- Offered differences (`Downloads`): at most 4.3 bytes together. In bf16 these are two of 2 bytes
  each; with fewer bits, more differences are kept. The offered whole copy is the published copy
  itself.

Further memory:

- For a fragment with buffers: the changes of the newest merges to them (`BufferHistory`).
- For a fragment with folded contributions: an accumulator of 4 bytes per element of the largest
  fragment, which is reused; two decoded contributions that are not folded yet (4 bytes per
  element); and during the merge a second copy of the fragment's state.

Shapes: N elements of a fragment; B bytes of a payload.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decoupled_diloco.errors import MergeError, ProtocolError
from decoupled_diloco.merge import (
    OuterOptimizer,
    digest,
    is_finite,
    parameters_numel,
    publish,
    values_digest,
)
from decoupled_diloco.merge.accumulate import Accumulator
from decoupled_diloco.merge.fixed_point import first_bounds, next_bounds, opened
from decoupled_diloco.merge.fragments import buffer_sizes
from decoupled_diloco.merge.outer import AVERAGE, momentum_of
from decoupled_diloco.merge.packing import BufferHistory, packed
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.merge.rules import FragmentMerge
from decoupled_diloco.privacy.dp import COUNT_UNIT, Mechanism
from decoupled_diloco.privacy.secure_sum import Opening
from decoupled_diloco.protocol.messages import Version
from decoupled_diloco.runtime import runtime
from decoupled_diloco.syncer.contributions import Contributions

Factors = tuple[tuple[str, float], ...]
"""Parties, each with the factor of its weight in a merge."""


@dataclass
class FragmentTensors:
    """One fragment.

    Attributes:
        master: Θ, fp32 [N].
        published: Θ̂, fp32 [N].
        outer: The outer optimizer with its state.
        clip: The clip in force, as a multiple of that in the settings; see `AdaptiveClip`.
    """

    master: Tensor
    published: Tensor
    outer: OuterOptimizer
    clip: float = 1.0


@dataclass(frozen=True)
class PublishedCopy:
    """The published data of a version. Neither tensor is written to again.

    Attributes:
        difference: The encoded difference from the previous version, uint8 [B]; it may be empty.
        whole: Θ̂, fp32 [N].
        digest: The digest of `whole`.
        difference_digest: The digest of `difference`; empty until it is offered.
        average: The average of the parameters, fp32; ``None`` in a run without one.
    """

    difference: Tensor
    whole: Tensor
    digest: str
    difference_digest: str = ""
    average: Tensor | None = None


@dataclass(frozen=True)
class OuterStep:
    """An outer step that is not committed yet.

    Attributes:
        after: The fragment's tensors after the step.
        gradient: Δ, fp32 [N]. It determines `after` together with the fragment before the step.
        copy: The published copy.
    """

    after: FragmentTensors
    gradient: Tensor
    copy: PublishedCopy


class ShardTensors(Contributions):
    """The tensors of the fragments that one shard owns.

    Args:
        plan: The run's layout, fragments, codecs and merge method.
        owned: The fragments of this shard.
        earlier_versions: How many versions the base of a contribution may be behind the newest one.
        mechanism: How contributions are clipped and merges get noise; ``None``: without
            differential privacy.
    """

    def __init__(
        self,
        plan: MergePlan,
        owned: tuple[int, ...],
        earlier_versions: int = 1,
        mechanism: Mechanism | None = None,
    ) -> None:
        super().__init__(plan, owned, mechanism)
        self.owned = owned
        self.fragments: dict[int, FragmentTensors] = {}
        self._earlier_versions = earlier_versions
        self._bounds: dict[int, tuple[float, ...]] = {}
        self._opened_counts: dict[int, float] = {}
        self._received: dict[int, tuple[str, Tensor]] = {}

    def install(self, fragment: int, values: Tensor) -> str:
        """Install values as master and published copy, with fresh momentum.

        Args:
            fragment: The fragment.
            values: fp32 [N]; kept without a copy.

        Returns:
            The digest of the published copy.

        Raises:
            MergeError: The values are not finite.
        """
        numel = self.plan.fragments[fragment].numel
        assert values.shape == (numel,), f"{tuple(values.shape)} for N={numel}"
        self._require_finite(fragment, values)
        self.fragments[fragment] = FragmentTensors(
            values.clone(), values, self.plan.outer_of(fragment)
        )
        return values_digest(values)

    def receive(self, fragment: int, values: Tensor, announced: str) -> None:
        """Store a whole fragment (fp32 [N], without a copy) until it is installed.

        Raises:
            ProtocolError: Its digest differs from the announced one.
            MergeError: The values are not finite.
        """
        actual = values_digest(values)
        if actual != announced:
            raise ProtocolError(f"digest={actual}, but {announced} was announced")
        self._require_finite(fragment, values)
        self._received[fragment] = (actual, values)

    def _require_finite(self, fragment: int, values: Tensor) -> None:
        """Check that parameters are finite.

        Buffers may be infinite, as in a mask or a minimum. Moments may be absent.
        """
        trained = parameters_numel(self.plan.fragments[fragment], self.plan.layout)
        if not is_finite(values[:trained]):
            raise MergeError(f"fragment {fragment} has NaN or infinite values and is not installed")

    def install_received(self, fragment: int, wanted: str) -> None:
        """Remove the stored fragment, and install it if its digest is the wanted one."""
        actual, values = self._received.pop(fragment, ("", None))
        if values is not None and actual == wanted:
            self.install(fragment, values)

    def bounds(self, fragment: int) -> tuple[float, ...]:
        """Return the norm of each segment to which learners clip their next masked contribution.

        With differential privacy it is the clip in force, because earlier norms would reveal
        something.
        """
        mechanism = self.mechanism_of(fragment)
        if mechanism is not None:
            limit = mechanism.clip_of(self.plan.fragments[fragment].numel)
            return (limit,) * len(self.plan.segments(fragment))
        if fragment not in self._bounds:
            published = self.fragments[fragment].published
            return first_bounds(self.plan.segments(fragment), published)
        return self._bounds[fragment]

    def open_sum(self, fragment: int, opening: Opening) -> None:
        """Unmask what was folded, so that it can be merged.

        Raises:
            MergeError: It cannot be opened. It is kept until `forget_folded`.
        """
        form, segments = self.plan.secure, self.plan.segments(fragment)
        assert form is not None
        total, bounds = self._masked_total[fragment].clone(), opening.cohort.bounds
        opening.unmask(total)
        weights, heaviest = opening.weights(self.plan.weight)
        base = self.fragments[fragment].published
        sums = opened(form, segments, total, base, weights, heaviest, bounds)
        self._accumulators[fragment] = {"": sums.accumulator}
        if self.mechanism is not None:
            self._opened_counts[fragment] = int(total.scalars[1]) / COUNT_UNIT
        self._bounds[fragment] = next_bounds(bounds, sums.norms)

    def merge(self, fragment: int, factors: Factors = ()) -> PublishedCopy:
        """Merge what was folded, and commit the result; see `prepare` and `commit`."""
        step = self.prepare(fragment, factors)
        self.commit(fragment, step)
        return step.copy

    def prepare(self, fragment: int, factors: Factors = ()) -> OuterStep:
        """Compute the outer step from what was folded; the fragment does not change yet.

        The outer gradient is the negated merged contribution (Algorithm 2, and rule 6).

        Args:
            fragment: The fragment.
            factors: Factors of the weights of parties.

        Raises:
            MergeError: The total weight is zero, or the result is not finite. The fragment is
                unchanged.
        """
        try:
            clip = self._next_clip(fragment)
            step = self.step(fragment, self._merged(fragment, factors).neg_())
            return replace(step, after=replace(step.after, clip=clip))
        finally:
            self.forget_folded(fragment)

    def mechanism_of(self, fragment: int) -> Mechanism | None:
        """See `Contributions`."""
        if self.mechanism is None or self.mechanism.adaptive is None:
            return self.mechanism
        return self.mechanism.at(self.fragments[fragment].clip)

    def _momentum(self, fragment: int) -> Tensor | None:
        """See `Contributions`."""
        return momentum_of(self.fragments[fragment].outer)

    def adapted_clip(self, fragment: int) -> float | None:
        """Return the clip in force, as the norm of a whole period; ``None``: it does not change."""
        mechanism = self.mechanism_of(fragment)
        return None if mechanism is None or mechanism.adaptive is None else mechanism.clip

    def _next_clip(self, fragment: int) -> float:
        """Return the clip in force after the merge of what was folded."""
        clip, mechanism = self.fragments[fragment].clip, self.mechanism
        if mechanism is None or mechanism.adaptive is None:
            return clip
        count = sum(_count_of(each) for each in self._accumulators[fragment].values())
        if self.plan.secure is not None:
            signs = self._opened_counts.pop(fragment)
        else:
            numel = self.plan.fragments[fragment].numel
            signs = mechanism.count_of(self._signs[fragment], numel, runtime().random_bytes)
        return mechanism.adaptive.next(clip, signs, count)

    def _merged(self, fragment: int, factors: Factors) -> Tensor:
        """Return what was folded, merged, fp32 [N]; with differential privacy, with noise.

        In a secure sum, the noise is that of the learners.
        """
        accumulator = self._folded(fragment, factors)
        merged = accumulator.result()
        mechanism = self.mechanism_of(fragment)
        if mechanism is not None and self.plan.secure is None:
            assert isinstance(accumulator, Accumulator), "a custom merge rule has no bound"
            # break: merge-without-noise
            mechanism.add_noise_(merged, accumulator.weight, runtime().random_bytes)
        return merged

    def step(self, fragment: int, gradient: Tensor) -> OuterStep:
        """Return the outer step for a merged outer gradient (fp32 [N], kept without a copy).

        The same state and gradient give the same bits, so a journal only needs gradients.
        """
        entry = self.fragments[fragment]
        # Copies, because a failed step must change nothing, and because readers still use the old
        # tensors: the data plane sends `published`, and a checkpoint is written from all of them.
        master, published = entry.master.clone(), entry.published.clone()
        outer = self.plan.outer_of(fragment)
        outer.load_state_dict(entry.outer.state_dict())  # break: failed-step-moves-momentum
        outer.step(master, gradient)
        body = publish(master, published, self.plan.downlink_of(fragment))
        copy = PublishedCopy(body, published, values_digest(published))
        after = FragmentTensors(master, published, outer, entry.clip)
        return OuterStep(after, gradient, copy)

    def commit(self, fragment: int, step: OuterStep) -> None:
        """Replace the fragment's tensors by the result of the step."""
        self.fragments[fragment] = step.after

    def installed(self, fragment: int, version: Version) -> None:
        """Record that the published copy has this version; older bases are unknown from now on."""
        sizes = buffer_sizes(self.plan.fragments[fragment], self.plan.layout)
        if sizes:
            self._buffers[fragment] = BufferHistory(sizes, self._earlier_versions)
            published = self.fragments[fragment].published
            self._buffers[fragment].add(version, self.plan.buffers_of(fragment, published))

    def published(self, fragment: int, version: Version, copy: PublishedCopy) -> PublishedCopy:
        """Record that the copy that was just merged has this version.

        Returns:
            The copy as it is offered. Its difference omits unchanged buffers and moments.
        """
        difference = self._without_unchanged_buffers(fragment, version, copy)
        average = self.average(fragment)
        return replace(
            copy, difference=difference, difference_digest=digest(difference), average=average
        )

    def _without_unchanged_buffers(
        self, fragment: int, version: Version, copy: PublishedCopy
    ) -> Tensor:
        before = None
        if fragment in self._buffers:
            buffers = self.plan.buffers_of(fragment, copy.whole)
            before = self._buffers[fragment].add(version, buffers)
            assert before is not None, f"fragment {fragment} was merged before it was installed"
        return packed(copy.difference, before, self.plan.downlink_of(fragment))

    def whole(self, fragment: int, *, average: bool = False) -> Tensor:
        """Return the published copy Θ̂, fp32 [N]; it is never written to again.

        Args:
            average: Return the average of the parameters instead, before the published buffers.
        """
        published = self.fragments[fragment].published
        values = self.average(fragment) if average else None
        return published if values is None else torch.cat([values, published[values.numel() :]])

    def average(self, fragment: int) -> Tensor | None:
        """Return the average of the parameters over the last versions, fp32, never written to.

        Before the first merge it is the published copy. ``None``: the run keeps no average.
        """
        if self.plan.average is None:
            return None
        entry = self.fragments[fragment]
        trained = parameters_numel(self.plan.fragments[fragment], self.plan.layout)
        return entry.outer.state_dict().get(AVERAGE, entry.published[:trained])


def _count_of(merge: FragmentMerge) -> int:
    assert isinstance(merge, Accumulator), "a custom merge rule has no bound"
    return merge.count
