"""Learner processes that are killed or asked to stop, and what is kept of their work."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.launch.placement import COMMAND
from decoupled_diloco.run_model.fold_records import read_run
from decoupled_diloco.show.tables import absences
from process.process_runs import (
    command,
    config_file,
    config_of,
    local_run,
    records,
    send,
    stopped_at_exit,
    until,
    wait,
    when,
)
from replay_check import assert_replays


@pytest.mark.smoke
def test_a_learner_that_is_asked_to_stop_flushes_saves_itself_and_returns(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_of(
        folder,
        run={"learners": 3, "max_steps": 700},
        sync={"sync_every": 40},
        learner={"checkpoint_interval_seconds": 60.0},
    )

    def script() -> Iterator[None]:
        yield from when(lambda: run.used_budget() > 0.1)
        child = run.supervisor.children["learner-1"]
        process = child.process
        send(run, "learner-1", signal.SIGTERM)
        yield from when(lambda: child.process is not process)

    with local_run(config) as run:
        run.start()
        outcome = wait(run, script())
    assert outcome.finished, outcome.reason
    own = records(folder, "learner-1")
    first = [r for r in own if r.life == 0]
    steps = sum(r.type == "StepFinished" for r in first)
    went = next(r for r in first if r.type == "DrainAsked")
    back = next(r for r in own if r.life == 1)
    rounds = [r for r in records(folder, "shard-0") if r.type == "RoundFinished"]
    handed_in = [
        r.data
        for r in rounds
        if went.wall - 1 < r.wall < back.wall and r.data["verdict"] == "merged"
    ]
    mine = {
        each["fragment"]: p["tokens"]
        for each in handed_in
        for p in each["participants"]
        if p["learner"] == "learner-1" and p["state"] == "folded"
    }
    assert len(mine) == config.sync.fragments, "every fragment's new steps are in a version"
    assert all(tokens > 0 for tokens in mine.values())
    ways = [r.data for r in own if r.type == "Recovered"]
    assert [each["way"] for each in ways[1:]] == ["checkpoint"]
    last = f"its own checkpoint of step {steps}, incarnation 1"
    assert ways[1]["why"] == last, "it is of the boundary at which it went"
    assert_replays(folder)


def steps_in(run: LocalRun, learner: str, epoch: int) -> int:
    """Return the steps that this incarnation of a learner has reported."""
    log = run.followed.run.learners.get(learner)
    return 0 if log is None else log.steps_of.get(epoch, 0)


def test_a_preempted_learner_has_not_failed(tmp_path: Path) -> None:
    """Each has its own count and limit. The launcher did not send the SIGTERM."""
    folder = tmp_path / "run"
    config = config_of(
        folder,
        run={"learners": 3, "max_steps": 400},
        learner={"max_failures": 1, "max_preemptions": 1},
    )

    def script() -> Iterator[None]:
        spot, crashing = (run.supervisor.children[f"learner-{n}"] for n in (1, 2))
        for epoch in (1, 2):
            yield from when(lambda epoch=epoch: steps_in(run, "learner-1", epoch))
            send(run, "learner-1", signal.SIGTERM)
            yield from when(lambda epoch=epoch: spot.preemptions == epoch)
        assert spot.failures == 0
        send(run, "learner-2", signal.SIGKILL)
        yield from when(lambda: crashing.failures == 1 and crashing.running)

    with local_run(config) as run:
        run.start()
        outcome = wait(run, script())
        assert run.supervisor.children["learner-1"].down, "its second preemption is one too many"
    assert outcome.finished, outcome.reason
    found = read_run(folder)
    counts = {each.name: (each.failures, each.preemptions) for each in found.trained.values()}
    assert counts == {"learner-0": (0, 0), "learner-1": (0, 2), "learner-2": (1, 0)}
    lines = absences(found)
    assert sum("learner-1 was preempted" in line for line in lines) == 2
    assert sum("learner-2 was killed" in line for line in lines) == 1
    assert_replays(folder)


def test_a_supervised_learner_ends_even_a_long_step_and_saves_itself(
    tmp_path: Path,
) -> None:
    tables = {
        "run": {"max_steps": 1000, "learners": 1},
        "sync": {"quorum": 1},
        "learner": {"flush_seconds": 0.0, "checkpoint_interval_seconds": 600.0},
        "workload": {"step_seconds": 6.0},
    }
    own = config_file(tmp_path / "own", **tables)
    with local_run(config_of(tmp_path / "run", **tables), learners=False) as run:
        run.start()
        run.wait_for_shards()
        where = ["--index", "0", "--syncer", str(run.path), "--supervised"]
        where += ["--auth-token-file", str(run.secret_file)]
        with stopped_at_exit(command("learner", str(own), *where)) as learner:
            tape = tmp_path / "own" / "tape" / "learner-0.jsonl"
            until(lambda: tape.exists() and "StepFinished" in tape.read_text(), "a step", 90)
            learner.send_signal(signal.SIGTERM)  # seconds before the next step is finished
            output, _ = learner.communicate(timeout=60)
    assert learner.returncode == 130, output
    assert "killing it" not in output
    assert any((tmp_path / "own" / "learners").rglob("*.safetensors"))


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.smoke), signal.SIGINT]
)
def test_a_signal_during_the_import_of_torch_ends_the_process_silently(
    tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ["learner", "quickstart", "--index", "0", "--syncer", "http://127.0.0.1:9"]
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--set", f"run.folder={tmp_path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(os.environ),
    )
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.005)
    process.send_signal(number)
    output, _ = process.communicate(timeout=240)
    assert b"Traceback" not in output
    assert process.returncode == 130, output
