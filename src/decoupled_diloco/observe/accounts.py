"""Where a run's learner-time and its tokens went: nothing is left over, nothing is counted twice.

**Time.** The run's span reaches from the first finished step of a learner to the last. A learner's
time is *allocated* from the beginning of the span, or from its process's start if that is later, to
the end of the span, or to the moment it left on purpose. `TIME_PARTS` are its parts. Tokens are
thrown away, not seconds: so *discarded* is the share of its stepping time that its tokens were. It
is *waiting* if it is ordered to hold (synchronous baselines), or is more than ``GAP_MEDIANS`` of
its median steps without a step; then one median counts as the step. *Other* includes what follows
its own end.

**Goodput** is useful / allocated. The paper counts every step as useful: its goodput is our
*stepping* share, (useful + discarded) / allocated. Its **uptime** is the share of the span in which
at least one learner steps.

**Tokens** are counted per fragment, because a merge takes one of P fragments
(`decoupled_diloco.observe.ledger`). `TOKEN_PARTS` are the parts of what a learner was trained on.
*Merged* is what is in a merged copy, as the learner took it; of what it had not taken when its life
or the tape ended, as the shards say. What is *given up* the shards did not merge either, as far as
the tape says. *Left behind* is what was not merged, though perhaps under way, when nothing of it
could be delivered any more. What was refused because it came too late counts as *unsent*.

Discarded is everything but *merged* and *unsent*. A version that was merged and then lost with its
shard, before a learner had taken it, counts as merged until a round goes on from what was restored.
What one life was trained on and a later one, from a checkpoint, got merged is merged, and no longer
the earlier one's rest.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from decoupled_diloco.observe.ledger import GivenUpTokens, Name, Open
from decoupled_diloco.observe.run_data import GAP_MEDIANS, LearnerLog, ProcessLife
from decoupled_diloco.observe.run_facts import RunFacts
from decoupled_diloco.observe.shard_data import RoundLog

NANO = 1_000_000_000

Doing = Literal["stepping", "waiting", "down", "joining", "other"]
"""What a learner does at an instant."""


class Folded(NamedTuple):
    """A contribution, named by its asking, that a shard merged into ``version`` (term, counter)."""

    fragment: int
    ask: Name
    version: tuple[int, int]
    tokens: int
    arrived_at: float


@dataclass(frozen=True, slots=True)
class Activity:
    """What a learner did from one instant to another, seconds since the run's first record."""

    doing: Doing
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class TimeAccount:
    """Learner-time in whole nanoseconds, so that the parts are exactly the whole."""

    allocated: int = 0
    useful: int = 0
    discarded: int = 0
    waiting: int = 0
    down: int = 0
    joining: int = 0
    other: int = 0

    @property
    def goodput(self) -> float | None:
        """Share of the allocated time in which training was done that was not thrown away."""
        return self.useful / self.allocated if self.allocated else None

    @property
    def stepping(self) -> float | None:
        """Share of the allocated time in steps; what the paper calls goodput."""
        return (self.useful + self.discarded) / self.allocated if self.allocated else None

    def share(self, part: str) -> float:
        """A part's share of the allocated time; 0 if there is none."""
        value: int = getattr(self, part)
        return value / self.allocated if self.allocated else 0.0

    def seconds(self, part: str) -> float:
        """A part, or ``allocated``, in seconds."""
        value: int = getattr(self, part)
        return value / NANO


