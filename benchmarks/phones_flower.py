"""FedAvg and FedProx with sampled clients, compared with Flower for the same clients and rounds.

The clients, their images and their model are those of the scenario `phones`. Here, the real
processes run in virtual time. There, Flower's strategies run in its simulation engine, with the
cohorts that were drawn here. Flower has a separate environment:

    python benchmarks/peers/environments.py flower
    python benchmarks/phones_flower.py
"""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from evidence import keep, options
from peers.environments import INTO
from phones import compared
from torch import Tensor, nn
from virtual import mean_of

import decoupled_diloco as dd
from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.merge import layout_of
from decoupled_diloco.protocol.messages import Fold, Merge
from decoupled_diloco_lab.simulate.device_hosts import DeviceSystem, Habits
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.training import RAM, VirtualRun
from decoupled_diloco_lab.workloads.digits import DigitsOptions, DigitsWorkload
from decoupled_diloco_lab.workloads.vit import CLASSES

FLOWER = Path(__file__).parent / "peers" / "flower_phones.py"
STEPS, BATCH = 10, 8
"""Steps of one visit, and images of a step."""

METHODS = {"FedAvg": 0.0, "FedProx, μ = 0.1": 0.1}


class Client:
    """The workload of one device: `DigitsWorkload`, with FedProx's term."""

    def __init__(self, digits: DigitsWorkload, host: Any, mu: float) -> None:
        self._digits, self._host, self._mu = digits, host, mu
        self._learner: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._digits, name)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self._digits.loss(model, batch)
        if not self._mu:
            return loss
        if self._host.participant is not self._learner:  # a new visit
            self._learner = self._host.participant
            self._proximal = dd.ProximalTerm(self._learner, self._mu)
        return loss + self._proximal()


class Cohorts:
    """The devices whose contributions each version contains, from the events of all processes."""

    def __init__(self) -> None:
        self.rounds: list[list[int]] = [[]]

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Fold):
                assert effect.scale == effect.discount == 1.0
                self.rounds[-1].append(int(effect.learner.rpartition("-")[2]))
            elif isinstance(effect, Merge):
                self.rounds.append([])


def configuration(given: Any, seed: int) -> RunConfig:
    """Return the settings with which one version is one round of FedAvg."""
    return RunConfig(
        run={
            "learners": given.devices,
            "max_tokens": 2 * given.rounds * given.cohort * STEPS * BATCH,
            "seed": seed,
            "evaluator": False,
        },
        sync={
            "fragments": 1,
            "sync_every": 2 * STEPS,
            "overlap_steps": 0,
            "quorum": given.cohort,
            "grace_margin": 0.0,
            "participation": "async",
            "codec": {"uplink": "fp32", "downlink": "fp32"},
            "merge": {"rule": "mean", "weighting": "uniform", "norm_gate": 0.0},
            "late": {"policy": "drop"},
            "apply": {"missed": "rebase"},
            "devices": {"cohort": given.cohort},
        },
        outer={"optimizer": "sgd", "lr": 1.0, "momentum": 0.0},
        data={"elastic": False},
    )


def here(
    given: Any, seed: int, digits: DigitsWorkload, mu: float
) -> tuple[dict[str, Any], Any, Any]:
    """Train for the rounds; return the result, the cohort of each round, and the weights."""
    config, cohorts = configuration(given, seed), Cohorts()
    specs = [
        LearnerSpec(name, step_seconds=1.0, variance=0.1, latency=0.05, jitter=0.02)
        for name in config.learner_ids
    ]
    folder = tempfile.TemporaryDirectory(dir=RAM if Path(RAM).is_dir() else None)
    system = DeviceSystem(
        config,
        specs,
        Path(folder.name),
        habits=lambda spec: Habits(steps=STEPS),
        seed=seed,
        workload=lambda host: Client(digits, host, mu),  # type: ignore[arg-type, return-value]
        checks=False,
    )
    system.recorders.append(cohorts)
    workload: Any = digits
    with VirtualRun(system, workload, plan_of(layout_of(digits.model()), config), folder) as run:
        system.run(stop=lambda: len(cohorts.rounds) > given.rounds, until=1e6)
        system.run(until=system.now + 1.0)  # the merge ends; the next steps do not
        shard: Any = system.shards[0]
        result = {
            **run.evaluate(),
            "bytes": {
                "down": shard.data_sent / given.rounds,
                "up": shard.data_received / given.rounds,
            },
        }
        return result, cohorts.rounds[: given.rounds], run.weights()


