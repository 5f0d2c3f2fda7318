"""Contributions that have arrived and are not merged yet, at a shard or at a relay.

Pure arithmetic on the orders of a state machine. It is not thread-safe: one worker calls it, in the
order of the orders.

Host memory: an accumulator of 4 bytes per element of the largest fragment for each fragment with
folded contributions (reused), one for each party if the shares of parties are limited; and the
decoded contributions that are not folded yet (4 bytes per element).

Shapes: N elements of a fragment; B bytes of a payload.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from decoupled_diloco.errors import MergeError, ProtocolError
from decoupled_diloco.merge import Body, Contribution, as_bytes, body_digest, digest
from decoupled_diloco.merge.accumulate import Accumulator
from decoupled_diloco.merge.fixed_point import Integers, read
from decoupled_diloco.merge.fragments import parameters_numel
from decoupled_diloco.merge.packing import BufferHistory, unpacked
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.merge.rules import FragmentMerge
from decoupled_diloco.merge.sketch import are_alike, sketch
from decoupled_diloco.merge.sum_payload import read_sum
from decoupled_diloco.privacy.dp import Mechanism
from decoupled_diloco.protocol.messages import Asking, Version

COMPARED_MAX = 32
"""Maximum number of other contributions that a new one is compared with."""

_T = TypeVar("_T")

WEIGHT_TOLERANCE = 1e-6
"""Relative error of a sum's weight: it is added in fp64, in any order."""

LENGTH_FACTOR = 2.0
"""By how much a codec may lengthen a sum."""

RELAYED_MAX = 1 << 16
"""Contributions at relays whose weights are kept; the oldest are forgotten first."""

SumName = tuple[str, int]
"""The name of a sum of a fragment: its relay and its number."""


