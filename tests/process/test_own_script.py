"""Users' own programs as learners of `ddiloco train`: killed, they rejoin and are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.run_model import read_run
from decoupled_diloco.show.report import write_report
from decoupled_diloco.storage.weight_files import load_weights
from decoupled_diloco.tape.samples import ProcessEnded
from process.own_script import config_of, programs
from process.process_runs import local_run, logs, records, until, wait


@pytest.mark.parametrize(
    ("example", "settings"),
    [
        ("train", ["run.max_steps=200"]),
        ("train_ddp", ["run.max_steps=120"]),
        ("trainer_hf", ["run.max_steps=60"]),
    ],
)
def test_a_killed_program_rejoins(example: str, settings: list[str], tmp_path: Path) -> None:
    if example == "trainer_hf":
        pytest.importorskip("transformers")
    folder = tmp_path / "run"
    config = config_of(example, folder, "faults=[{at=0.2, kill='learner-1'}]", *settings)
    with local_run(config) as run:
        run.start()
        outcome = wait(run, seconds=180)
    assert outcome.finished, f"{outcome.reason}: {logs(folder)}"
    assert outcome.weights is not None
    assert all(tensor.isfinite().all() for tensor in load_weights(outcome.weights).values())
    own = records(folder, "learner-1")
    assert [r.data["header"]["epoch"] for r in own if r.kind == "start"] == [1, 2]
    ended = [r.data for r in records(folder, "launcher") if r.type == "ProcessEnded"]
    assert {"signal": 9} in [
        {"signal": each["signal"]} for each in ended if each["name"] == "learner-1"
    ]
    assert not programs(folder)
    model = read_run(folder)
    write_report(model, folder / "report.html")
    assert set(model.trained) == {"learner-0", "learner-1"}
    assert "learner-1" in (folder / "report.html").read_text()
    assert bool(model.evaluations) == (example == "train_ddp")


def test_a_run_without_programs_reports_it(tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text(
        """
import torch
import decoupled_diloco as dd

with dd.Learner(torch.nn.Linear(4, 4)) as learner:
    for _ in range(5):
        learner.step(tokens=1)
"""
    )
    config = RunConfig(
        run={"folder": tmp_path / "run", "learners": 1, "max_steps": 1_000_000},
        sync={"fragments": 1, "sync_every": 2, "overlap_steps": 1},
        syncer={"port": 0},
        learner={"command": ["python", str(script)], "flush_seconds": 0.0},
    )
    with local_run(config) as run:
        run.start()
        outcome = wait(run)
    assert not outcome.finished
    assert outcome.reason.startswith("every learner has left at step")
    codes = [r.data for r in records(run.path, "launcher") if r.type == ProcessEnded.__name__]
    assert [each["code"] for each in codes if each["name"] == "learner-0"] == [0]


@pytest.mark.smoke
def test_sigterm_flushes_and_keeps_a_checkpoint(tmp_path: Path) -> None:
    config = config_of("train", tmp_path / "run", "run.max_steps=1_000_000")
    with local_run(config) as run:
        run.start()
        kept = run.path / "learners"
        until(lambda: run.followed.poll() or run.followed.run.global_step > 40, "it trains", 90)
        run.stop()
    ended = [r.data for r in records(run.path, "launcher") if r.type == ProcessEnded.__name__]
    codes = {each["name"]: each["code"] for each in ended}
    assert (codes["learner-0"], codes["learner-1"]) == (130, 130)
    for name in ("learner-0", "learner-1"):
        assert list((kept / name).glob("*")), "a checkpoint"
        said = [r.type for r in records(run.path, name)]
        assert "DrainAsked" in said, "the learner flushes"
    assert not programs(run.path)
