"""Processes of a run are killed and stopped; the run continues."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.launch.fork_server import ForkedProcess
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.storage.weight_files import load_weights
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.samples import Evaluated
from process.process_runs import (
    PATIENCE,
    STEP_SECONDS_MAX,
    config_of,
    health,
    local_run,
    longest_step,
    pause,
    records,
    send,
    until,
    wait,
    when,
)
from replay_check import assert_replays


@pytest.mark.smoke
def test_a_killed_learner_costs_the_others_no_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_of(
        folder,
        run={"learners": 3, "max_steps": 300},
        syncer={"shards": 2},
        learner={"checkpoint_interval_seconds": 0.2},
        data={"elastic": False},
        faults=[{"at": 0.2, "kill": "learner-1"}],
    )
    with local_run(config) as run:
        run.start()
        outcome = wait(run)
    assert outcome.finished, outcome.reason
    assert outcome.weights is not None
    assert load_weights(outcome.weights)
    for name in ("learner-0", "learner-2"):
        assert longest_step(folder, name) < STEP_SECONDS_MAX
    killed = records(folder, "learner-1")
    assert [r.data["header"]["epoch"] for r in killed if r.kind == "start"] == [1, 2]
    steps = [sum(r.life == life and r.type == "StepFinished" for r in killed) for life in (0, 1)]
    assert min(steps) > 5
    log = (folder / "logs" / "learner-1.log").read_text()
    begun = [int(n) for n in re.findall(r"starts at batch (\d+)", log)]
    # Tokens of the last half second count too, although the tape had not been written yet.
    assert begun[0] == 0
    assert 0 < begun[1] <= steps[0] + 20
    ways = [r.data["way"] for r in killed if r.type == "Recovered"]
    assert ways[1:] == ["checkpoint"]
    back = max(r.wall for r in killed if r.kind == "start")
    for shard in ("shard-0", "shard-1"):
        later = [r for r in records(folder, shard) if r.type == "RoundFinished" and r.wall > back]
        states = {p["state"] for r in later for p in r.data["participants"] if "-1" in p["learner"]}
        assert "folded" in states, f"{shard} has merged nothing since its restart"
    assert assert_replays(folder) > 500


def test_a_killed_process_is_forked_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_of(folder, run={"max_steps": 100_000})
    taken: dict[str, int] = {}

    def script() -> Iterator[None]:
        children, server = run.supervisor.children, run.placement.server
        assert server is not None
        assert not devices(server.pid)
        yield from when(lambda: run.used_budget() > 0)
        for name in ("learner-1", "shard-0"):
            send(run, name, signal.SIGKILL)
            yield from when(lambda name=name: not children[name].running)
            yield from when(lambda name=name: children[name].running)
            process = children[name].process
            assert isinstance(process, ForkedProcess)
            taken[name] = parent(process.pid)
            assert environment(process.pid) == environment(server.pid)
        assert taken == dict.fromkeys(taken, server.pid)
        clock = run.global_step
        yield from when(lambda: run.global_step > clock + 20)
        yield from when(lambda: steps_of_the_second_life(folder) > 5)
        raise Enough

    with local_run(config) as run:
        run.start()
        with pytest.raises(Enough):
            wait(run, script())
    assert_replays(folder)


def test_a_run_continues_when_its_fork_server_is_killed(tmp_path: Path) -> None:
    """The exit codes of its children are lost, and later processes import PyTorch by themselves."""
    folder = tmp_path / "run"
    config = config_of(folder, run={"max_steps": 100_000})

    def script() -> Iterator[None]:
        children, server = run.supervisor.children, run.placement.server
        assert server is not None
        yield from when(lambda: run.used_budget() > 0)
        os.kill(server.pid, signal.SIGKILL)
        send(run, "learner-1", signal.SIGKILL)
        yield from when(lambda: not children["learner-1"].running)
        yield from when(lambda: children["learner-1"].running)
        assert isinstance(children["learner-1"].process, subprocess.Popen)
        shard = run.supervisor.children["shard-0"].process
        assert isinstance(shard, ForkedProcess)
        yield from when(lambda: steps_of_the_second_life(folder) > 5)
        raise Enough

    with local_run(config, own_server=True) as run:
        run.start()
        with pytest.raises(Enough):
            wait(run, script())


def steps_of_the_second_life(folder: Path) -> int:
    own = records(folder, "learner-1")
    return sum(r.life == 1 and r.type == "StepFinished" for r in own)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def devices(pid: int) -> list[str]:
    """Return the ports and devices that a process has open and that others then lack."""
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.name != "0"]
    opened = [str(link.readlink()) for link in links]
    return [name for name in opened if name.startswith(("socket:", "/dev/nvidia", "/dev/dri"))]


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


SHARDS = ("shard-0", "shard-1")


def test_a_stopped_shard_evicts_no_learner_and_a_stopped_learner_returns(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_of(
        folder,
        run={"learners": 2, "max_steps": 700},
        syncer={"shards": 2},
        workload={"step_seconds": 0.1},
    )
    resumed: list[float] = []

    def evicted(shard: str) -> list[tuple[float, str]]:
        return [
            (r.wall, r.data["learner"])
            for r in records(folder, shard)
            if r.type == "Evict" and "lease ran out" in r.data["reason"]
        ]

    def script() -> Iterator[None]:
        yield from when(lambda: run.used_budget() > 0.03)
        send(run, "shard-1", signal.SIGSTOP)
        yield from pause(12.0)
        send(run, "shard-1", signal.SIGCONT)
        yield from pause(2.5)
        resumed.append(time.time())
        send(run, "learner-1", signal.SIGSTOP)
        yield from when(lambda: all(evicted(shard) for shard in SHARDS))
        send(run, "learner-1", signal.SIGCONT)
        resumed.append(time.time())
        yield from pause(2.5)
        raise Enough

    with local_run(config) as run:
        run.start()
        with pytest.raises(Enough):
            wait(run, script())
    stopped, back = resumed
    assert longest_step(folder, "learner-0") < STEP_SECONDS_MAX
    for shard in SHARDS:
        own = records(folder, shard)
        assert max(r.life for r in own) == 0
        ((out, learner),) = evicted(shard)
        assert learner == "learner-1"
        assert stopped + 9 < out, "its lease lasts ten seconds"
        greeted = [r for r in own if r.type == "Accept" and r.wall > back]
        assert greeted[0].data["learner"] == "learner-1"
        assert greeted[0].data["epoch"] == 1, "the process is the same"
        assert greeted[0].data["why"] == "came back"
    assert_replays(folder)


@pytest.mark.smoke
def test_killed_shards_are_restored_from_the_learners_copies(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_of(
        folder, run={"learners": 2, "max_steps": 420}, syncer={"shards": 2}, sync={"quorum": 2}
    )
    lives: dict[str, int] = {}

    def script() -> Iterator[None]:
        for name in ("shard-1", "shard-0"):
            child = run.supervisor.children[name]
            yield from when(lambda: run.used_budget() > 0.05)
            send(run, name, signal.SIGKILL)
            yield from when(lambda child=child: not child.running)
            yield from when(lambda name=name: phase(run, name) == "running")
            lives[name] = 2

    with local_run(config) as run:
        run.start()
        outcome = wait(run, script())
    assert outcome.finished, outcome.reason
    assert lives == {"shard-0": 2, "shard-1": 2}
    for name in ("learner-0", "learner-1"):
        assert longest_step(folder, name) < STEP_SECONDS_MAX
    for name in ("shard-0", "shard-1"):
        own = records(folder, name)
        versions = [
            (r.data["version"]["term"], r.data["version"]["counter"])
            for r in own
            if r.type in ("Merge", "Install") and r.data["fragment"] % 2 == int(name[-1])
        ]
        terms = {term for term, _ in versions}
        assert len(terms) == 2, "a restarted shard has a new term"
        for fragment in {r.data["fragment"] for r in own if r.type == "Merge"}:
            mine = [
                (r.data["version"]["term"], r.data["version"]["counter"])
                for r in own
                if r.type in ("Merge", "Install") and r.data["fragment"] == fragment
            ]
            assert mine == sorted(mine), "versions only increase"
            restored = [counter for term, counter in mine if term == max(terms)]
            assert restored[0] > 0, "the run does not start again"
    assert_replays(folder)


@pytest.mark.smoke
@pytest.mark.timeout(300)  # it would wait forever
def test_a_process_does_not_wait_for_shards_that_have_ended(tmp_path: Path) -> None:
    """As with a syncer that continues with a run's last steps, and is busy while they are taken."""
    with local_run(config_of(tmp_path / "run", run={"learners": 1, "max_steps": 8})) as run:
        run.start()
        until(lambda: [run.supervisor.poll(), run.supervisor.children["shard-0"].done][1], "end")
        run.wait_for_shards()
        assert wait(run).finished


