"""View model of a run at one instant: a pure function of its `RunModel`, without rendering.

Seconds are ages as of ``RunStatus.as_of``. This module also has the headline and position for the
terminal and the live page, and the advice for the status, the report and the doctor.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from decoupled_diloco.protocol.syncer_state import LEASE_SECONDS
from decoupled_diloco.run_model import RunModel
from decoupled_diloco.run_model.accounts import RunAccount
from decoupled_diloco.run_model.facts import (
    OUT_OF_REACH,
    TOOK_PART,
    LearnerLog,
    RoundLog,
    ShardLog,
    Stay,
)
from decoupled_diloco.run_model.phrases import ABSENT, many, natural, percent
from decoupled_diloco.show.privacy_accounts import PrivacyStatus, most_spent, privacy_of
from decoupled_diloco.storage.mirror import StoredCopy
from decoupled_diloco.units import format_bytes, format_count, format_duration

AWAY = "away"
"""State of a device between two visits."""

CUT_OFF = "cut off"
"""State of a learner that steps, but that no shard can reach."""

NEVER_CONNECTED = "never connected"
"""State of a site whose relay has connected to no shard yet."""

WAIT_SECONDS = 60.0
"""Time after which a relay that has never connected, or a quorum of devices, is a problem."""

DIRECT = "direct"
"""How a learner is connected that is behind no relay."""

ABSENT_STATES = ("left", AWAY)
"""States of learners that are not in the run now, on purpose."""

DISCONNECTED = "disconnected"
"""State of a site whose relay is connected to no shard."""

JOINED = "joined"
"""State of a learner that has not finished its first step, for example while its model compiles."""

ROUTINE = ("Evaluated", "WeightsSaved")
"""Remarks of these kinds are not shown, because other numbers show them."""

Budget = tuple[int | None, int | None]
"""Steps and tokens that end a run; ``None``: no limit."""

QUIET_STEPS = 5.0
"""A live learner is quiet if it reports nothing during a lease and this number of its steps."""


DISCARDED_MAX = 0.05
"""Share of discarded tokens above which a small overlap is reported."""

ROUNDS_MIN = 10
"""Minimum number of merged rounds for this advice, because the first ones are slow."""

ROUNDS_LOOKED_AT = 50
"""Number of each shard's newest rounds from which times are measured."""


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """One learner.

    ``state`` is one of ``stepping``, ``quiet`` (live, but no recent step), ``joining``, ``joined``
    (in the run, before its first step), ``cut off`` (it steps, but no shard can reach it), ``out
    of reach`` (its connection is broken, and its activity is unknown), ``down``, ``restarting``,
    ``away`` (a device between two visits), ``left``, ``finished``, ``ended`` (the launcher asked it
    to stop before the end of the run).
    """

    name: str
    state: str
    epoch: int  # its newest incarnation
    steps: int  # inner steps of all incarnations; tokens likewise
    tokens: int
    tokens_per_second: float | None  # recent rate; None while it does not step
    participation: float | None  # share of the merged rounds in which it took part
    participation_recent: float | None  # the same for the last 50 merged rounds
    reasons_recent: dict[str, int]  # these rounds by reason: took part, or why not
    rounds_behind: int | None  # merged since its last participation, all shards together
    steps_behind: int | None  # global steps since the tick of its last participation
    accepted_seconds: float | None  # since its last contribution was merged
    versions_behind: int | None  # fragments of which it does not hold the newest version
    seen_seconds: float | None  # since its last message to the syncer
    discarded_tokens: float  # trained and then overwritten
    discarded_why: dict[str, float] | None  # by mode and reason; only its own tape has them
    bytes_up: int  # contributions that the syncer has received
    loss: float | None  # its last training loss
    device: str = ""  # its device, as "cuda:0, NVIDIA H100 80GB HBM3"; empty if unknown
    via: str = ""  # the relays of its connections, or "direct"; empty if no shard is connected
    privacy: PrivacyStatus | None = None  # its account; None without differential privacy
    score: float | None = None  # the median of its last gains, in those of the median learner
    weight: float = 1.0  # the factor on its weight because of its score; 0: it is excluded
    failures: int = 0  # its process crashed, or its lease ran out
    preemptions: int = 0  # it was asked to stop, but not by the launcher, and left in order


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round that is not finished; ``waits_for``: quorum, grace, upload or merge."""

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
    """The last complete checkpoint of the whole run; ``missing``: learners without a part in it."""

    number: int
    seconds_ago: float
    nbytes: int
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """A site, whose learners are behind a relay.

    ``state`` is one of ``connected`` (to all shards), ``partly connected``, ``disconnected``,
    ``never connected``, ``ended`` (with the run). ``saved_bytes`` is the size of the contributions
    in its sums, as they arrived at the relay, less that of the sums. It is slightly negative if
    each sum has one contribution, because a sum also has a header.
    """

    name: str
    state: str
    lost_seconds: float | None  # since it has lost a connection; None while it has all
    upstream: str  # the relay before it; empty: the shards
    learners: tuple[str, ...]  # behind it now, or at the end of the run
    elsewhere: tuple[str, ...]  # live learners that were behind it, and are no longer
    contributions: int  # in its sums
    sums: int
    refused: int  # sums that were refused, or did not arrive whole
    sent_bytes: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class PartStatus:
    """The files of a run folder on another machine, in the newest state of an object store."""

    name: str
    host: str
    seconds_ago: float


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The mirror of the run in an object store.

    ``state``: the newest complete state; 0 if there is none. ``seconds_ago``: since it was
    complete; if the run was read from the store, since it was taken. ``backlog_bytes``: bytes that
    are not uploaded. ``problem``: why the last attempt failed; empty if it did not. ``parts``: only
    if the run was read from the store.
    """

    address: str
    state: int
    seconds_ago: float | None
    backlog_bytes: int
    problem: str
    parts: tuple[PartStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at one instant.

    ``phase`` is one of ``starting``, ``restoring``, ``waiting for learners``, ``running``,
    ``closing``, ``finished``, ``interrupted`` (its processes were asked to stop before the end),
    ``silent`` (it has not ended, but no process writes its tape), ``empty``.
    """

    name: str
    phase: str
    virtual: bool  # in virtual time: the run ended when its tape did
    as_of: float  # wall-clock instant, seconds since the Unix epoch
    began: float | None
    elapsed_seconds: float
    silent_seconds: float  # since the latest record
    step: int
    max_steps: int | None
    tokens: int
    max_tokens: int | None
    steps_per_second: float | None
    tokens_per_second: float | None
    seconds_left: float | None  # until the budget is reached at the current rate; None: unknown
    left_by: str  # the budget that ends it: "steps" or "tokens"
    rounds_merged: int
    rounds_abandoned: int
    bytes_up: int | None  # received by the syncer, also an evaluator's; None: unknown
    bytes_down: int | None
    bytes_of: str  # the side that counted these bytes: "syncer", or "learners"
    discarded_tokens: float
    discarded_whole: bool  # whether the number is complete; otherwise it is a lower bound
    evaluation_loss: float | None
    average_loss: float | None  # of the average of the weights, in the same evaluation
    evaluation_step: int | None
    learners: tuple[LearnerStatus, ...]
    shards: tuple[ShardStatus, ...]
    checkpoint: CheckpointStatus | None  # the last complete one
    store: StoreStatus | None  # None: the run has no store
    sites: tuple[SiteStatus, ...]
    privacy: PrivacyStatus | None  # the account of the learner that has spent most
    remarks: tuple[tuple[float, str], ...]  # the last ones, with seconds since the start
    problems: tuple[str, ...]

    @property
    def has_ended(self) -> bool:
        """Whether the run is finished or was interrupted."""
        return self.phase in ("finished", "interrupted")

    def to_json(self) -> dict[str, Any]:
        """Return the status as plain JSON values; the keys are the names of the fields."""
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
    stored: StoredCopy | None = None,
) -> RunStatus:
    """Return the status of a run.

    Args:
        run: The run.
        now: Wall-clock seconds. If the last record is older than a lease, the status is that at
            the last record.
        problems: Sources that could not be read or reached, one sentence each.
        account: The account of a whole tape. Without it, only the tokens that learners reported
            as overwritten count as discarded: a lower bound.
        budget: Steps and tokens that end the run; default: those in its settings.
        stored: The copy from which the run was read, if it is in an object store. The tape in a
            state is older than the state.
    """
    if account is not None and run.learners.keys() - account.learners.keys():
        account = None
    silent = max(0.0, now - run.latest) if run.records else 0.0
    going = not run.finished and not run.interrupted and silent <= LEASE_SECONDS
    as_of = now - run.started_wall if going and run.records else run.duration
    settings = run.settings_of("run")
    budget = budget or (settings.get("max_steps"), settings.get("max_tokens"))
    up, down, bytes_of = _bytes(run)
    evaluation = run.evaluations[-1] if run.evaluations else None
    learners = tuple(
        _learner(run, run.learners[name], as_of, going, account)
        for name in sorted(run.learners, key=natural)
    )
    sites = tuple(_site(run, name, as_of, going) for name in sorted(run.sites, key=natural))
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
        max_steps=budget[0],
        tokens=run.tokens,
        max_tokens=budget[1],
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
        average_loss=evaluation.average_loss if evaluation else None,
        evaluation_step=evaluation.global_step if evaluation else None,
        learners=learners,
        shards=tuple(_shard(run, shard, as_of) for shard in run.shards.values()),
        checkpoint=_checkpoint(run, as_of),
        store=_store(run, as_of) if stored is None else _stored(stored, now),
        sites=sites,
        privacy=most_spent(run),
        remarks=tuple((r.at, r.text) for r in run.remarks if r.kind not in ROUTINE)[-20:],
        problems=tuple(
            filter(
                None,
                (
                    *problems,
                    *(
                        _without_relay(site, _merging_seconds(run, as_of)) if going else ""
                        for site in sites
                    ),
                    *(_quorums_of_devices(run, as_of) if going else ()),
                    *advice_of(run),
                    *(f"{n} records left out: {why}" for why, n in run.left_out.items()),
                ),
            )
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


def _store(run: RunModel, as_of: float) -> StoreStatus | None:
    if run.store is None:
        return None
    _, newest = run.store
    ago = _age(run.store_state_at, as_of)
    return StoreStatus(newest.address, newest.state, ago, newest.backlog_bytes, newest.problem)


def _stored(copy: StoredCopy, now: float) -> StoreStatus:
    state = copy.state
    parts = tuple(
        PartStatus(name, part.host, max(0.0, now - part.wall)) for name, part in state.parts.items()
    )
    return StoreStatus(copy.address, state.number, max(0.0, now - state.wall), 0, "", parts)


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
    """Return the remaining seconds and the budget that ends the run; None before rates settle."""
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
    """Return bytes up and down as the syncer counts them, or else as the learners' tapes do."""
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
    if account is not None:  # includes tokens that were lost with a process
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
        via=", ".join(dict.fromkeys(s.relay or DIRECT for _, s in members if s.connected)),
        privacy=privacy_of(run, learner),
        score=None if learner.scored is None else learner.scored.score,
        weight=1.0 if learner.scored is None else learner.scored.weight,
        failures=learner.failures,
        preemptions=learner.preemptions,
    )


