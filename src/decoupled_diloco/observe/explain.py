"""Why a round closed when it did, in words; see also `explain_learner` and `explain_step`.

Nothing is invented: every number is on the shards' tapes, or follows from them by the run's own
formulas (`token_weight`, the grace window's inputs as `RoundOpened` tells them).
"""

from __future__ import annotations

import math

from decoupled_diloco.config.method import options_of, read_settings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge import token_weight
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shard_data import RoundLog, ShardLog
from decoupled_diloco.observe.words import (
    BULLET,
    after,
    listing,
    many,
    numbers,
    ordinal,
    percent,
    when,
)
from decoupled_diloco.protocol.effects import Participant, RoundFinished
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.revisions import Revision
from decoupled_diloco.protocol.versions import Asking
from decoupled_diloco.units import format_count, format_duration

_ANSWERS = {
    "declined": "it declined",
    "refused": "its body was refused",
    "gone": "gone before it delivered",
    "waiting": "had not delivered when the round ended",
}


def explain_round(run: RunModel, number: int, shard: int | None = None) -> list[str]:
    """What happened in a round of one shard or, as each counts its own, of all; and why.

    Raises:
        ConfigError: There is no such round; the message says which there are.
    """
    shards = shards_of(run, shard)
    lines: list[str] = []
    for log in shards:
        found = [r for r in (*log.rounds, *log.open.values(), *log.lost) if r.number == number]
        for round in sorted(found, key=lambda round: (round.life, round.opened_at)):
            lines += ["", *_Round(run, log, round).told()]
    if not lines:
        known = [
            f"{log.name}: {numbers(r.number for r in (*log.rounds, *log.open.values()))}"
            for log in shards
        ]
        raise ConfigError(f"there is no round {number}; there are {'; '.join(known) or 'none'}")
    return lines[1:]


def options_in(run: RunModel, tick: int = 0) -> Options | None:
    """The run's settings of the method at a tick; ``None`` if the tape does not tell them."""
    try:
        options = options_of(read_settings(run.settings))
    except (KeyError, TypeError, ValueError, ConfigError):
        return None
    plan = revision_at(run, tick)
    return options if plan is None else options.revised(plan[0])


def revision_at(run: RunModel, tick: int) -> tuple[Revision, str] | None:
    """The revision of H and τ that holds at a tick, and why it was made; ``None``: none does."""
    known = [each for each in run.revisions.values() if each[0].tick <= tick]
    return max(known, key=lambda each: each[0].number, default=None)


def shards_of(run: RunModel, shard: int | None) -> list[ShardLog]:
    """The shard of this number, or all.

    Raises:
        ConfigError: There is none of this number; the message names those there are.
    """
    logs = list(run.shards.values())
    chosen = [log for log in logs if shard in (None, log.index)]
    if shard is not None and not chosen:
        names = listing([log.name for log in logs])
        raise ConfigError(f"--shard {shard} is no shard on this tape: there is {names}")
    return chosen


def name_of(shard: ShardLog, life: int) -> str:
    """A shard, and which of its lives if there were several: each counts its rounds from 1."""
    lives = len(shard.lives)
    return f"{shard.name} in life {life} of {lives}" if lives > 1 else shard.name


def token_weights(run: RunModel, round: RoundLog) -> dict[Asking, float]:
    """The weight of every contribution, from the counters that were folded and the run's rule."""
    uniform = run.settings_of("sync").get("weighting") == "uniform"
    return {
        name: fold.discount * (1.0 if uniform else token_weight(fold.tokens, fold.steps))
        for name, (_, fold) in round.folds.items()
    }


