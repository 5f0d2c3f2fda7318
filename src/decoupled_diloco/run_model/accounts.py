"""Accounts of a run's learner-time and tokens: the parts are disjoint and add up to the whole.

**Time.** The run's span is from the first finished step of any learner to the last. A learner's
time is *allocated* from the start of the span, or of its process if that is later. It ends at the
end of the span, or when the learner leaves on purpose. `TIME_PARTS` are its parts. A run discards
tokens, not seconds. So *discarded* time is stepping time multiplied by the share of the learner's
tokens that were discarded. A learner is *waiting* if it is ordered to hold (synchronous baselines),
or if it makes no step for more than ``GAP_MEDIANS`` median steps. In such a gap, one median counts
as the step. *Other* includes the time after its own end. A device's time is allocated while it
visits the run, and its wait for a place is *joining*.

**Goodput** is useful / allocated. The paper counts every step as useful. Its goodput is the
*stepping* share here, (useful + discarded) / allocated. Its **uptime** is the share of the span in
which at least one learner steps.

**Tokens** are counted per fragment, because a merge takes one of P fragments
(`decoupled_diloco.run_model.ledger`). `TOKEN_PARTS` are the parts of a learner's trained tokens.

- *Merged* tokens are in a merged copy that the learner applied. For tokens without such a copy when
  the incarnation or the tape ended, the shards' records decide.
- *Given-up* tokens were not merged by the shards either, according to the tape.
- *Left-behind* tokens were not merged, though perhaps in transit, when delivery became impossible.
- *Unsent* tokens include those that were rejected because they arrived too late.

All tokens except *merged* and *unsent* ones are discarded. A version may be lost with its shard
before any learner applied it. It counts as merged until a round builds on the restored state. If an
incarnation trained tokens and a later one, from its checkpoint, gets them merged, they are merged
and no longer open for the earlier incarnation.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from decoupled_diloco.run_model.facts import (
    GAP_MEDIANS,
    LearnerLog,
    ProcessLife,
    RoundLog,
    RunFacts,
)
from decoupled_diloco.run_model.ledger import GivenUpTokens, Name, Open

NANO = 1_000_000_000

Doing = Literal["stepping", "waiting", "down", "joining", "other"]
"""A learner's activity at an instant."""


class Folded(NamedTuple):
    """A contribution that a shard merged into ``version`` (term, counter); ``ask`` is its pull."""

    fragment: int
    ask: Name
    version: tuple[int, int]
    tokens: int
    arrived_at: float


@dataclass(frozen=True, slots=True)
class Activity:
    """A learner's activity in an interval, in seconds since the run's first record."""

    doing: Doing
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class TimeAccount:
    """Learner-time in integer nanoseconds, so that the parts add up exactly."""

    allocated: int = 0
    useful: int = 0
    discarded: int = 0
    waiting: int = 0
    down: int = 0
    joining: int = 0
    other: int = 0

    @property
    def goodput(self) -> float | None:
        """Share of the allocated time spent on training that was not discarded."""
        return self.useful / self.allocated if self.allocated else None

    @property
    def stepping(self) -> float | None:
        """Share of the allocated time spent in steps: the paper's goodput."""
        return (self.useful + self.discarded) / self.allocated if self.allocated else None

    def share(self, part: str) -> float:
        """Return a part's share of the allocated time; 0 if no time is allocated."""
        value: int = getattr(self, part)
        return value / self.allocated if self.allocated else 0.0

    def seconds(self, part: str) -> float:
        """Return a part, or ``allocated``, in seconds."""
        value: int = getattr(self, part)
        return value / NANO