@pytest.mark.smoke
def test_a_run_that_loses_its_evaluator_still_evaluates_its_result(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with local_run(config_of(folder, run={"evaluator": True, "max_steps": 30})) as run:
        run.start()
        assert run.supervisor.kill("evaluator", restart=False)
        outcome = wait(run)
    assert outcome.finished, outcome.reason
    tape = TapeReader(folder)
    [evaluated] = [record.value() for record in tape if record.type == "Evaluated"]
    assert isinstance(evaluated, Evaluated)
    assert evaluated.global_step >= 30
    assert evaluated.loss is not None
    assert evaluated.loss < math.log(256)


def test_a_learner_that_returns_after_the_end_delays_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_of(folder, faults=[{"at": 0.95, "kill": "learner-1"}])
    with local_run(config) as run:
        run.start()
        wait_for_end = when(lambda: run.supervisor.children["shard-0"].done)
        over: list[float] = []

        def script() -> Iterator[None]:
            yield from wait_for_end
            over.append(time.monotonic())

        outcome = wait(run, script())
    assert outcome.finished, outcome.reason
    assert time.monotonic() - over[0] < PATIENCE * 30.0
    assert longest_step(folder, "learner-0") < STEP_SECONDS_MAX
    assert_replays(folder)


class Enough(Exception):
    """The test has its result; the run need not end."""


def phase(run: LocalRun, name: str) -> str:
    return str(health(run.addresses[int(name[-1])]).get("phase"))
