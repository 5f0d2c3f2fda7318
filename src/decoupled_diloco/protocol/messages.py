"""What processes say to each other on the control plane. Facts only; bodies travel elsewhere.

Every class is a frozen dataclass of plain values, so that a message is one JSON object. A body is
named by a path that the control plane gives out; who holds the path may be another host. The
messages of what stands beside the rules of the method are in `transfer`, `checkpoints` and
`data_leases`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from decoupled_diloco.protocol.checkpoints.messages import CheckpointOrdered, PartSaved
from decoupled_diloco.protocol.data_leases.messages import DataRefused, DataReport, LeasesGiven
from decoupled_diloco.protocol.options import Alignment
from decoupled_diloco.protocol.revisions import Demand, Revision
from decoupled_diloco.protocol.transfer import messages as transfer
from decoupled_diloco.protocol.versions import Asking as Asking
from decoupled_diloco.protocol.versions import Holding as Holding
from decoupled_diloco.protocol.versions import Version as Version

Role = Literal["learner", "observer"]
LOSS_MAX = 1e30
"""A loss that is not below it is as good as none: the training has diverged."""

Verdict = Literal["accepted", "refused", "unfit", "behind", "abandoned"]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on every connection to a shard.

    ``step`` counts the learner's own steps in this epoch; ``clock`` is the latest global step
    that it knows of this shard (a restarted shard takes it up again). ``run_step`` is its run step
    s_m at this shard if it has been told one before: who was away goes on counting. ``asks``: what
    it has sent to this shard, or is sending, and has no outcome of.
    """

    learner: str
    epoch: int
    nonce: str
    role: Role
    step: int
    clock: int
    run_step: int | None
    held: tuple[Holding, ...]
    asks: tuple[Asking, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReport:
    """One more inner step: own steps and tokens in this epoch, and the mean seconds of a step.

    ``discarded_tokens``: tokens whose training was overwritten, summed over the fragments (a
    fragment is one of P parts of the model). ``loss``: the step's training loss, if the loop has
    told it; one that is no number or not below ``LOSS_MAX`` is told as that. Nothing is decided by
    either; they are for people.
    """

    step: int
    tokens: int
    seconds: float
    discarded_tokens: int = 0
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """Announces the body of a contribution; counters are those of its snapshot.

    ``digest``: of the body with all buffers, also of those that it leaves out because they are as
    in ``base``.
    """

    fragment: int
    ask: Asking
    base: Version
    steps: int
    tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class Decline:
    """No contribution to this asking, and why.

    ``nothing_new``: everything that it has trained is merged already; else it may be asked again.
    """

    fragment: int
    ask: Asking
    nothing_new: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Announces the body of a whole fragment that the shard asked for (seed or restore).

    ``attempt`` is the asking that it answers.
    """

    fragment: int
    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class CopyDeclined:
    """The whole fragment that was asked for cannot be had from here, and why."""

    fragment: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class CopyTook:
    """A published copy of this fragment has come, and has kept the link busy for so long.

    Said only where H and τ follow the links (rule 20).
    """

    fragment: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ahead:
    """Where learners wait for one another: its run step at another shard, which is further."""

    run_step: int


@dataclass(frozen=True, slots=True)
class Draining:
    """The learner is about to go and steps no more; of these fragments it has something new."""

    fragments: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The learner goes, on purpose."""

    reason: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Accepted: the shard's term and clock; own step ``step`` is run step ``run_step``.

    ``news``: of so many fragments a newer copy is announced next. ``asks``: what the shard still
    waits for, or has and has not merged yet, of this learner; every other asking is over.
    """

    shard: int
    term: int
    clock: int
    step: int
    run_step: int
    news: int = 0
    asks: tuple[Asking, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not accepted. ``final``: trying again cannot help."""

    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class Pull:
    """Asks for one fragment: against which base, in which codec, where to.

    ``alignment``: how who answers takes the next copy (rule 7). ``final`` marks the closing sweep:
    answered once the learner has stopped stepping. ``coming``: the fragments that a learner in
    arrears will probably be asked for next, so that it has snapshots of them ready.
    """

    fragment: int
    ask: Asking
    base: Version
    tick: int
    codec: str
    alignment: Alignment
    path: str
    final: bool
    coming: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a contribution; ``version`` is what it went into, when accepted.

    ``unfit``: refused for its values, too large or not finite, and would be again. ``abandoned``:
    the merge failed, and it went with it.
    """

    fragment: int
    ask: Asking
    verdict: Verdict
    reason: str
    version: Version | None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A fragment's round was given up: nobody need stop and wait for its next copy.

    What was sent for it, and is neither refused nor abandoned, goes into the next round.
    """

    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class Published:
    """A new published copy. Who holds ``base`` fetches the difference, everybody else the whole.

    An empty ``difference`` with a ``base`` means that only the version's name has changed.
    ``seal``: by it the shard will know the version again as one of its own. ``difference_nbytes``:
    the difference leaves out buffers that have not changed, and has this size; 0: it has them all.
    """

    fragment: int
    version: Version
    base: Version | None
    digest: str
    difference: str
    whole: str
    clock: int
    seal: str = ""
    difference_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Shifted:
    """The clock's quorum changed: every learner's run step moves up by this much (rule 1)."""

    by: int


@dataclass(frozen=True, slots=True)
class CopyWanted:
    """Asks for a whole fragment in fp32: the initial weights, or a copy that the shard lost.

    ``version`` is ``None`` for the learner's own parameters.
    """

    fragment: int
    attempt: int
    version: Version | None
    path: str


@dataclass(frozen=True, slots=True)
class DrainRefused:
    """Who is about to go need not wait: nothing that it has can be merged now, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class SameData:
    """Shard or coordinator → learner: you seem to train on this other learner's data, and why."""

    other: str
    why: str


@dataclass(frozen=True, slots=True)
class RandomNumbers:
    """Learner → coordinator: generators that the loop draws from in every step, and their states.

    All learners say it after equally many steps of their own.
    """

    states: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """The budget is spent: stop stepping, the closing sweep begins."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over; the last published copies are the result."""


@dataclass(frozen=True, slots=True)
class Join:
    """Learner or observer → coordinator: let me in. ``layout`` is its layout as JSON text.

    An empty layout (an observer that wants to learn it) matches any. ``run``: the id of the run
    that it is in already and comes back to; empty: it is in none. ``device``: what a learner trains
    on, for people.
    """

    learner: str
    nonce: str
    role: Role
    layout: str
    run: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Coordinator → learner: your epoch, the run's settings and layout, where the shards are.

    ``run``: the id of this run, which no other has: what a learner keeps of one is void in another.
    ``index``: the number of this name in the run, from 0; a restarted learner has the same.
    ``count``: the number of learners that the run expects, or has had, whichever is more.
    """

    epoch: int
    settings: str
    layout: str
    shards: tuple[str, ...]
    run: str = ""
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """Coordinator → learner: no. ``retry``: the reason may pass by itself."""

    reason: str
    retry: bool


@dataclass(frozen=True, slots=True)
class Referred:
    """Shard → learner: I do not host the coordinator, this address does."""

    address: str


@dataclass(frozen=True, slots=True)
class ShardHello:
    """Shard → coordinator: I have started (a new nonce) or reconnected (the same).

    ``settings`` are the public settings it was started with, as JSON text. ``claim`` is the number
    of the claim by which it acts for the shard; 0: there is no other process that could.
    """

    shard: int
    nonce: str
    settings: str = ""
    claim: int = 0


@dataclass(frozen=True, slots=True)
class ShardAdmitted:
    """Coordinator → shard: your term; ``begun``: the run is under way, restore from learners.

    ``key``: what shards seal published versions by; the state machines never see it.
    """

    term: int
    begun: bool
    key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class LayoutSet:
    """Coordinator → shard: the run's layout, as JSON text."""

    layout: str


@dataclass(frozen=True, slots=True)
class SeedNamed:
    """Coordinator → shard: take the initial weights from this learner; forget earlier attempts."""

    learner: str
    epoch: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ShardReady:
    """Shard → coordinator: I hold my whole share of the initial weights."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SeedFailed:
    """Shard → coordinator: what this seed delivers is no good, or does not come. Name another."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Coordinator → shard: every shard is ready, rounds may open."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Shard → coordinator: the clock, and the tokens trained so far as far as I know."""

    clock: int
    tokens: int


@dataclass(frozen=True, slots=True)
class EndOrdered:
    """Coordinator → shard: the budget is spent, sweep."""


@dataclass(frozen=True, slots=True)
class Swept:
    """Shard → coordinator: every fragment has had its last round."""


@dataclass(frozen=True, slots=True)
class FinishOrdered:
    """Coordinator → shard: all are swept, the run is over."""


FromLearner = (
    StepReport
    | Upload
    | Decline
    | Copy
    | CopyDeclined
    | CopyTook
    | Holding
    | Ahead
    | Draining
    | Leave
)
ToLearner = (
    Welcome
    | Refusal
    | Pull
    | Outcome
    | GivenUp
    | Published
    | Shifted
    | Revision
    | CopyWanted
    | DrainRefused
    | SameData
    | Ending
    | Finished
)
FromMember = transfer.FromMember | DataReport | PartSaved | RandomNumbers
ToMember = transfer.ToMember | LeasesGiven | DataRefused | CheckpointOrdered | SameData
FROM_MEMBER: tuple[type[FromMember], ...] = get_args(FromMember)
TO_MEMBER: tuple[type[ToMember], ...] = get_args(ToMember)
FromShard = ShardReady | SeedFailed | Progress | Demand | Swept | PartSaved
ToShard = LayoutSet | SeedNamed | Begin | Revision | EndOrdered | FinishOrdered | CheckpointOrdered
Message = (
    Hello
    | FromLearner
    | ToLearner
    | Join
    | Admitted
    | JoinRefused
    | FromMember
    | ToMember
    | Referred
    | ShardHello
    | ShardAdmitted
    | FromShard
    | ToShard
)
