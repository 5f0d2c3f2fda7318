"""`ddiloco logs`: print the log files of a run's processes."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from heapq import merge
from pathlib import Path
from typing import Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.runs import chosen_run, fix_of_process, is_url
from decoupled_diloco.cli.shared_options import complete_run, fail
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.termination import handling, interrupt

LOGS = "logs"
POLL_SECONDS = 0.25
TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
"""The start of a line that Python's logging has written."""


class LogsOptions(CommandOptions):
    """Options of `ddiloco logs`."""

    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [PROCESS]",
            help="RUN: run folder. Default: the newest run in runs/. PROCESS: name of a process, "
            "such as learner-0. Default: all processes, each line with the name of its process.",
            autocompletion=complete_run,
        ),
    ] = None
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Print new lines until the run ends, or Ctrl-C."),
    ] = False
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines",
            "-n",
            min=0,
            metavar="NUMBER",
            help="Print only the last lines of each process. Default: all lines.",
        ),
    ] = None


@command(LogsOptions)
def logs(options: LogsOptions) -> None:
    """Print the logs of a run: of one process, or of all in order of time.

    Example: ddiloco logs runs/quickstart learner-1 --follow
    """
    from decoupled_diloco.launch.run_folder import is_running_here
    from decoupled_diloco.show.console import drop_output

    run, process = _run_and_process(options.names or [])
    files = LogFiles(run, process)
    try:
        with contextlib.suppress(KeyboardInterrupt), handling(interrupt, signal.SIGTERM):
            going = options.follow
            _write(files.read(options.lines, whole_lines=going))
            while going:
                # Before the read, so that no last line is missed. On another machine it may run.
                going = is_running_here(run) is not False
                _write(files.read(whole_lines=going))
                time.sleep(POLL_SECONDS if going else 0.0)
    except BrokenPipeError:
        drop_output(sys.stdout)


def _run_and_process(names: list[str]) -> tuple[Path, str]:
    """Distinguish RUN and PROCESS: a run is a folder, and process names have no slash."""
    runs = [name for name in names if is_url(name) or "/" in name or Path(name).is_dir()]
    processes = [name for name in names if name not in runs]
    if len(runs) > 1 or len(processes) > 1:
        fail(f"{' '.join(names)!r} is not one RUN and one PROCESS: give one of each at most")
    if runs and is_url(runs[0]):
        fail(f"{runs[0]} is a URL: ddiloco logs reads a run folder")
    run = Path(chosen_run(runs[0] if runs else "", "ddiloco logs runs/quickstart", here=True))
    return run, processes[0] if processes else ""


class LogFiles:
    """The log files of a run, read piece by piece.

    Args:
        run: The run folder.
        process: Name of the only process to read; empty: all processes.

    Raises:
        ConfigError: The run, the process or the log does not exist.
    """

    def __init__(self, run: Path, process: str) -> None:
        self._folders = log_folders(run)
        self._process = process
        self._offsets: dict[Path, int] = {}
        found = self._files()
        if not found:
            raise ConfigError(_nothing(run, process, sorted(self._names())))
        self._width = max(len(path.stem) for path in found)

    def _names(self) -> set[str]:
        return {path.stem for folder in self._folders for path in folder.glob("*.log")}

    def _files(self) -> list[Path]:
        pattern = f"{self._process or '*'}.log"
        return sorted(path for folder in self._folders for path in folder.glob(pattern))

    def read(self, count: int | None = None, *, whole_lines: bool = False) -> Iterator[str]:
        """Return the lines since the last call, in order of time.

        Args:
            count: Only the last lines of each file, at most this many.
            whole_lines: Leave a line that a process has not finished for the next call.
        """
        pieces = [self._timed(path, count, whole_lines) for path in self._files()]
        return (line for _, line in merge(*pieces, key=lambda item: item[0]))

    def _timed(self, path: Path, count: int | None, whole_lines: bool) -> Iterator[tuple[str, str]]:
        """Return the new lines of one file, each with the time at which it was written."""
        prefix = "" if self._process else f"{path.stem:<{self._width}} | "
        written = ""
        lines: Iterable[str] = self._new_lines(path, whole_lines)
        for line in lines if count is None else deque(lines, count):
            found = TIMESTAMP.match(line)
            written = max(written, found[0]) if found else written
            yield written, prefix + line

    def _new_lines(self, path: Path, whole_lines: bool) -> Iterator[str]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            for line in file:
                if whole_lines and not line.endswith(b"\n"):
                    return
                self._offsets[path] = self._offsets.get(path, 0) + len(line)
                yield line.decode(errors="replace").rstrip("\n") + "\n"


def log_folders(run: Path) -> list[Path]:
    """Return the folders with the logs of a run: Slurm's jobs write to the launch folder."""
    from decoupled_diloco.launch.launch_folder import launch_folder

    return [folder / LOGS for folder in (run, launch_folder(run)) if (folder / LOGS).is_dir()]


def _nothing(run: Path, process: str, names: list[str]) -> str:
    """Return why there is nothing to print, and where the logs are."""
    if process and names:
        return f"{process!r} has no log in {run}: {fix_of_process(process, names)}"
    from decoupled_diloco.launch.launch_folder import Launch, launch_folder, was_launched

    if was_launched(run):
        launch = Launch(launch_folder(run))
        return f"{run} has no logs here yet: {launch.engine.logs(launch.config, launch.folder)}"
    if not run.exists():
        return f"{run} does not exist: give a run folder"
    return f"{run} has no logs: only ddiloco train, syncer and launch write them"


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line)
    sys.stdout.flush()
