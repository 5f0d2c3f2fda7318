"""The fold of the shards' tapes; see `run_model.fold_records`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import chain, compress, repeat
from typing import Any

from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking, Holding
from decoupled_diloco.run_model.facts import (
    TOOK_PART,
    Asked,
    LearnerLog,
    ProcessLife,
    Relayed,
    RoundLog,
    RunFacts,
    ShardLog,
    SiteLog,
    Stay,
    SumLog,
    TickLog,
)
from decoupled_diloco.run_model.learners import note_joined, note_loss
from decoupled_diloco.run_model.phrases import departure_of
from decoupled_diloco.tape.records import SECONDS_MAX
from decoupled_diloco.units import format_duration

INSTANT_SECONDS = 1e-6
"""Instants of one shard closer than this count as equal: wall-clock seconds have no more digits,
and any event takes longer. A learner that leaves at the instant when a window closes closed it."""

BURST_SHARE = 0.5
"""Reports that arrive faster than this share of the step time were delayed by an absent syncer."""

LATE_ROUNDS_MAX = 8
"""Number of latest rounds kept with details, because payloads may still arrive for them."""

ROUNDS_MAX = 100
"""Maximum number of rounds, lost rounds and ticks per shard with ``keep="now"``: the newest."""

LEFT_AT_THE_END = "left: the run is over"
"""A shard's reason for the eviction of a learner whose run has ended."""


