"""A run continues in its folder after everything was killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.launch.run_folder import RunFolder
from decoupled_diloco.learner.learner_checkpoint import LearnerCheckpoint
from decoupled_diloco.protocol.messages import Leased, TakenBack
from decoupled_diloco.run_model.data_usage import read_data
from decoupled_diloco.storage.data_ledger import FILE, Basis, read_ledger
from decoupled_diloco.tape.records import Record
from decoupled_diloco.tape.replay import replay_run
from process.process_runs import (
    command,
    config_file,
    kill_everything,
    orphans,
    records,
    stopped_at_exit,
    until,
)

BUDGET = 40


def clock_of(folder: Path) -> int:
    """Return the newest step that any incarnation of shard 0 has reached."""
    if not (folder / "tape" / "shard-0.jsonl").exists():
        return 0
    steps = [r.data["clock"] for r in records(folder, "shard-0") if r.type == "ClockAdvanced"]
    return max(steps, default=0)


def train(*arguments: str) -> tuple[int, str]:
    with stopped_at_exit(command("train", *arguments)) as process:
        text, _ = process.communicate(timeout=240)
        return process.returncode, text


def train_until(folder: Path, step: int, *arguments: str) -> None:
    """Train until the clock reaches this step, then kill everything."""
    with stopped_at_exit(command("train", *arguments)) as process:
        until(lambda: clock_of(folder) >= step or process.poll() is not None, f"step {step}", 60)
        assert process.poll() is None, process.communicate()[0]
        kill_everything(folder, process)


def lives(folder: Path, process: str) -> list[list[Record]]:
    found: list[list[Record]] = []
    for record in records(folder, process):
        found += [[]] if record.kind == "start" else []
        found[-1].append(record)
    return found


def published(folder: Path) -> list[tuple[int, tuple[int, int]]]:
    """Return fragment and version of each copy that a shard announced, in order."""
    return [
        (message["fragment"], (message["version"]["term"], message["version"]["counter"]))
        for r in records(folder, "shard-0")
        if r.type == "Broadcast" and (message := r.data["message"])["type"] == "Published"
    ]


def check(folder: Path) -> None:
    """Check that no version decreases or is issued twice with other bits, and that the tape
    replays.
    """
    newest: dict[int, tuple[int, int]] = {}
    counters: dict[int, int] = {}
    for fragment, version in published(folder):
        assert version >= newest.get(fragment, version)
        assert version[1] >= counters.get(fragment, 0), "a version that was received was lost"
        newest[fragment], counters[fragment] = version, version[1]
    results, problems = replay_run(folder)
    assert not [p for p in problems if "torn" not in p]
    assert {r.process: r.differences for r in results if r.differences} == {}


def test_a_run_continues_after_everything_was_killed_repeatedly(tmp_path: Path) -> None:
    folder, rng = tmp_path / "run", random.Random(4)
    budget = 4 * BUDGET  # long after the last kill, even if that is late
    file = config_file(
        folder,
        run={"max_steps": budget},
        syncer={"shards": 2},
        learner={"checkpoint_interval_seconds": 0.5},
    )
    steps = sorted(rng.randint(1, BUDGET - 8) for _ in range(5))
    train_until(folder, steps[0], str(file))
    token = (folder / "token").read_text()
    for step in steps[1:]:
        train_until(folder, step, "--resume", str(folder))
    code, text = train("--resume", str(folder))
    assert code == 0, text
    assert (folder / "weights.safetensors").exists()
    assert (folder / "token").read_text() == token
    check(folder)
    kept = [LearnerCheckpoint.read(path) for path in (folder / "learners").glob("*/*.safetensors")]
    assert sorted(each.learner for each in kept) == ["learner-0", "learner-1"]
    assert all(each.fragments == () and set(each.model) <= {"cos", "sin"} for each in kept)
    beginnings = [
        [r.data["clock"] for r in life if r.type == "ClockAdvanced"]
        for life in lives(folder, "shard-0")
    ]
    clocks = [life for life in beginnings if life]
    for before, after in pairwise(clocks):
        assert after[0] >= before[-1] - 4, "the clock continues within a period of its last value"
    code, text = train("--resume", str(folder))
    assert code == 0
    assert "already finished" in text
    more = clock_of(folder) + 12  # the loops continued until they received the end
    code, text = train("--resume", str(folder), "--set", f"run.max_steps={more}")
    assert code == 0, text
    check(folder)
    assert clock_of(folder) >= more
    tapes = [record for own in kept for record in records(folder, own.learner)]
    whys = [record.data["why"] for record in tapes if record.type == "Recovered"]
    assert any(f"its own checkpoint of step {own.steps}," in why for own in kept for why in whys)


def checkpoints(folder: Path) -> list[int]:
    """Return the complete checkpoints of the run, in ascending order."""
    return sorted(int(p.parent.name) for p in folder.glob("checkpoints/*/manifest.json"))


def test_a_run_returns_to_a_consistent_checkpoint_and_names_a_corrupt_one(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    file = config_file(
        folder,
        run={"max_steps": 5 * BUDGET, "checkpoint_interval_seconds": 1.0},
        syncer={"shards": 2},
        learner={"checkpoint_interval_seconds": 1.0},
    )
    with stopped_at_exit(command("train", str(file))) as process:
        until(
            lambda: len(checkpoints(folder)) >= 2 or process.poll() is not None,
            "two checkpoints",
            60,
        )
        assert process.poll() is None, process.communicate()[0]
        kill_everything(folder, process)
    *_, before, newest = checkpoints(folder)
    part = folder / f"checkpoints/{newest:06d}/shard-1.safetensors"
    content = bytearray(part.read_bytes())
    content[-20] ^= 1
    part.write_bytes(content)
    code, text = train("--resume", str(folder), "--checkpoint", str(newest))
    assert code == 6
    assert "is torn" in text
    assert f"choose one of {before}, or" in text or f", {before}, or" in text
    code, text = train("--resume", str(folder), "--checkpoint", "last")
    assert code == 0, text
    assert f"checkpoint {newest} is not used" in text
    assert f"back to checkpoint {before}" in text
    assert list(folder.glob("set-aside-1/durable/shard-1/*.safetensors"))
    check_data(folder)
    recovered = [r for r in records(folder, "learner-0") if r.type == "Recovered"]
    assert recovered[-1].data["way"] == "checkpoint"
    assert recovered[-1].data["kept"] + recovered[-1].data["overwritten"] == 4
    results, _ = replay_run(folder)
    assert {r.process: r.differences for r in results if r.differences} == {}
    code, text = train(str(file), "--checkpoint", "last")
    assert code == 2


def check_data(folder: Path) -> None:
    """Check that the ledger returned with the checkpoint, is consistent, and issues no lease number
    twice.
    """
    basis = [item for item in read_ledger(folder / FILE) if isinstance(item, Basis)]
    assert len(basis) == 1
    account = read_data(folder)
    assert account.problems == []
    leased = [item.lease for item in read_ledger(folder / FILE) if isinstance(item, Leased)]
    assert len(leased) == len(set(leased))
    back = [item for item in read_ledger(folder / FILE) if isinstance(item, TakenBack)]
    assert {item.learner for item in back} >= set(basis[0].book.holders), (
        "incarnations before the checkpoint"
    )


def run_command(*arguments: str) -> tuple[int, str]:
    with stopped_at_exit(command(*arguments)) as process:
        text, _ = process.communicate(timeout=240)
        return process.returncode, text


def process_id(folder: Path, of: str) -> int:
    return next(int(each.partition(":")[0]) for each in orphans(folder) if of in each)


@pytest.mark.smoke
def test_a_checkpoint_on_demand_and_one_that_a_kill_interrupted(tmp_path: Path) -> None:
    """The second one waits for a stalled learner when all are killed, and is not used."""
    folder = tmp_path / "run"
    file = config_file(folder, run={"max_steps": 100 * BUDGET}, syncer={"shards": 2})
    with stopped_at_exit(command("train", str(file))) as process:
        until(lambda: clock_of(folder) >= 4 or process.poll() is not None, "step 4", 60)
        code, text = run_command("checkpoint", str(folder))
        assert (code, checkpoints(folder)) == (0, [1]), text
        assert "checkpoint 1 of the whole run" in text
        assert str(folder / "checkpoints/000001") in text.replace("\n", "")
        code, text = run_command("status", str(folder), "--json")
        status = json.loads(text)["checkpoint"]
        parts = [
            *folder.glob("checkpoints/*/*.safetensors"),
            *folder.glob("learners/*/*checkpoint-1*"),
        ]
        assert status["number"] == 1
        assert status["nbytes"] == sum(part.stat().st_size for part in parts)
        assert status["missing"] == []
        wrong = tmp_path / "wrong"
        wrong.write_text("not the secret")
        code, text = run_command("checkpoint", str(folder), "--auth-token-file", str(wrong))
        assert code == 5, text
        os.kill(process_id(folder, "--index 1"), signal.SIGSTOP)
        # Within this process: on a busy machine, a command may start more slowly than a lease
        # expires, and a checkpoint does not wait for an evicted learner.
        done = CliRunner().invoke(app, ["checkpoint", str(folder), "--timeout-seconds", "2"])
        assert done.exit_code == 1
        assert "waiting for the parts of learner-1" in done.output
        kill_everything(folder, process)
    assert (folder / "checkpoints/000002").exists()
    assert checkpoints(folder) == [1]
    short = ("--set", f"run.max_steps={clock_of(folder) + 8}")
    code, text = train("--resume", str(folder), "--checkpoint", "last", *short)
    assert code == 0, text
    assert "checkpoint 2 is not used" in text
    assert "back to checkpoint 1" in text
    check_data(folder)


SYNCHRONOUS = {
    "fragments": 1,
    "sync_every": 5,
    "overlap_steps": 0,
    "quorum": 2,
    "participation": "all",
    "merge": {"rule": "mean"},
    "wait": "at_overlap",
    "grace_margin": 0.0,
}


def test_a_synchronous_run_continues_from_a_checkpoint_to_the_same_bits(
    tmp_path: Path,
) -> None:
    folder, kept = tmp_path / "run", tmp_path / "kept"
    file = config_file(
        folder,
        run={"max_steps": 30, "checkpoint_interval_seconds": 1.0},
        sync=SYNCHRONOUS,
        data={"elastic": False},
        workload={"step_seconds": 0.15},
    )
    with stopped_at_exit(command("train", str(file))) as process:
        until(lambda: checkpoints(folder) or process.poll() is not None, "a checkpoint", 60)
        assert process.poll() is None, process.communicate()[0]
        kill_everything(folder, process)
    number = checkpoints(folder)[0]
    folder.rename(kept)
    results = []
    for _ in range(2):
        shutil.copytree(kept, folder)
        code, text = train("--resume", str(folder), "--checkpoint", str(number))
        assert code == 0, text
        results.append(load_file(folder / "weights.safetensors"))
        shutil.rmtree(folder)
    first, second = results
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(tensor.abs().sum() > 0 for tensor in first.values())


def test_a_run_that_cannot_continue_is_explained(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, text = train("--resume", str(folder))
    assert code == 2
    assert "is not a run folder" in text
    file = config_file(folder)
    train_until(folder, 2, str(file))
    code, text = train("--resume", str(folder), "--set", "sync.sync_every=5")
    assert code == 2
    assert "sync.sync_every is 5 here and 4 there" in text
    code, text = train("--resume", str(folder), "--set", "run.learners=3")
    assert code == 2
    assert "run.learners" in text
    with RunFolder(folder, resume=True):
        code, text = train("--resume", str(folder))
    assert code == 2
    assert "in use" in text
    assert "run.folder" not in text
    state = max((folder / "coordinator").glob("*.json"))
    state.write_text(json.dumps({"state": 1}))
    code, text = train("--resume", str(folder))
    assert code == 6
    assert f"{state.name} cannot be read" in text
