"""What each process of a run does: a shard, a learner with a workload, the evaluator."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from pathlib import Path

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import public_text
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.folder import Position
from decoupled_diloco.learner.learner import Learner, Observer
from decoupled_diloco.observe.samples import CorpusDescribed, Evaluated, SampleGenerated
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.syncer.shard import Shard
from decoupled_diloco.transport.http import HttpClient, HttpServer
from decoupled_diloco.transport.tokens import Tokens
from decoupled_diloco.units import MIB
from decoupled_diloco.workloads import Workload, load_workload

logger = logging.getLogger(__name__)

EVALUATOR = "evaluator"
EVALUATED_BEFORE_WARNING_SECONDS = 120.0


def stop_with_parent() -> None:
    """Ends this process when its standard input is closed: the launcher is gone."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def run_shard(
    config: RunConfig,
    shard: int,
    *,
    port: int,
    addresses: tuple[str, ...],
    folder: Path,
    token: str | None,
) -> None:
    """Serves one shard until the run is over, or SIGTERM or SIGINT.

    Raises:
        Error: the port is taken, or state on disk cannot be read or written.
    """
    header = {"machine": "shard", "shard": shard, "settings": json.loads(public_text(config))}
    tape = TapeWriter(folder / "tape" / f"shard-{shard}.jsonl", f"shard-{shard}", header)
    coordinator_tape = None
    if shard == 0:
        path = folder / "tape" / "coordinator.jsonl"
        coordinator_tape = TapeWriter(path, "coordinator", header | {"machine": "coordinator"})

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        process = Shard(
            config,
            shard,
            addresses=addresses,
            folder=folder,
            server=lambda on_channel: HttpServer(
                host=config.syncer.host,
                port=port,
                tokens=Tokens(token),
                on_channel=on_channel,
                health=lambda: process.health(),
                pool_bytes=config.syncer.pool_mib * MIB,
            ),
            client=HttpClient(token=token),
            tape=tape,
            coordinator_tape=coordinator_tape,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, process.stop)
        await process.run()

    try:
        asyncio.run(serve())
    finally:
        tape.close()
        if coordinator_tape is not None:
            coordinator_tape.close()


def run_learner(
    config: RunConfig, index: int, *, syncer: tuple[str, ...], folder: Path, token: str | None
) -> None:
    """Trains one learner's part of the workload until the run ends.

    Raises:
        Error: the run refuses this learner, or the syncer was out of reach for too long.
    """
    if not 0 <= index < config.run.learners:
        raise ConfigError(
            f"index={index} is no learner of this run: 0 to {config.run.learners - 1}, or raise "
            "learners"
        )
    torch.set_num_threads(config.learner.threads)
    workload = load_workload(config.workload.name, config.workload_options())
    model = workload.model()
    optimizer = workload.optimizer(model)
    name = config.learner_ids[index]
    position = Position(folder / "positions" / name)
    signal.signal(signal.SIGTERM, _interrupt)
    with Learner(
        model,
        syncer,
        token=token,
        learner_id=name,
        optimizer=optimizer,
        give_up_seconds=config.learner.give_up_seconds,
        tape=folder / "tape" / f"{name}.jsonl",
    ) as learner:
        logger.info("%s begins at batch %d of its data", name, position.batches)
        train(workload, model, optimizer, learner, index, config.run.learners, position)
    position.close()


def train(
    workload: Workload,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    learner: Learner,
    part: int,
    parts: int,
    position: Position,
) -> None:
    """The training loop of the built-in workloads."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for batch in workload.batches(part, parts, position.batches):
        factor = workload.schedule(learner.global_step)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        position.advance()
        if not learner.step(tokens=workload.tokens(batch), loss=loss.item()):
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
    path = folder / "tape" / f"{EVALUATOR}.jsonl"
    with TapeWriter(path, EVALUATOR, header) as tape, _observer(model, syncer, token) as observer:
        tape.sample(time.monotonic(), CorpusDescribed(json.dumps(workload.describe())))
        complete = False
        while not complete:
            complete = observer.complete
            observer.update()
            _evaluate(workload, model, observer, tape)
            if not complete:
                observer.wait(config.run.evaluate_every_seconds)
        text = workload.sample(model)
        if text is not None:
            tape.sample(time.monotonic(), SampleGenerated(text))


def _observer(model: torch.nn.Module, syncer: tuple[str, ...], token: str | None) -> Observer:
    return Observer(model, syncer, name=EVALUATOR, token=token)


def _evaluate(
    workload: Workload, model: torch.nn.Module, observer: Observer, tape: TapeWriter
) -> None:
    global_step = observer.global_step
    metrics = workload.evaluate(model)
    tokens = int(metrics.get("tokens", 0))
    tape.sample(time.monotonic(), Evaluated(global_step, metrics["loss"], tokens))
    tape.flush()


def _interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt
