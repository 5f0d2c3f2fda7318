"""What a learner did, in words: its lives, where its time and tokens went, its longest gaps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.observe.accounts import (
    TIME_PARTS,
    TOKEN_PARTS,
    LearnerAccount,
    part_in_words,
)
from decoupled_diloco.observe.acting import is_shard
from decoupled_diloco.observe.run_data import (
    AWAY,
    GAP_MEDIANS,
    LATE,
    NOT_ASKED,
    OUT_OF_REACH,
    TOOK_PART,
    LearnerLog,
)
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shard_data import RoundLog, Stay
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
    LATE: "late: what it sent went into a later one",
    "declined": "asked, and declined",
    "refused": "its body was refused",
    "gone": "gone while it was asked",
    "waiting": "asked, and not heard of again",
    OUT_OF_REACH: "its connection was broken",
    AWAY: "not live",
}


def explain_learner(run: RunModel, name: str, *, live: bool = False) -> list[str]:
    """What a learner did.

    Args:
        run: What is known of the run.
        name: The learner.
        live: The source is a running syncer, which does not have the learners' tapes.

    Raises:
        ConfigError: There is no such learner; the message names those there are.
    """
    learner = run.learners.get(name)
    if learner is None:
        names = listing(list(run.learners))
        raise ConfigError(f"there is no learner {name!r} on this tape; there is {names}")
    account = None if live else run.account.learners.get(name)
    lines = [_title(learner), "", "Its lives:", *_lives(run, learner)]
    lines += ["", *_time(account, live), "", *_tokens(learner, account, run, live)]
    lines += ["", *_participation(run, learner)]
    return [*lines, "", *_gaps(run, learner)]


def _title(learner: LearnerLog) -> str:
    lives = many(max(1, len(learner.steps_of), learner.epoch), "life", "lives")
    return (
        f"{learner.name}: {many(learner.steps, 'step')}, {format_count(learner.tokens)} tokens in "
        f"{lives}."
    )


# ---- lives


def _lives(run: RunModel, learner: LearnerLog) -> list[str]:
    lines = []
    for epoch, stays in sorted(_stays(run, learner.name).items()):
        steps = learner.steps_of.get(epoch, 0)
        told = []
        for first, last in _unbroken(stays):
            text = f"live from {when(first.since)} ({first.why})"
            if last.until is None:
                text += ", and still is"
            else:
                text += f" to {when(last.until)} ({last.reason})"
            told.append(text)
        text = f"epoch {epoch}: {', then again '.join(told)}"
        lines.append(f"{BULLET}{text}; {many(steps, 'step')} reported.")
    lines += [f"{BULLET}{_recovery(each)}." for each in learner.recoveries]
    return lines or [BULLET + "it has never joined a shard."]


def _recovery(recovered: Recovered) -> str:
    """How one of its processes came by its state."""
    seconds = format_duration(recovered.seconds)
    overwritten = many(recovered.overwritten, "fragment")
    if recovered.way == "checkpoint":
        return (
            f"began after {seconds} from {recovered.why}: its progress went on in "
            f"{recovered.kept}, and {overwritten} had moved on"
        )
    if recovered.way == "donor":
        size = format_bytes(recovered.nbytes)
        how = f"{size} {recovered.why}"
        return f"began after {seconds} with the optimizer of {recovered.donor}, {how}"
    why = f" ({recovered.why})" if recovered.why else ""
    return f"began after {seconds} with the published copies and a fresh optimizer{why}"


def _unbroken(stays: list[Stay]) -> list[tuple[Stay, Stay]]:
    """The times in which a shard counted on it: the stays that begin and end each of them."""
    times: list[tuple[Stay, Stay]] = []
    for stay in sorted(stays, key=lambda stay: stay.since):
        if times and stay.since <= _until(times[-1][1]):
            times[-1] = (times[-1][0], max(times[-1][1], stay, key=_until))
        else:
            times.append((stay, stay))
    return times


def _until(stay: Stay) -> float:
    return math.inf if stay.until is None else stay.until


def _stays(run: RunModel, name: str) -> dict[int, list[Stay]]:
    """Its stays at all shards, by epoch."""
    found: dict[int, list[Stay]] = {}
    for shard in run.shards.values():
        for stay in shard.stays:
            if stay.learner == name:
                found.setdefault(stay.epoch, []).append(stay)
    return found


# ---- time and tokens


def _time(account: LearnerAccount | None, live: bool) -> list[str]:
    if account is None:
        where = "not known at the syncer" if live else "not on this tape"
        return [f"Where its time went is {where}: its own tape tells."]
    time = account.time
    whole = format_duration(time.seconds("allocated"))
    lines = [f"Of {whole}, from the run's first step to its last or to its own end:"]
    for part in TIME_PARTS:
        if time.seconds(part) > 0:
            share = f"{format_duration(time.seconds(part))}, {percent(time.share(part))}"
            lines.append(f"{BULLET}{share}: {part_in_words(part)}")
    return lines


def _tokens(
    learner: LearnerLog, account: LearnerAccount | None, run: RunModel, live: bool
) -> list[str]:
    if account is None:
        discarded = learner.discarded_fragment_tokens / (run.fragments or 1)
        text = f"Of {format_count(learner.tokens)} tokens it says that {format_count(discarded)} "
        where = "not known at the syncer" if live else "not on this tape"
        return [f"{text}were overwritten; for which cause is {where}: its own tape tells."]
    tokens = account.tokens
    lines = [f"Of {format_count(tokens.tokens('trained'))} tokens:"]
    for part in TOKEN_PARTS:
        count = tokens.tokens(part)
        if count > 0:
            share = percent(count / tokens.tokens("trained"))
            lines.append(f"{BULLET}{format_count(count)}, {share}: {part_in_words(part)}")
    return lines


# ---- participation


def _participation(run: RunModel, learner: LearnerLog) -> list[str]:
    merged = run.rounds_merged
    if not merged:
        return ["No round has been merged yet."]
    took = learner.reasons[TOOK_PART]
    head = (
        f"It was in {took} of {many(merged, 'merged round')} ({percent(took / merged)}), and in "
        f"{learner.recent.count(TOOK_PART)} of the last {len(learner.recent)}. Why:"
    )
    reasons = Counter(learner.reasons)
    early = merged - sum(reasons.values())
    lines = [
        f"{BULLET}{count}: {_REASONS.get(reason, reason)}{_examples(run, learner, reason)}"
        for reason, count in reasons.most_common()
    ]
    if early > 0:
        lines.append(f"{BULLET}{early}: before anything was heard of it")
    return [head, *lines]


def _examples(run: RunModel, learner: LearnerLog, reason: str) -> str:
    """The last rounds that it was not in, to ask about."""
    if reason == TOOK_PART:
        return ""
    found = [round for round in run.rounds if _reason(round, learner.name) == reason]
    if not found:
        return ""
    last = max(found, key=lambda round: round.opened_at)
    return f" (last: round {last.number} of {last.shard})"


def _reason(round: RoundLog, name: str) -> str:
    result = round.result
    if result is None or not round.merged:
        return ""
    for participant in result.participants:
        if participant.learner == name:
            return TOOK_PART if participant.state == "folded" else participant.state
    if name in round.live:
        return NOT_ASKED
    return OUT_OF_REACH if name in round.unreachable else AWAY


# ---- gaps


def _gaps(run: RunModel, learner: LearnerLog) -> list[str]:
    spans = [(b - a, a, b) for a, b in pairwise(learner.steps_at)]
    if not spans:
        return ["It has taken too few steps to speak of gaps."]
    middle = median(seconds for seconds, _, _ in spans)
    long = [span for span in spans if span[0] > GAP_MEDIANS * middle]
    if not long:
        longest = format_duration(max(spans)[0])
        return [
            f"Its median step took {format_duration(middle)}, and none more than "
            f"{GAP_MEDIANS:g} times that: the longest was {longest}."
        ]
    lines = [f"Its median step took {format_duration(middle)}. Its longest gaps between two steps:"]
    for seconds, a, b in sorted(long, reverse=True)[:GAPS_MAX]:
        cause = _cause(run, learner, a, b)
        at = when(a)
        lines.append(f"{BULLET}{format_duration(seconds)}, from {at} on: {cause}")
    return lines


def _cause(run: RunModel, learner: LearnerLog, begin: float, end: float) -> str:
    """What is known to have happened in a gap."""
    told = [r for r in run.remarks if begin <= r.at <= end and r.kind in _CAUSES]
    own = [remark.text for remark in told if remark.subject == learner.name]
    ends = [
        f"it was no longer live: {stay.reason}"
        for stays in _stays(run, learner.name).values()
        for stay in stays
        if stay.until is not None and begin <= stay.until <= end and stay.reason
    ]
    known = any("no longer live" in text or " left: " in text for text in own)
    found = list(_once([*own, *([] if known else ends)]))
    shards = [remark.text for remark in told if is_shard(remark.subject)]
    found += list(_once(shards))
    return "; ".join(found) if found else "nothing on the tape says why"


def _once(texts: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(texts)
