"""What a learner's machine remembers of transfers: as the one that takes, and as one that gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decoupled_diloco.protocol.transfer.messages import TransferReady
from decoupled_diloco.protocol.versions import Holding


@dataclass(slots=True)
class Search:
    """The search for a donor; over when ``phase`` is ``found`` or ``given up``.

    ``until``: how long the present phase may last; ``relayed``: the copy comes by a shard.
    """

    phase: Literal["waiting", "asking", "copying", "found", "given up"] = "waiting"
    attempt: int = 0
    until: float | None = None
    named: TransferReady | None = None
    relayed: bool = False
    refused: tuple[str, ...] = ()


@dataclass(slots=True)
class Giving:
    """A learner that this one's state is for, once the versions are seen; ``until``: or never."""

    attempt: int
    seen: tuple[Holding, ...]
    until: float
    copied: bool = False
