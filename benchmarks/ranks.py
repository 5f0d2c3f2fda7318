"""What a learner of several ranks costs: in ``step()``, by rank, to redistribute, to start.

    python benchmarks/ranks.py                      # everything
    python benchmarks/ranks.py --only redistribute

*step*: each learner trains a GPT by DDP in blocks of steps, by turns with and without
``learner.step()``, against a shard in another process. *redistribute*: all fragments of an FSDP2
and a tensor-parallel model go to the carriers and back; beside it a plain copy of the same bytes
within one process, into memory that stays as what is collected stays, and a gather of each tensor
on rank 0. *start*: from the command to the first finished step. All in one run; ranks are processes
of this machine, so with more ranks than cores they wait for one another.
"""

from __future__ import annotations

import argparse
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
from evidence import keep, spread
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from decoupled_diloco import Learner
from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.merge import Fragment, layout_of, local_of, partition
from decoupled_diloco.ranks.carrier import Carrier
from decoupled_diloco.ranks.group import RankGroup
from decoupled_diloco.ranks.model import described, joined
from decoupled_diloco.ranks.redistribute import HeldRows, Parts, Redistribution
from decoupled_diloco.runtime import blocking
from decoupled_diloco.workloads import load_workload

ESTIMATE = (
    "step(): two collectives of 1 kB and a plan, 1 to 3 ms of a step of some 300 ms with 2 ranks "
    "on 2 cores, as a plain learner's 1 ms; 4 ranks wait for cores. Only rank 0 talks to the "
    "syncer; of four carriers each brings a quarter. Redistribution copies what stays on its rank "
    "once, all else twice and over loopback: 1 to 2 times a plain copy outside the exchange, as "
    "long as a gather with it. Start: importing torch, 3 s, times ranks over cores"
)
GPT = {"layers": 4, "width": 128, "heads": 4, "batch_size": 16, "total_steps": 10**6}
BLOCKS, WIDTH = 8, 512
"""The model that is redistributed: as many blocks of two matrices, 16.8 M parameters."""

FRAGMENTS = 24
PORT = 7312
LEARNERS: dict[str, dict[str, Any]] = {
    "one process": {"ranks": 1},
    "DDP, 2 ranks": {"ranks": 2},
    "DDP, 4 ranks": {"ranks": 4},
    "DDP, 4 ranks, all carry": {"ranks": 4, "carriers": "all", "fragments": 2},
}
"""A fragment is cut between blocks of 65,536 elements, so of this model carriers share large ones
only."""


class Block(nn.Module):
    """Two matrices: as columns and as rows in tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)


def cut(kind: str) -> nn.Module:
    """The model as FSDP2 or tensor parallelism has it on this rank."""
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
    """Seconds of each; all ranks begin together."""
    found = []
    for _ in range(repetitions + 1):
        dist.barrier()
        begun = time.perf_counter()
        work()
        dist.barrier()
        found.append(time.perf_counter() - begun)
    return found[1:]


class Moves:
    """A redistribution of the whole model, and what of it is the exchange."""

    def __init__(self, model: nn.Module, carriers: tuple[int, ...], group: RankGroup) -> None:
        layout, told = layout_of(model), described(model, model, group.rank)
        self._group, self._rank = group, group.rank
        self._own = joined(model, [each or {} for each in gathered(told)], carriers)
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
        """All fragments from the ranks to the carriers."""
        for fragment in self._fragments:
            parts = self._parts(fragment)
            self._flat[fragment.index] = blocking(self._moves.collect(fragment, parts))

    def distribute(self) -> None:
        """And back."""
        for fragment in self._fragments:
            blocking(self._moves.distribute(fragment, self._flat[fragment.index]))


def gathered(mine: Any) -> list[Any]:
    """What every rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def redistribute(kind: str, repetitions: int) -> dict[str, Any]:
    """One rank's part of it; the result is rank 0's."""
    dist.init_process_group("gloo")
    model, group = cut(kind), RankGroup()
    numel = layout_of(model).numel
    found: dict[str, Any] = {"bytes": 4 * numel, "ranks": group.size}
    for name, carriers in (("one carrier", (0,)), ("all carry", tuple(range(group.size)))):
        moves = Moves(model, carriers, group)
        moves.collect()
        found[name] = {"MB sent and taken by rank, one way": gathered([moves.sent, moves.taken])}
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


