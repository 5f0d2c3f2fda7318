"""Find the processes that were down or cut off during a run, and the cost for the others.

The launcher records how processes end. Shards record expired leases and returning learners. A
learner's own tape shows whether it continued to step in the meantime. If that tape is on another
machine, the shards have received reports of all steps, but late if a link was cut or the shard was
stalled. Such steps are spread evenly over the time before the report.

A device is away between two visits, also if a visit broke off. That does not count as an outage,
unless the launcher has recorded that its process was killed during a visit.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from itertools import pairwise

from decoupled_diloco.protocol.syncer_state import LEASE_SECONDS
from decoupled_diloco.run_model.facts import (
    GAP_MEDIANS,
    STEP_FAULTS,
    TOOK_PART,
    CutOff,
    LearnerLog,
    Outage,
    ProcessLife,
    RunFacts,
    ShardLog,
)
from decoupled_diloco.run_model.phrases import (
    PREEMPTED,
    RAN_OUT,
    departure_of,
    ending_in_words,
    natural,
)

BURST_MEDIANS = 0.5
"""Steps closer together than this share of a median step were reported late."""


def find_absences(run: RunFacts) -> None:
    """Add outages, cuts and lost steps to a model; call it once, after the whole tape is read."""
    run.shards = {name: shard for name, shard in run.shards.items() if shard.lives}
    run.learners = {name: run.learners[name] for name in sorted(run.learners, key=natural)}
    for learner in run.trained.values():
        if learner.afar:
            _spread_steps(learner)
    _add_lives_without_records(run)
    for fault in run.faults:
        for name in fault.processes if fault.kind in STEP_FAULTS else ():
            if name in run.learners:
                span = (fault.begin, min(fault.end, run.duration))
                run.learners[name].disturbed.append(span)
    for member in run.members:
        member.outages = list(_outages(run, member))
    for learner in run.learners.values():
        for life in learner.lives:  # tokens that a killed process had not flushed to its tape
            life.ledger.stepped(life.unrecorded[1])
    if run.training_span is not None:
        for member in run.members:
            member.outages = [
                dataclasses.replace(outage, lost_steps=_lost_steps(run, outage))
                for outage in member.outages
            ]
    for learner in run.trained.values():
        learner.cuts = _cuts(run, learner)


def _spread_steps(learner: LearnerLog) -> None:
    for life in learner.lives:
        life.steps_at = evenly(life.steps_at)
        if life.steps_at:  # the first step started when the learner had the global weights
            life.ready_at = max(life.started_at, life.steps_at[0] - _median_gap(life.steps_at))


def evenly(steps_at: list[float]) -> list[float]:
    """Spread steps that arrived in a burst after a gap evenly over the gap and the burst.

    >>> evenly([0.0, 1.0, 2.0, 3.0, 7.0, 7.0, 7.0, 7.0, 8.0, 9.0])
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    """
    even, median = list(steps_at), _median_gap(steps_at)
    for index, (before, at) in enumerate(pairwise(steps_at), start=1):
        last = index
        if at - before > GAP_MEDIANS * median:
            while last + 1 < len(even) and even[last + 1] - even[last] < BURST_MEDIANS * median:
                last += 1
        count = last - index + 1
        for k in range(count if count > 1 else 0):
            even[index + k] = before + (even[last] - before) * (k + 1) / count
    return even


def _median_gap(steps_at: list[float]) -> float:
    return statistics.median([b - a for a, b in pairwise(steps_at)] or [0.0])


def _add_lives_without_records(run: RunFacts) -> None:
    """Add an incarnation for each process that was restarted but wrote no record."""
    span = run.training_span
    members = {member.name: member for member in run.members if member.lives}
    for name, at in run.spawns.items():
        if name in members and at > members[name].lives[-1].last_at:
            ends = [ended for ended, _ in run.ends.get(name, []) if ended >= at]
            over = span is not None and min(ends, default=span[1]) >= span[1]
            members[name].lives.append(ProcessLife(at, at, spawned_at=at, over=over))


def _outages(run: RunFacts, member: LearnerLog | ShardLog) -> Iterator[Outage]:
    for life, following in zip(member.lives, [*member.lives[1:], None], strict=True):
        ending = _ending(run, member.name, life, following)
        life.crashed = ending is not None
        if ending is None:
            life.ended_at = _end_on_purpose(run, member.name, life, following)
            continue
        life.ended_at, how = ending
        step = run.global_step_by(life.ended_at)
        restarted_at = back_at = None
        if following is not None:
            restarted_at = following.began_at
            back_at = min(following.steps_at[:1], default=None)
            back_at = back_at if following.ready_at is None else following.ready_at
        yield Outage(member.name, life.ended_at, how, step, restarted_at, back_at, {})


def _ending(
    run: RunFacts, name: str, life: ProcessLife, following: ProcessLife | None
) -> tuple[float, str] | None:
    """Return when and how an incarnation ended; None if it was asked to stop or ended normally."""
    until = following.began_at if following else run.duration
    if any(life.began_at <= at <= until for at in run.orders.get(name, [])):
        return None  # the launcher asks only running processes to stop, so it had not crashed
    is_device = run.has_devices and name in run.learners
    evictions = [(at, why) for at, why in _evictions(run, name) if life.started_at <= at <= until]
    if is_device and any(_left(why) for _, why in evictions):
        return None
    for at, ended in run.ends.get(name, []):
        if life.started_at <= at <= until:
            proper = following is None and (ended.code == 0 or life.over)
            return None if proper else (at, ending_in_words(ended.code, ended.signal))
    went = [(at, why) for at, why in evictions if _left(why) and at > life.last_at]
    kind = departure_of(went[0][1]) if went else None
    if kind is not None and following is not None and not is_device:
        at, why = went[0]
        return at, PREEMPTED if kind == PREEMPTED else f"ended: {why.removeprefix('left: ')}"
    if is_device or went:
        return None
    silent = any(at > life.last_at for at, _ in evictions) and not life.over
    return (life.last_at, "fell silent") if following is not None or silent else None


def _end_on_purpose(
    run: RunFacts, name: str, life: ProcessLife, following: ProcessLife | None
) -> float | None:
    """Return when an incarnation that did not crash ended, if that is on the tape."""
    ends = [at for at, _ in run.ends.get(name, [])]
    ends += [at for at, why in _evictions(run, name) if _left(why)]
    since = [at for at in ends if at >= life.started_at]
    if run.has_devices and name in run.learners:
        broke_off = any(at > life.last_at for at, _ in _evictions(run, name))
        since += [life.last_at] if broke_off or following is not None else []
    return min(since, default=life.last_at if life.over else None)


def _left(reason: str) -> bool:
    """Whether a shard's reason for an eviction is that the learner has left on purpose."""
    return reason.startswith("left")


