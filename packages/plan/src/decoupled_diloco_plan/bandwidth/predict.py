"""One plan in numbers: utilisation, traffic, slack, staleness, memory, joining, cost."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.errors import ConfigError
from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.network import Network
from decoupled_diloco_plan.bandwidth.rounds import Rounds, simulate
from decoupled_diloco_plan.bandwidth.setting import Model, Setting
from decoupled_diloco.protocol.grace import Grace, MovingAverage, Timing


@dataclass(frozen=True, slots=True)
class Prices:
    """What the chips and the links cost.

    Attributes:
        chip_hour: of one chip for an hour, in any currency.
        gigabyte: of 10⁹ bytes that leave a place.
        chips: of all learners together, greater than 0.
        tokens_per_step: of all learners together, greater than 0.
    """

    chip_hour: float
    gigabyte: float
    chips: float
    tokens_per_step: float

    def __post_init__(self) -> None:
        for name, value in (
            ("price-chip-hour", self.chip_hour),
            ("price-gb", self.gigabyte),
        ):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name}={value:g} is out of range: it must be 0 or more")
        for name, value in (("chips", self.chips), ("tokens-per-step", self.tokens_per_step)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value:g} is out of range: it must be greater than 0")

    def per_million_tokens(self, step_seconds: float, step_bytes: float) -> float:
        """Cost of a million tokens.

        Args:
            step_seconds: wall-clock of a step.
            step_bytes: what leaves all places in it.
        """
        compute = self.chips * self.chip_hour * step_seconds / 3600
        return 1e6 * (compute + self.gigabyte * step_bytes / 1e9) / self.tokens_per_step


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a setting comes to on a network.

    Attributes:
        rounds: the steady state.
        grace: slack and grace window of a round, by the protocol's own formula.
        up_bytes: what a learner sends in one step, mean.
        down_bytes: what it receives.
        discarded: share of the trained tokens that overwriting throws away.
        age_steps: steps since a fragment's values left their learners, just before the next apply.
        memory_bytes: of one shard: its fragments, and bodies on their way.
        cores: that all shards keep busy.
        join_seconds: for a new learner to fetch the whole published copy, where it takes longest.
        cost: of a million tokens; None without prices.
        error: of the utilisation, as it was measured for such learners; 0 to 1.
        traffic_error: of the traffic, as a share of it.
    """

    rounds: Rounds
    grace: Grace
    up_bytes: float
    down_bytes: float
    discarded: float
    age_steps: float
    memory_bytes: float
    cores: float
    join_seconds: float
    cost: float | None
    error: float
    traffic_error: float

    @property
    def utilization(self) -> float:
        """See `Rounds.utilization`."""
        return self.rounds.utilization

    @property
    def utilization_low(self) -> float:
        """The lower end of the measured error bar."""
        return max(0.0, self.utilization - self.error)

    @property
    def utilization_high(self) -> float:
        """The upper end of the measured error bar."""
        return min(1.0, self.utilization + self.error)

    @property
    def join_steps(self) -> float:
        """Steps of the others while a new learner fetches."""
        return self.join_seconds / self.rounds.step_seconds


def predict(
    model: Model,
    setting: Setting,
    network: Network,
    *,
    prices: Prices | None = None,
    link_share: float = measured.LINK_SHARE,
) -> Prediction:
    """Simulates some periods and derives the rest.

    Args:
        model: what is trained.
        setting: how.
        network: where.
        prices: for the cost of tokens; None: it is left out.
        link_share: share of a link's rate that bodies fill.

    Raises:
        ConfigError: the setting could be no run's.
    """
    rounds = simulate(model, setting, network, link_share=link_share)
    o = setting.options
    each = model.params * rounds.kept / o.period / 8
    period = o.period / max(rounds.kept, 1e-9)
    sent = sum(t.mean for t in rounds.traffic if t.direction == "up") * rounds.pace_seconds
    return Prediction(
        rounds=rounds,
        grace=_grace(setting, rounds),
        up_bytes=each * setting.up.bits,
        down_bytes=each * setting.down.bits,
        discarded=min(1.0, rounds.delay_steps / period) if o.alignment == "overwrite" else 0.0,
        age_steps=period + rounds.delay_steps,
        memory_bytes=_memory(model, setting, network),
        cores=_cores(model, setting, network, rounds),
        join_seconds=_join_seconds(model, setting, network, rounds, link_share),
        cost=prices.per_million_tokens(rounds.pace_seconds, sent) if prices else None,
        error=measured.UTILIZATION_ERRORS[o.wait],
        traffic_error=measured.TRAFFIC_ERRORS[o.wait],
    )


def _grace(setting: Setting, rounds: Rounds) -> Grace:
    """Eq. 3, with the simulated times in the place of measured ones."""
    timing = Timing(
        quorum=MovingAverage(rounds.quorum_seconds),
        merge=MovingAverage(rounds.merge_seconds),
        broadcast=MovingAverage(rounds.broadcast_seconds),
    )
    o = setting.options
    return timing.window(o.overlap, o.grace_margin, rounds.step_seconds)


def _memory(model: Model, setting: Setting, network: Network) -> float:
    o = setting.options
    fragment = model.params / o.fragments
    bodies = network.learners * o.open_rounds_max * fragment * setting.up.bits / 8
    largest = -(-o.fragments // o.shards)
    return measured.SYNCER_BYTES * fragment * largest + bodies


def _cores(model: Model, setting: Setting, network: Network, rounds: Rounds) -> float:
    """Folding and merging of all shards, per second of wall-clock."""
    numel = model.params * rounds.kept / setting.options.period
    work = network.learners * measured.fold_seconds(numel) + measured.merge_seconds(numel)
    return work / rounds.step_seconds


def _join_seconds(
    model: Model, setting: Setting, network: Network, rounds: Rounds, link_share: float
) -> float:
    """The whole copy over what the rounds leave free; at least a fair part of the link."""
    free = {}
    for t in rounds.traffic:
        place = network.names().index(t.place)
        users = network.sites[place].learners if place < len(network.sites) else network.learners
        fair = t.capacity / (users + 1)
        free[place, t.direction] = max(t.capacity - t.mean, fair)
    shards = setting.options.shards
    hosts = [network.host(shard, shards) for shard in range(shards)]
    whole = measured.COPY_BYTES * model.params
    slowest = 0.0
    for site, there in enumerate(network.sites):
        away = [host for host in hosts if host != site]
        if not away:
            continue
        own = min(free[site, "down"], there.link.down * link_share)
        far = max(away.count(host) / free[host, "up"] for host in set(away)) / len(hosts)
        latency = 6 * max(network.latency(site, host) for host in away)
        slowest = max(slowest, whole * max(len(away) / len(hosts) / own, far) + latency)
    return slowest
