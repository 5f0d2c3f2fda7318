"""The end of a run in words and numbers, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from decoupled_diloco.observe.accounts import TIME_PARTS, RunAccount, account_for
from decoupled_diloco.observe.history import LearnerHistory, Outage, RunHistory, ShardHistory
from decoupled_diloco.observe.progress import natural
from decoupled_diloco.units import format_bytes, format_count, format_duration

ABSENT = "–"
"""Stands where there is no number."""


def print_summary(
    history: RunHistory, files: Sequence[str | Path] = (), console: Console | None = None
) -> None:
    """Prints what became of a run: totals, every learner and shard, outages, files written."""
    console = console or Console()
    account = account_for(history)
    pairs = [
        (name, f"{value}, {detail}" if detail else value)
        for name, value, detail in totals(history, account)
    ]
    _print_pairs(console, pairs)
    tables = (("learners", learner_rows(history, account)), ("syncer", shard_rows(history)))
    for title, rows in tables:
        if len(rows) > 1:
            console.print()
            console.print(_table(title, rows))
    lines = [outage_line(history, outage) for outage in history.outages]
    lines += [f"the tape is not whole: {problem}" for problem in history.problems]
    for line in lines:
        console.print()
        console.print(Text(line), soft_wrap=True)
    if files:
        console.print()
        _print_pairs(console, [("written", str(file)) for file in files])


def totals(history: RunHistory, account: RunAccount) -> list[tuple[str, str, str]]:
    """Name, value and detail of everything that is one number a run."""
    first_to_last, steps = _evaluations(history)
    rows = [
        ("duration", format_duration(history.duration), ""),
        ("global steps", str(history.global_step), ""),
        ("tokens", format_count(history.tokens), _rate(history)),
        ("evaluation loss", first_to_last, steps),
        ("rounds merged", str(history.rounds_merged), f"{history.rounds_abandoned} given up"),
        ("goodput", percent(account.time.goodput), rest_in_words(account)),
        ("anybody stepping", percent(account.uptime), "share of the time"),
        ("tokens discarded", *_discarded(account)),
    ]
    moved = history.bytes_total
    if moved is not None:
        received = f"received {format_bytes(moved.data_received)}"
        control = format_bytes(moved.control_sent + moved.control_received)
        rows.append(("learners sent", format_bytes(moved.data_sent), received))
        rows.append(("control messages", control, "sent and received"))
    return rows


def _evaluations(history: RunHistory) -> tuple[str, str]:
    """The first and the last evaluation of the global weights."""
    losses = [e for e in history.evaluations if e.loss is not None]
    if not losses:
        return ("not finite", "it diverged") if history.evaluations else (ABSENT, "none was made")
    first, last = losses[0], losses[-1]
    if first is last:
        return (f"{last.loss:.4f}", f"step {last.global_step}")
    return (
        f"{first.loss:.4f} → {last.loss:.4f}",
        f"steps {first.global_step} → {last.global_step}",
    )


def rest_in_words(account: RunAccount) -> str:
    """Where the learner-time went that was not goodput, the largest part first.

    >>> from decoupled_diloco.observe.history import RunHistory
    >>> rest_in_words(account_for(RunHistory()))
    'nobody took two steps'
    """
    time = account.time
    if not time.allocated:
        return "nobody took two steps"
    parts = [part for part in TIME_PARTS[1:] if getattr(time, part)]
    parts.sort(key=lambda part: -getattr(time, part))
    shares = [f"{part} {percent(time.share(part))}" for part in parts]
    return ", ".join(shares) or "nothing was lost"


def _discarded(account: RunAccount) -> tuple[str, str]:
    tokens = account.tokens
    share = percent(tokens.discarded_share) if tokens.trained else ""
    return (format_count(tokens.tokens("discarded")), share)


def outage_line(history: RunHistory, outage: Outage) -> str:
    """What an outage did, in one sentence."""
    was = "was " if outage.how.startswith("killed") else ""
    how = outage.how.removesuffix(" (SIGKILL)")
    line = f"{outage.who} {was}{how} at {outage.down_at:.1f} s (step {outage.global_step})"
    if outage.seconds is not None:
        line += f", back after {outage.seconds:.1f} s"
    elif outage.restarted_at is not None:
        line += ", started again but not back before the end"
    else:
        line += ", not started again"
    if not outage.lost_steps:
        return line
    whose = "the others" if outage.who in history.learners else "the learners"
    line += f"; steps lost by {whose}: {outage.lost_steps_total}"
    losers = [f"{name} {count}" for name, count in outage.lost_steps.items() if count]
    return line + (f" ({', '.join(losers)})" if losers else "")


def learner_rows(history: RunHistory, account: RunAccount) -> list[list[str]]:
    """A table of the learners: the header, then one row each."""
    header = ["", "steps", "tokens", "last loss", "took part", "discarded", "down"]
    header += ["longest gap", "median step"]
    learners = sorted(history.learners.values(), key=lambda learner: natural(learner.name))
    return [header, *(_learner_row(learner, account) for learner in learners)]


def shard_rows(history: RunHistory) -> list[list[str]]:
    """A table of the shards: the header, then one row each."""
    header = ["", "clock", "merged", "given up", "median round", "median grace", "terms"]
    shards = sorted(history.shards.values(), key=lambda shard: natural(shard.name))
    return [header, *(_shard_row(shard) for shard in shards)]


def percent(share: float | None) -> str:
    """A share as a whole per cent; never rounded up to 100 %.

    >>> percent(0.25), percent(0.999), percent(None)
    ('25 %', '99.9 %', '–')
    """
    if share is None:
        return ABSENT
    return f"{100 * share:.0f} %" if share == 1 or share < 0.99 else f"{int(1000 * share) / 10} %"


def last_loss(learner: LearnerHistory) -> float | None:
    """The mean of a learner's last 20 losses: one batch alone says little."""
    losses = [loss.loss for loss in learner.losses[-20:]]
    return sum(losses) / len(losses) if losses else None


