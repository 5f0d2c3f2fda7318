"""Answers requests for a checkpoint of the whole run.

``/checkpoint`` begins one, or returns the one in progress. ``/checkpoint?number=N`` returns its
progress. Both require an auth token of the run, as the tapes do. Only shard 0 answers, because it
hosts the coordinator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Protocol

from decoupled_diloco.syncer.run_checkpoints import CheckpointAnswer
from decoupled_diloco.transport.documents import Document, NoSuchDocumentError

CHECKPOINT_PATH = "/checkpoint"


class Coordinator(Protocol):
    """Begins checkpoints and reports their state."""

    def want_checkpoint(self) -> CheckpointAnswer:
        """Begin a checkpoint, unless one is in progress."""
        ...

    def checkpoint_answer(self, number: int) -> CheckpointAnswer:
        """Return the state of a checkpoint."""
        ...


def answer(coordinator: Coordinator | None, query: Mapping[str, str]) -> Document:
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
