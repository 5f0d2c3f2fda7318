"""The audit trail of a shard: what was removed, moved, altered or added is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from decoupled_diloco.config.signing_keys import SigningKey, create_signing_key
from decoupled_diloco.protocol.messages import Asking, Merge, Version
from decoupled_diloco.protocol.syncer_state import Ask
from decoupled_diloco.storage.journal import Journal
from decoupled_diloco.syncer.audit_trail import (
    AUDIT,
    AuditTrail,
    ChainCheck,
    SignedRecord,
    check_chain,
    read_trail,
)


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return create_signing_key(tmp_path / "key")


_opened: list[AuditTrail | Journal] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def trail_of(run: Path, key: SigningKey, claim: int = 0) -> AuditTrail:
    trail = AuditTrail(run, 0, key, journals=run / "durable", about={"run": "r"}, claim=claim)
    _opened.append(trail)
    return trail


def merge(trail: AuditTrail, counter: int, fragment: int = 0) -> SignedRecord:
    name = Asking(1, counter)
    trail.announced(name, f"payload-{counter}")
    base = Version(1, counter - 1)
    ask = Ask(name, fragment, "learner-0", 1, "/up", base, 0.0, 1, False, weight=2.0)
    order = Merge(counter, fragment, Version(1, counter), base, "all")
    line = trail.merged(order, [ask], f"copy-{counter}")
    trail.keep(line)
    return line


def checked(run: Path) -> ChainCheck:
    lines, problems = read_trail(run, 0)
    found = check_chain(lines)
    found.problems[:0] = problems
    return found


def rewrite(run: Path, change: Callable[[list[str]], object], name: str = "shard-0") -> None:
    path = run / AUDIT / f"{name}.jsonl"
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("".join(line + "\n" for line in lines))


def whole(run: Path, key: SigningKey) -> list[SignedRecord]:
    trail = trail_of(run, key)
    return [merge(trail, counter) for counter in range(1, 6)]


def test_a_whole_chain_has_no_problem_and_names_the_contributions(
    tmp_path: Path, key: SigningKey
) -> None:
    whole(tmp_path, key)
    found = checked(tmp_path)
    assert (found.problems, found.notes, found.keys) == ([], [], [key.public])
    assert [record["version"] for record in found.merges] == [f"1.{n}" for n in range(1, 6)]
    assert found.merges[2]["contributions"] == [["learner-0", "1.3", "payload-3", 2.0, ""]]


def test_a_removed_record_is_named(tmp_path: Path, key: SigningKey) -> None:
    whole(tmp_path, key)
    rewrite(tmp_path, lambda lines: lines.pop(2))
    assert checked(tmp_path).problems == [
        "record 3 was removed: record 4 (version 1.3 of fragment 0) follows record 2"
    ]


def test_an_altered_record_is_named(tmp_path: Path, key: SigningKey) -> None:
    whole(tmp_path, key)
    rewrite(tmp_path, lambda ls: ls.__setitem__(3, ls[3].replace("learner-0", "learner-9")))
    (problem,) = checked(tmp_path).problems
    assert problem.startswith("record 4 (version 1.3 of fragment 0) was altered or added")


def test_a_moved_record_is_named(tmp_path: Path, key: SigningKey) -> None:
    whole(tmp_path, key)
    rewrite(tmp_path, lambda lines: lines.insert(2, lines.pop(4)))
    problems = checked(tmp_path).problems
    assert problems[0] == (
        "records 3 to 4 were removed: record 5 (version 1.4 of fragment 0) follows record 2"
    )
    assert "record 3 (version 1.2 of fragment 0) is not in its place" in problems[1]


def test_an_added_record_is_named(tmp_path: Path, key: SigningKey) -> None:
    whole(tmp_path, key)
    rewrite(tmp_path, lambda lines: lines.insert(4, lines[2]))
    assert checked(tmp_path).problems == [
        "record 3 (version 1.2 of fragment 0) was added: it occurs twice"
    ]
    other = create_signing_key(tmp_path / "other")
    record = {"number": 7, "previous": "", "kind": "merge", "fragment": 0, "version": "1.6"}
    forged = SignedRecord(record, other.sign(json.dumps(record).encode()))
    rewrite(tmp_path, lambda lines: lines.pop(4))
    rewrite(tmp_path, lambda lines: lines.append(json.dumps(forged.json)))
    assert checked(tmp_path).problems == [
        "record 7 (version 1.6 of fragment 0) was altered or added: its signature is not valid"
    ]


def test_a_line_that_is_no_record_is_named(tmp_path: Path, key: SigningKey) -> None:
    whole(tmp_path, key)
    rewrite(tmp_path, lambda lines: lines.__setitem__(3, "{"))
    assert checked(tmp_path).problems[0] == (
        "line 4 of shard-0.jsonl is not a record: it was altered"
    )


def test_a_restart_continues_the_chain_after_a_torn_line(tmp_path: Path, key: SigningKey) -> None:
    whole(tmp_path, key)
    path = tmp_path / AUDIT / "shard-0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"record":{"num')
    merge(trail_of(tmp_path, key), 6)
    found = checked(tmp_path)
    assert not found.problems
    assert [record["number"] for record in found.merges] == [2, 3, 4, 5, 6, 8]


def test_records_that_a_power_failure_lost_come_from_the_journal(
    tmp_path: Path, key: SigningKey
) -> None:
    lines = whole(tmp_path, key)
    journal = Journal(tmp_path / "durable" / "00000001.journal")
    _opened.append(journal)
    for line in lines:
        journal.append({"fragment": 0, "audit": line.json}, b"body")
    rewrite(tmp_path, lambda lines: lines.__delitem__(slice(3, None)))
    trail_of(tmp_path, key)
    found = checked(tmp_path)
    assert not found.problems
    assert [record["version"] for record in found.merges] == [f"1.{n}" for n in range(1, 6)]


def test_a_standby_continues_the_chain_and_later_records_of_the_old_process_do_not_count(
    tmp_path: Path, key: SigningKey
) -> None:
    old = trail_of(tmp_path, key, claim=1)
    merge(old, 1)
    new = trail_of(tmp_path, key, claim=2)
    merge(old, 2)  # it has lost its claim, and no process receives the version
    merge(new, 2)
    found = checked(tmp_path)
    assert not found.problems
    assert found.notes == ["records 3 to 3 of shard-0.1.jsonl were never published"]
    assert [record["number"] for record in found.merges] == [2, 4]


def test_another_key_is_noted_and_a_pinned_one_is_required(tmp_path: Path, key: SigningKey) -> None:
    whole(tmp_path, key)
    other = create_signing_key(tmp_path / "other")
    merge(trail_of(tmp_path, other), 6)
    lines, _ = read_trail(tmp_path, 0)
    found = check_chain(lines)
    assert found.keys == [key.public, other.public]
    assert not found.problems
    assert len(found.notes) == 1
    problems = check_chain(lines, key.public).problems
    assert "names the key" in problems[0]
    assert "record 8 (version 1.6 of fragment 0) was altered or added" in problems[-1]
