"""Run a learner or the evaluator that is the user's own program.

`ddiloco learner` starts the program and supervises it. It passes the run's addresses in environment
variables (`learner/launched`), forwards SIGTERM, and exits with the program's exit code. Code 0
means that the program has left the run: it is not restarted. Any other code is a failure. Processes
that the program has started end with it, including torchrun's ranks in separate sessions.
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
from decoupled_diloco.config.toml_files import dump_tables
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.processes import EVALUATOR, evaluator_name
from decoupled_diloco.launch.termination import INTERRUPTED, Termination
from decoupled_diloco.learner.launched import Launched
from decoupled_diloco.runtime import now
from decoupled_diloco.storage.files import write_text
from decoupled_diloco.transport.tls import TLSConfig

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05

PARENT_SECONDS = 5.0
"""Time that a program has to end after the launcher has died."""

_SET_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): orphaned descendants become children of this process."""


def program_path() -> str:
    """Return the search path for programs: the folder of this Python, then PATH."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def require_commands(config: RunConfig) -> None:
    """Check that the programs of learners and evaluator exist.

    Raises:
        ConfigError: One does not.
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
    """Return the values for a learner's or the evaluator's program; see `roles.run_learner`.

    Args:
        config: The run's settings.
        index: The number of the learner; `None` for the evaluator.
        syncer: Addresses of a relay, if any, and of shards; with ``shared`` only of the relay.
        folder: The run folder on this machine.
        token_file: The file with the auth token.
        shared: The shards' run folder, if the program reads their addresses there.
        tls: CA and certificate.
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
            "parties": _path(_own_parties(config, folder / "parties" / f"{name}.toml")),
            "party_key": _path(settings.party_key),
        }
    return Launched(
        role="learner" if index is not None else "evaluator",
        name=evaluator_name(config) if index is None else name,
        learners=str(config.run.learners),
        syncer=",".join(syncer),
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


def _own_parties(config: RunConfig, path: Path) -> Path | None:
    """Write the parties of this machine's settings for a user's program; `None`: it has none."""
    parties = config.privacy.agreed
    if parties is None:
        return None
    path.parent.mkdir(exist_ok=True)
    write_text(path, dump_tables(parties.model_dump(mode="json", exclude_none=True)))
    return path


def variables(config: RunConfig) -> dict[str, str]:
    """Return environment variables that make other libraries follow the run's settings."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if config.learner.device == "cpu" else {}
    return {"OMP_NUM_THREADS": str(config.learner.threads), **hidden}


def _path(file: str | Path | None) -> str:
    """Return an absolute path, because the program may change its current folder."""
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
    """Run a program to its end, then end all processes that it has started.

    Args:
        command: The program and its arguments.
        launched: Values for the program.
        environment: Additional environment variables.
        patience_seconds: Time that the program has after SIGTERM.
        termination: Where a stop of this process is requested.
        parent_matters: Whether to stop, too, when this process's standard input closes.

    Returns:
        The exit code for this process.

    Raises:
        ConfigError: The program cannot be started.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    theirs, ours = os.pipe()
    passed = {
        "PATH": program_path(),
        "PYTHONUNBUFFERED": "1",
        **launched.environment(),
        **environment,
        "DDILOCO_STDIN": str(os.fstat(theirs).st_ino),
    }
    # Under a launcher this process leads a session: a SIGKILL to its group must end the program
    # too. In a terminal the program gets a separate group: this process forwards Ctrl-C.
    own_group = os.getsid(0) != os.getpid()
    termination.at_boundary()
    try:
        process = subprocess.Popen(
            command,
            stdin=theirs,
            env={**os.environ, **passed},
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
    if code == 0:  # after a failure, the last line of the log must be the program's
        logger.info("the program has ended with exit code 0")
    return code if code >= 0 else 128 - code


def _wait(
    process: subprocess.Popen[bytes],
    termination: Termination,
    orphaned: threading.Event,
    patience_seconds: float,
) -> int | None:
    """Return the program's exit code, or `None` if it takes too long to stop."""
    deadline: float | None = None
    while (code := process.poll()) is None:
        if deadline is None and (termination.asked or orphaned.is_set()):
            patience = PARENT_SECONDS if orphaned.is_set() else patience_seconds
            deadline = now() + patience
            process.send_signal(signal.SIGTERM)
            logger.info("a stop is requested; the program has %g s to end", patience)
        if deadline is not None and now() > deadline:
            logger.warning("the program does not end; killing it")
            return None
        time.sleep(POLL_SECONDS)
    return code


def _closed_input() -> threading.Event:
    """Return an event that is set when standard input closes: the launcher is gone."""
    closed = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        closed.set()

    threading.Thread(target=watch, name="parent", daemon=True).start()
    return closed


def kill_descendants() -> None:
    """Kill all descendants of this process, and reap those that are its children.

    Only Linux lists them (`/proc`). Elsewhere ranks notice that the launcher's pipe has closed.
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
