"""Orders that the state machines give. Closed unions; every one says ``why``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decoupled_diloco.protocol.checkpoints.effects import (
    BeginCheckpoint,
    ForgetCheckpoints,
    KeepCheckpoint,
    TakeCheckpoint,
)
from decoupled_diloco.protocol.data_leases.effects import Enter
from decoupled_diloco.protocol.messages import Message, ToLearner
from decoupled_diloco.protocol.transfer.effects import TransferOfCoordinator, TransferOfLearner
from decoupled_diloco.protocol.versions import Asking, Version


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to one peer, if it is connected."""

    peer: str
    message: Message
    why: str


@dataclass(frozen=True, slots=True)
class Accept:
    """Bind this connection to the learner (closing its older one) and send the welcome."""

    connection: int
    learner: str
    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Send the refusal on this connection and close it."""

    connection: int
    reason: str
    final: bool
    why: str


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send a message to every connected learner and observer."""

    message: ToLearner
    why: str


@dataclass(frozen=True, slots=True)
class Expect:
    """Be ready for a contribution's body at this path, from this learner alone.

    ``round``: the fragment's open round; 0: there is none. ``codec``: of the body.
    """

    path: str
    learner: str
    epoch: int
    round: int
    fragment: int
    ask: Asking
    why: str
    codec: str


@dataclass(frozen=True, slots=True)
class ExpectCopy:
    """Be ready for a whole fragment in fp32 at this path, from this learner alone."""

    path: str
    learner: str
    fragment: int
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class Unexpect:
    """Stop expecting a body; refuse it if it still comes."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold a verified body into the fragment's accumulator. The order of these is the fold order.

    ``scale``: what its values are multiplied by first; less than 1 where its norm was clipped.
    ``discount``: what its weight is multiplied by; less than 1 where lateness counts against it.
    """

    fragment: int
    learner: str
    ask: Asking
    steps: float
    tokens: float
    why: str
    scale: float = 1.0
    discount: float = 1.0


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a body that arrived and is not wanted."""

    fragment: int
    learner: str
    ask: Asking
    why: str


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge what was folded, step the outer optimizer, make the published copy ``version``."""

    round: int
    fragment: int
    version: Version
    base: Version
    why: str


@dataclass(frozen=True, slots=True)
class Install:
    """The fragment's published copy, as it was copied or loaded, now bears this version.

    ``digest``: of the copy that is meant; another one that has come meanwhile is forgotten.
    """

    fragment: int
    version: Version
    why: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Read the initial weights of every owned fragment from the run's file."""

    why: str


@dataclass(frozen=True, slots=True)
class Evict:
    """A learner is no longer live; close its connection if there is one."""

    learner: str
    reason: str
    why: str


NOTHING_NEW = "nothing new"
"""Why a learner declines that was not trained since it last reported a fragment."""


NOBODY_ASKED = Asking(0, 0)
"""On tapes from before askings were named."""


@dataclass(frozen=True, slots=True)
class Participant:
    """One contribution to a round, for observers.

    Seconds count from the round's opening; what is late was asked for before it. ``state``:
    ``folded``; ``late``: under way when the round merged, and goes into the next; ``declined``;
    ``refused``; ``gone``. ``age``: by how many versions a folded one is late.
    """

    learner: str
    state: str
    steps: int
    tokens: int
    asked_seconds: float
    delivered_seconds: float | None
    reason: str
    ask: Asking = NOBODY_ASKED
    age: int = 0


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """A round is open: its grace window, and the moving averages that it was derived from (Eq. 3).

    Rounds are numbered within a ``term``. ``closing``: it belongs to the closing sweep, which has
    no window and asks everyone. ``delivery_seconds``: with its quorum in, it waits so long at most.
    """

    round: int
    fragment: int
    tick: int
    base: Version
    closing: bool
    grace_seconds: float
    slack_seconds: float
    step_seconds: float
    quorum_average_seconds: float
    merge_average_seconds: float
    broadcast_average_seconds: float
    why: str
    term: int = 0
    delivery_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """A round is over: everything that a metric or an explanation needs.

    Seconds count from the round's opening; ``None``: did not happen. The averages are those at the
    opening, as in `RoundOpened`; ``None`` on tapes from before they were told. ``quorum_learner``:
    with whom the quorum was complete; empty: it never was, or the tape is from before it was told.
    """

    round: int
    fragment: int
    tick: int
    version: Version | None
    verdict: Literal["merged", "abandoned"]
    reason: str
    participants: tuple[Participant, ...]
    quorum_seconds: float | None
    grace_seconds: float
    closed_seconds: float | None
    uploaded_seconds: float | None
    finished_seconds: float
    step_seconds: float
    slack_seconds: float
    why: str
    base: Version | None = None
    quorum_average_seconds: float | None = None
    merge_average_seconds: float | None = None
    broadcast_average_seconds: float | None = None
    quorum_learner: str = ""
    term: int = 0

    @property
    def given_up(self) -> bool:
        """Whether it failed; one in which everybody had nothing new, as at the end, did not."""
        idle = all(p.state == "declined" and p.reason == NOTHING_NEW for p in self.participants)
        return self.verdict == "abandoned" and not (idle and self.participants)


@dataclass(frozen=True, slots=True)
class ClockAdvanced:
    """The shard's global step has moved."""

    clock: int
    live: int
    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """A fact for people: on the tape, and in the log; ``warns``: somebody should act on it."""

    text: str
    why: str
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """The process has nothing left to do."""

    why: str


