"""Multi-rank learners that the launcher starts: cut off, killed, asked to stop, and restarted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import LocalRun
from process.process_runs import (
    STEP_SECONDS_MAX,
    command,
    config_file,
    config_of,
    fork_server,
    local_run,
    logs,
    longest_step,
    orphans,
    records,
    send,
    until,
    wait,
    when,
)
from replay_check import assert_replays

KEEPS = {"checkpoint_interval_seconds": 0.5}
MIXED = {"ranks": [1, 2, 2], "parallelism": ["plain", "fsdp", "tp"], "sync_ranks": "all"}


ENDING_SECONDS_MAX = 10.0
"""Longest time from the run's end, as the last learner receives it, to the end of shard 0."""


def config(folder: Path, learner: dict[str, Any], steps: int, learners: int = 2) -> RunConfig:
    """Return a run of these learners, with fixed partitions of the data.

    Its clock stops while one of them is disconnected, so no run ends before a script does.
    """
    return config_of(
        folder,
        run={"max_steps": steps, "learners": learners},
        sync={"quorum": learners},
        learner={**KEEPS, **learner},
        data={"elastic": False},
    )


def ranks_of(run: LocalRun, name: str) -> list[int]:
    """Return the process IDs of a learner's ranks, rank 0 first; empty before they start."""
    process = run.supervisor.children[name].process
    if process is None:
        return []
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in children.split()]


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie whose parent does not wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def trains(run: LocalRun, name: str, life: int = 0, steps: int = 1) -> bool:
    """Whether a learner has made steps in an incarnation."""
    own = [r for r in records(run.path, name) if r.life == life] if has_tape(run, name) else []
    return sum(r.type == "StepFinished" for r in own) >= steps


def has_tape(run: LocalRun, name: str) -> bool:
    return (run.path / "tape" / f"{name}.jsonl").exists()


def kept(run: LocalRun, name: str) -> bool:
    return bool(list((run.path / "learners" / name).glob("*.safetensors")))


def starts(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the start record of each incarnation of a learner."""
    return [r.data for r in records(folder, name) if r.type == "Recovered"]


PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import decoupled_diloco as dd
from decoupled_diloco.config import load_config
from decoupled_diloco.workloads import load_workload

run, syncer, token = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]).read_text()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
config = load_config(run / "run.toml")
workload = load_workload(config.workload.name, config.workload_options())
model = workload.model()
fully_shard(model)
optimizer = workload.optimizer(model)
learner = dd.Learner(
    model, syncer, auth_token=token, name="learner-1", optimizer=optimizer,
    checkpoint=dd.Checkpointing(run / "learners", interval_seconds=0.5),
    observability=dd.Observability(event_tape=run / "tape/learner-1.jsonl"),
)
print(f"rank {rank} is process {os.getpid()}, begins at step {learner.steps}", flush=True)
for batch in workload.batches(1, 2, learner.steps * ranks + rank):
    loss = workload.loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if not learner.step(loss, tokens=workload.tokens(batch)):
        break
learner.close()
dist.destroy_process_group()
"""


def test_torchrun_restarts_a_learner_and_the_other_one_loses_no_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    script, log = tmp_path / "program.py", tmp_path / "torchrun.log"
    script.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.2"]
    processes: list[subprocess.Popen[bytes]] = []

    def begun() -> list[tuple[int, int]]:
        """Return process ID and first step of rank 1, for each incarnation."""
        found = re.findall(r"rank 1 is process (\d+), begins at step (\d+)", log.read_text())
        return [(int(pid), int(step)) for pid, step in found]

    def course() -> Iterator[None]:
        where = [str(folder), run.addresses[0], str(run.secret_file)]
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [*torchrun, str(script), *where],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    # otherwise a restart finds the old incarnation's addresses in torchrun's store
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    },
                )
            )
        yield from when(lambda: trains(run, "learner-1", steps=5) and kept(run, "learner-1"))
        os.kill(begun()[0][0], signal.SIGKILL)
        yield from when(lambda: len(begun()) > 1)

    run = LocalRun(config(folder, {}, 200), absent=("learner-1",), server=fork_server())
    try:
        run.start()
        outcome = wait(run, course(), seconds=150.0)
        assert outcome.finished, outcome.reason
        assert processes[0].wait(240) == 0, log.read_text()[-3000:]
    finally:
        run.close()
        for process in processes:
            process.terminate()
            process.wait()
    assert [step > 0 for _, step in begun()] == [False, True], "it continues from its checkpoint"
    assert starts(folder, "learner-1")[-1]["way"] == "checkpoint"
    assert longest_step(folder, "learner-0") < STEP_SECONDS_MAX
    assert_replays(folder)


