"""Compute error feedback independently: values that codecs leave out are sent once and not lost.

For each fragment of each learner, the residual is computed again in the simplest way, from the
captured parameters and the shards' messages. Every payload must encode the contribution plus
exactly this residual. The code's own orders about residuals are not trusted: a received message
must justify each of them.

For multi-rank learners only the orders are checked, because no process has a whole fragment.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from decoupled_diloco.learner.exchange import Capture
from decoupled_diloco.merge import body_digest, codec, contribution
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Apply,
    Asking,
    Began,
    BodyEncoded,
    ForgetResidual,
    Outcome,
    Pull,
    Receipt,
    Received,
    Relabel,
    RunOver,
    SendBody,
    Settle,
    Version,
    Welcome,
    shard_of,
)

if TYPE_CHECKING:
    from decoupled_diloco_lab.simulate.hosts import CheckpointId, LearnerHost
    from decoupled_diloco_lab.simulate.system import System


@dataclass
class Sent:
    """A contribution, the residual that it took, and the residual that it leaves.

    Attributes:
        base: The version that it was made from.
        codec: The codec of its payload.
        taken: The residual that was added to it.
        changes: The captured change, without the residual.
        leaves: What the codec left out.
        lost: Its outcome was lost with the connection.
        accepted: It was accepted while its steps were still in the parameters, which are based on
            `base` until a newer copy is applied.
    """

    base: Version
    codec: str
    taken: tuple[Tensor, ...]
    changes: Tensor | None = None
    leaves: tuple[Tensor, ...] | None = None
    lost: bool = False
    accepted: bool = False


@dataclass
class Local:
    """One fragment at one learner: its residual and the contributions in flight.

    Attributes:
        left: The terms of its residual. The order matters because sums are rounded.
        sent: Contributions that are not settled yet.
        held: The version that its parameters are based on.
        restored: Whether it comes from the checkpoint of an earlier incarnation.
        made: Whether a contribution from the held version was sent and may be merged.
    """

    left: tuple[Tensor, ...] = ()
    sent: dict[Asking, Sent] = field(default_factory=dict)
    held: Version | None = None
    restored: bool = False
    made: bool = False

    @property
    def again(self) -> tuple[Tensor, ...]:
        """The residual if the contributions from the held version are made again."""
        found = self.left
        for sent in self.sent.values():
            if sent.base == self.held:
                found += sent.taken
        return (functools.reduce(operator.add, found),) if found else ()


class Residuals:
    """Checks the learners of a system. It raises `AssertionError` at a violation."""

    def __init__(self, system: System) -> None:
        self.kept: dict[tuple[str, CheckpointId | None], list[tuple[Tensor, ...]]] = {}
        self.lives: dict[str, tuple[int, list[Local]]] = {}
        self.resumed(system)

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Check one event that a state machine has handled."""
        host = self.system.learners.get(process)
        if host is None:
            return
        if not host.machine.options.error_feedback:
            assert not any(isinstance(each, Settle | ForgetResidual) for each in effects)
            return
        fragments = self._fragments(host)
        if isinstance(event, Began):
            for kept in event.kept:
                local = fragments[kept.fragment]
                local.left = self.kept[process, host.loaded][kept.fragment]
                local.held, local.restored = kept.version, True
        elif isinstance(event, BodyEncoded):
            self._encoded(host, fragments[event.fragment], event)
        for number, effect in enumerate(effects):
            self._ordered(fragments, event, effect, effects[:number])
        if any(isinstance(effect, RunOver) for effect in effects):
            return  # no contribution follows that could send a residual
        for fragment, ask in _answered(event, effects, fragments, host.machine.options.shards):
            assert ask not in fragments[fragment].sent, (
                f"{process}: {ask} of {fragment} is not settled"
            )

    def resumed(self, system: System) -> None:
        """Follow another system, which starts from checkpoints of the previous one, if any."""
        self.system = system
        self.lives = {}
        system.recorders.append(self)
        system.on_capture = self.captured

    def _fragments(self, host: LearnerHost) -> list[Local]:
        life, fragments = self.lives.get(host.name, (-1, []))
        if life != host.life:
            fragments = [Local() for _ in host.machine.state.fragments]
            self.lives[host.name] = (host.life, fragments)
        return fragments

    def checkpoint(self, process: str, taken: CheckpointId) -> None:
        """Record the residuals in a learner's checkpoint, which it writes now."""
        host = self.system.learners[process]
        self.kept[process, taken] = [local.again for local in self._fragments(host)]

    def captured(self, host: LearnerHost, order: SendBody, capture: Capture) -> None:
        """Record the change that a learner is about to encode."""
        if host.machine.options.error_feedback:
            part, layout = capture.plan.fragments[order.fragment], capture.plan.layout
            sent = self._fragments(host)[order.fragment].sent.get(order.ask)
            if sent is not None:
                sent.changes = contribution(part, layout, capture.copy.values(), capture.published)
                if not capture.plan.sends_moments(order.base.counter):
                    sent.changes[capture.plan.moments_start(order.fragment) :] = math.nan

    def _encoded(self, host: LearnerHost, local: Local, event: BodyEncoded) -> None:
        sent = local.sent.get(event.ask)
        if sent is None or sent.changes is None:
            return
        plan = host.tensors.plan
        assert plan.feedback is not None
        u = sent.changes.clone()
        for each in sent.taken:
            u += plan.feedback * each
        uplink = plan.codec_of(event.fragment, codec(sent.codec))
        body = uplink.encode(u)
        text = f"{host.name}: {event.ask} of fragment {event.fragment} has a wrong residual"
        assert body_digest(body, uplink) == event.digest, text
        left = u - uplink.decode(body, len(u))
        left[plan.moments_start(event.fragment) :] = 0.0  # moments are values, not changes
        sent.leaves = () if uplink.is_exact else (left,)

    def _ordered(
        self, fragments: list[Local], event: Any, effect: Any, before: Sequence[Any]
    ) -> None:
        match effect:
            case SendBody(fragment=fragment, ask=ask, base=base, codec=name):
                local = fragments[fragment]
                local.sent[ask], local.left, local.made = Sent(base, name, local.left), (), True
            case Settle(fragment, ask, gone):
                local = fragments[fragment]
                applied = any(isinstance(e, Apply) and e.fragment == fragment for e in before)
                assert _may_settle(event, effect, local, applied), f"{effect} for {event}"
                sent = local.sent.pop(ask)
                local.made &= gone or sent.base != local.held
                unsent = sent.changes is not None and sent.leaves is None
                local.left += (sent.leaves or ()) if gone and not unsent else sent.taken
            case ForgetResidual(fragment):
                assert not fragments[fragment].left, f"{effect} for {event}"
            case Apply(fragment, version):
                local = fragments[fragment]
                if local.restored and not local.made and not self.system.options.devices:
                    local.left = ()
                local.held, local.restored, local.made = version, False, False
            case Relabel(fragment, version, staged=False):
                fragments[fragment].held = version


