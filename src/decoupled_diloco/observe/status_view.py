"""A `RunStatus` for people, as ``ddiloco status``, ``watch`` and ``train`` show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from decoupled_diloco.observe.headline import budget_share, headline, position
from decoupled_diloco.observe.status import LearnerStatus, OpenRound, RunStatus, ShardStatus
from decoupled_diloco.observe.terminal import plain_table
from decoupled_diloco.observe.words import ABSENT, clock_face, percent
from decoupled_diloco.units import format_bytes, format_count, format_duration

_STYLES = {
    **dict.fromkeys(("stepping", "running"), "green"),
    **dict.fromkeys(("finished", "left", "ended"), "dim"),
    **dict.fromkeys(("interrupted", "down", "silent", "out of reach"), "bold red"),
    "cut off": "bold yellow",
}

HEADER_LINES = 3
"""An empty line and two of headers go before a table's rows."""

LEARNERS_MAX = 17
"""Rows of learners that `ddiloco train` shows; more are summed up in the last one."""

REMARKS_MAX = 3
"""Remarks that are shown where nothing else says how many."""

OPEN_ROUNDS_MAX = 3
"""Open rounds of a shard that are shown, the oldest."""

_LEARNERS_NARROW = ("learner", "state", "steps", "tok/s", "took\npart", "lately")
_LEARNERS = (*_LEARNERS_NARROW, "rounds\nbehind", "silent")
_LEARNERS_WIDE = (*_LEARNERS[:-1], "stale\ncopies", "discarded", "silent")
_DEVICE = "device"  # shown where it is known
_LEARNERS_TRAINING = ("learner", "state", "steps", "tok/s", "loss", "took part")
_SHARDS_NARROW = ("syncer", "state", "term", "clock", "merged", "given\nup", "open")
_SHARDS = (*_SHARDS_NARROW[:-1], "live", "open", "grace", "versions")
_SHARDS_TRAINING = ("syncer", "state", "clock", "merged", "given up", "open", "grace")
"""Columns, by how wide the terminal is and by what for."""


def render_status(status: RunStatus, *, width: int = 80, rows: int | None = None) -> RenderableType:
    """The whole picture, for a terminal of so many columns and lines; ``rows=None``: no limit.

    A narrow terminal gets fewer columns; learners that do not fit a low one are summed up.
    """
    parts: list[RenderableType] = [*_head(status, width), *_totals(status, width)]
    shards = len(status.shards) + HEADER_LINES if status.shards else 0
    used = len(parts) + shards + HEADER_LINES
    room = len(status.learners) if rows is None else max(2, rows - used)
    used += min(room, len(status.learners))
    if status.learners:
        columns = _LEARNERS_NARROW if width < 56 else _LEARNERS if width < 80 else _LEARNERS_WIDE
        parts += [Text(""), _learner_table(status, columns, room)]
    if status.shards:
        parts += [Text(""), _shard_table(status, _SHARDS if width >= 60 else _SHARDS_NARROW)]
    told = [Text(f"! {each}", style="yellow", overflow="fold") for each in status.problems]
    told += _dim(_open_lines(status))
    count = REMARKS_MAX if rows is None else max(0, rows - used - len(told) - 1)
    told += _dim(f"{clock_face(at)}  {text}" for at, text in status.remarks[-count:] if count)
    if rows is not None:
        told = told[: max(0, rows - used - 1)]
        for line in told:  # one line each: the terminal has no more
            line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*parts, *([Text("")] if told else []), *told)


def render_training(status: RunStatus, left: str) -> RenderableType:
    """What `ddiloco train` shows below its lines; fits 80 columns. ``left``: for how long yet."""
    parts: list[RenderableType] = [Text(""), _budget_bar(status, 80, left)]
    if status.learners:
        parts += [Text(""), _learner_table(status, _LEARNERS_TRAINING, LEARNERS_MAX)]
    if status.shards:
        parts += [Text(""), _shard_table(status, _SHARDS_TRAINING)]
    if status.evaluation_loss is not None:
        loss, where = f"{status.evaluation_loss:.4f}", f" (step {status.evaluation_step})"
        parts += [Text(""), Text.assemble("evaluation loss ", (loss, "bold"), (where, "dim"))]
    return Group(*parts)


