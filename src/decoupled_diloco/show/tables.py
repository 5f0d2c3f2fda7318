"""View model of a whole run: its totals, its absences, and a row for each learner and shard."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup

from decoupled_diloco.run_model import RunModel
from decoupled_diloco.run_model.accounts import (
    TIME_PARTS,
    TOKEN_PARTS,
    RunAccount,
    TimeAccount,
    TokenAccount,
    part_in_words,
)
from decoupled_diloco.run_model.facts import CutOff, LearnerLog, Outage, RoundLog, ShardLog
from decoupled_diloco.run_model.phrases import ABSENT, percent, was_ended
from decoupled_diloco.show.charts import stacked_bar
from decoupled_diloco.show.privacy_accounts import most_spent, spent_cell
from decoupled_diloco.show.status import saved_in_words, score_text
from decoupled_diloco.tape.samples import BytesMoved
from decoupled_diloco.units import format_bytes, format_count, format_duration

SHOWN_ELSEWHERE = ("Evaluated", "Ready", "RestartScheduled", "StepFinished", "WeightsSaved")
"""Remarks of these kinds are not listed, because charts and other tables show them."""


NOT_FINITE = "not finite"
"""Text of a measured number that is not finite: the training diverged."""


ROUND_PARTS = (
    ("quorum", "wait for the quorum"),
    ("grace", "grace window after the quorum"),
    ("upload", "uploads after the window"),
    ("merge", "merge and publication"),
)
"""The consecutive parts of a round's time."""


def round_parts(r: RoundLog) -> tuple[float, float, float, float]:
    """Return the seconds of a merged round: quorum, grace after it, remaining uploads, merge."""
    result, end, ends = r.outcome, r.outcome.finished_seconds, [0.0]
    for mark in (result.quorum_seconds, result.closed_seconds, result.uploaded_seconds, end):
        ends.append(ends[-1] if mark is None else min(end, max(ends[-1], mark)))
    quorum, grace, upload, merge = (until - since for since, until in pairwise(ends))
    return quorum, grace, upload, merge


class Number(NamedTuple):
    """A number as text, and its exact value."""

    text: str
    value: float


Row = Sequence[str | Number]


class Table(NamedTuple):
    """A table; the first cell of a row names it. The page template has its title and note."""

    header: Sequence[str]
    rows: Sequence[Row]
    marked: Collection[str] = ()  # names of highlighted rows


class Bar(NamedTuple):
    """A learner's time as a bar."""

    name: str
    goodput: str
    picture: Markup


def time_bars(account: RunAccount) -> list[Bar]:
    """Return a bar for the run's time, then one for each learner."""
    every = [(name, time) for name, time, _ in _each(account) if time.allocated]
    bars = []
    for name, time in every:
        parts = [(p, time.share(p), f"{p} {percent(time.share(p))}") for p in TIME_PARTS]
        label = f"Time of {name}: {', '.join(text for _, _, text in parts)}."
        bars.append(Bar(name, percent(time.goodput), stacked_bar(parts, label)))
    return bars


def _each(account: RunAccount) -> list[tuple[str, TimeAccount, TokenAccount]]:
    """Return the accounts of all learners together, if there are several, then of each."""
    every = [(one.name, one.time, one.tokens) for one in account.learners.values()]
    return [("all learners", account.time, account.tokens)] * (len(every) > 1) + every


def tables_of(run: RunModel) -> dict[str, Table]:
    """Return every table of a run's report by its id."""
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
    """Return the meanings of the parts of an account, one sentence each."""
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
            verdict = "folded" if r.merged else "in an abandoned round"
            state = verdict if participant.state == "folded" else participant.state
            states.setdefault(participant.learner, Counter())[state] += 1
    known = (
        *("folded", "in an abandoned round", "late", "declined", "refused", "discarded", "gone"),
        "waiting",
    )
    shown = [state for state in known if any(count[state] for count in states.values())]
    rows: list[Row] = []
    for name in run.trained if any(states.values()) else ():
        own, merged = states[name], run.rounds_merged
        took_part = percent(own["folded"] / merged if merged else None)
        rows.append([name, took_part, *map(_number, (own.total(), *(own[each] for each in shown)))])
    return Table(["learner", "took part", "requested", *shown], rows)


