"""The groups of options of `Learner`: ranges, defaults and short forms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import decoupled_diloco as dd
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.option_groups import ParticipantOptions, SyncerConnection

NOT_SECONDS: list[Any] = [-1, -0.5, math.nan, math.inf, 10**400, True, "10", None]


@pytest.mark.parametrize("seconds", NOT_SECONDS)
def test_a_checkpoint_interval_is_0_or_more(seconds: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^Checkpointing\(interval_seconds=.*\) .*: pass 0 or more sec"
    ):
        dd.Checkpointing("kept", interval_seconds=seconds)
    assert dd.Checkpointing("kept", interval_seconds=0).interval_seconds == 0


@pytest.mark.parametrize("name", ["join", "disconnect"])
@pytest.mark.parametrize("seconds", [0, *NOT_SECONDS[:-1]])
def test_a_wait_for_the_syncer_is_more_than_0_or_none(name: str, seconds: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^Timeouts\({name}=.*\) .*: pass more than 0 seconds"):
        dd.Timeouts(**{name: seconds})
    assert getattr(dd.Timeouts(**{name: None}), name) is None


@pytest.mark.parametrize("seconds", NOT_SECONDS)
def test_a_flush_is_0_or_more(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"^Timeouts\(flush=.*\) .*: pass 0 or more seconds"):
        dd.Timeouts(flush=seconds)
    assert dd.Timeouts(flush=0).flush == 0


def test_shared_objects_are_several_names() -> None:
    with pytest.raises(ConfigError, match=r"objects='optimizer'\) is a string: .*\('optimizer',\)"):
        dd.StateSharing("optimizer")
    assert dd.StateSharing().objects == ("optimizer",)


URL = "use a local or mounted folder; [run] store mirrors a run to an object store"
IS_URL = f"is a URL: {URL}"
FOLDER = "pass a folder as text or a Path, or None for no checkpoints"
SHARED = "pass several names, as ('optimizer',), or () to share nothing"
PATH = "pass a file as text or a Path, or leave it out"
STATE = 'as in state={"loader": loader}'


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (dd.Timeouts, {"join": "3"}, "(join='3') is not a number: pass more than 0 seconds"),
        (dd.Timeouts, {"flush": True}, "(flush=True) is not a number: pass 0 or more seconds"),
        (dd.Timeouts, {"join": math.inf}, "(join=inf) is too large: pass more than 0 seconds"),
        (dd.Timeouts, {"join": -1}, "(join=-1) is out of range: pass more than 0 seconds"),
        (dd.Checkpointing, {"folder": "http://b/a"}, f"(folder='http://b/a') is a URL: {URL}"),
        (dd.Checkpointing, {"folder": Path("s3://b/a")}, f"(folder=PosixPath('s3:/b/a')) {IS_URL}"),
        (
            dd.Checkpointing,
            {"folder": "s4://b/a"},
            "(folder='s4://b/a') is not an object store: use one of s3://, gs://, az://, file://, "
            "memory://",
        ),
        (dd.Checkpointing, {"folder": 5}, f"(folder=5) is not a path: {FOLDER}"),
        (dd.Checkpointing, {"folder": ""}, f"(folder='') is empty: {FOLDER}"),
        (
            dd.Checkpointing,
            {"state": ["a"]},
            f"(state=…) is a list without names: pass a dict, {STATE}",
        ),
        (
            dd.Checkpointing,
            {"state": {5: 5}},
            f"(state=…) has the name 5, which is not text: pass names in quotes, {STATE}",
        ),
        (dd.StateSharing, {"objects": 5}, f"(objects=5) is not a list of names: {SHARED}"),
        (dd.StateSharing, {"objects": [5]}, f"(objects=[5]) is not a list of names: {SHARED}"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused(
    kind: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**given)
    assert str(caught.value) == kind.__name__ + message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tracker": 5},
            "tracker=5 is not an experiment tracker: pass one as 'wandb' or "
            "'tensorboard:runs/x', or leave it out",
        ),
        (
            {"metrics_address": 5},
            "metrics_address=5 is not an address: pass 'host:port', or leave it out",
        ),
        ({"event_tape": 5}, f"event_tape=5 is not a path: {PATH}"),
    ],
)
def test_a_report_goes_to_a_named_place(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dd.Observability(**given)
    assert str(caught.value) == message


NOT_A_MODEL = "is not a torch.nn.Module: pass the model, or the list of its pipeline stages as"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": 5}, "name=5 is not text: pass a name as 'learner-0'"),
    ({"tls": "x"}, "tls='x' is not a dd.TLSConfig: pass dd.TLSConfig(ca_cert=…), or leave it out"),
    (
        {"auth_token": 5},
        "auth_token= is an int, not a string: pass the content of the run's token file",
    ),
    ({"syncer": 5}, "syncer=5 is not an address: pass one or several 'http://host:port'"),
    ({"syncer": b"x"}, "syncer=b'x' is not an address: pass one or several 'http://host:port'"),
    ({"timeouts": 5}, "timeouts=5 is not a dd.Timeouts: pass dd.Timeouts(join=…), or leave it out"),
    (
        {"timeouts": {}},
        "timeouts={} is not a dd.Timeouts: pass dd.Timeouts(join=…), or leave it out",
    ),
]
WRONG_FOR_A_LEARNER: list[tuple[dict[str, Any], str]] = [
    *(({"model": model}, f"model={model!r} {NOT_A_MODEL}") for model in ("m", 5, None, [], ["m"])),
    (
        {"state_sharing": ("optimizer",)},
        "state_sharing=('optimizer',) is not a dd.StateSharing: pass dd.StateSharing(objects=…)",
    ),
    (
        {"observability": "wandb"},
        "observability='wandb' is not a dd.Observability: pass dd.Observability(tracker=…), or",
    ),
    ({"checkpoint": 5}, f"checkpoint=5 is not a path: {FOLDER}"),
    ({"checkpoint": ""}, f"checkpoint='' is empty: {FOLDER}"),
    ({"sync_ranks": [1]}, "sync_ranks=[1] is not a number of ranks: pass a number, 'hosts' (one"),
]


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        *((dd.Learner, *case) for case in [*WRONG, *WRONG_FOR_A_LEARNER]),
        *((dd.Observer, *case) for case in WRONG),
        (dd.Observer, {"model": []}, "model=[] is not a torch.nn.Module: pass the model as"),
        (dd.Observer, {"event_tape": 5}, f"event_tape=5 is not a path: {PATH}"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_argument_of_a_wrong_type_is_refused_before_anything_starts(
    kind: Any, given: dict[str, Any], message: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two ranks, none of them waits for the other."""
    monkeypatch.setattr("decoupled_diloco.participants.ranks_of_this_job", lambda: ranks)
    monkeypatch.setattr("decoupled_diloco.participants.ModuleStore", lambda module: 1 / 0)
    arguments = {"model": torch.nn.Linear(1, 1), "syncer": "http://127.0.0.1:9", **given}
    with pytest.raises(ConfigError) as caught:
        kind(**arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_is_the_folder_of_checkpoints() -> None:
    for path in ("kept", Path("kept")):
        assert dd.Checkpointing.of(path) == dd.Checkpointing(path)
    whole = dd.Checkpointing("kept", 5.0)
    assert dd.Checkpointing.of(whole) is whole
    assert dd.Checkpointing.of(None) == dd.Checkpointing()


@pytest.mark.parametrize(
    ("syncer", "addresses"),
    [
        ("http://a:1", ("http://a:1",)),
        ("http://a:1|http://b:2", ("http://a:1", "http://b:2")),
        (["http://a:1", "http://b:2|http://c:3"], ("http://a:1", "http://b:2", "http://c:3")),
    ],
)
def test_an_address_may_include_standbys(syncer: Any, addresses: tuple[str, ...]) -> None:
    connection = SyncerConnection.of(syncer)
    assert connection.addresses == addresses
    assert SyncerConnection.of(connection) is connection


def test_standbys_are_also_found_by_another_client() -> None:
    client: Any = object
    connection = SyncerConnection(("http://a:1|http://b:2", "http://c:3"), client)
    assert connection.addresses == ("http://a:1", "http://b:2", "http://c:3")
    assert connection.client is client


@pytest.mark.parametrize(("syncer", "message"), [([], r"syncer=\[\] has no address"), ([7], "7")])
def test_a_syncer_without_an_address_is_refused(syncer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyncerConnection.of(syncer)


def test_the_default_name_is_derived_from_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Mein Rechner!")
    monkeypatch.setattr("os.getpid", lambda: 7)
    assert ParticipantOptions().participant_name == "Mein-Rechner-7"
    assert ParticipantOptions("a").participant_name == "a"
    assert ParticipantOptions("").participant_name == "", "it is rejected later, not replaced"
