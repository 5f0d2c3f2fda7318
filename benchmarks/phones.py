"""Phone-like devices with different data, 5 % online at a time, in virtual time.

The run is the scenario `phones`: a visit trains 10 steps. For comparison, all devices are online
all the time, and the same cohort is drawn among them. Other cases: devices that train while they
are away, and older contributions with a smaller weight or a smaller change. All cases of a table
train the same number of images. Runs in the file of ``--kept`` are not repeated.

The loss of a run is the mean over all versions in the last fifth of its budget. One version alone
is a random draw: it contains the data of one buffer of devices. The swing is the standard deviation
over the same versions, relative to that mean.

    python benchmarks/phones.py
    python benchmarks/phones.py --name phones_away --seeds 1 --cases "trains while away"
    python benchmarks/phones.py --name phones_discount --visits 1 --cases weight change
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from evidence import keep, options
from virtual import Row, Watch, gap_percent, interval, mean_of, measured

from decoupled_diloco.config.method import plan_of
from decoupled_diloco.merge import layout_of
from decoupled_diloco.protocol.messages import Fetch
from decoupled_diloco.workloads import workload_of
from decoupled_diloco_lab import SCENARIOS
from decoupled_diloco_lab.simulate.scenario import Scenario, load_scenario
from decoupled_diloco_lab.simulate.simulation import specs_of, system_of
from decoupled_diloco_lab.simulate.training import RAM, VirtualRun

WINDOW = 0.8
"""The loss is that of all versions from this share of the budget on."""

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "all online": ({"online": 1.0}, ()),
    "5 % online": ({}, ()),
    # A device keeps its place while it is away, so each device needs one.
    "trains while away": ({"alone": True}, ("sync.devices.cohort={devices}", "sync.quorum=100")),
    "weight": (
        {},
        ("sync.devices.cohort=60", "sync.quorum=10", "sync.late.discount_of=weight"),
    ),
    "change": ({}, ("sync.devices.cohort=60", "sync.quorum=10")),
}
"""Of each case, what differs from the scenario: in `[devices]`, and in the run."""


class DeviceWatch(Watch):
    """Counts from the events of all processes."""

    def __init__(self) -> None:
        super().__init__(fragments=1)
        self.whole = self.differences = 0

    def __call__(self, process: str, now: float, event: Any, effects: Any) -> None:
        super().__call__(process, now, event, effects)
        for effect in effects:
            if type(effect) is Fetch:
                self.whole += effect.whole
                self.differences += not effect.whole


def scenario_of(given: Any, case: str, seed: int) -> Scenario:
    """Return the scenario of a case."""
    changes, overrides = CASES[case]
    budget = given.devices * given.visits * 80  # ten steps of eight images
    sets = [f"run.max_tokens={budget}", "run.evaluator=false", "run.evaluate_interval_seconds="]
    sets += overrides
    found = load_scenario(
        given.scenario, overrides=[each.format(devices=given.devices) for each in sets], seed=seed
    )
    devices = found.file.devices
    assert devices is not None
    file = found.file.model_copy(update={"devices": devices.model_copy(update=changes)})
    return dataclasses.replace(found, file=file)


def measure(scenario: Scenario) -> dict[str, Any]:
    """Train to the budget and return the result of one run."""
    torch.set_num_threads(1)
    config, workload = scenario.config, workload_of(scenario.config)
    budget = config.run.max_tokens or 0
    watch, began = DeviceWatch(), time.monotonic()
    folder = tempfile.TemporaryDirectory(dir=RAM if Path(RAM).is_dir() else None)
    system: Any = system_of(
        scenario,
        specs_of(scenario),
        Path(folder.name),
        workload=lambda host: workload,
        checks=False,
    )
    system.recorders.append(watch)
    curve: list[dict[str, float]] = []
    plan = plan_of(layout_of(workload.model()), config)
    with VirtualRun(system, workload, plan, folder) as run:
        while not system.finished:
            until = watch.rounds + 1
            outcome = system.run(
                until=1e6, stop=lambda until=until: system.finished or watch.rounds >= until
            )
            assert outcome == "stop", f"the run stalled: {outcome}"
            if not system.finished and run.tokens:
                now = {"at": float(system.now), "tokens": run.tokens}
                curve.append(run.evaluate() | now)
        last = [each for each in curve if WINDOW * budget <= each["tokens"] <= budget]
        losses = [each["loss"] for each in last]
        loss = statistics.mean(losses)
        return {
            "loss": loss,
            "swing": statistics.stdev(losses) / loss,
            "accuracy": statistics.mean(each["accuracy"] for each in last),
            "first": workload.evaluate(workload.model()),
            "tokens": run.tokens,
            "virtual_seconds": float(system.now),
            "seconds": time.monotonic() - began,
            "visits": sum(host.counts.visits for host in system.devices),
            "devices": len(watch.folded),
            "online": sum(host.counts.present_seconds for host in system.devices)
            / (float(system.now) * len(system.devices)),
            "merges": watch.rounds,
            "ages": dict(sorted(watch.ages.items())),
            "whole_copies": watch.whole,
            "differences": watch.differences,
            "curve": curve,
        }


def compared(runs: list[Row], others: list[Row]) -> Row:
    """Return the columns that compare runs with others of the same seeds."""
    return {
        "loss": interval([each["loss"] for each in runs]),
        "mean_loss": mean_of(runs, "loss"),
        "gap_percent": gap_percent(runs, others),
        "accuracy": mean_of(runs, "accuracy"),
    }


def summary(raw: dict[str, Any]) -> dict[str, Any]:
    """The table's rows."""
    result: dict[str, Any] = {}
    for case, runs in raw.items():
        ages = [(int(age), n) for each in runs for age, n in each["ages"].items()]
        result[case] = {
            **compared(runs, next(iter(raw.values()))),
            "swing": mean_of(runs, "swing"),
            "online": mean_of(runs, "online"),
            "age": sum(age * n for age, n in ages) / sum(n for _, n in ages),
            "versions": mean_of(runs, "merges"),
            "minutes": mean_of(runs, "virtual_seconds") / 60,
            "devices": min(each["devices"] for each in runs),
            "images": mean_of(runs, "tokens"),
        }
    return result


if __name__ == "__main__":
    given = options(
        seeds=[1, 2, 3],
        scenario=str(SCENARIOS.find("phones")),
        devices=1000,
        visits=2,
        kept="",
        cases=list(CASES)[:2],
        name="phones_thousand",
    )
    # With the default, the collector takes a third of the time: the heap has all devices' objects.
    gc.set_threshold(200_000, 50, 1000)
    raw = measured(
        Path(given.kept or f"{given.name}.jsonl"),
        given.cases,
        given.seeds,
        lambda case, seed: measure(scenario_of(given, case, seed)),
    )
    settings = {
        case: scenario_of(given, case, given.seeds[0]).config.public() for case in given.cases
    }
    shown = {key: value for key, value in vars(given).items() if key not in ("kept", "scenario")}
    keep(given.name, config={**shown, "settings": settings}, raw=raw, result=summary(raw))
