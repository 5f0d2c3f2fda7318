"""Explanations in text: why a round closed when it did, what a learner did, what a step caused.

Every number is on the shards' tapes, or follows from them by the run's own formulas
(`token_weight`, the inputs of the grace window as `RoundOpened` records them).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from decoupled_diloco.config.method import options_of, read_settings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge import token_weight
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    Asking,
    Participant,
    Recovered,
    Revision,
    RoundFinished,
)
from decoupled_diloco.protocol.participation import RULES
from decoupled_diloco.run_model import RunModel
from decoupled_diloco.run_model.accounts import TIME_PARTS, TOKEN_PARTS, part_in_words
from decoupled_diloco.run_model.facts import (
    AWAY,
    GAP_MEDIANS,
    NOT_ASKED,
    OUT_OF_REACH,
    TOOK_PART,
    LearnerLog,
    RoundLog,
    ShardLog,
    Stay,
    SumLog,
    TickLog,
    is_shard,
)
from decoupled_diloco.run_model.phrases import (
    BULLET,
    after,
    listing,
    many,
    numbers,
    ordinal,
    percent,
    when,
)
from decoupled_diloco.units import format_bytes, format_count, format_duration

_ANSWERS = {
    "declined": "it declined",
    "refused": "its payload was rejected",
    "discarded": "its payload was discarded",
    "gone": "disconnected before it delivered",
    "waiting": "had not delivered when the round ended",
}


GAPS_MAX = 5
"""Maximum number of gaps shown, longest first."""

_CAUSES = frozenset({"EndRequested", "FaultInjected", "Note", "ProcessEnded", "TookOver"})
"""Kinds of remarks that can explain a gap."""

_REASONS = {
    TOOK_PART: "it took part",
    NOT_ASKED: "live, without a new step before the window closed",
    "late": "late: its payload was merged in a later round",
    "declined": "declined the request",
    "refused": "its payload was rejected",
    "discarded": "its payload was discarded",
    "gone": "disconnected after the request",
    "waiting": "requested, but did not answer",
    OUT_OF_REACH: "its connection was broken",
    AWAY: "not live",
}


def explain_round(run: RunModel, number: int, shard: int | None = None) -> list[str]:
    """Explain a round of one shard, or of all shards, because each shard numbers its own rounds.

    Raises:
        ConfigError: The round does not exist; the message lists the existing ones.
    """
    shards = shards_of(run, shard)
    lines: list[str] = []
    for log in shards:
        found = [r for r in (*log.rounds, *log.open.values(), *log.lost) if r.number == number]
        for round in sorted(found, key=lambda round: (round.life, round.opened_at)):
            lines += ["", *_Round(run, log, round).lines()]
    if not lines:
        known = [
            f"{log.name}: {numbers(r.number for r in (*log.rounds, *log.open.values()))}"
            for log in shards
        ]
        raise ConfigError(f"round {number} does not exist; there are {'; '.join(known) or 'none'}")
    return lines[1:]


def options_in(run: RunModel, tick: int = 0) -> Options | None:
    """Return the method's options at a tick; ``None`` if the tape does not have them."""
    try:
        options = options_of(read_settings(run.settings))
    except (KeyError, TypeError, ValueError, ConfigError):
        return None
    plan = revision_at(run, tick)
    return options if plan is None else options.revised(plan[0])


def revision_at(run: RunModel, tick: int) -> tuple[Revision, str] | None:
    """Return the schedule revision of H and τ at a tick, and its reason; ``None`` without one."""
    known = [each for each in run.revisions.values() if each[0].tick <= tick]
    return max(known, key=lambda each: each[0].number, default=None)


def shards_of(run: RunModel, shard: int | None) -> list[ShardLog]:
    """Return the shard with this number, or all.

    Raises:
        ConfigError: The shard does not exist; the message lists the existing ones.
    """
    logs = list(run.shards.values())
    chosen = [log for log in logs if shard in (None, log.index)]
    if shard is not None and not chosen:
        names = listing([log.name for log in logs])
        raise ConfigError(f"--shard {shard} is not a shard on this tape: there is {names}")
    return chosen


