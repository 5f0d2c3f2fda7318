"""`ddiloco status`, `watch`, `explain`, `intervals` on a run in progress, and on its folder."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from decoupled_diloco.cli.watch import GONE_SECONDS, Reader
from decoupled_diloco.syncer.tapes import TapeDocuments
from decoupled_diloco.tape.records import Record
from decoupled_diloco.tape.segments import lines_of, tapes_in
from decoupled_diloco.tape.sources import TAPE_PATH, FolderSource
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.tokens import Tokens
from free_ports import free_ports
from process.process_runs import (
    config_of,
    ddiloco,
    health,
    local_run,
    output_of,
    records,
    wait,
    when,
)
from replay_check import assert_replays
from unit.show.show_worlds import write_world


def test_a_run_is_read_while_it_is_in_progress(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "run", run={"name": "live", "max_steps": 1_000_000}, syncer={"shards": 2}
    )
    with local_run(config) as run:
        run.start()
        for _ in read_while_it_goes_on(run, tmp_path):
            run.supervisor.poll()
            time.sleep(0.05)
    text = output_of("explain", "learner", "learner-1", str(run.path))
    assert "killed (SIGKILL)" in " ".join(text.split())
    assert_replays(run.path)


def test_a_run_is_read_after_its_end(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", syncer={"shards": 2})
    with local_run(config) as run:
        run.start()
        assert wait(run).finished
    afterwards(run.path)


def read_while_it_goes_on(run, tmp_path: Path) -> Iterator[None]:
    yield from when(lambda: health(run.addresses[0]).get("clock", 0) >= 20)
    run.supervisor.kill("learner-1", restart=True)
    yield from when(lambda: any(r.life == 1 for r in steps_of(run.path, "learner-1")))
    token, address = ("--auth-token-file", str(run.secret_file)), run.addresses[1]
    live = json.loads(output_of("status", address, *token, "--json"))
    folder = json.loads(output_of("status", str(run.path), "--json"))
    for status in (live, folder):
        assert (status["name"], status["phase"]) == ("live", "running")
        assert {x["name"] for x in status["learners"]} == {"learner-0", "learner-1"}
        assert {x["state"] for x in status["learners"]} == {"stepping"}
        assert [x["name"] for x in status["shards"]] == ["shard-0", "shard-1"]
        assert 0 < status["step"] <= status["max_steps"]
    assert live["learners"][0]["discarded_why"] is None
    assert folder["learners"][0]["loss"] is not None
    assert folder["step"] >= live["step"]
    assert "shard-1" in output_of("explain", "round", "2", address, *token)
    assert "not known to the syncer" in output_of(
        "explain", "learner", "learner-0", address, *token
    )
    refused(address, tmp_path)


def steps_of(folder: Path, process: str) -> list[Record]:
    return [record for record in records(folder, process) if record.type == "StepFinished"]


def refused(address: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-secret")
    for command in (
        ("status", address),
        ("status", address, "--auth-token-file", str(wrong)),
    ):
        done = ddiloco(*command)
        assert done.returncode == 5, done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert "not-the-secret" not in done.stderr


def afterwards(folder: Path) -> None:
    status = json.loads(output_of("status", str(folder), "--json"))
    assert status["phase"] == "finished"
    assert status["bytes_up"] > 0
    rounds = [
        (shard, record.data)
        for shard in (0, 1)
        for record in records(folder, f"shard-{shard}")
        if record.type == "RoundFinished"
    ]
    assert status["rounds_merged"] == sum(data["verdict"] == "merged" for _, data in rounds)
    secret = (folder / "token").read_text().strip()
    for tape in tapes_in(folder / "tape"):
        assert not [line for line in lines_of(tape, []) if secret.encode() in line.text]
    shard, data = rounds[len(rounds) // 2]
    number = str(data["round"])
    text = output_of("explain", "round", number, str(folder), "--shard", str(shard))
    assert data["why"] in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "set the clock" in output_of("explain", "step", "50", str(folder))
    window = output_of("intervals", str(folder)).split("grace window")[1].splitlines()[0]
    assert "not measured" not in window
    done = ddiloco("explain", "round", "100000", str(folder))
    assert (done.returncode, "there are shard-0: 1 to" in done.stderr) == (2, True)


def test_an_unreachable_syncer_has_exit_code_4() -> None:
    done = ddiloco("status", f"http://127.0.0.1:{free_ports(1)[0]}")
    assert done.returncode == 4
    assert "is it running" in done.stderr


def test_the_table_of_intervals_fits_a_terminal() -> None:
    text = output_of("intervals", "quickstart")
    assert max(map(len, text.splitlines())) <= 80
    assert "learner's lease" in text
    assert ddiloco("intervals", "no-such-recipe").returncode == 2


def _without_size() -> dict[str, str]:
    """Return the environment without the size of another terminal."""
    return {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}


class Terminal:
    """A command in a pseudo-terminal of 80 columns and 24 lines."""

    def __init__(self, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self.slave)
        self.raw = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "decoupled_diloco.cli", *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**_without_size(), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"},
        )

    def resize(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)

    def read(self, seconds: float) -> str:
        """Return the text of everything that was drawn within this time."""
        deadline, drawn = time.monotonic() + seconds, b""
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self.master], [], [], left)[0]:
                drawn += os.read(self.master, 65536)
        self.raw += drawn
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.decode(errors="replace"))

    def expect(self, what: str, seconds: float = 160.0) -> str:
        deadline, text = time.monotonic() + seconds, ""
        while what not in text:
            assert time.monotonic() < deadline, f"{what!r} is not drawn: {text[-2000:]}"
            text += self.read(0.2)
        return text

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def ended(self) -> int:
        """Return the exit code, and check that the terminal is restored."""
        deadline = time.monotonic() + 120
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "the command does not end"
            self.read(0.1)
        self.read(0.2)
        assert termios.tcgetattr(self.slave) == self.before
        assert b"\x1b[?1049h" in self.raw, "the alternate screen was not used"
        assert self.raw.rindex(b"\x1b[?1049l") > self.raw.rindex(b"\x1b[?1049h")
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def halfway(tmp_path: Path) -> Path:
    """Yield the folder of a run that is in progress."""
    write_world(tmp_path, until=30.0)
    return tmp_path


@pytest.mark.parametrize(
    "keys",
    [pytest.param(b"q", marks=pytest.mark.smoke), b"\x03", b"\x1b"],
    ids=["q", "ctrl-c", "escape"],
)
def test_watch_quits_cleanly(halfway: Path, keys: bytes) -> None:
    with terminal("watch", str(halfway)) as screen:
        screen.expect("shard-1")
        screen.press(keys)
        assert screen.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_watch_restores_the_terminal_when_it_is_asked_to_stop(halfway: Path, number: int) -> None:
    with terminal("watch", str(halfway)) as screen:
        screen.expect("shard-1")
        os.kill(screen.process.pid, number)
        assert screen.ended() == 0


def test_arrow_keys_do_not_end_watch(halfway: Path) -> None:
    with terminal("watch", str(halfway)) as screen:
        screen.expect("shard-1")
        for keys in (b"\x1b[A", b"\x1bOB", b"\x1b[1;5C", b"\x1b[5~"):
            screen.press(keys)
            screen.read(0.4)
            assert screen.process.poll() is None, keys
        screen.press(b"q")
        assert screen.ended() == 0


class Spoilt(FolderSource):
    """A source that fails in an unexpected way."""

    def poll(self) -> list[Record]:
        if self.generation:
            raise RuntimeError("nobody has thought of it")
        self.generation += 1
        return super().poll()


def test_any_error_of_the_reader_ends_watch(halfway: Path) -> None:
    reader = Reader(Spoilt(halfway), interval_seconds=0.01)
    reader.start()
    reader.join(10)
    assert not reader.is_alive()
    assert isinstance(reader.failure, RuntimeError)
    assert reader.over


def test_watch_follows_the_size_of_the_terminal(halfway: Path) -> None:
    with terminal("watch", str(halfway)) as screen:
        assert "copies" in screen.expect("shard-1")
        screen.resize(50, 20)
        os.killpg(screen.process.pid, signal.SIGWINCH)
        deadline, narrow = time.monotonic() + 120, ""
        while "no room for" not in narrow:  # first, what was drawn before
            assert time.monotonic() < deadline, narrow[-2000:]
            narrow = screen.read(1.0)
        screen.press(b"q")
        assert screen.ended() == 0


@pytest.mark.smoke
def test_watch_ends_with_the_run(tmp_path: Path) -> None:
    write_world(tmp_path)
    with terminal("watch", str(tmp_path)) as screen:
        assert "finished" in screen.expect("finished")
        assert screen.ended() == 0


def test_watch_outlives_a_syncer_that_exits(halfway: Path) -> None:
    port = free_ports(1)[0]
    with terminal_of(halfway, port) as (screen, serving):
        screen.expect("shard-0")
        serving.stop()
        screen.expect("unreachable for")
        with Serving(halfway, port):
            deadline = time.monotonic() + 120
            while "unreachable for" in screen.read(1.5):
                assert time.monotonic() < deadline, "the run does not return"
        screen.press(b"q")
        assert screen.ended() == 0


def test_watch_ends_when_the_syncer_exits_right_before_the_end(halfway: Path) -> None:
    reader = Reader(FolderSource(halfway), interval_seconds=1.0)
    assert reader.status is not None
    reader.trouble = (time.monotonic() - GONE_SECONDS - 1, "connection refused")
    for phase, left, over in (
        ("running", 100.0, False),
        ("running", None, False),
        ("running", 3.0, True),
        ("closing", None, True),
    ):
        reader.status = replace(reader.status, phase=phase, seconds_left=left)
        assert reader.over is over
    reader.trouble = (time.monotonic(), "connection refused")
    assert not reader.over


def test_watch_requires_a_terminal(halfway: Path) -> None:
    done = ddiloco("watch", str(halfway))
    assert done.returncode == 2
    assert "use ddiloco status" in done.stderr


class Serving:
    """A shard's tape behind HTTP, from a separate thread, without a shard."""

    def __init__(self, folder: Path, port: int) -> None:
        address = f"http://127.0.0.1:{port}"
        names = ("shard-0", "coordinator")
        files = {name: folder / "tape" / f"{name}.jsonl" for name in names}
        documents = TapeDocuments("causes", 0, (address,), files)
        self._loop = asyncio.new_event_loop()
        self._server = HttpServer(
            port=port,
            tokens=Tokens("secret"),
            on_channel=self._nobody,
            queries={TAPE_PATH: documents},
        )
        self._loop.run_until_complete(self._server.start())
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    async def _nobody(self, channel: object) -> None:
        raise AssertionError("no channel is opened here")

    def stop(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


@contextlib.contextmanager
def terminal_of(folder: Path, port: int) -> Iterator[tuple[Terminal, Serving]]:
    """Run `ddiloco watch` on a tape that is served at this port."""
    secret = folder / "secret"
    secret.write_text("secret\n")
    arguments = ("watch", f"http://127.0.0.1:{port}", "--auth-token-file", str(secret))
    with Serving(folder, port) as serving, terminal(*arguments) as screen:
        yield screen, serving
