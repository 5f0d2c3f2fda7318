"""The node agent of a Ray actor, without Ray: it keeps processes going, or gives up."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.launch_folder import write_launch
from decoupled_diloco.launch.run_folder import RunFolder, enter_run_folder
from decoupled_diloco.launch.termination import INTERRUPTED
from decoupled_diloco_engines.node_agent import Ending, Keeper, note_of, read_notes
from decoupled_diloco_engines.ray_plan import RayPlan, read_plan

SECONDS = 60.0


def plan_in(folder: Path, **tables: Any) -> RayPlan:
    """Return the plan of a launched run that has no cluster."""
    run = {"name": "big", "folder": folder / "big", "learners": 1, "max_steps": 100}
    config = RunConfig(run=run, launch={"backend": "ray", **tables.pop("launch", {})}, **tables)
    launch = write_launch(config)
    with RunFolder(launch.config.run.folder):
        enter_run_folder(launch.config)
    return read_plan(launch.folder)


class Running:
    """A keeper that runs in a separate thread."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.ending: Ending | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self.ending = self.keeper.run()

    def wait_for(self, what: str) -> None:
        pause, left = threading.Event(), SECONDS
        while what not in self.keeper.state:
            left -= 0.05
            assert left > 0, f"{self.keeper.state}, not {what}"
            pause.wait(0.05)

    def ended(self) -> Ending:
        self._thread.join(SECONDS)
        assert self.ending is not None, self.keeper.state
        return self.ending


def host_of_a_learner(folder: Path, monkeypatch: Any) -> Running:
    """Return the second host of a two-host learner whose first host does not exist."""
    monkeypatch.chdir(folder)
    plan = plan_in(
        folder,
        data={"elastic": False},
        learner={"ranks": 2},
        launch={"learner": {"hosts": 2, "cpus": 2}, "workdir": folder},
    )
    running = Running(Keeper(plan, plan.placement_groups[0], 1, "127.0.0.1"))
    running.wait_for("waiting for its first host")
    return running


def test_a_host_ends_when_another_host_of_its_learner_was_rejected(
    tmp_path: Path, monkeypatch: Any
) -> None:
    running = host_of_a_learner(tmp_path, monkeypatch)
    launch = running.keeper.plan.settings.parent
    note = note_of(launch, "learner-0.0")
    note.parent.mkdir()
    note.write_text(json.dumps({"code": 2, "words": "error: quorum=5 exceeds learners=4"}))
    assert running.ended() == Ending(2, "error: quorum=5 exceeds learners=4")
    assert running.ended().is_final
    assert read_notes(launch) == {"learner-0.0": running.ended()}


def test_a_host_keeps_waiting_after_another_failed_and_ends_when_asked_to_stop(
    tmp_path: Path, monkeypatch: Any
) -> None:
    running = host_of_a_learner(tmp_path, monkeypatch)
    note = note_of(running.keeper.plan.settings.parent, "learner-0.0")
    note.parent.mkdir()
    note.write_text(json.dumps({"code": INTERRUPTED, "words": ""}))
    threading.Event().wait(1.5)
    assert running.ending is None
    running.keeper.end()
    assert running.ended().code == INTERRUPTED
