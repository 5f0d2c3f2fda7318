"""How a run is doing at one instant: a pure function of its `Chronicle`; rendering is apart.

Seconds are ages: how long ago something was, as of ``RunStatus.as_of``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from decoupled_diloco.observe.accounts import RunAccount
from decoupled_diloco.observe.chronicle import Chronicle, settings_fields
from decoupled_diloco.observe.chronicle_data import (
    TOOK_PART,
    LearnerLog,
    Member,
    RoundLog,
    ShardLog,
)
from decoupled_diloco.observe.live import CUT_OFF
from decoupled_diloco.observe.progress import natural
from decoupled_diloco.protocol.membership import LEASE_SECONDS

QUIET_STEPS = 5.0
"""A live learner without a report for so many of its own steps, and a lease, is quiet."""


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """One learner.

    Attributes:
        state: ``stepping``, ``quiet`` (live, no step for long), ``joining``, ``cut off``
            (no shard hears of it, and it steps on), ``out of reach`` (its connection is broken,
            and what it does is not known), ``down``, ``restarting``, ``left``, ``finished``,
            ``ended`` (the launcher told it to, before the run was over).
        epoch: Its newest life.
        steps: Own inner steps of all lives; ``tokens`` likewise.
        tokens_per_second: Of the last seconds; ``None`` while it does not step.
        participation: Share of the run's merged rounds that it was in; ``None`` before the first.
        participation_recent: The same of the last 50 merged rounds.
        reasons_recent: How many of those it was in, or why it was not in them.
        rounds_behind: Merged rounds since the last one that it was in, all shards together.
        steps_behind: Global steps since the tick of the last round that it was in.
        accepted_seconds: Since its last contribution was merged.
        versions_behind: Fragments of which it does not hold the newest version.
        seen_seconds: Since the syncer last heard of it.
        discarded_tokens: Trained and then overwritten.
        discarded_why: For each mode and reason; only its own tape tells.
        bytes_up: Contributions that the syncer has received.
        loss: Its last training loss.
    """

    name: str
    state: str
    epoch: int
    steps: int
    tokens: int
    tokens_per_second: float | None
    participation: float | None
    participation_recent: float | None
    reasons_recent: dict[str, int]
    rounds_behind: int | None
    steps_behind: int | None
    accepted_seconds: float | None
    versions_behind: int | None
    seen_seconds: float | None
    discarded_tokens: float
    discarded_why: dict[str, float] | None
    bytes_up: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round that is not over; ``waits_for``: quorum, grace, upload or merge."""

    number: int
    fragment: int
    step: int | None
    open_seconds: float
    waits_for: str
    learners: tuple[str, ...]
    delivered: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard of the syncer; ``versions``: the newest published version of each fragment."""

    name: str
    state: str
    term: int
    clock: int
    live: int
    merged: int
    abandoned: int
    open_rounds: tuple[OpenRound, ...]
    versions: dict[int, str]
    grace_seconds: float | None
    seen_seconds: float | None


@dataclass(frozen=True, slots=True)
class CutStatus:
    """The last complete cut of the whole run; ``missing``: learners that gave no part."""

    number: int
    seconds_ago: float
    nbytes: int
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at one instant.

    Attributes:
        phase: ``starting``, ``waiting for learners``, ``running``, ``closing``, ``finished``,
            ``interrupted`` (its processes were told to end before), ``silent`` (it was not over,
            and nothing writes its tape any more), ``empty``.
        virtual: The run is one in virtual time: it ended when its tape did.
        as_of: Wall-clock instant, seconds since the Unix epoch.
        silent_seconds: Since the latest record.
        seconds_left: To the end of the budget at the present rate; ``None``: not known.
        left_by: Which budget ends it: ``steps`` or ``tokens``.
        bytes_up: What the syncer has received, bodies and messages, also an evaluator's; ``None``:
            nobody has told.
        bytes_of: Who has counted these bytes: ``syncer``, or ``learners``.
        discarded_whole: Whether the discards are all there are; else there are at least so many.
        discarded_known: Whether the discards' reasons are known (the learners' tapes are at hand).
        cut: The last complete cut, ``None``: there was none.
        remarks: The last things worth a line, each with seconds since the run's beginning.
    """

    name: str
    phase: str
    virtual: bool
    as_of: float
    began: float | None
    elapsed_seconds: float
    silent_seconds: float
    step: int
    budget_steps: int | None
    tokens: int
    budget_tokens: int | None
    steps_per_second: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    left_by: str
    rounds_merged: int
    rounds_abandoned: int
    bytes_up: int | None
    bytes_down: int | None
    bytes_of: str
    discarded_tokens: float
    discarded_whole: bool
    evaluation_loss: float | None
    learners: tuple[LearnerStatus, ...]
    shards: tuple[ShardStatus, ...]
    cut: CutStatus | None
    remarks: tuple[tuple[float, str], ...]
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values; the keys are the names of the fields."""
        plain = dataclasses.asdict(self)
        for shard in plain["shards"]:
            shard["versions"] = {str(p): version for p, version in shard["versions"].items()}
        return plain


def status_of(
    chronicle: Chronicle,
    now: float,
    problems: Iterable[str] = (),
    account: RunAccount | None = None,
) -> RunStatus:
    """How a run is doing.

    Args:
        chronicle: What is known of it.
        now: Wall-clock seconds. A run that nothing has been heard of for longer than a lease is
            looked at as it was at its latest record.
        problems: What could not be read or reached, one sentence each.
        account: What became of all tokens, where a whole tape is at hand. Without it only those
            count that learners have told to be overwritten: a lower bound.
    """
    if account is not None and chronicle.learners.keys() - account.learners.keys():
        account = None
    shards = list(chronicle.shards.values())
    silent = max(0.0, now - chronicle.latest) if chronicle.began is not None else 0.0
    over = chronicle.finished
    going = not over and not chronicle.interrupted and silent <= LEASE_SECONDS
    as_of = now if going else chronicle.latest
    run = settings_fields(chronicle, "run")
    budget_steps, budget_tokens = run.get("budget_steps"), run.get("budget_tokens")
    steps_rate = chronicle.clock_rate.per_second() if going else None
    tokens_rate = chronicle.token_rate.per_second() if going else None
    left, left_by = _left(chronicle, budget_steps, budget_tokens, steps_rate, tokens_rate)
    up, down, bytes_of = _bytes(chronicle)
    learners = sorted(chronicle.learners.values(), key=lambda learner: natural(learner.name))
    statuses = tuple(
        _with_account(_learner(chronicle, learner, as_of, over, going), account)
        for learner in learners
    )
    began = chronicle.began
    return RunStatus(
        name=str(run.get("name", "")),
        phase=_phase(chronicle, silent),
        virtual=chronicle.virtual,
        as_of=as_of,
        began=began,
        elapsed_seconds=0.0 if began is None else max(0.0, as_of - began),
        silent_seconds=silent,
        step=chronicle.step,
        budget_steps=budget_steps,
        tokens=chronicle.tokens,
        budget_tokens=budget_tokens,
        steps_per_second=steps_rate,
        tokens_per_second=tokens_rate,
        seconds_left=left,
        left_by=left_by,
        rounds_merged=chronicle.merged,
        rounds_abandoned=sum(shard.abandoned for shard in shards),
        bytes_up=up,
        bytes_down=down,
        bytes_of=bytes_of,
        discarded_tokens=sum(learner.discarded_tokens for learner in statuses),
        discarded_whole=account is not None,
        evaluation_loss=chronicle.evaluation.loss if chronicle.evaluation else None,
        learners=statuses,
        shards=tuple(_shard(chronicle, shard, as_of) for shard in shards),
        cut=_cut(chronicle, as_of),
        remarks=tuple((r.at - (began or r.at), r.text) for r in chronicle.remarks[-20:]),
        problems=(*problems, *(f"{n} records left out: {why}" for why, n in _left_out(chronicle))),
    )


def _cut(chronicle: Chronicle, as_of: float) -> CutStatus | None:
    if chronicle.cut is None:
        return None
    at, cut = chronicle.cut
    nbytes = sum(part.nbytes for part in (*cut.shards, *cut.learners))
    return CutStatus(cut.number, max(0.0, as_of - at), nbytes, cut.missing)


def _left_out(chronicle: Chronicle) -> list[tuple[str, int]]:
    return list(chronicle.left_out.items())


def _phase(chronicle: Chronicle, silent: float) -> str:
    if chronicle.began is None:
        return "empty"
    if chronicle.finished:
        return "finished"
    if chronicle.interrupted:
        return "interrupted"
    if silent > LEASE_SECONDS:
        return "silent"
    order = ("starting", "restoring", "waiting for learners", "running", "closing", "finished")
    phases = [shard.phase for shard in chronicle.shards.values() if shard.phase in order]
    return min(phases, key=order.index, default="starting")


def _left(
    chronicle: Chronicle,
    budget_steps: int | None,
    budget_tokens: int | None,
    steps_rate: float | None,
    tokens_rate: float | None,
) -> tuple[float | None, str]:
    """How long the budget lasts, and which one ends the run."""
    found = []
    for name, budget, spent, rate in (
        ("steps", budget_steps, chronicle.step, steps_rate),
        ("tokens", budget_tokens, chronicle.tokens, tokens_rate),
    ):
        if budget and rate is not None and rate > 0.0:
            found.append((max(0.0, (budget - spent) / rate), name))
    return min(found, default=(None, ""))


def _bytes(chronicle: Chronicle) -> tuple[int | None, int | None, str]:
    """Up and down as the syncer counts them, else as the learners' own tapes do."""
    at_shards = [s.bytes_moved for s in chronicle.shards.values() if s.bytes_moved is not None]
    if at_shards:
        return (
            sum(b.data_received + b.control_received for b in at_shards),
            sum(b.data_sent + b.control_sent for b in at_shards),
            "syncer",
        )
    own = [b for learner in chronicle.learners.values() for b in learner.bytes_moved.values()]
    if own:
        return (
            sum(b.data_sent + b.control_sent for b in own),
            sum(b.data_received + b.control_received for b in own),
            "learners",
        )
    return None, None, ""