def _learner_row(learner: LearnerHistory, account: RunAccount) -> list[str]:
    loss = last_loss(learner)
    not_finite = f" ({learner.losses_not_finite} not finite)" if learner.losses_not_finite else ""
    return [
        learner.name,
        str(learner.steps),
        format_count(learner.tokens),
        (ABSENT if loss is None else f"{loss:.3f}") + not_finite,
        percent(learner.participation),
        percent(account.learners[learner.name].tokens.discarded_share if learner.tokens else None),
        _down(learner.outages),
        _seconds(learner.gap_seconds_longest),
        _seconds(learner.step_seconds_median),
    ]


def _shard_row(shard: ShardHistory) -> list[str]:
    return [
        shard.name,
        str(shard.clock[-1] if shard.clock else 0),
        str(shard.merged),
        str(shard.abandoned),
        _seconds(_median([r.result.finished_seconds for r in shard.rounds])),
        _seconds(_median([r.result.grace_seconds for r in shard.rounds])),
        ", ".join(map(str, shard.terms)) or ABSENT,
    ]


def _down(outages: list[Outage]) -> str:
    """How often and how long, or that it never came back."""
    if not outages:
        return ABSENT
    seconds = [outage.seconds for outage in outages if outage.seconds is not None]
    times = f"{len(outages)}×, " if len(outages) > 1 else ""
    return times + (f"{sum(seconds):.1f} s" if len(seconds) == len(outages) else "for good")


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _seconds(value: float | None) -> str:
    return ABSENT if value is None else format_duration(value)


def _rate(history: RunHistory) -> str:
    span = history.training_span
    if span is None or span[1] <= span[0]:
        return ""
    return f"{format_count(history.tokens / (span[1] - span[0]))}/s"


def _print_pairs(console: Console, pairs: Sequence[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, value in pairs:
        grid.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
    console.print(grid)


def _table(title: str, rows: list[list[str]]) -> Table:
    """Headers are broken at spaces, so that the table fits 80 columns."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for index, name in enumerate(rows[0]):
        header = name.replace(" ", "\n") or title
        table.add_column(header, justify="right" if index else "left", vertical="bottom")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table
