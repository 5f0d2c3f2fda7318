"""SIGTERM and Ctrl-C for a user's program, and for its DataLoader workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from decoupled_diloco.learner.learner_checkpoint import CheckpointFolder
from integration.real_system import System
from process.process_runs import until

PROGRAM = """
import os, sys, time
import torch
import decoupled_diloco as dd
from decoupled_diloco.learner import process

process.SAME_SECONDS = 60.0  # a busy machine delivers signals at different times

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        if index > last:
            time.sleep(10**6)
        return torch.randn(4)

def starving(loader):
    # Prints when the next batch does not come.
    batches = iter(loader)
    for index in range(10**7):
        if index == last + 1:
            print("starving", flush=True)
        yield next(batches)

if __name__ == "__main__":
    loop, last = sys.argv[3], int(sys.argv[4])
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    workers = 2 if loop in ("with", "batches") else 0
    loader = starving(torch.utils.data.DataLoader(Data(), 1, num_workers=workers))
    learner = dd.Learner(model, sys.argv[1], name="a", optimizer=optimizer,
                         checkpoint=dd.Checkpointing(sys.argv[2], interval_seconds=0))

    def train(batches, step):
        for batch in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step and not learner.step(tokens=4):
                break
            if learner.steps == 10:
                print("ten", flush=True)
            time.sleep(0.01)

    if loop == "batches":
        train(learner.wrap(loader), False)
    elif loop == "with":
        with learner:
            train(loader, True)
    elif loop == "unchecked":
        for batch in loader:
            learner.step(tokens=4)
            print("ten", flush=True) if learner.steps == 10 else None
            time.sleep(0.01)
    else:
        train(loader, True)
        if loop == "close":
            learner.close()
    print("done", flush=True)
"""


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    run = {"learners": 1, "max_steps": 10**7}
    system = System(tmp_path / "run", run=run, sync={"quorum": 1, "fragments": 2})
    system.start()
    yield system
    system.close()


@contextmanager
def program(
    system: System, kept: Path, loop: str, last: int = 10**7
) -> Iterator[subprocess.Popen[str]]:
    """Yield the program once it has made ten steps, or has used all its data."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, system.addresses[0], str(kept), loop, str(last)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        word = "ten" if last > 10**6 else "starving"
        said = []
        while not said or said[-1].strip() != word:
            line = process.stdout.readline()
            assert line, said
            said.append(line)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps_kept(kept: Path) -> int:
    newest = CheckpointFolder(kept / "a").newest()
    return 0 if newest is None else newest.steps


@pytest.mark.parametrize(
    "loop", [pytest.param("with", marks=pytest.mark.smoke), "close", "batches", "falls off its end"]
)
def test_sigterm_to_the_group_ends_a_loop_in_order(
    system: System, tmp_path: Path, loop: str
) -> None:
    with program(system, tmp_path / "kept", loop) as process:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert output.rstrip().endswith("done")
    assert steps_kept(tmp_path / "kept") >= 10


def test_sigterm_ends_a_loop_that_ignores_the_result_of_step(
    system: System, tmp_path: Path
) -> None:
    with program(system, tmp_path / "kept", "unchecked") as process:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 143, output
    assert "Traceback" not in output
    assert "done" not in output
    assert steps_kept(tmp_path / "kept") >= 10


@pytest.mark.smoke
def test_ctrl_c_to_the_group_saves_a_checkpoint(system: System, tmp_path: Path) -> None:
    with program(system, tmp_path / "kept", "with") as process:
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=240)
    assert output.rstrip().endswith("KeyboardInterrupt"), output
    assert steps_kept(tmp_path / "kept") >= 10


@pytest.mark.parametrize("loop", ["with", pytest.param("batches", marks=pytest.mark.smoke)])
def test_workers_that_die_first_while_the_loop_waits_for_them(
    system: System, tmp_path: Path, loop: str
) -> None:
    """The loop waits for a batch; its workers receive the signal before it does."""
    with program(system, tmp_path / "kept", loop, last=20) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:  # one after the other, as on a busy machine
            os.kill(int(child), signal.SIGTERM)
            until(lambda child=child: not alive(child), "the worker ends")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert steps_kept(tmp_path / "kept") >= 10
