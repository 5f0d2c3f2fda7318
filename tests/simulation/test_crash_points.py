"""After a crash between or within any disk operations, all published versions still exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.errors import StorageError
from decoupled_diloco.runtime import Runtime, within
from decoupled_diloco.storage.coordinator_states import CoordinatorStates
from decoupled_diloco.storage.files import write_text
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.virtual_disk import (
    SECTOR_BYTES,
    Loss,
    SimulatedDisk,
    read_folder,
    remains,
    write_folder,
)
from worlds import crashes

STEPS = "0110c1001c0c11"
"""Merges and checkpoints of a small history, with three rotations and merges after the last."""

LOSSES = {
    "killed: the kernel keeps everything": {},
    "only synced data remains": {"names": 1.0, "writes": 1.0},
    "names without content": {"writes": 1.0},
    "names and lengths, zeros for content": {"writes": 1.0, "zeros": 1.0},
    "content without names": {"names": 1.0},
    "torn writes": {"torn": 1.0},
    "anything, once": {"names": 0.5, "writes": 0.5, "torn": 0.5, "zeros": 0.5},
    "anything, another time": {"names": 0.5, "writes": 0.3, "torn": 0.7, "zeros": 0.3},
}

LIES = {
    "no sync works, nothing remains": {"lies": 1.0, "names": 1.0, "writes": 1.0},
    "no sync works, zeros for content": {"lies": 1.0, "writes": 1.0, "zeros": 1.0},
    "no sync works, half remains": {"lies": 1.0, "names": 0.5, "writes": 0.5, "zeros": 0.5},
    "some syncs fail, torn writes": {"lies": 0.3, "writes": 0.3, "torn": 1.0},
    "some syncs fail, anything": {
        "lies": 0.5,
        "names": 0.3,
        "writes": 0.5,
        "torn": 0.3,
        "zeros": 0.7,
    },
}


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> crashes.History:
    return crashes.record(tmp_path_factory.mktemp("history"), STEPS)


@pytest.mark.parametrize("name", [*LOSSES, *LIES])
def test_published_versions_survive_any_crash(
    history: crashes.History, tmp_path: Path, name: str
) -> None:
    """If syncs have no effect, an older version or none may be found, but never other bits."""
    losses = LOSSES | LIES
    for operations in range(len(history.disk.log) + 1):
        loss = Loss(Choices(f"{name} {operations}"), **losses[name])
        crashes.crash(history, operations, loss, tmp_path / str(operations))


def test_a_history_has_every_kind_of_operation(history: crashes.History) -> None:
    kinds = {operation.kind for operation in history.disk.log}
    assert kinds >= {"folder", "create", "write", "sync", "sync names", "rename", "remove"}
    assert len(history.published) > len(STEPS)
    assert str(max(history.known.published.values())) == "1.6"


@pytest.mark.parametrize("seed", range(60))
def test_published_versions_survive_repeated_crashes_on_bad_disks(
    seed: int, tmp_path: Path
) -> None:
    try:
        crashes.story(seed, tmp_path)
    except AssertionError as error:
        command = crashes.COMMAND.format(seed=seed)
        raise AssertionError(f"{error}\nrepeat it with: {command}") from error


@pytest.mark.parametrize("length", [1, 3])
def test_a_disk_that_is_full_at_any_operation_costs_only_rounds(
    tmp_path: Path, length: int
) -> None:
    """Every operation of the history fails once, alone and together with the next ones."""
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
        before = dict(known.published)
        assert len(before) == 2
        life.merge(0)
        disk.close()
        assert known.published[0] > before[0], "rounds continue when there is space again"
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
    """Write a coordinator's state several times; return the number of operations after each."""
    disk, done = SimulatedDisk(root), [0]
    states = CoordinatorStates(root, "n")
    for number in range(1, 8):
        with within(Runtime(disk)):
            records = {str(each): [number] * 40 for each in range(3)}
            if number % 3 == 1:
                states.write({"state": {"learners": records}})
            else:
                states.append(records)
        done.append(len(disk.log))
    return disk, done


@pytest.mark.parametrize("name", LOSSES)
def test_the_coordinators_state_is_complete_and_never_goes_back(tmp_path: Path, name: str) -> None:
    root = tmp_path / "run"
    root.mkdir()
    disk, done = coordinator(root)
    for operations in range(len(disk.log) + 1):
        loss = Loss(Choices(f"{name} {operations}"), **LOSSES[name])
        rest = remains(disk.before, disk.log[:operations], loss)
        written = sum(end <= operations for end in done) - 1
        after = tmp_path / f"after-{operations}"
        write_folder(after, rest)
        document = CoordinatorStates(after).read()
        if document is None:
            assert written == 0
            continue
        (found,) = {number for each in document["state"]["learners"].values() for number in each}
        assert found in (written, written + 1)


@pytest.mark.parametrize("number", range(2, 8))
def test_a_full_disk_leaves_a_text_file_intact(tmp_path: Path, number: int) -> None:
    """The disk is full at each operation in turn. After the rename, the file may be the new one."""
    write_text(tmp_path / "text.json", "before")
    disk = SimulatedDisk(tmp_path, full=lambda n: n == number)
    if number <= 6:
        with pytest.raises(StorageError, match="No space left"), within(Runtime(disk)):
            write_text(tmp_path / "text.json", "after")
        content = (tmp_path / "text.json").read_text()
        assert content == ("after" if number == 6 else "before")
    with within(Runtime(disk)):
        write_text(tmp_path / "text.json", "after")
    assert (tmp_path / "text.json").read_text() == "after"


def test_the_simulated_disk_loses_what_was_not_synced(tmp_path: Path) -> None:
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
    assert left(names=1.0) == {"a": None}, "the folder's name was synced, but not the file's"
    assert left(names=1.0, lies=1.0) == {}


def test_a_torn_write_keeps_whole_sectors(tmp_path: Path) -> None:
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
