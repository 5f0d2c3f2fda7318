"""Rounds with secure sums (rule 24). Functions of the shard's state.

```
   window over, all requested       all shared,           all delivered, or     enough shares
   learners have claimed            or time is over       window over
 claims ──────────────────▶ shares ───────────────▶ masks ───────────────▶ opening ─────▶ merging
   └──────────────────────────┴──────────────────────┴─────────────────────┴─▶ abandoned
                     fewer learners remain than the sum needs
```

A learner answers a request with a *claim* instead of a contribution. When the window is over, the
learners with claims are the *cohort*; no other learner can contribute to this round. They share the
secrets of their masks and deliver masked contributions. Those whose contributions have arrived are
the *survivors*, and they open the sum (`privacy.secure_sum` has what is computed).

A learner that drops out at any stage is notified that its contribution is abandoned. It still has
its training, and contributes to the next round. The same holds for all members if too few remain. A
masked contribution that comes late cannot be used, so requests are made only for open rounds.

The shell passes the contents of these messages on. The machine sees which learners have answered.
"""

from __future__ import annotations

from decoupled_diloco.protocol import rounds
from decoupled_diloco.protocol.leaving import waits_for_leaver
from decoupled_diloco.protocol.machine_options import Options, least_survivors
from decoupled_diloco.protocol.messages import (
    PassOn,
    SecureStep,
    SumClaim,
    SumOpening,
    SumShares,
    SyncerEffect,
)
from decoupled_diloco.protocol.rounds import patience
from decoupled_diloco.protocol.syncer_state import Ask, Round, SecureSum, SyncerState

COMPLETE_MAX = 32
"""In a larger cohort, a learner shares its secrets with some of the members only."""


TOO_FEW = "too few learners remain for the sum"


def answered(
    state: SyncerState,
    options: Options,
    now: float,
    learner: str,
    message: SumClaim | SumShares | SumOpening,
) -> list[SyncerEffect]:
    """Note a learner's answer in the present stage; an answer in another stage is late."""
    round = state.rounds.get(message.fragment)
    if round is None or round.secure is None or round.settled_at is not None:
        return []
    secure, entry = round.secure, state.fragments[message.fragment]
    ask = rounds.open_request(state, learner, message.fragment, message.ask)
    match message:
        case SumClaim(steps=steps, tokens=tokens):
            if secure.stage != "claims" or ask is None:
                return []
            if steps < 1 or tokens < 1:
                why = f"{tokens} tokens in {steps} steps"
                return rounds.close_request(state, options, now, ask, "refused", why)
            ask.announced_at, ask.steps, ask.tokens = now, steps, tokens
            round.awaited.discard(learner)
        case SumShares():
            if secure.stage != "shares" or ask is None:
                return []
        case SumOpening():
            survivors = {each.learner: each.name for each in entry.folded}
            if secure.stage != "opening" or survivors.get(learner) != message.ask:
                return []
    secure.answered.add(learner)
    return []


def deadline(round: Round) -> float | None:
    """Return when a round needs a ``Tick`` because of its secure sum."""
    secure = round.secure
    if secure is None or round.settled_at is not None:
        return None
    return secure.until if secure.is_patient else None


