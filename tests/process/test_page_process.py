"""The live page of real runs, as a plain client reads it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.launch.local import LocalRun
from process.page import PageReader
from process.process_runs import config_of, health, local_run, send, wait, when


def fold_of(run: LocalRun) -> list[str]:
    """Return the processes of this run's shard 0 that fold tapes for pages."""
    shard = run.supervisor.children["shard-0"].process
    assert shard is not None
    done = subprocess.run(
        ["ps", "--ppid", str(shard.pid), "-o", "args="], capture_output=True, text=True, check=False
    )
    return [line for line in done.stdout.splitlines() if "page.fold" in line]


def test_the_page_of_a_run_shows_changes_faults_and_the_end(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "run", run={"evaluator": True, "max_steps": 240}, syncer={"shards": 2}
    )
    readers: list[PageReader] = []

    def script() -> Iterator[None]:
        yield from when(lambda: health(run.addresses[0]).get("clock", 0) > 4)
        assert not fold_of(run), "without viewers, nothing is folded"
        secret = run.secret_file.read_text().strip()
        reader = PageReader(run.addresses[0], secret)
        reader.start()
        readers.append(reader)
        yield from when(lambda: len(set(reader.steps)) > 2)
        [line] = fold_of(run)
        assert secret not in line
        send(run, "learner-1", signal.SIGKILL)
        yield from when(lambda: "learner-1 was killed (SIGKILL)" in reader.remarks())
        yield from when(lambda: "learner-1 is back" in reader.remarks())

    with local_run(config) as run:
        run.start()
        assert wait(run, script()).finished
        [reader] = readers
        reader.join(30)
        assert reader.end == {"how": "finished", "step": 240, "folder": str(run.path)}
        secret = run.secret_file.read_text().strip()
        for place in ("logs", "tape"):
            for path in (run.path / place).rglob("*.*"):
                assert secret.encode() not in path.read_bytes(), path
    assert "learner-0" in reader.state["charts"]["loss"]
    fates = {each["fate"] for each in reader.state["recent"]}
    assert "merged" in fates
    assert fates <= {"merged", "nothing to merge", "abandoned"}
    assert "learner-0" in reader.state["recent"][-1]["from"]


@pytest.mark.smoke
def test_a_page_continues_with_a_restarted_syncer(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", run={"max_steps": 1_000_000})
    readers: list[PageReader] = []

    def script() -> Iterator[None]:
        yield from when(lambda: health(run.addresses[0]).get("clock", 0) > 4)
        secret = run.secret_file.read_text().strip()
        first = PageReader(run.addresses[0], secret)
        first.start()
        yield from when(lambda: len(set(first.steps)) > 2)
        send(run, "shard-0", signal.SIGKILL)
        yield from when(lambda: not first.is_alive())
        assert first.end is None, "it was killed, and could send nothing"
        yield from when(lambda: health(run.addresses[0]))
        second = PageReader(run.addresses[0], secret)
        assert second._cookie.split("=")[0] == first._cookie.split("=")[0]
        second._cookie = first._cookie
        second.start()
        readers.append(second)
        yield from when(lambda: "shard-0 was killed" in second.remarks())
        yield from when(lambda: len(set(second.steps)) > 2)
        send(run, "shard-0", signal.SIGTERM)
        yield from when(lambda: second.end)

    with local_run(config) as run, contextlib.suppress(StopIteration):
        run.start()
        lines = script()
        while True:
            run.supervisor.poll()
            next(lines)
    [second] = readers
    assert second.end is not None
    assert second.end["how"] == "stopped"
