"""Orders about a state that one learner gives to another: to donor, joiner and relay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyState:
    """Copy what this learner gives away as it is at this step boundary, and serve it."""

    learner: str
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class RelayState:
    """Deliver the copy for this learner to the relay, chunk by chunk, as it takes them."""

    learner: str
    attempt: int
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class ForgetState:
    """The copy for this learner is not wanted any more."""

    learner: str
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class FetchState:
    """Get a donor's state: head and chunks, from the donor itself or (``path``) from the relay."""

    donor: str
    attempt: int
    head_nbytes: int
    nbytes: int
    digest: str
    address: str
    path: str
    why: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class DropState:
    """Stop getting a donor's state."""

    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class OpenRelay:
    """Take a donor's chunks in and offer them to the learner, a few at a time."""

    learner: str
    donor: str
    attempt: int
    path: str
    head_nbytes: int
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class RelayOn:
    """The learner has this chunk: forget it, and take further ones in."""

    path: str
    chunk: int
    why: str


@dataclass(frozen=True, slots=True)
class CloseRelay:
    """Forget everything of this relay."""

    path: str
    why: str


TransferOfLearner = CopyState | RelayState | ForgetState | FetchState | DropState
TransferOfCoordinator = OpenRelay | RelayOn | CloseRelay