def _round_parts_table(run: RunModel) -> Table:
    rounds = [round_parts(r) for r in run.rounds if r.merged]
    columns = [*zip(*rounds, strict=True), tuple(map(sum, rounds))] if rounds else []
    names = [*(title for _, title in ROUND_PARTS), "whole round"]
    rows = [[name, *_quantiles(sorted(c))] for name, c in zip(names, columns, strict=False)]
    return Table(["part", "median", "95th percentile", "longest"], rows)


def _quantiles(values: Sequence[float]) -> Row:
    chosen = (values[len(values) // 2], values[int(0.95 * (len(values) - 1))], values[-1])
    return [Number(format_duration(value), value) for value in chosen]


def _verdict_table(run: RunModel) -> Table:
    verdicts = {"merged": "merged", "abandoned": "abandoned", "idle": "had nothing to merge"}
    counts = Counter((verdicts[r.fate], r.outcome.reason) for r in run.rounds).most_common(12)
    rows: list[Row] = [
        [how, _number(count), "" if why == how else why] for (how, why), count in counts
    ]
    return Table(["rounds", "count", "reason"], rows)


def _versions(run: RunModel) -> set[tuple[str, str]]:
    """Return the software versions of the run's processes."""
    named = {("decoupled-diloco", version) for version in run.releases.values()}
    for header in run.headers.values():
        versions = header.get("versions")
        if isinstance(versions, dict):
            named |= {(str(name), str(version)) for name, version in versions.items()}
    return named


def _remark_table(run: RunModel) -> Table:
    """Return the events of the run in order of time."""
    events = sorted((r.at, r.process, r.text) for r in run.remarks if r.kind not in SHOWN_ELSEWHERE)
    rows: list[Row] = [[Number(f"{at:.1f} s", at), process, text] for at, process, text in events]
    return Table(["time", "process", "event"], rows)


@dataclass(frozen=True, slots=True)
class Total:
    """A property of a run that is one number.

    Attributes:
        name: Its name.
        text: The number as text.
        detail: Supplementary text.
        number: The number, in the unit from which ``text`` is made; ``None``: there is none.
        show: Converts a number, or a difference of two, to ``text``.
    """

    name: str
    text: str
    detail: str = ""
    number: float | None = None
    show: Callable[[float], str] = "{:g}".format


def totals(run: RunModel) -> list[Total]:
    account, tokens, span = run.account, run.account.tokens, run.training_span
    whole, abandoned = "{:.0f}".format, f"{run.rounds_abandoned} abandoned"
    rate = ""
    if span is not None and span[1] > span[0]:
        rate = f"{format_count(run.tokens / (span[1] - span[0]))}/s"
    discarded = percent(tokens.discarded_share) if tokens.trained else ""
    rows = [
        _total("duration", run.duration, format_duration),
        _total("global steps", run.global_step, whole),
        _total("tokens", run.tokens, format_count, rate),
        *_evaluation_totals(run),
        _total("rounds merged", run.rounds_merged, whole, abandoned),
        _total("goodput", account.time.goodput, percent, rest_in_words(account)),
        _total("time in steps", account.time.stepping, percent, "goodput as the paper defines it"),
        _total("uptime", account.uptime, percent, "share of time with at least one step"),
        _total("tokens discarded", tokens.tokens("discarded"), format_count, discarded),
    ]
    moved = run.bytes_total
    if moved is not None:
        received = f"received {format_bytes(moved.data_received)}"
        control = moved.control_sent + moved.control_received
        rows.append(_total("learners sent", moved.data_sent, format_bytes, received))
        rows.append(_total("control messages", control, format_bytes, "sent and received"))
    privacy = most_spent(run)
    if privacy is not None:
        rows.append(Total("privacy spent, at most", privacy.spent, privacy.detail, None, str))
    for name, site in sorted(run.sites.items()):
        sent, saved = site.traffic, saved_in_words(site.traffic.saved_bytes)
        of = f"for {sent.contributions} contributions in {sent.sums} sums, {saved} saved"
        if not site.connected:
            of = "its relay has never connected"
        rows.append(_total(f"{name} sent", sent.sent_bytes, format_bytes, of))
    return rows


def _total(
    name: str, number: float | None, show: Callable[[float], str], detail: str = ""
) -> Total:
    if number is not None and not math.isfinite(number):
        return Total(name, NOT_FINITE, detail, None, show)
    return Total(name, ABSENT if number is None else show(number), detail, number, show)


def _evaluation_totals(run: RunModel) -> list[Total]:
    """Return the first and last loss of the global weights, and the metrics of the last one."""
    show = "{:.4f}".format
    losses = [(e.loss, e.global_step) for e in run.evaluations if e.loss is not None]
    text, detail = (NOT_FINITE, "it diverged") if run.evaluations else (ABSENT, "no evaluation")
    if losses:
        (first, begin), (last, end) = losses[0], losses[-1]
        text, detail = f"{first:.4f} → {last:.4f}", f"steps {begin} → {end}"
    if len(losses) == 1:
        text, detail = show(losses[0][0]), f"step {losses[0][1]}"
    number = losses[-1][0] if losses else None
    rows = [Total("evaluation loss", text, detail, number, show)]
    for name, value in run.evaluations[-1].metrics if run.evaluations else ():
        measured = math.nan if value is None else value  # JSON cannot represent such a number
        rows.append(_total(name, measured, show, "last evaluation"))
    return rows


def rest_in_words(account: RunAccount) -> str:
    """Return the learner-time that was not goodput, by part, the largest first.

    >>> rest_in_words(RunModel().account)
    'no learner made two steps'
    """
    time = account.time
    if not time.allocated:
        return "no learner made two steps"
    parts = [part for part in TIME_PARTS if part != "useful" and getattr(time, part)]
    parts.sort(key=lambda part: -getattr(time, part))
    shares = [f"{part} {percent(time.share(part))}" for part in parts]
    return ", ".join(shares) or "nothing was lost"


def absences(run: RunModel) -> list[str]:
    """Return the absences of all processes, one sentence each, in order of time."""
    lines = [(outage.down_at, outage_line(run, outage)) for outage in run.outages]
    lines += [(cut.cut_at, cut_line(run, cut)) for cut in run.cuts]
    return [line for _, line in sorted(lines, key=lambda entry: entry[0])]


def cut_line(run: RunModel, cut: CutOff) -> str:
    """Return one sentence about a learner that was cut off from all shards."""
    until = "the end" if cut.back_at is None else f"{cut.back_at:.1f} s"
    line = (
        f"{cut.learner} was cut off from {cut.cut_at:.1f} s "
        f"(step {run.global_step_by(cut.cut_at)}) to {until}, trained alone for {cut.steps} steps, "
        f"and missed {cut.rounds_missed} of {cut.rounds_merged} merged rounds"
    )
    return line + _lost("the others", cut.lost_steps)


def outage_line(run: RunModel, outage: Outage) -> str:
    """Return one sentence about an outage and its effect."""
    how = was_ended(outage.how.removesuffix(" (SIGKILL)"))
    line = f"{outage.process} {how} at {outage.down_at:.1f} s (step {outage.global_step})"
    if outage.seconds is not None:
        line += f", back after {outage.seconds:.1f} s"
        if outage.down_seconds is not None:
            then = "starting" if outage.process in run.shards else "joining"
            rest = format_duration(max(0.0, outage.seconds - outage.down_seconds))
            line += f" (down {format_duration(outage.down_seconds)}, {then} {rest})"
    elif outage.restarted_at is not None:
        line += ", restarted but not back before the end"
    else:
        line += ", not restarted"
    return line + _lost(
        "the others" if outage.process in run.learners else "the learners", outage.lost_steps
    )


def _lost(whose: str, lost_steps: dict[str, int]) -> str:
    if not lost_steps:
        return ""
    line = f"; steps lost by {whose}: {sum(lost_steps.values())}"
    losers = [f"{name} {count}" for name, count in lost_steps.items() if count]
    return line + (f" ({', '.join(losers)})" if losers else "")


def learner_rows(run: RunModel, *, devices: bool = False) -> list[list[str]]:
    """Return a table of the learners: the header, then one row each.

    ``devices`` adds a column with their devices.
    """
    header = ["", "steps", "tokens", "last loss", "took part", "discarded", "away"]
    header += ["longest gap", "median step"]
    if run.has_devices:
        header[header.index("away")] = "visits"
    rows = [header, *(_learner_row(run, learner) for learner in run.trained.values())]
    if run.settings_of("privacy", "dp"):
        spent = (spent_cell(run, learner) for learner in run.trained.values())
        for row, text in zip(rows, ["privacy", *spent], strict=True):
            row.append(text)
    if any(learner.scored for learner in run.trained.values()):
        scores = ["score"]
        for learner in run.trained.values():
            found = learner.scored
            scores.append(ABSENT if found is None else score_text(found.score, found.weight))
        for row, text in zip(rows, scores, strict=True):
            row.append(text)
    for name, counts in (
        ("failed", [learner.failures for learner in run.trained.values()]),
        ("preempted", [learner.preemptions for learner in run.trained.values()]),
    ):
        if any(counts):
            for row, text in zip(rows, [name, *map(str, counts)], strict=True):
                row.append(text)
    texts = [learner.device for learner in run.trained.values()]
    if devices and any(texts):
        for row, text in zip(rows, ["device", *texts], strict=True):
            row.append(text or ABSENT)
    return rows


def _learner_row(run: RunModel, learner: LearnerLog) -> list[str]:
    losses = [loss.loss for loss in learner.losses[-20:]]  # a single batch is too noisy
    loss = f"{sum(losses) / len(losses):.3f}" if losses else ABSENT
    tokens = run.account.learners[learner.name].tokens
    return [
        learner.name,
        str(learner.steps),
        format_count(learner.tokens),
        loss + (f" ({n} not finite)" if (n := learner.losses_not_finite) else ""),
        percent(run.participation_of(learner)),
        percent(tokens.discarded_share if learner.tokens else None),
        str(len(learner.lives)) if run.has_devices else _away([*learner.outages, *learner.cuts]),
        _seconds(learner.gap_seconds_longest),
        _seconds(learner.step_seconds_median),
    ]


def _away(times: Sequence[Outage | CutOff]) -> str:
    """Return the number and duration of outages, or that the learner never came back."""
    if not times:
        return ABSENT
    seconds = [each.seconds for each in times if each.seconds is not None]
    often = f"{len(times)}×, " if len(times) > 1 else ""
    return often + (f"{sum(seconds):.1f} s" if len(seconds) == len(times) else "until the end")


def shard_rows(run: RunModel) -> list[list[str]]:
    """Return a table of the shards: the header, then one row each."""
    header = ["", "clock", "merged", "abandoned", "median round", "median grace", "terms"]
    return [header, *map(_shard_row, run.shards.values())]


def _shard_row(shard: ShardLog) -> list[str]:
    return [
        shard.name,
        str(shard.clock),
        str(shard.merged),
        str(shard.abandoned),
        _seconds(_median([r.outcome.finished_seconds for r in shard.rounds])),
        _seconds(_median([r.outcome.grace_seconds for r in shard.rounds])),
        ", ".join(map(str, shard.terms)) or ABSENT,
    ]


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _seconds(value: float | None) -> str:
    return ABSENT if value is None else format_duration(value)
