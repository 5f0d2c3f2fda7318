"""Whether a run has kept its promises under faults: checks on its tapes, each with its limit.

Three definitions that the numbers rest on, all instants in seconds since the run's first record:

* A learner is **disturbed** while a fault on purpose holds it: it is paused or slowed down, its
  clock leaps, or it is away (killed, told to leave, joining). Steps that it loses then are the
  fault's; steps that a **survivor** loses are not. A link's fault disturbs no step, but it keeps
  a learner from taking part.
* **Alive** is a learner from the moment it holds the global weights to its end, without the time
  that it stood, and with 1/factor of the time in which it was slowed down. Its *pace* is its own
  median step in this run. A fault-free run would have merged, of every token trained in that time
  at that pace, the share that a fault-free run of the same recipe merges (`chaos.reference`): what
  is overwritten in flight is lost without any fault too. *Accepted* is what was merged by that.
  What a killed learner had not merged dies with it: that is the fault. How much it is depends on
  how long shards were away before, so on how fast this machine starts a process: it is taken off.
* **Eligible** is a learner for a merged round if the shard counted on it all the while, nothing
  disturbed it, and it had finished a step since the tick before. It takes part if its contribution
  is in.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from decoupled_diloco.chaos.safety import SafetyChecker
from decoupled_diloco.errors import Error, ProtocolError
from decoupled_diloco.observe.accounts import TokenAccount
from decoupled_diloco.observe.run_data import (
    GAP_MEDIANS,
    LINK_FAULTS,
    STEP_FAULTS,
    FaultLog,
    LearnerLog,
    ProcessLife,
)
from decoupled_diloco.observe.run_model import RunModel, run_of
from decoupled_diloco.observe.shard_data import RoundLog, ShardLog
from decoupled_diloco.observe.tape import FLUSH_SECONDS, TapeReader
from decoupled_diloco.protocol.effects import NOTHING_NEW
from decoupled_diloco.simulate.replay import replay_run
from decoupled_diloco.storage.files import write_text

FILE_NAME = "chaos.json"

ACCEPTED_MIN = 0.97
"""Least share of what a fault-free run would have merged in the same learners' alive time."""

PARTICIPATION_MIN = 0.95
"""Least share of the rounds that a learner was eligible for that it took part in."""

SETTLE_SECONDS = 1.0
"""So long after a fault on a link has ended its wires may be dialled again."""

_Span = tuple[float, float]


@dataclass(frozen=True)
class Check:
    """One promise: what was measured, what is asked for, and whether it was kept."""

    name: str
    kept: bool
    measured: str
    limit: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """All checks of a run, in the order in which they are shown; how many faults of each kind."""

    checks: tuple[Check, ...]
    faults: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        return all(check.kept for check in self.checks)


def judge(
    folder: Path,
    *,
    accepted_share: float,
    finished: bool,
    reason: str = "",
    accepted_min: float = ACCEPTED_MIN,
    participation_min: float = PARTICIPATION_MIN,
) -> Verdict:
    """Checks everything that a run's tape tells.

    Args:
        folder: The run folder; no process writes to its tape any more.
        accepted_share: Share of the trained tokens that a fault-free run of the same recipe merges.
        accepted_min: Least accepted tokens over those of a fault-free run.
        participation_min: Least share of its eligible rounds that any learner may take part in.

    Raises:
        StorageError: There is no tape.
        ProtocolError: It is of another version.
    """
    reader = TapeReader(folder)
    checker = SafetyChecker()
    run = run_of(reader, "run", checker)
    if run.left_out:
        raise ProtocolError(f"the tape of {folder} cannot be judged: {next(iter(run.left_out))}")
    judge = _Judge(run, checker)
    judge.steps()
    judge.survivors()
    judge.accepted(accepted_share, accepted_min)
    judge.participation(participation_min)
    judge.safety()
    judge.replays(folder, reader.problems)
    judge.end(finished, reason)
    kinds = Counter(struck.kind for struck in judge.run.faults)
    return Verdict(tuple(judge.checks), dict(sorted(kinds.items())), judge.numbers)


def save_verdict(folder: Path, verdict: Verdict) -> Path:
    """Writes ``RUN/chaos.json``."""
    document = {
        "kept": verdict.kept,
        "faults": verdict.faults,
        "checks": [dataclasses.asdict(check) for check in verdict.checks],
        "numbers": verdict.numbers,
    }
    path = folder / FILE_NAME
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return path


