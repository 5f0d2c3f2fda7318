"""Bounds that every world must keep: delay of copies, memory, and duration of steps.

*Rounds behind.* After faults have ceased, a connected learner applies a published copy at most

    D = 3·q + (8 + 2·n)·w + r + (1 + τ')·ξ

seconds after its publication. A payload that is being fetched finishes first and may be stale by
then. The newest one follows, perhaps by a retry.

* q is the time of all fragments' whole copies through its downlink. That is the longest possible
  queue, in n = ⌈P / ⌈τ·P/H⌉⌉ turns.
* w is the one-way delay with jitter, and r is the retry delay of one second.
* ξ is its longest step, or any learner's longest step if learners wait for each other.
* τ' is τ if copies are applied at τ, otherwise 0.
* H is the shortest, τ' the longest and n the largest that the run's limits allow.

A multi-rank learner needs 1 + n steps more. A plan is for the boundary after the next, and in each
turn an earlier boundary has the ranks fetch their parts. Also w counts twice, because rank 0
requests from the sync ranks.

So a learner holds the version published D seconds ago, or a newer one. A fragment is due once in H
steps of the fastest learner, of ξ_min each. In D seconds no more than ``2 + ⌈D / (H·ξ_min)⌉``
versions of it are published, which bounds the rounds behind. But the next version replaces a whole
copy on the shard. If 2·w ≥ H·ξ_min, a learner can request the copy only then. It is allowed 2·w + r
more for each copy that it requested in vain.

If learners open rounds by themselves, a fragment is due as many times as often as there are
learners, and n is at least c. In a turn at most one difference of each fragment is fetched, and c
of them come before a whole copy.

*Memory.* The number of entries in all containers of a machine's state (`entries`) has a bound. L
learners and O observers have ever been in the run, which has P fragments and S shards:

    shard        12·L + O + P·(12 + 16·L + 32)
    learner      (8 + c)·P + 4·S        c: differences instead of a whole copy

These bounds hold at any time, with any events. A shard's data plane waits only for payloads that
its machine expects.

*Steps.* An undisturbed learner takes its next step within the time of its longest step.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AnySet
from typing import Any

from decoupled_diloco.protocol.copies import RETRY_SECONDS
from decoupled_diloco.protocol.features.partitions import HELD_MAX
from decoupled_diloco.protocol.messages import (
    Broadcast,
    Evict,
    Failed,
    Fetch,
    Install,
    Published,
    StepFinished,
    Unexpect,
    Version,
)
from decoupled_diloco.protocol.norm_gate import SAMPLES_MAX
from decoupled_diloco.protocol.syncer_machine import LINGER_SECONDS
from decoupled_diloco_lab.simulate.hosts import LearnerHost, ShardHost
from decoupled_diloco_lab.simulate.system import System

MEMORY_CHECK_EVENTS = 64
"""Memory is counted once per this number of events."""

SLACK_SECONDS = 0.1
"""Allowance for late ticks and for merging."""


class Bounds:
    """Checks one world. It raises `AssertionError` at the event that exceeds a bound."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.disks_are_lost = False
        self.learners = list(system.learners.values())
        self.shards = {shard.name: shard for shard in system.shard_processes}
        self.calm_since: float | None = None
        self.behind_most = 0
        self._announced: dict[int, tuple[Version, str]] = {}
        self._published: dict[int, deque[tuple[float, Version]]] = defaultdict(
            lambda: deque(maxlen=256)
        )
        self._failed_fetches: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=256))
        self._stepped: dict[tuple[str, int], float] = {}
        self._events = 0
        system.recorders.append(self)

    def calm(self) -> None:
        """Start the checks that require that faults and their consequences are over."""
        self.calm_since = self.system.now

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Check one event that a state machine has handled."""
        self._events += 1
        if self._events % MEMORY_CHECK_EVENTS == 0:
            self._memory(process, effects)
        if type(event) is Failed and type(event.order) is Fetch:
            self._failed_fetches[process].append(now)
        shard = self.shards.get(process)
        for effect in effects:
            kind = type(effect)
            if kind is Broadcast and type(effect.message) is Published:
                assert shard is not None
                if not self.system.is_replaced(shard):
                    self._publish(effect.message)
            elif kind is Install:
                assert shard is not None
                if not self.system.is_replaced(shard):
                    self._installed(shard, effect.fragment, effect.version)
            elif kind is Evict and self.calm_since is not None:
                assert "no data arrived" not in effect.reason, f"{effect.learner} is evicted"
        if (
            type(event) is StepFinished
            and self.calm_since is not None
            and process in self.system.learners
        ):
            self._step(self.system.learners[process])

    def _publish(self, message: Published) -> None:
        self._announced[message.fragment] = (message.version, message.digest)
        if self.calm_since is not None:
            self._published[message.fragment].append((self.system.now, message.version))
            self._rounds_behind(message.fragment)

    def _installed(self, shard: ShardHost, fragment: int, version: Version) -> None:
        """Check that a shard restores every version that it announced, bit for bit."""
        announced = self._announced.get(fragment)
        if announced is None or self.disks_are_lost:
            return
        text = f"fragment {fragment}: {announced[0]} was announced, {version} is restored"
        assert version.counter >= announced[0].counter, text
        if version.counter == announced[0].counter:
            digest = shard.machine.state.fragments[fragment].digest
            assert digest == announced[1], f"{text} with other bits"

    def _rounds_behind(self, fragment: int) -> None:
        shard = self.system.acting(self.system.options.owner(fragment))
        if shard.machine.state.phase != "running":
            return  # the closing sweep's rounds follow one another at once
        if self.system.options.devices:
            return  # a device stays behind while it trains alone
        for learner in self.learners:
            machine = learner.machine
            if machine is None or not learner.alive or not machine.state.ready:
                continue
            if self._is_settled(learner, shard.shard):
                self._is_near(learner, fragment)

    def _is_near(self, learner: LearnerHost, fragment: int) -> None:
        held, published = learner.machine.state.fragments[fragment].held, self._published[fragment]
        if held is not None and (not published or published[-1][1] <= held):
            return
        missing = [at for at, v in published if held is None or v > held]
        self.behind_most = max(self.behind_most, len(missing))
        if not missing:
            return
        allowed_seconds = self.behind_seconds_max(learner, missing[0])
        allowed = rounds_behind_max(self.system, allowed_seconds)
        text = f"{learner.name} is {len(missing)} rounds behind in fragment {fragment}"
        assert len(missing) <= allowed, f"{text}: at most {allowed}"
        seconds = self.system.now - missing[0]
        assert seconds <= allowed_seconds, f"{text}, for {seconds:g} s: at most {allowed_seconds:g}"

    def behind_seconds_max(self, learner: LearnerHost, since: float) -> float:
        """Return how long after ``since`` a learner may be without a copy; see the module."""
        system, round_trip = self.system, 2 * _way(self.system, learner)
        seconds = behind_seconds_max(system, learner)
        if round_trip < _seconds_between_rounds(system):
            return seconds
        in_vain = sum(at >= since for at in self._failed_fetches[learner.name])
        return seconds + in_vain * (round_trip + RETRY_SECONDS)

    def _is_settled(self, learner: LearnerHost, shard: int) -> bool:
        """Whether a learner is connected, has not stalled recently, and has taken a step."""
        linked = shard in learner.links and learner.machine.state.shards[shard].linked
        stalled = learner.stalled or (
            self.system.now - learner.stalled_until <= behind_seconds_max(self.system, learner)
        )
        return linked and not stalled and (learner.name, learner.life) in self._stepped

    def _runs(self, learner: LearnerHost) -> bool:
        """Whether its loop has not stalled since its last step."""
        stepped = self._stepped.get((learner.name, learner.life), float("-inf"))
        return not learner.stalled and stepped > learner.stalled_until

    def _step(self, learner: LearnerHost) -> None:
        place, now = (learner.name, learner.life), self.system.now
        before = self._stepped.get(place)
        self._stepped[place] = now
        for index in range(len(learner.machine.state.fragments)) if before is not None else ():
            shard = self.system.acting(self.system.options.owner(index))
            if shard.machine.state.phase == "running" and self._is_settled(learner, shard.shard):
                self._is_near(learner, index)
        stalled = before is not None and before <= learner.stalled_until
        if before is not None and not stalled and self.system.options.wait == "never":
            seconds = now - before
            longest = step_seconds_max(learner) + SLACK_SECONDS
            assert seconds <= longest, f"{learner.name} has waited: a step took {seconds:g} s"

    def stalled(self) -> list[str]:
        """Return the learners whose next step is overdue now, after faults have ceased."""
        if self.system.options.wait != "never":
            return []
        return [
            learner.name
            for learner in self.learners
            if learner.alive and not _has_stopped(learner) and self._is_overdue(learner)
        ]

    def _is_overdue(self, learner: LearnerHost) -> bool:
        before = self._stepped.get((learner.name, learner.life))
        longest = step_seconds_max(learner) + SLACK_SECONDS
        overdue = before is not None and self.system.now - before > longest
        return overdue and self._runs(learner)

    def _memory(self, process: str, effects: Sequence[Any]) -> None:
        options, count = self.system.options, len(self.system.participants)
        shard = self.shards.get(process)
        if shard is not None and shard.machine is not None:
            owned = len(shard.machine.owned)
            allowed = owned * (12 + 16 * count + SAMPLES_MAX) + 13 * count
            state = shard.machine.state
            _check_expected_payloads(shard, effects)
        elif process in self.system.participants:
            allowed = (8 + options.chain) * options.fragments + 4 * options.shards
            allowed += 3 * HELD_MAX if self.system.config.data.elastic else 0
            state = self.system.participants[process].machine.state
        else:
            return
        kept = entries(state)
        assert kept <= allowed, f"the state of {process} has {kept} entries: at most {allowed}"


def behind_seconds_max(system: System, learner: LearnerHost) -> float:
    """Return D, the longest time from a copy's publication until it is applied; see the module."""
    options, spec = system.options, learner.spec
    queue = system.model_bytes / spec.down_bytes_per_second
    way = _way(system, learner)
    steps = 1 + (options.overlaps[1] if options.apply == "at_tau" else 0)
    turns = math.ceil(options.fragments / options.open_rounds_least)
    if options.participants == "own":
        turns = max(turns, options.chain)
    if spec.ranks > 1:
        steps, way = steps + 1 + turns, 2 * way
    alone = options.wait == "never"  # otherwise it steps at the pace of the slowest
    others = [learner] if alone else list(system.learners.values())
    waiting = 3 * queue + (8 + 2 * turns) * way + RETRY_SECONDS + SLACK_SECONDS
    return waiting + steps * max(map(step_seconds_max, others))


