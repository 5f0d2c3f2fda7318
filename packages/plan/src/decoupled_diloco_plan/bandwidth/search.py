"""Search for a setting: the shortest period that the links support, and the limiting resource.

Candidates are tried in this order until one reaches the aim:

1. The period H, from 24 up. P equals H, as in the paper, so that a fragment is due in every step.
2. For each H, the wire formats from the most exact one down, and the locations of the shards.
3. The shortest overlap τ up to H/12 that is enough.

A longer period costs quality. So does a longer overlap, because the steps during it are
overwritten. Fewer bits cost least, so they are tried before a longer H. A setting reaches the aim
under three conditions: its utilization does; its rounds have slack (Eq. 3), so merges finish within
τ; and no shard's core is more than half busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.case import (
    Case,
    Format,
    Model,
    demands,
    wire_format,
    wire_formats,
)
from decoupled_diloco_plan.bandwidth.network import HUB, SPREAD, Network, link_name
from decoupled_diloco_plan.bandwidth.plan_options import PlanOptions
from decoupled_diloco_plan.bandwidth.predict import Prediction, Prices, predict
from decoupled_diloco_plan.bandwidth.steady_state import Rounds

PERIODS = (24, 36, 48, 72, 96, 144, 192, 288, 384, 576, 768)
"""Values of H: from the paper's up to values without published results. A shorter one costs
traffic, and its benefit is unknown."""

OVERLAPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

OVERLAP_SHARE_MAX = 1 / 12
"""Limit on τ/H, as in the paper (2 of 24): this share of the tokens is overwritten."""

FRAGMENT_BYTES_MIN = 1 << 20
"""Smaller payloads have more than 2 % overhead (`benchmarks/results/step_overhead`)."""

CORE_BUSY_MAX = 0.5

ONE_WAYS, ONE_WAYS_OF_RELAY = 6, 2
"""One-way latencies in a round, one after another, and additional ones with a relay."""

TRIED = ("bf16", "int4")
"""Wire formats with almost no loss in quality (arXiv 2604.21428: text 55.4 and 55.3)."""

LINK_FULL = 0.97
"""A link limits the setting if its traffic exceeds this share of its usable rate."""

Formats = list[tuple[Format, Format]]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Result of a search."""

    case: Case  # the first that reaches the aim, or the best of those that were tried
    prediction: Prediction  # for this case
    binds: str  # the limiting resource; empty if the first candidate is enough
    reached: bool  # whether it reaches the aim


def evaluate(case: Case, prices: Prices | None = None, aim: float = 0.0) -> Proposal:
    """Predict one case, and name what keeps it from the aim."""
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
    """Return the first setting that reaches the aim, or otherwise the best one tried.

    Args:
        given: The aim and the fixed options; an option that is None may be chosen.

    Raises:
        ConfigError: The aim is not a share, or the fixed options do not form a valid run.
    """
    aim, formats = given.utilization or 0.0, formats_of(given)
    _check(given, aim)
    best: Proposal | None = None
    rejected: dict[tuple[int, Format, Format], str] = {}  # the first placement of each
    for case in _candidates(model, network, given, formats):
        period, tried = case.options.period, (case.options.period, case.up, case.down)
        overfull = _overfull(case, aim)
        if overfull:
            rejected.setdefault(tried, f"{overfull} at H={period}")
            if not _is_last(given, formats, case):
                continue
            case = _least(given, case)
        found = evaluate(case, prices, aim)
        if found.reached:
            shorter = [why for (other, *_), why in rejected.items() if other < period]
            found = _shortest(given, found, lambda other: evaluate(other, prices, aim))
            return replace(found, binds=shorter[-1] if shorter else "")
        if overfull:
            found = replace(found, binds=overfull)
        rejected.setdefault(tried, f"{found.binds} at H={period}")
        if best is None or _rank(found) > _rank(best):
            best = found
    assert best is not None, "the last candidate is always evaluated"
    return best


def formats_of(given: PlanOptions) -> Formats:
    """Return the given formats, or the formats in `TRIED`, the most exact one first.

    Of a ladder, it is the first format; see `Case.coarser` for the others.
    """
    tried = [wire_format(name) for name in TRIED]
    up = wire_formats(given.up)[:1] * len(tried) if given.up else tried
    down = [wire_format(given.down)] * len(tried) if given.down else tried
    return list(dict.fromkeys(zip(up, down, strict=True)))


def _check(given: PlanOptions, aim: float) -> None:
    if not 0 < aim <= 1:
        raise ConfigError(f"utilization={aim:g} is out of range: above 0, at most 1, such as 0.95")
    if given.wait == "at_overlap":
        raise ConfigError(
            '--utilization needs learners that never wait, and this run has wait="at_overlap": '
            "leave --utilization out"
        )


