"""What a user starts, on a GPU if there is one; `make gpu` runs this on a GPU, all of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.launch.devices import environment_of
from decoupled_diloco.launch.on_device import home_of, moved, placed
from decoupled_diloco.launch.roles import BACKENDS, Training
from decoupled_diloco.ranks.group import RankGroup
from decoupled_diloco.run_model import read_run
from decoupled_diloco.workloads import Workload, load_workload
from decoupled_diloco.workloads.rank_split import divided
from decoupled_diloco_lab.simulate.training import train_virtually
from decoupled_diloco_lab.study import Study
from on_gpu.waits import DEVICE

TINY: dict[str, Any] = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 32,
    "batch_size": 4,
    "eval_batches": 1,
    "corpus_bytes_max": 200_000,
    "warmup_steps": 1,
}
LEARNERS, STEPS = 2, 24
APPLIED_MIN = 24
STEPS_MAX = 4000
CONFIG_ERROR = 2


def tiny_config(folder: Path, **tables: dict[str, Any]) -> RunConfig:
    run = {"learners": LEARNERS, "max_steps": STEPS, "folder": folder, "evaluator": False}
    return RunConfig(
        run={**run, **tables.get("run", {})},
        sync={"fragments": 4, "sync_every": 4, "overlap_steps": 1},
        syncer={"port": 0, "persist": False},
        learner=tables.get("learner", {}),
        data=tables.get("data", {}),
        workload={"options": TINY},
    )


def ddiloco(
    config: RunConfig, folder: Path, *arguments: str, **environment: str
) -> tuple[int, str]:
    """Runs a command of `ddiloco` with a run's file; the exit code and what it printed."""
    path = folder / "run.toml"
    path.write_text(dump_config(config))
    words = [str(path) if each == "RUN" else each for each in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "decoupled_diloco.cli", *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_train_takes_the_device_by_itself_and_shows_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", learner={"precision": "bf16"})
    code, said = ddiloco(config, tmp_path, "train", "RUN")
    assert code == 0, said[-600:]
    for learner in read_run(tmp_path / "run").learners.values():
        assert learner.device.startswith(DEVICE.type)
        assert learner.loss is not None
        assert math.isfinite(learner.loss)
    code, said = ddiloco(config, tmp_path, "status", str(tmp_path / "run"), "--json")
    assert code == 0, said[-300:]
    told = [each["device"] for each in json.loads(said)["learners"]]
    assert [each[: len(DEVICE.type)] for each in told] == [DEVICE.type] * LEARNERS
    assert f">{DEVICE.type}" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.long
def test_learners_share_the_gpus_and_a_missing_one_is_an_error_before_anything_starts(
    tmp_path: Path,
) -> None:
    config = tiny_config(tmp_path / "run", run={"learners": 3})
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = visible if visible[0] else [str(number) for number in range(count)]
    wanted = [{"CUDA_VISIBLE_DEVICES": names[i % count]} if count else {} for i in range(3)]
    assert [environment_of(config, index) for index in range(3)] == wanted
    missing = tiny_config(tmp_path / "run", learner={"device": "cuda"})
    code, said = ddiloco(missing, tmp_path, "train", "RUN", CUDA_VISIBLE_DEVICES="")
    assert code == CONFIG_ERROR, said
    assert "device='cuda'" in said
    assert not (tmp_path / "run").exists()
    one = [*("learner", "RUN", "--index", "0"), *("--syncer", "http://127.0.0.1:9")]
    one += ["--devices", "CUDA_VISIBLE_DEVICES="] if count else []
    code, said = ddiloco(missing, tmp_path, *one)
    assert code == CONFIG_ERROR, said
    assert "device='cuda'" in said
    code, said = ddiloco(tiny_config(tmp_path / "run"), tmp_path, "doctor", "RUN")
    assert f"device='auto' is {DEVICE.type}" in " ".join(said.split())


@pytest.mark.long
def test_counting_gpus_initializes_none() -> None:
    program = (
        "import torch; from decoupled_diloco.config import RunConfig;"
        "from decoupled_diloco.launch.devices import environment_of;"
        "environment_of(RunConfig(run={'learners': 1, 'max_steps': 1}), 0);"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


class Alone:
    """A learner for `Training` that takes part in nothing."""

    def __init__(self, steps: int) -> None:
        self.global_step, self._steps = 0, steps
        self.losses: list[torch.Tensor] = []

    async def _take_step(self, loss: torch.Tensor, tokens: int) -> bool:
        """Records the loss; ends after a fixed number of steps."""
        assert tokens > 0
        self.losses.append(loss)
        self.global_step += 1
        return self.global_step < self._steps


class Never:
    """A termination that never occurs."""

    asked = False


def trained(
    workload: Workload, model: nn.Module, precision: Any, steps: int = 6
) -> tuple[list[float], set[torch.dtype]]:
    """Losses of the built-in loop, and the types that linear layers gave."""
    optimizer = workload.optimizer(model)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    dtypes: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, out: dtypes.add(out.dtype))
    batches, alone = workload.batches(0, 1), Alone(steps)

    async def pace() -> None:
        pass

    async def next_batch() -> Any:
        return next(batches)

    loop = Training(workload, model, optimizer, alone, pace, precision=precision)  # type: ignore[arg-type]
    run = loop.run(next_batch, Never())  # type: ignore[arg-type]
    with suppress(StopIteration):
        run.send(None)
    return [float(each) for each in alone.losses], dtypes


@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_bf16_autocast(name: str) -> None:
    """Linear layers give bf16, weights stay fp32, and the losses are close."""
    workload = load_workload(name, {**TINY, "total_steps": 100})
    losses: dict[str, list[float]] = {}
    for word, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = placed(workload.model(), DEVICE)
        losses[word], dtypes = trained(workload, model, word)
        assert dtype in dtypes
        assert {each.dtype for each in model.parameters()} == {torch.float32}
        assert home_of(model).type == DEVICE.type
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    assert losses["bf16"][-1] < losses["bf16"][0]


def test_batches_are_moved_with_their_values() -> None:
    batch = {"a": torch.ones(4), "b": (torch.ones(2), [torch.ones(1), "text"])}
    there = moved(batch, DEVICE)
    kinds = {each.device.type for each in (there["a"], there["b"][0], there["b"][1][0])}
    assert kinds == {DEVICE.type}
    assert float(there["a"].sum()) == 4


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """The process group of a learner whose only rank is this process."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", 1)
    backend = BACKENDS.get(DEVICE.type, "gloo")
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_ranks_divide_a_model_in_each_way_and_exchange_over_the_host(tmp_path: Path) -> None:
    workload = load_workload("gpt", {**TINY, "total_steps": 100})
    whole, _ = trained(workload, placed(workload.model(), DEVICE), "bf16")
    with one_rank(tmp_path):
        for parallelism in ("ddp", "fsdp", "tp"):
            model = divided(placed(workload.model(), DEVICE), workload, parallelism)  # type: ignore[arg-type]
            losses, _ = trained(workload, model, "bf16")
            assert losses == pytest.approx(whole, rel=0.02), parallelism
        group = RankGroup()
        work = group.exchange({"at": "here"})
        work._work.wait()
        assert work._whole(0)
        out = torch.empty(3, device="cpu")
        dist.all_to_all_single(out, torch.ones(3, device="cpu"), [3], [3], group.payloads)
        assert float(out.sum()) == 3
        total, on_host = torch.ones(1, device=DEVICE), torch.ones(1, device="cpu")
        dist.all_reduce(total)
        dist.all_reduce(on_host)
        assert float(total) == float(on_host) == 1, "the default group serves host and device"
        group.watch.close()
        group.close()


@pytest.mark.long
def test_simulate_trains_on_the_device_as_on_the_cpu(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", data={"elastic": False})
    losses = {}
    for each in dict.fromkeys(("cpu", DEVICE.type)):
        run = train_virtually(config, device=torch.device(each))
        losses[each] = run.evaluate()["loss"]
        assert home_of(run.model()).type == each
    assert losses[DEVICE.type] == pytest.approx(losses["cpu"], rel=0.05)
    path, scenario = tmp_path / "small.toml", tmp_path / "scenario.toml"
    path.write_text(dump_config(config))
    scenario.write_text(f'run = "{path}"\n')
    words = "simulate", str(scenario), "--device", DEVICE.type
    code, said = ddiloco(config, tmp_path, *words)
    assert code == 0, said[-600:]


def linear_batches(learner: int, learners: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 * seed + learner)
    while True:
        inputs = torch.randn(16, 8, generator=generator)
        yield inputs, inputs.sum(1, keepdim=True)


def test_a_study_merges_weights_and_moments_on_the_device_as_on_the_cpu() -> None:
    places: set[str] = set()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        places.add(batch[0].device.type)
        return (model(batch[0]) - batch[1]).square().mean()

    losses = {}
    for each in dict.fromkeys(("cpu", DEVICE.type)):
        places.clear()
        study = Study(
            model=lambda: nn.Linear(8, 1),
            batches=linear_batches,
            loss=loss,
            evaluation=lambda: [next(linear_batches(9, 10, 0))],
            inner=lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
            learners=LEARNERS,
            steps=STEPS,
            seeds=1,
            device=each,
        )
        schedule = {"sync.fragments": 2, "sync.sync_every": 4}
        losses[each] = [
            *study.run("data-parallel"),
            *study.run("local moments", settings=schedule),
            *study.run("merged moments", settings={**schedule, "sync.moments": {}}),
        ]
        assert places == {each}
    assert len(set(losses["cpu"])) == 3
    assert losses[DEVICE.type] == pytest.approx(losses["cpu"], rel=0.01)


LEARNS = """
import json, sys
from pathlib import Path
import torch
from torch import Tensor, nn
from decoupled_diloco import Learner, Timeouts

device, syncer, token, kept, least, most = sys.argv[1:]
model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).to(device)
torch.set_default_device(device)
torch.set_default_dtype(torch.bfloat16)
# AdamW itself would keep its counters on the default device, and wait for them.
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
applied, steps = [], 0
with Learner(
    model, syncer, auth_token=Path(token).read_text(), name="learner-0", optimizer=optimizer,
    checkpoint=kept, timeouts=Timeouts(join=60.0),
) as learner:
    first = learner.versions
    learner.on_weights_updated(lambda names: applied.extend(
        p for p, version in enumerate(learner.versions) if version != first[p]
    ))
    while len(set(applied)) < int(least) and steps < int(most):
        loss = model(torch.ones(8, 64, dtype=torch.float32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(loss, tokens=8)
        steps += 1
print(json.dumps({
    "applied": len(set(applied)),
    "types": sorted({str(each.dtype) for each in model.parameters()}),
    "finite": all(bool(each.isfinite().all()) for each in model.parameters()),
}))
"""


@pytest.mark.long
def test_a_learner_with_another_default_device_and_dtype(tmp_path: Path) -> None:
    config = RunConfig(
        run={"learners": 1, "max_steps": 10**7, "folder": tmp_path / "run", "evaluator": False},
        sync={"fragments": APPLIED_MIN, "sync_every": APPLIED_MIN, "overlap_steps": 2},
        syncer={"port": 0, "persist": False},
    )
    path, addresses = tmp_path / "run.toml", tmp_path / "run" / "addresses"
    path.write_text(dump_config(config))
    cli = [sys.executable, "-m", "decoupled_diloco.cli"]
    with subprocess.Popen([*cli, "syncer", str(path)], stderr=subprocess.DEVNULL) as syncer:
        try:
            while not (addresses.exists() and (told := addresses.read_text().split())):
                assert syncer.poll() is None, "the syncer has ended"
            words = (DEVICE.type, told[0], tmp_path / "run" / "token", tmp_path / "kept")
            program = [sys.executable, "-c", LEARNS, *map(str, words)]
            program += [str(APPLIED_MIN), str(STEPS_MAX)]
            done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
        finally:
            syncer.terminate()
    assert done.returncode == 0, done.stderr[-600:]
    found = json.loads(done.stdout)
    assert found == {"applied": APPLIED_MIN, "types": ["torch.float32"], "finite": True}
    assert any((tmp_path / "kept").rglob("*.safetensors")), "no checkpoint is kept"
