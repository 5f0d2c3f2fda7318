"""Send requests to the coordinator of a running syncer: for a checkpoint of the run, or its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import cast, get_args

from decoupled_diloco.config.addresses import alternatives, reached_by
from decoupled_diloco.errors import AccessError, ProtocolError, TransportError
from decoupled_diloco.syncer.coordinator_requests import CHECKPOINT_PATH, STOP_PATH
from decoupled_diloco.syncer.run_checkpoints import CheckpointAnswer, State
from decoupled_diloco.tape.sources import TAPE_PATH
from decoupled_diloco.transport.documents import Document
from decoupled_diloco.transport.fetch import fetch, read_object
from decoupled_diloco.transport.tls import TLSConfig

POLL_SECONDS = 0.3
"""Time between two requests for the state of the checkpoint."""


def take_checkpoint(
    address: str, token: str | None, timeout_seconds: float, tls: TLSConfig | None = None
) -> CheckpointAnswer:
    """Request a checkpoint of the run from a running syncer, and wait until it is complete.

    The checkpoint may also be refused or abandoned, or still be open after the timeout.

    Raises:
        AccessError: The syncer refuses the auth token.
        TransportError: The syncer cannot be reached.
    """
    deadline = time.monotonic() + timeout_seconds
    where = _coordinator_of(address, token, tls)
    found = _checkpoint(where, {}, token, tls)
    while found.state == "open" and time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        found = _checkpoint(where, {"number": str(found.number)}, token, tls)
    return found


def _coordinator_of(address: str, token: str | None, tls: TLSConfig | None) -> tuple[str, ...]:
    about = read_object(fetch(address, TAPE_PATH, {}, token, tls), address)
    shards = about.get("shards")
    if not isinstance(shards, list) or not shards or not isinstance(shards[0], str):
        raise ProtocolError(f"{address} does not report the addresses of the shards")
    return tuple(reached_by(each, address) for each in alternatives(shards[0]))


def stop_run(address: str, token: str | None, tls: TLSConfig | None = None) -> None:
    """End a run in order: each fragment has its closing round, and the result is written.

    Raises:
        AccessError: The syncer refuses the auth token, or this process may not end the run.
        ProtocolError: The run cannot be ended, because it has not begun.
        TransportError: The syncer cannot be reached.
    """
    _first_answer(
        _coordinator_of(address, token, tls),
        lambda each: fetch(each, STOP_PATH, {}, token, tls, method="POST"),
    )


def _checkpoint(
    addresses: tuple[str, ...], query: Mapping[str, str], token: str | None, tls: TLSConfig | None
) -> CheckpointAnswer:
    return _read(
        *_first_answer(addresses, lambda each: fetch(each, CHECKPOINT_PATH, query, token, tls))
    )


def _first_answer(
    addresses: tuple[str, ...], request: Callable[[str], Document]
) -> tuple[Document, str]:
    """Return the answer of the first address that can be reached, and this address."""
    failure: TransportError | None = None
    for address in addresses:
        try:
            return request(address), address
        except AccessError:
            raise
        except TransportError as error:
            failure = failure or error
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
