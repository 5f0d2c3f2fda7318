"""The run folder and its contents."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.launch.run_folder import RunFolder, enter_run_folder, read_token

SETTINGS = dump_config(RunConfig(run={"max_steps": 9}))


def begun(path: Path) -> Path:
    """Return a run folder that no process uses any more."""
    with RunFolder(path):
        (path / "run.toml").write_text(SETTINGS)
    return path


def contents(path: Path) -> dict[str, str | None]:
    """Return every name below a folder, with the text of files."""
    return {
        str(each.relative_to(path)): each.read_text() if each.is_file() else None
        for each in sorted(path.rglob("*"))
    }


def test_a_run_folder_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run"):
        with pytest.raises(ConfigError, match="is in use by another process: wait for it"):
            RunFolder(tmp_path / "run")
        assert not (tmp_path / "run.1").exists(), "a folder in use is not moved"
    RunFolder(tmp_path / "run").release()


def test_an_earlier_run_is_moved_aside_and_kept(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        with RunFolder(tmp_path / "run") as folder:
            assert not (folder.path / "kept").exists()
            (folder.path / "kept").write_text(text)
        (folder.path / "run.toml").write_text(SETTINGS)
    assert (tmp_path / "run.1" / "kept").read_text() == "first"
    assert (tmp_path / "run.2" / "kept").read_text() == "second"
    assert (tmp_path / "run" / "kept").read_text() == "third"


def test_the_lock_is_held_until_the_folder_has_been_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rename, seen = begun(tmp_path / "run"), Path.rename, []

    def renamed(self: Path, target: Path) -> Path:
        with pytest.raises(ConfigError, match="is in use"):
            RunFolder(path)
        seen.append(target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with RunFolder(path):
        assert seen == [tmp_path / "run.1"]


def test_a_lock_in_a_renamed_folder_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = begun(tmp_path / "run"), fcntl.flock

    def late(file: int, how: int) -> None:
        if path.exists() and not (tmp_path / "run.1").exists():
            path.rename(tmp_path / "run.1")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ConfigError, match="is in use by another process"):
        RunFolder(path)


FOREIGN = {
    "a user's files": {"thesis.txt": "years of work"},
    "a file that begins with a dot": {".git": "…"},
    "another program's run.toml": {"run.toml": "command = 'make'\n", "tape/one": "…"},
    "a run's settings, written by hand": {"run.toml": '[run]\nname = "mine"\n'},
    "all settings, but no tape": {"run.toml": SETTINGS, "model.py": "…"},
    "a run.toml that is not TOML": {"run.toml": "[run\n", "tape/one": "…"},
    "a lock that is not empty": {"lock": "42"},
    "a copy of settings": {"run.toml.bak": SETTINGS},
    "another program's file in a folder named logs": {"logs/apache.log": "GET /"},
}


def put(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("how", ["begin", "resume", "enter", "begin through a link"])
def test_a_folder_that_is_not_a_run_is_not_changed(tmp_path: Path, what: str, how: str) -> None:
    folder = put(tmp_path / "theirs", FOREIGN[what])
    link = tmp_path / "link"
    link.symlink_to(folder)
    config = RunConfig(run={"folder": folder, "max_steps": 9})
    before = contents(tmp_path)
    fix = "folder of a run to --resume" if how == "resume" else "another with --set run.folder=…"
    begin = {
        "enter": lambda: enter_run_folder(config),
        "resume": lambda: RunFolder(folder, resume=True),
        "begin": lambda: RunFolder(folder),
        "begin through a link": lambda: RunFolder(link),
    }
    with pytest.raises(ConfigError, match=f"not a run of ddiloco.*{fix}"):
        begin[how]()
    assert contents(tmp_path) == before


def test_a_file_is_not_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for begin in (
        RunFolder,
        lambda path: enter_run_folder(RunConfig(run={"folder": path, "max_steps": 9})),
    ):
        with pytest.raises(ConfigError, match="is a file, not a folder"):
            begin(tmp_path / "file")
    assert contents(tmp_path) == {"file": "kept"}


def test_an_empty_folder_and_an_unused_run_folder_are_used_unchanged(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    for _ in range(2):
        with RunFolder(tmp_path / "run") as folder:
            assert folder.moved_to is None


def test_a_linked_run_is_moved_aside_in_its_own_parent(tmp_path: Path) -> None:
    big = begun(tmp_path / "big-disk" / "run")
    link = tmp_path / "run"
    link.symlink_to(big)
    with RunFolder(link) as folder:
        assert folder.moved_to == big.with_name("run.1")
        assert (big / "tape").is_dir()
    assert link.is_symlink()
    assert (big.with_name("run.1") / "run.toml").exists()


def test_the_target_of_a_dangling_link_is_created(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "big-disk" / "run")
    with RunFolder(tmp_path / "run"):
        assert (tmp_path / "big-disk" / "run" / "tape").is_dir()


def test_a_run_folder_with_the_current_folder_in_it_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path / "run")
    for inside in (tmp_path / "run", tmp_path / "run" / "logs"):
        monkeypatch.chdir(inside)
        with pytest.raises(ConfigError, match="start the command in another folder"):
            RunFolder(Path(os.path.relpath(tmp_path / "run")))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_process_without_a_launcher_marks_the_run_folder(tmp_path: Path) -> None:
    config = RunConfig(run={"folder": tmp_path / "run", "max_steps": 9})
    for _ in range(2):
        assert enter_run_folder(config) == tmp_path / "run"
        (tmp_path / "run" / "tape" / "learner-0.jsonl").write_text("")
    with RunFolder(tmp_path / "run") as folder:
        assert folder.moved_to == tmp_path / "run.1"


def test_a_folder_that_cannot_be_created_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be created: Not a directory$"):
        RunFolder(tmp_path / "file" / "run")


def test_each_run_has_a_new_token_that_only_this_user_can_read(tmp_path: Path) -> None:
    tokens = []
    for name in ("a", "b"):
        with RunFolder(tmp_path / name) as folder:
            path = folder.token_file()
            assert path.stat().st_mode & 0o777 == 0o600
            tokens.append(read_token(path))
    assert tokens[0] != tokens[1]
    assert all(token and len(token) >= 32 for token in tokens)


def test_a_token_file_must_contain_a_token(tmp_path: Path) -> None:
    assert read_token(None) is None
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory$"):
        read_token(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty: write the run's secret into it"):
        read_token(tmp_path / "empty")
    (tmp_path / "run.toml").write_text("[run]\nlearners = 2\n")
    with pytest.raises(ConfigError, match="is not one line of printable ASCII: pass the file"):
        read_token(tmp_path / "run.toml")


def test_the_token_file_appears_atomically_when_learners_can_join(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        hidden = folder.token_file(shown=False)
        shown = folder.path / "token"
        assert not shown.exists()
        (folder.path / "run.toml").write_text(SETTINGS)
        folder.show_token()
        assert shown.read_text() == hidden.read_text()
        assert shown.stat().st_mode & 0o777 == 0o600
    with RunFolder(tmp_path / "run", resume=True) as folder:
        assert folder.token_file(shown=False) == shown, "waiting learners already have it"
        assert shown.read_text() == hidden.read_text()
        folder.show_token()
        assert shown.read_text() == hidden.read_text()