def test_killed_learners_of_different_parallelism_return_with_other_ranks(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    killed: list[int] = []

    def script() -> Iterator[None]:
        for name in ("learner-1", "learner-2"):
            yield from when(lambda name=name: trains(run, name) and kept(run, name))
            killed.extend(ranks_of(run, name))
            assert run.supervisor.kill(name, restart=True)
            until(lambda: all(map(ended, killed)), "all ranks are killed with their learner")
            yield from when(lambda name=name: trains(run, name, life=1))

    with local_run(config(folder, MIXED, 120, learners=3)) as run:
        run.start()
        outcome = wait(run, script(), seconds=150.0)
    assert outcome.finished, outcome.reason
    assert len(killed) == 4
    for name in ("learner-1", "learner-2"):
        assert [each["way"] for each in starts(folder, name)[1:]] == ["checkpoint"], logs(folder)
    assert_replays(folder)

    other = {"ranks": [2, 1, 2], "parallelism": ["ddp", "plain", "ddp"]}
    with local_run(config(folder, other, 160, learners=3), resume=True) as run:
        run.start()
        outcome = wait(run)
    assert outcome.finished, outcome.reason
    log = (folder / "logs" / "learner-1.log").read_text()
    assert "rank" not in log.rpartition("epoch 2")[2].partition("epoch 3")[2]
    for name in ("learner-1", "learner-2"):
        assert starts(folder, name)[2]["why"].startswith("its own checkpoint of step"), logs(folder)
    begins = [int(line.split()[-4]) for line in log.splitlines() if "starts at batch" in line]
    assert 0 < begins[2] < begins[4], "two ranks twice, then one process"


@pytest.mark.smoke
def test_the_death_of_one_rank_ends_its_learner_which_returns(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def script() -> Iterator[None]:
        yield from when(lambda: trains(run, "learner-0") and kept(run, "learner-0"))
        first = ranks_of(run, "learner-0")
        os.kill(first[1], signal.SIGKILL)
        yield from when(lambda: run.supervisor.children["learner-0"].failures == 1)
        assert all(map(ended, first))
        yield from when(lambda: trains(run, "learner-0", life=1))
        head = run.supervisor.children["learner-0"].process
        assert head is not None
        second = ranks_of(run, "learner-0")
        os.kill(head.pid, signal.SIGKILL)
        until(lambda: all(map(ended, second)), "ranks end with their head", seconds=15.0)
        yield from when(lambda: trains(run, "learner-0", life=2))

    with local_run(config(folder, {"ranks": [2, 1], "parallelism": ["ddp", "plain"]}, 150)) as run:
        run.start()
        outcome = wait(run, script(), seconds=150.0)
    assert outcome.finished, outcome.reason
    over = max(
        r.at for n in range(2) for r in records(folder, f"learner-{n}") if r.type == "RunOver"
    )
    assert records(folder, "shard-0")[-1].at - over < ENDING_SECONDS_MAX
    own = [r.data for r in records(folder, "launcher") if r.type == "ProcessEnded"]
    # The launcher stops an incarnation that ends slowly on a busy machine: any code is possible.
    first, killed, _ = [each["code"] for each in own if each["name"] == "learner-0"]
    assert first in (137, 1), (
        "the code of the killed rank, or of the other one, which fails without it"
    )
    assert killed is None
    assert [each["way"] for each in starts(folder, "learner-0")[1:]] == ["checkpoint"] * 2
    assert_replays(folder)


def test_a_learner_that_is_asked_to_stop_stops_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def script() -> Iterator[None]:
        yield from when(lambda: trains(run, "learner-1", steps=5))
        child = run.supervisor.children["learner-1"]
        process = child.process
        send(run, "learner-1", signal.SIGTERM)
        yield from when(lambda: child.process is not process)
        assert child.code == 130

    with local_run(config(folder, {"ranks": [1, 2], "parallelism": ["plain", "tp"]}, 100)) as run:
        run.start()
        outcome = wait(run, script())
    assert outcome.finished, outcome.reason
    first = [r for r in records(folder, "learner-1") if r.life == 0]
    assert any(r.type == "DrainAsked" for r in first), "it flushes what it has trained"
    assert [each["way"] for each in starts(folder, "learner-1")[1:]] == ["checkpoint"]
    assert "Traceback" not in (folder / "logs" / "learner-1.log").read_text()


@pytest.mark.parametrize("forks", [True, False])
def test_ctrl_c_leaves_no_rank(tmp_path: Path, forks: bool) -> None:
    folder = tmp_path / "run"
    file = config_file(
        folder,
        run={"max_steps": 5000, "fork_server": forks},
        learner={"ranks": [1, 2], "parallelism": ["plain", "fsdp"]},
        data={"elastic": False},
    )
    process = command("train", str(file))
    tape = folder / "tape" / "learner-1.jsonl"
    until(lambda: tape.exists() and '"StepFinished"' in tape.read_text(), "it trains", 120.0)
    assert len(orphans(folder)) == 5 + forks, "a shard, two learners, two ranks, the fork server"
    os.killpg(process.pid, signal.SIGINT)
    until(lambda: not orphans(folder), "all processes of the run are gone", seconds=15.0)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output
    assert "Traceback" not in output
