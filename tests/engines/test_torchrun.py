"""Exit codes of multi-host ranks, as passed on by the torchrun that starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def ended(*command: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "decoupled_diloco_engines.torchrun"]
    options = ["--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return subprocess.run(
        [*torchrun, *options, *command], capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 2), (3, 1)])
def test_rejected_ranks_are_distinguished_from_failed_ones(
    code: int, expected: int, tmp_path: Path
) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(f"import sys; print('error: why', file=sys.stderr); sys.exit({code})\n")
    done = ended(str(rank))
    assert done.returncode == expected, done.stderr
    assert "\nerror: why\n" in "\n" + done.stderr
