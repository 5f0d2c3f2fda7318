"""What the page shows, as plain JSON values: a whole state, and the changes from one to the next.

A state has sections. A change names those that differ, and of what is long only the rows that do:
of a thousand learners those whose state has changed, and of the others some, in turn.
"""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

from decoupled_diloco.observe.headline import budget_share, headline, position
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.status import ROUTINE, LearnerStatus, RunStatus, ShardStatus
from decoupled_diloco.observe.words import ABSENT, clock_face, percent
from decoupled_diloco.page.history import LINES_MAX, PageHistory
from decoupled_diloco.page.waits import (
    few,
    not_training,
    open_rounds,
    recent_rounds,
    time_of_rounds,
)
from decoupled_diloco.units import format_bytes, format_count, format_duration

LEARNERS_MAX = 2000
"""So many learners have a row and a lane; more are counted."""

ROWS_MAX = 200
"""Rows of learners in one change, beside those whose state is another one."""

REMARKS_MAX = 120

Document = dict[str, Any]


def state_of_page(run: RunModel, status: RunStatus, history: PageHistory) -> Document:
    """Everything that the page shows.

    Args:
        run: The fold of the tape.
        status: The same as of now.
        history: How it went so far.
    """
    learners = status.learners[:LEARNERS_MAX]
    known = {learner.name for learner in learners} | {shard.name for shard in status.shards}
    return {
        "run": _run(status),
        "cards": _cards(status, history),
        "shards": [_shard(run, shard) for shard in status.shards],
        "open": open_rounds(run, status),
        "waits": not_training(run, status),
        "time": time_of_rounds(run),
        "recent": recent_rounds(run),
        "learners": {learner.name: _learner(learner) for learner in learners},
        "unlisted": len(status.learners) - len(learners),
        "history": {
            "interval": history.interval,
            "rows": list(history.rows),
            "lines": len(run.learners) <= LINES_MAX,
        },
        "evaluations": list(history.evaluations),
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
    """The numbers at the top: name, value, detail."""
    training = sum(learner.state == "stepping" for learner in status.learners)
    there = sum(learner.state != "left" for learner in status.learners)
    cards = [
        [
            "global step",
            position(status).removeprefix("step "),
            f"{clock_face(status.elapsed_seconds)} so far",
        ]
    ]
    if status.evaluation_loss is not None:
        told = f"of the global weights at step {status.evaluation_step}"
        cards.append(["evaluation loss", f"{status.evaluation_loss:.4f}", told])
    left = "" if status.seconds_left is None else f"{format_duration(status.seconds_left)} left"
    rate = status.tokens_per_second
    speed = ABSENT if rate is None else f"{format_count(rate)}/s"
    cards += [
        ["tokens", format_count(status.tokens), f"{speed}{', ' if left else ''}{left}"],
        ["learners training", f"{training} of {there}", _others(status)],
        ["rounds merged", str(status.rounds_merged), f"{status.rounds_abandoned} given up"],
        _goodput(status, history),
    ]
    if status.bytes_up is not None and status.bytes_down is not None:
        up, down = format_bytes(status.bytes_up), format_bytes(status.bytes_down)
        cards.append(["learners sent", up, f"and received {down}"])
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
    """An estimate, from samples; the report has the account."""
    in_steps = history.time_in_steps
    if in_steps is None:
        return ["goodput, about", ABSENT, "nobody trains yet"]
    lost = status.discarded_tokens / status.tokens if status.tokens else 0.0
    least = "" if status.discarded_whole else "at least "
    told = f"{percent(in_steps)} of the time in steps, {least}{percent(lost)} of tokens discarded"
    return ["goodput, about", percent(in_steps * (1 - lost)), told]


def _learner(learner: LearnerStatus) -> list[Any]:
    """A row of the table; the columns are named on the page."""
    rate, seen = learner.tokens_per_second, learner.seen_seconds
    return [
        learner.state,
        learner.steps,
        ABSENT if rate is None else format_count(rate),
        ABSENT if learner.loss is None else f"{learner.loss:.3f}",
        percent(learner.participation),
        percent(learner.participation_recent),
        ABSENT if learner.rounds_behind is None else str(learner.rounds_behind),
        format_bytes(learner.bytes_up),
        ABSENT if seen is None else "no" if seen < 2.5 else format_duration(round(seen)),
    ]


def _shard(run: RunModel, shard: ShardStatus) -> list[Any]:
    moved = run.bytes_moved.get(shard.name)
    up = ABSENT if moved is None else format_bytes(moved.data_sent + moved.control_sent)
    down = ABSENT if moved is None else format_bytes(moved.data_received + moved.control_received)
    grace = shard.grace_seconds
    return [
        shard.name,
        shard.state,
        shard.clock,
        shard.live,
        shard.merged,
        shard.abandoned,
        len(shard.open_rounds),
        ABSENT if grace is None else format_duration(grace) if grace else "0",
        down,
        up,
    ]


class PageChanges:
    """Tells one state after the other as changes."""

    def __init__(self, state: Document) -> None:
        self._told = dict(state)
        self._learners = dict(state["learners"])
        self._turn = 0

    def to(self, state: Document) -> Document:
        """What differs from the state before; the history and the lanes have only grown."""
        before, self._told = self._told, dict(state)
        long = ("learners", "lanes", "history", "remarks", "evaluations")
        differing = {k: v for k, v in state.items() if k not in long and v != before[k]}
        change: Document = {"set": differing}
        known = len(before["history"]["rows"])
        change["rows"] = state["history"]["rows"][known:]
        change["lanes"] = {
            name: spans[len(before["lanes"].get(name, [])) :]
            for name, spans in state["lanes"].items()
            if len(spans) > len(before["lanes"].get(name, []))
        }
        for name in ("remarks", "evaluations"):
            if state[name] != before[name]:
                change["set"][name] = state[name]
        change["learners"] = self._rows(state["learners"])
        change["gone"] = [name for name in self._learners if name not in state["learners"]]
        for name in change["gone"]:
            del self._learners[name]
        return change

    def _rows(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Those in another state, and some of the others that differ, in turn."""
        told = self._learners
        differing = [name for name, row in rows.items() if told.get(name) != row]
        urgent = [name for name in differing if name not in told or told[name][0] != rows[name][0]]
        rest = [name for name in differing if name not in set(urgent)]
        first = self._turn % len(rest) if rest else 0
        turn = list(islice((*rest[first:], *rest[:first]), ROWS_MAX))
        self._turn += len(turn)
        chosen = {name: rows[name] for name in (*urgent, *turn)}
        told.update(chosen)
        return chosen
