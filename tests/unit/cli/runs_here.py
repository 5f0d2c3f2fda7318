"""Run folders for tests of commands, with a launcher, its lock and its tape."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.launch.processes import open_tape
from decoupled_diloco.launch.run_folder import RunFolder
from decoupled_diloco.tape.samples import ProcessEnded, ProcessStarted


@contextlib.contextmanager
def running(path: Path, *samples: ProcessStarted | ProcessEnded) -> Iterator[Path]:
    """Yield a run folder that this process has locked, like a launcher."""
    with RunFolder(path) as folder:
        config = RunConfig(run={"name": path.name, "folder": path, "max_steps": 8})
        (path / "run.toml").write_text(dump_config(config), encoding="utf-8")
        folder.record_launcher()
        with open_tape(path, "launcher", {"machine": "launcher"}) as tape:
            for each in samples:
                tape.sample(time.monotonic(), each)
        yield path
