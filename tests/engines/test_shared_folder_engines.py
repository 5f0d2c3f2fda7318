"""Processes that share a run folder find a syncer that restarted at other ports."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.config import dump_config
from decoupled_diloco.storage.shared_folder import read_addresses
from engines.slurm_runs import LARGE, merged
from process.process_runs import command, config_of, health, stopped_at_exit, until


def settings(folder: Path, **tables: Any) -> Path:
    """Return a run's file: one two-rank learner in which both ranks sync."""
    config = config_of(
        folder / "run",
        run={"max_steps": 100_000, "learners": 1},
        sync={"quorum": 1, "fragments": 2},
        syncer={"port": 0, "token_file": folder / "token"},
        learner={"ranks": 2, "parallelism": "ddp", "sync_ranks": 2},
        data={"elastic": False},
        **tables,
    )
    options = {**config.workload.options, **LARGE}
    workload = config.workload.model_copy(update={"options": options})
    path = folder / "small.toml"
    path.write_text(dump_config(config.model_copy(update={"workload": workload})))
    (folder / "token").write_text("hush\n")
    return path


@pytest.mark.long
def test_all_sync_ranks_find_a_syncer_that_has_moved(tmp_path: Path) -> None:
    file, run = settings(tmp_path), tmp_path / "run"
    syncer = command("syncer", str(file))
    learner = command("learner", str(file), "--index", "0", "--syncer", str(run))
    with stopped_at_exit(learner):
        with stopped_at_exit(syncer):
            until(lambda: merged(run) > 5, "both ranks sync", 90)
            before = read_addresses(run)
            syncer.send_signal(signal.SIGINT)
            syncer.wait(240)
        again = command("syncer", str(run), "--resume")
        with stopped_at_exit(again):
            until(lambda: read_addresses(run) != before, "it uses another port", 60)
            until(lambda: health(read_addresses(run)[0]), "it is back", 30)
            count = merged(run)
            until(lambda: merged(run) > count + 5, "both ranks sync again", 60)
            again.send_signal(signal.SIGINT)
            again.wait(240)
