"""Rounds of a shard and the contributions to them (rules 2 to 4). Functions of its state.

```
        tick, slot           quorum, window        all, or K and the window      worker
 (due) ───────────▶ gathering ─────────▶ delivering ───────────────────▶ merging ──────▶ merged
                        │                    │ delivery window over,        │ failed
                        │                    │ too few: releases its        ▼
                        │                    │ slot and waits on       (pause, due)
                        └────────────────────┴─▶ abandoned (due at the next tick)
                   fewer than K can still deliver
```

A contribution belongs to its fragment, not to the round that requested it. A round merges what its
fragment has. It waits for all learners with a request until its delivery window is over, and then
only for its quorum. An upload still in progress continues and is folded into the fragment's next
round. No process waits for a slow link, and everything that the link delivers is merged, once.

*Flow*. A learner has at most as many contributions in progress as a shard has slots. If this limit
prevents a request for a fragment, the fragment enters the learner's *backlog*. A learner with a
backlog sends one payload at a time. When it arrives, the learner at once receives a request,
outside of any round, for a fragment in its backlog or due soon: the one that it has trained
longest, because the next copy discards what no contribution contains. A fragment with two
contributions more than another one waits for it. Rounds that lack their quorum come first. A slow
link is therefore always busy, and every fragment receives contributions from every learner equally
often.

*Base*. A request is for a contribution from the version that the learner holds, usually the newest.
A learner with a slow downlink hardly ever holds the newest. It may contribute from an older
version, up to the age limit of late payloads, and once per version. While it holds no version that
it could contribute from, it receives no request, and no round waits for it.

`participation` decides what makes a contribution due: the shard's clock or the learner's own steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from decoupled_diloco.errors import MethodError
from decoupled_diloco.protocol import privacy_account, same_data, visits, weighing
from decoupled_diloco.protocol.clock import window_decision
from decoupled_diloco.protocol.leaving import waits_for_leaver, was_asked, was_drained
from decoupled_diloco.protocol.link_measurements import payload_arrived
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    Asking,
    BodyArrived,
    BodyCorrupt,
    Broadcast,
    Collect,
    Collected,
    Decline,
    Drop,
    Expect,
    Fold,
    ForgetFolded,
    ForgetSum,
    GivenUp,
    Merge,
    Note,
    Outcome,
    Pull,
    Send,
    SumOutcome,
    SumVerdict,
    SyncerEffect,
    Unexpect,
    Verdict,
    Version,
    relay_peer,
)
from decoupled_diloco.protocol.norm_gate import age_of, gate_scale, problem_of, tokens_believed
from decoupled_diloco.protocol.participation import participation
from decoupled_diloco.protocol.privacy_account import has_learners_left, has_spent, is_in_next
from decoupled_diloco.protocol.quotas import factors, party_of, weight_of
from decoupled_diloco.protocol.syncer_state import (
    Ask,
    AskState,
    FragmentState,
    Member,
    Round,
    SecureSum,
    SyncerState,
)

RULE_FAILED = "the participation rule has failed; rounds wait longer and merge what they need"


SWEEP_TRIES_MAX = 3
"""Failed closing rounds of a fragment after which the missing training is dropped."""


LATE_ROUNDS_MIN = 8
"""Rounds in a row without a timely contribution that trigger a warning.

It is logged after one period if that has more rounds.
"""


CLOSING_SECONDS = 60.0
"""In the closing sweep, a learner that has not started to answer by then counts as stalled."""


COPY_SECONDS = 600.0
"""In the closing sweep, a learner has this time to fetch the base of its contribution."""


ANSWER_SECONDS = 5.0
"""In each stage of a secure sum, a learner has at least this time to answer.

Its background answers, even while its loop is stalled.
"""


AHEAD_MAX = 1
"""A fragment waits if a learner with a backlog has sent it more often than another one by more than
this number. Discarded contributions count as well: the learner would send nothing else.

0 would request a fragment that was overwritten a moment ago only because its turn has come.
"""


MERGE_PAUSE_SECONDS = (1.0, 60.0)
"""First and longest pause of a fragment after failed merges; each pause doubles the last."""


def note_due(
    state: SyncerState, options: Options, owned: frozenset[int], since: int, until: int
) -> None:
    """Queue what the ticks after ``since``, up to ``until``, make due, and what was left due.

    If the clock jumps over several periods, every fragment is due once, at its latest tick. A
    fragment that is due while its round is open is due again as soon as the round ends.
    """
    due = [(fragment, state.clock) for fragment in sorted(state.again)]
    # One period covers every fragment, so earlier ticks would add nothing.
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
    """Open queued rounds while slots are free (rule 2)."""
    effects: list[SyncerEffect] = []
    slots = options.open_rounds_max - sum(round.holds_slot for round in state.rounds.values())
    for fragment in _openable(state, options)[: max(0, slots)]:
        tick = state.queue.pop(fragment, state.clock)
        effects += _open(state, options, now, fragment, tick)
    return effects


def _openable(state: SyncerState, options: Options) -> list[int]:
    may_open = participation(options).may_open
    queue = (
        p
        for p in state.queue
        if may_open(options, state.fragments[p]) and has_learners_left(state, options, p)
    )
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
        delivery_over=window == 0.0,  # τ = 0, or no step time yet: the quorum alone decides
        final=final,
        leaver=participation(options).leaver_of(state, fragment),
        secure=SecureSum(now + patience(options, state)) if options.secure else None,
    )
    why = "the closing sweep" if final else participation(options).why_open(fragment, tick)
    if round.leaver and not final:
        why = f"{round.leaver} is about to leave, so all learners take part"
    effects: list[SyncerEffect] = [round.opened(why)]
    if round.secure is None:  # otherwise relays collect once the cohort masks its contributions
        effects += collect(state, options, now, round)
    note_quorum(state, options, now, round, "")
    for member in list(state.members.values()):
        effects += ask_if_qualified(state, options, now, round, member)
    return effects


def patience(options: Options, state: SyncerState) -> float:
    """Return how long a stage of a secure sum waits for a learner's answer: a period, or more."""
    return max(ANSWER_SECONDS, options.period * state.step_seconds)


