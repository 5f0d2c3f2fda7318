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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.options import Options
from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.case import Case, Format, Model, demands, wire_format
from decoupled_diloco_plan.bandwidth.network import HUB, SPREAD, Network
from decoupled_diloco_plan.bandwidth.options import PlanOptions
from decoupled_diloco_plan.bandwidth.predict import Prediction, Prices, predict
from decoupled_diloco_plan.bandwidth.steady import Rounds

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

TRIED = ("bf16", "int4")
"""Wire formats that cost next to no loss (arXiv 2604.21428: text 55.4 and 55.3)."""

LINK_FULL = 0.97
"""A link that is used to so much of what bodies may fill is what binds."""

Formats = list[tuple[Format, Format]]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What was found."""

    case: Case  # the first that reaches the aim, or the best of those that were tried
    prediction: Prediction  # what it comes to
    binds: str  # what keeps it from more, in words; empty if the first that was tried is enough
    reached: bool  # whether it reaches the aim


def look(case: Case, prices: Prices | None = None, aim: float = 0.0) -> Proposal:
    """What this case comes to, and what is in the way of the aim."""
    prediction = predict(case, prices)
    why = limits(case, prediction, aim)
    return Proposal(case, prediction, why, not why)


def propose(
    model: Model,
    network: Network,
    given: PlanOptions,
    *,
    prices: Prices | None = None,
) -> Proposal:
    """The first setting that reaches the aim.

    Args:
        given: the aim, and what is fixed; what is None is open.

    Raises:
        ConfigError: the aim is no share, or what is fixed could be no run's.
    """
    aim, formats = given.utilization or 0.0, formats_of(given)
    _check(given, aim)
    best: Proposal | None = None
    turned_down: dict[tuple[int, Format, Format], str] = {}  # the first place of each
    for case in _candidates(model, network, given, formats):
        period, tried = case.options.period, (case.options.period, case.up, case.down)
        overfull = _overfull(case, aim)
        if overfull:
            turned_down.setdefault(tried, f"{overfull} at H={period}")
            if not _is_last(given, formats, case):
                continue
            case = _least(given, case)
        found = look(case, prices, aim)
        if found.reached:
            shorter = [why for (other, *_), why in turned_down.items() if other < period]
            found = _shortest(given, found, lambda other: look(other, prices, aim))
            return replace(found, binds=shorter[-1] if shorter else "")
        if overfull:
            found = replace(found, binds=overfull)
        turned_down.setdefault(tried, f"{found.binds} at H={period}")
        if best is None or _rank(found) > _rank(best):
            best = found
    assert best is not None, "the last candidate is looked at in any case"
    return best


def formats_of(given: PlanOptions) -> Formats:
    """What is given stays; else what costs next to no loss, the most exact first."""
    tried = [wire_format(name) for name in TRIED]
    up, down = (
        [wire_format(name)] * len(tried) if name else tried for name in (given.up, given.down)
    )
    return list(dict.fromkeys(zip(up, down, strict=True)))


def _check(given: PlanOptions, aim: float) -> None:
    if not 0 < aim <= 1:
        raise ConfigError(
            f"utilization={aim:g} is no share: it must be above 0, at most 1, such as 0.95"
        )
    if given.wait == "at_overlap":
        raise ConfigError(
            "a setting is proposed for learners that never wait, and this run's do "
            '(wait="at_overlap"): leave --utilization out'
        )


def limits(case: Case, prediction: Prediction, aim: float = 0.0) -> str:
    """What keeps a setting from the aim, or merges from being back in time; empty if nothing."""
    rounds, overlap = prediction.rounds, case.options.overlap
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
        return f"the time of a round, {_longest_part(case, rounds)} ({back})"
    if not low:
        return ""
    if rounds.kept == 1.0:
        return f"what Learner.step costs ({100 * measured.STEP_OVERHEAD:.2f} % of a step)"
    return f"the rounds that a shard has open at once ({case.options.open_rounds_max})"


def _overfull(case: Case, aim: float) -> str:
    """The link that cannot carry it, in words; empty if all can."""
    used = demands(case)
    (place, direction), most = max(used.items(), key=lambda item: item[1], default=(("", ""), 0.0))
    if most <= 1 / aim:
        return ""
    return f"the {direction}link of {place}, which would have to carry {most:.3g} times what it can"


def _longest_part(case: Case, rounds: Rounds) -> str:
    """What most of a round's time goes into."""
    network = case.network
    core = measured.core_seconds(network.learners, case.fragment_params)
    sites = range(len(network.sites))
    latency = ONE_WAYS * max(network.latency(site, host) for site in sites for host in case.hosts)
    whole = rounds.quorum_seconds + rounds.merge_seconds + rounds.broadcast_seconds
    handling = 2 * measured.HANDLING_SECONDS
    parts = {
        "mostly latency": latency,
        "mostly merging on one core": core,
        "mostly what processes take for bodies": handling,
        "mostly moving bodies": whole - latency - core - handling,
    }
    return max(parts, key=lambda part: parts[part])


