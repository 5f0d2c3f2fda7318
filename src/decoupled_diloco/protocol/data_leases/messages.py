"""What learners and the coordinator say to each other about leased data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeaseState:
    """One lease as its learner has it: batches trained from 0 on, and how many are durable.

    ``ended``: the part has no more batches than ``trained``. ``repeated``: batches trained beyond
    them, because no other lease was left.
    """

    lease: int
    trained: int
    durable: int
    ended: bool
    repeated: int


@dataclass(frozen=True, slots=True)
class DataReport:
    """Learner → coordinator: all leases that I hold, and how many unfinished ones I want to hold.

    ``want`` 0: I train no more, take back what is not durable.
    """

    parts: int
    want: int
    leases: tuple[LeaseState, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to train a part, from batch ``start`` on; ``turn``: the pass over the data."""

    number: int
    turn: int
    part: int
    start: int


@dataclass(frozen=True, slots=True)
class LeasesGiven:
    """Coordinator → learner: new leases, and those that are over: durable, or taken back."""

    leases: tuple[Lease, ...]
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DataRefused:
    """Coordinator → learner: there are no leases for these data, and why."""

    reason: str
