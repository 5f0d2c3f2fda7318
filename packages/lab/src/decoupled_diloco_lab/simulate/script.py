"""Carry out a scenario's events in a virtual run: by time, by step, or at random.

Several faults may hit one process at once. It comes back only when none of them keeps it down any
more. If several faults slow it down, their factors are multiplied.
"""

from __future__ import annotations

import math
import signal
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from decoupled_diloco.launch.supervisor import TERMINATE_SECONDS
from decoupled_diloco.protocol.messages import ClockAdvanced, Progress, Send
from decoupled_diloco.tape.samples import FaultEnded, FaultInjected
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.crowd import Crowd
from decoupled_diloco_lab.simulate.scenario import COORDINATOR, Happening, Recurrence, Scenario
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.simulate.virtual_network import Link

LASTING = ("cut", "pause", "slow", "throttle", "delay", "loss", "corrupt", "disk-full")
"""Kinds that last until they are undone. The end of any other kind shows as a process start."""

_NOT_YET = 0
"""Pseudo event number that keeps a learner down until it joins."""


class Script:
    """The faults, joins and leaves of one scenario in one virtual run.

    Args:
        system: The virtual run. The script observes its clock.
        scenario: The events to carry out.

    Attributes:
        clock: The latest global step of any shard.
        tokens: The latest count of all tokens.
        changed_at: When an event was last undone, in seconds.
    """

    def __init__(
        self,
        system: System | Crowd,
        scenario: Scenario,
    ) -> None:
        self.system = system
        self.clock = self.tokens = 0
        self.changed_at = 0.0
        self._run = scenario.config.run
        self._flush_seconds = scenario.config.learner.flush_seconds
        self._hosts: dict[str, Any] = {host.name: host for host in system.hosts}
        self._hosts[COORDINATOR] = system.shards[0]
        self._away: defaultdict[str, set[int]] = defaultdict(set)
        self._pauses: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._full: Counter[str] = Counter()
        self._choices = Choices(f"{scenario.seed}/choose")
        self._slowed: defaultdict[str, list[float]] = defaultdict(list)
        self._throttled: defaultdict[int, list[float]] = defaultdict(list)
        self._lossy: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        self._rates = {
            id(p.link): (p.link.up_bytes_per_second, p.link.down_bytes_per_second)
            for p in system.participants.values()
        }
        for name, group in scenario.members.items():
            if not group.present:
                self._away[name].add(_NOT_YET)
        self._number = _NOT_YET
        self._pending: list[Happening] = []
        self._to_end: list[tuple[int, Happening, int]] = []
        self._timed = self._undone_later = 0
        for happening in scenario.happenings:
            if happening.at_seconds is None:
                self._pending.append(happening)
            else:
                self._timed += 1
                system.clockwork.at(happening.at_seconds, self._on_time, happening)
        for recurrence in scenario.recurrences:
            self._recur(recurrence, scenario)
        system.recorders.append(self._watch)

    @property
    def planned(self) -> bool:
        """Whether an event with a known time is still pending."""
        return self._timed > 0

    @property
    def waiting(self) -> bool:
        """Whether an event will be undone at a known time."""
        return self._undone_later > 0

    @property
    def missed(self) -> list[Happening]:
        """Events that have not happened because the run has not reached their step."""
        return list(self._pending)

    def _on_time(self, happening: Happening) -> None:
        self._timed -= 1
        self._strike(happening)

    def _undo_on_time(self, happening: Happening, number: int) -> None:
        self._undone_later -= 1
        self._undo(happening, number)

    def _watch(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if not process.startswith("shard-"):
            return
        for effect in effects:
            if type(effect) is ClockAdvanced and effect.clock > self.clock:
                self.clock = effect.clock
                self._clock_has_moved()
            elif type(effect) is Send and type(effect.message) is Progress:
                self.tokens = max(self.tokens, effect.message.tokens)

    def _clock_has_moved(self) -> None:
        # This runs while the shard's event is being recorded. A delay of 0 lets the shard carry
        # out its orders before a fault hits it.
        clockwork = self.system.clockwork
        due = [h for h in self._pending if self._is_due(h)]
        if due:
            self._pending = [h for h in self._pending if h not in due]
        for happening in due:
            clockwork.after(0.0, self._strike, happening)
        ended = [entry for entry in self._to_end if entry[0] <= self.clock]
        for entry in ended:
            self._to_end.remove(entry)
            clockwork.after(0.0, self._undo, entry[1], entry[2])

    def _is_due(self, happening: Happening) -> bool:
        if happening.at_step is not None:
            return self.clock >= happening.at_step
        assert happening.at_share is not None
        shares = [0.0]
        if self._run.max_steps:
            shares.append(self.clock / self._run.max_steps)
        if self._run.max_tokens:
            shares.append(self.tokens / self._run.max_tokens)
        return max(shares) >= happening.at_share

    def _strike(self, happening: Happening) -> None:
        self._number += 1
        number = self._number
        happening = self._aimed(happening)
        self._begin(happening, number)
        if happening.for_seconds is not None:
            self._undone_later += 1
            self.system.clockwork.after(
                happening.for_seconds, self._undo_on_time, happening, number
            )
        elif happening.until_step is not None:
            if happening.until_step <= self.clock:
                self.system.clockwork.after(0.0, self._undo, happening, number)
            else:
                self._to_end.append((happening.until_step, happening, number))

    def _aimed(self, happening: Happening) -> Happening:
        """Draw the members to hit, and drop processes that this run does not have.

        A run without tensors has no evaluator.
        """
        target = happening.target.some(happening.choose, self._choices)
        hosts = [self._hosts[name].name for name in target.processes if name in self._hosts]
        return replace(happening, target=replace(target, processes=tuple(dict.fromkeys(hosts))))

    def _recur(self, recurrence: Recurrence, scenario: Scenario) -> None:
        choices = recurrence.choices(scenario.seed)
        self._plan_next(recurrence, choices, recurrence.settings.from_seconds)

    def _plan_next(self, recurrence: Recurrence, choices: Choices, since: float) -> None:
        upcoming = recurrence.next(choices, since)
        if upcoming is not None:
            at, over_at, happening = upcoming
            self.system.clockwork.at(at, self._strike, happening)
            self.system.clockwork.at(over_at, self._plan_next, recurrence, choices, over_at)

    def _begin(self, happening: Happening, number: int) -> None:
        kind, target = happening.kind, happening.target
        if kind not in ("join", "leave"):  # these are not faults
            self.system.sample(FaultInjected(kind, target.name, target.processes))
        match kind:
            case "cut":
                self._cut(happening, 1)
            case "break":
                for struck, other in self._pairs(happening):
                    self.system.break_connections(struck, other)
            case "throttle":
                self._throttle(happening, begins=True)
            case "delay" | "loss" | "corrupt":
                self._impair(happening, begins=True)
            case _:
                for name in target.processes:
                    self._apply(self._hosts[name], happening, number)

    def _undo(self, happening: Happening, number: int) -> None:
        self.changed_at = self.system.now
        if happening.kind in LASTING:
            target = happening.target
            self.system.sample(FaultEnded(happening.kind, target.name, target.processes))
        match happening.kind:
            case "cut":
                self._cut(happening, -1)
            case "throttle":
                self._throttle(happening, begins=False)
            case "delay" | "loss" | "corrupt":
                self._impair(happening, begins=False)
            case _:
                for name in happening.target.processes:
                    self._recover(self._hosts[name], happening, number)

    def _apply(self, host: Any, happening: Happening, number: int) -> None:
        match happening.kind:
            case "kill" | "vanish" | "disk-lost":
                self._away[host.name].add(number)
                self.system.crash(host, silent=happening.kind == "vanish")
                if happening.kind == "disk-lost" and isinstance(self.system, System):
                    self.system.lose_disk(host)
            case "disk-full":
                self._fill(host, 1)
            case "leave" | "restart":
                self._stop(host, number)
            case "clock-jump":
                host.leap(happening.jump_seconds)
            case "join":
                self._away[host.name].clear()
                self.system.restart(host)
            case "pause":
                self._pauses[host.name][number] = host.pid
                self.system.pause(host)
            case "slow":
                self._slowed[host.name].append(happening.factor)
                self._set_pace(host)

    def _recover(self, host: Any, happening: Happening, number: int) -> None:
        match happening.kind:
            case "disk-full":
                self._fill(host, -1)
            case "kill" | "vanish" | "restart" | "disk-lost" | "leave":
                away = self._away[host.name]
                if number in away:
                    away.discard(number)
                    if not away:
                        self.system.restart(host)
            case "join":
                self._stop(host, number)
            case "pause":
                pauses = self._pauses[host.name]
                del pauses[number]
                # A fault pauses one process: a process that was started since is not paused.
                if host.pid not in pauses.values():
                    self.system.resume(host)
            case "slow":
                self._slowed[host.name].remove(happening.factor)
                self._set_pace(host)

    def _stop(self, host: Any, number: int) -> None:
        self._away[host.name].add(number)
        if host.alive:
            flushes = host.name in self.system.participants
            seconds = TERMINATE_SECONDS + (self._flush_seconds if flushes else 0.0)
            self.system.request_stop(host, seconds, signal.SIGTERM)

    def _set_pace(self, host: Any) -> None:
        host.slowness = math.prod(self._slowed[host.name])

    def _throttle(self, happening: Happening, *, begins: bool) -> None:
        struck = {id(link): link for link in map(self._link_of, happening.target.processes)}
        for key, link in struck.items():
            factors = self._throttled[key]
            factors.append(happening.factor) if begins else factors.remove(happening.factor)
            up, down = self._rates[key]
            link.up_bytes_per_second = up / math.prod(factors)
            link.down_bytes_per_second = down / math.prod(factors)

    def _impair(self, happening: Happening, *, begins: bool) -> None:
        """Add delay, loss or corruption to links, or take it back. Overlapping faults add up."""
        sign = 1.0 if begins else -1.0
        struck = {id(link): link for link in map(self._link_of, happening.target.processes)}
        for key, link in struck.items():
            if happening.kind == "delay":
                link.latency = max(0.0, link.latency + sign * happening.delay_seconds)
                continue
            shares = self._lossy[happening.kind, key]
            shares.append(happening.share) if begins else shares.remove(happening.share)
            share = 1 - math.prod(1 - each for each in shares)
            if happening.kind == "loss":
                link.loss = share
            else:
                link.corruption = share

    def _fill(self, host: Any, change: int) -> None:
        self._full[host.name] += change
        host.disk_is_full = self._full[host.name] > 0

    def _link_of(self, name: str) -> Link:
        link: Link = self._hosts[name].link
        return link

    def _cut(self, happening: Happening, change: int) -> None:
        for struck, other in self._pairs(happening):
            up, down = (struck, other), (other, struck)
            ways = {"both": (up, down), "up": (up,), "down": (down,)}
            for a, b in ways[happening.direction]:
                self._cuts[a.name, b.name] += change
                if change > 0 and self._cuts[a.name, b.name] == 1:
                    self.system.cut(a, b, back=False)
                elif change < 0 and self._cuts[a.name, b.name] == 0:
                    self.system.heal(a, b, back=False)

    def _pairs(self, happening: Happening) -> list[tuple[Any, Any]]:
        """Return pairs of a hit process and a peer that the fault does not hit.

        All connections have a shard at one end at least.
        """
        struck = [self._hosts[name] for name in happening.target.processes]
        shards = self.system.shard_processes
        pairs: list[tuple[Any, Any]] = []
        for host, other in product(struck, self.system.hosts):
            talk = host in shards or other in shards
            if talk and other not in struck:
                pairs.append((host, other))
        return pairs
