"""The torchtitan example, with the CPU instead of its device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration.real_system import System

pytest.importorskip("torchtitan")
pytest.importorskip("triton")

from ranks.titan_program import ALONE

ROOT = Path(__file__).parents[2]
ON_A_CPU = "import ranks.cpu_device, runpy, sys; runpy.run_path(sys.argv.pop(1), None, '__main__')"


def test_the_example_trains_until_the_budget_is_spent(tmp_path: Path) -> None:
    run = {"learners": 1, "max_steps": 8}
    system = System(tmp_path / "run", run=run, sync={"fragments": 2, "quorum": 1})
    system.start()
    try:
        options = "--training.seq_len 16 --training.local_batch_size 2 --training.steps 100"
        command = [sys.executable, "-W", "ignore", "-c", ON_A_CPU]
        command += [str(ROOT / "examples" / "trainer_torchtitan.py"), "--name", "a"]
        command += ["--syncer", system.addresses[0], *options.split()]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | ALONE | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "steps; the model holds the run's final weights" in done.stdout
        system.wait_finished()
    finally:
        system.close()
