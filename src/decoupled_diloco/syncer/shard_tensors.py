"""The tensors of one shard: master, published copy, outer optimizer and accumulators.

Pure arithmetic on the orders of `SyncerMachine`: used by the shard process and by the virtual
world alike. Not thread-safe: one worker calls it, in the order of the orders.

Host memory an owned parameter: 12 bytes of state (master, published copy, momentum), and the newest
differences on offer: two of 2 bytes each in bf16, with fewer bits more of them, 4.3 bytes together
at most (`Downloads`; the whole on offer is the published copy itself). For each fragment with
buffers, what the newest merges have changed of them (`BufferHistory`). For each fragment that
something was folded for: an accumulator (4 bytes an element of the largest fragment, kept for the
next one); two bodies that have arrived and are not folded yet, decoded (4 bytes); during the merge
a second copy of the state of that fragment.

Shapes: N elements of a fragment; B bytes of a body.
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
"""With how many other contributions a new one is compared."""


@dataclass
class FragmentTensors:
    """One fragment: Θ, Θ̂ (both fp32 [N]) and the outer optimizer's state."""

    master: Tensor
    published: Tensor
    outer: OuterOptimizer


@dataclass(frozen=True)
class PublishedCopy:
    """What everybody is given: the difference [B], the whole Θ̂ (fp32 [N]) and its digest.

    Neither tensor is written to again.
    """

    difference: Tensor
    whole: Tensor
    digest: str


@dataclass(frozen=True)
class OuterStep:
    """An outer step that is not taken over yet.

    Attributes:
        after: The fragment's tensors after it.
        gradient: Δ, fp32 [N]: with the fragment before it, all that `after` follows from.
        copy: What everybody is given.
    """

    after: FragmentTensors
    gradient: Tensor
    copy: PublishedCopy