def name_of(shard: ShardLog, life: int) -> str:
    """Return a shard's name, with its incarnation if there are several: each has a round 1."""
    lives = len(shard.lives)
    return f"{shard.name} (incarnation {life} of {lives})" if lives > 1 else shard.name


def token_weights(run: RunModel, round: RoundLog) -> dict[Asking, float]:
    """Return the weight of each contribution, from the folded counters and the run's rule."""
    uniform = run.settings_of("sync", "merge").get("weighting") == "uniform"
    return {
        name: fold.discount * (1.0 if uniform else token_weight(fold.tokens, fold.steps))
        for name, (_, fold) in round.folds.items()
    }


class _Round:
    """Explains one round."""

    def __init__(self, run: RunModel, shard: ShardLog, round: RoundLog) -> None:
        self.run, self.shard, self.round = run, shard, round
        self.options = options_in(run, round.tick or 0)

    def lines(self) -> list[str]:
        result = self.round.result
        lines = [self._title(), "", self._opening() + ".", "", "Learners:"]
        answers = self._requests_so_far() if result is None else self._participants(result)
        lines += [f"{BULLET}{text}." for text in (*answers, *self._others())] or ["- no learner"]
        if self.round.sums:
            lines += ["", "Sites:", *(f"{BULLET}{self._sum(each)}." for each in self.round.sums)]
        if result is None:
            return [*lines, "", self._unfinished()]
        lines.append("")
        if not self._is_own:
            lines += [self._quorum(result), self._grace(result), self._closing(result)]
        return [*lines, self._durations(result), self._outcome(result)]

    @property
    def _is_own(self) -> bool:
        """Whether a learner opened it with its own steps."""
        closing = self.round.opened is not None and self.round.opened.closing
        return self.options is not None and self.options.participants == "own" and not closing

    def _title(self) -> str:
        round, result = self.round, self.round.result
        title = f"Round {round.number} of {name_of(self.shard, round.life)}: "
        title += f"fragment {round.fragment}"
        if round.tick is not None:
            title += f", step {round.tick}"
        if result is None:
            return title + ", not finished"
        verdict = "merged" if round.merged else "abandoned"
        return f"{title}, {verdict} {after(result.finished_seconds)}"

    def _opening(self) -> str:
        round, options, tick = self.round, self.options, self.round.tick
        text = f"It opened {when(round.opened_at)} into the run"
        if round.opened is not None and round.opened.closing:
            return text + ", in the closing sweep, which gives every fragment a last round"
        if tick is None:
            return text
        if self._is_own and round.opened is not None:
            return f"{text}, because {round.opened.why}: learners open their own rounds"
        text += (
            f", because the clock had reached step {tick}, when fragment {round.fragment} is due"
        )
        if options is None:
            return text
        offset = options.phase(round.fragment)
        text += f" (every H = {options.period} steps, at step mod {options.period} = {offset})"
        if round.fragment not in options.due(tick):
            text += "; it is due again at once because its last round was abandoned"
        late = next((t for t in self.shard.ticks_of(round.life) if t.clock >= tick), None)
        if late is not None and round.opened_at - late.at > 1e-3:
            waited = format_duration(round.opened_at - late.at)
            limit = many(options.open_rounds_max, "round")
            text += f". Before that it was queued for {waited}: at most {limit} may be open at once"
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
        at = after(asked) if asked >= 0 else f"{format_duration(-asked)} before the opening"
        text = f"{participant.learner}: requested {at}{why}"
        if len(asks) > 1:
            text += f", for the {ordinal(len(asks))} time"
        if participant.state == "folded":
            return text + self._delivery(participant, share)
        void = self._void(participant.ask)
        if void:
            return text + void
        if participant.state == "late":
            text += "; still in transit when the round ended: merged in the fragment's next round"
        else:
            answer = _ANSWERS.get(participant.state, participant.state)
            text += f"; {answer}: {participant.reason or 'no reason recorded'}"
            fallen = round.fallen.get(participant.learner)
            if fallen is not None:
                ago = format_duration(fallen[0] - round.opened_at)
                text += f" (abandoned {ago} after the opening)"
        came_at = round.late_bodies.get(participant.learner)
        if came_at is not None:
            late = format_duration(came_at - round.finished_at)
            text += f"; its payload arrived {late} after the end"
        return text

    def _delivery(self, participant: Participant, share: float | None) -> str:
        at = _since_opening(participant.delivered_seconds or 0.0)
        text = f", delivered {self._way(participant.ask)}{at}: {many(participant.steps, 'step')}, "
        text += f"{format_count(participant.tokens)} tokens"
        if participant.age:
            text += f", late by {many(participant.age, 'version')}"
        _, fold = self.round.folds.get(participant.ask, (0.0, None))
        if fold is not None and "capped" in fold.why:
            text += f" ({fold.why})"
        return text if share is None else f"{text}, weight {percent(share)}"

    def _way(self, ask: Asking) -> str:
        """Return the relays and sums that a contribution has passed; empty if it came directly."""
        opened_at = self.round.opened_at
        passed = [each for each in self.round.sums if ask in each.asks and not each.problem]
        if not passed:
            return ""
        at, fold = self.round.folds.get(ask, (opened_at, None))
        first = passed[0].relay if fold is None else fold.relay
        text = f"to {first} {_since_opening(at - opened_at)}, "
        for each in passed:
            text += f"in its sum {each.number} "
            if each.upstream:
                text += f"to {each.upstream} {_since_opening(each.at - opened_at)}, "
        return text

    def _void(self, ask: Asking) -> str:
        """Return why a contribution that a relay had does not count; empty if that is not so."""
        lost = next((each for each in self.round.sums if ask in each.asks and each.problem), None)
        if lost is None:
            return ""
        has = f"in sum {lost.number} of {lost.relay}" if lost.number else f"at {lost.relay}"
        at = _since_opening(lost.at - self.round.opened_at)
        return f"; its contribution {has} became void {at}: {lost.problem}"

    def _sum(self, sum: SumLog) -> str:
        """Return what a site has sent in a sum, or what a lost sum means."""
        at, count = _since_opening(sum.at - self.round.opened_at), len(sum.asks)
        contributions = many(count, "contribution")
        if not sum.number:
            return (
                f"{sum.relay}: {sum.problem} {at}, and {contributions} that it had not sent "
                "became void: the learners still have them, so the shard requests them again"
            )
        if sum.problem:
            return (
                f"{sum.relay}: sum {sum.number} was refused {at} ({sum.problem}): of its "
                f"{contributions}, none counts, and the shard requests those still open again"
            )
        text = f"{sum.relay}: sum {sum.number} arrived {at}"
        text += f" at {sum.upstream}" if sum.upstream else ""
        text += f" with {contributions}, {format_bytes(sum.nbytes)}"
        return text + f" instead of {format_bytes(sum.relayed_bytes)}"

    def _requests_so_far(self) -> list[str]:
        round, lines = self.round, []
        for name, asks in round.asks.items():
            text = f"{name}: requested {after(asks[-1].at - round.opened_at)} ({asks[-1].why})"
            ask = asks[-1].name
            if ask in round.folds:
                at = after(round.folds[ask][0] - round.opened_at)
                relayed = self.shard.relayed.get(ask)
                to = f" to {relayed.relay}, whose sum has not arrived" if relayed else ""
                text += f", delivered {self._way(ask)}{at}{to}"
            elif self._void(ask):
                text += self._void(ask)
            elif name in round.fallen:
                text += f"; dropped: {round.fallen[name][1]}"
            else:
                text += ", not delivered yet"
            lines.append(text)
        return lines

    def _others(self) -> list[str]:
        """Return the learners without a request: no new step in time, disconnected, or not live."""
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
            own = "its own steps open its rounds"
            return "live, without a request: " + (
                own if self._is_own else self._window_missed(name)
            )
        if name in round.unreachable:
            return "live, without a request: its connection was broken"
        gone = [stay for stay in stays if stay.until <= until]
        if gone:
            ago = format_duration(until - gone[-1].until)
            return f"not live: {gone[-1].reason}, {ago} before the round ended"
        later = [stay.since for stay in stays if stay.since > until]
        if later:
            return f"not live yet: it joined {when(later[0])} into the run"
        return "not live: it never joined this shard"

    def _window_missed(self, name: str) -> str:
        round, result = self.round, self.round.result
        if result is None or result.closed_seconds is None:
            return "it has not reported a new step yet"
        if self.options is not None and self.options.rule not in (None, *RULES.values()):
            return "the participation rule did not include it"
        before = f"before the window closed {after(result.closed_seconds)}"
        kind = "new step" if round.live.get(name) is not None else "step"
        text = f"it had reported no {kind} {before}"
        closed_at = round.opened_at + result.closed_seconds
        reports = self.shard.reports_of(round.life, name)
        late = next((at - closed_at for _, at in reports if at > closed_at), None)
        if late is None:
            return text + ", and none later on this tape"
        return f"{text}; its next report came {format_duration(late)} too late"

    def _quorum(self, result: RoundFinished) -> str:
        k = "" if self.options is None else f" of K = {self.options.quorum}"
        if result.quorum_seconds is None:
            return f"The quorum{k} was never reached."
        name = result.quorum_learner
        by = f", when {name} qualified" if name else ", with requests from before the opening"
        return f"The quorum{k} was reached {after(result.quorum_seconds)}{by}."

    def _grace(self, result: RoundFinished) -> str:
        opened, options = self.round.opened, self.options
        if opened is not None and opened.closing:
            return "A closing round has no grace window: it waits for all learners."
        averages = (
            result.quorum_average_seconds,
            result.merge_average_seconds,
            result.broadcast_average_seconds,
        )
        text = f"The grace window was {format_duration(result.grace_seconds)}"
        if result.grace_seconds == 0.0:
            text = "There was no grace window"
        if options is None or any(average is None for average in averages):
            return f"{text}; its inputs are not on this tape."
        if options.grace_margin == 0.0:
            return f"{text}: grace_margin is 0."
        if result.step_seconds == 0.0:
            return f"{text}: the duration of a step was still unknown."
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
            parts.append(f"the first payload arrived {after(min(times))}, {last}")
        elif times:
            parts.append(f"the payload arrived {after(times[0])}")
        if result.uploaded_seconds is not None:
            merge = format_duration(result.finished_seconds - result.uploaded_seconds)
            parts.append(
                f"everything had arrived {after(result.uploaded_seconds)}, the merge took {merge}"
            )
        if round.held_at:
            held = sorted((at - round.finished_at, name) for name, at in round.held_at.items())
            holders = [f"{name} {after(max(0.0, seconds))}" for seconds, name in held]
            parts.append(f"the new copy had reached {', '.join(holders)}")
        return f"After the opening: {'; '.join(parts)}." if parts else "No payload arrived."

    def _outcome(self, result: RoundFinished) -> str:
        fragment = self.round.fragment
        before = "" if result.base is None else f" from {result.base}"
        if result.verdict == "merged":
            return f"Merged: fragment {fragment} advanced{before} to version {result.version}."
        text = f"Abandoned: {result.reason}. The fragment did not change"
        text += "" if result.base is None else f" (version {result.base})"
        own = [r for r in self.shard.rounds if (r.life, r.fragment) == (self.round.life, fragment)]
        later = [r.number for r in own if r.number > self.round.number]
        return text + (f"; its next round was round {min(later)}." if later else ".")

    def _unfinished(self) -> str:
        round = self.round
        if round in self.shard.lost:
            return f"It was open when the process of {self.shard.name} ended, and was lost."
        age = format_duration(max(0.0, self.run.duration - round.opened_at))
        if round.merging_at is not None:
            return f"It has been open for {age}; everything has arrived, and it is being merged."
        waiting = [
            name
            for name, asks in round.asks.items()
            if asks[-1].name not in round.folds and name not in round.fallen
        ]
        relayed = map(self.shard.relayed.get, round.folds)
        waiting += sorted({f"the sum of {each.relay}" for each in relayed if each is not None})
        awaited = listing(waiting) if waiting else "its quorum or the end of its window"
        text = f"It has been open for {age} and waits for {awaited}."
        if round.opened is not None:
            text += f" Its grace window is {format_duration(round.opened.grace_seconds)}."
        return text


