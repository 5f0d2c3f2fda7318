"""Virtual training: placement of models and batches on a device, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.sync import MomentSettings
from decoupled_diloco.errors import ConfigError, DilocoError
from decoupled_diloco.launch import devices
from decoupled_diloco.launch.resume_run import LEARNERS
from decoupled_diloco_lab.simulate import hosts, training
from decoupled_diloco_lab.simulate.training import train_virtually

OPTIONS = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 2, "eval_batches": 1}


def config_of(own: dict[str, Any] | None = None, **learner: Any) -> RunConfig:
    return RunConfig(
        run={"learners": 2, "max_steps": 6, "evaluator": False},
        sync={"fragments": 2, "sync_every": 4, "overlap_steps": 1},
        learner=learner,
        workload={
            "options": {**OPTIONS, "corpus_bytes_max": 100_000, "warmup_steps": 1, **(own or {})}
        },
    )


def test_every_model_is_placed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def placed(model: nn.Module, device: torch.device) -> nn.Module:
        asked.append(device)
        return model  # the CPU stands for the device

    for module in (hosts, training):
        monkeypatch.setattr(module, "placed", placed)
    train_virtually(config_of(), device="xpu").model()
    assert asked == [torch.device("xpu")] * 3, "two learners, and the model at the end"


@pytest.mark.parametrize(("settings", "written"), [({}, False), ({"seconds": 1.0}, True)])
def test_learners_write_checkpoints_only_if_their_interval_is_set(
    settings: dict[str, float], written: bool
) -> None:
    learner = {f"checkpoint_interval_{key}": value for key, value in settings.items()}
    with training.virtual_run(config_of(**learner)) as run:
        run.train()
        assert any((run.system.folder / LEARNERS).rglob("*.safetensors")) == written


def test_a_run_whose_shard_stays_down_ends() -> None:
    config = config_of()
    merge = config.sync.merge.model_copy(update={"rule": "gone:rule"})
    sync = config.sync.model_copy(update={"merge": merge})
    with pytest.raises(DilocoError, match=r"shard-0 failed: .*'gone:rule' is not loaded"):
        train_virtually(config.model_copy(update={"sync": sync}))


def test_a_run_whose_learner_stays_down_ends() -> None:
    config = config_of({"optimizer": "sgd"})
    sync = config.sync.model_copy(update={"moments": MomentSettings()})
    with pytest.raises(DilocoError, match=r"learner-\d failed: .*no parameter has such a tensor"):
        train_virtually(config.model_copy(update={"sync": sync}))


def test_bf16_trains_in_autocast_and_keeps_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    forward = nn.Linear.forward

    def noting(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        if self.training:
            seen.add(out.dtype)
        return out

    monkeypatch.setattr(nn.Linear, "forward", noting)
    plain = train_virtually(config_of()).evaluate()["loss"]
    assert seen == {torch.float32}
    seen.clear()
    run = train_virtually(config_of(precision="bf16"))
    assert seen == {torch.bfloat16}
    assert {each.dtype for each in run.model().parameters()} == {torch.float32}
    assert run.evaluate()["loss"] == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("device", ["gpu", "cuda", "cuda:1"])
def test_a_missing_device_is_rejected_before_a_folder_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "count", lambda kind: int(kind == "cpu"))
    done = CliRunner().invoke(app, ["simulate", "mixed-speeds", "--device", device])
    assert isinstance(done.exception, ConfigError)
    assert f"device='{device}' in [learner] is missing" in str(done.exception)
    assert not (tmp_path / "runs").exists()


def test_a_simulation_without_tensors_has_no_device() -> None:
    done = CliRunner().invoke(
        app, ["simulate", "mixed-speeds", "--protocol-only", "--device", "cuda"]
    )
    assert done.exit_code == 2
    assert "--device cuda cannot be combined with --protocol-only" in " ".join(done.output.split())
