"""Replay weights from tape and payloads: every version bit for bit, or a note why not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.config.sync import ROBUST_RULES
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.storage.weight_files import load_weights, save_weights
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.samples import PayloadsEnded
from decoupled_diloco_lab.simulate.protocol_run import ProtocolRun
from decoupled_diloco_lab.simulate.scenario import load_scenario
from decoupled_diloco_lab.simulate.simulation import Simulation
from decoupled_diloco_lab.simulate.weights_replay import WeightsReplay, replay_weights

RUN = """
[run]
max_steps = 40
evaluator = false

[sync]
fragments = 4
sync_every = 8
overlap_steps = 2
quorum = 2

[syncer]
shards = 2
record_payloads = true

[workload]
name = "paced"

[workload.options]
layers = 1
width = 32
heads = 2
context = 16
batch_size = 2
corpus_bytes_max = 200_000
warmup_steps = 0

[[learners]]
name = "near"
count = 2
variance = 0.1

[[learners]]
name = "far"
step_seconds = 1.5
variance = 0.1

[[events]]
at_seconds = 12.0
kind = "kill"
target = "shard-1"
for_seconds = 3.0

[[events]]
at_step = 22
kind = "kill"
target = "learner-0"
for_seconds = 6.0
"""


def simulated(folder: Path, text: str = RUN) -> Simulation:
    """Simulate a scenario to its end in this process."""
    folder.mkdir()
    (folder / "story.toml").write_text(text)
    simulation = Simulation(load_scenario(folder / "story.toml"), folder)
    while simulation.advance():
        pass
    assert simulation.finished, simulation.reason
    simulation.finish()
    simulation.close()
    return simulation


class Answer(NamedTuple):
    code: int
    text: str


def ddiloco(*arguments: str | Path) -> Answer:
    """Run the command in this process."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return Answer(done.exit_code, done.output)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "kept"
    simulated(folder)
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may corrupt."""
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def published(folder: Path) -> int:
    """Count the published versions on the tape."""
    versions = set()
    for record in TapeReader(folder):
        message = record.data.get("message", {})
        if record.kind == "effect" and message.get("type") == "Published":
            versions.add((message["fragment"], *message["version"].values()))
    return len(versions)


def test_every_published_version_and_the_final_weights_are_the_same(run: Path) -> None:
    """A shard dies during the run and recovers from its disk."""
    results = replay_weights(run)
    assert [result.process for result in results] == ["shard-0", "shard-1"]
    for result in results:
        assert result.final == "the same"
        assert (result.unknown, result.differences, result.notes) == (0, [], [])
        assert result.merges >= 8
    assert sum(result.versions for result in results) == published(run) > 20
    lives = [r for r in TapeReader(run) if r.process == "shard-1" and r.kind == "start"]
    assert len(lives) == 2


@pytest.mark.parametrize("rule", ROBUST_RULES)
def test_the_weights_of_a_robust_rule_are_the_same(rule: str, tmp_path: Path) -> None:
    text = RUN.replace("[syncer]", f'[sync.merge]\nrule = "{rule}"\n\n[syncer]')
    simulated(tmp_path / "robust", text.replace("max_steps = 40", "max_steps = 24"))
    for result in replay_weights(tmp_path / "robust"):
        assert result.merges >= 4
        assert (result.final, result.unknown, result.differences) == ("the same", 0, [])


def test_the_command_reports_the_same_bits(run: Path) -> None:
    done = ddiloco("replay", run)
    assert done.code == 0, done.text
    assert done.text.count("the same bits") == 2
    assert "the same bits" not in ddiloco("replay", run, "--no-weights").text


def test_until_computes_the_beginning(run: Path) -> None:
    some, every = replay_weights(run, 15.0), replay_weights(run)
    assert 0 < some[0].versions < every[0].versions
    assert some[0].final == "none"
    assert not some[0].differences


def test_a_payload_with_another_bit_is_found(copied: Path) -> None:
    body = sorted((copied / "payloads/shard-0/up").glob("1/0/learner-0/*/*"))[1]
    content = bytearray(body.read_bytes())
    content[5] ^= 1
    body.write_bytes(content)
    result = replay_weights(copied)[0]
    assert result.unknown > 0
    assert "was announced" in result.notes[0]
    assert ddiloco("replay", copied).code == 1


def assert_found(results: list[WeightsReplay], why: str) -> None:
    assert results[0].differences, why
    assert "version 1." in results[0].differences[0]
    assert not results[1].differences


def test_different_final_weights_are_found(copied: Path) -> None:
    path = copied / "checkpoints" / "shard-1.safetensors"
    state = load_weights(path)
    state["fragment.1"][0] += 1e-3
    save_weights(path, state)
    results = replay_weights(copied)
    assert [result.final for result in results] == ["the same", "others"]
    assert ddiloco("replay", copied).code == 1


def test_a_missing_payload_is_named_and_its_versions_are_unknown(copied: Path) -> None:
    body = sorted((copied / "payloads/shard-0/up").glob("1/0/learner-0/*/*"))[1]
    body.unlink()
    result = replay_weights(copied)[0]
    assert result.unknown > 0
    assert not result.differences
    assert result.final == "others"
    assert "/up/1/0/learner-0/" in result.notes[0]
    assert "was not recorded" in result.notes[0]


def test_without_payloads_the_error_names_the_setting(copied: Path) -> None:
    shutil.rmtree(copied / "payloads")
    with pytest.raises(StorageError, match=r"syncer\.record_payloads = true"):
        replay_weights(copied)
    done = ddiloco("replay", copied)
    assert done.code == 0
    assert "same bits" not in done.text


def test_a_full_disk_ends_the_recording_but_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter(range(10**9))

    def usage(path: Path) -> shutil._ntuple_diskusage:
        return shutil._ntuple_diskusage(10**12, 0, 10**12 if next(free) < 25 else 10**6)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    simulated(tmp_path / "full")
    ends = [r.value() for r in TapeReader(tmp_path / "full") if r.type == "PayloadsEnded"]
    assert len(ends) == 2
    assert isinstance(ends[0], PayloadsEnded)
    assert "the journal may need" in ends[0].problem
    for result in replay_weights(tmp_path / "full"):
        assert result.unknown > 0
        assert any(note.startswith("recording ended: ") for note in result.notes)
        assert not result.differences


def test_recording_payloads_without_tensors_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "story.toml").write_text(RUN)
    with pytest.raises(ConfigError, match=r"syncer\.record_payloads=true would be ignored"):
        ProtocolRun(load_scenario(tmp_path / "story.toml"))
