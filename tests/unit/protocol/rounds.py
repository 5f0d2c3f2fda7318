"""A shard with an open round, and what its learners are told."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.protocol.effects import (
    RoundFinished,
    Send,
)
from decoupled_diloco.protocol.events import Heard, Tick
from decoupled_diloco.protocol.messages import (
    Outcome,
)

DELIVERY_SECONDS = 2.0
"""The delivery window of these rounds: τ = 2 steps of a second."""


def opened(shard_bench: Any, *learners: str, **options: Any) -> Any:
    """A shard whose learners have all reported two steps; the round of fragment 0 is open."""
    bench = shard_bench(*learners, **{"fragments": 1, "period": 2, **options})
    for learner in (*learners, *learners):
        bench.step(learner)
    assert bench.machine.state.rounds[0].tick == 2
    return bench


def tick_at(bench: Any, at: float) -> list[Any]:
    """A tick, by when everybody has been heard."""
    bench.told(Heard(tuple(bench.machine.state.members)), at)
    return list(bench.told(Tick()))


def outcomes(bench: Any) -> list[tuple[str, str]]:
    """Who is told what became of its contribution."""
    return [
        (order.peer, order.message.verdict)
        for order in bench.orders(Send)
        if isinstance(order.message, Outcome)
    ]


def states(finished: RoundFinished) -> dict[str, str]:
    return {participant.learner: participant.state for participant in finished.participants}