class _Round:
    """One round in words."""

    def __init__(self, run: RunModel, shard: ShardLog, round: RoundLog) -> None:
        self.run, self.shard, self.round = run, shard, round
        self.options = options_in(run, round.tick or 0)

    def told(self) -> list[str]:
        result = self.round.result
        lines = [self._title(), "", self._opening() + ".", "", "What each learner did:"]
        answers = self._asked_so_far() if result is None else self._participants(result)
        lines += [f"{BULLET}{text}." for text in (*answers, *self._others())] or ["- no learner"]
        if result is None:
            return [*lines, "", self._unfinished()]
        lines.append("")
        if not self._is_own:
            lines += [self._quorum(result), self._grace(result), self._closing(result)]
        return [*lines, self._durations(result), self._outcome(result)]

    @property
    def _is_own(self) -> bool:
        """Whether a learner has opened it by its own steps."""
        closing = self.round.opened is not None and self.round.opened.closing
        return self.options is not None and self.options.participants == "own" and not closing

    def _title(self) -> str:
        round, result = self.round, self.round.result
        title = f"Round {round.number} of {name_of(self.shard, round.life)}: "
        title += f"fragment {round.fragment}"
        if round.tick is not None:
            title += f", step {round.tick}"
        if result is None:
            return title + ", not over"
        verdict = "merged" if round.merged else "given up"
        return f"{title}, {verdict} {after(result.finished_seconds)}"

    def _opening(self) -> str:
        round, options, tick = self.round, self.options, self.round.tick
        text = f"It opened {when(round.opened_at)} into the run"
        if round.opened is not None and round.opened.closing:
            return text + ", in the closing sweep, in which every fragment gets one last round"
        if tick is None:
            return text
        if self._is_own and round.opened is not None:
            return f"{text}, because {round.opened.why}: learners open their rounds themselves"
        text += (
            f", because the clock had reached step {tick}, when fragment {round.fragment} is due"
        )
        if options is None:
            return text
        offset = options.phase(round.fragment)
        text += f" (every H = {options.period} steps, at step mod {options.period} = {offset})"
        if round.fragment not in options.due(tick):
            text += "; it is due again at once because its last round was given up"
        late = next((t for t in self.shard.ticks_of(round.life) if t.clock >= tick), None)
        if late is not None and round.opened_at - late.at > 1e-3:
            waited = format_duration(round.opened_at - late.at)
            limit = many(options.open_rounds_max, "round")
            text += (
                f". It had waited in the queue for {waited}: at most {limit} may be open at once"
            )
        return text

    def _participants(self, result: RoundFinished) -> list[str]:
        weights = token_weights(self.run, self.round)
        total = sum(weights.values())
        return [
            self._participant(each, weights.get(each.ask, 0.0) / total if total else None)
            for each in result.participants
        ]

    def _participant(self, participant: Participant, share: float | None) -> str:
        round, asked = self.round, participant.asked_seconds
        asks = round.asks.get(participant.learner, [])
        why = f" ({asks[-1].why})" if asks else ""
        told = after(asked) if asked >= 0 else f"{format_duration(-asked)} before the opening"
        text = f"{participant.learner}: asked {told}{why}"
        if len(asks) > 1:
            text += f", for the {ordinal(len(asks))} time"
        if participant.state == "folded":
            return text + self._delivery(participant, share)
        if participant.state == "late":
            text += "; still under way when the round ended: it goes into the fragment's next one"
        else:
            said = _ANSWERS.get(participant.state, participant.state)
            text += f"; {said}: {participant.reason or 'no reason is given'}"
            fallen = round.fallen.get(participant.learner)
            if fallen is not None:
                ago = format_duration(fallen[0] - round.opened_at)
                text += f" (given up {ago} after the opening)"
        came_at = round.late_bodies.get(participant.learner)
        if came_at is not None:
            text += f"; its body came {format_duration(came_at - round.finished_at)} after the end"
        return text

    def _delivery(self, participant: Participant, share: float | None) -> str:
        delivered = participant.delivered_seconds or 0.0
        told = after(delivered) if delivered >= 0 else "before it as well"
        text = f", delivered {told}: {many(participant.steps, 'step')}, "
        text += f"{format_count(participant.tokens)} tokens"
        if participant.age:
            text += f", late by {many(participant.age, 'version')}"
        _, fold = self.round.folds.get(participant.ask, (0.0, None))
        if fold is not None and "capped" in fold.why:
            text += f" ({fold.why})"
        return text if share is None else f"{text}, weight {percent(share)}"

    def _asked_so_far(self) -> list[str]:
        round, lines = self.round, []
        for name, asks in round.asks.items():
            text = f"{name}: asked {after(asks[-1].at - round.opened_at)} ({asks[-1].why})"
            if asks[-1].name in round.folds:
                delivered = round.folds[asks[-1].name][0]
                text += f", delivered {after(delivered - round.opened_at)}"
            elif name in round.fallen:
                text += f"; it fell out: {round.fallen[name][1]}"
            else:
                text += ", not delivered yet"
            lines.append(text)
        return lines

    def _others(self) -> list[str]:
        """Learners that were not asked: without a new step in time, out of reach, or not live."""
        asked = set(self.round.asks)
        if self.round.result is not None:
            asked |= {participant.learner for participant in self.round.result.participants}
        return [f"{name}: {self._absent(name)}" for name in self.run.learners if name not in asked]

    def _absent(self, name: str) -> str:
        round, until = self.round, min(self.round.finished_at, self.run.duration)
        stays = [stay for stay in self.shard.stays if stay.learner == name]
        if round.result is None:
            present = [stay for stay in stays if stay.since <= until]
            if not (present and math.isinf(present[-1].until)):
                return "not live"
        if round.result is None or name in round.live:
            own = "its own steps say when it is"
            return "live, but not asked: " + (own if self._is_own else self._window_missed(name))
        if name in round.unreachable:
            return "live, but not asked: its connection was broken"
        gone = [stay for stay in stays if stay.until <= until]
        if gone:
            ago = format_duration(until - gone[-1].until)
            return f"not live: {gone[-1].reason}, {ago} before the round ended"
        later = [stay.since for stay in stays if stay.since > until]
        if later:
            return f"not live yet: it joined {when(later[0])} into the run"
        return "not live: it has never joined this shard"

    def _window_missed(self, name: str) -> str:
        round, result = self.round, self.round.result
        if result is None or result.closed_seconds is None:
            return "it has no new step yet"
        before = f"before the window closed {after(result.closed_seconds)}"
        text = (
            f"it had {'no new' if round.live.get(name) is not None else 'taken no'} step {before}"
        )
        closed_at = round.opened_at + result.closed_seconds
        reports = self.shard.reports_of(round.life, name)
        late = next((at - closed_at for _, at in reports if at > closed_at), None)
        if late is None:
            return text + ", nor any after that on this tape"
        return f"{text}; its next report came {format_duration(late)} too late"

    def _quorum(self, result: RoundFinished) -> str:
        k = "" if self.options is None else f" of K = {self.options.quorum}"
        if result.quorum_seconds is None:
            return f"The quorum{k} was never reached."
        name = result.quorum_learner
        by = f", when {name} qualified" if name else ", with what was asked for before it opened"
        return f"The quorum{k} was reached {after(result.quorum_seconds)}{by}."

    def _grace(self, result: RoundFinished) -> str:
        opened, options = self.round.opened, self.options
        if opened is not None and opened.closing:
            return "A closing round has no grace window: it asks all learners and waits for them."
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
        if result.step_seconds == 0.0:
            return f"{text}: the duration of a step was not known yet."
        quorum, merge, broadcast = (format_duration(average or 0.0) for average in averages)
        slack = result.slack_seconds
        shown = f"{'−' if slack < 0 else ''}{format_duration(abs(slack))}"
        sign = "; a negative slack leaves no time" if slack <= 0 else ""
        return (
            f"{text}: γ = {options.grace_margin:g} of a slack of {shown}, which is "
            f"τ·ξ_step − (ξ_quorum + ξ_sync) = {options.overlap} × "
            f"{format_duration(result.step_seconds)} − ({quorum} + {merge} to merge + {broadcast} "
            f"to broadcast), the shard's moving averages{sign}."
        )

    def _closing(self, result: RoundFinished) -> str:
        if result.closed_seconds is None:
            return "The window never closed."
        text = f"The window closed {after(result.closed_seconds)}: {result.why}"
        spare = result.grace_seconds - result.closed_seconds
        if spare > 1e-3 and result.why.startswith("all"):
            text += f", {format_duration(spare)} before its end"
        return text + "."

    def _durations(self, result: RoundFinished) -> str:
        round, parts = self.round, []
        delivered = [p for p in result.participants if p.delivered_seconds]
        times = [p.delivered_seconds or 0.0 for p in delivered]
        if len(times) > 1:
            slowest = delivered[times.index(max(times))].learner
            last = f"the last one {after(max(times))}, from {slowest}"
            parts.append(f"the first body came {after(min(times))}, {last}")
        elif times:
            parts.append(f"the body came {after(times[0])}")
        if result.uploaded_seconds is not None:
            merge = format_duration(result.finished_seconds - result.uploaded_seconds)
            parts.append(
                f"everything was in {after(result.uploaded_seconds)}, the merge took {merge}"
            )
        if round.held_at:
            held = sorted((at - round.finished_at, name) for name, at in round.held_at.items())
            told = [f"{name} {after(max(0.0, seconds))}" for seconds, name in held]
            parts.append(f"the new copy was held by {', '.join(told)}")
        return f"From the opening on: {'; '.join(parts)}." if parts else "No body came."

    def _outcome(self, result: RoundFinished) -> str:
        fragment = self.round.fragment
        before = "" if result.base is None else f" from {result.base}"
        if result.verdict == "merged":
            return f"Merged: fragment {fragment} went{before} to version {result.version}."
        text = f"Given up: {result.reason}. The fragment stayed as it was"
        text += "" if result.base is None else f" (version {result.base})"
        own = [r for r in self.shard.rounds if (r.life, r.fragment) == (self.round.life, fragment)]
        later = [r.number for r in own if r.number > self.round.number]
        return text + (f"; its next round was round {min(later)}." if later else ".")

    def _unfinished(self) -> str:
        round = self.round
        if round in self.shard.lost:
            return f"It was open when {self.shard.name}'s process ended, and went with it."
        age = format_duration(max(0.0, self.run.duration - round.opened_at))
        if round.merging_at is not None:
            return f"It has been open for {age}; everything is in, and it is being merged."
        waiting = [
            name
            for name, asks in round.asks.items()
            if asks[-1].name not in round.folds and name not in round.fallen
        ]
        awaited = listing(waiting) if waiting else "its quorum or the end of its window"
        text = f"It has been open for {age} and waits for {awaited}."
        if round.opened is not None:
            text += f" Its grace window is {format_duration(round.opened.grace_seconds)}."
        return text
