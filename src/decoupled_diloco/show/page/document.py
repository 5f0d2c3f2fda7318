"""Content of the live page as plain JSON values: a whole state, and changes between states.

A state has sections. A change contains the sections that differ. For long sections, it contains
only rows that differ: all learners in a new state, and some of the others in turn.
"""

from __future__ import annotations

import copy
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any

from decoupled_diloco.run_model import RunModel
from decoupled_diloco.run_model.facts import LearnerLog, RoundLog, ShardLog
from decoupled_diloco.run_model.phrases import (
    ABSENT,
    clock_face,
    ending_in_words,
    many,
    natural,
    percent,
)
from decoupled_diloco.show.page.history import LINES_MAX, PageHistory, charts_of
from decoupled_diloco.show.status import (
    ABSENT_STATES,
    AWAY,
    JOINED,
    ROUTINE,
    LearnerStatus,
    OpenRound,
    RunStatus,
    ShardStatus,
    SiteStatus,
    budget_share,
    headline,
    learner_cells,
    position,
    shard_cells,
    site_cells,
)
from decoupled_diloco.show.tables import ROUND_PARTS, round_parts
from decoupled_diloco.units import format_bytes, format_count, format_duration

LEARNERS_MAX = 2000
"""Maximum number of learners with a row and a lane; the rest are counted."""

ROWS_MAX = 200
"""Maximum rows of learners in one change, besides those in a new state."""

REMARKS_MAX = 120

Document = dict[str, Any]


LEARNER_COLUMNS = (
    *("tok/s", "loss", "took part", "recent", "score", "rounds behind", "sent", "silent"),
)
"""Columns of the table of learners after state and steps; live.js depends on their order."""

NAMES_MAX = 6
"""Maximum number of names in one place; the rest are counted."""

OPEN_MAX = 16
"""Maximum number of open rounds shown, oldest first."""

RECENT_MAX = 12
"""Maximum number of finished rounds shown, newest first."""

_FOR = {
    "merge": "the merge of its contributions",
    "quorum": "its quorum",
    "grace": "stragglers within its grace window",
    "upload": "uploads",
}


def state_of_page(run: RunModel, status: RunStatus, history: PageHistory) -> Document:
    """Return the whole content of the page.

    Args:
        run: The fold of the tape.
        status: The current status of the run.
        history: Samples of the run so far.
    """
    learners = status.learners[:LEARNERS_MAX]
    known = {learner.name for learner in learners} | {shard.name for shard in status.shards}
    return {
        "run": _run(status),
        "cards": _cards(status, history),
        "shards": [_shard(run, shard) for shard in status.shards],
        "sites": [_site(site) for site in status.sites],
        "open": open_rounds(run, status),
        "waits": not_training(run, status),
        "time": time_of_rounds(run),
        "recent": recent_rounds(run),
        "learners": {learner.name: _learner(learner) for learner in learners},
        "unlisted": len(status.learners) - len(learners),
        "history": {
            "interval": history.interval,
            "samples": len(history.samples),
            "lines": len(run.learners) <= LINES_MAX,
        },
        "charts": charts_of(history, run.learners),
        "lanes": {name: copy.deepcopy(s) for name, s in history.spans.items() if name in known},
        "remarks": [
            [round(each.at, 1), each.text] for each in run.remarks if each.kind not in ROUTINE
        ][-REMARKS_MAX:],
        "problems": list(status.problems[:8]),
    }


def _run(status: RunStatus) -> Document:
    return {
        "name": status.name,
        "phase": status.phase,
        "headline": headline(status),
        "position": position(status),
        "share": budget_share(status),
        "elapsed": clock_face(status.elapsed_seconds),
        "began": status.began,
        "virtual": status.virtual,
    }


