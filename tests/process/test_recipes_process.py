"""Every recipe trains at a small size, with real processes or in virtual time.

The recipes' own sizes are for people; these tests check that each of their settings works.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import decoupled_diloco as dd
from decoupled_diloco.config import load_config
from decoupled_diloco.export.run_export import export_run
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.samples import Evaluated
from decoupled_diloco.workloads import load_workload
from decoupled_diloco_lab.simulate.training import train_virtually
from process.process_runs import command
from replay_check import assert_replays

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"homelab", "mixed-speeds", "vision"}
"""Trained by other tests: by hand, with their speeds, and below."""

PROCESSES = ("data-parallel", "fsdp", "mixed-parallelism", "quickstart")
"""Trained by real processes. The others differ from them only in settings; moe also differs in its
model, which real processes train in the commands of docs/how-to/workload.md.
"""

RECIPES = {path.stem for path in (ROOT / "recipes").glob("*.toml")}
VIRTUAL = sorted(RECIPES - ELSEWHERE - set(PROCESSES))
TEXT = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "context": 16,
    "batch_size": 2,
    "corpus_bytes_max": 200_000,
    "eval_batches": 1,
    "warmup_steps": 0,
}
SMALL: dict[str, dict[str, Any]] = {
    "gpt": TEXT,
    "moe": {**TEXT, "expert_hidden": 16},
    "speech": {"layers": 1, "width": 32, "batch_size": 4, "warmup_steps": 0, "eval_utterances": 20},
    "vit": {"layers": 1, "width": 32, "batch_size": 8, "warmup_steps": 0},
}


def ran(*arguments: str, **options: Any) -> str:
    """Return the output of a command that must succeed."""
    process = command(*arguments, **options)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def sets(recipe: Path, folder: Path, options: dict[str, Any], steps: int = 0) -> list[str]:
    """Return the settings of a small run, with an evaluator only for a run of enough steps.

    A run of a second would end before the evaluator has joined.
    """
    config = load_config(recipe)
    settings = {
        "run.folder": str(folder),
        "run.learners": 3 if recipe.stem == "mixed-parallelism" else 2,
        "run.max_steps": steps or max(12, min(60, 2 * config.sync.sync_every)),
        "sync.quorum": min(2, config.sync.quorum),
        "syncer.port": 0,
        **{f"workload.options.{name}": value for name, value in options.items()},
    }
    if not steps:
        settings["run.evaluator"] = False
    given = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return [*given, "run.evaluate_interval_seconds="]


def trained(
    recipe: Path, folder: Path, options: dict[str, Any], steps: int = 0, **where: Any
) -> str:
    """Train a small version of a recipe with real processes, and return the command's output."""
    given = [f"--set={each}" for each in sets(recipe, folder, options, steps)]
    return ran("train", str(recipe), *given, **where)


def evaluations(folder: Path) -> list[Evaluated]:
    records = TapeReader(folder)
    return [r.value() for r in records if r.type == "Evaluated"]  # type: ignore[misc]


@pytest.mark.parametrize(
    "name", [*PROCESSES[:-1], pytest.param(PROCESSES[-1], marks=pytest.mark.smoke)]
)
def test_a_recipe_trains(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    recipe = ROOT / "recipes" / f"{name}.toml"
    trained(recipe, folder, SMALL[load_config(recipe).workload.name])
    torch.set_num_threads(1)
    model = dd.load_model(export_run(folder).folder)
    config = load_config(folder / "run.toml")
    workload = load_workload(config.workload.name, config.workload_options())
    assert workload.evaluate(model)["loss"] < workload.evaluate(workload.model())["loss"]
    assert_replays(folder)


@pytest.mark.parametrize("name", [pytest.param(VIRTUAL[0], marks=pytest.mark.smoke), *VIRTUAL[1:]])
def test_a_recipe_trains_in_virtual_time(tmp_path: Path, name: str) -> None:
    recipe = ROOT / "recipes" / f"{name}.toml"
    torch.set_num_threads(1)
    small = SMALL[load_config(recipe).workload.name]
    run = train_virtually(load_config(recipe, sets(recipe, tmp_path / "run", small)))
    assert run.tokens > 0
    before = run.workload.evaluate(run.workload.model())
    assert run.evaluate()["loss"] < before["loss"]


def test_an_exported_run_has_the_loss_of_its_last_evaluation(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trained(ROOT / "recipes/vision.toml", folder, SMALL["vit"], steps=150)
    output = ran("export", str(folder))
    assert f"to {folder}/export" in output
    torch.set_num_threads(1)
    model = dd.load_model(folder / "export")
    config = load_config(folder / "run.toml")
    workload = load_workload(config.workload.name, config.workload_options())
    measured, last = workload.evaluate(model), evaluations(folder)[-1]
    assert last.loss == pytest.approx(measured["loss"], rel=1e-5)
    assert last.metrics[0].value == pytest.approx(measured["accuracy"])
    assert last.tokens == 359
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", (folder / "report.html").read_text())
    assert captions == [each.caption for each in workload.pictures(model)]

    (folder / "weights.safetensors").unlink()
    shutil.rmtree(folder / "checkpoints")
    shutil.rmtree(folder / "durable")
    process = command("export", str(folder), "--force")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 6
    assert output.startswith(f"error: {folder} has no weights: weights.safetensors is written when")


def test_the_hugging_face_example_trains_and_exports(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, examples = tmp_path / "run", ROOT / "examples"
    small = {"context": 16, "batch_size": 2, "text_bytes_max": 50_000, "eval_batches": 1}
    output = trained(examples / "finetune_hf.toml", folder, small, steps=120, cwd=examples)
    assert re.search(r"perplexity +[0-9.]+", output), output
    ran("export", str(folder), "--format", "huggingface", cwd=examples)
    model = AutoModelForCausalLM.from_pretrained(folder / "export").eval()
    last = evaluations(folder)[-1]
    assert last.loss is not None
    assert last.metrics[0].value == pytest.approx(math.exp(last.loss), rel=1e-6)
    assert sum(parameter.numel() for parameter in model.parameters()) == 758_912
