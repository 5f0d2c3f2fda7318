"""A separate training loop with Accelerate, started like a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from decoupled_diloco.tape import TapeReader
from integration.real_system import System

pytest.importorskip("accelerate")

EXAMPLE = Path(__file__).parents[2] / "examples" / "loop_accelerate.py"
ROWS, ACCUMULATED = 64, 2


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.smoke), 2])
def test_its_steps_and_tokens_are_counted(ranks: int, tmp_path: Path) -> None:
    """Two batches are accumulated per step; several processes are together one learner."""
    system = System(tmp_path / "run", run={"learners": 1, "max_steps": 12})
    system.start()
    try:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *(torchrun if ranks > 1 else []), str(EXAMPLE)]
        command += ["--syncer", system.addresses[0], "--name", "a"]
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "the model holds the run's final weights" in done.stdout
        system.wait_finished()
    finally:
        system.close()
    reports = [
        record.data["message"]
        for record in TapeReader(tmp_path / "run" / "tape" / "shard-0.jsonl")
        if record.type == "Received" and record.data["message"]["type"] == "StepReport"
    ]
    steps, tokens = reports[-1]["step"], reports[-1]["tokens"]
    assert steps >= 12
    assert tokens == steps * ranks * ACCUMULATED * ROWS * 64
