"""The intervals, windows, leases and deadlines in force, and what each is derived from.

There is no timeout for a user to set; this is the table that says so. A number is not written here
but named, by the constant that is in force, so that the two cannot differ.
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
who is live
ping | each end of a control connection | {limits.ping_seconds}
connection lost | silent, although pinged | {limits.lost_seconds}
learner's lease | any byte renews it | {syncer_state.LEASE_SECONDS}\
 | silent for longer, a learner has to join again
reconnect | what a broken connection leaves of it | {syncer_state.RECONNECT_SECONDS}\
 | a broken connection may come back within it
lateness correction | of leases, if a tick is over {members.LATENESS_SECONDS_MIN} late\
 | lateness + {syncer_state.RECONNECT_SECONDS}
redial | doubling, with full jitter | {backoff.FLOOR_SECONDS} to {backoff.BRISK_CAP_SECONDS};\
 after {backoff.BRISK_SECONDS} to {backoff.CAP_SECONDS}
learner gives up | learner.disconnect_seconds, without any shard | {give_up}
first join | of a learner that finds no syncer | {join}
coordinator first | before a shard that was lost together with it is dialled\
 | {connections.CONFIRM_SECONDS}
id in use | a second process: the first is alive if heard, gone after its lease; looked at every\
 | {coordinator.LISTEN_SECONDS}
trouble is told | by a learner, while it lasts, every | {connections.AGAIN_SECONDS}
a round
grace window | {grace_rule} | {grace_window} | {grace_words}
ξ_step, ξ_quorum, … | averages, {clock.SMOOTHING:g} the newest; sync: merge, broadcast | {averages}
delivery window | {overlap} ξ_step | {delivery_window} | a round merges; what is late joins the next
after a failed merge | × 2 each time\
 | {rounds.MERGE_PAUSE_SECONDS[0]} to {rounds.MERGE_PAUSE_SECONDS[1]}
loop that stands still\
 | or {syncer_state.STANDS_STEPS:g} ξ_step, {syncer_state.STANDS_OWN_STEPS:g} of its own\
 | {syncer_state.STANDS_SECONDS}
closing round | a learner that has not begun to answer by then is left out\
 | {rounds.CLOSING_SECONDS}, {rounds.SWEEP_TRIES_MAX} tries
closing round, copy | a learner may fetch the version that it answers from\
 | {rounds.COPY_SECONDS}
transfers
given up | no byte for max({limits.stall_seconds}, {http_client.STALL_RTTS} round trips)\
 | {limits.stall_seconds} or more
one more copy | after {limits.copies_per_principal} of one version by one id | {limits.copy_seconds}
server's patience | × of that for a sender; a reader gets 3 ×\
 | {payload_store.SERVER_PATIENCE:g} × {limits.stall_seconds}
resumed | attempts in a row without progress | {limits.retries}
copy not had | a learner asks again after | {copies.RETRY_SECONDS}
begin, end
restoring shard | waits {first_copies.SETTLE_SECONDS} for more holders; initial weights if none by\
 | {first_copies.FROM_THE_START_SECONDS}
finished shard stays | for learners and observers to take the last copies\
 | {syncer_machine.LINGER_SECONDS}
coordinator stays | for the other shards to hear of the end | {coordinator.FAREWELL_SECONDS}
leases of data | a learner that is gone for so long loses its parts to others\
 | {partitions.GRACE_SECONDS}
learner's farewell | waits for the closing sweep while no shard is there\
 | {ending.FAREWELL_SECONDS}
state on a full disk | the coordinator, and a shard before the run begins, try again after\
 | {coordinator.RETRY_SECONDS}
a learner comes and goes
restored learner | waits for the word of a shard that is out of reach\
 | {recovery.SHARD_PATIENCE_SECONDS}
donor's copy | is waited for, and a little longer by the learner that asks\
 | {state_transfer.OFFER_SECONDS}
donor's next chunk | or another donor, {state_transfer.DONORS_MAX} in all, then a fresh optimizer\
 | {state_transfer.STALL_SECONDS}
last checkpoint | is waited for when a learner goes | {ending.CHECKPOINT_SECONDS}
standbys
claim renewed | {lease_machine.RENEWALS} times in syncer.lease_seconds | {renewed}
shard steps down | not renewed for a lease less {margin}, for clocks that differ\
 | {steps_down}
standby takes over | a lease and {margin} after it; looked at {lease_machine.LOOKS} times in one,\
 and once in {lease_machine.LOOK_SECONDS_MAX} | {takes_over}
processes
restart | doubling, then never again; {supervisor.HEALTHY_SECONDS} of life forgive\
 | {supervisor.RESTART_SECONDS[0]} to {supervisor.RESTART_SECONDS[4]}\
 | pause before an ended process starts again
stop | from SIGTERM to SIGKILL; a shard waits {http_server.STOP_SECONDS} for peers\
 | {supervisor.TERMINATE_SECONDS}
after the end | learners and shards; the evaluator {local.EVALUATOR_SECONDS}\
 | {local.FAREWELL_SECONDS}
evaluator gives up | alone for so long; it is started again | {roles.EVALUATOR_GIVES_UP_SECONDS}
tape to the disk | bytes moved are noted every {background.STATS_SECONDS} by learners,\
 {flushing.STATS_SECONDS} by shards | {writer.FLUSH_SECONDS}
"""
"""Groups; in each, lines of ``name | rule | value``, and a fourth part for the start of a run."""

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
"""Where the constants of the table are in force; the table calls them as `name_of` does."""


def name_of(module: ModuleType) -> str:
    """The last part of a module's name."""
    return module.__name__.rpartition(".")[2]


class Interval(NamedTuple):
    """One row."""

    group: str  # what it belongs to
    name: str  # what it is
    rule: str  # what it is derived from: a formula with its constants, or a constant
    value: str  # what it is now; where only a run can tell, what is known before
    # What it means in plain words, for the start of a run; empty: not shown there.
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
        give_up_seconds: The learners' own setting: after so long alone they end.
        lease_seconds: A shard's setting, if the shards have standbys.
        run: What is measured; default: nothing yet.
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
    """Writes what is named as seconds in the units of people."""

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
    told = dict.fromkeys(shares, "no standbys")
    if lease_seconds is not None:
        told = {name: format_duration(share * lease_seconds) for name, share in shares.items()}
    return told | {"margin": f"{100 * margin:g} %"}


def _of_run(options: Options, measured: RoundOpened | None) -> dict[str, Any]:
    """What settings decide, and what a run has measured."""
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
        found["grace_words"] = "a round is closed once its quorum is there"
    return found | {"overlap": overlap}


def _newest_opening(run: RunModel | None) -> RoundOpened | None:
    """The grace window of an ordinary round, at a shard that has measured a step."""
    logs = run.shards.values() if run else ()
    rounds = [each for log in logs for each in (*log.rounds, *log.open.values())]
    opened = [each.opened for each in rounds if each.opened and not each.opened.closing]
    return next((each for each in reversed(opened) if each.step_seconds > 0), None)
