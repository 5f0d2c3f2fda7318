"""Rule 20: H and τ follow the links, beside a model of what the docs promise of it.

Written from the rule, the how-to and the settings' docs alone. A plan is H and τ from a tick on; of
those that a shard has heard, the one of the highest number holds from its tick on. What links carry
is plain arithmetic: P bodies in the coarsest codec and P copies in H steps.

`python -m outside.test_revisions FIRST END` (in `tests`) tries more seeds and names the bad.
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

from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.revisions import AdaptLimits, Demand, Revision
from decoupled_diloco.simulate import LearnerSpec
from decoupled_diloco.simulate.crowd import Crowd

LADDER = (("bf16", 16.0), ("int8", 8.125), ("int4", 4.125), ("int2", 2.125))
FRAGMENT = 4e6
COPY = 0.5 * FRAGMENT
"""Bytes: in fp32, and of a copy, which goes down in bf16."""

LIMITS = AdaptLimits((8, 64), (1, 16))
SEEDS = 6


class Plans:
    """Every plan that is named and heard, and the ticks for which each fragment is due by them."""

    def __init__(self, world: Crowd, *, deaf: bool = False) -> None:
        self.world, self.options, self.deaf = world, world.options, deaf
        first = Revision(0, 0, self.options.period, self.options.overlap)
        self.named, self.named_at = {0: first}, [0.0]
        self.heard: dict[str, list[Revision]] = defaultdict(lambda: [first])
        self.clock: dict[str, int] = defaultdict(int)
        self.due: dict[int, list[int]] = defaultdict(list)
        self.again: dict[str, set[int]] = defaultdict(set)
        self.opened: dict[int, list[int]] = defaultdict(list)
        self.folded: dict[str, list[float]] = defaultdict(list)
        self.too_late: list[str] = []
        self.said: Counter[type] = Counter()
        self.wrong: list[str] = []
        world.recorders.append(self)

    @property
    def newest(self) -> Revision:
        return self.named[max(self.named)]

    @property
    def changes(self) -> list[str]:
        plans = zip(self.named_at, self.named.values(), strict=True)
        return [f"t={at:.0f}: H={plan.period} τ={plan.overlap}" for at, plan in plans]

    def holds(self, who: str, tick: int) -> Revision:
        return max((r for r in self.heard[who] if r.tick <= tick), key=lambda r: r.number)

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if isinstance(event, ev.Received) and isinstance(event.message, Revision):
            self._hears(who, event.message)
        for effect in effects:
            match effect:
                case do.Send(message=message) | do.Broadcast(message=message):
                    self.said[type(message)] += 1
                    if isinstance(message, Revision):
                        self._names(who, message)
                case do.Hold():
                    self._complain(f"{who} holds: {effect.why}")
                case do.Fold(learner=learner):
                    self.folded[learner].append(now)
            if who.startswith("shard"):
                self._rounds(who, effect)

    def _complain(self, text: str) -> None:
        self.wrong.append(f"t={self.world.now:.2f}: {text}")

    def _names(self, who: str, plan: Revision) -> None:
        if plan.number in self.named:
            if plan != self.named[plan.number]:
                self._complain(f"{who}: two plans, {plan!r} and {self.named[plan.number]!r}")
            return
        before, limits = self.newest, self.options.adapt
        if limits is None or who != "coordinator" or plan.number != before.number + 1:
            self._complain(f"{who} may not name {plan!r} after {before!r}")
            return
        (least, most), (shortest, longest) = limits.period, limits.overlap
        if not (least <= plan.period <= most and shortest <= plan.overlap <= longest):
            self._complain(f"{plan!r} is not within {limits}")
        if plan.overlap >= plan.period:
            self._complain(f"{plan!r}: a fragment is sent again before it is back")
        if plan.tick < before.tick or (plan.period, plan.overlap) == (
            before.period,
            before.overlap,
        ):
            self._complain(f"{plan!r} after {before!r}")
        self.named[plan.number] = plan
        self.named_at.append(self.world.now)

    def _hears(self, who: str, plan: Revision) -> None:
        if self.named.get(plan.number) != plan:
            self._complain(f"{who} hears {plan!r}, which is not the one that was named")
        if who.startswith("shard") and plan.tick <= self.clock[who]:
            self.too_late.append(f"{who} hears {plan!r} at step {self.clock[who]}")
        if plan not in self.heard[who] and not self.deaf:
            self.heard[who].append(plan)

    def _rounds(self, who: str, effect: Any) -> None:
        match effect:
            case do.ClockAdvanced(clock):
                for tick in range(self.clock[who] + 1, clock + 1):
                    self._passes(who, tick)
                self.clock[who] = clock
            case do.RoundFinished(fragment=fragment, verdict="abandoned"):
                self.again[who].add(fragment)
            case do.RoundOpened(fragment=fragment, tick=tick, closing=False):
                if tick not in self.due[fragment][-1:]:
                    plan, due = self.holds(who, tick), self.due[fragment][-2:]
                    self._complain(f"{who} opens {fragment} for {tick}, due {due} by {plan!r}")
                if tick in self.opened[fragment][-1:]:
                    self._complain(f"{who} opens {fragment} twice for {tick}")
                self.opened[fragment].append(tick)

    def _passes(self, who: str, tick: int) -> None:
        """A fragment is due when t mod H = ⌊p·H/P⌋, and again at once if it was given up."""
        period, count = self.holds(who, tick).period, self.options.fragments
        for p in self.options.owned(int(who.removeprefix("shard-"))):
            if p in self.again[who] or tick % period == p * period // count:
                self.due[p].append(tick)
        self.again[who] = set()


class Sites:
    """Learners by what their links carry: the steps of a body in the coarsest codec, of a copy."""

    def __init__(
        self,
        bodies: Sequence[float],
        copies: Sequence[float] = (),
        *,
        seed: int = 0,
        step: float = 1.0,
        deaf: bool = False,
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
        self.plans = Plans(self.world, deaf=deaf)

    def run(self, steps: float) -> None:
        self.world.run(until=self.world.now + steps * self.step)

    def becomes(self, learner: Any, body: float, copy: float | None = None) -> None:
        """From now on its link takes so many steps for each."""
        copy = copy or self.took[learner.name][1]
        self.took[learner.name] = (body, copy)
        clockwork = self.world.clockwork
        learner.link.stretch("up", self.body / (body * self.step), clockwork)
        learner.link.stretch("down", COPY / (copy * self.step), clockwork)

    def needs(self) -> float:
        """Steps in which the link of the last learner that must be heard carries all fragments."""
        limits = self.options.adapt
        assert limits
        each = sorted(self.options.fragments * max(self.took[one.name]) for one in self.learners)
        return each[math.ceil(limits.carried_by * len(each) - 1e-9) - 1]

    def least(self) -> int:
        """The smallest H, doubled from the least, in which they are carried."""
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
                    self.plans._complain(f"{host.name} goes by {plan}, and not by {newest!r}")

    def are_carried(self) -> None:
        """The plan is one that the links carry, and not much longer than it must be."""
        limits, plan, needs = self.options.adapt, self.plans.newest, self.needs()
        assert limits
        if plan.period < min(needs, limits.period[1]):
            self.plans._complain(f"H={plan.period}, and links need {needs:.1f}")
        if plan.period > 4 * self.least():
            self.plans._complain(f"H={plan.period}, and {self.least()} would do for {needs:.1f}")

    def settled(self, steps: float) -> None:
        """Nothing has changed for so long. Not asked for where no H within the limits would do."""
        limits = self.options.adapt
        assert limits
        since = (self.world.now - self.plans.named_at[-1]) / self.step
        if since < steps and self.needs() <= 0.95 * limits.period[1]:
            self.plans._complain(f"changed {since:.0f} steps ago: {self.plans.changes}")

    def nothing_is_wrong(self) -> None:
        assert not self.plans.wrong, (self.plans.wrong[:5], self.plans.changes)


class Weather(Sites):
    """Random settings; links that change, learners that crash and come back; then calm."""

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
            world.crash(learner, silent=silent)  # one that nobody noticed is not let in again
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
        """Long enough for some revisions, one after the other."""
        for learner in self.learners:
            self.world.restart(learner)
            self.becomes(learner, *self.took[learner.name])
        assert self.options.adapt
        most = self.options.adapt.period[1]
        self.run(100 + 12 * most)
        self.hold_the_newest()
        self.are_carried()
        self.settled(3 * most)
        self._all_are_heard(3 * most)

    def _all_are_heard(self, steps: float) -> None:
        """No due fragment is passed over, and whose link has room is in the rounds.

        In every second one at least: without a grace window, who reports just after the tick is
        asked for what it missed the last time (rule 3).
        """
        period, since = self.plans.newest.period, self.world.now - steps * self.step
        for p, due in self.plans.due.items():
            if self.plans.opened[p][-1] < due[-1] - 2 * period:
                self.plans._complain(f"{p} is due for {due[-3:]}: {self.plans.opened[p][-3:]}")
        nominal = self.options.fragments * steps / period
        for learner in self.learners:
            heard = sum(now > since for now in self.plans.folded[learner.name])
            busy = self.options.fragments * max(self.took[learner.name])
            if busy <= 0.5 * period and heard < 0.4 * nominal:
                self.plans._complain(f"{learner.name} is heard {heard} times of {nominal:.0f}")


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
    """Of several shards each finds out by itself, and it takes longer."""
    sites = Sites([body] * 3, ladder=ladder, shards=shards)
    sites.run(400 if shards == 1 else 950)
    sites.hold_the_newest()
    sites.are_carried()
    sites.settled(100)
    sites.nothing_is_wrong()
    assert body <= sites.plans.newest.overlap <= 4 * math.ceil(body)
    assert not sites.plans.too_late


@pytest.mark.parametrize("copy", [0.5, 1.2, 5.0])
def test_rule_20_what_comes_down_counts_too(copy: float) -> None:
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


def test_rule_20_a_quarter_is_of_those_that_are_there() -> None:
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
def test_rule_20_links_that_alternate_quickly_change_little(gap: int, ladder: Any) -> None:
    """More than a hundred times better or worse."""
    sites = Sites([0.1] * 2, ladder=ladder)
    for turn in range(600 // gap):
        for learner in sites.learners:
            sites.becomes(learner, 3.0 if turn % 2 else 0.1)
        sites.run(gap)
    assert len(sites.plans.changes) <= 1 + 4, sites.plans.changes
    sites.nothing_is_wrong()


def test_rule_20_who_joins_again_and_again_is_no_reason() -> None:
    """Who comes takes whole copies, which are twice as large."""
    sites = Sites([0.1] * 3, [0.5] * 3)
    for turn in range(12):
        sites.run(30)
        sites.world.crash(sites.learners[turn % 3])
        sites.run(5)
        sites.world.restart(sites.learners[turn % 3])
    assert len(sites.plans.named) == 1, sites.plans.changes


def test_rule_20_observers_count_for_nothing() -> None:
    sites = Sites([0.1] * 2, observers=[6.0] * 4)
    sites.run(300)
    assert len(sites.plans.named) == 1, sites.plans.changes


@pytest.mark.parametrize("body", [0.1, 3.0])
def test_rule_20_a_fixed_run_says_nothing_of_it(body: float) -> None:
    sites = Sites([body] * 3, adapt=None, shards=2)
    sites.run(300)
    assert not {Revision, Demand, msg.CopyTook} & set(sites.plans.said)
    sites.hold_the_newest()
    sites.nothing_is_wrong()


class Lags:
    """At which step a fragment is applied, counted from that of its snapshot."""

    def __init__(self, world: Crowd) -> None:
        self.steps: Counter[str] = Counter()
        self.sent: dict[tuple[str, int], int] = {}
        self.lags: Counter[int] = Counter()
        world.recorders.append(self)

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        self.steps[who] += isinstance(event, ev.StepFinished)
        for effect in effects:
            if isinstance(effect, do.Apply) and (who, effect.fragment) in self.sent:
                self.lags[self.steps[who] - self.sent.pop((who, effect.fragment))] += 1
            elif isinstance(effect, do.Snapshot):
                self.sent[who, effect.fragment] = self.steps[who]


@pytest.mark.parametrize("body", [0.5, 1.0, 3.0])
def test_rule_20_at_tau_is_at_the_tau_that_holds(body: float) -> None:
    sites = Sites([body] * 3, apply="at_tau")
    lags = Lags(sites.world)
    sites.run(250)
    lags.lags.clear()
    sites.run(100)
    assert set(lags.lags) == {sites.plans.newest.overlap}, (lags.lags, sites.plans.changes)


def test_the_model_notices_rounds_by_another_plan() -> None:
    """It hears of none itself."""
    sites = Sites([3.0] * 3, deaf=True)
    sites.run(200)
    assert any("opens" in text for text in sites.plans.wrong)


def test_the_model_notices_who_does_not_hear() -> None:
    sites = Sites([3.0] * 3)
    learner = sites.learners[1]
    hears = learner.received

    def received(connection: Any, message: Any) -> None:
        if not isinstance(message, Revision):
            hears(connection, message)

    learner.received = received
    sites.run(200)
    sites.hold_the_newest()
    assert ["l1 goes by" in text for text in sites.plans.wrong] == [True]


def test_the_model_notices_another_plan_of_the_same_number() -> None:
    sites = Sites([3.0] * 3)
    shard = sites.world.shards[0]
    tells = shard.tell

    def tell(event: Any) -> None:
        if isinstance(event, ev.Received) and isinstance(event.message, Revision):
            event = replace(event, message=replace(event.message, tick=event.message.tick + 1))
        tells(event)

    shard.tell = tell
    sites.run(200)
    assert any("two plans" in text for text in sites.plans.wrong)


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        if found := wrong(number):
            print(f"seed {number}: {found}", flush=True)


def test_rule_20_nothing_flaps_where_no_plan_would_do() -> None:
    """A little more is due than the greatest period carries: answers wait for each other."""
    sites = Sites([4.05] * 3, ladder=LADDER[:1], adapt=AdaptLimits((8, 32), (1, 16)))
    sites.run(3000)
    assert len(sites.plans.changes) <= 3, sites.plans.changes


def test_rule_20_a_body_that_is_too_late_to_be_merged_is_measured() -> None:
    """It is late by more versions than are merged, in the first codec: so the next one is sent."""
    sites = Sites([0.1] * 2 + [36.0] * 2)
    sites.run(1400)
    members = sites.world.shards[0].machine.state.members
    rungs = {name: member.uplink.rung for name, member in members.items()}
    assert list(rungs.values()) == [0, 0, 3, 3], rungs