def _since_opening(seconds: float) -> str:
    return after(seconds) if seconds >= 0 else f"{format_duration(-seconds)} before the opening"


def explain_learner(run: RunModel, name: str, *, live: bool = False) -> list[str]:
    """Explain what a learner did; a ``live`` syncer does not have the learners' tapes.

    Raises:
        ConfigError: The learner does not exist; the message lists the existing ones.
    """
    learner = run.learners.get(name)
    if learner is None:
        names = listing(list(run.learners))
        raise ConfigError(f"learner {name!r} does not exist on this tape; there is {names}")
    lives = many(max(1, len(learner.steps_of), learner.epoch), "incarnation")
    steps, tokens = many(learner.steps, "step"), format_count(learner.tokens)
    lines = [f"{name}: {steps}, {tokens} tokens in {lives}.", "", "Incarnations:"]
    lines += [*_lives(run, learner), "", *_time_and_tokens(run, learner, live)]
    return [*lines, "", *_participation(run, learner), "", *_gaps(run, learner)]


def _lives(run: RunModel, learner: LearnerLog) -> list[str]:
    lines, by_epoch = [], dict[int, list[Stay]]()
    for stay in _stays(run, learner.name):
        by_epoch.setdefault(stay.epoch, []).append(stay)
    for epoch, stays in sorted(by_epoch.items()):
        periods = []
        for first, last in _unbroken(stays):
            still = math.isinf(last.until)
            end = ", and still is" if still else f" to {when(last.until)} ({last.reason})"
            periods.append(f"live from {when(first.since)} ({first.why}){end}")
        steps = many(learner.steps_of.get(epoch, 0), "step")
        lines.append(f"incarnation {epoch}: {', then again '.join(periods)}; {steps} reported")
    lines += map(_recovery, learner.recoveries)
    return [f"{BULLET}{line}." for line in lines or ["it never joined a shard"]]


