"""Run all checks in order. Slow ones have a time limit, and all together take `SECONDS_MAX`.

A check that hangs is reported and abandoned in its thread; the other checks continue.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch

from decoupled_diloco._version import __version__
from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.addresses import alternatives, reached_by
from decoupled_diloco.errors import ConfigError, DilocoError
from decoupled_diloco.launch.data_check import require_data
from decoupled_diloco.launch.devices import environment_of, kind_of
from decoupled_diloco.launch.doctor import machine, machine_facts
from decoupled_diloco.launch.doctor import syncer_findings as judge
from decoupled_diloco.launch.doctor.machine import Finding, error, ok, warning
from decoupled_diloco.transport.reachability import LookTrouble, Seen, check_server, listens
from decoupled_diloco.transport.tls import TLSConfig
from decoupled_diloco.workloads import Workload, workload_of

SECONDS_MAX = 15.0
MODEL_SECONDS = 6.0
DATA_SECONDS = 3.0
DISK_SECONDS = 3.0
THREAD = "check"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Examined:
    """The input of the checks.

    Attributes:
        config: The settings of the run, if a file is given.
        syncer: Addresses of shards; empty for a run on this machine alone.
        token: The auth token for the shards.
        started: When the checks started, in seconds of `time.monotonic`.
        tls: CA and certificate for the shards.
    """

    config: RunConfig | None
    syncer: tuple[str, ...]
    token: str | None
    started: float
    tls: TLSConfig | None = None

    @property
    def left_seconds(self) -> float:
        """Seconds that are left for all remaining checks."""
        return self.started + SECONDS_MAX - time.monotonic()


def examine(case: Examined) -> Iterator[Finding]:
    """Run all checks that apply, and yield each finding at once."""
    config, cores = case.config, machine_facts.cores()
    yield machine.judge_torch(machine_facts.torch_facts())
    if config is not None:
        learners = 1 if case.syncer else config.run.learners
        ranks = sum(map(config.learner.ranks_of, range(learners)))
        yield machine.judge_cores(cores, learners, ranks, config.learner.threads)
        yield _devices(config, learners)
        yield from _sites(config)
    omp = os.environ.get("OMP_NUM_THREADS")
    yield machine.judge_threads(omp, torch.get_num_threads(), cores)
    process_bytes = machine_facts.process_bytes()
    model: machine_facts.ModelFacts | None = None
    if config is not None and config.workload is not None:
        workload, model, finding = _model(config, config.workload.name)
        yield finding
        if workload is not None:
            yield _data(config, config.workload.name, workload)
    yield _memory(case, model, process_bytes)
    yield _disk(case, model)
    yield machine.judge_clock(machine_facts.clock_facts())
    if case.syncer:
        yield from _syncer(case, model)
    elif config is not None:
        yield from _here(config)


def _devices(config: RunConfig, learners: int) -> Finding:
    """Check the devices of the learners on this machine."""
    try:
        kind, _ = kind_of(config)
        shares = [environment_of(config, index) for index in range(learners)]
    except ConfigError as problem:
        if config.launch.backend != "local":  # they run elsewhere
            advice = f"ignore this if the machines of {config.launch.backend} have the devices"
            return warning("device", str(problem), advice)
        return error("device", str(problem), "correct [learner] in the file")
    return machine.judge_devices(kind, config.learner.device, shares)


def _model(
    config: RunConfig, name: str
) -> tuple[Workload | None, machine_facts.ModelFacts | None, Finding]:
    def build() -> tuple[Workload, machine_facts.ModelFacts]:
        workload = workload_of(config)
        return workload, machine_facts.model_facts(config, workload)

    try:
        workload, model = limited(MODEL_SECONDS, build)
    except TimeoutError:
        text = f"{name} is not built within {MODEL_SECONDS:g} s"
        advice = "data, memory, layout and the transfer time of a fragment are not checked"
        return None, None, warning("model", text, advice)
    except ConfigError as problem:
        advice = "correct [workload] or [sync] in the file"
        return None, None, error("model", str(problem), advice)
    except Exception as problem:  # a user's workload may raise anything
        text = f"{name}: {type(problem).__name__}: {problem}"
        return None, None, error("model", text, "correct the workload")
    return workload, model, machine.judge_model(name, model)


def _data(config: RunConfig, name: str, workload: Workload) -> Finding:
    """Check whether each learner has a batch."""
    try:
        tokens = limited(DATA_SECONDS, lambda: require_data(workload, config))
    except TimeoutError:
        text = f"{name} returns no batch within {DATA_SECONDS:g} s"
        return warning("data", text, "each learner needs this time when it starts")
    except DilocoError as problem:
        return error("data", str(problem), "correct [workload.options] or run.learners")
    return ok("data", f"each learner has batches of {tokens} tokens")


def _memory(case: Examined, model: machine_facts.ModelFacts | None, process_bytes: int) -> Finding:
    need = None
    if case.config is not None and model is not None:
        need = machine.need_of(
            model,
            case.config,
            process_bytes=process_bytes,
            learners=1 if case.syncer else case.config.run.learners,
            everything=not case.syncer,
        )
    return machine.judge_memory(machine_facts.memory_available(), need)


def _disk(case: Examined, model: machine_facts.ModelFacts | None) -> Finding:
    config, need = case.config, 0
    if config is not None and model is not None:
        learners = 1 if case.syncer else config.run.learners
        need = machine.disk_need_of(model, config, learners=learners, everything=not case.syncer)
    folder = Path.cwd() if config is None else Path(config.run.folder)
    try:
        found = limited(DISK_SECONDS, lambda: machine_facts.disk_facts(folder))
    except TimeoutError:
        text = f"writing a few MiB to {folder} takes longer than {DISK_SECONDS:g} s"
        advice = "choose a folder on a local disk with --set run.folder=…"
        return warning("disk", text, advice)
    except DilocoError as problem:
        return error("disk", str(problem), "choose another folder with --set run.folder=…")
    return machine.judge_disk(found, need)


def _sites(config: RunConfig) -> Iterator[Finding]:
    """Find relays that save nothing: no other learner shares their copies and sums."""
    upstream = {site.upstream for site in config.sites}
    lone = [s.name for s in config.sites if len(s.learners) == 1 and s.name not in upstream]
    if lone:
        text = f"a relay for one learner saves no bytes: {', '.join(lone)}"
        yield warning("sites", text, "remove it from [[sites]], or list more learners there")


def _here(config: RunConfig) -> Iterator[Finding]:
    """Check what the syncer needs on this machine: ports and initial weights."""
    settings = config.syncer
    processes = settings.shards * (1 + settings.standby)
    ports = range(settings.port, settings.port + processes) if settings.port else ()
    yield machine.judge_ports(
        settings.host, {port: machine_facts.port_problem(settings.host, port) for port in ports}
    )
    weights = config.sync.initial_weights
    if weights is not None and not weights.is_file():
        text = f"initial_weights={str(weights)!r} does not exist"
        yield error("weights", text, "correct the path in [sync], or remove initial_weights")


def _syncer(case: Examined, model: machine_facts.ModelFacts | None) -> Iterator[Finding]:
    # At least 5 s, also after slow checks of this machine: the user asked about the syncer.
    seconds = max(5.0, case.left_seconds - 0.5)
    seen, shards = asyncio.run(check_all(case.syncer, case.token, seconds, case.tls))
    yield from judge.judge_seen(seen, __version__)
    config = case.config
    yield from judge.judge_rates(seen, model, config.sync.overlap_steps if config else 0)
    if shards:
        yield judge.judge_shards(case.syncer[0], shards)
    if config is not None and seen.run is not None:
        yield from judge.judge_run(seen.run, config, model)


async def check_all(
    addresses: tuple[str, ...], token: str | None, seconds: float, tls: TLSConfig | None = None
) -> tuple[Seen, dict[str, LookTrouble | None]]:
    """Check the first address in depth, and whether all shards can be reached.

    Returns:
        The results of the first address, and for each shard's address the failure, if any.
    """
    seen = await check_server(addresses[0], token, seconds, tls)
    given = seen.run.get("addresses") if seen.run is not None else None
    reported = given if isinstance(given, list) else []  # any program may have answered
    reachable_as = [reached_by(str(address), addresses[0]) for address in reported]
    named = dict.fromkeys([*reachable_as, *addresses[1:]])
    others = [each for each in named if addresses[0] not in alternatives(each)]
    troubles = await asyncio.gather(*(one_listens(alternatives(each)) for each in others))
    known = {} if seen.run is None else {addresses[0]: cast("LookTrouble | None", None)}
    return seen, known | dict(zip(others, troubles, strict=True))


async def one_listens(addresses: tuple[str, ...]) -> LookTrouble | None:
    """Return why neither a shard nor its standby can be reached; `None` if one can.

    Args:
        addresses: The addresses of the shard and of its standby.
    """
    troubles = await asyncio.gather(*(listens(address) for address in addresses))
    return None if None in troubles else troubles[0]


def limited(seconds: float, work: Callable[[], _T]) -> _T:
    """Return the result of a function that may hang.

    Raises:
        TimeoutError: It does not return in time; its thread is abandoned.
        Exception: The exception that ``work`` raises.
    """
    results: list[_T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name=THREAD, daemon=True)
    thread.start()
    thread.join(seconds)
    if problems:
        raise problems[0]
    if not results:
        raise TimeoutError
    return results[0]


def any_left_behind() -> bool:
    """Whether an abandoned check still runs: then only `os._exit` ends the process."""
    return any(thread.name == THREAD for thread in threading.enumerate())
