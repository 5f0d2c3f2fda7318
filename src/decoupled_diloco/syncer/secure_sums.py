"""A shard's part in secure sums (rule 24): it passes the members' messages on, and opens the sum.

The texts of the messages stay here: the machine and the tape do not receive them. Everything here
is lost with the process, and so are the rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from decoupled_diloco.privacy.secure_sum import (
    Claim,
    Cohort,
    Opening,
    names_text,
    read_claim,
    read_shares,
    shares_text,
    sum_name,
)
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking
from decoupled_diloco.protocol.syncer_machine import SyncerMachine
from decoupled_diloco.shell.driver import executes
from decoupled_diloco.syncer.shard_tensors import ShardTensors

FromMember = messages.SumClaim | messages.SumShares | messages.SumOpening


@dataclass
class SumInProgress:
    """What a shard has received for one fragment's round.

    Attributes:
        claims: The claims, by request: a claim of an earlier request does not count.
        shares: The encrypted shares, by sender and holder.
        answers: The shares that open the sum, by sender and owner.
    """

    claims: dict[Asking, Claim] = field(default_factory=dict)
    cohort: Cohort | None = None
    shares: dict[str, dict[str, bytes]] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()
    answers: dict[str, dict[str, bytes]] = field(default_factory=dict)


class SecureSums:
    """Keeps the messages of members for each other.

    Args:
        machine: The shard's machine.
        tensors: The shard's tensors.
        run: Id of the run.
        send: Sends a message to a learner.
    """

    def __init__(
        self,
        machine: SyncerMachine,
        tensors: ShardTensors,
        run: str,
        send: Callable[[str, messages.Message], None],
    ) -> None:
        self._machine = machine
        self._tensors = tensors
        self._run = run
        self._send = send
        self._sums: dict[int, SumInProgress] = {}

    def receive(self, learner: str, message: FromMember) -> FromMember:
        """Keep the text of a message, and return the message without it.

        Raises:
            ProtocolError: The text is malformed.
        """
        entry = self._machine.state.fragments.get(message.fragment)
        asked = None if entry is None else entry.asks.get(learner)
        if isinstance(message, messages.SumClaim):
            # Only an answer to the learner's own open request is kept, so memory is bounded.
            is_own = asked is not None and asked.name == message.ask
            if is_own and min(message.steps, message.tokens):
                found = self._sums.setdefault(message.fragment, SumInProgress())
                claim = read_claim(learner, message.steps, message.tokens, message.keys)
                if found.cohort is None:  # a later claim would not be in it
                    found.claims[message.ask] = claim
            return replace(message, keys="")
        found = self._sums.get(message.fragment, SumInProgress())
        match message:
            case messages.SumShares(shares=text):
                if self._is_member(found, learner, message.ask) and not found.shared:
                    found.shares[learner] = read_shares(text)
            case messages.SumOpening(shares=text):
                if self._is_member(found, learner, message.ask) and learner in found.survivors:
                    found.answers[learner] = read_shares(text)
        return replace(message, shares="")

    @staticmethod
    def _is_member(found: SumInProgress, learner: str, ask: Asking) -> bool:
        claim = found.claims.get(ask)
        members = () if found.cohort is None else found.cohort.names
        return claim is not None and claim.learner == learner and learner in members

    @executes(messages.PassOn)
    def pass_on(self, order: messages.PassOn) -> None:
        """Send each member what it needs for the next step."""
        round = self._machine.state.rounds.get(order.fragment)
        if round is None or round.number != order.round:
            return  # it was abandoned meanwhile
        found = self._sums[order.fragment]
        names = tuple(learner for learner, _ in order.members)
        match order.step:
            case "share":
                cohort = found.cohort = self._cohort(order, round.base, found)
                texts = dict.fromkeys(names, cohort.to_text())
            case "mask":
                found.shared = names
                texts = {name: shares_text(_for_member(found, name)) for name in names}
            case "open":
                found.survivors = names
                texts = dict.fromkeys(names, names_text(names))
        for learner, ask in order.members:
            step = messages.SumStep(order.fragment, ask, order.step, texts[learner])
            self._send(learner, step)

    def _cohort(
        self, order: messages.PassOn, base: messages.Version, found: SumInProgress
    ) -> Cohort:
        digest = self._machine.state.fragments[order.fragment].digest
        return Cohort(
            sum_name(self._run, order.fragment, str(base), digest),
            tuple(found.claims[ask] for _, ask in order.members),
            self._tensors.bounds(order.fragment),
            self._machine.options.threshold,
        )

    def opening(self, fragment: int) -> Opening:
        """Return what opens a fragment's sum, and forget the sum."""
        found = self._sums.pop(fragment)
        assert found.cohort is not None, "a sum is merged before its cohort is fixed"
        options = self._machine.options
        limits = (options.steps_counted, options.quotas)
        return Opening(found.cohort, found.shared, found.survivors, found.answers, *limits)

    def forget(self, fragment: int) -> None:
        """Forget an abandoned sum."""
        self._sums.pop(fragment, None)


def _for_member(found: SumInProgress, member: str) -> dict[str, bytes]:
    """Return the shares for a member from those neighbors that have shared."""
    return {
        sender: found.shares[sender][member]
        for sender in found.shared
        if sender != member and member in found.shares.get(sender, {})
    }
