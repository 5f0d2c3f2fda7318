"""What a learner with a workload and the evaluator do."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import difference_of, public_text, read_public
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.export.weights import fill, find_weights
from decoupled_diloco.launch.folder import Position
from decoupled_diloco.launch.processes import EVALUATOR, open_tape
from decoupled_diloco.launch.termination import Termination
from decoupled_diloco.learner.learner import Learner
from decoupled_diloco.learner.leased import LeasedBatches
from decoupled_diloco.learner.observer import Observer
from decoupled_diloco.observe.samples import (
    CorpusDescribed,
    SampleGenerated,
    evaluation_of,
)
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.workloads import Batch, Workload, load_workload
from decoupled_diloco.workloads.base import Placed
from decoupled_diloco.workloads.parts import WorkloadParts

logger = logging.getLogger(__name__)

EVALUATOR_NICENESS = 10
"""An evaluation may take longer; a learner's step on the same core should not."""

EVALUATOR_GIVES_UP_SECONDS = 15.0
"""An evaluator that was started too late finds nobody; whoever supervises it starts it again."""


def run_learner(
    config: RunConfig,
    index: int,
    *,
    syncer: tuple[str, ...],
    folder: Path,
    token: str | None,
    termination: Termination | None = None,
) -> None:
    """Trains one learner's part of the workload until the run ends, or until it is told to go.

    Raises:
        Error: the run refuses this learner, or the syncer was out of reach for too long.
    """
    if index < 0 or (index >= config.run.learners and not config.data.leases):
        raise ConfigError(
            f"index={index} is no learner of this run: 0 to {config.run.learners - 1}, or raise "
            "learners, or leave data.leases=true, so that there may be any number"
        )
    torch.set_num_threads(config.learner.threads)
    workload = load_workload(config.workload.name, config.workload_options())
    model = workload.model()
    optimizer = workload.optimizer(model)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # what is kept of it, and put back, is a scheduled rate
    name = f"learner-{index}"
    if isinstance(workload, Placed):
        workload.take_place(index, config.run.learners)
    position = Position()
    parts = LeasedBatches(WorkloadParts(workload, config.data.parts))
    every_seconds = config.learner.checkpoint_every_seconds
    termination = termination or Termination()
    with Learner(
        model,
        syncer,
        token=token,
        learner_id=name,
        optimizer=optimizer,
        stateful={"data": parts if config.data.leases else position},
        checkpoint=folder / "learners" if every_seconds else None,
        checkpoint_every_seconds=every_seconds,
        hand_in_seconds=config.learner.hand_in_seconds,
        donate=("optimizer",) if config.data.leases else ("optimizer", "data"),
        listen=config.learner.listen or None,
        give_up_seconds=config.learner.give_up_seconds,
        tape=folder / "tape" / f"{name}.jsonl",
    ) as learner:
        _require_same_work(learner.settings, read_public(public_text(config)))
        if learner.epoch == 1:
            position.batches = 0  # a donor's position is for who has lost its own
        termination.at_boundary(learner.stop_waiting)
        if config.data.leases:
            batches: Iterator[Batch] = parts.of(learner)
        else:
            batches = fixed_batches(config, workload, index, position)
        train(workload, model, optimizer, learner, batches, termination)
    if termination.asked:
        raise KeyboardInterrupt


def fixed_batches(
    config: RunConfig, workload: Workload, index: int, position: Position
) -> Iterator[Batch]:
    """The batches of a learner's fixed part, from where its last life was."""
    logger.info("learner-%d begins at batch %d of its data", index, position.batches)
    for batch in workload.batches(index, config.run.learners, position.batches):
        position.advance()  # a checkpoint of the step that trains it counts it
        yield batch


def _require_same_work(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """What a learner takes from its own file must be what the run's other learners have."""
    difference = difference_of(
        {"learners": ours["run"]["learners"], "data": ours["data"], "workload": ours["workload"]},
        {
            "learners": theirs["run"]["learners"],
            "data": theirs.get("data"),
            "workload": theirs["workload"],
        },
    )
    if difference:
        raise ConfigError(
            f"this learner's file is not the syncer's: {difference}: give both the same file"
        )


def train(
    workload: Workload,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    learner: Learner,
    batches: Iterator[Batch],
    termination: Termination,
) -> None:
    """The training loop of the built-in workloads; ends at a boundary when told to go."""
    for batch in batches:
        factor = workload.schedule(learner.global_step)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not learner.step(tokens=workload.tokens(batch), loss=loss.item()) or termination.asked:
            return


def run_evaluator(
    config: RunConfig, *, syncer: tuple[str, ...], folder: Path, token: str | None
) -> None:
    """Scores the published weights on held-out data until the run is over.

    Raises:
        Error: the run refuses the observer.
    """
    torch.set_num_threads(1)
    workload = load_workload(config.workload.name, config.workload_options())
    model = workload.model()
    signal.signal(signal.SIGTERM, _interrupt)
    header = {"machine": "evaluator"}
    os.nice(EVALUATOR_NICENESS)
    with (
        open_tape(folder, EVALUATOR, header) as tape,
        Observer(
            model,
            syncer,
            name=_evaluator_name(config),
            token=token,
            give_up_seconds=EVALUATOR_GIVES_UP_SECONDS,
        ) as observer,
    ):
        tape.sample(time.monotonic(), CorpusDescribed(json.dumps(workload.describe())))
        complete = False
        while not complete:
            complete = observer.complete
            observer.update()
            _evaluate(workload, model, observer.global_step, tape)
            if not complete:
                observer.wait(config.run.evaluate_every_seconds)
        _sample_text(workload, model, tape)


def evaluate_result(config: RunConfig, *, folder: Path) -> None:
    """Scores the weights of a run that is over, as the evaluator does where it sees the end.

    A short run may be over before its evaluator has joined, and an evaluator may fail.

    Raises:
        StorageError: the folder has no weights.
        ConfigError: they are not of this model.
    """
    torch.set_num_threads(1)
    found = find_weights(folder, config)
    workload = load_workload(config.workload.name, config.workload_options())
    model = workload.model()
    fill(model, found.tensors, found.source)
    with open_tape(folder, EVALUATOR, {"machine": "evaluator"}) as tape:
        tape.sample(time.monotonic(), CorpusDescribed(json.dumps(workload.describe())))
        _evaluate(workload, model, found.global_step or 0, tape)
        _sample_text(workload, model, tape)


def _sample_text(workload: Workload, model: torch.nn.Module, tape: TapeWriter) -> None:
    text = workload.sample(model)
    if text is not None:
        tape.sample(time.monotonic(), SampleGenerated(text))


def _evaluator_name(config: RunConfig) -> str:
    """A name of its own, since a second one of the same name would take over from the first.

    Where ids have secrets there is one evaluator, by the name that the secret is for.
    """
    if config.syncer.principals_file is not None:
        return EVALUATOR
    return f"{EVALUATOR}-{uuid.uuid4().hex[:8]}"


def _evaluate(
    workload: Workload, model: torch.nn.Module, global_step: int, tape: TapeWriter
) -> None:
    tape.sample(time.monotonic(), evaluation_of(global_step, workload.evaluate(model)))
    tape.flush()


def _interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt
