"""Run a learner with a built-in or user-defined workload, and the evaluator."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import difference_of_work, read_settings
from decoupled_diloco.data import ElasticLoader
from decoupled_diloco.errors import ConfigError, ProtocolError, TransportError
from decoupled_diloco.export.run_weights import fill, find_weights
from decoupled_diloco.launch.devices import device_of_process
from decoupled_diloco.launch.on_device import home_of, moved, placed
from decoupled_diloco.launch.processes import EVALUATOR, evaluator_name, open_tape
from decoupled_diloco.launch.run_folder import Position
from decoupled_diloco.launch.scoring import Scorer
from decoupled_diloco.launch.termination import SignalledTermination, Termination, interrupt
from decoupled_diloco.learner.launched import client_in_run
from decoupled_diloco.learner.learner_model import Model, device_text
from decoupled_diloco.learner.option_groups import (
    Checkpointing,
    Observability,
    PartyFiles,
    StateSharing,
    SyncerConnection,
    Timeouts,
)
from decoupled_diloco.learner.process import is_death_of_worker
from decoupled_diloco.participants import Learner, Observer
from decoupled_diloco.ranks.group import ranks_of_this_job
from decoupled_diloco.runtime import blocking, now
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.samples import (
    CorpusDescribed,
    SampleGenerated,
    evaluation_of,
    pictures_of,
)
from decoupled_diloco.transport.interface import Client
from decoupled_diloco.transport.tls import TLSConfig
from decoupled_diloco.workloads import Batch, Workload, workload_of
from decoupled_diloco.workloads.data_partitions import WorkloadPartitions
from decoupled_diloco.workloads.rank_split import (
    DataShare,
    divided,
    require_divisible,
    share_of_data,
    step_separately,
)
from decoupled_diloco.workloads.workload import Pictured, Placed

logger = logging.getLogger(__name__)

EVALUATOR_NICENESS = 10
"""Niceness of the evaluator, so that it does not slow a learner's step on the same core."""

EVALUATOR_GIVES_UP_SECONDS = 15.0
"""Time without any shard after which the evaluator ends; its supervisor restarts it."""


@dataclass(frozen=True)
class Cut:
    """One rank's share of its learner.

    Attributes:
        model: Its part of the model.
        ranks: The number of ranks of the learner.
        share: Its part of the learner's data.
    """

    model: torch.nn.Module
    ranks: int
    share: DataShare


def _built(workload: Workload) -> torch.nn.Module:
    return workload.model()


@dataclass(frozen=True)
class Seat:
    """The backend of a role, on a real or virtual machine.

    Attributes:
        learner: Creates a `Learner`.
        observer: Creates an `Observer`.
        workload: Creates the workload.
        cut: Divides the model among the ranks and returns this rank's share.
        pace: Awaited in each step before the model changes; real steps take their own time.
        open_tape: Opens an event tape; see `processes.open_tape`.
        model: Creates the model.
    """

    learner: Callable[..., Coroutine[Any, Any, Learner]]
    observer: Callable[..., Coroutine[Any, Any, Observer]]
    workload: Callable[[RunConfig], Workload]
    cut: Callable[[RunConfig, int, Workload, torch.nn.Module], Cut]
    pace: Callable[[], Coroutine[Any, Any, None]]
    open_tape: Callable[[Path, str, Mapping[str, Any]], TapeWriter]
    model: Callable[[Workload], torch.nn.Module] = _built


async def _learner(model: Model, syncer: tuple[str, ...], **named: Any) -> Learner:
    return Learner(model, syncer, **named)


async def _observer(model: torch.nn.Module, syncer: tuple[str, ...], **named: Any) -> Observer:
    return Observer(model, syncer, **named)


def _seat_at(
    shared: Path | None, folder: Path, name: str, token: str | None, tls: TLSConfig | None
) -> Seat:
    """Return the backend of this machine.

    Args:
        shared: The shards' run folder, if this machine shares it; their addresses are read there.
        folder: The run folder of this process.
        name: Name of the process.
        token: Its auth token.
        tls: Its CA and certificate.
    """

    def client() -> Client:
        return client_in_run(name, token, tls, folder=folder, shared=shared)

    async def learner(model: Model, syncer: tuple[str, ...], **named: Any) -> Learner:
        return Learner(model, SyncerConnection(syncer, client), **named)

    async def observer(model: torch.nn.Module, syncer: tuple[str, ...], **named: Any) -> Observer:
        return Observer(model, SyncerConnection(syncer, client), **named)

    return replace(HERE, learner=learner, observer=observer)


