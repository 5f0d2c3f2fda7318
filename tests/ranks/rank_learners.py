"""Multi-rank learners as processes, forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from decoupled_diloco.syncer.shard_tensors import ShardTensors
from integration.real_system import System
from ranks import rank_program
from ranks.rank_program import Job

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "decoupled_diloco.participants",
        "decoupled_diloco.transport.http_client",
    ]
)

SECONDS_MAX = 300.0


Main = Callable[[Job, Mapping[str, str]], None]


class Ranks:
    """The processes of one learner."""

    def __init__(self, job: Job, world: int, main: Main) -> None:
        self.job = job
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes: list[BaseProcess] = []
        for rank in range(world):
            environment = {"OMP_NUM_THREADS": "1"}
            if job.kind != "plain":
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
                environment |= {name: str(number) for name, number in numbers.items()}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            process = FORKS.Process(target=main, args=(job, environment))
            process.start()
            self.processes.append(process)

    def log(self, rank: int) -> str:
        """Return the output of a rank."""
        path = self.job.folder / f"{self.job.name}-{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, seconds: float = SECONDS_MAX) -> list[int | None]:
        """Wait and return the exit codes; ``None``: the process still runs."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def require_success(self) -> None:
        """Wait until all ranks exit with code 0; a rank that does not exit prints its stack."""
        codes = self.wait()
        for rank, process in enumerate(self.processes):
            if process.is_alive():
                self.send(rank, signal.SIGABRT)
                process.join(5)
        logs = "\n".join(f"rank {n}:\n{self.log(n)[-3000:]}" for n in range(len(codes)))
        assert set(codes) == {0}, f"{codes}\n{logs}"

    def send(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


@contextmanager
def ranks(job: Job, world: int, main: Main = rank_program.main) -> Iterator[Ranks]:
    """Run a learner; kill its processes at the end."""
    started = Ranks(job, world, main)
    try:
        yield started
    finally:
        started.kill()


FRAGMENTS, ROUNDS = 3, 5


SYNCHRONOUS = {
    "fragments": FRAGMENTS,
    "sync_every": 4,
    "overlap_steps": 1,
    "quorum": 1,
    "wait": "at_overlap",
    # While it waits for one fragment, another one must not be applied a step early.
    "apply": {"when": "at_overlap"},
}


TOLERANCE = 1e-6
"""Relative to the fragment's norm: sums over ranks are rounded in another order."""


History = dict[int, list[Tensor]]


def recorded(patch: pytest.MonkeyPatch) -> History:
    """Record every version of every fragment that the shard merges."""
    found: History = defaultdict(list)
    commit = ShardTensors.commit

    def committed(self: ShardTensors, fragment: int, *arguments: Any) -> None:
        commit(self, fragment, *arguments)
        found[fragment].append(self.whole(fragment).clone())

    patch.setattr(ShardTensors, "commit", committed)
    return found


@contextmanager
def system_in(folder: Path, **tables: Any) -> Iterator[System]:
    run = {"learners": 1, "max_steps": 4 * (ROUNDS + 1), **tables.pop("run", {})}
    system = System(folder / "run", run=run, sync={**SYNCHRONOUS, **tables.pop("sync", {})})
    system.start()
    try:
        yield system
    finally:
        system.close()


BLOCK = 128
"""Elements per digest block: small, so that ranges of the small model have whole blocks."""


def several_sync_ranks(patch: pytest.MonkeyPatch, sync_ranks: Any = "all") -> dict[str, Any]:
    """Return a job's options; also set the block size of the syncer to that of the ranks."""
    patch.setattr(sys.modules["decoupled_diloco.merge.codec"], "DIGEST_NUMEL", BLOCK)
    return {"sync_ranks": sync_ranks, "block": BLOCK}


ASYNCHRONOUS = {
    "fragments": 2,
    "sync_every": 4,
    "overlap_steps": 1,
    "quorum": 1,
    "wait": "never",
    "apply": {"when": "on_arrival"},
}


NOWHERE = "http://127.0.0.1:9"


def wait_for_step(learner: Ranks, step: int) -> None:
    """Wait until rank 0 has finished a step."""
    wait_for_log(learner, f"step {step}\n")


def wait_for_log(learner: Ranks, text: str, seconds: float = 240.0) -> None:
    """Wait until the output of rank 0 contains a text."""
    deadline = time.monotonic() + seconds
    while text not in learner.log(0):
        assert time.monotonic() < deadline, learner.log(0)[-3000:]
        assert None in learner.wait(0.0), learner.log(0)[-3000:]
        time.sleep(0.05)
