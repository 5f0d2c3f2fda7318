"""The coordinator's knowledge of a run, as plain data, for its machine and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from decoupled_diloco.protocol.features import partitions as leases
from decoupled_diloco.protocol.features.partitions import LeaseBook
from decoupled_diloco.protocol.messages import Revision

Phase = Literal["gathering", "seeding", "running", "ending", "finished"]


@dataclass(frozen=True, slots=True)
class Enrolled:
    """One learner name: its newest incarnation, the process that has it, and the name's number.

    ``index`` is 0 or more, unique to the name and never changed.
    """

    epoch: int
    nonce: str
    present: bool
    index: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """A user has ended the run. This holds until the run is resumed with another budget."""

    by: str
    max_steps: int | None
    max_tokens: int | None


@dataclass(slots=True)
class CoordinatorState:
    """The state that must survive a crash of the coordinator, as plain data.

    ``learners`` has every name that ever joined. ``former`` lists, per shard, the nonces of
    replaced processes. ``seed`` is the learner that provides the initial weights, in ``attempt``.
    ``ready`` and ``swept`` list the shards that hold the initial weights, or have finished the
    closing sweep. ``stopped`` is set if a user has ended the run.
    """

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
    stopped: Stopped | None = None


def copied(state: CoordinatorState) -> CoordinatorState:
    """Return a copy that shares only immutable values. One is made for every learner that joins."""
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
