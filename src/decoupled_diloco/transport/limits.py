"""Sizes and intervals that bound the effect of a peer on a process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Every size that a peer can name, and the derived intervals.

    The defaults are meant for production; tests shorten the intervals.
    """

    message_bytes: int = 1 << 20  # largest control message, in bytes of JSON text
    # messages that may wait for a slow peer before its channel is closed
    outbox_messages: int = 4096
    outbox_bytes: int = 16 << 20  # the same, in bytes
    # messages that may wait for `receive` before reading from the peer pauses
    inbox_messages: int = 4096
    inbox_bytes: int = 16 << 20  # the same, in bytes
    streams_per_principal: int = 128  # data-plane requests that one principal may have open
    # times that one principal may fetch a payload: normally once, parts of it again after a
    # broken connection, and once more after each restart of its process
    copies_per_principal: int = 8
    # interval after which one more copy is allowed, so that no request waits forever
    copy_seconds: float = 60.0
    # payloads that one principal may fetch at once; a learner fetches 4
    downloads_per_principal: int = 16
    # control channels that one principal may have open; one more closes the oldest. Two are in use,
    # and a few dead ones may not have been detected yet.
    channels_per_principal: int = 8
    # connections of all kinds that a server accepts: 4,000 learners have four each
    connections: int = 16384
    # unauthenticated connections among them: one more closes the oldest of these
    strangers: int = 512
    header_bytes: int = 8190  # largest request line and largest single header
    ping_seconds: float = 1.0  # interval of control pings, which also measure the round-trip time
    lost_seconds: float = 10.0  # silence after which a channel is lost: ten pings
    # minimum time without a moved byte after which a transfer is abandoned. Far above a
    # retransmission timeout (0.2 s and its doublings), below the lease of a learner.
    stall_seconds: float = 5.0
    retries: int = 5  # attempts to resume a range after its connection failed
