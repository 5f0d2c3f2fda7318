"""Judge the measurements of a syncer: pure functions from measurements to findings."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import difference_of_work, read_public
from decoupled_diloco.config.plugins import MissingCodecError
from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.launch.doctor.machine import Finding, error, ok, warning
from decoupled_diloco.launch.doctor.machine_facts import ModelFacts
from decoupled_diloco.merge import Layout
from decoupled_diloco.transport.http_server import CERTIFICATE_LEFT
from decoupled_diloco.transport.reachability import LookTrouble, Seen
from decoupled_diloco.transport.tls import DAY_SECONDS, RENEW, TELL_SECONDS
from decoupled_diloco.units import format_bytes, format_duration

CLOCK_SECONDS_MAX = 2.0
"""Largest offset that counts as equal: the date in the response header has whole seconds."""

JITTER_SECONDS_MAX = 0.05

ADVICE = {
    "name": "correct the address, or give the IP address instead of the name",
    "refused": "start the syncer there (ddiloco syncer RUN.toml), or correct the port; for access "
    'from other machines, set syncer.host="0.0.0.0"',
    "unreachable": "check the network, or the VPN, of both machines",
    "timeout": "a firewall may drop packets: open the shards' ports there, or tunnel them (ssh -L)",
    "silent": "the process may be stopped, or may not be a syncer: read its log",
    "tls": "write http:// for a syncer without TLS; otherwise pass --ca-cert, and if it requires a "
    "certificate --cert and --key (ddiloco certs creates them)",
    "stranger": "another program listens there: correct the address (the syncer prints its own)",
    "token": "pass the run's secret with --auth-token-file: `ddiloco syncer` prints its path",
    "busy": "another process is measuring: try again later",
    "older": "install the same version on both machines",
    "broken": "look for a proxy or firewall in between that ends connections or blocks WebSockets",
}
"""The fix for each kind of failure."""

CHECKS = {
    "name": "reach",
    "connect": "reach",
    "run": "token",
    "up": "bandwidth",
    "down": "bandwidth",
}
"""The check under which a failed step is reported. Other steps use their own names."""


def judge_seen(seen: Seen, version: str) -> Iterator[Finding]:
    """Yield the findings that do not need the run's file."""
    if seen.connect_seconds is not None:
        took = format_duration(seen.connect_seconds)
        yield ok("reach", f"{seen.address} ({seen.ip}), connected in {took}")
    if seen.health is not None:
        yield judge_health(seen.health, version)
        left = seen.health.get(CERTIFICATE_LEFT)
        if isinstance(left, int | float):
            yield judge_certificate(left)
    if seen.clock_ahead_seconds is not None:
        yield judge_offset(seen.clock_ahead_seconds)
    if seen.round_trips:
        yield judge_round_trips(seen.round_trips)
    if seen.run is not None:
        kind = f"token of {seen.principal}" if seen.principal else "run's shared secret"
        yield ok("token", f"accepted: it is the {kind}")
    if seen.upgraded:
        yield ok("control", "a WebSocket can be opened")
    if seen.trouble is not None:
        yield judge_trouble(seen.trouble, seen.address)


def judge_trouble(trouble: LookTrouble, address: str) -> Finding:
    """Report the failure that ended the checks of a syncer."""
    check = CHECKS.get(trouble.step, trouble.step)
    if trouble.cause == "older":
        text = f"{address} does not support this check: {trouble.text}"
        return warning("version", text, ADVICE["older"])
    if trouble.cause == "busy":
        return warning(check, f"not measured: {address}: {trouble.text}", ADVICE["busy"])
    return error(check, f"{address}: {trouble.text}", ADVICE[trouble.cause])


def judge_health(health: Mapping[str, Any], version: str) -> Finding:
    """Judge the answer of a shard's `/healthz`."""
    learners = health.get("learners")
    count = len(learners) if isinstance(learners, list) else 0
    text = (
        f"shard {health.get('shard')} of {str(health.get('run'))[:60]!r} is "
        f"{str(health.get('phase'))[:20]} at step {health.get('clock')}, learners: {count}"
    )
    theirs = str(health.get("version"))[:20]
    if health.get("phase") == "finished":
        return warning("health", text, "this run has ended: start a new one")
    if theirs != version:
        text += f"; version {theirs}, here {version}"
        return warning("health", text, ADVICE["older"])
    return ok("health", f"{text}; version {theirs}")


def judge_certificate(left_seconds: float) -> Finding:
    """Judge the remaining lifetime of the syncer's certificate."""
    days = left_seconds / DAY_SECONDS
    if left_seconds > TELL_SECONDS:
        return ok("certificate", f"the syncer's certificate is valid for {days:.0f} more days")
    if left_seconds > 0:
        text = f"the syncer's certificate expires in {days:.1f} days"
        return warning("certificate", text, f"{RENEW}; it is loaded without a restart")
    return error("certificate", "the syncer's certificate has expired", RENEW)


