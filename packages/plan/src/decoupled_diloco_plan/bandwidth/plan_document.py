"""Output of a plan: one JSON document with the unit in the name of each number, and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from rich.table import Table

from decoupled_diloco.run_model.phrases import listing
from decoupled_diloco.show.console import SteadyConsole, named_values, plain_table
from decoupled_diloco.units import format_bytes, format_duration, format_rate
from decoupled_diloco_plan.bandwidth import compare, measured
from decoupled_diloco_plan.bandwidth.case import Case, loads
from decoupled_diloco_plan.bandwidth.compare import SystemResult, gbit, needs
from decoupled_diloco_plan.bandwidth.inputs import Inputs, summary
from decoupled_diloco_plan.bandwidth.network import INSIDE, slowest
from decoupled_diloco_plan.bandwidth.predict import Prediction, relay_seconds
from decoupled_diloco_plan.bandwidth.published_tables import (
    PublishedRow,
    Reach,
    WallClock,
    wall_clock,
)
from decoupled_diloco_plan.bandwidth.round_periods import simulate
from decoupled_diloco_plan.bandwidth.search import PERIODS, Proposal, propose
from decoupled_diloco_plan.bandwidth.steady_state import Rounds, Traffic

RECOMMENDED_AIM = 0.95
"""The utilization of the recommended settings, if none is given."""

CHOSEN = ("period", "fragments", "overlap", "up", "down", "shards")
"""Options that a recommended setting chooses, although a run's file or an option has them."""


@dataclass(frozen=True)
class Plan:
    """The inputs, the setting that was evaluated or proposed, and the target utilization."""

    inputs: Inputs
    found: Proposal
    aim: float | None = None

    @property
    def case(self) -> Case:
        """The setting, and the network with the location of the shards."""
        return self.found.case

    @property
    def prediction(self) -> Prediction:
        return self.found.prediction

    @cached_property
    def systems(self) -> list[SystemResult]:
        return compare.compare_systems(self.case)

    @cached_property
    def without_relays(self) -> dict[tuple[str, str], float]:
        """The bytes per second of each place's link and direction, if no site had a relay."""
        case = self.case.without_relays()
        names = case.network.names()
        seconds = case.options.period * self.prediction.rounds.step_seconds
        return {
            (names[place], "up" if up else "down"): nbytes / seconds
            for (place, up), nbytes in loads(case).items()
        }

    @property
    def over_links_of_sites(self) -> tuple[float, float]:
        """Bytes per step over the links of all sites, with and without the relays."""
        rounds, sites = self.prediction.rounds, {site.name for site in self.case.network.sites}
        ours = sum(t.mean for t in rounds.traffic if t.place in sites)
        without = sum(rate for (place, _), rate in self.without_relays.items() if place in sites)
        return ours * rounds.step_seconds, without * rounds.step_seconds

    @cached_property
    def recommended(self) -> dict[str, Proposal]:
        """The settings that reach the aim, with the relays and without them."""
        network, options = self.inputs.network, self.inputs.options
        if not network.has_relays or options.wait == "at_overlap":
            return {}
        aim = RECOMMENDED_AIM if self.aim is None else self.aim
        free = {**dict.fromkeys(CHOSEN), "utilization": aim}
        given = options.model_copy(update=free)
        networks = {"with relays": network, "without relays": network.without_relays()}
        return {name: propose(self.inputs.model, each, given) for name, each in networks.items()}

    def clocks(self) -> dict[str, tuple[float, WallClock | None]]:
        """Return each system's seconds for the token budget, by our model and by Scaling Laws.

        The second value is None unless `chips` and `flops` are given. The result is empty without a
        token budget.
        """
        given = self.inputs.options
        if given.tokens is None or given.tokens_per_step is None:
            return {}
        steps = given.tokens / given.tokens_per_step
        return {s.system: (steps * s.step_seconds, self._clock_of(s)) for s in self.systems}

    def _clock_of(self, result: SystemResult) -> WallClock | None:
        given, link = self.inputs.options, slowest(self.case.network.sites)
        if given.chips is None or given.flops is None:
            return None
        assert given.tokens is not None
        assert given.tokens_per_step is not None
        single = result.system == "data-parallel"
        return wall_clock(
            params=self.case.model.params,
            tokens=given.tokens,
            tokens_per_step=given.tokens_per_step,
            chips=given.chips,
            flops_per_chip=given.flops,
            learners=1 if single else self.case.network.learners,
            period=result.period,
            between=Reach(link.least * self.case.link_share, 2 * link.latency_seconds),
        )