def _recovery(recovered: Recovered) -> str:
    began = f"started after {format_duration(recovered.seconds)}"
    if recovered.way == "checkpoint":
        overwritten = many(recovered.overwritten, "fragment")
        return (
            f"{began} from {recovered.why}: its progress continued in {recovered.kept}, and "
            f"{overwritten} had newer versions"
        )
    if recovered.way == "donor":
        how = f"{format_bytes(recovered.nbytes)} {recovered.why}"
        return f"{began} with the optimizer state of {recovered.donor}, {how}"
    why = f" ({recovered.why})" if recovered.why else ""
    return f"{began} with the published copies and a fresh optimizer{why}"


def _unbroken(stays: list[Stay]) -> list[tuple[Stay, Stay]]:
    """Return the first and last stay of each period in which shards counted the learner as live."""
    times: list[tuple[Stay, Stay]] = []
    for stay in sorted(stays, key=lambda stay: stay.since):
        if times and stay.since <= times[-1][1].until:
            times[-1] = (times[-1][0], max(times[-1][1], stay, key=lambda stay: stay.until))
        else:
            times.append((stay, stay))
    return times


def _stays(run: RunModel, name: str) -> list[Stay]:
    return [stay for shard in run.shards.values() for stay in shard.stays if stay.learner == name]


