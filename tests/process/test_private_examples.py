"""`examples/private_examples.py` trains with DP-SGD, and sends nothing without noise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from decoupled_diloco.run_model import read_run
from docs.snippets import ROOT

pytest.importorskip("opacus", reason="Opacus is not installed: make setup")


@pytest.mark.smoke
def test_learners_with_opacus_train_and_print_their_epsilon(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sets = (f"run.folder={folder}", "syncer.port=0", "run.max_steps=80", "run.evaluator=false")
    options = [word for each in sets for word in ("--set", each)]
    command = [sys.executable, "-m", "decoupled_diloco.cli", "train"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*command, "examples/private_examples.toml", *options],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("learner-0", "learner-1"):
        text = "".join(log.read_text() for log in (folder / "logs").glob(f"{name}*"))
        found = re.search(r"(\d+) steps; each example: ε = ([\d.]+), δ = 0.0001", text)
        assert found, text
        assert int(found[1]) >= 10
        assert 0 < float(found[2]) < 10
    run = read_run(folder)
    assert run.rounds_merged > 1
    assert all(not learner.losses for learner in run.learners.values()), "a loss has no noise"