class Carried:
    """Bytes of bodies that this process has carried."""

    def __init__(self) -> None:
        self.nbytes = 0
        answer = Carrier.answer

        async def counted(carrier: Carrier, asked: dict[str, Any]) -> dict[str, Any]:
            found = await answer(carrier, asked)
            self.nbytes += found.get("sent", 0) + found.get("received", 0)
            return found

        Carrier.answer = counted  # type: ignore[method-assign]


def step(address: str, token: str, blocks: int, steps: int, carriers: Any) -> dict[str, Any]:
    """One rank's part of a learner that trains by turns with and without the run."""
    carried = Carried()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    workload = load_workload("gpt", GPT)
    model: nn.Module = workload.model()
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = workload.optimizer(model)
    batches = workload.batches(dist.get_rank() if dist.is_initialized() else 0, 4)

    def train() -> int:
        batch = next(batches)
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return workload.tokens(batch)

    for _ in range(3):
        train()
    raw: dict[str, Any] = {"attached": [], "detached": [], "inside": []}
    with Learner(model, address, token=token, learner_id="learner-0", carriers=carriers) as learner:
        learner.step(tokens=train())
        raw["first step at"] = time.time()
        for block in range(2 * blocks):
            attached = block % 2 == 0
            for number in range(steps):
                begun = time.perf_counter()
                tokens = train()
                inside = time.perf_counter()
                if attached:
                    learner.step(tokens=tokens)
                done = time.perf_counter()
                if number >= 3:
                    raw["attached" if attached else "detached"].append((block, done - begun))
                    raw["inside"] += [done - inside] if attached else []
        background = getattr(learner, "_background", None)
        stats = vars(background._client.stats) if background is not None else {}
        control = sum(value for name, value in stats.items() if name.startswith("control"))
        # The leader's own count of bodies has those of all carriers.
        bodies = carried.nbytes if dist.is_initialized() else sum(stats.values()) - control
        raw["bytes to and from the syncer"] = control + bodies
    raw["parameters"] = sum(p.numel() for p in model.parameters())
    if dist.is_initialized():
        dist.destroy_process_group()
    return raw


def launched(ranks: int, *arguments: str, folder: Path) -> list[Any]:
    """What each rank of this program measured."""
    me = [__file__, *arguments, "--into", str(folder)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={ranks}", *me] if ranks > 1 else [sys.executable, *me]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=1200)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def with_a_shard(
    blocks: int, steps: int, ranks: int, carriers: int | str = 1, fragments: int = FRAGMENTS
) -> dict[str, Any]:
    """A learner of so many ranks, and what its `step` took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "token").write_text("benchmark")
        run = {
            "learners": 1,
            "budget_steps": 10**7,
            "evaluator": False,
            "folder": str(folder / "run"),
        }
        tables: dict[str, Any] = {
            "run": run,
            "sync": {"fragments": fragments, "period": FRAGMENTS, "overlap": 2},
            "syncer": {"port": PORT, "token_file": str(folder / "token")},
            "workload": {"options": GPT},
        }
        config = RunConfig(**tables)
        (folder / "run.toml").write_text(dump_config(config))
        cli = [sys.executable, "-m", "decoupled_diloco.cli", "syncer", str(folder / "run.toml")]
        with (folder / "shard.log").open("wb") as log:
            shard = subprocess.Popen([*cli, "--shard", "0"], stdout=log, stderr=log)
        try:
            time.sleep(5.0)
            begun = time.time()
            told = ["--measure", "step", "--blocks", str(blocks), "--steps", str(steps)]
            told += ["--carriers", str(carriers)]
            found = launched(ranks, *told, folder=folder)
        finally:
            shard.terminate()
            shard.wait()
    return {"ranks": found, "start": found[0]["first step at"] - begun}


def summary_of_step(raw: dict[str, Any]) -> dict[str, Any]:
    first = raw["ranks"][0]

    def medians(kind: str) -> list[float]:
        blocks = sorted({block for block, _ in first[kind]})
        return [statistics.median(s for b, s in first[kind] if b == block) for block in blocks]

    step = statistics.median(medians("detached"))
    inside = [1e3 * statistics.median(each["inside"]) for each in raw["ranks"]]
    attached = medians("attached")
    return {
        "step, ms": 1e3 * step,
        "inside step(), ms, median by rank": inside,
        "inside step(), % of a step, rank 0": inside[0] / 10 / step,
        "throughput, % of that without the run": spread(
            [100 * d / a for a, d in zip(attached, medians("detached"), strict=True)]
        ),
        "bytes to and from the syncer by rank": [
            each["bytes to and from the syncer"] for each in raw["ranks"]
        ],
        "start to first step, s": raw["start"],
    }


def summary_of_redistribution(raw: dict[str, Any]) -> dict[str, Any]:
    copy, gather = statistics.median(raw["copy"]), statistics.median(raw["gather"])
    found: dict[str, Any] = {"a plain copy, ms": 1e3 * copy, "a gather on rank 0, ms": 1e3 * gather}
    for name in ("one carrier", "all carry"):
        for way in ("collect", "distribute"):
            seconds = raw[name][way]
            median, exchange = statistics.median(seconds), raw[name][f"{way}, the exchange"]
            found[f"{way}, {name}, ms"] = spread([1e3 * each for each in seconds])
            found[f"{way}, {name}, times a gather"] = median / gather
            found[f"{way}, {name}, times a copy"] = median / copy
            found[f"{way}, {name}, without the exchange, times a copy"] = (
                statistics.mean(seconds) - exchange
            ) / copy
        moved = raw[name]["MB sent and taken by rank, one way"]
        found[f"MB sent and taken by rank, {name}"] = [[s / 1e6, t / 1e6] for s, t in moved]
    return found


def measured(arguments: argparse.Namespace) -> None:
    """In a rank's process: what it finds goes into a file."""
    torch.set_num_threads(1)
    if arguments.measure == "step":
        address = f"http://127.0.0.1:{PORT}"
        carriers = int(arguments.carriers) if arguments.carriers.isdecimal() else arguments.carriers
        found = step(address, "benchmark", arguments.blocks, arguments.steps, carriers)
    else:
        found = redistribute(arguments.measure, arguments.repetitions)
    rank = os.environ.get("RANK", "0")
    (arguments.into / f"{rank}.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("step", "redistribute"))
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--measure", choices=("step", "fsdp", "tp"), help=argparse.SUPPRESS)
    parser.add_argument("--carriers", default="1", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measured(arguments)
        return
    raw, result, loads = {}, {}, [os.getloadavg()[0]]
    if arguments.only != "step":
        for kind in ("fsdp", "tp"):
            for ranks in (2, 4):
                name = f"redistribute, {kind}, {ranks} ranks"
                with tempfile.TemporaryDirectory() as folder:
                    told = ["--measure", kind, "--repetitions", str(arguments.repetitions)]
                    raw[name] = launched(ranks, *told, folder=Path(folder))[0]
                result[name] = summary_of_redistribution(raw[name])
                print(name, json.dumps(result[name], indent=1), flush=True)
    if arguments.only != "redistribute":
        for learner, options in LEARNERS.items():
            name = f"step, {learner}"
            raw[name] = with_a_shard(arguments.blocks, arguments.steps, **options)
            result[name] = summary_of_step(raw[name])
            print(name, json.dumps(result[name], indent=1), flush=True)
    loads.append(os.getloadavg()[0])
    keep(
        "ranks",
        estimate=ESTIMATE,
        config={
            "gpt": GPT,
            "blocks": BLOCKS,
            "width": WIDTH,
            "fragments": FRAGMENTS,
            "learners": LEARNERS,
        },
        raw=raw,
        result=result,
        not_measured="CUDA, NCCL, several machines, ranks that have a core each; an idle machine: "
        f"{loads[0]:.1f} processes were ready to run at the start and {loads[1]:.1f} at the end, "
        f"on {os.cpu_count()} cores",
    )


if __name__ == "__main__":
    main()
