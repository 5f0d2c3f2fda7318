"""A learner's join includes its device, which status and report show."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from decoupled_diloco.learner.learner_model import device_text
from decoupled_diloco.run_model import read_run
from decoupled_diloco.show.console import SteadyConsole
from decoupled_diloco.show.status import status_of
from decoupled_diloco.show.tables import learner_rows
from decoupled_diloco.show.terminal import print_summary, render_status
from integration.real_system import Model, System


def test_status_and_report_show_the_device_of_each_learner(tmp_path: Path) -> None:
    system = System(tmp_path, run={"learners": 1})
    try:
        system.start()
        system.learner(Model(), "learner-0").close()
        system.stop()
    finally:
        system.close()
    run = read_run(tmp_path, "details")
    assert run.learners["learner-0"].device == "cpu"
    status = status_of(run, time.time())
    assert status.to_json()["learners"][0]["device"] == "cpu"
    present = replace(
        status.learners[0], state="stepping"
    )  # the table omits learners that have left
    status = replace(status, learners=(present,))
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(render_status(status, width=100))
    assert "device" in console.export_text()
    header, row = learner_rows(run, devices=True)
    assert dict(zip(header, row, strict=True))["device"] == "cpu"
    console = SteadyConsole(width=80, file=io.StringIO(), record=True)
    print_summary(run, console=console)
    assert "1 learner on cpu" in console.export_text()


@pytest.mark.parametrize(
    ("visible", "text"),
    [
        ("", "cuda:1"),
        ("0,1", "cuda:1"),
        ("2,3", "cuda:1 (GPU 3)"),
        ("GPU-1f,GPU-2e", "cuda:1 (GPU GPU-2e)"),
        ("5", "cuda:1"),
    ],
)
def test_a_gpu_is_shown_with_its_number_on_the_machine(
    monkeypatch: pytest.MonkeyPatch, visible: str, text: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    model = nn.Linear(1, 1)

    class Elsewhere:
        device = torch.device("cuda", 1)

    monkeypatch.setattr(model, "parameters", lambda: iter([Elsewhere()]))
    assert device_text(model).partition(",")[0] == text


def test_all_devices_of_a_model_are_named() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    assert device_text(model) == "cpu + meta"
