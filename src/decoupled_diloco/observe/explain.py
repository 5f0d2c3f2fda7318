"""Why a round closed when it did, in words; see also `explain_learner` and `explain_step`.

Nothing is invented: every number is on the shards' tapes, or follows from them by the run's own
formulas (`token_weight`, the grace window's inputs as `RoundOpened` tells them).
"""

from __future__ import annotations

from decoupled_diloco.config.method import options_of
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge import token_weight
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shard_data import RoundLog, ShardLog
from decoupled_diloco.observe.words import (
    BULLET,
    after,
    listing,
    many,
    natural,
    numbers,
    percent,
    when,
)
from decoupled_diloco.protocol.effects import Participant, RoundFinished
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.versions import Asking
from decoupled_diloco.units import format_count, format_duration


def explain_round(run: RunModel, number: int, shard: int | None = None) -> list[str]:
    """What happened in a round, and why.

    Args:
        run: What is known of the run.
        number: The round's number; every shard counts its own.
        shard: Of this shard only; default: of all.

    Returns:
        Paragraphs and bullets.

    Raises:
        ConfigError: There is no such round; the message says which there are.
    """
    shards = shards_of(run, shard)
    lines: list[str] = []
    for log in shards:
        for round in sorted((*log.rounds, *log.open.values(), *log.lost), key=_age):
            if round.number == number:
                lines += ["", *_round(run, log, round)] if lines else _round(run, log, round)
    if not lines:
        known = [
            f"{log.name}: {numbers(r.number for r in (*log.rounds, *log.open.values()))}"
            for log in shards
        ]
        raise ConfigError(f"there is no round {number}; there are {'; '.join(known) or 'none'}")
    return lines


def options_in(run: RunModel) -> Options | None:
    """The run's settings of the method; ``None`` if the tape does not tell them."""
    try:
        return options_of(run.settings)
    except (KeyError, TypeError, ValueError, ConfigError):
        return None


def _age(round: RoundLog) -> tuple[int, float]:
    return (round.life, round.opened_at)


def shards_of(run: RunModel, shard: int | None) -> list[ShardLog]:
    """The shard of this number, or all.

    Raises:
        ConfigError: There is none of this number; the message names those there are.
    """
    logs = list(run.shards.values())
    if shard is None:
        return logs
    chosen = [log for log in logs if log.index == shard]
    if not chosen:
        names = listing([log.name for log in logs])
        raise ConfigError(f"--shard {shard} is no shard on this tape: there is {names}")
    return chosen


def _round(run: RunModel, shard: ShardLog, round: RoundLog) -> list[str]:
    options = options_in(run)
    result = round.result
    lines = [_title(shard, round), "", _opening(run, shard, round, options)]
    lines += ["", "Who took part:", *_participants(run, shard, round)]
    if result is None:
        return [*lines, "", _unfinished(run, shard, round)]
    lines += ["", _quorum(result, options), _grace(round, result, options)]
    lines += [_closing(result, options), _durations(round, result)]
    return [*lines, _outcome(shard, round, result)]


def _title(shard: ShardLog, round: RoundLog) -> str:
    title = f"Round {round.number} of {name_of(shard, round.life)}: fragment {round.fragment}"
    if round.tick is not None:
        title += f", step {round.tick}"
    if round.result is None:
        return title + ", not over"
    verdict = "merged" if round.result.verdict == "merged" else "given up"
    return f"{title}, {verdict} {after(round.result.finished_seconds)}"


def name_of(shard: ShardLog, life: int) -> str:
    """A shard, and which of its lives if there were several: each counts its rounds from 1."""
    lives = len(shard.lives)
    return f"{shard.name} in life {life} of {lives}" if lives > 1 else shard.name


def _opening(run: RunModel, shard: ShardLog, round: RoundLog, options: Options | None) -> str:
    text = f"It opened {when(round.opened_at)} into the run"
    if round.opened is not None and round.opened.closing:
        return text + ", in the closing sweep, in which every fragment gets one last round."
    tick = round.tick
    if tick is None:
        return text + "."
    text += f", because the clock had reached step {tick}, when fragment {round.fragment} is due"
    if options is not None:
        offset = options.offset(round.fragment)
        text += f" (every H = {options.period} steps, at step mod {options.period} = {offset})"
        if tick not in _due_steps(options, round.fragment, tick):
            text += "; it is due again at once because its last round was given up"
    late = next((t for t in shard.ticks_of(round.life) if t.clock >= tick), None)
    if late is not None and round.opened_at - late.at > 1e-3 and options is not None:
        waited = format_duration(round.opened_at - late.at)
        limit = options.open_rounds_max
        text += (
            f". It had waited in the queue for {waited}: at most {many(limit, 'round')} may be open"
            " at once"
        )
    return text + "."


def _due_steps(options: Options, fragment: int, tick: int) -> set[int]:
    return {tick} if fragment in options.due(tick) else set()


# ---- who was in


