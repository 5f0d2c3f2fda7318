"""A run's numbers in TensorBoard, Weights & Biases and MLflow, by their own libraries."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.local import LocalRun
from process.runs import config_of, local_run, logs, wait

SHORT = {"budget_steps": 240, "evaluator": True, "evaluate_every_seconds": 1.0}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All that TensorBoard reads from a folder: steps and values by tag."""
    read = EventAccumulator(str(folder))
    read.Reload()
    return {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def run_of(config: RunConfig) -> None:
    # Its environment is the test's: the shared fork server has that of an earlier moment.
    with local_run(config, own_server=True) as run:
        run.start()
        assert wait(run).finished, logs(run.path)


def test_a_run_is_logged_to_all_places_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = f"file://{tmp_path / 'mlruns'}"
    places = ("tensorboard", "wandb:mine", f"mlflow:{tracking}")
    folder = tmp_path / "run"
    run_of(config_of(folder, run={**SHORT, "log": places}))

    found = scalars(folder / "tensorboard")
    steps = [step for step, _ in found["diloco/run_step"]]
    assert steps == sorted(steps), "steps never go back"
    assert steps[-1] >= SHORT["budget_steps"], logs(folder)
    assert found["diloco/run_step"][-1] == (steps[-1], float(steps[-1]))
    kept = 1 - found["diloco/discarded_tokens"][-1][1] / found["diloco/tokens"][-1][1]
    assert found["diloco/kept_share"][-1][1] == pytest.approx(kept, rel=1e-4)
    for tag in ("learner-0/loss", "learner-1/loss", "evaluation/loss", "diloco/bytes_up"):
        assert found[tag][-1][1] > 0
    assert 1 <= max(value for _, value in found["diloco/learners"]) <= 2

    (kept_by_wandb,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    told = kept_by_wandb.read_bytes()
    assert all(tag.encode() in told for tag in ("diloco/run_step", "learner-1/loss"))

    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=tracking)
    experiment = client.get_experiment_by_name("decoupled-diloco")
    (one,) = client.search_runs([experiment.experiment_id])
    assert one.info.run_name == "small"
    assert one.info.status == "FINISHED"
    assert one.data.metrics["diloco/run_step"] == steps[-1]
    assert math.isfinite(one.data.metrics["learner-0/loss"])


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("tensorbord", "log='tensorbord' is no place: write 'tensorboard', 'wandb', 'mlflow'"),
        ("wandb", "wandb is not installed: pip install 'decoupled-diloco\\[wandb\\]'"),
    ],
)
def test_a_place_that_cannot_be_is_told_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, sentence: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=sentence):
        LocalRun(config_of(tmp_path / "run", run={**SHORT, "log": (place,)}))
    assert not (tmp_path / "run").exists()
