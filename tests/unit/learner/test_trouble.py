"""A lasting problem is logged at once, repeatedly, and when it is over."""

from __future__ import annotations

import logging

import pytest

from decoupled_diloco.learner.connections import AGAIN_SECONDS, TroubleLog
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
