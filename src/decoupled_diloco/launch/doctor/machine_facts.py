"""Facts about this machine (cores, memory, disk, clock, ports, torch) and about a run's model."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.errors import StorageError
from decoupled_diloco.launch.devices import count
from decoupled_diloco.merge import Layout, layout_of
from decoupled_diloco.units import KIB, MIB
from decoupled_diloco.workloads import Workload

DISK_BYTES = 32 * MIB
DISK_SECONDS = 1.0
CLOCK_SECONDS = 0.2

BUILT_PARAMETERS_MAX = 50_000_000
"""Models with more parameters are described on the meta device, without memory for values."""

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class TorchFacts:
    """The installed torch.

    Attributes:
        version: Its version.
        cuda: The CUDA version that it was built for; `None` for a CPU build.
        devices: Names of the devices that it can use.
        nvidia: Whether this machine has an NVIDIA device.
    """

    version: str
    cuda: str | None
    devices: tuple[str, ...]
    nvidia: bool


@dataclass(frozen=True)
class DiskFacts:
    """The disk of the run folder."""

    folder: Path  # the nearest parent folder that exists
    free_bytes: int
    bytes_per_second: float
    sync_seconds: float  # until 4 KiB are on disk, median


@dataclass(frozen=True)
class ClockFacts:
    """Progress of the wall clock and of the monotonic clock in the same interval."""

    wall_seconds: float
    monotonic_seconds: float
    year: int


@dataclass(frozen=True)
class ModelFacts:
    """The run's model: its layout, its bytes in a learner, and its largest fragment on the wire."""

    layout: Layout
    model_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    fragment_bytes: int
    fragment_numel: int


def torch_facts() -> TorchFacts:
    names = tuple(
        f"cuda:{number} {torch.cuda.get_device_name(number)}" for number in range(count("cuda"))
    )
    names += tuple(
        f"xpu:{number} {torch.xpu.get_device_name(number)}" for number in range(count("xpu"))
    )
    names += ("mps",) * count("mps")
    return TorchFacts(torch.__version__, torch.version.cuda, names, Path("/dev/nvidia0").exists())


def cores() -> float:
    """Return the cores that this process may use, by its affinity and its control group."""
    available = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            available = min(available, int(quota) / int(period))
    return available


def memory_available() -> int:
    """Return the bytes that processes may still use, by the system and the control group."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    table = dict(line.split(":", 1) for line in lines)
    available = int(table["MemAvailable"].split()[0]) * KIB
    with contextlib.suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        statistics = (CGROUP / "memory.stat").read_text().splitlines()
        cache = dict(line.split() for line in statistics).get("inactive_file", "0")
        available = min(available, limit - used + int(cache))
    return max(0, available)


def process_bytes() -> int:
    """Return the bytes of a process that has loaded Python and torch: this one."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def disk_facts(folder: Path) -> DiskFacts:
    """Measure the disk of the run folder with a temporary file.

    Raises:
        StorageError: The file cannot be written.
    """
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            rate = _write_rate(file.fileno(), min(DISK_BYTES, free // 2))
            syncs = sorted(_sync_seconds(file.fileno()) for _ in range(5))
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
    return DiskFacts(folder, free, rate, syncs[2])


def _write_rate(file: int, count: int) -> float:
    piece, written = os.urandom(MIB), 0
    begun = time.monotonic()
    while written < max(count, 4 * KIB) and time.monotonic() < begun + DISK_SECONDS:
        written += os.write(file, piece[: max(4 * KIB, min(MIB, count - written))])
    os.fsync(file)
    return written / (time.monotonic() - begun)


def _sync_seconds(file: int) -> float:
    begun = time.monotonic()
    os.pwrite(file, bytes(4 * KIB), 0)
    os.fsync(file)
    return time.monotonic() - begun


def clock_facts() -> ClockFacts:
    """Measure `CLOCK_SECONDS` with both clocks."""
    wall, monotonic = time.time(), time.monotonic()
    time.sleep(CLOCK_SECONDS)
    return ClockFacts(time.time() - wall, time.monotonic() - monotonic, time.gmtime().tm_year)


def port_problem(host: str, port: int) -> str:
    """Return why a shard cannot listen on a port; empty if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            return error.strerror or str(error)
    return ""


def model_facts(config: RunConfig, workload: Workload) -> ModelFacts:
    """Build the run's model, without memory if it is large, and return its sizes."""
    model = _model(workload)
    layout = layout_of(model)
    plan = plan_of(layout, config)
    largest = max(range(len(plan.fragments)), key=lambda p: plan.fragments[p].numel)
    return ModelFacts(
        layout=plan.layout,
        model_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        gradient_bytes=sum(
            p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
        ),
        optimizer_bytes=_optimizer_bytes(workload.optimizer(model)),
        fragment_bytes=plan.uplink_nbytes(largest),
        fragment_numel=plan.fragments[largest].numel,
    )


def _model(workload: Workload) -> nn.Module:
    """Build the model on the meta device first; some models cannot be built there."""
    try:
        with torch.device("meta"):
            model = workload.model()
    except (RuntimeError, NotImplementedError):
        return workload.model()
    small = sum(p.numel() for p in model.parameters()) <= BUILT_PARAMETERS_MAX
    return workload.model() if small else model


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state.

    Adam-like optimizers keep two values per parameter, SGD with momentum one, and plain SGD none.
    """
    count = 0
    for group in optimizer.param_groups:
        states = 2
        if isinstance(optimizer, torch.optim.SGD):
            states = 1 if group["momentum"] else 0
        count += states * sum(p.numel() * p.element_size() for p in group["params"])
    return count
