"""How a run is doing at one instant: a pure function of its `RunModel`; rendering is apart.

Seconds are ages: how long ago something was, as of ``RunStatus.as_of``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from decoupled_diloco.observe.accounts import RunAccount
from decoupled_diloco.observe.advice import advice_of
from decoupled_diloco.observe.run_data import OUT_OF_REACH, TOOK_PART, LearnerLog
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shard_data import RoundLog, ShardLog, Stay
from decoupled_diloco.observe.words import natural
from decoupled_diloco.protocol.membership import LEASE_SECONDS

CUT_OFF = "cut off"
"""The state of a learner that steps on while no shard can be heard."""

JOINED = "joined"
"""The state of a learner that has not finished its first step, while its model compiles, say."""

ROUTINE = ("Evaluated", "WeightsSaved")
"""Remarks on these are not shown: other numbers tell it."""

Budget = tuple[int | None, int | None]
"""Steps and tokens that end a run; ``None``: no limit."""

QUIET_STEPS = 5.0
"""A live learner without a report for so many of its own steps, and a lease, is quiet."""


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """One learner.

    ``state``: ``stepping``, ``quiet`` (live, no step for long), ``joining``, ``joined`` (in the
    run, and has not finished a step yet), ``cut off`` (no shard
    hears of it, and it steps on), ``out of reach`` (its connection is broken, and what it does is
    not known), ``down``, ``restarting``, ``left``, ``finished``, ``ended`` (the launcher told it
    to, before the run was over).
    """

    name: str
    state: str
    epoch: int  # its newest life
    steps: int  # own inner steps of all lives; tokens likewise
    tokens: int
    tokens_per_second: float | None  # of the last seconds; None while it does not step
    participation: float | None  # share of the merged rounds that it was in
    participation_recent: float | None  # the same of the last 50 merged rounds
    reasons_recent: dict[str, int]  # how many of those it was in, or why it was not in them
    rounds_behind: int | None  # merged since the last one that it was in, all shards together
    steps_behind: int | None  # global steps since the tick of the last round that it was in
    accepted_seconds: float | None  # since its last contribution was merged
    versions_behind: int | None  # fragments of which it does not hold the newest version
    seen_seconds: float | None  # since the syncer last heard of it
    discarded_tokens: float  # trained and then overwritten
    discarded_why: dict[str, float] | None  # by mode and reason; only its own tape tells
    bytes_up: int  # contributions that the syncer has received
    loss: float | None  # its last training loss
    device: str = ""  # what it trains on, as "cuda:0, NVIDIA H100 80GB HBM3"; "": not known


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
class CheckpointStatus:
    """The last complete checkpoint of the whole run; ``missing``: learners that gave no part."""

    number: int
    seconds_ago: float
    nbytes: int
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at one instant.

    ``phase``: ``starting``, ``waiting for learners``, ``running``, ``closing``, ``finished``,
    ``interrupted`` (its processes were told to end before), ``silent`` (it was not over, and
    nothing writes its tape any more), ``empty``.
    """

    name: str
    phase: str
    virtual: bool  # in virtual time: it ended when its tape did
    as_of: float  # wall-clock instant, seconds since the Unix epoch
    began: float | None
    elapsed_seconds: float
    silent_seconds: float  # since the latest record
    step: int
    budget_steps: int | None
    tokens: int
    budget_tokens: int | None
    steps_per_second: float | None
    tokens_per_second: float | None
    seconds_left: float | None  # of the budget at the present rate; None: not known
    left_by: str  # which budget ends it: "steps" or "tokens"
    rounds_merged: int
    rounds_abandoned: int
    bytes_up: int | None  # received by the syncer, also an evaluator's; None: not known yet
    bytes_down: int | None
    bytes_of: str  # which side has counted these bytes: "syncer", or "learners"
    discarded_tokens: float
    discarded_whole: bool  # whether these are all there are; else there are at least so many
    evaluation_loss: float | None
    evaluation_step: int | None
    learners: tuple[LearnerStatus, ...]
    shards: tuple[ShardStatus, ...]
    checkpoint: CheckpointStatus | None  # the last complete one
    remarks: tuple[tuple[float, str], ...]  # the last ones, with seconds since the beginning
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The status as plain JSON values; the keys are the names of the fields."""
        plain = dataclasses.asdict(self)
        for shard in plain["shards"]:
            shard["versions"] = {str(p): version for p, version in shard["versions"].items()}
        return plain


def status_of(
    run: RunModel,
    now: float,
    problems: Iterable[str] = (),
    account: RunAccount | None = None,
    budget: Budget | None = None,
) -> RunStatus:
    """How a run is doing.

    Args:
        run: What is known of it.
        now: Wall-clock seconds. A run that nothing has been heard of for longer than a lease is
            looked at as it was at its latest record.
        problems: What could not be read or reached, one sentence each.
        account: Where a whole tape is at hand. Without it only those tokens are discarded that
            learners have told to be overwritten: a lower bound.
        budget: Steps and tokens that end the run; default: as its settings say.
    """
    if account is not None and run.learners.keys() - account.learners.keys():
        account = None
    silent = max(0.0, now - run.latest) if run.records else 0.0
    going = not run.finished and not run.interrupted and silent <= LEASE_SECONDS
    as_of = now - run.started_wall if going and run.records else run.duration
    settings = run.settings_of("run")
    budget = budget or (settings.get("budget_steps"), settings.get("budget_tokens"))
    up, down, bytes_of = _bytes(run)
    evaluation = run.evaluations[-1] if run.evaluations else None
    learners = tuple(
        _learner(run, run.learners[name], as_of, going, account)
        for name in sorted(run.learners, key=natural)
    )
    idle = bool(learners) and all(learner.state != "stepping" for learner in learners)
    left, left_by = _left(run, budget, as_of) if going and not idle else (None, "")
    return RunStatus(
        name=str(settings.get("name", "")),
        phase=_phase(run, silent),
        virtual=run.virtual,
        as_of=run.started_wall + as_of,
        began=run.started_wall if run.records else None,
        elapsed_seconds=max(0.0, as_of),
        silent_seconds=silent,
        step=run.step,
        budget_steps=budget[0],
        tokens=run.tokens,
        budget_tokens=budget[1],
        steps_per_second=run.clock_rate.per_second(as_of) if going else None,
        tokens_per_second=run.token_rate.per_second(as_of) if going else None,
        seconds_left=left,
        left_by=left_by,
        rounds_merged=run.rounds_merged,
        rounds_abandoned=run.rounds_abandoned,
        bytes_up=up,
        bytes_down=down,
        bytes_of=bytes_of,
        discarded_tokens=sum(learner.discarded_tokens for learner in learners),
        discarded_whole=account is not None,
        evaluation_loss=evaluation.loss if evaluation else None,
        evaluation_step=evaluation.global_step if evaluation else None,
        learners=learners,
        shards=tuple(_shard(run, shard, as_of) for shard in run.shards.values()),
        checkpoint=_checkpoint(run, as_of),
        remarks=tuple((r.at, r.text) for r in run.remarks if r.kind not in ROUTINE)[-20:],
        problems=(
            *problems,
            *advice_of(run),
            *(f"{n} records left out: {why}" for why, n in run.left_out.items()),
        ),
    )


def _age(at: float | None, as_of: float) -> float | None:
    return None if at is None else max(0.0, as_of - at)


def _checkpoint(run: RunModel, as_of: float) -> CheckpointStatus | None:
    if run.checkpoint is None:
        return None
    at, kept = run.checkpoint
    nbytes = sum(part.nbytes for part in (*kept.shards, *kept.learners))
    return CheckpointStatus(kept.number, max(0.0, as_of - at), nbytes, kept.missing)


def _phase(run: RunModel, silent: float) -> str:
    if not run.records:
        return "empty"
    if run.finished:
        return "finished"
    if run.interrupted:
        return "interrupted"
    if silent > LEASE_SECONDS:
        return "silent"
    order = ("starting", "restoring", "waiting for learners", "running", "closing", "finished")
    phases = [shard.phase for shard in run.shards.values() if shard.phase in order]
    return min(phases, key=order.index, default="starting")


def _left(run: RunModel, budget: Budget, as_of: float) -> tuple[float | None, str]:
    """How long the budget lasts, and which one ends the run; the first few steps tell nothing."""
    found = []
    for name, limit, spent, rate in (
        ("steps", budget[0], run.step, run.clock_rate),
        ("tokens", budget[1], run.tokens, run.token_rate),
    ):
        per_second = rate.per_second(as_of)
        if limit and per_second and rate.settled:
            found.append((max(0.0, (limit - spent) / per_second), name))
    return min(found, default=(None, ""))


def _bytes(run: RunModel) -> tuple[int | None, int | None, str]:
    """Up and down as the syncer counts them, else as the learners' own tapes do."""
    for counted_by in ("syncer", "learners"):
        moved = run.bytes_of(syncer=counted_by == "syncer")
        if moved is not None:
            down = moved.data_received + moved.control_received
            return moved.data_sent + moved.control_sent, down, counted_by
    return None, None, ""


