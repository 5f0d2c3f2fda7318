"""Small files are replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from decoupled_diloco.errors import StorageError
from decoupled_diloco.storage.files import write_text


def test_text_and_name_are_durable_on_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, forced = tmp_path / "state.json", []

    def fsync(descriptor: int) -> None:
        forced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(path, "one")
    assert forced == [(tmp_path / "state.part", False), (tmp_path, True)]
    assert path.read_text() == "one"


def test_a_failure_keeps_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_text(path, "one")
    (tmp_path / "state.part").mkdir()
    with pytest.raises(StorageError, match=r"state\.json cannot be written"):
        write_text(path, "two")
    assert path.read_text() == "one"
