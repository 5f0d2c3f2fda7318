"""Random schedules of scripted learners that open rounds with their own steps."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from decoupled_diloco.protocol import Options, SyncerMachine, messages
from decoupled_diloco.protocol.messages import COORDINATOR, Done, Failed, Made
from outside.own_learner import Learner
from outside.own_model import Key, Model


class Schedule:
    """A shard and its learners, drawn from a seed. ``changed`` may change the shard's orders."""

    def __init__(self, seed: int, **options: Any) -> None:
        rng = self.rng = random.Random(f"own {seed}")
        fragments = rng.randint(1, 8)
        period = rng.choice([1, 2, fragments, rng.randint(1, 3 * fragments), 12])
        shards = min(fragments, rng.choice([1, 1, 2, 3]))
        given: dict[str, Any] = {
            "fragments": fragments,
            "period": period,
            "overlap": rng.randint(0, min(4, period - 1)),
            "shards": shards,
            "phases": rng.choice([(), (), tuple(rng.randrange(period) for _ in range(fragments))]),
            "late_rounds_max": rng.choice([32, 32, 6, 2]),
            "participants": "own",
            "grace_margin": 0.0,
            "missed": "rebase",
        }
        shard = rng.randrange(shards)
        self.merge_seconds, self.fails = rng.choice([0.01, 0.05, 0.5, 3.0]), rng.choice([0, 0, 0.2])
        self.machine = SyncerMachine(Options(**{**given, **options}), shard)
        self.model = Model(Options(**given), shard)
        self.changed: Callable[[list[Any]], list[Any]] = list
        self.now = self.worker_free = 0.0
        self.count, self.heap = 0, list[tuple[float, int, Callable[[], None]]]()
        self.paths: dict[str, Key] = {}
        self.void: set[Key] = set()
        self.copies: list[messages.ExpectCopy] = []
        self.learners = {f"l{n}": Learner(self, f"l{n}") for n in range(rng.randint(1, 5))}
        self.handle(messages.Received(COORDINATOR, messages.ShardAdmitted(1, False)))
        self.learners["l0"].join()
        self.handle(messages.Received(COORDINATOR, messages.SeedNamed("l0", 1, 1)))
        for copy in self.copies:
            self.handle(
                messages.CopyArrived("l0", copy.fragment, copy.attempt, f"initial {copy.fragment}")
            )
        self.handle(messages.Received(COORDINATOR, messages.Begin(1)))
        for learner in list(self.learners.values())[1:]:
            self.at(rng.choice([0.0, 0.0, 20.0]) * rng.random(), learner.join)
        self.at(1.0, self.send_heartbeats)
        self.at(rng.choice([0.0, 1000.0]), self.mishap)

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + seconds, self.count, call))

    def send_heartbeats(self) -> None:
        names = [name for name, learner in self.learners.items() if learner.connected]
        self.handle(messages.Heard(tuple(names)))
        self.at(1.0, self.send_heartbeats)

    def mishap(self) -> None:
        learner = self.rng.choice(list(self.learners.values()))
        learner.goes(self.rng.choice(["breaks", "breaks", "breaks", "leaves", "crashes", "drains"]))
        self.at(self.rng.expovariate(1 / 15.0), self.mishap)

    def handle(self, event: Any) -> None:
        """Handle an event and every tick that is due then."""
        effects = self._handle(event)
        while (deadline := self.machine.deadline()) is not None and deadline <= self.now:
            effects += self._handle(messages.Tick())
        self.model.settled(self.now)
        for effect in effects:
            self.do(effect)

    def _handle(self, event: Any) -> list[Any]:
        self.model.before_event(self.now, event)
        effects = self.changed(self.machine.handle(self.now, event))
        self.machine.check()
        for effect in effects:
            self.model.check(effect)
        return effects

    def do(self, effect: Any) -> None:
        match effect:
            case messages.Send(peer, message) if peer in self.learners:
                self.at(0.0, lambda: self.learners[peer].receives(message))
            case messages.Broadcast(message):
                for learner in self.learners.values():
                    self.at(0.0, lambda each=learner: each.receives(message))  # type: ignore[misc]
            case messages.ExpectCopy():
                self.copies.append(effect)
            case messages.Expect(path, learner, _, _, fragment, ask):
                self.paths[path] = learner, fragment, ask
            case messages.Unexpect(path) if path in self.paths:
                self.void.add(self.paths[path])
            case messages.Merge():
                self.worker_free = max(self.worker_free, self.now) + self.merge_seconds
                self.at(self.worker_free - self.now, lambda: self.merged(effect))
            case messages.Reject(_, reason):
                raise AssertionError(f"rejected: {reason}")

    def merged(self, order: messages.Merge) -> None:
        if self.rng.random() < self.fails:
            self.handle(Failed(order, "the disk is full"))
        else:
            self.handle(Done(order, Made(f"{order.fragment} {order.round}")))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.heap[0][0] <= until and not self.model.swept:
            deadline = self.machine.deadline()
            if deadline is not None and deadline < self.heap[0][0]:
                self.now = max(self.now, deadline)
                self.handle(messages.Tick())
            else:
                self.now, _, call = heapq.heappop(self.heap)
                call()
        self.now = until

    def run_to_the_end(self) -> None:
        self.run(100.0)
        self.handle(messages.Received(COORDINATOR, messages.EndOrdered()))
        self.run(2000.0)
        assert self.model.swept, "the closing sweep does not end"
