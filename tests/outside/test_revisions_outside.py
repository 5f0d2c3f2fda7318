"""Compare rule 20 (H and τ follow the links) with a model of what the docs promise.

The model was written only from the rule, the how-to and the settings' docs. A plan sets H and τ
from a tick on. Of the plans that a shard has received, the one with the highest number holds from
its tick on. The capacity of links is plain arithmetic: P payloads in the coarsest codec and P
copies in H steps.

`python -m outside.test_revisions_outside FIRST END` (in `tests`) tries more seeds, and prints those
that fail.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from decoupled_diloco.protocol import Options, messages
from decoupled_diloco.protocol.adapt import AdaptLimits
from decoupled_diloco.protocol.messages import Demand, Revision
from decoupled_diloco_lab.simulate import LearnerSpec
from decoupled_diloco_lab.simulate.crowd import Crowd

LADDER = (("bf16", 16.0), ("int8", 8.125), ("int4", 4.125), ("int2", 2.125))
FRAGMENT = 4e6
COPY = 0.5 * FRAGMENT
"""Bytes of a fragment in fp32, and of a copy, which is sent in bf16."""

LIMITS = AdaptLimits((8, 64), (1, 16))
SEEDS = 6


class Plans:
    """All plans that were sent and received, and the ticks at which fragments are due by them."""

    def __init__(self, world: Crowd, *, ignore_plans: bool = False) -> None:
        self.world, self.options, self.ignore_plans = world, world.options, ignore_plans
        first = Revision(0, 0, self.options.period, self.options.overlap)
        self.named, self.named_at = {0: first}, [0.0]
        self.received: dict[str, list[Revision]] = defaultdict(lambda: [first])
        self.clock: dict[str, int] = defaultdict(int)
        self.due: dict[int, list[int]] = defaultdict(list)
        self.again: dict[str, set[int]] = defaultdict(set)
        self.opened: dict[int, list[int]] = defaultdict(list)
        self.folded: dict[str, list[float]] = defaultdict(list)
        self.too_late: list[str] = []
        self.sent: Counter[type] = Counter()
        self.wrong: list[str] = []
        world.recorders.append(self)

    @property
    def newest(self) -> Revision:
        return self.named[max(self.named)]

    @property
    def changes(self) -> list[str]:
        plans = zip(self.named_at, self.named.values(), strict=True)
        return [f"t={at:.0f}: H={plan.period} τ={plan.overlap}" for at, plan in plans]

    def holds(self, process: str, tick: int) -> Revision:
        return max((r for r in self.received[process] if r.tick <= tick), key=lambda r: r.number)

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if isinstance(event, messages.Received) and isinstance(event.message, Revision):
            self._receives(process, event.message)
        for effect in effects:
            match effect:
                case messages.Send(message=message) | messages.Broadcast(message=message):
                    self.sent[type(message)] += 1
                    if isinstance(message, Revision):
                        self._names(process, message)
                case messages.Hold():
                    self._complain(f"{process} holds: {effect.why}")
                case messages.Fold(learner=learner):
                    self.folded[learner].append(now)
            if process.startswith("shard"):
                self._rounds(process, effect)

    def _complain(self, text: str) -> None:
        self.wrong.append(f"t={self.world.now:.2f}: {text}")

    def _names(self, process: str, plan: Revision) -> None:
        if plan.number in self.named:
            if plan != self.named[plan.number]:
                self._complain(f"{process}: two plans, {plan!r} and {self.named[plan.number]!r}")
            return
        before, limits = self.newest, self.options.adapt
        if limits is None or process != "coordinator" or plan.number != before.number + 1:
            self._complain(f"{process} must not send {plan!r} after {before!r}")
            return
        (least, most), (shortest, longest) = limits.period, limits.overlap
        if not (least <= plan.period <= most and shortest <= plan.overlap <= longest):
            self._complain(f"{plan!r} is not within {limits}")
        if plan.overlap >= plan.period:
            self._complain(f"{plan!r}: a fragment is sent again before its copy is applied")
        if plan.tick < before.tick or (plan.period, plan.overlap) == (
            before.period,
            before.overlap,
        ):
            self._complain(f"{plan!r} after {before!r}")
        self.named[plan.number] = plan
        self.named_at.append(self.world.now)

    def _receives(self, process: str, plan: Revision) -> None:
        if self.named.get(plan.number) != plan:
            self._complain(f"{process} receives {plan!r}, which is not the plan that was sent")
        if process.startswith("shard") and plan.tick <= self.clock[process]:
            self.too_late.append(f"{process} receives {plan!r} at step {self.clock[process]}")
        if plan not in self.received[process] and not self.ignore_plans:
            self.received[process].append(plan)

    def _rounds(self, process: str, effect: Any) -> None:
        match effect:
            case messages.ClockAdvanced(clock):
                for tick in range(self.clock[process] + 1, clock + 1):
                    self._passes(process, tick)
                self.clock[process] = clock
            case messages.RoundFinished(fragment=fragment, verdict="abandoned"):
                self.again[process].add(fragment)
            case messages.RoundOpened(fragment=fragment, tick=tick, closing=False):
                if tick not in self.due[fragment][-1:]:
                    plan, due = self.holds(process, tick), self.due[fragment][-2:]
                    self._complain(f"{process} opens {fragment} for {tick}, due {due} by {plan!r}")
                if tick in self.opened[fragment][-1:]:
                    self._complain(f"{process} opens {fragment} twice for {tick}")
                self.opened[fragment].append(tick)

    def _passes(self, process: str, tick: int) -> None:
        """A fragment is due when t mod H = ⌊p·H/P⌋, and again at once if it was abandoned."""
        period, count = self.holds(process, tick).period, self.options.fragments
        for p in self.options.owned(int(process.removeprefix("shard-"))):
            if p in self.again[process] or tick % period == p * period // count:
                self.due[p].append(tick)
        self.again[process] = set()


class Sites:
    """Learners with links whose speed is given in steps per payload and per copy.

    The payload is in the coarsest codec.
    """

    def __init__(
        self,
        bodies: Sequence[float],
        copies: Sequence[float] = (),
        *,
        seed: int = 0,
        step: float = 1.0,
        ignore_plans: bool = False,
        observers: Sequence[float] = (),
        **settings: Any,
    ) -> None:
        given: dict[str, Any] = {"fragments": 8, "period": 8, "overlap": 2, "ladder": LADDER}
        options = Options(**{**given, "adapt": LIMITS, **settings})
        self.options, self.step = options, step
        self.body = (options.ladder or LADDER[:1])[-1][1] / 32 * FRAGMENT
        specs = [
            LearnerSpec(f"l{n}", step_seconds=step, latency=0.01, joins_at=0.1 * n)
            for n in range(len(bodies))
        ]
        watching = [
            LearnerSpec(f"o{n}", role="observer", down_bytes_per_second=COPY / copy)
            for n, copy in enumerate(observers)
        ]
        sizes = [FRAGMENT] * options.fragments
        self.world = Crowd(
            options, [*specs, *watching], seed, fragment_bytes=sizes, checks=seed % 4 == 1
        )
        self.learners = [self.world.learners[spec.name] for spec in specs]
        self.took: dict[str, tuple[float, float]] = {}
        for learner, body, copy in zip(
            self.learners, bodies, copies or [0.01] * len(bodies), strict=True
        ):
            learner.link.up_bytes_per_second = self.body / (body * step)
            learner.link.down_bytes_per_second = COPY / (copy * step)
            self.took[learner.name] = (body, copy)
        self.plans = Plans(self.world, ignore_plans=ignore_plans)

    def run(self, steps: float) -> None:
        self.world.run(until=self.world.now + steps * self.step)

    def becomes(self, learner: Any, body: float, copy: float | None = None) -> None:
        """Change the number of steps that a learner's link takes for a payload and a copy."""
        copy = copy or self.took[learner.name][1]
        self.took[learner.name] = (body, copy)
        clockwork = self.world.clockwork
        learner.link.stretch("up", self.body / (body * self.step), clockwork)
        learner.link.stretch("down", COPY / (copy * self.step), clockwork)

    def needs(self) -> float:
        """Return the steps in which enough links carry all fragments."""
        limits = self.options.adapt
        assert limits
        each = sorted(self.options.fragments * max(self.took[one.name]) for one in self.learners)
        return each[math.ceil(limits.carried_by * len(each) - 1e-9) - 1]

    def least(self) -> int:
        """Return the smallest H, doubled from the minimum, in which all fragments are carried."""
        limits = self.options.adapt
        assert limits
        least, most = limits.period
        while least < min(self.needs(), most):
            least *= 2
        return min(least, most)

    def hold_the_newest(self) -> None:
        newest = self.plans.newest
        for host in (*self.world.shards, *self.world.learners.values()):
            if host.alive:
                plan = (host.machine.options.period, host.machine.options.overlap)
                if plan != (newest.period, newest.overlap):
                    self.plans._complain(f"{host.name} follows {plan}, not {newest!r}")

    def are_carried(self) -> None:
        """Check that the links carry the plan, and that it is not much longer than necessary."""
        limits, plan, needs = self.options.adapt, self.plans.newest, self.needs()
        assert limits
        if plan.period < min(needs, limits.period[1]):
            self.plans._complain(f"H={plan.period}, but links need {needs:.1f}")
        if plan.period > 4 * self.least():
            text = f"H={plan.period}, but {self.least()} would suffice for {needs:.1f}"
            self.plans._complain(text)

    def settled(self, steps: float) -> None:
        """Check that no plan was sent for some steps, if an H within the limits suffices."""
        limits = self.options.adapt
        assert limits
        since = (self.world.now - self.plans.named_at[-1]) / self.step
        if since < steps and self.needs() <= 0.95 * limits.period[1]:
            self.plans._complain(f"changed {since:.0f} steps ago: {self.plans.changes}")

    def nothing_is_wrong(self) -> None:
        assert not self.plans.wrong, (self.plans.wrong[:5], self.plans.changes)


