"""Limits on how often, and how much at once, one principal may fetch of a server's offers."""

from __future__ import annotations

import pytest

from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.payload_store import BodyBooks
from decoupled_diloco.transport.pool import ReceivePool
from decoupled_diloco.transport.tokens import RequestRefusal

NBYTES = 1000
LIMITS = Limits(copies_per_principal=2, copy_seconds=60.0, downloads_per_principal=2)


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def offering(*paths: str) -> tuple[BodyBooks, Clock]:
    clock = Clock()
    bodies = BodyBooks(ReceivePool(1 << 20), LIMITS, clock)
    for path in paths:
        bodies.offer(path, memoryview(bytes(NBYTES)), "")
    return bodies, clock


def fetch(bodies: BodyBooks, process: str = "a", start: int = 0, sent: int = NBYTES) -> None:
    download = bodies.fetch("x", process, (start, NBYTES))
    download.sent(sent)
    download.close()


def refused(bodies: BodyBooks, key: str = "x") -> str:
    with pytest.raises(RequestRefusal) as refusal:
        bodies.fetch(key, "a", (0, NBYTES))
    assert refusal.value.status == 429
    return refusal.value.text


def test_fetches_of_a_payload_are_limited_and_one_more_is_allowed_per_minute() -> None:
    bodies, clock = offering("x")
    fetch(bodies)
    fetch(bodies)
    assert (
        "'a' has fetched /bodies/x 2 times, the limit: one more is allowed every 60 s"
        in refused(bodies)
    )
    clock.now += 60.0
    fetch(bodies)
    refused(bodies)
    fetch(bodies, "b")


def test_unsent_bytes_do_not_count_and_parts_count_proportionally() -> None:
    bodies, _ = offering("x")
    for _ in range(10):
        fetch(bodies, sent=NBYTES // 10)
    fetch(bodies, start=NBYTES // 2, sent=NBYTES // 2)
    fetch(bodies, start=NBYTES // 2, sent=NBYTES // 2)
    refused(bodies)


def test_downloads_in_progress_count_in_full() -> None:
    bodies, _ = offering("x")
    downloads = [bodies.fetch("x", "a", (0, NBYTES)) for _ in range(2)]
    refused(bodies)
    for download in downloads:
        download.close()
    fetch(bodies)


def test_concurrent_payloads_per_principal_are_limited() -> None:
    bodies, _ = offering("x", "y", "z")
    first = bodies.fetch("x", "a", (0, 10))
    bodies.fetch("y", "a", (0, 10))
    bodies.fetch("y", "a", (10, 20))
    assert "'a' fetches 2 payloads in 3 requests at once, the limit" in refused(bodies, "z")
    bodies.fetch("z", "b", (0, 10))
    first.close()
    bodies.fetch("z", "a", (0, 10))


def test_concurrent_requests_per_principal_are_limited() -> None:
    bodies, _ = offering("x")
    for start in range(LIMITS.streams_per_principal):
        bodies.fetch("x", "a", (start, start + 1))
    assert "in 128 requests at once" in refused(bodies)
    fetch(bodies, "b")


def test_withdrawing_a_payload_drops_its_counts() -> None:
    bodies, _ = offering("x")
    fetch(bodies)
    fetch(bodies)
    bodies.withdraw("x")
    bodies.offer("x", memoryview(bytes(NBYTES)), "")
    fetch(bodies)
