"""Which process acts for a shard: one at a time, whatever clocks, storage and pauses do."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from typing import Any

import pytest

from decoupled_diloco.protocol.lease_machine import MARGIN, ShardLeaseMachine
from decoupled_diloco.protocol.messages import (
    Acquire,
    Activate,
    Done,
    Failed,
    GiveBack,
    HolderLeaves,
    Look,
    NewestClaim,
    NewestLease,
    Note,
    Renew,
    StandDown,
    StepDown,
    Tick,
)
from simulation.breaks import LATE_ANSWER
from unit.protocol.conftest import Bench

LEASE = 4.0
NOBODY = NewestLease(0, "", 0, 0.0, "held")


def held(number: int, renewals: int = 0, lease: float = LEASE) -> NewestLease:
    return NewestLease(number, "other", renewals, lease, "held")


def looked(found: NewestLease) -> Done:
    return Done(Look(""), found)


def look_failed(reason: str) -> Failed:
    return Failed(Look(""), reason)


def kinds(effects: list[Any]) -> list[type]:
    return [type(effect) for effect in effects]


@pytest.fixture
def first() -> Bench:
    return Bench(ShardLeaseMachine("a", LEASE, waits=False))


@pytest.fixture
def standby() -> Bench:
    return Bench(ShardLeaseMachine("b", LEASE, waits=True))


def acting(bench: Bench, at: float = 100.0) -> Bench:
    bench.handle(Tick(), at)
    bench.handle(looked(NOBODY))
    bench.handle(Done(Acquire(1, "")))
    assert bench.machine.holds(at)
    return bench


def test_the_preferred_process_claims_at_once(first: Bench) -> None:
    assert kinds(first.handle(Tick(), 100.0)) == [Look]
    [claim] = first.handle(looked(NOBODY), 100.1)
    assert (type(claim), claim.number) == (Acquire, 1)
    [activate] = first.handle(Done(Acquire(1, "")), 100.2)
    assert (type(activate), activate.number) == (Activate, 1)


def test_a_claim_counts_from_its_order(first: Bench) -> None:
    first.handle(Tick(), 100.0)
    first.handle(looked(NOBODY), 100.0)
    first.handle(Done(Acquire(1, "")), 103.0)
    assert first.machine.holds(103.5)
    assert not first.machine.holds(100.0 + LEASE * (1 - MARGIN))


def test_a_claim_that_took_a_lease_has_expired(first: Bench) -> None:
    first.handle(Tick(), 100.0)
    first.handle(looked(NOBODY), 100.0)
    assert kinds(first.handle(Done(Acquire(1, "")), 104.0)) == [Note, Look]
    assert not first.machine.holds(104.0)


def test_the_active_process_renews_four_times_per_lease(first: Bench) -> None:
    acting(first)
    assert first.machine.deadline() == 101.0
    [renew] = first.handle(Tick(), 101.0)
    assert (type(renew), renew.number, renew.renewals) == (Renew, 1, 1)
    assert first.handle(Done(Renew(1, 1, ""), NewestClaim(1)), 101.2) == []
    assert first.machine.holds(101.0 + LEASE * (1 - MARGIN) - 0.01)
    assert first.machine.deadline() == 102.0


def test_a_renewed_lease_counts_from_the_start_of_its_renewal(first: Bench) -> None:
    """The storage wrote it at some instant in between, from which others may count."""
    acting(first)
    first.handle(Tick(), 101.0)
    assert first.handle(Done(Renew(1, 1, ""), NewestClaim(1)), 103.0) != [StepDown]
    assert first.machine.holds(101.0 + LEASE * (1 - MARGIN) - 0.01)
    assert not first.machine.holds(101.0 + LEASE * (1 - MARGIN))


def test_a_process_that_cannot_renew_steps_down_for_good_within_its_lease(first: Bench) -> None:
    acting(first)
    first.handle(Tick(), 101.0)
    [note] = first.handle(Failed(Renew(1, 1, ""), "no such folder"), 101.1)
    assert note.why == "no such folder"
    now = first.machine.deadline()
    while kinds(first.handle(Tick(), now)) == [Renew]:
        assert first.machine.holds(now)
        assert first.handle(Failed(Renew(1, 2, ""), "no such folder")) == []
        now = first.machine.deadline()
    assert kinds(first.effects) == [StepDown]
    assert now == pytest.approx(100.0 + LEASE * (1 - MARGIN))
    assert first.handle(Tick(), now + 1) == []
    assert first.machine.deadline() is None


def test_an_answer_after_the_lease_does_not_revive_it(first: Bench) -> None:
    acting(first)
    first.handle(Tick(), 101.0)
    assert kinds(first.handle(Done(Renew(1, 1, ""), NewestClaim(1)), 103.7)) == [StepDown]


def test_a_process_that_sees_a_newer_claim_steps_down(first: Bench) -> None:
    acting(first)
    first.handle(Tick(), 101.0)
    [down] = first.handle(Done(Renew(1, 1, ""), NewestClaim(2)), 101.1)
    assert type(down) is StepDown
    assert "claim 2 is newer than this process's claim 1" in down.why


def test_a_standby_leaves_the_first_claim_to_others_for_a_lease(standby: Bench) -> None:
    standby.handle(Tick(), 100.0)
    assert standby.handle(looked(NOBODY)) == []
    while kinds(standby.effects) != [Acquire]:
        standby.handle(Tick(), standby.machine.deadline())
        standby.handle(looked(NOBODY))
    assert standby.now == pytest.approx(100.0 + LEASE * (1 + MARGIN))


def test_a_standby_waits_while_the_claim_is_renewed(standby: Bench) -> None:
    standby.handle(Tick(), 100.0)
    for renewals in range(40):
        assert standby.handle(looked(held(3, renewals // 2))) == []
        assert kinds(standby.handle(Tick(), standby.machine.deadline())) == [Look]


def test_a_standby_takes_over_a_lease_after_the_last_change(standby: Bench) -> None:
    standby.handle(Tick(), 100.0)
    standby.handle(looked(held(3)), 100.3)
    while kinds(standby.effects) != [Acquire]:
        standby.handle(Tick(), standby.machine.deadline())
        standby.handle(looked(held(3)))
    assert standby.effects[0].number == 4
    assert standby.now == pytest.approx(100.3 + LEASE * (1 + MARGIN))
    [activate] = standby.handle(Done(Acquire(4, "")))
    assert activate.waited_seconds == pytest.approx(LEASE * (1 + MARGIN))


def test_a_longer_lease_of_the_holder_is_respected(standby: Bench) -> None:
    standby.handle(Tick(), 100.0)
    standby.handle(looked(held(3, lease=20.0)))
    while kinds(standby.effects) != [Acquire]:
        standby.handle(Tick(), standby.machine.deadline())
        standby.handle(looked(held(3, lease=20.0)))
    assert standby.now >= 122.0


def test_a_read_that_began_too_early_proves_nothing(standby: Bench) -> None:
    """It took long, and the claim may have been renewed since."""
    standby.handle(Tick(), 100.0)
    standby.handle(looked(held(3)))
    standby.handle(Tick(), standby.machine.deadline())
    assert kinds(standby.handle(looked(held(3)), 110.0)) == [Look]
    assert kinds(standby.handle(looked(held(3)), 110.0)) == [Acquire]


def test_a_process_that_loses_the_race_keeps_waiting(standby: Bench) -> None:
    standby.handle(Tick(), 100.0)
    standby.handle(looked(NewestLease(3, "other", 0, LEASE, "released")))
    assert kinds(standby.effects) == [Acquire]
    assert kinds(standby.handle(Failed(Acquire(4, ""), "another process was faster"))) == [Note]
    assert standby.machine.state.phase == "waiting"
    assert kinds(standby.handle(Tick(), standby.machine.deadline())) == [Look]
    assert standby.handle(looked(held(4))) == []


@pytest.mark.parametrize(("condition", "order"), [("released", Acquire), ("finished", StandDown)])
def test_a_released_claim_is_taken_over_at_once(
    standby: Bench, condition: Any, order: type
) -> None:
    standby.handle(Tick(), 100.0)
    assert kinds(standby.handle(looked(NewestLease(3, "a", 9, LEASE, condition)))) == [order]


def test_a_finished_run_is_not_continued(first: Bench) -> None:
    """Otherwise, a process that restarts late would hide the run's end from its launcher."""
    first.handle(Tick(), 100.0)
    assert kinds(first.handle(looked(NewestLease(3, "a", 9, LEASE, "finished")))) == [StandDown]


