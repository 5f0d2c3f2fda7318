"""What a shard makes of a contribution that has arrived (rules 6 and 13). Functions of its state.

It is refused, or folded: with the tokens that are believed, and clipped where its norm is too
large.
"""

from __future__ import annotations

from decoupled_diloco.protocol.events import BodyArrived
from decoupled_diloco.protocol.gate import norm_limit, remember, remember_own
from decoupled_diloco.protocol.messages import Verdict
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.rounds import Ask
from decoupled_diloco.protocol.syncer_state import SyncerState


def problem_of(
    state: SyncerState, options: Options, ask: Ask, event: BodyArrived
) -> tuple[Verdict, str]:
    """Why a contribution is not folded; nothing if it is."""
    if event.base != ask.base:
        return "behind", f"its base {event.base} is not {ask.base}"
    if event.steps < 1 or event.tokens < 1:
        return "refused", f"{event.tokens} tokens in {event.steps} steps"
    age = age_of(state, ask)
    if age > 0 and options.late == "drop":
        return "refused", f"late by {age} versions"
    if age > options.late_rounds_max:
        return "refused", f"late by {age} versions, more than {options.late_rounds_max}"
    return "accepted", ""


def age_of(state: SyncerState, ask: Ask) -> int:
    """By how many versions a contribution is late if it arrives now."""
    entry, round = state.fragments[ask.fragment], state.rounds.get(ask.fragment)
    assert entry.version is not None
    merging = round is not None and round.settled_at is not None
    return entry.version.counter - ask.base.counter + merging  # break: arrival-during-merge-on-time


def tokens_believed(state: SyncerState, event: BodyArrived) -> int:
    """No more tokens than its learner has reported, nor than so many steps can have (rule 13)."""
    known = state.identities[event.learner]
    reported = max(1, known.tokens + known.earlier_tokens)
    # break: tokens-beyond-reports
    return min(reported, state.tokens_believed(event.tokens, event.steps))


def gate_scale(state: SyncerState, options: Options, event: BodyArrived) -> tuple[float, str]:
    """What the norm gate makes of a contribution: its scale, 0 if it is refused, and why."""
    norms, own = state.fragments[event.fragment].norms, state.identities[event.learner].sizes
    found = norm_limit(norms, own, event.steps, options.norm_gate)
    remember(norms, event.norm, event.steps)
    if found is None:
        return (1.0, "")
    limit, usual = found
    remember_own(own, event.norm, usual)
    if event.norm <= limit:
        return (1.0, "")
    text = (
        f"its norm {event.norm:.3g} in {event.steps} steps exceeds {limit:.3g}: "
        f"norms of this fragment are {usual:.3g} as a rule"
    )
    if options.oversized == "clip":
        return (limit / event.norm, f"clipped: {text}")
    return (0.0, text)
