"""Who is asked for a contribution, when, and made from which version (rules 3, 4 and 6).

Functions of a shard's state.

*Flow*. A learner has at most as many contributions under way as a shard has slots. A fragment that
it could not be asked for because of that is in *arrears* with it. A learner in arrears sends one
body at a time: when that is here it is asked, at once and outside of any round, for the fragment
that has not heard it for longest; first for one whose round still lacks its quorum. So a slow link
is always busy, and every fragment hears every learner equally often.

*Base*. A learner is asked for what it has made from the version that it holds. That is the newest
as a rule. A learner whose copies come slowly hardly ever holds the newest: it is asked for what it
has made from an older one, as late as a late body may be, once from each version that it holds.
While it holds nothing that it could contribute from it is not asked, and nothing waits for it.

*By themselves*. With ``participants = "own"`` no tick makes a fragment due. Each learner's own
steps do, every H of them, with this learner alone; the fragment's round opens when its contribution
is here, and merges it at once (rule 21, Async Local-SGD).
"""

from __future__ import annotations

from collections.abc import Sequence

from decoupled_diloco.protocol.draining import waits_for_leaver, was_asked
from decoupled_diloco.protocol.effects import Expect, Send, SyncerEffect
from decoupled_diloco.protocol.membership import Member
from decoupled_diloco.protocol.messages import Pull
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.rounds import Ask, Round
from decoupled_diloco.protocol.syncer_state import FragmentState, SyncerState
from decoupled_diloco.protocol.versions import Asking, Version


def ask_if_qualified(
    state: SyncerState, options: Options, now: float, round: Round, member: Member
) -> list[SyncerEffect]:
    """Gives one learner its turn in a round, the moment it qualifies (rule 3).

    The closing sweep also asks who connects anew while the others' bodies are on their way.
    """
    over = round.settled_at if round.final else round.closed_at
    if over is not None or not member.connected or member.learner in round.turned:
        return []
    why = _qualifies(state, options, round, member)
    if why is None:
        return []
    fragment, entry = round.fragment, state.fragments[round.fragment]
    base = _base(state, options, now, member, fragment)
    if base is None and not entry.has_since_version(member.learner):
        return []
    round.turn(member.learner, stepping=member.reported_at is not None)
    if member.learner in entry.asks:
        if round.final:
            round.awaited.add(member.learner)
        else:
            member.arrears.add(fragment)
        return []
    if base is None:
        return []
    if _hurried(state, member) or not _is_busy(state, options, member):
        return _ask(state, options, now, member, fragment, base, why)
    member.arrears.add(fragment)
    return serve(state, options, now, member)


def _base(
    state: SyncerState, options: Options, now: float, member: Member, fragment: int
) -> Version | None:
    """From which version a learner is to have made a contribution; ``None``: it has none.

    The newest one is worth waiting for to who is about to hold it.
    """
    entry = state.fragments[fragment]
    base = _held_base(state, options, member, fragment)
    if base is not None or entry.has_since_version(member.learner):
        return base
    since = 0.0 if entry.published_at is None else now - entry.published_at
    comes = since <= options.overlap * state.step_seconds
    return entry.version if comes or _hurried(state, member) else None


def _held_base(
    state: SyncerState, options: Options, member: Member, fragment: int
) -> Version | None:
    """The version that a learner holds, if what it makes from that can still be merged."""
    entry = state.fragments[fragment]
    newest, held = entry.version, member.held.get(fragment)
    assert newest is not None
    if held is None or held == entry.made.get(member.learner):
        return None
    age = newest.counter - held.counter
    late = held.term == newest.term and 0 < age <= options.late_rounds_max
    return held if held == newest or (late and options.late == "next") else None


def _hurried(state: SyncerState, member: Member) -> bool:
    return state.phase == "sweeping" or member.leaving_with is not None


def _is_busy(state: SyncerState, options: Options, member: Member) -> bool:
    """Whether what else a learner is asked for has to wait for what it is sending."""
    full = len(member.under_way) >= options.open_rounds_max
    return full or member.pressed or has_arrears(state, options, member)


