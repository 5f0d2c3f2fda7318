"""The part of a `RunModel` that takes in what the shards of the syncer wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from decoupled_diloco.observe.learner_fold import LearnerFold
from decoupled_diloco.observe.records import SECONDS_MAX, Record
from decoupled_diloco.observe.run_data import (
    AWAY,
    LATE,
    NOT_ASKED,
    OUT_OF_REACH,
    TOOK_PART,
    LearnerLog,
    ProcessLife,
)
from decoupled_diloco.observe.shard_data import Asked, MemberLog, RoundLog, ShardLog, Stay, TickLog
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.versions import Holding
from decoupled_diloco.units import format_duration

if TYPE_CHECKING:
    from decoupled_diloco.observe.run_model import RunModel

INSTANT_SECONDS = 1e-6
"""Closer instants of one shard are the same: a wall clock's seconds hold no more digits, and any
event takes longer. Who leaves in the instant in which a window closes has closed it."""

LATE_REPORTS_MAX = 8
"""Rounds that may wait at once for the next report of a learner not in them."""

ROUNDS_MAX = 100
"""The newest rounds, lost rounds and ticks of a shard that are kept for the present state."""

LEFT_AT_THE_END = "left: the run is over"
"""Why a shard no longer counts on a learner whose run has ended."""


class ShardFold:
    """Takes in the records of shards."""

    def __init__(self, run: RunModel, learners: LearnerFold) -> None:
        self._run, self._learners = run, learners

    def started(self, shard: ShardLog, at: float) -> None:
        """A new life: it knows no learner, and what was open is given up."""
        for member in shard.members.values():
            self._leave(shard, member, at, f"{shard.name} was started again")
        for learner in self._run.learners.values():
            learner.cut_from.discard(shard.name)
        shard.lost += list(shard.open.values())
        self._forget(shard.lost)
        shard.members.clear()
        shard.open.clear()
        shard.paths.clear()
        shard.folds.clear()
        shard.unreported.clear()
        shard.greeting, shard.moved, shard.phase = None, (-1, []), "starting"
        self._run.clock_rate.clear()  # it may have to make up for what it has forgotten

    def take(self, shard: ShardLog, record: Record, at: float, value: Any) -> None:
        """Takes one record in."""
        match value:
            case fact.Received(_, say.ShardAdmitted() as admitted):
                if admitted.term not in shard.terms:  # a new coordinator confirms the one it has
                    shard.terms.append(admitted.term)
                shard.phase = "restoring" if admitted.begun else "waiting for learners"
            case fact.Received(_, say.Begin()):
                shard.phase = "running"
            case fact.Received(_, say.EndOrdered()):
                shard.phase = "closing"
            case fact.Connected(name, say.Hello(role="observer")):
                self._run.observe_only(name)
            case fact.Connected(_, say.Hello() as hello, connection):
                shard.greeting = (connection, hello)
            case do.Accept(connection, name, epoch, why):
                self._accepted(shard, record, at, (connection, name, epoch, why))
            case fact.Lost(learner):
                self._of(shard, learner, at).connected = False
            case fact.Heard(learners):
                for name in learners:
                    if name in shard.members:
                        self._seen(name, at)
            case do.Evict(name, reason):
                self._evicted(shard, name, at, reason)
            case do.Install(fragment, version):
                shard.versions[fragment] = version
            case do.Send(learner, say.Welcome(step=step, run_step=run_step)):
                if learner in shard.members:
                    shard.members[learner].offset = run_step - step
            case do.Broadcast(say.Shifted(by)):
                for member in shard.members.values():
                    member.offset += by
            case do.Broadcast(say.Finished()) | do.Stop():
                self._finished(shard)
            case _:
                self._message(shard, record, at, value)

    def _message(self, shard: ShardLog, record: Record, at: float, value: Any) -> None:
        learners = self._run.learners
        match value:
            case fact.Received(learner, Holding() | say.Leave()) if learner not in learners:
                pass  # an observer
            case fact.Received(learner, say.StepReport() as report):
                self._reported(shard, record, at, ((learner, report),))
            case fact.Reported(reports):
                self._reported(shard, record, at, reports)
            case fact.Received(learner, Holding(fragment, version)):
                member = self._of(shard, learner, at)
                member.held[fragment] = max(version, member.held.get(fragment, version))
                round = shard.last_merged.get(fragment)
                if round and round.outcome.version == version:
                    round.held_at.setdefault(learner, at)
                self._seen(learner, at)
            case fact.Received(learner, say.Leave(reason)):
                if self._of(shard, learner, at).epoch in (0, learners[learner].epoch):
                    learners[learner].left = reason
            case fact.BodyArrived(learner=learner, nbytes=nbytes):
                self._run.learner(learner).bytes_up += nbytes
                self._seen(learner, at)
                for round in shard.rounds[-LATE_REPORTS_MAX:]:
                    if any(p.ask == value.ask for p in round.outcome.participants):
                        round.late_bodies[learner] = at
            case do.ClockAdvanced(clock, live, why):
                self._ticked(shard, record, at, clock, live, why)
            case _:
                self._round_record(shard, record, at, value)

    def _of(self, shard: ShardLog, name: str, at: float) -> MemberLog:
        """A learner that this tape speaks of; it began before what is read of the tape."""
        if name not in shard.members:
            return MemberLog(name, 0, at)
        return shard.members[name]

    # ---- who comes and goes

    def _accepted(
        self, shard: ShardLog, record: Record, at: float, accept: tuple[int, str, int, str]
    ) -> None:
        connection, name, epoch, why = accept
        if name in self._run.observers:
            return
        hello = shard.greeting[1] if shard.greeting and shard.greeting[0] == connection else None
        self._seen(name, at)
        member = shard.members.get(name)
        if member is not None and member.epoch != epoch:
            self._leave(shard, member, at, f"epoch {epoch} of it has joined")
            member = None
        if member is None:
            member = shard.members[name] = MemberLog(name, epoch, at)
            shard.stays.append(Stay(name, epoch, at, why))
        learner = self._run.learner(name)
        if epoch > learner.epoch:
            learner.epoch, learner.left = epoch, ""
            learner.cut_from.clear()
        self._life_afar(learner, epoch, at)
        self._heard_again(learner, shard, record, at)
        member.connected = True
        if hello is not None:
            member.step = max(member.step, hello.step)
            member.held = {holding.fragment: holding.version for holding in hello.held}

    def _life_afar(self, learner: LearnerLog, epoch: int, at: float) -> None:
        """A life of a learner whose tape is elsewhere, as a shard takes it in."""
        if learner.afar and epoch not in learner.life_of:
            life = learner.life_of[epoch] = ProcessLife(at, at, overwritten=0)
            learner.lives.append(life)

    def _heard_again(self, learner: LearnerLog, shard: ShardLog, record: Record, at: float) -> None:
        if shard.name in learner.cut_from:
            learner.cut_from.discard(shard.name)
            if not learner.cut_from and learner.process == "training":
                away = format_duration(at - learner.cut_at)
                text = f"{learner.name} is live again, {away} after it was not"
                self._run.remark(record, at, learner.name, text)

    def _evicted(self, shard: ShardLog, name: str, at: float, reason: str) -> None:
        member = shard.members.pop(name, None)
        if member is not None:
            self._leave(shard, member, at, reason)
        learner = self._run.learners.get(name)
        if learner is None:
            return
        if self._run.whole:
            learner.evictions.append((at, shard.name, reason))
        learner.cut_at = learner.cut_at if learner.cut_from else at
        learner.cut_from.add(shard.name)
        if reason == LEFT_AT_THE_END:
            _is_over(learner)

    def _finished(self, shard: ShardLog) -> None:
        shard.phase = "finished"
        for name in shard.members:
            _is_over(self._run.learner(name))

    def _leave(self, shard: ShardLog, member: MemberLog, at: float, reason: str) -> None:
        oldest = min((round.opened_at for round in shard.open.values()), default=at)
        while shard.departed and shard.departed[0][0] < oldest:
            shard.departed.popleft()
        shard.departed.append((at, member))
        for stay in reversed(shard.stays):
            if stay.learner == member.learner and stay.until is None:
                stay.until, stay.reason = at, reason
                break
        if not self._run.whole:
            shard.stays = [stay for stay in shard.stays if stay.until is None]

    def _seen(self, name: str, at: float) -> None:
        learner = self._run.learner(name)
        learner.seen_at = max(at, learner.seen_at or at)

    # ---- steps

    def _reported(
        self,
        shard: ShardLog,
        record: Record,
        at: float,
        reports: Iterable[tuple[str, say.StepReport]],
    ) -> None:
        """One report or several at once: they move the clock together."""
        moved = []
        for name, report in reports:
            member = self._of(shard, name, at)
            before = member.run_step
            self._report(shard, record, at, member, report)
            moved.append((name, before, member.run_step))
        shard.moved = (record.seq, moved)
        self._run.token_rate.add(self._run.duration, self._run.tokens)

    def _report(
        self, shard: ShardLog, record: Record, at: float, member: MemberLog, report: say.StepReport
    ) -> None:
        name, learner = member.learner, self._run.learner(member.learner)
        member.step, member.reported_at = max(member.step, report.step), at
        member.step_seconds = report.seconds or member.step_seconds
        if self._run.keep == "details":
            shard.reports.setdefault(name, []).append((member.run_step, at))
        self._seen(name, at)
        for table, value in (
            (learner.steps_of, report.step),
            (learner.tokens_of, report.tokens),
            (learner.discarded_of, report.discarded_tokens),
        ):
            table[member.epoch] = max(value, table.get(member.epoch, 0))
        if learner.afar:
            self._step_afar(learner, record, at, member.epoch, report)
        elif learner.lives:
            life = learner.lives[-1]
            life.told = (max(life.told[0], report.step), max(life.told[1], report.tokens))
        self._run.count_tokens(learner)
        if learner.afar:
            learner.rate.add(at, learner.tokens)
        for round in shard.unreported.pop(name, ()):
            round.late_reports.setdefault(name, at)
        for round in shard.open.values():
            if name not in round.asks:
                round.unasked.setdefault(name, []).append(at)

    def _step_afar(
        self, learner: LearnerLog, record: Record, at: float, epoch: int, report: say.StepReport
    ) -> None:
        """Steps of a learner whose tape is elsewhere, spread over the time since the one before."""
        if not learner.lives:
            self._life_afar(learner, epoch, at)
        life = learner.life_of.get(epoch)
        if life is None:
            return
        steps, tokens = report.step - life.steps, report.tokens - life.tokens
        if steps < 1 or tokens < 0:
            return  # another shard has told it already
        self._note_steps(life, at, steps, tokens, report.seconds)
        life.overwritten = max(life.overwritten or 0, report.discarded_tokens)
        if life.ready_at is None:
            life.ready_at = at
            learner.process = "training"
            self._learners.tell_joined(learner, record, at)
        if report.loss is not None:
            step = self._run.global_step
            self._learners.measured(learner, record, at, step, report.loss)

    def _note_steps(
        self, life: ProcessLife, at: float, steps: int, tokens: int, seconds: float
    ) -> None:
        life.last_at = at
        if self._run.whole:
            since = life.steps_at[-1] if life.steps_at else life.started_at
            if not life.steps_at:
                since = max(since, at - steps * seconds)
            life.steps_at += [since + (at - since) * (k + 1) / steps for k in range(steps)]
            each, rest = divmod(tokens, steps)
            life.step_tokens += [each + (k < rest) for k in range(steps)]
            life.ledger.stepped(tokens)
        life.steps += steps
        life.tokens += tokens

    def _ticked(
        self, shard: ShardLog, record: Record, at: float, clock: int, live: int, why: str
    ) -> None:
        quorum = int(self._run.settings_of("sync").get("quorum", 1))
        setter = shard.clock_setter(record.cause, clock, quorum)
        known = shard.life == 1 or any(tick.life == shard.life for tick in shard.ticks[-1:])
        before = shard.clock if known else None
        shard.ticks.append(TickLog(at, clock, before, live, setter, why, shard.life))
        self._forget(shard.ticks)
        life = shard.lives[-1]
        life.ready_at = at if life.ready_at is None else life.ready_at
        shard.clock, shard.clock_max = clock, max(clock, shard.clock_max)
        self._run.clock_rate.add(at, self._run.step)
        if shard.phase not in ("closing", "finished"):
            shard.phase = "running"

    def _forget(self, logs: list[Any]) -> None:
        """All but the newest, if not all are to be kept."""
        if not self._run.whole:
            del logs[:-ROUNDS_MAX]

    # ---- rounds

    def _round_record(self, shard: ShardLog, record: Record, at: float, value: Any) -> None:
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
            case do.RoundFinished(finished_seconds=seconds):
                if not 0 <= seconds < SECONDS_MAX:
                    self._run.leave_out(record, at, f"a round of {seconds} s")
                else:
                    self._round_finished(shard, at, value)

    def _round_finished(self, shard: ShardLog, at: float, result: do.RoundFinished) -> None:
        round = shard.open.pop(result.round, None)
        if round is None:
            round = _round(shard, result, max(0.0, at - result.finished_seconds))
        shard.paths = {p: asked for p, asked in shard.paths.items() if asked[0] != result.round}
        round.result, round.finished_at = result, at
        round.folds = dict(round.folds)  # what a round that is given up leaves goes into the next
        _note_who_is_live(shard, round)
        shard.rounds.append(round)
        self._forget(shard.rounds)
        if self._run.keep == "run" and len(shard.rounds) > LATE_REPORTS_MAX:
            shard.rounds[-LATE_REPORTS_MAX - 1] = shard.rounds[-LATE_REPORTS_MAX - 1].summed_up()
        _note_lateness(shard, round)
        if not round.merged:
            shard.abandoned += result.given_up
            return
        shard.merged += 1
        if result.version is not None:
            shard.versions[result.fragment] = result.version
        shard.last_merged[result.fragment] = round
        self._count(shard, round, at)

    def _count(self, shard: ShardLog, round: RoundLog, at: float) -> None:
        """Counts the learners that took part in a merged round, and why the others did not."""
        states: dict[str, str] = {}
        for participant in round.outcome.participants:  # what is folded comes first, and counts
            states.setdefault(participant.learner, participant.state)
        for name, state in states.items():
            learner = self._run.learner(name)
            if state == "folded":
                learner.count(TOOK_PART)
                learner.accepted_at, learner.accepted_step = at, round.outcome.tick
                learner.accepted[shard.name] = shard.merged
            else:
                learner.count(LATE if state == "late" else state)
        for name in round.live.keys() - states.keys():
            self._run.learner(name).count(NOT_ASKED)
        for name, learner in self._run.learners.items():
            if name not in states and name not in round.live:
                learner.count(OUT_OF_REACH if name in round.unreachable else AWAY)


def _is_over(learner: LearnerLog) -> None:
    """The run is over for a learner whose tape is elsewhere."""
    if learner.afar and learner.lives:
        learner.lives[-1].over = True


def _round(
    shard: ShardLog, told: do.RoundOpened | do.Expect | do.RoundFinished, at: float
) -> RoundLog:
    """A round of the shard's present life."""
    folds = shard.folds.setdefault(told.fragment, {})
    return RoundLog(shard.name, told.round, told.fragment, at, life=shard.life, folds=folds)


def _note_who_is_live(shard: ShardLog, round: RoundLog) -> None:
    """Notes the learners that were live when its window closed."""
    closed_at = round.closed_at
    until = round.finished_at if closed_at is None else closed_at + INSTANT_SECONDS
    there = [member for member in shard.members.values() if member.since <= until]
    since_gone = [m for gone_at, m in shard.departed if m.since <= until < gone_at]
    round.live = {m.learner: m.reported_at for m in since_gone}
    round.live |= {m.learner: m.reported_at for m in there if m.connected}
    round.unreachable = tuple(m.learner for m in there if not m.connected)


def _note_lateness(shard: ShardLog, round: RoundLog) -> None:
    """Notes when the learners that were not asked reported, or waits until they do."""
    closed_at = round.closed_at
    if closed_at is None:
        return
    for name in round.live.keys() - {p.learner for p in round.outcome.participants}:
        late = [reported for reported in round.unasked.get(name, ()) if reported > closed_at]
        if late:
            round.late_reports[name] = late[0]
        else:
            waiting = shard.unreported.setdefault(name, [])
            waiting.append(round)
            del waiting[:-LATE_REPORTS_MAX]
    round.unasked.clear()
