"""Every engine starts `ddiloco learner`, which runs the command in the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.launch.engine import SETTINGS
from decoupled_diloco.launch.launch_folder import write_launch

COMMAND = ("torchrun", "--nproc-per-node=2", "train.py", "--key=mine")
KUBERNETES = {"image": "registry.example/mine:1"}


@pytest.mark.parametrize(
    ("backend", "launch", "file"),
    [
        ("slurm", {}, "learners.sbatch"),
        ("kubernetes", {"kubernetes": KUBERNETES}, "learners.yaml"),
        ("ray", {}, "ray.json"),
    ],
)
@pytest.mark.parametrize("evaluate", [(), ("python", "evaluate.py")])
def test_the_command_is_passed_in_the_settings(
    backend: str, launch: dict[str, Any], file: str, evaluate: tuple[str, ...], tmp_path: Path
) -> None:
    config = RunConfig(
        run={
            "name": "own",
            "folder": tmp_path / "own",
            "max_steps": 9,
            "evaluate_command": evaluate,
        }
        if evaluate
        else {"name": "own", "folder": tmp_path / "own", "max_steps": 9},
        learner={"command": COMMAND},
        launch={"backend": backend, "learner": {"gpus": 2}, **launch},
    )
    written = write_launch(config)
    placed = load_config(written.folder / SETTINGS)
    assert placed.learner.command == COMMAND
    assert placed.workload is None
    assert placed.run.evaluate_command == evaluate
    text = (written.folder / file).read_text()
    assert "learner" in text
    assert "--key=mine" not in text, "the learner's process reads it from the settings"
    everything = "".join(p.read_text() for p in written.folder.glob("*") if p.is_file())
    assert ("evaluator" in everything.replace("evaluator = false", "")) == bool(evaluate)
