"""Numbers that must hold in every world: how far behind, how much memory, how long a step.

*Rounds behind.* Once faults have ceased, a connected learner applies a published copy at most

    D = 3·q + (8 + 2·n)·w + r + (1 + τ')·ξ

seconds after it was published: a body that is being fetched comes first, and may have become stale;
then the newest one, perhaps by a retry (r, a second). q: all fragments' whole copies through its
downlink, the longest queue there can be, in n = ⌈P / ⌈τ·P/H⌉⌉ turns; w: one way with jitter; ξ: its
longest step (anybody's, where learners wait for each other), τ' = τ where copies are applied at τ.
For a learner of several ranks it is 1 + n steps more (a plan is for the boundary after the next,
and a boundary before has the ranks fetch their parts, in each turn), and w counts twice (rank 0
asks the carriers). H is the shortest, τ' the longest and n the most that the run's limits allow.
So it holds what was published D seconds ago, or newer. And a fragment is due once in H steps of
the fastest learner (ξ_min each), so in D seconds no more than ``2 + ⌈D / (H·ξ_min)⌉`` versions of
it are published: that is how many rounds it may be behind. But a whole copy makes way for the
next version: who may ask for it only then, 2·w ≥ H·ξ_min, is allowed 2·w + r more for each copy
that it has asked for in vain. Where learners open rounds by themselves, a fragment is due so many
times as often as there are learners, and n is c at least: of each fragment no more than one
difference is fetched in a turn, and c of them before a whole copy.

*Memory.* The entries of all containers of a machine's state (`entries`) are bounded by the learners
L and observers O that the run has ever had, and its fragments P:

    shard        12·L + O + P·(12 + 16·L + 32)
    learner      (8 + c)·P + 4·S        c: differences in the place of a whole copy

whatever happens, and for however long. And a shard's data plane waits only for bodies that its
machine waits for.

*Steps.* A learner that nothing befalls takes its next step within its longest step's time.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AnySet
from typing import Any

from decoupled_diloco.protocol.data_leases.coordinator import HELD_MAX
from decoupled_diloco.protocol.effects import Broadcast, Evict, Install, Unexpect
from decoupled_diloco.protocol.events import FetchFailed, StepFinished
from decoupled_diloco.protocol.gate import SAMPLES_MAX
from decoupled_diloco.protocol.learner_fragments import RETRY_SECONDS
from decoupled_diloco.protocol.messages import Published
from decoupled_diloco.protocol.syncer import LINGER_SECONDS
from decoupled_diloco.protocol.versions import Version
from decoupled_diloco.simulate.hosts import LearnerHost, ShardHost
from decoupled_diloco.simulate.system import System

LOOK_EVERY = 64
"""Memory is counted at every so many events."""

SLACK_SECONDS = 0.1
"""Ticks come late by so much, and merging takes its time."""


class Bounds:
    """Watches one world; raises `AssertionError` at the event that exceeds a bound."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.disks_are_lost = False
        self.learners = list(system.learners.values())
        self.shards = {shard.name: shard for shard in system.shard_processes}
        self.calm_since: float | None = None
        self.behind_most = 0
        self._told: dict[int, tuple[Version, str]] = {}
        self._published: dict[int, deque[tuple[float, Version]]] = defaultdict(
            lambda: deque(maxlen=256)
        )
        self._asked_in_vain: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=256))
        self._stepped: dict[tuple[str, int], float] = {}
        self._events = 0
        system.recorders.append(self)

    def calm(self) -> None:
        """Faults have ceased, and what they have led to is over."""
        self.calm_since = self.system.now

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """One event that a machine has handled."""
        self._events += 1
        if self._events % LOOK_EVERY == 0:
            self._memory(who, effects)
        if type(event) is FetchFailed:
            self._asked_in_vain[who].append(now)
        shard = self.shards.get(who)
        for effect in effects:
            kind = type(effect)
            if kind is Broadcast and type(effect.message) is Published:
                assert shard is not None
                if not self.system.is_replaced(shard):
                    self._tell(effect.message)
            elif kind is Install:
                assert shard is not None
                if not self.system.is_replaced(shard):
                    self._installed(shard, effect.fragment, effect.version)
            elif kind is Evict and self.calm_since is not None:
                assert "nothing was heard" not in effect.reason, f"{effect.learner} is evicted"
        if (
            type(event) is StepFinished
            and self.calm_since is not None
            and who in self.system.learners
        ):
            self._step(self.system.learners[who])

    def _tell(self, message: Published) -> None:
        self._told[message.fragment] = (message.version, message.digest)
        if self.calm_since is not None:
            self._published[message.fragment].append((self.system.now, message.version))
            self._rounds_behind(message.fragment)

    def _installed(self, shard: ShardHost, fragment: int, version: Version) -> None:
        """A shard whose disk is honest has every version that it has told of, bit for bit."""
        told = self._told.get(fragment)
        if told is None or self.disks_are_lost:
            return
        text = f"fragment {fragment}: {told[0]} was told, {version} is restored"
        assert version.counter >= told[0].counter, text
        if version.counter == told[0].counter:
            assert shard.machine.state.fragments[fragment].digest == told[1], f"{text}: other bits"

    def _rounds_behind(self, fragment: int) -> None:
        shard = self.system.acting(self.system.options.owner(fragment))
        if shard.machine.state.phase != "running":
            return  # the closing sweep's rounds follow one another at once
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
        """How long since then a learner may be without a copy; see the module's head."""
        system, there_and_back = self.system, 2 * _way(self.system, learner)
        seconds = behind_seconds_max(system, learner)
        if there_and_back < _seconds_between_rounds(system):
            return seconds
        in_vain = sum(at >= since for at in self._asked_in_vain[learner.name])
        return seconds + in_vain * (there_and_back + RETRY_SECONDS)

    def _is_settled(self, learner: LearnerHost, shard: int) -> bool:
        """Whether a learner is connected, and has stepped since all is calm."""
        linked = shard in learner.links and learner.machine.state.shards[shard].linked
        stands = learner.stands or (
            self.system.now - learner.stood_until <= behind_seconds_max(self.system, learner)
        )
        return linked and not stands and (learner.name, learner.life) in self._stepped

    def _goes(self, learner: LearnerHost) -> bool:
        """Whether its loop has not stood still since a step that was seen here."""
        stepped = self._stepped.get((learner.name, learner.life), float("-inf"))
        return not learner.stands and stepped > learner.stood_until

    def _step(self, learner: LearnerHost) -> None:
        place, now = (learner.name, learner.life), self.system.now
        before = self._stepped.get(place)
        self._stepped[place] = now
        for index in range(len(learner.machine.state.fragments)) if before is not None else ():
            shard = self.system.acting(self.system.options.owner(index))
            if shard.machine.state.phase == "running" and self._is_settled(learner, shard.shard):
                self._is_near(learner, index)
        stood = before is not None and before <= learner.stood_until
        if before is not None and not stood and self.system.options.wait == "never":
            seconds = now - before
            longest = step_seconds_max(learner) + SLACK_SECONDS
            assert seconds <= longest, f"{learner.name} has waited: a step took {seconds:g} s"

    def standing(self) -> list[str]:
        """Learners whose next step is overdue at this moment, now that all is calm."""
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
        return overdue and self._goes(learner)

    def _memory(self, who: str, effects: Sequence[Any]) -> None:
        options, count = self.system.options, len(self.system.participants)
        shard = self.shards.get(who)
        if shard is not None and shard.machine is not None:
            owned = len(shard.machine.owned)
            allowed = owned * (12 + 16 * count + SAMPLES_MAX) + 13 * count
            state = shard.machine.state
            _waits_for_nothing_else(shard, effects)
        elif who in self.system.participants:
            allowed = (8 + options.chain) * options.fragments + 4 * options.shards
            allowed += 3 * HELD_MAX if self.system.config.data.leases else 0
            state = self.system.participants[who].machine.state
        else:
            return
        kept = entries(state)
        assert kept <= allowed, f"{who} remembers {kept} things: at most {allowed}"