def judge_offset(seconds: float) -> Finding:
    """Judge how far the syncer's wall clock is ahead of this machine's."""
    if abs(seconds) <= CLOCK_SECONDS_MAX:
        return ok("wall clock", "the syncer's is equal within two seconds")
    ahead = "ahead of" if seconds > 0 else "behind"
    return warning(
        "wall clock",
        f"the syncer's is {format_duration(abs(seconds))} {ahead} this machine's",
        "let NTP set both: tapes are ordered by wall time; training does not depend on it",
    )


def judge_round_trips(seconds: tuple[float, ...]) -> Finding:
    """Judge median and jitter of requests on an open connection."""
    median, worst = statistics.median(seconds), max(seconds)
    text = f"median {format_duration(median)}, longest {format_duration(worst)} of {len(seconds)}"
    if worst - median > max(JITTER_SECONDS_MAX, 4 * median):
        return warning(
            "round trip",
            f"{text}: uneven",
            "the syncer or the link is busy; raise sync.overlap_steps if rounds are late",
        )
    return ok("round trip", text)


def judge_rates(seen: Seen, model: ModelFacts | None, overlap: int) -> Iterator[Finding]:
    """Report the rates of the data plane, and the step time that hides a fragment's transfer.

    Args:
        seen: The measurements.
        model: Sizes of the model, if known.
        overlap: `sync.overlap_steps`.
    """
    up, down = seen.up_bytes_per_second, seen.down_bytes_per_second
    if up is None or down is None:
        return
    text = f"up {_rate(up)}, down {_rate(down)}"
    if model is None:
        yield ok("bandwidth", text)
        return
    seconds = model.fragment_bytes * (1 / up + 1 / down) + 2 * min(seen.round_trips, default=0.0)
    text += (
        f": a fragment ({format_bytes(model.fragment_bytes)}) takes {format_duration(seconds)} to "
        "the syncer and back"
    )
    if overlap:
        text += f", hidden behind steps of {format_duration(seconds / overlap)} or longer"
    yield ok("bandwidth", text)


def _rate(bytes_per_second: float) -> str:
    megabits = 8e-6 * bytes_per_second
    return f"{megabits:.0f} Mbit/s" if megabits >= 10 else f"{megabits:.2g} Mbit/s"


def judge_shards(dialled: str, troubles: Mapping[str, LookTrouble | None]) -> Finding:
    """Judge whether all shards can be reached.

    Args:
        dialled: The address that the user has given.
        troubles: For each shard's address the failure, if any.
    """
    bad = {address: trouble for address, trouble in troubles.items() if trouble is not None}
    if not bad:
        count = len(troubles)
        return ok("shards", f"all {count} can be reached" if count > 1 else "the run has one")
    text = "; ".join(f"{address}: {trouble.text}" for address, trouble in bad.items())
    return error(
        "shards",
        f"{len(bad)} of {len(troubles)} cannot be reached from here ({dialled} can): {text}",
        "open their ports too; if the addresses are wrong, set syncer.addresses",
    )


def judge_run(
    run: Mapping[str, Any], config: RunConfig, model: ModelFacts | None
) -> Iterator[Finding]:
    """Judge, without joining, whether the run would accept a learner with this file."""
    try:
        theirs = read_public(json.dumps(run.get("settings")))
    except MissingCodecError as problem:
        yield error("settings", str(problem), "name the codec in this file as in the syncer's file")
        return
    except ProtocolError as problem:
        yield error("settings", str(problem), ADVICE["older"])
        return
    yield judge_settings(config, theirs)
    if model is not None:
        yield judge_layout(model.layout.of_model, run.get("layout"))


def judge_settings(ours: RunConfig, theirs: RunConfig) -> Finding:
    """Compare the settings that `ddiloco learner` compares before it trains."""
    advice = (
        "give `ddiloco learner` the syncer's own file; your own script needs no file: leave it "
        "out here too"
    )
    difference = difference_of_work(ours, theirs)
    if difference:
        return error("settings", f"the file differs from the syncer's: {difference}", advice)
    return ok("settings", "learners, data and workload are the same as the syncer's")


def judge_layout(ours: Layout, theirs: object) -> Finding:
    """Compare the layout of the file's model with the run's layout, a JSON value."""
    if theirs is None:
        return ok("layout", "the run has none yet: it takes the first learner's model")
    try:
        difference = Layout.from_json(theirs).describe_difference(ours)
    except ProtocolError as problem:
        return error("layout", f"the syncer's cannot be read: {problem}", ADVICE["older"])
    if difference is not None:
        return error(
            "layout",
            f"the model differs from the run's (ours: the run's; theirs: the file's): {difference}",
            "build the same model in every learner",
        )
    return ok("layout", f"the model is the same as the run's, fingerprint {ours.fingerprint[:12]}")