def has_arrears(state: SyncerState, options: Options, member: Member) -> bool:
    """Whether a learner could be asked for more, once its link is free."""
    return any(_can_be_served(state, options, member, p) for p in member.arrears)


def _qualifies(state: SyncerState, options: Options, round: Round, member: Member) -> str | None:
    if round.final:
        return "the closing sweep asks everyone"
    if member.reported_at is None or options.participants == "own":
        return None  # its own steps say when it is asked
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
    if member.learner in state.fragments[round.fragment].missed:
        # Steps that are an exact multiple of the fastest learner's would otherwise meet the same
        # fragments for ever, and never the others.
        return "it missed this fragment's last round"
    return None


def held_more(
    state: SyncerState, options: Options, now: float, member: Member, fragment: int
) -> list[SyncerEffect]:
    """A learner holds another version: it may have lacked that to be asked."""
    ask, round = state.fragments[fragment].asks.get(member.learner), state.rounds.get(fragment)
    if ask is not None and ask.base == member.held[fragment]:
        ask.base_at = now
    effects = [] if round is None else ask_if_qualified(state, options, now, round, member)
    return effects + serve(state, options, now, member)


def serve(state: SyncerState, options: Options, now: float, member: Member) -> list[SyncerEffect]:
    """Asks a learner in arrears, whose link is free, for what has not heard it for longest."""
    goes = options.participants == "own" and member.leaving_with is not None
    if not member.connected or state.phase != "running" or (member.under_way and not goes):
        return []
    ready = [p for p in member.arrears if _can_be_served(state, options, member, p)]
    if goes:
        return _ask_who_goes(state, options, now, member, ready)
    if not ready:
        return []
    fragment, *coming = sorted(ready, key=lambda p: _urgency(state, options, member, p))
    member.arrears.discard(fragment)
    why = "it is in arrears with this fragment, and its link is free"
    coming = coming[: options.open_rounds_max]
    base = _held_base(state, options, member, fragment)
    assert base is not None
    return _ask(state, options, now, member, fragment, base, why, tuple(coming))


def _ask_who_goes(
    state: SyncerState, options: Options, now: float, member: Member, ready: Sequence[int]
) -> list[SyncerEffect]:
    """Where learners open their rounds, one that is about to go is asked for all it has at once."""
    effects: list[SyncerEffect] = []
    for fragment in sorted(set(ready) - member.under_way):
        member.arrears.discard(fragment)
        base = _held_base(state, options, member, fragment)
        assert base is not None
        effects += _ask(state, options, now, member, fragment, base, "it is about to go")
    return effects


