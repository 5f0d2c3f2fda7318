"""Prediction for one setting: utilization, traffic, slack, staleness, memory, joining, cost."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.protocol.clock import Grace, MovingAverage, Timing
from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.case import Case
from decoupled_diloco_plan.bandwidth.round_periods import simulate
from decoupled_diloco_plan.bandwidth.steady_state import Rounds
from decoupled_diloco_plan.checks import above, at_least


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a chip per hour and of 10⁹ bytes that leave a place, in any currency.

    `chips` and `tokens_per_step` are those of all learners together, greater than 0.
    """

    chip_hour: float
    gigabyte: float
    chips: float
    tokens_per_step: float

    def __post_init__(self) -> None:
        at_least(0, price_chip_hour=self.chip_hour, price_gb=self.gigabyte)
        above(0, chips=self.chips, tokens_per_step=self.tokens_per_step)

    def per_million_tokens(self, step_seconds: float, step_bytes: float) -> float:
        """Return the cost of a million tokens if a step sends `step_bytes` out of all places."""
        compute = self.chips * self.chip_hour * step_seconds / 3600
        return 1e6 * (compute + self.gigabyte * step_bytes / 1e9) / self.tokens_per_step


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction for a setting on a network."""

    rounds: Rounds  # the steady state
    grace: Grace  # slack and grace window of a round, by the protocol's formula
    up_bytes: float  # bytes that a learner sends per step, mean
    down_bytes: float  # bytes that a learner receives per step, mean
    discarded: float  # share of the trained tokens that overwriting discards
    # steps since a fragment's values left their learners, just before the next apply
    age_steps: float
    memory_bytes: float  # of one shard, at most: process, fragments, payloads in transit
    cores: float  # cores that all shards keep busy
    # time for a new learner to fetch the whole published copy, at the slowest site
    join_seconds: float
    cost: float | None  # per million tokens; None without prices
    error: float  # measured error of the utilization for such learners, 0 to 1
    traffic_error: float  # measured error of the traffic, as a share of it

    @property
    def utilization(self) -> float:
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
        """Steps of the other learners while a new learner fetches the weights."""
        return self.join_seconds / self.rounds.step_seconds


def predict(case: Case, prices: Prices | None = None) -> Prediction:
    """Simulate some periods and derive all other values; without prices, `cost` is None."""
    rounds, o = simulate(case), case.options
    each = case.model.params * rounds.kept / o.period / 8
    period = o.period / max(rounds.kept, 1e-9)
    # A link behind another site carries what leaves either of them.
    behind = {site.name for site in case.network.sites if site.upstream}
    outwards = [t for t in rounds.traffic if t.direction == "up" or t.place in behind]
    sent = sum(t.mean for t in outwards if not t.is_inside)
    return Prediction(
        rounds=rounds,
        grace=_grace(case, rounds),
        up_bytes=each * _up_bits(case),
        down_bytes=each * case.down_bits,
        discarded=min(1.0, rounds.delay_steps / period) if o.alignment == "overwrite" else 0.0,
        age_steps=period + rounds.delay_steps,
        memory_bytes=_memory(case),
        cores=_cores(case, rounds),
        join_seconds=_join_seconds(case, rounds),
        cost=prices.per_million_tokens(rounds.pace_seconds, sent * rounds.pace_seconds)
        if prices
        else None,
        error=measured.UTILIZATION_ERRORS[o.wait],
        traffic_error=measured.TRAFFIC_ERRORS[o.wait],
    )


def _up_bits(case: Case) -> float:
    """Return the bits per element of the uplink format, as a mean over all learners."""
    sites = case.network.sites
    bits = sum(site.learners * case.up_bits_of(number) for number, site in enumerate(sites))
    return bits / case.network.learners


def relay_seconds(case: Case) -> tuple[float, float]:
    """Return what relays add to the time of a round, at the site where it is most.

    Returns:
        Seconds of the transfers between a relay and its learners, up and down, and of the round
        trips to the shards: one for each relay on the way.
    """
    network, most = case.network, (0.0, 0.0)
    nbytes = case.fragment_params * (case.up_bits + case.down_bits) / 8
    for number, site in enumerate(network.sites):
        trips, relay = 0.0, number if site.relay else None
        while relay is not None:
            trips += 2 * max(network.latency(relay, host) for host in case.hosts)
            relay = network.next_relay(relay)
        inside = nbytes * site.learners / (network.relay_rate * case.link_share)
        most = max(most, (inside if site.relay else 0.0, trips), key=sum)
    return most


def _grace(case: Case, rounds: Rounds) -> Grace:
    """Return slack and grace window by Eq. 3, with simulated instead of measured times."""
    timing = Timing(
        quorum=MovingAverage(rounds.quorum_seconds),
        merge=MovingAverage(rounds.merge_seconds),
        broadcast=MovingAverage(rounds.broadcast_seconds),
    )
    o = case.options
    return timing.window(o.overlap, o.grace_margin, rounds.step_seconds)


def _memory(case: Case) -> float:
    """Return the memory of the shard with the most fragments, bytes."""
    o, fragment = case.options, case.fragment_params
    payloads = case.network.senders * o.open_rounds_max * fragment * case.up_bits / 8
    largest = -(-o.fragments // o.shards)
    each = measured.SYNCER_BYTES + case.model.extra.shard_bytes
    return measured.SHARD_BYTES + each * fragment * largest + payloads


def _cores(case: Case, rounds: Rounds) -> float:
    """Return the cores that folding and merging keep busy, over all shards."""
    numel = case.model.params * rounds.kept / case.options.period
    return measured.core_seconds(case.network.senders, numel) / rounds.step_seconds


def _join_seconds(case: Case, rounds: Rounds) -> float:
    """Return the time to fetch a whole copy with the bandwidth that the rounds leave free.

    A joining learner gets at least a fair share of each link.
    """
    network, hosts, free = case.network, case.hosts, {}
    for t in rounds.traffic:
        place = network.names().index(t.place)
        users = network.sites[place].learners if place < len(network.sites) else network.learners
        free[place, t.direction == "up"] = max(t.capacity - t.mean, t.capacity / (users + 1))
    whole, slowest = (measured.COPY_BYTES + case.model.extra.copy_bytes) * case.model.params, 0.0
    for site, there in enumerate(network.sites):
        away = [host for host in hosts if host != site]
        # A relay fetches the whole copy before it serves it.
        inside = whole / free[network.inside(site), False] if there.relay else 0.0
        if not away:
            slowest = max(slowest, inside)
            continue
        ways = {link for host in away for link in network.route(host, site) if not link[1]}
        own = min(there.link.down * case.link_share, *(free[link] for link in ways))
        far = max(away.count(host) / free[host, True] for host in set(away)) / len(hosts)
        # Joining takes six one-way latencies.
        latency = 6 * max(network.latency(site, host) for host in away)
        seconds = whole * max(len(away) / len(hosts) / own, far) + latency
        slowest = max(slowest, seconds + inside)
    return slowest
