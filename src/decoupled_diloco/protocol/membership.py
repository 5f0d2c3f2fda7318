"""Who is live at a shard: records, leases, epochs (rules 10 and 13).

A lease is renewed by any byte that is heard, and expires only in a tick; a tick that comes late
moves every lease by its lateness, so that a paused shard does not evict the world.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from decoupled_diloco.protocol.adapt import Uplink
from decoupled_diloco.protocol.grace import MovingAverage
from decoupled_diloco.protocol.revisions import Needs
from decoupled_diloco.protocol.versions import Holding, Version

LEASE_SECONDS = 10.0
"""Ten of the transport's one-second pings: nine may be lost in a row."""

RECONNECT_SECONDS = 3.0
"""How long a learner whose connection broke stays live: a second, and two retries with backoff."""

STANDS_SECONDS = 1.0
STANDS_STEPS = 10.0
STANDS_OWN_STEPS = 3.0
"""A loop from which no step was heard for all of these stands still: seconds, steps of the fastest
learner, steps of its own."""

VERSION_MAX = 2**48
"""Versions from here on are nobody's: the next ones must still fit into a message (2^53)."""

STEPS_AHEAD_MAX = 10**6
"""No honest learner makes so many steps between two reports, or while it is away."""

TOKENS_AHEAD_MAX = 10**12
"""Nor trains so many tokens."""

CLOCK_MAX = 2**48
"""A restoring shard believes its learners up to here: room for the clock to go on (2^53)."""

STEPS_BURST = 100.0
"""So many steps a learner may be ahead of what its pace allows."""

STEPS_PER_SECOND = (10.0, 2000.0)
"""Whatever its pace, so many steps a second are believed; and no more than so many."""

PACE_FACTOR = 4.0
"""A learner may have become faster by so much while nothing was heard of it."""

PACE_SMOOTHING = 0.3
"""Weight of the newest report: a learner that becomes faster is believed soon."""

DRAIN_SECONDS = 1.0
"""Reports that have waited for a paused shard come all at once, within this time."""

TOKENS_FACTOR = 32
"""A learner's tokens a step are believed up to so many times the (lower) median learner's."""


@dataclass(slots=True)
class Pace:
    """What a shard has itself seen of a learner's steps, by the arrival of its reports (rule 13).

    ``credit``: steps that were believable at ``at`` and not reported; ``seconds``: of a step, known
    from the second report on, since the first step may have had to wait and to compile.
    """

    at: float
    reported: bool = False
    credit: float = STEPS_BURST
    seconds: MovingAverage = field(default_factory=MovingAverage)

    def allows(self, now: float) -> int:
        """How many more steps can be true at this instant."""
        least, most = STEPS_PER_SECOND
        seen, passed = self.seconds.value, now - self.at
        rate = least if not seen else min(most, max(least, PACE_FACTOR / seen))
        kept = self.credit if passed <= DRAIN_SECONDS else min(self.credit, STEPS_BURST)
        return int(kept + passed * rate)

    def saw(self, now: float, steps: int) -> None:
        """So many more steps are believed."""
        self.credit = float(self.allows(now) - steps)
        if self.reported and now > self.at:
            self.seconds.update((now - self.at) / steps, PACE_SMOOTHING)
        self.at, self.reported = now, True

    def believes(self, seconds: float, fastest: float) -> float:
        """The step time that a learner names, if its reports come as fast.

        Of whom only one report has come is not believed to be faster than the fastest other.
        """
        seen = self.seconds.value
        return max(seconds, fastest if seen is None else seen / 2)


@dataclass(slots=True)
class Member:
    """A live learner, as one shard sees it.

    Attributes:
        held_at: When it has said last that it holds another version.
        stands: Its loop stands still, and the clock goes on without it.
        leaving_with: It is about to go, and has something new of these fragments.
        under_way: Fragments that it was asked for and has not delivered.
        arrears: Fragments that it is to be asked for once its link is free: others were under way,
            or their round still lacks its quorum.
        pressed: It had arrears when it delivered last: it sends one body at a time.
        heard_at: When each fragment heard it last.
        is_new: It came while the clock was being restored: its steps begin where that then is.
        handed_in: Fragments that have had what it had when it said that it goes.
        leavings: How often it has said so.
        uplink: What its bodies have told of its link.
        needs: What its link needs, where H and τ follow the links.
    """

    learner: str
    epoch: int
    offset: int
    step: int
    lease_until: float
    connected: bool = True
    reported_at: float | None = None
    step_seconds: float = 0.0
    held: dict[int, Version] = field(default_factory=dict)
    held_at: float = 0.0
    stands: bool = False
    leaving_with: frozenset[int] | None = None
    under_way: set[int] = field(default_factory=set)
    arrears: set[int] = field(default_factory=set)
    pressed: bool = False
    heard_at: dict[int, float] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)
    uplink: Uplink = field(default_factory=Uplink)
    needs: Needs = field(default_factory=Needs)
    leavings: int = 0
    is_new: bool = False

    @property
    def run_step(self) -> int:
        """s_m: what the shard told it at join, and its own steps since."""
        return self.offset + self.step


def credible(holdings: Iterable[Holding], owned: Container[int]) -> dict[int, Version]:
    """The versions that a learner says it holds, as far as they can be this shard's.

    >>> credible([Holding(0, Version(1, 7)), Holding(9, Version(1, 7))], [0, 1])
    {0: Version(term=1, counter=7)}
    """
    return {
        holding.fragment: holding.version
        for holding in holdings
        if holding.fragment in owned
        and max(holding.version.term, holding.version.counter) < VERSION_MAX
    }


@dataclass(slots=True)
class Identity:
    """The newest epoch of a learner id that a shard has met, whether live or not.

    ``steps`` and ``tokens``: as it has reported them, ``earlier_tokens``: of the epochs before;
    ``run_step``: the last that was believed of this epoch; ``sizes``: of its last contributions, in
    usual norms of their fragments; see `gate`.
    """

    epoch: int
    nonce: str
    tokens: int = 0
    steps: int = 0
    earlier_tokens: int = 0
    run_step: int | None = None
    pace: Pace | None = None
    sizes: list[float] = field(default_factory=list)


def report_problem(step_known: int, step: int, tokens_known: int, tokens: int) -> str | None:
    """Why a report cannot be true, in words; ``None`` if it can.

    >>> report_problem(3, 4, 30, 40), report_problem(3, 2**50, 30, 40)
    (None, 'step 1125899906842624 after step 3')
    """
    if step > step_known + STEPS_AHEAD_MAX:
        return f"step {step} after step {step_known}"
    if tokens > tokens_known + TOKENS_AHEAD_MAX:
        return f"{tokens} tokens after {tokens_known}"
    return None


def identity_problem(known: Identity | None, epoch: int, nonce: str) -> str | None:
    """Why a hello with this epoch and nonce is refused, in words; ``None`` if it is not.

    >>> identity_problem(Identity(3, "a"), 2, "b")
    'epoch 2 is older than epoch 3: another process has joined under this id since'
    """
    if known is None or epoch > known.epoch:
        return None
    if epoch < known.epoch:
        return (
            f"epoch {epoch} is older than epoch {known.epoch}: "
            "another process has joined under this id since"
        )
    if nonce != known.nonce:
        return f"two processes claim epoch {epoch} of this id: give each learner an id of its own"
    return None
