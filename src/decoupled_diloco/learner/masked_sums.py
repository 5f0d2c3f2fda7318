"""A learner's part in secure sums (rule 24): it answers each step of a round.

The background's event loop runs this module; keys, shares and masks are computed in its worker. The
texts of the steps stay here: the machine and the tape do not receive them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from decoupled_diloco.config.parties import OwnParty, Parties, PartySettings
from decoupled_diloco.errors import ConfigError, ProtocolError
from decoupled_diloco.learner.exchange import Capture
from decoupled_diloco.learner.shared import Context
from decoupled_diloco.merge.blocks import norm_of
from decoupled_diloco.merge.fixed_point import quantize, write
from decoupled_diloco.privacy.keys import require_cryptography
from decoupled_diloco.privacy.secure_sum import (
    Cohort,
    SumMember,
    claim_text,
    read_cohort,
    read_names,
    read_shares,
    shares_text,
    sum_name,
)
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking, SecureStep
from decoupled_diloco.runtime import runtime

LEAST_PARTIES = 2
"""The least number of parties in a sum, if their file does not say otherwise."""


@dataclass
class OwnSum:
    """A secure sum in which this learner takes part.

    Attributes:
        order: The order to contribute.
        capture: The contribution; ``None`` once it is masked.
        member: This learner's secrets.
        cohort: The cohort, once it is known.
        texts: What each step brought.
    """

    order: messages.SendBody
    capture: Capture | None
    member: SumMember
    texts: dict[SecureStep, str]
    cohort: Cohort | None = None


def require_for_sums(party: OwnParty | None, is_secure: bool) -> None:
    """Check that this learner can take part in secure sums, or that its parties need none.

    Args:
        party: The learner's party, from its own files.
        is_secure: Whether the run has secure sums.

    Raises:
        ConfigError: The run has none although the parties require them; the package `cryptography`
            or the party's private key is missing.
    """
    if not is_secure:
        if party is not None and party.parties.least_parties is not None:
            raise ConfigError(
                f"least_parties={party.parties.least_parties} in this learner's parties.toml needs "
                "secure sums, but the syncer's run has none: set secure_sums=true in [privacy]"
            )
        return
    require_cryptography()
    if party is not None and party.key is None:
        raise ConfigError(
            f"secure_sums=true in [privacy] needs the private key of party "
            f"{party.settings.name!r}, because the other parties verify what this learner signs: "
            "pass it as dd.PartyFiles(key=…), --party-key or party_key in [learner]"
        )


class PinnedParties:
    """The parties of a learner's own file; see `privacy.secure_sum.Pins`."""

    def __init__(self, parties: Parties) -> None:
        self._parties = parties

    @property
    def least(self) -> int:
        """The least number of parties in a sum."""
        return self._parties.least_parties or LEAST_PARTIES

    def _find(self, learner: str) -> PartySettings:
        party = self._parties.find(learner)
        if party is None:
            raise ProtocolError(f"{learner} belongs to no party in this learner's parties.toml")
        return party

    def party(self, learner: str) -> str:
        """Return the name of a learner's party."""
        return self._find(learner).name

    def verify(self, learner: str, message: bytes, signature: bytes) -> None:
        """Check a learner's signature."""
        party = self._find(learner)
        if not party.key.verifies(signature, message):
            raise ProtocolError(
                f"the keys of {learner} are not signed by party {party.name}: the syncer may have "
                "swapped them"
            )