def _site(run: RunModel, name: str, as_of: float, going: bool) -> SiteStatus:
    site, shards = run.sites[name], run.shards.values()
    upstream = [shard.relays[name] for shard in shards if name in shard.relays]
    state = "connected" if len(upstream) == len(shards) else "partly connected"
    if not site.connected:
        state = NEVER_CONNECTED
    elif run.finished or run.interrupted:
        state = "ended"
    elif not upstream:
        state = DISCONNECTED
    behind, elsewhere = [], []
    for learner in run.learners.values():
        stays = [s for shard in shards if (s := shard.members.get(learner.name)) and s.connected]
        is_its = (learner.site == name) if site.connected else learner.name in site.learners
        if any(stay.relay == name for stay in stays) or (is_its and state == "ended"):
            behind.append(learner.name)
        elif is_its and stays:
            elsewhere.append(learner.name)
    traffic = site.traffic
    return SiteStatus(
        name=name,
        state=state,
        lost_seconds=_age(site.lost_at, as_of) if going and len(upstream) < len(shards) else None,
        upstream=next(iter(upstream), ""),
        learners=tuple(sorted(behind, key=natural)),
        elsewhere=tuple(sorted(elsewhere, key=natural)),
        contributions=traffic.contributions,
        sums=traffic.sums,
        refused=traffic.refused,
        sent_bytes=traffic.sent_bytes,
        saved_bytes=traffic.saved_bytes,
    )