def _participants(run: RunModel, shard: ShardLog, round: RoundLog) -> list[str]:
    result = round.result
    if result is None:
        return [*_asked_so_far(round), *_others(run, shard, round)] or [BULLET + "nobody"]
    weights = token_weights(run, round)
    total = sum(weights.values())
    lines = []
    for participant in result.participants:
        share = weights.get(participant.ask, 0.0) / total if total else None
        lines.append(BULLET + _participant(round, participant, share))
    return [*lines, *_others(run, shard, round)] or [BULLET + "nobody"]


def token_weights(run: RunModel, round: RoundLog) -> dict[Asking, float]:
    """The weight of every contribution, from the counters that were folded and the run's rule."""
    uniform = run.settings_of("sync").get("weighting") == "uniform"
    return {
        name: fold.discount * (1.0 if uniform else token_weight(fold.tokens, fold.steps))
        for name, (_, fold) in round.folds.items()
    }


def _participant(round: RoundLog, participant: Participant, share: float | None) -> str:
    asks = round.asks.get(participant.learner, [])
    why = f" ({asks[-1].why})" if asks else ""
    asked = participant.asked_seconds
    told = after(asked) if asked >= 0 else f"{format_duration(-asked)} before the opening"
    text = f"{participant.learner}: asked {told}{why}"
    if len(asks) > 1:
        text += f", for the {len(asks)}. time"
    if participant.state == "folded":
        delivered = participant.delivered_seconds or 0.0
        told = after(delivered) if delivered >= 0 else "before it as well"
        text += f", delivered {told}: {many(participant.steps, 'step')}, "
        text += f"{format_count(participant.tokens)} tokens"
        if participant.age:
            text += f", late by {many(participant.age, 'version')}"
        fold = round.folds.get(participant.ask)
        if fold is not None and "capped" in fold[1].why:
            text += f" ({fold[1].why})"
        if share is not None:
            text += f", weight {percent(share)}"
        return text + "."
    if participant.state == "late":
        text += "; still under way when the round ended: it goes into the fragment's next one"
        return text + f"{_came(round, participant)}."
    said = {
        "declined": "it declined",
        "refused": "its body was refused",
        "gone": "gone before it delivered",
        "waiting": "had not delivered when the round ended",
    }
    text += f"; {said.get(participant.state, participant.state)}: {participant.reason or 'no why'}"
    fallen = round.fallen.get(participant.learner)
    if fallen is not None:
        text += f" (given up {format_duration(fallen[0] - round.opened_at)} after the opening)"
    return text + f"{_came(round, participant)}."


def _came(round: RoundLog, participant: Participant) -> str:
    late = round.late_bodies.get(participant.learner)
    if late is None or round.result is None:
        return ""
    return f"; its body came {format_duration(late - round.finished_at)} after the end"


def _asked_so_far(round: RoundLog) -> list[str]:
    lines = []
    for name, asks in round.asks.items():
        text = f"{name}: asked {after(asks[-1].at - round.opened_at)} ({asks[-1].why})"
        if asks[-1].name in round.folds:
            delivered = round.folds[asks[-1].name][0]
            text += f", delivered {after(delivered - round.opened_at)}"
        elif name in round.fallen:
            text += f"; it fell out: {round.fallen[name][1]}"
        else:
            text += ", not delivered yet"
        lines.append(f"{BULLET}{text}.")
    return lines


def _others(run: RunModel, shard: ShardLog, round: RoundLog) -> list[str]:
    """Those that were not asked: without a new step in time, out of reach, or not live."""
    asked = set(round.asks)
    if round.result is not None:
        asked |= {participant.learner for participant in round.result.participants}
    lines = []
    for name in sorted(run.learners, key=natural):
        if name not in asked and (text := _absent(run, shard, round, name)):
            lines.append(f"{BULLET}{name}: {text}.")
    return lines


def _absent(run: RunModel, shard: ShardLog, round: RoundLog, name: str) -> str:
    result, until = round.result, min(round.finished_at, run.duration)
    if result is None or name in round.live:
        present = [s for s in shard.stays if s.learner == name and s.since <= until]
        if result is None and not (present and present[-1].until is None):
            return "not live"
        return "live, but not asked: " + _window_missed(round, name)
    if name in round.unreachable:
        return "live, but not asked: its connection was broken"
    stays = [s for s in shard.stays if s.learner == name]
    gone = [s for s in stays if s.until is not None and s.until <= until]
    if gone and gone[-1].until is not None:
        ago = format_duration(max(0.0, until - gone[-1].until))
        return f"not live: {gone[-1].reason}, {ago} before the round ended"
    later = [s for s in stays if s.since > until]
    if later:
        return f"not live yet: it joined {when(later[0].since)} into the run"
    return "not live: it has never joined this shard"


