"""Asking a running syncer for a consistent cut of the whole run, and hearing what becomes of it.

``/cut`` begins one, or names the one under way; ``/cut?number=N`` says how far it is. Both are for
whoever holds a token of the run, as the tapes are. Only shard 0 can answer, where the coordinator
is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol, cast, get_args

from decoupled_diloco.config.addresses import alternatives, reached_by
from decoupled_diloco.errors import AccessError, ProtocolError, TransportError
from decoupled_diloco.observe.sources import TAPE_PATH
from decoupled_diloco.protocol.checkpoints.coordinator import OpenCheckpoint
from decoupled_diloco.protocol.checkpoints.effects import KeepCheckpoint
from decoupled_diloco.syncer.cuts import cut_folder
from decoupled_diloco.transport.documents import Document, NoSuchDocumentError, fetch, read_object

CUT_PATH = "/cut"

ASK_SECONDS = 0.3
"""How often it is asked whether the cut is complete."""

State = Literal["refused", "open", "complete", "given up"]


@dataclass(frozen=True)
class CheckpointAnswer:
    """What has become of a cut.

    Attributes:
        state: ``refused``: none can begin now.
        number: Of the cut; 0: there is none.
        words: Why it was refused or given up, or what it waits for.
        folder: Where the shards' parts are, at the syncer.
        nbytes: Of all parts.
        missing: Learners that were there and gave no part.
    """

    state: State
    number: int
    words: str = ""
    folder: str = ""
    nbytes: int = 0
    missing: tuple[str, ...] = ()

    @classmethod
    def kept(cls, run: Path, cut: KeepCheckpoint) -> CheckpointAnswer:
        """Of a cut that is complete, its manifest written."""
        nbytes = sum(part.nbytes for part in (*cut.shards, *cut.learners))
        folder = str(cut_folder(run, cut.number).absolute())
        return cls("complete", cut.number, folder=folder, nbytes=nbytes, missing=cut.missing)

    @classmethod
    def of_open(cls, cut: OpenCheckpoint) -> CheckpointAnswer:
        """Of a cut that waits for parts."""
        awaited = [f"shard-{shard}" for shard in sorted(cut.shards_awaited)]
        awaited += sorted(cut.learners_awaited)
        words = f"the parts of {', '.join(awaited)} are still to come"
        return cls("open", cut.number, words, missing=tuple(sorted(cut.missing)))


class Coordinator(Protocol):
    """Where cuts begin."""

    def want_cut(self) -> CheckpointAnswer:
        """Begins a cut; one that is under way will do."""
        ...

    def cut_answer(self, number: int) -> CheckpointAnswer:
        """What has become of a cut."""
        ...


def answer(coordinator: Coordinator | None, query: Mapping[str, str]) -> Document:
    """Answers a request; see `transport.documents`.

    Raises:
        NoSuchDocumentError: The coordinator is not in this process, or the number is none.
    """
    if coordinator is None:
        raise NoSuchDocumentError("the coordinator is not here: ask shard 0")
    number = query.get("number")
    if number is None:
        found = coordinator.want_cut()
    elif number.isascii() and number.isdigit() and len(number) < 17:
        found = coordinator.cut_answer(int(number))
    else:
        raise NoSuchDocumentError(f"number={number[:40]!r} is no number of a cut")
    return Document(json.dumps(asdict(found)).encode())


def take_cut(address: str, token: str | None, timeout_seconds: float) -> CheckpointAnswer:
    """Has a running syncer take a consistent cut, and waits until it is complete.

    Args:
        address: Of any shard, ``http://host:port``.
        token: The run's secret; ``None``: it has none.
        timeout_seconds: How long to wait, seconds, greater than 0.

    Returns:
        A complete cut, one that was refused or given up, or one that is still open.

    Raises:
        AccessError: The syncer refuses the token.
        TransportError: It cannot be reached.
    """
    deadline = time.monotonic() + timeout_seconds
    where = _coordinator_of(address, token)
    found = _ask(where, {}, token)
    while found.state == "open" and time.monotonic() < deadline:
        time.sleep(min(ASK_SECONDS, max(0.0, deadline - time.monotonic())))
        found = _ask(where, {"number": str(found.number)}, token)
    return found


def _coordinator_of(address: str, token: str | None) -> tuple[str, ...]:
    about = read_object(fetch(address, TAPE_PATH, {}, token), address)
    shards = about.get("shards")
    if not isinstance(shards, list) or not shards or not isinstance(shards[0], str):
        raise ProtocolError(f"{address} does not say where the shards are")
    return tuple(reached_by(each, address) for each in alternatives(shards[0]))


def _ask(
    addresses: tuple[str, ...], query: Mapping[str, str], token: str | None
) -> CheckpointAnswer:
    failure: TransportError | None = None
    for address in addresses:
        try:
            document = fetch(address, CUT_PATH, query, token)
        except AccessError:
            raise
        except TransportError as error:
            failure = failure or error
            continue
        return _read(document, address)
    assert failure is not None, "shard 0 has an address"
    raise failure


def _read(document: Document, where: str) -> CheckpointAnswer:
    fields = read_object(document, where)
    try:
        if fields["state"] not in get_args(State):
            raise ValueError(fields["state"])
        return CheckpointAnswer(
            cast("State", fields["state"]),
            int(fields["number"]),
            str(fields["words"]),
            str(fields["folder"]),
            int(fields["nbytes"]),
            tuple(str(name) for name in fields["missing"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"{where} does not answer like a syncer of this version") from error