async def _at_once() -> None:
    pass


def _cut(config: RunConfig, index: int, workload: Workload, model: torch.nn.Module) -> Cut:
    ranks = ranks_of_this_job()
    model = placed(model, device_of_process(config))
    if ranks == 1:
        return Cut(model, ranks, DataShare())
    parallelism = config.learner.parallelism_of(index)
    require_divisible(workload, config)
    return Cut(divided(model, workload, parallelism), ranks, share_of_data(parallelism))


HERE = Seat(_learner, _observer, workload_of, _cut, _at_once, open_tape)
"""The backend of this machine."""


def run_learner(
    config: RunConfig,
    index: int,
    *,
    syncer: tuple[str, ...],
    folder: Path,
    token: str | None,
    shared: Path | None = None,
    tls: TLSConfig | None = None,
    termination: Termination | None = None,
) -> None:
    """Train one learner's part of the workload until the run ends or a stop is requested.

    In a learner with several ranks, each process calls this function, with torchrun's environment.

    Args:
        config: The run's settings.
        index: The number of the learner.
        syncer: Addresses of shards.
        folder: The run folder on this machine.
        token: The auth token.
        shared: The shards' run folder, if their addresses are read there whenever they are dialed.
        tls: CA and certificate.
        termination: Where a stop is requested. Default: SIGTERM and SIGINT.

    Raises:
        DilocoError: The run rejects this learner, the syncer was unreachable for too long, a rank
            has died, or the number of ranks differs from the settings.
        KeyboardInterrupt: A stop was requested.
    """
    torch.set_num_threads(config.learner.threads)
    asked = termination or SignalledTermination()
    seat = _seat_at(shared, folder, f"learner-{index}", token, tls)
    device = device_of_process(config)
    if device.index is not None:
        getattr(torch, device.type).set_device(device)
    with _process_group(config.learner.ranks_of(index), device):
        role = learn(config, index, seat, asked, syncer=syncer, folder=folder, token=token, tls=tls)
        blocking(role)


BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}


@contextlib.contextmanager
def _process_group(ranks: int, device: torch.device) -> Iterator[None]:
    """Connect the ranks of this learner for the duration of the block."""
    if ranks == 1:
        yield
        return
    dist.init_process_group(BACKENDS.get(device.type, "gloo"))
    if dist.get_world_size() != ranks:
        raise ConfigError(
            f"this learner has {dist.get_world_size()} processes, but ranks={ranks} in [learner]: "
            "start that number (torchrun --nproc-per-node), or change ranks"
        )
    yield
    dist.destroy_process_group()