def behind_seconds_max(system: System, learner: LearnerHost) -> float:
    """D: how long after its publication a copy is applied at the latest; see the module's head."""
    options, spec = system.options, learner.spec
    queue = system.model_bytes / spec.down_bytes_per_second
    way = _way(system, learner)
    steps = 1 + (options.overlaps[1] if options.apply == "at_tau" else 0)
    turns = math.ceil(options.fragments / options.open_rounds_least)
    if options.participants == "own":
        turns = max(turns, options.chain)
    if spec.ranks > 1:
        steps, way = steps + 1 + turns, 2 * way
    alone = options.wait == "never"  # else it steps as the slowest does
    others = [learner] if alone else list(system.learners.values())
    waiting = 3 * queue + (8 + 2 * turns) * way + RETRY_SECONDS + SLACK_SECONDS
    return waiting + steps * max(map(step_seconds_max, others))


def sees_the_end(system: System, learner: str, shard: int) -> bool:
    """Whether a learner can have a shard's last copies before that ends: it does not wait long.

    Whose link to it breaks in the end goes with what it holds.
    """
    host = system.learners[learner]
    in_time = 2 * system.model_bytes / host.spec.down_bytes_per_second < LINGER_SECONDS
    linked: bool = host.machine.state.shards[shard].linked
    return in_time and linked


