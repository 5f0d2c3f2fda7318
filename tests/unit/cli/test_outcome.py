"""The description of a run that did not finish matches its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.cli.run_messages import describe_remains
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import StorageError
from decoupled_diloco.export.run_weights import find_weights
from decoupled_diloco.syncer.result import RESULT, SHARES


def test_no_weights_can_be_exported_while_a_part_is_missing(tmp_path: Path) -> None:
    config = config_of(tmp_path, shards=2)
    text = describe_remains(tmp_path, config)
    assert text.startswith("no weights were written: ")
    assert text.endswith(f"\nto continue the run: ddiloco train --resume {tmp_path}")
    with pytest.raises(StorageError, match="has no weights"):
        find_weights(tmp_path, config)


def test_all_parts_can_be_merged(tmp_path: Path) -> None:
    for shard in (0, 1):
        path = tmp_path / SHARES / f"shard-{shard}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    text = describe_remains(tmp_path, config_of(tmp_path, shards=2))
    assert f"ddiloco export {tmp_path} merges the parts" in text
    assert "no weights were written" in describe_remains(tmp_path, config_of(tmp_path, shards=3))


def test_weights_from_before_a_resume_are_reported_as_old(tmp_path: Path) -> None:
    shares = tmp_path / SHARES
    shares.mkdir()
    (shares / "shard-0.safetensors").touch()
    (tmp_path / RESULT).touch()
    text = describe_remains(tmp_path, config_of(tmp_path, shards=1), "syncer")
    assert f"{tmp_path / RESULT} is from before the run was resumed" in text
    assert "merges the parts" not in text
    assert f"ddiloco syncer --resume {tmp_path}" in text


def test_a_run_without_durable_state_names_no_resume(tmp_path: Path) -> None:
    text = describe_remains(tmp_path, config_of(tmp_path, shards=1, persist=False))
    assert "syncer.persist=false" in text
    assert "--resume" not in text


def config_of(folder: Path, **syncer: object) -> RunConfig:
    return RunConfig(
        run={"name": "x", "folder": folder, "learners": 1, "max_steps": 8},
        syncer=syncer,
        workload={"name": "gpt"},
    )