class _Judge:
    def __init__(self, run: RunModel, checker: SafetyChecker) -> None:
        self.run, self.checker = run, checker
        self.checks: list[Check] = []
        self.numbers: dict[str, Any] = {}

    def _say(
        self, name: str, kept: bool, measured: str, limit: str, details: Iterable[str] = ()
    ) -> None:
        self.checks.append(Check(name, kept, measured, limit, tuple(details)))

    def steps(self) -> None:
        """At every moment some learner steps, unless a fault struck all of them."""
        learners = self.run.trained.values()
        instants = sorted(at for learner in learners for at in learner.steps_at)
        medians = [m for x in learners if (m := x.step_seconds_median)]
        if len(instants) < 2 or not medians:
            self._say("some learner always steps", False, "no learner has stepped", "100 %")
            return
        limit = GAP_MEDIANS * max(medians)
        gaps = [
            (a, b)
            for a, b in pairwise(instants)
            if b - a <= limit or not self._everybody_struck(a, b)
        ]
        longest = max((b - a for a, b in gaps), default=0.0)
        standing = sum(max(0.0, b - a - limit) for a, b in gaps)
        uptime = 1.0 - standing / (instants[-1] - instants[0])
        self.numbers |= {"uptime": uptime, "longest_without_a_step_seconds": longest}
        self._say(
            "some learner always steps",
            longest <= limit,
            f"{uptime:.2%} of the time, longest moment without a step {longest:.2f} s",
            f"100 %, {limit:.2f} s ({GAP_MEDIANS:g} steps)",
        )

    def _everybody_struck(self, begin: float, end: float) -> bool:
        learners = self.run.trained.values()
        return all(self._struck_during(learner, begin, end) for learner in learners)

    def _struck_during(self, learner: LearnerLog, begin: float, end: float) -> bool:
        there = any(_began(life) <= begin and end <= _ended(life) for life in learner.lives)
        return not there or _overlaps(self._disturbances(learner.name, STEP_FAULTS), begin, end)

    def _disturbances(self, name: str, kinds: Iterable[str], settle: float = 0.0) -> list[_Span]:
        return [
            (struck.begin, struck.end + settle if _lasts(struck) else struck.begin + settle)
            for struck in self.run.faults
            if struck.kind in kinds and name in struck.processes
        ]

    def survivors(self) -> None:
        """No learner loses a step because of a fault that struck another process."""
        lost = dict.fromkeys(self.run.trained, 0)
        details, longest = [], 0.0
        for name, learner in self.run.trained.items():
            median = learner.step_seconds_median
            if not median:
                continue
            own = self._disturbances(name, STEP_FAULTS, GAP_MEDIANS * median)
            for begin, end in self._gaps(learner):
                if end - begin > GAP_MEDIANS * median and not _overlaps(own, begin, end):
                    steps = round((end - begin) / median) - 1
                    lost[name] += steps
                    told = f"{name}: {steps} steps from {begin:.1f} s to {end:.1f} s"
                    details.append(told + self._struck_near(begin, end))
            between = [gap for life in learner.lives for gap in pairwise(life.steps_at)]
            undisturbed = [(b - a) / median for a, b in between if not _overlaps(own, a, b)]
            longest = max([longest, *undisturbed])
        self.numbers |= {"lost_steps": lost, "longest_gap_medians": longest}
        total = sum(lost.values())
        self._say(
            "survivors lose no step",
            total == 0,
            f"{total} steps lost, longest gap {longest:.1f} median steps",
            f"0 steps ({GAP_MEDIANS:g} median steps without one)",
            details,
        )

    def _gaps(self, learner: LearnerLog) -> Iterator[_Span]:
        """The time between steps, and from a life's last step to its end, if it was not its own."""
        told = self.run.orders.get(learner.name, [])
        for life in learner.lives:
            yield from pairwise(life.steps_at)
            if life.steps_at and not life.over:
                last = life.steps_at[-1]
                # What a killed process had not written yet is missing on its tape.
                unwritten = 2 * FLUSH_SECONDS if life.crashed else 0.0
                end = min(_ended(life), self.run.duration) - unwritten
                end = min([end, *(max(at, last) for at in told if at >= life.started_at)])
                if end > last:
                    yield last, end

    def _struck_near(self, begin: float, end: float) -> str:
        near = [s for s in self.run.faults if begin - 5.0 <= s.begin <= end]
        told = ", ".join(f"{s.kind} {s.target} at {s.begin:.1f} s" for s in near)
        return f" (then: {told})" if told else ""

    def accepted(self, share: float, least: float) -> None:
        """What was merged, over what a fault-free run would have merged in the same alive time."""
        accounts = self.run.account
        merged = trained = expected = died = 0.0
        alive: dict[str, float] = {}
        for name, learner in self.run.trained.items():
            median = learner.step_seconds_median
            if not median or not learner.steps:
                continue
            alive[name] = sum(self._alive_seconds(name, x, median) for x in learner.lives)
            tokens = accounts.learners[name].tokens
            merged += tokens.tokens("merged")
            trained += tokens.tokens("trained")
            expected += alive[name] / median * (learner.tokens / learner.steps) * share
            if all(self._is_killed(name, life) for life in learner.lives if life.crashed):
                died += tokens.tokens("crashed")
        ratio = merged / expected if expected else 0.0
        of_the_living = merged / (expected - died) if expected > died else 0.0
        self.numbers |= {
            "accepted_ratio": ratio,
            "accepted_ratio_of_the_living": of_the_living,
            "accepted_tokens": merged,
            "died_tokens": died,
            "trained_tokens": trained,
            "fault_free_tokens": expected,
            "fault_free_share": share,
            "alive_seconds": alive,
        }
        shown = math.floor(1000 * of_the_living) / 1000  # never more than what it is judged by
        self._say(
            "accepted tokens",
            of_the_living >= least,
            f"{shown:.3f} of a fault-free run's ({merged:.0f} of {trained:.0f} trained, "
            f"{died:.0f} died with killed learners)",
            f"at least {least:g}; fault-free, {share:.1%} are accepted",
            self._what_was_lost(accounts.tokens),
        )

    def _what_was_lost(self, tokens: TokenAccount) -> Iterator[str]:
        """Which tokens were not accepted, and what of that is this machine's doing."""
        for part in ("in_flight", "missed", "given_up", "left_behind"):
            if count := tokens.tokens(part):
                yield f"{count:.0f} tokens: {part.replace('_', ' ')}"
        away = [
            outage.seconds
            for shard in self.run.shards.values()
            for outage in shard.outages
            if outage.seconds is not None
        ]
        if away:
            yield (
                f"a shard was back {statistics.median(away):.1f} s after it died: what learners "
                "train meanwhile waits for it, and is overwritten on one that has just come back. "
                "A machine that starts processes faster loses less"
            )

    def _is_killed(self, name: str, life: ProcessLife) -> bool:
        """Whether a life was ended on purpose; what dies with any other is our own loss."""
        ended = _ended(life) + SETTLE_SECONDS
        return any(
            struck.kind == "kill"
            and name in struck.processes
            and life.started_at <= struck.begin <= ended
            for struck in self.run.faults
        )

    def _alive_seconds(self, name: str, life: ProcessLife, median: float) -> float:
        if life.ready_at is None:
            return 0.0
        begin, end = life.ready_at, _ended(life)
        if life.over and life.steps_at:
            end = life.steps_at[-1]
        end = min(end, self.run.duration)
        seconds = max(0.0, end - begin)
        for struck in self.run.faults:
            if struck.kind in ("pause", "slow") and name in struck.processes:
                seconds -= self._idle_seconds(struck, life, begin, end, median)
        return max(0.0, seconds)

    def _idle_seconds(
        self, struck: FaultLog, life: ProcessLife, begin: float, end: float, median: float
    ) -> float:
        """How long a pause or slowness kept a learner from stepping, within its life."""
        a, b = max(begin, struck.begin), min(end, struck.end)
        if b <= a:
            return 0.0
        return max(0.0, (b - a) - _steps_between(life, a, b) * median)

    def participation(self, least: float) -> None:
        """Every live learner takes part in the rounds that it is eligible for."""
        shares: dict[str, float] = {}
        details = []
        rounds = list(self._rounds())
        for name, learner in self.run.trained.items():
            eligible = took = 0
            missed: Counter[str] = Counter()
            for shard, each, since in rounds:
                state = self._part(shard, each, since, learner)
                eligible += state is not None
                took += state == "folded"
                if state not in (None, "folded"):
                    missed[str(state)] += 1
            if eligible:
                shares[name] = took / eligible
                told = ", ".join(f"{count} {state}" for state, count in missed.items())
                details.append(f"{name}: {took} of {eligible}" + (f" ({told})" if told else ""))
        worst = min(shares.values(), default=0.0)
        self.numbers["participation"] = shares
        self._say(
            "every live learner takes part",
            worst >= least,
            f"{worst:.1%} of the rounds that it was eligible for, at least",
            f"at least {least:.0%}",
            details,
        )

    def _rounds(self) -> Iterator[tuple[ShardLog, RoundLog, float]]:
        """Merged rounds, each with when the tick before its own was."""
        for shard in self.run.shards.values():
            for each in shard.rounds:
                if each.merged:
                    yield shard, each, _tick_before(shard, each)

    def _part(
        self, shard: ShardLog, each: RoundLog, since: float, learner: LearnerLog
    ) -> str | None:
        """What became of a learner in a round; ``None``: it was not eligible."""
        name = learner.name
        begin, end = each.opened_at, each.finished_at
        mine = [p for p in each.outcome.participants if p.learner == name]
        if mine and mine[0].state == "folded":
            return "folded"
        if mine and mine[0].reason == NOTHING_NEW:
            return None
        life = next((x for x in learner.lives if _ready(x) <= since and end <= _ended(x)), None)
        stepped = life is not None and _steps_between(life, since, begin) > 0
        if not stepped or not self.checker.member_during(shard.name, name, since, end):
            return None
        for who in (name, shard.name):
            kinds = (*STEP_FAULTS, *LINK_FAULTS)
            if _overlaps(self._disturbances(who, kinds, SETTLE_SECONDS), since, end):
                return None
        return mine[0].state if mine else "not asked"

    def safety(self) -> None:
        """Versions, epochs, terms, and what was merged; see `chaos.safety`."""
        broken = self.checker.broken
        merges = sum(self.checker.merges.values())
        self.numbers |= {"merges": merges, "contributions": self.checker.contributions}
        self._say(
            "versions and merges",
            not broken,
            f"{len(broken)} rules broken in {merges} merges of {self.checker.contributions} "
            "contributions",
            "0: none goes back, none twice, none of an old epoch",
            broken,
        )

    def replays(self, folder: Path, problems: list[str]) -> None:
        """Every process's tape gives itself again."""
        killed = sum(len(member.outages) for member in self.run.members)
        try:
            results, _ = replay_run(folder)
        except (Error, AssertionError) as error:
            # A machine asserts its invariants; a tape that breaks them is no tape of its run.
            told = f"they cannot be replayed: {error}"
            self._say("tapes replay exactly", False, told, "0 differences")
            return
        differences = [
            f"{each.who}: life {d.life}, event {d.cause}: {d.event}"
            for each in results
            for d in each.differences
        ]
        events = sum(each.events for each in results)
        self.numbers |= {"replayed_events": events, "torn_lines": len(problems)}
        torn = f", {len(problems)} torn lines" if problems else ""
        self._say(
            "tapes replay exactly",
            bool(results) and not differences and len(problems) <= killed,
            f"{len(differences)} differences in {events} events{torn}",
            "0 differences, a torn line for each kill at most",
            [*differences, *problems],
        )

    def end(self, finished: bool, reason: str) -> None:
        """The run is over as it should be, with every fragment merged."""
        fragments = self.run.fragments
        missing = [p for p in range(fragments) if not self.checker.merges[p]]
        self._say(
            "the run ends with all fragments",
            finished and not missing and fragments > 0,
            f"{reason or 'finished'}; {fragments - len(missing)} of {fragments} fragments merged",
            "finished, all of them",
            [f"nothing was merged into fragment {p}" for p in missing],
        )


def _steps_between(life: ProcessLife, begin: float, end: float) -> int:
    """How many steps were finished after the one instant and not after the other."""
    steps = life.steps_at
    return bisect.bisect_right(steps, end) - bisect.bisect_right(steps, begin)


def _lasts(struck: FaultLog) -> bool:
    return struck.kind not in ("break", "clock-jump", "vanish")


def _began(life: ProcessLife) -> float:
    return life.ready_at if life.ready_at is not None else math.inf


def _ready(life: ProcessLife) -> float:
    """When it had taken its first step with the global weights."""
    return life.steps_at[0] if life.steps_at else math.inf


def _ended(life: ProcessLife) -> float:
    return math.inf if life.ended_at is None else life.ended_at


def _overlaps(spans: Iterable[_Span], begin: float, end: float) -> bool:
    return any(a < end and begin < b for a, b in spans)


def _tick_before(shard: ShardLog, each: RoundLog) -> float:
    """When the shard's clock was at the tick before a round's."""
    ticks = shard.ticks
    index = bisect.bisect_right(ticks, each.opened_at, key=lambda tick: tick.at) - 1
    while index >= 0 and ticks[index].clock >= each.outcome.tick:
        index -= 1
    return ticks[index].at if index >= 0 else 0.0