def test_a_plain_start_that_has_waited_ends_with_the_run(first: Bench) -> None:
    first.handle(Tick(), 100.0)
    first.handle(looked(held(3)))
    first.handle(Tick(), first.machine.deadline())
    assert kinds(first.handle(looked(NewestLease(3, "a", 9, LEASE, "finished")))) == [StandDown]


@pytest.mark.parametrize("finished", [False, True])
def test_a_process_that_ends_releases_its_claim(first: Bench, finished: bool) -> None:
    acting(first)
    [back] = first.handle(HolderLeaves(finished), 100.5)
    assert (type(back), back.number, back.finished) == (GiveBack, 1, finished)
    assert not first.machine.holds(100.5)


def test_a_standby_that_ends_has_no_claim_to_release(standby: Bench) -> None:
    standby.handle(Tick(), 100.0)
    assert standby.handle(HolderLeaves(False)) == []


def test_storage_that_has_lost_claims_is_not_trusted(standby: Bench) -> None:
    """An empty mount point must not lead to a second first claim."""
    standby.handle(Tick(), 100.0)
    standby.handle(looked(held(3)))
    for _ in range(100):
        standby.handle(Tick(), standby.machine.deadline())
        assert Acquire not in kinds(standby.handle(looked(NOBODY)))
    assert standby.machine.state.troubled