def _window_missed(round: RoundLog, name: str) -> str:
    result = round.result
    if result is None or result.closed_seconds is None:
        return "it has no new step yet"
    before = f"before the window closed {after(result.closed_seconds)}"
    text = f"it had {'no new' if round.live.get(name) is not None else 'taken no'} step {before}"
    reported = round.late_reports.get(name)
    if reported is None:
        return text + ", nor any after that on this tape"
    late = reported - (round.opened_at + result.closed_seconds)
    return f"{text}; its next report came {format_duration(max(0.0, late))} too late"


# ---- why it closed


def _quorum(result: RoundFinished, options: Options | None) -> str:
    k = "" if options is None else f" of K = {options.quorum}"
    if result.quorum_seconds is None:
        return f"The quorum{k} was never reached."
    at = result.quorum_seconds
    name = result.quorum_learner
    by = f", when {name} qualified" if name else ", with what was asked for before it opened"
    return f"The quorum{k} was reached {after(at)}{by}."


def _grace(round: RoundLog, result: RoundFinished, options: Options | None) -> str:
    opened = round.opened
    if opened is not None and opened.closing:
        return "A closing round has no grace window: it asks everyone and waits for them."
    averages = (
        result.quorum_average_seconds,
        result.merge_average_seconds,
        result.broadcast_average_seconds,
    )
    text = f"The grace window was {format_duration(result.grace_seconds)}"
    if result.grace_seconds == 0.0:
        text = "There was no grace window"
    if options is None or any(average is None for average in averages):
        return f"{text}; what it was derived from is not on this tape."
    if options.grace_margin == 0.0:
        return f"{text}: grace_margin is 0."
    quorum, merge, broadcast = (format_duration(average or 0.0) for average in averages)
    slack = result.slack_seconds
    shown = f"{'−' if slack < 0 else ''}{format_duration(abs(slack))}"
    if result.step_seconds == 0.0:
        return f"{text}: the duration of a step was not known yet."
    sign = "; a negative slack leaves no time" if slack <= 0 else ""
    return (
        f"{text}: γ = {options.grace_margin:g} of a slack of {shown}, which is τ·ξ_step − (ξ_quorum"
        f" + ξ_sync) = {options.overlap} × {format_duration(result.step_seconds)} − ({quorum} + "
        f"{merge} to merge + {broadcast} to broadcast), the shard's moving averages{sign}."
    )


def _closing(result: RoundFinished, options: Options | None) -> str:
    if result.closed_seconds is None:
        return "The window never closed."
    text = f"The window closed {after(result.closed_seconds)}: {result.why}"
    spare = result.grace_seconds - result.closed_seconds
    if spare > 1e-3 and result.why.startswith("all"):
        text += f", {format_duration(spare)} before its end"
    return text + "."


def _durations(round: RoundLog, result: RoundFinished) -> str:
    delivered = [p.delivered_seconds for p in result.participants if p.delivered_seconds]
    parts = []
    if delivered:
        slowest = max(result.participants, key=lambda p: p.delivered_seconds or 0.0)
        if len(delivered) > 1:
            last = f"the last one {after(max(delivered))}, from {slowest.learner}"
            parts.append(f"the first body came {after(min(delivered))}, {last}")
        else:
            parts.append(f"the body came {after(delivered[0])}")
    if result.uploaded_seconds is not None:
        merge = format_duration(result.finished_seconds - result.uploaded_seconds)
        parts.append(f"everything was in {after(result.uploaded_seconds)}, the merge took {merge}")
    if round.held_at:
        held = sorted((at - round.finished_at, name) for name, at in round.held_at.items())
        times = [f"{name} {after(max(0.0, seconds))}" for seconds, name in held]
        parts.append(f"who held the new copy: {', '.join(times)}")
    if not parts:
        return "No body came."
    return f"From the opening on: {'; '.join(parts)}."


def _outcome(shard: ShardLog, round: RoundLog, result: RoundFinished) -> str:
    before = "" if result.base is None else f" from {result.base}"
    if result.verdict == "merged":
        return f"Merged: fragment {round.fragment} went{before} to version {result.version}."
    text = f"Given up: {result.reason}. The fragment stayed as it was"
    text += "" if result.base is None else f" (version {result.base})"
    following = [r for r in shard.rounds if r.life == round.life]
    own = [r.number for r in following if r.fragment == round.fragment]
    later = [number for number in own if number > round.number]
    return text + (f"; its next round was round {min(later)}." if later else ".")


def _unfinished(run: RunModel, shard: ShardLog, round: RoundLog) -> str:
    age = format_duration(max(0.0, run.duration - round.opened_at))
    if round in shard.lost:
        return f"It was open when {shard.name}'s process ended, and went with it."
    waiting = [
        name
        for name, asks in round.asks.items()
        if asks[-1].name not in round.folds and name not in round.fallen
    ]
    if round.merging_at is not None:
        return f"It has been open for {age}; everything is in, and it is being merged."
    grace = "" if round.opened is None else format_duration(round.opened.grace_seconds)
    window = f" Its grace window is {grace}." if grace else ""
    return f"It has been open for {age} and waits for {listing(waiting)}.{window}"
