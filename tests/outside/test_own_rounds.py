"""Rounds that learners open with their own steps, beside a naive model of what a shard must do.

Random schedules, with scripted learners: slow ones, slow links, reports of several steps, learners
that go, come back and drain, bodies and merges that fail. The model is looked at after every event.

`python -m outside.test_own_rounds FIRST END` (in `tests`) tries more seeds and names the bad.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from decoupled_diloco.protocol import Options, SyncerMachine
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.peers import COORDINATOR
from deliberate_breaks import Break
from outside.own_learner import Learner
from outside.own_model import Key, Model
from simulation.own_breaks import FORGOTTEN_TURNS

SEEDS = 80


class Schedule:
    """A shard and its learners, by a seed. ``spoils`` takes its orders, and gives others."""

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
        self.spoils: Callable[[list[Any]], list[Any]] = list
        self.now = self.worker_free = 0.0
        self.count, self.heap = 0, list[tuple[float, int, Callable[[], None]]]()
        self.paths: dict[str, Key] = {}
        self.void: set[Key] = set()
        self.copies: list[do.ExpectCopy] = []
        self.learners = {f"l{n}": Learner(self, f"l{n}") for n in range(rng.randint(1, 5))}
        self.tell(ev.Received(COORDINATOR, msg.ShardAdmitted(1, False)))
        self.learners["l0"].join()
        self.tell(ev.Received(COORDINATOR, msg.SeedNamed("l0", 1, 1)))
        for copy in self.copies:
            self.tell(ev.CopyArrived("l0", copy.fragment, copy.attempt, f"initial {copy.fragment}"))
        self.tell(ev.Received(COORDINATOR, msg.Begin(1)))
        for learner in list(self.learners.values())[1:]:
            self.at(rng.choice([0.0, 0.0, 20.0]) * rng.random(), learner.join)
        self.at(1.0, self.hear)
        self.at(rng.choice([0.0, 1000.0]), self.mishap)

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + seconds, self.count, call))

    def hear(self) -> None:
        names = [name for name, learner in self.learners.items() if learner.connected]
        self.tell(ev.Heard(tuple(names)))
        self.at(1.0, self.hear)

    def mishap(self) -> None:
        learner = self.rng.choice(list(self.learners.values()))
        learner.goes(self.rng.choice(["breaks", "breaks", "breaks", "leaves", "crashes", "drains"]))
        self.at(self.rng.expovariate(1 / 15.0), self.mishap)

    def tell(self, event: Any) -> None:
        """And every alarm that is due then."""
        effects = self._tell(event)
        while (deadline := self.machine.deadline()) is not None and deadline <= self.now:
            effects += self._tell(ev.Tick())
        self.model.settled(self.now)
        for effect in effects:
            self.do(effect)

    def _tell(self, event: Any) -> list[Any]:
        self.model.told(self.now, event)
        effects = self.spoils(self.machine.handle(self.now, event))
        self.machine.check()
        for effect in effects:
            self.model.answered(effect)
        return effects

    def do(self, effect: Any) -> None:
        match effect:
            case do.Send(peer, message) if peer in self.learners:
                self.at(0.0, lambda: self.learners[peer].hears(message))
            case do.Broadcast(message):
                for learner in self.learners.values():
                    self.at(0.0, lambda who=learner: who.hears(message))  # type: ignore[misc]
            case do.ExpectCopy():
                self.copies.append(effect)
            case do.Expect(path, learner, _, _, fragment, ask):
                self.paths[path] = learner, fragment, ask
            case do.Unexpect(path) if path in self.paths:
                self.void.add(self.paths[path])
            case do.Merge(round, fragment):
                self.worker_free = max(self.worker_free, self.now) + self.merge_seconds
                self.at(self.worker_free - self.now, lambda: self.merged(round, fragment))
            case do.Reject(_, reason):
                raise AssertionError(f"rejected: {reason}")

    def merged(self, round: int, fragment: int) -> None:
        if self.rng.random() < self.fails:
            self.tell(ev.MergeFailed(round, fragment, "the disk is full"))
        else:
            self.tell(ev.Merged(round, fragment, f"{fragment} {round}"))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.heap[0][0] <= until and not self.model.swept:
            deadline = self.machine.deadline()
            if deadline is not None and deadline < self.heap[0][0]:
                self.now = max(self.now, deadline)
                self.tell(ev.Tick())
            else:
                self.now, _, call = heapq.heappop(self.heap)
                call()
        self.now = until

    def whole(self) -> None:
        self.run(100.0)
        self.tell(ev.Received(COORDINATOR, msg.EndOrdered()))
        self.run(2000.0)
        assert self.model.swept, "the sweep does not end"


def wrong(seed: int) -> str:
    try:
        Schedule(seed).whole()
    except AssertionError as error:
        return str(error)[:500] or "the machine's own check"
    return ""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_schedules(seed: int) -> None:
    assert not (found := wrong(seed)), found


def test_the_schedules_do_what_they_should() -> None:
    said: Counter[str] = Counter()
    for seed in range(10):
        schedule = Schedule(seed)
        schedule.whole()
        said += schedule.model.said
    assert said["alone"] > 500
    assert said["late"] > 100


def lost(kind: type) -> Callable[[list[Any]], list[Any]]:
    """Every fifth order of a kind, or message, is forgotten."""
    seen = Counter[type]()

    def spoils(effects: list[Any]) -> list[Any]:
        kept = []
        for effect in effects:
            if kind in (type(effect), type(getattr(effect, "message", None))):
                seen[kind] += 1
            if kind not in (type(effect), type(getattr(effect, "message", None))) or seen[kind] % 5:
                kept.append(effect)
        return kept

    return spoils


@pytest.mark.parametrize("kind", [msg.Pull, do.Fold, do.Merge, msg.Outcome])
def test_the_model_notices_what_is_forgotten(kind: type) -> None:
    schedule = Schedule(3)
    schedule.spoils = lost(kind)
    with pytest.raises(AssertionError):
        schedule.whole()


@pytest.mark.parametrize("participants", ["reported", "all"])
def test_the_model_notices_rounds_that_a_clock_opens(participants: str) -> None:
    with pytest.raises(AssertionError, match=r"not its turn|with nothing"):
        Schedule(3, participants=participants).whole()


@pytest.mark.parametrize("each", FORGOTTEN_TURNS, ids=[each.mark for each in FORGOTTEN_TURNS])
def test_the_model_notices_a_turn_that_is_forgotten(each: Break) -> None:
    with each.broken():
        assert any(map(wrong, range(SEEDS)))


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        if found := wrong(number):
            print(f"seed {number}: {found}", flush=True)