def _time_and_tokens(run: RunModel, learner: LearnerLog, live: bool) -> list[str]:
    account = None if live else run.account.learners.get(learner.name)
    if account is None:
        where = "not known to the syncer" if live else "not on this tape"
        discarded = format_count(learner.discarded_fragment_tokens / (run.fragments or 1))
        return [
            f"Its use of time is {where}; the learner's own tape has it.",
            "",
            f"It reports that {discarded} of its {format_count(learner.tokens)} tokens were "
            f"overwritten. The causes are {where}; the learner's own tape has them.",
        ]
    time, tokens = account.time, account.tokens
    allocated, trained = format_duration(time.seconds("allocated")), tokens.tokens("trained")
    spent = [(part, format_duration(time.seconds(part)), time.share(part)) for part in TIME_PARTS]
    became = [
        (part, format_count(tokens.tokens(part)), tokens.tokens(part) / (trained or 1.0))
        for part in TOKEN_PARTS
    ]
    return [
        f"Of {allocated}, from the run's first step to its last step or to the learner's end:",
        *_shares(spent),
        "",
        f"Of {format_count(trained)} tokens:",
        *_shares(became),
    ]


def _shares(parts: Iterable[tuple[str, str, float]]) -> list[str]:
    return [
        f"{BULLET}{amount}, {percent(share)}: {part_in_words(part)}"
        for part, amount, share in parts
        if share > 0
    ]


