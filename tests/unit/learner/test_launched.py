"""How a program that a launcher has started finds its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import decoupled_diloco as dd
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.command import launched as passed_to
from decoupled_diloco.learner.launched import PREFIX, Launched, finds_its_run
from decoupled_diloco.transport.tls import Tls


class Made:
    """Notes what its constructor gets."""

    @finds_its_run("learner")
    def __init__(self, model: object, syncer: Any = None, **arguments: Any) -> None:
        self.syncer, self.arguments = syncer, arguments


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("a secret\n")
    return file


def launch(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    told = {"role": "learner", "name": "learner-1", "syncer": "http://a:1,http://b:2", **values}
    for name, value in Launched(**told).environment().items():
        monkeypatch.setenv(name, value)


def test_what_is_written_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Launched(role="learner", syncer="http://a:1", name="learner-0", index="0")
    assert Launched.read(found.environment()) == found
    assert all(name.startswith(PREFIX) for name in found.environment())


def test_an_argument_is_what_the_launcher_passed(
    monkeypatch: pytest.MonkeyPatch, secret: Path
) -> None:
    launch(monkeypatch, token_file=str(secret), checkpoint="/run/learners", flush_seconds="7.5")
    made = Made(object())
    assert made.syncer == ("http://a:1", "http://b:2")
    assert made.arguments == {
        "learner_id": "learner-1",
        "token": "a secret",
        "checkpoint": "/run/learners",
        "hand_in_seconds": 7.5,
    }


@pytest.mark.parametrize("positional", [(), (None,)])
def test_explicit_arguments_win_and_none_is_not_explicit(
    monkeypatch: pytest.MonkeyPatch, positional: tuple[None, ...]
) -> None:
    launch(monkeypatch, checkpoint="/run/learners", flush_seconds="7.5")
    made = Made(object(), *positional, checkpoint="/mine", hand_in_seconds=None, learner_id=None)
    assert made.arguments["checkpoint"] == "/mine"
    assert made.arguments["hand_in_seconds"] == 7.5
    assert made.arguments["learner_id"] == "learner-1"


def test_an_explicit_address_gets_nothing_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, token_file="/nowhere", checkpoint="/run/learners")
    assert Made(object(), "http://elsewhere:1").arguments == {}
    assert Made(object(), syncer="http://elsewhere:1").arguments == {}


@pytest.mark.parametrize("kind", [dd.Learner, dd.Observer])
def test_without_address_and_launcher_there_is_one_sentence(kind: Any) -> None:
    name = kind.__name__
    with pytest.raises(ConfigError, match=rf"^dd.{name}\(model\) has no syncer address, and DD"):
        kind(torch.nn.Linear(2, 2))


def test_an_evaluator_is_no_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, role="evaluator")
    with pytest.raises(ConfigError, match=r"started as the run's evaluator: use dd.Observer"):
        dd.Learner(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"token_file": "/nowhere/token"}, "DDILOCO_TOKEN_FILE='/nowhere/token' cannot be read"),
        ({"flush_seconds": "soon"}, "DDILOCO_FLUSH_SECONDS='soon' is not a number"),
        ({"checkpoint_seconds": "1,5"}, "DDILOCO_CHECKPOINT_SECONDS='1,5' is not a number"),
    ],
)
def test_a_variable_that_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], message: str
) -> None:
    launch(monkeypatch, **values)
    with pytest.raises(ConfigError, match=message):
        Made(object())


def test_the_secret_itself_is_never_in_the_environment(secret: Path, tmp_path: Path) -> None:
    config = RunConfig(
        run={"budget_steps": 9, "learners": 3},
        learner={"command": ["python", "train.py"], "metrics": "127.0.0.1:9400", "carriers": "all"},
    )
    told = passed_to(
        config,
        2,
        syncer=("https://a:1",),
        folder=tmp_path,
        token_file=secret,
        shared=None,
        tls=Tls("ca.pem", "mine.pem", "mine.key"),
    )
    environment = told.environment()
    assert "a secret" not in str(environment)
    assert environment["DDILOCO_TOKEN_FILE"] == str(secret)
    assert (environment["DDILOCO_INDEX"], environment["DDILOCO_LEARNERS"]) == ("2", "3")
    arguments = told.arguments()
    assert arguments["token"] == "a secret"
    assert arguments["metrics"] == "127.0.0.1:9402"
    assert arguments["carriers"] == "all"
    assert arguments["tape"] == str(tmp_path / "tape" / "learner-2.jsonl")
    assert Path(arguments["tls"].certificate) == Path("mine.pem").absolute()


def test_a_shared_run_folder_says_where_the_shards_are(tmp_path: Path) -> None:
    config = RunConfig(run={"budget_steps": 9}, learner={"command": ["python", "train.py"]})
    told = passed_to(
        config, 0, syncer=(), folder=tmp_path, token_file=None, shared=tmp_path, tls=None
    )
    (tmp_path / "places").mkdir()
    (tmp_path / "places" / "shard-0").write_text("http://old:1\nhttp://new:2\n")
    assert told.addresses() == ("http://new:2",)


@pytest.mark.parametrize("place", ["run_folder", "folder"])
def test_a_client_of_the_run_folder_shows_the_secret_that_the_program_gives(
    monkeypatch: pytest.MonkeyPatch, secret: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "places").mkdir()
    (tmp_path / "places" / "shard-0").write_text("http://a:1\n")
    launch(monkeypatch, token_file=str(secret), **{place: str(tmp_path)})
    assert Made(object()).arguments["client"]()._token == "a secret"
    assert Made(object(), token="mine\n").arguments["client"]()._token == "mine"


def test_no_checkpoints_where_the_settings_say_so(tmp_path: Path) -> None:
    config = RunConfig(
        run={"budget_steps": 9},
        learner={"command": ["python", "train.py"], "checkpoint_every_seconds": 0.0},
    )
    told = passed_to(
        config, 0, syncer=("http://a:1",), folder=tmp_path, token_file=None, shared=None, tls=None
    )
    assert not {"checkpoint", "checkpoint_every_seconds"} & told.arguments().keys()
