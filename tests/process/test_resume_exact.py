"""A resumed run compared with one that was never interrupted: what is equal and what is not.

A special workload records each trained batch with its global step and rate. One run is not
interrupted, one is stopped with Ctrl-C, and one is killed as a whole. docs/how-to/resume.md
lists what is exact. Cost: five starts of a small run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.tape.records import Record
from process.process_runs import command, kill_everything, records, stopped_at_exit, until

BUDGET, PERIOD, STOP_AT = 40, 4, 18

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
        time.sleep(0.1)
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
    """A finished run.

    Attributes:
        folder: The folder of its workload and its run folder.
        batches: Numbers of the batches that its only learner trained, in order.
        steps: The global step of each batch, which determined the rate.
        factors: The factor on the learning rate of each batch.
        interrupted_at: The number of batches that were trained before the interruption.
        taken_up_at: The learner's own step with which the resumed run began.
    """

    folder: Path
    batches: list[int]
    steps: list[int]
    factors: list[float]
    interrupted_at: int
    taken_up_at: int

    @property
    def evaluation(self) -> float:
        """Return the last evaluation on the run's tape."""
        told = [r.data["loss"] for r in records(self.folder / "run", "evaluator") if _evaluated(r)]
        return float(told[-1])


def _evaluated(record: Record) -> bool:
    return record.type == "Evaluated"


def write_files(folder: Path) -> Path:
    """Write the workload's module, and the run's file."""
    folder.mkdir()
    (folder / "recorded.py").write_text(WORKLOAD)
    config = RunConfig(
        run={"name": "exact", "folder": folder / "run", "learners": 1, "max_steps": BUDGET},
        sync={"fragments": 2, "sync_every": PERIOD, "overlap_steps": 1},
        syncer={"port": 0},
        learner={"checkpoint_interval_seconds": 0.5},
        data={"elastic": False},
        workload={"name": "recorded:make", "options": {"file": str(folder / "trained")}},
    )
    (folder / "run.toml").write_text(dump_config(config))
    return folder / "run.toml"


def trained(folder: Path) -> list[dict[str, Any]]:
    file = folder / "trained"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def train(folder: Path, *arguments: str, stop: str = "") -> None:
    """Run `ddiloco train`, to its end or until it is interrupted or killed."""
    with stopped_at_exit(command("train", *arguments, cwd=folder)) as process:
        if stop:
            until(
                lambda: len(trained(folder)) >= STOP_AT or process.poll() is not None, "steps", 60
            )
            assert process.poll() is None, process.communicate()[0]
        if stop == "kill":
            kill_everything(folder / "run", process)
            return
        if stop == "interrupt":
            os.killpg(process.pid, signal.SIGINT)
        text, _ = process.communicate(timeout=240)
        assert process.returncode == (130 if stop else 0), text


def run_of(folder: Path, stop: str) -> Trained:
    """Run to the end, interrupted and resumed if `stop` asks for it."""
    train(folder, str(write_files(folder)), stop=stop)
    interrupted_at = len(trained(folder))
    if stop:
        train(folder, "--resume", str(folder / "run"))
    facts, ways = trained(folder), records(folder / "run", "learner-0")
    why = [r.data["why"] for r in ways if r.type == "Recovered"][-1]
    found = re.search(r"its own checkpoint of step (\d+)", why)
    return Trained(
        folder,
        [each["batch"] for each in facts],
        [each["step"] for each in facts],
        [each["factor"] for each in facts],
        interrupted_at,
        int(found[1]) if found else 0,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """One run that was not interrupted, one that received Ctrl-C, one that was killed."""
    top = tmp_path_factory.mktemp("exact")
    return {stop: run_of(top / (stop or "whole"), stop) for stop in ("", "interrupt", "kill")}


def test_after_ctrl_c_no_batch_is_skipped_or_repeated(runs: dict[str, Trained]) -> None:
    whole, stopped = runs[""], runs["interrupt"]
    assert whole.batches == list(range(len(whole.batches)))
    assert STOP_AT <= stopped.interrupted_at < BUDGET
    assert stopped.taken_up_at == stopped.interrupted_at, "it saved its last step"
    assert stopped.batches == list(range(len(stopped.batches)))


def test_after_a_kill_the_data_continue_from_the_checkpoint(runs: dict[str, Trained]) -> None:
    killed = runs["kill"]
    again = killed.batches[killed.interrupted_at :]
    assert 0 < killed.taken_up_at <= killed.interrupted_at
    assert again == list(range(killed.taken_up_at, killed.taken_up_at + len(again)))


@pytest.mark.parametrize("stop", ["interrupt", "kill"])
def test_the_schedule_continues_at_the_runs_step(runs: dict[str, Trained], stop: str) -> None:
    """The same rate at the same global step, which may decrease a little after a kill of
    everything.
    """
    whole, resumed = runs[""], runs[stop]
    rates = dict(zip(whole.steps, whole.factors, strict=True))
    assert all(
        factor == rates[step]
        for step, factor in zip(resumed.steps, resumed.factors, strict=True)
        if step in rates
    )
    back = [before - after for before, after in pairwise(resumed.steps) if after < before]
    assert len(back) <= 1
    assert sum(back) <= 2 * PERIOD
    first = resumed.steps[resumed.interrupted_at]
    assert first >= resumed.steps[resumed.interrupted_at - 1] - 2 * PERIOD, "it started again"
    assert max(resumed.steps) >= BUDGET - 1


@pytest.mark.parametrize("stop", ["", "interrupt", "kill"])
def test_the_evaluation_is_that_of_the_weights(runs: dict[str, Trained], stop: str) -> None:
    """The held-out data is the same after each start: the evaluation matches the final weights."""
    folder = runs[stop].folder
    spec = importlib.util.spec_from_file_location("recorded", folder / "recorded.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    workload = module.make({"file": folder / "trained", "total_steps": BUDGET})
    model = workload.model()
    untrained = workload.evaluate(model)["loss"]
    model.load_state_dict(load_file(folder / "run/weights.safetensors"))
    assert runs[stop].evaluation == pytest.approx(workload.evaluate(model)["loss"], rel=1e-6)
    assert runs[stop].evaluation < untrained / 2