TIME_PARTS = {
    "useful": "steps whose training is in the result, or may still get there",
    "discarded": "steps whose training was discarded",
    "waiting": "alive but without steps",
    "down": "from the end of a process to the start of the next one",
    "joining": "until the learner has the global weights and starts its first step",
    "other": "steps interrupted by a crash or by the end of the run",
}
"""The parts of `TimeAccount.allocated`, with their meanings."""


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Tokens as integer *fragment tokens*: each token counts once for each of P fragments."""

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
        """Fragment tokens that were discarded, for any reason."""
        overwritten = self.in_flight + self.missed + self.given_up + self.overwritten
        return overwritten + self.crashed + self.left_behind

    @property
    def discarded_share(self) -> float:
        """Share of the trained tokens that was discarded; 0 if none were trained."""
        return self.discarded / self.trained if self.trained else 0.0

    def tokens(self, part: str) -> float:
        """Return a part, or ``trained`` or ``discarded``, in tokens."""
        value: int = getattr(self, part)
        return value / self.fragments


TOKEN_PARTS = {
    "merged": "in the global weights",
    "in_flight": "trained between a snapshot and the merged copy that overwrote it",
    "missed": "overwritten by a version without the learner's contribution",
    "given_up": "sent, but the outcome was lost with the link",
    "overwritten": "in flight, missed or given up; only the learner's own tape shows which",
    "crashed": "lost with a crashed process",
    "left_behind": "not merged when the learner left or its run ended",
    "unsent": "not merged when the tape ends, on a learner that is still alive",
}
"""The parts of `TokenAccount.trained`, with their meanings."""


def part_in_words(part: str) -> str:
    """Return a part's name and meaning.

    >>> part_in_words("in_flight")
    'in flight: trained between a snapshot and the merged copy that overwrote it'
    """
    return f"{part.replace('_', ' ')}: {(TIME_PARTS | TOKEN_PARTS)[part]}"


@dataclass(frozen=True, slots=True)
class LearnerAccount:
    """One learner's time and tokens; ``spans`` are contiguous."""

    name: str
    time: TimeAccount
    tokens: TokenAccount
    spans: tuple[Activity, ...]


@dataclass(frozen=True, slots=True)
class RunAccount:
    """All learners' accounts and their sum.

    ``span`` is ``None`` if there was no step; ``uptime`` is ``None`` if there was at most one.
    """

    learners: dict[str, LearnerAccount]
    time: TimeAccount
    tokens: TokenAccount
    span: tuple[float, float] | None
    uptime: float | None


def account_for(run: RunFacts) -> RunAccount:
    """Return the accounts of a run; the module's docstring defines the parts."""
    fragments, folded, span = max(1, run.fragments), _folded(run), run.training_span
    learners = {}
    for name, learner in run.trained.items():
        may_return = run.has_devices and not run.finished
        own = folded.get(name, [])
        tokens = _tokens(learner, fragments, own, may_return=may_return)
        every_span = () if span is None else _spans(learner, span[1], visits=run.has_devices)
        spans = () if span is None else _clipped(every_span, *span)
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
        # Each end is rounded, not the difference, so that adjacent spans add up exactly.
        nano[span.doing] += round(span.end * NANO) - round(span.begin * NANO)
    stepping = nano.pop("stepping")
    discarded = round(stepping * tokens.discarded_share)
    allocated = stepping + sum(nano.values())
    return TimeAccount(allocated, stepping - discarded, discarded, **nano)


def _spans(learner: LearnerLog, until: float, *, visits: bool) -> Iterator[Activity]:
    """Yield a learner's activities, from its process's start to the end of the run or its own.

    With ``visits``, it is away between two incarnations, unless its process crashed.
    """
    median = _median_step(learner)
    for life, following in zip(learner.lives, [*learner.lives[1:], None], strict=True):
        latest = max(until, life.started_at)
        end = latest if life.ended_at is None else min(life.ended_at, latest)
        if following is not None:
            end = min(end, following.began_at)
        yield from _spans_of_life(life, end, median)
        if life.crashed or (following is not None and not visits):
            yield Activity(
                "down", end, max(end, until) if following is None else following.began_at
            )


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
        stalled = held or (not life.over and close - begin > limit)
        yield Activity("waiting" if stalled else "other", begin, close)


def _step(
    life: ProcessLife, begin: float, end: float, median: float, limit: float, idle: Doing
) -> Iterator[Activity]:
    """Yield the activities from one step boundary to the next: held, stalled, then the step."""
    parts = list(_cut_by_holds(life, begin, end))
    free = sum(close - start for start, close, held in parts if not held)
    stalled = free - median if free > limit else 0.0
    for start, close, held in parts:
        if held:
            yield Activity("waiting", start, close)
            continue
        cut = min(close, start + stalled)
        stalled -= cut - start
        yield Activity(idle, start, cut)
        yield Activity("stepping", cut, close)


def _cut_by_holds(
    life: ProcessLife, begin: float, end: float
) -> Iterator[tuple[float, float, bool]]:
    """Yield the parts from ``begin`` to ``end``, each with whether the learner was held in it."""
    for hold_begin, hold_end in life.holds_between(begin, end):
        yield (begin, hold_begin, False)
        yield (hold_begin, hold_end, True)
        begin = hold_end
    yield (begin, end, False)


def _median_step(learner: LearnerLog) -> float:
    """Return the median seconds of a step without holds; 0 with fewer than two steps."""
    gaps = [
        sum(close - start for start, close, held in _cut_by_holds(life, a, b) if not held)
        for life in learner.lives
        for a, b in pairwise(life.steps_at)
    ]
    return statistics.median(gaps) if gaps else 0.0


