"""The same model on the same links by other methods, and the bandwidth that each of them needs.

The others reduce in rings over the sites, as is usual: 2 (1 - 1/n) of what is reduced goes out of
each of n sites and comes in, as fast as the slowest link; `timeline` says how much of it compute
hides. Learners of a site that share its link have reduced among themselves before, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.case import Case, demand
from decoupled_diloco_plan.bandwidth.network import slowest
from decoupled_diloco_plan.bandwidth.published import SYSTEMS, Schedule, schedule_of, utilization
from decoupled_diloco_plan.bandwidth.rounds import simulate

GRADIENT_BITS = 16
"""The others reduce bf16, as the published tables do."""

DECOUPLED = "decoupled"
OTHERS = {
    "data-parallel": SYSTEMS["data-parallel"],
    "diloco": SYSTEMS["diloco"],
    "streaming": SYSTEMS["streaming-overlap"],
}
"""What of the published systems they are."""

TARGETS = (0.5, 0.75, 0.9, 0.95, 0.99)

PER_DECADE = 8
DECADES = 3
"""Bandwidths that are tried are so many decades away from the given one, in both directions."""

FIRST_DECADES = 6
STEPS_PER_DECADE = 240
"""Where the bandwidth of a target is looked for, and how finely: a step is 1 %."""

Share = Callable[[float], float]
"""Utilisation when all sites' links are so many times as fast."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A system on the given links."""

    system: str  # `DECOUPLED`, or one of `OTHERS`
    # share of the time in which compute goes on; of a decoupled run, times the share of its rounds
    # that take place
    utilization: float
    step_seconds: float  # wall-clock in which all learners together do as many steps as they are
    gbit_per_second: float  # mean, out of the busiest place
    period: int
    overlap: int


@dataclass(frozen=True, slots=True)
class Need:
    """The bandwidth at which a system reaches a utilisation; None if no bandwidth does."""

    system: str
    utilization: float
    gbit_per_second: float | None


def standings(case: Case) -> list[Standing]:
    """All systems side by side, with the setting's H."""
    found = []
    for system in OTHERS:
        schedule, share = _schedule(system, case), ring_utilization(system, case)
        step = _mean_pace(case) / share
        rate = gbit(_ring_bytes(case) / schedule.period / step)
        found.append(Standing(system, share, step, rate, schedule.period, schedule.overlap))
    rounds, o = simulate(case), case.options
    busiest = gbit(max(t.mean for t in rounds.traffic if t.direction == "up"))
    ours = (rounds.utilization, rounds.pace_seconds, busiest, o.period, o.overlap)
    return [*found, Standing(DECOUPLED, *ours)]


def curves(case: Case) -> dict[str, list[tuple[float, float]]]:
    """Utilisation over bandwidth for each system: points of bytes a second and share.

    The bandwidth is that of the slowest site's slower direction; all sites' links go with it.
    """
    base, ends = slowest(case.network.sites).least, DECADES * PER_DECADE
    factors = [10 ** (i / PER_DECADE) for i in range(-ends, ends + 1)]
    return {
        system: [(base * factor, share(factor)) for factor in factors]
        for system, share in _shares(case).items()
    }


def needs(case: Case) -> list[Need]:
    """The bandwidth of the slowest link for each system and target, to a hundredth."""
    base = slowest(case.network.sites).least
    return [
        Need(system, target, None if factor is None else gbit(base * factor))
        for system, share in _shares(case).items()
        for target in TARGETS
        for factor in (_first(share, target),)
    ]


def gbit(bytes_per_second: float) -> float:
    """Bytes a second as Gbit/s."""
    return 8 * bytes_per_second / 1e9


def _schedule(system: str, case: Case) -> Schedule:
    """What a system of `OTHERS` reduces when."""
    return schedule_of(OTHERS[system], case.model.layers, case.options.period)


def ring_utilization(system: str, case: Case) -> float:
    """Compute utilisation of one of `OTHERS`, where all wait for the slowest learner."""
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
    """A step of the average learner."""
    network = case.network
    paces = zip(network.paces(case.model.step_seconds), network.sites, strict=True)
    return sum(pace * site.learners for pace, site in paces) / network.learners


def _ring_size(case: Case) -> int:
    """Members of the ring: sites, or learners that have links of their own."""
    sites = case.network.sites
    if len(sites) == 1 and sites[0].link.shared:
        return 1
    return sum(1 if site.link.shared else site.learners for site in sites)


def _ring_bytes(case: Case) -> float:
    """What a ring moves over each link and direction for one reduction of the whole model."""
    return 2 * (1 - 1 / _ring_size(case)) * case.model.params * GRADIENT_BITS / 8


def _shares(case: Case) -> dict[str, Share]:
    """Each system's utilisation as a function of how many times faster the links are."""

    def ring(system: str) -> Share:
        return lambda factor: ring_utilization(system, case.scaled(factor))

    def decoupled(factor: float) -> float:
        scaled = case.scaled(factor)
        full = demand(scaled)
        if full > 1:  # Nothing carries more than it can; queues would only take time to simulate.
            return 1 / full / (1 + measured.STEP_OVERHEAD)
        return simulate(scaled).utilization

    shares: dict[str, Share] = {system: ring(system) for system in OTHERS}
    return {name: cache(share) for name, share in {**shares, DECOUPLED: decoupled}.items()}


def _first(share: Share, target: float) -> float | None:
    """The smallest factor that reaches the target, to a hundredth; None if none does."""
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
