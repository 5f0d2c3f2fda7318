"""Facts that the state machines are told, in the past tense. Closed unions, one per machine.

All three machines hear of their peers in the same words: `Connected`, `Received`, `Lost`. A peer is
named as in `peers`.
"""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.protocol.checkpoints.events import (
    CheckpointHeard,
    CheckpointWanted,
    PartWritten,
)
from decoupled_diloco.protocol.data_leases.events import DataEvent
from decoupled_diloco.protocol.messages import Hello, Message, Role, ShardHello, StepReport
from decoupled_diloco.protocol.transfer.events import TransferEvent
from decoupled_diloco.protocol.versions import Asking, Version


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that ``deadline()`` named has come. Early, late and double ones are harmless."""


@dataclass(frozen=True, slots=True)
class Joining:
    """How a learner or observer asks the coordinator to be let in.

    ``difference`` is empty when its layout matches (or is the first), else names the first
    differing tensor.
    """

    nonce: str
    role: Role
    fingerprint: str
    difference: str


@dataclass(frozen=True, slots=True)
class Connected:
    """A peer is there. ``greeting``: what it said first on this connection; we dialled it if none.

    Who greets is let in or turned away, and is no peer before it is let in.
    """

    peer: str
    greeting: Hello | Joining | ShardHello | None = None
    connection: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A peer said something. ``nonce``: which process of that name; empty where only one can be."""

    peer: str
    message: Message
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to a peer is gone; ``nonce`` as in `Received`."""

    peer: str
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class DurableCopy:
    """A fragment's published copy as the shard's own disk has it, whole."""

    fragment: int
    version: Version
    digest: str


@dataclass(frozen=True, slots=True)
class KnownLearner:
    """A learner id as an earlier life of a shard knew it: the tokens of which epoch it counted."""

    learner: str
    epoch: int
    nonce: str
    tokens: int


@dataclass(frozen=True, slots=True)
class KnownNorms:
    """The norms (and steps) that the gate of a fragment judges by."""

    fragment: int
    samples: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class ShardMemory:
    """What a shard knew besides its copies, at its last merge."""

    clock: int
    tokens_retired: int
    learners: tuple[KnownLearner, ...] = ()
    norms: tuple[KnownNorms, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskRead:
    """What an earlier life of this shard has left on its disk; told before `ShardAdmitted`.

    ``exact``: it is its part of a checkpoint that the whole run goes back to; whoever holds
    something newer has it from a time that is no more.
    """

    copies: tuple[DurableCopy, ...]
    memory: ShardMemory | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """Some byte came from these learners since the last time (renews their leases)."""

    learners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reported:
    """Step reports that a shell has at hand at once, each with its learner, as they came.

    As ``Received`` one by one at the same instant, except that rounds and clock are looked at once.
    """

    reports: tuple[tuple[str, StepReport], ...]


@dataclass(frozen=True, slots=True)
class BodyArrived:
    """A contribution's body is here, whole, with the announced digest, finite; ``norm`` is ‖d‖.

    ``alike``: learners whose contributions to the same round are nearly parallel to it.
    """

    learner: str
    epoch: int
    fragment: int
    ask: Asking
    base: Version
    steps: int
    tokens: int
    nbytes: int
    norm: float = 0.0
    alike: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BodyCorrupt:
    """A contribution's body is wrong: truncated, another digest, or else not finite."""

    learner: str
    fragment: int
    ask: Asking
    reason: str
    is_finite: bool = True


@dataclass(frozen=True, slots=True)
class CopyArrived:
    """A whole fragment is here and installed (initial weights, or a restored copy)."""

    learner: str
    fragment: int
    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class CopyCorrupt:
    """A whole fragment did not come, or came wrong."""

    learner: str
    fragment: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """The initial weights of every owned fragment were read from the run's file."""

    digests: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """The worker has merged a round and made the new published copy."""

    round: int
    fragment: int
    digest: str


@dataclass(frozen=True, slots=True)
class MergeFailed:
    """The worker could not merge a round; the fragment is as it was."""

    round: int
    fragment: int
    reason: str


SyncerEvent = (
    Tick
    | Connected
    | Received
    | Lost
    | DiskRead
    | Heard
    | Reported
    | BodyArrived
    | BodyCorrupt
    | CopyArrived
    | CopyCorrupt
    | WeightsLoaded
    | Merged
    | MergeFailed
    | CheckpointHeard
    | PartWritten
)


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The training loop is at a step boundary. ``tokens`` were trained since the last one.

    ``batches``: what was taken meanwhile of the leased part that the loop has now.
    """

    tokens: int
    batches: int = 0


@dataclass(frozen=True, slots=True)
class Paused:
    """The training loop has stopped stepping and asks what there is to do at this boundary."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The process is told to end; its loop steps no more, and what it has is to be drained."""

    why: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """A published copy is here, its digest verified, staged for the next step boundary."""

    fragment: int
    version: Version


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A published copy could not be had, or its digest was wrong."""

    fragment: int
    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class UploadFailed:
    """A contribution's body could not be delivered."""

    fragment: int
    ask: Asking
    reason: str


@dataclass(frozen=True, slots=True)
class BodyEncoded:
    """A contribution's body is ready to be sent, with this digest."""

    fragment: int
    ask: Asking
    digest: str


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """A whole fragment that a shard had asked for could not be delivered."""

    shard: int
    fragment: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class KeptFragment:
    """A fragment as this learner's own checkpoint has it.

    ``steps`` and ``tokens``: what is trained in its parameters beyond ``version``, whose ``digest``
    and ``seal`` are those of its announcement.
    """

    fragment: int
    version: Version
    steps: int
    tokens: int
    digest: str = ""
    seal: str = ""


@dataclass(frozen=True, slots=True)
class Began:
    """The run has let this process in; told before anything else.

    ``kept``: what its own checkpoint has, every fragment; empty: it has none. ``why``: where that
    comes from, or why there is none, in words. ``seeks_donor``: then it would take the optimizer's
    state from a healthy learner. ``gives``: it gives its own to others.
    """

    kept: tuple[KeptFragment, ...] = ()
    why: str = ""
    seeks_donor: bool = False
    gives: bool = False


@dataclass(frozen=True, slots=True)
class RandomDrawn:
    """The loop draws random numbers in every step: generators, and their states by now."""

    states: tuple[str, ...]


LearnerEvent = (
    Tick
    | Connected
    | Received
    | Lost
    | Began
    | StepFinished
    | Paused
    | DrainAsked
    | RandomDrawn
    | Fetched
    | FetchFailed
    | BodyEncoded
    | UploadFailed
    | CopyFailed
    | TransferEvent
    | DataEvent
    | CheckpointHeard
    | PartWritten
)
CoordinatorEvent = Tick | Connected | Received | Lost | CheckpointWanted
