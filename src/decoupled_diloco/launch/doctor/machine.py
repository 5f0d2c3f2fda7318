"""Findings of the doctor, and pure functions that derive them from facts about this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of
from decoupled_diloco.config.sync import EXACT_CODECS
from decoupled_diloco.launch.doctor.machine_facts import (
    ClockFacts,
    DiskFacts,
    ModelFacts,
    TorchFacts,
)
from decoupled_diloco.run_model.phrases import many
from decoupled_diloco.units import GIB, MIB, format_bytes, format_count, format_duration

TORCH_MIN = (2, 6)

MEMORY_SHARE_MAX = 0.8
"""Share of the free memory that the estimate may use: batches and activations need the rest."""

DISK_BYTES_MIN = GIB
"""Free space for tapes, logs and the report, in addition to the weights."""

DISK_RATE_MIN = 20 * MIB
SYNC_SECONDS_MAX = 0.2
CLOCK_DRIFT_MAX = 0.02
YEAR_MIN = 2025

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    check: str
    level: Level  # "error": a run cannot work; "warning": a run works, but perhaps badly
    text: str
    advice: str = ""  # the fix; empty for "ok"


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warning(check: str, text: str, advice: str) -> Finding:
    return Finding(check, "warning", text, advice)


def error(check: str, text: str, advice: str) -> Finding:
    return Finding(check, "error", text, advice)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of memory that the processes of a run need on this machine.

    Attributes:
        learners: The number of learners on this machine.
        learner_bytes: Memory of one learner.
        syncer_bytes: Memory of all shards together; 0 if they run elsewhere.
        evaluator_bytes: Memory of the evaluator; 0 if there is none here.
        fork_server_bytes: Memory of the fork server; 0 if there is none here.
    """

    learners: int
    learner_bytes: int
    syncer_bytes: int
    evaluator_bytes: int
    fork_server_bytes: int

    @property
    def total(self) -> int:
        others = self.syncer_bytes + self.evaluator_bytes + self.fork_server_bytes
        return self.learners * self.learner_bytes + others


def judge_torch(facts: TorchFacts) -> Finding:
    """Judge the version of torch, and whether it can use the devices of this machine."""
    numbers = tuple(int(x) for x in facts.version.split("+")[0].split(".")[:2] if x.isdigit())
    build = "a CPU build" if facts.cuda is None else f"built for CUDA {facts.cuda}"
    text = f"{facts.version}, {build}"
    if numbers < TORCH_MIN:
        return error("torch", text, "install torch 2.6 or later")
    if facts.devices:
        return ok("torch", f"{text}: {', '.join(facts.devices)}")
    if facts.nvidia and facts.cuda is None:
        return warning(
            "torch",
            f"{text}, but this machine has an NVIDIA device",
            "install a build of torch for CUDA to train on it",
        )
    if facts.nvidia:
        return warning(
            "torch", f"{text}, but torch can use no device", "check the driver with nvidia-smi"
        )
    return ok("torch", f"{text}; no GPU")


DEVICES_SHOWN = 8
"""Number of learners whose devices are listed one by one."""


def judge_devices(kind: str, setting: str, shares: Sequence[Mapping[str, str]]) -> Finding:
    """Report the devices of the learners.

    Args:
        kind: The kind of device.
        setting: `device` in `[learner]`.
        shares: For each learner, the variable that selects its devices.

    >>> judge_devices("cuda", "auto", [{"CUDA_VISIBLE_DEVICES": "0"}]).text
    "device='auto' is cuda: learner-0 gets 0"
    """
    own = [", ".join(each.values()) for each in shares]
    parts = [
        f"learner-{index} gets {gets}" for index, gets in enumerate(own[:DEVICES_SHOWN]) if gets
    ]
    more = f", and {len(own) - DEVICES_SHOWN} more" if parts and len(own) > DEVICES_SHOWN else ""
    listed = f": {'; '.join(parts)}{more}" if parts else ""
    return ok("device", f"device={setting!r} is {kind}{listed}")


