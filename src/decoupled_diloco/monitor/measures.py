"""Every metric that a shard or a learner tells: name, kind, meaning and labels, in one table.

Names and units follow Prometheus' conventions: base units, ``_total`` for what only grows, instants
as Unix times. A shard's are ``ddiloco_shard_…``, among them what it knows of each learner
(``ddiloco_shard_learner_…``); ``ddiloco_learner_…`` is what a learner tells of itself. Which run,
shard or learner is asked is a label of the target: `ddiloco metrics config` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

METRICS_PATH = "/metrics"

INSTALL = "pip install 'decoupled-diloco[metrics]' (in a clone: pip install -e '.[metrics]')"
"""How to have the library that writes metrics as Prometheus reads them."""

Kind = Literal["gauge", "counter", "histogram", "summary"]


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric.

    Attributes:
        help: What it means, in a sentence without a full stop.
        labels: What tells its series apart; every one has few values, or is a learner's id.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The names by which it can be asked for."""
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


INFO = _gauge("ddiloco_info", "Always 1: which process this is", "process", "run_name", "version")

EVERY = (
    INFO,
    _gauge(
        "ddiloco_certificate_expiry_timestamp_seconds",
        "When the certificate that the process shows ends; of encrypted connections",
    ),
)
"""What every process tells."""

SHARD = (
    *EVERY,
    _gauge("ddiloco_shard_clock_steps", "The shard's clock, the run's global step"),
    _gauge("ddiloco_shard_phase", "Always 1: what the shard does now", "phase"),
    _gauge("ddiloco_shard_term", "The shard's term, which grows when it begins again"),
    _counter(
        "ddiloco_shard_rounds_total", "Rounds that are over: merged, abandoned or idle", "verdict"
    ),
    _counter(
        "ddiloco_shard_contributions_total",
        "What became of contributions that rounds have asked for",
        "state",
    ),
    Measure(
        "ddiloco_shard_round_seconds", "histogram", "From the opening of a round to its new version"
    ),
    Measure(
        "ddiloco_shard_merge_seconds",
        "histogram",
        "From the last contribution of a round to its new version",
    ),
    _gauge("ddiloco_shard_open_rounds", "Rounds that are not over"),
    _gauge("ddiloco_shard_open_round_seconds", "Age of the oldest open round; 0 if none is open"),
    _gauge("ddiloco_shard_quorum_learners", "K, the minimum quorum of a round"),
    _gauge(
        "ddiloco_shard_quorum_wait_seconds",
        "Age of the oldest open round that lacks its quorum; 0 if none does",
    ),
    _gauge("ddiloco_shard_learners", "Live learners"),
    _gauge("ddiloco_shard_stepping_learners", "Live learners that have reported a step"),
    _gauge("ddiloco_shard_observers", "Observers that are connected"),
    _counter("ddiloco_shard_tokens_total", "Tokens that all learners were trained on"),
    _counter(
        "ddiloco_shard_discarded_tokens_total",
        "Tokens whose training was overwritten, as learners report; counted by each shard",
    ),
    _counter("ddiloco_shard_sent_bytes_total", "Bytes that the shard has sent", "plane"),
    _counter("ddiloco_shard_received_bytes_total", "Bytes that the shard has received", "plane"),
    _gauge("ddiloco_shard_disk_free_bytes", "Free space where the run folder is"),
    _gauge("ddiloco_shard_disk_size_bytes", "Size of the disk where the run folder is"),
    _gauge("ddiloco_shard_durable_bytes", "The shard's checkpoint and journal on its disk"),
    _gauge("ddiloco_shard_learner_connected", "Whether the learner has a connection", "learner"),
    _gauge(
        "ddiloco_shard_learner_heard_timestamp_seconds",
        "When the shard last heard of the learner; gone once it leaves by itself",
        "learner",
    ),
    _gauge("ddiloco_shard_learner_run_step", "The learner's run step", "learner"),
    _counter(
        "ddiloco_shard_learner_tokens_total", "Tokens that the learner was trained on", "learner"
    ),
    _counter(
        "ddiloco_shard_learner_discarded_tokens_total",
        "Tokens of the learner's present life whose training was overwritten",
        "learner",
    ),
    _gauge("ddiloco_shard_learner_step_seconds", "Mean seconds of an inner step", "learner"),
    _gauge("ddiloco_shard_learner_loss", "Last training loss; +Inf if it was no number", "learner"),
)
"""What `/metrics` of a shard tells."""

LEARNER = (
    *EVERY,
    _counter("ddiloco_learner_steps_total", "Inner steps, those of earlier lives included"),
    _counter("ddiloco_learner_tokens_total", "Tokens trained on, in earlier lives too"),
    _counter("ddiloco_learner_discarded_tokens_total", "Tokens whose training was overwritten"),
    _gauge("ddiloco_learner_run_step", "The learner's run step"),
    _gauge("ddiloco_learner_loss", "The last training loss that the loop has told"),
    _gauge("ddiloco_learner_step_seconds", "Mean seconds of an inner step"),
    Measure(
        "ddiloco_learner_step_overhead_seconds",
        "summary",
        "How long the training loop waited in Learner.step",
    ),
    _gauge("ddiloco_learner_epoch", "Which life of the learner this is"),
    _gauge("ddiloco_learner_shards", "Shards of the run"),
    _gauge("ddiloco_learner_connected_shards", "Shards that the learner is connected to"),
    _counter("ddiloco_learner_versions_applied_total", "Global versions of fragments taken"),
    _gauge("ddiloco_learner_applied_timestamp_seconds", "When the last version was taken"),
    _gauge(
        "ddiloco_learner_fragments_behind", "Fragments of which a newer version is known than held"
    ),
    _counter("ddiloco_learner_sent_bytes_total", "Bytes that the learner has sent", "plane"),
    _counter(
        "ddiloco_learner_received_bytes_total", "Bytes that the learner has received", "plane"
    ),
)
"""What a learner tells at the address of its ``metrics``."""

PROCESS = (
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
)
"""What every process tells of itself, as the client libraries of Prometheus do; on Linux."""