def _clipped(spans: Iterable[Activity], begin: float, end: float) -> tuple[Activity, ...]:
    """Clip spans to an interval, join adjacent equal activities, and drop empty spans."""
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
    """Return the contributions that the shards have merged, by learner."""
    found: dict[str, list[Folded]] = {}
    merged = [r for r in run.rounds if r.merged and r.outcome.version is not None]
    restored = _restored(merged)
    for r in merged:
        result = r.outcome
        assert result.version is not None
        version = (result.version.term, result.version.counter)
        later = restored.get(result.fragment, {}).items()
        if any(term > version[0] and counter < version[1] for term, counter in later):
            continue  # lost with the shard before any learner applied it
        for part in r.folded:
            seconds = part.delivered_seconds
            arrived_at = r.finished_at if seconds is None else r.opened_at + seconds
            name = (part.ask.term, part.ask.number)
            folded = Folded(result.fragment, name, version, part.tokens, arrived_at)
            found.setdefault(part.learner, []).append(folded)
    return found


def _restored(merged: Iterable[RoundLog]) -> dict[int, dict[int, int]]:
    """Return for each fragment and term the smallest base counter: the shard's restored version.

    A restarted shard gives the restored version its new term and the old counter.
    """
    found: dict[int, dict[int, int]] = {}
    for r in merged:
        base = r.outcome.base
        if base is not None:
            counters = found.setdefault(r.fragment, {})
            counters[base.term] = min(base.counter, counters.get(base.term, base.counter))
    return found


def _tokens(
    learner: LearnerLog, fragments: int, folded: list[Folded], *, may_return: bool
) -> TokenAccount:
    """Return one learner's tokens over all of its incarnations.

    With ``may_return``, what it has not delivered yet is on its disk, or waits at a shard.
    """
    total = Counter[str]()
    rests: list[tuple[str, Counter[int]]] = []
    # A contribution belongs to the incarnation that was running when it arrived at its shard.
    begins = [-math.inf, *(life.started_at for life in learner.lives[1:]), math.inf]
    for life, (begin, end) in zip(learner.lives, pairwise(begins), strict=False):
        own = [each for each in folded if begin <= each.arrived_at < end]
        count = _tokens_recorded if life.overwritten is None else _tokens_reported
        parts, rest, brought = count(life, fragments, own)
        total.update(parts)
        total["merged"] -= _settle_brought([earlier for _, earlier in rests], brought)
        fate = "unsent" if may_return and not life.crashed else _fate_of_the_rest(life)
        rests.append((fate, rest))
    for fate, rest in rests:
        total[fate] += rest.total()
    return TokenAccount(fragments, **total)


_OfLife = tuple[Counter[str], Counter[int], Counter[int]]
"""One incarnation's tokens without the rest; the rest, by fragment; and the merged tokens of
earlier incarnations that this one brought, by fragment."""


def _tokens_recorded(life: ProcessLife, fragments: int, folded: list[Folded]) -> _OfLife:
    """Return the tokens of an incarnation with its own tape."""
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


def _tokens_reported(life: ProcessLife, fragments: int, folded: list[Folded]) -> _OfLife:
    """Return the tokens of an incarnation that only appears on the shards' tapes."""
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


def _settle_brought(rests: list[Counter[int]], brought: Counter[int]) -> int:
    """Subtract tokens that a later incarnation brought from earlier rests, the latest rest first.

    Returns:
        The tokens that no earlier incarnation has, because its tape is lost.
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
    """Return the token part for an incarnation's undelivered tokens: "unsent" if it is alive."""
    if life.crashed:
        return "crashed"
    return "left_behind" if life.over or life.ended_at is not None else "unsent"


def _yet_merged(entry: GivenUpTokens, folded: Iterable[Folded]) -> int:
    """Return the number of given-up tokens that the shards merged after all."""
    if entry.sent is None:
        return 0
    ask, tokens = entry.sent
    known = any((each.fragment, each.ask) == (entry.fragment, ask) for each in folded)
    return min(tokens, entry.tokens + entry.carried) if known else 0


def _delivered(entry: Open, folded: Iterable[Folded]) -> int:
    """Return the number of an incarnation's open and carried tokens that the shards merged."""
    newer = sum(
        each.tokens
        for each in folded
        if each.fragment == entry.fragment and (entry.held is None or each.version > entry.held)
    )
    return min(entry.tokens + entry.carried, newer)