# ---- learners


def _learner(
    chronicle: Chronicle, learner: LearnerLog, as_of: float, over: bool, going: bool
) -> LearnerStatus:
    members = [
        (shard, shard.members[learner.name])
        for shard in chronicle.shards.values()
        if learner.name in shard.members
    ]
    state = "finished" if over else _learner_state(learner, [m for _, m in members], as_of)
    if chronicle.interrupted and state != "finished":
        state = "ended" if learner.name in chronicle.told_to_end else "out of reach"
    total, recent = sum(learner.reasons.values()), len(learner.recent)
    merged = chronicle.merged
    tally = {reason: learner.recent.count(reason) for reason in sorted(set(learner.recent))}
    rate = learner.own_rate if learner.has_tape else learner.rate
    fragments = chronicle.fragments or 1
    why = {
        f"{mode}, {reason}": tokens / fragments
        for (mode, reason), tokens in learner.discarded.most_common()
    }
    return LearnerStatus(
        name=learner.name,
        state=state,
        epoch=learner.epoch,
        steps=learner.steps,
        tokens=learner.tokens,
        tokens_per_second=rate.per_second() if state == "stepping" and going else None,
        participation=learner.reasons[TOOK_PART] / merged if merged else None,
        participation_recent=tally.get(TOOK_PART, 0) / recent if recent else None,
        reasons_recent=tally,
        rounds_behind=_rounds_behind(chronicle, learner) if total else None,
        steps_behind=None
        if learner.accepted_step is None
        else max(0, chronicle.step - learner.accepted_step),
        accepted_seconds=None
        if learner.accepted_at is None
        else max(0.0, as_of - learner.accepted_at),
        versions_behind=_versions_behind(members) if members else None,
        seen_seconds=None if learner.seen_at is None else max(0.0, as_of - learner.seen_at),
        discarded_tokens=learner.discarded_fragment_tokens / fragments,
        discarded_why=why if learner.has_tape else None,
        bytes_up=learner.bytes_up,
        loss=learner.loss,
    )


