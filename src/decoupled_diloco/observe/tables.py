"""The tables of a report: what each learner, shard and round came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
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
from decoupled_diloco.observe.run_data import GAP_MEDIANS
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.samples import BytesMoved
from decoupled_diloco.observe.shard_data import RoundLog
from decoupled_diloco.observe.summary import learner_rows, shard_rows
from decoupled_diloco.observe.words import percent
from decoupled_diloco.units import format_bytes, format_count, format_duration

TOLD_ELSEWHERE = ("Evaluated", "Ready", "RestartScheduled", "StepFinished", "WeightsSaved")
"""Remarks on these are not listed: charts and other tables show what they tell."""

REMARKS_MAX = 200
"""The report lists no more lines of what happened than this."""


class Number(NamedTuple):
    """A number as it is shown, and exactly."""

    text: str
    value: float


Row = Sequence[str | Number]


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first cell of a row names it."""

    id: str  # finds it in the page
    caption: str
    header: Sequence[str]
    rows: Sequence[Row]
    missing: str = ""  # stands there instead when it has no rows
    note: str = ""
    left: bool = False  # it holds text, not numbers
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
    learner_header, *learners = learner_rows(run)
    shard_header, *shards = shard_rows(run)
    verdicts = Counter(map(_verdict, run.rounds)).most_common(12)
    corpus = [[str(name), str(value)] for name, value in (run.corpus or {}).items()]
    every = (
        _time_table(run),
        _token_table(run),
        _bytes_table(run),
        _participation_table(run),
        _round_parts_table(run),
        Table(
            "verdicts",
            "How rounds ended",
            ["rounds", "how many", "why"],
            [[told, _number(count), "" if why == told else why] for (told, why), count in verdicts],
            "No round was finished.",
            left=True,
        ),
        Table(
            "learners",
            "Learners",
            ["learner", *learner_header[1:]],
            learners,
            "No learner is on the tape.",
            "Last loss: mean of its last 20 steps. Away: from the end of its process until it held "
            "the global weights again, or cut off: without a shard that heard of it. Longest gap: "
            "the longest time from one step to the next while the process lived. Lost steps "
            f"are those that would have fitted into gaps longer than {GAP_MEDIANS:.0f} median "
            "steps.",
        ),
        Table(
            "shards",
            "Syncer shards",
            ["shard", *shard_header[1:]],
            shards,
            "No shard of the syncer is on the tape.",
        ),
        Table("corpus", "Corpus", [], corpus, "The tape does not say what was trained.", left=True),
        _version_table(run),
        _remark_table(run),
    )
    return {table.id: table for table in every}


def _meanings(parts: Iterable[str]) -> str:
    return " ".join(f"{part_in_words(part).capitalize()}." for part in parts)


def _number(count: int) -> Number:
    return Number(str(count), count)


def _time_table(run: RunModel) -> Table:
    rows: list[Row] = [
        [
            name,
            Number(format_duration(time.seconds("allocated")), time.seconds("allocated")),
            *(Number(percent(time.share(part)), time.seconds(part)) for part in TIME_PARTS),
        ]
        for name, time, _ in _each(run.account)
    ]
    return Table(
        "time",
        "Learner-time and where it went",
        ["learner", "allocated", *TIME_PARTS],
        rows if run.account.time.allocated else [],
        "Nobody took two steps, so there is no time to divide.",
        "Allocated: from the run's first step, or the learner's own start if that is later, to "
        f"the run's last step. {_meanings(TIME_PARTS)} Goodput is useful divided by allocated.",
    )


def _token_table(run: RunModel) -> Table:
    rows: list[Row] = []
    for name, _, tokens in _each(run.account):
        counts = [tokens.tokens(part) for part in ("trained", *TOKEN_PARTS)]
        rows.append([name, *(Number(format_count(count), count) for count in counts)])
    return Table(
        "tokens",
        "Tokens and what became of them",
        ["learner", "trained", *(part.replace("_", " ") for part in TOKEN_PARTS)],
        rows,
        "No learner is on the tape.",
        f"{_meanings(TOKEN_PARTS)} A merge takes one of the fragments, so a token counts for each "
        "fragment by its part.",
    )


def _bytes_table(run: RunModel) -> Table:
    moved = run.bytes_moved
    names = dict.fromkeys([*run.trained, *sorted(moved)])
    rows = [_bytes_row(name, moved[name]) for name in names if name in moved]
    total = run.bytes_total
    if total is not None and len(names) > 1:
        rows.insert(0, _bytes_row("all learners", total))
    return Table(
        "bytes",
        "Bytes by process and plane",
        ["process", "data up", "data down", "control up", "control down"],
        rows,
        "The tape does not say what was sent.",
        "Up: sent by the process. Data: fragments and published copies. Control: everything else. "
        "What a killed process moved after its last sample is not on the tape.",
    )


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
    merged = run.rounds_merged
    rows: list[Row] = [
        [
            name,
            percent(states[name]["folded"] / merged if merged else None),
            _number(states[name].total()),
            *(_number(states[name][state]) for state in shown),
        ]
        for name in run.trained
    ]
    return Table(
        "participation",
        "Rounds that each learner was asked in, and how it answered",
        ["learner", "took part", "asked", *shown],
        rows if any(states.values()) else [],
        "No round asked a learner.",
        f"Took part: share of all {merged} merged rounds that its contribution went into.",
    )


def _round_parts_table(run: RunModel) -> Table:
    rounds = [round_parts(r) for r in run.rounds if r.merged]
    columns = [*zip(*rounds, strict=True), tuple(map(sum, rounds))] if rounds else []
    names = [*(title for _, title in ROUND_PARTS), "whole round"]
    return Table(
        "round-parts",
        "Parts of a merged round",
        ["part", "median", "95 %", "longest"],
        [[name, *_quantiles(sorted(c))] for name, c in zip(names, columns, strict=False)],
        "No round was merged.",
        "A round's parts follow each other. Uploads begin as soon as a learner is asked, so most "
        "of their time lies within the grace window.",
    )


def _quantiles(values: Sequence[float]) -> Row:
    chosen = (values[len(values) // 2], values[int(0.95 * (len(values) - 1))], values[-1])
    return [Number(format_duration(value), value) for value in chosen]


def _verdict(round: RoundLog) -> tuple[str, str]:
    told = {"merged": "merged", "abandoned": "given up", "idle": "had nothing to merge"}
    return told[round.fate], round.outcome.reason


def _version_table(run: RunModel) -> Table:
    """With which versions the run was made."""
    named = {("decoupled-diloco", version) for version in run.releases.values()}
    for header in run.headers.values():
        versions = header.get("versions")
        if isinstance(versions, dict):
            named |= {(str(name), str(version)) for name, version in versions.items()}
    return Table(
        "versions", "Versions", [], sorted(named), "The tape does not name any.", left=True
    )


def _remark_table(run: RunModel) -> Table:
    """What happened, in order."""
    told = sorted((r.at, r.who, r.text) for r in run.remarks if r.kind not in TOLD_ELSEWHERE)
    rows: list[Row] = [[Number(f"{at:.1f} s", at), who, text] for at, who, text in told]
    more = len(rows) - REMARKS_MAX
    caption = f"{len(rows)} notes" if more <= 0 else f"The first {REMARKS_MAX} of {len(rows)} notes"
    header = ["time", "process", "what"]
    return Table("remarks", caption, header, rows[:REMARKS_MAX], "Nothing worth a note.", left=True)
