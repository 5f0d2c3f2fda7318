"""Samples: measurements and reports outside of the protocol, such as losses, times and faults.

Samples are written to the event tape next to events and effects. They are for people and plots: no
state machine receives one. A number that is not finite (a diverged loss) is written as ``None``,
because JSON cannot represent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.transport.interface import Stats

if TYPE_CHECKING:
    from decoupled_diloco.workloads.workload import Picture

PICTURE_SIDE_MAX = 256
"""Most pixels of a picture's side, so that pictures do not dominate the tape."""


@dataclass(frozen=True, slots=True)
class LossMeasured:
    """A learner's training loss at one of its steps.

    ``step``: the learner's steps since it joined. ``tokens``: its tokens since it joined, including
    this step's. ``loss``: the mean over the step's batch.
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

    ``metrics``: the workload's other measurements, in its order. Those of the average of the
    weights follow; their names start with ``average_``.
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
    """A process ended with an exit code, or by a signal (then ``code`` is ``None``)."""

    name: str
    code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class EndRequested:
    """The launcher asks these running processes to stop; their end does not count as a failure."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FaultInjected:
    """A fault was caused on purpose, for example ``kill`` on ``learner-1``.

    ``processes``: all processes that it affects.
    """

    kind: str
    target: str
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FaultEnded:
    """A lasting fault that was caused on purpose was undone; see `FaultInjected`."""

    kind: str
    target: str
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RestartScheduled:
    """The launcher will restart a process this many seconds from now."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TookOver:
    """A process with a standby, or a standby, acts for a shard from now on, by a claim.

    ``waited_seconds``: the time since the last renewal of the previous claim.
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
    """Text that the trained model generated."""

    text: str


@dataclass(frozen=True, slots=True)
class GrayPicture:
    """A picture, from top to bottom: each row has a digit per pixel, 0 (background) to 9."""

    caption: str
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PicturesGenerated:
    """Pictures of held-out data, with the trained model's results as captions."""

    pictures: tuple[GrayPicture, ...]


@dataclass(frozen=True, slots=True)
class CorpusDescribed:
    """The learners' training data, described by a JSON object as text."""

    description: str


@dataclass(frozen=True, slots=True)
class LinkState:
    """A learner's control connection to a shard opened or broke."""

    shard: int
    connected: bool


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """Total bytes that this process has sent and received since it started, by plane."""

    control_sent: int
    control_received: int
    data_sent: int
    data_received: int

    @classmethod
    def of(cls, stats: Stats) -> BytesMoved:
        """Return the counters of a server or client."""
        return cls(
            stats.control_bytes_sent,
            stats.control_bytes_received,
            stats.data_bytes_sent,
            stats.data_bytes_received,
        )

    @property
    def seen_from_there(self) -> BytesMoved:
        """The same bytes as counted by the other side."""
        return BytesMoved(
            self.control_received, self.control_sent, self.data_received, self.data_sent
        )


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """A learner wrote its checkpoint, or failed to: then ``problem`` is the reason.

    ``step``: the learner's steps over all incarnations. ``copy_seconds``: time that its step was
    blocked. ``write_seconds``: time of the write in a background thread. ``run_checkpoint``: the
    checkpoint of the run that it belongs to.
    """

    step: int
    nbytes: int
    copy_seconds: float
    write_seconds: float
    problem: str = ""
    run_checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class WentBack:
    """The run was reset to a consistent checkpoint of the whole run.

    ``told``: text that names the checkpoint, the newer corrupt ones, and the folder to which newer
    files were moved.
    """

    told: str


@dataclass(frozen=True, slots=True)
class DeviceUsed:
    """A learner that joined trains on this device: "cuda:0 (GPU 3), NVIDIA H100 80GB HBM3"."""

    learner: str
    device: str


@dataclass(frozen=True, slots=True)
class PayloadsEnded:
    """A shard stopped recording payloads for a replay; ``problem`` is the reason."""

    problem: str


@dataclass(frozen=True, slots=True)
class StoreMirrored:
    """The mirror of the run in an object store, after each state or failed attempt.

    ``state``: the number of the newest complete state. ``nbytes``: bytes that were uploaded since
    the last record. ``backlog_bytes``: bytes of the run folder that are not uploaded. ``problem``:
    why the last attempt failed; training continues.
    """

    address: str
    state: int
    nbytes: int
    backlog_bytes: int
    problem: str = ""


Sample = (
    LossMeasured | Evaluated | ProcessStarted | ProcessEnded | EndRequested | FaultInjected
    | FaultEnded | RestartScheduled | TookOver | WeightsSaved | SampleGenerated | CorpusDescribed
    | LinkState | BytesMoved | CheckpointWritten | PayloadsEnded | WentBack | DeviceUsed
    | StoreMirrored | PicturesGenerated
)  # fmt: skip


def evaluation_of(global_step: int, metrics: Mapping[str, float]) -> Evaluated:
    """Return the result of a workload's ``evaluate`` as a sample.

    Raises:
        ConfigError: The result has no loss.

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


def pictures_of(pictures: Iterable[Picture]) -> PicturesGenerated:
    """Return the result of a workload's ``pictures`` as a sample.

    Raises:
        ConfigError: A picture is too large for the tape, or its pixels are not a matrix.

    >>> import torch
    >>> pictures_of([("two dots", torch.eye(2))]).pictures
    (GrayPicture(caption='two dots', rows=('90', '09')),)
    """
    drawn = []
    for caption, pixels in pictures:
        shape = tuple(pixels.shape)
        if len(shape) != 2 or max(shape) > PICTURE_SIDE_MAX:
            raise ConfigError(
                f"pictures() of the workload returned pixels of shape={shape}: use two dimensions, "
                f"of at most {PICTURE_SIDE_MAX} pixels each"
            )
        levels = (9 * pixels.float().nan_to_num(0).clamp(0, 1)).round().int().tolist()
        drawn.append(GrayPicture(caption, tuple("".join(map(str, row)) for row in levels)))
    return PicturesGenerated(tuple(drawn))
