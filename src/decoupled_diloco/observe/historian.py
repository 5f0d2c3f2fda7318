"""Builds a `RunHistory` from the records of a tape."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from decoupled_diloco.errors import ProtocolError, StorageError
from decoupled_diloco.observe.acting import OF_A_SHARD, SHARD, Acting
from decoupled_diloco.observe.afar import FromAfar
from decoupled_diloco.observe.cuts import cuts_of
from decoupled_diloco.observe.history import (
    STEP_FAULTS,
    Evaluation,
    LearnerHistory,
    Life,
    Loss,
    Outage,
    Remark,
    Round,
    RunHistory,
    ShardHistory,
)
from decoupled_diloco.observe.reader import TapeReader
from decoupled_diloco.observe.records import SECONDS_MAX, Record
from decoupled_diloco.observe.samples import (
    BytesMoved,
    CorpusDescribed,
    EndRequested,
    Evaluated,
    FaultEnded,
    FaultInjected,
    LossMeasured,
    ProcessEnded,
    ProcessStarted,
    SampleGenerated,
    TookOver,
    WeightsSaved,
)
from decoupled_diloco.protocol.effects import (
    Accept,
    Apply,
    ClockAdvanced,
    EndTraining,
    Evict,
    Hold,
    Note,
    Ready,
    Relabel,
    Release,
    RoundFinished,
    RunOver,
)
from decoupled_diloco.protocol.events import Began, Greeted, StepFinished, TermGranted
from decoupled_diloco.protocol.messages import LOSS_MAX

OTHERS = frozenset({"coordinator", "evaluator", "launcher"})
"""Processes that are neither learners nor shards."""

PROBLEMS_MAX = 10
"""No more torn lines than this are named one by one."""

_LOOKED_AT = frozenset(
    cls.__name__
    for cls in (
        Accept,
        Apply,
        Began,
        BytesMoved,
        ClockAdvanced,
        CorpusDescribed,
        EndRequested,
        EndTraining,
        Evaluated,
        Evict,
        FaultEnded,
        FaultInjected,
        Greeted,
        Hold,
        LossMeasured,
        Note,
        ProcessEnded,
        ProcessStarted,
        Ready,
        Relabel,
        Release,
        RoundFinished,
        RunOver,
        SampleGenerated,
        StepFinished,
        TermGranted,
        TookOver,
        WeightsSaved,
    )
)


def read_history(path: str | Path) -> RunHistory:
    """What happened in a run, from its run folder, its tape folder or a single tape file.

    What could not be read of the tape is in the history's ``problems``.

    Raises:
        StorageError: There is no tape, or it is of a newer schema.
    """
    reader = TapeReader(path)
    history = build_history(reader)
    if reader.problems and not history.records:
        raise StorageError(
            f"{path} is no event tape: none of its lines can be read, the first one: "
            f"{reader.problems[0]}"
        )
    history.problems[:0] = _fewer(reader.problems)
    if not history.records:
        history.problems.append(f"{path} is empty: no process had written a record yet.")
    return history


def _fewer(problems: list[str]) -> list[str]:
    """The first of many problems, and how many more there are."""
    more = len(problems) - PROBLEMS_MAX
    return problems if more <= 0 else [*problems[:PROBLEMS_MAX], f"… and {more} more lines."]


def build_history(records: Iterable[Record]) -> RunHistory:
    """What happened in a run, from its records in the order of time."""
    historian = _Historian()
    for record in records:
        historian.take(record)
    return historian.finish()


def is_shard(who: str) -> bool:
    """Whether a process is a shard of the syncer, by its name."""
    return SHARD.fullmatch(who) is not None


def is_learner(who: str) -> bool:
    """Whether a process is a learner, by its name."""
    return who not in OTHERS and not who.startswith(OF_A_SHARD)


def ending_in_words(code: int | None, signal_number: int | None) -> str:
    """How a process ended.

    >>> ending_in_words(None, 9), ending_in_words(4, None)
    ('killed (SIGKILL)', 'ended with exit code 4')
    """
    if signal_number is not None:
        try:
            return f"killed ({signal.Signals(signal_number).name})"
        except ValueError:
            return f"killed (signal {signal_number})"
    return f"ended with exit code {code}"


def _fragments_told(run: RunHistory) -> int:
    """How many fragments the run's settings say there are; 0: no start record has them."""
    told = 0
    for header in run.headers.values():
        value: Any = header
        for key in ("settings", "sync", "fragments"):
            value = value.get(key) if isinstance(value, dict) else None
        told = max(told, value if isinstance(value, int) else 0)
    return told