class Weather(Sites):
    """Random settings, with links that change and learners that crash and come back; then calm."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(f"weather {seed}")
        fragments = rng.randint(4, 24)
        period = rng.choice([fragments, fragments, 24, rng.randint(fragments // 2, 24)])
        least = rng.choice([period, period, period // 2])
        most = max(period, min(64, least * rng.choice([2, 4, 4, 8])))
        overlap = rng.randint(1, min(3, least - 1)) if least > 1 else 0
        shortest, longest = rng.choice([overlap, 1, 0]), rng.choice([overlap, 4, 16])
        learners = rng.randint(2, 8)
        self.scale = fragments, most
        super().__init__(
            [self._body() for _ in range(learners)],
            [self._copy() for _ in range(learners)],
            seed=seed,
            step=rng.choice([1.0, 1.0, 0.3]),
            fragments=fragments,
            period=period,
            overlap=overlap,
            adapt=AdaptLimits(
                (least, most),
                (min(shortest, overlap), max(longest, overlap)),
                rng.choice([0.75, 0.75, 1.0, 0.5]),
            ),
            ladder=rng.choice([LADDER, LADDER, LADDER[:1], LADDER[1:3]]),
            shards=rng.choice([1, 1, 2, 3]),
            quorum=rng.choice([1, 1, 2]),
            apply=rng.choice(["on_arrival", "at_tau"]),
            alignment=rng.choice(["overwrite", "carry"]),
            participants=rng.choice(["reported", "all"]),
        )

    def _body(self) -> float:
        fragments, most = self.scale
        return math.exp(self.rng.uniform(math.log(0.02), math.log(1.2 * most / fragments)))

    def _copy(self) -> float:
        return self._body() if self.rng.random() < 0.3 else 0.02

    def mishap(self) -> None:
        rng, world = self.rng, self.world
        learner, what = rng.choice(self.learners), rng.random()
        steps = rng.uniform(1.0, 40.0)
        if what < 0.6:
            self.becomes(learner, self._body(), self._copy())
        elif what < 0.85 and learner.alive:
            silent = rng.random() < 0.3
            world.crash(
                learner, silent=silent
            )  # the syncer must notice a silent crash before a rejoin
            world.clockwork.after(15.0 * silent + steps * self.step, world.restart, learner)
        elif what < 0.92:
            world.pause(learner)
            world.clockwork.after(min(steps, 15.0), world.resume, learner)
        else:
            shard = rng.choice(world.shards)
            world.cut(learner, shard)
            world.clockwork.after(min(steps, 15.0), world.heal, learner, shard)

    def blow(self, steps: float) -> None:
        ends = self.world.now + steps * self.step
        while self.world.now < ends:
            self.mishap()
            self.run(self.rng.expovariate(1 / 15))
        self.world.run(until=self.world.now + 60.0)

    def calm(self) -> None:
        """Run without changes long enough for some revisions, then check the result."""
        for learner in self.learners:
            self.world.restart(learner)
            self.becomes(learner, *self.took[learner.name])
        assert self.options.adapt
        most = self.options.adapt.period[1]
        self.run(100 + 12 * most)
        self.hold_the_newest()
        self.are_carried()
        self.settled(3 * most)
        self._all_are_merged(3 * most)

    def _all_are_merged(self, steps: float) -> None:
        """Check that no due fragment is skipped, and that learners with spare capacity take part.

        They must be in every second round at least. Without a grace window, a learner that reports
        just after the tick receives a request for the round that it missed before (rule 3).
        """
        period, since = self.plans.newest.period, self.world.now - steps * self.step
        for p, due in self.plans.due.items():
            if self.plans.opened[p][-1] < due[-1] - 2 * period:
                self.plans._complain(f"{p} is due for {due[-3:]}: {self.plans.opened[p][-3:]}")
        nominal = self.options.fragments * steps / period
        for learner in self.learners:
            merged = sum(now > since for now in self.plans.folded[learner.name])
            busy = self.options.fragments * max(self.took[learner.name])
            if busy <= 0.5 * period and merged < 0.4 * nominal:
                self.plans._complain(f"{learner.name} is merged {merged} times of {nominal:.0f}")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_rule_20_random_schedules(seed: int) -> None:
    found = wrong(seed)
    assert not found, f"seed {seed}: {found}"


def wrong(seed: int) -> list[str]:
    weather = Weather(seed)
    try:
        weather.run(30)
        weather.blow(120)
        weather.calm()
    except AssertionError as error:
        return [str(error)[:500] or "a machine's own check"]
    return [*weather.plans.wrong[:5], str(weather.plans.changes)] if weather.plans.wrong else []


@pytest.mark.parametrize(
    ("body", "shards", "ladder"),
    [
        *((body, 1, LADDER) for body in (0.5, 1.2, 2.5, 5.0)),
        *((body, 1, LADDER[:1]) for body in (0.5, 2.5)),
        *((body, 3, LADDER) for body in (0.5, 5.0)),
    ],
)
def test_rule_20_constant_links_are_carried(body: float, shards: int, ladder: Any) -> None:
    """Each of several shards measures the links by itself, which takes longer."""
    sites = Sites([body] * 3, ladder=ladder, shards=shards)
    sites.run(400 if shards == 1 else 950)
    sites.hold_the_newest()
    sites.are_carried()
    sites.settled(100)
    sites.nothing_is_wrong()
    assert body <= sites.plans.newest.overlap <= 4 * math.ceil(body)
    assert not sites.plans.too_late


@pytest.mark.parametrize("copy", [0.5, 1.2, 5.0])
def test_rule_20_copies_on_the_downlink_count_too(copy: float) -> None:
    sites = Sites([0.05] * 3, [copy] * 3)
    sites.run(500)
    sites.are_carried()
    sites.settled(200)
    sites.nothing_is_wrong()


@pytest.mark.parametrize(("learners", "slow", "body"), [(4, 1, 20.0), (7, 1, 3.0), (8, 2, 3.0)])
def test_rule_20_the_slowest_quarter_does_not_raise_the_period(
    learners: int, slow: int, body: float
) -> None:
    sites = Sites([0.1] * (learners - slow) + [body] * slow)
    sites.run(250)
    assert {plan.period for plan in sites.plans.named.values()} == {8}, sites.plans.changes
    more = Sites([0.1] * (learners - slow - 1) + [body] * (slow + 1))
    more.run(250)
    assert more.plans.newest.period > 8
    more.nothing_is_wrong()


def test_rule_20_a_quarter_is_counted_over_live_learners() -> None:
    sites = Sites([0.1, 0.1, 0.1, 3.0])
    sites.run(100)
    assert sites.plans.newest.period == 8
    sites.world.crash(sites.learners[0])
    sites.run(200)
    assert sites.plans.newest.period == 32, sites.plans.changes
    sites.world.restart(sites.learners[0])
    sites.run(400)
    assert sites.plans.newest.period == 8, sites.plans.changes
    sites.hold_the_newest()
    sites.nothing_is_wrong()


@pytest.mark.parametrize("ladder", [LADDER, LADDER[:1]])
@pytest.mark.parametrize("gap", [3, 10])
def test_rule_20_links_that_alternate_quickly_cause_few_plans(gap: int, ladder: Any) -> None:
    """Every link alternates between two speeds."""
    sites = Sites([0.1] * 2, ladder=ladder)
    for turn in range(600 // gap):
        for learner in sites.learners:
            sites.becomes(learner, 3.0 if turn % 2 else 0.1)
        sites.run(gap)
    assert len(sites.plans.changes) <= 1 + 4, sites.plans.changes
    sites.nothing_is_wrong()


def test_rule_20_learners_that_rejoin_often_cause_no_plan() -> None:
    """A learner that joins fetches whole copies, which are twice as large."""
    sites = Sites([0.1] * 3, [0.5] * 3)
    for turn in range(12):
        sites.run(30)
        sites.world.crash(sites.learners[turn % 3])
        sites.run(5)
        sites.world.restart(sites.learners[turn % 3])
    assert len(sites.plans.named) == 1, sites.plans.changes


def test_rule_20_observers_do_not_count() -> None:
    sites = Sites([0.1] * 2, observers=[6.0] * 4)
    sites.run(300)
    assert len(sites.plans.named) == 1, sites.plans.changes


@pytest.mark.parametrize("body", [0.1, 3.0])
def test_rule_20_a_run_with_fixed_h_and_tau_sends_no_plans(body: float) -> None:
    sites = Sites([body] * 3, adapt=None, shards=2)
    sites.run(300)
    assert not {Revision, Demand, messages.CopyTook} & set(sites.plans.sent)
    sites.hold_the_newest()
    sites.nothing_is_wrong()


class Lags:
    """Counts the steps from a fragment's snapshot until its copy is applied."""

    def __init__(self, world: Crowd) -> None:
        self.steps: Counter[str] = Counter()
        self.sent: dict[tuple[str, int], int] = {}
        self.lags: Counter[int] = Counter()
        world.recorders.append(self)

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        self.steps[process] += isinstance(event, messages.StepFinished)
        for effect in effects:
            if isinstance(effect, messages.Apply) and (process, effect.fragment) in self.sent:
                self.lags[self.steps[process] - self.sent.pop((process, effect.fragment))] += 1
            elif isinstance(effect, messages.Snapshot):
                self.sent[process, effect.fragment] = self.steps[process]


