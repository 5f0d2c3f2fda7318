"""The checks of the data ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.errors import StorageError
from decoupled_diloco.protocol.features.partitions import LeaseBook, apply
from decoupled_diloco.protocol.messages import (
    DataDescribed,
    Leased,
    LedgerEntry,
    Repeated,
    Settled,
    TakenBack,
)
from decoupled_diloco.run_model.data_usage import account_of_data, read_data
from decoupled_diloco.storage.data_ledger import Basis, DataLedger
from decoupled_diloco.tape import TapeWriter

TWO = DataDescribed(2)
A = Leased(1, 0, 0, 0, "a", 1)
B = Leased(2, 0, 1, 0, "b", 1)
RIGHT: list[LedgerEntry] = [
    *(TWO, A, B),
    TakenBack(2, "b", 3, 5, "b is gone"),
    Settled(1, "a", 9),
    Leased(3, 0, 1, 3, "a", 1),
    Repeated(3, "a", 4),
    Settled(3, "a", 8),
    Leased(4, 1, 0, 0, "a", 1),
]


def test_every_partition_is_accounted_for() -> None:
    account = account_of_data(RIGHT)
    assert not account.problems
    assert (account.count(0, "durable"), account.count(1, "training")) == (2, 1)
    assert account.shares(0) == {"a": 14, "b": 3}
    assert [(s.learner, s.first, s.end) for s in account.turns[0][1].spans] == [
        ("b", 0, 3),
        ("a", 3, 8),
    ]


def test_repeated_batches_are_listed() -> None:
    repeats = [(r.learner, r.part, r.first, r.end) for r in account_of_data(RIGHT).repeats]
    assert repeats == [("b", 1, 3, 5), ("a", 1, 0, 4)]


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([TWO, A, Leased(2, 0, 0, 0, "b", 1)], "partition 0 of epoch 0 is leased to b and to a"),
        (
            [TWO, A, Settled(1, "a", 9), Leased(2, 0, 0, 0, "b", 1)],
            "partition 0 of epoch 0 is durable but leased again, to b",
        ),
        (
            [TWO, A, TakenBack(1, "a", 3, 5, ""), Leased(2, 0, 0, 5, "b", 1)],
            "batches 3 to 4 are skipped",
        ),
        (
            [TWO, A, TakenBack(1, "a", 3, 5, ""), Leased(2, 0, 0, 0, "b", 1)],
            "batches 0 to 2 are durable twice",
        ),
        (
            [TWO, A, Settled(1, "a", 9), Leased(2, 1, 0, 0, "b", 1)],
            r"partitions \[1\] of epoch 0 are sk",
        ),
        ([TWO, A, Settled(1, "a", 9), Settled(1, "a", 9)], "lease 1 ends but is not in force"),
        ([TWO, Settled(7, "a", 9)], "lease 7 ends but was never granted"),
        ([TWO, Leased(1, 0, 2, 0, "a", 1)], r"partitions \[2\] of epoch 0 do not exist"),
    ],
)
def test_violations_are_reported(entries: list[LedgerEntry], problem: str) -> None:
    (found,) = account_of_data(entries).problems
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(found)


def test_a_run_that_went_back_is_checked_by_its_remaining_entries() -> None:
    book = LeaseBook()
    for entry in RIGHT[:3]:
        apply(book, entry)
    account = account_of_data([*RIGHT, Basis(book), Settled(1, "a", 9)])
    assert not account.problems
    assert (account.undone, account.count(0, "durable")) == (len(RIGHT) - 3, 1)


def test_the_command_prints_the_ledger(tmp_path: Path) -> None:
    ledger = DataLedger(tmp_path, LeaseBook())
    ledger.append(RIGHT)
    shown = CliRunner().invoke(app, ["data", str(tmp_path)])
    assert shown.exit_code == 0
    assert "partition 1 of epoch 0: b from batch 0, then a from batch 3" in shown.output
    unwrapped = " ".join(shown.output.split())  # the console breaks lines at 80 columns
    line = "partition 1 of epoch 0: 2 batches from batch 3, by b (incarnation 1): b is gone"
    assert line in unwrapped
    assert "No partition was skipped, and none is durable twice." in shown.output
    document = json.loads(CliRunner().invoke(app, ["data", str(tmp_path), "--json"]).output)
    assert document["turns"]["0"]["1"]["spans"][1]["learner"] == "a"
    ledger.append([Leased(9, 1, 0, 0, "b", 1)])
    ledger.close()
    shown = CliRunner().invoke(app, ["data", str(tmp_path)])
    assert shown.exit_code == 1
    assert "partition 0 of epoch 1 is leased to b and to a" in shown.output


def test_a_folder_without_a_ledger_raises(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"has neither data\.ledger nor a tape"):
        read_data(tmp_path)


def test_data_without_leases_is_not_reported_as_complete(tmp_path: Path) -> None:
    TapeWriter(tmp_path / "tape", "coordinator").close()
    shown = CliRunner().invoke(app, ["data", str(tmp_path)])
    assert shown.exit_code == 0
    assert shown.output.startswith("The data of this run were not leased")
    assert "No partition was skipped" not in shown.output


def test_a_file_that_is_not_a_tape_raises(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]")
    with pytest.raises(StorageError, match="is not an event tape"):
        read_data(tmp_path / "run.toml")