def measured_on() -> str:
    """Describe the measurements behind the error bars."""
    low, high = measured.MEASURED_MBIT
    return f"real runs of two learners on a link of {low:g} to {high:g} Mbit/s"


def document(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain JSON values."""
    return {
        "assumed": list(plan.inputs.assumed),
        "model": asdict(plan.case.model),
        "sites": _sites(plan),
        "aim": {
            "utilization": plan.aim,
            "reached": plan.found.reached,
            "binds": plan.found.binds,
        },
        "setting": _setting(plan.case),
        "prediction": _prediction(plan.prediction),
        "traffic": [
            {
                "place": t.place,
                "direction": t.direction,
                "mean_gbit_per_second": gbit(t.mean),
                "peak_gbit_per_second": gbit(t.peak),
                "capacity_gbit_per_second": _finite(gbit(t.capacity)),
                "bytes_per_step": t.mean * plan.prediction.rounds.step_seconds,
                "is_inside_site": t.is_inside,
            }
            for t in plan.prediction.rounds.traffic
        ],
        "relays": _relays(plan) if plan.case.network.has_relays else None,
        "systems": [asdict(each) for each in plan.systems],
        "bandwidth": [asdict(each) for each in compare.needs(plan.case)],
        "wall_clock": [
            {
                "system": system,
                "seconds": seconds,
                "scaling_laws": None if clock is None else {**asdict(clock), "total": clock.total},
            }
            for system, (seconds, clock) in plan.clocks().items()
        ],
        "measured_error": {
            "utilization": plan.prediction.error,
            "traffic": plan.prediction.traffic_error,
            "source": "benchmarks/results/plan_real",
            "of": measured_on(),
        },
    }


def _sites(plan: Plan) -> list[dict[str, Any]]:
    case, shares = plan.case, plan.prediction.rounds.participation
    paces = case.network.paces(case.model.step_seconds)
    return [
        {
            "name": site.name,
            "learners": site.learners,
            "step_seconds": pace,
            "participation": share,
            "uplink_format": case.up_of(number).name,
            "up_gbit_per_second": gbit(site.link.up),
            "down_gbit_per_second": gbit(site.link.down),
            "latency_seconds": site.link.latency_seconds,
            "shared": site.link.shared,
            "relay": site.relay,
            "upstream": site.upstream,
        }
        for number, (site, pace, share) in enumerate(
            zip(case.network.sites, paces, shares, strict=True)
        )
    ]


def _relays(plan: Plan) -> dict[str, Any]:
    """Return what the relays change."""
    rounds = plan.prediction.rounds
    ours, without = plan.over_links_of_sites
    inside, trips = relay_seconds(plan.case)
    return {
        "bytes_per_step": ours,
        "bytes_per_step_without": without,
        "links_without": [
            {"place": place, "direction": direction, "bytes_per_step": rate * rounds.step_seconds}
            for (place, direction), rate in plan.without_relays.items()
        ],
        "round_seconds": _finite(_round_seconds(rounds)),
        "round_seconds_without": _finite(_round_seconds(simulate(plan.case.without_relays()))),
        "added_transfer_seconds": inside,
        "added_round_trip_seconds": trips,
        "busy": rounds.relay_busy,
        "warnings": list(_relay_warnings(plan.case)),
        "recommended": {
            name: {
                "setting": _setting(found.case),
                "utilization": found.prediction.utilization,
                "reached": found.reached,
                "binds": found.binds,
            }
            for name, found in plan.recommended.items()
        },
    }


def _round_seconds(rounds: Rounds) -> float:
    """Return the mean time from a round's opening until the last learner has its copy."""
    return rounds.merge_seconds + rounds.broadcast_seconds


def _relay_warnings(case: Case) -> Iterator[str]:
    """Yield where relays save nothing, or less than planned."""
    behind = {site.upstream for site in case.network.sites}
    for site in case.network.sites:
        if site.relay and site.learners == 1 and site.name not in behind:
            yield (
                f"the relay of {site.name} saves nothing, because the site has one learner: "
                "leave it out"
            )


def _setting(case: Case) -> dict[str, Any]:
    numbers = ("period", "fragments", "overlap", "quorum", "grace_margin", "shards")
    return {
        "learners": case.network.learners,
        **_options(case, numbers),
        "syncer": case.network.syncer,
        "uplink_format": case.up.name,
        "downlink_format": case.down.name,
        "uplink_bits": case.up.bits,
        "downlink_bits": case.down.bits,
        "moment_bits": case.model.extra.moment_bits,
    }


def _options(case: Case, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(case.options, name) for name in names}


def _prediction(p: Prediction) -> dict[str, Any]:
    r = p.rounds
    return {
        "utilization": p.utilization,
        "utilization_low": p.utilization_low,
        "utilization_high": p.utilization_high,
        "compute_utilization": r.compute,
        "rounds_kept": r.kept,
        "step_seconds": r.step_seconds,
        "pace_seconds": r.pace_seconds,
        "up_bytes_per_step": p.up_bytes,
        "down_bytes_per_step": p.down_bytes,
        "slack_seconds": _finite(p.grace.slack),
        "grace_seconds": _finite(p.grace.seconds),
        "delay_steps": _finite(r.delay_steps),
        "delay_steps_max": _finite(r.delay_steps_max),
        "age_steps": _finite(p.age_steps),
        "discarded": p.discarded,
        "shard_memory_bytes": p.memory_bytes,
        "shard_core_busy": r.shard_busy,
        "cores": p.cores,
        "join_seconds": p.join_seconds,
        "join_steps": p.join_steps,
        "cost_per_million_tokens": p.cost,
    }


def _finite(value: float) -> float | None:
    """Return None for infinity, which JSON cannot represent."""
    return value if abs(value) < float("inf") else None


PUBLISHED_PERIOD = 300
"""The longest H of the published bandwidth tables (Scaling Laws for DiLoCo)."""

PAPERS = {
    "streaming-diloco": "Streaming DiLoCo (arXiv 2501.18512)",
    "scaling-laws": "Scaling Laws for DiLoCo (arXiv 2503.09799)",
}


def print_published(rows: Sequence[PublishedRow], console: SteadyConsole) -> None:
    """Print the reproduced rows, one line per system."""
    targets = sorted({row.utilization for row in rows})
    table = plain_table("system", "H", *(f"{100 * target:g} %" for target in targets))
    for system in dict.fromkeys(row.system for row in rows):
        cells = {row.utilization: row for row in rows if row.system == system}
        numbers = [_rate(cells[target].gbit_per_second) for target in targets]
        table.add_row(system, str(cells[targets[0]].period), *numbers)
    console.print("Gbit/s that reach a compute utilization:\n")
    console.print(table)
    for row in {row.source: row for row in rows}.values():
        console.print_text(f"\nvolume {row.volume:g}·N·bits, fitted to {PAPERS[row.source]}", "dim")


def print_plan(plan: Plan, console: SteadyConsole) -> None:
    """Print the plan: inputs, setting, prediction, then a comparison with other systems."""
    say = console.print_text
    say(summary(plan.case.model, plan.case.network))
    for each in plan.inputs.assumed:
        say(f"assumed: {each}", "dim")
    say("")
    _say_aim(plan, say)
    console.print(named_values(_setting_rows(plan)))
    say("")
    console.print(named_values(_prediction_rows(plan)))
    say("")
    console.print(_traffic_table(plan))
    say("peak: the largest mean of one step", "dim")
    for warning in _relay_warnings(plan.case):
        say(f"\n{warning}")
    if plan.recommended:
        aim = RECOMMENDED_AIM if plan.aim is None else plan.aim
        say(f"\nSettings for {100 * aim:g} % on these links, with the shortest possible H:\n")
        console.print(_recommended_table(plan))
    say("\nOn the same links, with the same H:\n")
    console.print(_systems_table(plan))
    say("\nGbit/s of the slowest link that reach a utilization (all links scale with it):\n")
    console.print(_needs_table(plan))
    say(f"\n{_error_line(plan)}", "dim")


def _say_aim(plan: Plan, say: Callable[[str], None]) -> None:
    found, aim = plan.found, plan.aim
    if aim is None:
        if found.binds:
            say(f"rounds do not finish in time, limited by {found.binds}\n")
        return
    got = _percent(plan.prediction.utilization)
    if not found.reached:
        say(
            f"no setting reaches {100 * aim:g} %; the best reaches {got}, limited by "
            f"{found.binds}\n"
        )
    elif found.binds:
        say(f"reaches {100 * aim:g} % ({got}); a shorter period is limited by {found.binds}\n")
    else:
        say(f"reaches {100 * aim:g} % ({got}) at the first setting tried: no link is a limit\n")


def _setting_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    o, network = plan.case.options, plan.case.network
    where = {"spread": "divided among the sites", "hub": "at the hub"}
    yield "period H, fragments P, overlap τ", f"{o.period}, {o.fragments}, {o.overlap}"
    yield "learners M, minimum quorum K", f"{network.learners}, {o.quorum}"
    up, down = plan.case.up, plan.case.down
    yield "wire format up, down", f"{up.name} ({up.bits:g} bit), {down.name} ({down.bits:g} bit)"
    if moments := plan.case.model.extra.moment_bits:
        yield "merged moments", f"{moments:g} bit in each direction, on average over the rounds"
    if plan.case.coarser:
        ladder = ", ".join(each.name for each in plan.case.coarser)
        yield "coarser ones for slow uplinks", f"{ladder}; {_coarser_uplinks(plan.case)}"
    yield "shards", f"{o.shards}, {where.get(network.syncer, 'at ' + network.syncer)}"
    if plan.aim is not None:
        yield "why", _why(plan)


def _coarser_uplinks(case: Case) -> str:
    """Describe which sites need a coarser uplink format."""
    names = [site.name for site in case.network.sites]
    found = [(name, case.up_of(number)) for number, name in enumerate(names)]
    needed = [f"{name} sends in {up.name}" for name, up in found if up != case.up]
    return ", ".join(needed) or "no site needs one"


def _why(plan: Plan) -> str:
    """Explain how the numbers of a proposed setting were chosen."""
    o = plan.case.options
    known = (
        "the paper's value"
        if o.period <= PERIODS[0]
        else f"longer than the paper's {PERIODS[0]}: {_period_losses()}"
        if o.period <= PUBLISHED_PERIOD
        else f"longer than any published period ({PUBLISHED_PERIOD}): test it on a small model"
    )
    return (
        f"H is the shortest of {PERIODS[0]}, {PERIODS[1]} … {PERIODS[-1]} that links support, "
        f"{known}; τ is the shortest that leaves slack, {_percent(o.overlap / o.period)} of H "
        "(paper: 8.3 %)" + "".join(f"; {each}" for each in _wire_losses(plan.case))
    )


def _period_losses() -> str:
    """Describe the measured loss increase of long periods."""
    known = measured.PERIOD_LOSS_PERCENT
    periods, losses = [f"{period}" for period in known], [f"{known[p]:.1f}" for p in known]
    return (
        f"at H = {listing(periods)} the loss of a 0.2 M parameter GPT was {listing(losses)} % "
        "higher after 600 steps"
    )


def _wire_losses(case: Case) -> Iterator[str]:
    """Yield the measured loss change of each low-bit wire format."""
    for name in sorted({case.up.name, case.down.name} & measured.WIRE_LOSS_PERCENT.keys()):
        mean, low, high = measured.WIRE_LOSS_PERCENT[name]
        yield (
            f"{name}: on par with bf16 in the paper (55.3 and 55.4); in our tests the loss of a "
            f"0.2 M parameter GPT differed by {mean:.1f} % ({low:.1f} to {high:.1f})"
        )


def _prediction_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    p, r = plan.prediction, plan.prediction.rounds
    yield (
        "utilization",
        f"{_percent(p.utilization)} ({_percent(p.utilization_low)} to "
        f"{_percent(p.utilization_high)}): learners step {_percent(r.compute)} of the time, "
        f"{_percent(r.kept)} of the due rounds take place",
    )
    yield "step time", format_duration(r.step_seconds)
    if len(set(plan.case.network.paces(plan.case.model.step_seconds))) > 1:
        yield "participation per site", ", ".join(_shares(plan))
    yield (
        "traffic per learner and step",
        f"{format_bytes(p.up_bytes)} up, {format_bytes(p.down_bytes)} down",
    )
    yield "slack, grace window", f"{_signed(p.grace.slack)}, {_signed(p.grace.seconds)}"
    yield (
        "merge applied after",
        f"{r.delay_steps:.1f} steps (mean; at most {r.delay_steps_max:g}), which discards "
        f"{_percent(p.discarded)} of the tokens",
    )
    yield "fragment age before that", f"up to {p.age_steps:.0f} steps"
    if plan.case.network.has_relays:
        yield from _relay_rows(plan)
    yield (
        "per shard",
        f"{format_bytes(p.memory_bytes)} of memory, {_percent(r.shard_busy)} of a core "
        f"(all shards: {p.cores:.2g} cores)",
    )
    joined = "" if p.join_seconds else " (same site as the syncer)"
    yield (
        "time for a learner to join",
        f"{format_duration(p.join_seconds)}, {p.join_steps:.0f} steps of other learners{joined}",
    )
    if p.cost is not None:
        yield "cost per million tokens", f"{p.cost:.4g}"
    for system, (seconds, clock) in plan.clocks().items():
        laws = "" if clock is None else f" (Scaling Laws: {format_duration(clock.total)})"
        yield f"token budget, {system}", format_duration(seconds) + laws


def _relay_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    ours, without = plan.over_links_of_sites
    yield (
        "relays save",
        f"{_percent(1 - ours / without) if without else 'none'} of the bytes over the sites' "
        f"links: {format_bytes(ours)} per step instead of {format_bytes(without)}",
    )
    inside, trips = relay_seconds(plan.case)
    alone = simulate(plan.case.without_relays())
    yield (
        "time of a round",
        f"{_signed(_round_seconds(plan.prediction.rounds))}, without relays "
        f"{_signed(_round_seconds(alone))}; relays add {format_duration(inside)} inside sites "
        f"and {format_duration(trips)} for the shard's decision",
    )


def _shares(plan: Plan) -> Iterator[str]:
    shares = plan.prediction.rounds.participation
    for site, share in zip(plan.case.network.sites, shares, strict=True):
        yield f"{site.name} {_percent(share)}"


def _traffic_table(plan: Plan) -> Table:
    """Return the traffic of each link; neighboring sites with equal numbers share their rows."""
    heads = ("link", "direction", "mean Gbit/s", "peak", "usable rate")
    with_relays = plan.case.network.has_relays
    table = plain_table(*heads, *["no relays"] * with_relays)
    traffic = plan.prediction.rounds.traffic
    rows = [(t.place, _traffic_cells(plan, t)[: 4 + with_relays]) for t in traffic]
    places = zip(rows[::2], rows[1::2], strict=True)  # each with its two directions
    for cells, same in groupby(places, key=lambda place: (place[0][1], place[1][1])):
        names = [name for (name, _), _ in same]
        last = names[-1].removeprefix(INSIDE)
        shown = names[0] if len(names) == 1 else f"{names[0]} to {last}"
        for row in cells:
            table.add_row(shown, *row)
    return table


def _traffic_cells(plan: Plan, t: Traffic) -> tuple[str, ...]:
    fills = format_rate(t.capacity) if t.capacity < float("inf") else "no limit"
    error = plan.prediction.traffic_error * gbit(t.mean)
    mean = f"{gbit(t.mean):.3g} ± {error:.1g}"
    without = plan.without_relays.get((t.place, t.direction))
    alone = "" if without is None else f"{gbit(without):.3g}"
    return t.direction, mean, f"{gbit(t.peak):.3g}", fills, alone


def _recommended_table(plan: Plan) -> Table:
    table = plain_table("", "H", "P", "τ", "wire format up, down", "utilization")
    for name, found in plan.recommended.items():
        o, case = found.case.options, found.case
        numbers = (f"{o.period}", f"{o.fragments}", f"{o.overlap}")
        wire = f"{case.up.name}, {case.down.name}"
        table.add_row(name, *numbers, wire, _percent(found.prediction.utilization))
    return table


def _systems_table(plan: Plan) -> Table:
    table = plain_table("system", "utilization", "step time", "Gbit/s", "H", "τ")
    for s in plan.systems:
        step = format_duration(s.step_seconds)
        numbers = (f"{s.gbit_per_second:.3g}", str(s.period), str(s.overlap))
        table.add_row(s.system, _percent(s.utilization), step, *numbers)
    return table


def _needs_table(plan: Plan) -> Table:
    found = needs(plan.case)
    targets = list(dict.fromkeys(n.utilization for n in found))
    table = plain_table("system", *(f"{100 * target:g} %" for target in targets))
    for system in dict.fromkeys(n.system for n in found):
        table.add_row(system, *(_rate(n.gbit_per_second) for n in found if n.system == system))
    return table


def _error_line(plan: Plan) -> str:
    p = plan.prediction
    wait = "wait" if plan.case.options.wait == "at_overlap" else "never wait"
    return (
        f"Error bars: with learners that {wait}, {measured_on()} differed by up to "
        f"{100 * p.error:.1f} points of utilization and {100 * p.traffic_error:.0f} % of traffic "
        "(benchmarks/results/plan_real). For other links and models the errors are extrapolated. "
        "The other systems were not measured."
    )


def _rate(gbit_per_second: float | None) -> str:
    return "none" if gbit_per_second is None else f"{gbit_per_second:.3g}"


def _signed(seconds: float) -> str:
    """Format a time that may be negative, or infinite if no round completes."""
    if abs(seconds) == float("inf"):
        return "none: no round completes"
    return f"{'-' if seconds < 0 else ''}{format_duration(abs(seconds))}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
