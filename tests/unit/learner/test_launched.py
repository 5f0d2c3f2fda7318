"""A program that a launcher has started finds its run."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import decoupled_diloco as dd
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.user_program import launched as passed_to
from decoupled_diloco.learner.launched import PREFIX, Launched, launched_as
from decoupled_diloco.learner.option_groups import (
    Checkpointing,
    Observability,
    ParticipantOptions,
    SyncerConnection,
    Timeouts,
)
from decoupled_diloco.transport.tls import TLSConfig


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("a secret\n")
    return file


def launch(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    passed = {"role": "learner", "name": "learner-1", "syncer": "http://a:1,http://b:2", **values}
    for name, value in Launched(**passed).environment().items():
        monkeypatch.setenv(name, value)


def filled(**given: Any) -> tuple[SyncerConnection, ParticipantOptions]:
    """Return the connection and the options of a `Learner` created without an address."""
    return launched_as("learner").fill(ParticipantOptions(**given))


def test_written_variables_are_read_back() -> None:
    found = Launched(role="learner", syncer="http://a:1", name="learner-0", index="0")
    assert Launched.read(found.environment()) == found
    assert all(name.startswith(PREFIX) for name in found.environment())


ALL = {
    "checkpoint": "/run/learners",
    "checkpoint_seconds": "30",
    "flush_seconds": "7.5",
    "disconnect_seconds": "90.0",
    "metrics_address": "127.0.0.1:9400",
    "event_tape": "/run/tape/learner-1.jsonl",
    "sync_ranks": "hosts",
    "tls_ca_cert": "/ca.pem",
    "tls_cert": "/mine.pem",
    "tls_key": "/mine.key",
}


def test_missing_options_are_taken_from_the_launcher(
    monkeypatch: pytest.MonkeyPatch, secret: Path
) -> None:
    launch(monkeypatch, auth_token_file=str(secret), **ALL)
    connection, options = filled()
    assert connection == SyncerConnection(("http://a:1", "http://b:2"))
    assert options == ParticipantOptions(
        name="learner-1",
        auth_token="a secret",
        tls=TLSConfig("/ca.pem", "/mine.pem", "/mine.key"),
        timeouts=Timeouts(disconnect=90.0, flush=7.5),
        observability=Observability(
            metrics_address="127.0.0.1:9400", event_tape="/run/tape/learner-1.jsonl"
        ),
        sync_ranks="hosts",
        checkpoint=Checkpointing("/run/learners", 30.0),
    )


def test_options_missing_everywhere_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch)
    assert filled()[1] == ParticipantOptions(name="learner-1")


def test_each_option_of_a_group_is_filled_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that sets one timeout keeps the launcher's other timeouts, as in each group."""
    launch(monkeypatch, **ALL)
    state = {"data": object()}
    _, options = filled(
        timeouts=Timeouts(join=5.0),
        observability=Observability(tracker="wandb"),
        checkpoint=Checkpointing(state=state),
    )
    assert options.timeouts == Timeouts(join=5.0, disconnect=90.0, flush=7.5)
    assert options.observability == Observability(
        "wandb", "127.0.0.1:9400", "/run/tape/learner-1.jsonl"
    )
    assert options.checkpoint == Checkpointing("/run/learners", 30.0, state)


def test_options_that_the_program_sets_win(monkeypatch: pytest.MonkeyPatch, secret: Path) -> None:
    launch(monkeypatch, auth_token_file=str(secret), **ALL)
    own = {
        "name": "mine",
        "auth_token": "own secret",
        "tls": TLSConfig("/own.pem"),
        "timeouts": Timeouts(1.0, 2.0, 3.0),
        "observability": Observability("mlflow", "127.0.0.1:1", "/own.jsonl"),
        "sync_ranks": 1,
        "checkpoint": Checkpointing("/own", 4.0, {"data": object()}),
    }
    assert filled(**own)[1] == ParticipantOptions(**own)


@pytest.mark.parametrize(("passed", "options"), [("1", 1), ("3", 3), ("all", "all"), ("", None)])
def test_sync_ranks_are_a_number_or_a_word(
    monkeypatch: pytest.MonkeyPatch, passed: str, options: object
) -> None:
    launch(monkeypatch, sync_ranks=passed)
    assert filled()[1].sync_ranks == options


def test_a_launcher_passes_standbys_with_their_shards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch(monkeypatch, syncer="http://a:1|http://b:1,http://c:2", folder=str(tmp_path))
    connection, _ = filled()
    assert connection.addresses == ("http://a:1", "http://b:1", "http://c:2")
    assert connection.client is not None


class Joined(dd.Learner):
    """A learner that does not join in its constructor."""

    def _enter(self) -> None:
        pass