def _participation(run: RunModel, learner: LearnerLog) -> list[str]:
    merged = run.rounds_merged
    if not merged:
        return ["No round has been merged yet."]
    took = learner.reasons[TOOK_PART]
    lines = [
        f"It took part in {took} of {many(merged, 'merged round')} ({percent(took / merged)}), and "
        f"in {learner.recent.count(TOOK_PART)} of the last {len(learner.recent)}. By reason:"
    ]
    words = dict(_REASONS)
    if run.settings_of("sync").get("participation") == "async":
        words[NOT_ASKED] = "another learner's round: each learner opens its own"
    for reason, count in learner.reasons.most_common():
        text = words.get(reason, reason) + _example(run, learner.name, reason)
        lines.append(f"{BULLET}{count}: {text}")
    early = merged - learner.reasons.total()
    if early > 0:
        lines.append(f"{BULLET}{early}: before it joined")
    return lines


def _example(run: RunModel, name: str, reason: str) -> str:
    """Return the last round in which it did not take part for this reason, as an example."""
    found = [r for r in run.rounds if r.merged and r.reason_of(name) == reason != TOOK_PART]
    if not found:
        return ""
    last = max(found, key=lambda round: round.opened_at)
    return f" (last: round {last.number} of {last.shard})"


def _gaps(run: RunModel, learner: LearnerLog) -> list[str]:
    spans = [(b - a, a, b) for a, b in pairwise(learner.steps_at)]
    if not spans:
        return ["It made too few steps to detect gaps."]
    middle = median(seconds for seconds, _, _ in spans)
    long = [span for span in spans if span[0] > GAP_MEDIANS * middle]
    text = f"Its median step took {format_duration(middle)}"
    if not long:
        longest = format_duration(max(spans)[0])
        return [
            f"{text}. No gap is longer than {GAP_MEDIANS:g} times that; the longest is {longest}."
        ]
    return [
        f"{text}. Its longest gaps between two steps:",
        *(
            f"{BULLET}{format_duration(seconds)}, from {when(a)}: {_cause(run, learner, a, b)}"
            for seconds, a, b in sorted(long, reverse=True)[:GAPS_MAX]
        ),
    ]


def _cause(run: RunModel, learner: LearnerLog, begin: float, end: float) -> str:
    """Return the known events during a gap."""
    during = [r for r in run.remarks if begin <= r.at <= end and r.kind in _CAUSES]
    own = [remark.text for remark in during if remark.subject == learner.name]
    if not any("no longer live" in text or " left: " in text for text in own):
        own += [
            f"it was no longer live: {stay.reason}"
            for stay in _stays(run, learner.name)
            if begin <= stay.until <= end and stay.reason
        ]
    shards = [remark.text for remark in during if is_shard(remark.subject)]
    return "; ".join(dict.fromkeys([*own, *shards])) or "the tape has no cause"