def layers(model: Any) -> Any:
    """Return the layers of a model that receive flat images, as Flower's clients have them."""
    return nn.Sequential(*list(model)[1:])


def task(given: Any, digits: DigitsWorkload, mu: float, cohorts: list[list[int]]) -> dict[str, Any]:
    """Return the same run for Flower."""
    visits = max(sum(part in each for each in cohorts) for part in range(given.devices))
    clients = []
    for part, (images, labels) in enumerate(digits.images_of(given.devices)):
        order = itertools.islice(digits.order(part), visits * STEPS)
        clients.append((images.flatten(1), labels, torch.stack(list(order))))
    return {
        "clients": clients,
        "cohorts": cohorts,
        "steps": STEPS,
        "hidden": given.hidden,
        "classes": CLASSES,
        "lr": given.lr,
        "mu": mu,
        "model": layers(digits.model()).state_dict(),
    }


def there(given: Any, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train each task with Flower; return the weights, and the bytes of a round."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tasks.pt"
        torch.save(tasks, path)
        env = {**os.environ, "FLWR_HOME": folder, "FLWR_TELEMETRY_ENABLED": "0"}
        subprocess.run([given.flower, FLOWER, path], env=env, check=True)
        finals: list[dict[str, Any]] = torch.load(path.with_name("finals.pt"))
    return finals


def measure(given: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each method, one per seed, on both sides."""
    torch.set_num_threads(1)
    raw: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    runs, tasks = [], []
    for seed, (method, mu) in itertools.product(given.seeds, METHODS.items()):
        options = DigitsOptions(
            seed=seed,
            alpha=given.alpha,
            hidden=given.hidden,
            batch_size=BATCH,
            optimizer="sgd",
            learning_rate=given.lr,
        )
        digits = DigitsWorkload(options)
        ours, cohorts, weights = here(given, seed, digits, mu)
        assert all(len(set(each)) == given.cohort for each in cohorts)
        row = {"seed": seed, "here": ours, "cohorts": cohorts}
        row["first"] = digits.evaluate(digits.model())
        raw[method].append(row)
        runs.append((row, digits, weights))
        tasks.append(task(given, digits, mu, cohorts))
        print(seed, method, ours, flush=True)
    for (row, digits, weights), final in zip(runs, there(given, tasks), strict=True):
        model = digits.model()
        layers(model).load_state_dict(final["model"])
        row["Flower"] = {**digits.evaluate(model), "bytes": final["bytes"]}
        pairs = zip(weights, model.parameters(), strict=True)
        row["weights"] = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    return raw


def summary(raw: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The table's rows."""
    result: dict[str, Any] = {}
    for method, runs in raw.items():
        ours = [each["here"] for each in runs]
        for system in ("here", "Flower"):
            rows = [each[system] for each in runs]
            result[f"{method}, {system}"] = {
                **compared(rows, ours),
                "weights": max(each["weights"] for each in runs) if system == "Flower" else None,
                "bytes": mean_of(rows, "bytes"),
            }
    return result


if __name__ == "__main__":
    given = options(
        seeds=[1, 2, 3],
        devices=60,
        rounds=20,
        cohort=10,
        alpha=0.3,
        hidden=64,
        lr=0.1,
        flower=INTO / "flower" / "bin" / "python",
    )
    settings = configuration(given, given.seeds[0]).public()
    shown = {name: value for name, value in vars(given).items() if name != "flower"}
    raw = measure(given)
    keep("phones_flower", config={**shown, "settings": settings}, raw=raw, result=summary(raw))