def _merging_seconds(run: RunModel, as_of: float) -> float:
    """Return the time since a shard's clock first moved; 0 if none has."""
    began = [life.ready_at for shard in run.shards.values() for life in shard.lives]
    return as_of - min((at for at in began if at is not None), default=as_of)


def _without_relay(site: SiteStatus, seconds: float) -> str:
    """Return what is wrong if a site has no relay after training for this time; empty: nothing."""
    lost = "" if site.lost_seconds is None else f" for {format_duration(round(site.lost_seconds))}"
    count = len(site.elsewhere)
    dial = "dials" if count == 1 else "dial"
    learners = f"; {many(count, 'learner')} of the site now {dial} the shards" if count else ""
    if site.state == DISCONNECTED:
        return (
            f"the relay of {site.name} has been disconnected{lost}{learners}: if its process has "
            "ended, start it again"
        )
    if site.state == NEVER_CONNECTED and seconds > WAIT_SECONDS:
        return (
            f"the relay of {site.name} has never connected{learners}: start it with ddiloco relay "
            f"--name {site.name}, or remove the site from [[sites]]"
        )
    return ""


def _quorums_of_devices(run: RunModel, as_of: float) -> Iterator[str]:
    """Warn if contributions of devices have waited for a quorum for long: it may be too high."""
    if not run.has_devices:
        return
    quorum = int(run.settings_of("sync").get("quorum", 1))
    waiting = [
        (
            min(at for at, _ in folds.values()),
            fragment,
            {fold.learner for _, fold in folds.values()},
        )
        for shard in run.shards.values()
        for fragment, folds in shard.folds.items()
        if folds
    ]
    since, fragment, devices = min(waiting, default=(as_of, 0, set[str]()), key=lambda w: w[0])
    if as_of - since > WAIT_SECONDS and len(devices) < quorum:
        yield (
            f"fragment {fragment} has not been merged for {format_duration(round(as_of - since))}: "
            f"{many(len(devices), 'device')} contributed, but quorum={quorum} in [sync] needs "
            f"{quorum} different ones: let {quorum - len(devices)} more visit the run, or start a "
            "run with a lower quorum"
        )


