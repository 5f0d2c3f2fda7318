"""Settings of a simulated cluster: its chips, their failures, and the reactions of its learners.

Scavenged chips are preempted as often as a cloud's preemptible machines.

Source: Google Cloud's documentation of preemptible instances (2021): of such machines, "the average
preemption rate varies between 5% and 15% per day" (another edition: "per seven days").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.units import format_count
from decoupled_diloco_plan.checks import above, at_least

System = Literal["data-parallel", "elastic", "barrier", "decoupled"]
SYSTEMS: dict[System, str] = {
    "data-parallel": "one learner, restarts after each failure",
    "elastic": "one learner, continues without the failed slices",
    "barrier": "DiLoCo: every H steps, all learners wait for the last one",
    "decoupled": "Decoupled DiLoCo: no learner waits",
}
ALONE = ("data-parallel", "elastic")
"""Systems with a single learner."""

SECOND = 1_000_000
"""Microseconds per second. Times are whole microseconds, so that accounts are exact."""

YEAR_SECONDS = 365.25 * 86400
CHIPS_MAX = 10**8
BLOCKS_MAX = 10**6
STEP_SECONDS_MIN = 1e-3
FAILURE_SECONDS_MIN = 1e-3
"""Minimum time between two failures of a cluster; below it, only failures would be simulated."""


STOPS = ("downscale_seconds", "upscale_seconds", "upscale_window_seconds", "restart_seconds")
REPAIRS = ("repair_seconds", "repair_power", "repair_tail")


@dataclass(frozen=True, slots=True)
class Constants:
    """Unpublished times, the same for every cluster.

    The first five were found by `ddiloco goodput --calibrate`, to three digits. The others are not
    fitted. They were chosen beforehand, from what operators report about such machines.
    """

    step_seconds: float = 4.76  # length of a step; an interruption takes effect between steps
    downscale_seconds: float = 15.9
    upscale_seconds: float = 13.7
    # from a slice's return to the upscale that adds it; slices that return in the meantime share it
    upscale_window_seconds: float = 72.3
    restart_seconds: float = 82.1
    # chips that leave together when one of them fails: a pod with one interconnect
    slice_chips: int = 256
    # mean time until a slice is back; most often it is replaced by a healthy one
    repair_seconds: float = 600.0
    # first shape of the exponentiated Weibull distribution; above 1, very short repairs are rare
    repair_power: float = 2.0
    repair_tail: float = 0.6  # second shape, that of Weibull; below 1, the tail is heavy

    def __post_init__(self) -> None:
        at_least(STEP_SECONDS_MIN, step_seconds=self.step_seconds)
        at_least(1, slice_chips=self.slice_chips)
        at_least(0, **{name: getattr(self, name) for name in STOPS})
        above(0, **{name: getattr(self, name) for name in REPAIRS})


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Chips that are slow for a while; a learner steps at the pace of its slowest chip.

    In such a spell a step takes (1 + slowdown) times as long.
    """

    interval_seconds: float
    seconds: float = 600.0
    slowdown: float = 0.2

    def __post_init__(self) -> None:
        above(0, interval_seconds=self.interval_seconds, seconds=self.seconds)
        at_least(0, slowdown=self.slowdown)


@dataclass(frozen=True, slots=True)
class Scavenged:
    """Preemptible chips, in blocks that come and go independently.

    In a system with several learners a block is a learner. With one learner each block is a slice
    of it. A block leaves when it is preempted or one of its chips fails.
    """

    chips: int
    blocks: int
    stay_seconds: float = 600.0
    # mean time that a block is away; 0: another one replaces it at once
    away_seconds: float = 0.0
    join_seconds: float = 1.0

    def __post_init__(self) -> None:
        at_least(1, scavenged_chips=self.chips, scavenged_blocks=self.blocks)
        if self.blocks > self.chips:
            raise ConfigError(
                f"scavenged blocks={self.blocks} exceeds scavenged chips={self.chips}: lower blocks"
            )
        if self.blocks > BLOCKS_MAX:
            raise ConfigError(
                f"scavenged blocks={self.blocks} exceeds {BLOCKS_MAX}: raise the chips per block"
            )
        above(0, stay_seconds=self.stay_seconds)
        at_least(0, away_seconds=self.away_seconds, join_seconds=self.join_seconds)