def _cards(status: RunStatus, history: PageHistory) -> list[list[str]]:
    """Return the numbers at the top: name, value, detail."""
    training = sum(learner.state == "stepping" for learner in status.learners)
    there = sum(learner.state not in ABSENT_STATES for learner in status.learners)
    cards = [
        [
            "global step",
            position(status).removeprefix("step "),
            f"{clock_face(status.elapsed_seconds)} so far",
        ]
    ]
    if status.evaluation_loss is not None:
        where = f"of the global weights at step {status.evaluation_step}"
        if status.average_loss is not None:
            where += f"; of their average: {status.average_loss:.4f}"
        cards.append(["evaluation loss", f"{status.evaluation_loss:.4f}", where])
    left = "" if status.seconds_left is None else f"{format_duration(status.seconds_left)} left"
    rate = status.tokens_per_second
    speed = ABSENT if rate is None else f"{format_count(rate)}/s"
    cards += [
        ["tokens", format_count(status.tokens), f"{speed}{', ' if left else ''}{left}"],
        ["learners training", f"{training} of {there}", _others(status)],
        ["rounds merged", str(status.rounds_merged), f"{status.rounds_abandoned} abandoned"],
        _goodput(status, history),
    ]
    if status.bytes_up is not None and status.bytes_down is not None:
        up, down = format_bytes(status.bytes_up), format_bytes(status.bytes_down)
        cards.append(["learners sent", up, f"and received {down}"])
    if status.privacy is not None:
        cards.append(["privacy spent, at most", status.privacy.spent, status.privacy.detail])
    if status.checkpoint is not None:
        ago, size = (
            format_duration(round(status.checkpoint.seconds_ago)),
            format_bytes(status.checkpoint.nbytes),
        )
        missing = f", without {few(status.checkpoint.missing)}" if status.checkpoint.missing else ""
        cards.append(
            ["last checkpoint", f"number {status.checkpoint.number}", f"{ago} ago, {size}{missing}"]
        )
    return cards


def _others(status: RunStatus) -> str:
    counts: dict[str, int] = {}
    for learner in status.learners:
        if learner.state not in ("stepping", "left"):
            counts[learner.state] = counts.get(learner.state, 0) + 1
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _goodput(status: RunStatus, history: PageHistory) -> list[str]:
    """Return an estimate from samples; the report has the exact value."""
    in_steps = history.time_in_steps
    if in_steps is None:
        return ["goodput, about", ABSENT, "no learner trains yet"]
    lost = status.discarded_tokens / status.tokens if status.tokens else 0.0
    least = "" if status.discarded_whole else "at least "
    detail = f"{percent(in_steps)} of the time in steps, {least}{percent(lost)} of tokens discarded"
    return ["goodput, about", percent(in_steps * (1 - lost)), detail]


def _learner(learner: LearnerStatus) -> list[Any]:
    cells = learner_cells(learner)
    return [learner.state, learner.steps, *(cells[name] for name in LEARNER_COLUMNS)]


def _shard(run: RunModel, shard: ShardStatus) -> list[Any]:
    moved = run.bytes_moved.get(shard.name)
    up = ABSENT if moved is None else format_bytes(moved.data_sent + moved.control_sent)
    down = ABSENT if moved is None else format_bytes(moved.data_received + moved.control_received)
    counts = (shard.clock, shard.live, shard.merged, shard.abandoned, len(shard.open_rounds))
    return [shard.name, shard.state, *counts, shard_cells(shard)["grace"], down, up]


def _site(site: SiteStatus) -> list[str]:
    """Return the row of a site, with the names of its learners."""
    name, state, _, *numbers = site_cells(site).values()
    names = [few(each) or ABSENT for each in (site.learners, site.elsewhere)]
    return [name, state, *names, *numbers]


