"""Create the dashboard for Grafana that the package ships: `python docs/pictures/dashboard.py`.

It needs grafana-foundation-sdk (dev), which writes Grafana's JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
)

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "src" / "decoupled_diloco" / "monitor" / "dashboard.json"

SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
RUN = 'run=~"$run"'


@dataclass(frozen=True)
class Panel:
    """One chart: a title, one of Grafana's units, and queries with the names of their lines."""

    title: str
    unit: str
    queries: dict[str, str]
    description: str = ""


def _of_learners(metric: str) -> str:
    """Return a query of the shards' view of a learner; all shards receive the same reports."""
    return f"max by (run, learner) (ddiloco_shard_learner_{metric}{{{RUN}}})"


def _rate(metric: str, by: str = "run") -> str:
    return f"max by ({by}) (rate(ddiloco_shard_{metric}{{{RUN}}}[$__rate_interval]))"


def _quantile(share: float, metric: str) -> str:
    rate = f"rate(ddiloco_shard_{metric}_bucket{{{RUN}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (run, le) ({rate}))"


ROWS: dict[str, tuple[Panel, ...]] = {
    "The run": (
        Panel(
            "Global step",
            "none",
            {"{{run}}": f"max by (run) (ddiloco_shard_clock_steps{{{RUN}}})"},
        ),
        Panel("Tokens per second", "cps", {"{{run}}": _rate("tokens_total")}),
        Panel("Training loss", "none", {"{{learner}}": _of_learners("loss")}),
        Panel(
            "Goodput (kept tokens)",
            "percentunit",
            {"{{run}}": f"1 - {_rate('discarded_tokens_total')} / {_rate('tokens_total')}"},
            "Share of tokens whose training was not overwritten.",
        ),
        Panel(
            "Learners",
            "none",
            {
                "live {{run}}": f"max by (run) (ddiloco_shard_learners{{{RUN}}})",
                "stepping {{run}}": f"max by (run) (ddiloco_shard_stepping_learners{{{RUN}}})",
                "quorum {{run}}": f"max by (run) (ddiloco_shard_quorum_learners{{{RUN}}})",
            },
        ),
        Panel(
            "Time since the last message from a learner",
            "s",
            {"{{learner}}": f"time() - {_of_learners('heard_timestamp_seconds')}"},
        ),
    ),
    "Learners": (
        Panel("Run step", "none", {"{{learner}}": _of_learners("run_step")}),
        Panel("Step duration", "s", {"{{learner}}": _of_learners("step_seconds")}),
        Panel(
            "Discarded tokens per second",
            "cps",
            {
                "{{learner}}": "max by (run, learner) (rate("
                f"ddiloco_shard_learner_discarded_tokens_total{{{RUN}}}[$__rate_interval]))"
            },
        ),
        Panel(
            "Step overhead",
            "s",
            {
                "{{learner}}": "sum by (run, learner) (rate("
                f"ddiloco_learner_step_overhead_seconds_sum{{{RUN}}}[$__rate_interval])) / "
                "sum by (run, learner) (rate("
                f"ddiloco_learner_step_overhead_seconds_count{{{RUN}}}[$__rate_interval]))"
            },
            "Time that the training loop spends in Learner.step; only of scraped learners.",
        ),
    ),
    "Shards": (
        Panel(
            "Rounds per second",
            "ops",
            {
                "{{verdict}} shard {{shard}}": "sum by (run, shard, verdict) (rate("
                f"ddiloco_shard_rounds_total{{{RUN}}}[$__rate_interval]))"
            },
        ),
        Panel(
            "Duration of rounds and merges",
            "s",
            {
                "round, median": _quantile(0.5, "round_seconds"),
                "round, 95th percentile": _quantile(0.95, "round_seconds"),
                "merge, 95th percentile": _quantile(0.95, "merge_seconds"),
            },
        ),
        Panel(
            "Contributions per second",
            "ops",
            {
                "{{state}}": "sum by (run, state) (rate("
                f"ddiloco_shard_contributions_total{{{RUN}}}[$__rate_interval]))"
            },
        ),
        Panel(
            "Bytes per second",
            "Bps",
            {
                "sent, shard {{shard}}": "sum by (run, shard) (rate("
                f"ddiloco_shard_sent_bytes_total{{{RUN}}}[$__rate_interval]))",
                "received, shard {{shard}}": "sum by (run, shard) (rate("
                f"ddiloco_shard_received_bytes_total{{{RUN}}}[$__rate_interval]))",
            },
        ),
        Panel(
            "Age of the oldest round without quorum",
            "s",
            {
                "shard {{shard}}": "max by (run, shard) "
                f"(ddiloco_shard_quorum_wait_seconds{{{RUN}}})"
            },
        ),
        Panel(
            "Disk",
            "bytes",
            {
                "free, shard {{shard}}": "min by (run, shard) "
                f"(ddiloco_shard_disk_free_bytes{{{RUN}}})",
                "durable, shard {{shard}}": "max by (run, shard) "
                f"(ddiloco_shard_durable_bytes{{{RUN}}})",
            },
        ),
        Panel(
            "Time until a certificate expires",
            "s",
            {
                "{{shard}}{{learner}}": "min by (run, shard, learner) "
                f"(ddiloco_certificate_expiry_timestamp_seconds{{{RUN}}}) - time()"
            },
            "Only for runs with TLS.",
        ),
        Panel(
            "CPU cores in use",
            "none",
            {
                "{{shard}}{{learner}}": "sum by (run, shard, learner) (rate("
                f'process_cpu_seconds_total{{{RUN}, job="ddiloco"}}[$__rate_interval]))'
            },
        ),
        Panel(
            "Memory",
            "bytes",
            {
                "{{shard}}{{learner}}": "sum by (run, shard, learner) "
                f'(process_resident_memory_bytes{{{RUN}, job="ddiloco"}})'
            },
        ),
    ),
}


def text() -> str:
    """Return the dashboard as JSON."""
    made = (
        dashboard.Dashboard("Decoupled DiLoCo")
        .uid("decoupled-diloco")
        .tags(["decoupled-diloco"])
        .refresh("30s")
        .time("now-3h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("run")
            .datasource(SOURCE)
            .query("label_values(ddiloco_shard_clock_steps, run)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
        )
    )
    for title, panels in ROWS.items():
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(_chart(panel))
    return str(JSONEncoder(sort_keys=True, indent=2).encode(made.build())) + "\n"


def _chart(panel: Panel) -> timeseries.Panel:
    chart = timeseries.Panel().title(panel.title).unit(panel.unit).datasource(SOURCE).span(8)
    chart = chart.height(7).description(panel.description) if panel.description else chart.height(7)
    for number, (line, query) in enumerate(panel.queries.items()):
        target = prometheus.Dataquery().expr(query).legend_format(line)
        chart = chart.with_target(target.ref_id(chr(ord("A") + number)))
    return chart


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