def _with_account(learner: LearnerStatus, account: RunAccount | None) -> LearnerStatus:
    """With all that was discarded of it, also what died with a process or was left behind."""
    if account is None or learner.name not in account.learners:
        return learner
    tokens = account.learners[learner.name].tokens.tokens("discarded")
    return dataclasses.replace(learner, discarded_tokens=tokens)


def _learner_state(learner: LearnerLog, members: list[Member], as_of: float) -> str:
    """What it does now: as the syncer sees it, and its own tape where that knows better."""
    if learner.process in ("restarting", "finished"):
        return learner.process
    if not members:
        if learner.left:
            return "left"
        if _steps(learner, as_of):
            return CUT_OFF
        return "joining" if learner.process == "joining" or not learner.epoch else "down"
    if learner.process == "down":
        return "down"
    if not any(member.connected for member in members):
        return CUT_OFF if _steps(learner, as_of) else "out of reach"
    reported = [member.reported_at for member in members if member.reported_at is not None]
    if not reported:
        return "joining"
    step_seconds = max(member.step_seconds for member in members)
    patience = max(LEASE_SECONDS, QUIET_STEPS * step_seconds)
    return "quiet" if as_of - max(reported) > patience else "stepping"


def _steps(learner: LearnerLog, as_of: float) -> bool:
    """Whether its own tape says that it steps, whatever the shards hear of it."""
    if learner.process != "training" or learner.stepped_at is None:
        return False
    return as_of - learner.stepped_at <= LEASE_SECONDS


