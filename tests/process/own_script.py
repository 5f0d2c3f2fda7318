"""Runs whose learners are the programs of `examples`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from decoupled_diloco.config import RunConfig, load_config

EXAMPLES = Path(__file__).parents[2] / "examples"


def config_of(example: str, folder: Path, *settings: str) -> RunConfig:
    """Return the run file of an example, whose programs are found from any folder."""
    config = load_config(
        EXAMPLES / f"{example}.toml",
        [
            f"run.folder={str(folder)!r}",
            "syncer.port=0",
            "learner.checkpoint_interval_seconds=1.0",
            "sync.quorum=2",  # the run cannot end before a killed learner has returned
            *settings,
        ],
    )
    run, learner = config.run, config.learner
    found = [word.replace("examples/", f"{EXAMPLES}/") for word in learner.command]
    evaluate = [word.replace("examples/", f"{EXAMPLES}/") for word in run.evaluate_command]
    return config.model_copy(
        update={
            "learner": learner.model_copy(update={"command": tuple(found)}),
            "run": run.model_copy(update={"evaluate_command": tuple(evaluate)}),
        }
    )


def programs(folder: Path) -> list[str]:
    """Return the processes started for the learners of a run, including ranks of torchrun."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            told = (entry / "environ").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if f"DDILOCO_CHECKPOINT={folder}/learners".encode() in told and state != "Z":
                found.append(f"{entry.name}: {(entry / 'cmdline').read_text()}")
    return found
