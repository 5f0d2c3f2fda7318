"""`ddiloco report`: its output file, its messages, and what it never overwrites."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from decoupled_diloco.cli.report_command import report
from decoupled_diloco.errors import StorageError


@pytest.fixture
def run(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the synthetic run's folder; the current folder is another one."""
    shutil.copytree(run_folder, tmp_path / "run")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "run"


def invoke(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, list(map(str, arguments)))


def say(*arguments: object) -> str:
    """Return the output of a command that succeeds, without the terminal's line breaks."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("part", ["", "tape", "tape/learner-0.jsonl"])
def test_a_run_s_report_goes_to_its_folder(run: Path, part: str) -> None:
    assert f"written: {run / 'report.html'}\n" in say(run / part)
    assert "made-up" in (run / "report.html").read_text()


def test_a_bare_tape_s_report_goes_to_the_current_folder(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.jsonl"
    shutil.copy(run / "tape" / "learner-0.jsonl", bare)
    output = say(bare)
    assert output.endswith("written: report.html\n")
    assert f"note: {bare}: No shard of the syncer is on the tape" in output
    assert (tmp_path / "here" / "report.html").is_file()


def test_the_page_is_written_to_out(run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (run / "tape").iterdir()}
    page = tmp_path / "new" / "a.html"
    assert say(run, "--out", page) == f"written: {page}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert {path: path.read_bytes() for path in (run / "tape").iterdir()} == before
    assert not (run / "report.html").exists()


def test_two_runs(run: Path, tmp_path: Path) -> None:
    assert say(run, run / "tape" / "learner-0.jsonl").endswith("written: comparison.html\n")
    text = (tmp_path / "here" / "comparison.html").read_text()
    assert "run and learner-0" in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--out", "tape.jsonl"], "--out tape.jsonl does not end in .html or .htm"),
        (["--out", "../run/x.html"], "--out ../run/x.html is a folder"),
    ],
)
def test_invalid_outputs_are_rejected(run: Path, arguments: list[str], reason: str) -> None:
    (run / "x.html").mkdir()
    result = invoke("../run", *arguments)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert not Path("comparison.html").exists()


def test_sources_without_a_tape_are_rejected(run: Path) -> None:
    result = invoke(run / "run.toml")
    assert isinstance(result.exception, StorageError)
    assert "is not an event tape" in str(result.exception)
    result = invoke("nowhere")
    assert "nowhere does not exist" in str(result.exception)
