"""A shard with an open round, and the outcomes that its learners receive."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.protocol.messages import (
    Asking,
    Connected,
    Heard,
    Hello,
    Holding,
    Outcome,
    RelayHello,
    RoundFinished,
    Send,
    SumArrived,
    Tick,
    relay_peer,
)

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


class Site:
    """A shard whose learners are behind relays, each named by its learner's first letter.

    All of them are behind the relay ``top``, if it is given.
    """

    def __init__(self, shard_bench: Any, *learners: str, top: str = "", **options: Any) -> None:
        self.bench = bench = shard_bench("direct", **{"fragments": 1, "period": 2, **options})
        upstream = dict.fromkeys([f"site-{learner[0]}" for learner in learners], top)
        for relay, above in {**({top: ""} if top else {}), **upstream}.items():
            hello = RelayHello(relay, f"nonce-{relay}")
            bench.handle(Connected(relay_peer(relay), hello, relay=above))
        for learner in learners:
            self.greet(learner, f"site-{learner[0]}")
        for _ in range(2):
            for learner in ("direct", *learners):
                bench.step(learner)

    def greet(self, learner: str, relay: str, **fields: Any) -> None:
        bench = self.bench
        bench.connection += 1
        step = bench.steps.setdefault(learner, 0)
        entry = bench.machine.state.fragments[0]
        held = (Holding(0, entry.version, entry.digest),) if step else ()
        hello = Hello(learner, 1, f"{learner}-1", "learner", step, 0, None, held, **fields)
        bench.handle(Connected(learner, hello, bench.connection, relay))

    def body(self, learner: str, **fields: Any) -> Asking:
        """A payload has arrived where it was requested; return the name of its request."""
        ask = self.bench.machine.state.fragments[0].asks[learner]
        self.bench.body(learner, relay=ask.relay, **fields)
        return ask.name

    def sum(self, relay: str, *asks: Asking, number: int = 1, at: str = "") -> None:
        self.bench.handle(SumArrived(relay, 0, number, asks, 100, at))

    def to_relays(self, kind: type[Any]) -> dict[str, Any]:
        sends = [o for o in self.bench.orders(Send) if isinstance(o.message, kind)]
        return {order.peer: order.message for order in sends}
