"""The tensors of one shard: master, published copy, outer optimizer and accumulators.

This is pure arithmetic on the orders of `SyncerMachine`. Both the shard process and the virtual
world use it. It is not thread-safe: one worker calls it, in the order of the orders.

Host memory per owned parameter:

- State: 12 bytes (master, published copy, momentum).
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
    Body,
    Contribution,
    OuterOptimizer,
    body_digest,
    is_finite,
    parameters_numel,
    publish,
    values_digest,
)
from decoupled_diloco.merge.fragments import buffer_sizes
from decoupled_diloco.merge.packing import BufferHistory, packed, unpacked
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.merge.rules import FragmentMerge
from decoupled_diloco.merge.sketch import are_alike, sketch
from decoupled_diloco.protocol.messages import Asking, Version

COMPARED_MAX = 32
"""Maximum number of other contributions that a new one is compared with."""


@dataclass
class FragmentTensors:
    """One fragment: Θ, Θ̂ (both fp32 [N]) and the outer optimizer's state."""

    master: Tensor
    published: Tensor
    outer: OuterOptimizer


@dataclass(frozen=True)
class PublishedCopy:
    """The published data of a version: the difference [B], the whole Θ̂ (fp32 [N]) and its digest.

    Neither tensor is written to again.
    """

    difference: Tensor
    whole: Tensor
    digest: str


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


