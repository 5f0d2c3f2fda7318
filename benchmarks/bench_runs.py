"""Processes of a benchmark: local runs, a syncer for external learners, and the benchmark itself.

A benchmark whose learners are separate processes calls its own functions in them: `start` starts a
process that calls a function, and `called` runs it in that process.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import tomli_w

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import LocalRun, RunOutcome

TOKEN = "benchmark"
CLI = [sys.executable, "-m", "decoupled_diloco.cli"]


@contextmanager
def paced(
    *, step_seconds: float, run: Any, sync: Any, syncer: Any, model: Any = None, **tables: Any
) -> Iterator[RunConfig]:
    """Yield the settings of a run with a fixed step time, in a temporary folder."""
    with TemporaryDirectory() as name:
        yield RunConfig(
            run={"folder": Path(name) / "run", "evaluator": False, **run},
            sync=sync,
            syncer={"port": 0, **syncer},
            workload={"name": "paced", "options": {"step_seconds": step_seconds, **(model or {})}},
            **tables,
        )


class _Enough(Exception):
    """The script of a run has ended."""


def carry_out(
    config: RunConfig,
    script: Callable[[LocalRun], Iterator[None]] | None = None,
    *,
    absent: Sequence[str] = (),
    resume: bool = False,
) -> RunOutcome | None:
    """Carry out a whole run with real processes on this machine.

    Args:
        config: Its settings.
        script: Runs beside it. It yields to wait a moment; when it ends, the run is ended.
        absent: Learners that are started by other code.
        resume: Continue the run in its folder.
    """
    run = LocalRun(config, absent=absent, resume=resume)
    end = object()
    steps = script(run) if script else iter(int, 1)

    def advance() -> None:
        if next(steps, end) is end:
            raise _Enough

    with suppress(_Enough):
        try:
            run.start()
            advance()
            outcome = run.wait(advance)
            assert outcome.finished, outcome.reason
            return outcome
        finally:
            run.close()
    return None


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Syncer(NamedTuple):
    """The shards of a run whose learners start separately."""

    address: str
    folder: Path
    shards: list[subprocess.Popen[bytes]]


@contextmanager
def a_syncer(
    tables: Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    into: Path | None = None,
    before: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Syncer]:
    """Run shards, each in a separate process, in a temporary folder.

    Args:
        tables: The run's settings; they override the defaults of such runs.
        host: Address on which they listen.
        into: Their folder, if it exists already.
        before: Prefix of each shard's command.
        environment: Environment of the shards.
    """
    port = free_port()
    with TemporaryDirectory() as name:
        folder = into or Path(name)
        own = {
            "run": {"max_steps": 10**7, "evaluator": False, "folder": str(folder / "run")},
            "sync": {"sync_every": 24, "overlap_steps": 2},
            "syncer": {
                "host": host,
                "port": port,
                "shards": 1,
                "token_file": str(folder / "token"),
            },
        }
        # Write only given settings, without defaults, because an older version may not know all of
        # them.
        settings = {**own, **tables} | {each: own[each] | tables.get(each, {}) for each in own}
        (folder / "token").write_text(TOKEN)
        (folder / "run.toml").write_text(tomli_w.dumps(settings))
        shards: list[subprocess.Popen[bytes]] = []
        try:
            with (folder / "shard.log").open("wb") as log:
                for number in range(settings["syncer"]["shards"]):
                    words = ["syncer", str(folder / "run.toml"), "--shard", str(number)]
                    shards.append(
                        subprocess.Popen(
                            [*before, *CLI, *words],
                            stdout=log,
                            stderr=log,
                            env=environment,
                            start_new_session=True,
                        )
                    )
            scheme = "https" if tables.get("tls") else "http"
            yield Syncer(f"{scheme}://{host}:{port}", folder, shards)
        finally:
            for shard in shards:
                end_with_its_children(shard)


def end_with_its_children(process: subprocess.Popen[Any]) -> None:
    """Kill the remaining processes of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def calling(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Return Python's arguments for a process that calls a function of this program."""
    call = json.dumps([function.__name__, arguments], default=str)
    return [inspect.getfile(function), "--call", call]


def start(
    function: Callable[..., Any], *arguments: Any, before: Sequence[str] = (), **more: Any
) -> subprocess.Popen[bytes]:
    """Start a process that calls a function; `answer` returns the result."""
    command = [*before, sys.executable, *calling(function, *arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, **more)


def answer(process: subprocess.Popen[bytes]) -> Any:
    """Wait for the process, and return the result of its function."""
    output, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return json.loads(output)


@contextmanager
def serving(function: Callable[..., Any], *arguments: Any, before: Sequence[str] = ()) -> Any:
    """Run a server process during the block; yield the first line that it prints, as JSON."""
    process = start(function, *arguments, before=before)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def called() -> bool:
    """Run the function for which `start` started this process; return False otherwise."""
    if sys.argv[1:2] != ["--call"]:
        return False
    name, arguments = json.loads(sys.argv[2])
    print(json.dumps(getattr(sys.modules["__main__"], name)(*arguments)))
    return True
