"""Judge whether a run kept its promises under faults: checks on its tapes, each with a limit.

The numbers use these definitions. All instants are in seconds since the run's first record.

* A learner is **disturbed** while an injected fault affects it. It is paused or slowed down, its
  clock jumps, or it is down (killed, asked to stop, or joining). The fault explains the steps that
  it loses in that time. It does not explain steps that a **survivor** loses. A link fault disturbs
  no step, but it keeps a learner from taking part.
* A learner is **alive** from the moment it holds the global weights until it ends. Time in which it
  was paused does not count, and only 1/factor of the time in which it was slowed down counts. Its
  *pace* is its own median step time in this run.
* The **expected** tokens are those trained in the alive time at that pace, times the share that a
  fault-free run of the same recipe merges (`chaos.reference`). Even without a fault, steps that are
  overwritten in flight are lost. The *accepted* ratio is merged tokens over expected tokens.
* Tokens that a killed learner had not merged **died** with it. The fault explains them, so they are
  subtracted from the expected tokens. Their number depends on how long shards were down before, and
  so on how fast this machine starts a process.
* A learner is **eligible** for a merged round if it was an undisturbed member of the shard
  throughout and had finished a step since the previous tick. It takes part if the round merges its
  contribution.
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

from decoupled_diloco.errors import DilocoError, ProtocolError
from decoupled_diloco.protocol.messages import NOTHING_NEW
from decoupled_diloco.run_model import RunModel, run_of
from decoupled_diloco.run_model.accounts import TokenAccount
from decoupled_diloco.run_model.facts import (
    GAP_MEDIANS,
    LINK_FAULTS,
    STEP_FAULTS,
    FaultLog,
    LearnerLog,
    ProcessLife,
    RoundLog,
    ShardLog,
)
from decoupled_diloco.storage.files import write_text
from decoupled_diloco.tape import FLUSH_SECONDS, TapeReader
from decoupled_diloco.tape.replay import replay_run
from decoupled_diloco_lab.chaos.safety import SafetyChecker

FILE_NAME = "chaos.json"

ACCEPTED_MIN = 0.97
"""Least ratio of merged tokens to those that a fault-free run would have merged in the same alive
time."""

PARTICIPATION_MIN = 0.95
"""Least share of its eligible rounds in which a learner must take part."""

SETTLE_SECONDS = 1.0
"""Time after the end of a fault that still counts as disturbed, because connections are dialed
again."""

_Span = tuple[float, float]


@dataclass(frozen=True)
class Check:
    """One promise: the measured value, its limit, and whether the promise was kept."""

    name: str
    kept: bool
    measured: str
    limit: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """All checks of a run in display order, and the number of faults of each kind."""

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
    """Run all checks on a run's tape.

    Args:
        folder: The run folder. All processes of the run must have ended.
        accepted_share: Share of the trained tokens that a fault-free run of the same recipe merges.
        finished: Whether the run ended as it should.
        reason: Why it did not, for the report.
        accepted_min: Least ratio of accepted tokens to those of a fault-free run.
        participation_min: Least share of its eligible rounds in which each learner must take part.

    Raises:
        StorageError: The folder has no tape.
        ProtocolError: The tape has another schema version.
    """
    reader = TapeReader(folder)
    checker = SafetyChecker()
    run = run_of(reader, "run", checker)
    if run.left_out:
        raise ProtocolError(f"cannot judge the tape of {folder}: {next(iter(run.left_out))}")
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
    """Write the verdict to ``RUN/chaos.json`` and return its path."""
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

    def _add(
        self, name: str, kept: bool, measured: str, limit: str, details: Iterable[str] = ()
    ) -> None:
        self.checks.append(Check(name, kept, measured, limit, tuple(details)))

    def steps(self) -> None:
        """Check that some learner steps at every moment, unless a fault hits all of them."""
        learners = self.run.trained.values()
        instants = sorted(at for learner in learners for at in learner.steps_at)
        medians = [m for x in learners if (m := x.step_seconds_median)]
        if len(instants) < 2 or not medians:
            self._add("some learner always steps", False, "no learner has stepped", "100 %")
            return
        limit = GAP_MEDIANS * max(medians)
        gaps = [
            (a, b) for a, b in pairwise(instants) if b - a <= limit or not self._all_struck(a, b)
        ]
        longest = max((b - a for a, b in gaps), default=0.0)
        stalled = sum(max(0.0, b - a - limit) for a, b in gaps)
        uptime = 1.0 - stalled / (instants[-1] - instants[0])
        self.numbers |= {"uptime": uptime, "longest_without_a_step_seconds": longest}
        self._add(
            "some learner always steps",
            longest <= limit,
            f"{uptime:.2%} of the time, longest time without a step {longest:.2f} s",
            f"100 %, {limit:.2f} s ({GAP_MEDIANS:g} steps)",
        )

    def _all_struck(self, begin: float, end: float) -> bool:
        learners = self.run.trained.values()
        return all(self._struck_during(learner, begin, end) for learner in learners)

    def _struck_during(self, learner: LearnerLog, begin: float, end: float) -> bool:
        alive = any(_began(life) <= begin and end <= _ended(life) for life in learner.lives)
        return not alive or _overlaps(self._disturbances(learner.name, STEP_FAULTS), begin, end)

    def _disturbances(self, name: str, kinds: Iterable[str], settle: float = 0.0) -> list[_Span]:
        return [
            (struck.begin, struck.end + settle if _lasts(struck) else struck.begin + settle)
            for struck in self.run.faults
            if struck.kind in kinds and name in struck.processes
        ]

    def survivors(self) -> None:
        """Check that no learner loses a step because of a fault that hits another process."""
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
                    loss = f"{name}: {steps} steps from {begin:.1f} s to {end:.1f} s"
                    details.append(loss + self._struck_near(begin, end))
            between = [gap for life in learner.lives for gap in pairwise(life.steps_at)]
            undisturbed = [(b - a) / median for a, b in between if not _overlaps(own, a, b)]
            longest = max([longest, *undisturbed])
        self.numbers |= {"lost_steps": lost, "longest_gap_medians": longest}
        total = sum(lost.values())
        self._add(
            "survivors lose no step",
            total == 0,
            f"{total} steps lost, longest gap {longest:.1f} median steps",
            f"0 steps, longest gap {GAP_MEDIANS:g} median steps",
            details,
        )

    def _gaps(self, learner: LearnerLog) -> Iterator[_Span]:
        """Yield the gaps between steps, also from the last step of an incarnation to its end.

        The last gap is left out if the incarnation ended by itself.
        """
        orders = self.run.orders.get(learner.name, [])
        for life in learner.lives:
            yield from pairwise(life.steps_at)
            if life.steps_at and not life.over:
                last = life.steps_at[-1]
                # A killed process loses the records that it had not yet flushed to its tape.
                unwritten = 2 * FLUSH_SECONDS if life.crashed else 0.0
                end = min(_ended(life), self.run.duration) - unwritten
                end = min([end, *(max(at, last) for at in orders if at >= life.started_at)])
                if end > last:
                    yield last, end

    def _struck_near(self, begin: float, end: float) -> str:
        near = [s for s in self.run.faults if begin - 5.0 <= s.begin <= end]
        faults = ", ".join(f"{s.kind} {s.target} at {s.begin:.1f} s" for s in near)
        return f" (faults nearby: {faults})" if faults else ""

    def accepted(self, share: float, least: float) -> None:
        """Check the merged tokens against those of a fault-free run with the same alive time."""
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
        shown = math.floor(1000 * of_the_living) / 1000  # never round up to a limit that is missed
        self._add(
            "accepted tokens",
            of_the_living >= least,
            f"{shown:.3f} of a fault-free run's ({merged:.0f} of {trained:.0f} trained, "
            f"{died:.0f} died with killed learners)",
            f"at least {least:g}; a fault-free run accepts {share:.1%}",
            self._losses(accounts.tokens),
        )

    def _losses(self, tokens: TokenAccount) -> Iterator[str]:
        """Describe the tokens that were not accepted, and how much slow restarts contributed."""
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
                f"shards came back after a median of {statistics.median(away):.1f} s. Meanwhile "
                "learners keep their steps for the shard, but a learner that has just come back "
                "overwrites them. A machine that starts processes faster loses less"
            )

    def _is_killed(self, name: str, life: ProcessLife) -> bool:
        """Whether an injected kill ended an incarnation. Other crashes count as real losses."""
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
        """Return how long a pause or slowdown kept a learner from stepping, in one incarnation."""
        a, b = max(begin, struck.begin), min(end, struck.end)
        if b <= a:
            return 0.0
        return max(0.0, (b - a) - _steps_between(life, a, b) * median)

    def participation(self, least: float) -> None:
        """Check that every live learner takes part in the rounds that it is eligible for."""
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
                states = ", ".join(f"{count} {state}" for state, count in missed.items())
                details.append(f"{name}: {took} of {eligible}" + (f" ({states})" if states else ""))
        worst = min(shares.values(), default=0.0)
        self.numbers["participation"] = shares
        self._add(
            "every live learner takes part",
            worst >= least,
            f"at least {worst:.1%} of its eligible rounds",
            f"at least {least:.0%}",
            details,
        )

    def _rounds(self) -> Iterator[tuple[ShardLog, RoundLog, float]]:
        """Yield the merged rounds, each with the instant of the previous tick."""
        for shard in self.run.shards.values():
            for each in shard.rounds:
                if each.merged:
                    yield shard, each, _tick_before(shard, each)

    def _part(
        self, shard: ShardLog, each: RoundLog, since: float, learner: LearnerLog
    ) -> str | None:
        """Return a learner's state in a round, or ``None`` if it was not eligible."""
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
        for process in (name, shard.name):
            kinds = (*STEP_FAULTS, *LINK_FAULTS)
            if _overlaps(self._disturbances(process, kinds, SETTLE_SECONDS), since, end):
                return None
        return mine[0].state if mine else "not requested"

    def safety(self) -> None:
        """Check versions, epochs, terms and merges; see `chaos.safety`."""
        broken = self.checker.broken
        merges = sum(self.checker.merges.values())
        self.numbers |= {"merges": merges, "contributions": self.checker.contributions}
        self._add(
            "versions and merges",
            not broken,
            f"{len(broken)} rules broken in {merges} merges of {self.checker.contributions} "
            "contributions",
            "0: no version goes back, nothing is merged twice or from an old epoch",
            broken,
        )

    def replays(self, folder: Path, problems: list[str]) -> None:
        """Check that replaying every process's tape reproduces it exactly."""
        killed = sum(len(member.outages) for member in self.run.members)
        try:
            results, _ = replay_run(folder)
        except (DilocoError, AssertionError) as error:
            # A machine asserts its invariants, so a tape that violates them raises AssertionError.
            failure = f"the tapes cannot be replayed: {error}"
            self._add("tapes replay exactly", False, failure, "0 differences")
            return
        differences = [
            f"{each.process}: incarnation {d.life}, event {d.cause}: {d.event}"
            for each in results
            for d in each.differences
        ]
        events = sum(each.events for each in results)
        self.numbers |= {"replayed_events": events, "torn_lines": len(problems)}
        torn = f", {len(problems)} torn lines" if problems else ""
        self._add(
            "tapes replay exactly",
            bool(results) and not differences and len(problems) <= killed,
            f"{len(differences)} differences in {events} events{torn}",
            "0 differences, at most one torn line per kill",
            [*differences, *problems],
        )

    def end(self, finished: bool, reason: str) -> None:
        """Check that the run ended as it should, with every fragment merged at least once."""
        fragments = self.run.fragments
        missing = [p for p in range(fragments) if not self.checker.merges[p]]
        self._add(
            "the run ends with all fragments",
            finished and not missing and fragments > 0,
            f"{reason or 'finished'}; {fragments - len(missing)} of {fragments} fragments merged",
            "finished, all fragments merged",
            [f"nothing was merged into fragment {p}" for p in missing],
        )