def announced(state: SyncerState, now: float, learner: str, fragment: int, name: Asking) -> None:
    """Record that a learner has started to answer."""
    ask = open_request(state, learner, fragment, name)
    if ask is not None:
        ask.announced_at = now


def open_request(state: SyncerState, learner: str, fragment: int, name: Asking) -> Ask | None:
    """Return the open request with this name, if it has not been replaced by a newer one."""
    entry = state.fragments.get(fragment)
    ask = None if entry is None else entry.asks.get(learner)
    return ask if ask is not None and ask.name == name else None


def body_arrived(
    state: SyncerState, options: Options, now: float, event: BodyArrived
) -> list[SyncerEffect]:
    """Fold a verified payload, or refuse it with a reason (rule 6)."""
    ask = open_request(state, event.learner, event.fragment, event.ask)
    if ask is None or ask.epoch != event.epoch:
        why = "its request was replaced, or the learner left"
        return [Drop(event.fragment, event.learner, event.ask, why, event.relay)]
    # A refused payload measures the link, and takes its turn, as well as an accepted one.
    member = state.members[ask.learner]
    member.uploads[event.fragment] += 1
    adapted = payload_arrived(state, options, now, member, ask)
    verdict, problem = problem_of(state, options, ask, event)
    if not problem:
        verdict, problem = weightless(state, options, ask)
    scale = 1.0
    if not problem:
        scale, problem = gate_scale(state, options, event)
        verdict = "unfit" if scale == 0.0 else "accepted"
    if verdict != "accepted":
        drop = Drop(event.fragment, event.learner, event.ask, problem, ask.relay)
        became: AskState = "discarded" if verdict == "discarded" else "refused"
        closed = close_request(state, options, now, ask, became, problem, verdict)
        return [drop, *adapted, *closed]
    return [*adapted, *_fold(state, options, now, ask, event, scale, problem)]


def weightless(state: SyncerState, options: Options, ask: Ask) -> tuple[Verdict, str]:
    """Return the verdict on a contribution with weight 0, and why it has none; empty: it has one.

    It stays discarded if its learner has got a weight since the request, because no quorum counted
    it.
    """
    weight, why = weighing.weight_of(state, options, ask.learner)
    if ask.weightless or weight == 0.0:
        return "discarded", f"weight 0: {why or 'its learner was on probation at the request'}"
    return "accepted", ""


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
    ask.reason, ask.age = gated, age
    ask.steps, ask.tokens, ask.alike = event.steps, event.tokens, event.alike
    state.fragments[fragment].fold(ask)
    if ask.relay:
        ask.state, ask.relayed_at, ask.nbytes = "relayed", now, event.nbytes
    else:
        is_here(state, options, now, ask)
    cap = options.steps_counted
    believed = tokens_believed(state, event)
    steps, tokens = float(event.steps), float(believed)
    why = "delivered in time" if age == 0 else f"late by {age} versions"
    if believed < event.tokens:
        why = f"{why}; {believed} of its {event.tokens} tokens count"
    if event.steps > cap:
        steps, tokens = float(cap), believed * cap / event.steps  # break: capped-steps-keep-tokens
        why = f"{why}; counters capped at {cap} steps"
    if gated:
        why = f"{why}; {gated}"
    discount = options.discount(age)
    if options.discount_of == "change":
        # A mean divides by its weights. A weight would cancel where all are equally late.
        scale, discount = scale * discount, 1.0
    trusted, why_less = weighing.weight_of(state, options, ask.learner)
    if trusted < 1.0:
        discount, why = discount * trusted, f"{why}; {why_less}"
    ask.weight = weight_of(options.weighting, steps, tokens, discount)
    ask.party = party_of(options.quotas, ask.learner)
    fold = Fold(fragment, ask.learner, ask.name, steps, tokens, why, scale, discount)
    fold = replace(fold, relay=ask.relay, party=ask.party)
    member = state.members[ask.learner]
    confirmed = [] if ask.relay else visits.folded(options, ask)
    return [fold, *confirmed, *_link_free(state, options, now, member, fragment)]


def is_here(state: SyncerState, options: Options, now: float, ask: Ask) -> None:
    """Count a contribution that is folded into the accumulator of this shard."""
    ask.state, ask.delivered_at = "folded", now
    round, member = state.rounds.get(ask.fragment), state.members.get(ask.learner)
    if round is not None and round.settled_at is None:
        owes_nothing(state, round, ask.learner)
    participation(options).folded(state, ask.fragment)
    if member is not None:
        was_drained(member, ask.fragment)


