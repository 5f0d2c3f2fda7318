"""A run's numbers in TensorBoard, Weights & Biases and MLflow, through their own libraries."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import encrypted
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.local import LocalRun
from free_ports import free_ports
from process.process_runs import (
    command,
    config_file,
    config_of,
    local_run,
    logs,
    scalars,
    stopped_at_exit,
    until,
    wait,
)

SHORT = {"max_steps": 240, "evaluator": True, "evaluate_interval_seconds": 1.0}


def run_of(config: RunConfig) -> None:
    # No shared fork server: its environment is older than the test's.
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
    run_of(config_of(folder, run={**SHORT, "trackers": places}))

    found = scalars(folder / "tensorboard")
    steps = [step for step, _ in found["diloco/run_step"]]
    assert steps == sorted(steps), "steps never decrease"
    assert steps[-1] >= SHORT["max_steps"], logs(folder)
    assert found["diloco/run_step"][-1] == (steps[-1], float(steps[-1]))
    kept = 1 - found["diloco/discarded_tokens"][-1][1] / found["diloco/tokens"][-1][1]
    assert found["diloco/kept_share"][-1][1] == pytest.approx(kept, rel=1e-4)
    for tag in ("learner-0/loss", "learner-1/loss", "evaluation/loss", "diloco/bytes_up"):
        assert found[tag][-1][1] > 0
    assert found["diloco/learners"][-1][1] == 0, "at the end no learner is stepping"

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


def learners(file: Path, stack: ExitStack, *options: str) -> list[subprocess.Popen[str]]:
    """Run both learners of a run, started by hand."""
    told = [["learner", str(file), "--index", str(index), *options] for index in (0, 1)]
    return [stack.enter_context(stopped_at_exit(command(*arguments))) for arguments in told]


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def assert_logged_to_the_end(folder: Path) -> None:
    found = scalars(folder / "tensorboard")
    assert found["diloco/run_step"][-1][1] >= SHORT["max_steps"], logs(folder)
    assert {"learner-0/loss", "learner-1/loss", "diloco/bytes_up"} <= found.keys()


def test_a_syncer_started_by_hand_logs_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = config_file(folder, run={**SHORT, "trackers": ("tensorboard",)}, syncer={"shards": 2})
    with ExitStack() as stack:
        syncer = stack.enter_context(stopped_at_exit(command("syncer", str(file))))
        until(lambda: (folder / "addresses").exists(), "it tells where it is", 60)
        for learner in learners(file, stack, "--syncer", str(folder), *token_of(folder)):
            ended(learner)
        ended(syncer)
    assert_logged_to_the_end(folder)


def token_of(folder: Path) -> tuple[str, ...]:
    return ("--auth-token-file", str(folder / "token"))


@pytest.mark.parametrize("encryption", ["mutual TLS", "a token"])
def test_only_shard_0_logs_the_run(tmp_path: Path, encryption: str) -> None:
    """Without a launcher, it starts the logger, waits for it at the end, and restarts it."""
    ports, places = free_ports(2), {**SHORT, "trackers": ("tensorboard",)}
    tables: dict[str, Any] = {"run": places, "syncer": {"shards": 2}}
    scheme, token = "https", []
    if encryption == "mutual TLS":
        tables["tls"] = encrypted.tables(encrypted.made(tmp_path / "tls"))
    else:
        scheme, token = "http", ["--auth-token-file", str(tmp_path / "secret")]
        (tmp_path / "secret").write_text("hush-hush-hush")
    told = ",".join(f"{scheme}://127.0.0.1:{port}" for port in ports)
    folders = [tmp_path / f"shard-{shard}" for shard in (0, 1)]
    files = [config_file(folder, **tables) for folder in folders]
    with ExitStack() as stack:
        shards = [
            stack.enter_context(
                stopped_at_exit(
                    command(
                        *("syncer", str(files[shard]), "--shard", str(shard)),
                        *("--port", str(ports[shard]), "--addresses", told, *token),
                    )
                )
            )
            for shard in (0, 1)
        ]
        mine = learners(config_file(tmp_path / "l", **tables), stack, "--syncer", told, *token)
        until(lambda: list((folders[0] / "tensorboard").glob("events*")), "it logs", 60)
        (logger,) = loggers(folders[0])
        os.kill(logger, signal.SIGKILL)
        for learner in mine:
            ended(learner)
        output = ended(shards[0])
        ended(shards[1])
    assert "the logger has ended with code -9; restarting" in output
    assert not loggers(folders[0])
    assert not (folders[1] / "tensorboard").exists()
    assert_logged_to_the_end(folders[0])


def loggers(folder: Path) -> list[int]:
    """Return the processes that log a run to its folder."""
    found = subprocess.run(
        ["pgrep", "-f", f"cli track .* --out {folder}"], capture_output=True, text=True
    )
    return [int(number) for number in found.stdout.split()]


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("tensorbord", "tracker='tensorbord' is not a valid tracker: write 'tensorboard',"),
        ("wandb", r"wandb is not installed: run pip install -e '\.\[wandb\]' in the clone"),
    ],
)
def test_an_invalid_tracker_is_reported_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, sentence: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=sentence):
        LocalRun(config_of(tmp_path / "run", run={**SHORT, "trackers": (place,)}))
    assert not (tmp_path / "run").exists()
