"""`examples/full_loop.py` is stopped and restarted, and trains to the end of the run."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import LocalRun
from docs.snippets import ROOT
from process.process_runs import fork_server, stopped_at_exit, until

EXAMPLE = ROOT / "examples" / "full_loop.py"
BUDGET = 400


def example(run: LocalRun, folder: Path, output: Path) -> subprocess.Popen[str]:
    arguments = ["--syncer", run.addresses[0], "--auth-token-file", str(run.secret_file)]
    arguments += ["--name", "a", "--checkpoints", str(folder / "checkpoints")]
    with output.open("w") as file:
        return subprocess.Popen(
            [sys.executable, str(EXAMPLE), *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def numbers(pattern: str, text: str) -> tuple[int, ...]:
    found = re.search(pattern, text)
    assert found, text
    return tuple(map(int, found.groups()))


@pytest.mark.long
def test_the_full_loop_continues_after_a_restart(tmp_path: Path) -> None:
    config = RunConfig(
        run={"folder": tmp_path / "run", "learners": 1, "max_steps": BUDGET, "evaluator": False},
        sync={"fragments": 4, "sync_every": 8, "overlap_steps": 1},
        syncer={"port": 0},
    )
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    with contextlib.closing(LocalRun(config, learners=False, server=fork_server())) as run:
        run.start()
        with stopped_at_exit(example(run, tmp_path, first)) as process:
            until(lambda: "held out" in first.read_text() or process.poll() is not None, "it", 120)
            process.send_signal(signal.SIGTERM)
            assert process.wait(240) == 0, first.read_text()
        with stopped_at_exit(example(run, tmp_path, second)) as process:
            assert process.wait(240) == 0, second.read_text()
    assert numbers(r"starts at its step (\d+), batch (\d+)", first.read_text()) == (0, 0)
    step, batch = numbers(r"stops after its step (\d+), batch (\d+)", first.read_text())
    assert batch == 4 * step > 0
    assert numbers(r"starts at its step (\d+), batch (\d+)", second.read_text()) == (step, batch)
    rate_at = runpy.run_path(str(EXAMPLE))["rate_at"]
    printed = re.findall(r"step (\d+), rate ([\d.]+)", first.read_text() + second.read_text())
    assert len(printed) >= 5
    assert all(
        float(rate) == pytest.approx(rate_at(int(at), BUDGET), abs=1e-6) for at, rate in printed
    )
    steps = [int(at) for at, _ in printed]
    assert steps == sorted(steps), "the schedule started again"
    losses = re.findall(r"held out ([\d.]+)", first.read_text() + second.read_text())
    assert float(losses[-1]) < float(losses[0])


def test_the_study_compares_the_strategies_of_exo_gym(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["study_digits.py", "--steps", "24"])
    runpy.run_path(str(ROOT / "examples" / "study_digits.py"), run_name="__main__")
    _, *rows, seeds = capsys.readouterr().out.splitlines()
    names = ["data-parallel", "diloco", "streaming-diloco", "decoupled"]
    assert [row.split()[0] for row in rows] == names
    assert all(float(row.split()[1]) < 2.3 for row in rows), "each has learned something"
    assert seeds == "2 seeds"