SyncerEffect = (
    Accept
    | Reject
    | Send
    | Broadcast
    | Expect
    | ExpectCopy
    | Unexpect
    | Fold
    | Drop
    | Merge
    | Install
    | LoadWeights
    | Evict
    | RoundOpened
    | RoundFinished
    | ClockAdvanced
    | TakeCheckpoint
    | ForgetCheckpoints
    | Note
    | Stop
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy this fragment's parameters as they are at this step boundary."""

    fragment: int
    base: Version
    step: int
    why: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Take the staged published copy into the parameters; the held one again, if none is staged.

    ``mode``: ``overwrite`` θ ← Θ̂; ``carry`` θ ← Θ̂ + (θ − snapshot); ``rebase``
    θ ← Θ̂ + (θ − Θ̂_base); ``blend`` θ ← αθ + (1−α)Θ̂.
    """

    fragment: int
    version: Version
    mode: Literal["overwrite", "carry", "rebase", "blend"]
    discarded_tokens: int
    why: str


@dataclass(frozen=True, slots=True)
class Relabel:
    """The newest copy that is here now bears another version; its values are the same.

    ``staged``: it waits to be applied, and what was sent before it still counts; else it is held,
    and what was sent is gone.
    """

    fragment: int
    version: Version
    why: str
    staged: bool = False


@dataclass(frozen=True, slots=True)
class SendBody:
    """Encode the snapshot against its base, tell its digest (`BodyEncoded`), deliver the body."""

    shard: int
    fragment: int
    ask: Asking
    base: Version
    steps: int
    tokens: int
    codec: str
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Settle:
    """A contribution's residual is known: it goes with the fragment's next one (rule 19).

    ``gone``: the body is merged, or may be, and what it lacked is what is left; else it is merged
    nowhere, and what was left before it is left again.
    """

    fragment: int
    ask: Asking
    gone: bool
    why: str


@dataclass(frozen=True, slots=True)
class ForgetResidual:
    """What is left of earlier contributions of this fragment may be merged: drop it."""

    fragment: int
    why: str


@dataclass(frozen=True, slots=True)
class SendCopy:
    """Deliver a whole fragment in fp32: the published copy, or (no version) the parameters."""

    shard: int
    fragment: int
    attempt: int
    version: Version | None
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get a published copy: the difference to what is held or staged, or the whole.

    ``nbytes``: of a difference that leaves out buffers; 0: of the usual size.
    """

    shard: int
    fragment: int
    version: Version
    path: str
    whole: bool
    digest: str
    why: str
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """Do not start the next step before ``Release`` (synchronous baselines only)."""

    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """The next step may start."""

    why: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Every fragment of the published copy is held: training may begin from it."""

    why: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """How this process came by its state, for observers; said together with ``Ready``.

    ``way``: from its own ``checkpoint``, from a ``donor``'s optimizer and data position, or from
    the ``published`` copies alone, with a fresh optimizer. ``kept``: fragments whose own progress
    goes on; ``overwritten``: those that the run has moved on from. ``nbytes``: of a donor's state.
    """

    way: Literal["checkpoint", "donor", "published"]
    seconds: float
    kept: int
    overwritten: int
    why: str
    donor: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class EndTraining:
    """The run's budget is spent: ``step()`` says so at this boundary."""

    why: str


@dataclass(frozen=True, slots=True)
class RunOver:
    """Every shard has finished; nothing more will come."""

    why: str


@dataclass(frozen=True, slots=True)
class Expelled:
    """A shard refuses this learner for good: another one bears its id, or the epoch is old."""

    reason: str
    why: str


LearnerEffect = (
    Snapshot
    | Apply
    | Relabel
    | Send
    | SendBody
    | Settle
    | ForgetResidual
    | SendCopy
    | Fetch
    | Hold
    | Release
    | Ready
    | Recovered
    | TransferOfLearner
    | EndTraining
    | RunOver
    | Expelled
    | TakeCheckpoint
    | ForgetCheckpoints
    | Note
)


@dataclass(frozen=True, slots=True)
class Admit:
    """Answer a join: this epoch. The shell adds settings, layout and addresses.

    ``index``: the name's number, 0 and up. ``count``: the highest number so far, plus 1.
    """

    connection: int
    learner: str
    epoch: int
    why: str
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Deny:
    """Answer a join: no."""

    connection: int
    reason: str
    retry: bool
    why: str


@dataclass(frozen=True, slots=True)
class AdoptLayout:
    """The layout of this join is the run's layout from now on."""

    connection: int
    fingerprint: str
    why: str


@dataclass(frozen=True, slots=True)
class AdmitShard:
    """Answer a shard: its term, and whether the run has begun; then the layout if known."""

    shard: int
    term: int
    begun: bool
    why: str


@dataclass(frozen=True, slots=True)
class DenyShard:
    """Answer a shard's greeting: another process acts for it now. It keeps its connection."""

    shard: int
    nonce: str
    reason: str
    why: str


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the snapshot durably before any later effect of this list is carried out.

    ``learner``: only this one's record has changed since the last that said so.
    """

    why: str
    learner: str = ""


CoordinatorEffect = (
    BeginCheckpoint
    | KeepCheckpoint
    | Enter
    | Admit
    | Deny
    | Send
    | TransferOfCoordinator
    | AdoptLayout
    | AdmitShard
    | DenyShard
    | Persist
    | Note
)
