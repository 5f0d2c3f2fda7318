"""The table of intervals, windows, leases and deadlines, with the rule for each.

Users need not set these timeouts. The table contains no numbers but the names of the constants in
force, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from types import ModuleType
from typing import Any, NamedTuple

from decoupled_diloco.launch import local, roles, supervisor
from decoupled_diloco.learner import background, connections, ending
from decoupled_diloco.learner.option_groups import Timeouts
from decoupled_diloco.protocol import (
    clock,
    copies,
    first_copies,
    lease_machine,
    members,
    recovery,
    rounds,
    syncer_machine,
    syncer_state,
)
from decoupled_diloco.protocol.features import partitions, state_transfer
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import RoundOpened
from decoupled_diloco.run_model import RunModel
from decoupled_diloco.syncer import coordinator, flushing
from decoupled_diloco.tape import writer
from decoupled_diloco.transport import backoff, http_client, http_server, payload_store
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.units import format_duration

TABLE = """
liveness
ping | sent by each end of a control connection | {limits.ping_seconds}
connection lost | no byte from the peer, despite pings | {limits.lost_seconds}
learner's lease | renewed by each received byte | {syncer_state.LEASE_SECONDS}\
 | a silent learner must join again after it
reconnect | time left of the lease after its connection breaks | {syncer_state.RECONNECT_SECONDS}\
 | a learner may reconnect within this time
lateness correction | extends leases if a tick is over {members.LATENESS_SECONDS_MIN} late\
 | lateness + {syncer_state.RECONNECT_SECONDS}
redial | doubling, with full jitter | {backoff.FLOOR_SECONDS} to {backoff.BRISK_CAP_SECONDS};\
 after {backoff.BRISK_SECONDS} to {backoff.CAP_SECONDS}
learner gives up | learner.disconnect_seconds, without any shard | {give_up}
first join | limit for a learner that finds no syncer | {join}
coordinator first | delay before a shard that was lost with it is dialed\
 | {connections.CONFIRM_SECONDS}
id in use | interval of the check whether the first process with an id is alive; its lease decides\
 | {coordinator.LISTEN_SECONDS}
warnings | interval at which a learner repeats them | {connections.AGAIN_SECONDS}
round
grace window | {grace_rule} | {grace_window} | {grace_words}
ξ_step, ξ_quorum, … | averages, {clock.SMOOTHING:g} the newest; sync: merge, broadcast | {averages}
delivery window | {overlap} ξ_step | {delivery_window} | a late contribution joins the next round
after a failed merge | × 2 each time\
 | {rounds.MERGE_PAUSE_SECONDS[0]} to {rounds.MERGE_PAUSE_SECONDS[1]}
stalled training loop\
 | or {syncer_state.STANDS_STEPS:g} ξ_step, or {syncer_state.STANDS_OWN_STEPS:g} of its own steps\
 | {syncer_state.STANDS_SECONDS}
closing round | a learner that has not started to answer by then is left out\
 | {rounds.CLOSING_SECONDS}, {rounds.SWEEP_TRIES_MAX} tries
closing round, copy | time for a learner to fetch the version for its answer\
 | {rounds.COPY_SECONDS}
transfers
abandoned | no byte for max({limits.stall_seconds}, {http_client.STALL_RTTS} round trips)\
 | {limits.stall_seconds} or more
another copy | pause after {limits.copies_per_principal} of one version for one id\
 | {limits.copy_seconds}
abandoned by server | × that for a sender; 3 × for a reader\
 | {payload_store.SERVER_PATIENCE:g} × {limits.stall_seconds}
resumed | attempts in a row without progress | {limits.retries}
failed copy | pause before a learner requests it again | {copies.RETRY_SECONDS}
start and end
restoring shard\
 | waits {first_copies.SETTLE_SECONDS} for more holders; uses initial weights if none by\
 | {first_copies.FROM_THE_START_SECONDS}
finished shard stays | for learners and observers to fetch the last copies\
 | {syncer_machine.LINGER_SECONDS}
coordinator stays | for the other shards to receive the end | {coordinator.FAREWELL_SECONDS}
data leases | a learner that is absent for longer loses its partitions\
 | {partitions.GRACE_SECONDS}
learner's farewell | waits for the closing sweep while no shard is reachable\
 | {ending.FAREWELL_SECONDS}
state on a full disk | pause before coordinator or starting shard write it again\
 | {coordinator.RETRY_SECONDS}
joining and leaving
restored learner | waits for an unreachable shard\
 | {recovery.SHARD_PATIENCE_SECONDS}
shared state | wait for a state provider; a little longer by the receiver\
 | {state_transfer.OFFER_SECONDS}
shared state, chunk\
 | then another provider, {state_transfer.DONORS_MAX} in all, then a fresh optimizer\
 | {state_transfer.STALL_SECONDS}
last checkpoint | wait for it when a learner leaves | {ending.CHECKPOINT_SECONDS}
standbys
lease renewed | {lease_machine.RENEWALS} times in syncer.lease_seconds | {renewed}
shard steps down | without renewal for a lease less {margin}, a margin for clock rates\
 | {steps_down}
standby takes over | a lease plus {margin} later; checked {lease_machine.LOOKS} times per lease,\
 at least every {lease_machine.LOOK_SECONDS_MAX} | {takes_over}