def explain_step(run: RunModel, step: int, shard: int | None = None) -> list[str]:
    """Explain a global step at every shard, because each shard has its own clock.

    Raises:
        ConfigError: No shard's clock has reached it; the message lists the clocks.
    """
    logs = shards_of(run, shard)
    reached = [(log, tick) for log in logs for tick in _ticks(log, step)]
    if step < 1 or not reached:
        clocks = ", ".join(f"{log.name} at {log.clock_max}" for log in logs)
        raise ConfigError(
            f"no clock on this tape has reached step {step}; the clocks are: {clocks or 'none'}"
        )
    options, plan = options_in(run, step), revision_at(run, step)
    lines = [f"Global step {step}"]
    if plan is not None:
        revision, why = plan
        lines += [
            "",
            f"{revision} since step {revision.tick}, schedule revision {revision.number}: {why}.",
        ]
    for log, tick in reached:
        lines += ["", _clock(log, tick, step, options)]
        reports = [_report(log, tick, step, name) for name in run.learners]
        lines += [f"{BULLET}{text}." for text in (*reports, *_rounds(log, tick, step, options))]
    return lines


def _ticks(shard: ShardLog, step: int) -> list[TickLog]:
    """Return, for each incarnation of a shard, the tick at which its clock reached a step.

    A restarted shard continues at its learners' steps. Earlier steps belong to the incarnation
    before it, unless that one did not reach them.
    """
    found: list[TickLog] = []
    for life in range(1, shard.life + 1):
        tick = next((tick for tick in shard.ticks_of(life) if tick.clock >= step), None)
        passed = tick is not None and tick.before is None and tick.clock > step
        if tick is not None and not (passed and found):
            found.append(tick)
    return found


def _clock(shard: ShardLog, tick: TickLog, step: int, options: Options | None) -> str:
    text = (
        f"{name_of(shard, tick.life)}: its clock reached step {step}, {when(tick.at)} into the run"
    )
    if tick.before is None and tick.clock > step:
        text += f", or earlier: it was at {tick.clock} in the first record of this incarnation"
    elif tick.before is not None and tick.clock > tick.before + 1:
        text += f", in one jump from {tick.before} to {tick.clock}"
    if not tick.setter:
        return f"{text} ({tick.why})."
    text += f", by the report of {tick.setter}"
    if options is None:
        return text + "."
    kth = "largest" if options.quorum == 1 else f"{ordinal(options.quorum)} largest"
    sole = " (K = 1)" if options.quorum == 1 else ""
    return f"{text}: the clock is the {kth} run step of the {tick.live} live learners{sole}."


def _report(shard: ShardLog, tick: TickLog, step: int, name: str) -> str:
    at = next((at for own, at in shard.reports_of(tick.life, name) if own >= step), None)
    if at is None:
        return f"{name} has not reported step {step} to it"
    seconds = at - tick.at
    if abs(seconds) < 1e-6:
        relation = "and set the clock" if name == tick.setter else "at the same time"
    else:
        relation = f"{format_duration(abs(seconds))} {'before' if seconds < 0 else 'later'}"
    return f"{name} reported it {relation}"


def _rounds(shard: ShardLog, tick: TickLog, step: int, options: Options | None) -> list[str]:
    rounds = [*shard.rounds, *shard.open.values(), *shard.lost]
    rounds = [r for r in rounds if r.life == tick.life]
    lines = []
    if options is not None:
        own = [str(p) for p in options.due(step) if options.owner(p) == shard.index]
        due = f"fragment {listing(own)}" if own else "no fragment of this shard"
        lines.append(f"due: {due}")
    lines += [_round(round) for round in rounds if round.tick == step]
    besides = [r for r in rounds if r.opened_at <= tick.at < r.finished_at and r.tick != step]
    if besides:
        others = listing([f"{r.number} (fragment {r.fragment}, step {r.tick})" for r in besides])
        lines.append(f"also open: {many(len(besides), 'round')}: {others}")
    return lines


def _round(round: RoundLog) -> str:
    text = f"round {round.number} (fragment {round.fragment})"
    result = round.result
    if result is None:
        return f"{text}: not finished"
    seconds = format_duration(result.finished_seconds)
    if round.merged:
        learners = listing([participant.learner for participant in round.folded])
        return f"{text}: merged after {seconds} from {learners}, version {result.version}"
    return f"{text}: abandoned after {seconds}: {result.reason}"
