"""Every recipe in the repository loads, and matches its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.method import options_of
from decoupled_diloco.workloads import load_workload
from decoupled_diloco.workloads.gpt import GptWorkload
from decoupled_diloco_lab.workloads.speech import SpeechWorkload
from decoupled_diloco_lab.workloads.vit import VitWorkload

RECIPES = Path(__file__).parents[3] / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))


def load(name: str) -> RunConfig:
    return load_config(RECIPES / f"{name}.toml")


def test_there_are_recipes() -> None:
    assert {"quickstart", "data-parallel", "diloco", "streaming-diloco", "fedavg"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_loads_with_its_workload(name: str) -> None:
    config = load(name)
    assert config.run.name == name
    workload = load_workload(config.workload.name, config.workload_options())
    assert isinstance(workload, GptWorkload | SpeechWorkload | VitWorkload)
    assert workload.options.total_steps == config.run.max_steps


@pytest.mark.parametrize("name", ["data-parallel", "diloco", "streaming-diloco", "fedavg"])
def test_the_baselines_are_synchronous(name: str) -> None:
    config = load(name)
    assert config.sync.quorum == config.run.learners
    assert (config.sync.wait, config.sync.merge.rule) == ("at_overlap", "mean")


@pytest.mark.parametrize("name", ["diloco", "quickstart"])
def test_only_asynchronous_recipes_have_a_norm_gate(name: str) -> None:
    """Synchronous recipes are compared with data-parallel training, so nothing is clipped."""
    config = load(name)
    gate = options_of(config).norm_gate
    waits = config.sync.wait == "at_overlap"
    assert gate == (0.0 if waits else 10.0)
    assert ("merge.norm_gate" in config.sync.inapplicable()) is waits
    assert waits is (name == "diloco")


def test_the_quickstart_kills_one_learner() -> None:
    config = load("quickstart")
    assert (config.run.learners, config.syncer.shards, config.run.evaluator) == (4, 2, True)
    assert [(fault.at, fault.kill, fault.restart) for fault in config.faults] == [
        (0.4, "learner-1", True)
    ]


def test_data_parallel_is_one_step_of_sgd_on_the_mean() -> None:
    config = load("data-parallel")
    sync, outer = config.sync, config.outer
    assert (sync.fragments, sync.sync_every, sync.overlap_steps) == (1, 1, 0)
    assert (outer.optimizer, outer.lr, outer.momentum) == ("sgd", 1.0, 0.0)
    assert config.workload.options["optimizer"] == "sgd"


def test_the_recipe_moe_has_the_described_experts() -> None:
    config = load("moe")
    options = load_workload(config.workload.name, config.workload_options()).options
    text = (RECIPES / "moe.toml").read_text()
    assert f"{options.layers} layers × {options.experts} experts" in text
