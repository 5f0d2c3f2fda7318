"""What a learner's ranks on several hosts end with, told on by the torchrun that starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def ended(*command: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "decoupled_diloco.engines.torchrun"]
    told = [*torchrun, "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return subprocess.run([*told, *command], capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(("code", "told"), [(0, 0), (2, 2), (3, 1)])
def test_ranks_that_were_refused_are_not_taken_for_failed_ones(
    code: int, told: int, tmp_path: Path
) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(f"import sys; print('error: why', file=sys.stderr); sys.exit({code})\n")
    done = ended(str(rank))
    assert done.returncode == told, done.stderr
    assert "\nerror: why\n" in "\n" + done.stderr
