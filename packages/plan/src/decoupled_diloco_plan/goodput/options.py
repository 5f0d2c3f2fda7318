"""The options of `ddiloco goodput`, in groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from decoupled_diloco.cli.command_line import CommandOptions
from decoupled_diloco_plan.goodput.settings import SYSTEMS, Constants


def complete_systems(incomplete: str) -> list[tuple[str, str]]:
    """The systems, for the shell; after a comma the next one.

    >>> complete_systems("elastic,b")
    [('elastic,barrier', 'DiLoCo: every H steps all learners wait for the last one')]
    """
    before, comma, rest = incomplete.rpartition(",")
    return [(before + comma + k, text) for k, text in SYSTEMS.items() if k.startswith(rest)]


_option: Any = typer.Option
_failures: Any = partial(typer.Option, rich_help_panel="Failures")
_stops: Any = partial(typer.Option, rich_help_panel="Stops, by default as calibrated")
_unequal: Any = partial(typer.Option, rich_help_panel="Unequal and borrowed chips")
_runs: Any = partial(typer.Option, rich_help_panel="Runs")
_output: Any = partial(typer.Option, rich_help_panel="Output")
_found = Constants()


class GoodputOptions(CommandOptions):
    """Which clusters are simulated, and for how long."""

    chips: Annotated[str, _option(metavar="N[,N…]")] = "150k,300k,600k,1.2M,2.4M"
    """Chips of the cluster, as 150k or 2.4M."""

    learners: Annotated[str, _option(metavar="M[,M…]")] = "8"
    """Learners that barrier and decoupled cut it into."""

    system: Annotated[
        str, _option(metavar="SYSTEM[,…]", autocompletion=complete_systems, show_default=False)
    ] = ""
    """One or several of data-parallel, elastic, barrier, decoupled. Default: all (without barrier
    if --scavenged-share is given)."""

    quorum: Annotated[int, _option()] = 1
    """K: with fewer learners, steps of decoupled do not count."""

    period: Annotated[int, _option()] = 24
    """H: a barrier waits after so many steps."""

    calibrate: Annotated[bool, _option("--calibrate")] = False
    """Find the lengths of the stops on the published cells meant for it, and show what they give
    for all; takes half a minute."""

    mtbi_years: Annotated[float, _failures()] = 1.0
    """Mean time between interruptions of one chip."""

    slice_chips: Annotated[int, _failures()] = _found.slice_chips
    """Chips that leave together when one of them fails."""

    repair_seconds: Annotated[float, _failures()] = _found.repair_seconds
    """Mean time until a slice is back."""

    repair_power: Annotated[float, _failures()] = _found.repair_power
    """Shape a of its exponentiated Weibull distribution."""

    repair_tail: Annotated[float, _failures()] = _found.repair_tail
    """Shape k of it, below 1 for a heavy tail."""

    preempt: Annotated[list[str] | None, _failures(metavar="START,HOURS,SHARE")] = None
    """A share of every learner's slices is taken START hours into the run, for HOURS; several times
    for a schedule."""

    step_seconds: Annotated[float, _stops()] = _found.step_seconds
    """Length of a step."""

    downscale_seconds: Annotated[float, _stops()] = _found.downscale_seconds
    """How long a learner stands when slices leave it."""

    upscale_seconds: Annotated[float, _stops()] = _found.upscale_seconds
    """How long a learner stands when slices join it."""

    upscale_window_seconds: Annotated[float, _stops()] = _found.upscale_window_seconds
    """How long a slice that is back waits for others to join with it."""

    restart_seconds: Annotated[float, _stops()] = _found.restart_seconds
    """How long training that is not elastic stands at a failure."""

    checkpoint_seconds: Annotated[float, _stops()] = 0.0
    """Seconds between two checkpoints of training that is not elastic, which loses the steps since;
    0: a checkpoint in each step."""

    sudden: Annotated[bool, _stops("--sudden")] = False
    """The step in which a chip fails is lost."""

    minimum_share: Annotated[float, _stops()] = 0.0
    """A learner needs this share of its slices to step."""

    slowdowns: Annotated[str, _unequal(metavar="S[xCOUNT],…")] = ""
    """How many times as long a step of each learner takes, as 1x4,1.18x4."""

    jitter: Annotated[float, _unequal()] = 0.0
    """Standard deviation of a step, as a share of its length."""

    slack_steps: Annotated[int, _unequal()] = 0
    """Steps that a learner goes on before a round that it waits for is over."""

    grace: Annotated[bool, _unequal("--grace/--no-grace")] = True
    """Whether rounds of decoupled stay open for slow learners as long as the slack allows."""

    straggler_days: Annotated[float | None, _unequal()] = None
    """Mean time between spells of slowness of one chip; none: no spells."""

    straggler_seconds: Annotated[float, _unequal()] = 600.0
    """Length of such a spell."""

    straggler_slowdown: Annotated[float, _unequal()] = 0.2
    """Share by which the steps of its learner are longer meanwhile."""

    scavenged_share: Annotated[float, _unequal()] = 0.0
    """Further chips that come and go, as a share of all."""

    scavenged_block_chips: Annotated[int, _unequal()] = 1024
    """Chips of one scavenged block, which is a learner, or a slice of the only learner."""

    stay_seconds: Annotated[float | None, _unequal()] = None
    """Mean time until a block is preempted. Default: as if 10 % of all machines, of 8 chips each,
    were preempted in a day."""

    away_seconds: Annotated[float, _unequal()] = 0.0
    """Mean time until the next one comes."""

    join_seconds: Annotated[float, _unequal()] = 1.0
    """How long a new learner fetches the weights."""

    seeds: Annotated[int, _runs()] = 6
    """Runs of each cell."""

    seed: Annotated[int, _runs()] = 0
    """The first one's seed."""

    days: Annotated[float | None, _runs()] = None
    """Length of each run; none: until the interval is at most ±0.3 points."""

    tokens_per_chip_second: Annotated[float, _output()] = 1000.0
    """Tokens that a chip trains in a second of steps."""

    json_to: Annotated[Path | None, _output("--json", metavar="FILE")] = None
    """Write the rows to this file; -: print them instead of the table."""

    plot: Annotated[Path | None, _output(metavar="FILE")] = None
    """Draw goodput over chips: .png, .svg, .pdf."""

    timeline: Annotated[Path | None, _output(metavar="FILE")] = None
    """Draw what each learner does in the table's last cell."""

    timeline_hours: Annotated[float, _output()] = 1.0
    """Hours that --timeline draws."""