def _rounds_behind(chronicle: Chronicle, learner: LearnerLog) -> int:
    return sum(
        shard.merged - learner.accepted.get(shard.name, 0) for shard in chronicle.shards.values()
    )


def _versions_behind(members: list[tuple[ShardLog, Member]]) -> int:
    return sum(
        member.held.get(fragment) != version
        for shard, member in members
        for fragment, version in shard.versions.items()
    )


# ---- shards


def _shard(chronicle: Chronicle, shard: ShardLog, as_of: float) -> ShardStatus:
    quorum = int(settings_fields(chronicle, "sync").get("quorum", 1))
    rounds = sorted(shard.open.values(), key=lambda round: round.opened_at)
    opened = [r.opened for r in (*shard.finished[-1:], *rounds) if r.opened is not None]
    return ShardStatus(
        name=shard.name,
        state=shard.phase,
        term=shard.term,
        clock=shard.clock,
        live=len(shard.members),
        merged=shard.merged,
        abandoned=shard.abandoned,
        open_rounds=tuple(_open(shard, round, quorum, as_of) for round in rounds),
        versions={p: str(version) for p, version in sorted(shard.versions.items())},
        grace_seconds=opened[-1].grace_seconds if opened else None,
        seen_seconds=None if shard.heard_at is None else max(0.0, as_of - shard.heard_at),
    )


def _open(shard: ShardLog, round: RoundLog, quorum: int, as_of: float) -> OpenRound:
    delivered = tuple(dict.fromkeys(fold.learner for _, fold in round.folds.values()))
    waiting = [name for name in round.asks if name not in (*delivered, *round.fallen)]
    qualified = len(waiting) + len(delivered)
    others = [
        member.learner
        for member in shard.members.values()
        if member.learner not in round.asks and member.reported_at is not None
    ]
    grace = round.opened.grace_seconds if round.opened is not None else 0.0
    if round.merging_at is not None:
        waits_for, whom = "merge", []
    elif qualified < quorum:
        waits_for, whom = "quorum", others
    elif others and as_of < round.opened_at + grace:
        waits_for, whom = "grace", others
    else:
        waits_for, whom = "upload", waiting
    return OpenRound(
        number=round.number,
        fragment=round.fragment,
        step=round.tick,
        open_seconds=max(0.0, as_of - round.opened_at),
        waits_for=waits_for,
        learners=tuple(whom),
        delivered=delivered,
    )
