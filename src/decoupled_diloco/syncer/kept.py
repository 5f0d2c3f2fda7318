"""The global weights of a run as its shards keep them on disk: at any time."""

from __future__ import annotations

import contextlib
from pathlib import Path

from torch import Tensor

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of, plan_of, public_text, read_public
from decoupled_diloco.errors import StorageError
from decoupled_diloco.merge import Layout
from decoupled_diloco.syncer.coordinator_document import read_layout
from decoupled_diloco.syncer.durable import DURABLE, Durable, ShardDisk, identity_of_shard
from decoupled_diloco.syncer.fragments import ShardTensors
from decoupled_diloco.syncer.result import by_name

TRIES = 3
"""A running shard may delete what has just been listed; its newer checkpoint is there then."""


def kept_layout(run: Path, config: RunConfig) -> Layout | None:
    """The layout of what a run's shards keep; ``None``: nobody has joined, or they keep nothing.

    Raises:
        StorageError: The coordinator's state cannot be read.
        ConfigError: It is of a run with other settings.
    """
    if not (run / DURABLE).is_dir():
        return None
    return read_layout(run, read_public(public_text(config)))


def read_kept(
    run: Path, config: RunConfig, layout: Layout
) -> tuple[dict[str, Tensor], dict[str, str], int | None]:
    """The global weights by the model's names, the version of each fragment, and the step.

    Every shard's are as of its last merge.

    Raises:
        StorageError: A shard keeps none, or none that is whole.
    """
    public = read_public(public_text(config))
    plan, options = plan_of(layout, public), options_of(public)
    copies: dict[int, Tensor] = {}
    versions: dict[str, str] = {}
    clocks: list[int] = []
    for shard in range(config.syncer.shards):
        folder = run / DURABLE / f"shard-{shard}"
        tensors = ShardTensors(plan, options.owned(shard))
        disk = ShardDisk(folder, identity_of_shard(public, layout), tensors)
        found = _recovered(disk)
        if set(found) != set(tensors.owned):
            problems = "".join(f"; {problem}" for problem in dict.fromkeys(disk.problems))
            raise StorageError(f"{folder} has no whole checkpoint of its fragments{problems}")
        copies |= {fragment: tensors.whole(fragment) for fragment in found}
        versions |= {str(fragment): str(each.version) for fragment, each in found.items()}
        clocks.append(int((disk.memory or {}).get("clock", 0)))
    return by_name(plan, copies), versions, min(clocks)


def _recovered(disk: ShardDisk) -> dict[int, Durable]:
    for _ in range(TRIES - 1):
        with contextlib.suppress(StorageError):
            if found := disk.recover():
                return found
    return disk.recover()
