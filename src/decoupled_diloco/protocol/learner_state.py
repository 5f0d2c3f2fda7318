"""All that a learner's state machine remembers, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from decoupled_diloco.protocol.data_leases.state import DataView
from decoupled_diloco.protocol.grace import MovingAverage
from decoupled_diloco.protocol.messages import Published, Pull
from decoupled_diloco.protocol.options import Alignment
from decoupled_diloco.protocol.revisions import Revision
from decoupled_diloco.protocol.transfer.state import Giving, Search
from decoupled_diloco.protocol.versions import Asking, Holding, Version


@dataclass(frozen=True, slots=True)
class Taken:
    """A snapshot: at which own step, against which version, which counters, for which ticks.

    ``alignment``: as the pull asked that was answered with it.
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
    """A contribution that went out, or is going out.

    ``digest``: of its body, once that is encoded; ``failed``: its upload did not get through, and
    the shard will say so; ``lost``: its outcome went with a connection, and nobody will say what
    became of it; ``version``: what it was accepted into.
    """

    ask: Asking
    taken: Taken
    digest: str = ""
    failed: bool = False
    lost: bool = False
    version: Version | None = None


@dataclass(slots=True)
class FragmentView:
    """One fragment at this learner.

    ``steps_before`` and ``tokens_before``: the learner's own counters up to which its training is
    in ``held`` or discarded, so that c_steps[p] and c_tokens[p] are what it counts beyond
    (`LearnerState.steps_of`, `LearnerState.tokens_of`) and a step does not touch every fragment.

    ``restored``: its parameters come from an earlier life's checkpoint. What that life sent after
    it may be in any newer version, so that only an overwrite is safe.

    ``unfit``: what was made from ``held``, or before, was refused for its values.

    ``alone``: of the steps since ``held`` was applied, those taken while nothing was heard of its
    shard, until its link was here again; see `learner_fragments.is_apart`.

    ``merged_step``: the newest own step that is in an accepted contribution. ``seals``: digest and
    seal of the versions that are here or on their way.

    ``fetched_from``: when its newest fetch began. ``following``: the newest announcements, each of
    a difference to the one before it.

    ``sent``: what was made from ``held``. There is one at a time: from sending it until a newer
    copy is applied no other is, so that carrying subtracts exactly what was sent. ``late``: what
    was made from older copies, and has no outcome yet; it is no longer in the parameters.
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
    unfit: bool = False
    alone: int = 0
    merged_step: int = 0
    seals: dict[Version, tuple[str, str]] = field(default_factory=dict)

    @property
    def newest(self) -> Version | None:
        """The newest version that is here, applied or staged."""
        return self.staged or self.held

    def told(self, message: Published, chain: int) -> None:
        """A copy is announced; of those that are no longer here nothing is kept."""
        newest = self.newest
        later = [each for each in self.following if newest is None or each.version > newest]
        joins = bool(later) and message.difference and later[-1].version == message.base
        self.following = (*later, message)[-chain:] if joins else (message,)
        here = (self.held, self.staged, self.fetching)
        self.seals = {version: seal for version, seal in self.seals.items() if version in here}
        self.seals[message.version] = (message.digest, message.seal)
        self.latest = message

    def next_difference(self) -> Published | None:
        """The announcement that follows what is here."""
        newest = self.newest
        follows = (each for each in self.following if each.difference and each.base == newest)
        return None if newest is None else next(follows, None)

    def holding(self, fragment: int) -> Holding:
        """What a shard is told of the version that is held."""
        assert self.held is not None
        return Holding(fragment, self.held, *self.seals.get(self.held, ("", "")))


@dataclass(slots=True)
class ShardView:
    """One shard, as the learner sees it.

    ``news``: announcements that its welcome has promised and that have not come; ``None``: no
    welcome yet. ``dismissed``: it can take nothing from who is about to go. ``coming``: what it
    will probably ask for next. ``copy_at``: when a copy of it has come last. ``wanted``: fragments
    whose newest copy waits for its turn, in order. ``crowded``: a difference could not be had, as a
    rule because it was superseded, and ever since copies have been waiting. ``heard_step``: the own
    step at which it has said something last.
    """

    linked: bool = False
    offset: int | None = None
    clock: int = 0
    clock_at: float | None = None
    tick_seconds: MovingAverage = field(default_factory=MovingAverage)
    finished: bool = False
    news: int | None = None
    dismissed: bool = False
    coming: tuple[int, ...] = ()
    wanted: dict[int, None] = field(default_factory=dict)
    crowded: bool = False
    heard_step: int = 0
    copy_at: float = float("-inf")


@dataclass(slots=True)
class Recovery:
    """How this process comes by its state; see `recovery`.

    ``patient_until``: a shard that is out of reach is waited for until then.
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

    ``attention``: fragments for which a boundary may bring something: a staged copy, a pull.
    ``retrying``: fragments of which a copy may have to be asked for again. ``leaving``: why this
    learner is about to go. ``givings``: to whom this learner gives its optimizer's state.
    ``coordinated``: the coordinator can be told things. ``data``: the leased parts of the data;
    ``None``: the loop does not use them.
    ``checkpoint``: the checkpoint of the run that its part was taken of last; ``checkpoint_heard``:
    the newest that it has heard of, whose part is due at the next boundary;
    ``checkpoint_just_taken``: the last boundary was one for a part.
    ``revision``: of H and τ, that holds, and the next ones that are heard of. ``twins``: learners
    that seem to train on the same data as this one. ``refusals``: how many contributions were not
    merged, by verdict.
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
    givings: dict[str, Giving] = field(default_factory=dict)
    coordinated: bool = False
    data: DataView | None = None
    checkpoint: int = 0
    checkpoint_heard: int = 0
    checkpoint_just_taken: bool = False
    revision: Revision | None = None
    next_revisions: tuple[Revision, ...] = ()
    twins: set[str] = field(default_factory=set)
    refusals: dict[str, int] = field(default_factory=dict)

    def steps_of(self, view: FragmentView) -> int:
        """c_steps[p]: inner steps that are in the parameters and in no version that is held."""
        return self.step - view.steps_before

    def tokens_of(self, view: FragmentView) -> int:
        """c_tokens[p]: tokens of those steps."""
        return self.tokens - view.tokens_before

    def has_rest(self, view: FragmentView) -> bool:
        """Whether its parameters are not those of the version that is held."""
        return view.held is not None and view.staged is None and self.steps_of(view) > 0

    def look_away(self) -> None:
        """Fragments that nothing is left to be done for need no attention."""
        for index in list(self.attention):
            view = self.fragments[index]
            if view.staged is None and view.pull is None:
                self.attention.discard(index)

    def check_fragments(self) -> None:
        """Asserts what must hold of each fragment."""
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
