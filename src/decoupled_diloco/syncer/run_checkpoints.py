"""Checkpoints of the whole run on disk: the shards' parts, and a manifest once complete.

```
RUN/checkpoints/000012/shard-0.safetensors   shard-1.safetensors   manifest.json
```

A shard's part has the format of a checkpoint in `durable`. Learners keep their parts in their own
folders. The manifest is written last and atomically: a checkpoint without a manifest is incomplete.
The manifest lists every part with its digest and the learners without a part, and contains the
coordinator's own part.
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
        number: The checkpoint's number.
        folder: The folder of the shards' parts.
        shards: The shards' parts.
        learners: The learners' parts, in their own checkpoint folders.
        missing: Learners that were in the run and provided no part.
        coordinator: The contents of the coordinator's file.
    """

    number: int
    folder: Path
    shards: tuple[CheckpointPart, ...]
    learners: tuple[CheckpointPart, ...]
    missing: tuple[str, ...]
    coordinator: dict[str, Any]

    def part(self, process: str) -> Path:
        """Return the file of a shard's part."""
        return self.folder / f"{process}.safetensors"

    def check(self) -> None:
        """Read every byte of the shards' parts.

        Raises:
            StorageError: A part is missing, torn, corrupt, or belongs to another checkpoint.
        """
        for part in self.shards:
            path = self.part(part.process)
            if part_digest(path) != part.digest:
                raise StorageError(
                    f"{path} is not the part that belongs to checkpoint {self.number}: its digest "
                    f"differs from the manifest's"
                )


State = Literal["refused", "open", "complete", "given up"]


@dataclass(frozen=True)
class CheckpointAnswer:
    """The state of a checkpoint.

    Attributes:
        state: ``refused``: no checkpoint can begin now.
        number: The checkpoint's number; 0 if there is none.
        words: Why it was refused or abandoned, or what it waits for.
        folder: The folder of the shards' parts, on the syncer's machine.
        nbytes: The size of all parts.
        missing: Learners that were in the run and provided no part.
    """

    state: State
    number: int
    words: str = ""
    folder: str = ""
    nbytes: int = 0
    missing: tuple[str, ...] = ()

    @classmethod
    def kept(cls, run: Path, checkpoint: KeepCheckpoint) -> CheckpointAnswer:
        """Return the answer for a complete checkpoint, whose manifest is written."""
        nbytes = sum(part.nbytes for part in (*checkpoint.shards, *checkpoint.learners))
        folder = str(checkpoint_folder(run, checkpoint.number).absolute())
        return cls(
            "complete", checkpoint.number, folder=folder, nbytes=nbytes, missing=checkpoint.missing
        )

    @classmethod
    def of_open(cls, checkpoint: OpenCheckpoint) -> CheckpointAnswer:
        """Return the answer for a checkpoint that waits for parts."""
        awaited = [f"shard-{shard}" for shard in sorted(checkpoint.shards_awaited)]
        awaited += sorted(checkpoint.learners_awaited)
        words = f"waiting for the parts of {', '.join(awaited)}"
        return cls("open", checkpoint.number, words, missing=tuple(sorted(checkpoint.missing)))


def checkpoint_folder(run: Path, number: int) -> Path:
    """Return the folder of a checkpoint's parts in a run folder."""
    return run / SHARES / f"{number:06d}"


def part_file(run: Path, number: int, shard: int) -> Path:
    """Return the file of one shard's part."""
    return checkpoint_folder(run, number) / f"shard-{shard}.safetensors"


def write_manifest(run: Path, checkpoint: KeepCheckpoint, coordinator: dict[str, Any]) -> None:
    """Write the manifest, which makes a checkpoint complete.

    Raises:
        StorageError: The manifest cannot be written; the checkpoint is incomplete.
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
    """Return the manifest in the folder of a checkpoint.

    Raises:
        StorageError: The checkpoint is incomplete, or its manifest cannot be read.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(runtime().disk.read(path))
        if document["format"] != FORMAT:
            raise StorageError(
                f"{path} has format={document['format']}, but this version reads only {FORMAT}: "
                "continue with the version of decoupled-diloco that wrote it"
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
        raise StorageError(f"{folder} is incomplete: it has no {MANIFEST}") from None
    except (OSError, *NOT_JSON) as error:
        raise StorageError(f"{path} cannot be read: {error!r}") from error


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, complete or not, newest first."""
    found = names_in(run / SHARES)
    return sorted((path for path in found if path.name.isdecimal()), key=number_in, reverse=True)


def number_in(folder: Path) -> int:
    """Return the number of the checkpoint that a folder belongs to."""
    return int(folder.name)


def forget_checkpoints(run: Path, keep: Container[int], before: int) -> None:
    """Delete checkpoints that no process will return to.

    A failed deletion is tried again next time.

    Args:
        run: The run folder.
        keep: Numbers of checkpoints that stay.
        before: Only checkpoints with smaller numbers are deleted.
    """
    for folder in checkpoint_folders(run):
        number = number_in(folder)
        if number < before and number not in keep:
            runtime().disk.remove_folder(folder)
