"""A plan as one JSON document: every number with its unit in its name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from decoupled_diloco_plan.bandwidth import compare, measured
from decoupled_diloco_plan.bandwidth.compare import Need, Standing
from decoupled_diloco_plan.bandwidth.inputs import Inputs
from decoupled_diloco_plan.bandwidth.network import Network, slowest
from decoupled_diloco_plan.bandwidth.predict import Prediction
from decoupled_diloco_plan.bandwidth.search import Proposal
from decoupled_diloco_plan.bandwidth.setting import Setting
from decoupled_diloco_plan.bandwidth.wallclock import Reach, WallClock, wall_clock


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was found.

    Attributes:
        inputs: what it starts from.
        setting: given, or proposed.
        network: with the place of the shards.
        prediction: what it comes to.
        aim: the utilisation that was asked for; None if none was.
        reached: whether the setting reaches it.
        binds: what binds, in words; empty if nothing does.
        thought_of: what would be proposed with 4 bits each way, for which there is no codec; None
            if that was not looked for, or brings nothing.
        link_share: share of a link's rate that bodies fill.
    """

    inputs: Inputs
    setting: Setting
    network: Network
    prediction: Prediction
    aim: float | None
    reached: bool
    binds: str
    link_share: float
    thought_of: Proposal | None = None

    def standings(self) -> list[Standing]:
        """All systems on the same links."""
        return compare.standings(
            self.inputs.model, self.setting, self.network, link_share=self.link_share
        )

    def needs(self) -> list[Need]:
        """The bandwidth that each system needs."""
        return compare.needs(
            self.inputs.model, self.setting, self.network, link_share=self.link_share
        )

    def clocks(self) -> dict[str, tuple[float, WallClock | None]]:
        """Seconds for the token budget, by our model and by that of Scaling Laws.

        The latter only if chips and what they do are given. Empty without a budget.
        """
        chips = self.inputs.chips
        if chips.tokens is None or chips.tokens_per_step is None:
            return {}
        steps = chips.tokens / chips.tokens_per_step
        found = {}
        for each in self.standings():
            decoupled = each.system == compare.DECOUPLED
            step = self.prediction.rounds.pace_seconds if decoupled else each.step_seconds
            found[each.system] = (steps * step, self._clock_of(each))
        return found

    def _clock_of(self, standing: Standing) -> WallClock | None:
        chips = self.inputs.chips
        if (
            chips.count is None
            or chips.flops is None
            or None in (chips.tokens, chips.tokens_per_step)
        ):
            return None
        link = slowest(self.network.sites)
        assert chips.tokens is not None
        assert chips.tokens_per_step is not None
        single = standing.system == "data-parallel"
        return wall_clock(
            params=self.inputs.model.params,
            tokens=chips.tokens,
            tokens_per_step=chips.tokens_per_step,
            chips=chips.count,
            flops_per_chip=chips.flops,
            learners=1 if single else self.network.learners,
            period=standing.period,
            between=Reach(min(link.up, link.down) * self.link_share, 2 * link.latency_seconds),
        )


def gbit(bytes_per_second: float) -> float:
    """Bytes a second as Gbit/s."""
    return 8 * bytes_per_second / 1e9


def document(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON values."""
    model, setting, network = plan.inputs.model, plan.setting, plan.network
    o = setting.options
    return {
        "assumed": list(plan.inputs.assumed),
        "model": asdict(model),
        "sites": [
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
            for site, pace, share in zip(
                network.sites,
                network.paces(model.step_seconds),
                plan.prediction.rounds.participation,
                strict=True,
            )
        ],
        "aim": {
            "utilization": plan.aim,
            "reached": plan.reached,
            "binds": plan.binds,
            "with_4_bits": _thought_of(plan),
        },
        "setting": {
            "learners": network.learners,
            "period": o.period,
            "fragments": o.fragments,
            "overlap": o.overlap,
            "quorum": o.quorum,
            "grace_margin": o.grace_margin,
            "shards": o.shards,
            "syncer": network.syncer,
            "uplink_format": setting.up.name,
            "downlink_format": setting.down.name,
            "uplink_bits": setting.up.bits,
            "downlink_bits": setting.down.bits,
        },
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
        "systems": [
            {
                "system": s.system,
                "utilization": s.utilization,
                "step_seconds": s.step_seconds,
                "gbit_per_second": gbit(s.mean),
                "period": s.period,
                "overlap": s.overlap,
            }
            for s in plan.standings()
        ],
        "bandwidth": [
            {
                "system": n.system,
                "utilization": n.utilization,
                "gbit_per_second": None if n.bytes_per_second is None else gbit(n.bytes_per_second),
            }
            for n in plan.needs()
        ],
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


def _thought_of(plan: Plan) -> dict[str, Any] | None:
    if plan.thought_of is None:
        return None
    o = plan.thought_of.setting.options
    return {"period": o.period, "fragments": o.fragments, "overlap": o.overlap}


def measured_on() -> str:
    """Where the error bars come from, in words."""
    low, high = measured.MEASURED_MBIT
    return f"real runs of two learners on a link of {low:g} to {high:g} Mbit/s"


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
