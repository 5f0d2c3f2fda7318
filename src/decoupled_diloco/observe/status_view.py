"""A `RunStatus` for people: the same picture for ``ddiloco status`` and ``ddiloco watch``."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from decoupled_diloco.observe.progress import clock_face
from decoupled_diloco.observe.status import LearnerStatus, OpenRound, RunStatus, ShardStatus
from decoupled_diloco.observe.words import ABSENT, percent
from decoupled_diloco.units import format_bytes, format_count, format_duration

_STYLES = {
    "stepping": "green",
    "running": "green",
    "finished": "dim",
    "left": "dim",
    "ended": "dim",
    "interrupted": "bold red",
    "down": "bold red",
    "silent": "bold red",
    "cut off": "bold yellow",
    "out of reach": "bold red",
}

HEADER_LINES = 3
"""An empty line and two of headers go before a table's rows."""

REMARKS_MAX = 3
"""Remarks that are shown where nothing else says how many."""

OPEN_ROUNDS_MAX = 3
"""Open rounds of a shard that are shown, the oldest."""


def render_status(status: RunStatus, *, width: int = 80, rows: int | None = None) -> RenderableType:
    """The whole picture.

    Args:
        status: The run.
        width: Columns of the terminal: a narrow one gets fewer columns.
        rows: Lines of the terminal: learners that do not fit are summed up; ``None``: no limit.
    """
    parts: list[RenderableType] = [*_head(status, width), *_totals(status, width)]
    shards = len(status.shards) + HEADER_LINES if status.shards else 0
    used = len(parts) + shards + HEADER_LINES
    room = len(status.learners) if rows is None else max(2, rows - used)
    used += min(room, len(status.learners))
    if status.learners:
        parts += [Text(""), _learner_table(status, width, room)]
    if status.shards:
        parts += [Text(""), _shard_table(status, width)]
    told = [*map(_problem, status.problems), *(_dim(line) for line in _open_lines(status))]
    count = REMARKS_MAX if rows is None else max(0, rows - used - len(told) - 1)
    told += _remarks(status, count)
    if rows is not None:
        told = told[: max(0, rows - used - 1)]
        for line in told:  # one line each: the terminal has no more
            line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*parts, *([Text("")] if told else []), *told)


def _problem(text: str) -> Text:
    return Text(f"! {text}", style="yellow", overflow="fold")


def _dim(text: str) -> Text:
    return Text(text, style="dim", overflow="fold")


def _remarks(status: RunStatus, count: int) -> list[Text]:
    """The last things worth a line."""
    return [_dim(f"{clock_face(at)}  {text}") for at, text in status.remarks[-count:] if count]


def headline(status: RunStatus) -> str:
    """What is going on, in one sentence."""
    silent = format_duration(status.silent_seconds)
    if status.virtual and status.phase in ("finished", "silent"):
        return {"finished": "finished", "silent": "not finished"}[
            status.phase
        ] + ", in virtual time"
    match status.phase:
        case "empty":
            return "nothing is on the tape yet"
        case "finished":
            return f"finished: its last record is {silent} old"
        case "interrupted":
            return f"interrupted at step {status.step}, {silent} ago"
        case "silent":
            return f"nothing has written this tape for {silent}: the run was not over, and stopped"
        case phase:
            return phase


