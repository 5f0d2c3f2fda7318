"""Table of all metrics that a shard or a learner exports: name, kind, meaning and labels.

Names and units follow the conventions of Prometheus: base units, ``_total`` for counters, instants
as Unix times. A shard exports ``ddiloco_shard_…``, including its view of each learner
(``ddiloco_shard_learner_…``). A learner exports ``ddiloco_learner_…``. The run, shard or learner is
a label of the scrape target, which `ddiloco metrics config` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

METRICS_PATH = "/metrics"

INSTALL = "run pip install -e '.[metrics]' in the clone"
"""Command that installs the library for Prometheus' text format."""

Kind = Literal["gauge", "counter", "histogram", "summary"]


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric.

    Attributes:
        help: Its meaning, in a sentence without a period.
        labels: Labels of its series; each has few values, or is a learner's id.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series in a query."""
        match self.kind:
            case "gauge" | "counter":
                return (self.name,)
            case "summary":
                return (f"{self.name}_sum", f"{self.name}_count")
            case "histogram":
                return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


def _gauge(name: str, help: str, *labels: str) -> Measure:
    return Measure(name, "gauge", help, labels)


def _counter(name: str, help: str, *labels: str) -> Measure:
    return Measure(name, "counter", help, labels)


INFO = _gauge(
    "ddiloco_info", "Always 1; the labels identify the process", "process", "run_name", "version"
)

EVERY = (
    INFO,
    _gauge(
        "ddiloco_certificate_expiry_timestamp_seconds",
        "Expiry of the process's certificate; only with TLS",
    ),
)
"""Metrics of every process."""

SHARD = (
    *EVERY,
    _gauge("ddiloco_shard_clock_steps", "The shard's clock, which is the run's global step"),
    _gauge("ddiloco_shard_phase", "Always 1; the label is the current phase of the shard", "phase"),
    _gauge("ddiloco_shard_term", "The shard's term, which grows with each restart of the shard"),
    _counter("ddiloco_shard_rounds_total", "Finished rounds: merged, abandoned or idle", "verdict"),
    _counter(
        "ddiloco_shard_contributions_total",
        "Contributions that rounds have requested, by their final state",
        "state",
    ),
    Measure(
        "ddiloco_shard_round_seconds",
        "histogram",
        "Time from the start of a round to its new version",
    ),
    Measure(
        "ddiloco_shard_merge_seconds",
        "histogram",
        "Time from the last contribution of a round to its new version",
    ),
    _gauge("ddiloco_shard_open_rounds", "Open rounds"),
    _gauge("ddiloco_shard_open_round_seconds", "Age of the oldest open round; 0 without one"),
    _gauge(
        "ddiloco_shard_quorum_learners",
        "K, the minimum quorum of a round; absent with devices, which need not be live together",
    ),
    _gauge(
        "ddiloco_shard_quorum_wait_seconds",
        "Age of the oldest open round without a quorum; 0 without one",
    ),
    _gauge("ddiloco_shard_learners", "Live learners"),
    _gauge("ddiloco_shard_stepping_learners", "Live learners that have reported a step"),
    _gauge("ddiloco_shard_observers", "Connected observers"),
    _counter("ddiloco_shard_tokens_total", "Tokens that all learners have trained on"),
    _counter(
        "ddiloco_shard_discarded_tokens_total",
        "Tokens whose training was overwritten, as reported by learners; counted at each shard",
    ),
    _counter("ddiloco_shard_sent_bytes_total", "Bytes that the shard has sent", "plane"),
    _counter("ddiloco_shard_received_bytes_total", "Bytes that the shard has received", "plane"),
    _gauge("ddiloco_shard_disk_free_bytes", "Free space on the disk of the run folder"),
    _gauge("ddiloco_shard_disk_size_bytes", "Size of the disk of the run folder"),
    _gauge("ddiloco_shard_durable_bytes", "Size of the shard's checkpoint and journal on disk"),
    _gauge(
        "ddiloco_shard_store_backlog_bytes",
        "Bytes of the run folder that are not in the object store; only of shard 0",
    ),
    _gauge(
        "ddiloco_shard_store_state_timestamp_seconds",
        "Time of the newest complete state in the object store; only of shard 0",
    ),
    _gauge("ddiloco_shard_site_connected", "Whether the relay of the site is connected", "site"),
    _gauge(
        "ddiloco_shard_site_learners", "Learners connected through the relay of the site", "site"
    ),
    _counter(
        "ddiloco_shard_site_sums_total",
        "Sums that the relay has sent: accepted, or refused (also those that did not arrive)",
        "site",
        "verdict",
    ),
    _counter(
        "ddiloco_shard_site_contributions_total", "Contributions in the accepted sums", "site"
    ),
    _counter("ddiloco_shard_site_sent_bytes_total", "Bytes of the sums that arrived", "site"),
    _counter(
        "ddiloco_shard_site_relayed_bytes_total",
        "Bytes of the contributions in the accepted sums, as they arrived at the relay; without a "
        "relay, these would have been sent",
        "site",
    ),
    _gauge("ddiloco_shard_learner_connected", "Whether the learner is connected", "learner"),
    _gauge(
        "ddiloco_shard_learner_heard_timestamp_seconds",
        "Time of the last message from the learner; absent after the learner has left",
        "learner",
    ),
    _gauge("ddiloco_shard_learner_run_step", "The learner's run step", "learner"),
    _counter(
        "ddiloco_shard_learner_tokens_total", "Tokens that the learner has trained on", "learner"
    ),
    _counter(
        "ddiloco_shard_learner_discarded_tokens_total",
        "Tokens of the learner's current incarnation whose training was overwritten",
        "learner",
    ),
    _gauge(
        "ddiloco_shard_learner_score",
        "Median of the learner's last gains, in gains of the median learner; only with "
        "act in [trust]",
        "learner",
    ),
    _counter(
        "ddiloco_shard_learner_failures_total",
        "Times that the learner's lease ran out or an error ended its training loop, since the "
        "shard started",
        "learner",
    ),
    _counter(
        "ddiloco_shard_learner_preemptions_total",
        "Times that the learner was asked to stop and left in order, since the shard started",
        "learner",
    ),
    _gauge("ddiloco_shard_learner_step_seconds", "Mean duration of an inner step", "learner"),
    _gauge(
        "ddiloco_shard_learner_loss", "Last training loss; +Inf if it is not a number", "learner"
    ),
)
"""Metrics at a shard's `/metrics`."""

