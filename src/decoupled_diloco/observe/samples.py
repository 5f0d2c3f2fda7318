"""What processes measure and say beside the protocol: losses, times, faults, lives of processes.

Samples go on the event tape next to events and effects. They are for people and plots: no state
machine ever sees one. A number that is not finite (a diverged loss) is written as ``None``, because
JSON has no other word for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.transport.base import Stats


@dataclass(frozen=True, slots=True)
class LossMeasured:
    """A learner's training loss at one of its steps.

    ``step``: own steps since it joined; ``tokens``: own tokens since it joined, this step's
    included; ``loss``: mean over the step's batch.
    """

    step: int
    global_step: int
    tokens: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of an evaluation, for example ``accuracy`` from 0 to 1."""

    name: str
    value: float | None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The global weights were evaluated on this many held-out tokens.

    ``metrics``: what the workload measures besides the loss, in its own order.
    """

    global_step: int
    loss: float | None
    tokens: int
    metrics: tuple[Metric, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """The launcher started a process; a second one of the same name is a restart."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A process ended: with an exit code, or by a signal (then ``code`` is ``None``)."""

    name: str
    code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class EndRequested:
    """The launcher tells these running processes to end: that they do is no failure."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FaultInjected:
    """A fault was caused on purpose, for example ``kill`` on ``learner-1``.

    ``processes``: all processes that it strikes.
    """

    kind: str
    target: str
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FaultEnded:
    """A fault that was caused on purpose, and lasted, was undone; see `FaultInjected`."""

    kind: str
    target: str
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RestartScheduled:
    """The launcher will start a process again, this many seconds from now."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TookOver:
    """A process acts for a shard from now on, by a claim; it has a standby, or is one.

    ``waited_seconds``: how long the claim before had not been renewed.
    """

    process: str
    shard: int
    claim: int
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class WeightsSaved:
    """A file of weights was written."""

    path: str


@dataclass(frozen=True, slots=True)
class SampleGenerated:
    """Text that the trained model wrote."""

    text: str


@dataclass(frozen=True, slots=True)
class CorpusDescribed:
    """What the learners train on, as a JSON object in a text."""

    description: str


@dataclass(frozen=True, slots=True)
class LinkState:
    """A learner's control connection to a shard opened or broke."""

    shard: int
    connected: bool


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """Bytes that this process has sent and received since it started, by plane (totals)."""

    control_sent: int
    control_received: int
    data_sent: int
    data_received: int

    @classmethod
    def of(cls, stats: Stats) -> BytesMoved:
        """What a server or client has counted."""
        return cls(
            stats.control_bytes_sent,
            stats.control_bytes_received,
            stats.data_bytes_sent,
            stats.data_bytes_received,
        )

    @property
    def seen_from_there(self) -> BytesMoved:
        """The same bytes as the other side counts them."""
        return BytesMoved(
            self.control_received, self.control_sent, self.data_received, self.data_sent
        )


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """A learner has kept itself, or tried to: ``problem`` says why it could not.

    ``step``: own steps over all lives; ``copy_seconds``: what its step waited for;
    ``write_seconds``: what a thread of its own took; ``run_checkpoint``: the run's checkpoint
    that it belongs to.
    """

    step: int
    nbytes: int
    copy_seconds: float
    write_seconds: float
    problem: str = ""
    run_checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class WentBack:
    """The run was put back to a consistent checkpoint of the whole run.

    ``told``: which checkpoint, which newer ones were corrupt, and where what is newer is kept, in
    words.
    """

    told: str


@dataclass(frozen=True, slots=True)
class DeviceUsed:
    """A learner that has joined trains on this device: "cuda:0 (GPU 3), NVIDIA H100 80GB HBM3"."""

    learner: str
    device: str


@dataclass(frozen=True, slots=True)
class PayloadsEnded:
    """A shard keeps no more bodies for a replay, and why."""

    problem: str


Sample = (
    LossMeasured | Evaluated | ProcessStarted | ProcessEnded | EndRequested | FaultInjected
    | FaultEnded | RestartScheduled | TookOver | WeightsSaved | SampleGenerated | CorpusDescribed
    | LinkState | BytesMoved | CheckpointWritten | PayloadsEnded | WentBack | DeviceUsed
)  # fmt: skip


def evaluation_of(global_step: int, metrics: Mapping[str, float]) -> Evaluated:
    """What a workload's ``evaluate`` has returned, as a sample.

    Raises:
        ConfigError: there is no loss among it.

    >>> evaluation_of(7, {"loss": 2.5, "tokens": 64, "accuracy": 0.5}).metrics
    (Metric(name='accuracy', value=0.5),)
    """
    if "loss" not in metrics:
        raise ConfigError(
            f"evaluate() of the workload returned {sorted(metrics)} without 'loss': add it"
        )
    others = [Metric(k, float(v)) for k, v in metrics.items() if k not in ("loss", "tokens")]
    tokens = int(metrics.get("tokens", 0))
    return Evaluated(global_step, metrics["loss"], tokens, tuple(others))
