"""Replay the tapes of a run: fresh state machines with the taped events reproduce the tape."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.replay import MACHINES, machine_of, replay


def assert_replays(run_folder: Path) -> int:
    """Check that every state machine of a run replays exactly; return the number of events."""
    events = 0
    for path in sorted((run_folder / "tape").glob("*.jsonl")):
        reader = TapeReader(path)
        records = list(reader)
        starts = [r for r in records if r.kind == "start"]
        if starts[0].data["header"].get("machine") not in MACHINES:
            continue
        # Only the last line of a killed incarnation can be torn.
        assert len(reader.problems) < len(starts), reader.problems
        records = [r for r in records if r.kind != "sample"]
        for process, own in groupby(records, key=lambda r: r.process):
            differences = replay(own, machine_of)
            assert not differences, f"{process}: {differences[0]}"
        events += sum(r.kind == "event" for r in records)
    return events
