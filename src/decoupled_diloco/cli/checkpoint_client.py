"""Request a checkpoint of the whole run from a running syncer, and wait for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import cast, get_args

from decoupled_diloco.config.addresses import alternatives, reached_by
from decoupled_diloco.errors import AccessError, ProtocolError, TransportError
from decoupled_diloco.syncer.checkpoint_requests import CHECKPOINT_PATH
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
    found = _request(where, {}, token, tls)
    while found.state == "open" and time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        found = _request(where, {"number": str(found.number)}, token, tls)
    return found


def _coordinator_of(address: str, token: str | None, tls: TLSConfig | None) -> tuple[str, ...]:
    about = read_object(fetch(address, TAPE_PATH, {}, token, tls), address)
    shards = about.get("shards")
    if not isinstance(shards, list) or not shards or not isinstance(shards[0], str):
        raise ProtocolError(f"{address} does not report the addresses of the shards")
    return tuple(reached_by(each, address) for each in alternatives(shards[0]))


def _request(
    addresses: tuple[str, ...], query: Mapping[str, str], token: str | None, tls: TLSConfig | None
) -> CheckpointAnswer:
    failure: TransportError | None = None
    for address in addresses:
        try:
            document = fetch(address, CHECKPOINT_PATH, query, token, tls)
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