def _head(status: RunStatus, width: int) -> list[RenderableType]:
    style = _STYLES.get(status.phase, "yellow")
    name = status.name or "(no name yet)"
    lines: list[RenderableType] = [
        Text.assemble((name, "bold"), "  ", (headline(status), style)),
    ]
    if status.phase == "empty":
        return lines
    grid = Table.grid(padding=(0, 2))
    cells: list[RenderableType] = [Text(_position(status))]
    share = _share(status)
    if share is not None and width >= 60:
        done = "cyan"
        cells.append(
            ProgressBar(
                total=1.0,
                completed=share,
                width=min(24, width // 4),
                style="grey37",
                complete_style=done,
                finished_style=done,
            )
        )
    if share is not None:
        cells.append(Text(percent(share)))
    cells.append(Text(clock_face(status.elapsed_seconds)))
    if status.seconds_left is not None:
        rate = (
            f"{status.steps_per_second or 0:.3g}/s"
            if status.left_by == "steps"
            else f"{format_count(status.tokens_per_second or 0)} tok/s"
        )
        cells.append(
            Text(f"{format_duration(status.seconds_left)} left, {rate}", style="dim", no_wrap=True)
        )
    grid.add_row(*cells)
    return [*lines, grid]


def _position(status: RunStatus) -> str:
    if status.budget_steps:
        return f"step {status.step}/{status.budget_steps}"
    return f"step {status.step}"


def _share(status: RunStatus) -> float | None:
    shares = []
    if status.budget_steps:
        shares.append(status.step / status.budget_steps)
    if status.budget_tokens:
        shares.append(status.tokens / status.budget_tokens)
    return min(1.0, max(shares)) if shares else None


def _totals(status: RunStatus, width: int) -> list[RenderableType]:
    if status.phase == "empty":
        return []
    tokens = f"{format_count(status.tokens)} tokens"
    if status.budget_tokens:
        tokens += f" of {format_count(status.budget_tokens)}"
    if status.tokens_per_second is not None:
        tokens += f" ({format_count(status.tokens_per_second)}/s)"
    if status.tokens:
        share = percent(status.discarded_tokens / status.tokens)
        least = "" if status.discarded_whole else "at least "
        tokens += f", {least}{share} discarded"
    parts = [tokens, f"{status.rounds_merged} rounds merged, {status.rounds_abandoned} given up"]
    if status.bytes_up is not None and status.bytes_down is not None:
        up, down = format_bytes(status.bytes_up), format_bytes(status.bytes_down)
        of_syncer = status.bytes_of == "syncer"
        parts.append(
            f"syncer received {up}, sent {down}"
            if of_syncer
            else f"learners sent {up}, received {down}"
        )
    if status.evaluation_loss is not None:
        parts.append(f"evaluation loss {status.evaluation_loss:.4f}")
    if status.cut is not None:
        ago, size = format_duration(round(status.cut.seconds_ago)), format_bytes(status.cut.nbytes)
        without = f", without {', '.join(status.cut.missing)}" if status.cut.missing else ""
        parts.append(f"cut {status.cut.number} of {ago} ago ({size}{without})")
    lines, line = [], ""
    for part in parts:
        if line and len(line) + len(part) + 2 > width:
            lines.append(line)
            line = ""
        line += ("; " if line else "") + part
    return [Text(each) for each in (*lines, line) if each]


# ---- learners


def _learner_table(status: RunStatus, width: int, room: int) -> Table:
    wide, narrow = width >= 80, width < 56
    names = ["learner", "state", "steps", "tok/s", "took\npart", "lately"]
    if wide:
        names += ["rounds\nbehind", "stale\ncopies", "discarded", "silent"]
    elif not narrow:
        names += ["rounds\nbehind", "silent"]
    table = _table(names)
    learners = list(status.learners)
    shown = learners if len(learners) <= room else _most_interesting(learners, room - 1)
    for learner in shown:
        table.add_row(*_learner_row(learner, wide, narrow))
    if len(shown) < len(learners):
        table.add_row(f"… {len(learners) - len(shown)} more", *[""] * (len(names) - 1))
    return table


def _most_interesting(learners: list[LearnerStatus], room: int) -> list[LearnerStatus]:
    """Who is in trouble goes first; the order of the names is kept."""

    def health(learner: LearnerStatus) -> tuple[bool, float]:
        return (learner.state == "stepping", learner.participation_recent or 0.0)

    worst = {learner.name for learner in sorted(learners, key=health)[: max(1, room)]}
    return [learner for learner in learners if learner.name in worst]


def _learner_row(learner: LearnerStatus, wide: bool, narrow: bool) -> Iterable[RenderableType]:
    yield Text(learner.name)
    yield Text(learner.state, style=_STYLES.get(learner.state, "yellow"))
    yield Text(str(learner.steps))
    rate = learner.tokens_per_second
    yield Text(ABSENT if rate is None else format_count(rate))
    yield Text(percent(learner.participation))
    recent = learner.participation_recent
    absent = learner.state == "stepping" and recent is not None and recent < 0.5
    yield Text(percent(recent), style="bold yellow" if absent else "")
    if not narrow:
        yield Text(_number(learner.rounds_behind))
    if wide:
        yield Text(_number(learner.versions_behind))
        lost = learner.discarded_tokens / learner.tokens if learner.tokens else None
        yield Text(percent(lost))
    if not narrow:
        yield Text(_ago(learner.seen_seconds))


def _number(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return ABSENT
    return "no" if seconds < 2.5 else format_duration(round(seconds))


# ---- shards


def _shard_table(status: RunStatus, width: int) -> Table:
    wide = width >= 60
    names = ["syncer", "state", "term", "clock", "merged", "given\nup"]
    names += ["live", "open", "grace", "versions"] if wide else ["open"]
    table = _table(names)
    for shard in status.shards:
        table.add_row(*_shard_row(shard, wide))
    return table


def _shard_row(shard: ShardStatus, wide: bool) -> Iterable[RenderableType]:
    yield Text(shard.name)
    yield Text(shard.state, style=_STYLES.get(shard.state, "yellow"))
    yield Text(str(shard.term))
    yield Text(str(shard.clock))
    yield Text(str(shard.merged))
    yield Text(str(shard.abandoned), style="yellow" if shard.abandoned else "")
    if wide:
        yield Text(str(shard.live))
    yield Text(str(len(shard.open_rounds)))
    if wide:
        grace = shard.grace_seconds
        yield Text(ABSENT if grace is None else format_duration(grace) if grace else "0")
        yield Text(_versions(shard))


def _versions(shard: ShardStatus) -> str:
    """From the oldest to the newest version of its fragments."""
    versions = sorted(
        shard.versions.values(), key=lambda text: tuple(int(part) for part in text.split("."))
    )
    if not versions:
        return ABSENT
    return versions[0] if versions[0] == versions[-1] else f"{versions[0]}–{versions[-1]}"


def _open_lines(status: RunStatus) -> list[str]:
    """What each open round waits for; nothing at the end of a run."""
    lines = []
    for shard in status.shards:
        for round in shard.open_rounds[:OPEN_ROUNDS_MAX]:
            lines.append(f"{shard.name} {open_line(round)}")
        more = len(shard.open_rounds) - OPEN_ROUNDS_MAX
        if more > 0:
            lines.append(f"{shard.name} and {more} more open rounds")
    return lines


def open_line(round: OpenRound) -> str:
    """What an open round waits for."""
    step = "" if round.step is None else f", step {round.step}"
    text = f"round {round.number} (fragment {round.fragment}{step}) open for "
    text += f"{format_duration(round.open_seconds)}, waits for "
    whom = ", ".join(round.learners) or "nobody"
    match round.waits_for:
        case "merge":
            return text + f"the merge of {', '.join(round.delivered)}"
        case "quorum":
            return text + f"its quorum: not asked yet {whom}"
        case "grace":
            return text + f"stragglers within its grace window: {whom}"
        case _:
            return text + f"the upload of {whom}"


def _table(columns: list[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(
            column,
            justify="left" if index < 2 else "right",
            vertical="bottom",
            no_wrap=True,
            min_width=len(max(column.split("\n"), key=len)),
        )
    return table
