"""Replays the tapes of a run: every process's events, fed to fresh machines, give what is taped."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from decoupled_diloco.observe.tape import TapeReader, replay
from decoupled_diloco.simulate.replay import MACHINES, machine_of


def assert_replays(run_folder: Path) -> int:
    """Every machine of the run replays exactly; returns how many events that were."""
    events = 0
    for path in sorted((run_folder / "tape").glob("*.jsonl")):
        reader = TapeReader(path)
        records = list(reader)
        starts = [r for r in records if r.kind == "start"]
        if starts[0].data["header"].get("machine") not in MACHINES:
            continue
        # A torn line can only be the last one of a life that was killed.
        assert len(reader.problems) < len(starts), reader.problems
        records = [r for r in records if r.kind != "sample"]
        for who, own in groupby(records, key=lambda r: r.who):
            differences = replay(own, machine_of)
            assert not differences, f"{who}: {differences[0]}"
        events += sum(r.kind == "event" for r in records)
    return events
