"""Every interval, window, lease and deadline in force, and what each is derived from.

There is no timeout for a user to set; this is the table that says so. Every number is taken from
where it is in force, when the table is made, so that the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from decoupled_diloco.launch import local, roles, supervisor
from decoupled_diloco.learner import background, donations, joining, trouble
from decoupled_diloco.learner import learner as learner_process
from decoupled_diloco.observe import writer
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.protocol import (
    donating,
    grace,
    learner_copies,
    lease,
    leases,
    membership,
    recovery,
    syncer,
    syncer_fill,
    syncer_members,
    syncer_rounds,
)
from decoupled_diloco.protocol.effects import RoundOpened
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.syncer import coordinator, cut_requests, sessions, shard
from decoupled_diloco.transport import backoff, bodies, channel, documents, http_client, http_server
from decoupled_diloco.transport.base import Limits
from decoupled_diloco.units import format_duration


@dataclass(frozen=True, slots=True)
class Interval:
    """One row.

    Attributes:
        group: What it belongs to.
        name: What it is.
        rule: What it is derived from: a formula with its constants, or a constant.
        value: What it is now; where only a run can tell, what is known before.
        sources: The constants it rests on, ``module.NAME``.
        essential: What it means in plain words, for the start of a run; empty: not shown there.
    """

    group: str
    name: str
    rule: str
    value: str
    sources: tuple[str, ...]
    essential: str = ""


def intervals(
    options: Options,
    *,
    give_up_seconds: float | None = None,
    lease_seconds: float | None = None,
    run: RunModel | None = None,
) -> list[Interval]:
    """The table.

    Args:
        options: The run's settings of the method.
        give_up_seconds: The learners' own setting: after so long alone they end.
        lease_seconds: A shard's setting, if the shards have standbys.
        run: What is measured; default: nothing yet.
    """
    return [
        *_liveness(give_up_seconds),
        *_rounds(options, run),
        *_transfers(),
        *_begin_and_end(),
        *_recovery(),
        *_standbys(lease_seconds),
        *_processes(),
    ]


def _s(seconds: float) -> str:
    return format_duration(seconds)


def _liveness(give_up_seconds: float | None) -> list[Interval]:
    limits, learners_lease = Limits(), membership.LEASE_SECONDS
    reconnect, late = membership.RECONNECT_SECONDS, syncer_members.LATENESS_SECONDS_MIN
    pings = round(learners_lease / limits.ping_seconds)
    floor, cap = backoff.FLOOR_SECONDS, backoff.CAP_SECONDS
    brisk = backoff.BRISK_CAP_SECONDS
    forever = "never" if give_up_seconds is None else _s(give_up_seconds)
    row = partial(Interval, "who is live")
    return [
        row(
            "ping",
            "each end of a control connection",
            _s(limits.ping_seconds),
            ("transport.base.Limits.ping_seconds",),
        ),
        row(
            "connection lost",
            f"{round(limits.lost_seconds / limits.ping_seconds)} pings unanswered",
            _s(limits.lost_seconds),
            ("transport.base.Limits.lost_seconds",),
        ),
        row(
            "learner's lease",
            f"{pings} pings; any byte renews it",
            _s(learners_lease),
            ("protocol.membership.LEASE_SECONDS",),
            "silent for longer, a learner has to join again",
        ),
        row(
            "reconnect",
            "what a broken connection leaves of it",
            _s(reconnect),
            ("protocol.membership.RECONNECT_SECONDS",),
            "a broken connection may come back within it",
        ),
        row(
            "lateness correction",
            f"of leases, if a tick is over {_s(late)} late",
            f"lateness + {_s(reconnect)}",
            (
                "protocol.syncer_members.LATENESS_SECONDS_MIN",
                "protocol.membership.RECONNECT_SECONDS",
            ),
        ),
        row(
            "who was heard",
            "looked at every",
            _s(shard.HEARD_SECONDS),
            ("syncer.shard.HEARD_SECONDS",),
        ),
        row(
            "first word",
            "of a new connection",
            _s(sessions.GREETING_SECONDS),
            ("syncer.sessions.GREETING_SECONDS",),
        ),
        row(
            "redial",
            "doubling, with full jitter",
            f"{_s(floor)} to {_s(brisk)}; after {_s(backoff.BRISK_SECONDS)} to {_s(cap)}",
            (
                "transport.backoff.FLOOR_SECONDS",
                "transport.backoff.BRISK_CAP_SECONDS",
                "transport.backoff.BRISK_SECONDS",
                "transport.backoff.CAP_SECONDS",
            ),
        ),
        row(
            "learner gives up",
            "learner.give_up_seconds, without any shard",
            forever,
            (),
        ),
        row(
            "first join",
            "of a learner that finds no syncer",
            _s(joining.JOIN_TIMEOUT_SECONDS),
            ("learner.joining.JOIN_TIMEOUT_SECONDS",),
        ),
        row(
            "coordinator first",
            "before a shard that was lost together with it is dialled",
            _s(joining.CONFIRM_SECONDS),
            ("learner.joining.CONFIRM_SECONDS",),
        ),
        row(
            "id in use",
            "a second process: the first is alive if heard, gone after its lease; looked at every",
            _s(coordinator.LISTEN_SECONDS),
            ("syncer.coordinator.LISTEN_SECONDS",),
        ),
        row(
            "program ended",
            "a learner that was not closed looks for it every",
            _s(background.PROGRAM_ENDED_SECONDS),
            ("learner.background.PROGRAM_ENDED_SECONDS",),
        ),
        row(
            "trouble is told",
            "by a learner, while it lasts, every",
            _s(trouble.AGAIN_SECONDS),
            ("learner.trouble.AGAIN_SECONDS",),
        ),
    ]


# ---- rounds


def _rounds(options: Options, run: RunModel | None) -> list[Interval]:
    row, step = partial(Interval, "a round"), _step_seconds(run)
    pause, longest = syncer_rounds.MERGE_PAUSE_SECONDS
    margin = options.grace_margin
    formula = f"{margin:g} ({options.overlap} ξ_step − ξ_quorum − ξ_sync)"
    return [
        row(
            "grace window",
            formula if margin else "grace_margin = 0",
            _grace(run) if margin else "none",
            (),
            _grace_in_words(options),
        ),
        row(
            "ξ_step, ξ_quorum, …",
            f"averages, {grace.SMOOTHING:g} the newest; sync: merge, broadcast",
            _averages(run),
            ("protocol.grace.SMOOTHING",),
        ),
        row(
            "delivery window",
            f"{options.overlap} ξ_step",
            "not measured yet" if step is None else _s(options.overlap * step),
            (),
            "a round merges; what is late joins the next",
        ),
        row(
            "after a failed merge",
            "× 2 each time",
            f"{_s(pause)} to {_s(longest)}",
            ("protocol.syncer_rounds.MERGE_PAUSE_SECONDS",),
        ),
        row(
            "loop that stands still",
            f"or {membership.STANDS_STEPS:g} ξ_step, {membership.STANDS_OWN_STEPS:g} of its own",
            _s(membership.STANDS_SECONDS),
            ("protocol.membership.STANDS_SECONDS",),
        ),
        row(
            "closing round",
            "for who has not begun to answer by then",
            f"{_s(syncer_rounds.CLOSING_SECONDS)}, {syncer_rounds.SWEEP_TRIES_MAX} tries",
            (
                "protocol.syncer_rounds.CLOSING_SECONDS",
                "protocol.syncer_rounds.SWEEP_TRIES_MAX",
            ),
        ),
        row(
            "closing round, copy",
            "for who is still fetching what it answers from",
            _s(syncer_rounds.COPY_SECONDS),
            ("protocol.syncer_rounds.COPY_SECONDS",),
        ),
    ]


def _grace_in_words(options: Options) -> str:
    if not options.grace_margin:
        return "a round is closed once its quorum is there"
    return f"{100 * options.grace_margin:.0f} % of the spare time, for more than a quorum"


def _step_seconds(run: RunModel | None) -> float | None:
    """ξ_step: that of the fastest learner that is live."""
    known = [
        member.step_seconds
        for log in (run.shards.values() if run else ())
        for member in log.members.values()
        if member.step_seconds > 0
    ]
    if known:
        return min(known)
    last = [o.step_seconds for o in _openings(run) if o.step_seconds > 0]
    return last[-1] if last else None


def _openings(run: RunModel | None) -> list[RoundOpened]:
    """The newest opening of an ordinary round at each shard."""
    found = []
    for log in run.shards.values() if run else ():
        rounds = (*log.rounds, *log.open.values())
        opened = [r.opened for r in rounds if r.opened is not None and not r.opened.closing]
        found += opened[-1:]
    return found


def _grace(run: RunModel | None) -> str:
    windows = [opened.grace_seconds for opened in _openings(run)]
    if not windows:
        return "not measured yet"
    return _span(windows)


def _averages(run: RunModel | None) -> str:
    openings = _openings(run)
    if not openings:
        return "not measured yet"
    newest = openings[0]
    parts = (
        newest.step_seconds,
        newest.quorum_average_seconds,
        newest.merge_average_seconds,
        newest.broadcast_average_seconds,
    )
    return ", ".join(map(_s, parts))


def _span(values: Iterable[float]) -> str:
    low, high = min(values := list(values)), max(values)
    return _s(low) if _s(low) == _s(high) else f"{_s(low)} to {_s(high)}"


# ---- the rest


def _transfers() -> list[Interval]:
    limits, rtts = Limits(), http_client.STALL_RTTS
    stall = limits.stall_seconds
    row = partial(Interval, "transfers")
    return [
        row(
            "given up",
            f"no byte for max({_s(stall)}, {rtts} round trips)",
            f"{_s(stall)} or more",
            ("transport.base.Limits.stall_seconds", "transport.http_client.STALL_RTTS"),
        ),
        row(
            "one more copy",
            f"after {limits.copies_per_principal} of one version by one id",
            _s(limits.copy_seconds),
            ("transport.base.Limits.copy_seconds",),
        ),
        row(
            "server's patience",
            "× of that, for who sends; a reader gets 3 ×",
            f"{bodies.SERVER_PATIENCE:g} × {_s(stall)}",
            ("transport.bodies.SERVER_PATIENCE",),
        ),
        row(
            "resumed",
            "attempts in a row without progress",
            str(limits.retries),
            ("transport.base.Limits.retries",),
        ),
        row(
            "copy not had",
            "a learner asks again after",
            _s(learner_copies.RETRY_SECONDS),
            ("protocol.learner_copies.RETRY_SECONDS",),
        ),
        row(
            "idle connections",
            "of the data plane stay open",
            _s(http_server.KEEP_ALIVE_SECONDS),
            ("transport.http_server.KEEP_ALIVE_SECONDS",),
        ),
        row(
            "goodbye",
            f"flushing a connection; a refused body is read for {_s(http_server.LINGER_SECONDS)}",
            _s(channel.FLUSH_SECONDS),
            ("transport.channel.FLUSH_SECONDS", "transport.http_server.LINGER_SECONDS"),
        ),
        row(
            "status answer",
            "a shard that serves its tape has",
            _s(documents.ANSWER_SECONDS),
            ("transport.documents.ANSWER_SECONDS",),
        ),
    ]


def _begin_and_end() -> list[Interval]:
    row = partial(Interval, "begin, end")
    return [
        row(
            "restoring shard",
            f"waits {_s(syncer_fill.SETTLE_SECONDS)} for more holders; initial weights if none by",
            _s(syncer_fill.FROM_THE_START_SECONDS),
            (
                "protocol.syncer_fill.SETTLE_SECONDS",
                "protocol.syncer_fill.FROM_THE_START_SECONDS",
            ),
        ),
        row(
            "another seed",
            "after so many bad copies of a fragment",
            str(syncer_fill.SEED_TRIES_MAX),
            ("protocol.syncer_fill.SEED_TRIES_MAX",),
        ),
        row(
            "finished shard stays",
            "for learners and observers to take the last copies",
            _s(syncer.LINGER_SECONDS),
            ("protocol.syncer.LINGER_SECONDS",),
        ),
        row(
            "coordinator stays",
            "for the other shards to hear of the end",
            _s(coordinator.FAREWELL_SECONDS),
            ("syncer.coordinator.FAREWELL_SECONDS",),
        ),
        row(
            "coordinator listens",
            "at the end, for learners to say which of their data are durable",
            _s(coordinator.LAST_REPORT_SECONDS),
            ("syncer.coordinator.LAST_REPORT_SECONDS",),
        ),
        row(
            "leases of data",
            "a learner that is gone for so long loses its parts to others",
            _s(leases.GRACE_SECONDS),
            ("protocol.leases.GRACE_SECONDS",),
        ),
        row(
            "learner's farewell",
            "waits for the closing sweep while no shard is there",
            _s(learner_process.FAREWELL_SECONDS),
            ("learner.learner.FAREWELL_SECONDS",),
        ),
        row(
            "state on a full disk",
            "the coordinator, and a shard before the run begins, try again after",
            _s(coordinator.RETRY_SECONDS),
            ("syncer.coordinator.RETRY_SECONDS",),
        ),
        row(
            "cut on demand",
            "who asked for one looks whether it is complete every",
            _s(cut_requests.ASK_SECONDS),
            ("syncer.cut_requests.ASK_SECONDS",),
        ),
    ]


def _recovery() -> list[Interval]:
    row = partial(Interval, "a learner comes and goes")
    return [
        row(
            "restored learner",
            "waits for the word of a shard that is out of reach",
            _s(recovery.SHARD_PATIENCE_SECONDS),
            ("protocol.recovery.SHARD_PATIENCE_SECONDS",),
        ),
        row(
            "donor's copy",
            "is waited for, and a little longer by who asks",
            _s(donating.OFFER_SECONDS),
            ("protocol.donating.OFFER_SECONDS",),
        ),
        row(
            "donor's next chunk",
            f"or another donor, {donating.DONORS_MAX} in all, then a fresh optimizer",
            _s(donating.STALL_SECONDS),
            ("protocol.donating.STALL_SECONDS", "protocol.donating.DONORS_MAX"),
        ),
        row(
            "relayed chunk",
            "is tried again",
            _s(donations.AGAIN_SECONDS),
            ("learner.donations.AGAIN_SECONDS",),
        ),
        row(
            "donor out of reach",
            "is relayed after so many attempts in a row",
            str(donations.DIRECT_TRIES_MAX),
            ("learner.donations.DIRECT_TRIES_MAX",),
        ),
        row(
            "last checkpoint",
            "is waited for when a learner goes",
            _s(learner_process.CHECKPOINT_SECONDS),
            ("learner.learner.CHECKPOINT_SECONDS",),
        ),
    ]


def _standbys(lease_seconds: float | None) -> list[Interval]:
    row, margin = partial(Interval, "standbys"), lease.MARGIN

    def of_it(share: float) -> str:
        return "no standbys" if lease_seconds is None else _s(share * lease_seconds)

    return [
        row(
            "claim renewed",
            f"{lease.RENEWALS} times in syncer.lease_seconds",
            of_it(1 / lease.RENEWALS),
            ("protocol.lease.RENEWALS",),
        ),
        row(
            "shard steps down",
            f"not renewed for a lease less {100 * margin:g} %, for clocks that differ",
            of_it(1 - margin),
            ("protocol.lease.MARGIN",),
        ),
        row(
            "standby takes over",
            f"a lease and {100 * margin:g} % after it; looked at {lease.LOOKS} times a lease, "
            f"and once in {_s(lease.LOOK_SECONDS_MAX)}",
            of_it(1 + margin),
            (
                "protocol.lease.MARGIN",
                "protocol.lease.LOOKS",
                "protocol.lease.LOOK_SECONDS_MAX",
            ),
        ),
    ]


def _processes() -> list[Interval]:
    row, delays = partial(Interval, "processes"), supervisor.RESTART_SECONDS
    return [
        row(
            "restart",
            f"{len(delays)} times in a row; {_s(supervisor.HEALTHY_SECONDS)} of life forgive",
            f"{_s(delays[0])} to {_s(delays[-1])}",
            ("launch.supervisor.RESTART_SECONDS", "launch.supervisor.HEALTHY_SECONDS"),
            "pause before an ended process starts again",
        ),
        row(
            "stop",
            f"from SIGTERM to SIGKILL; a shard waits {_s(http_server.STOP_SECONDS)} for peers",
            _s(supervisor.TERMINATE_SECONDS),
            ("launch.supervisor.TERMINATE_SECONDS", "transport.http_server.STOP_SECONDS"),
        ),
        row(
            "after the end",
            f"learners and shards; the evaluator {_s(local.EVALUATOR_SECONDS)}",
            _s(local.FAREWELL_SECONDS),
            ("launch.local.FAREWELL_SECONDS", "launch.local.EVALUATOR_SECONDS"),
        ),
        row(
            "evaluator gives up",
            "alone for so long; it is started again",
            _s(roles.EVALUATOR_GIVES_UP_SECONDS),
            ("launch.roles.EVALUATOR_GIVES_UP_SECONDS",),
        ),
        row(
            "tape to the disk",
            f"bytes moved are noted every {_s(background.STATS_SECONDS)} by learners, "
            f"{_s(shard.STATS_SECONDS)} by shards",
            _s(writer.FLUSH_SECONDS),
            (
                "observe.writer.FLUSH_SECONDS",
                "learner.background.STATS_SECONDS",
                "syncer.shard.STATS_SECONDS",
            ),
        ),
        row(
            "launcher looks",
            "at its processes every",
            _s(local.POLL_SECONDS),
            ("launch.local.POLL_SECONDS",),
        ),
    ]
