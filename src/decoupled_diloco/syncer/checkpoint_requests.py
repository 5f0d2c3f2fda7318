"""What a running syncer answers who asks for a checkpoint of the whole run.

``/checkpoint`` begins one, or names the one under way; ``/checkpoint?number=N`` says how far it is.
Both require a token of the run, as the tapes do. Only shard 0 answers, where the coordinator is.
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
    """Where checkpoints begin."""

    def want_checkpoint(self) -> CheckpointAnswer:
        """Begins a checkpoint; one that is under way will do."""
        ...

    def checkpoint_answer(self, number: int) -> CheckpointAnswer:
        """What has become of a checkpoint."""
        ...


def answer(coordinator: Coordinator | None, query: Mapping[str, str]) -> Document:
    """Answers a request; see `transport.documents`.

    Raises:
        NoSuchDocumentError: The coordinator is not in this process, or the number is none.
    """
    if coordinator is None:
        raise NoSuchDocumentError("the coordinator is not here: ask shard 0")
    number = query.get("number")
    if number is None:
        found = coordinator.want_checkpoint()
    elif number.isascii() and number.isdigit() and len(number) < 17:
        found = coordinator.checkpoint_answer(int(number))
    else:
        raise NoSuchDocumentError(f"number={number[:40]!r} is not the number of a checkpoint")
    return Document(json.dumps(asdict(found)).encode())
