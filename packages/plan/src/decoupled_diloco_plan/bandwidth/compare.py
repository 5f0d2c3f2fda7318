"""The same model on the same links with other methods, and the bandwidth that each method needs.

The other methods reduce in rings over the sites. Each of n sites sends and receives 2 (1 - 1/n)
times the reduced bytes at the rate of the slowest link. `published.utilization` models how much of
a reduction is hidden by compute. Learners that share a site's link reduce locally first, at no
cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.case import Case, demand
from decoupled_diloco_plan.bandwidth.network import slowest
from decoupled_diloco_plan.bandwidth.published_tables import (
    SYSTEMS,
    Schedule,
    schedule_of,
    utilization,
)
from decoupled_diloco_plan.bandwidth.round_periods import simulate

GRADIENT_BITS = 16
"""Bits per element of the other methods' reductions: bf16, as in the published tables."""

DECOUPLED, WITHOUT_RELAYS = "decoupled", "decoupled, no relays"
OTHERS = {
    "data-parallel": SYSTEMS["data-parallel"],
    "diloco": SYSTEMS["diloco"],
    "streaming": SYSTEMS["streaming-overlap"],
}
"""Other methods, by name, as systems of the published tables."""

TARGETS = (0.5, 0.75, 0.9, 0.95, 0.99)

PER_DECADE = 8
DECADES = 3
"""Decades of bandwidth on each side of the given one, and points per decade, in curves."""

FIRST_DECADES = 6
STEPS_PER_DECADE = 240
"""Search range of a target's bandwidth in decades, and its resolution: a step is 1 %."""

Share = Callable[[float], float]
"""Utilization as a function of a factor on the rate of all sites' links."""


@dataclass(frozen=True, slots=True)
class SystemResult:
    """Result of one system on the given links."""

    system: str  # `DECOUPLED`, `WITHOUT_RELAYS`, or one of `OTHERS`
    # share of the time in which compute runs; for a decoupled run, times the share of its completed
    # rounds
    utilization: float
    step_seconds: float  # mean wall-clock time per step over all learners
    gbit_per_second: float  # mean rate out of the busiest place
    period: int
    overlap: int


@dataclass(frozen=True, slots=True)
class Need:
    """The bandwidth at which a system reaches a utilization; None if no bandwidth is enough."""

    system: str
    utilization: float
    gbit_per_second: float | None


def compare_systems(case: Case) -> list[SystemResult]:
    """Return the results of all systems with the setting's H."""
    found = []
    for system in OTHERS:
        schedule, share = _schedule(system, case), ring_utilization(system, case)
        step = _mean_pace(case) / share
        rate = gbit(_ring_bytes(case) / schedule.period / step)
        found.append(SystemResult(system, share, step, rate, schedule.period, schedule.overlap))
    o = case.options
    for system, ours in _decoupled(case).items():
        rounds = simulate(ours)
        busiest = max(t.mean for t in rounds.traffic if t.direction == "up" and not t.is_inside)
        numbers = (rounds.utilization, rounds.pace_seconds, gbit(busiest), o.period, o.overlap)
        found.append(SystemResult(system, *numbers))
    return found


def _decoupled(case: Case) -> dict[str, Case]:
    """Return the case and, if it has relays, the same case without them."""
    if not case.network.has_relays:
        return {DECOUPLED: case}
    return {DECOUPLED: case, WITHOUT_RELAYS: case.without_relays()}


def curves(case: Case) -> dict[str, list[tuple[float, float]]]:
    """Return utilization over bandwidth per system, as points (bytes per second, share).

    The bandwidth is that of the slowest site's slower direction; all sites' links scale with it.
    """
    base, ends = slowest(case.network.sites).least, DECADES * PER_DECADE
    factors = [10 ** (i / PER_DECADE) for i in range(-ends, ends + 1)]
    return {
        system: [(base * factor, share(factor)) for factor in factors]
        for system, share in _shares(case).items()
    }


def needs(case: Case) -> list[Need]:
    """Return the bandwidth of the slowest link per system and target, to 1 %."""
    base = slowest(case.network.sites).least
    return [
        Need(system, target, None if factor is None else gbit(base * factor))
        for system, share in _shares(case).items()
        for target in TARGETS
        for factor in (_first(share, target),)
    ]


def gbit(bytes_per_second: float) -> float:
    """Convert bytes per second to Gbit/s."""
    return 8 * bytes_per_second / 1e9


def _schedule(system: str, case: Case) -> Schedule:
    """Return the reductions of a system of `OTHERS` in each phase of the period."""
    return schedule_of(OTHERS[system], case.model.layers, case.options.period)


def ring_utilization(system: str, case: Case) -> float:
    """Return the compute utilization of one of `OTHERS`; all wait for the slowest learner."""
    network, n = case.network, _ring_size(case)
    longest = max(network.paces(case.model.step_seconds))
    busy = _mean_pace(case) / longest
    if n == 1:
        return busy
    rate = slowest(network.sites).least * case.link_share
    far = max(site.link.latency_seconds for site in network.sites)
    return busy * utilization(
        _schedule(system, case),
        longest,
        _ring_bytes(case) / case.model.layers / rate,
        latency_seconds=2 * (n - 1) * 2 * far,
    )


def _mean_pace(case: Case) -> float:
    """Return the mean step time over all learners."""
    network = case.network
    paces = zip(network.paces(case.model.step_seconds), network.sites, strict=True)
    return sum(pace * site.learners for pace, site in paces) / network.learners


def _ring_size(case: Case) -> int:
    """Return the number of ring members: sites, or learners that have separate links."""
    sites = case.network.sites
    if len(sites) == 1 and sites[0].link.shared:
        return 1
    return sum(1 if site.link.shared else site.learners for site in sites)


def _ring_bytes(case: Case) -> float:
    """Return the bytes that a reduction of the whole model moves per link and direction."""
    return 2 * (1 - 1 / _ring_size(case)) * case.model.params * GRADIENT_BITS / 8


def _shares(case: Case) -> dict[str, Share]:
    """Return each system's utilization as a function of the factor on the link rates.

    All learners have the most exact format: the bandwidth is what it needs.
    """

    def ring(system: str) -> Share:
        return lambda factor: ring_utilization(system, case.scaled(factor))

    def decoupled(ours: Case) -> Share:
        exact = replace(ours, coarser=())
        return lambda factor: _utilization(exact.scaled(factor))

    shares = {system: ring(system) for system in OTHERS}
    shares |= {system: decoupled(ours) for system, ours in _decoupled(case).items()}
    return {name: cache(share) for name, share in shares.items()}


def _utilization(case: Case) -> float:
    full = demand(case)
    if full > 1:  # The links are the limit. Simulating the growing queues would only take time.
        return 1 / full / (1 + measured.STEP_OVERHEAD)
    return simulate(case).utilization


def _first(share: Share, target: float) -> float | None:
    """Return the smallest factor that reaches the target, to 1 %; None if none does."""
    steps = FIRST_DECADES * STEPS_PER_DECADE
    low, high = -steps, steps
    if share(_factor(high)) < target:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if share(_factor(middle)) >= target:
            high = middle
        else:
            low = middle
    return _factor(high)


def _factor(steps: int) -> float:
    return float(10 ** (steps / STEPS_PER_DECADE))
