"""Users' own programs as learners of `ddiloco train`: killed, they rejoin and are reported."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.observe.report import write_report
from decoupled_diloco.observe.run_model import read_run
from decoupled_diloco.observe.samples import ProcessEnded
from decoupled_diloco.storage.weights import load_weights
from process.runs import local_run, logs, records, until, wait

EXAMPLES = Path(__file__).parents[2] / "examples"


def config_of(example: str, folder: Path, *settings: str) -> RunConfig:
    """The run file of an example, whose programs are found from any folder."""
    config = load_config(
        EXAMPLES / f"{example}.toml",
        [
            f"run.folder={str(folder)!r}",
            "syncer.port=0",
            "learner.checkpoint_every_seconds=1.0",
            "sync.quorum=2",  # the run cannot end before a killed learner is back
            *settings,
        ],
    )
    run, learner = config.run, config.learner
    found = [word.replace("examples/", f"{EXAMPLES}/") for word in learner.command]
    evaluate = [word.replace("examples/", f"{EXAMPLES}/") for word in run.evaluate_command]
    return config.model_copy(
        update={
            "learner": learner.model_copy(update={"command": tuple(found)}),
            "run": run.model_copy(update={"evaluate_command": tuple(evaluate)}),
        }
    )


def programs(folder: Path) -> list[str]:
    """Processes that were started for the learners of a run, ranks of torchrun included."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            told = (entry / "environ").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if f"DDILOCO_CHECKPOINT={folder}/learners".encode() in told and state != "Z":
                found.append(f"{entry.name}: {(entry / 'cmdline').read_text()}")
    return found


@pytest.mark.parametrize(
    ("example", "settings"),
    [
        ("train", ["run.budget_steps=200"]),
        ("train_ddp", ["run.budget_steps=120"]),
        ("trainer_hf", ["run.budget_steps=60"]),
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
    write_report(model, folder / "report.html", folder / "report.png")
    assert set(model.trained) == {"learner-0", "learner-1"}
    assert "learner-1" in (folder / "report.html").read_text()
    assert bool(model.evaluations) == (example == "train_ddp")


def test_a_run_that_all_programs_have_left_says_so(tmp_path: Path) -> None:
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
        run={"folder": tmp_path / "run", "learners": 1, "budget_steps": 1_000_000},
        sync={"fragments": 1, "period": 2, "overlap": 1},
        syncer={"port": 0},
        learner={"command": ["python", str(script)], "hand_in_seconds": 0.0},
    )
    with local_run(config) as run:
        run.start()
        outcome = wait(run)
    assert not outcome.finished
    assert outcome.reason.startswith("every learner has left at step")
    codes = [r.data for r in records(run.path, "launcher") if r.type == ProcessEnded.__name__]
    assert [each["code"] for each in codes if each["name"] == "learner-0"] == [0]


def test_sigterm_flushes_and_keeps_a_checkpoint(tmp_path: Path) -> None:
    config = config_of("train", tmp_path / "run", "run.budget_steps=1_000_000")
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
        assert "DrainAsked" in said, "it flushes"
    assert not programs(run.path)
