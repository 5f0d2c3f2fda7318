"""The tensors of one learner: published copies, staged copies, snapshots.

Pure arithmetic on the orders of `LearnerMachine`. The training thread calls `snapshot` and `apply`
at step boundaries; the background calls the rest. No tensor that is kept here is ever written to
again: whatever holds a reference may read it while a newer one takes its place.

Host memory: 4 bytes per parameter for the published copies, with error feedback 4 more for the
residuals, and a few fragments in flight.

*Error feedback* (rule 19). What a codec leaves out of a contribution, its *residual*, goes with the
fragment's next one. A contribution that is captured takes the residual along. When it is merged, or
may be, what its own body lacks is left; when it is merged nowhere, what it has taken is left again.
While one is under way, the next one has nothing of it, so that no part is ever in two bodies. It
counts as under way until its steps have left the parameters: a checkpoint that holds these steps
holds the residual from before them.

Shapes: N elements of a fragment; B bytes of a body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

from decoupled_diloco.errors import MergeError
from decoupled_diloco.learner.parameter_store import (
    Copied,
    HostCopy,
    ParameterStore,
    Rounded,
    Values,
)
from decoupled_diloco.merge import Body, body_digest, contribution, receive, values_digest
from decoupled_diloco.merge.packing import packed, unpacked
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.protocol.messages import Asking, ForgetResidual, SendBody, SendCopy, Settle
from decoupled_diloco.shell.driver import at_decision

Mode = Literal["overwrite", "carry", "rebase", "blend"]


@dataclass(frozen=True)
class Capture:
    """A snapshot together with the published copy it was trained from: enough to encode later."""

    plan: MergePlan
    fragment: int
    copy: HostCopy
    published: Values
    residuals: tuple[Values, ...] = ()

    def packed(self, body: Tensor, codec_name: str) -> Tensor:
        """An encoded contribution without the buffers that are as in the published copy."""
        buffers = self.plan.buffers_of(self.fragment, self.published)
        return packed(body, buffers, self.plan.uplink_of(self.fragment, codec_name))

    def encode(self, codec_name: str) -> tuple[Tensor, str, Tensor | None]:
        """The contribution d = θ − cast(Θ̂) in the codec that the pull has named (rule 6).

        Returns:
            The body, uint8 [B], its digest, and with error feedback its residual, fp32 [N].

        Raises:
            ConfigError: there is no such codec here.
        """
        part = self.plan.fragments[self.fragment]
        d = contribution(part, self.plan.layout, self.copy.values(), self.published)
        uplink = self.plan.uplink_of(self.fragment, codec_name)
        body, residual = self.plan.encode(d, self.residuals, uplink)
        return body, body_digest(body, uplink), residual


@dataclass
class UnderWay:
    """What a contribution has taken of the residuals, and once it is encoded, what it leaves."""

    taken: tuple[Values, ...]
    leaves: Values | None = None


class LearnerTensors:
    """The tensors of one learner.

    Args:
        plan: The run's layout, cut and codecs.
        store: The learner's parameters.
        blend_alpha: α of ``alignment="blend"``: the share of the learner's own parameters.
    """

    def __init__(self, plan: MergePlan, store: ParameterStore, blend_alpha: float = 0.5) -> None:
        self.plan = plan
        self.store = store
        self.blend_alpha = blend_alpha
        count = len(plan.fragments)
        self.published: list[Values | None] = [None] * count
        self.staged: list[Values | None] = [None] * count
        self.snapshots: list[HostCopy | None] = [None] * count
        self.residuals: list[tuple[Values, ...]] = [()] * count
        self.under_way: dict[tuple[int, Asking], UnderWay] = {}
        self._sent: list[HostCopy | None] = [None] * count

    @at_decision(SendBody)
    def _capture(self, order: SendBody) -> Capture:
        return self.capture(order.fragment, order.ask)

    @at_decision(SendCopy)
    def _copy(self, order: SendCopy) -> HostCopy:
        return self.whole(order.fragment, published=order.version is not None)

    @at_decision(Settle)
    def _settle(self, order: Settle) -> None:
        self.settle(order.fragment, order.ask, gone=order.gone)

    @at_decision(ForgetResidual)
    def _forget(self, order: ForgetResidual) -> None:
        self.residuals[order.fragment] = ()

    def snapshot(self, fragment: int) -> None:
        """Copies a fragment's parameters as they are now."""
        self.snapshots[fragment] = self.store.snapshot(self.plan.fragments[fragment])

    def apply(self, fragment: int, mode: Mode) -> None:
        """Takes the staged published copy into the parameters (rule 7)."""
        part, new = self.plan.fragments[fragment], self.staged[fragment]
        if new is None:
            new = self.published[fragment]
        assert new is not None, f"nothing is staged or held of fragment {fragment}"
        match mode:
            case "overwrite":
                self.store.overwrite(part, new)
            case "blend":
                self.store.combine(part, new, None, self.blend_alpha)
            case "carry":
                sent = self._sent[fragment]
                assert sent is not None, f"nothing of fragment {fragment} was sent"
                self.store.combine(part, new, sent, 1.0)
            case "rebase":
                old = self.published[fragment]
                assert old is not None
                self.store.combine(part, new, Rounded(part, self.plan.layout, old), 1.0)
        # break: applied-copy-not-published
        self.published[fragment], self.staged[fragment] = new, None
        self.snapshots[fragment] = self._sent[fragment] = None

    def capture(self, fragment: int, ask: Asking) -> Capture:
        """What a pull is answered with: the newest snapshot, its published copy, the residual."""
        copy, published = self.snapshots[fragment], self.published[fragment]
        assert copy is not None, f"no snapshot of fragment {fragment}"
        assert published is not None, f"no published copy of fragment {fragment}"
        self._sent[fragment] = copy
        # break: residual-stays-after-capture
        taken, self.residuals[fragment] = self.residuals[fragment], ()
        if self.plan.feedback is not None:
            self.under_way[fragment, ask] = UnderWay(taken)
        return Capture(self.plan, fragment, copy, published, taken)  # break: residual-not-sent

    def encoded(self, fragment: int, ask: Asking, residual: Values | None) -> None:
        """A captured contribution is encoded, and leaves this."""
        if (entry := self.under_way.get((fragment, ask))) is not None:
            entry.leaves = residual

    def settle(self, fragment: int, ask: Asking, *, gone: bool) -> None:
        """What a contribution leaves is left: see `Settle`."""
        entry = self.under_way.pop((fragment, ask))
        left = entry.taken  # also of what was never encoded, and so never sent
        # break: merged-keeps-old-residual, refused-keeps-encoding-loss
        if gone and entry.leaves is not None:
            left = (entry.leaves,)
        self.residuals[fragment] += left  # break: residual-overwrites-later

    def kept_residual(self, fragment: int, ask: Asking | None) -> tuple[Values, ...]:
        """What a checkpoint keeps, its tensors to be added up.

        Args:
            ask: Of what was made from the version that is held. A next life that still finds that
                version makes it again, with all that it has taken.
        """
        entry = None if ask is None else self.under_way.get((fragment, ask))
        # break: in-flight-residual-lost
        return self.residuals[fragment] + (() if entry is None else entry.taken)

    def whole(self, fragment: int, *, published: bool) -> HostCopy:
        """A whole fragment, fp32 [N]: the published copy, or the parameters as they are now."""
        if not published:
            return self.store.snapshot(self.plan.fragments[fragment])
        kept = self.published[fragment]
        assert kept is not None, f"fragment {fragment} has no published copy"
        return Copied(kept)

    def next_values(self, fragment: int, body: Body, announced: str) -> Tensor:
        """The next version's values: what is here, staged or published, plus the difference.

        Raises:
            MergeError: the result's digest is not the announced one.
            ProtocolError: the body's size does not fit.
        """
        values: Tensor = self.newest(fragment).clone()
        wire = self.plan.downlink_of(fragment)
        receive(values, unpacked(body, self.plan.buffers_of(fragment, values), wire), wire)
        return self.store.prepare(verified(values, fragment, announced))

    def newest(self, fragment: int) -> Values:
        """The newest published copy that is here, staged or not."""
        staged, published = self.staged[fragment], self.published[fragment]
        newest = published if staged is None else staged
        assert newest is not None, f"fragment {fragment} has no copy to add a difference to"
        return newest

    def stage(self, fragment: int, values: Values) -> None:
        """Keeps verified values for the next boundary.

        Called together with telling the machine ``Done``, under the same lock, so that what is
        staged here is always the version that the machine thinks it is.
        """
        self.staged[fragment] = values


def verified(values: Tensor, fragment: int, announced: str) -> Tensor:
    """The values, if their digest is the announced one.

    Raises:
        MergeError: it is not.
    """
    actual = values_digest(values)
    if actual != announced:
        raise MergeError(
            f"fragment {fragment} has digest {actual}, the shard announced {announced}: the "
            "whole copy is fetched instead"
        )
    return values


_T = TypeVar("_T")
