"""The run folder, and what is kept in it."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.launch.folder import RunFolder, read_token


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run"):
        with pytest.raises(ConfigError, match="is in use by another process: wait for it"):
            RunFolder(tmp_path / "run")
        assert not (tmp_path / "run.1").exists(), "nothing is moved under its feet"
    RunFolder(tmp_path / "run").release()


def test_an_earlier_run_is_moved_aside_and_kept(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        with RunFolder(tmp_path / "run") as folder:
            assert not (folder.path / "kept").exists()
            (folder.path / "kept").write_text(text)
    assert (tmp_path / "run.1" / "kept").read_text() == "first"
    assert (tmp_path / "run.2" / "kept").read_text() == "second"
    assert (tmp_path / "run" / "kept").read_text() == "third"


def test_the_lock_is_held_until_the_folder_has_been_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rename, seen = tmp_path / "run", Path.rename, []
    with RunFolder(path):
        (path / "kept").write_text("first")

    def renamed(self: Path, target: Path) -> Path:
        with pytest.raises(ConfigError, match="is in use"):
            RunFolder(path)
        seen.append(target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with RunFolder(path):
        assert seen == [tmp_path / "run.1"]


def test_a_lock_that_went_away_with_its_folder_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "run", fcntl.flock
    path.mkdir()

    def late(file: int, how: int) -> None:
        if path.exists() and not (tmp_path / "run.1").exists():
            path.rename(tmp_path / "run.1")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ConfigError, match="is in use by another process"):
        RunFolder(path)


def test_a_folder_that_cannot_be_made_is_an_error_of_storage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be made: Not a directory$"):
        RunFolder(tmp_path / "file" / "run")


def test_the_secret_is_new_for_each_run_and_for_this_user_only(tmp_path: Path) -> None:
    tokens = []
    for name in ("a", "b"):
        with RunFolder(tmp_path / name) as folder:
            path = folder.token_file()
            assert path.stat().st_mode & 0o777 == 0o600
            tokens.append(read_token(path))
    assert tokens[0] != tokens[1]
    assert all(token and len(token) >= 32 for token in tokens)


def test_a_token_file_must_hold_a_token(tmp_path: Path) -> None:
    assert read_token(None) is None
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory$"):
        read_token(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty: put the run's secret into it"):
        read_token(tmp_path / "empty")
