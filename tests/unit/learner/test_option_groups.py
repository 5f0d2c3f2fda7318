"""The groups of options of `Learner`: ranges, defaults and short forms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import decoupled_diloco as dd
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.option_groups import ParticipantOptions, SyncerConnection

NOT_SECONDS: list[Any] = [-1, -0.5, math.nan, math.inf, "10", None]


@pytest.mark.parametrize("seconds", NOT_SECONDS)
def test_a_checkpoint_interval_is_0_or_more(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"^Checkpointing\(interval_seconds\)=.* 0 or more sec"):
        dd.Checkpointing("kept", interval_seconds=seconds)
    assert dd.Checkpointing("kept", interval_seconds=0).interval_seconds == 0


@pytest.mark.parametrize("name", ["join", "disconnect"])
@pytest.mark.parametrize("seconds", [0, *NOT_SECONDS[:-1]])
def test_a_wait_for_the_syncer_is_more_than_0_or_none(name: str, seconds: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^Timeouts\({name}\)=.*: pass more than 0 seconds"):
        dd.Timeouts(**{name: seconds})
    assert getattr(dd.Timeouts(**{name: None}), name) is None


@pytest.mark.parametrize("seconds", NOT_SECONDS)
def test_a_flush_is_0_or_more(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"^Timeouts\(flush\)=.*: pass 0 or more seconds"):
        dd.Timeouts(flush=seconds)
    assert dd.Timeouts(flush=0).flush == 0


def test_shared_objects_are_several_names() -> None:
    with pytest.raises(ConfigError, match=r"objects='optimizer'\) is a string: .*\('optimizer',\)"):
        dd.StateSharing("optimizer")
    assert dd.StateSharing().objects == ("optimizer",)


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
