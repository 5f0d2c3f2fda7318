"""Start of each system: its processes, their sites and environments.

Worker 0 and a system's center (syncer, lighthouse, server) are at site 0, worker 1 is at site 1,
and so on in turns, so every exchange crosses the link once in each direction.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common import Task
from links import DEVICE

from decoupled_diloco.config import RunConfig, dump_config

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


@dataclass(frozen=True)
class Start:
    """One process: its site, command and environment."""

    site: int
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """A peer, or a variant of one.

    Attributes:
        environment: Name of the folder with its Python; empty: the Python that runs this program.
        worker: Returns the start of one worker, for that Python.
        center: Returns the start of the syncer, lighthouse or server, if there is one.
    """

    environment: str
    worker: Callable[[Task, Path], Start]
    center: Callable[[Task, Path], Start] | None = None

    def python(self, environments: Path) -> Path:
        """Return the interpreter of its environment."""
        if not self.environment:
            return Path(sys.executable)
        return environments / self.environment / "bin" / "python"


def environment_of(start: Start) -> dict[str, str]:
    """Return a process's environment: one thread, the workload, and the link as gloo's network."""
    own = {
        "PYTHONPATH": os.pathsep.join((str(SOURCE), str(HERE))),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": DEVICE,
        "TP_SOCKET_IFNAME": DEVICE,
    }
    return {**os.environ, **own, **start.env}


def _script(name: str, task: Task, *more: str) -> list[str]:
    return [str(HERE / f"{name}.py"), str(task.write()), *more]


def plainly(name: str) -> Callable[[Task, Path], Start]:
    """Return the start of a worker that is a plain script."""
    return lambda task, python: Start(task.site, [str(python), *_script(name, task)])


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=1", "--max-restarts=3"]


def ddp(task: Task, python: Path) -> Start:
    """Start as in torchrun's documentation, "Elastic": at least one machine, at most all."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={task.center}:29400", "--rdzv-id=run"]
    elastic = [f"--nnodes=1:{task.workers}", f"--local-addr={task.addresses[task.worker]}"]
    command = [str(python), *TORCHRUN, *elastic, *rendezvous, *_script("worker_here", task)]
    return Start(task.site, command)


def torchft(task: Task, python: Path) -> Start:
    """The README's `torchrun` for a replica group, reachable from the other site."""
    master = [
        f"--master-addr={task.addresses[task.worker]}",
        f"--master-port={29600 + task.worker}",
    ]
    command = [str(python), *TORCHRUN, "--nnodes=1", *master, *_script("worker_torchft", task)]
    lighthouse = {"TORCHFT_LIGHTHOUSE": f"http://{task.center}:29510"}
    return Start(task.site, command, {**lighthouse, "REPLICA_GROUP_ID": str(task.worker)})


def lighthouse(task: Task, python: Path) -> Start:
    """Start as in the README."""
    settings = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    return Start(
        0, [str(python.with_name("torchft_lighthouse")), *settings], {"RUST_BACKTRACE": "1"}
    )


def syncer(task: Task, python: Path) -> Start:
    """Start one shard; settings that are not here have their defaults."""
    folder = Path(task.folder)
    sync = {"fragments": task.fragments, "sync_every": task.period, "overlap_steps": task.overlap}
    codec = task.system.removeprefix("ours-")
    if codec != "bf16":
        sync |= {"codec": {"uplink": codec, "downlink": codec}}
    run = {
        "folder": str(folder / "run"),
        "learners": task.workers,
        "max_tokens": task.workers * task.steps * task.tokens_per_step,
        "evaluator": False,
    }
    outer = {"lr": task.outer_lr, "momentum": task.outer_momentum}
    server = {"host": task.center, "token_file": str(folder / "token")}
    config = RunConfig.model_validate({"run": run, "sync": sync, "outer": outer, "syncer": server})
    (folder / "token").write_text("benchmark")
    (folder / "run.toml").write_text(dump_config(config))
    command = ["-m", "decoupled_diloco.cli", "syncer", str(folder / "run.toml"), "--shard", "0"]
    return Start(0, [str(python), *command])


def dht(task: Task, python: Path) -> Start:
    """Start the first peer, as in OpenDiLoCo's README; after a restart it has the same identity."""
    settings = ["--identity_path", "dht.key", "--host_maddrs", f"/ip4/{task.center}/tcp/30001"]
    return Start(0, [str(python.with_name("hivemind-dht")), *settings])


def flower(task: Task, python: Path) -> Start:
    return Start(task.site, [str(python), *_script("processes_flower", task, "worker")])


def superlink(task: Task, python: Path) -> Start:
    return Start(0, [str(python), *_script("processes_flower", task, "center")])


HERE_TOO = plainly("worker_here")
SYSTEMS: dict[str, System] = {
    "none": System("", HERE_TOO),
    "ddp": System("", ddp),
    "ddp-fp16": System("", ddp),
    "torchft": System("torchft", torchft, lighthouse),
    "torchft-buckets": System("torchft", torchft, lighthouse),
    "torchft-streaming": System("torchft", torchft, lighthouse),
    "hivemind": System("hivemind", plainly("worker_hivemind"), dht),
    "flower": System("flower", flower, superlink),
    "ours-bf16": System("", HERE_TOO, syncer),
    "ours-int4": System("", HERE_TOO, syncer),
    "ours-int2": System("", HERE_TOO, syncer),
}