class _Historian:
    def __init__(self) -> None:
        self.run = RunHistory()
        self._began = False
        self._fragments: set[int] = set()
        self._left_out: Counter[str] = Counter()
        self._observers: set[str] = set()
        self._ends: dict[str, list[tuple[float, ProcessEnded]]] = {}
        self._orders: dict[str, list[float]] = {}
        self._spawns: dict[str, float] = {}
        self._acting = Acting()
        self._evictions: dict[str, list[tuple[float, str]]] = {}
        self._gone: dict[str, dict[str, list[tuple[float, str]]]] = {}
        self._accepted: dict[str, dict[str, list[float]]] = {}
        self._bytes: dict[str, dict[int, BytesMoved]] = {}
        self._afar = FromAfar()
        self._disturbing: dict[FaultInjected, float] = {}

    def take(self, record: Record) -> None:
        run = self.run
        if not self._began:
            self._began, run.started_wall = True, record.wall
        run.records += 1
        at = max(0.0, record.wall - run.started_wall)  # less: the clock was set back
        run.duration = max(run.duration, at)
        who = record.who
        if record.kind == "start":
            run.versions[who] = str(record.data.get("version", "unknown"))
            header = record.data.get("header")
            run.headers[who] = dict(header) if isinstance(header, dict) else {}
            if run.headers[who].get("role") == "observer":
                self._observers.add(who)
        life = self._life(record, at)
        if record.type not in _LOOKED_AT:
            if record.type == "SendBody" and life is not None:
                self._sent(life, record)
            elif record.type in ("Said", "Reported") and is_shard(who):
                self._told(record, at)
            elif record.type == "Broadcast" and is_shard(who):
                self._finished(record)
            return
        try:
            value = record.value()
        except ProtocolError as error:
            self._left_out[f"{who}: {error}"] += 1
            return
        if who in run.learners:
            self._learner(run.learners[who], life, at, value)
        elif is_shard(who):
            self._shard(run.shards[who], life, at, value)
        self._anybody(record, at, value)

    def finish(self) -> RunHistory:
        run = self.run
        run.problems += [
            f"{count} records that this version cannot read were left out: {reason}"
            for reason, count in self._left_out.items()
        ]
        run.learners |= self._afar.histories({*run.learners, *self._observers, *OTHERS})
        run.fragments = max(_fragments_told(run), 1 + max(self._fragments, default=-1))
        for learner in run.learners.values():
            learner.discarded_tokens /= max(1, run.fragments)
            learner.rounds_merged_in_run = run.rounds_merged
            for shard in run.shards.values():
                self._count_rounds(learner, shard)
        self._add_lives_without_records()
        for fault in list(self._disturbing):
            self._disturbed(fault, run.duration)
        for member in run.members:
            member.outages = self._outages(member)
        for learner in run.learners.values():
            self._add_unrecorded(learner)
        for member in run.members:
            member.outages = [self._with_lost_steps(outage) for outage in member.outages]
        for name, gone in self._gone.items():
            if name in run.learners:
                learner, accepted = run.learners[name], self._accepted.get(name, {})
                learner.cuts = cuts_of(run, learner, gone, accepted)
        run.bytes_moved = {
            who: BytesMoved(*map(sum, zip(*map(dataclasses.astuple, lives.values()), strict=True)))
            for who, lives in self._bytes.items()
        }
        run.remarks.sort(key=lambda remark: remark.at)
        return run

    def _add_unrecorded(self, learner: LearnerHistory) -> None:
        """The last steps of a process that was killed before it had written them down."""
        for life in learner.lives:
            steps = life.told[0] - len(life.steps_at)
            tokens = life.told[1] - sum(life.step_tokens)
            if life.crashed and steps > 0 and tokens >= 0:
                life.unrecorded = (steps, tokens)
                life.ledger.stepped(tokens)
                learner.tokens += tokens

    def _add_lives_without_records(self) -> None:
        """A process that was started again, but not in time to write anything."""
        span = self.run.training_span
        members = {member.name: member for member in self.run.members}
        for name, at in self._spawns.items():
            if name in members and at > members[name].lives[-1].last_at:
                ends = [ended for ended, _ in self._ends.get(name, []) if ended >= at]
                over = span is not None and min(ends, default=span[1]) >= span[1]
                members[name].lives.append(Life(at, at, spawned_at=at, over=over))

    def _life(self, record: Record, at: float) -> Life | None:
        """The life that a record of a learner or shard belongs to."""
        who, run = record.who, self.run
        member: LearnerHistory | ShardHistory
        if is_shard(who):
            member = run.shards.setdefault(who, ShardHistory(who))
        elif is_learner(who) and who not in self._observers:
            member = run.learners.setdefault(who, LearnerHistory(who))
        else:
            return None
        if record.kind == "start" or not member.lives:
            member.lives.append(Life(at, at, spawned_at=self._spawns.pop(who, None)))
        member.lives[-1].last_at = at
        return member.lives[-1]

    def _learner(self, learner: LearnerHistory, life: Life | None, at: float, value: Any) -> None:
        assert life is not None
        match value:
            case StepFinished(tokens):
                life.steps_at.append(at)
                life.step_tokens.append(tokens)
                life.ledger.stepped(tokens)
                learner.tokens += tokens
            case Began(kept=kept):
                for own in kept:
                    version = (own.version.term, own.version.counter)
                    life.ledger.restored(own.fragment, version, own.tokens)
            case LossMeasured(_, global_step, _, loss):
                if loss is None or abs(loss) > LOSS_MAX:
                    learner.losses_not_finite += 1
                else:
                    learner.losses.append(Loss(at, global_step, loss))
            case Apply(fragment, version, mode, discarded_tokens, why):
                self._fragments.add(fragment)
                learner.applied[mode] += 1
                learner.discarded_tokens += discarded_tokens
                life.ledger.applied(fragment, mode, discarded_tokens, why)
                life.ledger.holds(fragment, (version.term, version.counter))
            case Relabel(fragment, version, staged=staged):
                life.ledger.renamed(fragment, staged=staged)
                if not staged:
                    life.ledger.holds(fragment, (version.term, version.counter))
            case Hold():
                life.holds.append((at, math.inf))
            case Release() if life.holds:
                life.holds[-1] = (life.holds[-1][0], at)
            case Ready():
                life.ready_at = at if life.ready_at is None else life.ready_at
            case EndTraining() | RunOver():
                life.over = True

    def _sent(self, life: Life, record: Record) -> None:
        """Of what was sent only this much matters."""
        try:
            ask = record.data["ask"]
            name = (int(ask["term"]), int(ask["number"]))
            life.ledger.sent(int(record.data["fragment"]), name, int(record.data["tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            self._left_out[f"{record.who}: SendBody: {error!r}"] += 1

    def _told(self, record: Record, at: float) -> None:
        """How far a shard has heard that learners are; these records are too many to decode."""
        data = record.data
        try:
            said: list[Any] = [(data["learner"], data["message"])] if record.type == "Said" else []
            for name, report in said or data["reports"]:
                if report.get("type") != "StepReport":
                    continue
                learner = self.run.learners.get(name)
                if learner is None:
                    self._afar.reported(at, record.who, name, report, self.run.global_step)
                elif learner.lives:
                    life = learner.lives[-1]
                    steps, tokens = int(report["step"]), int(report["tokens"])
                    life.told = (max(life.told[0], steps), max(life.told[1], tokens))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._left_out[f"{record.who}: {record.type}: {error!r}"] += 1

    def _finished(self, record: Record) -> None:
        message = record.data.get("message")
        if isinstance(message, dict) and message.get("type") == "Finished":
            self._afar.finished(record.who)

    def _shard(self, shard: ShardHistory, life: Life | None, at: float, value: Any) -> None:
        assert life is not None
        match value:
            case ClockAdvanced(clock, _, _):
                shard.clock_at.append(at)
                shard.clock.append(clock)
                life.steps_at.append(at)
            case RoundFinished(closed_seconds=closed, finished_seconds=finished):
                if not 0 <= finished < SECONDS_MAX:
                    self._left_out[f"{shard.name}: a round of {finished} s"] += 1
                    return
                opened_at = max(0.0, at - finished)
                closed_at = None if closed is None else opened_at + closed
                shard.rounds.append(Round(opened_at, closed_at, at, value))
            case TermGranted(admitted):
                if admitted.term not in shard.terms:  # a new coordinator confirms the one it has
                    shard.terms.append(admitted.term)
            case Evict(learner, reason, _):
                self._afar.left(shard.name, learner, reason)
                self._evictions.setdefault(learner, []).append((at, reason))
                own = self._gone.setdefault(learner, {})
                own.setdefault(shard.name, []).append((at, reason))
            case Greeted(_, hello) if hello.role == "observer":
                self._observers.add(hello.learner)
            case Accept(learner=learner, epoch=epoch):
                self._afar.accepted(at, shard.name, learner, epoch)
                self._accepted.setdefault(learner, {}).setdefault(shard.name, []).append(at)

    def _anybody(self, record: Record, at: float, value: Any) -> None:
        run, who = self.run, record.who
        match value:
            case Evaluated(global_step, loss, tokens, metrics):
                loss = None if loss is None or abs(loss) > LOSS_MAX else loss
                named = tuple((metric.name, metric.value) for metric in metrics)
                run.evaluations.append(Evaluation(at, global_step, loss, tokens, named))
            case ProcessStarted(name, _):
                self._spawns[self._acting.whose(name)] = at
            case ProcessEnded(name, code, signal_number):
                self._ends.setdefault(self._acting.whose(name), []).append((at, value))
                if code != 0:
                    how = ending_in_words(code, signal_number)
                    run.remarks.append(Remark(at, who, f"{name} {how}"))
            case EndRequested(names):
                for name in names:
                    self._orders.setdefault(name, []).append(at)
                told = names[0] if len(names) == 1 else f"{len(names)} processes"
                run.remarks.append(Remark(at, who, f"{told} told to end"))
            case FaultInjected(kind):
                run.faults.append((at, value))
                if kind in STEP_FAULTS:
                    self._disturbing[value] = at
            case FaultEnded(kind, target, processes):
                self._disturbed(FaultInjected(kind, target, processes), at)
            case BytesMoved():
                self._bytes.setdefault(who, {})[record.life] = value
            case TookOver():
                if told := self._acting.took_over(value):
                    run.remarks.append(Remark(at, who, told))
            case WeightsSaved(path):
                run.weights.append(path)
            case SampleGenerated(text):
                run.sample_text = text
            case CorpusDescribed(description):
                run.corpus = self._corpus(description)
            case Note(text, why):
                run.remarks.append(Remark(at, who, f"{text}: {why}"))

    def _disturbed(self, fault: FaultInjected, until: float) -> None:
        begin = self._disturbing.pop(fault, until)
        for name in fault.processes:
            if name in self.run.learners:
                self.run.learners[name].disturbed.append((begin, until))

    def _corpus(self, description: str) -> dict[str, Any] | None:
        try:
            corpus = json.loads(description)
        except ValueError:
            corpus = None
        if not isinstance(corpus, dict):
            self.run.problems.append("the description of the corpus is no JSON object")
            return None
        return corpus

    def _count_rounds(self, learner: LearnerHistory, shard: ShardHistory) -> None:
        for round in shard.rounds:
            own = [p for p in round.result.participants if p.learner == learner.name]
            if own:
                learner.rounds_asked += 1
                merged = round.result.verdict == "merged"
                learner.rounds_folded += merged and any(p.state == "folded" for p in own)

    def _outages(self, member: LearnerHistory | ShardHistory) -> list[Outage]:
        outages = []
        for index, life in enumerate(member.lives):
            following = member.lives[index + 1] if index + 1 < len(member.lives) else None
            ending = self._ending(member.name, life, following)
            life.crashed = ending is not None
            if ending is None:
                life.ended_at = self._end_on_purpose(member.name, life)
                continue
            down_at, how = ending
            life.ended_at = down_at
            back_at = None
            if following is not None:
                back_at = following.ready_at
                back_at = (
                    following.steps_at[0] if back_at is None and following.steps_at else back_at
                )
            outages.append(
                Outage(
                    who=member.name,
                    down_at=down_at,
                    how=how,
                    global_step=self.run.global_step_by(down_at),
                    restarted_at=following.began_at if following else None,
                    back_at=back_at,
                    lost_steps={},
                )
            )
        return outages

    def _ending(self, name: str, life: Life, following: Life | None) -> tuple[float, str] | None:
        """When and how a life ended, if it was neither told to nor at the proper end of the run."""
        until = following.began_at if following else self.run.duration
        if any(life.began_at <= at <= until for at in self._orders.get(name, [])):
            return None  # only who runs is told to end: it has not crashed before
        for at, ended in self._ends.get(name, []):
            if life.started_at <= at <= until:
                proper = following is None and (ended.code == 0 or life.over)
                how = ending_in_words(ended.code, ended.signal)
                return None if proper else (at, how)
        if following is not None:
            return (life.last_at, "fell silent")
        for at, reason in self._evictions.get(name, []):
            if at > life.last_at and not reason.startswith("left") and not life.over:
                return (life.last_at, "fell silent")
        return None

    def _end_on_purpose(self, name: str, life: Life) -> float | None:
        """When a life that was not cut short ended, if that is on the tape."""
        ends = [at for at, _ in self._ends.get(name, []) if at >= life.started_at]
        left = [
            at
            for at, reason in self._evictions.get(name, [])
            if at >= life.started_at and reason.startswith("left")
        ]
        return min(ends + left, default=life.last_at if life.over else None)

    def _with_lost_steps(self, outage: Outage) -> Outage:
        """Fills in what the learners that lived through an outage lost meanwhile."""
        span = self.run.training_span
        if span is None:
            return outage
        until = span[1] if outage.back_at is None else min(outage.back_at, span[1])
        lost = {
            name: learner.lost_steps(outage.down_at, until)
            for name, learner in self.run.learners.items()
            if name != outage.who
            and not any(
                other.down_at < until and (other.back_at is None or other.back_at > outage.down_at)
                for other in learner.outages
            )
        }
        return dataclasses.replace(outage, lost_steps=lost)