def sees_the_end(system: System, learner: str, shard: int) -> bool:
    """Whether a learner can fetch a shard's last copies before the shard ends.

    The shard does not wait long. A learner whose link breaks at the end keeps the copies it holds.
    """
    host = system.learners[learner]
    in_time = 2 * system.model_bytes / host.spec.down_bytes_per_second < LINGER_SECONDS
    linked: bool = host.machine.state.shards[shard].linked
    return in_time and linked


def _way(system: System, learner: LearnerHost) -> float:
    """Return w, the longest one-way delay between a learner and the syncer."""
    spec = learner.spec
    return spec.latency + spec.jitter + system.link_of_shards.jitter + 0.001


def _fastest_step(system: System) -> float:
    """Return ξ_min, the shortest step of any learner."""
    return min(map(step_seconds_min, system.learners.values()))


def rounds_behind_max(system: System, seconds: float) -> int:
    """Return how many rounds a learner may be behind that is this late; see the module."""
    return 2 + math.ceil(seconds / _seconds_between_rounds(system))


def _seconds_between_rounds(system: System) -> float:
    """Return the shortest average time from one round of a fragment to the next."""
    openers = len(system.learners) if system.options.participants == "own" else 1
    return system.options.periods[0] * _fastest_step(system) / openers


def step_seconds_max(learner: LearnerHost) -> float:
    """Return the longest step that a learner takes: seven standard deviations above the mean."""
    spec = learner.spec
    return spec.step_seconds * learner.slowness * (1 + 7 * spec.variance)


