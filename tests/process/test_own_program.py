"""A program with a separate training loop that ends in the middle: normally, or abruptly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from process.process_runs import command, config_file, stopped_at_exit

PROGRAM = """
import atexit, sys, threading, time
import torch
import decoupled_diloco as dd

torch.set_num_threads(1)
atexit.register(time.sleep, 0.5)  # as the cleaning up of other libraries takes
model = torch.nn.Linear(300, 300)
learner = dd.Learner(model, sys.argv[1], auth_token=open(sys.argv[2]).read(), name="a")

def train():
    while True:
        with torch.no_grad():
            model.weight.add_(0.001)
        learner.step(tokens=1)
        if learner.steps == 30:
            print("under way", flush=True)
"""


@pytest.fixture(scope="module")
def syncer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Run a syncer, and yield its address."""
    file = config_file(
        tmp_path_factory.mktemp("own") / "run", run={"max_steps": 10_000_000, "learners": 1}
    )
    with ExitStack() as stack:
        process = stack.enter_context(stopped_at_exit(command("syncer", str(file))))
        assert process.stdout is not None
        address = process.stdout.readline().split(": ")[1].strip()
        token = process.stdout.readline().split(": ")[1].strip()
        yield address, token
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=240)


def program(where: tuple[str, str], ending: str) -> subprocess.Popen[str]:
    """Run the program with this ending."""
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", PROGRAM + ending, *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("again", range(3))
def test_ctrl_c_ends_a_program_that_does_not_close(syncer: tuple[str, str], again: int) -> None:
    ending = "\ntry:\n    train()\nexcept KeyboardInterrupt:\n    sys.exit(130)\n"
    with stopped_at_exit(program(syncer, ending)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 130
    # Also the second one, if Ctrl-C arrives between the change of the weights and `step`.
    early = "a leaves the run before its budget is reached (step "
    replaced = "The weights of a were replaced after its last step"
    warnings = output.replace("under way\n", "").splitlines()
    assert warnings
    assert [line for line in warnings if not line.startswith((early, replaced))] == []


@pytest.mark.smoke
def test_a_program_may_end_without_closing(syncer: tuple[str, str]) -> None:
    ending = "\nfor _ in range(200):\n    learner.step(tokens=1)\nprint('done', flush=True)\n"
    with stopped_at_exit(program(syncer, ending)) as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert output.startswith("done\na leaves the run before its budget is reached (step ")
    assert output.count("\n") == 2


def test_a_loop_that_outlives_the_main_thread_is_reported(syncer: tuple[str, str]) -> None:
    with stopped_at_exit(program(syncer, "\nthreading.Thread(target=train).start()\n")) as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert "the program's main thread has ended, and the exchange stops with it" in output
