"""What a learner's machine remembers of its leased parts of the data."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from decoupled_diloco.protocol.data_leases.messages import Lease


@dataclass(slots=True)
class TrainedRun:
    """Steps from ``step`` on that trained ``stride`` batches each of one lease."""

    step: int
    steps: int
    trained: int
    stride: int

    def trained_by(self, step: int) -> int:
        """Batches of the lease that were trained when that step was finished."""
        return self.trained + self.stride * min(self.steps, step - self.step + 1)


@dataclass(slots=True)
class LeasedPart:
    """One lease at its learner; ``runs`` tells which steps trained what is not durable yet."""

    lease: Lease
    trained: int
    durable: int
    length: int | None = None
    repeated: int = 0
    runs: deque[TrainedRun] = field(default_factory=deque)

    @property
    def settled(self) -> bool:
        """Whether all of it is durable."""
        return self.length is not None and self.durable >= self.length


@dataclass(slots=True)
class DataView:
    """The data at this learner.

    Attributes:
        parts: Virtual parts of the data.
        want: Unfinished leases that it wants to hold.
        linked: Whether the coordinator can be told things.
        current: Number of the lease that the loop trains; 0: none.
        repeating: Whether the loop trains a part that it had finished.
        leave: Whether the loop should ask for a part before its next batch.
        leases: In the order in which they are trained.
        pending: Taken before the step that they belong to is finished: lease, batches, whether
            they are repeats.
        durable_step: Every fragment has an accepted contribution of this step or a later one.
        reported_step: Own step at the last report.
        stale: Whether something has become durable since.
        refused: Why there are no leases, once that is known.
    """

    parts: int
    want: int
    linked: bool
    current: int = 0
    repeating: bool = False
    leave: bool = False
    leases: dict[int, LeasedPart] = field(default_factory=dict)
    pending: list[tuple[int, int, bool]] = field(default_factory=list)
    durable_step: int = 0
    reported_step: int = 0
    stale: bool = False
    refused: str = ""

    def next_batch(self) -> tuple[Lease, int]:
        """The lease that the loop has now, and the number of its batch that comes next."""
        part = self.leases[self.current]
        waiting = sum(n for lease, n, again in self.pending if lease == self.current and not again)
        return part.lease, _again_from(part) if self.repeating else part.trained + waiting


def _again_from(part: LeasedPart) -> int:
    """Where a part is begun once more: where its lease began, unless nothing was left there."""
    start = part.lease.start
    return start if part.length is None or start < part.length else 0
