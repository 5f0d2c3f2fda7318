"""Rounds of a shard and the contributions to them (rules 2 to 4). Functions of its state.

```
        tick, slot           quorum, window        all, or K and the window      worker
 (due) ───────────▶ gathering ─────────▶ delivering ───────────────────▶ merging ──────▶ merged
                        │                    │ delivery window over,        │ failed
                        │                    │ too few: gives its slot      ▼
                        │                    │ back, and waits on        (pause, due)
                        └────────────────────┴─▶ given up (due at the next tick)
                   fewer than K can still deliver
```
A contribution belongs to its fragment, not to the round in which it was asked for. A round merges
what its fragment has: it waits for those that it asked until its delivery window is over, and then
for its quorum alone. What is still under way goes on, and is folded into the fragment's next round.
So nobody waits for a slow link, and whatever it delivers is merged, once. Who is asked for what is
in `asking`.
"""

from __future__ import annotations

from collections.abc import Iterable

from decoupled_diloco.protocol import same_data
from decoupled_diloco.protocol.asking import (
    ask_again,
    ask_if_qualified,
    has_arrears,
    has_quorum,
    note_quorum,
    serve,
    serve_idle,
)
from decoupled_diloco.protocol.draining import leaver_of, waits_for_leaver, was_heard
from decoupled_diloco.protocol.effects import (
    Broadcast,
    Drop,
    Fold,
    Merge,
    Note,
    Send,
    SyncerEffect,
    Unexpect,
)
from decoupled_diloco.protocol.events import BodyArrived, BodyCorrupt
from decoupled_diloco.protocol.following import body_is_here
from decoupled_diloco.protocol.judging import age_of, gate_scale, problem_of, tokens_believed
from decoupled_diloco.protocol.membership import Member
from decoupled_diloco.protocol.messages import Decline, GivenUp, Outcome, Verdict
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.quorum import window_decision
from decoupled_diloco.protocol.rounds import Ask, AskState, Round
from decoupled_diloco.protocol.syncer_state import SyncerState
from decoupled_diloco.protocol.versions import Asking, Version

SWEEP_TRIES_MAX = 3
"""How often a fragment's closing round may fail before its learners' rest is given up."""

LATE_ROUNDS_MIN = 8
"""So many rounds in a row, and a period of them, merge only what came late, until it is said."""

CLOSING_SECONDS = 60.0
"""In the closing sweep, who has not begun to answer by then is not waited for: its loop stands."""

COPY_SECONDS = 600.0
"""Nor who has not even the copy by then from which it is to make its contribution."""

MERGE_PAUSE_SECONDS = (1.0, 60.0)
"""After a merge that failed the fragment pauses: so long at first, twice as long each time, and so
long at most."""


def note_due(
    state: SyncerState, options: Options, owned: frozenset[int], since: int, until: int
) -> None:
    """Queues what the ticks after ``since``, until a tick, make due, and what was left due.

    A clock that jumps over several periods makes every fragment due once, at its latest tick. One
    that is due while its round is open is due again as soon as that ends.
    """
    due = [(fragment, state.clock) for fragment in sorted(state.again)]
    for tick in range(max(since, until - options.period) + 1, until + 1):
        due += [(fragment, tick) for fragment in options.due(tick) if fragment in owned]
    for fragment, tick in due:
        round = state.rounds.get(fragment)
        if round is None:
            state.queue[fragment] = tick
        else:
            round.next_tick = tick
            ask_again(state, options, round)
    state.again.clear()


