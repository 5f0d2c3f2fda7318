"""The built-in workloads train in a virtual world, with the same result in each process."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.workloads import load_workload
from decoupled_diloco_lab.simulate.training import train_virtually

SMALL: dict[str, dict[str, Any]] = {
    "moe": {
        "layers": 2,
        "width": 32,
        "heads": 2,
        "context": 32,
        "batch_size": 4,
        "experts": 4,
        "expert_hidden": 48,
        "eval_batches": 2,
        "corpus_bytes_max": 200_000,
        "warmup_steps": 0,
        "learning_rate": 5e-3,
    },
    "speech": {
        "layers": 1,
        "width": 32,
        "heads": 2,
        "batch_size": 8,
        "characters_max": 2,
        "warmup_steps": 0,
        "eval_utterances": 20,
    },
    "vit": {
        "layers": 1,
        "width": 32,
        "heads": 2,
        "batch_size": 16,
        "warmup_steps": 0,
        "learning_rate": 5e-3,
    },
}


def config(name: str) -> RunConfig:
    return RunConfig(
        run={"name": "small", "learners": 2, "max_steps": 48},
        sync={"fragments": 6, "sync_every": 12, "overlap_steps": 2},
        workload={"name": name, "options": SMALL[name]},
    )


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["moe", "speech", "vit"])
def test_two_learners_train_to_the_same_bits_each_time(name: str) -> None:
    first, second = (train_virtually(config(name)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.weights(), second.weights(), strict=True))
    before = first.workload.evaluate(first.workload.model())
    after = first.evaluate()
    assert after["loss"] < 0.8 * before["loss"]
    if name == "vit":
        assert after["accuracy"] > before["accuracy"] + 0.2
        # The last batch of a partition may be smaller, so this need not be a multiple of 16.
        assert 2 * 47 * 16 < first.tokens < 2 * 52 * 16, "tokens are images"
    elif name == "moe":
        assert after["expert_load_min"] > 0.1, "no expert has died"


SCRIPT = """
import hashlib, itertools, torch
from decoupled_diloco.workloads import load_workload
torch.set_num_threads(1)
w = load_workload({name!r}, {options!r})
model, optimizer = w.model(), None
for batch in itertools.islice(w.batches(1, 2, 3), 2):
    w.loss(model, batch).backward()
text = b"".join(p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None)
print(hashlib.sha256(text).hexdigest())
"""


@pytest.mark.parametrize("name", ["moe", "speech", "vit"])
def test_another_process_has_the_same_weights_batches_and_gradients(name: str) -> None:
    script = SCRIPT.format(name=name, options=SMALL[name])
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    workload = load_workload(name, SMALL[name])
    model, batches = workload.model(), workload.batches(1, 2, 3)
    for _ in range(2):
        workload.loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
    found = [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
    assert other.stdout.strip() == hashlib.sha256(b"".join(found)).hexdigest(), other.stderr
