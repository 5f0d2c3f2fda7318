"""Wrong arguments end with one sentence and an exit code, never with a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.launch.launch_folder import launch_folder


def refusal(*arguments: str) -> str:
    """Return the sentence with which a command ends."""
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})
    if isinstance(result.exception, DilocoError):
        return f"{result.exception}"
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    return result.stderr.removeprefix("error: ").strip()


@pytest.mark.parametrize("folder", ["/", "."])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("status RUN", "is not a run folder"),
        ("logs RUN", "has no logs"),
        ("stop RUN", "does not name the process that launched it"),
        ("kill learner-0 RUN", "does not name the process that launched it"),
    ],
)
def test_a_path_without_a_name_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, words: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = refusal(*words.replace("RUN", folder).split())
    assert found.startswith(f"{folder} {sentence}")


def test_the_launch_folder_of_the_present_folder_is_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch_folder(Path()) == tmp_path.with_name(f"{tmp_path.name}.launch")
    assert launch_folder(Path("/")) == Path("/.launch")


@pytest.mark.parametrize("devices", ["=3", "foo", "=", "2,3", "A B=1", "-x=1"])
def test_devices_without_a_variable_are_rejected(devices: str) -> None:
    words = ("learner", "quickstart", "--index", "0", "--syncer", "http://127.0.0.1:1")
    assert refusal(*words, f"--devices={devices}") == (
        f"--devices {devices!r} is not NAME=LIST: write a variable and its devices, such as "
        "CUDA_VISIBLE_DEVICES=2,3"
    )
