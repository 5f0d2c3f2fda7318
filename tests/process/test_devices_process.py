"""Real processes: devices that visit the run, train while they are away, and come back."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from decoupled_diloco.config import load_config
from decoupled_diloco.protocol.messages import Fetch, Fold, PlaceGiven, Send
from decoupled_diloco.tape import TapeReader
from process.process_runs import local_run, logs, wait
from replay_check import assert_replays

PAGE = Path(__file__).parents[2] / "docs/how-to/devices.md"


def listing(name: str) -> str:
    """Return a file from the page, as a reader would save it."""
    found = re.search(rf"<!-- test: file {name} -->\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.smoke
def test_devices_visit_a_run_again_and_again(tmp_path: Path) -> None:
    """The files of the page. The first visit fetches a whole copy, and later ones differences."""
    program, folder = tmp_path / "phone.py", tmp_path / "run"
    program.write_text(listing("phone.py"))
    (tmp_path / "phones.toml").write_text(listing("phones.toml"))
    settings = [
        f"run.folder={str(folder)!r}",
        "syncer.port=0",
        f"learner.command=[{sys.executable!r}, {str(program)!r}]",
        "run.max_tokens=6000",
    ]
    with local_run(load_config(tmp_path / "phones.toml", settings)) as run:
        run.start()
        outcome = wait(run, seconds=120)
    assert outcome.finished, f"{outcome.reason}: {logs(folder)}"
    effects = [r.value() for r in TapeReader(folder) if r.kind == "effect"]
    folds = [each for each in effects if isinstance(each, Fold)]
    assert {each.learner for each in folds} == {f"learner-{number}" for number in range(4)}
    assert min(each.scale for each in folds) < 1.0 == max(each.scale for each in folds)
    places = [
        each for each in effects if isinstance(each, Send) and isinstance(each.message, PlaceGiven)
    ]
    assert {each.peer for each in places} == {each.learner for each in folds}
    own = [r.value() for r in TapeReader(folder / "tape/learner-0.jsonl") if r.type == "Fetch"]
    fetched = [each for each in own if isinstance(each, Fetch)]
    assert fetched[0].whole
    assert any(not each.whole for each in fetched)
    assert_replays(folder)