class ShardFold:
    """Folds the records of one shard."""

    def __init__(self, run: RunFacts, shard: ShardLog) -> None:
        self._run, self._shard = run, shard
        self._ended = deque[tuple[RoundLog, set[Asking]]](maxlen=LATE_ROUNDS_MAX)
        self._payload: tuple[Asking, int] | None = None  # the latest one, with its bytes
        self._sum: SumLog | None = None  # the latest one that has arrived

    def started(self) -> None:
        """Start a new incarnation: it has no members, and open rounds are lost."""
        shard = self._shard
        for member in shard.members.values():
            self._leave(member, f"{shard.name} was restarted")
        for learner in self._run.learners.values():
            learner.cut_from.discard(shard.name)
        shard.lost += list(shard.open.values())
        self._forget(shard.lost)
        for known in (shard.members, shard.open, shard.paths, shard.folds):
            known.clear()
        relays = list(shard.relays)
        for of_relays in (shard.relays, shard.relayed, shard.sums):
            of_relays.clear()
        for relay in relays:
            self._site_lost(relay)
        shard.greeting, shard.moved, shard.phase = None, (-1, []), "starting"
        self._run.clock_rate.clear()  # a restarted shard's clock may jump back and catch up

    def take(self, value: Any) -> None:
        shard = self._shard
        match value:
            case messages.Received(_, messages.ShardAdmitted() as admitted):
                if admitted.term not in shard.terms:  # a new coordinator confirms the current term
                    shard.terms.append(admitted.term)
                shard.phase = "restoring" if admitted.begun else "waiting for learners"
            case messages.Received(_, messages.Begin()):
                shard.phase = "running"
            case messages.Received(_, messages.EndOrdered()):
                shard.phase = "closing"
            case messages.Connected(name, messages.Hello(role="observer")):
                self._run.observe_only(name)
            case messages.Connected(_, messages.RelayHello(relay), _, upstream):
                self._relay_connected(relay, upstream)
            case messages.Connected(_, messages.Hello() as hello, connection, relay):
                shard.greeting = (connection, hello, relay)
            case messages.Accept():
                self._accepted(value)
            case messages.Lost(peer) if relay := messages.relay_of(peer):
                self._relay_lost(relay)
            case messages.Lost(learner):
                self._member(learner).connected = False
            case messages.Heard(learners):
                for name in shard.members.keys() & set(learners):
                    self._seen(name)
            case messages.Evict(name, reason):
                self._evicted(name, reason)
            case messages.Install(fragment, version):
                shard.versions[fragment] = version
            case messages.Send(learner, messages.Welcome(step=step, run_step=run_step)):
                if learner in shard.members:
                    shard.members[learner].offset = run_step - step
            case messages.Broadcast(messages.Shifted(by)):
                for member in shard.members.values():
                    member.offset += by
            case messages.Send(learner, messages.Shifted(by)) if learner in shard.members:
                shard.members[learner].offset += by
            case messages.Broadcast(messages.Finished()) | messages.Stop():
                shard.phase = "finished"
                for name in shard.members:
                    _is_over(self._run.learner(name))
            case _:
                self._message(value)

    def _message(self, value: Any) -> None:
        shard, learners, at = self._shard, self._run.learners, self._run.at
        match value:
            case messages.Received(learner, Holding() | messages.Leave()) if (
                learner not in learners
            ):
                pass  # an observer
            case messages.Received(learner, messages.StepReport() as report):
                self._reported(((learner, report),))
            case messages.Reported(reports):
                self._reported(reports)
            case messages.Received(learner, Holding(fragment, version)):
                member = self._member(learner)
                member.held[fragment] = max(version, member.held.get(fragment, version))
                round = shard.last_merged.get(fragment)
                if round and round.outcome.version == version:
                    round.held_at.setdefault(learner, at)
                self._seen(learner)
            case messages.Received(learner, messages.Ahead(run_step)):
                member = self._member(learner)
                member.offset = max(member.offset, run_step - member.step)
                self._seen(learner)
            case messages.Received(learner, messages.Leave(reason)):
                if self._member(learner).epoch in (0, learners[learner].epoch):
                    learners[learner].left = reason
            case messages.BodyArrived(learner=learner, nbytes=nbytes):
                self._run.learner(learner).bytes_up += nbytes
                self._payload = value.ask, nbytes
                self._seen(learner)
                for round, asks in self._ended:
                    if value.ask in asks:
                        round.late_bodies[learner] = at
            case messages.SumArrived(relay, fragment, number, asks, nbytes, upstream):
                self._sum = SumLog(relay, fragment, number, at, asks, nbytes, upstream=upstream)
            case messages.FoldSum(fragment, relay, number):
                self._sum_folded(relay, fragment, number)
            case messages.DropSum(fragment, relay, number, why=why):
                self._sum_dropped(relay, fragment, number, why)
            case messages.SumCorrupt(relay, fragment, number, asks, reason):
                self._site(relay).traffic.refuse()
                self._void(SumLog(relay, fragment, number, at, asks, problem=reason))
            case messages.ClockAdvanced():
                self._ticked(value)
            case messages.PrivacyAccounted(fragment, merges):
                for name, count in merges:
                    self._run.learner(name).merges[fragment] = count
            case messages.Scored(learner):
                self._run.learner(learner).scored = value
            case _:
                self._round_record(value)

    def _site(self, relay: str) -> SiteLog:
        return self._run.sites.setdefault(relay, SiteLog())

    def _relay_connected(self, relay: str, upstream: str) -> None:
        site = self._site(relay)
        self._shard.relays[relay] = upstream
        if not site.connected or not math.isinf(site.connected[-1][1]):
            site.connected.append([self._run.at, math.inf])
        if site.lost_at is not None:
            self._run.remark(relay, f"the relay of {relay} is connected again")

    def _relay_lost(self, relay: str) -> None:
        """Void what a relay has sent in no sum: it comes back empty."""
        run, shard, at = self._run, self._shard, self._run.at
        if shard.relays.pop(relay, None) is not None and shard.phase != "finished":
            self._site_lost(relay)
            run.remark(relay, f"the relay of {relay} has lost its connection to the syncer")
        had: dict[int, list[Asking]] = {}
        for ask, each in shard.relayed.items():
            if each.relay == relay:
                had.setdefault(each.fragment, []).append(ask)
        for fragment, asks in had.items():
            problem = "its connection broke"
            self._void(SumLog(relay, fragment, 0, at, tuple(asks), problem=problem))

    def _site_lost(self, relay: str) -> None:
        """Record that a shard has lost a relay, which is disconnected once all have."""
        site, at = self._site(relay), self._run.at
        site.lost_at = at
        if not any(relay in shard.relays for shard in self._run.shards.values()):
            for times in site.connected[-1:]:
                times[1] = min(times[1], at)

    def _arrived(self, *name: str | int) -> SumLog | None:
        """Return the sum that an order is about; ``None`` if its arrival is not on the tape."""
        newest = self._sum
        is_it = newest and (newest.relay, newest.fragment, newest.number) == name
        return newest if is_it else None

    def _sum_folded(self, relay: str, fragment: int, number: int) -> None:
        """Count an accepted sum. Its contributions are now at the shard, or one relay further."""
        shard, arrived = self._shard, self._arrived(relay, fragment, number)
        if arrived is None:
            return
        known = [shard.relayed.pop(ask, None) for ask in arrived.asks]
        sizes = [0 if each is None else each.nbytes for each in known]
        arrived.relayed_bytes = sum(sizes)
        site = self._site(relay)
        site.traffic.accept(arrived.nbytes, sizes)
        if self._run.whole:
            site.sums_at.append(arrived.at)
        if arrived.upstream:
            for ask, nbytes in zip(arrived.asks, chain([arrived.nbytes], repeat(0)), strict=False):
                shard.relayed[ask] = Relayed(fragment, arrived.upstream, nbytes)
        shard.sums.setdefault(fragment, []).append(arrived)

    def _sum_dropped(self, relay: str, fragment: int, number: int, why: str) -> None:
        arrived = self._arrived(relay, fragment, number)
        if arrived is not None:
            arrived.problem = why
            self._site(relay).traffic.refuse(arrived.nbytes)
            self._void(arrived)

    def _void(self, lost: SumLog) -> None:
        """Forget the contributions of a sum that does not count, if they are still at its relay."""
        shard = self._shard
        shard.sums.setdefault(lost.fragment, []).append(lost)
        for ask in lost.asks:
            each = shard.relayed.get(ask)
            if each is not None and each.relay == lost.relay:
                del shard.relayed[ask]
                shard.folds.get(lost.fragment, {}).pop(ask, None)

    def _member(self, name: str) -> Stay:
        """Return a learner's membership; a new one if it started before the part that was read."""
        return self._shard.members.get(name) or Stay(name, 0, self._run.at)

    def _accepted(self, accept: messages.Accept) -> None:
        shard, name, epoch, at = self._shard, accept.learner, accept.epoch, self._run.at
        if name in self._run.observers:
            return
        self._seen(name)
        member = shard.members.get(name)
        if member is not None and member.epoch != epoch:
            self._leave(member, f"its incarnation {epoch} has joined")
            self._run.learner(name).departures.setdefault(member.epoch, "failed")
            member = None
        if member is None:
            member = shard.members[name] = Stay(name, epoch, at, accept.why)
            if self._run.whole:
                shard.stays.append(member)
        learner = self._run.learner(name)
        if epoch > learner.epoch:
            learner.epoch, learner.left = epoch, ""
            learner.cut_from.clear()
        if learner.departures.get(epoch) == "failed":
            del learner.departures[epoch]  # it was only cut off
        self._add_remote_life(learner, epoch)
        self._reachable_again(learner)
        member.connected = True
        if shard.greeting and shard.greeting[0] == accept.connection:
            _, hello, member.relay = shard.greeting
            learner.site = member.relay or learner.site
            member.step = max(member.step, hello.step)
            member.held = {holding.fragment: holding.version for holding in hello.held}

    def _add_remote_life(self, learner: LearnerLog, epoch: int) -> None:
        """Add an incarnation of a learner whose tape is not available, at its admission."""
        if learner.afar and epoch not in learner.life_of:
            life = ProcessLife(self._run.at, self._run.at, overwritten=0)
            learner.life_of[epoch] = life
            learner.lives.append(life)

    def _reachable_again(self, learner: LearnerLog) -> None:
        if self._shard.name in learner.cut_from:
            learner.cut_from.discard(self._shard.name)
            if not learner.cut_from and learner.process == "training":
                away = format_duration(self._run.at - learner.cut_at)
                self._run.remark(learner.name, f"{learner.name} is live again after {away}")

    def _evicted(self, name: str, reason: str) -> None:
        at, member = self._run.at, self._shard.members.pop(name, None)
        if member is not None:
            self._leave(member, reason)
        learner = self._run.learners.get(name)
        if learner is None:
            return
        kind = departure_of(reason)
        if kind is not None and member is not None and not self._run.has_devices:
            learner.departures.setdefault(member.epoch, kind)
        if self._run.whole:
            learner.evictions.append((at, self._shard.name, reason))
        learner.cut_at = learner.cut_at if learner.cut_from else at
        learner.cut_from.add(self._shard.name)
        if reason == LEFT_AT_THE_END:
            _is_over(learner)

    def _leave(self, member: Stay, reason: str) -> None:
        shard, member.until, member.reason = self._shard, self._run.at, reason
        oldest = min((round.opened_at for round in shard.open.values()), default=member.until)
        shard.departed = [*(s for s in shard.departed if s.until >= oldest), member]

    def _seen(self, name: str) -> None:
        learner = self._run.learner(name)
        learner.seen_at = max(self._run.at, learner.seen_at or 0.0)

    def _reported(self, reports: Iterable[tuple[str, messages.StepReport]]) -> None:
        """Fold the step reports of one record, which move the clock together."""
        # `clock_setter` needs the run steps before and after: a learner whose report passed the
        # clock with this record has set the tick that follows.
        moved = []
        for name, report in reports:
            member = self._member(name)
            before = member.run_step
            self._report(member, report)
            moved.append((name, before, member.run_step))
        self._shard.moved = (self._run.record.seq, moved)
        self._run.token_rate.add(self._run.duration, self._run.tokens)

    def _report(self, member: Stay, report: messages.StepReport) -> None:
        shard, at, name = self._shard, self._run.at, member.learner
        learner = self._run.learner(name)
        member.step, member.reported_at = max(member.step, report.step), at
        member.step_seconds = report.seconds or member.step_seconds
        if self._run.keep == "details":
            shard.reports.setdefault(name, []).append((member.run_step, at))
        self._seen(name)
        for table, value in (
            (learner.steps_of, report.step),
            (learner.tokens_of, report.tokens),
            (learner.discarded_of, report.discarded_tokens),
        ):
            table[member.epoch] = max(value, table.get(member.epoch, 0))
        if learner.afar:
            self._add_remote_steps(learner, member.epoch, report)
        elif learner.lives:
            life = learner.lives[-1]
            life.reported = (
                max(life.reported[0], report.step),
                max(life.reported[1], report.tokens),
            )
        self._run.count_tokens(learner)
        if learner.afar:
            learner.rate.add(at, learner.tokens)

    def _add_remote_steps(
        self, learner: LearnerLog, epoch: int, report: messages.StepReport
    ) -> None:
        """Add the steps of a learner without a tape, spread over the time since its last step."""
        if not learner.lives:
            self._add_remote_life(learner, epoch)
        life = learner.life_of.get(epoch)
        if life is None:
            return
        steps, tokens = report.step - life.steps, report.tokens - life.tokens
        if steps < 1 or tokens < 0:
            return  # another shard's tape has already reported these steps
        if self._run.has_devices and not life.steps and not report.seconds and steps > 1:
            # A device trained them alone, at times that no process knows.
            life.steps, life.tokens = report.step, report.tokens
            life.ledger.stepped(tokens)
            return
        self._note_steps(life, steps, tokens, report.seconds)
        life.overwritten = max(life.overwritten or 0, report.discarded_tokens)
        if life.ready_at is None:
            life.ready_at = self._run.at
            learner.process = "training"
            note_joined(self._run, learner)
        if report.loss is not None:
            note_loss(self._run, learner, self._run.global_step, report.loss)

    def _note_steps(self, life: ProcessLife, steps: int, tokens: int, seconds: float) -> None:
        life.last_at = at = self._run.at
        if self._run.whole:
            since = life.steps_at[-1] if life.steps_at else life.started_at
            if not life.steps_at:
                since = max(since, at - steps * seconds)
            elif at - since >= BURST_SHARE * steps * seconds:
                life.spread_burst()
                life.burst_from = len(life.steps_at)
            life.burst_step_seconds = seconds
            life.steps_at += [since + (at - since) * (k + 1) / steps for k in range(steps)]
            each, rest = divmod(tokens, steps)
            life.step_tokens += [each + (k < rest) for k in range(steps)]
            life.ledger.stepped(tokens)
        life.steps += steps
        life.tokens += tokens

    def _ticked(self, tick: messages.ClockAdvanced) -> None:
        run, shard, clock, at = self._run, self._shard, tick.clock, self._run.at
        quorum = int(run.settings_of("sync").get("quorum", 1))
        setter = shard.clock_setter(run.record.cause, clock, quorum)
        known = shard.life == 1 or any(tick.life == shard.life for tick in shard.ticks[-1:])
        before = shard.clock if known else None
        shard.ticks.append(TickLog(at, clock, before, tick.live, setter, tick.why, shard.life))
        self._forget(shard.ticks)
        life = shard.lives[-1]
        life.ready_at = at if life.ready_at is None else life.ready_at
        shard.clock, shard.clock_max = clock, max(clock, shard.clock_max)
        run.clock_rate.add(at, run.step)
        if shard.phase not in ("closing", "finished"):
            shard.phase = "running"

    def _forget(self, logs: list[Any]) -> None:
        """Drop all but the newest entries, unless the model keeps the whole run."""
        if not self._run.whole:
            del logs[:-ROUNDS_MAX]

    def _round_record(self, value: Any) -> None:
        shard, at = self._shard, self._run.at
        match value:
            case messages.RoundOpened():
                round = self._round(value, at)
                round.opened = value
                shard.open[value.round] = round
            case messages.Expect(path=path, learner=learner, round=number, ask=ask, why=why) if (
                number
            ):
                round = shard.open.get(number) or self._round(value, at)
                shard.open[number] = round
                round.asks.setdefault(learner, []).append(Asked(at, ask, why))
                shard.paths[path] = (number, learner)
            case messages.Unexpect(path, why):
                number, learner = shard.paths.pop(path, (-1, ""))
                if number in shard.open:
                    shard.open[number].fallen[learner] = (at, why)
            case messages.Fold(fragment=fragment, ask=ask, relay=relay):
                shard.folds.setdefault(fragment, {})[ask] = (at, value)
                if relay:
                    known, nbytes = self._payload or (None, 0)
                    shard.relayed[ask] = Relayed(fragment, relay, nbytes if known == ask else 0)
            case messages.Merge(round=number, fragment=fragment):
                self._taken(fragment)
                if number in shard.open:
                    shard.open[number].merging_at = at
            case messages.RoundFinished(finished_seconds=seconds):
                if not 0 <= seconds < SECONDS_MAX:
                    self._run.leave_out(f"a round of {seconds} s")
                else:
                    self._round_finished(value)

    def _taken(self, fragment: int) -> None:
        """Start the next version's table: the contributions that relays have are not merged yet."""
        shard = self._shard
        folds = shard.folds.pop(fragment, {})
        late = [ask for ask in folds if ask in shard.relayed]
        if late:
            shard.folds[fragment] = {ask: folds.pop(ask) for ask in late}
        shard.sums.pop(fragment, None)

    def _round(
        self, event: messages.RoundOpened | messages.Expect | messages.RoundFinished, at: float
    ) -> RoundLog:
        shard = self._shard
        # The tables are shared with the shard until the round ends: later folds appear in both.
        folds = shard.folds.setdefault(event.fragment, {})
        sums = shard.sums.setdefault(event.fragment, [])
        identity = (shard.name, event.round, event.fragment, at)
        return RoundLog(*identity, life=shard.life, folds=folds, sums=sums)

    def _round_finished(self, result: messages.RoundFinished) -> None:
        shard, at = self._shard, self._run.at
        round = shard.open.pop(result.round, None)
        if round is None:
            round = self._round(result, max(0.0, at - result.finished_seconds))
        shard.paths = {p: asked for p, asked in shard.paths.items() if asked[0] != result.round}
        round.result, round.finished_at = result, at
        # A copy: the folds of an abandoned round stay in `shard.folds` for the fragment's next one.
        round.folds, round.sums = dict(round.folds), list(round.sums)
        self._note_live(round)
        shard.rounds.append(round)
        self._ended.append((round, {participant.ask for participant in result.participants}))
        self._forget(shard.rounds)
        if self._run.keep == "run" and len(shard.rounds) > LATE_ROUNDS_MAX:
            shard.rounds[-LATE_ROUNDS_MAX - 1] = shard.rounds[-LATE_ROUNDS_MAX - 1].summed_up()
        if not round.merged:
            shard.abandoned += result.given_up
            return
        shard.merged += 1
        if result.version is not None:
            shard.versions[result.fragment] = result.version
        shard.last_merged[result.fragment] = round
        self._count(round)

    def _note_live(self, round: RoundLog) -> None:
        """Record the learners that were live when a round's window closed."""
        shard, closed_at = self._shard, round.closed_at
        until = round.finished_at if closed_at is None else closed_at + INSTANT_SECONDS
        known = (*shard.departed, *shard.members.values())
        present = [stay for stay in known if stay.since <= until < stay.until]
        reachable = [stay.connected or not math.isinf(stay.until) for stay in present]
        round.live = {s.learner: s.reported_at for s in compress(present, reachable)}
        round.unreachable = tuple(s.learner for s in present if s.learner not in round.live)

    def _count(self, round: RoundLog) -> None:
        """Count for each learner whether it took part in a merged round, or why not."""
        named = [*(p.learner for p in round.outcome.participants), *round.live, *self._run.learners]
        for name in dict.fromkeys(named):
            learner, reason = self._run.learner(name), round.reason_of(name)
            learner.reasons[reason] += 1
            learner.recent.append(reason)
            if reason == TOOK_PART:
                learner.accepted_at, learner.accepted_step = self._run.at, round.outcome.tick
                learner.accepted[self._shard.name] = self._shard.merged


def _is_over(learner: LearnerLog) -> None:
    """Record the end of the run for a learner whose tape is not available."""
    if learner.afar and learner.lives:
        learner.lives[-1].over = True
