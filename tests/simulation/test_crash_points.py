"""A crash between any two operations on the disk, and inside each: what was told is still there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoupled_diloco.errors import StorageError
from decoupled_diloco.runtime import Runtime, within
from decoupled_diloco.simulate import crashes
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.disk import (
    SECTOR_BYTES,
    Loss,
    SimulatedDisk,
    read_folder,
    remains,
    write_folder,
)
from decoupled_diloco.storage.files import write_text

STEPS = "0110c1001c0c11"
"""Merges and checkpoints of the small history: three rotations, and merges after the last."""

LOSSES = {
    "killed: the kernel keeps all": {},
    "nothing that was not waited for": {"names": 1.0, "writes": 1.0},
    "names without content": {"writes": 1.0},
    "names and lengths, zeros for content": {"writes": 1.0, "zeros": 1.0},
    "content without names": {"names": 1.0},
    "torn writes": {"torn": 1.0},
    "anything, once": {"names": 0.5, "writes": 0.5, "torn": 0.5, "zeros": 0.5},
    "anything, another time": {"names": 0.5, "writes": 0.3, "torn": 0.7, "zeros": 0.3},
}

LIES = {
    "every sync lies and nothing is left": {"lies": 1.0, "names": 1.0, "writes": 1.0},
    "every sync lies, zeros for content": {"lies": 1.0, "writes": 1.0, "zeros": 1.0},
    "every sync lies, half is there": {"lies": 1.0, "names": 0.5, "writes": 0.5, "zeros": 0.5},
    "some lie, torn": {"lies": 0.3, "writes": 0.3, "torn": 1.0},
    "some lie, anything": {"lies": 0.5, "names": 0.3, "writes": 0.5, "torn": 0.3, "zeros": 0.7},
}


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> crashes.History:
    return crashes.record(tmp_path_factory.mktemp("history"), STEPS)


@pytest.mark.parametrize("name", [*LOSSES, *LIES])
def test_whatever_the_crash_what_was_told_is_there(
    history: crashes.History, tmp_path: Path, name: str
) -> None:
    """With syncs that lie: an older version or none, but never other bits."""
    losses = LOSSES | LIES
    for operations in range(len(history.disk.log) + 1):
        loss = Loss(Choices(f"{name} {operations}"), **losses[name])
        crashes.crash(history, operations, loss, tmp_path / str(operations))


def test_a_history_has_every_kind_of_operation(history: crashes.History) -> None:
    kinds = {operation.kind for operation in history.disk.log}
    assert kinds >= {"folder", "create", "write", "sync", "sync names", "rename", "remove"}
    assert len(history.told) > len(STEPS)
    assert str(max(history.known.told.values())) == "1.6"


@pytest.mark.parametrize("seed", range(60))
def test_lives_that_crash_lie_and_run_full_keep_their_word(seed: int, tmp_path: Path) -> None:
    try:
        crashes.story(seed, tmp_path)
    except AssertionError as error:
        command = crashes.COMMAND.format(seed=seed)
        raise AssertionError(f"{error}\nrepeat it with: {command}") from error


@pytest.mark.parametrize("length", [1, 3])
def test_a_disk_that_is_full_at_any_operation_costs_rounds_and_nothing_else(
    tmp_path: Path, length: int
) -> None:
    """Every operation of the history fails once, alone and with those after it."""
    for number in range(1, 70):
        root = tmp_path / str(number)
        root.mkdir()
        failing = range(number, number + length)
        disk = SimulatedDisk(root, full=lambda n, failing=failing: n in failing)  # type: ignore[misc]
        known = crashes.Known()
        life = crashes.Life(root, disk, 1, known, Choices(number))
        life.begin(honest=True)
        for step in STEPS:
            if step == "c":
                crashes.checkpoint(life)
            else:
                life.merge(int(step))
        before = dict(known.told)
        assert len(before) == 2
        life.merge(0)
        disk.close()
        assert known.told[0] > before[0], "space again: rounds go on"
        rest = remains(disk.before, disk.log, Loss(Choices(number), names=1.0, writes=1.0))
        write_folder(tmp_path / f"{number}-after", rest)
        after = crashes.Life(
            tmp_path / f"{number}-after",
            SimulatedDisk(tmp_path / f"{number}-after"),
            2,
            known,
            Choices(number),
        )
        after.begin(honest=True)
        after.disk.close()


def coordinator(root: Path) -> tuple[SimulatedDisk, list[int]]:
    """A coordinator's file that is written again and again; after how many operations each was."""
    disk, done = SimulatedDisk(root), [0]
    for number in range(1, 5):
        with within(Runtime(disk)):
            write_text(root / "coordinator.json", json.dumps({"terms": [number] * 40}))
        done.append(len(disk.log))
    return disk, done


