"""A lasting problem is logged at once, repeatedly, and when it is over."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from decoupled_diloco.learner.connections import (
    AGAIN_SECONDS,
    CoordinatorSession,
    ProcessIdentity,
    TroubleLog,
)
from decoupled_diloco.learner.option_groups import Timeouts
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.wire import encode
from decoupled_diloco.runtime import Runtime, within


class Steady(Runtime):
    """A clock that advances only when the test sets it."""

    at = 100.0

    def now(self) -> float:
        return self.at


def test_a_problem_is_logged_at_once_repeatedly_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with within(Steady()) as time:
        trouble = TroubleLog()
        trouble.over("a is back")
        for _ in range(3):
            trouble.warn("away", "a is away: because")
            time.at += AGAIN_SECONDS / 2
        trouble.warn("rejected", "a is rejected")
        time.at += 5
        trouble.over("a is back")
        trouble.over("a is back")
    assert [record.getMessage() for record in caplog.records] == [
        "a is away: because",
        "a is away: because (for 1 min)",
        "a is rejected",
        "a is back, after 1 min 35 s",
    ]
    # A loop without logging setup shows warnings only, and the last record belongs to the first.
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


async def test_through_a_relay_a_wildcard_is_replaced_by_the_host_of_a_shard() -> None:
    """The relay is on another machine than the shards, and serves none of their ports."""
    dialled = []

    class Relay:
        def send(self, message: object) -> None:
            pass

        async def receive(self) -> dict[str, Any]:
            shards = ("http://0.0.0.0:7070", "http://0.0.0.0:7071")
            return encode(messages.Admitted(1, "{}", "", shards, relayed=True))

    class Here:
        async def connect(self, *args: object, **named: object) -> Relay:
            return Relay()

        def admitted(self, answer: messages.Admitted, address: str) -> None:
            dialled.append(address)

    addresses = ("http://relay:7080", "http://syncer:7070")
    me = ProcessIdentity("learner-0", "n", "learner")
    here = cast("Any", Here())
    await CoordinatorSession(me, "", addresses, here, Timeouts()).join(here)
    assert dialled == ["http://syncer:7070"]
