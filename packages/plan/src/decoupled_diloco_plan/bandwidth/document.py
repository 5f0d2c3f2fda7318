"""A plan as one JSON document: every number with its unit in its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from decoupled_diloco_plan.bandwidth import compare, measured
from decoupled_diloco_plan.bandwidth.case import Case
from decoupled_diloco_plan.bandwidth.compare import Standing, gbit
from decoupled_diloco_plan.bandwidth.inputs import Inputs
from decoupled_diloco_plan.bandwidth.network import slowest
from decoupled_diloco_plan.bandwidth.predict import Prediction
from decoupled_diloco_plan.bandwidth.search import Proposal
from decoupled_diloco_plan.bandwidth.wallclock import Reach, WallClock, wall_clock


@dataclass(frozen=True)
class Plan:
    """Everything that was found.

    Attributes:
        inputs: what it starts from.
        found: the setting, given or proposed, and what it comes to.
        aim: the utilisation that was asked for; None if none was.
        thought_of: what would be proposed with 4 bits each way, for which there is no codec; None
            if that was not looked for, or brings nothing.
    """

    inputs: Inputs
    found: Proposal
    aim: float | None = None
    thought_of: Proposal | None = None

    @property
    def case(self) -> Case:
        """The setting, and the network with the place of the shards."""
        return self.found.case

    @property
    def prediction(self) -> Prediction:
        """What it comes to."""
        return self.found.prediction

    @cached_property
    def standings(self) -> list[Standing]:
        """All systems on the same links."""
        return compare.standings(self.case)

    def clocks(self) -> dict[str, tuple[float, WallClock | None]]:
        """Seconds for the token budget, by our model and by that of Scaling Laws.

        The latter only if chips and what they do are given. Empty without a budget.
        """
        given = self.inputs.options
        if given.tokens is None or given.tokens_per_step is None:
            return {}
        steps = given.tokens / given.tokens_per_step
        return {s.system: (steps * s.step_seconds, self._clock_of(s)) for s in self.standings}

    def _clock_of(self, standing: Standing) -> WallClock | None:
        given, link = self.inputs.options, slowest(self.case.network.sites)
        if given.chips is None or given.flops is None:
            return None
        assert given.tokens is not None
        assert given.tokens_per_step is not None
        single = standing.system == "data-parallel"
        return wall_clock(
            params=self.case.model.params,
            tokens=given.tokens,
            tokens_per_step=given.tokens_per_step,
            chips=given.chips,
            flops_per_chip=given.flops,
            learners=1 if single else self.case.network.learners,
            period=standing.period,
            between=Reach(link.least * self.case.link_share, 2 * link.latency_seconds),
        )


def measured_on() -> str:
    """Where the error bars come from, in words."""
    low, high = measured.MEASURED_MBIT
    return f"real runs of two learners on a link of {low:g} to {high:g} Mbit/s"


def document(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON values."""
    return {
        "assumed": list(plan.inputs.assumed),
        "model": asdict(plan.case.model),
        "sites": _sites(plan),
        "aim": {
            "utilization": plan.aim,
            "reached": plan.found.reached,
            "binds": plan.found.binds,
            "with_4_bits": None
            if plan.thought_of is None
            else _options(plan.thought_of.case, ("period", "fragments", "overlap")),
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
            }
            for t in plan.prediction.rounds.traffic
        ],
        "systems": [asdict(each) for each in plan.standings],
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
            "up_gbit_per_second": gbit(site.link.up),
            "down_gbit_per_second": gbit(site.link.down),
            "latency_seconds": site.link.latency_seconds,
            "shared": site.link.shared,
        }
        for site, pace, share in zip(case.network.sites, paces, shares, strict=True)
    ]


def _setting(case: Case) -> dict[str, Any]:
    numbers = ("period", "fragments", "overlap", "quorum", "grace_margin", "shards")
    return {
        "learners": case.network.learners,
        **_options(case, numbers),
        "syncer": case.network.syncer,
        "uplink_format": case.setting.up.name,
        "downlink_format": case.setting.down.name,
        "uplink_bits": case.setting.up.bits,
        "downlink_bits": case.setting.down.bits,
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
    """JSON knows no infinity."""
    return value if abs(value) < float("inf") else None