def limits(case: Case, prediction: Prediction, aim: float = 0.0) -> str:
    """Name what keeps a setting from the aim, or makes its merges late; empty if nothing does."""
    rounds, overlap = prediction.rounds, case.options.overlap
    full = max(rounds.traffic, key=lambda t: t.mean / t.capacity)
    late = rounds.delay_steps > overlap or prediction.grace.slack < 0
    low = prediction.utilization < aim
    if (late or low) and full.mean > LINK_FULL * full.capacity:
        return f"{link_name(full.place, full.direction)}, which is full"
    if rounds.shard_busy > CORE_BUSY_MAX:
        busy = f"busy for {100 * rounds.shard_busy:.0f} %"
        return f"the core of a shard ({busy}, half is the limit)"
    if rounds.relay_busy > CORE_BUSY_MAX:
        busy = f"busy for {100 * rounds.relay_busy:.0f} %"
        return f"the core of a relay ({busy}, half is the limit)"
    if late:
        back = f"complete after {rounds.delay_steps:.1f} steps, overlap {overlap}"
        return f"the time of a round, {_longest_part(case, rounds)} ({back})"
    if not low:
        return ""
    if rounds.kept == 1.0:
        return f"the overhead of Learner.step ({100 * measured.STEP_OVERHEAD:.2f} % of a step)"
    return f"the rounds that a shard can have open at once ({case.options.open_rounds_max})"


def _overfull(case: Case, aim: float) -> str:
    """Name the link that cannot carry all rounds; empty if every link can."""
    used = demands(case)
    (place, direction), most = max(used.items(), key=lambda item: item[1], default=(("", ""), 0.0))
    if most <= 1 / aim:
        return ""
    return f"{link_name(place, direction)}, which needs {most:.3g} times its usable rate"


def _longest_part(case: Case, rounds: Rounds) -> str:
    """Name the largest component of a round's time."""
    network = case.network
    core = measured.core_seconds(network.senders, case.fragment_params)
    sites = range(len(network.sites))
    ways = ONE_WAYS + ONE_WAYS_OF_RELAY * network.has_relays
    latency = ways * max(network.latency(site, host) for site in sites for host in case.hosts)
    whole = rounds.quorum_seconds + rounds.merge_seconds + rounds.broadcast_seconds
    handling = 2 * measured.HANDLING_SECONDS
    parts = {
        "mostly latency": latency,
        "mostly merging on one core": core,
        "mostly processing of payloads": handling,
        "mostly transfer of payloads": whole - latency - core - handling,
    }
    return max(parts, key=lambda part: parts[part])


def _shortest(
    given: PlanOptions, longest: Proposal, try_case: Callable[[Case], Proposal]
) -> Proposal:
    """Return the same setting with the shortest overlap that reaches the aim."""
    overlaps = _overlaps(given, longest.case.options.period)
    found, low, high = longest, 0, len(overlaps) - 1
    while low < high:
        middle = (low + high) // 2
        tried = try_case(longest.case.with_options(overlap=overlaps[middle]))
        if tried.reached:
            found, high = tried, middle
        else:
            low = middle + 1
    return found


def _least(given: PlanOptions, case: Case) -> Case:
    """Return the case with the paper's fragments and the shortest overlap.

    It is used for overfull links, where other values would not be enough either.
    """
    o = case.options
    fragments = given.fragments or max(o.shards, min(o.fragments, PERIODS[0]))
    return case.with_options(fragments=fragments, overlap=_overlaps(given, o.period)[0])


def _is_last(given: PlanOptions, formats: Formats, case: Case) -> bool:
    """Whether no candidate with less traffic follows; if so, this one is always evaluated."""
    longest = case.options.period == (given.period or PERIODS[-1])
    return longest and (case.up, case.down) == formats[-1]


def _rank(found: Proposal) -> tuple[float, float]:
    """Sort key, larger is better: utilization in hundredths, then how few steps a merge is late."""
    late = found.prediction.rounds.delay_steps - found.case.options.overlap
    return (round(found.prediction.utilization, 2), -max(0.0, late))


def _candidates(
    model: Model, network: Network, given: PlanOptions, formats: Formats
) -> Iterator[Case]:
    coarser = tuple(wire_formats(given.up)[1:]) if given.up else ()
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
                yield Case(model, options, placed, up, down, given.link_share, coarser=coarser)


def _fragments(model: Model, given: PlanOptions, formats: Formats, period: int) -> int:
    """Return one fragment per step, or fewer if the partition or the minimum size requires it."""
    most = max(
        1,
        int(model.params * (formats[0][0].bits + model.extra.moment_bits) / 8 / FRAGMENT_BYTES_MIN),
    )
    return min(period, most, model.layers + 2 if given.whole_layers else period)


def _overlaps(given: PlanOptions, period: int) -> list[int]:
    if given.overlap is not None:
        return [given.overlap]
    fitting = [o for o in OVERLAPS if o <= period * OVERLAP_SHARE_MAX]
    return fitting or [min(1, period - 1)]


def _places(network: Network, given: PlanOptions) -> list[Network]:
    """Return the placements to try: the given one, or spread and the site with the fastest link."""
    if given.syncer is not None or network.syncer == HUB:
        return [network]
    widest = max(network.sites, key=lambda site: site.link.least)
    names = [SPREAD, widest.name] if len(network.sites) > 1 else [widest.name]
    return [replace(network, syncer=name) for name in names]


def _shards(model: Model, network: Network, period: int, fragments: int) -> int:
    """Return the fewest shards whose cores are less than half busy; the same number per site."""
    numel = model.params / period
    work = measured.core_seconds(network.senders, numel)
    shards = max(1, ceil(1.1 * work / model.step_seconds / CORE_BUSY_MAX))
    if network.syncer == SPREAD:
        sites = len(network.sites)
        shards = sites * ceil(shards / sites)
    return min(shards, fragments)
