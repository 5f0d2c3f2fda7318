"""The tables of a report: what each learner, shard and round came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from decoupled_diloco.observe.accounts import (
    TIME_PARTS,
    TOKEN_PARTS,
    RunAccount,
    TimeAccount,
    TokenAccount,
    part_in_words,
)
from decoupled_diloco.observe.charts import stacked_bar
from decoupled_diloco.observe.figures import ROUND_PARTS, round_parts
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.samples import BytesMoved
from decoupled_diloco.observe.summary import learner_rows, shard_rows
from decoupled_diloco.observe.words import percent
from decoupled_diloco.units import format_bytes, format_count, format_duration

TOLD_ELSEWHERE = ("Evaluated", "Ready", "RestartScheduled", "StepFinished", "WeightsSaved")
"""Remarks on these are not listed: charts and other tables show what they tell."""


class Number(NamedTuple):
    """A number as it is shown, and exactly."""

    text: str
    value: float


Row = Sequence[str | Number]


class Table(NamedTuple):
    """A table; the first cell of a row names it. The page has its words."""

    header: Sequence[str]
    rows: Sequence[Row]
    marked: Collection[str] = ()  # names of rows that stand out


class Bar(NamedTuple):
    """A learner's time as a bar."""

    name: str
    goodput: str
    picture: Markup


def time_bars(account: RunAccount) -> list[Bar]:
    """The run's time, then every learner's."""
    every = [(name, time) for name, time, _ in _each(account) if time.allocated]
    return [Bar(name, percent(time.goodput), _bar(name, time)) for name, time in every]


def _each(account: RunAccount) -> list[tuple[str, TimeAccount, TokenAccount]]:
    """The accounts of all learners together, if there are several, then of each."""
    every = [(one.name, one.time, one.tokens) for one in account.learners.values()]
    return [("all learners", account.time, account.tokens)] * (len(every) > 1) + every


def _bar(name: str, time: TimeAccount) -> Markup:
    parts = [(part, time.share(part), f"{part} {percent(time.share(part))}") for part in TIME_PARTS]
    return stacked_bar(parts, f"Time of {name}: {', '.join(told for _, _, told in parts)}.")


def tables_of(run: RunModel) -> dict[str, Table]:
    """Every table of a run's report, by its id."""
    learner_header, *learners = learner_rows(run, devices=True)
    shard_header, *shards = shard_rows(run)
    return {
        "time": _time_table(run),
        "tokens": _token_table(run),
        "bytes": _bytes_table(run),
        "participation": _participation_table(run),
        "round-parts": _round_parts_table(run),
        "verdicts": _verdict_table(run),
        "learners": Table(["learner", *learner_header[1:]], learners),
        "shards": Table(["shard", *shard_header[1:]], shards),
        "corpus": Table([], [[str(k), str(v)] for k, v in (run.corpus or {}).items()]),
        "versions": Table([], sorted(_versions(run))),
        "remarks": _remark_table(run),
    }


def meanings(parts: Iterable[str]) -> str:
    """What parts of an account mean, a sentence each."""
    return " ".join(f"{part_in_words(part).capitalize()}." for part in parts)


def _number(count: int) -> Number:
    return Number(str(count), count)


def _time_table(run: RunModel) -> Table:
    rows: list[Row] = []
    for name, time, _ in _each(run.account) if run.account.time.allocated else ():
        allocated = time.seconds("allocated")
        parts = [Number(percent(time.share(part)), time.seconds(part)) for part in TIME_PARTS]
        rows.append([name, Number(format_duration(allocated), allocated), *parts])
    return Table(["learner", "allocated", *TIME_PARTS], rows)


def _token_table(run: RunModel) -> Table:
    rows: list[Row] = []
    for name, _, tokens in _each(run.account):
        counts = [tokens.tokens(part) for part in ("trained", *TOKEN_PARTS)]
        rows.append([name, *(Number(format_count(count), count) for count in counts)])
    return Table(["learner", "trained", *(part.replace("_", " ") for part in TOKEN_PARTS)], rows)


def _bytes_table(run: RunModel) -> Table:
    moved = run.bytes_moved
    names = dict.fromkeys([*run.trained, *sorted(moved)])
    rows = [_bytes_row(name, moved[name]) for name in names if name in moved]
    total = run.bytes_total
    if total is not None and len(names) > 1:
        rows.insert(0, _bytes_row("all learners", total))
    return Table(["process", "data up", "data down", "control up", "control down"], rows)


def _bytes_row(name: str, b: BytesMoved) -> Row:
    counts = (b.data_sent, b.data_received, b.control_sent, b.control_received)
    return [name, *(Number(format_bytes(count), count) for count in counts)]


def _participation_table(run: RunModel) -> Table:
    states: dict[str, Counter[str]] = {name: Counter() for name in run.trained}
    for r in run.rounds:
        for participant in r.outcome.participants:
            verdict = "folded" if r.merged else "in a round given up"
            state = verdict if participant.state == "folded" else participant.state
            states.setdefault(participant.learner, Counter())[state] += 1
    known = ("folded", "in a round given up", "late", "declined", "refused", "gone", "waiting")
    shown = [state for state in known if any(count[state] for count in states.values())]
    rows: list[Row] = []
    for name in run.trained if any(states.values()) else ():
        own, merged = states[name], run.rounds_merged
        took_part = percent(own["folded"] / merged if merged else None)
        rows.append([name, took_part, *map(_number, (own.total(), *(own[each] for each in shown)))])
    return Table(["learner", "took part", "asked", *shown], rows)


def _round_parts_table(run: RunModel) -> Table:
    rounds = [round_parts(r) for r in run.rounds if r.merged]
    columns = [*zip(*rounds, strict=True), tuple(map(sum, rounds))] if rounds else []
    names = [*(title for _, title in ROUND_PARTS), "whole round"]
    rows = [[name, *_quantiles(sorted(c))] for name, c in zip(names, columns, strict=False)]
    return Table(["part", "median", "95 %", "longest"], rows)


def _quantiles(values: Sequence[float]) -> Row:
    chosen = (values[len(values) // 2], values[int(0.95 * (len(values) - 1))], values[-1])
    return [Number(format_duration(value), value) for value in chosen]


def _verdict_table(run: RunModel) -> Table:
    told = {"merged": "merged", "abandoned": "given up", "idle": "had nothing to merge"}
    counts = Counter((told[r.fate], r.outcome.reason) for r in run.rounds).most_common(12)
    rows: list[Row] = [
        [how, _number(count), "" if why == how else why] for (how, why), count in counts
    ]
    return Table(["rounds", "how many", "why"], rows)


def _versions(run: RunModel) -> set[tuple[str, str]]:
    """With which versions the run was made."""
    named = {("decoupled-diloco", version) for version in run.releases.values()}
    for header in run.headers.values():
        versions = header.get("versions")
        if isinstance(versions, dict):
            named |= {(str(name), str(version)) for name, version in versions.items()}
    return named


def _remark_table(run: RunModel) -> Table:
    """What happened, in order."""
    told = sorted((r.at, r.who, r.text) for r in run.remarks if r.kind not in TOLD_ELSEWHERE)
    rows: list[Row] = [[Number(f"{at:.1f} s", at), who, text] for at, who, text in told]
    return Table(["time", "process", "what"], rows)
