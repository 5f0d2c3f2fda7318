"""Devices that come and go in virtual time: the real `Device` and real shards (rule 23)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.protocol.messages import Fetch, Fold
from decoupled_diloco.run_model import read_run
from decoupled_diloco_lab import SCENARIOS
from decoupled_diloco_lab.simulate.device_hosts import DeviceSystem, Habits
from decoupled_diloco_lab.simulate.scenario import load_scenario
from decoupled_diloco_lab.simulate.simulation import Simulation
from decoupled_diloco_lab.simulate.spec import LearnerSpec

DEVICES = 8


class Line:
    """A linear model; each device sees a different part of the inputs."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[Tensor]:
        rng = torch.Generator().manual_seed(part)
        while True:
            yield torch.randn(8, 4, generator=rng) + part / parts

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch).squeeze(1) - batch.sum(1)).square().mean()

    def tokens(self, batch: Tensor) -> int:
        return len(batch)


@pytest.mark.parametrize("alone", [False, True])
def test_devices_that_are_mostly_away_train_a_model(alone: bool, tmp_path: Path) -> None:
    config = RunConfig(
        run={
            "learners": DEVICES,
            "max_tokens": DEVICES * 4 * 10 * 8,
            "evaluator": False,
            "folder": tmp_path / "run",
        },
        sync={
            "fragments": 1,
            "sync_every": 20,
            "overlap_steps": 0,
            "quorum": 2,
            "grace_margin": 0.0,
            "participation": "async",
            "codec": {"uplink": "int8", "downlink": "int4"},
            "late": {"discount": "polynomial"},
            "apply": {"missed": "rebase"},
            "devices": {"history": 16, "cohort": 3, "visit_seconds": 120.0},
        },
        outer={"optimizer": "sgd", "lr": 0.7},
        data={"elastic": False},
    )
    specs = [
        LearnerSpec(name, latency=0.05, up_bytes_per_second=1e5, down_bytes_per_second=1e5)
        for name in config.learner_ids
    ]
    habits = Habits(steps=10, online=0.2, alone=alone)
    workload: Any = Line()
    system = DeviceSystem(
        config,
        specs,
        tmp_path / "run",
        habits=lambda spec: habits,
        seed=1,
        workload=lambda host: workload,
    )
    folded: list[Fold] = []
    fetched: list[Fetch] = []

    def watch(process: str, now: float, event: Any, effects: Any) -> None:
        folded.extend(each for each in effects if isinstance(each, Fold))
        fetched.extend(each for each in effects if isinstance(each, Fetch))

    system.recorders.append(watch)
    try:
        assert system.run(until=1e6, stop=lambda: system.finished) == "stop"
        values = system.shards[0].tensors.fragments[0].published
    finally:
        system.close()
    assert {each.learner for each in folded} == set(config.learner_ids)
    assert any(each.discount < 1.0 for each in folded)
    assert any(not each.whole for each in fetched)
    assert sum(host.counts.visits for host in system.devices) >= 2 * DEVICES
    assert torch.allclose(values, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])[: len(values)], atol=0.35)


FEWER = {
    "count = 1000": "count = 40",
    "cohort = 50": "cohort = 6",
    "quorum = 20 ": "quorum = 2 ",
    "max_tokens = 160_000": "max_tokens = 12_800",
}


def test_the_scenario_phones_learns_with_fewer_devices(tmp_path: Path) -> None:
    text = SCENARIOS.find("phones").read_text()
    for line, smaller in FEWER.items():
        assert line in text
        text = text.replace(line, smaller)
    path, folder = tmp_path / "phones.toml", tmp_path / "run"
    path.write_text(text)
    folder.mkdir()
    simulation = Simulation(load_scenario(path), folder)
    try:
        while simulation.advance():
            pass
        assert simulation.finished, simulation.reason
        simulation.finish()
    finally:
        simulation.close()
    system: Any = simulation.system
    present = sum(host.counts.present_seconds for host in system.devices)
    assert present / (system.now * len(system.devices)) == pytest.approx(0.05, abs=0.025)
    run = read_run(folder)
    losses = [each.loss or 10.0 for each in run.evaluations]
    assert losses[0] > 2.2
    assert min(losses[-3:]) < 0.9
    assert not run.outages, "a device that leaves after its visit has not failed"
