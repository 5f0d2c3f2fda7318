"""Reads the global weights of a run from its shards' disks, at any time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of, plan_of
from decoupled_diloco.errors import StorageError
from decoupled_diloco.merge import Layout
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import is_folder
from decoupled_diloco.syncer.coordinator_document import read_layout
from decoupled_diloco.syncer.durable import DURABLE, Durable, ShardDisk, identity_of_shard
from decoupled_diloco.syncer.result import RESULT, by_name, share_file
from decoupled_diloco.syncer.shard_tensors import ShardTensors

logger = logging.getLogger(__name__)

TRIES = 3
"""Attempts to read: a running shard may delete a listed checkpoint after it wrote a newer one."""


def kept_layout(run: Path, config: RunConfig) -> Layout | None:
    """Return the layout of the weights on the shards' disks.

    ``None`` if no learner has joined, or if the shards store nothing.

    Raises:
        StorageError: The coordinator's state cannot be read.
        ConfigError: It belongs to a run with other settings.
    """
    if not is_folder(run / DURABLE):
        return None
    return read_layout(run, config)


def read_kept(
    run: Path, config: RunConfig, layout: Layout, *, average: bool = False
) -> tuple[dict[str, Tensor], dict[str, str], int | None]:
    """Return the global weights by the model's names, the version of each fragment, and the step.

    Each shard's weights are those of its last merge. ``average``: their average instead, in a run
    that keeps one.

    Raises:
        StorageError: A shard has no whole checkpoint.
    """
    plan = plan_of(layout, config)
    copies: dict[int, Tensor] = {}
    versions: dict[str, str] = {}
    clocks: list[int] = []
    for shard in range(config.syncer.shards):
        disk = _disk_of(run, config, layout, shard)
        found = _recovered(disk)
        if set(found) != set(disk.tensors.owned):
            problems = "".join(f"; {problem}" for problem in dict.fromkeys(disk.problems))
            raise StorageError(f"{disk.folder} has no whole checkpoint of its fragments{problems}")
        copies |= {p: disk.tensors.whole(p, average=average) for p in found}
        versions |= {str(fragment): str(each.version) for fragment, each in found.items()}
        clocks.append(int((disk.memory or {}).get("clock", 0)))
    return by_name(plan, copies), versions, min(clocks)


def leave_to_result(run: Path, config: RunConfig, shards: Iterable[int]) -> None:
    """Delete the files of a finished run that its result makes redundant.

    These are the shares of the result, and the published copies in the shards' checkpoints. Replays
    of recorded payloads compare the shares, so runs with such records keep everything. If the
    shards store no checkpoints, nothing is deleted either.

    Args:
        run: The run folder, with the result.
        config: The run.
        shards: The shards whose processes have ended.
    """
    layout = kept_layout(run, config)
    if layout is None or config.syncer.record_payloads:
        return
    try:
        for shard in shards:
            _disk_of(run, config, layout, shard).leave_to(run / RESULT)
            runtime().disk.remove(share_file(run, shard))
    except OSError as error:
        logger.warning("%s: the shards' files next to the result are not deleted", error)


def _disk_of(run: Path, config: RunConfig, layout: Layout, shard: int) -> ShardDisk:
    tensors = ShardTensors(plan_of(layout, config), options_of(config).owned(shard))
    folder = run / DURABLE / f"shard-{shard}"
    return ShardDisk(folder, identity_of_shard(config, layout), tensors)


def _recovered(disk: ShardDisk) -> dict[int, Durable]:
    for _ in range(TRIES - 1):
        with contextlib.suppress(StorageError):
            if found := disk.recover():
                return found
    return disk.recover()
