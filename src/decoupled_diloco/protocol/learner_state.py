"""The whole state of a learner's machine, as plain data."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from decoupled_diloco.protocol.clock import MovingAverage
from decoupled_diloco.protocol.messages import (
    Alignment,
    Asking,
    Holding,
    Lease,
    Published,
    Pull,
    Revision,
    TransferReady,
    Version,
)


@dataclass(slots=True)
class TrainedRun:
    """Consecutive steps from ``step`` on that trained ``stride`` batches each of one lease."""

    step: int
    steps: int
    trained: int
    stride: int

    def trained_by(self, step: int) -> int:
        """Return how many batches of the lease were trained by the end of a step."""
        return self.trained + self.stride * min(self.steps, step - self.step + 1)


@dataclass(slots=True)
class LeasedPart:
    """One lease at its learner. ``runs`` records which steps trained the non-durable batches."""

    lease: Lease
    trained: int
    durable: int
    length: int | None = None
    repeated: int = 0
    runs: deque[TrainedRun] = field(default_factory=deque)

    @property
    def settled(self) -> bool:
        """Whether the whole partition is durable."""
        return self.length is not None and self.durable >= self.length


@dataclass(slots=True)
class DataView:
    """The leased data at this learner.

    Attributes:
        parts: Number of partitions of the data.
        want: Number of unfinished leases that the learner keeps.
        linked: Whether the coordinator is connected.
        current: Number of the lease that the loop trains; 0: none.
        repeating: Whether the loop repeats a partition that it had finished.
        leave: Whether the loop should request a partition before its next batch.
        leases: In training order.
        pending: Batches taken before their step is finished, as (lease, batches, repeated).
        durable_step: Every fragment has an accepted contribution of this step or a later one.
        reported_step: Own step at the last report.
        stale: Whether batches have become durable since the last report.
        refused: Why no leases are available, if the coordinator refused.
    """

    parts: int
    want: int
    linked: bool
    current: int = 0
    repeating: bool = False
    leave: bool = False
    leases: dict[int, LeasedPart] = field(default_factory=dict)
    pending: list[tuple[int, int, bool]] = field(default_factory=list)
    durable_step: int = 0
    reported_step: int = 0
    stale: bool = False
    refused: str = ""

    def next_batch(self) -> tuple[Lease, int]:
        """Return the loop's present lease and the number of its next batch."""
        part = self.leases[self.current]
        waiting = sum(n for lease, n, again in self.pending if lease == self.current and not again)
        return part.lease, _again_from(part) if self.repeating else part.trained + waiting


def _again_from(part: LeasedPart) -> int:
    """Return the first batch of a repeat: the lease's start, or 0 if the lease had no batches."""
    start = part.lease.start
    return start if part.length is None or start < part.length else 0


@dataclass(slots=True)
class Search:
    """The search for a state provider; over when ``phase`` is ``found`` or ``given up``.

    ``until`` is the end of the present phase.
    """

    phase: Literal["waiting", "asking", "copying", "found", "given up"] = "waiting"
    attempt: int = 0
    until: float | None = None
    named: TransferReady | None = None
    refused: tuple[str, ...] = ()


@dataclass(slots=True)
class StateRequest:
    """A learner that waits for this one's state until ``until``; ``seen`` must be applied first."""

    attempt: int
    seen: tuple[Holding, ...]
    until: float
    copied: bool = False


# Fragments, shards, and the whole


@dataclass(frozen=True, slots=True)
class Taken:
    """A snapshot: its step, base, counters, and the ticks for which it is valid.

    ``alignment`` is that of the request that the snapshot answered.
    """

    step: int
    base: Version
    steps: int
    tokens: int
    first_tick: int
    last_tick: int
    alignment: Alignment = "overwrite"


@dataclass(slots=True)
class Sent:
    """A contribution that is in progress or delivered.

    ``digest`` is that of its encoded payload. ``failed``: the upload failed, and the shard will
    send an outcome. ``lost``: the outcome was lost with a connection and will not be repeated.
    ``version`` is the version that accepted it. ``kept``: its shard has folded it (rule 23).
    ``opened``: the learner has helped to open its secure sum (rule 24). ``burnt``: that sum is
    abandoned, or requested again, so its training must leave the parameters.
    """

    ask: Asking
    taken: Taken
    digest: str = ""
    failed: bool = False
    lost: bool = False
    version: Version | None = None
    kept: bool = False
    opened: bool = False
    burnt: bool = False


