"""The folder of an export: existing files are never damaged, and a partial export never remains."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import decoupled_diloco as dd
from decoupled_diloco.cli.main import app
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.export.export_folder import export_folder, read_facts
from decoupled_diloco.export.run_export import export_run
from unit.export.export_runs import run_folder

FACTS = {"decoupled_diloco": "0"}


def write(out: Path, files: dict[str, str], *, force: bool = False) -> None:
    """Export these files; a name with a slash is in a folder."""
    with export_folder(out, FACTS, force=force) as folder:
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "export.json"]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_the_current_folder_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(tmp_path / "run")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    result = CliRunner().invoke(app, ["export", "../run", "--out", "."])
    assert result.exit_code == 0, result.output
    dd.load_model(".")


def test_the_root_is_refused() -> None:
    with pytest.raises(ConfigError, match="is the root folder: choose another --out"):
        write(Path("/"), {"a": "new"}, force=True)


def test_a_run_folder_is_rejected_even_with_force(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    before = (tmp_path / "run/run.toml").read_text()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"is a run folder, whose run\.toml an export would"):
            export_run(tmp_path / "run", tmp_path / "run", force=True)
    assert (tmp_path / "run/run.toml").read_text() == before


def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, {"a": "old"})
    (out / "config.json").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"out/config\.json is not part of an earlier export, and"
    ):
        write(out, {"a": "new", "config.json": "new"}, force=True)
    assert contents(out) == {"a": "old", "config.json": "mine"}
    assert read_facts(out)["files"] == ["a", "export.json"]


def test_a_foreign_list_of_files_is_not_an_export(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "export.json").write_text('{"files": ["a", "export.json"]}')
    (out / "a").write_text("mine")
    with pytest.raises(ConfigError, match=r"out/a is not part of an earlier export"):
        write(out, {"a": "new"}, force=True)
    assert contents(out) == {"a": "mine"}


def test_an_export_with_a_folder_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, {"a": "old", "templates/x": "old", "gone/y": "old"})
    (out / "notes").write_text("mine")
    write(out, {"a": "new", "templates/x": "new"}, force=True)
    assert contents(out) == {"a": "new", "templates/x": "new", "notes": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_that_cannot_be_moved_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write(out, {"a": "old", "b": "old"})
    replace = Path.replace

    def no_b(self: Path, target: Path) -> Path:
        if ".part" in self.parent.name and self.name == "b":
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", no_b)
    with pytest.raises(StorageError, match=r"out cannot be written: .*No space left on device"):
        write(out, {"a": "new", "b": "new"}, force=True)
    assert contents(out) == {"a": "old", "b": "old"}
    assert read_facts(out)["files"] == ["a", "b", "export.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_all_files_have_the_mode_that_the_user_gives_new_files(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    exported = export_run(tmp_path / "run")
    (tmp_path / "other").touch()
    mode = (tmp_path / "other").stat().st_mode
    assert {path.stat().st_mode for path in exported.files} == {mode}
    assert (tmp_path / "run/weights.safetensors").stat().st_mode == mode
