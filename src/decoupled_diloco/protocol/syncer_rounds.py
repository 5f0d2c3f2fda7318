"""Rounds of a shard (rules 2 to 4): opening, asking, folding, settling. Functions of its state.

```
        tick, queue           quorum, window             all answered          worker
 (due) ────────────▶ gathering ─────────────▶ uploading ─────────────▶ merging ───────▶ merged
                         │ everybody fell out     │ too few, no weight    │ failed
                         └────────────────────────┴──────────▶ abandoned ◀┘ (due again)
```
Bodies are folded from the moment they arrive, in any of the first two states.
"""

from __future__ import annotations

from decoupled_diloco.protocol.effects import (
    Abandon,
    Drop,
    Expect,
    Fold,
    Merge,
    Note,
    Send,
    SyncerEffect,
    Unexpect,
)
from decoupled_diloco.protocol.events import BodyArrived, BodySpoiled
from decoupled_diloco.protocol.gate import norm_limit, remember
from decoupled_diloco.protocol.leaving import given_up, leaver_of, was_asked
from decoupled_diloco.protocol.membership import Member
from decoupled_diloco.protocol.messages import Decline, Outcome, Pull, Verdict, Version
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.quorum import window_decision
from decoupled_diloco.protocol.rounds import Ask, AskState, Round
from decoupled_diloco.protocol.syncer_state import SyncerState

SWEEP_TRIES_MAX = 3
"""How often the closing round of a fragment is tried before its learners' rest is given up."""

CLOSING_SECONDS = 60.0
"""The closing round leaves this much more time: to take the newest copy first, and because nobody
trains meanwhile, so that haste gains nothing."""

SOFT_DEADLINES_MISSED_MAX = 4
"""Who has missed a fragment so often is waited for: a learner whose step takes longer than H steps
of the fastest would otherwise always be late, and the fragment never hear it."""

SOFT_DEADLINE_SECONDS_MIN = 1.0
"""A round with its quorum delivered gives the others at least this long."""


def note_due(state: SyncerState, options: Options, owned: frozenset[int], since: int) -> None:
    """Queues what the ticks after ``since`` make due, and what an abandoned round left due.

    A clock that jumps over several periods makes every fragment due once, at its latest tick.
    """
    due = [(fragment, state.clock) for fragment in sorted(state.again)]
    for tick in range(max(since, state.clock - options.period) + 1, state.clock + 1):
        due += [(fragment, tick) for fragment in options.due(tick) if fragment in owned]
    for fragment, tick in due:
        if fragment not in state.rounds and fragment not in state.queue:
            state.queue[fragment] = tick
    state.again.clear()


