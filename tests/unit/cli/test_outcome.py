"""The description of a run that did not finish matches its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.cli.run_messages import describe_remains
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import StorageError
from decoupled_diloco.export.run_weights import find_weights
from decoupled_diloco.syncer.result import RESULT, SHARES


def test_nothing_can_be_saved_while_a_share_is_missing(tmp_path: Path) -> None:
    config = config_of(tmp_path, shards=2)
    told = describe_remains(tmp_path, config)
    assert told.startswith("no weights were written: ")
    assert told.endswith(f"\nto continue the run: ddiloco train --resume {tmp_path}")
    with pytest.raises(StorageError, match="has no weights"):
        find_weights(tmp_path, config)


def test_all_shares_can_be_put_together(tmp_path: Path) -> None:
    for shard in (0, 1):
        path = tmp_path / SHARES / f"shard-{shard}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    told = describe_remains(tmp_path, config_of(tmp_path, shards=2))
    assert f"ddiloco export {tmp_path} merges the parts" in told
    assert "no weights were written" in describe_remains(tmp_path, config_of(tmp_path, shards=3))


def test_shares_of_an_earlier_end_are_not_those_of_a_run_that_went_on(tmp_path: Path) -> None:
    shares = tmp_path / SHARES
    shares.mkdir()
    (shares / "shard-0.safetensors").touch()
    (tmp_path / RESULT).touch()
    told = describe_remains(tmp_path, config_of(tmp_path, shards=1), "syncer")
    assert f"{tmp_path / RESULT} is from before the run was resumed" in told
    assert "merges the parts" not in told
    assert f"ddiloco syncer --resume {tmp_path}" in told


def test_a_run_without_durable_state_names_no_resume(tmp_path: Path) -> None:
    told = describe_remains(tmp_path, config_of(tmp_path, shards=1, persist=False))
    assert "syncer.persist=false" in told
    assert "--resume" not in told


def config_of(folder: Path, **syncer: object) -> RunConfig:
    return RunConfig(
        run={"name": "x", "folder": folder, "learners": 1, "max_steps": 8},
        syncer=syncer,
        workload={"name": "gpt"},
    )
