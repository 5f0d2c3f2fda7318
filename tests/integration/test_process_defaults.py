"""A learner runs in a program that may have set PyTorch's default device or dtype.

Neither changes a bit that is merged, sent, saved or exported. The meta device stands for any
other device: a tensor that is created there by mistake has no values, and the run fails.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.export.run_weights import find_weights
from decoupled_diloco.merge import (
    Accumulator,
    codec,
    codec_names,
    contribution,
    encode_with_feedback,
    layout_of,
    make_outer,
    merge,
    partition,
    publish,
    receive,
    segments,
)
from decoupled_diloco.storage.vector_ranges import keep_ranges, kept_range
from decoupled_diloco.storage.weight_files import load_weights, save_weights
from decoupled_diloco.workloads import load_workload
from decoupled_diloco_lab.simulate.training import train_virtually
from integration.real_system import Model, System

CPU = torch.device("cpu")
DEFAULTS = ("meta", torch.bfloat16, torch.float64, torch.float16)


@contextmanager
def default(what: str | torch.dtype | None) -> Iterator[None]:
    """Set PyTorch's default device or dtype, as another program may do."""
    try:
        if isinstance(what, str):
            torch.set_default_device(what)
        elif what is not None:
            torch.set_default_dtype(what)
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def codecs() -> list[Tensor]:
    """Return the same values, encoded and decoded by each codec."""
    found = []
    for name in codec_names():
        each = codec(name)
        body, rest = encode_with_feedback(drawn(1, 9000), [drawn(2, 9000)], 0.5, each)
        published = drawn(4, 9000)
        offered = publish(drawn(3, 9000), published, each)
        taken = drawn(4, 9000)
        receive(taken, offered, each)
        found += [body, rest, each.decode(body, 9000), published, offered, taken]
    return found


def merging() -> list[Tensor]:
    """Return the results of both merge rules, an accumulator's state, and a contribution."""
    with torch.device("cpu"):
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 5), nn.BatchNorm1d(5)).float()
    layout = layout_of(model)
    fragment = partition(layout, 1)[0]
    found = []
    for rule in ("rda", "mean"):
        cut = segments(fragment, layout, rule)
        vectors = [drawn(seed, fragment.numel) for seed in range(3)]
        found.append(merge(vectors, [1.0, 2.0, 5.0], cut))
        accumulator = Accumulator(fragment.numel, cut)
        state = accumulator.state_dict()
        found += state.values()
        accumulator.add(vectors[0], 2.0)
        found += accumulator.state_dict().values()
        found.append(contribution(fragment, layout, drawn(7, fragment.numel), vectors[0]))
    return found


OUTER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nesterov", {}),
    ("sgd", {}),
    ("delayed-nesterov", {"every": 2}),
    ("AdamW", {}),
    ("NAdam", {}),
    ("RMSprop", {}),
    ("ASGD", {}),
)


def outer() -> list[Tensor]:
    """Return masters and states of outer optimizers, each restored once."""
    found = []
    for name, options in OUTER:
        optimizer, master = make_outer(name, lr=0.1, options=options)(50), drawn(1, 50)
        for step in range(3):
            optimizer.step(master, drawn(step, 50))
            again = make_outer(name, lr=0.1, options=options)(50)
            again.load_state_dict(optimizer.state_dict())
            optimizer = again
        vectors = [each for each in optimizer.state_dict().values() if each.numel() == 50]
        found += [master, *vectors]
    return found


def workloads() -> list[Tensor]:
    """Return batches, and losses of untrained models."""
    found = []
    for name in ("gpt", "moe"):
        options = {"layers": 1, "width": 16, "heads": 2, "context": 16, "eval_batches": 1}
        workload = load_workload(name, {**options, "corpus_bytes_max": 100_000})
        found += next(workload.batches(0, 2))
        found += workload.pass_batch(0, 1)  # type: ignore[attr-defined]
        found += workload._held_out[0] if hasattr(workload, "_held_out") else []
    return found


@pytest.mark.parametrize(
    "work", [codecs, merging, outer, workloads], ids=lambda each: each.__name__
)
@pytest.mark.parametrize("what", DEFAULTS, ids=str)
def test_arithmetic_gives_the_same_bits(
    work: Callable[[], list[Tensor]], what: str | torch.dtype
) -> None:
    expected = work()
    with default(what):
        found = work()
    assert [each.device for each in found] == [CPU] * len(expected)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("what", DEFAULTS, ids=str)
