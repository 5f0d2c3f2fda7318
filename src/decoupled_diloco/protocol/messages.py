"""The vocabulary of the protocol: names, messages, facts and orders, all frozen and plain.

*Messages* travel between processes on the control plane, each as one JSON object (`wire`). Payloads
travel separately: a message names a payload by a path. *Facts* (events) are the inputs of a state
machine, in the past tense. *Orders* (effects) are its outputs, and each states its reason in
``why``. Each machine has one closed union of facts and one of orders. All machines receive the same
facts about their peers: `Connected`, `Received`, `Lost`.

An order that takes time is answered by `Done` or `Failed`, which contain the order itself. The
answer therefore holds the keys with which the machine finds the entry in its state, and no order
needs its own success and failure types. `Done` adds what the machine could not know before, such as
the digest and size of the result.

Two kinds of facts look like answers but complete no order. `BodyArrived`, `CopyArrived` and their
counterparts report that a *peer* delivered something. They arrive when the peer sends it, or never,
and contain the counters that the peer announced. `BodyEncoded` and `ChunkArrived` report *partial
progress* of an order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, get_args

RARE = {"rare": True}
"""Metadata of a field that only devices use: other learners' messages and tapes do not have it."""


# Names


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """The version of a fragment's published copy: (shard term, counter), ordered lexicographically.

    A shard raises its term, durably, at every start. Two processes of one shard can therefore never
    issue the same version (rule 10).
    """

    term: int
    counter: int

    def __str__(self) -> str:
        return f"{self.term}.{self.counter}"

    @classmethod
    def read(cls, text: str) -> Version:
        """Parse a version from its text form.

        >>> Version.read("2.57")
        Version(term=2, counter=57)
        """
        term, counter = text.split(".")
        return cls(int(term), int(counter))


@dataclass(frozen=True, slots=True, order=True)
class Asking:
    """The name of one request for a contribution: the shard's term and a number within the term.

    A contribution carries the name of the request that it answers. Two processes of one shard never
    issue the same name.
    """

    term: int
    number: int

    def __str__(self) -> str:
        return f"{self.term}.{self.number}"


@dataclass(frozen=True, slots=True)
class Holding:
    """Learner → shard: the learner holds this version of the published copy.

    ``digest`` and ``seal`` are those of the shard's announcement. A shard ignores a version that it
    never issued. ``again`` counts the contributions that a device has made from this version before
    it started from it again (rule 23).
    """

    fragment: int
    version: Version
    digest: str = ""
    seal: str = ""
    again: int = field(default=0, metadata=RARE)


COORDINATOR = "coordinator"


_SHARD = re.compile(r"shard-(\d{1,9})")


_GIVEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@cache
def shard_peer(shard: int) -> str:
    """Return the peer name of a shard.

    >>> shard_peer(1)
    'shard-1'
    """
    return f"shard-{shard}"


@cache
def shard_of(peer: str) -> int:
    """Return the shard with this peer name. Asserts that the name is one of a shard."""
    found = _SHARD.fullmatch(peer)
    assert found is not None, f"{peer!r} is not the name of a shard"
    return int(found[1])


def is_shard_peer(peer: str) -> bool:
    """Return whether a name is the peer name of a shard."""
    return _SHARD.fullmatch(peer) is not None


def average_path(fragment: int) -> str:
    """Return the path at which a shard offers the newest average of a fragment's parameters."""
    return f"/average/{fragment}"


def relay_peer(relay: str) -> str:
    """Return the peer name of a relay. No learner or shard can have it.

    >>> relay_peer("site-a")
    'relay:site-a'
    """
    return f"relay:{relay}"


def relay_of(peer: str) -> str:
    """Return the relay with this peer name; empty if the name is not one of a relay.

    >>> relay_of("relay:site-a"), relay_of("learner-0")
    ('site-a', '')
    """
    return peer.removeprefix("relay:") if peer.startswith("relay:") else ""


def name_problem(name: str) -> str:
    """Return why a learner or observer cannot use a name, or an empty text if it can.

    >>> name_problem("learner-0"), name_problem("shard-0")
    ('', "'shard-0' is reserved for a syncer process: choose another learner name")
    """
    if not _GIVEN.fullmatch(name):
        return (
            f"{name!r} is not a valid learner name: use 1 to 64 letters, digits, dots, dashes or "
            "underscores, starting with a letter or digit"
        )
    if name == COORDINATOR or is_shard_peer(name) or name.startswith("relay-"):
        return f"{name!r} is reserved for a syncer process: choose another learner name"
    return ""


Alignment = Literal["overwrite", "carry", "blend"]


@dataclass(frozen=True, slots=True)
class Revision:
    """A schedule revision: H and τ from a tick on. Coordinator → shard → learner.

    The revision with the highest number applies. Number 0 stands for the run's settings.
    """

    number: int
    tick: int
    period: int
    overlap: int

    def __str__(self) -> str:
        return f"H = {self.period}, τ = {self.overlap}"


@dataclass(frozen=True, slots=True)
class Demand:
    """Shard → coordinator: what the links of its learners need, in steps of the fastest learner.

    Attributes:
        body: Time for which one payload in the coarsest codec occupies a link.
        answer: Time from the request for a payload until its arrival.
    """

    body: float
    answer: float


# Messages about state transfers (rule 16)


@dataclass(frozen=True, slots=True)
class Trains:
    """Learner → coordinator: the learner has started to train.

    ``gives``: whether it shares its state with other learners.
    """

    gives: bool


@dataclass(frozen=True, slots=True)
class TransferWanted:
    """Learner → coordinator: the learner starts without state and requests a state provider.

    The provider must be healthy and must have applied the versions in ``seen``. ``attempt`` numbers
    the requests. ``refused`` lists the providers that failed before.
    """

    attempt: int
    seen: tuple[Holding, ...]
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateWanted:
    """Coordinator → provider: share your state with this learner after you apply these versions."""

    learner: str
    attempt: int
    seen: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class StateOffered:
    """Provider → coordinator: a copy of the provider's state is ready for this learner.

    The copy consists of a head of ``head_nbytes`` and of ``nbytes`` in chunks. ``digest`` is that
    of the head, which contains the digests of all chunks.
    """

    learner: str
    attempt: int
    head_nbytes: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class StateDeclined:
    """Provider → coordinator: the provider cannot share its state with this learner, and why."""

    learner: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class StateUnwanted:
    """Coordinator → provider: drop the copy for this learner."""

    learner: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TransferReady:
    """Coordinator → learner: this provider's state is available through a relay.

    `RelayOpened` contains the relay's path. The other fields are as in `StateOffered`.
    """

    donor: str
    attempt: int
    head_nbytes: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class TransferLost:
    """Coordinator → learner: the provider is gone or declined, so request another one."""

    donor: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class NoTransfer:
    """Coordinator → learner: no provider is available, and why."""

    reason: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RelayOpened:
    """Coordinator → provider and learner: the relay is open at this path; chunk 0 is the head."""

    learner: str
    attempt: int
    path: str