class ShardTensors:
    """The tensors of the fragments that one shard owns.

    Args:
        plan: The run's layout, cut, codecs and merge method.
        owned: The fragments of this shard.
        earlier_versions: How many versions a contribution's base may be behind the newest one.
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
        """Takes values (fp32 [N], kept) as master and published copy, with fresh momentum.

        Returns:
            The digest of the published copy.

        Raises:
            MergeError: the values are not finite.
        """
        numel = self.plan.fragments[fragment].numel
        assert values.shape == (numel,), f"{tuple(values.shape)} for N={numel}"
        self._require_finite(fragment, values)
        self.fragments[fragment] = FragmentTensors(
            values.clone(), values, self.plan.outer_of(fragment)
        )
        return values_digest(values)

    def receive(self, fragment: int, values: Tensor, announced: str) -> None:
        """Keeps a whole fragment (fp32 [N], kept) aside until it is to be installed.

        Raises:
            ProtocolError: its digest is not the announced one.
            MergeError: the values are not finite.
        """
        actual = values_digest(values)
        if actual != announced:
            raise ProtocolError(f"the digest is {actual}, {announced} was announced")
        self._require_finite(fragment, values)
        self._received[fragment] = (actual, values)

    def _require_finite(self, fragment: int, values: Tensor) -> None:
        """Parameters must be finite; a buffer may be infinite, as a mask or a least value is."""
        trained = parameters_numel(self.plan.fragments[fragment], self.plan.layout)
        if not is_finite(values[:trained]):
            raise MergeError(f"fragment {fragment} has NaN or infinite values: not installed")

    def install_received(self, fragment: int, wanted: str) -> None:
        """Installs what was kept aside, if it is what is wanted; it is needed no more."""
        actual, values = self._received.pop(fragment, ("", None))
        if values is not None and actual == wanted:
            self.install(fragment, values)

    def verify(
        self, fragment: int, ask: Asking, body: Body, announced: str, codec: str = ""
    ) -> float:
        """Checks a contribution whole and keeps it decoded until it is folded or dropped.

        Args:
            fragment: Which fragment.
            ask: Which asking it answers.
            body: [B] in the codec.
            announced: The digest that the learner gave.
            codec: The name of the codec; the run's uplink codec if empty.

        Returns:
            Its norm.

        Raises:
            ProtocolError: another digest, or another size.
            MergeError: not finite.
        """
        uplink = self.plan.uplink_of(fragment, codec)
        actual = body_digest(body, uplink)
        if actual != announced:
            raise ProtocolError(f"the body's digest is {actual}, {announced} was announced")
        numel = self.plan.fragments[fragment].numel
        contribution = Contribution(numel, self.plan.segments(fragment))
        contribution.add(0, uplink.decode(body, numel))
        self._arrived[ask] = contribution
        return contribution.norm

    def alike(self, fragment: int, ask: Asking, learner: str) -> tuple[str, ...]:
        """The learners whose contributions to the next merge are nearly parallel to this one.

        With many learners it is compared with the newest `COMPARED_MAX`. Buffers do not count:
        their values, not changes, are sent, and they are alike in all learners. A learner's first
        contribution is compared with none.

        Args:
            fragment: Which fragment.
            ask: Names a contribution that was verified and is neither folded nor dropped.
            learner: Which learner made it.
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
        earlier[learner] = own  # the newest is the last one
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
        """Folds a verified contribution, scaled, into its fragment's accumulator.

        Args:
            fragment: Which fragment.
            ask: Which asking it answers.
            steps: c_steps of its snapshot.
            tokens: c_tokens of its snapshot.
            scale: What its values are multiplied by.
            discount: What its weight is multiplied by.
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
        """Forgets a verified contribution that is not wanted."""
        self._arrived.pop(ask, None)
        for sketches in self._sketches.values():
            sketches.pop(ask, None)

    def forget_folded(self, fragment: int) -> None:
        """Forgets what was folded, if anything; the accumulator's memory serves the next one."""
        kept = {a: s for a, s in self._sketches[fragment].items() if a in self._arrived}
        self._sketches[fragment] = kept
        if self._accumulators.pop(fragment, None) is not None:
            self._free.append(self._used.pop(fragment))

    def merge(self, fragment: int) -> PublishedCopy:
        """Merges what was folded and takes the result over; see `prepare` and `commit`."""
        step = self.prepare(fragment)
        self.commit(fragment, step)
        return step.copy

    def prepare(self, fragment: int) -> OuterStep:
        """Merges what was folded: outer gradient, outer step, new copy; nothing changes yet.

        The outer gradient is minus the merged contribution (Algorithm 2, and rule 6).

        Raises:
            MergeError: no weight, or a result that is not finite; the fragment is as it was.
        """
        try:
            return self.step(fragment, self._accumulators[fragment].result().neg_())
        finally:
            self.forget_folded(fragment)

    def step(self, fragment: int, gradient: Tensor) -> OuterStep:
        """The outer step that a merged outer gradient (fp32 [N], kept) leads to.

        The same state and gradient give the same bits, so that a journal need only keep gradients.
        """
        entry = self.fragments[fragment]
        master, published = entry.master.clone(), entry.published.clone()
        outer = self.plan.outer_of(fragment)
        outer.load_state_dict(entry.outer.state_dict())  # break: failed-step-moves-momentum
        outer.step(master, gradient)
        body = publish(master, published, self.plan.downlink_of(fragment))
        copy = PublishedCopy(body, published, values_digest(published))
        return OuterStep(FragmentTensors(master, published, outer), gradient, copy)

    def commit(self, fragment: int, step: OuterStep) -> None:
        """The fragment is from now on what the step has led to."""
        self.fragments[fragment] = step.after

    def installed(self, fragment: int, version: Version) -> None:
        """The published copy bears this version; nothing that was made from another one comes."""
        sizes = buffer_sizes(self.plan.fragments[fragment], self.plan.layout)
        if sizes:
            self._buffers[fragment] = BufferHistory(sizes, self._earlier_versions)
            published = self.fragments[fragment].published
            self._buffers[fragment].add(version, self.plan.buffers_of(fragment, published))

    def published(self, fragment: int, version: Version, copy: PublishedCopy) -> PublishedCopy:
        """The copy that was just merged bears this version.

        Returns:
            The copy, whose difference lacks the buffers that have not changed.
        """
        if fragment not in self._buffers:
            return copy
        buffers = self.plan.buffers_of(fragment, copy.whole)
        before = self._buffers[fragment].add(version, buffers)
        assert before is not None, f"fragment {fragment} was merged before it was installed"
        wire = self.plan.downlink_of(fragment)
        return replace(copy, difference=packed(copy.difference, before, wire))

    def unpacked(self, fragment: int, body: Body, base: Version, codec: str = "") -> Body:
        """A contribution's body with the buffers that its learner left out: those of its base.

        Raises:
            ProtocolError: It is not such a body, or the buffers of the base are not known any more.
        """
        history = self._buffers.get(fragment)
        buffers = None if history is None else history.of(base)
        return unpacked(body, buffers, self.plan.uplink_of(fragment, codec))

    def whole(self, fragment: int) -> Tensor:
        """The published copy Θ̂, fp32 [N]; never written to again."""
        return self.fragments[fragment].published