def _evictions(run: RunFacts, name: str) -> list[tuple[float, str]]:
    learner = run.learners.get(name)
    return [(at, reason) for at, _, reason in learner.evictions] if learner else []


def _lost_steps(run: RunFacts, outage: Outage) -> dict[str, int]:
    """Return the steps that the other learners lost during an outage, by learner."""
    assert run.training_span is not None
    end = run.training_span[1]
    until = end if outage.back_at is None else min(outage.back_at, end)
    return _lost_by_others(run, outage.process, outage.down_at, until)


def _lost_by_others(run: RunFacts, learner: str, begin: float, end: float) -> dict[str, int]:
    """Return the steps lost by the other learners, except those that had an outage themselves."""
    return {
        name: other.lost_steps(begin, end)
        for name, other in run.trained.items()
        if name != learner
        and not any(
            outage.down_at < end and (outage.back_at is None or outage.back_at > begin)
            for outage in other.outages
        )
    }


def _cuts(run: RunFacts, learner: LearnerLog) -> list[CutOff]:
    """Return the intervals in which a learner continued to step but shards received no report."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(_times_unreported(run, learner)):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return [_cut(run, learner, begin, end) for begin, end in merged]


def _times_unreported(run: RunFacts, learner: LearnerLog) -> Iterator[tuple[float, float]]:
    """Yield for each shard the interval from its last report to the learner's readmission."""
    for at, shard, why in learner.evictions:
        last_report_at = at - LEASE_SECONDS  # each message renews the lease
        stepped = (life for life in learner.lives if life.steps_at)
        life = next((x for x in stepped if x.steps_at[0] <= last_report_at < x.steps_at[-1]), None)
        if why.endswith(RAN_OUT) and life is not None and life.steps_at[-1] > at:
            back = [
                stay.since
                for stay in run.shards[shard].stays
                if stay.learner == learner.name and at < stay.since <= life.last_at
            ]
            yield (last_report_at, min(back, default=life.last_at))


def _cut(run: RunFacts, learner: LearnerLog, begin: float, end: float) -> CutOff:
    merged = [r for r in run.rounds if r.merged and begin < r.finished_at <= end]
    back = end < max(life.last_at for life in learner.lives)
    return CutOff(
        learner=learner.name,
        cut_at=begin,
        back_at=end if back else None,
        steps=sum(begin < at <= end for at in learner.steps_at),
        rounds_merged=len(merged),
        rounds_missed=sum(r.reason_of(learner.name) != TOOK_PART for r in merged),
        lost_steps=_lost_by_others(run, learner.name, begin, end),
    )
