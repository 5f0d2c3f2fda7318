"""Shards that have moved are found where the run folder says that they are."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.launch.folder import HOST, write_addresses
from decoupled_diloco.launch.shared_folder import FindingClient, shared_addresses


class Notes:
    """A client that notes whom it is to dial."""

    def __init__(self) -> None:
        self.dialled: list[str] = []
        self.trusted: set[str] = set()

    def trust(self, address: str) -> None:
        self.trusted.add(address)

    async def connect(self, address: str, role: str, principal: str) -> Any:
        self.dialled.append(address)

    async def put(self, url: str, body: Any, *, base: str = "", **rest: Any) -> Any:
        self.dialled.append(base)


def moved(run: Path, host: str, *addresses: str) -> None:
    write_addresses(run, addresses)
    (run / HOST).write_text(host + "\n")


def test_a_wildcard_means_the_syncers_machine(tmp_path: Path) -> None:
    moved(tmp_path, "node-7", "http://0.0.0.0:7070", "http://10.1.1.1:7071")
    assert shared_addresses(tmp_path) == ("http://node-7:7070", "http://10.1.1.1:7071")
    moved(tmp_path, socket.gethostname(), "http://0.0.0.0:7070")
    assert shared_addresses(tmp_path) == ("http://127.0.0.1:7070",)


async def test_shards_that_have_moved_are_found(tmp_path: Path) -> None:
    notes = Notes()
    client = FindingClient(notes, tmp_path)  # type: ignore[arg-type]
    moved(tmp_path, "a", "http://0.0.0.0:1|http://0.0.0.0:2", "http://0.0.0.0:3")
    await client.connect("http://a:3", "learner", "learner-0")
    moved(tmp_path, "b", "http://0.0.0.0:4|http://0.0.0.0:5", "http://0.0.0.0:6")
    for old in ("http://a:1", "http://a:2", "http://a:3", "http://b:6", "http://other:9"):
        await client.connect(old, "learner", "learner-0")
    await client.put("/bodies/1", memoryview(b""), base="http://a:3")
    (tmp_path / "addresses").unlink()  # the file system is away
    await client.connect("http://a:1", "learner", "learner-0")
    assert notes.dialled == [
        "http://a:3",
        "http://b:4",
        "http://b:5",
        "http://b:6",
        "http://b:6",
        "http://other:9",
        "http://b:6",
        "http://b:4",
    ]
    assert "http://b:6" in notes.trusted
    assert "http://other:9" not in notes.trusted


@pytest.mark.parametrize("missing", [HOST, "addresses"])
async def test_a_folder_that_says_nothing_changes_nothing(tmp_path: Path, missing: str) -> None:
    notes = Notes()
    moved(tmp_path, "a", "http://0.0.0.0:1")
    (tmp_path / missing).unlink()
    await FindingClient(notes, tmp_path).connect("http://a:1", "learner", "x")  # type: ignore[arg-type]
    assert notes.dialled == ["http://a:1"]