@dataclass(frozen=True, slots=True)
class ChunkTaken:
    """Learner → coordinator: the learner has fetched this chunk and all earlier ones."""

    attempt: int
    chunk: int


TransferFromMember = Trains | TransferWanted | StateOffered | StateDeclined | ChunkTaken


TransferToMember = (
    NoTransfer | TransferReady | TransferLost | StateWanted | StateUnwanted | RelayOpened
)


# Messages about checkpoints of the run


@dataclass(frozen=True, slots=True)
class CheckpointOrdered:
    """Coordinator → all processes: save your part; delete earlier checkpoints except ``keep``."""

    number: int
    keep: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartSaved:
    """Learner or shard → coordinator: its part is on its disk, or ``problem`` says why not."""

    number: int
    digest: str
    nbytes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One participant's part of a complete checkpoint, as listed in the manifest."""

    process: str
    digest: str
    nbytes: int


# Messages about data leases


@dataclass(frozen=True, slots=True)
class LeaseState:
    """One lease as its learner reports it.

    ``trained`` counts the trained batches from 0 on, ``durable`` how many of them are durable.
    ``ended``: the partition has no more batches than ``trained``. ``repeated`` counts batches that
    were trained again because no other lease was left.
    """

    lease: int
    trained: int
    durable: int
    ended: bool
    repeated: int