def judge_cores(cores: float, learners: int, ranks: int, threads: int) -> Finding:
    """Compare the cores with the learners' threads; shards and evaluator use the remaining ones.

    Args:
        cores: Cores that this process may use.
        learners: The number of learners on this machine.
        ranks: The number of ranks of all learners together.
        threads: Threads per rank.
    """
    wanted = ranks * threads
    users = many(learners, "learner") + (f" of {ranks} ranks" if ranks > learners else "")
    text = f"{cores:g} for {users} × {many(threads, 'thread')}"
    if wanted <= cores:
        return ok("cores", text)
    return warning(
        "cores",
        f"{text}: they share the cores, and steps take about {wanted / cores:.2g} times as long",
        "this is fine for a trial; otherwise lower run.learners or learner.threads",
    )


def judge_threads(setting: str | None, torch_threads: int, cores: float) -> Finding:
    """Judge the threads of a user's own training script; `ddiloco learner` has learner.threads."""
    text = f"your own script gets {many(torch_threads, 'thread')} from torch"
    if setting is not None:
        text += f" (OMP_NUM_THREADS={setting})"
    if torch_threads > math.ceil(cores):
        return warning(
            "threads",
            f"{text}, and {cores:g} cores",
            "set OMP_NUM_THREADS to the cores of each learner",
        )
    return ok("threads", text)


SHARD_BYTES_PER_PARAMETER = 26
"""Memory of all shards together at most, as measured (`benchmarks/results/shard_memory`)."""

SHARD_DISK_BYTES_PER_PARAMETER = 24
"""Disk space of all shards' checkpoints and journals at least; at most it is 120."""


def need_of(
    model: ModelFacts, config: RunConfig, *, process_bytes: int, learners: int, everything: bool
) -> MemoryNeed:
    """Return the memory that the processes on this machine need, at most, without activations.

    Args:
        model: Sizes of the model.
        config: The run's settings.
        process_bytes: Memory of a process that has only loaded Python and torch.
        learners: Number of learners on this machine.
        everything: Whether shards, evaluator and the fork server are on this machine too.
    """
    numel = model.layout.numel
    at_once = options_of(config).open_rounds_max + 1
    in_flight = at_once * (model.fragment_bytes + 8 * model.fragment_numel)
    trained = model.model_bytes + model.gradient_bytes + model.optimizer_bytes
    checkpoint = _checkpoint_bytes(model) if config.learner.checkpoint_interval_seconds else 0
    codec = config.sync.codec  # whether a link is too slow for the first one shows only later
    is_exact = codec.feedback is None or codec.uplinks[0] in EXACT_CODECS
    residual = 0 if is_exact else 4 * numel
    syncer = config.syncer.shards * process_bytes + SHARD_BYTES_PER_PARAMETER * numel
    syncer += min(
        config.syncer.shards * config.syncer.pool_mib * MIB,
        config.run.learners * at_once * model.fragment_bytes,
    )
    evaluator = process_bytes + model.model_bytes + 4 * numel
    return MemoryNeed(
        learners=learners,
        learner_bytes=process_bytes + trained + 4 * numel + residual + checkpoint + in_flight,
        syncer_bytes=syncer if everything else 0,
        evaluator_bytes=evaluator if everything and config.run.evaluator else 0,
        fork_server_bytes=process_bytes if everything and config.run.fork_server else 0,
    )


def _checkpoint_bytes(model: ModelFacts) -> int:
    """Return the size of one learner's checkpoint: model and optimizer."""
    return model.model_bytes + model.optimizer_bytes


def disk_need_of(model: ModelFacts, config: RunConfig, *, learners: int, everything: bool) -> int:
    """Return the bytes that the run folder needs at least, without tapes and logs.

    Args:
        model: Sizes of the model.
        config: The run's settings.
        learners: Number of learners on this machine.
        everything: Whether the shards are on this machine too.
    """
    numel, need = model.layout.numel, 0
    if everything:
        need += 8 * numel  # the shards' parts of the result, and the assembled weights, in fp32
        need += SHARD_DISK_BYTES_PER_PARAMETER * numel if config.syncer.persist else 0
    if config.learner.checkpoint_interval_seconds:
        need += 2 * _checkpoint_bytes(model) * learners  # the newest one, and one being written
    return need


