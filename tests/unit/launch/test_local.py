"""The launcher, until it starts the shards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import TransportError
from decoupled_diloco.launch.local import LocalRun

SCRIPT = """
import sys
from decoupled_diloco.cli import local_training  # what `ddiloco syncer` imports
from decoupled_diloco.config import RunConfig

config = RunConfig(run={"folder": sys.argv[1], "max_steps": 9})
run = local_training.LocalRun(config, learners=False)
heavy = {"torch", "numpy", "matplotlib", "jinja2", "aiohttp"} & set(sys.modules)
print(sorted(heavy))
run.close()
"""


def test_a_launcher_that_cannot_listen_leaves_no_folder(tmp_path: Path) -> None:
    """Otherwise the newest run would be one that has never started."""
    elsewhere = {"host": "192.0.2.1", "port": 0}  # an address that no machine has: RFC 5737
    config = RunConfig(run={"folder": tmp_path / "run", "max_steps": 9}, syncer=elsewhere)
    with pytest.raises(TransportError, match=r"syncer\.host to an address of this machine"):
        LocalRun(config, learners=False)
    assert not list(tmp_path.iterdir())


def test_the_launcher_of_a_syncer_does_not_import_torch(tmp_path: Path) -> None:
    """Each shard imports torch, which takes seconds; the launcher must not add to them."""
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.parametrize("wanted", [True, False])
def test_the_fork_server_follows_the_settings(tmp_path: Path, wanted: bool) -> None:
    settings = {"folder": tmp_path / "run", "max_steps": 9, "fork_server": wanted}
    run = LocalRun(RunConfig(run=settings, syncer={"port": 0}), learners=False)
    assert (run.placement.server is not None) == wanted
    run.close()
