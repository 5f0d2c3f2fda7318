"""The coordinator's states on disk: numbered, created once, with one small file per join."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from decoupled_diloco.errors import LeaseError, StorageError
from decoupled_diloco.runtime.disk import Disk
from decoupled_diloco.storage import coordinator_states
from decoupled_diloco.storage.claims import numbered, numbers
from decoupled_diloco.storage.coordinator_states import JOINS_MAX, STATES, CoordinatorStates


def document(**learners: int) -> dict[str, object]:
    return {"state": {"learners": learners}}


def learners(run: Path) -> object:
    found = CoordinatorStates(run).read()
    return None if found is None else found["state"]["learners"]


def test_joins_are_added_to_the_state_and_are_in_the_next_one(tmp_path: Path) -> None:
    states = CoordinatorStates(tmp_path, "n")
    assert states.read() is None
    assert not states.can_append, "there is no state to add to"
    states.write(document(a=1))
    states.append({"b": 1})
    states.append({"b": 2, "c": 1})
    assert learners(tmp_path) == {"a": 1, "b": 2, "c": 1}
    states.write(document(a=5))
    assert learners(tmp_path) == {"a": 5}
    assert sorted(numbers(tmp_path / STATES)) == [1, 2, 3, 4], "a reader may still be at them"
    states.write(document(a=6))
    assert sorted(numbers(tmp_path / STATES)) == [4, 5]


def test_a_process_writes_a_whole_state_before_it_adds_joins(tmp_path: Path) -> None:
    CoordinatorStates(tmp_path, "first").write(document(a=1))
    again = CoordinatorStates(tmp_path, "second")
    again.read()
    assert not again.can_append
    again.write(document(a=1))
    assert again.can_append


def test_a_whole_state_is_due_after_many_joins(tmp_path: Path) -> None:
    states = CoordinatorStates(tmp_path, "n")
    states.write(document())
    for number in range(JOINS_MAX):
        assert states.can_append
        states.append({"a": number})
    assert not states.can_append


def test_a_replaced_coordinator_cannot_write(tmp_path: Path) -> None:
    old = CoordinatorStates(tmp_path, "first")
    old.write(document(a=1))
    new = CoordinatorStates(tmp_path, "second")
    assert new.read() is not None
    new.append({"b": 1})
    with pytest.raises(LeaseError, match="another coordinator has taken over"):
        old.append({"c": 1})
    for number in range(10):
        new.write(document(a=number))
    with pytest.raises(LeaseError, match="another coordinator has taken over"):
        old.write(document(c=1))  # its number is free again
    assert learners(tmp_path) == {"a": 9}


@pytest.mark.parametrize("operation", ["names", "sync"])
def test_a_storage_that_fails_after_it_created_a_state_does_not_replace_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    states = CoordinatorStates(tmp_path, "n")
    states.write(document(a=1))
    answer, failures = getattr(Disk, operation), [OSError(errno.EIO, os.strerror(errno.EIO))]

    def ask(disk: Disk, path: Path) -> object:
        if failures:
            raise failures.pop()
        return answer(disk, path)

    monkeypatch.setattr(Disk, operation, ask)
    with pytest.raises(StorageError, match="Input/output error"):
        states.append({"b": 1})
    states.append({"b": 1, "c": 1})  # each attempt writes what is known by then
    assert learners(tmp_path) == {"a": 1, "b": 1, "c": 1}


def test_a_read_is_retried_if_a_state_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = CoordinatorStates(tmp_path, "n")
    states.write(document(a=1))
    listed = [iter([1, 7])]
    there = coordinator_states.numbers
    monkeypatch.setattr(
        coordinator_states, "numbers", lambda folder: listed.pop() if listed else there(folder)
    )
    assert learners(tmp_path) == {"a": 1}


@pytest.mark.parametrize("text", ["", '{"joined": 3}', '{"state": 1}', "[]"])
def test_a_state_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    CoordinatorStates(tmp_path, "n").write(document())
    path = numbered(tmp_path / STATES, 2)
    path.write_text(text)
    with pytest.raises(StorageError, match=rf"{path.name} cannot be read .* to start a new run"):
        learners(tmp_path)


def test_joins_without_the_state_before_them_are_an_error(tmp_path: Path) -> None:
    states = CoordinatorStates(tmp_path, "n")
    states.write(document())
    states.append({"a": 1})
    numbered(tmp_path / STATES, 1).unlink()
    with pytest.raises(StorageError, match="no whole state"):
        learners(tmp_path)