def test_a_learner_without_an_address_uses_the_launchers_values(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch(monkeypatch, checkpoint=str(tmp_path / "kept"))
    Joined(torch.nn.Linear(2, 2))
    assert (tmp_path / "kept" / "learner-1").is_dir()


def test_with_an_explicit_address_the_launchers_values_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch(monkeypatch, auth_token_file="/nowhere", checkpoint=str(tmp_path / "kept"))
    learner = Joined(torch.nn.Linear(2, 2), "http://elsewhere:1")
    assert learner.addresses == ("http://elsewhere:1",)
    assert learner.name != "learner-1"
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("kind", [dd.Learner, dd.Observer])
def test_a_missing_address_without_launcher_is_reported(kind: Any) -> None:
    name = kind.__name__
    with pytest.raises(ConfigError, match=rf"^dd.{name}\(model\) has no syncer address, and DD"):
        kind(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", [dd.Learner, dd.Observer])
@pytest.mark.parametrize(
    ("role", "problem"), [("", "is not set"), ("boss", "is 'boss', which is not known")]
)
@pytest.mark.parametrize("place", ["syncer", "run_folder"])
def test_an_address_without_a_role_is_reported(
    monkeypatch: pytest.MonkeyPatch, kind: Any, role: str, problem: str, place: str
) -> None:
    """A person may have set the variable, which only a launcher sets."""
    launch(monkeypatch, **{"role": role, "syncer": "", place: "http://a:1"})
    with pytest.raises(ConfigError) as caught:
        kind(torch.nn.Linear(2, 2))
    variable = PREFIX + place.upper()
    assert str(caught.value) == (
        f"{variable} is set, but DDILOCO_ROLE {problem}: only ddiloco sets these variables: unset "
        f'{variable} and pass an address, as dd.{kind.__name__}(model, "http://HOST:PORT")'
    )


def test_an_evaluator_cannot_create_a_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, role="evaluator")
    with pytest.raises(ConfigError, match=r"started as the run's evaluator: use dd.Observer"):
        dd.Learner(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"auth_token_file": "/nowhere/token"},
            "DDILOCO_AUTH_TOKEN_FILE='/nowhere/token' cannot be read",
        ),
        ({"flush_seconds": "soon"}, "DDILOCO_FLUSH_SECONDS='soon' is not a number"),
        ({"disconnect_seconds": "soon"}, "DDILOCO_DISCONNECT_SECONDS='soon' is not a number"),
        ({"checkpoint_seconds": "1,5"}, "DDILOCO_CHECKPOINT_SECONDS='1,5' is not a number"),
    ],
)
def test_an_invalid_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], message: str
) -> None:
    launch(monkeypatch, **values)
    with pytest.raises(ConfigError, match=message):
        filled()


def test_the_secret_itself_is_never_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, secret: Path, tmp_path: Path
) -> None:
    config = RunConfig(
        run={"max_steps": 9, "learners": 3},
        learner={
            "command": ["python", "train.py"],
            "metrics_address": "127.0.0.1:9400",
            "sync_ranks": "all",
        },
    )
    passed = passed_to(
        config,
        2,
        syncer=("https://a:1",),
        folder=tmp_path,
        token_file=secret,
        shared=None,
        tls=TLSConfig("ca.pem", "mine.pem", "mine.key"),
    )
    environment = passed.environment()
    assert "a secret" not in str(environment)
    assert environment["DDILOCO_AUTH_TOKEN_FILE"] == str(secret)
    assert (environment["DDILOCO_INDEX"], environment["DDILOCO_LEARNERS"]) == ("2", "3")
    _, options = passed.fill(ParticipantOptions())
    assert options.auth_token == "a secret"
    assert options.observability.metrics_address == "127.0.0.1:9402"
    assert options.observability.event_tape == str(tmp_path / "tape" / "learner-2.jsonl")
    assert options.sync_ranks == "all"
    assert options.tls is not None
    assert options.tls.cert == str(Path("mine.pem").absolute())


def test_a_shared_run_folder_has_the_shards_addresses(tmp_path: Path) -> None:
    config = RunConfig(run={"max_steps": 9}, learner={"command": ["python", "train.py"]})
    passed = passed_to(
        config, 0, syncer=(), folder=tmp_path, token_file=None, shared=tmp_path, tls=None
    )
    (tmp_path / "places").mkdir()
    (tmp_path / "places" / "shard-0").write_text("http://old:1\nhttp://new:2\n")
    assert passed.addresses() == ("http://new:2",)


@pytest.mark.parametrize("place", ["run_folder", "folder"])
def test_a_run_folder_client_sends_the_programs_auth_token(
    monkeypatch: pytest.MonkeyPatch, secret: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "places").mkdir()
    (tmp_path / "places" / "shard-0").write_text("http://a:1\n")
    launch(monkeypatch, auth_token_file=str(secret), **{place: str(tmp_path)})
    for given, expected in ({}, "a secret"), ({"auth_token": "mine\n"}, "mine"):
        connection, _ = filled(**given)
        assert connection.client is not None
        assert connection.client()._token == expected  # type: ignore[attr-defined]


def test_settings_can_disable_checkpoints(tmp_path: Path) -> None:
    config = RunConfig(
        run={"max_steps": 9},
        learner={"command": ["python", "train.py"], "checkpoint_interval_seconds": 0.0},
    )
    passed = passed_to(
        config, 0, syncer=("http://a:1",), folder=tmp_path, token_file=None, shared=None, tls=None
    )
    assert passed.fill(ParticipantOptions())[1].checkpoint == Checkpointing()


def test_settings_can_disable_the_flush(tmp_path: Path) -> None:
    """0 seconds differ from the default of `Timeouts`, so they are passed."""
    config = RunConfig(
        run={"max_steps": 9},
        learner={"command": ["python", "train.py"], "flush_seconds": 0.0},
    )
    passed = passed_to(
        config, 0, syncer=("http://a:1",), folder=tmp_path, token_file=None, shared=None, tls=None
    )
    assert passed.fill(ParticipantOptions())[1].timeouts == Timeouts(flush=0.0)


def test_the_options_of_a_launcher_are_arguments_of_a_learner() -> None:
    arguments = inspect.signature(dd.Learner).parameters
    assert set(ParticipantOptions.__dataclass_fields__) <= arguments.keys()