def owes_nothing(state: SyncerState, round: Round, learner: str) -> None:
    """Stop waiting for a learner, unless another contribution of it is still on its way."""
    if not state.fragments[round.fragment].owes(learner):
        round.awaited.discard(learner)


def _link_free(
    state: SyncerState, options: Options, now: float, member: Member, fragment: int
) -> list[SyncerEffect]:
    """Continue with a learner that has nothing more to send of a fragment."""
    member.under_way.discard(fragment)
    member.pressed = has_backlog(state, options, member)
    return serve(state, options, now, member)


def declined(
    state: SyncerState, options: Options, now: float, learner: str, message: Decline
) -> list[SyncerEffect]:
    """Close the request of a learner that will not deliver.

    In the closing sweep, only a learner without new training may decline; otherwise the decline
    counts as a failure. A learner that applied a newer version meanwhile may keep the fragment's
    turn.
    """
    ask = open_request(state, learner, message.fragment, message.ask)
    if ask is None:
        return []
    member = state.members[learner]
    keeps_turn = participation(options).keeps_turn(member)  # break: newer-version-loses-turn
    if keeps_turn and member.held.get(ask.fragment) != ask.base:
        member.backlog.add(ask.fragment)
    keeps = state.phase == "sweeping" and not message.nothing_new
    ask_state: AskState = "refused" if keeps else "declined"
    return close_request(state, options, now, ask, ask_state, message.reason)


def body_corrupt(
    state: SyncerState, options: Options, now: float, event: BodyCorrupt
) -> list[SyncerEffect]:
    """Record that a payload was invalid or its upload stopped."""
    ask = open_request(state, event.learner, event.fragment, event.ask)
    if ask is None:
        return []
    verdict: Verdict = "refused" if event.is_finite else "unfit"
    return close_request(state, options, now, ask, "refused", event.reason, verdict)


def close_request(
    state: SyncerState,
    options: Options,
    now: float,
    ask: Ask,
    ask_state: AskState,
    reason: str,
    verdict: Verdict = "refused",
) -> list[SyncerEffect]:
    """Close a request that will not be delivered: declined, invalid, or its learner left.

    The learner receives the outcome even after a decline: its upload may have failed for it and
    arrived here.
    """
    fragment = ask.fragment
    ask.state, ask.reason = ask_state, reason
    state.fragments[fragment].lose(ask)
    round, member = state.rounds.get(fragment), state.members.get(ask.learner)
    if round is not None and round.settled_at is None:
        owes_nothing(state, round, ask.learner)
        round.fallen[ask.learner] = ask
        if round.secure is not None:
            round.secure.answered.discard(ask.learner)  # break: answer-to-closed-request-counts
        if ask_state == "gone":
            stepping = state.is_stepping(ask.learner)
            round.turn_back(ask.learner, live=member is not None, stepping=stepping)
    unexpect = Unexpect(ask.path, reason, ask.relay)
    effects: list[SyncerEffect] = [unexpect]  # break: abandoned-payload-expected
    if ask_state != "gone":
        outcome = Outcome(fragment, ask.name, verdict, reason, None)
        effects.append(Send(ask.learner, outcome, reason))
    if member is not None:
        if ask_state == "gone":
            participation(options).lost(member, fragment)
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
    """Close a learner's requests, except those that it reports as in progress (``known``).

    It has reconnected, so the other requests may not have reached it, or it has left.
    """
    effects: list[SyncerEffect] = []
    for entry in state.fragments.values():
        ask = entry.asks.get(learner)
        if ask is not None and ask.name not in known:  # break: lost-request-in-flight
            effects += close_request(state, options, now, ask, "gone", reason)
    return effects


def open_asks(state: SyncerState, learner: str) -> tuple[Asking, ...]:
    """Return a learner's valid requests: those open, and those folded but not merged yet."""
    found = []
    for fragment, entry in state.fragments.items():
        round = state.rounds.get(fragment)
        asks = [] if round is None else round.folded
        if learner in entry.present:  # usually false: keeps joins cheap
            asks = [*entry.asks.values(), *entry.relayed, *entry.folded, *asks]
        found += [ask.name for ask in asks if ask.learner == learner]
    return tuple(found)


def deadline(state: SyncerState, options: Options, round: Round) -> float | None:
    """Return when a round needs a ``Tick``, if no other event occurs."""
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
    """Return until when a learner may start to answer in the closing sweep.

    A learner that stepped recently and lacks the base is fetching it. Otherwise its loop has
    stalled.
    """
    since, stepped_at = max(round.opened_at, ask.asked_at), state.members[ask.learner].reported_at
    if ask.base_at is not None:
        return max(since, ask.base_at) + CLOSING_SECONDS
    fetches = stepped_at is not None and since - stepped_at < CLOSING_SECONDS
    return since + (COPY_SECONDS if fetches else CLOSING_SECONDS)


