"""A shard with an open round, and the outcomes that its learners receive."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.protocol.messages import Heard, Outcome, RoundFinished, Send, Tick

DELIVERY_SECONDS = 2.0
"""The delivery window of these rounds: τ = 2 steps of one second."""


def opened(shard_bench: Any, *learners: str, **options: Any) -> Any:
    """Return a shard whose learners have reported two steps; the round of fragment 0 is open."""
    bench = shard_bench(*learners, **{"fragments": 1, "period": 2, **options})
    for learner in (*learners, *learners):
        bench.step(learner)
    assert bench.machine.state.rounds[0].tick == 2
    return bench


def tick_at(bench: Any, at: float) -> list[Any]:
    """Send a tick, after bytes from all learners."""
    bench.handle(Heard(tuple(bench.machine.state.members)), at)
    return list(bench.handle(Tick()))


def outcomes(bench: Any) -> list[tuple[str, str]]:
    """Return the outcomes of the last event, with their learners."""
    return [
        (order.peer, order.message.verdict)
        for order in bench.orders(Send)
        if isinstance(order.message, Outcome)
    ]


def states(finished: RoundFinished) -> dict[str, str]:
    return {participant.learner: participant.state for participant in finished.participants}
