"""`ddiloco goodput`: what failures cost a cluster of up to millions of chips."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from decoupled_diloco_plan.goodput import options as options
from decoupled_diloco.cli.options import listed, make_console
from decoupled_diloco.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.console import JustifyMethod as Justify
    from rich.table import Table

    from decoupled_diloco_plan.goodput.calibrate import Residual
    from decoupled_diloco_plan.goodput.settings import Cluster, Constants, Preemption, Stragglers, System
    from decoupled_diloco_plan.goodput.study import Effort, Row

YEAR_DAYS = 365.25
SHOWN_MIN = 0.05
"""A cause is a column if any row has so much of it, percent."""

SEVERAL = ("barrier", "decoupled")
WITH_SYSTEMS: dict[str, tuple[str, ...]] = {
    "learners": SEVERAL,
    "quorum": ("decoupled",),
    "slack_steps": ("decoupled",),
    "grace": ("decoupled",),
    "period": ("barrier",),
    "slowdowns": SEVERAL,
    "jitter": SEVERAL,
    "restart_seconds": ("data-parallel",),
    "checkpoint_seconds": ("data-parallel",),
    "downscale_seconds": ("elastic", *SEVERAL),
    "upscale_seconds": ("elastic", *SEVERAL),
    "join_seconds": ("decoupled",),
}
"""Options that are of some systems only."""

WITH_OPTIONS: dict[str, tuple[str, ...]] = {
    "slack_steps": ("slowdowns", "jitter"),
    "grace": ("slack_steps",),
    "straggler_seconds": ("straggler_days",),
    "straggler_slowdown": ("straggler_days",),
    "scavenged_block_chips": ("scavenged_share",),
    "stay_seconds": ("scavenged_share",),
    "away_seconds": ("scavenged_share",),
    "join_seconds": ("scavenged_share",),
    "timeline_hours": ("timeline",),
}
"""Options that need another one, or one of several."""

CAUSES = {
    "waiting": "wait",
    "downscale": "down",
    "upscale": "up",
    "restart": "restart",
    "lost_work": "lost",
    "below_minimum": "short",
    "missing_chips": "miss",
    "stragglers": "slow",
}
"""Heads of the columns."""

PICTURES = (".png", ".svg", ".pdf")
TIMELINE_HOURS_MAX = 168.0
"""A week: more is no picture any more."""

_COUNT = re.compile(r"([+-]?\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)([kMG]?)")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def goodput(
    context: typer.Context,
    chips: options.Chips = "150k,300k,600k,1.2M,2.4M",
    learners: options.Learners = "8",
    system: options.SystemNames = "",
    quorum: options.Quorum = 1,
    period: options.Period = 24,
    calibrate: options.Calibrate = False,
    mtbi_years: options.MtbiYears = 1.0,
    slice_chips: options.SliceChips = None,
    repair_seconds: options.RepairSeconds = None,
    repair_power: options.RepairPower = None,
    repair_tail: options.RepairTail = None,
    preempt: options.Preempt = None,
    step_seconds: options.StepSeconds = None,
    downscale_seconds: options.DownscaleSeconds = None,
    upscale_seconds: options.UpscaleSeconds = None,
    upscale_window_seconds: options.UpscaleWindowSeconds = None,
    restart_seconds: options.RestartSeconds = None,
    checkpoint_seconds: options.CheckpointSeconds = 0.0,
    sudden: options.Sudden = False,
    minimum_share: options.MinimumShare = 0.0,
    slowdowns: options.Slowdowns = "",
    jitter: options.Jitter = 0.0,
    slack_steps: options.SlackSteps = 0,
    grace: options.Grace = True,
    straggler_days: options.StragglerDays = None,
    straggler_seconds: options.StragglerSeconds = 600.0,
    straggler_slowdown: options.StragglerSlowdown = 0.2,
    scavenged_share: options.ScavengedShare = 0.0,
    scavenged_block_chips: options.ScavengedBlockChips = 1024,
    stay_seconds: options.StaySeconds = None,
    away_seconds: options.AwaySeconds = 0.0,
    join_seconds: options.JoinSeconds = 1.0,
    seeds: options.Seeds = 6,
    seed: options.Seed = 0,
    days: options.Days = None,
    tokens_per_chip_second: options.TokensPerChipSecond = 1000.0,
    json_file: options.JsonFile = None,
    plot: options.Plot = None,
    timeline: options.Timeline = None,
    timeline_hours: options.TimelineHours = 1.0,
) -> None:
    """What failures cost a cluster: goodput, uptime, and where the rest of the chip-time goes."""
    from decoupled_diloco_plan.goodput.study import Effort, cells

    console = make_console()
    _refuse_what_is_ignored(context)
    _check_files(json_file, plot, timeline)
    if calibrate:
        _calibrate(console, json_file)
        return
    _positive("--mtbi-years", mtbi_years)
    _positive("--tokens-per-chip-second", tokens_per_chip_second)
    _positive("--timeline-hours", timeline_hours, most=TIMELINE_HOURS_MAX)
    constants = _constants(
        slice_chips=slice_chips,
        repair_seconds=repair_seconds,
        repair_power=repair_power,
        repair_tail=repair_tail,
        step_seconds=step_seconds,
        downscale_seconds=downscale_seconds,
        upscale_seconds=upscale_seconds,
        upscale_window_seconds=upscale_window_seconds,
        restart_seconds=restart_seconds,
    )
    terms = (scavenged_block_chips, stay_seconds, away_seconds, join_seconds)
    clusters = list(
        cells(
            _systems(system, scavenged=bool(scavenged_share)),
            [_count(each, "--chips") for each in _several(chips, "--chips")],
            [_count(each, "--learners") for each in _several(learners, "--learners")],
            scavenged=_scavenged(scavenged_share, terms) if scavenged_share else None,
            constants=constants,
            mtbi_seconds=mtbi_years * YEAR_DAYS * 86400,
            quorum=quorum,
            period=period,
            minimum_share=minimum_share,
            checkpoint_seconds=checkpoint_seconds,
            sudden=sudden,
            slowdowns=_slowdowns(slowdowns),
            jitter=jitter,
            slack_steps=slack_steps,
            grace=grace,
            stragglers=_stragglers(straggler_days, straggler_seconds, straggler_slowdown),
            preemptions=tuple(map(_preemption, preempt or ())),
        )
    )
    rows: list[Row] = []
    try:
        _simulate(clusters, Effort(seeds, seed, days), rows)
    except KeyboardInterrupt:
        if rows:
            _tell(rows, tokens_per_chip_second, json_file, console)
        print(f"stopped: {len(rows)} of {len(clusters)} rows are done", file=sys.stderr)
        raise
    _tell(rows, tokens_per_chip_second, json_file, console)
    if plot is not None:
        from decoupled_diloco_plan.goodput.picture import plot_goodput

        plot_goodput(rows, plot)
    if timeline is not None:
        from decoupled_diloco_plan.goodput.picture import plot_timeline

        plot_timeline(clusters[-1], timeline_hours, seed, timeline)


def _simulate(clusters: Sequence[Cluster], effort: Effort, rows: list[Row]) -> None:
    """Adds the rows one by one, so that who stops it has those that are done."""
    from decoupled_diloco_plan.goodput.study import study

    with _progress() as tell:
        for cluster in clusters:
            tell(f"row {len(rows) + 1} of {len(clusters)}: {_name(cluster)}")
            rows.append(study(cluster, effort))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is being simulated, and goes away."""
    from decoupled_diloco.observe.progress import SteadyConsole

    console = SteadyConsole(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield status.update


# ---- what is given


def _refuse_what_is_ignored(context: typer.Context) -> None:
    """An option that the others leave nothing to do is a mistake."""
    given = {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }
    names = dict(_option_names(context))
    systems = _systems(context.params["system"], scavenged=bool(context.params["scavenged_share"]))
    if context.params["calibrate"]:
        for name in sorted(given - {"calibrate", "json_file"}):
            raise ConfigError(f"--calibrate fits published cells alone: leave out {names[name]}")
    for name in sorted(given & WITH_SYSTEMS.keys()):
        one = name == "learners" and "1" in listed(context.params[name])
        if not one and not set(systems) & set(WITH_SYSTEMS[name]):
            raise ConfigError(
                f"{names[name]} is of {' and '.join(WITH_SYSTEMS[name])} only: leave it out, or "
                f"name the system with --system"
            )
    for name in sorted(given & WITH_OPTIONS.keys()):
        if not any(context.params[other] for other in WITH_OPTIONS[name]):
            others = " or ".join(names[other] for other in WITH_OPTIONS[name])
            raise ConfigError(f"{names[name]} does nothing without {others}")


def _check_files(json_file: Path | None, *pictures: Path | None) -> None:
    """What could not be written is told before the work and not after it."""
    for path in pictures:
        if path is not None and path.suffix.lower() not in PICTURES:
            raise ConfigError(
                f"picture {path} does not end in {', '.join(PICTURES)}: give such a file"
            )
    for path in (json_file, *pictures):
        if path is None or path == Path("-"):
            continue
        if path.is_dir():
            raise StorageError(f"cannot write {path}: it is a folder, give a file in it")
        if not path.parent.is_dir():
            raise StorageError(f"cannot write {path}: there is no folder {path.parent}, make it")


def _positive(option: str, value: float, most: float = math.inf) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{option} {value:g} is out of range: it must be greater than 0")
    if value > most:
        raise ConfigError(f"{option} {value:g} is out of range: at most {most:g}")


def _option_names(context: typer.Context) -> Iterable[tuple[str, str]]:
    """For each parameter the option that stands on the command line."""
    for parameter in context.command.params:
        if parameter.name:
            yield parameter.name, parameter.opts[0]


def _constants(**given: float | None) -> Constants:
    from decoupled_diloco_plan.goodput.settings import Constants

    return Constants(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _systems(text: str, *, scavenged: bool) -> list[System]:
    """Those that are named; else all that can be."""
    from decoupled_diloco_plan.goodput.settings import SYSTEMS

    if not text:
        return [system for system in SYSTEMS if not (scavenged and system == "barrier")]
    names = _several(text, "--system")
    for name in names:
        if name not in SYSTEMS:
            raise ConfigError(f"--system {name!r} is none of {', '.join(SYSTEMS)}")
    return [system for system in SYSTEMS if system in names]


def _several(text: str, option: str) -> list[str]:
    items = list(dict.fromkeys(listed(text)))
    if not items:
        raise ConfigError(f"{option} is empty: give one value, or several with commas")
    return items


def _count(text: str, option: str) -> int:
    """A whole number, perhaps with k, M or G, or a power of ten."""
    match = _COUNT.fullmatch(text)
    value = float(match[1]) * _FACTORS[match[2]] if match else 0.5
    if value != round(value):
        raise ConfigError(f"{option} {text!r} is no whole number: write such as 8, 150k or 2.4e6")
    return round(value)


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is no number") from None


def _slowdowns(text: str) -> tuple[float, ...]:
    """`1x4,1.18x4` as eight numbers."""
    found: list[float] = []
    for item in listed(text):
        value, _, times = item.partition("x")
        count = _count(times, "--slowdowns") if times else 1
        if count > 10_000:
            raise ConfigError(f"--slowdowns {item!r} names more than 10000 learners")
        found += [_number(value, "--slowdowns")] * count
    return tuple(found)


def _preemption(text: str) -> Preemption:
    from decoupled_diloco_plan.goodput.settings import Preemption

    parts = [_number(part, "--preempt") for part in text.split(",")]
    if len(parts) != 3:
        raise ConfigError(f"--preempt {text!r} is not START,HOURS,SHARE, as 2,0.5,0.25")
    start, hours, share = parts
    return Preemption(start * 3600, hours * 3600, share)


def _stragglers(days: float | None, seconds: float, slowdown: float) -> Stragglers | None:
    from decoupled_diloco_plan.goodput.settings import Stragglers

    return None if days is None else Stragglers(days * 86400, seconds, slowdown)


def _scavenged(share: float, terms: tuple[int, float | None, float, float]) -> Any:
    """For a number of chips the scavenged ones that come in addition."""
    from decoupled_diloco_plan.goodput.scavenge import blocks_of

    block_chips, stay, away, join = terms
    return lambda chips: blocks_of(chips, share, block_chips, stay, away, join)


# ---- what is told


def _tell(rows: Sequence[Row], tokens: float, json_file: Path | None, console: Console) -> None:
    documents = [row.as_json(tokens) for row in rows]
    if json_file == Path("-"):
        print(json.dumps(documents, indent=1))
        return
    _print_rows(rows, tokens, console)
    if json_file is not None:
        _write(json_file, documents)


def _write(path: Path, documents: Any) -> None:
    try:
        path.write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def _table(*columns: tuple[str, Justify]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def _print_rows(rows: Sequence[Row], tokens: float, console: Console) -> None:
    from decoupled_diloco.units import format_count

    known = any(row.published is not None for row in rows)
    shown = [cause for cause in CAUSES if any(row.badput[cause] >= SHOWN_MIN for row in rows)]
    columns: list[tuple[str, Justify]] = [("system", "left"), ("chips", "right")]
    columns += [("goodput", "right"), *([("publ.", "right")] if known else [])]  # type: ignore[list-item]
    columns += [("uptime", "right"), ("tokens/h", "right")]
    columns += [(CAUSES[cause], "right") for cause in shown]
    table = _table(*columns)
    for row in rows:
        cluster = row.cluster
        published = "" if row.published is None else f"{row.published:g}"
        table.add_row(
            _system_name(cluster),
            format_count(cluster.chips),
            _with_interval(row),
            *([published] if known else []),
            f"{row.uptime:.1f}",
            format_count(row.tokens_per_hour(tokens)),
            *(f"{row.badput[cause]:.1f}" for cause in shown),
        )
    console.print(table)
    _print_notes(rows, shown, console)


def _print_notes(rows: Sequence[Row], shown: Sequence[str], console: Console) -> None:
    """What the columns mean, and what unequal speeds come to."""
    from decoupled_diloco_plan.goodput.accounts import CAUSES as MEANINGS

    told = ["Percent of the allocated chip-time"]
    if any(row.interval is not None for row in rows):
        told.append("±: 95 % interval of the mean over seeds")
    if any(row.published is not None for row in rows):
        told.append("publ.: published for the same cluster")
    told += [f"{CAUSES[cause]}: {MEANINGS[cause]}" for cause in shown]
    console.print("; ".join(told), style="dim", highlight=False)
    for row in rows:
        if row.pace is not None:
            console.print(_pace(row), highlight=False)


def _system_name(cluster: Cluster) -> str:
    return cluster.system if cluster.alone else f"{cluster.system} M={cluster.learners}"


def _name(cluster: Cluster) -> str:
    from decoupled_diloco.units import format_count

    return f"{_system_name(cluster)}, {format_count(cluster.chips)} chips"


def _with_interval(row: Row) -> str:
    interval = row.interval
    return f"{row.goodput:.1f}" + ("" if interval is None else f" ±{interval:.1f}")


def _pace(row: Row) -> str:
    assert row.pace is not None
    shares = sorted({f"{100 * share:.0f}" for share in row.pace.took_part}, key=int)
    least, most = shares[0], shares[-1]
    return (
        f"{row.cluster.system}, M={row.cluster.learners}, K={row.cluster.quorum}: the clock makes "
        f"{100 * row.pace.against_fastest:.0f} % of the fastest learner's steps; a learner is in "
        f"{least if least == most else f'{least} to {most}'} % of the rounds"
    )


def _calibrate(console: Console, json_file: Path | None) -> None:
    from dataclasses import asdict

    from decoupled_diloco_plan.goodput.calibrate import NAMES, calibrated, residuals, rounded

    def tell(text: str) -> None:
        if json_file != Path("-"):
            console.print(text, highlight=False, style="dim")

    exact = calibrated(tell)
    found = rounded(exact)
    rows = residuals(found)
    if json_file == Path("-"):
        print(json.dumps({"constants": asdict(found), "cells": _cells(rows)}, indent=1))
        return
    table = _table(("constant", "left"), ("seconds", "right"))
    for name in NAMES:
        table.add_row(name.removesuffix("_seconds").replace("_", " "), f"{getattr(found, name):g}")
    console.print(table)
    _print_residuals(rows, console)
    if json_file is not None:
        _write(json_file, {"constants": asdict(found), "cells": _cells(rows)})


def _cells(rows: Iterable[Residual]) -> list[dict[str, Any]]:
    return [
        {
            "system": row.cell.system,
            "chips": row.cell.chips,
            "learners": row.cell.learners,
            "published": row.cell.goodput,
            "goodput": round(row.goodput, 2),
            "calibrated": row.cell.calibrate,
        }
        for row in rows
    ]


def _print_residuals(rows: Sequence[Residual], console: Console) -> None:
    from decoupled_diloco.units import format_count

    table = _table(
        ("system", "left"),
        ("M", "right"),
        ("chips", "right"),
        ("published", "right"),
        ("simulated", "right"),
        ("points", "right"),
        ("", "left"),
    )
    for row in rows:
        cell = row.cell
        table.add_row(
            cell.system,
            str(cell.learners),
            format_count(cell.chips),
            f"{cell.goodput:g}",
            f"{row.goodput:.1f}",
            f"{row.points:+.1f}",
            "fitted" if cell.calibrate else "predicted",
        )
    console.print()
    console.print(table)
