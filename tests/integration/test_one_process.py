"""A learner's process: a notebook cell that runs again, a fork, a program without `close`."""

from __future__ import annotations

import copy
import gc
import io
import logging
import multiprocessing
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from decoupled_diloco import Learner
from decoupled_diloco.errors import ConfigError
from free_ports import free_ports
from integration.real_system import (
    PATIENCE_SECONDS,
    TOKENS,
    Model,
    System,
    Trainer,
    equal,
    nudge,
    parameters,
    training,
)

Make = Callable[..., System]

CELL = """
model = torch.nn.Linear(4, 4)
learner = dd.Learner(model, address, name="a", observability=reported, **options)
for _ in range(5):
    learner.step(tokens=8)
if interrupted:
    raise KeyboardInterrupt
learner.close()
"""


def background_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "ddiloco"]


@pytest.mark.parametrize("kept", [False, True])
def test_a_notebook_cell_may_be_interrupted_and_run_again(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    """The second learner takes over the name and port, and continues the first's checkpoint."""
    import decoupled_diloco as dd

    system = make(run={"learners": 1, "max_steps": 1000}, sync={"quorum": 1})
    system.start()
    notebook: dict[str, Any] = {
        "torch": torch,
        "dd": dd,
        "address": system.addresses[0],
        "reported": dd.Observability(metrics_address=f"127.0.0.1:{free_ports(1)[0]}"),
        "options": {"checkpoint": tmp_path / "kept"} if kept else {},
        "interrupted": True,
    }
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            exec(CELL, notebook)
    first = notebook["learner"]
    notebook["interrupted"] = False
    exec(CELL, notebook)
    last = notebook["learner"]
    assert last.incarnation == 3
    assert last.steps == (15 if kept else 5)
    assert not background_threads()
    assert sum("another Learner with this name" in each for each in caplog.messages) == 2
    with pytest.raises(ConfigError, match=r"'a' \(another Learner with this name was"):
        first.step(tokens=8)


def test_a_second_learner_with_another_name_or_syncer_does_not_take_over(make: Make) -> None:
    systems = make(run={"max_steps": 1000}), make(run={"max_steps": 1000})
    for system in systems:
        system.start()
    first = systems[0].learner(Model(), "a")
    others = systems[0].learner(Model(), "b"), systems[1].learner(Model(), "a")
    for each in (first, *others):
        assert each.step(tokens=TOKENS)
        each.close()


def in_child(work: Callable[[], object]) -> str:
    """Return the result of some work in a forked child; fail if the child does not end."""

    def run() -> None:
        try:
            result = f"{work()}"
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        sender.send(result)

    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    try:
        assert receiver.poll(PATIENCE_SECONDS), "it hangs"
        return str(receiver.recv())
    finally:
        child.kill()
        child.join()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_cannot_use_the_learner_and_does_not_hang(
    make: Make, tmp_path: Path
) -> None:
    system = make(run={"learners": 1, "max_steps": 1000}, sync={"quorum": 1})
    system.start()
    with system.learner(Model(), "a", checkpoint=tmp_path / "kept") as learner:
        learner.step(tokens=TOKENS)
        refused = "called on learner 'a' in a forked child process: use the learner in the process"
        with (
            learner._party.membership.background.changed
        ):  # the child inherits a locked lock that nothing releases
            assert f"step() {refused}" in in_child(lambda: learner.step(tokens=TOKENS))
            assert f"wrap() {refused}" in in_child(lambda: learner.wrap([1]))
            assert f"checkpoint() {refused}" in in_child(learner.checkpoint)
            assert f"flush() {refused}" in in_child(lambda: learner.flush(1.0))
            assert in_child(learner.close) == "None"
            assert in_child(lambda: gc.collect() >= 0) == "True"
        assert learner.step(tokens=TOKENS), "the parent continues"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_no_socket_of_the_learner(make: Make) -> None:
    def sockets() -> list[str]:
        links = [str(Path(f"/proc/self/fd/{each}").readlink()) for each in numbers]
        return [each for each in links if each.startswith("socket:")]

    system = make(run={"learners": 1, "max_steps": 1000}, sync={"quorum": 1})
    system.start()
    with system.learner(Model(), "a") as learner:
        learner.step(tokens=TOKENS)
        loop = learner._party.membership.background._loop
        assert loop is not None
        numbers = list(loop._transports)
        assert len(sockets()) == len(numbers) > 0
        assert in_child(sockets) == "[]"


def test_a_step_after_the_end_of_the_run_is_reported_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    system = make(run={"learners": 1, "max_steps": 4}, sync={"quorum": 1})
    system.start()
    model, rng = Model(), random.Random(0)
    with system.learner(model, "a") as learner:
        for _ in range(3):  # epochs
            goes_on = True
            while goes_on:
                nudge(model, rng)
                goes_on = learner.step(tokens=TOKENS)
    system.wait_finished()
    warnings = [each for each in caplog.messages if "after it returned False" in each]
    assert len(warnings) == 1
    assert "the run is over" in warnings[0]


def test_epochs_after_the_end_of_the_run_are_reported_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    system = make(run={"learners": 1, "max_steps": 4}, sync={"quorum": 1})
    system.start()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    learner: Learner = system.learner(model, "a", optimizer=optimizer)
    empty = 0
    while empty < 3:
        trained = 0
        for batch in learner.wrap([torch.randn(2, 4)] * 3):
            model(batch).square().mean().backward()
            optimizer.step()
            trained += 1
        empty += not trained
    assert learner.ended
    warnings = [each for each in caplog.records if "returns no more batches" in each.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].levelno == logging.WARNING
    assert "if learner.ended: break" in warnings[0].getMessage()
    system.wait_finished()


def test_an_early_end_of_the_data_is_reported_with_the_discarded_tokens(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    system = make(run={"learners": 1, "max_steps": 1000}, sync={"quorum": 1, "sync_every": 100})
    system.start()
    learner = system.learner(Model(), "a")
    for _ in range(3):
        learner.step(tokens=TOKENS)
    learner.close()
    learner.close()
    (warning,) = [each for each in caplog.messages if "before its budget is reached" in each]
    assert "(step 3 of 1000): 24 of its tokens are not merged and are discarded" in warning
    assert "Its model is not the run's result" in warning


@pytest.mark.parametrize("left_out", [0, 1])
def test_a_loop_of_exactly_the_budgets_steps_ends_with_the_runs_weights(
    make: Make, caplog: pytest.LogCaptureFixture, left_out: int
) -> None:
    """The loop counts its steps, and calls `close` before it receives the end of the run."""
    system = make(run={"learners": 2, "max_steps": 12}, sync={"quorum": 1, "overlap_steps": 2})
    system.start()
    models = Model(), Model(seed=1)
    other = Trainer(system, "b", models[1], pause=0.02)
    with training(other), system.learner(models[0], "a") as learner:
        for _ in range(12 - left_out):
            nudge(models[0], random.Random(0))
            learner.step(tokens=TOKENS)
        learner.close()
        assert learner.ended
        other.end()
    system.wait_finished()
    assert equal(parameters(models[0]), parameters(models[1]))
    assert not [each for each in caplog.messages if "a leaves the run before" in each]


@pytest.mark.parametrize("learners", [1, 2])
def test_a_share_of_the_budgets_tokens_ends_with_the_runs_weights(
    make: Make, caplog: pytest.LogCaptureFixture, learners: int
) -> None:
    """The loops count their tokens, and call `close` before they receive the end of the run."""
    budget = {"max_steps": None, "max_tokens": learners * 12 * TOKENS}
    system = make(run={"learners": learners, **budget}, sync={"quorum": 1, "overlap_steps": 2})
    system.start()
    trainers = [
        Trainer(system, name, Model(seed), steps_max=12)
        for seed, name in enumerate("ab"[:learners])
    ]
    with training(*trainers):
        assert all(trainer.end().ended for trainer in trainers)
    system.wait_finished()
    first, *others = (parameters(trainer.model) for trainer in trainers)
    assert all(equal(first, other) for other in others)
    assert not [each for each in caplog.messages if "leaves the run before" in each]


def test_close_does_not_wait_for_the_end_far_from_the_budget(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    budget = {"max_steps": None, "max_tokens": 100 * TOKENS}
    system = make(run={"learners": 1, **budget}, sync={"quorum": 1, "overlap_steps": 2})
    system.start()
    with system.learner(Model(), "a") as learner:
        for _ in range(3):
            learner.step(tokens=TOKENS)
    assert not learner.ended
    assert [each for each in caplog.messages if "a leaves the run before" in each]


def test_objects_that_refer_to_a_learner_can_be_copied_and_pickled(make: Make) -> None:
    system = make(run={"learners": 1, "max_steps": 1000}, sync={"quorum": 1})
    system.start()
    model = Model()
    with system.learner(model, "a") as learner:
        model.learner = learner
        assert copy.deepcopy(model).learner is learner
        assert pickle.loads(pickle.dumps(model)).learner is None
        torch.save(model, io.BytesIO())
        learner.step(tokens=TOKENS)
