"""Cost of a multi-rank learner: time in ``step()``, traffic by rank, redistribution, start.

    python benchmarks/ranks.py                      # everything
    python benchmarks/ranks.py --only redistribute

*step*: each learner trains a GPT with DDP in blocks of steps, in turns with and without
``learner.step()``, against a shard in another process. *redistribute*: all fragments of an FSDP2
and a tensor-parallel model go to the sync ranks and back. It is compared with a plain copy of the
same bytes within one process into reused memory, and with a gather of each tensor on rank 0.
*start*: from the command to the first finished step. All are in one run. Ranks are processes on
this machine, so with more ranks than cores they wait for one another.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_runs import TOKEN, a_syncer, called, calling
from evidence import keep, options, spread
from timed_loops import by_turns, gpt_loop, medians, throughput_percent
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from decoupled_diloco import Learner
from decoupled_diloco.merge import Fragment, layout_of, local_of, partition
from decoupled_diloco.ranks.group import RankGroup
from decoupled_diloco.ranks.rank_model import described, joined
from decoupled_diloco.ranks.redistribute import HeldRows, Parts, Redistribution
from decoupled_diloco.ranks.sync_ranks import SyncRank
from decoupled_diloco.runtime import blocking

GPT = {"layers": 4, "width": 128, "heads": 4, "batch_size": 16}
BLOCKS, WIDTH = 8, 512
"""The redistributed model has this number of blocks with two matrices each, 16.8 M parameters."""

FRAGMENTS = 24
LEARNERS: dict[str, dict[str, Any]] = {
    "one process": {},
    "DDP, 2 ranks": {"ranks": 2},
    "DDP, 4 ranks": {"ranks": 4},
    "DDP, 4 ranks, all sync ranks": {"ranks": 4, "sync_ranks": "all", "fragments": 2},
}
"""Fragments are split among sync ranks at multiples of 65,536 elements, so only large fragments of
this model are shared."""


class Block(nn.Module):
    """Two matrices: column-wise and row-wise in tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)


def sharded(kind: str) -> nn.Module:
    """Return this rank's model under FSDP2 or tensor parallelism."""
    torch.manual_seed(0)
    model = nn.ModuleDict({f"block{n}": Block() for n in range(BLOCKS)})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.values():
        if kind == "fsdp":
            fully_shard(block, mesh=mesh)
        else:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def timed(work: Callable[[], object], repetitions: int) -> list[float]:
    """Return the seconds of each repetition; all ranks start together."""
    found = []
    for _ in range(repetitions + 1):
        dist.barrier()
        begun = time.perf_counter()
        work()
        dist.barrier()
        found.append(time.perf_counter() - begun)
    return found[1:]


class Moves:
    """Redistribution of the whole model; it also measures the exchange."""

    def __init__(self, model: nn.Module, sync_ranks: tuple[int, ...], group: RankGroup) -> None:
        layout, description = layout_of(model), described(model, model, group.rank)
        self._group, self._rank = group, group.rank
        self._own = joined(model, [each or {} for each in gathered(description)], sync_ranks)
        self._moves = Redistribution(self._own.sharding, self._rank, self._exchange)
        self._fragments = partition(layout, FRAGMENTS)
        self._flat: dict[int, Tensor] = {}
        self.sent = self.taken = 0
        self.exchange_seconds = 0.0

    async def _exchange(
        self, out: Tensor, given: Tensor, outs: list[int], gives: list[int]
    ) -> None:
        begun = time.perf_counter()
        await self._group.all_to_all(out, given, outs, gives)
        self.exchange_seconds += time.perf_counter() - begun
        self.sent += 4 * (sum(gives) - gives[self._rank])
        self.taken += 4 * (sum(outs) - outs[self._rank])

    def _parts(self, fragment: Fragment) -> Parts:
        found: list[HeldRows | None] = []
        for piece, box in zip(fragment.pieces, self._moves.parts(fragment), strict=True):
            tensor, whole = self._own.tensors[piece.tensor], self._own.sharding.boxes[piece.tensor]
            held = whole[self._rank]
            if box is None or held is None or tensor is None:
                found.append(None)
            else:
                found.append(HeldRows(box, held.view(local_of(tensor), box).detach()))
        return tuple(found)

    def collect(self) -> None:
        """Move all fragments from the ranks to the sync ranks."""
        for fragment in self._fragments:
            parts = self._parts(fragment)
            self._flat[fragment.index] = blocking(self._moves.collect(fragment, parts))

    def distribute(self) -> None:
        """Move all fragments back."""
        for fragment in self._fragments:
            blocking(self._moves.distribute(fragment, self._flat[fragment.index]))


