"""A learner, or the evaluator, that is the user's own program.

`ddiloco learner` starts the program, and stays beside it. It tells the program in its environment
where the run is (`learner/launched`), passes SIGTERM on, and ends with the program's exit code: 0
means that the program has left the run, and it is not started again; any other is a failure. What
the program has started ends with it, ranks of torchrun in sessions of their own included.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.processes import EVALUATOR, evaluator_name
from decoupled_diloco.launch.termination import INTERRUPTED, Termination
from decoupled_diloco.learner.launched import Launched
from decoupled_diloco.runtime import now
from decoupled_diloco.transport.tls import TLSConfig

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05

PARENT_SECONDS = 5.0
"""How long a program may take to end after the launcher has died."""

_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): orphans among the descendants become children of this process."""


def program_path() -> str:
    """Where programs are looked for: beside this Python, then as the environment says."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def require_commands(config: RunConfig) -> None:
    """Checks that the programs of learners and evaluator are here.

    Raises:
        ConfigError: One is not.
    """
    _require_program("command", "[learner]", config.learner.command)
    _require_program("evaluate_command", "[run]", config.run.evaluate_command)


def _require_program(name: str, table: str, command: Sequence[str]) -> None:
    if not command:
        return
    if shutil.which(command[0], path=program_path()) is None:
        raise ConfigError(
            f"{name}={list(command)!r} in {table}: the program {command[0]!r} is not found or not "
            f"executable: install it, or write its path, relative to {Path.cwd()}"
        )
    script = next((word for word in command[1:] if word.endswith(".py")), None)
    options = any(word in ("-m", "--module", "-c") for word in command[1:])
    if script is not None and not options and not Path(script).exists():
        raise ConfigError(
            f"{name}={list(command)!r} in {table}: {script!r} does not exist: write its path, "
            f"relative to {Path.cwd()}"
        )


def launched(
    config: RunConfig,
    index: int | None,
    *,
    syncer: tuple[str, ...],
    folder: Path,
    token_file: Path | None,
    shared: Path | None,
    tls: TLSConfig | None,
) -> Launched:
    """Values passed to a learner's or the evaluator's program; see `roles.run_learner`.

    Args:
        index: Which learner; `None`: the evaluator.
    """
    settings = config.learner
    if index is None:
        name = EVALUATOR
        own = {"evaluate_seconds": str(config.run.evaluate_interval_seconds)}
    else:
        name, every_seconds = f"learner-{index}", settings.checkpoint_interval_seconds
        own = {
            "index": str(index),
            "checkpoint": _path(folder / "learners") if every_seconds else "",
            "checkpoint_seconds": str(every_seconds or ""),
            "flush_seconds": str(settings.flush_seconds),
            "metrics_address": settings.metrics_of(index) or "",
            "sync_ranks": str(settings.sync_ranks),
        }
    return Launched(
        role="learner" if index is not None else "evaluator",
        name=evaluator_name(config) if index is None else name,
        learners=str(config.run.learners),
        syncer="" if shared is not None else ",".join(syncer),
        run_folder=_path(shared),
        folder=_path(folder),
        auth_token_file=_path(token_file),
        tls_ca_cert=_path(None if tls is None else tls.ca_cert),
        tls_cert=_path(None if tls is None else tls.cert),
        tls_key=_path(None if tls is None else tls.key),
        disconnect_seconds=str(settings.disconnect_seconds or ""),
        event_tape=_path(folder / "tape" / f"{name}.jsonl"),
        **own,
    )


def variables(config: RunConfig) -> dict[str, str]:
    """The variables by which other libraries follow the run's settings."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if config.learner.device == "cpu" else {}
    return {"OMP_NUM_THREADS": str(config.learner.threads), **hidden}


def _path(file: str | Path | None) -> str:
    """Absolute: the program may change its folder."""
    return "" if file is None else str(Path(file).absolute())


def run_command(
    command: Sequence[str],
    launched: Launched,
    *,
    environment: Mapping[str, str],
    patience_seconds: float,
    termination: Termination,
    parent_matters: bool = False,
) -> int:
    """Runs a program to its end, and all that it starts; returns the exit code to end with.

    Args:
        environment: Further variables for it.
        patience_seconds: How long the program may take after SIGTERM.
        termination: Whether this process is asked to stop.
        parent_matters: Whether to end, too, when this process's standard input closes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    theirs, ours = os.pipe()
    told = {
        "PATH": program_path(),
        "PYTHONUNBUFFERED": "1",
        **launched.environment(),
        **environment,
        "DDILOCO_STDIN": str(os.fstat(theirs).st_ino),
    }
    # Where a launcher has started this process, a SIGKILL for its group is for the program, too.
    # In a terminal the program has a group of its own, since Ctrl-C comes by this process.
    own_group = os.getsid(0) != os.getpid()
    termination.at_boundary()
    try:
        process = subprocess.Popen(
            command,
            stdin=theirs,
            env={**os.environ, **told},
            process_group=0 if own_group else None,
        )
    except OSError as error:
        raise ConfigError(
            f"{command[0]!r} cannot be started: {error.strerror or error}: correct the command"
        ) from error
    finally:
        os.close(theirs)
    orphaned = _closed_input() if parent_matters else threading.Event()
    try:
        code = _wait(process, termination, orphaned, patience_seconds)
    except KeyboardInterrupt:  # asked a second time
        code = None
    kill_descendants()
    process.wait()
    os.close(ours)
    if code is None or termination.asked or orphaned.is_set():
        return INTERRUPTED
    if code == 0:  # else the log's last line is the program's own
        logger.info("the program has ended with exit code 0")
    return code if code >= 0 else 128 - code


def _wait(
    process: subprocess.Popen[bytes],
    termination: Termination,
    orphaned: threading.Event,
    patience_seconds: float,
) -> int | None:
    """The program's exit code; `None` if it takes too long after it was asked to stop."""
    deadline: float | None = None
    while (code := process.poll()) is None:
        if deadline is None and (termination.asked or orphaned.is_set()):
            patience = PARENT_SECONDS if orphaned.is_set() else patience_seconds
            deadline = now() + patience
            process.send_signal(signal.SIGTERM)
            logger.info("asked to stop: the program has %g s", patience)
        if deadline is not None and now() > deadline:
            logger.warning("the program does not end: killing it")
            return None
        time.sleep(POLL_SECONDS)
    return code


def _closed_input() -> threading.Event:
    """Set when this process's standard input is closed: the launcher is gone."""
    closed = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        closed.set()

    threading.Thread(target=watch, name="parent", daemon=True).start()
    return closed


def kill_descendants() -> None:
    """Kills all processes that descend from this one, and reaps those that are its children.

    Only Linux tells which they are. Elsewhere ranks notice that the launcher's pipe has closed.
    """
    deadline = now() + PARENT_SECONDS
    while (found := _descendants()) and now() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _descendants() -> set[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(path.parent.name)] = int(parent)
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}
