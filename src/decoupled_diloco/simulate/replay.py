"""Exact replay: fresh machines are told what is on a tape, and must order what is on it.

The machines are the run's own; nothing else of it is needed. A difference means that the tape was
changed, that it was written by other code, or that a machine is not pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from decoupled_diloco.config.method import options_of, read_settings
from decoupled_diloco.errors import StorageError
from decoupled_diloco.observe.records import Record
from decoupled_diloco.observe.tape import ReplayDifference, TapeReader, replay
from decoupled_diloco.protocol.coordinator import CoordinatorMachine
from decoupled_diloco.protocol.coordinator_state import CoordinatorState
from decoupled_diloco.protocol.learner import LearnerMachine
from decoupled_diloco.protocol.shard_lease import ShardLeaseMachine
from decoupled_diloco.protocol.syncer import SyncerMachine

Machine = SyncerMachine | LearnerMachine | CoordinatorMachine | ShardLeaseMachine
MACHINES = ("shard", "learner", "coordinator", "lease")


@dataclass
class ProcessReplay:
    """What a replay of one process has shown.

    Attributes:
        who: The process.
        lives: How often it started.
        events: What its machines were told.
        effects: What the tape says that they ordered.
        differences: Where the replayed machines ordered something else; none: it is exact.
    """

    who: str
    lives: int = 0
    events: int = 0
    effects: int = 0
    differences: list[ReplayDifference] = field(default_factory=list)


@dataclass(frozen=True)
class Divergence:
    """Where two tapes of one process part.

    Attributes:
        who: The process.
        after: Records that are alike before.
        left: The first record that is not, as its type and fields; ``None``: the tape ends.
        right: The same of the other tape.
    """

    who: str
    after: int
    left: tuple[str, Mapping[str, Any]] | None
    right: tuple[str, Mapping[str, Any]] | None


def machine_of(header: Mapping[str, Any]) -> Machine:
    """The machine of a life, as it was when its start record was written.

    Raises:
        StorageError: The header is not that of a machine of this version.
    """
    try:
        if header["machine"] == "lease":
            return ShardLeaseMachine(
                header["nonce"], header["lease_seconds"], waits=header["waits"]
            )
        options = options_of(read_settings(header["settings"]))
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
                raise StorageError(f"a start record names a machine {other!r}, which is none")
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"a start record cannot be understood ({type(error).__name__}: {error}): replay the "
            "tape with the version that wrote it"
        ) from error


def replay_run(
    path: str | Path, until_seconds: float | None = None
) -> tuple[list[ProcessReplay], list[str]]:
    """Replays every process of a run.

    Args:
        path: A run folder, tape folder or tape file.
        until_seconds: Only what happened up to so many seconds after the run's first record.

    Returns:
        One result for each process that has a machine, and what could not be read of the tape.

    Raises:
        StorageError: There is no tape, or it is not of this version.
        ProtocolError: An event on the tape is not of this version.
    """
    reader = TapeReader(path)
    results = []
    for who, records in by_process(reader, until_seconds):
        result = ProcessReplay(who)
        for record in records:
            result.lives += record.kind == "start"
            result.events += record.kind == "event"
            result.effects += record.kind == "effect"
        result.differences = replay(records, machine_of)
        results.append(result)
    return results, reader.problems


def divergences(left: str | Path, right: str | Path) -> list[Divergence]:
    """Where the tapes of two runs part, process by process; times and samples are not compared.

    Raises:
        StorageError: There is no tape.
    """
    ours = {who: list(map(_content, records)) for who, records in by_process(TapeReader(left))}
    theirs = {who: list(map(_content, records)) for who, records in by_process(TapeReader(right))}
    found = []
    for who in sorted(ours.keys() | theirs.keys()):
        pairs = zip_longest(ours.get(who, []), theirs.get(who, []))
        for number, (a, b) in enumerate(pairs):
            if a != b:
                found.append(Divergence(who, number, a, b))
                break
    return found


def by_process(
    records: Iterable[Record], until_seconds: float | None = None, *, samples: bool = False
) -> Iterator[tuple[str, list[Record]]]:
    """The records of each process that has a machine, in order of names.

    Args:
        records: Of all processes.
        until_seconds: Only those of so many seconds after the first.
        samples: Whether measurements are among them.
    """
    mine: dict[str, list[Record]] = {}
    began: float | None = None
    for record in records:
        began = record.wall if began is None else began
        if until_seconds is not None and record.wall - began > until_seconds:
            break
        if samples or record.kind != "sample":
            mine.setdefault(record.who, []).append(record)
    for who in sorted(mine):
        header = mine[who][0].data.get("header", {}) if mine[who][0].kind == "start" else {}
        if header.get("machine") in MACHINES:
            yield who, mine[who]


def _content(record: Record) -> tuple[str, Mapping[str, Any]]:
    """What a record says, without when."""
    if record.kind == "start":
        header = {k: v for k, v in record.data.get("header", {}).items() if k != "nonce"}
        return (record.type, header)
    return (record.type, record.data)
