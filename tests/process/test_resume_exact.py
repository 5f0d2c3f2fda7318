"""What a resumed run has in common with one that was never interrupted, and what it has not.

A workload of its own writes down each batch that is trained, at which global step and rate, and
what is evaluated. One run is not interrupted, one is stopped with Ctrl-C, one is killed whole.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from process.runs import command, stopped_at_exit, until
from process.test_resume import kill_everything, lives

pytestmark = pytest.mark.timeout(180)

BUDGET, PERIOD, STOP_AT = 60, 4, 25

WORKLOAD = '''
import json
import time
from pathlib import Path

import torch
from torch import nn

from decoupled_diloco.workloads import Workload


class Recorded(Workload):
    """Fit a line; write down what is trained and evaluated."""

    def __init__(self, options):
        self.file, self.total, self.step = Path(options["file"]), options["total_steps"], None

    def model(self):
        model = nn.Linear(4, 1)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.05)

    def schedule(self, step):
        self.step = step
        return 1.0 - min(1.0, step / self.total)

    def batches(self, part, parts, start=0):
        number = start
        while True:
            rng = torch.Generator().manual_seed(number)
            yield number, torch.randn(8, 4, generator=rng)
            number += 1

    def loss(self, model, batch):
        time.sleep(0.03)
        number, rows = batch
        self.write(batch=number, step=self.step, factor=self.schedule(self.step))
        return (model(rows)[:, 0] - rows.sum(1)).square().mean()

    def tokens(self, batch):
        return 8

    @torch.no_grad()
    def evaluate(self, model):
        rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(-1))
        return {"loss": (model(rows)[:, 0] - rows.sum(1)).square().mean().item()}

    def write(self, **facts):
        with self.file.open("a") as file:
            file.write(json.dumps(facts) + "\\n")


def make(options):
    return Recorded(options)
'''


@dataclass(frozen=True)
class Trained:
    """A run that is over: what its one learner trained, in order, and its last evaluation."""

    folder: Path
    batches: list[int]
    steps: list[int]
    factors: list[float]
    evaluation: float


def write_files(folder: Path) -> Path:
    """The workload's module, and the run's file."""
    folder.mkdir()
    (folder / "recorded.py").write_text(WORKLOAD)
    tables = {
        "run": {"folder": str(folder / "run"), "learners": 1, "budget_steps": BUDGET},
        "sync": {"fragments": 2, "period": PERIOD, "overlap": 1},
        "syncer": {"port": 0},
        "learner": {"checkpoint_every_seconds": 0.5},
        "data": {"leases": False},
        "workload": {"name": "recorded:make", "options": {"file": str(folder / "trained")}},
    }
    import tomli_w

    (folder / "run.toml").write_text(tomli_w.dumps(tables))
    return folder / "run.toml"


def trained(folder: Path) -> list[dict[str, Any]]:
    file = folder / "trained"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def go(folder: Path, *arguments: str, stop: str = "") -> None:
    """`ddiloco train`, to the end or until it is interrupted or killed."""
    with stopped_at_exit(command("train", *arguments, cwd=folder)) as process:
        if stop:
            until(lambda: len(trained(folder)) >= STOP_AT or process.poll() is not None, "steps", 60)
            assert process.poll() is None, process.communicate()[0]
        if stop == "kill":
            kill_everything(folder / "run", process)
            return
        if stop == "interrupt":
            os.killpg(process.pid, signal.SIGINT)
        text, _ = process.communicate(timeout=90)
        assert process.returncode == (130 if stop else 0), text


def result(folder: Path) -> Trained:
    facts = trained(folder)
    (evaluation,) = [
        json.loads(line)["data"]["loss"]
        for line in (folder / "run/tape/evaluator.jsonl").read_text().splitlines()[-20:]
        if '"LossEvaluated"' in line
    ][-1:]
    return Trained(
        folder,
        [each["batch"] for each in facts],
        [each["step"] for each in facts],
        [each["factor"] for each in facts],
        evaluation,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    found = {}
    for how in ("", "interrupt", "kill"):
        folder = tmp_path_factory.mktemp("exact") / (how or "whole")
        go(folder, str(write_files(folder)), stop=how)
        if how:
            go(folder, "--resume", str(folder / "run"))
        found[how or "whole"] = result(folder)
    return found


def test_x(runs):
    for name, r in runs.items():
        print(name, r)
        print([x.data for x in __import__("process.runs").runs.records(r.folder/"run","learner-0") if x.type=="Recovered"])