def open_due(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Opens queued rounds while there are slots (rule 2)."""
    effects: list[SyncerEffect] = []
    slots = options.open_rounds_max - sum(round.holds_slot for round in state.rounds.values())
    for fragment in _openable(state, options)[: max(0, slots)]:
        tick = state.queue.pop(fragment, state.clock)
        effects += _open(state, options, now, fragment, tick)
    return effects


def _openable(state: SyncerState, options: Options) -> list[int]:
    queue: Iterable[int] = state.queue
    # break: empty-round-opened
    if options.participants == "own":  # whatever is due: what is here opens a round
        queue = (p for p in queue if state.fragments[p].folded)
    closing = sorted(state.closing - state.rounds.keys())
    return [p for p in (*queue, *closing) if state.fragments[p].retry_at is None]


def _open(
    state: SyncerState, options: Options, now: float, fragment: int, tick: int
) -> list[SyncerEffect]:
    version, final = state.fragments[fragment].version, state.phase == "sweeping"
    assert version is not None
    state.rounds_opened += 1
    margin = 0.0 if final else options.grace_margin
    round = state.rounds[fragment] = Round(
        number=state.rounds_opened,
        term=state.term,
        fragment=fragment,
        tick=tick,
        base=version,
        opened_at=now,
        previous_tick_at=state.previous_tick_at,
        grace=state.timing.window(options.overlap, margin, state.step_seconds),
        deliver_until=now + (window := options.overlap * state.step_seconds),
        delivery_over=window == 0.0,
        final=final,
        leaver=leaver_of(state, options, fragment),
    )
    why = "the closing sweep" if final else f"fragment {fragment} is due since step {tick}"
    if options.participants == "own" and not final:
        why = "a contribution is here"
    if round.leaver and not final:
        why = f"{round.leaver} is about to go: everybody is asked"
    effects: list[SyncerEffect] = [round.opened(why)]
    note_quorum(state, options, now, round, "")
    for member in list(state.members.values()):
        effects += ask_if_qualified(state, options, now, round, member)
    return effects


def announced(state: SyncerState, now: float, learner: str, fragment: int, name: Asking) -> None:
    """A learner has begun to answer."""
    ask = _under_way(state, learner, fragment, name)
    if ask is not None:
        ask.announced_at = now


def _under_way(state: SyncerState, learner: str, fragment: int, name: Asking) -> Ask | None:
    """What is under way by this name: an earlier asking's failure must not undo the next."""
    entry = state.fragments.get(fragment)
    ask = None if entry is None else entry.asks.get(learner)
    return ask if ask is not None and ask.name == name else None


def body_arrived(
    state: SyncerState, options: Options, now: float, event: BodyArrived
) -> list[SyncerEffect]:
    """Folds a verified body in, or says why not (rule 6)."""
    ask = _under_way(state, event.learner, event.fragment, event.ask)
    if ask is None or ask.epoch != event.epoch:
        why = "it was asked anew since, or is gone"
        return [Drop(event.fragment, event.learner, event.ask, why)]
    adapted = body_is_here(state, options, now, state.members[ask.learner], ask)
    verdict, problem = problem_of(state, options, ask, event)
    scale = 1.0
    if not problem:
        scale, problem = gate_scale(state, options, event)
        verdict = "unfit" if scale == 0.0 else "accepted"
    if verdict != "accepted":
        drop = Drop(event.fragment, event.learner, event.ask, problem)
        fallen = _fall_out(state, options, now, ask, "refused", problem, verdict)
        return [drop, *adapted, *fallen]
    return [*adapted, *_fold(state, options, now, ask, event, scale, problem)]


def _fold(
    state: SyncerState,
    options: Options,
    now: float,
    ask: Ask,
    event: BodyArrived,
    scale: float,
    gated: str,
) -> list[SyncerEffect]:
    fragment, age = event.fragment, age_of(state, ask)
    ask.state, ask.delivered_at, ask.reason, ask.age = "folded", now, gated, age
    ask.steps, ask.tokens, ask.alike = event.steps, event.tokens, event.alike
    state.fragments[fragment].fold(ask)
    round = state.rounds.get(fragment)
    if round is not None and round.settled_at is None:
        round.awaited.discard(ask.learner)
    if options.participants == "own" and state.phase == "running":
        if round is None:
            state.queue[fragment] = state.clock  # break: arrival-opens-no-round
        else:  # it merges what came before
            round.next_tick = state.clock  # break: arrival-during-merge-waits
    cap = options.steps_counted
    believed = tokens_believed(state, event)
    steps, tokens = float(event.steps), float(believed)
    why = "delivered in time" if age == 0 else f"late by {age} versions"
    if believed < event.tokens:
        why = f"{why}; {believed} of its {event.tokens} tokens are believed"
    if event.steps > cap:
        steps, tokens = float(cap), believed * cap / event.steps  # break: capped-steps-keep-tokens
        why = f"{why}; counters capped at {cap} steps"
    if gated:
        why = f"{why}; {gated}"
    discount = options.late_discount**age
    fold = Fold(fragment, ask.learner, ask.name, steps, tokens, why, scale, discount)
    member = state.members[ask.learner]
    member.heard_at[fragment] = now
    was_heard(member, fragment)
    return [fold, *_link_free(state, options, now, member, fragment)]


def _link_free(
    state: SyncerState, options: Options, now: float, member: Member, fragment: int
) -> list[SyncerEffect]:
    """A learner has nothing more to send of a fragment."""
    member.under_way.discard(fragment)
    member.pressed = has_arrears(state, options, member)
    return serve(state, options, now, member)


def declined(
    state: SyncerState, options: Options, now: float, learner: str, message: Decline
) -> list[SyncerEffect]:
    """A learner says that it will not deliver; in the closing sweep only who has nothing may.

    One in arrears that took a newer version while it was being asked keeps the fragment's turn; and
    one that is asked by its own steps, whom nobody else's round would ask again.
    """
    ask = _under_way(state, learner, message.fragment, message.ask)
    if ask is None:
        return []
    member = state.members[learner]
    keeps_turn = member.pressed or options.participants == "own"  # break: newer-version-loses-turn
    if keeps_turn and member.held.get(ask.fragment) != ask.base:
        member.arrears.add(ask.fragment)
    keeps = state.phase == "sweeping" and not message.nothing_new
    ask_state: AskState = "refused" if keeps else "declined"
    return _fall_out(state, options, now, ask, ask_state, message.reason)


def body_corrupt(
    state: SyncerState, options: Options, now: float, event: BodyCorrupt
) -> list[SyncerEffect]:
    """A body came wrong, or stopped coming."""
    ask = _under_way(state, event.learner, event.fragment, event.ask)
    if ask is None:
        return []
    verdict: Verdict = "refused" if event.is_finite else "unfit"
    return _fall_out(state, options, now, ask, "refused", event.reason, verdict)


def _fall_out(
    state: SyncerState,
    options: Options,
    now: float,
    ask: Ask,
    ask_state: AskState,
    reason: str,
    verdict: Verdict = "refused",
) -> list[SyncerEffect]:
    """What was asked for will not come: the learner declined, sent rubbish, or is gone.

    It hears so even if it declined: its upload may have failed for it and arrived for us.
    """
    fragment = ask.fragment
    ask.state, ask.reason = ask_state, reason
    state.fragments[fragment].lose(ask)
    round, member = state.rounds.get(fragment), state.members.get(ask.learner)
    if round is not None and round.settled_at is None:
        round.awaited.discard(ask.learner)
        round.fallen[ask.learner] = ask
        if ask_state == "gone":
            stepping = state.is_stepping(ask.learner)
            round.turn_back(ask.learner, live=member is not None, stepping=stepping)
    effects: list[SyncerEffect] = [Unexpect(ask.path, reason)]  # break: abandoned-payload-expected
    if ask_state != "gone":
        outcome = Outcome(fragment, ask.name, verdict, reason, None)
        effects.append(Send(ask.learner, outcome, reason))
    if member is not None:
        # break: broken-link-not-asked-again
        if ask_state == "gone" and options.participants == "own":
            member.arrears.add(fragment)  # nobody else's round would ask it again
        effects += _link_free(state, options, now, member, fragment)
    return effects


def forget_asks(
    state: SyncerState,
    options: Options,
    now: float,
    learner: str,
    reason: str,
    known: tuple[Asking, ...] = (),
) -> list[SyncerEffect]:
    """Nothing comes any more of what a learner was asked for, but for what it says it is sending.

    It has connected anew, and what it was asked before did not reach it; or it is gone.
    """
    effects: list[SyncerEffect] = []
    for entry in state.fragments.values():
        ask = entry.asks.get(learner)
        if ask is not None and ask.name not in known:  # break: lost-request-in-flight
            effects += _fall_out(state, options, now, ask, "gone", reason)
    return effects


def open_asks(state: SyncerState, learner: str) -> tuple[Asking, ...]:
    """What the shard still waits for, or has and has not merged yet, of a learner."""
    found = []
    for fragment, entry in state.fragments.items():
        round = state.rounds.get(fragment)
        asks = [] if round is None else round.folded
        if learner in entry.present:  # as a rule it has nothing there: who joins costs little
            asks = [*entry.asks.values(), *entry.folded, *asks]
        found += [ask.name for ask in asks if ask.learner == learner]
    return tuple(found)


def deadline(state: SyncerState, options: Options, round: Round) -> float | None:
    """When a round is to be looked at, though nothing has happened."""
    if round.settled_at is not None:
        return None
    if round.final:
        asks = state.fragments[round.fragment].asks.values()
        return min(
            (_answer_by(state, round, ask) for ask in asks if ask.announced_at is None),
            default=None,
        )
    gathering = round.closed_at is None and _qualified(state, round) >= options.quorum
    instants = [round.closes_at] if gathering else []
    return min([*instants, *([] if round.delivery_over else [round.deliver_until])], default=None)


def _answer_by(state: SyncerState, round: Round, ask: Ask) -> float:
    """Until when a learner may begin to answer in the closing sweep.

    Who stepped until now and lacks the base is fetching it; else it is its loop that stands.
    """
    since, stepped_at = max(round.opened_at, ask.asked_at), state.members[ask.learner].reported_at
    if ask.base_at is not None:
        return max(since, ask.base_at) + CLOSING_SECONDS
    fetches = stepped_at is not None and since - stepped_at < CLOSING_SECONDS
    return since + (COPY_SECONDS if fetches else CLOSING_SECONDS)


def pass_windows(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Sees which windows are over.

    Only a ``Tick`` does this: after a pause of the process, what had arrived is told first.
    """
    effects: list[SyncerEffect] = []
    for entry in state.fragments.values():
        if entry.retry_at is not None and now >= entry.retry_at:
            entry.retry_at = None
    for round in state.rounds.values():
        if not round.delivery_over and now >= round.deliver_until:
            round.delivery_over = True
            ask_again(state, options, round)
        if round.final and round.settled_at is None:
            effects += _pass_unanswered(state, options, now, round)
    return effects + serve_idle(state, options, now)


def _pass_unanswered(
    state: SyncerState, options: Options, now: float, round: Round
) -> list[SyncerEffect]:
    effects: list[SyncerEffect] = []
    for ask in list(state.fragments[round.fragment].asks.values()):
        if ask.announced_at is None and now >= _answer_by(state, round, ask):
            reason = f"no answer within {CLOSING_SECONDS:g} s: its loop stands still"
            if ask.base_at is None:
                reason = f"{ask.base} is not with it after {now - ask.asked_at:.0f} s"
            effects += _fall_out(state, options, now, ask, "refused", reason)
    return effects


def progress(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Moves every open round as far as it can go at this instant."""
    effects: list[SyncerEffect] = []
    for round in list(state.rounds.values()):
        if round.settled_at is None:
            effects += _progress(state, options, now, round)
    return effects


def _progress(state: SyncerState, options: Options, now: float, round: Round) -> list[SyncerEffect]:
    entry = state.fragments[round.fragment]
    if round.closed_at is None or round.final:
        _close(state, options, now, round)
    if round.final:
        if round.closed_at is None or round.awaited:
            return []
        if entry.folded:
            return _settle(state, options, now, round)
        return _give_up(state, now, round, "nobody is left who has anything new")
    if round.closed_at is not None and has_quorum(entry, options):
        # break: round-waits-for-all
        waits = round.awaited and (not round.delivery_over or waits_for_leaver(state, round))
        return [] if waits else _settle(state, options, now, round)
    if round.delivery_over:
        round.holds_slot = False
    if _hopeless(state, options, round):
        return _give_up(state, now, round, "too few learners are left for the quorum")
    return []


def _close(state: SyncerState, options: Options, now: float, round: Round) -> None:
    if round.final:
        if len(state.members) > round.turned_live:
            round.closed_at = None  # who is missing comes back within its lease, or is gone
        elif round.closed_at is None:
            round.closed_at, round.close_reason = now, "the closing sweep has asked everyone"
        return
    decision = window_decision(
        now,
        closes_at=round.closes_at,
        quorum=options.quorum,
        qualified=_qualified(state, round),
        possible=_possible(state, round),
    )
    if decision.close:
        round.closed_at, round.close_reason = now, decision.reason
        if options.participants == "own":
            round.close_reason = "a contribution is merged as soon as it is here"


def _qualified(state: SyncerState, round: Round) -> int:
    """Learners of which something is under way or folded."""
    return len(state.fragments[round.fragment].present)


def _possible(state: SyncerState, round: Round) -> int:
    """Learners that are in, or may still come in before the window closes."""
    return _qualified(state, round) + state.members_stepping - round.turned_stepping


def _hopeless(state: SyncerState, options: Options, round: Round) -> bool:
    """Whether fewer than the quorum can still deliver, though enough learners are live."""
    if state.members_stepping < options.quorum:
        return False  # the clock stands, too; who comes may be asked
    can = _qualified(state, round)
    if round.closed_at is None:
        can = _possible(state, round)
    if can >= options.quorum:
        return False
    present = state.fragments[round.fragment].present
    waiting = [m for m in state.members.values() if round.fragment in m.arrears]
    return can + sum(m.learner not in present for m in waiting) < options.quorum


def _settle(state: SyncerState, options: Options, now: float, round: Round) -> list[SyncerEffect]:
    round.settled_at = now
    round.version = Version(state.term, round.base.counter + 1)
    round.folded = state.fragments[round.fragment].take_folded()
    merge = Merge(round.number, round.fragment, round.version, round.base, round.close_reason)
    twins = same_data.noticed(state.twins, round.folded, round.tick, options.period)
    return [merge, *_note_lateness(state, options, round), *twins]


def _note_lateness(state: SyncerState, options: Options, round: Round) -> list[SyncerEffect]:
    """Says it once if nothing comes in time any more: outer steps then lag by a period."""
    if options.participants == "own":
        return []  # most have others' before them
    is_late = all(ask.age for ask in round.folded) and not round.final
    state.late_rounds = state.late_rounds + 1 if is_late else 0
    if state.late_rounds != max(LATE_ROUNDS_MIN, len(state.fragments)):
        return []
    text = f"all contributions to the last {state.late_rounds} rounds came late"
    why = (
        "outer steps lag, and can diverge: raise sync.overlap, or send less (sync.adapt does both)"
    )
    return [Note(text, why, warns=True)]


def _give_up(state: SyncerState, now: float, round: Round, reason: str) -> list[SyncerEffect]:
    """Gives the round up; the fragment is due again at the next tick (rule 4).

    What is folded or under way stays the fragment's; nobody need stop and wait for it.
    """
    del state.rounds[round.fragment]
    entry = state.fragments[round.fragment]
    effects: list[SyncerEffect] = []
    if state.phase == "running":
        state.again.add(round.fragment)
    elif round.final:
        effects += _swept(state, round, reason)
    effects.append(Broadcast(GivenUp(round.fragment, reason), reason))
    effects.append(round.finished(now, "abandoned", reason, list(entry.asks.values())))
    return effects


def begin_sweep(state: SyncerState, now: float) -> list[SyncerEffect]:
    """Gives up what is open: every fragment has its closing rounds from now on (rule 12)."""
    effects: list[SyncerEffect] = []
    for round in list(state.rounds.values()):
        if round.settled_at is None:  # break: final-sweep-keeps-rounds
            effects += _give_up(state, now, round, "the run ends")
    return effects


def _swept(state: SyncerState, round: Round, problem: str) -> list[SyncerEffect]:
    """A closing round is over: again, if somebody may still have something; else says who had.

    Something that was asked for before the end is not all that its learner has. A ``problem``
    counts as a try.
    """
    entry = state.fragments[round.fragment]
    failed = [ask for ask in round.fallen.values() if ask.state == "refused"]
    if problem:
        failed += round.folded
    entry.sweep_tries += bool(failed)
    absent = state.members_stepping > round.turned_stepping
    unfinished = absent or any(not ask.final for ask in round.folded)
    # break: final-round-not-retried
    if (failed or unfinished) and entry.sweep_tries < SWEEP_TRIES_MAX:
        return []
    state.closing.discard(round.fragment)
    delivered = {ask.learner for ask in round.folded}
    gone = [ask for ask in round.fallen.values() if ask.state == "gone"]
    lost = failed + [ask for ask in gone if ask.learner not in delivered]
    if not lost:
        return []
    missing = ", ".join(sorted({ask.learner for ask in lost}))
    text = f"fragment {round.fragment} is without what {missing} trained last"
    reason = lost[0].reason or problem
    return [Note(text, f"{reason}; closing rounds that failed: {entry.sweep_tries}")]


def merged(
    state: SyncerState, now: float, number: int, fragment: int, digest: str
) -> list[SyncerEffect]:
    """The worker is done: a new published copy, and everybody is told."""
    round = state.rounds.get(fragment)
    if round is None or round.number != number or round.version is None:
        return []
    assert round.closed_at is not None
    del state.rounds[fragment]
    entry = state.fragments[fragment]
    entry.base, entry.version, entry.digest = round.base, round.version, digest
    entry.published_at, entry.renamed = now, False
    entry.failures, entry.retry_at = 0, None
    entry.made = {who: base for who, base in entry.made.items() if who in state.members}
    entry.awaited = {
        member.learner
        for member in state.members.values()
        if member.connected and member.held.get(fragment) == round.base
    }
    state.timing.merge.update(now - round.closed_at)
    if round.next_tick is not None:
        state.queue[fragment] = round.next_tick
    effects = _swept(state, round, "") if round.final else []
    for ask in round.folded:
        outcome = Outcome(fragment, ask.name, "accepted", round.close_reason, round.version)
        effects.append(Send(ask.learner, outcome, round.close_reason))
    took_part = {ask.learner for ask in round.folded}
    entry.missed = {m.learner for m in state.stepping if m.learner not in took_part}
    under_way = list(entry.asks.values())
    effects.append(round.finished(now, "merged", round.close_reason, under_way))
    return effects


def merge_failed(
    state: SyncerState, options: Options, now: float, number: int, fragment: int, reason: str
) -> list[SyncerEffect]:
    """The worker could not: what was folded is gone with it, and the fragment pauses."""
    round = state.rounds.get(fragment)
    if round is None or round.number != number:
        return []
    del state.rounds[fragment]
    entry, round.version = state.fragments[fragment], None
    first, longest = MERGE_PAUSE_SECONDS
    entry.retry_at = now + min(longest, first * 2.0**entry.failures)  # break: failed-merge-no-pause
    entry.failures += 1
    effects: list[SyncerEffect] = []
    if state.phase == "running":
        state.queue[fragment] = max(round.tick, round.next_tick or round.tick)
    elif round.final:
        effects += _swept(state, round, reason)
    for ask in round.folded:
        if entry.made.get(ask.learner) == ask.base:  # break: failed-merge-counts-as-made
            del entry.made[ask.learner]
        outcome = Outcome(fragment, ask.name, "abandoned", reason, None)
        effects.append(Send(ask.learner, outcome, reason))
    effects.append(Broadcast(GivenUp(fragment, reason), reason))
    effects.append(round.finished(now, "abandoned", reason, list(entry.asks.values())))
    return effects + serve_idle(state, options, now)
