"""Find me a setting: the smallest period that the link can bear, and what binds.

What is tried, in this order, until one reaches the aim: H from 24 up, for each the wire formats
from the most exact one down, and places for the shards; P is as large as H, as in the paper, so
that a fragment is due in every step; of the overlaps τ up to H/12 the shortest one that does. A
longer period costs quality, so does a longer overlap (what is trained meanwhile is overwritten),
and fewer bits cost least: that is why they are tried before a longer H. A setting reaches the aim
when its utilisation does, rounds have slack left (Eq. 3), so that there is a grace window and
merges are back within τ, and no shard's core is more than half busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from decoupled_diloco.errors import ConfigError
from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.network import SPREAD, Network
from decoupled_diloco_plan.bandwidth.predict import Prediction, Prices, predict
from decoupled_diloco_plan.bandwidth.rounds import Rounds, demands
from decoupled_diloco_plan.bandwidth.setting import Format, Model, Setting
from decoupled_diloco.protocol.options import Options

PERIODS = (24, 36, 48, 72, 96, 144, 192, 288, 384, 576, 768)
"""H: from the paper's up to where nobody has looked. A shorter one than the paper's costs
traffic, and nothing is known of what it would bring."""

OVERLAPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

OVERLAP_SHARE_MAX = 1 / 12
"""τ at most so much of H, as the paper's own 2 of 24: this share of the tokens is overwritten."""

FRAGMENT_BYTES_MIN = 1 << 20
"""Smaller bodies cost more than 2 % besides (`benchmarks/results/step_overhead`)."""

CORE_BUSY_MAX = 0.5

ONE_WAYS = 6
"""Latencies of one round, one after another."""

LINK_FULL = 0.97
"""A link that is used to so much of what bodies may fill is what binds."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The aim, what the user has fixed, and what is open (None).

    Attributes:
        utilization: the aim, above 0, at most 1.
        formats: wire formats up and down to try, the most exact first.
        syncer_fixed: whether the shards stay where the network says.
        fragments_max: what the partition allows; None: any number.
    """

    utilization: float
    formats: Sequence[tuple[Format, Format]]
    period: int | None = None
    fragments: int | None = None
    overlap: int | None = None
    shards: int | None = None
    syncer_fixed: bool = False
    quorum: int = 1
    grace_margin: float = 0.8
    fragments_max: int | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """What was found.

    Attributes:
        setting: the first that reaches the aim, or the best of those that were tried.
        network: with the place of its shards.
        prediction: what it comes to.
        reached: whether it reaches the aim.
        binds: what keeps it from more, in words; empty if the first that was tried is enough.
    """

    setting: Setting
    network: Network
    prediction: Prediction
    reached: bool
    binds: str


def propose(
    model: Model,
    network: Network,
    wanted: Wanted,
    *,
    prices: Prices | None = None,
    link_share: float = measured.LINK_SHARE,
) -> Proposal:
    """The first setting that reaches the aim.

    Args:
        model: what is trained.
        network: the sites, and the place of the shards if that is fixed.
        wanted: the aim, and what is fixed.
        prices: for the cost of tokens.
        link_share: share of a link's rate that bodies fill.

    Raises:
        ConfigError: the aim is no share, or what is fixed could be no run's.
    """
    if not 0 < wanted.utilization <= 1:
        raise ConfigError(
            f"utilization={wanted.utilization:g} is no share: it must be above 0, at most 1, such "
            "as 0.95"
        )
    best: Proposal | None = None
    turned_down: dict[int, str] = {}

    def look(placed: Network, setting: Setting) -> Proposal:
        prediction = predict(model, setting, placed, prices=prices, link_share=link_share)
        why = limits(model, setting, placed, prediction, aim=wanted.utilization)
        return Proposal(setting, placed, prediction, not why, why)

    for placed, setting in _candidates(model, network, wanted):
        setting.check(network.learners)
        period = setting.options.period
        overfull = _overfull(model, setting, placed, link_share, wanted.utilization)
        if overfull:
            turned_down.setdefault(period, f"{overfull} at H={period}")
            if not _is_last(wanted, setting):
                continue
            setting = _least(wanted, setting)
        found = look(placed, setting)
        if found.reached:
            shorter = [why for tried, why in turned_down.items() if tried < period]
            return replace(_shortest(wanted, found, look), binds=shorter[-1] if shorter else "")
        if overfull:
            found = replace(found, binds=overfull)
        turned_down.setdefault(period, f"{found.binds} at H={period}")
        if best is None or _rank(found) > _rank(best):
            best = found
    assert best is not None, "the last candidate is looked at in any case"
    return best


def _shortest(
    wanted: Wanted, longest: Proposal, look: Callable[[Network, Setting], Proposal]
) -> Proposal:
    """The same with the shortest overlap that reaches the aim."""
    setting = longest.setting
    overlaps = _overlaps(wanted, setting.options.period)
    found, low, high = longest, 0, len(overlaps) - 1
    while low < high:
        middle = (low + high) // 2
        tried = look(longest.network, _with_overlap(setting, overlaps[middle]))
        if tried.reached:
            found, high = tried, middle
        else:
            low = middle + 1
    return found


def _least(wanted: Wanted, setting: Setting) -> Setting:
    """The paper's fragments and the shortest overlap, where more would not be enough either."""
    o = setting.options
    fragments = wanted.fragments or max(o.shards, min(o.fragments, PERIODS[0]))
    overlap = _overlaps(wanted, o.period)[0]
    return replace(setting, options=replace(o, fragments=fragments, overlap=overlap))