def _way(system: System, learner: LearnerHost) -> float:
    """w: how long a message is on its way to a learner, or from it, at most."""
    spec = learner.spec
    return spec.latency + spec.jitter + system.link_of_shards.jitter + 0.001


def _fastest_step(system: System) -> float:
    """ξ_min: the shortest step of anybody."""
    return min(map(step_seconds_min, system.learners.values()))


def rounds_behind_max(system: System, seconds: float) -> int:
    """How many rounds somebody may be behind who is so late; see the module's head."""
    return 2 + math.ceil(seconds / _seconds_between_rounds(system))


def _seconds_between_rounds(system: System) -> float:
    """The shortest time from one round of a fragment to the next, on the average."""
    openers = len(system.learners) if system.options.participants == "own" else 1
    return system.options.periods[0] * _fastest_step(system) / openers


def step_seconds_max(learner: LearnerHost) -> float:
    """The longest step that there is: seven standard deviations."""
    spec = learner.spec
    return spec.step_seconds * learner.slowness * (1 + 7 * spec.variance)


def step_seconds_min(learner: LearnerHost) -> float:
    """The shortest step that there is."""
    spec = learner.spec
    return spec.step_seconds * max(0.1, 1 - 7 * spec.variance)


def _has_stopped(learner: LearnerHost) -> bool:
    """Whether its training loop has ended."""
    machine = learner.machine
    return machine is None or machine.state.ended or bool(machine.state.leaving)


def _waits_for_nothing_else(shard: ShardHost, effects: Sequence[Any]) -> None:
    """Whether every body that the data plane still waits for is one that the machine wants.

    What the machine has just now said that it does not want is not heard yet.
    """
    assert shard.role is not None
    state, uploads = shard.machine.state, shard.role.acting._uploads
    wanted = {ask.path for entry in state.fragments.values() for ask in entry.asks.values()}
    if state.fill is not None:
        wanted |= {ask.path for ask in state.fill.asked.values()}
    wanted |= {effect.path for effect in effects if type(effect) is Unexpect}
    expected = {} if uploads is None else uploads._expected
    left = [path for path, body in expected.items() if path not in wanted and body.task is None]
    assert not left, f"{shard.name} waits for bodies that it does not want: {left}"


def entries(state: Any) -> int:
    """How many entries the containers within a state have, all together; tuples are values."""
    if dataclasses.is_dataclass(state):
        return sum(entries(getattr(state, f.name)) for f in dataclasses.fields(state))
    if isinstance(state, Mapping):
        return len(state) + sum(map(entries, state.values()))
    if isinstance(state, list):
        return len(state) + sum(map(entries, state))
    return len(state) if isinstance(state, AnySet) else 0