def _learner(
    run: RunModel, learner: LearnerLog, as_of: float, going: bool, account: RunAccount | None
) -> LearnerStatus:
    members = [
        (shard, shard.members[learner.name])
        for shard in run.shards.values()
        if learner.name in shard.members
    ]
    state = state_of(run, learner, as_of)
    recent, merged, fragments = Counter(learner.recent), run.rounds_merged, run.fragments or 1
    discarded = learner.discarded_fragment_tokens / fragments
    if account is not None:  # also what died with a process or was left behind
        discarded = account.learners[learner.name].tokens.tokens("discarded")
    why = {
        f"{mode}, {reason}": tokens / fragments
        for (mode, reason), tokens in learner.discarded.most_common()
    }
    accepted = learner.accepted_step
    return LearnerStatus(
        name=learner.name,
        state=state,
        epoch=learner.epoch,
        steps=learner.steps,
        tokens=learner.tokens,
        tokens_per_second=learner.rate.per_second(as_of) if state == "stepping" and going else None,
        participation=run.participation_of(learner),
        participation_recent=recent[TOOK_PART] / recent.total() if recent else None,
        reasons_recent=dict(sorted(recent.items())),
        rounds_behind=merged - sum(learner.accepted.values()) if learner.reasons else None,
        steps_behind=None if accepted is None else max(0, run.step - accepted),
        accepted_seconds=_age(learner.accepted_at, as_of),
        versions_behind=_versions_behind(members) if members else None,
        seen_seconds=_age(learner.seen_at, as_of),
        discarded_tokens=discarded,
        discarded_why=why if learner.has_tape else None,
        bytes_up=learner.bytes_up,
        loss=learner.loss,
        device=learner.device,
    )