SILENT_SECONDS = 3.0
"""Longest time until the learners of a failed relay dial the shards. The syncer counts a learner as
live for as long after its connection breaks, so its clock does not stall."""


@dataclass(frozen=True, slots=True)
class Relays:
    """The relays of a cluster's sites, each in front of equally many learners.

    They fail independently of each other and of the chips. While its relay is away, the learners of
    a site train on and dial the shards, so no step is lost. Their payloads then use the site's link
    once per learner.
    """

    sites: int
    interval_seconds: float  # mean time from a relay's return to its next failure
    away_seconds: float

    def __post_init__(self) -> None:
        at_least(1, relays=self.sites)
        above(0, interval_seconds=self.interval_seconds)
        at_least(0, away_seconds=self.away_seconds)

    @property
    def cycle_seconds(self) -> float:
        """Mean time between two failures of one relay."""
        return self.interval_seconds + self.away_seconds

    @property
    def failures_per_day(self) -> float:
        """Mean number of failures of all relays."""
        return self.sites * 86400 / self.cycle_seconds

    @property
    def silent_share(self) -> float:
        """Largest share of the time in which the shards do not receive from a learner."""
        return min(1.0, SILENT_SECONDS / self.cycle_seconds)

    def link_share(self, learners: int) -> float:
        """Return the bytes over the sites' links as a share of those without relays."""
        away = self.away_seconds / self.cycle_seconds
        return away + (1 - away) * self.sites / learners


@dataclass(frozen=True, slots=True)
class Preemption:
    """Preemption of a share of every learner's slices for a limited time."""

    at_seconds: float
    seconds: float
    share: float

    def __post_init__(self) -> None:
        at_least(0, at_seconds=self.at_seconds)
        above(0, seconds=self.seconds)
        if not 0 < self.share <= 1:
            raise ConfigError(
                f"share={self.share:g} of a preemption is out of range: above 0, at most 1"
            )