@pytest.mark.parametrize("name", LOSSES)
def test_the_coordinators_file_is_whole_and_not_older_than_what_it_has_told(
    tmp_path: Path, name: str
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    disk, done = coordinator(root)
    for operations in range(len(disk.log) + 1):
        loss = Loss(Choices(f"{name} {operations}"), **LOSSES[name])
        rest = remains(disk.before, disk.log[:operations], loss)
        told = sum(end <= operations for end in done) - 1
        content = rest.get(Path("coordinator.json"))
        if content is None:
            assert told == 0
            continue
        (found,) = set(json.loads(content)["terms"])
        assert found in (told, told + 1)


@pytest.mark.parametrize("number", range(2, 8))
def test_a_full_disk_leaves_the_coordinators_file_whole(tmp_path: Path, number: int) -> None:
    """At each operation; once the name is there it may be the new one."""
    write_text(tmp_path / "coordinator.json", "before")
    disk = SimulatedDisk(tmp_path, full=lambda n: n == number)
    if number <= 6:
        with pytest.raises(StorageError, match="No space left"), within(Runtime(disk)):
            write_text(tmp_path / "coordinator.json", "after")
        content = (tmp_path / "coordinator.json").read_text()
        assert content == ("after" if number == 6 else "before")
    with within(Runtime(disk)):
        write_text(tmp_path / "coordinator.json", "after")
    assert (tmp_path / "coordinator.json").read_text() == "after"


def test_the_simulated_disk_does_what_it_says(tmp_path: Path) -> None:
    disk = SimulatedDisk(tmp_path)
    disk.make_folder(tmp_path / "a")
    with disk.open(tmp_path / "a" / "x") as file:
        disk.write(file, b"one")
        disk.sync_file(file)
        disk.write(file, b"two")
    disk.rename(tmp_path / "a" / "x", tmp_path / "a" / "y")
    assert (tmp_path / "a" / "y").read_bytes() == b"onetwo"

    def left(**loss: float) -> dict[str, bytes | None]:
        rest = remains(disk.before, disk.log, Loss(Choices(0), **loss))
        return {str(path): content for path, content in rest.items()}

    assert left() == {"a": None, "a/y": b"onetwo"}
    assert left(writes=1.0) == {"a": None, "a/y": b"one"}
    assert left(writes=1.0, zeros=1.0) == {"a": None, "a/y": b"one\0\0\0"}
    assert left(names=1.0) == {"a": None}, "the folder was synced in its parent, its file not"
    assert left(names=1.0, lies=1.0) == {}


def test_a_torn_write_is_there_by_sectors(tmp_path: Path) -> None:
    disk = SimulatedDisk(tmp_path)
    content = bytes([7]) * (SECTOR_BYTES * 40)
    with disk.open(tmp_path / "x") as file:
        disk.write(file, content)
    rest = remains(disk.before, disk.log, Loss(Choices(0), torn=1.0))[Path("x")]
    assert rest is not None
    sectors = [rest[at : at + SECTOR_BYTES] for at in range(0, len(rest), SECTOR_BYTES)]
    assert {bytes(SECTOR_BYTES), content[:SECTOR_BYTES]} == set(sectors)


def test_a_folder_is_read_and_written_again(tmp_path: Path) -> None:
    content = {Path("a"): None, Path("a/b"): b"x", Path("c"): b""}
    write_folder(tmp_path / "new", content)
    assert read_folder(tmp_path / "new") == content
