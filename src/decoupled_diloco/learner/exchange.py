"""The tensors of one learner: published copies, staged copies, snapshots.

Pure arithmetic on the orders of `LearnerMachine`. The training thread calls `snapshot` and `apply`
at step boundaries; the background calls the rest. A tensor that is stored here is never written to
again, so another thread may still read it after a newer one has replaced it.

Host memory: 4 bytes per parameter for the published copies, 4 more for the residuals once the
learner sends in an inexact codec with error feedback, and a few fragments in flight.

*Error feedback* (rule 19). A codec leaves a *residual* out of a contribution. The residual is added
to the fragment's next contribution:

- A captured contribution takes the stored residual.
- If the contribution is merged, or may be, the residual of its own encoding is stored.
- If it is merged nowhere, the residual that it took is stored again.
- While it is in flight, the next contribution takes nothing of it. So no share of a residual is
  ever in two payloads.

A contribution is in flight until its steps have left the parameters. A checkpoint that holds these
steps holds the residual from before them.

Shapes: N elements of a fragment; B bytes of a payload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

from decoupled_diloco.errors import MergeError
from decoupled_diloco.learner.parameter_store import (
    Copied,
    HostCopy,
    MomentStore,
    ParameterStore,
    Rounded,
    Values,
)
from decoupled_diloco.merge import Body, body_digest, contribution, receive, values_digest
from decoupled_diloco.merge.blocks import same_bits
from decoupled_diloco.merge.packing import packed, unpacked
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.privacy.dp import Mechanism
from decoupled_diloco.protocol.messages import Asking, ForgetResidual, SendBody, SendCopy, Settle
from decoupled_diloco.shell.driver import at_decision

Mode = Literal["overwrite", "carry", "rebase", "blend"]


@dataclass(frozen=True)
class Capture:
    """A snapshot and the published copy it was trained from, to be encoded later.

    Attributes:
        moments: Whether the contribution has the moments of the snapshot, if it has any.
    """

    plan: MergePlan
    fragment: int
    copy: HostCopy
    published: Values
    residuals: tuple[Values, ...] = ()
    mechanism: Mechanism | None = None
    moments: bool = True

    def packed(self, body: Tensor, codec_name: str) -> Tensor:
        """Return a payload without absent moments and the buffers that the published copy has."""
        buffers = self.plan.buffers_of(self.fragment, self.published)
        return packed(body, buffers, self.plan.uplink_of(self.fragment, codec_name))

    def change(self) -> Tensor:
        """Return the contribution d = θ − cast(Θ̂), fp32 [N] (rule 6)."""
        part = self.plan.fragments[self.fragment]
        d = contribution(part, self.plan.layout, self.copy.values(), self.published)
        if self.mechanism is not None:
            # The learner itself limits what any process can learn from its contribution.
            self.mechanism.clip_(d)
        if not self.moments:
            d[self.plan.moments_start(self.fragment) :] = math.nan
        return d

    def encode(self, codec_name: str) -> tuple[Tensor, str, Tensor | None]:
        """Encode the contribution with the requested codec.

        Returns:
            The payload, uint8 [B], its digest, and its residual, fp32 [N], if it has one.

        Raises:
            ConfigError: This process does not have the codec.
        """
        uplink = self.plan.uplink_of(self.fragment, codec_name)
        body, residual = self.plan.encode(self.change(), self.residuals, uplink)
        return body, body_digest(body, uplink), residual


@dataclass
class UnderWay:
    """The residuals that a contribution took and, once it is encoded, its own, if it has one."""

    taken: tuple[Values, ...]
    leaves: tuple[Values, ...] | None = None


class LearnerTensors:
    """The tensors of one learner.

    Args:
        plan: The run's layout, fragments and codecs.
        store: The learner's parameters.
        blend_alpha: α of ``alignment="blend"``: the share of the learner's own parameters.
        mechanism: How contributions are clipped and get noise; ``None``: without differential
            privacy.

    Raises:
        ConfigError: The run merges moments, which this learner does not have.
    """

    def __init__(
        self,
        plan: MergePlan,
        store: ParameterStore,
        blend_alpha: float = 0.5,
        mechanism: Mechanism | None = None,
    ) -> None:
        self.plan = plan
        self.store = store
        self.blend_alpha = blend_alpha
        self.mechanism = mechanism
        store.admit(plan.layout)
        count = len(plan.fragments)
        self.published: list[Values | None] = [None] * count
        self.staged: list[Values | None] = [None] * count
        self.snapshots: list[HostCopy | None] = [None] * count
        self.residuals: list[tuple[Values, ...]] = [()] * count
        self.under_way: dict[tuple[int, Asking], UnderWay] = {}
        self._sent: list[HostCopy | None] = [None] * count

    @at_decision(SendBody)
    def _capture(self, order: SendBody) -> Capture:
        moments = self.plan.sends_moments(order.base.counter)
        return self.capture(order.fragment, order.ask, moments=moments)

    @at_decision(SendCopy)
    def _copy(self, order: SendCopy) -> HostCopy:
        return self.whole(order.fragment, published=order.version is not None)

    @at_decision(Settle)
    def _settle(self, order: Settle) -> None:
        self.settle(order.fragment, order.ask, gone=order.gone)

    @at_decision(ForgetResidual)
    def _forget(self, order: ForgetResidual) -> None:
        self.residuals[order.fragment] = ()

    @property
    def awaits_moments(self) -> bool:
        """Whether moments of the run wait for the first step of the learner's optimizer."""
        return isinstance(self.store, MomentStore) and self.store.awaits_step

    def stepped(self, run_step: int) -> None:
        """See `Moments.stepped`."""
        assert isinstance(self.store, MomentStore), "no other store admits moments"
        self.store.stepped(self.plan.fragments, run_step)

    def snapshot(self, fragment: int) -> None:
        """Copy a fragment's parameters as they are now."""
        self.snapshots[fragment] = self.store.snapshot(self.plan.fragments[fragment])

    def apply(self, fragment: int, mode: Mode) -> None:
        """Apply the staged published copy, or the current one, to the parameters (rule 7)."""
        part, old = self.plan.fragments[fragment], self.published[fragment]
        new = old if self.staged[fragment] is None else self.staged[fragment]
        assert new is not None, f"nothing is staged or held of fragment {fragment}"
        values = self._without_unchanged_moments(fragment, new)
        match mode:
            case "overwrite":
                self.store.overwrite(part, values)
            case "blend":
                self.store.combine(part, values, None, self.blend_alpha)
            case "carry":
                sent = self._sent[fragment]
                assert sent is not None, f"nothing of fragment {fragment} was sent"
                self.store.combine(part, values, sent, 1.0)
            case "rebase":
                assert old is not None
                self.store.combine(part, values, Rounded(part, self.plan.layout, old), 1.0)
        # break: applied-copy-not-published
        self.published[fragment], self.staged[fragment] = new, None
        self.snapshots[fragment] = self._sent[fragment] = None

    def _without_unchanged_moments(self, fragment: int, new: Values) -> Values:
        """Return a published copy, without its moments if no merge has changed them since the last.

        The optimizer has continued from those. To write them again would set it back.
        """
        old = self.published[fragment]
        if self.plan.moments is None or old is None:
            return new
        start = self.plan.moments_start(fragment)
        if not same_bits(old[start:], new[start:]):
            return new
        values = new.clone()
        values[start:] = math.nan
        return values

    def capture(self, fragment: int, ask: Asking, *, moments: bool = True) -> Capture:
        """Return the answer to a request: the newest snapshot, its published copy, the residual.

        Args:
            fragment: Index of the fragment.
            ask: The request.
            moments: See `Capture`.
        """
        copy, published = self.snapshots[fragment], self.published[fragment]
        assert copy is not None, f"no snapshot of fragment {fragment}"
        assert published is not None, f"no published copy of fragment {fragment}"
        self._sent[fragment] = copy
        # break: residual-stays-after-capture
        taken, self.residuals[fragment] = self.residuals[fragment], ()
        if self.plan.feedback is not None:
            self.under_way[fragment, ask] = UnderWay(taken)
        # break: residual-not-sent
        return Capture(self.plan, fragment, copy, published, taken, self._clip, moments)

    @property
    def _clip(self) -> Mechanism | None:
        """How contributions are clipped here; ``None``: not at all, or only when they are sent.

        A secure sum has its own bound. An adaptive clip is applied by the shard, which counts what
        exceeds it.
        """
        is_known = self.mechanism is not None and self.mechanism.adaptive is None
        return self.mechanism if is_known and self.plan.secure is None else None

    def encoded(self, fragment: int, ask: Asking, residual: Values | None) -> None:
        """Note the residual of a captured contribution, which is now encoded."""
        if (entry := self.under_way.get((fragment, ask))) is not None:
            entry.leaves = () if residual is None else (residual,)

    def settle(self, fragment: int, ask: Asking, *, gone: bool) -> None:
        """Store the residual that remains of a contribution; see `Settle`."""
        entry = self.under_way.pop((fragment, ask))
        left = entry.taken  # also if it was never encoded, and so never sent
        # break: merged-keeps-old-residual, refused-keeps-encoding-loss
        if gone and entry.leaves is not None:
            left = entry.leaves
        self.residuals[fragment] += left  # break: residual-overwrites-later

    def kept_residual(self, fragment: int, ask: Asking | None) -> tuple[Values, ...]:
        """Return the residual for a checkpoint, as tensors whose sum counts.

        Args:
            fragment: Index of the fragment.
            ask: The request for the contribution that was made from the held version, if any. The
                next incarnation makes that contribution again if the version is still the newest,
                so the checkpoint includes the residual that it took.
        """
        entry = None if ask is None else self.under_way.get((fragment, ask))
        # break: in-flight-residual-lost
        return self.residuals[fragment] + (() if entry is None else entry.taken)

    def whole(self, fragment: int, *, published: bool) -> HostCopy:
        """Return a whole fragment, fp32 [N]: the published copy, or the current parameters."""
        if not published:
            return self.store.snapshot(self.plan.fragments[fragment])
        kept = self.published[fragment]
        assert kept is not None, f"fragment {fragment} has no published copy"
        return Copied(kept)

    def next_values(self, fragment: int, body: Body, announced: str) -> Tensor:
        """Return the next version's values: the newest copy plus the received difference.

        Args:
            fragment: Index of the fragment.
            body: The payload of the difference.
            announced: Digest of the result.

        Raises:
            MergeError: The result's digest is not the announced one.
            ProtocolError: The payload's size does not fit.
        """
        # A copy: the training thread may read the older values at any time.
        values: Tensor = self.newest(fragment).clone()
        wire = self.plan.downlink_of(fragment)
        receive(values, unpacked(body, self.plan.buffers_of(fragment, values), wire), wire)
        return self.store.prepare(verified(values, fragment, announced))

    def newest(self, fragment: int) -> Values:
        """Return the staged published copy, or the applied one if none is staged."""
        staged, published = self.staged[fragment], self.published[fragment]
        newest = published if staged is None else staged
        assert newest is not None, f"fragment {fragment} has no copy to add a difference to"
        return newest

    def show(self, averages: Sequence[Tensor] | None) -> None:
        """Write other values into the parameters of an observer; its published copies stay.

        Args:
            averages: The values of each fragment's parameters, fp32; ``None``: the published
                copies.
        """
        for number, part in enumerate(self.plan.fragments):
            values = self.published[number]
            assert values is not None, f"fragment {number} has no published copy"
            if averages is not None:
                values = values.clone()
                values[: averages[number].numel()] = averages[number]
            self.store.overwrite(part, values)

    def stage(self, fragment: int, values: Values) -> None:
        """Keep verified values for the next boundary.

        The caller must pass ``Done`` to the machine under the same lock. Otherwise the version in
        the machine's state and the staged values could differ.
        """
        self.staged[fragment] = values


def verified(values: Tensor, fragment: int, announced: str) -> Tensor:
    """Return the values if their digest is the announced one.

    Raises:
        MergeError: The digest differs.
    """
    actual = values_digest(values)
    if actual != announced:
        raise MergeError(
            f"fragment {fragment} has digest {actual}, the shard announced {announced}: the "
            "whole copy is fetched instead"
        )
    return values


_T = TypeVar("_T")