def test_unreachable_storage_is_logged_once(standby: Bench) -> None:
    standby.handle(Tick(), 100.0)
    notes = []
    for _ in range(20):
        notes += standby.handle(look_failed("stale file handle"))
        standby.handle(Tick(), standby.machine.deadline())
    assert len(notes) == 1
    standby.handle(looked(held(3)))
    standby.handle(Tick(), standby.machine.deadline())
    assert len(standby.handle(look_failed("stale file handle"))) == 1


class Storage:
    """The claims, as all processes see them."""

    def __init__(self) -> None:
        self.claims: dict[int, tuple[str, int, Any]] = {}

    def standing(self) -> NewestLease:
        if not self.claims:
            return NOBODY
        number = max(self.claims)
        nonce, renewals, condition = self.claims[number]
        return NewestLease(number, nonce, renewals, LEASE, condition)

    def carry_out(self, process: str, order: Any) -> Any:
        match order:
            case Look():
                return Done(order, self.standing())
            case Acquire(number):
                if number in self.claims:
                    return Failed(order, "it exists")
                self.claims[number] = (process, 0, "held")
                return Done(order)
            case Renew(number, renewals):
                self.claims[number] = (process, renewals, "held")
                return Done(order, NewestClaim(max(self.claims)))
            case GiveBack(number, finished):
                renewals = self.claims[number][1]
                self.claims[number] = (process, renewals, "finished" if finished else "released")
                return None


