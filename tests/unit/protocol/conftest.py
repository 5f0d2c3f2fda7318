"""Benches: one machine that receives facts at chosen instants, and checks of its orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from decoupled_diloco.protocol import LearnerMachine, Options, SyncerMachine, Version
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    NOTHING_NEW,
    Asking,
    Begin,
    BodyArrived,
    BodyCorrupt,
    Connected,
    CopyArrived,
    Decline,
    Done,
    Expect,
    Fetch,
    Hello,
    Holding,
    Made,
    Merge,
    Published,
    Received,
    SeedNamed,
    SendBody,
    ShardAdmitted,
    StepFinished,
    StepReport,
    Upload,
    Welcome,
    shard_peer,
)

_T = TypeVar("_T")


def fetch_of(fragment: int, version: Version) -> Fetch:
    """Return the order that an answer contains; a machine reads only these fields."""
    return Fetch(0, fragment, version, "", False, "", "")


def merge_of(round: int, fragment: int) -> Merge:
    """Return the order that an answer contains; a machine reads only these fields."""
    return Merge(round, fragment, Version(0, 0), Version(0, 0), "")


def send_of(fragment: int, ask: Asking) -> SendBody:
    """Return the order that an answer contains; a machine reads only these fields."""
    return SendBody(0, fragment, ask, Version(0, 0), 0, 0, "", "", "")


class Bench:
    """Shared by both benches: the time, and the effects of the last event."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.now = 0.0
        self.effects: list[Any] = []

    def handle(self, event: Any, at: float | None = None) -> list[Any]:
        """Pass a fact to the machine and return its orders."""
        self.now = self.now if at is None else at
        self.effects = self.machine.handle(self.now, event)
        self.machine.check()
        return self.effects

    def orders(self, kind: type[_T]) -> list[_T]:
        """Return the orders of one kind that the last event caused."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def messages(self, kind: type[_T]) -> list[_T]:
        """Return the messages of one kind among them."""
        found = [getattr(effect, "message", None) for effect in self.effects]
        return [message for message in found if isinstance(message, kind)]


class ShardBench(Bench):
    """One running shard, with the named learners."""

    machine: SyncerMachine

    def __init__(self, *learners: str, **options: Any) -> None:
        super().__init__(SyncerMachine(Options(**options), 0))
        self.connection = 0
        self.steps: dict[str, int] = {}
        self.handle(Received(COORDINATOR, ShardAdmitted(1, False)))
        for learner in learners:
            self.greet(learner)
        seed = learners[0] if learners else "seed"
        if not learners:
            self.greet(seed)
        self.handle(Received(COORDINATOR, SeedNamed(seed, 1, 1)))
        fill = self.machine.state.fill
        assert fill is not None
        for fragment in self.machine.owned:
            number = fill.asked[fragment].number
            self.handle(CopyArrived(seed, fragment, number, f"initial-{fragment}"))
        self.handle(Received(COORDINATOR, Begin(1)))
        assert self.machine.state.phase == "running"

    def greet(self, learner: str, epoch: int = 1, step: int = 0, **fields: Any) -> list[Any]:
        """A learner greets on a new connection."""
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
        return self.handle(Connected(learner, Hello(**values), self.connection))

    def step(self, learner: str, at: float | None = None, seconds: float = 1.0) -> list[Any]:
        """A learner applies new copies and reports its next step."""
        effects = self.holds(learner, at)
        self.steps[learner] = step = self.steps[learner] + 1
        effects += self.handle(Received(learner, StepReport(step, 10 * step, seconds)))
        self.effects = effects
        return effects

    def holds(self, learner: str, at: float | None = None) -> list[Any]:
        """A learner reports that it holds all new copies."""
        self.now = self.now if at is None else at
        effects: list[Any] = []
        for fragment, entry in self.machine.state.fragments.items():
            member = self.machine.state.members.get(learner)
            if member and entry.version and member.held.get(fragment) != entry.version:
                holding = Holding(fragment, entry.version, entry.digest)
                effects += self.handle(Received(learner, holding))
        self.effects = effects
        return effects

    def ask(self, learner: str, fragment: int = 0) -> Asking:
        """Return the name of a learner's open request, or 0.0 if there is none."""
        ask = self.machine.state.fragments[fragment].asks.get(learner)
        return Asking(0, 0) if ask is None else ask.name

    def decline(
        self, learner: str, reason: str = NOTHING_NEW, fragment: int = 0, at: float | None = None
    ) -> list[Any]:
        """A learner declines its open request."""
        message = Decline(fragment, self.ask(learner, fragment), reason == NOTHING_NEW, reason)
        return self.handle(Received(learner, message), at)

    def corrupt(self, learner: str, reason: str, fragment: int = 0) -> list[Any]:
        """A learner's payload is corrupted."""
        return self.handle(BodyCorrupt(learner, fragment, self.ask(learner, fragment), reason))

    def body(self, learner: str, fragment: int = 0, **fields: Any) -> list[Any]:
        """A contribution's payload has arrived, made from the base of the open request."""
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
        return self.handle(BodyArrived(**values), at)

    def announce(self, learner: str, fragment: int = 0, at: float | None = None) -> list[Any]:
        """A learner starts to answer."""
        ask = self.ask(learner, fragment)
        return self.handle(Received(learner, Upload(fragment, ask, Version(1, 0), 1, 10, "d")), at)

    def merged(self, fragment: int = 0) -> list[Any]:
        """The worker has merged."""
        round = self.machine.state.rounds[fragment]
        return self.handle(Done(merge_of(round.number, fragment), Made(f"digest-{round.number}")))

    def requested(self) -> list[str]:
        """Return the learners that received a request in the last event."""
        return [order.learner for order in self.orders(Expect)]


class LearnerBench(Bench):
    """One learner that holds version 1.0 of everything and was welcomed at run step 0."""

    machine: LearnerMachine

    def __init__(self, role: Any = "learner", *, begin: bool = True, **options: Any) -> None:
        values = {"fragments": 1, "period": 4, "overlap": 2, **options}
        super().__init__(LearnerMachine(Options(**values), "me", 1, "nonce", role))
        for shard in range(self.machine.options.shards):
            self.handle(Connected(shard_peer(shard)))
            self.receive(Welcome(shard, 1, 0, 0, 0), shard)
        if begin:
            for fragment in range(self.machine.options.fragments):
                self.publish(Version(1, 0), None, fragment)
                self.fetched(Version(1, 0), fragment)

    def receive(self, message: Any, shard: int = 0) -> list[Any]:
        """A shard sends a message."""
        return self.handle(Received(shard_peer(shard), message))

    def publish(
        self, version: Version, base: Version | None, fragment: int = 0, **fields: Any
    ) -> list[Any]:
        """A shard announces a new copy."""
        values = {
            "difference": "" if base is None else "/d",
            "clock": 0,
            "seal": f"seal-{version}",
            **fields,
        }
        shard = self.machine.options.owner(fragment)
        return self.receive(
            Published(fragment, version, base, f"digest-{version}", whole="/w", **values), shard
        )

    def fetched(self, version: Version, fragment: int = 0) -> list[Any]:
        """A copy is staged."""
        return self.handle(Done(fetch_of(fragment, version)))

    def step(self, at: float | None = None, tokens: int = 10) -> list[Any]:
        """A step boundary."""
        return self.handle(StepFinished(tokens), self.now + 1.0 if at is None else at)


@pytest.fixture
def shard_bench() -> Callable[..., ShardBench]:
    return ShardBench


@pytest.fixture
def learner_bench() -> Callable[..., LearnerBench]:
    return LearnerBench
