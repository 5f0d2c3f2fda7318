"""Carries out in a virtual world what a scenario says: at its time, at its step, or at random.

Several things may befall one process at once: it is there again only when nothing keeps it away
any more, and as slow as all that slows it down together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.effects import ClockAdvanced, Send
from decoupled_diloco.protocol.messages import Progress
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.learner_process import LearnerProcess
from decoupled_diloco.simulate.network import Link
from decoupled_diloco.simulate.scenario import Happening, Recurrence, Scenario, Target
from decoupled_diloco.simulate.shard_process import ShardProcess
from decoupled_diloco.simulate.shell import Shell
from decoupled_diloco.simulate.world import World

Teller = Callable[[str, Target], None]
"""Told of a fault: its kind, and whom it strikes."""

LASTING = ("cut", "pause", "slow", "throttle", "delay", "loss", "corrupt", "disk-full")
"""What ends only when it is undone; of others it is told who comes back."""

_NOT_YET = 0
"""Number of what keeps a learner away that is not present from the start."""


class Script:
    """The faults, joins and leaves of one scenario in one world.

    Args:
        world: Where they happen; the script listens to its clock.
        scenario: What happens.
        tell: Told of every fault when it begins, for the event tape.
        tell_end: Told of every fault that lasts when it is undone.

    Attributes:
        clock: The latest global step of any shard.
        tokens: The latest count of all tokens.
        changed_at: When something was undone last, seconds.
    """

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        tell: Teller = lambda kind, target: None,
        tell_end: Teller = lambda kind, target: None,
    ) -> None:
        self.world = world
        self.clock = self.tokens = 0
        self.changed_at = 0.0
        _require_no_standbys(scenario)
        self._run = scenario.config.run
        self._tell, self._tell_end = tell, tell_end
        self._processes = {process.name: process for process in world.processes}
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
            for p in world.learners.values()
        }
        for name, group in scenario.members.items():
            if not group.present:
                self._away[name].add(_NOT_YET)
        self._number = _NOT_YET
        self._to_come: list[Happening] = []
        self._to_end: list[tuple[int, Happening, int]] = []
        self._timed = self._undone_later = 0
        for happening in scenario.happenings:
            if happening.at_seconds is None:
                self._to_come.append(happening)
            else:
                self._timed += 1
                world.clockwork.at(happening.at_seconds, self._on_time, happening)
        for recurrence in scenario.recurrences:
            self._recur(recurrence, scenario)
        world.recorders.append(self._watch)
        world.may_restart = lambda process: not self._away[process.name]

    @property
    def planned(self) -> bool:
        """Whether something that the scenario tells is still to come at a known time."""
        return self._timed > 0

    @property
    def waiting(self) -> bool:
        """Whether something is to be undone at a known time."""
        return self._undone_later > 0

    @property
    def missed(self) -> list[Happening]:
        """What has not happened, because its step has not been reached."""
        return list(self._to_come)

    # ---- triggers

    def _on_time(self, happening: Happening) -> None:
        self._timed -= 1
        self._strike(happening)

    def _undo_on_time(self, happening: Happening, number: int) -> None:
        self._undone_later -= 1
        self._undo(happening, number)

    def _watch(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if not who.startswith("shard-"):
            return
        for effect in effects:
            if type(effect) is ClockAdvanced and effect.clock > self.clock:
                self.clock = effect.clock
                self._clock_has_moved()
            elif type(effect) is Send and type(effect.message) is Progress:
                self.tokens = max(self.tokens, effect.message.tokens)

    def _clock_has_moved(self) -> None:
        """What is due happens next, when the shard has carried its orders out."""
        clockwork = self.world.clockwork
        due = [h for h in self._to_come if self._is_due(h)]
        if due:
            self._to_come = [h for h in self._to_come if h not in due]
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
        if self._run.budget_steps:
            shares.append(self.clock / self._run.budget_steps)
        if self._run.budget_tokens:
            shares.append(self.tokens / self._run.budget_tokens)
        return max(shares) >= happening.at_share

    def _strike(self, happening: Happening) -> None:
        self._number += 1
        number = self._number
        happening = self._aimed(happening)
        self._begin(happening, number)
        if happening.for_seconds is not None:
            self._undone_later += 1
            self.world.clockwork.after(happening.for_seconds, self._undo_on_time, happening, number)
        elif happening.until_step is not None:
            if happening.until_step <= self.clock:
                self.world.clockwork.after(0.0, self._undo, happening, number)
            else:
                self._to_end.append((happening.until_step, happening, number))

    def _aimed(self, happening: Happening) -> Happening:
        """At those whom chance chooses, and who are there: without tensors nobody evaluates."""
        target = happening.target.some(happening.choose, self._choices)
        there = tuple(name for name in target.processes if name in self._processes)
        return replace(happening, target=replace(target, processes=there))

    # ---- at random

    def _recur(self, recurrence: Recurrence, scenario: Scenario) -> None:
        choices = recurrence.choices(scenario.seed)
        self._plan_next(recurrence, choices, recurrence.settings.from_seconds)

    def _plan_next(self, recurrence: Recurrence, choices: Choices, since: float) -> None:
        coming = recurrence.next(choices, since)
        if coming is not None:
            at, over_at, happening = coming
            self.world.clockwork.at(at, self._strike, happening)
            self.world.clockwork.at(over_at, self._plan_next, recurrence, choices, over_at)

    # ---- what happens, and how it is undone

    def _begin(self, happening: Happening, number: int) -> None:
        kind, target = happening.kind, happening.target
        if kind not in ("join", "leave"):  # which is no fault
            self._tell(kind, target)
        match kind:
            case "cut":
                self._cut(happening, 1)
            case "break":
                for struck, other in self._pairs(happening):
                    self.world.break_connections(struck, other)
            case "throttle":
                self._throttle(happening, begins=True)
            case "delay" | "loss" | "corrupt":
                self._spoil(happening, begins=True)
            case _:
                for name in target.processes:
                    self._befall(self._processes[name], happening, number)

    def _undo(self, happening: Happening, number: int) -> None:
        self.changed_at = self.world.now
        if happening.kind in LASTING:
            self._tell_end(happening.kind, happening.target)
        match happening.kind:
            case "cut":
                self._cut(happening, -1)
            case "throttle":
                self._throttle(happening, begins=False)
            case "delay" | "loss" | "corrupt":
                self._spoil(happening, begins=False)
            case _:
                for name in happening.target.processes:
                    self._recover(self._processes[name], happening, number)

    def _befall(self, process: Shell, happening: Happening, number: int) -> None:
        match happening.kind:
            case "kill" | "vanish":
                self._away[process.name].add(number)
                self.world.crash(process, silent=happening.kind == "vanish")
            case "disk-lost":
                self._away[process.name].add(number)
                self.world.crash(process)
                if isinstance(process, ShardProcess):  # the coordinator's state is elsewhere
                    process.disk.clear()
            case "disk-full":
                self._fill(process, 1)
            case "restart" if not isinstance(process, LearnerProcess):
                self._away[process.name].add(number)
                self.world.crash(process)
            case "leave" | "restart":
                self._go(process, number)
            case "clock-jump":
                process.leap(happening.jump_seconds)
            case "join":
                self._away[process.name].clear()
                self.world.restart(process)
            case "pause":
                self._pauses[process.name][number] = process.life
                self.world.pause(process)
            case "slow":
                self._slowed[process.name].append(happening.factor)
                self._set_pace(process)

    def _recover(self, process: Shell, happening: Happening, number: int) -> None:
        match happening.kind:
            case "disk-full":
                self._fill(process, -1)
            case "kill" | "vanish" | "restart" | "disk-lost" | "leave":
                away = self._away[process.name]
                if number in away:
                    away.discard(number)
                    if not away:
                        self.world.restart(process)
            case "join":
                self._go(process, number)
            case "pause":
                pauses = self._pauses[process.name]
                del pauses[number]
                if process.life not in pauses.values():  # a new process is not the one that stands
                    self.world.resume(process)
            case "slow":
                self._slowed[process.name].remove(happening.factor)
                self._set_pace(process)

    def _go(self, process: Shell, number: int) -> None:
        assert isinstance(process, LearnerProcess)
        self._away[process.name].add(number)
        if process.alive:
            process.leave("its loop has ended")

    def _set_pace(self, process: Shell) -> None:
        assert isinstance(process, LearnerProcess)
        process.slowness = math.prod(self._slowed[process.name])

    def _throttle(self, happening: Happening, *, begins: bool) -> None:
        struck = {id(link): link for link in map(self._link_of, happening.target.processes)}
        for key, link in struck.items():
            factors = self._throttled[key]
            factors.append(happening.factor) if begins else factors.remove(happening.factor)
            up, down = self._rates[key]
            link.up_bytes_per_second = up / math.prod(factors)
            link.down_bytes_per_second = down / math.prod(factors)

    def _spoil(self, happening: Happening, *, begins: bool) -> None:
        """Makes links slower to answer, lossy or corrupting; what overlaps adds up."""
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

    def _fill(self, process: Shell, change: int) -> None:
        if isinstance(process, ShardProcess):  # the coordinator's state is elsewhere
            self._full[process.name] += change
            process.disk_is_full = self._full[process.name] > 0

    def _link_of(self, name: str) -> Link:
        return self._processes[name].link

    def _cut(self, happening: Happening, change: int) -> None:
        for struck, other in self._pairs(happening):
            up, down = (struck, other), (other, struck)
            ways = {"both": (up, down), "up": (up,), "down": (down,)}
            for a, b in ways[happening.direction]:
                self._cuts[a.name, b.name] += change
                if change > 0 and self._cuts[a.name, b.name] == 1:
                    self.world.cut(a, b, back=False)
                elif change < 0 and self._cuts[a.name, b.name] == 0:
                    self.world.heal(a, b, back=False)

    def _pairs(self, happening: Happening) -> list[tuple[Shell, Shell]]:
        """Those who are struck, each with everybody outside whom it talks to."""
        struck = [self._processes[name] for name in happening.target.processes]
        hosts = [self.world.coordinator, *self.world.shards]
        pairs: list[tuple[Shell, Shell]] = []
        for process, other in product(struck, self.world.processes):
            talk = process in hosts or other in hosts
            if talk and other not in struck:
                pairs.append((process, other))
        return pairs


def _require_no_standbys(scenario: Scenario) -> None:
    targets = [happening.target for happening in scenario.happenings]
    targets += [recurrence.target for recurrence in scenario.recurrences]
    for name in (name for target in targets for name in target.processes):
        if name.endswith("-standby"):
            raise ConfigError(
                f"target={name!r} is not in the virtual world, whose shards have no standbys: take "
                "it out, or carry the scenario out on real processes: ddiloco chaos"
            )