def state_of(run: RunModel, learner: LearnerLog, as_of: float) -> str:
    """Return a learner's state as the syncer sees it, or from its own tape if that has more.

    The states are those of `LearnerStatus`; ``as_of``: seconds since the run's first record.
    """
    if run.finished:
        return "finished"
    shards = run.shards.values()
    members = [shard.members[learner.name] for shard in shards if learner.name in shard.members]
    state = _recorded_state(learner, members, as_of)
    if run.has_devices and (state == "left" or (state == "down" and learner.process != "down")):
        state = AWAY  # also if its visit broke off
    if run.interrupted and state != "finished":
        return "ended" if learner.name in run.told_to_end else OUT_OF_REACH
    return state


def _recorded_state(learner: LearnerLog, members: list[Stay], as_of: float) -> str:
    if learner.process in ("restarting", "finished"):
        return learner.process
    if not members and learner.left:
        return "left"
    if learner.process == "down":
        return "down"
    if not members and not learner.epoch and learner.process == "training":
        # Without any member, there may be no shard's tape at all; the learner's own tape decides.
        return "stepping" if _steps(learner, as_of) else "quiet"
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
    """Whether its own tape shows that it steps, whatever the shards receive from it."""
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
    opened = [round.opened or round.result for round in (*shard.rounds[-1:], *rounds)]
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
        grace_seconds=next((each.grace_seconds for each in reversed(opened) if each), None),
        seen_seconds=_age(shard.heard_at, as_of),
    )