def _shortest(given: PlanOptions, longest: Proposal, look: Callable[[Case], Proposal]) -> Proposal:
    """The same with the shortest overlap that reaches the aim."""
    overlaps = _overlaps(given, longest.case.options.period)
    found, low, high = longest, 0, len(overlaps) - 1
    while low < high:
        middle = (low + high) // 2
        tried = look(longest.case.with_options(overlap=overlaps[middle]))
        if tried.reached:
            found, high = tried, middle
        else:
            low = middle + 1
    return found


def _least(given: PlanOptions, case: Case) -> Case:
    """The paper's fragments and the shortest overlap, where more would not be enough either."""
    o = case.options
    fragments = given.fragments or max(o.shards, min(o.fragments, PERIODS[0]))
    return case.with_options(fragments=fragments, overlap=_overlaps(given, o.period)[0])


def _is_last(given: PlanOptions, formats: Formats, case: Case) -> bool:
    """Whether no settings with less traffic are to come: then it is looked at in any case."""
    longest = case.options.period == (given.period or PERIODS[-1])
    return longest and (case.up, case.down) == formats[-1]


def _rank(found: Proposal) -> tuple[float, float]:
    """Better is larger: utilisation in hundredths, then how few steps a merge comes late."""
    late = found.prediction.rounds.delay_steps - found.case.options.overlap
    return (round(found.prediction.utilization, 2), -max(0.0, late))


def _candidates(
    model: Model, network: Network, given: PlanOptions, formats: Formats
) -> Iterator[Case]:
    for period in (given.period,) if given.period else PERIODS:
        fragments = given.fragments or _fragments(model, given, formats, period)
        for up, down in formats:
            for placed in _places(network, given):
                options = Options(
                    fragments=fragments,
                    period=period,
                    overlap=_overlaps(given, period)[-1],
                    quorum=given.quorum,
                    shards=given.shards or _shards(model, placed, period, fragments),
                    grace_margin=given.grace_margin,
                )
                yield Case(model, options, placed, up, down, given.link_share)


def _fragments(model: Model, given: PlanOptions, formats: Formats, period: int) -> int:
    """One for each step of the period, if neither the partition nor their size is against it."""
    most = max(1, int(model.params * formats[0][0].bits / 8 / FRAGMENT_BYTES_MIN))
    return min(period, most, model.layers + 2 if given.whole_layers else period)


def _overlaps(given: PlanOptions, period: int) -> list[int]:
    if given.overlap is not None:
        return [given.overlap]
    fitting = [o for o in OVERLAPS if o <= period * OVERLAP_SHARE_MAX]
    return fitting or [min(1, period - 1)]


def _places(network: Network, given: PlanOptions) -> list[Network]:
    """Where the shards may be: as told; else divided among the sites, or at the widest one."""
    if given.syncer is not None or network.syncer == HUB:
        return [network]
    widest = max(network.sites, key=lambda site: site.link.least)
    names = [SPREAD, widest.name] if len(network.sites) > 1 else [widest.name]
    return [replace(network, syncer=name) for name in names]


def _shards(model: Model, network: Network, period: int, fragments: int) -> int:
    """As many as keep each core less than half busy; the same number at each site."""
    numel = model.params / period
    work = measured.core_seconds(network.learners, numel)
    shards = max(1, ceil(1.1 * work / model.step_seconds / CORE_BUSY_MAX))
    if network.syncer == SPREAD:
        sites = len(network.sites)
        shards = sites * ceil(shards / sites)
    return min(shards, fragments)
