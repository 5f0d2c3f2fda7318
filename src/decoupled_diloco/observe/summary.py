"""The end of a run in words and numbers, for the terminal and for the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from decoupled_diloco.observe.accounts import TIME_PARTS, RunAccount
from decoupled_diloco.observe.advice import advice_of
from decoupled_diloco.observe.run_data import CutOff, LearnerLog, Outage
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shard_data import ShardLog
from decoupled_diloco.observe.terminal import SteadyConsole, named_values, plain_table
from decoupled_diloco.observe.words import ABSENT, many, percent
from decoupled_diloco.units import format_bytes, format_count, format_duration

LINES_MAX = 24
"""The terminal shows no more learners, and no more outages, than this; the report has all."""

NOT_FINITE = "not finite"
"""Stands where a number was measured that is none: the training has diverged."""


def print_summary(
    run: RunModel, files: Sequence[str | Path] = (), console: SteadyConsole | None = None
) -> None:
    """Prints what became of a run: totals, every learner and shard, outages, files written."""
    console = console or SteadyConsole()
    told = [(t.name, f"{t.text}, {t.detail}" if t.detail else t.text) for t in totals(run)]
    told += [("trained", devices)] if (devices := _devices(run)) else []
    console.print(named_values(told))
    for title, rows in (("learners", learner_rows(run)), ("syncer", shard_rows(run))):
        if len(rows) > 1:
            console.print()
            console.print(_table(title, rows[: 1 + LINES_MAX]))
        if len(rows) > 1 + LINES_MAX:
            console.print(f"… and {len(rows) - 1 - LINES_MAX} more: the report has them")
    lines = absences(run)
    if len(lines) > LINES_MAX:
        more = f"… and {len(lines) - LINES_MAX} more absences: the report has them"
        lines = [*lines[:LINES_MAX], more]
    lines += [
        f"{many(learner.steps_unrecorded, 'step')} of {learner.name} known from the shards alone: "
        "a process that is killed takes its last records with it"
        for learner in run.learners.values()
        if learner.steps_unrecorded
    ]
    lines += [f"the tape is not whole: {problem}" for problem in run.problems]
    lines += advice_of(run)
    for line in lines:
        console.print()
        console.say(line)
    if files:
        console.print()
        console.print(named_values(("written", str(file)) for file in files))


@dataclass(frozen=True, slots=True)
class Total:
    """Something that is one number a run.

    Attributes:
        name: What it is.
        text: The number, for people.
        detail: What else belongs beside it.
        number: The number itself, in the unit that ``text`` is made from; ``None``: there is none.
        show: Makes ``text`` of a number, also of a difference of two.
    """

    name: str
    text: str
    detail: str = ""
    number: float | None = None
    show: Callable[[float], str] = "{:g}".format


def totals(run: RunModel) -> list[Total]:
    account, tokens, span = run.account, run.account.tokens, run.training_span
    whole, given_up = "{:.0f}".format, f"{run.rounds_abandoned} given up"
    rate = ""
    if span is not None and span[1] > span[0]:
        rate = f"{format_count(run.tokens / (span[1] - span[0]))}/s"
    discarded = percent(tokens.discarded_share) if tokens.trained else ""
    rows = [
        _total("duration", run.duration, format_duration),
        _total("global steps", run.global_step, whole),
        _total("tokens", run.tokens, format_count, rate),
        *_evaluation_totals(run),
        _total("rounds merged", run.rounds_merged, whole, given_up),
        _total("goodput", account.time.goodput, percent, rest_in_words(account)),
        _total("time in steps", account.time.stepping, percent, "goodput, as the paper counts"),
        _total("uptime", account.uptime, percent, "share of the time with steps"),
        _total("tokens discarded", tokens.tokens("discarded"), format_count, discarded),
    ]
    moved = run.bytes_total
    if moved is not None:
        received = f"received {format_bytes(moved.data_received)}"
        control = moved.control_sent + moved.control_received
        rows.append(_total("learners sent", moved.data_sent, format_bytes, received))
        rows.append(_total("control messages", control, format_bytes, "sent and received"))
    return rows


def _total(
    name: str, number: float | None, show: Callable[[float], str], detail: str = ""
) -> Total:
    if number is not None and not math.isfinite(number):
        return Total(name, NOT_FINITE, detail, None, show)
    return Total(name, ABSENT if number is None else show(number), detail, number, show)


def _evaluation_totals(run: RunModel) -> list[Total]:
    """The loss of the global weights, first and last, and what else was measured at last."""
    show = "{:.4f}".format
    losses = [(e.loss, e.global_step) for e in run.evaluations if e.loss is not None]
    text, detail = (NOT_FINITE, "it diverged") if run.evaluations else (ABSENT, "none was made")
    if losses:
        (first, begin), (last, end) = losses[0], losses[-1]
        text, detail = f"{first:.4f} → {last:.4f}", f"steps {begin} → {end}"
    if len(losses) == 1:
        text, detail = show(losses[0][0]), f"step {losses[0][1]}"
    number = losses[-1][0] if losses else None
    rows = [Total("evaluation loss", text, detail, number, show)]
    for name, value in run.evaluations[-1].metrics if run.evaluations else ():
        measured = math.nan if value is None else value  # the tape has no word for such a number
        rows.append(_total(name, measured, show, "last evaluation"))
    return rows


def rest_in_words(account: RunAccount) -> str:
    """Where the learner-time went that was not goodput, the largest part first.

    >>> rest_in_words(RunModel().account)
    'no learner took two steps'
    """
    time = account.time
    if not time.allocated:
        return "no learner took two steps"
    parts = [part for part in TIME_PARTS if part != "useful" and getattr(time, part)]
    parts.sort(key=lambda part: -getattr(time, part))
    shares = [f"{part} {percent(time.share(part))}" for part in parts]
    return ", ".join(shares) or "nothing was lost"


def absences(run: RunModel) -> list[str]:
    """The absences of all processes, down or cut off, a sentence each, in order of time."""
    told = [(outage.down_at, outage_line(run, outage)) for outage in run.outages]
    told += [(cut.cut_at, cut_line(run, cut)) for cut in run.cuts]
    return [line for _, line in sorted(told, key=lambda entry: entry[0])]


def cut_line(run: RunModel, cut: CutOff) -> str:
    """What it meant that a learner was cut off, in one sentence."""
    until = "the end" if cut.back_at is None else f"{cut.back_at:.1f} s"
    line = (
        f"{cut.learner} was cut off from {cut.cut_at:.1f} s "
        f"(step {run.global_step_by(cut.cut_at)}) to {until}, trained on alone for {cut.steps} "
        f"steps and missed {cut.rounds_missed} of {cut.rounds_merged} merged rounds"
    )
    return line + _lost("the others", cut.lost_steps)


def outage_line(run: RunModel, outage: Outage) -> str:
    """What an outage did, in one sentence."""
    was = "was " if outage.how.startswith("killed") else ""
    how = outage.how.removesuffix(" (SIGKILL)")
    line = f"{outage.who} {was}{how} at {outage.down_at:.1f} s (step {outage.global_step})"
    if outage.seconds is not None:
        line += f", back after {outage.seconds:.1f} s"
        if outage.down_seconds is not None:
            then = "starting" if outage.who in run.shards else "joining"
            rest = format_duration(max(0.0, outage.seconds - outage.down_seconds))
            line += f" (down {format_duration(outage.down_seconds)}, {then} {rest})"
    elif outage.restarted_at is not None:
        line += ", started again but not back before the end"
    else:
        line += ", not started again"
    return line + _lost(
        "the others" if outage.who in run.learners else "the learners", outage.lost_steps
    )


def _lost(whose: str, lost_steps: dict[str, int]) -> str:
    if not lost_steps:
        return ""
    line = f"; steps lost by {whose}: {sum(lost_steps.values())}"
    losers = [f"{name} {count}" for name, count in lost_steps.items() if count]
    return line + (f" ({', '.join(losers)})" if losers else "")


def _devices(run: RunModel) -> str:
    """How many learners trained on which device; empty: the tape does not say."""
    counted = Counter(each.device for each in run.trained.values() if each.device)
    return "; ".join(f"{many(count, 'learner')} on {text}" for text, count in counted.items())


def learner_rows(run: RunModel, *, devices: bool = False) -> list[list[str]]:
    """A table of the learners: the header, then a row each; ``devices``: with that column."""
    header = ["", "steps", "tokens", "last loss", "took part", "discarded", "away"]
    header += ["longest gap", "median step"]
    rows = [header, *(_learner_row(run, learner) for learner in run.trained.values())]
    texts = [learner.device for learner in run.trained.values()]
    if devices and any(texts):
        for row, text in zip(rows, ["device", *texts], strict=True):
            row.append(text or ABSENT)
    return rows


def _learner_row(run: RunModel, learner: LearnerLog) -> list[str]:
    losses = [loss.loss for loss in learner.losses[-20:]]  # one batch alone says little
    loss = f"{sum(losses) / len(losses):.3f}" if losses else ABSENT
    tokens = run.account.learners[learner.name].tokens
    return [
        learner.name,
        str(learner.steps),
        format_count(learner.tokens),
        loss + (f" ({n} not finite)" if (n := learner.losses_not_finite) else ""),
        percent(run.participation_of(learner)),
        percent(tokens.discarded_share if learner.tokens else None),
        _away([*learner.outages, *learner.cuts]),
        _seconds(learner.gap_seconds_longest),
        _seconds(learner.step_seconds_median),
    ]


def _away(times: Sequence[Outage | CutOff]) -> str:
    """How often and how long it was down or cut off, or that it never came back."""
    if not times:
        return ABSENT
    seconds = [each.seconds for each in times if each.seconds is not None]
    often = f"{len(times)}×, " if len(times) > 1 else ""
    return often + (f"{sum(seconds):.1f} s" if len(seconds) == len(times) else "for good")


def shard_rows(run: RunModel) -> list[list[str]]:
    """A table of the shards: the header, then one row each."""
    header = ["", "clock", "merged", "given up", "median round", "median grace", "terms"]
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


def _table(title: str, rows: list[list[str]]) -> Table:
    """Headers are broken at spaces, so that the table fits 80 columns."""
    header = [name.replace(" ", "\n") or title for name in rows[0]]
    table = plain_table(*header, left=header[:1])
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table
