"""The options of `ddiloco goodput`, in groups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from decoupled_diloco_plan.goodput.settings import Constants

SYSTEMS = {
    "data-parallel": "one learner, restarts at each failure",
    "elastic": "one learner, goes on without the slices that failed",
    "barrier": "DiLoCo: every H steps all learners wait for the last one",
    "decoupled": "Decoupled DiLoCo: nobody waits",
}


def complete_systems(incomplete: str) -> list[tuple[str, str]]:
    """The systems, for the shell; after a comma the next one.

    >>> complete_systems("elastic,b")
    [('elastic,barrier', 'DiLoCo: every H steps all learners wait for the last one')]
    """
    before, comma, rest = incomplete.rpartition(",")
    return [(before + comma + k, text) for k, text in SYSTEMS.items() if k.startswith(rest)]


def _option(help: str, panel: str = "", *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel or None, **more)


_FOUND = Constants()
_FAILURES = "Failures"
_STOPS = "Stops, by default as calibrated"
_UNEQUAL = "Unequal and borrowed chips"
_RUNS = "Runs"
_OUTPUT = "Output"
_MANY = "N[,N…]"

Chips = Annotated[str, _option("Chips of the cluster, as 150k or 2.4M.", metavar=_MANY)]
Learners = Annotated[
    str, _option("Learners that barrier and decoupled cut it into.", metavar="M[,M…]")
]
SystemNames = Annotated[
    str,
    _option(
        f"Of {', '.join(SYSTEMS)}; by default all (barrier not with --scavenged-share).",
        metavar="SYSTEM[,…]",
        autocompletion=complete_systems,
        show_default=False,
    ),
]
Quorum = Annotated[int, _option("K: with fewer learners, steps of decoupled do not count.")]
Period = Annotated[int, _option("H: a barrier waits after so many steps.")]
Calibrate = Annotated[
    bool,
    _option(
        "Find the lengths of the stops on the published cells meant for it, and show what they "
        "give for all; takes half a minute.",
        "",
        "--calibrate",
    ),
]

MtbiYears = Annotated[float, _option("Mean time between interruptions of one chip.", _FAILURES)]
SliceChips = Annotated[
    int | None,
    _option(f"Chips that leave together when one of them fails: {_FOUND.slice_chips}.", _FAILURES),
]
RepairSeconds = Annotated[
    float | None,
    _option(f"Mean time until a slice is back: {_FOUND.repair_seconds:g}.", _FAILURES),
]
RepairPower = Annotated[
    float | None,
    _option(
        f"Shape a of its exponentiated Weibull distribution: {_FOUND.repair_power:g}.", _FAILURES
    ),
]
RepairTail = Annotated[
    float | None,
    _option(f"Shape k of it, below 1 for a heavy tail: {_FOUND.repair_tail:g}.", _FAILURES),
]
Preempt = Annotated[
    list[str] | None,
    _option(
        "A share of every learner's slices is taken START hours into the run, for HOURS; several "
        "times for a schedule.",
        _FAILURES,
        metavar="START,HOURS,SHARE",
    ),
]

StepSeconds = Annotated[
    float | None, _option(f"Length of a step: {_FOUND.step_seconds:g}.", _STOPS)
]
DownscaleSeconds = Annotated[
    float | None,
    _option(f"A learner stands so long when slices leave: {_FOUND.downscale_seconds:g}.", _STOPS),
]
UpscaleSeconds = Annotated[
    float | None,
    _option(f"A learner stands so long when slices join: {_FOUND.upscale_seconds:g}.", _STOPS),
]
UpscaleWindowSeconds = Annotated[
    float | None,
    _option(
        "A slice that is back waits so long for others to join with: "
        f"{_FOUND.upscale_window_seconds:g}.",
        _STOPS,
    ),
]
RestartSeconds = Annotated[
    float | None,
    _option(
        f"Training that is not elastic stands so long at a failure: {_FOUND.restart_seconds:g}.",
        _STOPS,
    ),
]
CheckpointSeconds = Annotated[
    float,
    _option("It loses what ran since its last checkpoint; 0: one in each step.", _STOPS),
]
Sudden = Annotated[bool, _option("The step in which a chip fails is lost.", _STOPS, "--sudden")]
MinimumShare = Annotated[
    float, _option("A learner needs this share of its slices to step.", _STOPS)
]

Slowdowns = Annotated[
    str,
    _option(
        "How many times as long a step of each learner takes, as 1x4,1.18x4.",
        _UNEQUAL,
        metavar="S[xCOUNT],…",
    ),
]
Jitter = Annotated[
    float, _option("Standard deviation of a step, as a share of its length.", _UNEQUAL)
]
SlackSteps = Annotated[
    int,
    _option("Steps that a learner goes on before a round that it waits for is over.", _UNEQUAL),
]
Grace = Annotated[
    bool,
    _option(
        "Whether rounds of decoupled stay open for slow learners as long as the slack allows.",
        _UNEQUAL,
        "--grace/--no-grace",
    ),
]
StragglerDays = Annotated[
    float | None,
    _option("Mean time between spells of slowness of one chip; none: no spells.", _UNEQUAL),
]
StragglerSeconds = Annotated[float, _option("Length of such a spell.", _UNEQUAL)]
StragglerSlowdown = Annotated[
    float, _option("By this share its learner's steps are longer meanwhile.", _UNEQUAL)
]
ScavengedShare = Annotated[
    float, _option("So many more chips that come and go, as a share of all.", _UNEQUAL)
]
ScavengedBlockChips = Annotated[
    int,
    _option("In blocks of so many; a block is a learner, or a slice of the only one.", _UNEQUAL),
]
StaySeconds = Annotated[
    float | None,
    _option(
        "Mean time until a block is preempted; by default as if of its machines of 8 chips 10 % a "
        "day were.",
        _UNEQUAL,
    ),
]
AwaySeconds = Annotated[float, _option("Mean time until the next one comes.", _UNEQUAL)]
JoinSeconds = Annotated[
    float, _option("A learner that has come fetches the weights so long.", _UNEQUAL)
]

Seeds = Annotated[int, _option("Runs of each cell.", _RUNS)]
Seed = Annotated[int, _option("The first one's seed.", _RUNS)]
Days = Annotated[
    float | None,
    _option("Length of each run; none: until the interval is at most ±0.3 points.", _RUNS),
]
TokensPerChipSecond = Annotated[
    float, _option("Tokens that a chip trains in a second of steps.", _OUTPUT)
]
JsonFile = Annotated[
    Path | None,
    _option(
        "Write the rows there; - prints them instead of the table.",
        _OUTPUT,
        "--json",
        metavar="FILE",
    ),
]
Plot = Annotated[
    Path | None, _option("Draw goodput over chips: .png, .svg, .pdf.", _OUTPUT, metavar="FILE")
]
Timeline = Annotated[
    Path | None,
    _option("Draw what each learner does in the table's last cell.", _OUTPUT, metavar="FILE"),
]
TimelineHours = Annotated[float, _option("How much of it.", _OUTPUT)]