def _open(shard: ShardLog, round: RoundLog, quorum: int, as_of: float) -> OpenRound:
    here = [fold for ask, (_, fold) in round.folds.items() if ask not in shard.relayed]
    delivered = tuple(dict.fromkeys(fold.learner for fold in here))
    waiting = [name for name in round.asks if name not in (*delivered, *round.fallen)]
    others = [
        member.learner
        for member in shard.members.values()
        if member.learner not in round.asks and member.reported_at is not None
    ]
    grace = round.opened.grace_seconds if round.opened is not None else 0.0
    waits_for, names = "upload", waiting
    if round.merging_at is not None:
        waits_for, names = "merge", []
    elif len(waiting) + len(delivered) < quorum:
        waits_for, names = "quorum", others
    elif others and as_of < round.opened_at + grace:
        waits_for, names = "grace", others
    age = max(0.0, as_of - round.opened_at)
    return OpenRound(
        round.number, round.fragment, round.tick, age, waits_for, tuple(names), delivered
    )


def headline(status: RunStatus) -> str:
    """Return the state of the run in a few words."""
    silent = format_duration(status.silent_seconds)
    match status.phase:
        case "finished" if status.virtual:
            return "finished, in virtual time"
        case "silent" if status.virtual:
            return "not finished, in virtual time"
        case "empty":
            return "the tape is empty"
        case "finished":
            return f"finished: its last record is {silent} old"
        case "interrupted":
            return f"interrupted at step {status.step}, {silent} ago"
        case "silent":
            return f"silent: no record for {silent}; the run stopped before its end"
        case phase:
            return phase


def position(status: RunStatus) -> str:
    """Return the global step, with the budget if there is one."""
    return f"step {step_of_budget(status.step, status.max_steps)}"


def step_of_budget(step: int, budget: int | None) -> str:
    """Return a step, which may exceed its budget: learners train on until they receive the end.

    >>> step_of_budget(60, 60), step_of_budget(65, 60), step_of_budget(7, None)
    ('60/60', '65 (budget 60)', '7')
    """
    if not budget:
        return str(step)
    return f"{step}/{budget}" if step <= budget else f"{step} (budget {budget})"


def learner_cells(learner: LearnerStatus) -> dict[str, str]:
    """Return the cells of a learner by column, for every table of learners."""
    rate, seen = learner.tokens_per_second, learner.seen_seconds
    discarded = learner.discarded_tokens / learner.tokens if learner.tokens else None
    return {
        "learner": learner.name,
        "state": learner.state,
        "via": learner.via or ABSENT,
        "device": learner.device.partition(",")[0] or ABSENT,
        "privacy": ABSENT if learner.privacy is None else learner.privacy.spent,
        "steps": str(learner.steps),
        "tok/s": ABSENT if rate is None else format_count(rate),
        "loss": ABSENT if learner.loss is None else f"{learner.loss:.3f}",
        "took part": percent(learner.participation),
        "recent": percent(learner.participation_recent),
        "rounds behind": _number(learner.rounds_behind),
        "stale copies": _number(learner.versions_behind),
        "discarded": percent(discarded),
        "score": score_text(learner.score, learner.weight),
        "failed": str(learner.failures),
        "preempted": str(learner.preemptions),
        "sent": format_bytes(learner.bytes_up),
        "silent": ABSENT if seen is None else "no" if seen < 2.5 else format_duration(round(seen)),
    }


def score_text(score: float | None, weight: float) -> str:
    """Return a score, and what it does to the learner's weight.

    >>> score_text(0.97, 1.0), score_text(0.3, 0.6), score_text(-1.2, 0.0)
    ('0.97', '0.30 (× 0.6)', '-1.20 (excluded)')
    """
    if score is None:
        return ABSENT
    effect = "" if weight == 1.0 else " (excluded)" if weight == 0.0 else f" (× {weight:.2g})"
    return f"{score:.2f}{effect}"


