"""Facts that the state machines are told, in the past tense. Closed unions, one per machine."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.protocol.messages import (
    FromLearner,
    FromMember,
    FromShard,
    Hello,
    Role,
    ShardAdmitted,
    StepReport,
    ToLearner,
    ToMember,
    ToShard,
)
from decoupled_diloco.protocol.versions import Asking, Version


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that ``deadline()`` named has come. Early, late and double ones are harmless."""


# ---- syncer


@dataclass(frozen=True, slots=True)
class TermGranted:
    """The coordinator let this shard in, under a new term."""

    admitted: ShardAdmitted


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
    """What an earlier life of this shard has left on its disk; told before ``TermGranted``.

    ``exact``: it is its part of a checkpoint that the whole run goes back to; whoever holds
    something newer has it from a time that is no more.
    """

    copies: tuple[DurableCopy, ...]
    memory: ShardMemory | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Ordered:
    """The coordinator said something."""

    message: ToShard


@dataclass(frozen=True, slots=True)
class Greeted:
    """A learner or observer said hello on a new connection."""

    connection: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class Heard:
    """Some byte came from these learners since the last time (renews their leases)."""

    learners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """A learner's current connection brought a control message."""

    learner: str
    message: FromLearner


@dataclass(frozen=True, slots=True)
class Reported:
    """Step reports that a shell has at hand at once, each with its learner, as they came.

    As ``Said`` one by one at the same instant, except that rounds and clock are looked at once.
    """

    reports: tuple[tuple[str, StepReport], ...]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A learner's current connection is gone."""

    learner: str


@dataclass(frozen=True, slots=True)
class BodyArrived:
    """A contribution's body is here, whole, with the announced digest, finite; ``norm`` is ‖d‖."""

    learner: str
    epoch: int
    fragment: int
    ask: Asking
    base: Version
    steps: int
    tokens: int
    nbytes: int
    norm: float = 0.0


@dataclass(frozen=True, slots=True)
class BodyCorrupt:
    """A contribution's body is wrong: truncated, another digest, not finite."""

    learner: str
    fragment: int
    ask: Asking
    reason: str


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


@dataclass(frozen=True, slots=True)
class CheckpointHeard:
    """A message with this checkpoint number has come; told before the message itself."""

    number: int


@dataclass(frozen=True, slots=True)
class PartWritten:
    """This process's part of a checkpoint is on its disk; or it cannot be, and why."""

    number: int
    digest: str
    nbytes: int
    problem: str = ""


SyncerEvent = (
    Tick
    | DiskRead
    | TermGranted
    | Ordered
    | Greeted
    | Heard
    | Said
    | Reported
    | Disconnected
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


# ---- learner


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
class DataOpened:
    """The training loop takes its batches from leased parts; it holds ``ahead`` spare leases."""

    parts: int
    ahead: int


@dataclass(frozen=True, slots=True)
class PartWanted:
    """The training loop needs a part; the one it had, if any, has ``batches`` and no more.

    ``None``: it had none, or was asked to leave it. ``taken``: batches of it that belong to the
    step that is under way.
    """

    batches: int | None
    taken: int = 0


@dataclass(frozen=True, slots=True)
class DataClosed:
    """The training loop has ended: what it holds of the data goes to others."""


@dataclass(frozen=True, slots=True)
class Linked:
    """A connection to a shard is open: say hello."""

    shard: int


@dataclass(frozen=True, slots=True)
class Unlinked:
    """The connection to a shard is gone."""

    shard: int


@dataclass(frozen=True, slots=True)
class Told:
    """A shard said something."""

    shard: int
    message: ToLearner


@dataclass(frozen=True, slots=True)
class CoordinatorLinked:
    """The coordinator has let this process in, or in again: it can be told things."""


@dataclass(frozen=True, slots=True)
class CoordinatorTold:
    """The coordinator said something."""

    message: ToMember


@dataclass(frozen=True, slots=True)
class CoordinatorUnlinked:
    """The connection to the coordinator is gone."""


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
class StateCopied:
    """A copy of this learner's state is on the host, checkpoint into chunks; see `StateOffered`."""

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


LearnerEvent = (
    Tick
    | Began
    | StateCopied
    | StateNotCopied
    | ChunkArrived
    | StateArrived
    | StateFailed
    | StepFinished
    | Paused
    | DrainAsked
    | DataOpened
    | PartWanted
    | DataClosed
    | Linked
    | Unlinked
    | Told
    | CoordinatorLinked
    | CoordinatorTold
    | CoordinatorUnlinked
    | Fetched
    | FetchFailed
    | BodyEncoded
    | UploadFailed
    | CopyFailed
    | CheckpointHeard
    | PartWritten
)


# ---- coordinator


@dataclass(frozen=True, slots=True)
class JoinAsked:
    """A learner or observer asked to join.

    ``difference`` is empty when its layout matches (or is the first), else names the first
    differing tensor.
    """

    connection: int
    learner: str
    nonce: str
    role: Role
    fingerprint: str
    difference: str


@dataclass(frozen=True, slots=True)
class MemberSaid:
    """A learner that has been let in said something to the coordinator."""

    learner: str
    nonce: str
    message: FromMember


@dataclass(frozen=True, slots=True)
class LearnerGone:
    """The connection through which a learner had joined is gone."""

    learner: str
    nonce: str


@dataclass(frozen=True, slots=True)
class ShardGreeted:
    """A shard said hello; ``claim``: the number of its claim, 0 where no other may act for it."""

    shard: int
    nonce: str
    claim: int = 0


@dataclass(frozen=True, slots=True)
class ShardGone:
    """The connection to a shard is gone."""

    shard: int


@dataclass(frozen=True, slots=True)
class ShardSaid:
    """A shard said something."""

    shard: int
    message: FromShard


@dataclass(frozen=True, slots=True)
class CheckpointWanted:
    """Somebody asks for a checkpoint of the run now."""


CoordinatorEvent = (
    Tick
    | JoinAsked
    | MemberSaid
    | LearnerGone
    | ShardGreeted
    | ShardGone
    | ShardSaid
    | CheckpointWanted
)
