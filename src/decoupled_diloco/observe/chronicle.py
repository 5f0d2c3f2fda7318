"""What a run's shards saw, learner by learner and round by round, kept up to date record by record.

`status`, `watch` and `explain` read nothing else of the protocol. All of it comes from the tapes of
the shards, which a running syncer serves; the learners' own tapes, where they are at hand, add what
only they know: losses, bytes, steps that were trained out of the syncer's reach.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.observe.acting import Acting
from decoupled_diloco.observe.chronicle_data import (
    AWAY,
    LATE,
    NOT_ASKED,
    OUT_OF_REACH,
    TOOK_PART,
    Asked,
    LearnerLog,
    Member,
    Remark,
    RoundLog,
    ShardLog,
    Stay,
    TickLog,
)
from decoupled_diloco.observe.historian import ending_in_words, is_learner, is_shard
from decoupled_diloco.observe.live import REPEAT_SECONDS, Rate
from decoupled_diloco.observe.looked_at import LOOKED_AT, MESSAGES
from decoupled_diloco.observe.records import Record
from decoupled_diloco.observe.samples import (
    BytesMoved,
    EndRequested,
    Evaluated,
    LossMeasured,
    ProcessEnded,
    ProcessStarted,
    RestartScheduled,
    TookOver,
    WentBack,
)
from decoupled_diloco.observe.words import named, subjects_of
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say

REMARKS_MAX = 500
"""Notes that are kept, the newest."""

INSTANT_SECONDS = 1e-6
"""Closer instants of one shard are the same: a wall clock's seconds hold no more digits, and any
event takes longer. Who leaves in the instant in which a window closes has closed it."""

LATE_REPORTS_MAX = 8
"""Rounds that may wait at once for the next report of a learner that was not in them."""


class Chronicle:
    """Everything that is known of a run as of its latest record; ``tokens``: of all learners.

    Args:
        rounds_max: Finished rounds to keep a shard, and ticks; of stays then only those that go on.
            ``None``: all.
        keep_steps: Keep when every learner reported each of its steps.
    """

    def __init__(self, *, rounds_max: int | None = None, keep_steps: bool = False) -> None:
        self.shards: dict[str, ShardLog] = {}
        self.learners: dict[str, LearnerLog] = {}
        self.settings: dict[str, Any] = {}
        self.virtual = False
        self.observers: set[str] = set()
        self.began: float | None = None
        self.latest = 0.0
        self.tokens = 0
        self.clock_rate = Rate()
        self.token_rate = Rate()
        self.evaluation: Evaluated | None = None
        self.cut: tuple[float, do.KeepCut] | None = None
        self.remarks: list[Remark] = []
        self.left_out: Counter[str] = Counter()
        self.told_to_end: set[str] = set()
        self._acting = Acting()
        self._rounds_max = rounds_max
        self._keep_steps = keep_steps

    # ---- what follows from it

    @property
    def finished(self) -> bool:
        """Whether every shard has seen the end of the run."""
        shards = self.shards.values()
        return bool(shards) and all(shard.phase == "finished" for shard in shards)

    @property
    def interrupted(self) -> bool:
        """Whether the launcher has ended the processes of a run that was not over."""
        return bool(self.told_to_end) and not self.finished

    @property
    def step(self) -> int:
        """How far the slowest shard has come: what a budget of steps is measured by."""
        return min((shard.clock_max for shard in self.shards.values()), default=0)

    @property
    def merged(self) -> int:
        """Rounds that were merged, of all shards."""
        return sum(shard.merged for shard in self.shards.values())

    @property
    def fragments(self) -> int | None:
        """P, from the run's settings; ``None`` while no process has told them."""
        sync = self.settings.get("sync")
        return sync.get("fragments") if isinstance(sync, dict) else None

    def rounds(self) -> Iterator[RoundLog]:
        """Every finished round that is kept, shard by shard."""
        for shard in self.shards.values():
            yield from shard.finished

    # ---- taking records in

    def take_all(self, records: Iterable[Record]) -> None:
        """Takes records in, in the order of time."""
        for record in records:
            self.take(record)

    def take(self, record: Record) -> None:
        """Takes one record in; one that this version cannot read is counted and left out."""
        self.began = record.wall if self.began is None else min(self.began, record.wall)
        self.latest = max(self.latest, record.wall)
        if record.kind == "start":
            self._started(record)
        if is_shard(record.who):
            self._shard(record.who).heard_at = record.wall
        if record.type not in LOOKED_AT or not _matters(record):
            return
        try:
            value = record.value()
        except ProtocolError as error:
            self.left_out[f"{record.who}: {error}"] += 1
            return
        if is_shard(record.who):
            self._shard_record(self._shard(record.who), record, value)
        elif is_learner(record.who):
            self._learner_record(self._learner(record.who), record.wall, value)
        self._anybody(record, value)

    def _shard(self, name: str) -> ShardLog:
        if name not in self.shards:
            self.shards[name] = ShardLog(name)
            ordered = sorted(self.shards.values(), key=lambda shard: shard.index)
            self.shards = {shard.name: shard for shard in ordered}
        return self.shards[name]

    def _learner(self, name: str) -> LearnerLog:
        return self.learners.setdefault(name, LearnerLog(name))

    def _started(self, record: Record) -> None:
        header = record.data.get("header") or {}
        self.virtual = self.virtual or header.get("virtual") is True
        settings = header.get("settings")
        if isinstance(settings, dict) and (not self.settings or is_shard(record.who)):
            self.settings = settings
        if is_shard(record.who):
            self._shard_started(self._shard(record.who), record.wall)
        elif is_learner(record.who):
            learner = self._learner(record.who)
            learner.has_tape, learner.process, learner.left = True, "joining", ""
            learner.started_at, learner.own_rate = record.wall, Rate()
            learner.begin_process()

    def _shard_started(self, shard: ShardLog, at: float) -> None:
        """A new life: it knows nobody, and what was open is nobody's any more."""
        for member in shard.members.values():
            self._leave(shard, member, at, f"{shard.name} was started again")
        shard.greeting = None
        shard.lost += list(shard.open.values())
        self._forget(shard.lost)
        shard.members.clear()
        shard.open.clear()
        shard.paths.clear()
        shard.folds.clear()
        shard.moved = (-1, [])
        shard.unreported.clear()
        shard.lives.append(at)
        self.clock_rate.clear()  # it may have to make up for what it has forgotten
        shard.phase = "starting"

    # ---- a shard's records

    def _shard_record(self, shard: ShardLog, record: Record, value: Any) -> None:
        at = record.wall
        match value:
            case fact.TermGranted(admitted):
                shard.term = admitted.term
                shard.phase = "restoring" if admitted.begun else "waiting for learners"
            case fact.Ordered(say.Begin()):
                shard.phase = "running"
            case fact.Ordered(say.EndOrdered()):
                shard.phase = "closing"
            case fact.Greeted(_, say.Hello(learner=name, role="observer")):
                self.observers.add(name)
                self.learners.pop(name, None)
            case fact.Greeted(connection, hello):
                shard.greeting = (connection, hello)
            case do.Accept(connection, _, _, why):
                if shard.greeting is not None and shard.greeting[0] == connection:
                    self._accepted(shard, at, shard.greeting[1], why)
            case fact.Disconnected(learner):
                self._of(shard, learner, at).connected = False
            case fact.Heard(learners):
                for name in learners:
                    if name in shard.members:
                        self._seen(name, at)
            case do.Evict(learner, reason):
                if learner in shard.members:
                    self._leave(shard, shard.members.pop(learner), at, reason)
            case do.Install(fragment, version):
                shard.versions[fragment] = version
            case BytesMoved():
                shard.bytes_moved = value
            case do.Send(learner, say.Welcome(step=step, run_step=run_step)):
                if learner in shard.members:
                    shard.members[learner].offset = run_step - step
            case do.Broadcast(say.Shifted(by)):
                for member in shard.members.values():
                    member.offset += by
            case do.Broadcast(say.Finished()) | do.Stop():
                shard.phase = "finished"
            case _:
                self._message(shard, record, value)

    def _message(self, shard: ShardLog, record: Record, value: Any) -> None:
        at = record.wall
        match value:
            case fact.Said(learner, say.Holding() | say.Leave()) if learner not in self.learners:
                pass  # an observer
            case fact.Said(learner, say.StepReport() as report):
                self._reported(shard, record, ((learner, report),))
            case fact.Reported(reports):
                self._reported(shard, record, reports)
            case fact.Said(learner, say.Holding(fragment, version)):
                member = self._of(shard, learner, at)
                member.held[fragment] = max(version, member.held.get(fragment, version))
                round = shard.last_merged.get(fragment)
                if round and round.result and round.result.version == version:
                    round.held_at.setdefault(learner, at)
                self._seen(learner, at)
            case fact.Said(learner, say.Leave(reason)):
                if self._of(shard, learner, at).epoch in (0, self._learner(learner).epoch):
                    self._learner(learner).left = reason
            case fact.BodyArrived(learner=learner, nbytes=nbytes):
                self._learner(learner).bytes_up += nbytes
                self._seen(learner, at)
                for round in shard.finished[-LATE_REPORTS_MAX:]:
                    if round.result and any(p.ask == value.ask for p in round.result.participants):
                        round.late_bodies[learner] = at
            case do.ClockAdvanced(clock, live, why):
                self._ticked(shard, record, clock, live, why)
            case _:
                self._round_record(shard, at, value)

    def _of(self, shard: ShardLog, name: str, at: float) -> Member:
        """A learner that this tape speaks of; it began before what is read of the tape."""
        if name not in shard.members:
            return Member(name, 0, at)
        return shard.members[name]

    def _accepted(self, shard: ShardLog, at: float, hello: say.Hello, why: str) -> None:
        if hello.role != "learner":
            return
        self._seen(hello.learner, at)
        member = shard.members.get(hello.learner)
        if member is not None and member.epoch != hello.epoch:
            self._leave(shard, member, at, f"epoch {hello.epoch} of it has joined")
            member = None
        if member is None:
            member = shard.members[hello.learner] = Member(hello.learner, hello.epoch, at)
            shard.stays.append(Stay(hello.learner, hello.epoch, at, why))
            learner = self._learner(hello.learner)
            if hello.epoch > learner.epoch:
                learner.epoch, learner.left = hello.epoch, ""
        member.connected, member.step = True, max(member.step, hello.step)
        member.held = {holding.fragment: holding.version for holding in hello.held}

    def _leave(self, shard: ShardLog, member: Member, at: float, reason: str) -> None:
        shard.former[member.learner] = member
        oldest = min((round.opened_at for round in shard.open.values()), default=at)
        while shard.departed and shard.departed[0][0] < oldest:
            shard.departed.popleft()
        shard.departed.append((at, member))
        for stay in reversed(shard.stays):
            if stay.learner == member.learner and stay.until is None:
                stay.until, stay.reason = at, reason
                break
        if self._rounds_max is not None:
            shard.stays = [stay for stay in shard.stays if stay.until is None]

    def _seen(self, name: str, at: float) -> None:
        learner = self._learner(name)
        learner.seen_at = max(at, learner.seen_at or at)

    def _reported(
        self, shard: ShardLog, record: Record, reports: Iterable[tuple[str, say.StepReport]]
    ) -> None:
        """One report or several at once: they move the clock together."""
        moved = []
        for name, report in reports:
            member = self._of(shard, name, record.wall)
            before = member.run_step
            self._report(shard, record.wall, member, report)
            moved.append((name, before, member.run_step))
        shard.moved = (record.seq, moved)
        self.token_rate.add(self.latest, self.tokens)

    def _report(self, shard: ShardLog, at: float, member: Member, report: say.StepReport) -> None:
        name, learner = member.learner, self._learner(member.learner)
        member.step, member.reported_at = max(member.step, report.step), at
        member.step_seconds = report.seconds or member.step_seconds
        if self._keep_steps:
            shard.reports.setdefault(name, []).append((member.run_step, at))
        self._seen(name, at)
        learner.report(member.epoch, report)
        learner.reported_at = at
        learner.rate.add(at, learner.tokens)
        self._count_tokens(learner)
        for round in shard.unreported.pop(name, ()):
            round.late_reports.setdefault(name, at)
        for round in shard.open.values():
            if name not in round.asks:
                round.unasked.setdefault(name, []).append(at)

    def _count_tokens(self, learner: LearnerLog) -> None:
        self.tokens += learner.tokens - learner.tokens_counted
        learner.tokens_counted = learner.tokens

    def _ticked(self, shard: ShardLog, record: Record, clock: int, live: int, why: str) -> None:
        quorum = int(settings_fields(self, "sync").get("quorum", 1))
        setter = shard.clock_setter(record.cause, clock, quorum)
        known = shard.life == 1 or any(tick.life == shard.life for tick in shard.ticks[-1:])
        before = shard.clock if known else None
        shard.ticks.append(TickLog(record.wall, clock, before, live, setter, why, shard.life))
        self._forget(shard.ticks)
        shard.clock, shard.clock_max = clock, max(clock, shard.clock_max)
        self.clock_rate.add(record.wall, self.step)
        if shard.phase not in ("closing", "finished"):
            shard.phase = "running"

    def _forget(self, logs: list[Any]) -> None:
        """All but the newest, if not all are to be kept."""
        if self._rounds_max is not None:
            del logs[: -self._rounds_max]

    # ---- rounds

    def _round_record(self, shard: ShardLog, at: float, value: Any) -> None:
        match value:
            case do.RoundOpened():
                round = _round(shard, value, at)
                round.opened = value
                shard.open[value.round] = round
            case do.Expect(path=path, learner=learner, round=number, ask=ask, why=why) if number:
                round = shard.open.get(number) or _round(shard, value, at)
                shard.open[number] = round
                round.asks.setdefault(learner, []).append(Asked(at, ask, why))
                shard.paths[path] = (number, learner)
            case do.Unexpect(path, why):
                number, learner = shard.paths.pop(path, (-1, ""))
                if number in shard.open:
                    shard.open[number].fallen[learner] = (at, why)
            case do.Fold(fragment=fragment, ask=ask):
                shard.folds.setdefault(fragment, {})[ask] = (at, value)
            case do.Merge(round=number, fragment=fragment):
                shard.folds.pop(fragment, None)
                if number in shard.open:
                    shard.open[number].merging_at = at
            case do.RoundFinished():
                self._finished(shard, at, value)

    def _finished(self, shard: ShardLog, at: float, result: do.RoundFinished) -> None:
        round = shard.open.pop(result.round, None)
        if round is None:
            round = _round(shard, result, at - result.finished_seconds)
        shard.paths = {p: asked for p, asked in shard.paths.items() if asked[0] != result.round}
        round.result, round.finished_at = result, at
        round.folds = dict(round.folds)  # what a round that is given up leaves goes into the next
        until = at
        if result.closed_seconds is not None:
            until = round.opened_at + result.closed_seconds + INSTANT_SECONDS
        there = [member for member in shard.members.values() if member.since <= until]
        since_gone = [m for gone_at, m in shard.departed if m.since <= until < gone_at]
        round.live = {m.learner: m.reported_at for m in since_gone}
        round.live |= {m.learner: m.reported_at for m in there if m.connected}
        round.unreachable = tuple(m.learner for m in there if not m.connected)
        shard.finished.append(round)
        self._forget(shard.finished)
        self._note_lateness(shard, round)
        if result.verdict == "abandoned":
            shard.abandoned += result.given_up
            return
        shard.merged += 1
        if result.version is not None:
            shard.versions[result.fragment] = result.version
        shard.last_merged[result.fragment] = round
        self._count(shard, round, at)

    def _note_lateness(self, shard: ShardLog, round: RoundLog) -> None:
        """When those reported that were not asked: by now, or whenever they will."""
        result = round.result
        if result is None or result.closed_seconds is None:
            return
        closed_at = round.opened_at + result.closed_seconds
        for name in round.live.keys() - {
            participant.learner for participant in result.participants
        }:
            late = [reported for reported in round.unasked.get(name, ()) if reported > closed_at]
            if late:
                round.late_reports[name] = late[0]
            else:
                waiting = shard.unreported.setdefault(name, [])
                waiting.append(round)
                del waiting[:-LATE_REPORTS_MAX]
        round.unasked.clear()

    def _count(self, shard: ShardLog, round: RoundLog, at: float) -> None:
        """Who took part in a merged round, and why the others did not."""
        result = round.result
        assert result is not None
        states: dict[str, str] = {}
        for participant in result.participants:  # what is folded comes first, and counts
            states.setdefault(participant.learner, participant.state)
        for name, state in states.items():
            learner = self._learner(name)
            if state == "folded":
                learner.count(TOOK_PART)
                learner.accepted_at, learner.accepted_step = at, result.tick
                learner.accepted[shard.name] = shard.merged
            else:
                learner.count(LATE if state == "late" else state)
        for name in round.live.keys() - states.keys():
            self._learner(name).count(NOT_ASKED)
        for name, learner in self.learners.items():
            if name not in states and name not in round.live:
                learner.count(OUT_OF_REACH if name in round.unreachable else AWAY)

    # ---- the records of learners, and of the launcher

    def _learner_record(self, learner: LearnerLog, at: float, value: Any) -> None:
        match value:
            case fact.StepFinished(tokens):
                learner.own_steps += 1
                learner.own_tokens += tokens
                learner.stepped_at, learner.process = at, "training"
                learner.own_rate.add(at, learner.own_tokens)
                self._count_tokens(learner)
            case LossMeasured(loss=loss):
                learner.loss = loss
            case do.Apply(_, _, mode, discarded, why):
                if discarded:
                    learner.discarded[(mode, why)] += discarded
            case do.Ready():
                learner.process = "training"
            case do.EndTraining() | do.RunOver():
                learner.process = "finished"
            case do.Recovered():
                learner.recoveries.append(value)
            case BytesMoved():
                learner.bytes_moved[learner.started_at or 0.0] = value

    def _anybody(self, record: Record, value: Any) -> None:
        match value:
            case do.KeepCut():
                self.cut = record.wall, value
            case EndRequested(names):
                if not self.told_to_end and not self.finished:
                    self._remark(record, "", "all processes are told to end")
                self.told_to_end |= set(names)
            case ProcessEnded(name) if name in self.told_to_end:
                if is_shard(name) and name in self.shards and not self.finished:
                    self.shards[name].phase = "ended"
            case ProcessEnded(process, code, signal):
                name = self._acting.whose(process)
                if self._is_learner(name):
                    learner = self._learner(name)
                    learner.process = "finished" if code == 0 else "down"
                    learner.down_at = record.wall
                elif is_shard(name) and name in self.shards:
                    self.shards[name].phase = "finished" if code == 0 else "down"
                if code != 0:
                    self._remark(record, name, f"{process}: {ending_in_words(code, signal)}")
            case RestartScheduled(name, _):
                if self._is_learner(name):
                    self._learner(name).process = "restarting"
            case ProcessStarted(name, _):
                self.told_to_end.discard(name)
                if self._is_learner(name):
                    self._learner(name).process, self._learner(name).left = "joining", ""
                elif is_shard(name):
                    self._shard(name)
            case TookOver():
                if told := self._acting.took_over(value):
                    self._remark(record, record.who, told)
            case Evaluated():
                self.evaluation = value
            case do.Note(text, why):
                told = named(record.who, text)
                self._remark(record, self._subject(told), f"{told}: {why}")
            case WentBack(told):
                for shard in self.shards.values():
                    shard.clock = shard.clock_max = 0
                self._remark(record, "", told)

    def _is_learner(self, name: str) -> bool:
        return is_learner(name) and name not in self.observers

    def _subject(self, note: str) -> str:
        return next((name for name in subjects_of(note) if name in self.learners), "")

    def _remark(self, record: Record, subject: str, text: str) -> None:
        at, lately = record.wall, self.remarks[-8:]
        if not any(text == told.text and at - told.at < REPEAT_SECONDS for told in lately):
            self.remarks.append(Remark(at, record.who, subject, text))
        del self.remarks[:-REMARKS_MAX]


def chronicle_of(records: Iterable[Record]) -> Chronicle:
    """Everything that the records of a run tell, with all its rounds and steps."""
    chronicle = Chronicle(keep_steps=True)
    chronicle.take_all(records)
    return chronicle


def _round(
    shard: ShardLog, told: do.RoundOpened | do.Expect | do.RoundFinished, at: float
) -> RoundLog:
    """A round of the shard's present life."""
    folds = shard.folds.setdefault(told.fragment, {})
    return RoundLog(shard.name, told.round, told.fragment, at, life=shard.life, folds=folds)


def _matters(record: Record) -> bool:
    """Whether the message in a record is one to look at: most are not, and need no decoding."""
    wanted = MESSAGES.get(record.type)
    if wanted is None:
        return True
    message = record.data.get("message")
    return isinstance(message, dict) and message.get("type") in wanted


def settings_fields(chronicle: Chronicle, table: str) -> dict[str, Any]:
    """One table of the run's public settings; empty while they are not known."""
    found = chronicle.settings.get(table)
    return dict(found) if isinstance(found, dict) else {}