class Contributions:
    """Verified contributions, decoded, and the accumulators into which they are folded.

    Args:
        plan: The run's layout, fragments, codecs and merge method.
        fragments: The fragments that occur.
        mechanism: How contributions are clipped; ``None``: without differential privacy.
    """

    def __init__(
        self, plan: MergePlan, fragments: tuple[int, ...], mechanism: Mechanism | None = None
    ) -> None:
        self.plan = plan
        self.mechanism = mechanism
        self._arrived: dict[tuple[int, Asking], Contribution] = {}
        self._sums: dict[tuple[int, SumName], Accumulator] = {}
        self._norms: OrderedDict[tuple[int, Asking], float] = OrderedDict()
        self._relayed: OrderedDict[tuple[int, Asking], tuple[float, float]] = OrderedDict()
        self._left_out: dict[tuple[int, str], float] = {}
        self._masked: dict[tuple[int, Asking], Integers] = {}
        self._masked_sums: dict[tuple[int, SumName], Integers] = {}
        self._masked_total: dict[int, Integers] = {}
        self._buffers: dict[int, BufferHistory] = {}
        self._signs: dict[int, int] = {}
        self._accumulators: dict[int, dict[str, FragmentMerge]] = {}
        self._numel_max = max(plan.fragments[fragment].numel for fragment in fragments)
        self._sketches: dict[int, dict[Asking, tuple[str, Tensor]]] = {p: {} for p in fragments}
        self._earlier: dict[int, dict[str, Tensor]] = {p: {} for p in fragments}
        self._free: list[Tensor] = []
        self._used: dict[int, list[Tensor]] = {}

    def mechanism_of(self, fragment: int) -> Mechanism | None:
        """Return the mechanism with the clip that is in force for a fragment."""
        return self.mechanism

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
        if self.plan.secure is not None:
            self._masked[fragment, ask] = self._read_masked(fragment, body, announced)
            return 0.0
        uplink = self.plan.uplink_of(fragment, codec)
        actual = body_digest(body, uplink)
        if actual != announced:
            raise ProtocolError(f"digest={actual}, but {announced} was announced")
        numel = self.plan.fragments[fragment].numel
        contribution = Contribution(numel, self.plan.segments(fragment))
        contribution.add(0, uplink.decode(body, numel))
        self._arrived[fragment, ask] = contribution
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
        if self.plan.secure is not None:
            return ()
        numel = parameters_numel(self.plan.fragments[fragment], self.plan.layout)
        own = sketch(self._arrived[fragment, ask].parts[0][1][:numel])
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
        party: str = "",
    ) -> None:
        """Fold a verified contribution, scaled, into its fragment's accumulator.

        Args:
            fragment: The fragment.
            ask: The request that the contribution answers.
            steps: c_steps of its snapshot.
            tokens: c_tokens of its snapshot.
            scale: Factor of its values.
            discount: Factor of its weight.
            party: The accumulator: that of a party, or of all learners.
        """
        if self.plan.secure is not None:
            self._add_masked(fragment, self._masked.pop((fragment, ask)))
            return
        contribution = self._arrived.pop((fragment, ask))
        mechanism = self.mechanism_of(fragment)
        if mechanism is not None:
            # Its learner has clipped it. A codec or a dishonest learner may have enlarged it.
            factor = mechanism.scale_of(scale * contribution.norm, contribution.numel)
            scale *= factor
            within = 1 if factor == 1.0 else -1
            self._signs[fragment] = self._signs.get(fragment, 0) + within
        if scale != 1.0:
            contribution.scale(scale)
        weight = discount * self.plan.weight(tokens, steps)
        self._accumulator(fragment, party).add_contribution(contribution, weight)

    def _read_masked(self, fragment: int, body: Body, announced: str) -> Integers:
        """Decode a masked contribution, or a relay's sum of some; only its owner could check it."""
        assert self.plan.secure is not None
        actual = digest(as_bytes(body).numpy().data)
        if actual != announced:
            raise ProtocolError(f"digest={actual}, but {announced} was announced")
        return read(self.plan.secure, self.plan.segments(fragment), body)

    def _add_masked(self, fragment: int, integers: Integers) -> None:
        if fragment in self._masked_total:
            self._masked_total[fragment].add(integers)
        else:
            self._masked_total[fragment] = integers

    def _accumulator(self, fragment: int, party: str) -> FragmentMerge:
        """Return a party's accumulator of a fragment; a new one gets reused memory."""
        found = self._accumulators.setdefault(fragment, {})
        if party not in found:
            memory = (
                self._free.pop()
                if self._free
                else torch.empty(self._numel_max, dtype=torch.float32, device="cpu")
            )
            self._used.setdefault(fragment, []).append(memory)
            buffer = memory[: self.plan.fragments[fragment].numel]
            momentum = partial(self._momentum, fragment)
            found[party] = self.plan.accumulator(fragment, buffer, momentum)
        return found[party]

    def _momentum(self, fragment: int) -> Tensor | None:
        """Return the outer momentum of a fragment's parameters, fp32; a relay has none."""
        return None

    def _folded(self, fragment: int, factors: Iterable[tuple[str, float]] = ()) -> FragmentMerge:
        """Return one accumulator with all that was folded; the others must not be used again.

        Args:
            fragment: The fragment.
            factors: Factors of the weights of parties.
        """
        parties = self._accumulators[fragment]
        for party, factor in factors:
            _sums_of(parties[party]).scale(factor)
        # The order of arrival is that of the tape's orders, so a replay adds in the same order.
        whole, *others = parties.values()
        for other in others:
            _sums_of(whole).combine(_sums_of(other))
        return whole

    def has_folded(self, fragment: int) -> bool:
        """Whether a merge of the fragment would have a contribution."""
        return fragment in self._accumulators

    def reported(self, fragment: int, ask: Asking, norm: float) -> None:
        """Note the norm that a relay has reported of a contribution."""
        _keep(self._norms, (fragment, ask), norm)

    def folded_at_relay(
        self,
        fragment: int,
        ask: Asking,
        steps: float,
        tokens: float,
        scale: float,
        discount: float,
    ) -> None:
        """Note what a relay was ordered to fold; for the arguments see `fold`."""
        weight = discount * self.plan.weight(tokens, steps)
        length = weight * scale * self._norms.pop((fragment, ask), 0.0)
        _keep(self._relayed, (fragment, ask), (weight, length))

    def check_sum(self, fragment: int, name: SumName, asks: Iterable[Asking]) -> None:
        """Compare a verified sum with the contributions that its relay was ordered to fold.

        A dishonest relay can thus neither give its site more weight nor send changes that are
        larger than those that the norm gate has seen. With error feedback, a relay may send later
        what it has left out earlier.

        Raises:
            MergeError: The sum has another weight or count, or is too long.
        """
        known = [self._relayed.pop((fragment, ask), (math.nan, math.nan)) for ask in asks]
        if self.plan.secure is not None:
            return  # it is masked; its opened sum must have the weight of its contributions
        weight, length = (math.fsum(values) for values in zip(*known, strict=True))
        accumulator, relay = self._sums[fragment, name], name[0]
        norms, means = accumulator.lengths
        feedback = self.plan.feedback_of(self.plan.uplink) or 0.0
        left_out = feedback * self._left_out.get((fragment, relay), 0.0)
        most, problem = length + left_out, ""
        if accumulator.count != len(known):
            problem = f"{accumulator.count} contributions, but names {len(known)}"
        elif not math.isclose(accumulator.weight, weight, rel_tol=WEIGHT_TOLERANCE):
            problem = f"weight {accumulator.weight:g}, but {weight:g} was ordered"
        elif accumulator.moment_weight > weight * (1 + WEIGHT_TOLERANCE):
            problem = f"moments of weight {accumulator.moment_weight:g}, but {weight:g} was ordered"
        elif norms > length * (1 + WEIGHT_TOLERANCE) + 1e-30:
            problem = f"norms of {norms:g}, but {length:g} was reported"
        elif means > LENGTH_FACTOR * most + 1e-30:
            problem = f"length {means:g}, but at most {most:g} was reported"
        if problem:
            del self._sums[fragment, name]
            raise MergeError(f"the sum of relay {relay} has {problem}")
        # No codec leaves out more than half of a long sum, or more than all of a short one.
        self._left_out[fragment, relay] = max(most / 2, math.sqrt(max(0.0, most**2 - means**2)))

    def verify_sum(self, fragment: int, name: SumName, body: Body, announced: str) -> None:
        """Verify a relay's sum, and keep it decoded until it is folded or dropped.

        Args:
            fragment: The fragment.
            name: The relay and the number of the sum.
            body: The payload; see `merge.sum_payload`.
            announced: The digest that the relay sent.

        Raises:
            ProtocolError: The digest or the size is wrong.
            MergeError: The sums are not finite or contradict each other.
        """
        if self.plan.secure is not None:
            self._masked_sums[fragment, name] = self._read_masked(fragment, body, announced)
            return
        self._sums[fragment, name] = read_sum(self.plan, fragment, body, announced)

    def fold_sum(self, fragment: int, name: SumName, party: str = "") -> None:
        """Add a verified sum to its fragment's accumulator; for ``party`` see `fold`."""
        if self.plan.secure is not None:
            self._add_masked(fragment, self._masked_sums.pop((fragment, name)))
            return
        _sums_of(self._accumulator(fragment, party)).combine(self._sums.pop((fragment, name)))

    def drop_sum(self, fragment: int, name: SumName) -> None:
        """Discard a verified sum."""
        self._sums.pop((fragment, name), None)
        self._masked_sums.pop((fragment, name), None)

    def drop(self, fragment: int, ask: Asking) -> None:
        """Discard a verified contribution."""
        self._arrived.pop((fragment, ask), None)
        self._masked.pop((fragment, ask), None)
        self._sketches[fragment].pop(ask, None)

    def forget_folded(self, fragment: int) -> None:
        """Discard folded contributions, if any; the next accumulator reuses the memory."""
        kept = {
            ask: each
            for ask, each in self._sketches[fragment].items()
            if (fragment, ask) in self._arrived
        }
        self._sketches[fragment] = kept
        self._masked_total.pop(fragment, None)
        self._signs.pop(fragment, None)
        if self._accumulators.pop(fragment, None) is not None:
            self._free += self._used.pop(fragment, [])

    def unpacked(self, fragment: int, body: Body, base: Version, codec: str = "") -> Body:
        """Return a contribution's payload, with omitted buffers filled in from its base.

        Raises:
            ProtocolError: The payload is malformed, or the base's buffers are not known any more.
        """
        if self.plan.secure is not None:
            return body
        history = self._buffers.get(fragment)
        buffers = None if history is None else history.of(base)
        return unpacked(body, buffers, self.plan.uplink_of(fragment, codec))


def _sums_of(merge: FragmentMerge) -> Accumulator:
    assert isinstance(merge, Accumulator), "a custom merge rule has no sums"
    return merge


def _keep(kept: OrderedDict[tuple[int, Asking], _T], name: tuple[int, Asking], value: _T) -> None:
    kept[name] = value
    while len(kept) > RELAYED_MAX:
        kept.popitem(last=False)
