"""What records of earlier schemas are called today, and what their fields are.

Schema 1 had a word of its own for each peer that is heard, and for each that is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from decoupled_diloco.protocol.peers import COORDINATOR, shard_peer

Fields = dict[str, Any]


def _from(peer: Callable[[Fields], str]) -> Callable[[Fields], Fields]:
    """The same fields, with the peer's name in the place of what named it."""

    def fields(data: Fields) -> Fields:
        rest = {name: data[name] for name in data if name not in ("learner", "shard")}
        return {"peer": peer(data), **rest}

    return fields


_OF_COORDINATOR = _from(lambda data: COORDINATOR)
_OF_LEARNER = _from(lambda data: str(data["learner"]))
_OF_SHARD = _from(lambda data: shard_peer(int(data["shard"])))


def _greeted(data: Fields) -> Fields:
    hello = data["hello"]
    return {"peer": hello["learner"], "greeting": hello, "connection": data["connection"]}


def _joining(data: Fields) -> Fields:
    rest = {name: data[name] for name in data if name not in ("learner", "connection")}
    greeting = {"type": "Joining", **rest}
    return {"peer": data["learner"], "greeting": greeting, "connection": data["connection"]}


def _shard_hello(data: Fields) -> Fields:
    return {"peer": shard_peer(int(data["shard"])), "greeting": {"type": "ShardHello", **data}}


_EVENTS_OF_1: Mapping[str, tuple[str, Callable[[Fields], Fields]]] = {
    "Linked": ("Connected", _OF_SHARD),
    "Unlinked": ("Lost", _OF_SHARD),
    "Told": ("Received", _OF_SHARD),
    "CoordinatorLinked": ("Connected", _OF_COORDINATOR),
    "CoordinatorUnlinked": ("Lost", _OF_COORDINATOR),
    "CoordinatorTold": ("Received", _OF_COORDINATOR),
    "TermGranted": (
        "Received",
        lambda data: {"peer": COORDINATOR, "message": data["admitted"]},
    ),
    "Ordered": ("Received", _OF_COORDINATOR),
    "Greeted": ("Connected", _greeted),
    "Said": ("Received", _OF_LEARNER),
    "Disconnected": ("Lost", _OF_LEARNER),
    "JoinAsked": ("Connected", _joining),
    "MemberSaid": ("Received", _OF_LEARNER),
    "LearnerGone": ("Lost", _OF_LEARNER),
    "ShardGreeted": ("Connected", _shard_hello),
    "ShardGone": ("Lost", _OF_SHARD),
    "ShardSaid": ("Received", _OF_SHARD),
}
_EFFECTS_OF_1: Mapping[str, tuple[str, Callable[[Fields], Fields]]] = {
    "Send": ("Send", _OF_LEARNER),
    "Tell": ("Send", _OF_COORDINATOR),
    "Say": ("Send", _OF_SHARD),
    "TellCoordinator": ("Send", _OF_COORDINATOR),
    "Inform": ("Send", _OF_LEARNER),
    "Order": ("Send", _OF_SHARD),
}
_OF_1 = {"event": _EVENTS_OF_1, "effect": _EFFECTS_OF_1}

_NAMES_OF_1: Mapping[str, Mapping[str, str]] = {
    "event": {
        "BodySpoiled": "BodyCorrupt",
        "ClaimMade": "Acquired",
        "ClaimNotMade": "NotAcquired",
        "CopySpoiled": "CopyCorrupt",
        "CutHeard": "CheckpointHeard",
        "CutWanted": "CheckpointWanted",
        "CutWritten": "PartWritten",
        "Leaving": "HolderLeaves",
        "Recovered": "DiskRead",
        "ToldToGo": "DrainAsked",
    },
    "effect": {
        "BeginCut": "BeginCheckpoint",
        "Claim": "Acquire",
        "ForgetCuts": "ForgetCheckpoints",
        "KeepCut": "KeepCheckpoint",
        "TakeCut": "TakeCheckpoint",
    },
}
_VALUES_OF_1: Mapping[str, str] = {
    "CutKept": "PartSaved",
    "CutOrdered": "CheckpointOrdered",
    "CutPart": "CheckpointPart",
    "Dismissed": "DrainRefused",
    "DonorLost": "TransferLost",
    "DonorNamed": "TransferReady",
    "DonorWanted": "TransferWanted",
    "Leaving": "Draining",
    "NoDonor": "NoTransfer",
    "Standing": "NewestLease",
}
"""What is within a record: messages, and parts of them."""


def today(schema: int, kind: str, name: str, data: Fields) -> tuple[str, Fields]:
    """Type and fields of a record of a schema, as they are called today.

    Raises:
        KeyError: A field is missing.
    """
    if schema != 1 or kind not in _OF_1:
        return name, data
    data = {field: _value_today(value) for field, value in data.items()}
    new, fields = _OF_1[kind].get(name, (_NAMES_OF_1[kind].get(name, name), None))
    return new, data if fields is None else fields(data)


def _value_today(value: Any) -> Any:
    if isinstance(value, list):
        return [_value_today(each) for each in value]
    if not isinstance(value, dict):
        return value
    renamed = {field: _value_today(each) for field, each in value.items()}
    if "type" in renamed:
        renamed["type"] = _VALUES_OF_1.get(renamed["type"], renamed["type"])
    return renamed


def name_today(name: str) -> str:
    """What a type of any schema that a shard has told or ordered is called today."""
    for kind, words in _OF_1.items():
        if name in words:
            return words[name][0]
        if name in _NAMES_OF_1[kind] and name != "Recovered":
            return _NAMES_OF_1[kind][name]
    return name