class PageChanges:
    """Turns consecutive states into changes."""

    def __init__(self, state: Document) -> None:
        self._sent = dict(state)
        self._learners = dict(state["learners"])
        self._turn = 0

    def to(self, state: Document) -> Document:
        """Return the difference to the previous state; lanes only grow."""
        before, self._sent = self._sent, dict(state)
        long = ("learners", "lanes", "charts")
        differing = {k: v for k, v in state.items() if k not in long and v != before[k]}
        change: Document = {"set": differing}
        change["charts"] = {
            name: drawn
            for name, drawn in state["charts"].items()
            if drawn != before["charts"][name]
        }
        change["lanes"] = {
            name: spans[len(before["lanes"].get(name, [])) :]
            for name, spans in state["lanes"].items()
            if len(spans) > len(before["lanes"].get(name, []))
        }
        change["learners"] = self._rows(state["learners"])
        change["gone"] = [name for name in self._learners if name not in state["learners"]]
        for name in change["gone"]:
            del self._learners[name]
        return change

    def _rows(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the rows of learners in a new state, and some other changed rows in turn."""
        sent = self._learners
        differing = [name for name, row in rows.items() if sent.get(name) != row]
        urgent = [name for name in differing if name not in sent or sent[name][0] != rows[name][0]]
        rest = [name for name in differing if name not in set(urgent)]
        first = self._turn % len(rest) if rest else 0
        turn = list(islice((*rest[first:], *rest[:first]), ROWS_MAX))
        self._turn += len(turn)
        chosen = {name: rows[name] for name in (*urgent, *turn)}
        sent.update(chosen)
        return chosen


def few(names: Collection[str]) -> str:
    """Return names in natural order; of many, only the first ones.

    >>> few(["a", "b"]), few([str(n) for n in range(8)])
    ('a, b', '0, 1, 2, 3, 4, 5 and 2 more')
    """
    more, ordered = len(names) - NAMES_MAX, sorted(names, key=natural)
    shown = ", ".join(ordered[:NAMES_MAX])
    return f"{shown} and {more} more" if more > 0 else shown


def open_rounds(run: RunModel, status: RunStatus) -> list[dict[str, Any]]:
    """Return what each open round waits for, from which peers and why; oldest first."""
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
    """Return the awaited learners with a reason each; many learners are grouped by reason."""
    log = run.shards[shard.name]
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name in waiting.learners:
        by_reason[_reason(log, waiting, name, states.get(name, ""), as_of)].append(name)
    if len(waiting.learners) <= NAMES_MAX:
        return [[name, reason] for reason, names in by_reason.items() for name in names]
    groups = sorted(by_reason.items(), key=lambda item: -len(item[1]))[:NAMES_MAX]
    return [[few(names), reason] for reason, names in groups]


def _reason(shard: ShardLog, waiting: OpenRound, name: str, state: str, as_of: float) -> str:
    asks = shard.open[waiting.number].asks.get(name) if waiting.number in shard.open else None
    member = shard.members.get(name)
    at_relay = shard.relayed.get(asks[-1].name) if asks else None
    if at_relay is not None:
        return f"delivered to {at_relay.relay}, whose sum is awaited"
    if asks:
        ago = format_duration(round(max(0.0, as_of - asks[-1].at), 1))
        return f"requested {ago} ago, upload in progress"
    if state and state != "stepping":
        return f"not requested yet: it is {state}"
    if member is not None and not member.connected:
        return "not requested yet: its connection is broken"
    return "not requested yet: it has made no new step"


def not_training(run: RunModel, status: RunStatus) -> list[list[str]]:
    """Return the processes that do not work at the moment, with a reason; many are grouped."""
    as_of = status.as_of - run.started_wall
    lines = []
    if not status.has_ended and status.phase != "empty":
        lines += [
            [shard.name, f"{shard.state}{_of_shard(run.shards[shard.name])}"]
            for shard in status.shards
            if shard.state not in ("running", "closing", "finished")
        ]
    groups: defaultdict[str, list[LearnerStatus]] = defaultdict(list)
    for learner in status.learners:
        if learner.state not in ("stepping", "finished", AWAY):
            groups[learner.state].append(learner)
    for state, learners in groups.items():
        if len(learners) > NAMES_MAX:
            lines.append(
                [few([one.name for one in learners]), f"{state}: {len(learners)} learners"]
            )
            continue
        for one in learners:
            why = _of_learner(run, run.learners[one.name], state, as_of)
            lines.append([one.name, f"{state}{why}"])
    return lines


def _of_shard(shard: ShardLog) -> str:
    if shard.phase == "waiting for learners":
        return f": {many(len(shard.members), 'learner')} joined; training starts when enough have"
    if shard.phase in ("down", "restarting"):
        return ": its fragments are not merged meanwhile; the learners continue to train"
    return ""


def _of_learner(run: RunModel, learner: LearnerLog, state: str, as_of: float) -> str:
    if state in ("down", "restarting") and run.ends.get(learner.name):
        at, ended = run.ends[learner.name][-1]
        how = ending_in_words(ended.code, ended.signal)
        return f": {how} {format_duration(round(max(0.0, as_of - at), 1))} ago"
    if state == "joining":
        return ": it loads its state, and has not reported a step yet"
    if state == JOINED:
        return ": it has not finished a step yet"
    if state == "left" and learner.left:
        return f": {learner.left}"
    if learner.seen_at is not None:
        ago = format_duration(round(max(0.0, as_of - learner.seen_at), 1))
        return f": last message {ago} ago"
    return ""


def time_of_rounds(run: RunModel) -> dict[str, Any]:
    """Return the mean parts of recent merged rounds' time, and the learners that were last."""
    rounds = [each for shard in run.shards.values() for each in shard.rounds if each.merged]
    if not rounds:
        return {"text": "", "parts": [], "last": []}
    means = [statistics.fmean(part) for part in zip(*map(round_parts, rounds), strict=True)]
    whole = sum(means) or 1.0
    parts = [
        [css, name, percent(mean / whole), format_duration(mean)]
        for (css, name), mean in zip(ROUND_PARTS, means, strict=True)
    ]
    title = f"Mean time of the last {many(len(rounds), 'merged round')} by part"
    return {"text": title, "parts": parts, "last": _last_ones(rounds)}


def _last_ones(rounds: Collection[RoundLog]) -> list[str]:
    """Return the learners that most often completed the quorum, or delivered last."""
    quorum = Counter(r.outcome.quorum_learner for r in rounds if r.outcome.quorum_learner)
    slowest: Counter[str] = Counter()
    for each in rounds:
        delivered = [p for p in each.folded if p.delivered_seconds is not None]
        if len(delivered) > 1:
            slowest[max(delivered, key=lambda p: p.delivered_seconds or 0.0).learner] += 1
    lines = []
    for counts, event in ((quorum, "completed the quorum"), (slowest, "delivered last")):
        if counts:
            name, count = counts.most_common(1)[0]
            lines.append(f"{name} {event} most often: in {count} of {counts.total()} rounds.")
    return lines


def recent_rounds(run: RunModel) -> list[dict[str, Any]]:
    """Return the newest finished rounds: contributors, and why others did not contribute."""
    latest = [each for shard in run.shards.values() for each in shard.rounds[-RECENT_MAX:]]
    latest.sort(key=lambda each: each.finished_at, reverse=True)
    return [_finished(each) for each in latest[:RECENT_MAX]]


def _finished(over: RoundLog) -> dict[str, Any]:
    outcome = over.outcome
    folded = list(dict.fromkeys(each.learner for each in over.folded))
    return {
        "shard": over.shard,
        "round": over.number,
        "fragment": over.fragment,
        "step": over.tick,
        "at": round(over.finished_at, 1),
        "took": format_duration(outcome.finished_seconds),
        "fate": {"merged": "merged", "abandoned": "abandoned"}.get(over.fate, "nothing to merge"),
        "from": few(folded),
        "without": _without(over, folded),
    }


def _without(over: RoundLog, folded: Iterable[str]) -> str:
    """Return the learners that did not contribute, counted by reason."""
    known = set(folded)
    reasons: Counter[str] = Counter()
    for each in over.outcome.participants:
        if each.learner not in known:
            known.add(each.learner)
            reasons[each.state] += 1
    reasons["not requested"] += len(over.live.keys() - known)
    reasons["out of reach"] += len(set(over.unreachable) - known)
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
