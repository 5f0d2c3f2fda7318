"""The same model on the same links by other methods, and the bandwidth that each of them needs.

The others reduce in rings over the sites, as is usual: 2 (1 - 1/n) of what is reduced goes out of
each of n sites and comes in, as fast as the slowest link; `timeline` says how much of it compute
hides. Learners of a site that share its link have reduced among themselves before, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.network import Network, slowest
from decoupled_diloco_plan.bandwidth.rounds import demand, simulate
from decoupled_diloco_plan.bandwidth.setting import Model, Setting
from decoupled_diloco_plan.bandwidth.timeline import Schedule, strided, utilization, whole

GRADIENT_BITS = 16
"""The others reduce bf16, as the published tables do."""

STREAMING_LAYERS = 3
STREAMING_OVERLAP = 1

DECOUPLED = "decoupled"
OTHERS = ("data-parallel", "diloco", "streaming")
SYSTEMS = (*OTHERS, DECOUPLED)

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
    """A system on the given links.

    Attributes:
        system: one of `SYSTEMS`.
        utilization: share of the time in which compute goes on; of a decoupled run, times the
            share of its rounds that take place.
        step_seconds: wall-clock in which all learners together do as many steps as they are.
        mean: bytes a second out of the busiest place.
        period: H; 1 for data-parallel.
        overlap: τ.
    """

    system: str
    utilization: float
    step_seconds: float
    mean: float
    period: int
    overlap: int


@dataclass(frozen=True, slots=True)
class Need:
    """The bandwidth at which a system reaches a utilisation; None if no bandwidth does."""

    system: str
    utilization: float
    bytes_per_second: float | None


def schedule_of(system: str, model: Model, setting: Setting) -> Schedule:
    """What a system of `OTHERS` reduces when."""
    period = setting.options.period
    if system == "data-parallel":
        return whole(model.layers, 1)
    if system == "diloco":
        return whole(model.layers, period)
    return strided(model.layers, period, STREAMING_LAYERS, STREAMING_OVERLAP)


def standings(
    model: Model,
    setting: Setting,
    network: Network,
    *,
    link_share: float = measured.LINK_SHARE,
) -> list[Standing]:
    """All systems side by side, with the setting's H."""
    found = []
    for system in OTHERS:
        schedule = schedule_of(system, model, setting)
        share = ring_utilization(system, model, setting, network, link_share)
        step = _mean_pace(model, network) / share
        moved = _ring_bytes(model, network) / schedule.period
        period, overlap = schedule.period, schedule.overlap
        found.append(Standing(system, share, step, moved / step, period, overlap))
    rounds = simulate(model, setting, network, link_share=link_share)
    busiest = max(t.mean for t in rounds.traffic if t.direction == "up")
    o = setting.options
    found.append(
        Standing(DECOUPLED, rounds.utilization, rounds.pace_seconds, busiest, o.period, o.overlap)
    )
    return found


def ring_utilization(
    system: str, model: Model, setting: Setting, network: Network, link_share: float
) -> float:
    """Compute utilisation of one of `OTHERS`, where all wait for the slowest learner."""
    link, n = slowest(network.sites), _ring_size(network)
    longest = max(network.paces(model.step_seconds))
    busy = _mean_pace(model, network) / longest
    if n == 1:
        return busy
    rate = min(link.up, link.down) * link_share
    far = max(site.link.latency_seconds for site in network.sites)
    return busy * utilization(
        schedule_of(system, model, setting),
        longest,
        _ring_bytes(model, network) / model.layers / rate,
        latency_seconds=2 * (n - 1) * 2 * far,
    )


def _mean_pace(model: Model, network: Network) -> float:
    """A step of the average learner."""
    paces = zip(network.paces(model.step_seconds), network.sites, strict=True)
    return sum(pace * site.learners for pace, site in paces) / network.learners


def _ring_size(network: Network) -> int:
    """Members of the ring: sites, or learners that have links of their own."""
    if len(network.sites) == 1 and network.sites[0].link.shared:
        return 1
    return sum(1 if site.link.shared else site.learners for site in network.sites)


def _ring_bytes(model: Model, network: Network) -> float:
    """What a ring moves over each link and direction for one reduction of the whole model."""
    return 2 * (1 - 1 / _ring_size(network)) * model.params * GRADIENT_BITS / 8


def curves(
    model: Model,
    setting: Setting,
    network: Network,
    *,
    link_share: float = measured.LINK_SHARE,
) -> dict[str, list[tuple[float, float]]]:
    """Utilisation over bandwidth for each system: points of bytes a second and share.

    The bandwidth is that of the slowest site's slower direction; all sites' links go with it.
    """
    base = _base(network)
    factors = [
        10 ** (i / PER_DECADE) for i in range(-DECADES * PER_DECADE, DECADES * PER_DECADE + 1)
    ]
    return {
        system: [(base * factor, share(factor)) for factor in factors]
        for system, share in _shares(model, setting, network, link_share).items()
    }


def needs(
    model: Model,
    setting: Setting,
    network: Network,
    *,
    targets: Sequence[float] = TARGETS,
    link_share: float = measured.LINK_SHARE,
) -> list[Need]:
    """The bandwidth of the slowest link for each system and target, to a hundredth."""
    base = _base(network)
    found = []
    for system, share in _shares(model, setting, network, link_share).items():
        for target in targets:
            factor = _first(share, target)
            found.append(Need(system, target, None if factor is None else base * factor))
    return found


def _base(network: Network) -> float:
    link = slowest(network.sites)
    return min(link.up, link.down)


def _shares(
    model: Model, setting: Setting, network: Network, link_share: float
) -> dict[str, Share]:
    """Each system's utilisation as a function of how many times faster the links are."""

    def ring(system: str) -> Share:
        return lambda factor: ring_utilization(
            system, model, setting, network.scaled(factor), link_share
        )

    def decoupled(factor: float) -> float:
        scaled = network.scaled(factor)
        full = demand(model, setting, scaled, link_share=link_share)
        if full > 1:  # Nothing carries more than it can; queues would only take time to simulate.
            return 1 / full / (1 + measured.STEP_OVERHEAD)
        return simulate(model, setting, scaled, link_share=link_share).utilization

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