TIME_PARTS = {
    "useful": "in steps whose training is in the result, or may still get there",
    "discarded": "in steps whose training was thrown away",
    "waiting": "alive and standing still",
    "down": "from the end of a process to the start of its next one",
    "joining": "until it held the global weights and began its first step",
    "other": "in steps that a crash or the end cut short",
}
"""The parts of `TimeAccount.allocated`, and what they mean."""


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Tokens in whole *fragment tokens*: each token counts once for each of P fragments."""

    fragments: int = 1
    trained: int = 0
    merged: int = 0
    in_flight: int = 0
    missed: int = 0
    given_up: int = 0
    overwritten: int = 0
    crashed: int = 0
    left_behind: int = 0
    unsent: int = 0

    @property
    def discarded(self) -> int:
        """Fragment tokens that were thrown away, for whatever cause."""
        overwritten = self.in_flight + self.missed + self.given_up + self.overwritten
        return overwritten + self.crashed + self.left_behind

    @property
    def discarded_share(self) -> float:
        """Share of what was trained that was thrown away; 0 if nothing was trained."""
        return self.discarded / self.trained if self.trained else 0.0

    def tokens(self, part: str) -> float:
        """A part, or ``trained`` or ``discarded``, in tokens."""
        value: int = getattr(self, part)
        return value / self.fragments


TOKEN_PARTS = {
    "merged": "in the global weights",
    "in_flight": "trained between a snapshot and the merged copy that overwrote it",
    "missed": "overwritten by a version that the learner had no part in",
    "given_up": "sent, and the outcome was lost with the link",
    "overwritten": "in flight, missed or given up; only the learner's own tape tells which",
    "crashed": "lost with a process that ended",
    "left_behind": "not merged when the learner left or its run was over",
    "unsent": "not merged when the tape ends, on a learner that still lives",
}
"""The parts of `TokenAccount.trained`, and what they mean."""


def part_in_words(part: str) -> str:
    """A part's name and meaning.

    >>> part_in_words("in_flight")
    'in flight: trained between a snapshot and the merged copy that overwrote it'
    """
    return f"{part.replace('_', ' ')}: {(TIME_PARTS | TOKEN_PARTS)[part]}"


@dataclass(frozen=True, slots=True)
class LearnerAccount:
    """One learner's time and tokens; ``spans`` follow each other without gaps."""

    name: str
    time: TimeAccount
    tokens: TokenAccount
    spans: tuple[Activity, ...]


@dataclass(frozen=True, slots=True)
class RunAccount:
    """All learners' accounts and their sum.

    ``span`` and ``uptime`` are ``None`` if there was no step, or only one.
    """

    learners: dict[str, LearnerAccount]
    time: TimeAccount
    tokens: TokenAccount
    span: tuple[float, float] | None
    uptime: float | None


def account_for(run: RunFacts) -> RunAccount:
    """The accounts of a run; see the head of this file for what counts as what."""
    fragments, folded, span = max(1, run.fragments), _folded(run), run.training_span
    learners = {}
    for name, learner in run.trained.items():
        tokens = _tokens(learner, fragments, folded.get(name, []))
        spans = () if span is None else _clipped(_spans(learner, span[1]), *span)
        learners[name] = LearnerAccount(name, _time(spans, tokens), tokens, spans)
    every = learners.values()
    return RunAccount(
        learners=learners,
        time=TimeAccount(*map(sum, zip(*(astuple(one.time) for one in every), strict=True))),
        tokens=TokenAccount(
            fragments, *map(sum, zip(*(astuple(one.tokens)[1:] for one in every), strict=True))
        ),
        span=span,
        uptime=_uptime(every, span),
    )


def _time(spans: Iterable[Activity], tokens: TokenAccount) -> TimeAccount:
    nano = dict.fromkeys(get_args(Doing), 0)
    for span in spans:
        nano[span.doing] += round(span.end * NANO) - round(span.begin * NANO)
    stepping = nano.pop("stepping")
    discarded = round(stepping * tokens.discarded_share)
    allocated = stepping + sum(nano.values())
    return TimeAccount(allocated, stepping - discarded, discarded, **nano)


def _spans(learner: LearnerLog, until: float) -> Iterator[Activity]:
    """What a learner did from its process's start to the end of the run or its own."""
    median = _median_step(learner)
    for life, following in zip(learner.lives, [*learner.lives[1:], None], strict=True):
        latest = max(until, life.started_at)
        end = latest if life.ended_at is None else min(life.ended_at, latest)
        if following is not None:
            end = min(end, following.began_at)
        yield from _spans_of_life(life, end, median)
        if following is not None:
            yield Activity("down", end, following.began_at)
        elif life.crashed:
            yield Activity("down", end, max(end, until))


def _spans_of_life(life: ProcessLife, end: float, median: float) -> Iterator[Activity]:
    limit = GAP_MEDIANS * median
    first = life.steps_at[0] if life.steps_at else end
    at = first if life.ready_at is None else min(life.ready_at, first)
    yield Activity("joining", min(life.began_at, end), at)
    for index, step in enumerate(life.steps_at):
        yield from _step(life, at, step, median, limit, "waiting" if index else "joining")
        at = step
    if not life.steps_at:
        yield Activity("joining", at, end)
        return
    for begin, close, held in _cut_by_holds(life, at, end):
        standing = held or (not life.over and close - begin > limit)
        yield Activity("waiting" if standing else "other", begin, close)


