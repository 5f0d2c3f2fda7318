"""A separate training loop with Lightning Fabric, started like a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from decoupled_diloco.storage.coordinator_states import CoordinatorStates
from decoupled_diloco.tape import TapeReader
from integration.real_system import System

pytest.importorskip("lightning")

EXAMPLE = Path(__file__).parents[2] / "examples" / "loop_fabric.py"
ROWS, ACCUMULATED, CONTEXT = 64, 2, 64


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.smoke), 2])
def test_its_steps_and_tokens_are_counted(ranks: int, tmp_path: Path) -> None:
    """Two batches are accumulated per step; several processes are together one learner."""
    system = System(tmp_path / "run", run={"learners": 1, "max_steps": 12})
    system.start()
    try:
        command = [sys.executable, str(EXAMPLE), "--syncer", system.addresses[0], "--name", "a"]
        command += ["--devices", str(ranks)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "the model holds the run's final weights" in done.stdout
        system.wait_finished()
    finally:
        system.close()
    records = TapeReader(tmp_path / "run" / "tape" / "shard-0.jsonl")
    told = [record.data["message"] for record in records if record.type == "Received"]
    coordinator = CoordinatorStates(tmp_path / "run").read()
    assert coordinator is not None
    names = [tensor["name"] for tensor in json.loads(coordinator["layout"])["tensors"]]
    assert names == ["0.weight", "2.weight", "2.bias", "4.weight", "4.bias"], (
        "and not the wrappers' names"
    )
    last = [each for each in told if each["type"] == "StepReport"][-1]
    assert last["step"] >= 12
    assert last["tokens"] == last["step"] * ranks * ACCUMULATED * ROWS * CONTEXT
