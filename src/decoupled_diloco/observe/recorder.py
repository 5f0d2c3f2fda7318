"""State machines whose events and effects go on the tape, and the replay of such a tape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, Protocol, TypeVar

from decoupled_diloco.errors import StorageError
from decoupled_diloco.observe.records import Effect, Event, Record, plain_numbers
from decoupled_diloco.observe.writer import TapeWriter
from decoupled_diloco.protocol import wire

_log = logging.getLogger(__name__)

_EventT = TypeVar("_EventT", bound=Event)
_EffectT = TypeVar("_EffectT", bound=Effect)
_EventIn = TypeVar("_EventIn", contravariant=True)


class Machine(Protocol[_EventIn, _EffectT]):
    """A state machine of the protocol."""

    def handle(self, now: float, event: _EventIn, /) -> list[_EffectT]: ...


class Recorder(Generic[_EventT, _EffectT]):
    """A state machine whose events and effects go on the tape.

    A tape that can no longer be written never costs an effect: the error is logged once, and the
    machine goes on unrecorded.
    """

    def __init__(self, machine: Machine[_EventT, _EffectT], tape: TapeWriter) -> None:
        self.machine = machine
        self.tape = tape

    def handle(self, now: float, event: _EventT) -> list[_EffectT]:
        """The machine's answer; event and effects are on the tape."""
        effects = self.machine.handle(now, event)
        try:
            self.tape.effects(now, self.tape.event(now, event), effects)
        except StorageError as error:
            _log.error("%s", error)
        return effects


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """A replayed machine ordered something else than the tape says."""

    life: int
    cause: int
    event: str
    taped: dict[str, Any] | None  # an effect as a JSON object; None: there was none
    replayed: dict[str, Any] | None


def replay(
    records: Iterable[Record], machine_factory: Callable[[Mapping[str, Any]], Machine[Any, Any]]
) -> list[ReplayDifference]:
    """Feeds one process's taped events to fresh machines and compares what these order.

    Args:
        records: The records of one process, in the order in which they were written.
        machine_factory: Called with the header of each start record; makes the machine of that
            life as it was then (options, name, epoch, a restored snapshot).

    Returns:
        Every difference. Empty: the tape explains the run exactly. The effects of a life's last
        event may be cut short by a kill; what is missing there is no difference.

    Raises:
        ProtocolError: An event on the tape is not one of this version.
        StorageError: Records are missing or in another order.
    """
    differences: list[ReplayDifference] = []
    machine: Machine[Any, Any] | None = None
    turns = list(_turns(records))
    for number, (first, taped) in enumerate(turns):
        if first.kind == "start":
            machine = machine_factory(first.data.get("header", {}))
            continue
        if machine is None:
            raise StorageError(f"the tape of {first.who} does not begin with a start record")
        effects = _handled(machine, first)
        replayed = [plain_numbers(wire.encode(effect)) for effect in effects]
        if number + 1 == len(turns) or turns[number + 1][0].kind == "start":
            del replayed[len(taped) :]
        differences += [
            ReplayDifference(first.life, first.seq, first.type, a, b)
            for a, b in zip_longest(taped, replayed)
            if a != b
        ]
    return differences


def _handled(machine: Machine[Any, Any], record: Record) -> list[Any]:
    """What a machine orders at a taped event, which it may find impossible if others are gone."""
    event = record.value()
    try:
        return list(machine.handle(record.at, event))
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise StorageError(
            f"the tape of {record.who} was changed: record {record.seq} of life {record.life}, "
            f"{record.type}, cannot follow those before it ({error!r})"
        ) from error


def _turns(records: Iterable[Record]) -> Iterator[tuple[Record, list[dict[str, Any]]]]:
    """Start records and events, each event with the effects that it caused."""
    current: tuple[Record, list[dict[str, Any]]] | None = None
    for record in records:
        if record.kind == "effect":
            if current is None or record.cause != current[0].seq:
                raise StorageError(
                    f"the tape of {record.who} was changed: record {record.seq} of life "
                    f"{record.life}, {record.type}, stands apart from the event that caused it"
                )
            current[1].append(record.typed)
        elif record.kind != "sample":
            if current is not None:
                yield current
            current = (record, [])
    if current is not None:
        yield current