def test_files_give_the_same_bits(tmp_path: Path, what: str | torch.dtype) -> None:
    tensors = {"a": drawn(1, 60), "b": torch.arange(5, dtype=torch.int64, device="cpu")}
    with default(what):
        save_weights(tmp_path / "x.safetensors", tensors)
        found = load_weights(tmp_path / "x.safetensors")
        keep_ranges(tmp_path, 0, {(0, 0): tensors["a"]})
        part = kept_range(tmp_path, 0, 4, 9)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert torch.equal(part, tensors["a"][4:9])


@contextmanager
def running(folder: Path) -> Iterator[System]:
    system = System(
        folder,
        run={"max_steps": 24, "learners": 1},
        sync={"quorum": 1, "wait": "at_overlap"},
    )
    try:
        system.start()
        yield system
    finally:
        system.close()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for each in (each for each in model.parameters() if each.requires_grad):
        each.grad = torch.ones_like(each)
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.SGD(trained, lr=0.01, momentum=0.5)


class Built:
    """A workload whose models were built before another program set its defaults."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._workload = load_workload("gpt", options)
        self._model = self._workload.model()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def model(self) -> nn.Module:
        return copy.deepcopy(self._model)


@pytest.mark.parametrize("name", ["bf16", "int4", "topk"])
def test_a_whole_run_in_virtual_time_ends_with_the_same_bits(name: str) -> None:
    options = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 2}
    more = {"optimizer": "sgd", "corpus_bytes_max": 100_000, "eval_batches": 1, "warmup_steps": 1}
    config = RunConfig(
        run={"learners": 2, "max_steps": 8, "evaluator": False},
        sync={
            "fragments": 2,
            "sync_every": 4,
            "overlap_steps": 1,
            "codec": {"uplink": name, "downlink": name},
        },
        workload={"options": {**options, **more}},
    )
    workload: Any = Built(config.workload_options())

    def run() -> list[Tensor]:
        return train_virtually(config, workload=workload).weights()

    expected = run()
    for what in ("meta", torch.bfloat16, torch.float64):
        with default(what):
            found = run()
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), what


@pytest.mark.parametrize("what", ["meta", torch.bfloat16, torch.float64], ids=str)
def test_a_learner_trains_to_the_end_of_its_run(tmp_path: Path, what: str | torch.dtype) -> None:
    model = Model()
    with running(tmp_path) as system:
        with default(what):
            optimizer = sgd(model)
            learner = system.learner(model, "a", optimizer=optimizer)
            step(model, optimizer)
            while learner.step(tokens=8):
                step(model, optimizer)
            learner.close()
        system.wait_finished()
        with default(what):
            result = find_weights(tmp_path, system.config).tensors
    assert not [version for version in learner.versions if version.endswith(".0")]
    for name, tensor in model.named_parameters():
        if name in result:
            assert torch.equal(tensor.detach(), result[name]), name


@pytest.mark.parametrize("what", ["meta", torch.bfloat16, torch.float64], ids=str)
def test_a_checkpoint_is_restored_and_an_observer_follows(
    tmp_path: Path, what: str | torch.dtype
) -> None:
    momenta = []
    with running(tmp_path / "run") as system, default(what):
        for _ in range(2):
            with torch.device("cpu"):
                model = Model().float()
            optimizer = sgd(model)
            options: dict[str, Any] = {"optimizer": optimizer, "checkpoint": tmp_path / "kept"}
            with system.learner(model, "a", **options) as learner:
                momenta.append([state["momentum_buffer"] for state in optimizer.state.values()])
                for _ in range(6):
                    step(model, optimizer)
                    learner.step(tokens=8)
            momenta.append([state["momentum_buffer"].clone() for state in optimizer.state.values()])
        observer = system.observer(model)
        observer.pull()
        observer.close()
    assert momenta[1]
    assert not momenta[0]
    assert len(momenta[2]) == len(momenta[1])
    assert all(bool(each.isfinite().all()) for each in model.parameters())
