"""`ddiloco goodput`: simulate clusters with failures, and print their goodput."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from typing import Any

from decoupled_diloco.cli.command_line import option_of
from decoupled_diloco.cli.shared_options import listed, make_console
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.show.console import SteadyConsole
from decoupled_diloco.units import format_count, parse_count
from decoupled_diloco_plan.checks import above
from decoupled_diloco_plan.goodput import goodput_tables
from decoupled_diloco_plan.goodput.calibrate import calibrated, residuals, rounded
from decoupled_diloco_plan.goodput.cluster_settings import (
    SYSTEMS,
    YEAR_SECONDS,
    Cluster,
    Constants,
    Preemption,
    Relays,
    Stragglers,
    System,
    blocks_of,
)
from decoupled_diloco_plan.goodput.goodput_options import GoodputOptions
from decoupled_diloco_plan.goodput.study import Effort, Row, cells, study
from decoupled_diloco_plan.output import check_files, write_json

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
    "relays": ("decoupled",),
}
"""Systems that each of these options applies to."""

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
    "relay_days": ("relays",),
    "relay_away_seconds": ("relays",),
}
"""Options that need one of these other options."""

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
"""One week; a longer timeline is not readable."""

_option = partial(option_of, GoodputOptions)


def run(options: GoodputOptions) -> None:
    """Simulate row by row; if interrupted, print the finished rows."""
    _reject_unused(options)
    check_files(options.out, options.plot, options.timeline)
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
            _output(rows, options)
        print(f"stopped: {len(rows)} of {len(clusters)} rows are done", file=sys.stderr)
        raise
    _output(rows, options)
    _draw(rows, options)


def _simulate(clusters: Sequence[Cluster], effort: Effort, rows: list[Row]) -> None:
    """Append the rows one by one, so that an interrupt keeps the finished ones."""
    with _progress() as report:
        for cluster in clusters:
            what = f"{cluster.name}, {format_count(cluster.chips)} chips"
            report(f"row {len(rows) + 1} of {len(clusters)}: {what}")
            rows.append(study(cluster, effort))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show a temporary status line on a terminal."""
    console = SteadyConsole(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield status.update


def _output(rows: Sequence[Row], options: GoodputOptions) -> None:
    tokens = options.tokens_per_chip_second
    if not options.as_json:
        goodput_tables.print_rows(rows, tokens, make_console())
    write_json([row.as_json(tokens) for row in rows], printed=options.as_json, out=options.out)


def _draw(rows: Sequence[Row], options: GoodputOptions) -> None:
    if options.plot is None and options.timeline is None:
        return
    # matplotlib is slow to import, so only --plot and --timeline pay for it
    from decoupled_diloco_plan.goodput import picture

    if options.plot is not None:
        picture.plot_goodput(rows, options.plot)
    if options.timeline is not None:
        hours = options.timeline_hours
        picture.plot_timeline(rows[-1].cluster, hours, options.seed, options.timeline)


def _calibrate(options: GoodputOptions) -> None:
    console, printed = make_console(), options.as_json

    def report(text: str) -> None:
        if not printed:
            console.print(text, style="dim")

    found = rounded(calibrated(report))
    rows = residuals(found)
    if not printed:
        goodput_tables.print_calibration(found, rows, console)
    document = {"constants": asdict(found), "cells": [row.as_json() for row in rows]}
    write_json(document, printed=printed, out=options.out)


def _reject_unused(options: GoodputOptions) -> None:
    """Raise ConfigError for an option that has no effect with the other options."""
    given, systems = options.model_fields_set, _systems(options)
    if options.calibrate:
        for name in sorted(given - {"calibrate", "as_json", "out"}):
            raise ConfigError(
                f"--calibrate cannot be combined with {_option(name)}: it fits published cells only"
            )
    for name in sorted(given & WITH_SYSTEMS.keys()):
        one = name == "learners" and "1" in listed(options.learners)
        if not one and not set(systems) & set(WITH_SYSTEMS[name]):
            raise ConfigError(
                f"{_option(name)} is for {' and '.join(WITH_SYSTEMS[name])} only: omit it, or name "
                "the system with --system"
            )
    for name in sorted(given & WITH_OPTIONS.keys()):
        if not any(getattr(options, other) for other in WITH_OPTIONS[name]):
            others = " or ".join(map(_option, WITH_OPTIONS[name]))
            raise ConfigError(f"{_option(name)} requires {others}")


def _clusters(options: GoodputOptions) -> Iterator[Cluster]:
    """Yield the clusters to simulate."""
    return cells(
        _systems(options),
        [_count(each, "--chips") for each in _several(options.chips)],
        [_count(each, "--learners") for each in _several(options.learners)],
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
        relays=_relays(options),
        preemptions=tuple(map(_preemption, options.preempt or ())),
        **_picked(options, OF_CLUSTER),
    )


def _picked(options: GoodputOptions, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _systems(options: GoodputOptions) -> list[System]:
    """Return the named systems, or all systems that the options allow."""
    if not options.system:
        borrows = bool(options.scavenged_share)
        return [system for system in SYSTEMS if not (borrows and system == "barrier")]
    names = _several(options.system)
    for name in names:
        if name not in SYSTEMS:
            raise ConfigError(f"--system {name!r} is not valid: give one of {', '.join(SYSTEMS)}")
    return [system for system in SYSTEMS if system in names]


def _stragglers(options: GoodputOptions) -> Stragglers | None:
    if options.straggler_days is None:
        return None
    spell = (options.straggler_seconds, options.straggler_slowdown)
    return Stragglers(options.straggler_days * 86400, *spell)


def _relays(options: GoodputOptions) -> Relays | None:
    if not options.relays:
        return None
    return Relays(options.relays, options.relay_days * 86400, options.relay_away_seconds)


def _preemption(text: str) -> Preemption:
    parts = [_number(part, "--preempt") for part in text.split(",")]
    if len(parts) != 3:
        raise ConfigError(f"--preempt {text!r} is not START,HOURS,SHARE, such as 2,0.5,0.25")
    start, hours, share = parts
    return Preemption(start * 3600, hours * 3600, share)


def _slowdowns(text: str) -> tuple[float, ...]:
    """Parse slowdowns; `1x4,1.18x4` are eight numbers."""
    found: list[float] = []
    for item in listed(text):
        value, _, times = item.partition("x")
        count = _count(times, "--slowdowns") if times else 1
        if count > 10_000:
            raise ConfigError(
                f"--slowdowns {item!r} is for more than 10000 learners: lower the count"
            )
        found += [_number(value, "--slowdowns")] * count
    return tuple(found)


def _several(text: str) -> list[str]:
    """The values of a list, without repetitions. The command line rejects an empty one."""
    return list(dict.fromkeys(listed(text)))


def _count(text: str, option: str) -> int:
    """Parse a whole number with an optional suffix k, M or G, or an exponent."""
    try:
        value = parse_count(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not value.is_integer():
        raise ConfigError(
            f"{option} {text!r} is not a whole number: write a number such as 8, 150k or 2.4e6"
        )
    return int(value)


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a valid number") from None