def step_seconds_min(learner: LearnerHost) -> float:
    """Return the shortest step that a learner takes."""
    spec = learner.spec
    return spec.step_seconds * max(0.1, 1 - 7 * spec.variance)


def _has_stopped(learner: LearnerHost) -> bool:
    """Whether its training loop has ended."""
    machine = learner.machine
    return machine is None or machine.state.ended or bool(machine.state.leaving)


def _check_expected_payloads(shard: ShardHost, effects: Sequence[Any]) -> None:
    """Check that the data plane waits only for payloads that the machine expects.

    The data plane has not yet executed the machine's latest orders, so these do not count.
    """
    assert shard.role is not None
    state, parts = shard.machine.state, shard.role.acting.parts
    required = {ask.path for entry in state.fragments.values() for ask in entry.asks.values()}
    if state.fill is not None:
        required |= {ask.path for ask in state.fill.asked.values()}
    required |= {effect.path for effect in effects if type(effect) is Unexpect}
    expected = parts.result().uploads._expected if parts.done() else {}
    left = [path for path, body in expected.items() if path not in required and body.task is None]
    assert not left, f"{shard.name} waits for payloads that its machine does not expect: {left}"


def entries(state: Any) -> int:
    """Count the entries of all containers within a state. Tuples count as values."""
    if dataclasses.is_dataclass(state):
        return sum(entries(getattr(state, f.name)) for f in dataclasses.fields(state))
    if isinstance(state, Mapping):
        return len(state) + sum(map(entries, state.values()))
    if isinstance(state, list):
        return len(state) + sum(map(entries, state))
    return len(state) if isinstance(state, AnySet) else 0