processes
restart | doubling, then never again; reset after {supervisor.HEALTHY_SECONDS}\
 | {supervisor.RESTART_SECONDS[0]} to {supervisor.RESTART_SECONDS[4]}\
 | pause before an ended process starts again
stop | from SIGTERM to SIGKILL; a shard waits {http_server.STOP_SECONDS} for peers\
 | {supervisor.TERMINATE_SECONDS}
after the end | for learners and shards; {local.EVALUATOR_SECONDS} for the evaluator\
 | {local.FAREWELL_SECONDS}
evaluator gives up | without any shard; then it is restarted | {roles.EVALUATOR_GIVES_UP_SECONDS}
tape to the disk | transferred bytes every {background.STATS_SECONDS} by learners,\
 {flushing.STATS_SECONDS} by shards | {writer.FLUSH_SECONDS}
"""
"""Groups; in each, lines of ``name | rule | value``, with a fourth field if `ddiloco train` shows
the row at the start of a run."""

MODULES = (
    *(
        background,
        backoff,
        payload_store,
        coordinator,
        state_transfer,
        connections,
        clock,
        http_client,
        http_server,
    ),
    *(
        ending,
        copies,
        lease_machine,
        partitions,
        local,
        syncer_state,
        recovery,
        roles,
        flushing,
    ),
    *(supervisor, syncer_machine, first_copies, members, rounds, writer),
)
"""The modules with the constants of the table, which names them as `name_of` does."""


def name_of(module: ModuleType) -> str:
    """Return the last part of a module's name."""
    return module.__name__.rpartition(".")[2]


class Interval(NamedTuple):
    """One row of the table.

    Attributes:
        group: The heading above it.
        name: What the interval is.
        rule: A formula with its constants, or a description.
        value: The current value; before a run has measured it, a text.
        essential: A description for the start of a run; empty if the row is not shown there.
    """

    group: str
    name: str
    rule: str
    value: str
    essential: str = ""


def intervals(
    options: Options,
    *,
    give_up_seconds: float | None = None,
    lease_seconds: float | None = None,
    run: RunModel | None = None,
) -> list[Interval]:
    """Return the rows of the table.

    Args:
        options: The options of the protocol.
        give_up_seconds: `learner.disconnect_seconds`; `None`: never.
        lease_seconds: `syncer.lease_seconds`, if the shards have standbys.
        run: The run with the measured values. Default: no value is measured yet.
    """
    named: dict[str, Any] = {name_of(module): module for module in MODULES}
    named["limits"] = Limits()
    named["join"] = format_duration(Timeouts().join or 0.0)
    named["give_up"] = "never" if give_up_seconds is None else format_duration(give_up_seconds)
    named |= _of_run(options, _newest_opening(run)) | _of_standbys(lease_seconds)
    rows, group, words = [], "", _Durations()
    for line in TABLE.strip().splitlines():
        name, *rest = line.split(" | ")
        if rest:
            rows.append(Interval(group, name, *(words.vformat(each, (), named) for each in rest)))
        else:
            group = name
    return rows


class _Durations(Formatter):
    """Formats fields whose names contain "seconds" as durations with units."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        return format_duration(value) if "SECONDS" in field_name.upper() else value, first


def _of_standbys(lease_seconds: float | None) -> dict[str, str]:
    margin = lease_machine.MARGIN
    shares = {
        "renewed": 1 / lease_machine.RENEWALS,
        "steps_down": 1 - margin,
        "takes_over": 1 + margin,
    }
    values = dict.fromkeys(shares, "no standbys")
    if lease_seconds is not None:
        values = {name: format_duration(share * lease_seconds) for name, share in shares.items()}
    return values | {"margin": f"{100 * margin:g} %"}


def _of_run(options: Options, measured: RoundOpened | None) -> dict[str, Any]:
    """Return the fields that depend on options or on measured values."""
    margin, overlap, unknown = options.grace_margin, options.overlap, "not measured yet"
    found = dict.fromkeys(("delivery_window", "averages", "grace_window"), unknown)
    if measured is not None:
        averages = (
            *(measured.step_seconds, measured.quorum_average_seconds),
            *(measured.merge_average_seconds, measured.broadcast_average_seconds),
        )
        found["delivery_window"] = format_duration(overlap * measured.step_seconds)
        found["averages"] = ", ".join(map(format_duration, averages))
        found["grace_window"] = format_duration(measured.grace_seconds)
    found["grace_rule"] = f"{margin:g} ({overlap} ξ_step − ξ_quorum − ξ_sync)"
    found["grace_words"] = f"{100 * margin:.0f} % of the spare time, for more than a quorum"
    if not margin:
        found["grace_rule"], found["grace_window"] = "grace_margin = 0", "none"
        found["grace_words"] = "a round closes when it has its quorum"
    return found | {"overlap": overlap}


def _newest_opening(run: RunModel | None) -> RoundOpened | None:
    """Return the newest opening of an ordinary round, by a shard that has measured a step."""
    logs = run.shards.values() if run else ()
    rounds = [each for log in logs for each in (*log.rounds, *log.open.values())]
    opened = [each.opened for each in rounds if each.opened and not each.opened.closing]
    return next((each for each in reversed(opened) if each.step_seconds > 0), None)