def judge_memory(available: int, need: MemoryNeed | None) -> Finding:
    """Compare the free memory, in bytes, with the need of the run on this machine."""
    free = f"{format_bytes(available)} free"
    if need is None:
        return ok("memory", free)
    text = (
        f"{free}, {format_bytes(need.total)} needed: {many(need.learners, 'learner')} × "
        f"{format_bytes(need.learner_bytes)}"
    )
    for name in ("syncer", "evaluator", "fork_server"):
        if nbytes := getattr(need, f"{name}_bytes"):
            text += f", {name.replace('_', ' ')} {format_bytes(nbytes)}"
    text += "; activations need more"
    if need.total > available:
        return error("memory", text, "use fewer learners, a smaller model, or a larger machine")
    if need.total > MEMORY_SHARE_MAX * available:
        advice = "leave memory for activations: use fewer learners or a smaller batch"
        return warning("memory", text, advice)
    return ok("memory", text)


def judge_model(name: str, model: ModelFacts) -> Finding:
    """Report the model that the run's file describes."""
    return ok(
        "model",
        f"{name}: {format_count(model.layout.of_model.numel)} parameters in "
        f"{many(len(model.layout.of_model.tensors), 'tensor')}, fragments of up to "
        f"{format_bytes(model.fragment_bytes)} on the wire",
    )


def judge_disk(facts: DiskFacts, need: int) -> Finding:
    """Compare space and speed of the run folder's disk with what the run needs, in bytes."""
    text = (
        f"{format_bytes(facts.free_bytes)} free at {facts.folder}, "
        f"{format_bytes(facts.bytes_per_second)}/s, a sync takes "
        f"{format_duration(facts.sync_seconds)}"
    )
    if facts.free_bytes < need:
        return error(
            "disk",
            f"{text}; weights, journals and checkpoints need {format_bytes(need)} or more",
            "free disk space, or choose another folder with --set run.folder=…",
        )
    if facts.free_bytes < need + DISK_BYTES_MIN:
        advice = "free space for tapes and logs: without them a run continues, but has no report"
        return warning("disk", text, advice)
    if facts.bytes_per_second < DISK_RATE_MIN or facts.sync_seconds > SYNC_SECONDS_MAX:
        advice = "use a faster disk: joins and the end of the run wait for it, steps do not"
        return warning("disk", f"{text}: slow", advice)
    return ok("disk", text)


def judge_clock(facts: ClockFacts) -> Finding:
    """Judge whether the wall clock is set, and runs as fast as the monotonic clock."""
    drift = facts.wall_seconds / facts.monotonic_seconds - 1
    advice = "let NTP set it: tapes of several machines are ordered by wall time"
    if facts.year < YEAR_MIN:
        return warning("clock", f"the wall clock shows the year {facts.year}", advice)
    if abs(drift) > CLOCK_DRIFT_MAX:
        text = f"the wall clock drifted by {100 * drift:+.0f} % against the monotonic clock"
        return warning("clock", text, advice)
    return ok("clock", "the wall clock and the monotonic clock run at the same rate")


def judge_ports(host: str, problems: dict[int, str]) -> Finding:
    """Judge whether the shards can listen on their ports.

    Args:
        host: The address to listen on.
        problems: For each port the reason why it cannot be used, or an empty text. Empty if the
            shards may use any free ports.
    """
    if not problems:
        return ok("ports", f"any free ports on {host}")
    taken = {port: problem for port, problem in problems.items() if problem}
    if not taken:
        ports = ", ".join(map(str, problems))
        return ok("ports", f"{ports} on {host} {'is' if len(problems) == 1 else 'are'} free")
    text = "; ".join(f"{host}:{port}: {problem}" for port, problem in taken.items())
    return error(
        "ports",
        text,
        "end the run that uses them, or choose others with --set syncer.port=… (0: any); with "
        "--syncer the doctor checks that syncer instead",
    )