@dataclass(frozen=True, slots=True)
class Cluster:
    """One cell of a table: a system on a number of chips. `GoodputOptions` documents the fields.

    Raises:
        ConfigError: A value is out of range; the message has the value, limit and fix.
    """

    system: System
    chips: int
    learners: int = 1
    mtbi_seconds: float = YEAR_SECONDS
    constants: Constants = field(default_factory=Constants)
    # K: while fewer learners step, the syncer's clock is stalled and steps are not useful
    quorum: int = 1
    period: int = 24
    minimum_share: float = 0.0
    # data-parallel: useful time between two checkpoints; 0: one per step, in other chips' memory
    checkpoint_seconds: float = 0.0
    sudden: bool = False
    slowdowns: tuple[float, ...] = ()
    jitter: float = 0.0
    # Steps that a learner can take before a round that it waits for ends: the part of the overlap τ
    # that transfers leave. Learners wait only with a quorum above 1.
    slack_steps: int = 0
    grace: bool = True
    stragglers: Stragglers | None = None
    scavenged: Scavenged | None = None
    preemptions: tuple[Preemption, ...] = ()
    relays: Relays | None = None

    def __post_init__(self) -> None:
        if self.system not in SYSTEMS:
            raise ConfigError(
                f"system={self.system!r} is unknown: choose from {', '.join(SYSTEMS)}"
            )
        at_least(1, chips=self.chips, learners=self.learners, period=self.period)
        chips = self.chips + (self.scavenged.chips if self.scavenged else 0)
        if chips > CHIPS_MAX:
            raise ConfigError(
                f"chips={chips} exceeds {CHIPS_MAX}, the limit for exact accounts: lower "
                "chips" + (" or the scavenged share" if self.scavenged else "")
            )
        above(0, mtbi_seconds=self.mtbi_seconds)
        if self.mtbi_seconds / self.chips < FAILURE_SECONDS_MIN:
            raise ConfigError(
                f"mtbi_seconds={self.mtbi_seconds:g} means {self.mtbi_seconds / self.chips:.1g} s "
                f"between failures of {format_count(self.chips)} chips, less than "
                f"{FAILURE_SECONDS_MIN:g}: raise mtbi or lower chips"
            )
        self._check_learners()
        if self.scavenged is not None and self.system == "barrier":
            raise ConfigError(
                "scavenged chips cannot be combined with system='barrier', which needs all "
                "learners: use elastic or decoupled"
            )
        at_least(0, checkpoint_seconds=self.checkpoint_seconds, jitter=self.jitter)
        at_least(0, slack_steps=self.slack_steps)
        if not 0 <= self.minimum_share <= 1:
            raise ConfigError(f"minimum_share={self.minimum_share:g} is out of range: 0 to 1")

    def _check_learners(self) -> None:
        if self.alone and self.learners != 1:
            raise ConfigError(
                f"learners={self.learners}: {self.system} has one learner; use barrier or decoupled"
            )
        if self.learners > self.slices:
            raise ConfigError(
                f"learners={self.learners} exceeds the {self.slices} slices of "
                f"{format_count(self.chips)} chips: lower learners or slice_chips="
                f"{self.constants.slice_chips}"
            )
        if not 1 <= self.quorum <= self.learners:
            raise ConfigError(
                f"quorum={self.quorum} is out of range: 1 to learners={self.learners}; lower "
                "quorum or raise learners"
            )
        if self.relays is not None and not self.relays.sites <= self.learners:
            raise ConfigError(
                f"relays={self.relays.sites} exceeds learners={self.learners}: a relay without a "
                "learner has no use; lower relays or raise learners"
            )
        if self.slowdowns and len(self.slowdowns) != self.learners:
            raise ConfigError(
                f"slowdowns has {len(self.slowdowns)} values for learners={self.learners}: "
                "give one per learner"
            )
        if any(not slowdown >= 1 for slowdown in self.slowdowns):
            slowest = min(self.slowdowns)
            raise ConfigError(
                f"slowdown={slowest:g} is out of range: it must be at least 1, the relative step "
                "time"
            )

    @property
    def name(self) -> str:
        """The system, with its number of learners if there can be several."""
        return self.system if self.alone else f"{self.system} M={self.learners}"

    @property
    def alone(self) -> bool:
        """Whether the system always has one learner."""
        return self.system in ALONE

    @property
    def slices(self) -> int:
        """Number of slices of all learners together."""
        return max(1, round(self.chips / self.constants.slice_chips))

    def chips_of(self, learner: int) -> int:
        """Return the chips of one learner; they are divided as equally as possible."""
        return self.chips // self.learners + (learner < self.chips % self.learners)

    @property
    def block_stay_seconds(self) -> float:
        """Mean time until a scavenged block leaves: it is preempted, or one of its chips fails."""
        terms = self.scavenged
        assert terms is not None
        failures = terms.chips / terms.blocks / self.mtbi_seconds
        return 1 / (1 / terms.stay_seconds + failures)


def microseconds(seconds: float) -> int:
    return round(seconds * SECOND)


BLOCK_CHIPS = 1024
"""Chips per block: four slices, the smallest useful learner."""

MACHINE_CHIPS = 8
"""Chips of one machine; a preemption takes the whole machine, and its block with it."""

PREEMPTED_A_DAY = (0.05, 0.10, 0.15)
"""Share of the machines that are preempted per day: minimum, middle and maximum."""


def stay_of(block_chips: int, preempted_a_day: float = PREEMPTED_A_DAY[1]) -> float:
    """Return the mean seconds until the first machine of a block is preempted.

    >>> round(stay_of(1024) / 3600, 1)
    1.8
    """
    machines = max(1.0, block_chips / MACHINE_CHIPS)
    return 86400.0 / (machines * -math.log1p(-preempted_a_day))


def blocks_of(
    chips: int,
    share: float,
    block_chips: int = BLOCK_CHIPS,
    stay_seconds: float | None = None,
    away_seconds: float = 0.0,
    join_seconds: float = 1.0,
) -> Scavenged:
    """Return additional chips, as a share of a cluster's, in blocks as equal as possible.

    ``stay_seconds`` defaults to `stay_of`.
    """
    if not (math.isfinite(share) and share > 0):
        raise ConfigError(f"scavenged share={share:g} is out of range: it must be above 0")
    if block_chips < 1:
        raise ConfigError(f"scavenged block_chips={block_chips} is out of range: at least 1")
    if stay_seconds is None:
        stay_seconds = stay_of(block_chips)
    more = max(1, round(share * chips))
    return Scavenged(
        chips=more,
        blocks=max(1, round(more / block_chips)),
        stay_seconds=stay_seconds,
        away_seconds=away_seconds,
        join_seconds=join_seconds,
    )