def progress(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Move every open round as far as it can go at this instant."""
    effects: list[SyncerEffect] = []
    for round in list(state.rounds.values()):
        stage = None
        # A round may pass several stages at once.
        while (
            round.settled_at is None
            and state.rounds.get(round.fragment) is round
            and round.secure is not None
            and stage != round.secure.stage
        ):
            stage = round.secure.stage
            effects += _progress(state, options, now, round, round.secure)
    return effects


def _waits(state: SyncerState, round: Round, secure: SecureSum) -> bool:
    """Return whether the round waits for learners that have not claimed, or not delivered.

    Beyond the delivery window, it waits for those that are not in the fragment's newest version. A
    late contribution cannot go into the next round, so the slowest learner would never take part.
    """
    if round.final or not round.delivery_over or waits_for_leaver(state, round):
        return bool(round.awaited)
    missed = round.awaited & state.fragments[round.fragment].missed
    return secure.is_patient and bool(missed)  # break: slowest-learner-left-out


def _progress(
    state: SyncerState, options: Options, now: float, round: Round, secure: SecureSum
) -> list[SyncerEffect]:
    match secure.stage:
        case "claims":
            return _claims(state, options, now, round, secure)
        case "shares":
            return _shares(state, options, now, round, secure)
        case "masks":
            return _masks(state, options, now, round, secure)
        case "opening":
            return _opening(state, options, now, round, secure)


def _claims(
    state: SyncerState, options: Options, now: float, round: Round, secure: SecureSum
) -> list[SyncerEffect]:
    """Fix the cohort when the window is over and no claim is awaited any more."""
    if round.closed_at is None or round.final:
        rounds.close_window(state, options, now, round)
    # It keeps its slot until then. Otherwise two rounds could each wait for the learners that have
    # claimed in the other one.
    if round.closed_at is None or _waits(state, round, secure):
        return _give_up(state, options, now, round, secure)
    members = _open(state, round, secure.answered)
    least = options.threshold if round.final else options.quorum
    if len(members) < least:  # break: cohort-below-threshold
        if round.final:
            return rounds.abandon(state, options, now, round, TOO_FEW)
        return _give_up(state, options, now, round, secure)
    effects = _close_others(state, options, now, round, "the cohort of its round is fixed")
    secure.stage, secure.members, secure.answered = "shares", len(members), set()
    secure.until, secure.is_patient = now + patience(options, state), True
    round.awaited = {ask.learner for ask in members}
    return [*effects, _pass_on(round, "share", members, round.close_reason)]


def _give_up(
    state: SyncerState, options: Options, now: float, round: Round, secure: SecureSum
) -> list[SyncerEffect]:
    """Abandon a round without a cohort if none can come, or none has come in time."""
    if round.final or (secure.is_patient and not rounds.is_hopeless(state, options, round)):
        return []
    return rounds.abandon(state, options, now, round, TOO_FEW)


def _shares(
    state: SyncerState, options: Options, now: float, round: Round, secure: SecureSum
) -> list[SyncerEffect]:
    """Let those that have shared mask their contributions."""
    least = _least(options, round, secure)
    members, may_answer = (_open(state, round, each) for each in (secure.answered, round.awaited))
    if least <= len(may_answer) > len(members) and secure.is_patient:
        return []
    if len(members) < least:
        return rounds.abandon(state, options, now, round, TOO_FEW)
    effects = _close_others(state, options, now, round, "it has not shared its secrets in time")
    secure.stage, secure.answered = "masks", set()
    # The window of the uploads begins now.
    window = options.overlap * state.step_seconds
    round.deliver_until, round.delivery_over = now + window, window == 0.0
    secure.until, secure.is_patient = now + patience(options, state), True
    round.awaited = {ask.learner for ask in members}
    effects += rounds.collect(state, options, now, round)
    return [*effects, _pass_on(round, "mask", members, "all members have shared, or time is over")]


def _masks(
    state: SyncerState, options: Options, now: float, round: Round, secure: SecureSum
) -> list[SyncerEffect]:
    """Fix the survivors when all have delivered, or enough have and the window is over."""
    entry = state.fragments[round.fragment]
    ends = rounds.gathered(state, options, round)
    if round.collecting:
        awaiting = rounds.awaiting_sums(state, (*entry.asks.values(), *entry.relayed))
        ends += rounds.collected(round, awaiting)
    least = _least(options, round, secure)
    waits = _waits(state, round, secure) or len(entry.delivered) < least
    if round.awaited and len(entry.present) >= least and waits:
        round.holds_slot &= not round.delivery_over
        return ends
    if len(entry.delivered) < least:
        return [*ends, *rounds.abandon(state, options, now, round, TOO_FEW)]
    reason = "its masked contribution has not arrived in time"
    ends += _close_others(state, options, now, round, reason)
    ends += rounds.drop_relayed(state, round, reason)
    secure.stage, secure.answered = "opening", set()
    secure.until, secure.is_patient = now + patience(options, state), True
    return [*ends, _pass_on(round, "open", entry.folded, "the contributions have arrived")]


def _opening(
    state: SyncerState, options: Options, now: float, round: Round, secure: SecureSum
) -> list[SyncerEffect]:
    """Merge as soon as enough survivors have sent their shares."""
    folded = state.fragments[round.fragment].folded
    least = _least(options, round, secure)
    may_answer = {
        ask.learner
        for ask in folded
        if (member := state.members.get(ask.learner)) is not None and member.connected
    } - secure.answered
    # In a large cohort each secret has its own holders, so all answers may be needed.
    lacks = secure.members > COMPLETE_MAX or len(secure.answered) < least
    if lacks and may_answer and secure.is_patient:
        return []
    if len(secure.answered) < least:
        return rounds.abandon(state, options, now, round, TOO_FEW)
    return rounds.settle_round(state, options, now, round)


def _least(options: Options, round: Round, secure: SecureSum) -> int:
    """Return how many contributions the sum needs: a quorum, and enough to open it."""
    least = least_survivors(options.threshold, secure.members)
    return least if round.final else max(options.quorum, least)


def _open(state: SyncerState, round: Round, learners: set[str]) -> list[Ask]:
    """Return the open requests of these learners, in the order of their names."""
    asks = state.fragments[round.fragment].asks
    return [asks[learner] for learner in sorted(learners & asks.keys())]


def _close_others(
    state: SyncerState, options: Options, now: float, round: Round, reason: str
) -> list[SyncerEffect]:
    """Close the requests of learners that have not answered: they contribute to a later round."""
    assert round.secure is not None
    secure, effects = round.secure, list[SyncerEffect]()
    for learner, ask in sorted(state.fragments[round.fragment].asks.items()):
        if learner not in secure.answered:
            effects += rounds.close_request(
                state, options, now, ask, "refused", reason, "abandoned"
            )
    return effects


def _pass_on(round: Round, step: SecureStep, asks: list[Ask], why: str) -> PassOn:
    members = tuple(sorted((ask.learner, ask.name) for ask in asks))
    return PassOn(round.fragment, round.number, step, members, why)