def _step(
    life: ProcessLife, begin: float, end: float, median: float, limit: float, idle: Doing
) -> Iterator[Activity]:
    """From one step boundary to the next: held, standing still, then the step."""
    parts = list(_cut_by_holds(life, begin, end))
    free = sum(close - start for start, close, held in parts if not held)
    standing = free - median if free > limit else 0.0
    for start, close, held in parts:
        if held:
            yield Activity("waiting", start, close)
            continue
        cut = min(close, start + standing)
        standing -= cut - start
        yield Activity(idle, start, cut)
        yield Activity("stepping", cut, close)


def _cut_by_holds(
    life: ProcessLife, begin: float, end: float
) -> Iterator[tuple[float, float, bool]]:
    """The time from ``begin`` to ``end`` in parts, each with whether the learner was held."""
    for hold_begin, hold_end in life.holds_between(begin, end):
        yield (begin, hold_begin, False)
        yield (hold_begin, hold_end, True)
        begin = hold_end
    yield (begin, end, False)


def _median_step(learner: LearnerLog) -> float:
    """Median seconds of a step, holds taken off; 0 with fewer than two steps."""
    gaps = [
        sum(close - start for start, close, held in _cut_by_holds(life, a, b) if not held)
        for life in learner.lives
        for a, b in pairwise(life.steps_at)
    ]
    return statistics.median(gaps) if gaps else 0.0


def _clipped(spans: Iterable[Activity], begin: float, end: float) -> tuple[Activity, ...]:
    """The spans within the run's; neighbours that do the same are one, empty ones are left out."""
    kept: list[Activity] = []
    for span in spans:
        span = replace(span, begin=max(span.begin, begin), end=min(span.end, end))
        if span.end <= span.begin:
            continue
        if kept and (kept[-1].doing, kept[-1].end) == (span.doing, span.begin):
            span = replace(kept.pop(), end=span.end)
        kept.append(span)
    return tuple(kept)


def _uptime(accounts: Iterable[LearnerAccount], span: tuple[float, float] | None) -> float | None:
    if span is None or span[1] <= span[0]:
        return None
    steps = sorted(
        (s.begin, s.end) for account in accounts for s in account.spans if s.doing == "stepping"
    )
    covered, end = 0.0, span[0]
    for a, b in steps:
        covered += max(0.0, b - max(a, end))
        end = max(end, b)
    return covered / (span[1] - span[0])


def _folded(run: RunFacts) -> dict[str, list[Folded]]:
    """What the shards have merged of each learner."""
    found: dict[str, list[Folded]] = {}
    merged = [r for r in run.rounds if r.merged and r.outcome.version is not None]
    restored = _restored(merged)
    for r in merged:
        result = r.outcome
        assert result.version is not None
        version = (result.version.term, result.version.counter)
        later = restored.get(result.fragment, {}).items()
        if any(term > version[0] and counter < version[1] for term, counter in later):
            continue  # lost with the shard, before any learner had taken it
        for part in r.folded:
            seconds = part.delivered_seconds
            arrived_at = r.finished_at if seconds is None else r.opened_at + seconds
            name = (part.ask.term, part.ask.number)
            folded = Folded(result.fragment, name, version, part.tokens, arrived_at)
            found.setdefault(part.learner, []).append(folded)
    return found


def _restored(merged: Iterable[RoundLog]) -> dict[int, dict[int, int]]:
    """For each fragment and term the counter that its shard went on from: the least of its bases.

    A shard that starts again gives what it has restored its new term and the old counter.
    """
    found: dict[int, dict[int, int]] = {}
    for r in merged:
        base = r.outcome.base
        if base is not None:
            counters = found.setdefault(r.fragment, {})
            counters[base.term] = min(base.counter, counters.get(base.term, base.counter))
    return found


