"""Benches: one machine, told facts at chosen instants, its orders looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from decoupled_diloco.protocol import LearnerMachine, Options, SyncerMachine, Version
from decoupled_diloco.protocol.effects import NOTHING_NEW, Expect
from decoupled_diloco.protocol.events import (
    BodyArrived,
    BodyCorrupt,
    Connected,
    CopyArrived,
    Fetched,
    Merged,
    Received,
    StepFinished,
)
from decoupled_diloco.protocol.messages import (
    Begin,
    Decline,
    Hello,
    Published,
    SeedNamed,
    ShardAdmitted,
    StepReport,
    Upload,
    Welcome,
)
from decoupled_diloco.protocol.peers import COORDINATOR, shard_peer
from decoupled_diloco.protocol.versions import Asking, Holding

_T = TypeVar("_T")


class Bench:
    """What both benches share: time, and the effects of the last event."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.now = 0.0
        self.effects: list[Any] = []

    def told(self, event: Any, at: float | None = None) -> list[Any]:
        """Tells the machine a fact and returns its orders."""
        self.now = self.now if at is None else at
        self.effects = self.machine.handle(self.now, event)
        self.machine.check()
        return self.effects

    def orders(self, kind: type[_T]) -> list[_T]:
        """The orders of one kind that the last event has led to."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def messages(self, kind: type[_T]) -> list[_T]:
        """The messages of one kind among them."""
        found = [getattr(effect, "message", None) for effect in self.effects]
        return [message for message in found if isinstance(message, kind)]


class ShardBench(Bench):
    """One shard that is running, with the learners that one names."""

    machine: SyncerMachine

    def __init__(self, *learners: str, **options: Any) -> None:
        super().__init__(SyncerMachine(Options(**options), 0))
        self.connection = 0
        self.steps: dict[str, int] = {}
        self.told(Received(COORDINATOR, ShardAdmitted(1, False)))
        for learner in learners:
            self.greet(learner)
        seed = learners[0] if learners else "seed"
        if not learners:
            self.greet(seed)
        self.told(Received(COORDINATOR, SeedNamed(seed, 1, 1)))
        fill = self.machine.state.fill
        assert fill is not None
        for fragment in self.machine.owned:
            number = fill.asked[fragment].number
            self.told(CopyArrived(seed, fragment, number, f"initial-{fragment}"))
        self.told(Received(COORDINATOR, Begin(1)))
        assert self.machine.state.phase == "running"

    def greet(self, learner: str, epoch: int = 1, step: int = 0, **fields: Any) -> list[Any]:
        """A learner says hello on a new connection."""
        self.connection += 1
        values = {
            "learner": learner,
            "epoch": epoch,
            "nonce": f"{learner}-{epoch}",
            "role": "learner",
            "step": step,
            "clock": 0,
            "run_step": None,
            "held": (),
            **fields,
        }
        self.steps[learner] = step
        return self.told(Connected(learner, Hello(**values), self.connection))

    def step(self, learner: str, at: float | None = None, seconds: float = 1.0) -> list[Any]:
        """A learner has taken over what is new, and reports its next step."""
        effects = self.holds(learner, at)
        self.steps[learner] = step = self.steps[learner] + 1
        effects += self.told(Received(learner, StepReport(step, 10 * step, seconds)))
        self.effects = effects
        return effects

    def holds(self, learner: str, at: float | None = None) -> list[Any]:
        """A learner says of what is new that it holds it."""
        self.now = self.now if at is None else at
        effects: list[Any] = []
        for fragment, entry in self.machine.state.fragments.items():
            member = self.machine.state.members.get(learner)
            if member and entry.version and member.held.get(fragment) != entry.version:
                holding = Holding(fragment, entry.version, entry.digest)
                effects += self.told(Received(learner, holding))
        self.effects = effects
        return effects

    def ask(self, learner: str, fragment: int = 0) -> Asking:
        """The name of what a learner is asked for at present; 0.0 if it is asked for nothing."""
        ask = self.machine.state.fragments[fragment].asks.get(learner)
        return Asking(0, 0) if ask is None else ask.name

    def decline(
        self, learner: str, reason: str = NOTHING_NEW, fragment: int = 0, at: float | None = None
    ) -> list[Any]:
        """A learner declines what it is asked for."""
        message = Decline(fragment, self.ask(learner, fragment), reason == NOTHING_NEW, reason)
        return self.told(Received(learner, message), at)

    def spoil(self, learner: str, reason: str, fragment: int = 0) -> list[Any]:
        """The body that a learner sent is wrong."""
        return self.told(BodyCorrupt(learner, fragment, self.ask(learner, fragment), reason))

    def body(self, learner: str, fragment: int = 0, **fields: Any) -> list[Any]:
        """The body of a contribution has arrived, made from what the learner was asked for."""
        ask = self.machine.state.fragments[fragment].asks.get(learner)
        values = {
            "learner": learner,
            "epoch": 1,
            "fragment": fragment,
            "ask": self.ask(learner, fragment),
            "base": Version(1, 0) if ask is None else ask.base,
            "steps": 1,
            "tokens": 10,
            "nbytes": 100,
            **fields,
        }
        at = values.pop("at", None)
        return self.told(BodyArrived(**values), at)

    def announce(self, learner: str, fragment: int = 0, at: float | None = None) -> list[Any]:
        """A learner begins to answer."""
        ask = self.ask(learner, fragment)
        return self.told(Received(learner, Upload(fragment, ask, Version(1, 0), 1, 10, "d")), at)

    def merged(self, fragment: int = 0) -> list[Any]:
        """The worker has merged."""
        round = self.machine.state.rounds[fragment]
        return self.told(Merged(round.number, fragment, f"digest-{round.number}"))

    def asked(self) -> list[str]:
        """Whom the last event has led to ask."""
        return [order.learner for order in self.orders(Expect)]


class LearnerBench(Bench):
    """One learner that holds version 1.0 of everything and is welcomed at run step 0."""

    machine: LearnerMachine

    def __init__(self, role: Any = "learner", *, begin: bool = True, **options: Any) -> None:
        values = {"fragments": 1, "period": 4, "overlap": 2, **options}
        super().__init__(LearnerMachine(Options(**values), "me", 1, "nonce", role))
        for shard in range(self.machine.options.shards):
            self.told(Connected(shard_peer(shard)))
            self.hear(Welcome(shard, 1, 0, 0, 0), shard)
        if begin:
            for fragment in range(self.machine.options.fragments):
                self.publish(Version(1, 0), None, fragment)
                self.fetched(Version(1, 0), fragment)

    def hear(self, message: Any, shard: int = 0) -> list[Any]:
        """A shard says something."""
        return self.told(Received(shard_peer(shard), message))

    def publish(
        self, version: Version, base: Version | None, fragment: int = 0, **fields: Any
    ) -> list[Any]:
        """A shard tells of a new copy."""
        values = {
            "difference": "" if base is None else "/d",
            "clock": 0,
            "seal": f"seal-{version}",
            **fields,
        }
        shard = self.machine.options.owner(fragment)
        return self.hear(
            Published(fragment, version, base, f"digest-{version}", whole="/w", **values), shard
        )

    def fetched(self, version: Version, fragment: int = 0) -> list[Any]:
        """A copy is staged."""
        return self.told(Fetched(fragment, version))

    def step(self, at: float | None = None, tokens: int = 10) -> list[Any]:
        """A step boundary."""
        return self.told(StepFinished(tokens), self.now + 1.0 if at is None else at)


@pytest.fixture
def shard_bench() -> Callable[..., ShardBench]:
    return ShardBench


@pytest.fixture
def learner_bench() -> Callable[..., LearnerBench]:
    return LearnerBench
