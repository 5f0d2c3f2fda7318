"""What a learner's machine is told about the transfer of a state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateCopied:
    """A copy of this learner's state is on the host, cut into chunks; see `StateOffered`."""

    learner: str
    attempt: int
    head_nbytes: int
    nbytes: int
    digest: str
    address: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class StateNotCopied:
    """This learner's state could not be copied, or not be delivered to the relay."""

    learner: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A chunk of the donor's state is here, its digest verified, and all before it."""

    attempt: int
    chunk: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StateArrived:
    """The donor's state is here, whole."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StateFailed:
    """The donor's state cannot be had this way."""

    attempt: int
    reason: str


TransferEvent = StateCopied | StateNotCopied | ChunkArrived | StateArrived | StateFailed
