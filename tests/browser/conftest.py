"""A virtual run with a fault and its report, and a real Chromium to view it.

Cost: about 15 s, most of it the browser's start.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from browser.chromium import browser as browser
from decoupled_diloco.show.report import write_report
from decoupled_diloco_lab.simulate.scenario import load_scenario
from decoupled_diloco_lab.simulate.simulation import Simulation

SCENARIO = """
learners = [{step_seconds = 0.5, variance = 0.05, count = 2}, {step_seconds = 1.0, count = 1}]

[run]
name = "seen"
learners = 3
max_steps = 48
evaluator = true
evaluate_interval_seconds = 5.0

[sync]
fragments = 6
sync_every = 6

[syncer]
shards = 2

[workload]
name = "gpt"

[workload.options]
layers = 1
width = 32
heads = 2
context = 16
batch_size = 2

[[events]]
at_seconds = 8.0
kind = "kill"
target = "learner-1"
for_seconds = 4.0
"""


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in virtual time: three learners, one of them slow, one killed."""
    folder = tmp_path_factory.mktemp("browser")
    (folder / "scenario.toml").write_text(SCENARIO)
    run = folder / "run"
    run.mkdir()
    simulation = Simulation(load_scenario(folder / "scenario.toml"), run)
    while simulation.advance():
        pass
    simulation.finish()
    simulation.close()
    write_report(run, run / "report.html")
    return run