def _answered(
    event: Any, effects: Sequence[Any], fragments: list[Local], shards: int
) -> list[tuple[int, Asking]]:
    """Return the contributions that must be settled with this event."""
    applied = [effect.fragment for effect in effects if isinstance(effect, Apply)]
    found = [
        (p, ask)
        for p in applied
        for ask, sent in fragments[p].sent.items()
        if sent.lost or sent.accepted
    ]
    if not isinstance(event, Received) or event.peer == COORDINATOR:
        return found
    match event.message:
        case Outcome(fragment=fragment, ask=ask, verdict=verdict):
            local = fragments[fragment]
            outstanding = local.sent.get(ask)
            if verdict == "accepted" and outstanding and outstanding.base == local.held:
                outstanding.accepted = True
            else:
                found.append((fragment, ask))
        case Receipt(fragment=fragment, ask=ask):
            local = fragments[fragment]
            outstanding = local.sent.get(ask)
            if outstanding and outstanding.base == local.held:
                outstanding.accepted = True
            else:
                found.append((fragment, ask))
        case Welcome(asks=asks):
            for p in range(shard_of(event.peer), len(fragments), shards):
                local = fragments[p]
                for ask, sent in local.sent.items():
                    sent.lost = ask not in asks
                    if sent.lost and sent.base != local.held:
                        found.append((p, ask))
    return found


def _may_settle(event: Any, order: Settle, local: Local, applied: bool) -> bool:
    """Whether a message justifies the order; ``applied``: a copy was just applied."""
    sent = local.sent[order.ask]
    if not isinstance(event, Received):  # a boundary: its steps are no longer in the parameters
        return order.gone and (sent.lost or sent.accepted) and applied
    match event.message:
        case Outcome(ask=ask, verdict=verdict):
            if verdict == "accepted":
                return ask == order.ask and order.gone and sent.base != local.held
            return ask == order.ask and not order.gone
        case Receipt(ask=ask):
            return ask == order.ask and order.gone and sent.base != local.held
        case Welcome(asks=asks):
            return order.gone and order.ask not in asks and sent.base != local.held
        case Pull(base=base):  # the shard has no contribution that was made from this version
            return not order.gone and sent.base == base
        case _:  # a new term: contributions to the shard's earlier incarnation are lost
            return not order.gone
