"""What each process of a run does: a shard, a learner with a workload, the evaluator."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import difference_of, public_text, read_public
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.export.weights import fill, find_weights
from decoupled_diloco.launch.folder import Position
from decoupled_diloco.launch.secrets import accepted_tokens
from decoupled_diloco.launch.termination import Termination
from decoupled_diloco.learner.learner import Learner, Observer
from decoupled_diloco.learner.leased import LeasedBatches
from decoupled_diloco.observe.samples import (
    CorpusDescribed,
    SampleGenerated,
    TookOver,
    evaluation_of,
)
from decoupled_diloco.observe.sources import TAPE_PATH
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.observe.versions import versions
from decoupled_diloco.storage.claims import CLAIMS, ClaimStore
from decoupled_diloco.syncer import cut_requests
from decoupled_diloco.syncer.cut_requests import CUT_PATH
from decoupled_diloco.syncer.shard import Shard
from decoupled_diloco.syncer.tapes import TapeDocuments
from decoupled_diloco.syncer.tenure import UNCHALLENGED, Tenure, Unchallenged
from decoupled_diloco.transport.documents import Document
from decoupled_diloco.transport.http import HttpClient, HttpServer
from decoupled_diloco.units import MIB
from decoupled_diloco.workloads import Batch, Workload, load_workload
from decoupled_diloco.workloads.base import Placed
from decoupled_diloco.workloads.parts import WorkloadParts

logger = logging.getLogger(__name__)

EVALUATOR = "evaluator"
EVALUATOR_NICENESS = 10
"""An evaluation may take longer; a learner's step on the same core should not."""

EVALUATOR_GIVES_UP_SECONDS = 15.0
"""An evaluator that was started too late finds nobody; whoever supervises it starts it again."""


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
    standby: bool = False,
) -> None:
    """Serves one shard until the run is over, or SIGTERM or SIGINT.

    Where the shard has a standby, this process waits for its turn before it listens.

    Raises:
        LeaseError: the other process acts for the shard now.
        Error: the port is taken, or state on disk cannot be read or written.
    """
    process_name = process_of(shard, standby=standby)
    tokens = accepted_tokens(config, token)
    header = {
        "machine": "shard",
        "shard": shard,
        "settings": json.loads(public_text(config)),
        "versions": versions(),
    }
    tapes: list[TapeWriter] = []
    files = {f"shard-{shard}": process_name}
    if shard == 0:
        files["coordinator"] = "coordinator" + process_name.removeprefix("shard-0")

    def begin_tape(who: str, header: Mapping[str, Any]) -> TapeWriter:
        tapes.append(open_tape(folder, who, header, file=files[who]))
        return tapes[-1]

    async def serve(tenure: Tenure | Unchallenged) -> bool:
        loop = asyncio.get_running_loop()
        tape = begin_tape(f"shard-{shard}", header)
        if isinstance(tenure, Tenure):
            taken = TookOver(process_name, shard, tenure.number, tenure.waited_seconds)
            tape.sample(time.monotonic(), taken)
        paths = {who: folder / "tape" / f"{file}.jsonl" for who, file in files.items()}

        async def cut_asked(query: Mapping[str, str]) -> Document:
            return cut_requests.answer(process.host, query)

        tapes_of_process = TapeDocuments(config.run.name, shard, addresses, paths)
        process = Shard(
            config,
            shard,
            addresses=addresses,
            folder=folder,
            server=lambda on_channel: HttpServer(
                host=config.syncer.host,
                port=port,
                tokens=tokens,
                on_channel=on_channel,
                health=lambda: process.health(),
                about=lambda: process.describe(),
                queries={TAPE_PATH: tapes_of_process, CUT_PATH: cut_asked},
                pool_bytes=config.syncer.pool_mib * MIB,
            ),
            client=HttpClient(token=token),
            tape=tape,
            coordinator_tape=partial(begin_tape, "coordinator") if shard == 0 else None,
            tenure=tenure,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, process.stop)
        await process.run()
        return process.finished

    try:
        if config.syncer.standbys:
            finished = asyncio.run(take_turn(config, shard, folder, standby=standby, serve=serve))
        else:
            finished = asyncio.run(serve(UNCHALLENGED))
    finally:
        for each in tapes:
            each.close()
    if not finished:
        # Only the end of the run is a success: whoever supervises this process starts it again.
        raise KeyboardInterrupt


async def take_turn(
    config: RunConfig,
    shard: int,
    folder: Path,
    *,
    standby: bool,
    serve: Callable[[Tenure], Coroutine[Any, Any, bool]],
) -> bool:
    """Waits for a shard's claim and serves by it; returns whether the run is over.

    Raises:
        Error: see `run_shard`.
    """
    name = process_of(shard, standby=standby)
    store = ClaimStore(
        folder / CLAIMS / f"shard-{shard}", uuid.uuid4().hex, config.syncer.lease_seconds, name
    )
    facts = {"machine": "lease", "waits": standby}
    told = {"nonce": store.nonce, "lease_seconds": store.lease_seconds}
    tenure = Tenure(store, open_tape(folder, f"{name}.claims", {**facts, **told}), waits=standby)
    finished, loop = False, asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tenure.give_up)
    logger.info("%s waits for its claim in %s", name, store.folder)
    try:
        if await tenure.gained():
            finished = await serve(tenure)
        else:
            finished = tenure.run_over
    finally:
        await tenure.end(finished=finished)
    return finished


def process_of(shard: int, *, standby: bool) -> str:
    """What a process of a shard is called."""
    return f"shard-{shard}-standby" if standby else f"shard-{shard}"


def open_tape(
    folder: Path, who: str, header: Mapping[str, Any], *, file: str | None = None
) -> TapeWriter:
    """A process's tape in a run folder; a full disk ends it, and nothing else.

    Args:
        folder: The run folder.
        who: Whose records they are.
        header: See `TapeWriter`.
        file: Name of the file; default: ``who``. Two processes that act for one shard in turns
            have a file each.

    Raises:
        StorageError: it cannot be opened.
    """
    path = folder / "tape" / f"{file or who}.jsonl"
    return TapeWriter(path, who, header, on_failure=lambda error: logger.error("%s", error))


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
