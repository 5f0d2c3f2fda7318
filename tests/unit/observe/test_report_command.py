"""`ddiloco report`: where it writes, what it says, what it never writes over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from decoupled_diloco.cli.report import report
from decoupled_diloco.errors import StorageError


@pytest.fixture
def run(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the made-up run's folder; the current folder is another."""
    shutil.copytree(run_folder, tmp_path / "run")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "run"


def invoke(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, list(map(str, arguments)))


def say(*arguments: object) -> str:
    """What a command that succeeds prints, without line breaks of the terminal's."""
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


def test_page_and_image_where_one_says(run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (run / "tape").iterdir()}
    page, image = tmp_path / "new" / "a.html", tmp_path / "new" / "a.png"
    assert say(run, "--out", page, "--png", image) == f"written: {page}\nwritten: {image}\n"
    assert image.read_bytes().startswith(b"\x89PNG")
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
        (["--png", "report.html"], "--png report.html does not end in .png"),
        (["--out", "../run/x.html"], "--out ../run/x.html is a folder"),
        (["../run", "--png", "x.png"], "--png is the image of one run"),
    ],
)
def test_what_it_does_not_write(run: Path, arguments: list[str], reason: str) -> None:
    (run / "x.html").mkdir()
    result = invoke("../run", *arguments)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert not Path("comparison.html").exists()


def test_what_is_no_tape(run: Path) -> None:
    result = invoke(run / "run.toml")
    assert isinstance(result.exception, StorageError)
    assert "is no event tape" in str(result.exception)
    result = invoke("nowhere")
    assert "nowhere does not exist" in str(result.exception)
