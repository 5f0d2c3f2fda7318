"""A join costs the disk one line, and no join that was told of is forgotten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoupled_diloco.errors import StorageError
from decoupled_diloco.syncer.coordinator_disk import FILE, JOINED, CoordinatorDisk, joined_since
from decoupled_diloco.syncer.shard_lease import NO_STANDBY


def test_records_are_added_to_the_state_and_forgotten_with_the_next_one(tmp_path: Path) -> None:
    disk = CoordinatorDisk(tmp_path, NO_STANDBY)
    assert not disk.can_append, "nothing of this life is on the disk"
    disk.write("{}")
    disk.append(["one", "two"])
    disk.append(["three"])
    assert joined_since(tmp_path) == ["one", "two", "three"]
    disk.write('{"all": 3}')
    assert joined_since(tmp_path) == []
    assert json.loads((tmp_path / FILE).read_text()) == {"all": 3}


def test_a_torn_line_counts_for_nothing_and_is_never_added_to(tmp_path: Path) -> None:
    disk = CoordinatorDisk(tmp_path, NO_STANDBY)
    disk.write("{}")
    disk.append(["one"])
    with (tmp_path / JOINED).open("a") as file:
        file.write('["tw')
    assert joined_since(tmp_path) == ["one"]
    assert not CoordinatorDisk(tmp_path, NO_STANDBY).can_append, "the next life writes all of it"


def test_what_could_not_be_added_is_written_whole_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = CoordinatorDisk(tmp_path, NO_STANDBY)
    disk.write("{}")
    (tmp_path / JOINED).mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        disk.append(["one"])
    assert not disk.can_append