async def learn(
    config: RunConfig,
    index: int,
    seat: Seat,
    termination: Termination,
    *,
    syncer: tuple[str, ...],
    folder: Path,
    token: str | None,
    tls: TLSConfig | None = None,
) -> None:
    """Run a learner with a backend; see `run_learner`."""
    if index < 0 or (index >= config.run.learners and not config.data.elastic):
        raise ConfigError(
            f"index={index} is not a learner of this run: use 0 to {config.run.learners - 1}, "
            "raise learners, or set data.elastic=true, which allows any number of learners"
        )
    workload = seat.workload(config)
    cut = seat.cut(config, index, workload, seat.model(workload))
    model, ranks = cut.model, cut.ranks
    optimizer = workload.optimizer(model)
    for group in optimizer.param_groups:
        # A restored optimizer contains a scheduled rate in "lr", so the base rate is kept here.
        group["initial_lr"] = group["lr"]
    name = f"learner-{index}"
    logger.info("%s trains on %s in %s", name, device_text(model), config.learner.precision)
    if isinstance(workload, Placed):
        workload.take_place(index, config.run.learners)
    position = Position()
    loader = ElasticLoader(WorkloadPartitions(workload, config.data.partitions))
    shared = ("optimizer",) if config.data.elastic else ("optimizer", "data")
    every_seconds = config.learner.checkpoint_interval_seconds
    goes_on = True
    while goes_on:
        async with await seat.learner(
            model,
            syncer,
            name=name,
            auth_token=token,
            tls=tls,
            optimizer=optimizer,
            checkpoint=Checkpointing(
                folder / "learners" if every_seconds else None,
                every_seconds,
                {"data": loader if config.data.elastic else position},
            ),
            timeouts=Timeouts(
                disconnect=config.learner.disconnect_seconds, flush=config.learner.flush_seconds
            ),
            state_sharing=StateSharing(shared if ranks == 1 else ()),
            observability=Observability(
                metrics_address=config.learner.metrics_of(index),
                event_tape=folder / "tape" / f"{name}.jsonl",
            ),
            sync_ranks=config.learner.sync_ranks if ranks > 1 else 1,
            party=PartyFiles(config.privacy.agreed, config.learner.party_key),
        ) as learner:
            _require_same_work(read_settings(learner.run_config), config)
            if learner.incarnation == 1:
                # A new learner may have received another learner's position with its state.
                position.batches = 0
            termination.at_boundary(learner.request_stop)
            next_batch: Callable[[], Awaitable[Batch]]
            if config.data.elastic:
                next_batch = loader.bind(learner).__anext__
            else:
                next_batch = in_turn(fixed_batches(config, workload, index, position, cut.share))
            training = Training(
                workload, model, optimizer, learner, seat.pace, ranks, config.learner.precision
            )
            await training.run(next_batch, termination)
        # A learner that has lost its place in the cohort is present, and waits for the next draw.
        over = termination.asked or learner.budget_reached or learner.ended
        goes_on = config.sync.devices is not None and not over
    if termination.asked:
        raise KeyboardInterrupt


def in_turn(batches: Iterator[Batch]) -> Callable[[], Awaitable[Batch]]:
    """Return an awaitable version of `next`, which never waits."""

    async def next_batch() -> Batch:
        return next(batches)

    return next_batch


def fixed_batches(
    config: RunConfig, workload: Workload, index: int, position: Position, share: DataShare
) -> Iterator[Batch]:
    """Yield this rank's batches of a learner's fixed partition, from ``position`` on."""
    logger.info("learner-%d starts at batch %d of its data", index, position.batches)
    batches = workload.batches(index, config.run.learners, position.batches + share.part)
    for batch in islice(batches, 0, None, share.parts):
        position.advance(share.parts)  # before the step: its checkpoint includes this batch
        yield batch


def _require_same_work(theirs: RunConfig, ours: RunConfig) -> None:
    """Check that the settings a learner reads from its own file are equal to the syncer's.

    Raises:
        ConfigError: They differ.
    """
    difference = difference_of_work(ours, theirs)
    if difference:
        raise ConfigError(
            f"this learner's file differs from the syncer's: {difference}: use the same file"
        )