@dataclass(slots=True)
class FragmentView:
    """One fragment at this learner.

    ``steps_before`` and ``tokens_before`` are the values of the learner's counters up to which its
    training is in ``held`` or discarded. c_steps[p] and c_tokens[p] are the differences to the
    present counters (`LearnerState.steps_of`, `LearnerState.tokens_of`), so that a step need not
    update every fragment.

    ``restored``: the parameters come from a checkpoint of an earlier incarnation. What that
    incarnation sent after the checkpoint may be in any newer version, so only an overwrite is safe.

    ``again`` counts the contributions that this device has made from ``held`` before it started
    from it again.

    ``dropped`` is why its training is dropped with the next copy: a contribution made from ``held``
    or before was refused for its values, or had weight 0.

    ``alone`` counts the steps since ``held`` was applied that were taken without any message from
    the shard, up to its last welcome; see `copies.has_diverged`.

    ``merged_step`` is the newest own step in an accepted contribution. ``seals`` holds the digest
    and seal of each version that is local or being fetched.

    ``fetched_from`` is when its newest fetch started. ``following`` holds the newest announcements,
    each of a difference to the one before it.

    ``sent`` is the contribution made from ``held``. There is at most one: no other is sent until a
    newer copy is applied, so that `carry` subtracts exactly what was sent. ``late`` holds
    contributions made from older copies that have no outcome yet; they are no longer in the
    parameters.
    """

    held: Version | None = None
    staged: Version | None = None
    latest: Published | None = None
    following: tuple[Published, ...] = ()
    fetching: Version | None = None
    fetch_whole: bool = False
    fetched_from: float = 0.0
    retry_at: float | None = None
    steps_before: int = 0
    tokens_before: int = 0
    snapshot: Taken | None = None
    sent: Sent | None = None
    late: dict[Asking, Sent] = field(default_factory=dict)
    behind: bool = False
    pull: Pull | None = None
    owed_at: int | None = None
    restored: bool = False
    again: int = 0
    dropped: str = ""
    alone: int = 0
    merged_step: int = 0
    seals: dict[Version, tuple[str, str]] = field(default_factory=dict)

    @property
    def newest(self) -> Version | None:
        """The newest local version, applied or staged."""
        return self.staged or self.held

    def announce(self, message: Published, chain: int) -> None:
        """Record an announcement, and drop the seals of versions that are no longer local."""
        newest = self.newest
        later = [each for each in self.following if newest is None or each.version > newest]
        # Only an unbroken chain of differences is useful; a gap starts a new one.
        joins = bool(later) and message.difference and later[-1].version == message.base
        self.following = (*later, message)[-chain:] if joins else (message,)
        here = (self.held, self.staged, self.fetching)
        self.seals = {version: seal for version, seal in self.seals.items() if version in here}
        self.seals[message.version] = (message.digest, message.seal)
        self.latest = message

    def next_difference(self) -> Published | None:
        """Return the announcement of the difference to the newest local version, if any."""
        newest = self.newest
        follows = (each for each in self.following if each.difference and each.base == newest)
        return None if newest is None else next(follows, None)

    def holding(self, fragment: int) -> Holding:
        """Return the message that reports the held version to its shard."""
        assert self.held is not None
        return Holding(fragment, self.held, *self.seals.get(self.held, ("", "")), self.again)


@dataclass(slots=True)
class ShardView:
    """One shard, as the learner sees it.

    ``news`` counts the announcements that the welcome promised and that have not arrived; ``None``:
    no welcome yet. ``dismissed``: the shard can merge nothing more from this leaving learner.
    ``upcoming`` lists the fragments that the shard will probably request next. ``copy_at`` is when
    a copy last arrived from it. ``fetch_queue`` lists, in order, fragments whose newest copy waits
    for a slot. ``crowded``: a fetch of a difference failed, usually because the difference was
    superseded, and copies have been waiting ever since. ``last_message_step`` is the own step at
    the shard's last message.
    """

    linked: bool = False
    offset: int | None = None
    clock: int = 0
    clock_at: float | None = None
    tick_seconds: MovingAverage = field(default_factory=MovingAverage)
    finished: bool = False
    news: int | None = None
    dismissed: bool = False
    upcoming: tuple[int, ...] = ()
    fetch_queue: dict[int, None] = field(default_factory=dict)
    crowded: bool = False
    last_message_step: int = 0
    copy_at: float = float("-inf")