def pass_windows(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Close the windows that are over.

    Only a ``Tick`` does this: after a pause of the process, earlier arrivals are handled first.
    """
    effects: list[SyncerEffect] = []
    for entry in state.fragments.values():
        if entry.retry_at is not None and now >= entry.retry_at:
            entry.retry_at = None
    for round in state.rounds.values():
        if not round.delivery_over and now >= round.deliver_until:
            round.delivery_over = True
            ask_again(state, options, round)
        if round.secure is not None and now >= round.secure.until:
            round.secure.is_patient = False
        if round.final and round.settled_at is None:
            effects += _pass_unanswered(state, options, now, round)
    return effects + serve_idle(state, options, now)


def _pass_unanswered(
    state: SyncerState, options: Options, now: float, round: Round
) -> list[SyncerEffect]:
    effects: list[SyncerEffect] = []
    for ask in list(state.fragments[round.fragment].asks.values()):
        if ask.announced_at is None and now >= _answer_by(state, round, ask):
            reason = f"no answer within {CLOSING_SECONDS:g} s: its loop has stalled"
            if ask.base_at is None:
                reason = f"it did not receive {ask.base} within {now - ask.asked_at:.0f} s"
            effects += close_request(state, options, now, ask, "refused", reason)
    return effects


def progress(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Move every open round as far as it can go at this instant."""
    effects: list[SyncerEffect] = []
    for round in list(state.rounds.values()):
        if round.settled_at is None:
            effects += _progress(state, options, now, round)
    return effects


def _progress(state: SyncerState, options: Options, now: float, round: Round) -> list[SyncerEffect]:
    entry = state.fragments[round.fragment]
    if round.closed_at is None or round.final:
        close_window(state, options, now, round)
    ends = gathered(state, options, round)
    if round.closed_at is not None and round.collecting:
        awaiting = awaiting_sums(state, (*entry.asks.values(), *entry.relayed))
        ends += collected(round, awaiting)
    if round.final:
        if round.closed_at is None or round.awaited:
            return ends
        if entry.folded:
            return [*ends, *settle_round(state, options, now, round)]
        return [*ends, *abandon(state, options, now, round, "no live learner has anything new")]
    if round.closed_at is not None and has_quorum(entry, options):
        # break: round-waits-for-all
        waits = round.awaited and (not round.delivery_over or waits_for_leaver(state, round))
        return ends if waits else [*ends, *settle_round(state, options, now, round)]
    if round.delivery_over:
        round.holds_slot = False
    if is_hopeless(state, options, round):
        return [
            *ends,
            *abandon(state, options, now, round, "too few learners remain for the quorum"),
        ]
    return ends


def close_window(state: SyncerState, options: Options, now: float, round: Round) -> None:
    if round.final:
        if len(state.members) > round.turned_live:
            round.closed_at = None  # a disconnected learner comes back or loses its lease
        elif round.closed_at is None:
            round.closed_at, round.close_reason = now, "the closing sweep has asked all learners"
        return
    decision = window_decision(
        now,
        closes_at=round.closes_at,
        quorum=options.quorum,
        qualified=_qualified(state, round),
        possible=_possible(state, round),
    )
    if decision.close:
        round.closed_at = now
        round.close_reason = participation(options).why_closed(options, decision.reason)


def _qualified(state: SyncerState, round: Round) -> int:
    """Return the number of learners with an open request or a folded contribution, and a weight."""
    return state.fragments[round.fragment].counted


def _possible(state: SyncerState, round: Round) -> int:
    """Return the number of learners that take part, or may before the window closes."""
    return _qualified(state, round) + state.members_stepping - round.turned_stepping


def is_hopeless(state: SyncerState, options: Options, round: Round) -> bool:
    """Return whether fewer than the quorum can still deliver, though enough learners are live."""
    if state.members_stepping < options.quorum:
        return False  # the clock has stopped too; a learner that joins may be asked
    can = _qualified(state, round)
    if round.closed_at is None:
        can = _possible(state, round)
    if can >= options.quorum or _too_few_with_weight(state, options):
        return False
    present = state.fragments[round.fragment].present
    waiting = [m for m in state.members.values() if round.fragment in m.backlog]
    return can + sum(m.learner not in present for m in waiting) < options.quorum


def _too_few_with_weight(state: SyncerState, options: Options) -> bool:
    """Return whether a new round would need the learners that have weight 0, too."""
    weights = (weighing.weight_of(state, options, each.learner)[0] for each in state.stepping)
    return sum(weight > 0.0 for weight in weights) < options.quorum


def settle_round(
    state: SyncerState, options: Options, now: float, round: Round
) -> list[SyncerEffect]:
    round.settled_at = now
    round.version = Version(state.term, round.base.counter + 1)
    # From here on, arrivals belong to the next round.
    round.folded = state.fragments[round.fragment].take_folded()
    weights = [(ask.party, ask.weight) for ask in round.folded]
    limited: tuple[tuple[str, float], ...] = ()
    if not options.secure:  # otherwise its learners have limited the weights of their cohort
        limited = factors(options.quotas, weights)  # break: factors-not-ordered
    why = round.close_reason
    if limited:
        why = f"{why}; " + ", ".join(f"{name}'s weight times {by:.3g}" for name, by in limited)
    merge = Merge(round.number, round.fragment, round.version, round.base, why, limited)
    spent = privacy_account.merges(state, options, round.fragment, round.folded)
    twins = same_data.noticed(state.twins, round.folded, round.tick, options.period)
    return [*spent, merge, *collected(round), *_note_lateness(state, options, round), *twins]


def _note_lateness(state: SyncerState, options: Options, round: Round) -> list[SyncerEffect]:
    """Warn once if no contribution is in time any more: outer steps then lag by a period."""
    is_late = participation(options).is_late(round)
    state.late_rounds = state.late_rounds + 1 if is_late else 0
    if state.late_rounds != max(LATE_ROUNDS_MIN, len(state.fragments)):
        return []
    text = f"all contributions to the last {state.late_rounds} rounds came late"
    why = (
        "outer steps lag and can diverge: raise sync.overlap_steps, or send less (sync.adapt does "
        "both)"
    )
    return [Note(text, why, warns=True)]


def abandon(
    state: SyncerState, options: Options, now: float, round: Round, reason: str
) -> list[SyncerEffect]:
    """End a round without a merge. What was folded goes into the fragment's next round."""
    effects = collected(round)
    if round.secure is not None:
        effects += _discard(state, options, now, round, reason)
    del state.rounds[round.fragment]
    entry = state.fragments[round.fragment]
    if state.phase == "running" and round.next_tick is not None:
        state.queue[round.fragment] = round.next_tick  # it became due while the round was open
    elif state.phase == "running":
        state.again.add(round.fragment)
    elif round.final:
        effects += _swept(state, round, reason)
    effects.append(Broadcast(GivenUp(round.fragment, reason), reason))
    effects.append(round.finished(now, "abandoned", reason, entry.under_way))
    return effects


def _discard(
    state: SyncerState, options: Options, now: float, round: Round, reason: str
) -> list[SyncerEffect]:
    """Discard all contributions to a secure sum. Masked, they are useless for another round."""
    assert round.secure is not None
    round.secure.stage = "opening"  # it takes no more requests
    entry, effects = state.fragments[round.fragment], list[SyncerEffect]()
    for ask in list(entry.asks.values()):
        effects += close_request(state, options, now, ask, "refused", reason, "abandoned")
    effects += drop_relayed(state, round, reason)
    for ask in entry.take_folded():
        if entry.made.get(ask.learner) == ask.base:
            entry.forget(ask.learner)
        effects.append(Send(ask.learner, _abandoned(ask, reason), reason))
    return [*effects, ForgetSum(round.fragment, round.number, reason)]


def drop_relayed(state: SyncerState, round: Round, reason: str) -> list[SyncerEffect]:
    """Discard the masked contributions that relays have folded and not sent."""
    entry, effects = state.fragments[round.fragment], list[SyncerEffect]()
    relayed = list(entry.relayed)
    for ask in relayed:
        ask.state, ask.reason = "gone", reason
        entry.void(ask)
        round.fallen[ask.learner] = ask
        owes_nothing(state, round, ask.learner)
        effects.append(Send(ask.learner, _abandoned(ask, reason), reason))
    forget = ForgetFolded(round.fragment, reason)
    relays = sorted({ask.relay for ask in relayed} & state.relays.keys())
    return [*effects, *(Send(relay_peer(relay), forget, reason) for relay in relays)]


def _abandoned(ask: Ask, reason: str) -> Outcome:
    return Outcome(ask.fragment, ask.name, "abandoned", reason, None)


def begin_sweep(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Abandon the open rounds: every fragment has closing rounds from now on (rule 12)."""
    effects: list[SyncerEffect] = []
    for round in list(state.rounds.values()):
        # A merge at the worker cannot be taken back; it finishes first.
        if round.settled_at is None:  # break: final-sweep-keeps-rounds
            effects += abandon(state, options, now, round, "the run ends")
    return effects


def _swept(state: SyncerState, round: Round, problem: str) -> list[SyncerEffect]:
    """Finish a closing round: repeat it if a learner may have more, otherwise log what is missing.

    A contribution that was requested before the end is not all that its learner has. A ``problem``
    counts as a failed try.
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
    text = f"fragment {round.fragment} lacks the last training of {missing}"
    reason = lost[0].reason or problem
    return [Note(text, f"{reason}; closing rounds that failed: {entry.sweep_tries}")]


def merged(
    state: SyncerState, options: Options, now: float, number: int, fragment: int, digest: str
) -> list[SyncerEffect]:
    """Publish the new copy that the worker has made, and send the outcomes."""
    round = state.rounds.get(fragment)
    if round is None or round.number != number or round.version is None:
        return []
    assert round.closed_at is not None
    del state.rounds[fragment]
    entry = state.fragments[fragment]
    entry.base, entry.version, entry.digest = round.base, round.version, digest
    entry.published_at, entry.renamed = now, False
    entry.failures, entry.retry_at = 0, None
    for name, base in list(entry.made.items()):
        if name not in state.members and not visits.remembers(options, round.version, base):
            entry.forget(name)
    if options.devices:
        entry.extend_chain(fragment, state.clock, options.chain)
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
    effects += _sums_settled(fragment, round.folded, "merged", "")
    took_part = {ask.learner for ask in round.folded}
    entry.missed = {m.learner for m in state.stepping if m.learner not in took_part}
    effects.append(round.finished(now, "merged", round.close_reason, entry.under_way))
    return effects


def merge_failed(
    state: SyncerState, options: Options, now: float, number: int, fragment: int, reason: str
) -> list[SyncerEffect]:
    """Pause a fragment after a failed merge. What was folded is lost."""
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
            entry.forget(ask.learner)  # it is lost, so this base may be requested again
        effects.append(Send(ask.learner, _abandoned(ask, reason), reason))
    effects += _sums_settled(fragment, round.folded, "void", reason)
    effects.append(Broadcast(GivenUp(fragment, reason), reason))
    effects.append(round.finished(now, "abandoned", reason, entry.under_way))
    return effects + serve_idle(state, options, now)


# Requests: to which learner, when, and from which version (rules 3, 4 and 6)


def ask_if_qualified(
    state: SyncerState, options: Options, now: float, round: Round, member: Member
) -> list[SyncerEffect]:
    """Give a learner its turn in a round, the moment it qualifies (rule 3).

    The closing sweep also sends requests to learners that reconnect while payloads are in progress.
    """
    over = round.settled_at if round.final else round.closed_at
    if over is not None or not member.connected or member.learner in round.turned:
        return []
    if not round.takes_requests:
        return []
    try:
        why = _qualifies(state, options, round, member)
    except MethodError as error:
        return _rule_failed(state, str(error))
    if why is None:
        return []
    fragment, entry = round.fragment, state.fragments[round.fragment]
    base = _base(state, options, now, member, fragment)
    if base is None and not _gives_nothing_more(options, entry, member):
        return []
    round.turn(member.learner, stepping=member.reported_at is not None)
    if entry.is_relayed(member.learner):
        round.awaited.add(member.learner)  # break: relayed-contribution-not-awaited
    if member.learner in entry.asks:
        if round.final:
            round.awaited.add(member.learner)
        else:
            member.backlog.add(fragment)
        return []
    if base is None:
        return []
    if _hurried(state, member) or not _is_busy(state, options, member):
        return _ask(state, options, now, member, fragment, base, why)
    member.backlog.add(fragment)
    return serve(state, options, now, member)


def _gives_nothing_more(options: Options, entry: FragmentState, member: Member) -> bool:
    """Return whether a learner without a base has had its turn all the same."""
    return entry.has_since_version(member.learner) or _is_barred(options, entry, member.learner)


def _base(
    state: SyncerState, options: Options, now: float, member: Member, fragment: int
) -> Version | None:
    """Return the version from which a learner is to contribute; ``None``: there is none.

    If the learner is about to hold the newest version, the request waits for that one.
    """
    entry = state.fragments[fragment]
    base = _held_base(state, options, member, fragment)
    if base is not None or entry.has_since_version(member.learner):
        return base
    if _is_barred(options, entry, member.learner):
        return None
    since = 0.0 if entry.published_at is None else now - entry.published_at
    comes = since <= options.overlap * state.step_seconds
    return entry.version if comes or _hurried(state, member) else None


def _held_base(
    state: SyncerState, options: Options, member: Member, fragment: int
) -> Version | None:
    """Return the held version, if a contribution from it can still be merged."""
    entry = state.fragments[fragment]
    newest, held = entry.version, member.held.get(fragment)
    assert newest is not None
    if held is None or _is_barred(options, entry, member.learner):
        return None
    made = held == entry.made.get(member.learner)
    if made and not visits.may_again(options, entry, member, fragment):
        return None
    age = newest.counter - held.counter
    late = held.term == newest.term and 0 < age <= options.age_max
    return held if held == newest or (late and options.late == "next") else None


def _is_barred(options: Options, entry: FragmentState, learner: str) -> bool:
    """Return whether differential privacy keeps a learner out of a fragment's next merge."""
    return has_spent(options, entry, learner) or is_in_next(options, entry, learner)


def _hurried(state: SyncerState, member: Member) -> bool:
    return state.phase == "sweeping" or member.leaving_with is not None


def _is_busy(state: SyncerState, options: Options, member: Member) -> bool:
    """Return whether further requests to a learner must wait for its present uploads."""
    full = len(member.under_way) >= options.open_rounds_max
    return full or member.pressed or has_backlog(state, options, member)


def has_backlog(state: SyncerState, options: Options, member: Member) -> bool:
    """Return whether a learner could receive another request, once its link is free."""
    return any(_can_be_served(state, options, member, p) for p in member.backlog)


def _qualifies(state: SyncerState, options: Options, round: Round, member: Member) -> str | None:
    if round.final:
        return "the closing sweep requests from all learners"
    if member.reported_at is None:
        return None
    return participation(options).why_asked(options, state, round, member)


def _rule_failed(state: SyncerState, reason: str) -> list[SyncerEffect]:
    """Warn once. Rounds without a quorum still request from all learners, see `ask_again`."""
    if state.rule_failed:
        return []
    state.rule_failed = True
    return [Note(RULE_FAILED, reason, warns=True)]


def held_more(
    state: SyncerState, options: Options, now: float, member: Member, fragment: int
) -> list[SyncerEffect]:
    """Serve a learner that holds another version, which may have been the missing base."""
    ask, round = state.fragments[fragment].asks.get(member.learner), state.rounds.get(fragment)
    if ask is not None and ask.base == member.held[fragment]:
        ask.base_at = now
    effects = [] if round is None else ask_if_qualified(state, options, now, round, member)
    return effects + serve(state, options, now, member)


def ask_returned(
    state: SyncerState, options: Options, now: float, member: Member, trained: Sequence[int]
) -> list[SyncerEffect]:
    """Request all that a device has trained alone and that can still be merged (rule 23)."""
    effects: list[SyncerEffect] = []
    for fragment in trained if state.phase == "running" else ():
        base = _held_base(state, options, member, fragment)
        if base is not None and fragment not in member.under_way:
            why = "it has trained the fragment alone"
            effects += _ask(state, options, now, member, fragment, base, why)
    return effects


def serve(state: SyncerState, options: Options, now: float, member: Member) -> list[SyncerEffect]:
    """Send a learner with a backlog and a free link its next request.

    The fragment that it has trained longest comes first, see `AHEAD_MAX`.
    """
    leaves = participation(options).drains_at_once(member)
    if not member.connected or state.phase != "running" or (member.under_way and not leaves):
        return []
    ready = [p for p in member.backlog if _can_be_served(state, options, member, p)]
    if leaves:
        return _ask_for_all(state, options, now, member, ready)
    if not ready:
        return []
    # Just after its round, a fragment in the backlog has hardly any training.
    soon = participation(options).due_soon(options, state.clock) - member.backlog
    ready += [p for p in soon & state.fragments.keys() if _can_be_served(state, options, member, p)]
    least = min(member.uploads[p] for p in ready)
    fragment, *upcoming = sorted(ready, key=lambda p: _urgency(state, options, member, p, least))
    why = "the fragment is in its backlog, and its link is free"
    if fragment not in member.backlog:
        why = "it has a backlog, and the fragment is due soon"
    member.backlog.discard(fragment)
    upcoming = upcoming[: options.open_rounds_max]
    base = _held_base(state, options, member, fragment)
    assert base is not None
    return _ask(state, options, now, member, fragment, base, why, tuple(upcoming))


def _ask_for_all(
    state: SyncerState, options: Options, now: float, member: Member, ready: Sequence[int]
) -> list[SyncerEffect]:
    """Request all fragments of a leaving learner at once."""
    effects: list[SyncerEffect] = []
    for fragment in sorted(set(ready) - member.under_way):
        member.backlog.discard(fragment)
        base = _held_base(state, options, member, fragment)
        assert base is not None
        effects += _ask(state, options, now, member, fragment, base, "it is about to leave")
    return effects


def serve_idle(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Serve idle learners with a backlog whose fragments were being merged before."""
    effects: list[SyncerEffect] = []
    for member in state.members.values():
        if member.backlog and (not member.under_way or member.leaving_with is not None):
            effects += serve(state, options, now, member)
    return effects


def ask_again(state: SyncerState, options: Options, round: Round) -> None:
    """Put a fragment without a quorum into the backlog of all learners that could contribute.

    The learners with a request may have failed, and others may have had no turn. The round must not
    wait for one slow link.
    """
    entry = state.fragments[round.fragment]
    if round.settled_at is not None or round.final or has_quorum(entry, options):
        return
    for member in state.stepping:
        if member.learner not in entry.asks and not entry.has_since_version(member.learner):
            member.backlog.add(round.fragment)


def _can_be_served(state: SyncerState, options: Options, member: Member, fragment: int) -> bool:
    round = state.rounds.get(fragment)
    if options.secure:
        # A masked contribution is only of use in the sum of its round.
        entry = state.fragments[fragment]
        open_for_it = round is not None and round.takes_requests
        if not open_for_it or member.learner in entry.present:
            return False
    merges = round is not None and round.settled_at is not None
    # break: due-during-merge-not-asked
    if merges and not participation(options).asks_during_merge:
        return False
    # break: backlog-never-requested
    return _held_base(state, options, member, fragment) is not None


def _urgency(
    state: SyncerState, options: Options, member: Member, fragment: int, least: int
) -> tuple[bool, bool, int, int, int]:
    round = state.rounds.get(fragment)
    waits = round is not None and round.delivery_over
    waits = waits and not has_quorum(state.fragments[fragment], options)
    times = member.uploads[fragment]
    trained = member.step - member.held_step.get(fragment, member.step)
    # break: backlog-first-fragment
    return (not waits, times > least + AHEAD_MAX, -trained, times, fragment)


def due_by_own_steps(
    state: SyncerState, options: Options, now: float, member: Member, since: int
) -> list[SyncerEffect]:
    """Request what a learner's own steps since ``since`` make due."""
    due = participation(options).due(options, since, member.step)
    if due is None or state.phase != "running":
        return []
    effects: list[SyncerEffect] = []
    for step, fragment in due:
        if fragment not in state.fragments or fragment in member.backlog:
            continue
        base = _held_base(state, options, member, fragment)
        asked = fragment in member.under_way or not member.connected
        if asked or base is None or _is_busy(state, options, member):
            member.backlog.add(fragment)
            continue
        why = f"its own step {step} makes fragment {fragment} due with it"
        effects += _ask(state, options, now, member, fragment, base, why)
    return effects + serve(state, options, now, member)


def has_quorum(entry: FragmentState, options: Options) -> bool:
    """Return whether enough learners have delivered for a merge."""
    return len(entry.delivered) >= options.quorum  # break: quorum-of-one


def _ask(
    state: SyncerState,
    options: Options,
    now: float,
    member: Member,
    fragment: int,
    base: Version,
    why: str,
    upcoming: tuple[int, ...] = (),
) -> list[SyncerEffect]:
    entry, round = state.fragments[fragment], state.rounds.get(fragment)
    if round is not None and round.settled_at is not None:
        round = None  # it is already being merged, without this contribution
    state.asks += 1
    name, learner = Asking(state.term, state.asks), member.learner
    # A path per request: a late upload for an old request cannot answer a new one.
    path = f"/up/{name.term}/{fragment}/{learner}/{member.epoch}/{name.number}"
    number, final = (0, False) if round is None else (round.number, round.final)
    ask = Ask(name, fragment, learner, member.epoch, path, base, now, number, final)
    ask.relay, ask.weightless = member.relay, weighing.weight_of(state, options, learner)[0] == 0.0
    if options.ladder:
        ask.codec = options.ladder[member.uplink.rung][0]
    ask.base_at = now if member.held.get(fragment) == base else None
    entry.ask(ask)
    member.under_way.add(fragment)
    was_asked(member, fragment)
    if round is not None:
        if learner not in round.turned:
            round.turn(learner, stepping=member.reported_at is not None)
        # A request after the window may contribute, but the round does not wait for it.
        if round.closed_at is None or round.final or waits_for_leaver(state, round):
            round.awaited.add(learner)
        note_quorum(state, options, now, round, learner)
    tick = participation(options).tick(state, member, round)
    pull = Pull(
        fragment=fragment,
        ask=name,
        base=base,
        tick=tick,
        codec=ask.codec or options.uplink_codec,
        alignment=options.alignment,
        path=path,
        final=final,
        coming=upcoming,
        packed=not ask.relay,
    )
    return [
        Expect(path, learner, member.epoch, number, fragment, name, why, ask.codec, ask.relay),
        Send(learner, pull, why),
    ]


def note_quorum(
    state: SyncerState, options: Options, now: float, round: Round, learner: str
) -> None:
    """Record when the number of learners with a request reaches the quorum."""
    if round.quorum_at is None and _qualified(state, round) >= options.quorum:
        round.quorum_at, round.quorum_learner = now, learner
        state.timing.quorum.update(now - round.opened_at)


def ask_leaver(
    state: SyncerState, options: Options, now: float, member: Member
) -> list[SyncerEffect]:
    """Request from a leaving learner whatever an open round can still take."""
    if participation(options).drains_at_once(member):
        return serve(state, options, now, member)
    effects: list[SyncerEffect] = []
    for round in state.rounds.values() if member.connected else ():
        fragment, entry = round.fragment, state.fragments[round.fragment]
        wanted = member.leaving_with is not None and fragment in member.leaving_with
        here = member.learner in entry.asks or entry.has_since_version(member.learner)
        base = None if here or not wanted else _base(state, options, now, member, fragment)
        if base is not None and round.settled_at is None and round.takes_requests:
            round.leaver = member.learner
            member.backlog.discard(fragment)
            effects += _ask(state, options, now, member, fragment, base, "it is about to leave")
    return effects


# Notifications of relays (rule 22); see `relayed`


def collect(state: SyncerState, options: Options, now: float, round: Round) -> list[SyncerEffect]:
    """Notify the relays of a round that opens, with the time that their sums have.

    Without a delivery window, this is until a quorum has delivered. A device leaves as soon as its
    contribution is here, so it does not wait for others.
    """
    round.collecting = tuple(sorted(state.relays))
    gathers = round.delivery_over and not options.devices
    round.gathering = round.collecting if gathers else ()
    seconds = COPY_SECONDS if round.final or gathers else max(0.0, round.deliver_until - now)
    order = Collect(round.fragment, round.number, seconds)
    return [Send(relay_peer(relay), order, "a round opens") for relay in round.collecting]


def gathered(state: SyncerState, options: Options, round: Round) -> list[SyncerEffect]:
    """Order the relays to send their sums as soon as these complete the quorum.

    A relay with relays behind it receives the order when it has their sums.
    """
    entry = state.fragments[round.fragment]
    # Count first, because every event leads here. A learner may have contributed twice.
    if not round.gathering or len(entry.relayed) + len(entry.delivered) < options.quorum:
        return []
    if len(entry.delivered.keys() | {ask.learner for ask in entry.relayed}) < options.quorum:
        return []
    awaiting = awaiting_sums(state, entry.relayed)
    ready = [relay for relay in round.gathering if relay not in awaiting]
    round.gathering = tuple(relay for relay in round.gathering if relay in awaiting)
    order = Collect(round.fragment, round.number, 0.0)
    return [Send(relay_peer(relay), order, "a quorum has delivered") for relay in ready]


def collected(round: Round, awaiting: Collection[str] = ()) -> list[SyncerEffect]:
    """Notify relays, except ``awaiting`` ones, that nothing more of a round will reach them."""
    notified = [relay for relay in round.collecting if relay not in awaiting]
    round.collecting = tuple(relay for relay in round.collecting if relay in awaiting)
    end = Collected(round.fragment, round.number)
    return [Send(relay_peer(relay), end, "the round's window is over") for relay in notified]


def awaiting_sums(state: SyncerState, asks: Iterable[Ask]) -> set[str]:
    """Return the relays to which relays behind them will send sums with these contributions."""
    found = set[str]()
    if any(state.relays.values()):
        for relay in {ask.relay for ask in asks}:
            upstream = state.relays.get(relay, "")
            while upstream and upstream not in found:
                found.add(upstream)
                upstream = state.relays.get(upstream, "")
    return found


def _sums_settled(
    fragment: int, asks: Sequence[Ask], verdict: SumVerdict, reason: str
) -> list[SyncerEffect]:
    """Send each relay the outcome of its sums, which were merged or not."""
    sums = sorted({sum for ask in asks for sum in ask.sums})
    why = reason or "its round is merged"
    return [
        Send(relay_peer(relay), SumOutcome(fragment, number, verdict, reason), why)
        for relay, number in sums
    ]
