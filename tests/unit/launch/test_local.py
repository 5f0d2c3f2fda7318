"""The launcher: what it needs before the shards can be started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from decoupled_diloco.cli import train  # what `ddiloco syncer` imports
from decoupled_diloco.config import RunConfig

config = RunConfig(run={"folder": sys.argv[1], "budget_steps": 9})
run = train.LocalRun(config, learners=False)
heavy = {"torch", "numpy", "matplotlib", "jinja2", "aiohttp"} & set(sys.modules)
print(sorted(heavy))
run.close()
"""


def test_a_syncers_shards_do_not_wait_for_imports_of_the_launcher(tmp_path: Path) -> None:
    """Each shard imports torch, which takes seconds; the launcher's would come on top."""
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
