"""The part of a shard's tape that a running syncer serves: the records that a `RunModel` reads.

The excerpt contains all rounds, ticks, members and notes. Unless ``detail`` is set, it contains
only enough step reports, holdings and pings for the current state. It omits nonces, by which a
learner proves its identity, and the state for a restart. Lines are searched, not parsed, so one
mebibyte takes about 10 ms.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable
from typing import get_args

from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import KeepCheckpoint
from decoupled_diloco.storage.files import NOT_JSON
from decoupled_diloco.tape.samples import CheckpointWritten, LinkState, PayloadsEnded, Sample

REPORT_SECONDS = 1.0
"""Minimum time between two step reports of a learner; the last one in a piece is always kept."""

_KIND = re.compile(rb'"kind":"(\w+)","type":"(\w+)"')
_MESSAGE = re.compile(rb'"message":\{"type":"(\w+)"')
_LEARNER = re.compile(rb'"data":\{"(?:learner|peer)":"([^"]*)"')
_LEARNERS = re.compile(rb'"learners":\[([^\]]*)\]')
_FRAGMENT = re.compile(rb'"fragment":(\d+)')
_AT = re.compile(rb'"at":([-+.\de]+)')
_NONCE = re.compile(rb'"nonce":"(?:[^"\\\n]|\\.)+"?')
"""Matches escaped quotes too, and matches up to the end of a torn line, so that no part leaks."""
_PRIVATE = ("nonce", "state")
_THINNED = ("StepReport", "Holding", "Heard")


_OTHER_SAMPLES = (CheckpointWritten, LinkState, PayloadsEnded)

_DECIDED = (
    messages.Accept,
    messages.Apply,
    messages.Broadcast,
    messages.ClockAdvanced,
    messages.DropSum,
    messages.EndTraining,
    messages.Evict,
    messages.Expect,
    messages.Fold,
    messages.FoldSum,
    messages.Hold,
    messages.Install,
    KeepCheckpoint,
    messages.Merge,
    messages.Note,
    messages.PrivacyAccounted,
    messages.Ready,
    messages.Recovered,
    messages.Relabel,
    messages.Release,
    messages.RoundFinished,
    messages.RoundOpened,
    messages.Scored,
    messages.RunOver,
    messages.Send,
    messages.Stop,
    messages.StopWanted,
    messages.Unexpect,
    messages.Began,
    messages.BodyArrived,
    messages.SumArrived,
    messages.SumCorrupt,
    messages.Connected,
    messages.Heard,
    messages.Lost,
    messages.Received,
    messages.Reported,
    messages.StepFinished,
)

LOOKED_AT = frozenset(
    cls.__name__ for cls in (*_DECIDED, *(c for c in get_args(Sample) if c not in _OTHER_SAMPLES))
)

MESSAGES = {
    "Send": frozenset({"Welcome", "Shifted", "Revision"}),
    "Received": frozenset(
        {"StepReport", "Holding", "Ahead", "Leave", "ShardAdmitted", "Begin", "EndOrdered"}
    ),
    "Broadcast": frozenset({"Shifted", "Ending", "Finished"}),
}
"""The messages of high-volume kinds that belong to the excerpt."""


PROGRESS = frozenset(
    {
        *("torn", "start", "ShardAdmitted", "Begin", "EndOrdered", "Finished", "Stop", "TookOver"),
        *("ProcessStarted", "ProcessEnded", "EndRequested", "WeightsSaved", "WentBack"),
    }
)
"""Which lines tell the phase of a run, besides ticks and pings."""


def progress(piece: bytes) -> bytes:
    """Return the lines of a piece of a tape that give a run's phase and step, a few of many."""
    kept, last = [], dict[Hashable, bytes]()
    for line in piece.splitlines(keepends=True):
        name = _name(line)
        if name in PROGRESS:
            kept += [*last.values(), line]
            last.clear()
        elif name in ("ClockAdvanced", "Heard"):
            last.pop(name, None)  # the order of the lines stays
            last[name] = line
    return b"".join([*kept, *last.values()])


def excerpt(piece: bytes, *, detail: bool) -> bytes:
    """Return the lines of a tape piece that belong to the excerpt.

    Args:
        piece: Whole lines of a tape.
        detail: Keep every step report and holding.
    """
    lines = piece.splitlines(keepends=True)
    keys = [_key(line) for line in lines]
    last = {topic: number for number, key in enumerate(keys) for topic in _topics(key)}
    reported = dict[Hashable, float]()
    kept = []
    for number, (line, key) in enumerate(zip(lines, keys, strict=True)):
        if key is None:
            continue
        is_last = any(last[topic] == number for topic in _topics(key))
        if not detail and key[0] in _THINNED and not is_last:
            at = _number(_AT, line)
            if key[0] != "StepReport" or at < reported.get(key, -math.inf) + REPORT_SECONDS:
                continue
            reported[key] = at
        kept.append(_public(line))
    return b"".join(kept)


def _key(line: bytes) -> tuple[Hashable, ...] | None:
    """Return the subject of a line; ``None`` if no view shows it. Torn lines are kept."""
    name = _name(line)
    if name is None:
        return None
    if name in ("torn", "start"):
        return (name, line)
    if name == "Heard":
        learners = _LEARNERS.search(line)
        return (name, *(learners[1].split(b",") if learners else ()))
    learner = _LEARNER.search(line)
    process = learner[1] if learner else b""
    if name == "Holding":
        fragment = _FRAGMENT.search(line)
        return (name, process, fragment[1] if fragment else b"")
    return (name, process)


def _name(line: bytes) -> str | None:
    """Return the type of a line's record, or of the message in it; ``None`` if no view shows it."""
    kind = _KIND.search(line)
    if kind is None:
        return "torn"
    name = kind[2].decode()
    if kind[1] == b"start":
        return "start"
    if name not in LOOKED_AT:
        return None
    if name in MESSAGES:
        message = _MESSAGE.search(line)
        name = "" if message is None else message[1].decode()
        return name if name in MESSAGES[kind[2].decode()] else None
    return name


def _topics(key: tuple[Hashable, ...] | None) -> list[Hashable]:
    """Return the subjects of a line, of which only the newest line is needed.

    A ping has one subject per learner in it.
    """
    if key is None:
        return []
    return [("Heard", name) for name in key[1:]] if key[0] == "Heard" else [key]


def _number(pattern: re.Pattern[bytes], line: bytes) -> float:
    found = pattern.search(line)
    try:
        return float(found[1]) if found else 0.0
    except ValueError:
        return 0.0


def _public(line: bytes) -> bytes:
    if b'"nonce"' in line:
        line = _NONCE.sub(b'"nonce":""', line)
    if b'"kind":"start"' not in line:
        return line
    try:
        record = json.loads(line)
        data = record["data"]
        header = data.get("header") or {}
        data["header"] = {key: header[key] for key in header if key not in _PRIVATE}
        data.pop("pid", None)
    except NOT_JSON:
        return b""
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