@pytest.mark.parametrize("body", [0.5, 1.0, 3.0])
def test_rule_20_at_tau_applies_at_the_current_tau(body: float) -> None:
    sites = Sites([body] * 3, apply="at_tau")
    lags = Lags(sites.world)
    sites.run(250)
    lags.lags.clear()
    sites.run(100)
    assert set(lags.lags) == {sites.plans.newest.overlap}, (lags.lags, sites.plans.changes)


def test_the_model_notices_rounds_by_another_plan() -> None:
    """The model ignores all plans."""
    sites = Sites([3.0] * 3, ignore_plans=True)
    sites.run(200)
    assert any("opens" in text for text in sites.plans.wrong)


def test_the_model_notices_a_learner_without_the_plan() -> None:
    sites = Sites([3.0] * 3)
    learner = sites.learners[1]
    receives = learner.received

    def received(connection: Any, message: Any) -> None:
        if not isinstance(message, Revision):
            receives(connection, message)

    learner.received = received
    sites.run(200)
    sites.hold_the_newest()
    assert ["l1 follows" in text for text in sites.plans.wrong] == [True]


def test_the_model_notices_another_plan_of_the_same_number() -> None:
    sites = Sites([3.0] * 3)
    shard = sites.world.shards[0]
    handle = shard.handle

    def shifted(event: Any) -> None:
        if isinstance(event, messages.Received) and isinstance(event.message, Revision):
            event = replace(event, message=replace(event.message, tick=event.message.tick + 1))
        handle(event)

    shard.handle = shifted
    sites.run(200)
    assert any("two plans" in text for text in sites.plans.wrong)


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        if found := wrong(number):
            print(f"seed {number}: {found}", flush=True)


def test_rule_20_plans_do_not_flap_if_none_suffices() -> None:
    """Slightly more is due than the longest period carries, so payloads queue."""
    sites = Sites([4.05] * 3, ladder=LADDER[:1], adapt=AdaptLimits((8, 32), (1, 16)))
    sites.run(3000)
    assert len(sites.plans.changes) <= 3, sites.plans.changes


def test_rule_20_a_payload_that_is_too_late_to_merge_is_measured() -> None:
    """In the first codec it is too many versions late, so the next codec is used."""
    sites = Sites([0.1] * 2 + [36.0] * 2)
    sites.run(1400)
    members = sites.world.shards[0].machine.state.members
    rungs = {name: member.uplink.rung for name, member in members.items()}
    assert list(rungs.values()) == [0, 0, 3, 3], rungs
