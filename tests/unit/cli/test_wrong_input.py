"""Wrong arguments end with one sentence and an exit code, never with a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.cli.run_commands import LearnerOptions
from decoupled_diloco.cli.shared_options import find_recipe, require_urls
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.launch.launch_folder import launch_folder
from unit.cli.runs_here import running


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


@pytest.mark.parametrize("value", ["", " ", ","])
@pytest.mark.parametrize(
    ("words", "option", "form"),
    [
        ("syncer quickstart", "--addresses", "URL[,URL…]"),
        ("syncer quickstart", "--auth-token-file", "FILE"),
        ("learner quickstart --index 0", "--syncer", "URL[,URL…]|RUN"),
        ("learner quickstart --index 0", "--devices", "NAME=LIST"),
        ("learner quickstart", "--index", "NUMBER"),
        ("status", "--auth-token-file", "FILE"),
        ("train quickstart", "--set", "KEY=VALUE"),
        ("train --resume", "--checkpoint", "last|NUMBER"),
        ("certs create-ca x", "--host", "HOST"),
        ("plan", "--link", "UP[/DOWN]"),
    ],
)
def test_an_empty_option_is_rejected(words: str, option: str, form: str, value: str) -> None:
    sentence = f"{option} is empty: write {form} after it"
    sentence += "" if option == "--index" else ", or omit the option"
    assert refusal(*words.split(), option, value) == sentence
    assert refusal(*words.split(), f"{option}={value}") == sentence


@pytest.mark.parametrize(
    "syncer", ["ftp://h:1", "http://", "http://h:99999", "http://h:1,foo", "http://h:1|ftp://b:2"]
)
@pytest.mark.parametrize("words", ["learner quickstart --index 0", "evaluator quickstart"])
def test_an_address_that_is_not_valid_is_rejected(words: str, syncer: str) -> None:
    assert refusal(*words.split(), "--syncer", syncer) == (
        f"--syncer {syncer!r} is not a valid URL: write http://HOST:PORT"
    )


@pytest.mark.parametrize("syncer", ["foo", "127.0.0.1:7070"])
def test_a_word_that_is_no_run_folder_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syncer: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("learner", "quickstart", "--index", "0", "--syncer", syncer)
    assert refusal(*words) == (
        f"--syncer {syncer!r} is neither a URL nor a run folder: write http://HOST:PORT, or a path "
        "such as runs/quickstart"
    )


def test_addresses_with_a_standby_and_run_folders_are_accepted(tmp_path: Path) -> None:
    assert require_urls("http://a:1|http://b:1, http://c:1") == (
        "http://a:1|http://b:1",
        "http://c:1",
    )
    config = find_recipe("quickstart")
    for syncer in ("http://a:1|http://b:1", "runs/not-yet", str(tmp_path), ""):
        assert LearnerOptions(config=config, index=0, syncer=syncer).load().run.learners


@pytest.mark.parametrize("words", ["stop runs/nope", "kill learner-1 runs/nope"])
def test_a_run_folder_that_does_not_exist_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(*words.split()) == (
        "runs/nope does not exist: pass a run folder (see ddiloco list)"
    )


@pytest.mark.parametrize(
    ("words", "lacking"),
    [("--standby", "--shard"), ("--standby --shard 0", "--set syncer.standby=true")],
)
def test_what_a_standby_lacks_is_named(words: str, lacking: str) -> None:
    assert refusal("syncer", "quickstart", *words.split()) == (
        "--standby requires --shard, and a run with syncer.standby=true: add " + lacking
    )


def test_a_run_folder_is_not_launched(tmp_path: Path) -> None:
    with running(tmp_path / "run") as run:
        assert refusal("launch", str(run)).startswith(
            f"{run} is a run folder, not a launch folder: pass the run's TOML file, or the folder"
        )


def test_a_collector_that_is_not_an_address_is_rejected() -> None:
    assert refusal("traces", "runs/nope", "--collector", "foo").startswith(
        "--collector 'foo' is not a valid collector address"
    )