class ShardTensors:
    """The tensors of the fragments that one shard owns.

    Args:
        plan: The run's layout, fragments, codecs and merge method.
        owned: The fragments of this shard.
        earlier_versions: How many versions the base of a contribution may be behind the newest one.
    """

    def __init__(self, plan: MergePlan, owned: tuple[int, ...], earlier_versions: int = 1) -> None:
        self.plan = plan
        self.owned = owned
        self.fragments: dict[int, FragmentTensors] = {}
        self._arrived: dict[Asking, Contribution] = {}
        self._earlier_versions = earlier_versions
        self._buffers: dict[int, BufferHistory] = {}
        self._received: dict[int, tuple[str, Tensor]] = {}
        self._accumulators: dict[int, FragmentMerge] = {}
        self._numel_max = max(plan.fragments[fragment].numel for fragment in owned)
        self._sketches: dict[int, dict[Asking, tuple[str, Tensor]]] = {p: {} for p in owned}
        self._earlier: dict[int, dict[str, Tensor]] = {p: {} for p in owned}
        self._free: list[Tensor] = []
        self._used: dict[int, Tensor] = {}

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
        """Check that parameters are finite; buffers may be infinite, as in a mask or a minimum."""
        trained = parameters_numel(self.plan.fragments[fragment], self.plan.layout)
        if not is_finite(values[:trained]):
            raise MergeError(f"fragment {fragment} has NaN or infinite values and is not installed")

    def install_received(self, fragment: int, wanted: str) -> None:
        """Remove the stored fragment, and install it if its digest is the wanted one."""
        actual, values = self._received.pop(fragment, ("", None))
        if values is not None and actual == wanted:
            self.install(fragment, values)

    def verify(
        self, fragment: int, ask: Asking, body: Body, announced: str, codec: str = ""
    ) -> float:
        """Verify a whole contribution, and keep it decoded until it is folded or dropped.

        Args:
            fragment: The fragment.
            ask: The request that it answers.
            body: The payload, [B] in the codec.
            announced: The digest that the learner sent.
            codec: The name of the codec; the run's uplink codec if empty.

        Returns:
            The norm of the contribution.

        Raises:
            ProtocolError: The digest or the size is wrong.
            MergeError: The values are not finite.
        """
        uplink = self.plan.uplink_of(fragment, codec)
        actual = body_digest(body, uplink)
        if actual != announced:
            raise ProtocolError(f"digest={actual}, but {announced} was announced")
        numel = self.plan.fragments[fragment].numel
        contribution = Contribution(numel, self.plan.segments(fragment))
        contribution.add(0, uplink.decode(body, numel))
        self._arrived[ask] = contribution
        return contribution.norm

    def alike(self, fragment: int, ask: Asking, learner: str) -> tuple[str, ...]:
        """Return the learners with contributions to the next merge that are nearly parallel to it.

        With many learners, the comparison covers the newest `COMPARED_MAX` contributions. Buffers
        do not count: learners send their values, not changes, and these are similar in all
        learners. A learner's first contribution is not compared.

        Args:
            fragment: The fragment.
            ask: The request whose contribution was verified and is neither folded nor dropped.
            learner: The learner that made the contribution.
        """
        numel = parameters_numel(self.plan.fragments[fragment], self.plan.layout)
        own = sketch(self._arrived[ask].parts[0][1][:numel])
        others, earlier = self._sketches[fragment], self._earlier[fragment]
        before = earlier.pop(learner, None)
        found = {
            name
            for name, other in list(others.values())[-COMPARED_MAX:]
            if name != learner and before is not None and are_alike(own, other, before)
        }
        others[ask] = learner, own
        earlier[learner] = own  # the newest comes last, so the first one is the oldest
        if len(earlier) > COMPARED_MAX:
            del earlier[next(iter(earlier))]
        return tuple(sorted(found))

    def fold(
        self,
        fragment: int,
        ask: Asking,
        steps: float,
        tokens: float,
        scale: float = 1.0,
        discount: float = 1.0,
    ) -> None:
        """Fold a verified contribution, scaled, into its fragment's accumulator.

        Args:
            fragment: The fragment.
            ask: The request that the contribution answers.
            steps: c_steps of its snapshot.
            tokens: c_tokens of its snapshot.
            scale: Factor of its values.
            discount: Factor of its weight.
        """
        contribution = self._arrived.pop(ask)
        if scale != 1.0:
            contribution.scale(scale)
        if fragment not in self._accumulators:
            memory = (
                self._free.pop()
                if self._free
                else torch.empty(self._numel_max, dtype=torch.float32, device="cpu")
            )
            self._used[fragment] = memory
            buffer = memory[: self.plan.fragments[fragment].numel]
            self._accumulators[fragment] = self.plan.accumulator(fragment, buffer)
        weight = discount * self.plan.weight(tokens, steps)
        self._accumulators[fragment].add_contribution(contribution, weight)

    def drop(self, ask: Asking) -> None:
        """Discard a verified contribution."""
        self._arrived.pop(ask, None)
        for sketches in self._sketches.values():
            sketches.pop(ask, None)

    def forget_folded(self, fragment: int) -> None:
        """Discard folded contributions, if any; the next accumulator reuses the memory."""
        kept = {a: s for a, s in self._sketches[fragment].items() if a in self._arrived}
        self._sketches[fragment] = kept
        if self._accumulators.pop(fragment, None) is not None:
            self._free.append(self._used.pop(fragment))

    def merge(self, fragment: int) -> PublishedCopy:
        """Merge what was folded, and commit the result; see `prepare` and `commit`."""
        step = self.prepare(fragment)
        self.commit(fragment, step)
        return step.copy

    def prepare(self, fragment: int) -> OuterStep:
        """Compute the outer step from what was folded; the fragment does not change yet.

        The outer gradient is the negated merged contribution (Algorithm 2, and rule 6).

        Raises:
            MergeError: The total weight is zero, or the result is not finite. The fragment is
                unchanged.
        """
        try:
            return self.step(fragment, self._accumulators[fragment].result().neg_())
        finally:
            self.forget_folded(fragment)

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
        return OuterStep(FragmentTensors(master, published, outer), gradient, copy)

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
            The copy, whose difference omits unchanged buffers.
        """
        if fragment not in self._buffers:
            return copy
        buffers = self.plan.buffers_of(fragment, copy.whole)
        before = self._buffers[fragment].add(version, buffers)
        assert before is not None, f"fragment {fragment} was merged before it was installed"
        wire = self.plan.downlink_of(fragment)
        return replace(copy, difference=packed(copy.difference, before, wire))

    def unpacked(self, fragment: int, body: Body, base: Version, codec: str = "") -> Body:
        """Return a contribution's payload, with omitted buffers filled in from its base.

        Raises:
            ProtocolError: The payload is malformed, or the base's buffers are not known any more.
        """
        history = self._buffers.get(fragment)
        buffers = None if history is None else history.of(base)
        return unpacked(body, buffers, self.plan.uplink_of(fragment, codec))

    def whole(self, fragment: int) -> Tensor:
        """Return the published copy Θ̂, fp32 [N]; it is never written to again."""
        return self.fragments[fragment].published