def state_of(run: RunModel, learner: LearnerLog, as_of: float) -> str:
    """What it does now: as the syncer sees it, and its own tape where that knows better.

    The words are those of `LearnerStatus`; ``as_of``: seconds since the run's first record.
    """
    if run.finished:
        return "finished"
    shards = run.shards.values()
    members = [shard.members[learner.name] for shard in shards if learner.name in shard.members]
    state = _state_told(learner, members, as_of)
    if run.interrupted and state != "finished":
        return "ended" if learner.name in run.told_to_end else OUT_OF_REACH
    return state


def _state_told(learner: LearnerLog, members: list[Stay], as_of: float) -> str:
    if learner.process in ("restarting", "finished"):
        return learner.process
    if not members and learner.left:
        return "left"
    if learner.process == "down":
        return "down"
    if not members and not learner.epoch and learner.process == "training":
        return "stepping" if _steps(learner, as_of) else "quiet"  # no shard tells of any learner
    if not members:
        if _steps(learner, as_of):
            return CUT_OFF
        return "joining" if learner.process == "joining" or not learner.epoch else "down"
    if not any(member.connected for member in members):
        return CUT_OFF if _steps(learner, as_of) else OUT_OF_REACH
    reported = [member.reported_at for member in members if member.reported_at is not None]
    if not reported:
        return JOINED
    step_seconds = max(member.step_seconds for member in members)
    patience = max(LEASE_SECONDS, QUIET_STEPS * step_seconds)
    return "quiet" if as_of - max(reported) > patience else "stepping"


def _steps(learner: LearnerLog, as_of: float) -> bool:
    """Whether its own tape says that it steps, whatever the shards hear of it."""
    if learner.process != "training" or learner.stepped_at is None:
        return False
    return as_of - learner.stepped_at <= LEASE_SECONDS


def _versions_behind(members: list[tuple[ShardLog, Stay]]) -> int:
    return sum(
        member.held.get(fragment) != version
        for shard, member in members
        for fragment, version in shard.versions.items()
    )


def _shard(run: RunModel, shard: ShardLog, as_of: float) -> ShardStatus:
    quorum = int(run.settings_of("sync").get("quorum", 1))
    rounds = sorted(shard.open.values(), key=lambda round: round.opened_at)
    return ShardStatus(
        name=shard.name,
        state=shard.phase,
        term=shard.terms[-1] if shard.terms else 0,
        clock=shard.clock,
        live=len(shard.members),
        merged=shard.merged,
        abandoned=shard.abandoned,
        open_rounds=tuple(_open(shard, round, quorum, as_of) for round in rounds),
        versions={p: str(version) for p, version in sorted(shard.versions.items())},
        grace_seconds=_grace_seconds(shard, rounds),
        seen_seconds=_age(shard.heard_at, as_of),
    )


def _grace_seconds(shard: ShardLog, rounds: Sequence[RoundLog]) -> float | None:
    """The grace window of the newest round."""
    told = [round.opened or round.result for round in (*shard.rounds[-1:], *rounds)]
    return next((each.grace_seconds for each in reversed(told) if each is not None), None)


def _open(shard: ShardLog, round: RoundLog, quorum: int, as_of: float) -> OpenRound:
    delivered = tuple(dict.fromkeys(fold.learner for _, fold in round.folds.values()))
    waiting = [name for name in round.asks if name not in (*delivered, *round.fallen)]
    others = [
        member.learner
        for member in shard.members.values()
        if member.learner not in round.asks and member.reported_at is not None
    ]
    grace = round.opened.grace_seconds if round.opened is not None else 0.0
    waits_for, whom = "upload", waiting
    if round.merging_at is not None:
        waits_for, whom = "merge", []
    elif len(waiting) + len(delivered) < quorum:
        waits_for, whom = "quorum", others
    elif others and as_of < round.opened_at + grace:
        waits_for, whom = "grace", others
    age = max(0.0, as_of - round.opened_at)
    return OpenRound(
        round.number, round.fragment, round.tick, age, waits_for, tuple(whom), delivered
    )
