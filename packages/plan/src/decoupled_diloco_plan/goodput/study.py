"""Rows of a table: clusters, each simulated with several seeds until the result is precise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from decoupled_diloco.errors import ConfigError
from decoupled_diloco_plan.checks import at_least
from decoupled_diloco_plan.goodput.calibrate import published
from decoupled_diloco_plan.goodput.chip_time import CAUSES, Account
from decoupled_diloco_plan.goodput.cluster_settings import (
    ALONE,
    SECOND,
    Cluster,
    Relays,
    Scavenged,
    System,
)
from decoupled_diloco_plan.goodput.pace import Pace, pace_of
from decoupled_diloco_plan.goodput.systems import simulate

DAY_SECONDS = 86400.0
INTERVAL_POINTS = 0.3
"""Target half-width of the interval over seeds; the horizon is extended until it is reached."""

FAILURES_FIRST = 15_000
"""Failures in the first horizon of a seed. It is large enough that the horizon seldom has to be
extended, because stopping at a narrow interval makes the interval too narrow."""

FAILURES_FIRST_BARRIER = 5_000
"""The same for a barrier, whose rounds are slow to simulate and average out more."""

DOUBLINGS_MAX = 8
DAYS_MIN, DAYS_MAX = 1.0, 3650.0
DAYS_GIVEN_MAX = 36525.0
SEEDS_MAX = 1000

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for 95 %, at 1 to 9 degrees of freedom; 2 is used beyond."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Number and length of the simulations.

    ``days`` is the length per seed; ``None`` simulates until the interval is narrow.
    """

    seeds: int = 6
    first_seed: int = 0
    days: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= SEEDS_MAX:
            raise ConfigError(f"seeds={self.seeds} is out of range: 1 to {SEEDS_MAX}")
        at_least(0, seed=self.first_seed)
        if self.days is not None and not 0 < self.days <= DAYS_GIVEN_MAX:
            raise ConfigError(
                f"days={self.days:g} is out of range: greater than 0, at most {DAYS_GIVEN_MAX:g}"
            )


