"""What the coordinator knows of a run, as plain data: its machine's and its checkpoints'."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from decoupled_diloco.protocol.data_leases import coordinator as leases
from decoupled_diloco.protocol.data_leases.coordinator import LeaseBook
from decoupled_diloco.protocol.revisions import Revision

Phase = Literal["gathering", "seeding", "running", "ending", "finished"]


@dataclass(frozen=True, slots=True)
class Enrolled:
    """One learner id: its newest epoch, the process that bears it, and the name's number.

    ``index``: 0 and up, different for every name, never changed.
    """

    epoch: int
    nonce: str
    present: bool
    index: int


@dataclass(slots=True)
class CoordinatorState:
    """What must survive a crash of the coordinator, all of it plain data."""

    phase: Phase = "gathering"
    fingerprint: str = ""
    learners: dict[str, Enrolled] = field(default_factory=dict)
    terms: dict[int, int] = field(default_factory=dict)
    nonces: dict[int, str] = field(default_factory=dict)
    claims: dict[int, int] = field(default_factory=dict)
    former: dict[int, tuple[str, ...]] = field(default_factory=dict)
    seed: str = ""
    attempt: int = 0
    ready: set[int] = field(default_factory=set)
    swept: set[int] = field(default_factory=set)
    clocks: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    data: LeaseBook = field(default_factory=LeaseBook)
    revision: Revision | None = None
    checkpoint: int = 0
    checkpoints_kept: list[int] = field(default_factory=list)


def copied(state: CoordinatorState) -> CoordinatorState:
    """A copy that shares only what never changes; one is made for every learner that joins."""
    return replace(
        state,
        learners=dict(state.learners),
        terms=dict(state.terms),
        nonces=dict(state.nonces),
        claims=dict(state.claims),
        former=dict(state.former),
        ready=set(state.ready),
        swept=set(state.swept),
        clocks=dict(state.clocks),
        data=leases.copied(state.data),
        checkpoints_kept=list(state.checkpoints_kept),
    )
