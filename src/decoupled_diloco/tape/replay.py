"""Exact replay: new machines receive the events of a tape and must produce its effects.

`replay_run` replays a whole run, `replay` one process. `divergences` compares two runs. The replay
uses the run's own state machines and nothing else. A difference means that the tape was changed,
that different code wrote it, or that a machine is not pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from decoupled_diloco.config.method import options_of, read_settings
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.protocol import wire
from decoupled_diloco.protocol.coordinator_machine import CoordinatorMachine
from decoupled_diloco.protocol.coordinator_state import CoordinatorState
from decoupled_diloco.protocol.learner_machine import LearnerMachine
from decoupled_diloco.protocol.lease_machine import ShardLeaseMachine
from decoupled_diloco.protocol.relay_machine import RelayMachine
from decoupled_diloco.protocol.syncer_machine import SyncerMachine
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco.tape.records import Record, plain_numbers
from decoupled_diloco.tape.writer import Machine as AnyMachine

Machine = SyncerMachine | LearnerMachine | CoordinatorMachine | ShardLeaseMachine | RelayMachine
MACHINES = ("shard", "learner", "coordinator", "lease", "relay")


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """An effect of a replayed machine that differs from the tape."""

    life: int
    cause: int
    event: str
    taped: dict[str, Any] | None  # an effect as a JSON object; None if there is none
    replayed: dict[str, Any] | None


@dataclass
class ProcessReplay:
    """The result of the replay of one process.

    Attributes:
        process: The name of the process.
        lives: The number of its incarnations.
        events: The number of events on the tape.
        effects: The number of effects on the tape.
        differences: The effects that differ; empty if the replay is exact.
    """

    process: str
    lives: int = 0
    events: int = 0
    effects: int = 0
    differences: list[ReplayDifference] = field(default_factory=list)


@dataclass(frozen=True)
class Divergence:
    """The first difference between two tapes of one process.

    Attributes:
        process: The name of the process.
        after: The number of equal records before it.
        left: The first record that differs, as type and fields; ``None`` if the tape ends.
        right: The same for the other tape.
    """

    process: str
    after: int
    left: tuple[str, Mapping[str, Any]] | None
    right: tuple[str, Mapping[str, Any]] | None


def machine_of(header: Mapping[str, Any]) -> Machine:
    """Create the machine of an incarnation, in its state at the start record.

    Raises:
        StorageError: The header does not describe a machine of this version.
    """
    try:
        if header["machine"] == "lease":
            return ShardLeaseMachine(
                header["nonce"], header["lease_seconds"], waits=header["waits"]
            )
        if header["machine"] == "relay":
            return RelayMachine()
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
                raise StorageError(f"a start record has an unknown machine: {other!r}")
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"a start record has an unknown format ({type(error).__name__}: {error}): replay the "
            "tape with the version that wrote it"
        ) from error


def replay_run(
    path: str | Path, until_seconds: float | None = None
) -> tuple[list[ProcessReplay], list[str]]:
    """Replay every process of a run.

    Args:
        path: A run folder, tape folder or tape file.
        until_seconds: Stop this many seconds after the run's first record.

    Returns:
        One result for each process that has a machine, and the problems found while reading.

    Raises:
        StorageError: The tape does not exist, or it has another version.
        ProtocolError: An event on the tape has another version.
    """
    reader = TapeReader(path)
    results = []
    for process, records in by_process(reader, until_seconds):
        result = ProcessReplay(process)
        for record in records:
            result.lives += record.kind == "start"
            result.events += record.kind == "event"
            result.effects += record.kind == "effect"
        result.differences = replay(records, machine_of)
        results.append(result)
    return results, reader.problems


def replay(
    records: Iterable[Record], machine_factory: Callable[[Mapping[str, Any]], AnyMachine[Any, Any]]
) -> list[ReplayDifference]:
    """Send one process's taped events to new machines and compare the effects.

    Args:
        records: The records of one process, in the order in which they were written.
        machine_factory: Called with the header of each start record; creates the machine of that
            incarnation in its state at that time (options, name, epoch, a restored snapshot).

    Returns:
        All differences; empty if the tape explains the run exactly. A kill may truncate the effects
        of an incarnation's last event; the missing ones do not count as differences.

    Raises:
        ProtocolError: An event on the tape has another version.
        StorageError: Records are missing or in another order.
    """
    differences: list[ReplayDifference] = []
    machine: AnyMachine[Any, Any] | None = None
    turns = list(_turns(records))
    for number, (first, taped) in enumerate(turns):
        if first.kind == "start":
            machine = machine_factory(first.data.get("header", {}))
            continue
        if machine is None:
            raise StorageError(f"the tape of {first.process} does not start with a start record")
        effects = _handled(machine, first)
        replayed = [plain_numbers(wire.encode(effect)) for effect in effects]
        # A kill can truncate the effects of an incarnation's last event: compare those written.
        if number + 1 == len(turns) or turns[number + 1][0].kind == "start":
            del replayed[len(taped) :]
        differences += [
            ReplayDifference(first.life, first.seq, first.type, a, b)
            for a, b in zip_longest(taped, replayed)
            if a != b
        ]
    return differences


def _handled(machine: AnyMachine[Any, Any], record: Record) -> list[Any]:
    """Return a machine's effects for a taped event.

    Raises:
        ConfigError: A custom method of the run is not loaded.
        StorageError: The event is impossible in the machine's state, because the tape was changed.
    """
    event = record.value()
    try:
        return list(machine.handle(record.at, event))
    except ConfigError:
        raise  # a method of the run is not loaded
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise StorageError(
            f"the tape of {record.process} was changed: record {record.seq} of incarnation "
            f"{record.life}, {record.type}, cannot follow the records before it ({error!r})"
        ) from error


def _turns(records: Iterable[Record]) -> Iterator[tuple[Record, list[dict[str, Any]]]]:
    """Yield start records and events, each event with the effects that it caused."""
    current: tuple[Record, list[dict[str, Any]]] | None = None
    for record in records:
        if record.kind == "effect":
            if current is None or record.cause != current[0].seq:
                raise StorageError(
                    f"the tape of {record.process} was changed: record {record.seq} of incarnation "
                    f"{record.life}, {record.type}, does not follow the event that caused it"
                )
            current[1].append(record.typed)
        elif record.kind != "sample":
            if current is not None:
                yield current
            current = (record, [])
    if current is not None:
        yield current


def divergences(left: str | Path, right: str | Path) -> list[Divergence]:
    """Return the first difference per process between the tapes of two runs.

    Times and samples are not compared.

    Raises:
        StorageError: A tape does not exist.
    """
    ours = {
        process: list(map(_content, records)) for process, records in by_process(TapeReader(left))
    }
    theirs = {
        process: list(map(_content, records)) for process, records in by_process(TapeReader(right))
    }
    found = []
    for process in sorted(ours.keys() | theirs.keys()):
        pairs = zip_longest(ours.get(process, []), theirs.get(process, []))
        for number, (a, b) in enumerate(pairs):
            if a != b:
                found.append(Divergence(process, number, a, b))
                break
    return found


def by_process(
    records: Iterable[Record], until_seconds: float | None = None, *, samples: bool = False
) -> Iterator[tuple[str, list[Record]]]:
    """Yield the records of each process that has a machine, in order of names.

    Args:
        records: The records of all processes, in order of time.
        until_seconds: Stop this many seconds after the first record.
        samples: Include samples.
    """
    mine: dict[str, list[Record]] = {}
    began: float | None = None
    for record in records:
        began = record.wall if began is None else began
        if until_seconds is not None and record.wall - began > until_seconds:
            break
        if samples or record.kind != "sample":
            mine.setdefault(record.process, []).append(record)
    for process in sorted(mine):
        header = mine[process][0].data.get("header", {}) if mine[process][0].kind == "start" else {}
        if header.get("machine") in MACHINES:
            yield process, mine[process]


def _content(record: Record) -> tuple[str, Mapping[str, Any]]:
    """Return the type and fields of a record, without its time."""
    if record.kind == "start":
        header = {k: v for k, v in record.data.get("header", {}).items() if k != "nonce"}
        return (record.type, header)
    return (record.type, record.data)