def _number(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def shard_cells(shard: ShardStatus) -> dict[str, str]:
    """Return the cells of a shard by column; versions: the oldest and the newest."""
    grace = shard.grace_seconds
    versions = sorted(shard.versions.values(), key=lambda text: [*map(int, text.split("."))])
    ends = dict.fromkeys([*versions[:1], *versions[-1:]])
    return {
        "syncer": shard.name,
        "state": shard.state,
        "term": str(shard.term),
        "clock": str(shard.clock),
        "merged": str(shard.merged),
        "abandoned": str(shard.abandoned),
        "live": str(shard.live),
        "open": str(len(shard.open_rounds)),
        "grace": ABSENT if grace is None else format_duration(grace) if grace else "0",
        "versions": "–".join(ends) or ABSENT,
    }


def site_cells(site: SiteStatus) -> dict[str, str]:
    """Return the cells of a site by column; learners: behind its relay, of all that were."""
    behind = len(site.learners)
    return {
        "site": f"{site.name} (behind {site.upstream})" if site.upstream else site.name,
        "state": site.state,
        "learners": f"{behind} of {behind + len(site.elsewhere)}",
        "contributions": str(site.contributions),
        "sums": str(site.sums),
        "refused": str(site.refused),
        "sent": format_bytes(site.sent_bytes),
        "saved": saved_in_words(site.saved_bytes),
    }


def saved_in_words(saved_bytes: int) -> str:
    """Return by how much sums were smaller; "none" if they were larger, by their headers.

    >>> saved_in_words(2048), saved_in_words(-300)
    ('2.0 KiB', 'none')
    """
    return format_bytes(saved_bytes) if saved_bytes > 0 else "none"


def budget_share(status: RunStatus) -> float | None:
    """Return the spent share of the budget, 0 to 1, for the budget that ends the run first."""
    budgets = ((status.step, status.max_steps), (status.tokens, status.max_tokens))
    shares = [spent / budget for spent, budget in budgets if budget]
    return min(1.0, max(shares)) if shares else None


def learners_in_words(status: RunStatus) -> str:
    """Return how many of the present learners step; if none does, their state instead."""
    states = [learner.state for learner in status.learners if learner.state not in ABSENT_STATES]
    stepping, joined = states.count("stepping"), states.count(JOINED)
    away = sum(learner.state == AWAY for learner in status.learners)
    others = f", {away} away" if away else ""
    if stepping or not states:
        return (f"{stepping}/{len(states)} learners" if states else "no learners") + others
    if joined == len(states):
        return f"{joined} joined, no step finished yet{others}"
    return f"0/{len(states)} learners" + (f" ({joined} joined, no step yet)" if joined else others)


def advice_of(run: RunModel) -> list[str]:
    """Return the warnings that need a user's action, one sentence each."""
    warnings = (w if w.endswith((".", "!")) else f"{w}." for w in run.warnings.values())
    return [*warnings, *_overlap(run)]


def _overlap(run: RunModel) -> Iterator[str]:
    """Warn if tokens are discarded because merged fragments arrive later than the overlap."""
    share, overlap = discarded_share(run), run.settings_of("sync").get("overlap_steps")
    measured = [found for shard in run.shards.values() if (found := _round_trip(shard.rounds))]
    if share <= DISCARDED_MAX or not isinstance(overlap, int) or not measured:
        return
    seconds, step_seconds = max(measured, key=lambda found: found[0] / found[1])
    fits = math.ceil(seconds / step_seconds)
    if run.rounds_merged < ROUNDS_MIN or fits <= overlap:
        return
    takes, step = format_duration(seconds), format_duration(step_seconds)
    yield (
        f"{percent(share)} of the tokens are discarded, because overlap_steps={overlap} is too "
        f"small: a round takes {takes}, but {overlap} steps of {step} are shorter: set "
        f"sync.overlap_steps to {fits}, and raise sync.sync_every to discard fewer. To discard "
        'none, set sync.apply.alignment="carry" and sync.apply.missed="rebase".'
    )


def discarded_share(run: RunModel) -> float:
    """Return the share of all tokens that merged fragments overwrote, as learners report."""
    fragment_tokens = sum(each.discarded_fragment_tokens for each in run.learners.values())
    return fragment_tokens / (run.fragments or 1) / run.tokens if run.tokens else 0.0


def _round_trip(rounds: Sequence[RoundLog]) -> tuple[float, float] | None:
    """Return ξ_quorum + ξ_sync and ξ_step of a shard's newest rounds; ``None``: not measured."""
    newest = [round.result for round in rounds[-ROUNDS_LOOKED_AT:] if round.merged]
    known = [each for each in newest if each is not None and each.step_seconds > 0]
    if not known:
        return None
    took = [
        (each.quorum_average_seconds or 0.0)
        + (each.merge_average_seconds or 0.0)
        + (each.broadcast_average_seconds or 0.0)
        for each in known
    ]
    return median(took), median(each.step_seconds for each in known)
