"""Replays the tapes of a run: every process's events, fed to fresh machines, give what is taped."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from decoupled_diloco.config.method import options_of
from decoupled_diloco.observe.tape import TapeReader, replay
from decoupled_diloco.protocol.coordinator import CoordinatorMachine, CoordinatorState
from decoupled_diloco.protocol.learner import LearnerMachine
from decoupled_diloco.protocol.syncer import SyncerMachine

Machine = SyncerMachine | LearnerMachine | CoordinatorMachine


def machine_of(header: Mapping[str, Any]) -> Machine:
    """The machine of a life, as it was when its start record was written."""
    options = options_of(header["settings"])
    match header["machine"]:
        case "shard":
            return SyncerMachine(options, header["shard"])
        case "learner":
            return LearnerMachine(
                options, header["learner"], header["epoch"], header["nonce"], header["role"]
            )
        case "coordinator":
            machine = CoordinatorMachine(options, weights_from_file=header["weights_from_file"])
            if header["state"] is not None:
                state = TypeAdapter(CoordinatorState).validate_python(header["state"])
                machine.restore(state)
            return machine
        case other:
            raise AssertionError(f"the tape is of a {other!r}")


def assert_replays(run_folder: Path) -> int:
    """Every machine of the run replays exactly; returns how many events that were."""
    events = 0
    for path in sorted((run_folder / "tape").glob("*.jsonl")):
        reader = TapeReader(path)
        records = list(reader)
        starts = [r for r in records if r.kind == "start"]
        if starts[0].data["header"].get("machine") not in ("shard", "learner", "coordinator"):
            continue
        # A torn line can only be the last one of a life that was killed.
        assert len(reader.problems) < len(starts), reader.problems
        records = [r for r in records if r.kind != "sample"]
        for who, own in groupby(records, key=lambda r: r.who):
            differences = replay(own, machine_of)
            assert not differences, f"{who}: {differences[0]}"
        events += sum(r.kind == "event" for r in records)
    return events
