"""Who waits for what, and why, in words; what became of the latest rounds, and of their time."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from decoupled_diloco.observe.figures import ROUND_PARTS, round_parts
from decoupled_diloco.observe.run_data import LearnerLog
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shard_data import RoundLog, ShardLog
from decoupled_diloco.observe.status import JOINED, LearnerStatus, OpenRound, RunStatus, ShardStatus
from decoupled_diloco.observe.words import ending_in_words, many, natural, percent
from decoupled_diloco.units import format_duration

NAMES_MAX = 6
"""So many learners are named in one place; more are counted."""

OPEN_MAX = 16
"""Open rounds that are told, the oldest."""

RECENT_MAX = 12
"""Rounds that are over and told, the latest."""

_FOR = {
    "merge": "the merge of what has been delivered",
    "quorum": "its quorum",
    "grace": "stragglers, within its grace window",
    "upload": "uploads",
}


def few(names: Collection[str]) -> str:
    """Names in order, of many the first ones.

    >>> few(["a", "b"]), few([str(n) for n in range(8)])
    ('a, b', '0, 1, 2, 3, 4, 5 and 2 more')
    """
    more, ordered = len(names) - NAMES_MAX, sorted(names, key=natural)
    shown = ", ".join(ordered[:NAMES_MAX])
    return f"{shown} and {more} more" if more > 0 else shown


def open_rounds(run: RunModel, status: RunStatus) -> list[dict[str, Any]]:
    """What each open round waits for: of whom, and why; the oldest first."""
    as_of = status.as_of - run.started_wall
    every = [(shard, each) for shard in status.shards for each in shard.open_rounds]
    every.sort(key=lambda pair: -pair[1].open_seconds)
    states = {learner.name: learner.state for learner in status.learners}
    return [
        {
            "shard": shard.name,
            "round": each.number,
            "fragment": each.fragment,
            "step": each.step,
            "seconds": round(each.open_seconds, 1),
            "for": each.waits_for,
            "text": _FOR[each.waits_for],
            "delivered": few(each.delivered),
            "awaited": _awaited(run, shard, each, states, as_of),
        }
        for shard, each in every[:OPEN_MAX]
    ]


def _awaited(
    run: RunModel, shard: ShardStatus, waiting: OpenRound, states: dict[str, str], as_of: float
) -> list[list[str]]:
    """Learners and why they are waited for; those of one reason together, if they are many."""
    log = run.shards[shard.name]
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name in waiting.learners:
        by_reason[_reason(log, waiting, name, states.get(name, ""), as_of)].append(name)
    if len(waiting.learners) <= NAMES_MAX:
        return [[name, reason] for reason, names in by_reason.items() for name in names]
    told = sorted(by_reason.items(), key=lambda item: -len(item[1]))[:NAMES_MAX]
    return [[few(names), reason] for reason, names in told]


def _reason(shard: ShardLog, waiting: OpenRound, name: str, state: str, as_of: float) -> str:
    asks = shard.open[waiting.number].asks.get(name) if waiting.number in shard.open else None
    member = shard.members.get(name)
    if asks:
        ago = format_duration(round(max(0.0, as_of - asks[-1].at), 1))
        return f"asked {ago} ago, and its upload is under way"
    if state and state != "stepping":
        return f"not asked yet: it is {state}"
    if member is not None and not member.connected:
        return "not asked yet: its connection is broken"
    return "not asked yet: it has made no new step"


def not_training(run: RunModel, status: RunStatus) -> list[list[str]]:
    """Processes that do not do what they are there for, with the reason; groups of many."""
    as_of = status.as_of - run.started_wall
    lines = []
    if status.phase not in ("finished", "interrupted", "empty"):
        lines += [
            [shard.name, f"{shard.state}{_of_shard(run.shards[shard.name])}"]
            for shard in status.shards
            if shard.state not in ("running", "closing", "finished")
        ]
    groups: defaultdict[str, list[LearnerStatus]] = defaultdict(list)
    for learner in status.learners:
        if learner.state not in ("stepping", "finished"):
            groups[learner.state].append(learner)
    for state, learners in groups.items():
        if len(learners) > NAMES_MAX:
            lines.append([few([one.name for one in learners]), f"{state}: {len(learners)} of them"])
            continue
        for one in learners:
            why = _of_learner(run, run.learners[one.name], state, as_of)
            lines.append([one.name, f"{state}{why}"])
    return lines


def _of_shard(shard: ShardLog) -> str:
    if shard.phase == "waiting for learners":
        return f": {many(len(shard.members), 'learner')} joined so far; training begins with enough"
    if shard.phase in ("down", "restarting"):
        return ": its fragments rest, and the learners train on without it"
    return ""


def _of_learner(run: RunModel, learner: LearnerLog, state: str, as_of: float) -> str:
    if state in ("down", "restarting") and run.ends.get(learner.name):
        at, ended = run.ends[learner.name][-1]
        how = ending_in_words(ended.code, ended.signal)
        return f": {how} {format_duration(round(max(0.0, as_of - at), 1))} ago"
    if state == "joining":
        return ": it fetches what it needs, and has not reported a step yet"
    if state == JOINED:
        return ": it has not finished a step yet"
    if state == "left" and learner.left:
        return f": {learner.left}"
    if learner.seen_at is not None:
        return f": last heard of {format_duration(round(max(0.0, as_of - learner.seen_at), 1))} ago"
    return ""


def time_of_rounds(run: RunModel) -> dict[str, Any]:
    """What the time of the latest merged rounds went to, and for whom they waited last."""
    rounds = [each for shard in run.shards.values() for each in shard.rounds if each.merged]
    if not rounds:
        return {"text": "", "parts": [], "last": []}
    means = [statistics.fmean(part) for part in zip(*map(round_parts, rounds), strict=True)]
    whole = sum(means) or 1.0
    parts = [
        [css, name, percent(mean / whole), format_duration(mean)]
        for (css, name), mean in zip(ROUND_PARTS, means, strict=True)
    ]
    told = f"Where the time of the last {many(len(rounds), 'merged round')} went, in the mean"
    return {"text": told, "parts": parts, "last": _last_ones(rounds)}


def _last_ones(rounds: Collection[RoundLog]) -> list[str]:
    """Who completed the quorum, and who delivered last, most often."""
    quorum = Counter(r.outcome.quorum_learner for r in rounds if r.outcome.quorum_learner)
    slowest: Counter[str] = Counter()
    for each in rounds:
        bodies = [p for p in each.folded if p.delivered_seconds is not None]
        if len(bodies) > 1:
            slowest[max(bodies, key=lambda p: p.delivered_seconds or 0.0).learner] += 1
    lines = []
    for counts, told in ((quorum, "The quorum was complete with"), (slowest, "The last body was")):
        if counts:
            name, count = counts.most_common(1)[0]
            whose = name if counts is quorum else f"{name}'s"
            lines.append(f"{told} {whose} most often: in {count} of {counts.total()}.")
    return lines


def recent_rounds(run: RunModel) -> list[dict[str, Any]]:
    """The latest rounds that are over: who contributed, and why others did not."""
    latest = [each for shard in run.shards.values() for each in shard.rounds[-RECENT_MAX:]]
    latest.sort(key=lambda each: each.finished_at, reverse=True)
    return [_told(each) for each in latest[:RECENT_MAX]]


def _told(over: RoundLog) -> dict[str, Any]:
    outcome = over.outcome
    folded = list(dict.fromkeys(each.learner for each in over.folded))
    return {
        "shard": over.shard,
        "round": over.number,
        "fragment": over.fragment,
        "step": over.tick,
        "at": round(over.finished_at, 1),
        "took": format_duration(outcome.finished_seconds),
        "fate": {"merged": "merged", "abandoned": "given up"}.get(over.fate, "nothing to merge"),
        "from": few(folded),
        "without": _without(over, folded),
    }


def _without(over: RoundLog, folded: Iterable[str]) -> str:
    """Who was not in it, counted by why."""
    known = set(folded)
    reasons: Counter[str] = Counter()
    for each in over.outcome.participants:
        if each.learner not in known:
            known.add(each.learner)
            reasons[each.state] += 1
    reasons["not asked"] += len(over.live.keys() - known)
    reasons["out of reach"] += len(set(over.unreachable) - known)
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