class Contenders:
    """Processes with separate clocks, slow storage, random pauses and crashes."""

    def __init__(self, seed: int, count: int) -> None:
        self.rng = random.Random(seed)
        self.storage = Storage()
        self.now = 0.0
        self.queue: list[tuple[float, int, Any]] = []
        self.planned = 0
        self.slow = self.rng.choice([0.0, 0.1, 1.0, LEASE])
        self.fails = self.rng.choice([0.0, 0.05, 0.4])
        self.machines: dict[str, ShardLeaseMachine] = {}
        self.clocks: dict[str, tuple[float, float]] = {}
        self.paused: dict[str, float] = {}
        self.seen: Counter[str] = Counter()
        for number in range(count):
            self.begin(waits=number > 0)

    def begin(self, *, waits: bool) -> None:
        name = f"process-{len(self.clocks)}"
        rate = 1 + self.rng.choice([0.0, 0.04, -0.04])
        self.clocks[name] = (self.rng.uniform(0.0, 1e4), rate)
        self.machines[name] = ShardLeaseMachine(name, LEASE, waits=waits)
        self.at(0.0, lambda: self.tell(name, Tick()))

    def at(self, delay: float, what: Any) -> None:
        self.planned += 1
        heapq.heappush(self.queue, (self.now + delay, self.planned, what))

    def clock(self, name: str) -> float:
        offset, rate = self.clocks[name]
        return offset + self.now * rate

    def tell(self, name: str, event: Any) -> None:
        machine = self.machines.get(name)
        if machine is None:
            return
        if self.now < self.paused.get(name, 0.0):
            self.at(self.paused[name] - self.now, lambda: self.tell(name, event))
            return
        effects = machine.handle(self.clock(name), event)
        machine.check()
        for effect in effects:
            self.seen[type(effect).__name__] += 1
            if isinstance(effect, Look | Acquire | Renew | GiveBack):
                self.order(name, effect)
        self.plan(name)
        self.one_acts()

    def plan(self, name: str) -> None:
        machine = self.machines[name]
        deadline = machine.deadline()
        if machine.state.phase == "over":
            del self.machines[name]  # its supervisor restarts it, and it waits
            self.at(self.rng.uniform(0.5, 8.0), lambda: self.begin(waits=False))
        elif deadline is not None:
            offset, rate = self.clocks[name]
            delay = max(0.0, (deadline - offset) / rate - self.now) + 1e-9
            self.at(delay, lambda: self.tell(name, Tick()))

    def order(self, name: str, order: Any) -> None:
        fails = self.rng.random() < self.fails and not isinstance(order, GiveBack)
        reached = self.rng.random() < 0.5

        def reach() -> None:
            answer = self.storage.carry_out(name, order) if reached or not fails else None
            if fails:
                answer = Failed(order, "the storage fails")
            if answer is not None:
                self.at(self.rng.uniform(0.0, self.slow), lambda: self.tell(name, answer))

        self.at(self.rng.uniform(0.0, self.slow), reach)

    def one_acts(self) -> None:
        acting = [n for n, m in self.machines.items() if m.holds(self.clock(n))]
        assert len(acting) <= 1, f"{acting} act at once at {self.now:.3f}"

    def mishap(self) -> None:
        if not self.machines:
            return
        name = self.rng.choice(list(self.machines))
        kind = self.rng.choice(["pause", "pause", "crash", "leave"])
        if kind == "pause":
            self.paused[name] = self.now + self.rng.uniform(0.0, 3 * LEASE)
        elif kind == "crash":
            del self.machines[name]
            self.at(self.rng.uniform(0.5, 8.0), lambda: self.begin(waits=False))
        else:
            self.tell(name, HolderLeaves(False))

    def run(self, until: float, mishaps: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self.queue)
            self.one_acts()
            what()
            if self.rng.random() < mishaps:
                self.mishap()
        self.now = until
        self.one_acts()

    def acting(self) -> list[str]:
        return [n for n, m in self.machines.items() if m.holds(self.clock(n))]


@pytest.mark.parametrize("count", [2, 3])
def test_two_processes_never_act_at_once_and_one_finally_does(count: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        world = Contenders(seed, count)
        world.run(100.0, mishaps=0.02)
        world.slow = world.fails = 0.0
        world.run(100.0 + 8 * LEASE, mishaps=0.0)
        assert len(world.acting()) == 1, f"seed {seed}"
        seen += world.seen
    assert min(seen[k] for k in ("Activate", "StepDown", "GiveBack", "Note", "Renew")) > 100, seen


def test_the_model_notices_a_machine_that_believes_a_late_answer() -> None:
    """The check above would fail if leases were counted from the answer to a renewal."""
    with LATE_ANSWER.broken(), pytest.raises(AssertionError, match="act at once"):
        [Contenders(seed, 2).run(100.0, mishaps=0.02) for seed in range(300)]
