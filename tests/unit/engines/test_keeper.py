"""What an actor of Ray does on its node, without Ray: processes are kept going, or given up."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.engines.keeper import HowEnded, Keeper, note_of, read_notes
from decoupled_diloco.engines.launch import write_launch
from decoupled_diloco.engines.ray_plan import RayPlan, read_plan
from decoupled_diloco.launch.folder import RunFolder, enter_run_folder
from decoupled_diloco.launch.termination import INTERRUPTED

SECONDS = 60.0


def plan_in(folder: Path, **tables: Any) -> RayPlan:
    """The plan of a run that is launched, but has no cluster."""
    run = {"name": "big", "folder": folder / "big", "learners": 1, "budget_steps": 100}
    config = RunConfig(run=run, where={"engine": "ray", **tables.pop("where", {})}, **tables)
    launch = write_launch(config)
    with RunFolder(launch.config.run.folder):
        enter_run_folder(launch.config)
    return read_plan(launch.folder)


class Running:
    """A keeper at work, in a thread of its own."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.how: HowEnded | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self.how = self.keeper.run()

    def waits_for(self, what: str) -> None:
        pause, left = threading.Event(), SECONDS
        while what not in self.keeper.state:
            left -= 0.05
            assert left > 0, f"{self.keeper.state}, not {what}"
            pause.wait(0.05)

    def ended(self) -> HowEnded:
        self._thread.join(SECONDS)
        assert self.how is not None, self.keeper.state
        return self.how


def host_of_a_learner(folder: Path, monkeypatch: Any) -> Running:
    """The second host of a learner of two, whose first is not there."""
    monkeypatch.chdir(folder)
    plan = plan_in(
        folder,
        data={"leases": False},
        learner={"ranks": 2},
        where={"learner": {"hosts": 2, "cpus": 2}, "workdir": folder},
    )
    running = Running(Keeper(plan, plan.placement_groups[0], 1, "127.0.0.1"))
    running.waits_for("waits for its first host")
    return running


def test_a_host_ends_when_another_of_its_learner_was_refused(
    tmp_path: Path, monkeypatch: Any
) -> None:
    running = host_of_a_learner(tmp_path, monkeypatch)
    launch = running.keeper.plan.settings.parent
    note = note_of(launch, "learner-0.0")
    note.parent.mkdir()
    note.write_text(json.dumps({"code": 2, "words": "error: quorum=5 exceeds learners=4"}))
    assert running.ended() == HowEnded(2, "error: quorum=5 exceeds learners=4")
    assert running.ended().is_final
    assert read_notes(launch) == {"learner-0.0": running.ended()}


def test_a_host_goes_on_waiting_when_another_failed_and_ends_when_told(
    tmp_path: Path, monkeypatch: Any
) -> None:
    running = host_of_a_learner(tmp_path, monkeypatch)
    note = note_of(running.keeper.plan.settings.parent, "learner-0.0")
    note.parent.mkdir()
    note.write_text(json.dumps({"code": INTERRUPTED, "words": ""}))
    threading.Event().wait(1.5)
    assert running.how is None
    running.keeper.end()
    assert running.ended().code == INTERRUPTED