def _with_overlap(setting: Setting, overlap: int) -> Setting:
    return replace(setting, options=replace(setting.options, overlap=overlap))


def _overfull(
    model: Model, setting: Setting, network: Network, link_share: float, aim: float
) -> str:
    """The link that cannot carry it, in words; empty if all can."""
    used = demands(model, setting, network, link_share=link_share)
    (place, direction), most = max(used.items(), key=lambda item: item[1], default=(("", ""), 0.0))
    if most <= 1 / aim:
        return ""
    return f"the {direction}link of {place}, which would have to carry {most:.3g} times what it can"


def limits(
    model: Model, setting: Setting, network: Network, prediction: Prediction, *, aim: float = 0.0
) -> str:
    """What keeps a setting from the aim, or merges from being back in time; empty if nothing."""
    rounds, overlap = prediction.rounds, setting.options.overlap
    full = max(rounds.traffic, key=lambda t: t.mean / t.capacity)
    late = rounds.delay_steps > overlap or prediction.grace.slack < 0
    low = prediction.utilization < aim
    if (late or low) and full.mean > LINK_FULL * full.capacity:
        return f"the {full.direction}link of {full.place}, which is full"
    if rounds.shard_busy > CORE_BUSY_MAX:
        busy = f"busy for {100 * rounds.shard_busy:.0f} %"
        return f"the core of a shard ({busy}, half is the limit)"
    if late:
        back = f"back after {rounds.delay_steps:.1f} steps, overlap {overlap}"
        return f"the time of a round, {_longest_part(model, setting, network, rounds)} ({back})"
    if not low:
        return ""
    if rounds.kept == 1.0:
        return f"what Learner.step costs ({100 * measured.STEP_OVERHEAD:.2f} % of a step)"
    return f"the rounds that a shard has open at once ({setting.options.open_rounds_max})"


def _longest_part(model: Model, setting: Setting, network: Network, rounds: Rounds) -> str:
    """What most of a round's time goes into."""
    numel = model.params / setting.options.fragments
    core = network.learners * measured.fold_seconds(numel) + measured.merge_seconds(numel)
    sites, shards = range(len(network.sites)), setting.options.shards
    hosts = {network.host(shard, shards) for shard in range(shards)}
    latency = ONE_WAYS * max(network.latency(site, host) for site in sites for host in hosts)
    whole = rounds.quorum_seconds + rounds.merge_seconds + rounds.broadcast_seconds
    handling = 2 * measured.HANDLING_SECONDS
    parts = {
        "mostly latency": latency,
        "mostly merging on one core": core,
        "mostly what processes take for bodies": handling,
        "mostly moving bodies": whole - latency - core - handling,
    }
    return max(parts, key=lambda part: parts[part])


def _is_last(wanted: Wanted, setting: Setting) -> bool:
    """Whether no settings with less traffic are to come: then it is looked at in any case."""
    longest = setting.options.period == (wanted.period or PERIODS[-1])
    return longest and (setting.up, setting.down) == tuple(wanted.formats[-1])


def _rank(found: Proposal) -> tuple[float, float]:
    """Better is larger: utilisation in hundredths, then how few steps a merge comes late."""
    late = found.prediction.rounds.delay_steps - found.setting.options.overlap
    return (round(found.prediction.utilization, 2), -max(0.0, late))


def _candidates(
    model: Model, network: Network, wanted: Wanted
) -> Iterator[tuple[Network, Setting]]:
    for period in (wanted.period,) if wanted.period else PERIODS:
        fragments = wanted.fragments or _fragments(model, wanted, period)
        for up, down in wanted.formats:
            for placed in _places(network, wanted):
                shards = wanted.shards or _shards(model, placed, period, fragments)
                options = Options(
                    fragments=fragments,
                    period=period,
                    overlap=_overlaps(wanted, period)[-1],
                    quorum=wanted.quorum,
                    shards=shards,
                    grace_margin=wanted.grace_margin,
                )
                yield placed, Setting(options, up, down)


def _fragments(model: Model, wanted: Wanted, period: int) -> int:
    """One for each step of the period, if neither the partition nor their size is against it."""
    most = max(1, int(model.params * wanted.formats[-1][0].bits / 8 / FRAGMENT_BYTES_MIN))
    return min(period, most, wanted.fragments_max or period)


def _overlaps(wanted: Wanted, period: int) -> list[int]:
    if wanted.overlap is not None:
        return [wanted.overlap]
    fitting = [o for o in OVERLAPS if o <= period * OVERLAP_SHARE_MAX]
    return fitting or [min(1, period - 1)]


def _places(network: Network, wanted: Wanted) -> list[Network]:
    """Where the shards may be: as told; else divided among the sites, or at the widest one."""
    if wanted.syncer_fixed:
        return [network]
    widest = max(network.sites, key=lambda site: min(site.link.up, site.link.down))
    names = [SPREAD, widest.name] if len(network.sites) > 1 else [widest.name]
    return [replace(network, syncer=name) for name in names]


def _shards(model: Model, network: Network, period: int, fragments: int) -> int:
    """As many as keep each core less than half busy; the same number at each site."""
    numel = model.params / period
    work = network.learners * measured.fold_seconds(numel) + measured.merge_seconds(numel)
    shards = max(1, ceil(1.1 * work / model.step_seconds / CORE_BUSY_MAX))
    if network.syncer == SPREAD:
        sites = len(network.sites)
        shards = sites * ceil(shards / sites)
    return min(shards, fragments)
