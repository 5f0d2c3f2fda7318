"""What is said of a run that did not finish is what its folder has."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.cli.outcome import what_remains
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import StorageError
from decoupled_diloco.export.weights import find_weights
from decoupled_diloco.syncer.result import SHARES


def test_nothing_can_be_saved_while_a_share_is_missing(tmp_path: Path) -> None:
    config = RunConfig(
        run={"name": "x", "folder": tmp_path, "learners": 1, "budget_steps": 8},
        syncer={"shards": 2},
        workload={"name": "gpt"},
    )
    told = what_remains(tmp_path, 2)
    assert "no weights were written, and none can be saved" in told
    with pytest.raises(StorageError, match="has no weights"):
        find_weights(tmp_path, config)


def test_all_shares_can_be_put_together(tmp_path: Path) -> None:
    for shard in (0, 1):
        path = tmp_path / SHARES / f"shard-{shard}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert f"ddiloco export {tmp_path} puts them together" in what_remains(tmp_path, 2)
    assert "none can be saved" in what_remains(tmp_path, 3)
