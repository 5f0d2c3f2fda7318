"""The ledger adds up, or says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.errors import StorageError
from decoupled_diloco.observe.data_ledger import account_of_data, read_data
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.protocol.data_leases.coordinator import LeaseBook, apply
from decoupled_diloco.protocol.data_leases.ledger import (
    DataDescribed,
    Leased,
    LedgerEntry,
    Repeated,
    Settled,
    TakenBack,
)
from decoupled_diloco.storage.data_ledger import Basis, DataLedger

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


def test_every_part_is_accounted_for() -> None:
    account = account_of_data(RIGHT)
    assert not account.problems
    assert (account.count(0, "durable"), account.count(1, "training")) == (2, 1)
    assert account.shares(0) == {"a": 14, "b": 3}
    assert [(s.learner, s.first, s.end) for s in account.turns[0][1].spans] == [
        ("b", 0, 3),
        ("a", 3, 8),
    ]


def test_what_was_trained_again_is_listed() -> None:
    told = [(r.learner, r.part, r.first, r.end) for r in account_of_data(RIGHT).repeats]
    assert told == [("b", 1, 3, 5), ("a", 1, 0, 4)]


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([TWO, A, Leased(2, 0, 0, 0, "b", 1)], "part 0 of pass 0 is leased to b and to a"),
        (
            [TWO, A, Settled(1, "a", 9), Leased(2, 0, 0, 0, "b", 1)],
            "part 0 of pass 0 is durable, and leased once more, to b",
        ),
        (
            [TWO, A, TakenBack(1, "a", 3, 5, ""), Leased(2, 0, 0, 5, "b", 1)],
            "batches 3 to 4 are skipped",
        ),
        (
            [TWO, A, TakenBack(1, "a", 3, 5, ""), Leased(2, 0, 0, 0, "b", 1)],
            "batches 0 to 2 are durable twice",
        ),
        ([TWO, A, Settled(1, "a", 9), Leased(2, 1, 0, 0, "b", 1)], r"parts \[1\] of pass 0 are sk"),
        ([TWO, A, Settled(1, "a", 9), Settled(1, "a", 9)], "lease 1 ends, and is not in force"),
        ([TWO, Settled(7, "a", 9)], "lease 7 ends, and was never given"),
        ([TWO, Leased(1, 0, 2, 0, "a", 1)], r"parts \[2\] of pass 0 are not of the data"),
    ],
)
def test_what_must_not_be_is_told(entries: list[LedgerEntry], problem: str) -> None:
    (told,) = account_of_data(entries).problems
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(told)


def test_a_run_that_went_back_is_judged_by_what_it_kept() -> None:
    book = LeaseBook()
    for entry in RIGHT[:3]:
        apply(book, entry)
    account = account_of_data([*RIGHT, Basis(book), Settled(1, "a", 9)])
    assert not account.problems
    assert (account.undone, account.count(0, "durable")) == (len(RIGHT) - 3, 1)


def test_the_command_tells_it(tmp_path: Path) -> None:
    ledger = DataLedger(tmp_path, LeaseBook())
    ledger.append(RIGHT)
    shown = CliRunner().invoke(app, ["ledger", str(tmp_path)])
    assert shown.exit_code == 0
    assert "part 1 of pass 0: b from batch 0, then a from batch 3" in shown.output
    assert "part 1 of pass 0: 2 batches from 3 on, by b (epoch 1): b is gone" in shown.output
    assert "Nothing is skipped, and nothing is durable twice." in shown.output
    told = json.loads(CliRunner().invoke(app, ["ledger", str(tmp_path), "--json"]).output)
    assert told["turns"]["0"]["1"]["spans"][1]["learner"] == "a"
    ledger.append([Leased(9, 1, 0, 0, "b", 1)])
    ledger.close()
    shown = CliRunner().invoke(app, ["ledger", str(tmp_path)])
    assert shown.exit_code == 1
    assert "part 0 of pass 1 is leased to b and to a" in shown.output


def test_a_folder_without_a_ledger_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"has no data\.ledger, and no tape either"):
        read_data(tmp_path)


def test_data_that_were_not_leased_are_not_said_to_be_complete(tmp_path: Path) -> None:
    TapeWriter(tmp_path / "tape", "coordinator").close()
    shown = CliRunner().invoke(app, ["ledger", str(tmp_path)])
    assert shown.exit_code == 0
    assert shown.output.startswith("The data of this run were not leased")
    assert "Nothing is skipped" not in shown.output


def test_what_is_no_tape_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]")
    with pytest.raises(StorageError, match="is no event tape"):
        read_data(tmp_path / "run.toml")
