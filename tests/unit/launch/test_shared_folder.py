"""Shards that have moved are found by the addresses in the run folder."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from decoupled_diloco.errors import TransportError
from decoupled_diloco.launch.processes import relay_process
from decoupled_diloco.storage.coordinator_states import STATES, CoordinatorStates
from decoupled_diloco.storage.shared_folder import (
    HOST,
    SharedFolder,
    recorded_end,
    relay_address,
    shards_that_move,
    shared_addresses,
    write_addresses,
    write_place,
)


def moved(run: Path, host: str, *addresses: str) -> None:
    write_addresses(run, addresses)
    (run / HOST).write_text(host + "\n")


def kept(run: Path, phase: str, before: int, now: int) -> None:
    settings = json.dumps({"run": {"max_steps": before}})
    state = {"phase": phase, "learners": {}}
    CoordinatorStates(run, "n").write({"settings": settings, "state": state})
    (run / "run.toml").write_text(f"[run]\nmax_steps = {now}\n")


@pytest.mark.parametrize(
    ("phase", "before", "now", "ended"),
    [
        ("finished", 9, 9, True),
        ("ending", 9, 9, False),
        ("running", 9, 9, False),
        ("finished", 9, 20, False),
    ],
)
def test_an_end_is_recorded_unless_the_budget_was_raised(
    tmp_path: Path, phase: str, before: int, now: int, ended: bool
) -> None:
    kept(tmp_path, phase, before, now)
    assert bool(recorded_end(tmp_path)) is ended


@pytest.mark.parametrize("text", [None, "", "[]", "7", '{"state": 3, "settings": "{}"}', "\0"])
def test_an_unreadable_state_records_no_end(tmp_path: Path, text: str | None) -> None:
    kept(tmp_path, "finished", 9, 9)
    (state,) = (tmp_path / STATES).iterdir()
    state.unlink()
    if text is not None:
        state.write_text(text)
    assert recorded_end(tmp_path) == ""
    assert recorded_end(tmp_path / "nothing") == ""


def test_a_wildcard_host_means_the_syncers_machine(tmp_path: Path) -> None:
    moved(tmp_path, "node-7", "http://0.0.0.0:7070", "http://10.1.1.1:7071")
    assert shared_addresses(tmp_path) == ("http://node-7:7070", "http://10.1.1.1:7071")
    moved(tmp_path, socket.gethostname(), "http://0.0.0.0:7070")
    assert shared_addresses(tmp_path) == ("http://127.0.0.1:7070",)


async def test_shards_that_have_moved_are_found(tmp_path: Path) -> None:
    shards = SharedFolder(tmp_path)
    moved(tmp_path, "a", "http://0.0.0.0:1|http://0.0.0.0:2", "http://0.0.0.0:3")
    assert await shards.locate() == ["http://a:1", "http://a:2", "http://a:3"]
    assert shards.now("http://a:3") == "http://a:3"
    moved(tmp_path, "b", "http://0.0.0.0:4|http://0.0.0.0:5", "http://0.0.0.0:6")
    (tmp_path / "addresses").rename(tmp_path / "away")  # the file system is unmounted
    assert await shards.locate() == ["http://a:1", "http://a:2", "http://a:3"]
    (tmp_path / "away").rename(tmp_path / "addresses")
    assert await shards.locate() == ["http://b:4", "http://b:5", "http://b:6"]
    old = ("http://a:1", "http://a:2", "http://a:3", "http://b:6", "http://other:9")
    new = ["http://b:4", "http://b:5", "http://b:6", "http://b:6", "http://other:9"]
    assert list(map(shards.now, old)) == new


async def test_a_loopback_address_is_translated_for_other_machines(
    tmp_path: Path,
) -> None:
    """Rank 0 may run there, and sends the address to sync ranks on other machines."""
    shards = SharedFolder(tmp_path)
    moved(tmp_path, "a", "https://0.0.0.0:1", "https://0.0.0.0:2")
    await shards.locate()
    assert shards.now("https://127.0.0.1:2") == "https://a:2"
    moved(tmp_path, socket.gethostname(), "https://0.0.0.0:3", "https://0.0.0.0:4")
    await shards.locate()
    assert shards.now("https://127.0.0.1:2") == shards.now("https://a:2") == "https://127.0.0.1:4"


@pytest.mark.parametrize("missing", [HOST, "addresses"])
async def test_a_folder_without_addresses_changes_nothing(tmp_path: Path, missing: str) -> None:
    moved(tmp_path, "a", "http://0.0.0.0:1")
    (tmp_path / missing).unlink()
    shards = SharedFolder(tmp_path)
    assert await shards.locate() == []
    assert shards.now("http://a:1") == "http://a:1"


async def test_a_relay_is_found_at_its_newest_recorded_address(tmp_path: Path) -> None:
    moved(tmp_path, "syncer", "http://0.0.0.0:1")
    relay, clients = relay_address("site-a", "http"), SharedFolder(tmp_path)
    assert await clients.locate() == ["http://syncer:1"]
    with pytest.raises(TransportError, match="the relay of site 'site-a' has not started yet"):
        clients.now(relay)
    for place in ("http://n1:1", "http://n2:7"):
        write_place(tmp_path, relay_process("site-a"), place)
        assert await clients.locate() == ["http://syncer:1", place]
        assert clients.now(relay) == place
    assert clients.now("http://syncer:1") == "http://syncer:1"


async def test_shards_are_found_at_their_newest_recorded_address(tmp_path: Path) -> None:
    assert shards_that_move(tmp_path) is None
    for shard, place in ((0, "http://a:1"), (1, "http://b:1"), (0, "http://b:2")):
        write_place(tmp_path, f"shard-{shard}", place)
    assert shared_addresses(tmp_path) == ("http://b:2", "http://b:1")
    shards = shards_that_move(tmp_path)
    assert shards is not None
    assert await shards.locate() == ["http://b:2", "http://b:1"]
    assert shards.now("http://a:1") == "http://b:2", "where it was before anyone here looked"
    write_place(tmp_path, "shard-1", "http://a:1")  # a port that the other shard no longer uses
    write_place(tmp_path, "shard-1", "http://c:1")
    write_place(tmp_path, "shard-0", "http://b:1")
    await shards.locate()
    assert shards.now("http://b:1") == "http://b:1", "the newest process that listens"
    assert shards.now("http://b:2") == "http://b:1"
