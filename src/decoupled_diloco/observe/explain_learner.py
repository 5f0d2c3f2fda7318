"""What a learner did, in words: its lives, where its time and tokens went, its longest gaps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.observe.accounts import (
    TIME_PARTS,
    TOKEN_PARTS,
    part_in_words,
)
from decoupled_diloco.observe.acting import is_shard
from decoupled_diloco.observe.run_data import (
    AWAY,
    GAP_MEDIANS,
    NOT_ASKED,
    OUT_OF_REACH,
    TOOK_PART,
    LearnerLog,
)
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shard_data import Stay
from decoupled_diloco.observe.words import BULLET, listing, many, percent, when
from decoupled_diloco.protocol.effects import Recovered
from decoupled_diloco.units import format_bytes, format_count, format_duration

GAPS_MAX = 5
"""Gaps that are told, the longest."""

_CAUSES = frozenset({"EndRequested", "FaultInjected", "Note", "ProcessEnded", "TookOver"})
"""What a remark must come from to say why there was a gap."""

_REASONS = {
    TOOK_PART: "it was in",
    NOT_ASKED: "live, without a new step before the window closed",
    "late": "late: what it sent went into a later one",
    "declined": "asked, and declined",
    "refused": "its body was refused",
    "gone": "gone while it was asked",
    "waiting": "asked, and not heard of again",
    OUT_OF_REACH: "its connection was broken",
    AWAY: "not live",
}


def explain_learner(run: RunModel, name: str, *, live: bool = False) -> list[str]:
    """What a learner did; a syncer that is ``live`` does not have the learners' tapes.

    Raises:
        ConfigError: There is no such learner; the message names those there are.
    """
    learner = run.learners.get(name)
    if learner is None:
        names = listing(list(run.learners))
        raise ConfigError(f"there is no learner {name!r} on this tape; there is {names}")
    lives = many(max(1, len(learner.steps_of), learner.epoch), "life", "lives")
    steps, tokens = many(learner.steps, "step"), format_count(learner.tokens)
    lines = [f"{name}: {steps}, {tokens} tokens in {lives}.", "", "Its lives:"]
    lines += [*_lives(run, learner), "", *_time_and_tokens(run, learner, live)]
    return [*lines, "", *_participation(run, learner), "", *_gaps(run, learner)]


def _lives(run: RunModel, learner: LearnerLog) -> list[str]:
    lines, by_epoch = [], dict[int, list[Stay]]()
    for stay in _stays(run, learner.name):
        by_epoch.setdefault(stay.epoch, []).append(stay)
    for epoch, stays in sorted(by_epoch.items()):
        told = [
            f"live from {when(first.since)} ({first.why}){_end_of(last)}"
            for first, last in _unbroken(stays)
        ]
        steps = many(learner.steps_of.get(epoch, 0), "step")
        lines.append(f"epoch {epoch}: {', then again '.join(told)}; {steps} reported")
    lines += map(_recovery, learner.recoveries)
    return [f"{BULLET}{line}." for line in lines or ["it has never joined a shard"]]


def _end_of(stay: Stay) -> str:
    still = math.isinf(stay.until)
    return ", and still is" if still else f" to {when(stay.until)} ({stay.reason})"


def _recovery(recovered: Recovered) -> str:
    began = f"began after {format_duration(recovered.seconds)}"
    if recovered.way == "checkpoint":
        overwritten = many(recovered.overwritten, "fragment")
        return (
            f"{began} from {recovered.why}: its progress went on in {recovered.kept}, and "
            f"{overwritten} had moved on"
        )
    if recovered.way == "donor":
        how = f"{format_bytes(recovered.nbytes)} {recovered.why}"
        return f"{began} with the optimizer of {recovered.donor}, {how}"
    why = f" ({recovered.why})" if recovered.why else ""
    return f"{began} with the published copies and a fresh optimizer{why}"


def _unbroken(stays: list[Stay]) -> list[tuple[Stay, Stay]]:
    """The times in which a shard counted on it: the stays that begin and end each of them."""
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
        where = "not known at the syncer" if live else "not on this tape"
        discarded = format_count(learner.discarded_fragment_tokens / (run.fragments or 1))
        return [
            f"Where its time went is {where}: its own tape tells.",
            "",
            f"Of {format_count(learner.tokens)} tokens it says that {discarded} were overwritten; "
            f"for which cause is {where}: its own tape tells.",
        ]
    time, tokens = account.time, account.tokens
    allocated, trained = format_duration(time.seconds("allocated")), tokens.tokens("trained")
    spent = [(part, format_duration(time.seconds(part)), time.share(part)) for part in TIME_PARTS]
    became = [
        (part, format_count(tokens.tokens(part)), tokens.tokens(part) / (trained or 1.0))
        for part in TOKEN_PARTS
    ]
    return [
        f"Of {allocated}, from the run's first step to its last or to its own end:",
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
        f"It was in {took} of {many(merged, 'merged round')} ({percent(took / merged)}), and in "
        f"{learner.recent.count(TOOK_PART)} of the last {len(learner.recent)}. Why:"
    ]
    words = dict(_REASONS)
    if run.settings_of("sync").get("participants") == "own":
        words[NOT_ASKED] = "another learner's: each opens its rounds by its own steps"
    for reason, count in learner.reasons.most_common():
        told = words.get(reason, reason) + _example(run, learner.name, reason)
        lines.append(f"{BULLET}{count}: {told}")
    early = merged - learner.reasons.total()
    if early > 0:
        lines.append(f"{BULLET}{early}: before anything was heard of it")
    return lines


def _example(run: RunModel, name: str, reason: str) -> str:
    """The last round that it was not in for this reason, to ask about."""
    found = [r for r in run.rounds if r.merged and r.reason_of(name) == reason != TOOK_PART]
    if not found:
        return ""
    last = max(found, key=lambda round: round.opened_at)
    return f" (last: round {last.number} of {last.shard})"


def _gaps(run: RunModel, learner: LearnerLog) -> list[str]:
    spans = [(b - a, a, b) for a, b in pairwise(learner.steps_at)]
    if not spans:
        return ["It has taken too few steps to speak of gaps."]
    middle = median(seconds for seconds, _, _ in spans)
    long = [span for span in spans if span[0] > GAP_MEDIANS * middle]
    text = f"Its median step took {format_duration(middle)}"
    if not long:
        longest = format_duration(max(spans)[0])
        return [
            f"{text}, and none more than {GAP_MEDIANS:g} times that: the longest was {longest}."
        ]
    return [
        f"{text}. Its longest gaps between two steps:",
        *(
            f"{BULLET}{format_duration(seconds)}, from {when(a)} on: {_cause(run, learner, a, b)}"
            for seconds, a, b in sorted(long, reverse=True)[:GAPS_MAX]
        ),
    ]


def _cause(run: RunModel, learner: LearnerLog, begin: float, end: float) -> str:
    """What is known to have happened in a gap."""
    told = [r for r in run.remarks if begin <= r.at <= end and r.kind in _CAUSES]
    own = [remark.text for remark in told if remark.subject == learner.name]
    if not any("no longer live" in text or " left: " in text for text in own):
        own += [
            f"it was no longer live: {stay.reason}"
            for stay in _stays(run, learner.name)
            if begin <= stay.until <= end and stay.reason
        ]
    shards = [remark.text for remark in told if is_shard(remark.subject)]
    return "; ".join(dict.fromkeys([*own, *shards])) or "nothing on the tape says why"
