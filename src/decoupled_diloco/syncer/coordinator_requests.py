"""Answers requests for a checkpoint of the whole run, and to end it.

``/checkpoint`` begins one, or returns the one in progress. ``/checkpoint?number=N`` returns its
progress. Both require an auth token of the run, as the tapes do. A POST to ``/stop`` has the effect
of a budget that is reached now: a closing round of every fragment, then the result. Only shard 0
answers, because it hosts the coordinator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Protocol

from decoupled_diloco.config.parties import Parties
from decoupled_diloco.protocol.messages import is_shard_peer
from decoupled_diloco.syncer.run_checkpoints import CheckpointAnswer
from decoupled_diloco.transport.documents import Document, NoSuchDocumentError
from decoupled_diloco.transport.tokens import SHARDS, RequestRefusal

CHECKPOINT_PATH = "/checkpoint"


STOP_PATH = "/stop"

OPERATOR = "the operator"


class Coordinator(Protocol):
    """Begins checkpoints, reports their state, and ends the run."""

    def want_checkpoint(self) -> CheckpointAnswer:
        """Begin a checkpoint, unless one is in progress."""
        ...

    def checkpoint_answer(self, number: int) -> CheckpointAnswer:
        """Return the state of a checkpoint."""
        ...

    def want_stop(self, by: str) -> str:
        """End the run in order; return why it cannot be ended, or an empty text."""
        ...


def answer_checkpoint(coordinator: Coordinator | None, query: Mapping[str, str]) -> Document:
    """Answer a request; see `transport.documents`.

    Raises:
        NoSuchDocumentError: The coordinator is not in this process, or the number is not valid.
    """
    if coordinator is None:
        raise NoSuchDocumentError(
            "this shard does not host the coordinator: send the request to shard 0"
        )
    number = query.get("number")
    if number is None:
        found = coordinator.want_checkpoint()
    elif number.isascii() and number.isdigit() and len(number) < 17:
        found = coordinator.checkpoint_answer(int(number))
    else:
        raise NoSuchDocumentError(f"number={number[:40]!r} is not the number of a checkpoint")
    return Document(json.dumps(asdict(found)).encode())


def answer_stop(
    coordinator: Coordinator | None, names: tuple[str, ...], parties: Parties | None
) -> Document:
    """End the run if a peer may do so; see `transport.documents`.

    Args:
        coordinator: The coordinator, if this process hosts it.
        names: The names that the peer's token and certificate prove.
        parties: The parties of the run; `None`: it has none.

    Raises:
        RequestRefusal: The peer may not end the run, or the run has not begun.
    """
    by = stopping_party(names, parties)
    if coordinator is None:
        raise RequestRefusal(
            404, "this shard does not host the coordinator: send the request to shard 0"
        )
    problem = coordinator.want_stop(by)
    if problem:
        raise RequestRefusal(400, problem)
    return Document(json.dumps({"by": by}).encode())


def stopping_party(names: tuple[str, ...], parties: Parties | None) -> str:
    """Return which party ends the run by a request of this peer, or the operator.

    The operator has the token of the whole run, or that of a shard, or a shard's certificate. A
    certificate may also name hosts.

    Raises:
        RequestRefusal: The peer is another process, or its party may not do so.
    """
    if not names or any(name == SHARDS or is_shard_peer(name) for name in names):
        return OPERATOR
    found = {} if parties is None else {p.name: p for n in names if (p := parties.of_name(n))}
    if found and all(party.may_stop for party in found.values()):  # break: any-party-stops
        return ", ".join(found)
    allowed = [] if parties is None else [p.name for p in parties.parties if p.may_stop]
    others = f", and {', '.join(allowed)}" if allowed else ""
    whose = f"party {', '.join(map(repr, found))}" if found else repr(names[0])
    raise RequestRefusal(
        403,
        f"{whose} may not stop the run: only the operator (with the run's or a shard's token or "
        f"certificate){others}: ask them, or agree on may_stop = true in parties.toml for the next "
        "run",
    )
