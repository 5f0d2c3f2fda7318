"""The part of a shard's tape that others may want: what a `RunModel` looks at, thinned.

Whole rounds, ticks, members and notes; of step reports, of what learners say they hold, and of
pings only enough for the present state, unless ``detail`` is asked for. Nonces, by which a learner
proves who it is, and what a restart needs are left out. Lines are looked at, not parsed, so
that a mebibyte takes about a hundredth of a second.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable

from decoupled_diloco.observe.looked_at import LOOKED_AT, MESSAGES
from decoupled_diloco.storage.files import NOT_JSON

REPORT_SECONDS = 1.0
"""One step report of a learner is kept for each such time, and the last one of a piece."""

_KIND = re.compile(rb'"kind":"(\w+)","type":"(\w+)"')
_MESSAGE = re.compile(rb'"message":\{"type":"(\w+)"')
_LEARNER = re.compile(rb'"data":\{"(?:learner|peer)":"([^"]*)"')
_LEARNERS = re.compile(rb'"learners":\[([^\]]*)\]')
_FRAGMENT = re.compile(rb'"fragment":(\d+)')
_AT = re.compile(rb'"at":([-+.\de]+)')
_NONCE = re.compile(rb'"nonce":"(?:[^"\\\n]|\\.)+"?')
"""With quotes in it, and to the end of a line that is torn."""
_PRIVATE = ("nonce", "state")
_THINNED = ("StepReport", "Holding", "Heard")


def excerpt(piece: bytes, *, detail: bool) -> bytes:
    """Of whole lines of a tape those worth sending; ``detail``: with every report and holding."""
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
    """What a line is about; ``None`` for one that no view shows. Torn lines pass."""
    kind = _KIND.search(line)
    if kind is None:
        return ("torn", line)
    name = kind[2].decode()
    if kind[1] == b"start":
        return ("start", line)
    if name not in LOOKED_AT:
        return None
    if name in MESSAGES:
        message = _MESSAGE.search(line)
        if message is None or message[1].decode() not in MESSAGES[name]:
            return None
        name = message[1].decode()
    if name == "Heard":
        learners = _LEARNERS.search(line)
        return (name, *(learners[1].split(b",") if learners else ()))
    learner = _LEARNER.search(line)
    who = learner[1] if learner else b""
    if name == "Holding":
        fragment = _FRAGMENT.search(line)
        return (name, who, fragment[1] if fragment else b"")
    return (name, who)


def _topics(key: tuple[Hashable, ...] | None) -> list[Hashable]:
    """What of a line's must be the newest to be worth sending: of pings, one of any process."""
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