class MaskedSums:
    """The sums in progress: at most one for each fragment, so an older one is forgotten.

    Args:
        context: The background around it.
    """

    def __init__(self, context: Context) -> None:
        self._here = context
        self._sums: dict[int, OwnSum] = {}

    def receive(self, message: messages.SumStep) -> messages.SumStep:
        """Keep the text of a step, and return the message without it."""
        found = self._find(message.fragment, message.ask)
        if found is not None:
            found.texts[message.step] = message.text
        return messages.SumStep(message.fragment, message.ask, message.step)

    async def begin(self, order: messages.SendBody, capture: Capture) -> None:
        """Take part in a sum: send fresh public keys."""
        machine = self._here.machine

        party: OwnParty | None = self._here.identity.party
        base = machine.state.fragments[order.fragment].seals[order.base][0]

        def make() -> tuple[SumMember, str]:
            member = SumMember(machine.learner, machine.options.threshold, runtime().random_bytes)
            if party is not None:
                member.signer, member.pins = party.key, PinnedParties(party.parties)
            name = sum_name(self._here.run_id, order.fragment, str(order.base), base)
            return member, claim_text(member.claim(name, order.steps, order.tokens))

        member, keys = await self._here.in_worker(make)
        self._sums[order.fragment] = OwnSum(order, capture, member, {})
        claim = messages.SumClaim(order.fragment, order.ask, order.steps, order.tokens, keys)
        self._here.send(order.shard, claim)

    async def take(self, step: messages.TakeStep) -> Tensor | None:
        """Answer a step; return the masked payload of the step ``"mask"``, uint8 [B].

        Raises:
            ProtocolError: The step is not valid, or the sum is forgotten.
            MergeError: The contribution is not finite.
        """
        found = self._required(step)
        text = found.texts.pop(step.step, "")
        match step.step:
            case "share":
                shares = await self._here.in_worker(lambda: _share(found, text))
                self._send(step, messages.SumShares, shares)
            case "mask":
                return await self._mask(found, text)
            case "open":
                shares = await self._here.in_worker(lambda: _open(found, text))
                self._send(step, messages.SumOpening, shares)
        return None

    async def _mask(self, found: OwnSum, text: str) -> Tensor:
        cohort, capture = found.cohort, found.capture
        if cohort is None or capture is None:
            raise ProtocolError("shares were sent before the cohort, or twice for one sum")
        found.capture = None  # once it is masked, the tensors are not needed any more
        d, base = await self._here.bodies.change_of(capture)
        plan, segments = capture.plan, capture.plan.segments(capture.fragment)
        form, options = plan.secure, self._here.machine.options
        assert form is not None
        if len(cohort.bounds) != len(segments):
            raise ProtocolError(f"the cohort has {len(cohort.bounds)} bounds, not {len(segments)}")
        mechanism = self._here.tensors.mechanism
        if mechanism is not None and mechanism.adaptive is None:
            limit = mechanism.clip_of(d.numel())
            if cohort.bounds != (limit,):  # break: other-bound-accepted
                raise ProtocolError(
                    f"the cohort has bounds={cohort.bounds}, but [privacy.dp] has clip={limit}"
                )

        def masked() -> Tensor:
            weights = cohort.weights(plan.weight, options.steps_counted, options.quotas)
            share = weights[found.member.learner] / max(weights.values())
            if not share > 0:
                raise ProtocolError("the other weights of the cohort leave none for this learner")
            private = mechanism is not None
            integers = quantize(form, segments, d, base, share, cohort.bounds, private=private)
            if mechanism is not None:
                needed, random = cohort.needed, runtime().random_bytes
                mechanism.add_share_(integers.elements, form.one, needed, random)
                if mechanism.adaptive is not None:
                    within = norm_of(d) <= cohort.bounds[0]
                    count = mechanism.count_share(within, d.numel(), needed, random)
                    integers.scalars[1] = count
            return write(form, found.member.mask(read_shares(text), integers))

        return await self._here.in_worker(masked)

    def path(self, step: messages.TakeStep) -> str:
        """Return the path of the payload of a step.

        Raises:
            ProtocolError: The sum is forgotten.
        """
        return self._required(step).order.path

    def _required(self, step: messages.TakeStep) -> OwnSum:
        found = self._find(step.fragment, step.ask)
        if found is None:
            raise ProtocolError("the secrets of this sum are forgotten")
        return found

    def _send(
        self,
        step: messages.TakeStep,
        kind: type[messages.SumShares | messages.SumOpening],
        shares: str,
    ) -> None:
        self._here.send(step.shard, kind(step.fragment, step.ask, shares))

    def _find(self, fragment: int, ask: Asking) -> OwnSum | None:
        found = self._sums.get(fragment)
        return found if found is not None and found.order.ask == ask else None


def _share(found: OwnSum, text: str) -> str:
    cohort = read_cohort(text)
    shares = found.member.share(cohort)
    found.cohort = cohort
    return shares_text(shares)


def _open(found: OwnSum, text: str) -> str:
    return shares_text(found.member.open(read_names(text)))
