"""An abandoned round has failed, unless no learner had anything new."""

from __future__ import annotations

from typing import Literal

import pytest

from decoupled_diloco.protocol.messages import NOTHING_NEW, Participant, RoundFinished


def finished(verdict: Literal["merged", "abandoned"], *states: tuple[str, str]) -> RoundFinished:
    return RoundFinished(
        round=1,
        fragment=0,
        tick=8,
        version=None,
        verdict=verdict,
        reason="",
        participants=tuple(
            Participant(f"learner-{i}", state, 0, 0, 0.0, None, reason)
            for i, (state, reason) in enumerate(states)
        ),
        quorum_seconds=None,
        grace_seconds=0.0,
        closed_seconds=None,
        uploaded_seconds=None,
        finished_seconds=1.0,
        step_seconds=1.0,
        slack_seconds=0.0,
        why="",
    )


IDLE = ("declined", NOTHING_NEW)


@pytest.mark.parametrize(
    ("round", "failed"),
    [
        (finished("abandoned", IDLE, IDLE), False),
        (finished("abandoned", IDLE, ("gone", "its lease ran out")), True),
        (finished("abandoned", IDLE, ("late", "no payload within 2 s")), True),
        (finished("abandoned"), True),
        (finished("merged", IDLE, ("folded", "")), False),
    ],
)
def test_a_round_without_new_training_has_not_failed(round: RoundFinished, failed: bool) -> None:
    assert round.given_up is failed
