"""`ddiloco goodput`: which clusters were asked for, and what comes of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from typing import Any

from decoupled_diloco.cli.command_line import option_of
from decoupled_diloco.cli.options import listed, make_console
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.observe.terminal import SteadyConsole
from decoupled_diloco.units import format_count, parse_count
from decoupled_diloco_plan.checks import above
from decoupled_diloco_plan.goodput import tables
from decoupled_diloco_plan.goodput.calibrate import calibrated, residuals, rounded
from decoupled_diloco_plan.goodput.options import GoodputOptions
from decoupled_diloco_plan.goodput.settings import (
    SYSTEMS,
    YEAR_SECONDS,
    Cluster,
    Constants,
    Preemption,
    Stragglers,
    System,
    blocks_of,
)
from decoupled_diloco_plan.goodput.study import Effort, Row, cells, study
from decoupled_diloco_plan.output import STDOUT, check_files, write_json

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

OF_CLUSTER = (
    "quorum",
    "period",
    "minimum_share",
    "checkpoint_seconds",
    "sudden",
    "jitter",
    "slack_steps",
    "grace",
)
"""Options that are fields of `Cluster`."""

TIMELINE_HOURS_MAX = 168.0
"""A week: more is no picture any more."""

_option = partial(option_of, GoodputOptions)


def run(options: GoodputOptions) -> None:
    """Simulates row by row, and tells those that are done even if it is stopped."""
    _refuse_what_is_ignored(options)
    check_files(options.json_to, options.plot, options.timeline)
    if options.calibrate:
        _calibrate(options)
        return
    for name in ("mtbi_years", "tokens_per_chip_second", "timeline_hours"):
        above(0, **{_option(name): getattr(options, name)})
    if options.timeline_hours > TIMELINE_HOURS_MAX:
        raise ConfigError(
            f"--timeline-hours {options.timeline_hours:g} is out of range: at most "
            f"{TIMELINE_HOURS_MAX:g}"
        )
    clusters = list(_clusters(options))
    rows: list[Row] = []
    try:
        _simulate(clusters, Effort(options.seeds, options.seed, options.days), rows)
    except KeyboardInterrupt:
        if rows:
            _tell(rows, options)
        print(f"stopped: {len(rows)} of {len(clusters)} rows are done", file=sys.stderr)
        raise
    _tell(rows, options)
    _draw(rows, options)


def _simulate(clusters: Sequence[Cluster], effort: Effort, rows: list[Row]) -> None:
    """Adds the rows one by one, so that a user who stops it has those that are done."""
    with _progress() as tell:
        for cluster in clusters:
            what = f"{cluster.name}, {format_count(cluster.chips)} chips"
            tell(f"row {len(rows) + 1} of {len(clusters)}: {what}")
            rows.append(study(cluster, effort))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is being simulated, and goes away."""
    console = SteadyConsole(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield status.update


def _tell(rows: Sequence[Row], options: GoodputOptions) -> None:
    tokens = options.tokens_per_chip_second
    if options.json_to != STDOUT:
        tables.print_rows(rows, tokens, make_console())
    write_json([row.as_json(tokens) for row in rows], options.json_to)


def _draw(rows: Sequence[Row], options: GoodputOptions) -> None:
    if options.plot is None and options.timeline is None:
        return
    from decoupled_diloco_plan.goodput import picture  # matplotlib takes a while

    if options.plot is not None:
        picture.plot_goodput(rows, options.plot)
    if options.timeline is not None:
        hours = options.timeline_hours
        picture.plot_timeline(rows[-1].cluster, hours, options.seed, options.timeline)


def _calibrate(options: GoodputOptions) -> None:
    console, printed = make_console(), options.json_to == STDOUT

    def tell(text: str) -> None:
        if not printed:
            console.print(text, style="dim")

    found = rounded(calibrated(tell))
    rows = residuals(found)
    if not printed:
        tables.print_calibration(found, rows, console)
    document = {"constants": asdict(found), "cells": [row.as_json() for row in rows]}
    write_json(document, options.json_to)


def _refuse_what_is_ignored(options: GoodputOptions) -> None:
    """An option that the others leave nothing to do is a mistake."""
    given, systems = options.model_fields_set, _systems(options)
    if options.calibrate:
        for name in sorted(given - {"calibrate", "json_to"}):
            raise ConfigError(f"--calibrate fits published cells alone: leave out {_option(name)}")
    for name in sorted(given & WITH_SYSTEMS.keys()):
        one = name == "learners" and "1" in listed(options.learners)
        if not one and not set(systems) & set(WITH_SYSTEMS[name]):
            raise ConfigError(
                f"{_option(name)} is of {' and '.join(WITH_SYSTEMS[name])} only: leave it out, or "
                "name the system with --system"
            )
    for name in sorted(given & WITH_OPTIONS.keys()):
        if not any(getattr(options, other) for other in WITH_OPTIONS[name]):
            others = " or ".join(map(_option, WITH_OPTIONS[name]))
            raise ConfigError(f"{_option(name)} does nothing without {others}")


def _clusters(options: GoodputOptions) -> Iterator[Cluster]:
    """The cells that were asked for."""
    return cells(
        _systems(options),
        [_count(each, "--chips") for each in _several(options.chips, "--chips")],
        [_count(each, "--learners") for each in _several(options.learners, "--learners")],
        scavenged=partial(
            blocks_of,
            share=options.scavenged_share,
            block_chips=options.scavenged_block_chips,
            stay_seconds=options.stay_seconds,
            away_seconds=options.away_seconds,
            join_seconds=options.join_seconds,
        )
        if options.scavenged_share
        else None,
        constants=Constants(**_picked(options, [each.name for each in fields(Constants)])),
        mtbi_seconds=options.mtbi_years * YEAR_SECONDS,
        slowdowns=_slowdowns(options.slowdowns),
        stragglers=_stragglers(options),
        preemptions=tuple(map(_preemption, options.preempt or ())),
        **_picked(options, OF_CLUSTER),
    )


def _picked(options: GoodputOptions, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _systems(options: GoodputOptions) -> list[System]:
    """The systems that are named, or else all that are possible."""
    if not options.system:
        borrows = bool(options.scavenged_share)
        return [system for system in SYSTEMS if not (borrows and system == "barrier")]
    names = _several(options.system, "--system")
    for name in names:
        if name not in SYSTEMS:
            raise ConfigError(f"--system {name!r} is none of {', '.join(SYSTEMS)}")
    return [system for system in SYSTEMS if system in names]


def _stragglers(options: GoodputOptions) -> Stragglers | None:
    if options.straggler_days is None:
        return None
    spell = (options.straggler_seconds, options.straggler_slowdown)
    return Stragglers(options.straggler_days * 86400, *spell)


def _preemption(text: str) -> Preemption:
    parts = [_number(part, "--preempt") for part in text.split(",")]
    if len(parts) != 3:
        raise ConfigError(f"--preempt {text!r} is not START,HOURS,SHARE, as 2,0.5,0.25")
    start, hours, share = parts
    return Preemption(start * 3600, hours * 3600, share)


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


def _several(text: str, option: str) -> list[str]:
    items = list(dict.fromkeys(listed(text)))
    if not items:
        raise ConfigError(f"{option} is empty: give one value, or several with commas")
    return items


def _count(text: str, option: str) -> int:
    """A whole number, perhaps with k, M or G, or a power of ten."""
    try:
        value = parse_count(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not value.is_integer():
        raise ConfigError(f"{option} {text!r} is no whole number: write such as 8, 150k or 2.4e6")
    return int(value)


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is no number") from None
