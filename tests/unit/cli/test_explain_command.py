"""Errors of `ddiloco explain`, `ddiloco status` and other commands for missing runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.errors import DilocoError
from unit.show.show_worlds import write_world


def refusal(*arguments: str) -> str:
    error = CliRunner().invoke(app, list(arguments)).exception
    assert isinstance(error, DilocoError)
    return str(error)


def test_unknown_kinds_and_numbers_are_rejected() -> None:
    assert refusal("explain", "foo", "1") == (
        "'foo' cannot be explained: choose one of round, learner, step"
    )


def test_without_a_run_the_error_shows_an_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal("explain", "round", "40") == (
        "runs/ contains no runs: name one, as in ddiloco explain round 40 runs/quickstart"
    )
    assert refusal("status").endswith("name one, as in ddiloco status runs/quickstart")


@pytest.mark.parametrize(
    "arguments",
    [
        ["export"],
        ["report"],
        ["status"],
        ["explain", "round", "1"],
        ["data"],
        ["checkpoint"],
        ["replay"],
        ["train", "--resume"],
    ],
    ids=" ".join,
)
def test_a_missing_folder_is_a_usage_error_in_every_command(
    tmp_path: Path, arguments: list[str]
) -> None:
    error = CliRunner().invoke(app, [*arguments, str(tmp_path / "none")]).exception
    assert isinstance(error, DilocoError), error
    assert error.exit_code == 2


def test_the_newest_run_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("new", "old")):
        folder = Path("runs") / name
        folder.mkdir(parents=True)
        write_world(folder, until=20.0)
        (folder / "run.toml").touch()
        os.utime(folder / "run.toml", (1000 - number, 1000 - number))
    result = CliRunner().invoke(app, ["explain", "round", "1"])
    assert result.exit_code == 0, result.output
    assert result.stderr == "run: runs/new, the newest in runs/\n"
    assert "run: " not in result.stdout
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 0, result.output
    assert result.stderr == "run: runs/new, the newest in runs/\n"
    assert "causes" in result.stdout


def test_a_file_of_noise_is_not_a_tape(tmp_path: Path) -> None:
    noise = tmp_path / "garbage.jsonl"
    noise.write_bytes(b"\x00\x03S\xc6\n\x19\x8f\xff\n")
    for command in ("status", "report"):
        text = refusal(command, str(noise))
        assert text.startswith(
            f"{noise} is not an event tape: none of its lines can be read; first"
        )
        assert "line 1 is torn and was skipped" in text
        assert text.endswith(" bytes, not text)")


def test_a_start_that_failed_is_not_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("trained", "failed")):
        (tmp_path / "runs" / name / "tape").mkdir(parents=True)
        (tmp_path / "runs" / name / "run.toml").touch()
        os.utime(tmp_path / "runs" / name / "run.toml", (number, number))
        (tmp_path / "runs" / name / "tape" / "launcher.jsonl").touch()
    (tmp_path / "runs" / "trained" / "tape" / "shard-0.jsonl").touch()
    result = CliRunner().invoke(app, ["status"])
    assert "run: runs/trained, the newest in runs/" in result.output