@dataclass(frozen=True, slots=True)
class Row:
    """One cluster and its simulated accounts."""

    cluster: Cluster
    accounts: tuple[Account, ...]
    days: float
    pace: Pace | None = None

    @property
    def goodput(self) -> float:
        """Mean over seeds, percent."""
        return statistics.fmean(account.goodput for account in self.accounts)

    @property
    def interval(self) -> float | None:
        """Half the width of the mean's 95 % interval (Student's t); ``None`` for one seed."""
        return half_width([account.goodput for account in self.accounts])

    @property
    def uptime(self) -> float:
        """Mean over seeds, percent."""
        return statistics.fmean(account.uptime for account in self.accounts)

    @property
    def badput(self) -> dict[str, float]:
        """Percent of the allocated chip-time for each cause."""
        return {
            cause: statistics.fmean(100 * a.badput[cause] / a.allocated for a in self.accounts)
            for cause in CAUSES
        }

    def tokens_per_hour(self, tokens_per_chip_second: float) -> float:
        """Return useful tokens per hour, for full-speed chips with this rate."""
        return 3600 * tokens_per_chip_second * self.chips_useful

    @property
    def chips_useful(self) -> float:
        """Number of full-speed chips that would train as much."""
        return statistics.fmean(account.tokens / account.wall for account in self.accounts)

    @property
    def relays(self) -> dict[str, float] | None:
        """Failures of the relays and their effects, or ``None`` without relays."""
        relays = self.cluster.relays
        if relays is None:
            return None
        return {
            "sites": relays.sites,
            "failures_per_day": relays.failures_per_day,
            "silent_percent": 100 * relays.silent_share,
            "link_bytes_percent": 100 * relays.link_share(self.cluster.learners),
        }

    @property
    def published(self) -> float | None:
        """The published goodput of exactly this cluster, percent, or ``None``."""
        cluster = self.cluster
        plain = Cluster(
            cluster.system, cluster.chips, cluster.learners, constants=cluster.constants
        )
        return published(cluster) if plain == cluster else None

    def as_json(self, tokens_per_chip_second: float) -> dict[str, Any]:
        cluster, interval = self.cluster, self.interval
        return {
            "system": cluster.system,
            "chips": cluster.chips,
            "learners": cluster.learners,
            "quorum": cluster.quorum,
            "goodput": round(self.goodput, 3),
            "goodput_interval": None if interval is None else round(interval, 3),
            "uptime": round(self.uptime, 3),
            "tokens_per_hour": self.tokens_per_hour(tokens_per_chip_second),
            "badput": {cause: round(share, 3) for cause, share in self.badput.items()},
            "pace": None if self.pace is None else round(100 * self.pace.against_fastest, 2),
            "rounds": None
            if self.pace is None
            else [round(100 * share, 2) for share in self.pace.took_part],
            "relays": self.relays,
            "published": self.published,
            "days": round(self.days, 3),
            "seeds": len(self.accounts),
        }


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of a mean's 95 % interval; ``None`` for a single value.

    >>> round(half_width([1.0, 2.0, 3.0]), 2)
    2.48
    """
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    student = STUDENT[degrees - 1] if degrees <= len(STUDENT) else 2.0
    return student * statistics.stdev(values) / math.sqrt(len(values))


def study(cluster: Cluster, effort: Effort) -> Row:
    """Simulate one cluster for the given days, or until the interval is narrow."""
    _check_schedule(cluster, effort)
    days = effort.days or _first_days(cluster)
    for _ in range(DOUBLINGS_MAX):
        seeds = range(effort.first_seed, effort.first_seed + effort.seeds)
        accounts = tuple(simulate(cluster, days * DAY_SECONDS, seed) for seed in seeds)
        width = half_width([account.goodput for account in accounts])
        if width is None or width <= INTERVAL_POINTS:
            break
        if effort.days is not None or 2 * days > DAYS_MAX:
            break
        # The interval narrows with the square root of the simulated time.
        days *= min(4.0, max(1.5, (width / INTERVAL_POINTS) ** 2))
    unequal = cluster.system == "decoupled" and (cluster.slowdowns or cluster.jitter)
    pace = pace_of(cluster, effort.first_seed) if unequal else None
    return Row(cluster, accounts, accounts[0].wall / SECOND / DAY_SECONDS, pace)


def _check_schedule(cluster: Cluster, effort: Effort) -> None:
    """Check that preemptions are within a run of known length."""
    for each in cluster.preemptions:
        if effort.days is None:
            raise ConfigError(
                "preemptions have fixed instants, so the run needs a length: give days (--days)"
            )
        if each.at_seconds >= effort.days * DAY_SECONDS:
            raise ConfigError(
                f"preemption at {each.at_seconds / 3600:g} h is after the end, "
                f"days={effort.days:g}: raise days or choose an earlier instant"
            )


def _first_days(cluster: Cluster) -> float:
    """Return the first horizon: long enough for some thousand failures and for rare repairs."""
    failures = FAILURES_FIRST_BARRIER if cluster.system == "barrier" else FAILURES_FIRST
    seconds = failures * cluster.mtbi_seconds / cluster.chips
    return min(DAYS_MAX / 4, max(DAYS_MIN, seconds / DAY_SECONDS))


def cells(
    systems: Iterable[System],
    chips: Iterable[int],
    learners: Iterable[int],
    *,
    quorum: int = 1,
    slowdowns: tuple[float, ...] = (),
    scavenged: Callable[[int], Scavenged] | None = None,
    relays: Relays | None = None,
    **common: Any,
) -> Iterator[Cluster]:
    """Yield the cells of a table; a system with one learner has one cell per number of chips.

    Learners, slowdowns, quorum and relays are set only for systems that use them; `common` is set
    for all.
    """
    chips, learners = tuple(chips), tuple(learners)
    for system in systems:
        alone = system in ALONE
        for total in chips:
            for count in (1,) if alone else learners:
                yield Cluster(
                    system,
                    total,
                    count,
                    quorum=quorum if system == "decoupled" else 1,
                    relays=relays if system == "decoupled" else None,
                    slowdowns=() if alone else slowdowns,
                    scavenged=scavenged(total) if scavenged and total > 0 else None,
                    **common,
                )
