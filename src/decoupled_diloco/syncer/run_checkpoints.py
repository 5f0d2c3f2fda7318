"""Checkpoints of the whole run on disk: the shards' parts, and the manifest of a complete one.

```
RUN/checkpoints/000012/shard-0.safetensors   shard-1.safetensors   manifest.json
```

A shard's part is a checkpoint as in `durable`. Learners keep theirs in their own folders. The
manifest is written last, whole or not at all: a checkpoint without one is not complete. It names
every part with its digest, who is missing, and holds the coordinator's own part.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from decoupled_diloco.errors import StorageError
from decoupled_diloco.protocol.features.checkpoint import OpenCheckpoint
from decoupled_diloco.protocol.messages import CheckpointPart, KeepCheckpoint
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON, names_in, write_text
from decoupled_diloco.syncer.durable import part_digest
from decoupled_diloco.syncer.result import SHARES

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 2


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        number: Of the checkpoint.
        folder: Where the shards' parts are.
        shards: Their parts.
        learners: Those of the learners, in their own checkpoint folders.
        missing: Learners that were there and gave none.
        coordinator: What the coordinator's file held.
    """

    number: int
    folder: Path
    shards: tuple[CheckpointPart, ...]
    learners: tuple[CheckpointPart, ...]
    missing: tuple[str, ...]
    coordinator: dict[str, Any]

    def part(self, who: str) -> Path:
        """The file of a shard's part."""
        return self.folder / f"{who}.safetensors"

    def check(self) -> None:
        """Reads the shards' parts, every byte.

        Raises:
            StorageError: One is missing, torn, corrupt or another one.
        """
        for part in self.shards:
            path = self.part(part.who)
            if part_digest(path) != part.digest:
                raise StorageError(
                    f"{path} is not the part that belongs to checkpoint {self.number}"
                )


State = Literal["refused", "open", "complete", "given up"]


@dataclass(frozen=True)
class CheckpointAnswer:
    """What has become of a checkpoint.

    Attributes:
        state: ``refused``: none can begin now.
        number: Of the checkpoint; 0: there is none.
        words: Why it was refused or given up, or what it waits for.
        folder: Where the shards' parts are, at the syncer.
        nbytes: Of all parts.
        missing: Learners that were there and gave no part.
    """

    state: State
    number: int
    words: str = ""
    folder: str = ""
    nbytes: int = 0
    missing: tuple[str, ...] = ()

    @classmethod
    def kept(cls, run: Path, checkpoint: KeepCheckpoint) -> CheckpointAnswer:
        """Of a checkpoint that is complete, its manifest written."""
        nbytes = sum(part.nbytes for part in (*checkpoint.shards, *checkpoint.learners))
        folder = str(checkpoint_folder(run, checkpoint.number).absolute())
        return cls(
            "complete", checkpoint.number, folder=folder, nbytes=nbytes, missing=checkpoint.missing
        )

    @classmethod
    def of_open(cls, checkpoint: OpenCheckpoint) -> CheckpointAnswer:
        """Of a checkpoint that waits for parts."""
        awaited = [f"shard-{shard}" for shard in sorted(checkpoint.shards_awaited)]
        awaited += sorted(checkpoint.learners_awaited)
        words = f"the parts of {', '.join(awaited)} are still to come"
        return cls("open", checkpoint.number, words, missing=tuple(sorted(checkpoint.missing)))


def checkpoint_folder(run: Path, number: int) -> Path:
    """Where the parts of a checkpoint are in a run folder."""
    return run / SHARES / f"{number:06d}"


def part_file(run: Path, number: int, shard: int) -> Path:
    """The file of one shard's part."""
    return checkpoint_folder(run, number) / f"shard-{shard}.safetensors"


def write_manifest(run: Path, checkpoint: KeepCheckpoint, coordinator: dict[str, Any]) -> None:
    """Makes a checkpoint complete.

    Raises:
        StorageError: It cannot be written; the checkpoint is not complete.
    """
    document = {
        "format": FORMAT,
        "checkpoint": checkpoint.number,
        "shards": [asdict(part) for part in checkpoint.shards],
        "learners": [asdict(part) for part in checkpoint.learners],
        "missing": list(checkpoint.missing),
        "coordinator": coordinator,
    }
    write_text(checkpoint_folder(run, checkpoint.number) / MANIFEST, json.dumps(document, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """The manifest in the folder of a checkpoint.

    Raises:
        StorageError: The checkpoint is not complete, or its manifest cannot be read.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(runtime().disk.read(path))
        if document["format"] != FORMAT:
            raise StorageError(
                f"{path} has format {document['format']}, but this version reads {FORMAT} only: "
                "continue with the decoupled-diloco that wrote it"
            )
        return Manifest(
            int(document["checkpoint"]),
            folder,
            tuple(CheckpointPart(**part) for part in document["shards"]),
            tuple(CheckpointPart(**part) for part in document["learners"]),
            tuple(document["missing"]),
            dict(document["coordinator"]),
        )
    except StorageError:
        raise
    except FileNotFoundError:
        raise StorageError(f"{folder} is not complete: it has no {MANIFEST}") from None
    except (OSError, *NOT_JSON) as error:
        raise StorageError(f"{path} cannot be read: {error!r}") from error


def checkpoint_folders(run: Path) -> list[Path]:
    """The folders of all checkpoints of a run, complete or not, newest first."""
    there = names_in(run / SHARES)
    return sorted((path for path in there if path.name.isdecimal()), key=number_in, reverse=True)


def number_in(folder: Path) -> int:
    """The number of the checkpoint that a folder is for."""
    return int(folder.name)


def forget_checkpoints(run: Path, keep: Container[int], before: int) -> None:
    """Deletes what nobody will go back to; what cannot be deleted is tried again next time."""
    for folder in checkpoint_folders(run):
        number = number_in(folder)
        if number < before and number not in keep:
            runtime().disk.remove_folder(folder)