def open_due(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Opens queued rounds while the limit of rule 2 allows."""
    effects: list[SyncerEffect] = []
    while state.queue and len(state.rounds) < options.open_rounds_max:
        fragment, tick = next(iter(state.queue.items()))
        del state.queue[fragment]
        effects += _open(state, options, now, fragment, tick, final=False)
    while state.closing and len(state.rounds) < options.open_rounds_max:
        waiting = sorted(state.closing - state.rounds.keys())
        if not waiting:
            break
        effects += _open(state, options, now, waiting[0], state.clock, final=True)
    return effects


def _open(
    state: SyncerState, options: Options, now: float, fragment: int, tick: int, *, final: bool
) -> list[SyncerEffect]:
    version = state.fragments[fragment].version
    assert version is not None
    state.rounds_opened += 1
    round = state.rounds[fragment] = Round(
        number=state.rounds_opened,
        fragment=fragment,
        tick=tick,
        base=version,
        opened_at=now,
        previous_tick_at=state.previous_tick_at,
        grace=state.timing.window(
            options.overlap,
            0.0 if final else options.grace_margin,
            state.step_seconds,
        ),
        final=final,
        leaver=leaver_of(state, fragment),
    )
    why = "the closing sweep" if final else f"fragment {fragment} is due since step {tick}"
    if round.leaver and not final:
        why = f"{round.leaver} is about to go: everybody is asked"
    return [round.opened(why), *ask_qualified(state, options, now, round)]


def ask_qualified(
    state: SyncerState, options: Options, now: float, round: Round
) -> list[SyncerEffect]:
    """Pulls from every learner that qualifies and was not asked yet."""
    effects: list[SyncerEffect] = []
    if round.closed_at is not None:
        return effects
    for member in state.members.values():
        effects += ask_if_qualified(state, options, now, round, member)
    return effects


def ask_if_qualified(
    state: SyncerState, options: Options, now: float, round: Round, member: Member
) -> list[SyncerEffect]:
    """Pulls from one learner, the moment it qualifies (rule 3).

    The closing sweep also asks who connects anew while the others' bodies are on their way.
    """
    asked = round.asks.get(member.learner)
    over = round.settled_at if round.final else round.closed_at
    if over is not None or not member.connected:
        return []
    if asked is not None and asked.state != "gone":
        return []
    why = _qualifies(state, options, round, member)
    if why is None:
        return []
    seconds = member.upload.deadline_seconds(member.step_seconds)
    if round.final:
        seconds += CLOSING_SECONDS
    state.asks += 1
    path = f"/up/{state.term}/{round.number}/{member.learner}/{member.epoch}/{state.asks}"
    missed = state.fragments[round.fragment].missed.get(member.learner, 0)
    ask = Ask(
        member.learner,
        member.epoch,
        state.asks,
        path,
        now,
        now + seconds,
        patient=missed >= SOFT_DEADLINES_MISSED_MAX,
    )
    round.add(ask, stepping=member.reported_at is not None)
    was_asked(member, round.fragment)
    if round.quorum_at is None and round.qualified >= options.quorum:
        round.quorum_at, round.quorum_learner = now, member.learner
        state.timing.quorum.update(now - round.opened_at)
    pull = Pull(
        round=round.number,
        fragment=round.fragment,
        ask=state.asks,
        base=round.base,
        tick=round.tick,
        codec=options.uplink_codec,
        alignment=options.alignment,
        path=path,
        seconds=seconds,
        final=round.final,
    )
    return [
        Expect(path, member.learner, member.epoch, round.number, round.fragment, state.asks, why),
        Send(member.learner, pull, why),
    ]


def _qualifies(state: SyncerState, options: Options, round: Round, member: Member) -> str | None:
    if round.final:
        return "the closing sweep asks everyone"
    if member.reported_at is None:
        return None
    if member.leaving_with is not None and round.fragment in member.leaving_with:
        return "it is about to go"
    if round.leaver:
        return f"{round.leaver} is about to go: everybody is asked"
    if options.participants == "all":
        return "every live learner takes part"
    if member.run_step >= round.tick:
        return f"its step {member.run_step} has reached the round's tick {round.tick}"
    if member.reported_at > round.previous_tick_at:
        return "it reported a step after the previous tick"
    if state.fragments[round.fragment].missed.get(member.learner, 0) > 0:
        # Steps that are an exact multiple of the fastest learner's would otherwise meet the same
        # fragments for ever, and never the others.
        return "it missed this fragment's last round"
    return None


def body_arrived(
    state: SyncerState, options: Options, now: float, event: BodyArrived
) -> list[SyncerEffect]:
    """Folds a verified body in, or says why not (rule 6)."""
    member = state.members.get(event.learner)
    if member is not None and member.epoch != event.epoch:
        # Nobody is told: the newer process of this name waits for the outcome of its own body.
        reason = f"epoch {event.epoch} is over, epoch {member.epoch} is here"
        return [Drop(event.round, event.fragment, event.learner, reason)]
    round = state.rounds.get(event.fragment)
    if round is None or round.number != event.round:
        return _drop(event, "late", "its round is over")
    ask = round.asks.get(event.learner)
    if ask is None or ask.epoch != event.epoch:
        return _drop(event, "refused", f"epoch {event.epoch} was not asked")
    if ask.number != event.ask:
        return [Drop(event.round, event.fragment, event.learner, "it was asked anew since")]
    if ask.state != "waiting" or round.settled_at is not None:
        return _drop(event, "late", f"its part in the round is already {ask.state}")
    if event.base != round.base:
        _move(state, round, ask, "refused")
        ask.reason = f"its base {event.base} is not {round.base}"
        return _drop(event, "behind", ask.reason)
    if event.steps < 1 or event.tokens < 1:
        _move(state, round, ask, "refused")
        ask.reason = f"{event.tokens} tokens in {event.steps} steps"
        return _drop(event, "refused", ask.reason)
    scale, verdict = _gate(state, options, event)
    if scale == 0.0:
        _move(state, round, ask, "refused")
        ask.reason = verdict
        return _drop(event, "refused", verdict)
    _move(state, round, ask, "folded")
    ask.delivered_at, ask.reason = now, verdict
    ask.steps, ask.tokens = event.steps, event.tokens
    if round.quorum_delivered_at is None and round.count("folded") >= options.quorum:
        round.quorum_delivered_at = now
    if member is not None:
        member.upload.update(now - ask.asked_at)
    cap = options.counter_cap_periods * options.period
    steps, tokens = float(event.steps), float(event.tokens)
    why = "delivered in time"
    if event.steps > cap:
        steps, tokens = float(cap), event.tokens * cap / event.steps
        why = f"counters capped at {cap} steps"
    if verdict:
        why = f"{why}; {verdict}"
    return [Fold(event.round, event.fragment, event.learner, steps, tokens, why, scale)]


def _gate(state: SyncerState, options: Options, event: BodyArrived) -> tuple[float, str]:
    """What the norm gate makes of a contribution: its scale, 0 if it is refused, and why."""
    norms = state.fragments[event.fragment].norms
    limit = norm_limit(norms, event.steps, options.norm_gate)
    remember(norms, event.norm, event.steps)
    if limit is None or event.norm <= limit:
        return (1.0, "")
    text = (
        f"its norm {event.norm:.3g} in {event.steps} steps exceeds {limit:.3g}, "
        f"median + {options.norm_gate:g} · MAD of the fragment's last ones"
    )
    if options.oversized == "clip":
        return (limit / event.norm, f"clipped: {text}")
    return (0.0, text)


def _move(state: SyncerState, round: Round, ask: Ask, ask_state: AskState) -> None:
    live, stepping = ask.learner in state.members, state.is_stepping(ask.learner)
    round.move(ask, ask_state, live=live, stepping=stepping)


def _drop(event: BodyArrived, verdict: Verdict, reason: str) -> list[SyncerEffect]:
    return [
        Drop(event.round, event.fragment, event.learner, reason),
        Send(
            event.learner,
            Outcome(event.round, event.fragment, verdict, reason, None),
            reason,
        ),
    ]


def declined(state: SyncerState, learner: str, message: Decline) -> list[SyncerEffect]:
    """A learner says that it will not deliver; in the closing sweep only who has nothing may."""
    number, fragment, reason = message.round, message.fragment, message.reason
    if not _is_asked(state, number, fragment, message.ask, learner):
        return []
    keeps = state.rounds[fragment].final and not message.nothing_new
    ask_state: AskState = "refused" if keeps else "declined"
    return fall_out(state, number, fragment, learner, ask_state, reason)


def body_spoiled(state: SyncerState, event: BodySpoiled) -> list[SyncerEffect]:
    """A body came wrong."""
    if not _is_asked(state, event.round, event.fragment, event.ask, event.learner):
        return []
    return fall_out(state, event.round, event.fragment, event.learner, "refused", event.reason)


def _is_asked(state: SyncerState, number: int, fragment: int, ask: int, learner: str) -> bool:
    """Whether this is the present asking: an earlier one's failure must not undo the next."""
    round = state.rounds.get(fragment)
    if round is None or round.number != number:
        return False
    asked = round.asks.get(learner)
    return asked is not None and asked.number == ask


def fall_out(
    state: SyncerState,
    number: int,
    fragment: int,
    learner: str,
    ask_state: AskState,
    reason: str,
) -> list[SyncerEffect]:
    """A learner that was asked will not deliver: it declined, sent rubbish, or is gone.

    It hears so even if it declined: its upload may have failed for it and arrived for us.
    """
    round = state.rounds.get(fragment)
    if round is None or round.number != number:
        return []
    ask = round.asks.get(learner)
    if ask is None or ask.state != "waiting":
        return []
    assert ask_state in ("declined", "refused", "gone", "late")
    _move(state, round, ask, ask_state)
    ask.reason = reason
    effects: list[SyncerEffect] = [Unexpect(ask.path, reason)]
    if ask_state != "gone":
        verdict: Verdict = "late" if ask_state == "late" else "refused"
        effects.append(Send(learner, Outcome(number, fragment, verdict, reason, None), reason))
    return effects


def ask_again(state: SyncerState, learner: str) -> list[SyncerEffect]:
    """A learner has connected anew: what it was asked before does not reach it any more."""
    effects: list[SyncerEffect] = []
    for round in state.rounds.values():
        effects += fall_out(
            state, round.number, round.fragment, learner, "gone", "it connected anew"
        )
    return effects


def progress(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Moves every open round as far as it can go at this instant."""
    effects: list[SyncerEffect] = []
    for round in list(state.rounds.values()):
        if round.settled_at is None:
            effects += _progress(state, options, now, round)
    return effects


def _progress(state: SyncerState, options: Options, now: float, round: Round) -> list[SyncerEffect]:
    effects: list[SyncerEffect] = []
    if (round.final or round.closed_at is None) and not _close(state, options, now, round):
        if _hopeless(state, options, round):
            effects += _abandon(state, now, round, "too few learners are left for the quorum")
        return effects
    if round.count("waiting"):
        return effects
    return effects + _settle(state, options, now, round)


def pass_deadlines(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Gives up waiting for bodies that are overdue.

    Only a ``Tick`` does this: after a pause of the process, what had arrived is told first.
    """
    effects: list[SyncerEffect] = []
    for round in state.rounds.values():
        deadline = next_deadline(state, options, round)
        if deadline is not None and now >= deadline:
            effects += _pass_deadlines(state, options, now, round)
    return effects


def _pass_deadlines(
    state: SyncerState, options: Options, now: float, round: Round
) -> list[SyncerEffect]:
    effects: list[SyncerEffect] = []
    soft = soft_deadline(state, options, round)
    for ask in list(round.asks.values()):
        deadline = _deadline(ask, soft)
        if ask.state != "waiting" or now < deadline:
            continue
        member = state.members.get(ask.learner)
        if now >= ask.deadline and member is not None:
            member.upload.missed(ask.deadline - ask.asked_at)
        reason = f"no body within {deadline - ask.asked_at:.3g} s"
        effects += fall_out(state, round.number, round.fragment, ask.learner, "late", reason)
    return effects


def next_deadline(state: SyncerState, options: Options, round: Round) -> float | None:
    """When the next body of a round is overdue."""
    upload = round.next_upload_deadline()
    soft = soft_deadline(state, options, round)
    if upload is None or soft is None or not round.hasty_waiting:
        return upload
    return min(soft, upload)


def _deadline(ask: Ask, soft: float | None) -> float:
    """The upload's own deadline, or the round's; not the round's for who was late too often."""
    return ask.deadline if soft is None or ask.patient else min(soft, ask.deadline)


def soft_deadline(state: SyncerState, options: Options, round: Round) -> float | None:
    """When a round whose quorum has delivered stops waiting for the rest: after one period H.

    A quorum that took longer than that leaves the rest a moment all the same. ``None`` while the
    quorum has not delivered: then only the deadlines of the uploads count, so that on a slow link
    rounds go on more slowly instead of never.
    """
    delivered_at = round.quorum_delivered_at
    if round.final or round.closed_at is None or delivered_at is None:
        return None
    patience = max(SOFT_DEADLINE_SECONDS_MIN, options.period * state.step_seconds)
    return max(
        round.closed_at + round.paused_seconds + patience,
        delivered_at + SOFT_DEADLINE_SECONDS_MIN,
    )


def _close(state: SyncerState, options: Options, now: float, round: Round) -> bool:
    if round.final:
        if len(state.members) > round.asked_live:
            return False  # it comes back within its lease, or it is gone
        reason = "the closing sweep has asked everyone"
        if round.closed_at is not None:
            return True
    else:
        decision = window_decision(
            now,
            closes_at=round.closes_at,
            quorum=options.quorum,
            qualified=round.qualified,
            possible=_possible(state, round),
        )
        if not decision.close:
            return False
        reason = decision.reason
    round.closed_at, round.close_reason = now, reason
    return True


def _possible(state: SyncerState, round: Round) -> int:
    """Learners that are in, or may still come in before the window closes."""
    return round.qualified + state.members_stepping - round.asked_stepping


def _hopeless(state: SyncerState, options: Options, round: Round) -> bool:
    """Whether those who fell out leave a quorum out of reach though enough learners are live."""
    if round.final:
        return False
    fell_out = round.count("declined", "refused", "late")
    live_enough = state.members_stepping >= options.quorum
    return bool(fell_out) and live_enough and _possible(state, round) < options.quorum


def _settle(state: SyncerState, options: Options, now: float, round: Round) -> list[SyncerEffect]:
    folded = round.count("folded")
    asked = len(round.asks) - (round.count("declined", "gone") if round.final else 0)
    if round.final and asked == 0:
        return _abandon(state, now, round, "nobody is left who has anything new")
    needed = max(1, min(options.quorum, asked))
    if folded < needed:
        return _abandon(state, now, round, f"{folded} delivered, {needed} are needed")
    round.settled_at = now
    round.version = Version(state.term, round.base.counter + 1)
    return [Merge(round.number, round.fragment, round.version, round.base, round.close_reason)]


def _abandon(state: SyncerState, now: float, round: Round, reason: str) -> list[SyncerEffect]:
    """Gives the round up; the fragment is due again at the next tick (rule 4)."""
    del state.rounds[round.fragment]
    effects: list[SyncerEffect] = [Abandon(round.number, round.fragment, reason)]
    if round.final:
        effects += _swept(state, round, reason)
    elif state.phase == "running":
        state.again.add(round.fragment)
    given_up(state, round)
    for ask in round.asks.values():
        if ask.state == "waiting":
            _move(state, round, ask, "late")
            ask.reason = reason
            effects.append(Unexpect(ask.path, reason))
        if ask.state != "gone":
            message = Outcome(round.number, round.fragment, "abandoned", reason, None)
            effects.append(Send(ask.learner, message, reason))
    effects.append(round.finished(now, "abandoned", reason))
    return effects


def _swept(state: SyncerState, round: Round, reason: str) -> list[SyncerEffect]:
    """A closing round is over: again, if somebody may still have something; else says who had."""
    entry = state.fragments[round.fragment]
    entry.sweep_tries += 1
    open_ends = round.count("waiting", "refused", "late")
    open_ends += state.members_stepping - round.asked_stepping
    open_ends += round.version is None and round.count("folded")
    if open_ends and entry.sweep_tries < SWEEP_TRIES_MAX:
        return []
    state.closing.discard(round.fragment)
    missing = sorted(
        name
        for name, ask in round.asks.items()
        if ask.state != "declined" and (ask.state != "folded" or round.version is None)
    )
    if not missing:
        return []
    text = f"fragment {round.fragment} is without what {', '.join(missing)} trained last"
    return [Note(text, f"closing round {entry.sweep_tries} of {SWEEP_TRIES_MAX}: {reason}")]


def merged(
    state: SyncerState, now: float, number: int, fragment: int, digest: str
) -> list[SyncerEffect]:
    """The worker is done: a new published copy, and everybody is told."""
    round = state.rounds.get(fragment)
    if round is None or round.number != number or round.version is None:
        return []
    del state.rounds[fragment]
    entry = state.fragments[fragment]
    entry.base, entry.version, entry.digest = round.base, round.version, digest
    entry.published_at, entry.renamed = now, False
    entry.awaited = {
        member.learner
        for member in state.members.values()
        if member.connected and member.held.get(fragment) == round.base
    }
    assert round.closed_at is not None
    state.timing.merge.update(now - round.closed_at)
    effects = _swept(state, round, "others had") if round.final else []
    for ask in round.asks.values():
        if ask.state == "folded":
            outcome = Outcome(number, fragment, "accepted", round.close_reason, round.version)
            effects.append(Send(ask.learner, outcome, round.close_reason))
    for member in state.stepping:
        ask_ = round.asks.get(member.learner)
        if ask_ is not None and ask_.state == "folded":
            entry.missed.pop(member.learner, None)
        else:
            entry.missed[member.learner] = entry.missed.get(member.learner, 0) + 1
    effects.append(round.finished(now, "merged", round.close_reason))
    return effects


def merge_failed(
    state: SyncerState, now: float, number: int, fragment: int, reason: str
) -> list[SyncerEffect]:
    """The worker could not: as if the round had been given up."""
    round = state.rounds.get(fragment)
    if round is None or round.number != number:
        return []
    round.version = None
    return _abandon(state, now, round, reason)
