"""Phone-like devices with different data, 5 % online at a time, in virtual time.

Each device draws its own mixture of the ten digits (Dirichlet 0.3) and has 20 images of
scikit-learn's digits. Its link has 1 to 50 Mbit/s. It visits the run for 10 steps, then it is away.
For comparison, all devices are online all the time, and the same cohort is drawn among them, for
the same number of images.

    python benchmarks/phones.py --devices 300 --cohort 18 --buffer 6 --visits 4

The defaults are 1,000 devices, whose comparison takes five to ten minutes per seed.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evidence import keep, options
from torch import Tensor, nn
from torch.nn import functional as F
from virtual import Row, gap_percent, interval, mean_of

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.merge import layout_of
from decoupled_diloco.protocol.messages import Fetch, Fold, Merge
from decoupled_diloco_lab.simulate.device_hosts import DeviceSystem, Habits
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.training import RAM, VirtualRun
from decoupled_diloco_lab.workloads.vit import load_digits

IMAGES, BATCH, STEPS = 20, 8, 10
"""Images of one device, of one batch, and steps of one visit."""

STEP_SECONDS, ONLINE = 1.0, 0.05

VISIT_SECONDS = 13.0
"""A visit: ten steps, the transfers, and a second to close the connections."""
CLASSES = 10


class Phones:
    """The workload: a small perceptron, and each device's own images."""

    def __init__(self, seed: int, devices: int, alpha: float, hidden: int, lr: float) -> None:
        self.seed, self.hidden, self.lr = seed, hidden, lr
        digits = load_digits(0)
        (images, labels), self.held_out = digits.train, digits.held_out
        rng = np.random.default_rng([seed, devices])
        by_class = [np.flatnonzero(labels.numpy() == each) for each in range(CLASSES)]
        self.own = []
        for _ in range(devices):
            classes = rng.choice(CLASSES, IMAGES, p=rng.dirichlet([alpha] * CLASSES))
            chosen = torch.tensor([rng.choice(by_class[each]) for each in classes])
            self.own.append((images[chosen].flatten(1), labels[chosen]))

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return nn.Sequential(
                nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, CLASSES)
            )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self.own[part]
        for chosen in self.order(part):
            yield images[chosen], labels[chosen]

    def order(self, part: int) -> Iterator[Tensor]:
        """Yield the indices of each batch among a device's images."""
        rng = np.random.default_rng([self.seed, part, 1])
        while True:
            yield torch.from_numpy(rng.permutation(IMAGES)[:BATCH])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def tokens(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        images, labels = self.held_out
        with torch.no_grad():
            logits = model(images.flatten(1))
        return {
            "loss": F.cross_entropy(logits, labels).item(),
            "accuracy": (logits.argmax(-1) == labels).float().mean().item(),
        }


class Watch:
    """Counts from the events of all processes."""

    def __init__(self) -> None:
        self.ages: Counter[int] = Counter()
        self.merges = self.whole = self.differences = 0
        self.contributors: set[str] = set()

    def __call__(self, process: str, now: float, event: Any, effects: Any) -> None:
        for effect in effects:
            kind = type(effect)
            if kind is Fold:
                self.ages[0 if effect.discount == 1.0 else round(effect.discount**-2) - 1] += 1
                self.contributors.add(effect.learner)
            elif kind is Merge:
                self.merges += 1
            elif kind is Fetch:
                self.whole += effect.whole
                self.differences += not effect.whole


def configuration(given: Any, seed: int) -> RunConfig:
    """The settings of both cases."""
    return RunConfig(
        run={
            "learners": given.devices,
            "max_tokens": given.devices * given.visits * STEPS * BATCH,
            "seed": seed,
            "evaluator": False,
        },
        sync={
            "fragments": 1,
            "sync_every": 2 * STEPS,
            "overlap_steps": 0,
            "quorum": given.buffer,
            "grace_margin": 0.0,
            "participation": "async",
            "codec": {"uplink": "int8", "downlink": "int4"},
            "merge": {"rule": "mean", "weighting": "uniform"},
            "late": {"discount": "polynomial"},
            "apply": {"missed": "rebase"},
            "devices": {"history": given.history, "cohort": given.cohort, "visit_seconds": 600.0},
        },
        outer={"optimizer": "sgd", "lr": 1.0},
        data={"elastic": False},
    )


def measure(given: Any, seed: int, online: float) -> dict[str, Any]:
    """Train to the budget and return the result of one run."""
    torch.set_num_threads(1)
    config = configuration(given, seed)
    rng = np.random.default_rng([seed, 7])
    bytes_per_second = 1e6 / 8 * 10 ** rng.uniform(0.0, math.log10(50.0), given.devices)
    specs = [
        LearnerSpec(
            name,
            step_seconds=STEP_SECONDS,
            variance=0.1,
            latency=0.05,
            jitter=0.02,
            up_bytes_per_second=rate,
            down_bytes_per_second=rate,
        )
        for name, rate in zip(config.learner_ids, bytes_per_second, strict=True)
    ]
    away = 0.0 if online == 1.0 else VISIT_SECONDS * (1 / online - 1)
    habits = Habits(steps=STEPS, away_seconds=away)
    workload: Any = Phones(seed, given.devices, given.alpha, given.hidden, given.lr)
    watch, began = Watch(), time.monotonic()
    folder = tempfile.TemporaryDirectory(dir=RAM if Path(RAM).is_dir() else None)
    system = DeviceSystem(
        config,
        specs,
        Path(folder.name),
        habits=lambda spec: habits,
        seed=seed,
        workload=lambda host: workload,
        checks=False,
    )
    system.recorders.append(watch)
    plan = plan_of(layout_of(workload.model()), config)
    curve: list[dict[str, float]] = []
    run = VirtualRun(system, workload, plan, folder)
    first = workload.evaluate(workload.model())
    machine = None
    while not system.finished:
        outcome = system.run(until=system.now + given.every, stop=lambda: system.finished)
        machine = system.shards[0].machine or machine
        if machine is not None and machine.state.phase in ("running", "sweeping"):
            curve.append(
                {"at": float(system.now), "tokens": machine.state.tokens, **run.evaluate()}
            )
        assert outcome in ("until", "stop"), f"the run stalled: {outcome}"
    result = {
        **run.evaluate(),
        "first": first,
        "tokens": run.tokens,
        "virtual_seconds": float(system.now),
        "seconds": time.monotonic() - began,
        "visits": sum(host.counts.visits for host in system.devices),
        "devices": len(watch.contributors),
        "online": float(
            sum(host.counts.present_seconds for host in system.devices)
            / (system.now * given.devices)
        ),
        "merges": watch.merges,
        "ages": dict(sorted(watch.ages.items())),
        "whole_copies": watch.whole,
        "differences": watch.differences,
        "curve": curve,
    }
    run.close()
    return result


CASES = {
    "5 % online": {"online": ONLINE},
    "all online": {"online": 1.0},
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
        ages: Counter[int] = sum((Counter(each["ages"]) for each in runs), Counter())
        result[case] = {
            **compared(runs, raw["all online"]),
            "online": mean_of(runs, "online"),
            "age": sum(age * times for age, times in ages.items()) / ages.total(),
            "hours": mean_of(runs, "virtual_seconds") / 3600,
            "devices": min(each["devices"] for each in runs),
            "images": mean_of(runs, "tokens"),
        }
    return result


if __name__ == "__main__":
    given = options(
        seeds=[1, 2, 3],
        devices=1000,
        visits=2,
        cohort=60,
        buffer=20,
        history=256,
        alpha=0.3,
        hidden=64,
        lr=0.1,
        every=200.0,
        name="phones",
    )
    # With the default, the collector takes a third of the time: the heap has all devices' objects.
    gc.set_threshold(200_000, 50, 1000)
    raw: dict[str, Any] = {case: [] for case in CASES}
    for seed in given.seeds:
        for case, how in CASES.items():
            raw[case].append({"seed": seed, **measure(given, seed, **how)})
            last = raw[case][-1]
            print(
                f"seed {seed}, {case}: loss {last['loss']:.4f}, accuracy {last['accuracy']:.4f}, "
                f"{last['tokens']} images, {last['visits']} visits, {last['merges']} merges, "
                f"{last['seconds']:.0f} s",
                flush=True,
            )
        keep(
            given.name,
            config={**vars(given), "settings": configuration(given, given.seeds[0]).public()},
            raw=raw,
            result=summary(raw),
        )
