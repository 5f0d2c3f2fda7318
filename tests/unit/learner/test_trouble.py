"""What is out of order is said at once, now and then again, and when it is over."""

from __future__ import annotations

import logging

import pytest

from decoupled_diloco.learner.connections import AGAIN_SECONDS, TroubleLog
from decoupled_diloco.runtime import Runtime, within


class Steady(Runtime):
    """A clock that goes on when it is told to."""

    at = 100.0

    def now(self) -> float:
        return self.at


def test_trouble_is_said_at_once_now_and_then_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with within(Steady()) as time:
        trouble = TroubleLog()
        trouble.over("a is back")
        for _ in range(3):
            trouble.tell("away", "a is away: because")
            time.at += AGAIN_SECONDS / 2
        trouble.tell("refused", "a is refused")
        time.at += 5
        trouble.over("a is back")
        trouble.over("a is back")
    assert [record.getMessage() for record in caplog.records] == [
        "a is away: because",
        "a is away: because (for 1 min)",
        "a is refused",
        "a is back, after 1 min 35 s",
    ]
    # A loop that has set up no logging shows warnings alone, and both belong together.
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