def _dim(lines: Iterable[str]) -> list[Text]:
    return [Text(line, style="dim", overflow="fold") for line in lines]


def _head(status: RunStatus, width: int) -> list[RenderableType]:
    style = _STYLES.get(status.phase, "yellow")
    name = status.name or "(no name yet)"
    line = Text.assemble((name, "bold"), "  ", (headline(status), style))
    if status.phase == "empty":
        return [line]
    left = ""
    if status.seconds_left is not None:
        rate = f"{format_count(status.tokens_per_second or 0)} tok/s"
        if status.left_by == "steps":
            rate = f"{status.steps_per_second or 0:.3g}/s"
        left = f"{format_duration(status.seconds_left)} left, {rate}"
    return [line, _budget_bar(status, width, left)]


def _budget_bar(status: RunStatus, width: int, left: str) -> Table:
    grid = Table.grid(padding=(0, 2))
    cells: list[RenderableType] = [Text(position(status))]
    share = budget_share(status)
    if share is not None and width >= 60:
        bar = ProgressBar(1.0, share, width=min(24, width // 4), style="grey37")
        bar.complete_style = bar.finished_style = "cyan"
        cells.append(bar)
    if share is not None:
        cells.append(Text(percent(share)))
    cells.append(Text(clock_face(status.elapsed_seconds)))
    if left:
        cells.append(Text(left, style="dim", no_wrap=True))
    grid.add_row(*cells)
    return grid


def _totals(status: RunStatus, width: int) -> list[RenderableType]:
    if status.phase == "empty":
        return []
    tokens = f"{format_count(status.tokens)} tokens"
    if status.budget_tokens:
        tokens += f" of {format_count(status.budget_tokens)}"
    if status.tokens_per_second is not None:
        tokens += f" ({format_count(status.tokens_per_second)}/s)"
    if status.tokens:
        least = "" if status.discarded_whole else "at least "
        tokens += f", {least}{percent(status.discarded_tokens / status.tokens)} discarded"
    parts = [tokens, f"{status.rounds_merged} rounds merged, {status.rounds_abandoned} given up"]
    if status.bytes_up is not None and status.bytes_down is not None:
        up, down = format_bytes(status.bytes_up), format_bytes(status.bytes_down)
        by_syncer = status.bytes_of == "syncer"
        moved = f"received {up}, sent {down}" if by_syncer else f"sent {up}, received {down}"
        parts.append(f"{status.bytes_of} {moved}")
    if status.evaluation_loss is not None:
        parts.append(f"evaluation loss {status.evaluation_loss:.4f}")
    if status.checkpoint is not None:
        ago, size = (
            format_duration(round(status.checkpoint.seconds_ago)),
            format_bytes(status.checkpoint.nbytes),
        )
        without = (
            f", without {', '.join(status.checkpoint.missing)}" if status.checkpoint.missing else ""
        )
        parts.append(f"checkpoint {status.checkpoint.number} of {ago} ago ({size}{without})")
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 2 > width:
            lines.append(part)
        else:
            lines[-1] += f"; {part}"
    return [Text(line) for line in lines]


def _learner_table(status: RunStatus, columns: Sequence[str], room: int) -> Table:
    """A row for each learner that is there; those that have left are counted."""
    learners = [learner for learner in status.learners if learner.state != "left"]
    left = len(status.learners) - len(learners)
    room -= bool(left)
    shown = learners if len(learners) <= room else _most_interesting(learners, room - 1)
    if columns is not _LEARNERS_NARROW and any(learner.device for learner in shown):
        columns = (*columns[:2], _DEVICE, *columns[2:])
    table = _table(columns, map(_learner_cells, shown))
    rest = [""] * (len(columns) - 1)
    if len(shown) < len(learners):
        table.add_row(f"… {len(learners) - len(shown)} more", *rest)
    if left:
        table.add_row(Text(f"… {left} left", style="dim"), *rest)
    return table


def _most_interesting(learners: list[LearnerStatus], room: int) -> list[LearnerStatus]:
    """The learners in trouble, as many as there is room for, in the order of their names."""

    def health(learner: LearnerStatus) -> tuple[bool, float]:
        return (learner.state == "stepping", learner.participation_recent or 0.0)

    worst = {learner.name for learner in sorted(learners, key=health)[: max(1, room)]}
    return [learner for learner in learners if learner.name in worst]


def _learner_cells(learner: LearnerStatus) -> dict[str, str | Text]:
    rate, recent = learner.tokens_per_second, learner.participation_recent
    absent = learner.state == "stepping" and recent is not None and recent < 0.5
    return {
        "learner": learner.name,
        "state": _state(learner.state),
        _DEVICE: learner.device.partition(",")[0] or ABSENT,
        "steps": str(learner.steps),
        "tok/s": ABSENT if rate is None else format_count(rate),
        "loss": ABSENT if learner.loss is None else f"{learner.loss:.3f}",
        "took part": percent(learner.participation),
        "lately": Text(percent(recent), style="bold yellow" if absent else ""),
        "rounds behind": _number(learner.rounds_behind),
        "stale copies": _number(learner.versions_behind),
        "discarded": percent(learner.discarded_tokens / learner.tokens if learner.tokens else None),
        "silent": _ago(learner.seen_seconds),
    }


def _state(state: str) -> Text:
    return Text(state, style=_STYLES.get(state, "yellow"))


def _number(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return ABSENT
    return "no" if seconds < 2.5 else format_duration(round(seconds))


def _shard_table(status: RunStatus, columns: Sequence[str]) -> Table:
    return _table(columns, map(_shard_cells, status.shards))


def _shard_cells(shard: ShardStatus) -> dict[str, str | Text]:
    grace = shard.grace_seconds
    return {
        "syncer": shard.name,
        "state": _state(shard.state),
        "term": str(shard.term),
        "clock": str(shard.clock),
        "merged": str(shard.merged),
        "given up": Text(str(shard.abandoned), style="yellow" if shard.abandoned else ""),
        "live": str(shard.live),
        "open": str(len(shard.open_rounds)),
        "grace": ABSENT if grace is None else format_duration(grace) if grace else "0",
        "versions": _versions(shard),
    }


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
        lines += [f"{shard.name} {open_line(r)}" for r in shard.open_rounds[:OPEN_ROUNDS_MAX]]
        more = len(shard.open_rounds) - OPEN_ROUNDS_MAX
        if more > 0:
            lines.append(f"{shard.name} and {more} more open rounds")
    return lines


def open_line(round: OpenRound) -> str:
    step = "" if round.step is None else f", step {round.step}"
    names = ", ".join(round.learners) or "no learner"
    awaited = {
        "merge": f"the merge of {', '.join(round.delivered)}",
        "quorum": f"its quorum: not asked yet: {names}",
        "grace": f"stragglers within its grace window: {names}",
        "upload": f"the upload of {names}",
    }[round.waits_for]
    text = f"round {round.number} (fragment {round.fragment}{step}) open for "
    return f"{text}{format_duration(round.open_seconds)}, waits for {awaited}"


def _table(columns: Sequence[str], rows: Iterable[dict[str, str | Text]]) -> Table:
    table = plain_table(*columns, gap=1, left=columns[:2], wrap=False)
    for cells in rows:
        shown = (cells[column.replace("\n", " ")] for column in columns)
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in shown))
    return table