def gathered(mine: Any) -> list[Any]:
    """Gather the objects of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def redistribute(kind: str, repetitions: int) -> dict[str, Any]:
    """Run one rank's part; the result is rank 0's."""
    dist.init_process_group("gloo")
    model, group = sharded(kind), RankGroup()
    numel = layout_of(model).numel
    found: dict[str, Any] = {"bytes": 4 * numel, "ranks": group.size}
    for name, sync_ranks in (("one sync rank", (0,)), ("all sync ranks", tuple(range(group.size)))):
        moves = Moves(model, sync_ranks, group)
        moves.collect()
        found[name] = {"MB sent and received by rank, one way": gathered([moves.sent, moves.taken])}
        for way in (moves.collect, moves.distribute):
            moves.exchange_seconds = 0.0
            found[name][way.__name__] = timed(way, repetitions)
            found[name][f"{way.__name__}, the exchange"] = moves.exchange_seconds / (
                1 + repetitions
            )
    source = [torch.empty(numel // FRAGMENTS) for _ in range(FRAGMENTS)]

    kept: dict[int, Tensor] = {}

    def copy() -> None:
        if dist.get_rank() == 0:
            for index, each in enumerate(source):
                kept[index] = each.clone()

    def gather() -> None:
        for parameter in model.parameters():
            mine = local_of(parameter).detach().contiguous()
            to = [torch.empty_like(mine) for _ in range(group.size)]
            dist.gather(mine, to if dist.get_rank() == 0 else None)

    found["copy"], found["gather"] = timed(copy, repetitions), timed(gather, repetitions)
    group.close()
    dist.destroy_process_group()
    return found


def carried() -> Callable[[], int]:
    """Start counting the payload bytes that this process syncs; return a function for the count."""
    nbytes, answer = [0], SyncRank.answer

    async def counted(sync_rank: SyncRank, request: dict[str, Any]) -> dict[str, Any]:
        found = await answer(sync_rank, request)
        nbytes[0] += found.get("sent", 0) + found.get("received", 0)
        return found

    SyncRank.answer = counted  # type: ignore[method-assign]
    return lambda: nbytes[0]


def step(address: str, blocks: int, steps: int, sync_ranks: Any) -> dict[str, Any]:
    """Run one rank of a learner that trains in turns with and without the run."""
    by_this_rank, rank = carried(), 0
    if several := "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    wrap = nn.parallel.DistributedDataParallel if several else lambda model: model
    model, train = gpt_loop(GPT, wrap, 4, rank)
    for _ in range(3):
        train()
    own = {"auth_token": TOKEN, "name": "learner-0", "sync_ranks": sync_ranks}
    with Learner(model, address, **own) as learner:
        learner.step(tokens=train())
        first = time.time()
        raw = by_turns(train, learner, blocks, steps)
        membership = getattr(learner._party, "membership", None)  # rank 0 has one
        stats = {} if membership is None else vars(membership.background.client.stats)
        control = sum(value for name, value in stats.items() if name.startswith("control"))
        # The leader's own count includes the payloads of all sync ranks.
        bodies = by_this_rank() if several else sum(stats.values()) - control
    if several:
        dist.destroy_process_group()
    parameters = sum(p.numel() for p in model.parameters())
    moved = {"bytes to and from the syncer": control + bodies, "parameters": parameters}
    return {**raw, "first step at": first, **moved}


def into(folder: str, what: str, *arguments: Any) -> None:
    """Run a function in a rank's process, and write its result to a file."""
    torch.set_num_threads(1)
    found = globals()[what](*arguments)
    (Path(folder) / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


def launched(ranks: int, what: str, *arguments: Any) -> list[Any]:
    """Return the results of a function in each rank's process."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        own = calling(into, folder, what, *arguments)
        command = [sys.executable, *(torchrun if ranks > 1 else []), *own]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, timeout=1200)
        files = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        return [json.loads(file.read_text()) for file in files]


def with_a_shard(
    blocks: int, steps: int, ranks: int = 1, sync_ranks: Any = 1, fragments: int = FRAGMENTS
) -> dict[str, Any]:
    """Return the times of a learner with this number of ranks."""
    tables = {
        "run": {"learners": 1},
        "sync": {"fragments": fragments},
        "workload": {"options": {**GPT, "total_steps": 10**6}},
    }
    with a_syncer(tables) as syncer:
        time.sleep(5.0)
        begun = time.time()
        found = launched(ranks, "step", syncer.address, blocks, steps, sync_ranks)
    return {"ranks": found, "start": found[0]["first step at"] - begun}


def summary_of_step(raw: dict[str, Any]) -> dict[str, Any]:
    first = raw["ranks"][0]
    step = statistics.median(medians(first["detached"]))
    inside = [1e3 * statistics.median(each["inside"]) for each in raw["ranks"]]
    talked = "bytes to and from the syncer"
    return {
        "step, ms": 1e3 * step,
        "inside step(), ms, median by rank": inside,
        "inside step(), % of a step, rank 0": inside[0] / 10 / step,
        "throughput, % of that without the run": spread(throughput_percent(first)),
        f"{talked} by rank": [each[talked] for each in raw["ranks"]],
        "start to first step, s": raw["start"],
    }


def summary_of_redistribution(raw: dict[str, Any]) -> dict[str, Any]:
    copy, gather = statistics.median(raw["copy"]), statistics.median(raw["gather"])
    found: dict[str, Any] = {"a plain copy, ms": 1e3 * copy, "a gather on rank 0, ms": 1e3 * gather}
    for name in ("one sync rank", "all sync ranks"):
        for way in ("collect", "distribute"):
            seconds = raw[name][way]
            median, exchange = statistics.median(seconds), raw[name][f"{way}, the exchange"]
            found[f"{way}, {name}, ms"] = spread([1e3 * each for each in seconds])
            found[f"{way}, {name}, relative to a gather"] = median / gather
            found[f"{way}, {name}, relative to a copy"] = median / copy
            found[f"{way}, {name}, without the exchange, relative to a copy"] = (
                statistics.mean(seconds) - exchange
            ) / copy
        moved = raw[name]["MB sent and received by rank, one way"]
        found[f"MB sent and received by rank, {name}"] = [[s / 1e6, t / 1e6] for s, t in moved]
    return found


def main() -> None:
    arguments = options(only=str, blocks=5, steps=30, repetitions=9)
    raw, result, loads = {}, {}, [os.getloadavg()[0]]
    if arguments.only != "step":
        for kind in ("fsdp", "tp"):
            for ranks in (2, 4):
                name = f"redistribute, {kind}, {ranks} ranks"
                raw[name] = launched(ranks, "redistribute", kind, arguments.repetitions)[0]
                result[name] = summary_of_redistribution(raw[name])
                print(name, json.dumps(result[name], indent=1), flush=True)
    if arguments.only != "redistribute":
        for learner, own in LEARNERS.items():
            name = f"step, {learner}"
            raw[name] = with_a_shard(arguments.blocks, arguments.steps, **own)
            result[name] = summary_of_step(raw[name])
            print(name, json.dumps(result[name], indent=1), flush=True)
    loads.append(os.getloadavg()[0])
    model = {"gpt": GPT, "blocks": BLOCKS, "width": WIDTH}
    keep(
        "ranks",
        config={**model, "fragments": FRAGMENTS, "learners": LEARNERS},
        raw=raw,
        result=result,
        besides=f": {loads[0]:.1f} processes were ready to run at the start and {loads[1]:.1f} at "
        f"the end, on {os.cpu_count()} cores",
    )


if __name__ == "__main__":
    called() or main()
