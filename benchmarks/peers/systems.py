"""How each system is started: which processes at which site, in which environment.

Worker 0 and what a system has as its centre (syncer, lighthouse, server) are at site 0, worker 1 at
site 1, and so on by turns, so every exchange crosses the link once each way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Task
from links import DEVICE

from decoupled_diloco.config import RunConfig, dump_config

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


@dataclass(frozen=True)
class Start:
    """One process: where, and what."""

    site: int
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """A peer, or a variant of one.

    Attributes:
        environment: Name of the folder with its Python; empty: the Python that runs this.
        exchange_bytes: Of a parameter in one blocking exchange: how long that may take follows.
    """

    environment: str
    worker: Callable[[Task, Path], Start]
    centre: Callable[[Task, Path], Start] | None = None
    exchange_bytes: float = 4.0


def environment_of(start: Start) -> dict[str, str]:
    """Of a process: one thread, the workload, and the link as gloo's network."""
    own = {
        "PYTHONPATH": os.pathsep.join((str(SOURCE), str(HERE))),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": DEVICE,
        "TP_SOCKET_IFNAME": DEVICE,
    }
    return {**os.environ, **own, **start.env}


def python_of(system: System, environments: Path) -> Path:
    """The interpreter of a system's environment."""
    if not system.environment:
        return Path(sys.executable)
    return environments / system.environment / "bin" / "python"


def _script(name: str, task: Task) -> list[str]:
    return [str(HERE / f"worker_{name}.py"), str(task.write())]


def none(task: Task, python: Path) -> Start:
    return Start(task.site, [str(python), *_script("none", task)])


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=1", "--max-restarts=3"]


def ddp(task: Task, python: Path) -> Start:
    """As torchrun's documentation says, "Elastic": at least one, at most all of the machines."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={task.centre}:29400", "--rdzv-id=run"]
    elastic = [f"--nnodes=1:{task.workers}", f"--local-addr={task.addresses[task.worker]}"]
    command = [str(python), *TORCHRUN, *elastic, *rendezvous, *_script("ddp", task)]
    return Start(task.site, command)


def torchft(task: Task, python: Path) -> Start:
    """The README's `torchrun` for a replica group, reachable from the other site."""
    here = [
        "--nnodes=1",
        f"--master-addr={task.addresses[task.worker]}",
        f"--master-port={29600 + task.worker}",
    ]
    command = [str(python), *TORCHRUN, *here, *_script("torchft", task)]
    env = {
        "TORCHFT_LIGHTHOUSE": f"http://{task.centre}:29510",
        "REPLICA_GROUP_ID": str(task.worker),
    }
    return Start(task.site, command, env)


def lighthouse(task: Task, python: Path) -> Start:
    """As in the README."""
    settings = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    return Start(
        0, [str(python.with_name("torchft_lighthouse")), *settings], {"RUST_BACKTRACE": "1"}
    )


def ours(task: Task, python: Path) -> Start:
    return Start(task.site, [str(python), *_script("ours", task)])


def syncer(task: Task, python: Path) -> Start:
    """One shard; every setting that is not here has its default."""
    folder = Path(task.folder)
    sync: dict[str, Any] = {
        "fragments": task.fragments,
        "period": task.period,
        "overlap": task.overlap,
    }
    if task.system == "ours-int4":
        sync |= {"uplink_codec": "int4", "downlink_codec": "int4"}
    run = {
        "folder": str(folder / "run"),
        "learners": task.workers,
        "budget_tokens": task.workers * task.steps * task.tokens_per_step,
        "evaluator": False,
    }
    outer = {"lr": task.outer_lr, "momentum": task.outer_momentum}
    server = {"host": task.centre, "token_file": str(folder / "token")}
    config = RunConfig.model_validate({"run": run, "sync": sync, "outer": outer, "syncer": server})
    (folder / "token").write_text("benchmark")
    (folder / "run.toml").write_text(dump_config(config))
    command = ["-m", "decoupled_diloco.cli", "syncer", str(folder / "run.toml"), "--shard", "0"]
    return Start(0, [str(python), *command])


def hivemind(task: Task, python: Path) -> Start:
    return Start(task.site, [str(python), *_script("hivemind", task)])


def dht(task: Task, python: Path) -> Start:
    """The first peer, as in OpenDiLoCo's README; started again it has the same name."""
    settings = ["--identity_path", "dht.key", "--host_maddrs", f"/ip4/{task.centre}/tcp/30001"]
    return Start(0, [str(python.with_name("hivemind-dht")), *settings])


def flower(task: Task, python: Path) -> Start:
    return Start(task.site, [str(python), *_script("flower", task)])


def superlink(task: Task, python: Path) -> Start:
    return Start(0, [str(python), str(HERE / "centre_flower.py"), str(task.write())])


SYSTEMS: dict[str, System] = {
    "none": System("", none),
    "ddp": System("", ddp),
    "ddp-fp16": System("", ddp),
    "torchft": System("torchft", torchft, lighthouse),
    "torchft-buckets": System("torchft", torchft, lighthouse),
    "torchft-streaming": System("torchft", torchft, lighthouse),
    "hivemind": System("hivemind", hivemind, dht),
    "flower": System("flower", flower, superlink),
    "ours-bf16": System("", ours, syncer),
    "ours-int4": System("", ours, syncer),
}
