"""The audit of a run: it agrees with what was recorded, and names whatever was changed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.config import dump_config
from decoupled_diloco.config.parties import Parties
from decoupled_diloco.config.signing_keys import PublicKey, create_signing_key
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.audit_run import ShardAudit, audit_run
from decoupled_diloco.launch.secrets import signing_key_of
from integration.real_system import Model, System, Trainer, training, until

MEMBERS = [
    {"name": name, "learners": [f"{name}-*"], "key": str(PublicKey(name.encode() * 32))}
    for name in ("a", "b")
]


@pytest.fixture
def run(make: Callable[..., System], tmp_path: Path) -> Path:
    """A copy of a run in which the shard was restarted, with recorded payloads."""
    system = make(privacy={"members": MEMBERS}, syncer={"record_payloads": True})
    (system.folder / "run.toml").write_text(dump_config(system.config))
    system.start()
    trainers = [Trainer(system, "a-0", Model(0)), Trainer(system, "b-0", Model(1))]
    with training(*trainers):
        until(lambda: system.rounds() > 4, "some rounds")
        system.stop()
        system.start()
        for trainer in trainers:
            trainer.end()
    system.wait_finished()
    copy = tmp_path / "copy"
    shutil.copytree(system.folder, copy)
    return copy


def only(found: list[ShardAudit]) -> ShardAudit:
    (shard,) = found
    return shard


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def last_merge(lines: list[str]) -> int:
    return max(i for i, line in enumerate(lines) if '"kind":"merge"' in line)


def test_a_whole_run_agrees_with_its_records(run: Path) -> None:
    found = only(audit_run(run))
    assert not found.problems
    # A stop may come between a merge and its report.
    assert found.versions - 1 <= found.compared["tape"] <= found.versions
    assert found.versions > 4
    assert found.compared["payloads"] == len(found.contributions) >= found.versions
    assert found.compared["weights"] == 4, "the final version of each fragment"
    result = CliRunner().invoke(app, ["audit", str(run), "--learner", "a-0"])
    assert result.exit_code == 0
    assert "no record was removed, moved, altered or added" in result.stdout
    assert re.search(r"^  version \d+\.\d+ of fragment \d: request ", result.stdout, re.MULTILINE)
    assert "b-0" not in result.stdout
    as_json = json.loads(CliRunner().invoke(app, ["audit", str(run), "--json"]).stdout)
    assert {each["learner"] for each in as_json["contributions"]} == {"a-0", "b-0"}


def test_the_last_record_cannot_be_removed_unnoticed(run: Path) -> None:
    path = run / "audit" / "shard-0.jsonl"
    lines = lines_of(path)
    record = json.loads(lines[last_merge(lines)])["record"]
    path.write_text("".join(lines[: last_merge(lines)]))
    found = only(audit_run(run))
    what = f"version {record['version']} of fragment {record['fragment']}"
    assert f"{what} is on the tape, but has no record: it was removed or altered" in found.problems
    assert CliRunner().invoke(app, ["audit", str(run)]).exit_code == 1


def test_a_changed_tape_is_named(run: Path) -> None:
    path = run / "tape" / "shard-0.jsonl"
    lines = lines_of(path)
    at = max(i for i, line in enumerate(lines) if '"type":"Fold"' in line)
    lines[at] = re.sub(r'"tokens":[0-9.]+', '"tokens":99999.0', lines[at])
    path.write_text("".join(lines))
    (problem,) = only(audit_run(run)).problems
    assert re.search(r"record \d+ .*: [ab]-0 has the weight .*, and .* on the tape", problem)


def test_a_truncated_tape_is_a_note(run: Path) -> None:
    path = run / "tape" / "shard-0.jsonl"
    lines = lines_of(path)
    merges = [i for i, line in enumerate(lines) if '"Made"' in line]
    path.write_text("".join(lines[: merges[-3]]))
    found = only(audit_run(run))
    assert not found.problems
    note = found.notes[0]
    assert re.fullmatch(r"the tape ends before [34] of the merges: their process had ended", note)


def test_a_changed_payload_is_named(run: Path) -> None:
    path = sorted((run / "payloads" / "shard-0" / "up").rglob("*"))[-1]
    body = bytearray(path.read_bytes())
    body[0] ^= 1
    path.write_bytes(body)
    (problem,) = only(audit_run(run)).problems
    assert "the payload of" in problem
    assert "has another digest than its record" in problem


def test_weights_that_cannot_be_read_are_named_and_the_rest_is_audited(run: Path) -> None:
    path = run / "checkpoints" / "shard-0.safetensors"
    body = bytearray(path.read_bytes())
    body[100] ^= 0xFF
    path.write_bytes(body)
    found = only(audit_run(run))
    (problem,) = found.problems
    assert problem.startswith(f"the weights cannot be compared: {path} is torn")
    assert found.compared["payloads"] == len(found.contributions)


def test_the_key_must_be_the_one_that_the_parties_agreed_on(run: Path, tmp_path: Path) -> None:
    other = create_signing_key(tmp_path / "other.key").public
    found = only(audit_run(run, Parties(parties=MEMBERS, syncer_key=other)))
    assert any(f"but parties.toml has {other}" in problem for problem in found.problems)


def test_a_shard_starts_only_with_the_key_of_the_parties(
    make: Callable[..., System], tmp_path: Path
) -> None:
    key, _ = (create_signing_key(tmp_path / f"{name}.key") for name in ("own", "other"))
    privacy = {"members": MEMBERS, "syncer_key": str(key.public)}
    system = make(privacy=privacy, syncer={"signing_key": tmp_path / "other.key"})
    with pytest.raises(ConfigError, match=r"set signing_key in .syncer. to the key that the part"):
        signing_key_of(system.config, 0, system.folder)


def test_a_run_without_parties_has_no_trail(make: Callable[..., System]) -> None:
    system = make()
    assert signing_key_of(system.config, 0, system.folder) is None
    with pytest.raises(ConfigError, match="has no audit trail: a run writes one with parties"):
        audit_run(system.folder)