def serve_idle(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Asks those in arrears who could not be asked before: what they lacked was being merged."""
    effects: list[SyncerEffect] = []
    for member in state.members.values():
        if member.arrears and (not member.under_way or member.leaving_with is not None):
            effects += serve(state, options, now, member)
    return effects


def ask_again(state: SyncerState, options: Options, round: Round) -> None:
    """A round lacks its quorum: whoever could contribute is in arrears with its fragment.

    Whom it asked may have failed it, and others had no turn; nobody is to wait for a slow link
    alone.
    """
    entry = state.fragments[round.fragment]
    if round.settled_at is not None or round.final or has_quorum(entry, options):
        return
    for member in state.stepping:
        if member.learner not in entry.asks and not entry.has_since_version(member.learner):
            member.arrears.add(round.fragment)


def _can_be_served(state: SyncerState, options: Options, member: Member, fragment: int) -> bool:
    round = state.rounds.get(fragment)
    # break: due-during-merge-not-asked
    if round is not None and round.settled_at is not None and options.participants != "own":
        return False  # what is being merged makes what it has late
    # break: backlog-never-requested
    return _held_base(state, options, member, fragment) is not None


def _urgency(
    state: SyncerState, options: Options, member: Member, fragment: int
) -> tuple[bool, float, int]:
    round = state.rounds.get(fragment)
    waits = round is not None and round.delivery_over
    waits = waits and not has_quorum(state.fragments[fragment], options)
    # break: backlog-first-fragment
    return (not waits, member.heard_at.get(fragment, float("-inf")), fragment)


def due_by_own_steps(
    state: SyncerState, options: Options, now: float, member: Member, since: int
) -> list[SyncerEffect]:
    """A learner has stepped: what its own steps since then make due, it is asked for at once."""
    if options.participants != "own" or state.phase != "running":  # break: own-steps-never-due
        return []
    effects: list[SyncerEffect] = []
    for step in range(max(since, member.step - options.period) + 1, member.step + 1):
        for fragment in options.due(step):  # break: asked-at-every-step
            if fragment not in state.fragments or fragment in member.arrears:
                continue
            base = _held_base(state, options, member, fragment)
            asked = fragment in member.under_way or not member.connected
            if asked or base is None or _is_busy(state, options, member):
                member.arrears.add(fragment)
                continue
            why = f"its own step {step} makes fragment {fragment} due with it"
            effects += _ask(state, options, now, member, fragment, base, why)
    return effects + serve(state, options, now, member)


def has_quorum(entry: FragmentState, options: Options) -> bool:
    """Whether enough learners have delivered for a merge."""
    return len(entry.delivered) >= options.quorum  # break: quorum-of-one


def _ask(
    state: SyncerState,
    options: Options,
    now: float,
    member: Member,
    fragment: int,
    base: Version,
    why: str,
    coming: tuple[int, ...] = (),
) -> list[SyncerEffect]:
    entry, round = state.fragments[fragment], state.rounds.get(fragment)
    if round is not None and round.settled_at is not None:
        round = None  # it merges without this one
    state.asks += 1
    name, learner = Asking(state.term, state.asks), member.learner
    path = f"/up/{name.term}/{fragment}/{learner}/{member.epoch}/{name.number}"
    number, final = (0, False) if round is None else (round.number, round.final)
    ask = Ask(name, fragment, learner, member.epoch, path, base, now, number, final)
    if options.ladder:
        ask.codec = options.ladder[member.uplink.rung][0]
    ask.base_at = now if member.held.get(fragment) == base else None
    entry.ask(ask)
    member.under_way.add(fragment)
    was_asked(member, fragment)
    if round is not None:
        if learner not in round.turned:
            round.turn(learner, stepping=member.reported_at is not None)
        if round.closed_at is None or round.final or waits_for_leaver(state, round):
            round.awaited.add(learner)
        note_quorum(state, options, now, round, learner)
    tick = state.clock if round is None else round.tick
    if options.participants == "own" and not final:
        tick = member.step
    pull = Pull(
        fragment=fragment,
        ask=name,
        base=base,
        tick=tick,
        codec=ask.codec or options.uplink_codec,
        alignment=options.alignment,
        path=path,
        final=final,
        coming=coming,
    )
    return [
        Expect(path, learner, member.epoch, number, fragment, name, why, ask.codec),
        Send(learner, pull, why),
    ]


def note_quorum(
    state: SyncerState, options: Options, now: float, round: Round, learner: str
) -> None:
    """A round has its quorum as soon as so many learners are asked."""
    present = state.fragments[round.fragment].present
    if round.quorum_at is None and len(present) >= options.quorum:
        round.quorum_at, round.quorum_learner = now, learner
        state.timing.quorum.update(now - round.opened_at)


def ask_leaver(
    state: SyncerState, options: Options, now: float, member: Member
) -> list[SyncerEffect]:
    """Asks who is about to go for whatever an open round can still take."""
    if options.participants == "own":
        return serve(state, options, now, member)
    effects: list[SyncerEffect] = []
    for round in state.rounds.values() if member.connected else ():
        fragment, entry = round.fragment, state.fragments[round.fragment]
        wanted = member.leaving_with is not None and fragment in member.leaving_with
        here = member.learner in entry.asks or entry.has_since_version(member.learner)
        base = None if here or not wanted else _base(state, options, now, member, fragment)
        if base is not None and round.settled_at is None:
            round.leaver = member.learner
            member.arrears.discard(fragment)
            effects += _ask(state, options, now, member, fragment, base, "it is about to go")
    return effects