@dataclass
class Training:
    """The training loop of workloads."""

    workload: Workload
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    learner: Learner
    pace: Callable[[], Coroutine[Any, Any, None]]
    ranks: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        if self.ranks > 1:
            step_separately(self.optimizer)
        self._home = home_of(self.model)
        kind = next(self.model.parameters()).device.type
        self._arithmetic = torch.autocast(
            kind, dtype=torch.bfloat16, enabled=self.precision == "bf16"
        )

    async def run(
        self, next_batch: Callable[[], Awaitable[Batch]], termination: Termination
    ) -> None:
        """Train until the run ends or, when a stop is requested, until the next boundary.

        Several ranks must stop at the same boundary: `Learner._take_step` returns false on all.
        """
        try:
            await self._run(next_batch, termination)
        except (RuntimeError, OSError, EOFError) as error:
            # A signal to the process group also ends a DataLoader's workers, and then it raises.
            if not (is_death_of_worker(error) and await self.learner._ends_in_order(error)):
                raise

    async def _run(
        self, next_batch: Callable[[], Awaitable[Batch]], termination: Termination
    ) -> None:
        continues = True
        while continues and not (termination.asked and self.ranks == 1):
            batch = await next_batch()
            await self.pace()
            tokens = self.workload.tokens(batch)  # still on the CPU: no wait for a GPU
            loss = self._train_on(batch)
            continues = await self.learner._take_step(loss, tokens)

    def _train_on(self, batch: Batch) -> torch.Tensor:
        factor = self.workload.schedule(self.learner.global_step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        if self._home is not None:
            batch = moved(batch, self._home)
        with self._arithmetic:
            loss = self.workload.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # the learner reads it later, so the host does not wait for a GPU here


def run_evaluator(
    config: RunConfig,
    *,
    syncer: tuple[str, ...],
    folder: Path,
    token: str | None,
    shared: Path | None = None,
    tls: TLSConfig | None = None,
) -> None:
    """Evaluate the published weights on held-out data until the run ends; see `run_learner`."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, interrupt)
    os.nice(EVALUATOR_NICENESS)
    seat = _seat_at(shared, folder, EVALUATOR, token, tls)
    blocking(evaluate(config, seat, syncer=syncer, folder=folder, token=token, tls=tls))


async def evaluate(
    config: RunConfig,
    seat: Seat,
    *,
    syncer: tuple[str, ...],
    folder: Path,
    token: str | None,
    tls: TLSConfig | None = None,
) -> None:
    """Run an evaluator with a backend; see `run_evaluator`."""
    workload = seat.workload(config)
    model = seat.model(workload)
    with seat.open_tape(folder, EVALUATOR, {"machine": "evaluator"}) as tape:
        async with await seat.observer(
            model,
            syncer,
            name=evaluator_name(config),
            auth_token=token,
            tls=tls,
            timeouts=Timeouts(disconnect=EVALUATOR_GIVES_UP_SECONDS),
        ) as observer:
            tape.sample(now(), CorpusDescribed(json.dumps(workload.describe())))
            done = False
            scorer = None
            if config.trust.act != "off":
                scorer = Scorer(config, folder, workload, model)
            while not done:
                done = observer.done
                observer.pull()
                await _evaluate_published(config, workload, model, observer, tape)
                if scorer is not None:
                    observer._report(scorer.gains(observer.global_step, observer.versions))
                if not done:
                    await observer._stay(config.run.evaluate_interval_seconds)
            _show_results(workload, model, tape)


def evaluate_result(config: RunConfig, *, folder: Path) -> None:
    """Evaluate the weights of a finished run, if its evaluator has not seen the end.

    A short run may end before its evaluator has joined, and an evaluator may fail.

    Raises:
        StorageError: The folder has no weights.
        ConfigError: They are not of this model.
    """
    torch.set_num_threads(1)
    found = find_weights(folder, config)
    workload = workload_of(config)
    model = workload.model()
    average: dict[str, float] = {}
    if config.outer.average is not None and config.syncer.persist:
        averaged = find_weights(folder, config, average=True)
        fill(model, averaged.tensors, averaged.source)
        average = _of_average(workload.evaluate(model))
    fill(model, found.tensors, found.source)
    with open_tape(folder, EVALUATOR, {"machine": "evaluator"}) as tape:
        tape.sample(now(), CorpusDescribed(json.dumps(workload.describe())))
        _evaluated(found.global_step or 0, {**workload.evaluate(model), **average}, tape)
        _show_results(workload, model, tape)


def _show_results(workload: Workload, model: torch.nn.Module, tape: TapeWriter) -> None:
    text = workload.sample(model)
    if text is not None:
        tape.sample(now(), SampleGenerated(text))
    if isinstance(workload, Pictured):
        tape.sample(now(), pictures_of(workload.pictures(model)))


async def _evaluate_published(
    config: RunConfig,
    workload: Workload,
    model: torch.nn.Module,
    observer: Observer,
    tape: TapeWriter,
) -> None:
    """Evaluate the global weights and, in a run that keeps one, their average."""
    averages = None
    if config.outer.average is not None:
        # Before the evaluation, because after the end the shards wait only some seconds.
        try:
            averages = await observer._averages()
        except (TransportError, ProtocolError) as error:
            logger.warning("the average of the weights is not evaluated: %s", error)
    metrics = dict(workload.evaluate(model))
    if averages is not None:
        with observer._averaged(averages):
            metrics |= _of_average(workload.evaluate(model))
    _evaluated(observer.global_step, metrics, tape)


def _of_average(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"average_{name}": value for name, value in metrics.items() if name != "tokens"}


def _evaluated(global_step: int, metrics: Mapping[str, float], tape: TapeWriter) -> None:
    tape.sample(now(), evaluation_of(global_step, metrics))
    tape.flush()