LEARNER = (
    *EVERY,
    _counter("ddiloco_learner_steps_total", "Inner steps, earlier incarnations included"),
    _counter("ddiloco_learner_tokens_total", "Tokens trained on, earlier incarnations included"),
    _counter("ddiloco_learner_discarded_tokens_total", "Tokens whose training was overwritten"),
    _gauge("ddiloco_learner_run_step", "The learner's run step"),
    _gauge("ddiloco_learner_loss", "Last training loss that the training loop reported"),
    _gauge("ddiloco_learner_step_seconds", "Mean duration of an inner step"),
    Measure(
        "ddiloco_learner_step_overhead_seconds",
        "summary",
        "Time that the training loop spent in Learner.step",
    ),
    _gauge("ddiloco_learner_epoch", "Number of the learner's incarnation"),
    _gauge("ddiloco_learner_shards", "Shards of the run"),
    _gauge("ddiloco_learner_connected_shards", "Shards that the learner is connected to"),
    _counter("ddiloco_learner_versions_applied_total", "Global fragment versions applied"),
    _gauge(
        "ddiloco_learner_applied_timestamp_seconds", "Time at which the last version was applied"
    ),
    _gauge(
        "ddiloco_learner_fragments_behind",
        "Fragments of which the learner lacks the newest version",
    ),
    _counter("ddiloco_learner_sent_bytes_total", "Bytes that the learner has sent", "plane"),
    _counter(
        "ddiloco_learner_received_bytes_total", "Bytes that the learner has received", "plane"
    ),
)
"""Metrics at a learner's ``metrics`` address."""

PROCESS = (
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
)
"""Standard metrics of Prometheus' client libraries, exported by every process; Linux only."""
