"""Options of `ddiloco goodput`, in groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from decoupled_diloco.cli.command_line import CommandOptions
from decoupled_diloco_plan.goodput.cluster_settings import SYSTEMS, Constants


def complete_systems(incomplete: str) -> list[tuple[str, str]]:
    """Return the systems that complete a text, for the shell; after a comma, the next system.

    >>> complete_systems("elastic,b")
    [('elastic,barrier', 'DiLoCo: every H steps, all learners wait for the last one')]
    """
    before, comma, rest = incomplete.rpartition(",")
    return [(before + comma + k, text) for k, text in SYSTEMS.items() if k.startswith(rest)]


_option: Any = typer.Option
_failures: Any = partial(typer.Option, rich_help_panel="Failures")
_stops: Any = partial(typer.Option, rich_help_panel="Stops (defaults are calibrated)")
_relays: Any = partial(typer.Option, rich_help_panel="Relays")
_unequal: Any = partial(typer.Option, rich_help_panel="Unequal and scavenged chips")
_runs: Any = partial(typer.Option, rich_help_panel="Runs")
_output: Any = partial(typer.Option, rich_help_panel="Output")
_found = Constants()


class GoodputOptions(CommandOptions):
    """Options of `ddiloco goodput`."""

    chips: Annotated[str, _option(metavar="N[,N…]")] = "150k,300k,600k,1.2M,2.4M"
    """Number of chips in the cluster, such as 150k or 2.4M."""

    learners: Annotated[str, _option(metavar="M[,M…]")] = "8"
    """Number of learners for barrier and decoupled."""

    system: Annotated[
        str, _option(metavar="NAME[,NAME…]", autocompletion=complete_systems, show_default=False)
    ] = ""
    """Systems to simulate: data-parallel, elastic, barrier, decoupled. Default: all, but without
    barrier if --scavenged-share is given."""

    quorum: Annotated[int, _option(metavar="K")] = 1
    """Minimum number of learners (K): with fewer, steps of decoupled do not count."""

    period: Annotated[int, _option(metavar="H")] = 24
    """Steps between two barriers (H)."""

    calibrate: Annotated[bool, _option("--calibrate")] = False
    """Fit the lengths of stops to published cells, and print the errors for all cells. Takes half a
    minute."""

    mtbi_years: Annotated[float, _failures()] = 1.0
    """Mean time between two interruptions of a chip, in years."""

    slice_chips: Annotated[int, _failures()] = _found.slice_chips
    """Number of chips that leave together when one of them fails."""

    repair_seconds: Annotated[float, _failures()] = _found.repair_seconds
    """Mean time until a slice is repaired, in seconds."""

    repair_power: Annotated[float, _failures()] = _found.repair_power
    """Shape a of the exponentiated Weibull distribution of the repair time."""

    repair_tail: Annotated[float, _failures()] = _found.repair_tail
    """Shape k of the same distribution; below 1, it has a heavy tail."""

    preempt: Annotated[list[str] | None, _failures(metavar="START,HOURS,SHARE")] = None
    """Take a SHARE of every learner's slices after START hours, for HOURS hours. Can be given
    several times."""

    step_seconds: Annotated[float, _stops()] = _found.step_seconds
    """Time of a step, in seconds."""

    downscale_seconds: Annotated[float, _stops()] = _found.downscale_seconds
    """Time for which a learner stops when slices leave it, in seconds."""

    upscale_seconds: Annotated[float, _stops()] = _found.upscale_seconds
    """Time for which a learner stops when slices join it, in seconds."""

    upscale_window_seconds: Annotated[float, _stops()] = _found.upscale_window_seconds
    """Time for which a repaired slice waits for others, in seconds."""

    restart_seconds: Annotated[float, _stops()] = _found.restart_seconds
    """Time for which data-parallel training stops at a failure, in seconds."""

    checkpoint_seconds: Annotated[float, _stops()] = 0.0
    """Time between two checkpoints of data-parallel training, in seconds; a failure loses the steps
    since the last one. 0: one checkpoint per step."""

    sudden: Annotated[bool, _stops("--sudden")] = False
    """Lose the step in which a chip fails."""

    minimum_share: Annotated[float, _stops()] = 0.0
    """Share of its slices that a learner requires to step, 0 to 1."""

    relays: Annotated[int, _relays()] = 0
    """Number of sites with a relay, among which the learners of decoupled are divided. 0: no
    relays."""

    relay_days: Annotated[float, _relays()] = 30.0
    """Mean time until a relay fails, in days."""

    relay_away_seconds: Annotated[float, _relays()] = 600.0
    """Mean time until a failed relay is back, in seconds."""

    slowdowns: Annotated[str, _unequal(metavar="S[xCOUNT],…")] = ""
    """Factor on the step time of each learner, such as 1x4,1.18x4 for eight learners."""

    jitter: Annotated[float, _unequal()] = 0.0
    """Standard deviation of the step time, as a share of it."""

    slack_steps: Annotated[int, _unequal()] = 0
    """Steps for which a learner continues before it waits for a round."""

    grace: Annotated[bool, _unequal("--grace/--no-grace")] = True
    """Keep rounds of decoupled open for slow learners as long as the slack allows."""

    straggler_days: Annotated[float | None, _unequal()] = None
    """Mean time between two slow periods of a chip, in days. Default: no slow periods."""

    straggler_seconds: Annotated[float, _unequal()] = 600.0
    """Length of a slow period, in seconds."""

    straggler_slowdown: Annotated[float, _unequal()] = 0.2
    """Share by which steps of the learner are longer in a slow period."""

    scavenged_share: Annotated[float, _unequal()] = 0.0
    """Additional chips that come and go, as a share of all chips."""

    scavenged_block_chips: Annotated[int, _unequal()] = 1024
    """Number of chips in a scavenged block, which is a learner, or a slice of a single learner."""

    stay_seconds: Annotated[float | None, _unequal()] = None
    """Mean time until a block is preempted, in seconds. Default: as if 10 % of all machines with 8
    chips were preempted per day."""

    away_seconds: Annotated[float, _unequal()] = 0.0
    """Mean time until the next block arrives, in seconds."""

    join_seconds: Annotated[float, _unequal()] = 1.0
    """Time for which a new learner fetches the weights, in seconds."""

    seeds: Annotated[int, _runs()] = 6
    """Number of runs per cell."""

    seed: Annotated[int, _runs()] = 0
    """Seed of the first run."""

    days: Annotated[float | None, _runs()] = None
    """Length of each run, in days. Default: until the error is at most ±0.3 points."""

    tokens_per_chip_second: Annotated[float, _output()] = 1000.0
    """Tokens that a chip trains per second of stepping."""

    as_json: Annotated[bool, _output("--json")] = False
    """Print JSON to standard output instead of tables."""

    out: Annotated[Path | None, _output(metavar="FILE.json")] = None
    """Also write the JSON to this file."""

    plot: Annotated[Path | None, _output(metavar="FILE")] = None
    """Plot the goodput over the number of chips: .png, .svg or .pdf."""

    timeline: Annotated[Path | None, _output(metavar="FILE")] = None
    """Plot what each learner does in the last cell of the table: .png, .svg or .pdf."""

    timeline_hours: Annotated[float, _output()] = 1.0
    """Hours that --timeline shows."""
