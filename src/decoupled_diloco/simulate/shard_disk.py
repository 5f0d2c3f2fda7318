"""What a virtual shard's processes share: the newest versions, kept by claim.

As on a real disk (`decoupled_diloco.syncer.durable`) each claim has files of its own: what a
process still writes that was replaced falls into none of its successor's. They are taken over once
they are whole.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from decoupled_diloco.protocol.events import DurableCopy, ShardMemory


@dataclass(frozen=True, slots=True)
class Kept:
    """A fragment as the disk has it."""

    copy: DurableCopy
    content: Any


@dataclass(slots=True)
class Files:
    """What was written by one claim."""

    fragments: dict[int, Kept] = field(default_factory=dict)
    memory: ShardMemory | None = None


class VirtualShardDisk:
    """The durable folder of one shard.

    Args:
        owned: The shard's fragments.
    """

    def __init__(self, owned: Collection[int]) -> None:
        self._owned = owned
        self._claims: dict[int, Files] = {}

    def __bool__(self) -> bool:
        return any(files.fragments for files in self._claims.values())

    def keep(self, claim: int, kept: Kept, memory: ShardMemory) -> None:
        """Writes a fragment; older claims' files go when this one's are whole."""
        files = self._claims.setdefault(claim, Files())
        files.fragments[kept.copy.fragment], files.memory = kept, memory
        if self._is_whole(files):
            for older in [number for number in self._claims if number < claim]:
                del self._claims[older]

    def read(self) -> Files:
        """The newest claim's files that are whole, else the newest there are."""
        ordered = [self._claims[number] for number in sorted(self._claims, reverse=True)]
        whole = [files for files in ordered if self._is_whole(files)]
        return (whole or ordered or [Files()])[0]

    def clear(self) -> None:
        """Everything on it is lost."""
        self._claims.clear()

    def _is_whole(self, files: Files) -> bool:
        return len(files.fragments) == len(self._owned)
