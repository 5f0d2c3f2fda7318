"""Learners that lived on out of the syncer's reach: from when to when, and what that cost.

Shards write down whose lease ran out and who came back; that the learner stepped on meanwhile is on
its own tape. Who is down, and whose lease runs out for that, is an outage and not looked at here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from decoupled_diloco.observe.history import Cut, LearnerHistory, Life, RunHistory
from decoupled_diloco.protocol.membership import LEASE_SECONDS

RAN_OUT = "its lease ran out"
"""How a shard ends its reason for no longer counting on a learner that it does not hear."""

Evictions = Mapping[str, Sequence[tuple[float, str]]]
"""For each shard when it no longer counted on a learner, and why."""

Accepted = Mapping[str, Sequence[float]]
"""For each shard when it took a learner in."""


def cuts_of(
    run: RunHistory, learner: LearnerHistory, evictions: Evictions, accepted: Accepted
) -> list[Cut]:
    """The times in which a learner stepped on while shards did not hear of it.

    Args:
        run: The run; outages of learners are known already.
        learner: The learner.
        evictions: When the shards no longer counted on it.
        accepted: When they took it in.
    """
    spans = sorted(_spans(learner, evictions, accepted))
    merged: list[tuple[float, float]] = []
    for begin, end in spans:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return [_cut(run, learner, begin, end) for begin, end in merged]


def _spans(
    learner: LearnerHistory, evictions: Evictions, accepted: Accepted
) -> Iterator[tuple[float, float]]:
    """At each shard, from the last that it heard to when it took the learner in again."""
    for shard, gone in evictions.items():
        for at, why in gone:
            heard_at = at - LEASE_SECONDS
            life = _life_at(learner, heard_at)
            if why.endswith(RAN_OUT) and life is not None and life.steps_at[-1] > at:
                back = [b for b in accepted.get(shard, ()) if at < b <= life.last_at]
                yield (heard_at, min(back, default=life.last_at))


def _life_at(learner: LearnerHistory, at: float) -> Life | None:
    """The life in which it stepped before and after an instant."""
    for life in learner.lives:
        if life.steps_at and life.steps_at[0] <= at < life.steps_at[-1]:
            return life
    return None


def _cut(run: RunHistory, learner: LearnerHistory, begin: float, end: float) -> Cut:
    merged = [
        r
        for shard in run.shards.values()
        for r in shard.rounds
        if r.result.verdict == "merged" and begin < r.finished_at <= end
    ]
    took = sum(
        any(p.learner == learner.name and p.state == "folded" for p in r.result.participants)
        for r in merged
    )
    back = end < max(life.last_at for life in learner.lives)
    return Cut(
        who=learner.name,
        cut_at=begin,
        back_at=end if back else None,
        steps=sum(begin < at <= end for at in learner.steps_at),
        rounds_merged=len(merged),
        rounds_missed=len(merged) - took,
        lost_steps={
            other.name: other.lost_steps(begin, end)
            for other in run.learners.values()
            if other is not learner and not _was_away(other, begin, end)
        },
    )


def _was_away(learner: LearnerHistory, begin: float, end: float) -> bool:
    """Whether it was down for a part of this time, so that its gap has another cause."""
    return any(
        outage.down_at < end and (outage.back_at is None or outage.back_at > begin)
        for outage in learner.outages
    )