def _tokens(learner: LearnerLog, fragments: int, folded: list[Folded]) -> TokenAccount:
    """One learner's tokens, all its lives together."""
    total = Counter[str]()
    rests: list[tuple[str, Counter[int]]] = []
    begins = [-math.inf, *(life.started_at for life in learner.lives[1:]), math.inf]
    for life, (begin, end) in zip(learner.lives, pairwise(begins), strict=False):
        own = [each for each in folded if begin <= each.arrived_at < end]
        tell = _tokens_told if life.overwritten is None else _tokens_heard_of
        parts, rest, brought = tell(life, fragments, own)
        total.update(parts)
        total["merged"] -= _hand_on([earlier for _, earlier in rests], brought)
        rests.append((_fate_of_the_rest(life), rest))
    for fate, rest in rests:
        total[fate] += rest.total()
    return TokenAccount(fragments, **total)


_OfLife = tuple[Counter[str], Counter[int], Counter[int]]
"""One life's tokens but for its rest; that rest by fragment; and likewise what is merged of earlier
lives' tokens, which this one brought."""


def _tokens_told(life: ProcessLife, fragments: int, folded: list[Folded]) -> _OfLife:
    """Of a life that has told it itself."""
    ledger = life.ledger
    brought, rest = Counter(ledger.brought), Counter[int]()
    settled = {(e.fragment, e.sent[0]) for e in ledger.given_up if e.sent is not None}
    others = [each for each in folded if (each.fragment, each.ask) not in settled]
    own = Counter(
        trained=ledger.trained * fragments,
        merged=ledger.merged,
        in_flight=ledger.in_flight,
        missed=ledger.missed,
    )
    entries: list[tuple[GivenUpTokens | Open, int]]
    entries = [(entry, _yet_merged(entry, folded)) for entry in ledger.given_up]
    entries += [(entry, _delivered(entry, others)) for entry in ledger.open(fragments)]
    for entry, found in entries:
        old = min(entry.carried, found)
        brought[entry.fragment] += old
        own["merged"] += found
        if isinstance(entry, Open) or entry.under_way:
            rest[entry.fragment] += entry.tokens - (found - old)
        else:
            own["given_up"] += entry.tokens - (found - old)
    return own, rest, brought


def _tokens_heard_of(life: ProcessLife, fragments: int, folded: list[Folded]) -> _OfLife:
    """Of a life that only the shards tell of."""
    trained, overwritten, folds = life.ledger.trained, life.overwritten or 0, Counter[int]()
    for each in folded:
        folds[each.fragment] += each.tokens
    rest = Counter({fragment: max(0, trained - folds[fragment]) for fragment in range(fragments)})
    for fragment, tokens in rest.items():
        rest[fragment] -= min(tokens, overwritten)
        overwritten -= tokens - rest[fragment]
    brought = Counter({f: max(0, tokens - trained) for f, tokens in folds.items()})
    whole, merged = trained * fragments, folds.total()
    lost = whole + brought.total() - merged - rest.total()
    return Counter(trained=whole, merged=merged, overwritten=lost), rest, brought


def _hand_on(rests: list[Counter[int]], brought: Counter[int]) -> int:
    """What a later life got merged is no longer an earlier one's rest; the latest pays first.

    Returns:
        What no earlier life has: its tape is lost.
    """
    unknown = 0
    for fragment, tokens in brought.items():
        for rest in reversed(rests):
            taken = min(tokens, rest[fragment])
            rest[fragment] -= taken
            tokens -= taken
        unknown += tokens
    return unknown


def _fate_of_the_rest(life: ProcessLife) -> str:
    """What becomes of tokens that a life has not delivered; if it still lives, it still may."""
    if life.crashed:
        return "crashed"
    return "left_behind" if life.over or life.ended_at is not None else "unsent"


def _yet_merged(entry: GivenUpTokens, folded: Iterable[Folded]) -> int:
    """What the shards merged of tokens that the learner gave up."""
    if entry.sent is None:
        return 0
    ask, tokens = entry.sent
    known = any((each.fragment, each.ask) == (entry.fragment, ask) for each in folded)
    return min(tokens, entry.tokens + entry.carried) if known else 0


def _delivered(entry: Open, folded: Iterable[Folded]) -> int:
    """What the shards merged of tokens that a life has left open, or has carried."""
    newer = sum(
        each.tokens
        for each in folded
        if each.fragment == entry.fragment and (entry.held is None or each.version > entry.held)
    )
    return min(entry.tokens + entry.carried, newer)