@dataclass(slots=True)
class Recovery:
    """How this process obtains its state; see `recovery`.

    ``patient_until`` is how long it waits for a shard that is unreachable.
    """

    began_at: float
    why: str = ""
    from_checkpoint: bool = False
    patient_until: float | None = None
    search: Search | None = None
    gives: bool = False


@dataclass(slots=True)
class LearnerState:
    """The state of one learner.

    ``attention`` lists the fragments for which a boundary may have work: a staged copy or a
    request. ``retrying`` lists the fragments whose copy may have to be requested again. ``leaving``
    is the reason why this learner is about to leave. ``state_requests`` lists the learners that
    wait for its state. ``coordinated``: the coordinator is connected. ``data`` is its leased data,
    or ``None`` if the loop uses none.

    ``checkpoint`` is the last checkpoint of the run for which it saved a part, ``checkpoint_heard``
    the newest one that it received: its part is due at the next boundary.
    ``checkpoint_just_taken``: the last boundary saved a part.

    ``revision`` is the schedule revision that applies, ``next_revisions`` those that follow.
    ``place`` is the number of a device's place, 0 while it has none, ``None`` if it needs none;
    ``place_step`` is its step when it got the place. ``contributed``: a contribution since then is
    folded. ``visit_over``: it has lost its place, so no step follows.
    ``twins`` lists learners that seem to train on the same data. ``refusals`` counts the
    contributions that were not merged, by verdict. ``is_fresh``: it joined a run in progress with a
    fresh inner optimizer. ``shares_state``: it may share its state with other learners.
    """

    fragments: list[FragmentView]
    shards: list[ShardView]
    step: int = 0
    tokens: int = 0
    discarded_tokens: int = 0
    stepped_at: float | None = None
    step_seconds: MovingAverage = field(default_factory=MovingAverage)
    ready: bool = False
    ending: bool = False
    ended: bool = False
    over: bool = False
    holding: bool = False
    attention: set[int] = field(default_factory=set)
    retrying: set[int] = field(default_factory=set)
    recovery: Recovery | None = None
    leaving: str = ""
    state_requests: dict[str, StateRequest] = field(default_factory=dict)
    coordinated: bool = False
    data: DataView | None = None
    checkpoint: int = 0
    checkpoint_heard: int = 0
    checkpoint_just_taken: bool = False
    revision: Revision | None = None
    next_revisions: tuple[Revision, ...] = ()
    twins: set[str] = field(default_factory=set)
    privacy_spent: bool = False
    refusals: dict[str, int] = field(default_factory=dict)
    place: int | None = None
    place_step: int = 0
    contributed: bool = False
    visit_over: bool = False
    is_fresh: bool = False
    shares_state: bool = True

    def steps_of(self, view: FragmentView) -> int:
        """c_steps[p]: inner steps that are in the parameters but not in the held version."""
        return self.step - view.steps_before

    def tokens_of(self, view: FragmentView) -> int:
        """c_tokens[p]: the tokens of those steps."""
        return self.tokens - view.tokens_before

    def has_unmerged(self, view: FragmentView) -> bool:
        """Whether the parameters differ from the held version."""
        return view.held is not None and view.staged is None and self.steps_of(view) > 0

    def trim_attention(self) -> None:
        """Drop the fragments from ``attention`` that need no more work."""
        for index in list(self.attention):
            view = self.fragments[index]
            if view.staged is None and view.pull is None:
                self.attention.discard(index)

    def check_fragments(self) -> None:
        """Assert the invariants of each fragment."""
        for index, view in enumerate(self.fragments):
            assert view.staged is None or view.held is None or view.staged > view.held
            assert view.snapshot is None or view.snapshot.base == view.held
            assert view.sent is None or view.sent.taken.base == view.held
            assert self.steps_of(view) >= 0 <= self.tokens_of(view)
            waits = view.staged is not None or view.pull is not None
            assert not waits or index in self.attention
            assert view.retry_at is None or index in self.retrying
            assert view.fetching is None or view.latest is not None
            assert view.pull is None or view.held is None or view.pull.base >= view.held