@dataclass(frozen=True, slots=True)
class DataReport:
    """Learner → coordinator: all leases that it holds, and how many unfinished ones it needs.

    ``want`` = 0: the learner has stopped training, so everything that is not durable is returned.
    """

    parts: int
    want: int
    leases: tuple[LeaseState, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to train a partition from batch ``start`` on; ``turn`` numbers the epoch."""

    number: int
    turn: int
    part: int
    start: int


@dataclass(frozen=True, slots=True)
class LeasesGiven:
    """Coordinator → learner: new leases, and leases that ended as durable or revoked."""

    leases: tuple[Lease, ...]
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DataRefused:
    """Coordinator → learner: no leases are available for its data, and why."""

    reason: str


# Entries of the data ledger: each is durable before any process is notified of it


@dataclass(frozen=True, slots=True)
class DataDescribed:
    """The first learner with leased data reported the number of partitions."""

    parts: int


@dataclass(frozen=True, slots=True)
class Leased:
    """A partition is leased to a learner from batch ``start`` on.

    ``turn`` numbers the epoch of the data, ``epoch`` the learner's incarnation.
    """

    lease: int
    turn: int
    part: int
    start: int
    learner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Settled:
    """A partition is durable: every fragment had an accepted merge after its last step."""

    lease: int
    learner: str
    batches: int


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A lease ended before its partition is durable. Other learners continue at batch ``durable``.

    The batches from there up to ``trained`` are trained again. ``trained`` is the last value that
    the learner reported, and it may have trained more since.
    """

    lease: int
    learner: str
    durable: int
    trained: int
    reason: str


@dataclass(frozen=True, slots=True)
class Repeated:
    """A learner without another lease trained ``batches`` more of a partition it had finished."""

    lease: int
    learner: str
    batches: int


LedgerEntry = DataDescribed | Leased | Settled | TakenBack | Repeated


LEDGER_ENTRIES: tuple[type[LedgerEntry], ...] = get_args(LedgerEntry)


# Messages of the method


Role = Literal["learner", "observer"]


LOSS_MAX = 1e30
"""A loss at or above this value means that the training has diverged; it counts as infinite."""


SecureStep = Literal["share", "mask", "open"]


Verdict = Literal["accepted", "refused", "unfit", "discarded", "behind", "abandoned"]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on every connection to a shard.

    ``step`` counts the learner's own steps in this incarnation (``epoch``). ``clock`` is the latest
    global step of this shard that the learner received; a restarted shard uses it to restore its
    clock. ``run_step`` is the learner's run step s_m at this shard, or ``None`` before the first
    welcome. A learner that was disconnected continues to count from it. ``asks`` lists the requests
    that the learner has answered, or is answering, without an outcome so far. ``shard`` is the
    shard that the learner dials; ``None`` if it does not know which shard has the address.
    ``trained`` lists the fragments that a device has trained since its last visit, for a
    contribution from the held version (rule 23). ``fresh`` as in `StepReport`.
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
    shard: int | None = field(default=None, metadata=RARE)
    trained: tuple[int, ...] = field(default=(), metadata=RARE)
    fresh: bool = field(default=False, metadata=RARE)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One more inner step: own steps and tokens in this incarnation, and the mean seconds per step.

    ``discarded_tokens`` counts tokens whose training was overwritten, summed over the fragments (a
    fragment is one of P parts of the model). ``loss`` is the training loss of the step, if the loop
    passed it. A loss that is not finite or not below ``LOSS_MAX`` is sent as ``LOSS_MAX``. No
    decision depends on these two fields. ``fresh``: this incarnation joined a run in progress with
    a fresh inner optimizer. It is reported only in a run with probation.
    """

    step: int
    tokens: int
    seconds: float
    discarded_tokens: int = 0
    loss: float | None = None
    fresh: bool = field(default=False, metadata=RARE)


@dataclass(frozen=True, slots=True)
class Upload:
    """Announce the payload of a contribution; the counters are those of its snapshot.

    ``digest`` covers the payload with all buffers, including those that it omits because they are
    unchanged since ``base``.
    """

    fragment: int
    ask: Asking
    base: Version
    steps: int
    tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class SumClaim:
    """Answer a request of a run with secure sums: the learner takes part, with these counters.

    ``keys`` are its fresh public keys, as `privacy.secure_sum.claim_text`. The shell removes them
    before the machine and the tape receive the message, and so it does with the texts of the other
    messages about secure sums.
    """

    fragment: int
    ask: Asking
    steps: int
    tokens: int
    keys: str = ""


@dataclass(frozen=True, slots=True)
class SumShares:
    """The learner has divided its secrets among its neighbors in the cohort.

    ``shares`` are encrypted, each for the neighbor that receives it.
    """

    fragment: int
    ask: Asking
    shares: str = ""


@dataclass(frozen=True, slots=True)
class SumOpening:
    """The learner's shares of the secrets that open the sum of its round."""

    fragment: int
    ask: Asking
    shares: str = ""


@dataclass(frozen=True, slots=True)
class Decline:
    """The learner does not contribute to this request, and why.

    ``nothing_new``: all of its training is merged already. Otherwise it may be asked again.
    """

    fragment: int
    ask: Asking
    nothing_new: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Announce the payload of a whole fragment that the shard requested (seed or restore).

    ``attempt`` is the number of that request.
    """

    fragment: int
    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class CopyDeclined:
    """The learner cannot deliver the requested whole fragment, and why."""

    fragment: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class CopyTook:
    """A published copy of this fragment has arrived and occupied the link for ``seconds``.

    Sent only if H and τ follow the links (rule 20).
    """

    fragment: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ahead:
    """The learner's run step at another shard that is further ahead.

    Sent only if learners wait for one another.
    """

    run_step: int


@dataclass(frozen=True, slots=True)
class Draining:
    """The learner has stopped stepping before it leaves; these fragments have unmerged training."""

    fragments: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Gains:
    """Evaluator → shard: by how much each learner's own contributions lower the held-out loss.

    ``gains`` lists learners and the differences of the loss. All contributions are from the same
    published copies, those at the global step ``step``.
    """

    step: int
    gains: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """The learner leaves on purpose."""

    reason: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The shard admits the learner. Its own step ``step`` corresponds to run step ``run_step``.

    ``term`` and ``clock`` are the shard's. ``news`` is the number of fragments whose newer copies
    are announced next. ``asks`` lists the learner's requests that are still valid: the shard waits
    for the payload, or has folded it and not merged it yet. All other requests are void.
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
    """The shard does not admit the learner. ``final``: trying again cannot help."""

    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class Pull:
    """Request a contribution to one fragment: against which base, in which codec, to which path.

    ``alignment`` states how the learner applies the next copy after it answers (rule 7). ``final``
    marks the closing sweep: the learner answers after it has stopped stepping. ``coming`` lists the
    fragments that a learner with a backlog will probably be asked for next, so that it takes their
    snapshots ahead of time. ``packed``: the payload may omit buffers that are unchanged since the
    base.
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
    packed: bool = field(default=True, metadata=RARE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a contribution. ``version`` is the version that it was merged into.

    It is ``None`` unless the verdict is ``accepted``. ``unfit``: refused because its values are too
    large or not finite, and sending them again would give the same result. ``discarded``: it has
    weight 0 (rule 26). ``abandoned``: the merge failed and the contribution is lost.
    """

    fragment: int
    ask: Asking
    verdict: Verdict
    reason: str
    version: Version | None


@dataclass(frozen=True, slots=True)
class SumStep:
    """The next step of a secure sum, for one of its members (rule 24).

    ``text`` is what this member needs. ``"share"``: the cohort, whose members are to share their
    secrets. ``"mask"``: the shares for this member, which then uploads its masked contribution.
    ``"open"``: the survivors, whose sum is to be opened.
    """

    fragment: int
    ask: Asking
    step: SecureStep
    text: str = ""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A fragment's round was abandoned, so no learner needs to wait for its next copy.

    Contributions that were sent for it, and are neither refused nor abandoned, go into the next
    round.
    """

    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class Published:
    """Announce a new published copy.

    A learner that holds ``base`` fetches the difference; any other process fetches the whole copy.
    An empty ``difference`` with a ``base`` means that only the version's name has changed. By
    ``seal`` the shard later recognizes the version as one that it issued. ``difference_nbytes`` is
    the size of a difference that omits unchanged buffers; 0 means that it contains all buffers.
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
    """The learners that determine the clock changed: every run step moves up by ``by`` (rule 1)."""

    by: int


@dataclass(frozen=True, slots=True)
class CopyWanted:
    """Request a whole fragment in fp32: the initial weights, or a copy that the shard lost.

    ``version`` is ``None`` for the learner's own parameters.
    """

    fragment: int
    attempt: int
    version: Version | None
    path: str


@dataclass(frozen=True, slots=True)
class DrainRefused:
    """A leaving learner need not wait, because nothing can be merged now, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class PrivacySpent:
    """Shard → learner: its training of a fragment is merged no longer, because its ε is spent."""

    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class SameData:
    """Shard or coordinator → learner: another learner seems to train on the same data, and why."""

    other: str
    why: str


@dataclass(frozen=True, slots=True)
class RandomNumbers:
    """Learner → coordinator: the states of the random generators that the loop uses in every step.

    All learners send this after the same number of their own steps.
    """

    states: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """Shard → device: the contribution is folded, so the device need not wait for its outcome."""

    fragment: int
    ask: Asking


# Messages about places to train (rule 23)


@dataclass(frozen=True, slots=True)
class PlaceWanted:
    """Device → coordinator: the device is present and requests a place to train.

    ``fresh``: it has answered the request of its last place, if it had one, so it takes part in the
    next draw. Otherwise a device that comes back keeps its place.
    """

    fresh: bool


@dataclass(frozen=True, slots=True)
class PlaceGiven:
    """Coordinator → device: the device may train. ``number`` numbers the places of the run.

    ``seconds``: the device loses its place after this time.
    """

    number: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PlaceLost:
    """Coordinator → device: the place with this number is over, because its time has passed."""

    number: int


@dataclass(frozen=True, slots=True)
class PlaceReturned:
    """Device → coordinator: the device has contributed, so its place is free."""

    number: int


@dataclass(frozen=True, slots=True)
class Ending:
    """The budget is reached: stop stepping, the closing sweep begins."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The run has ended; the last published copies are the result."""


@dataclass(frozen=True, slots=True)
class Join:
    """Learner or observer → coordinator: request admission. ``layout`` is its layout as JSON text.

    An empty layout matches any (an observer that has yet to receive it). ``run`` is the id of the
    run that the process was in before and rejoins, or empty. ``device`` describes the learner's
    hardware, for display only.
    """

    learner: str
    nonce: str
    role: Role
    layout: str
    run: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Coordinator → learner: its incarnation, the run's settings and layout, and the shards.

    ``relayed``: the answer passed through a relay, which can be dialed for every shard.

    ``shards`` are their addresses. ``run`` is the unique id of this run: state that a learner keeps
    from one run is void in another. ``index`` is the number of this name in the run, from 0; a
    restarted learner keeps it. ``count`` is the number of learners that the run expects or has had,
    whichever is larger.
    """

    epoch: int
    settings: str
    layout: str
    shards: tuple[str, ...]
    run: str = ""
    index: int = 0
    count: int = 1
    relayed: bool = field(default=False, metadata=RARE)


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """Coordinator → learner: admission denied. ``retry``: the cause may disappear by itself."""

    reason: str
    retry: bool


@dataclass(frozen=True, slots=True)
class Referred:
    """Shard → learner: this shard does not host the coordinator; dial this address instead."""

    address: str


@dataclass(frozen=True, slots=True)
class ShardHello:
    """Shard → coordinator: the shard has started (a new nonce) or reconnected (the same nonce).

    ``settings`` are the public settings with which it was started, as JSON text. ``claim`` is the
    number of the claim by which the process acts for the shard; 0: the shard has no standby.
    """

    shard: int
    nonce: str
    settings: str = ""
    claim: int = 0


@dataclass(frozen=True, slots=True)
class ShardAdmitted:
    """Coordinator → shard: its term. ``begun``: the run is in progress, so restore from learners.

    ``key`` is the key with which shards seal published versions. The state machines never receive
    it. ``run`` is the unique id of the run.
    """

    term: int
    begun: bool
    key: str = field(default="", repr=False)
    run: str = field(default="", metadata=RARE)


@dataclass(frozen=True, slots=True)
class LayoutSet:
    """Coordinator → shard: the run's layout, as JSON text."""

    layout: str


@dataclass(frozen=True, slots=True)
class SeedNamed:
    """Coordinator → shard: fetch the initial weights from this learner. Ends earlier attempts."""

    learner: str
    epoch: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ShardReady:
    """Shard → coordinator: the shard holds its whole share of the initial weights."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SeedFailed:
    """Shard → coordinator: the seed's weights are invalid or do not arrive; name another seed."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Coordinator → shard: every shard is ready, and rounds may open."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Shard → coordinator: the clock, and the trained tokens as far as the shard has seen them."""

    clock: int
    tokens: int


@dataclass(frozen=True, slots=True)
class EndOrdered:
    """Coordinator → shard: the budget is reached, so begin the closing sweep."""


@dataclass(frozen=True, slots=True)
class Swept:
    """Shard → coordinator: every fragment has had its closing round."""


@dataclass(frozen=True, slots=True)
class FinishOrdered:
    """Coordinator → shard: all shards have finished the sweep, and the run has ended."""


@dataclass(frozen=True, slots=True)
class RelayHello:
    """Relay → shard: the first message of a connection that carries those of its children.

    ``nonce`` identifies the process. ``shard`` as in `Hello`. ``behind`` lists the relays that are
    connected behind it.
    """

    relay: str
    nonce: str
    shard: int = 0
    behind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SiteListed:
    """A site in the run's file, and the numbers of its learners."""

    name: str
    learners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RelayAccepted:
    """Shard → relay: the connection is open. ``shards`` are the addresses of all shards.

    ``connection`` is a number that the shard never used before. The paths of sums contain it, so a
    sum of an earlier connection cannot be mistaken for one of this connection. ``relayed`` as in
    `Admitted`. ``run`` is the run's name, and ``sites`` are those of its file, by which the relay
    compares its own file.
    """

    shard: int
    connection: str
    shards: tuple[str, ...]
    relayed: bool = False
    run: str = ""
    sites: tuple[SiteListed, ...] = ()


@dataclass(frozen=True, slots=True)
class RelayWelcome:
    """Shard → relay: the layout is known, and requests follow. All three as in `Admitted`."""

    settings: str
    layout: str
    run: str


@dataclass(frozen=True, slots=True)
class RelayProbe:
    """Learner → an address that may be a relay's: ask whether it is connected to a shard."""

    shard: int


@dataclass(frozen=True, slots=True)
class RelayProbed:
    """The answer to `RelayProbe`; a shard answers ``is_relay=False``."""

    is_relay: bool
    is_connected: bool


@dataclass(frozen=True, slots=True)
class Collect:
    """Shard → relay: a round of this fragment requests contributions.

    They are merged in time if their sum arrives within ``seconds``. 0: the relay sends at once.
    """

    fragment: int
    round: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Collected:
    """Shard → relay: this round requests nothing more."""

    fragment: int
    round: int


@dataclass(frozen=True, slots=True)
class Sum:
    """Relay → shard: announce the payload of a sum of the contributions to these requests.

    A relay numbers its sums of each fragment from 1 in each of its connections.
    """

    fragment: int
    number: int
    asks: tuple[Asking, ...]
    digest: str


SumVerdict = Literal["merged", "void", "invalid", "unknown"]
"""What became of a relay's sum. The requests of one that is not merged are repeated or void; an
*invalid* one was rejected for its content. *Unknown*: the connection broke before its outcome
arrived; no shard sends this."""


@dataclass(frozen=True, slots=True)
class SumOutcome:
    """Shard → relay: what became of a sum."""

    fragment: int
    number: int
    verdict: SumVerdict
    reason: str


FromLearner = (
    StepReport
    | Upload
    | SumClaim
    | SumShares
    | SumOpening
    | Decline
    | Copy
    | CopyDeclined
    | CopyTook
    | Holding
    | Ahead
    | Draining
    | Gains
    | Leave
)


ToLearner = (
    Welcome
    | Refusal
    | Pull
    | SumStep
    | Outcome
    | GivenUp
    | Published
    | Shifted
    | Revision
    | CopyWanted
    | DrainRefused
    | Receipt
    | PrivacySpent
    | SameData
    | Ending
    | Finished
)


FromMember = (
    TransferFromMember | DataReport | PartSaved | RandomNumbers | PlaceWanted | PlaceReturned
)


ToMember = (
    TransferToMember
    | LeasesGiven
    | DataRefused
    | CheckpointOrdered
    | SameData
    | PlaceGiven
    | PlaceLost
)


FROM_MEMBER: tuple[type[FromMember], ...] = get_args(FromMember)


TO_MEMBER: tuple[type[ToMember], ...] = get_args(ToMember)


FromShard = ShardReady | SeedFailed | Progress | Demand | Swept | PartSaved


ToShard = LayoutSet | SeedNamed | Begin | Revision | EndOrdered | FinishOrdered | CheckpointOrdered


# Orders about state transfers


@dataclass(frozen=True, slots=True)
class CopyState:
    """Copy the state that this learner shares, as it is at this step boundary, and serve it."""

    learner: str
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class RelayState:
    """Upload the copy for this learner to the relay, chunk by chunk, as the learner fetches it."""

    learner: str
    attempt: int
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class ForgetState:
    """Drop the copy for this learner; it is no longer needed."""

    learner: str
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class FetchState:
    """Fetch a provider's state, head and chunks, from the relay at ``path``."""

    donor: str
    attempt: int
    head_nbytes: int
    nbytes: int
    digest: str
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class DropState:
    """Stop fetching a provider's state."""

    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class OpenRelay:
    """Receive a provider's chunks and serve them to the learner, a few at a time."""

    learner: str
    donor: str
    attempt: int
    path: str
    head_nbytes: int
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class RelayOn:
    """The learner has fetched this chunk: drop it and receive further ones."""

    path: str
    chunk: int
    why: str


@dataclass(frozen=True, slots=True)
class CloseRelay:
    """Drop everything that belongs to this relay."""

    path: str
    why: str


TransferOfLearner = CopyState | RelayState | ForgetState | FetchState | DropState


TransferOfCoordinator = OpenRelay | RelayOn | CloseRelay


# Orders about checkpoints of the run


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """Save this process's part of a checkpoint, in its present state, as a file.

    For a shard, the present state includes everything in its worker's queue. A learner saves its
    part at this boundary, before it applies anything. Its shell then sends ``Paused``, and the
    boundary continues.
    """

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class ForgetCheckpoints:
    """Delete the parts of checkpoints before ``before``, except those in ``keep``."""

    keep: tuple[int, ...]
    before: int
    why: str


@dataclass(frozen=True, slots=True)
class BeginCheckpoint:
    """Save the coordinator's present state as its own part of this checkpoint."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class KeepCheckpoint:
    """A checkpoint is complete: write its manifest.

    ``missing`` lists learners that were present when it began and delivered no part.
    """

    number: int
    shards: tuple[CheckpointPart, ...]
    learners: tuple[CheckpointPart, ...]
    missing: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Enter:
    """Write this entry to the data ledger, durably, before any later effect of this list."""

    entry: LedgerEntry
    why: str


# Orders of a shard, a learner and the coordinator


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to one peer, if it is connected."""

    peer: str
    message: Message
    why: str


@dataclass(frozen=True, slots=True)
class Accept:
    """Bind this connection to the learner, closing its older one, and send the welcome."""

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
    """Accept a contribution's payload at this path, from this learner only.

    ``round`` is the number of the fragment's open round, or 0 if there is none. ``codec`` is the
    payload's codec, or empty for the run's codec. ``relay`` is the relay to which the learner sends
    the payload; empty: to this process.
    """

    path: str
    learner: str
    epoch: int
    round: int
    fragment: int
    ask: Asking
    why: str
    codec: str
    relay: str = field(default="", metadata=RARE)


@dataclass(frozen=True, slots=True)
class ExpectCopy:
    """Accept a whole fragment in fp32 at this path, from this learner only."""

    path: str
    learner: str
    fragment: int
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class Unexpect:
    """Stop expecting a payload, and refuse it if it still arrives; ``relay`` as in `Expect`."""

    path: str
    why: str
    relay: str = field(default="", metadata=RARE)


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold a verified payload into the fragment's accumulator, in the order of these effects.

    ``scale`` multiplies its values and is below 1 if its norm was clipped or if lateness reduces
    its change. ``discount`` multiplies its weight and is below 1 if lateness reduces it. ``relay``
    is the relay that has the payload and folds it into its own accumulator; empty: this process.
    ``party`` is the learner's party, if the shares of parties are limited.
    """

    fragment: int
    learner: str
    ask: Asking
    steps: float
    tokens: float
    why: str
    scale: float = 1.0
    discount: float = 1.0
    relay: str = field(default="", metadata=RARE)
    party: str = field(default="", metadata=RARE)


@dataclass(frozen=True, slots=True)
class Drop:
    """Discard a payload that arrived and is not needed; ``relay`` as in `Fold`."""

    fragment: int
    learner: str
    ask: Asking
    why: str
    relay: str = field(default="", metadata=RARE)


@dataclass(frozen=True, slots=True)
class FoldSum:
    """Add a relay's verified sum to the fragment's accumulator.

    ``at`` and ``party`` as ``relay`` and ``party`` in `Fold`.
    """

    fragment: int
    relay: str
    number: int
    at: str
    why: str
    party: str = field(default="", metadata=RARE)


@dataclass(frozen=True, slots=True)
class DropSum:
    """Discard a relay's sum that arrived and is not needed. ``at`` as ``relay`` in `Fold`."""

    fragment: int
    relay: str
    number: int
    at: str
    why: str


@dataclass(frozen=True, slots=True)
class PassOn:
    """Send each of these members of a secure sum the next step, with what it needs of the others.

    For the step ``"open"``, ``members`` are the survivors. The shard has received what the other
    members sent, but this order does not contain it, and neither does the tape.
    """

    fragment: int
    round: int
    step: SecureStep
    members: tuple[tuple[str, Asking], ...]
    why: str


@dataclass(frozen=True, slots=True)
class ForgetSum:
    """Discard what was received for a secure sum that is abandoned."""

    fragment: int
    round: int
    why: str


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge the folded payloads, take an outer step, and create the published copy ``version``.

    ``factors`` multiply the weights of parties that would exceed the limits of their shares.
    """

    round: int
    fragment: int
    version: Version
    base: Version
    why: str
    factors: tuple[tuple[str, float], ...] = field(default=(), metadata=RARE)


@dataclass(frozen=True, slots=True)
class Install:
    """Name the fragment's published copy, as it was copied or loaded, with this version.

    ``digest`` identifies the copy. Any other copy that has arrived is dropped.
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
    """A learner is no longer live; close its connection, if any."""

    learner: str
    reason: str
    why: str


NOTHING_NEW = "nothing new"
"""The reason of a learner that declines because it has not trained since its last contribution."""


UNNAMED_REQUEST = Asking(0, 0)
"""Stands for the request's name on tapes that were written before requests had names."""


@dataclass(frozen=True, slots=True)
class Participant:
    """One contribution to a round, for observers.

    Seconds count from the round's opening; a request before the opening has a negative time.
    ``state`` is ``folded``, ``late`` (in progress when the round merged, so it goes into the next
    one), ``declined``, ``refused``, ``discarded`` (it had weight 0) or ``gone``. ``age`` is the
    number of versions by which a folded contribution is late.
    """

    learner: str
    state: str
    steps: int
    tokens: int
    asked_seconds: float
    delivered_seconds: float | None
    reason: str
    ask: Asking = UNNAMED_REQUEST
    age: int = 0


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """A round opened: its grace window, and the moving averages that determine it (Eq. 3).

    Rounds are numbered within a ``term``. ``closing``: the round belongs to the closing sweep,
    which has no window and sends requests to all learners. ``delivery_seconds`` is the longest time
    that the round waits once it has its quorum.
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
    """A round ended: all data that a metric or an explanation needs.

    Seconds count from the round's opening; ``None`` means that the event did not happen. The
    averages are those at the opening, as in `RoundOpened`, or ``None`` on tapes that predate them.
    ``quorum_learner`` is the learner that completed the quorum. It is empty if the quorum was never
    complete, or if the tape predates the field.
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
        """Whether the round failed. A round in which no learner had anything new did not fail."""
        idle = all(p.state == "declined" and p.reason == NOTHING_NEW for p in self.participants)
        return self.verdict == "abandoned" and not (idle and self.participants)


@dataclass(frozen=True, slots=True)
class PrivacyAccounted:
    """The merges of a fragment that count for each learner in its next version, for observers."""

    fragment: int
    merges: tuple[tuple[str, int], ...]
    why: str


@dataclass(frozen=True, slots=True)
class ClockAdvanced:
    """The shard's global step has advanced."""

    clock: int
    live: int
    why: str


@dataclass(frozen=True, slots=True)
class Scored:
    """A learner has a new score, for observers (rule 26).

    ``gain`` is the measured difference of the held-out loss. ``score`` is the median of the
    last gains, in gains of the median learner. ``weight`` is the factor on its weight from now on.
    """

    learner: str
    gain: float
    score: float
    weight: float
    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """A message for people, on the tape and in the log. ``warns``: it requires action."""

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
    | FoldSum
    | DropSum
    | PassOn
    | ForgetSum
    | Merge
    | Install
    | LoadWeights
    | Evict
    | RoundOpened
    | RoundFinished
    | PrivacyAccounted
    | ClockAdvanced
    | Scored
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
    """Apply the staged published copy to the parameters, or the held one if none is staged.

    ``mode``: ``overwrite`` θ ← Θ̂; ``carry`` θ ← Θ̂ + (θ − snapshot); ``rebase`` θ ← Θ̂ + (θ −
    Θ̂_base); ``blend`` θ ← αθ + (1−α)Θ̂.
    """

    fragment: int
    version: Version
    mode: Literal["overwrite", "carry", "rebase", "blend"]
    discarded_tokens: int
    why: str


@dataclass(frozen=True, slots=True)
class Relabel:
    """The newest local copy now has another version name; its values are the same.

    ``staged``: the copy is waiting to be applied, and earlier contributions are still valid.
    Otherwise the copy is held, and what was sent against it is lost.
    """

    fragment: int
    version: Version
    why: str
    staged: bool = False


@dataclass(frozen=True, slots=True)
class SendBody:
    """Encode the snapshot against its base, report its digest (`BodyEncoded`) and upload it.

    ``packed`` as in `Pull`.
    """

    shard: int
    fragment: int
    ask: Asking
    base: Version
    steps: int
    tokens: int
    codec: str
    path: str
    why: str
    packed: bool = field(default=True, metadata=RARE)


@dataclass(frozen=True, slots=True)
class TakeStep:
    """Compute the next step of a secure sum from the message that has just arrived, and answer."""

    shard: int
    fragment: int
    ask: Asking
    step: SecureStep
    why: str


@dataclass(frozen=True, slots=True)
class Settle:
    """A contribution's residual is known and is added to the fragment's next one (rule 19).

    ``gone``: the payload is merged, or may be, so the residual is what the payload lacks. Otherwise
    the payload is merged nowhere, and the residual from before it applies again.
    """

    fragment: int
    ask: Asking
    gone: bool
    why: str


@dataclass(frozen=True, slots=True)
class ForgetResidual:
    """Drop this fragment's residual, because it may be merged already."""

    fragment: int
    why: str


@dataclass(frozen=True, slots=True)
class SendCopy:
    """Upload a whole fragment in fp32: the published copy, or (no version) the parameters."""

    shard: int
    fragment: int
    attempt: int
    version: Version | None
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch a published copy: the difference to the held or staged copy, or the whole.

    ``nbytes`` is the size of a difference that omits buffers, or 0 for the usual size.
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
    """Every fragment of the published copy is held, so training may start from it."""

    why: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """How this process obtained its state, for observers; always together with ``Ready``.

    ``way``: from its own ``checkpoint``; from a ``donor`` (another learner's optimizer and data
    position); or from the ``published`` copies alone, with a fresh optimizer. ``kept`` counts the
    fragments that keep their local progress, ``overwritten`` those for which the run has a newer
    version. ``nbytes`` is the size of the provider's state.
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
    """The run's budget is reached: ``step()`` reports the end at this boundary."""

    why: str


@dataclass(frozen=True, slots=True)
class RunOver:
    """Every shard has finished; no more messages follow."""

    why: str


@dataclass(frozen=True, slots=True)
class Expelled:
    """A shard rejects this learner permanently: its id is in use, or its incarnation is old."""

    reason: str
    why: str


LearnerEffect = (
    Snapshot
    | Apply
    | Relabel
    | Send
    | SendBody
    | TakeStep
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
    """Accept a join with this incarnation. The shell adds settings, layout and addresses.

    ``index`` is the name's number, from 0. ``count`` is the highest number so far, plus 1.
    """

    connection: int
    learner: str
    epoch: int
    why: str
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Deny:
    """Deny a join."""

    connection: int
    reason: str
    retry: bool
    why: str


@dataclass(frozen=True, slots=True)
class AdoptLayout:
    """The layout of this join becomes the run's layout."""

    connection: int
    fingerprint: str
    why: str


@dataclass(frozen=True, slots=True)
class AdmitShard:
    """Answer a shard: its term, and whether the run has begun; then the layout, if known."""

    shard: int
    term: int
    begun: bool
    why: str


@dataclass(frozen=True, slots=True)
class DenyShard:
    """Reject a shard's greeting, because another process acts for it. Its connection stays open."""

    shard: int
    nonce: str
    reason: str
    why: str


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the snapshot durably before any later effect of this list is executed.

    ``learner``: only this learner's record has changed since the previous ``Persist``; empty:
    anything may have changed.
    """

    why: str
    learner: str = ""


@dataclass(frozen=True, slots=True)
class SendSum:
    """Encode what was folded for these requests, announce it to the shard, and send it there.

    The fragment's accumulator is empty afterwards. ``shard`` owns the fragment.
    """

    shard: int
    fragment: int
    number: int
    asks: tuple[Asking, ...]
    why: str


@dataclass(frozen=True, slots=True)
class SettleSum:
    """Keep the residual of a *merged* sum, or the one that a *void* sum took.

    Nothing is kept of an *invalid* sum: its residual may be what makes it invalid, and would make
    the next one invalid, too.
    """

    fragment: int
    number: int
    verdict: SumVerdict
    why: str


@dataclass(frozen=True, slots=True)
class ForgetFolded:
    """Discard what was folded for a fragment: its shard has forgotten the requests."""

    fragment: int
    why: str


RelayEffect = (
    Send
    | Expect
    | Unexpect
    | Fold
    | Drop
    | FoldSum
    | DropSum
    | SendSum
    | SettleSum
    | ForgetFolded
    | Note
)


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


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that ``deadline()`` returned has come. An early, late or double tick is harmless."""


# A shard's leadership lease, and answers to orders


Condition = Literal["held", "released", "finished"]


@dataclass(frozen=True, slots=True)
class NewestLease:
    """A shard's newest claim, as the storage has it. ``number`` = 0: no claim exists."""

    number: int
    nonce: str
    renewals: int
    lease_seconds: float
    condition: Condition


@dataclass(frozen=True, slots=True)
class NewestClaim:
    """A renewal is in the storage, and afterwards this was the newest claim."""

    number: int


@dataclass(frozen=True, slots=True)
class HolderLeaves:
    """This process ends on its own; ``finished``: because the run has ended."""

    finished: bool


@dataclass(frozen=True, slots=True)
class Look:
    """Read the newest claim."""

    why: str


@dataclass(frozen=True, slots=True)
class Acquire:
    """Create this claim, unless it exists."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Write the renewal count next to this process's claim, then check for a newer claim."""

    number: int
    renewals: int
    why: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Mark this process's claim as released, so that no process waits for it to expire."""

    number: int
    finished: bool
    why: str


@dataclass(frozen=True, slots=True)
class Activate:
    """Act for the shard. ``waited_seconds``: since the old claim was last seen to change."""

    number: int
    waited_seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class StepDown:
    """Stop acting for the shard."""

    why: str


@dataclass(frozen=True, slots=True)
class StandDown:
    """The run has ended, so there is nothing to wait for."""

    why: str


@dataclass(frozen=True, slots=True)
class Made:
    """The result of an order: a published copy, or a checkpoint part that is on the disk.

    ``clip`` is that for the fragment's next merge, if it is adaptive (`[privacy.dp]`), as the norm
    of a whole period.
    """

    digest: str
    nbytes: int = 0
    clip: float | None = field(default=None, metadata=RARE)


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """The digests of the initial weights of every owned fragment."""

    digests: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class StateCopied:
    """A copy of this learner's state is in host memory, split into chunks; see `StateOffered`."""

    head_nbytes: int
    nbytes: int
    digest: str


LeaseOrder = Look | Acquire | Renew | GiveBack
"""Requests to the storage."""


Order = (
    Fetch
    | SendBody
    | TakeStep
    | SendSum
    | SendCopy
    | CopyState
    | RelayState
    | FetchState
    | TakeCheckpoint
    | LoadWeights
    | Merge
    | LeaseOrder
)
"""Orders that may take time: the machine receives `Done` or `Failed` for them."""


Result = Made | WeightsLoaded | StateCopied | NewestLease | NewestClaim


@dataclass(frozen=True, slots=True)
class Done:
    """An order is complete. ``result`` holds its result, for orders that produce one.

    A delivered contribution or copy (`SendBody`, `SendCopy`) needs no `Done`: the peer reports its
    outcome.
    """

    order: Order
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """An order could not be executed and left nothing behind."""

    order: Order
    reason: str


LeaseEvent = Tick | Done | Failed | HolderLeaves


LeaseEffect = LeaseOrder | Activate | StepDown | StandDown | Note


# Facts


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A chunk of the provider's state, and all before it, have arrived with correct digests."""

    attempt: int
    chunk: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CheckpointHeard:
    """A message with this checkpoint number has arrived. Precedes the message itself."""

    number: int


@dataclass(frozen=True, slots=True)
class CheckpointWanted:
    """A user requests a checkpoint of the run now."""


@dataclass(frozen=True, slots=True)
class StopWanted:
    """A user ends the run now, as if its budget were reached. ``by`` names its party or process."""

    by: str


@dataclass(frozen=True, slots=True)
class DataOpened:
    """The training loop reads leased partitions and keeps ``ahead`` spare leases."""

    parts: int
    ahead: int


@dataclass(frozen=True, slots=True)
class PartWanted:
    """The training loop needs a partition. Its present one, if any, ended after ``batches``.

    ``batches`` is ``None`` if it had none or was asked to leave it. ``taken`` counts the batches of
    it that belong to the step in progress.
    """

    batches: int | None
    taken: int = 0


@dataclass(frozen=True, slots=True)
class DataClosed:
    """The training loop has ended: its unfinished data go to other learners."""


DataEvent = DataOpened | PartWanted | DataClosed


@dataclass(frozen=True, slots=True)
class Joining:
    """A learner's or observer's request to join, as the coordinator's machine receives it.

    ``difference`` names the first tensor that differs from the run's layout. It is empty if the
    layout matches or is the first.
    """

    nonce: str
    role: Role
    fingerprint: str
    difference: str


@dataclass(frozen=True, slots=True)
class Connected:
    """A peer has connected. ``greeting``: its first message, or ``None`` if this process dialed.

    A process that greets is admitted or rejected, and is not a peer before it is admitted.
    ``relay`` is the relay through which the connection passes; empty: there is none. ``shards`` is
    the number of shards, which a relay learns from each of them. Shard s has the fragments p with
    p mod ``shards`` = s.
    """

    peer: str
    greeting: Hello | Joining | ShardHello | RelayHello | None = None
    connection: int = 0
    relay: str = field(default="", metadata=RARE)
    shards: int = field(default=1, metadata=RARE)


@dataclass(frozen=True, slots=True)
class Received:
    """A peer has sent a message.

    ``nonce`` identifies the process behind the peer's name; empty if there can be only one.
    """

    peer: str
    message: Message
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to a peer is lost; ``nonce`` as in `Received`."""

    peer: str
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class DurableCopy:
    """A fragment's complete published copy on the shard's own disk."""

    fragment: int
    version: Version
    digest: str


@dataclass(frozen=True, slots=True)
class KnownLearner:
    """A learner's name in the memory of an earlier process: its incarnation and counted tokens."""

    learner: str
    epoch: int
    nonce: str
    tokens: int


@dataclass(frozen=True, slots=True)
class KnownNorms:
    """The norms, each with its steps, from which the norm gate computes a fragment's limit."""

    fragment: int
    samples: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class KnownMerges:
    """The merges of a fragment that count for each learner, and those that count for all."""

    fragment: int
    merges: tuple[tuple[str, int], ...]
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class KnownScore:
    """A learner's last gains, in gains of the median learner, and whether it is excluded."""

    learner: str
    samples: tuple[float, ...]
    excluded: bool


@dataclass(frozen=True, slots=True)
class ShardMemory:
    """What a shard had in memory besides its copies, at its last merge."""

    clock: int
    tokens_retired: int
    learners: tuple[KnownLearner, ...] = ()
    norms: tuple[KnownNorms, ...] = ()
    merges: tuple[KnownMerges, ...] = field(default=(), metadata=RARE)
    scores: tuple[KnownScore, ...] = field(default=(), metadata=RARE)


@dataclass(frozen=True, slots=True)
class DiskRead:
    """What an earlier process of this shard left on its disk. Precedes `ShardAdmitted`.

    ``exact``: it is the shard's part of a checkpoint to which the whole run returns. Any newer
    version that a learner holds then belongs to a discarded future.
    """

    copies: tuple[DurableCopy, ...]
    memory: ShardMemory | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """Bytes arrived from these learners since the last such fact (renews their leases)."""

    learners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reported:
    """Step reports that a shell received together, each with its learner, in order of arrival.

    Equivalent to one ``Received`` per report at the same instant, except that rounds and clock are
    evaluated only once.
    """

    reports: tuple[tuple[str, StepReport], ...]


@dataclass(frozen=True, slots=True)
class BodyArrived:
    """A contribution's whole payload arrived, finite and with the announced digest.

    ``norm`` is ‖d‖. ``alike`` lists learners whose contributions to the same round are nearly
    parallel to it. ``relay`` is the relay that has the payload; empty: this process.
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
    relay: str = field(default="", metadata=RARE)


@dataclass(frozen=True, slots=True)
class BodyCorrupt:
    """A contribution's payload is invalid: truncated, wrong digest, or not finite."""

    learner: str
    fragment: int
    ask: Asking
    reason: str
    is_finite: bool = True


@dataclass(frozen=True, slots=True)
class SumArrived:
    """A relay's sum of contributions arrived, finite and with the announced digest.

    ``at`` is the relay that has it; empty: this process.
    """

    relay: str
    fragment: int
    number: int
    asks: tuple[Asking, ...]
    nbytes: int
    at: str = ""


@dataclass(frozen=True, slots=True)
class SumCorrupt:
    """A relay's sum is invalid, or its upload stopped."""

    relay: str
    fragment: int
    number: int
    asks: tuple[Asking, ...]
    reason: str
    at: str = ""


@dataclass(frozen=True, slots=True)
class CopyArrived:
    """A whole fragment arrived and is installed (initial weights, or a restored copy)."""

    learner: str
    fragment: int
    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class CopyCorrupt:
    """A whole fragment did not arrive, or arrived corrupted."""

    learner: str
    fragment: int
    attempt: int
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
    | SumArrived
    | SumCorrupt
    | CopyArrived
    | CopyCorrupt
    | CheckpointHeard
    | Done
    | Failed
)


FromRelay = BodyArrived | BodyCorrupt | SumArrived | SumCorrupt | Sum


ToRelay = (
    RelayAccepted
    | RelayWelcome
    | Refusal
    | Expect
    | Unexpect
    | Fold
    | Drop
    | FoldSum
    | DropSum
    | ForgetFolded
    | Collect
    | Collected
    | SumOutcome
)


RelayEvent = (
    Tick
    | Connected
    | Received
    | Lost
    | BodyArrived
    | BodyCorrupt
    | SumArrived
    | SumCorrupt
    | Done
    | Failed
)


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The training loop is at a step boundary. ``tokens`` were trained since the last one.

    ``batches`` counts the batches that the loop took of its present leased partition since then.
    """

    tokens: int
    batches: int = 0


@dataclass(frozen=True, slots=True)
class Paused:
    """The training loop has stopped stepping and requests the orders of this boundary."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The process was asked to stop: its loop steps no more, and its training is to be drained."""

    why: str


@dataclass(frozen=True, slots=True)
class BodyEncoded:
    """A contribution's payload is encoded and ready to be sent, with this digest."""

    fragment: int
    ask: Asking
    digest: str


@dataclass(frozen=True, slots=True)
class KeptFragment:
    """A fragment as stored in this learner's own checkpoint.

    ``steps`` and ``tokens`` count the training in its parameters beyond ``version``. ``digest`` and
    ``seal`` are those of the version's announcement. ``again`` is as in `Holding`.
    """

    fragment: int
    version: Version
    steps: int
    tokens: int
    digest: str = ""
    seal: str = ""
    again: int = field(default=0, metadata=RARE)


@dataclass(frozen=True, slots=True)
class Began:
    """The run has admitted this process. Precedes all other facts.

    ``kept`` lists every fragment of its own checkpoint; empty: it has none. ``why`` describes where
    that state comes from, or why there is none. ``seeks_donor``: without a checkpoint, it requests
    the optimizer state of a healthy learner. ``gives``: it shares its own state with other
    learners. ``steps_alone`` and ``tokens_alone`` count what a device has trained since its last
    visit, and has reported to no process.
    """

    kept: tuple[KeptFragment, ...] = ()
    why: str = ""
    seeks_donor: bool = False
    gives: bool = False
    steps_alone: int = field(default=0, metadata=RARE)
    tokens_alone: int = field(default=0, metadata=RARE)


@dataclass(frozen=True, slots=True)
class GainsMeasured:
    """The evaluator has measured gains; see `Gains`."""

    step: int
    gains: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class VisitEnded:
    """A device is about to leave, and its loop takes no more steps."""


@dataclass(frozen=True, slots=True)
class RandomDrawn:
    """The states of the random generators that the loop uses in every step."""

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
    | GainsMeasured
    | VisitEnded
    | RandomDrawn
    | BodyEncoded
    | ChunkArrived
    | DataEvent
    | CheckpointHeard
    | Done
    | Failed
)


CoordinatorEvent = Tick | Connected | Received | Lost | CheckpointWanted | StopWanted


# All messages


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
    | RelayHello
    | ShardHello
    | ShardAdmitted
    | FromShard
    | ToShard
    | FromRelay
    | ToRelay
)