def _steps_between(life: ProcessLife, begin: float, end: float) -> int:
    """Count the steps finished after ``begin`` and up to ``end``."""
    steps = life.steps_at
    return bisect.bisect_right(steps, end) - bisect.bisect_right(steps, begin)


def _lasts(struck: FaultLog) -> bool:
    return struck.kind not in ("break", "clock-jump", "vanish")


def _began(life: ProcessLife) -> float:
    return life.ready_at if life.ready_at is not None else math.inf


def _ready(life: ProcessLife) -> float:
    """Return the instant of the incarnation's first step, or infinity."""
    return life.steps_at[0] if life.steps_at else math.inf


def _ended(life: ProcessLife) -> float:
    return math.inf if life.ended_at is None else life.ended_at


def _overlaps(spans: Iterable[_Span], begin: float, end: float) -> bool:
    return any(a < end and begin < b for a, b in spans)


def _tick_before(shard: ShardLog, each: RoundLog) -> float:
    """Return when the shard's clock was last below the round's tick."""
    ticks = shard.ticks
    index = bisect.bisect_right(ticks, each.opened_at, key=lambda tick: tick.at) - 1
    while index >= 0 and ticks[index].clock >= each.outcome.tick:
        index -= 1
    return ticks[index].at if index >= 0 else 0.0
