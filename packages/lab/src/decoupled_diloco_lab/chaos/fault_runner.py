"""Carry out a scenario's events on the real processes of a run: by time, by step, or at random.

`simulate.script` does the same for virtual processes. Time zero is the run's first global step,
because starting takes a while. Several faults may hit one process at once. It comes back only when
none of them keeps it down any more.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.launch.supervisor import TERMINATE_SECONDS
from decoupled_diloco.tape.samples import FaultEnded, FaultInjected
from decoupled_diloco_lab.chaos.pauses import Brake, Guard
from decoupled_diloco_lab.chaos.proxy import Links, Wire
from decoupled_diloco_lab.chaos.spaces import Disks, Shaper
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.scenario import COORDINATOR, Happening, Recurrence, Scenario
from decoupled_diloco_lab.simulate.script import LASTING

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.05


class Engine:
    """The faults, joins and leaves of one scenario in one run.

    Args:
        run: The run, on processes of this machine.
        scenario: What to carry out.
        links: The proxy links, if the scenario needs them.
        disks: The shards' durable folders.
        shaper: The rates of the links, if any is limited.
    """

    def __init__(
        self,
        run: LocalRun,
        scenario: Scenario,
        links: Links | None,
        disks: Disks,
        shaper: Shaper | None,
    ) -> None:
        self.run = run
        self.scenario = scenario
        self._links, self._disks, self._shaper = links, disks, shaper
        self._began_at: float | None = None
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._choices = Choices(f"{scenario.seed}/choose")
        self._numbers = itertools.count(1)
        self._away: defaultdict[str, set[int]] = defaultdict(set)
        self._returning: set[str] = set()
        self._brakes: dict[str, Brake] = {}
        self._guard: Guard | None = None
        self._full: Counter[str] = Counter()
        # The launcher itself carries out kills at a share of the budget.
        self._at_step = [h for h in scenario.happenings if h.at_step is not None]
        self._to_end: list[tuple[int, Happening, int]] = []
        for name, group in scenario.members.items():
            if not group.present:
                self._away[name].add(0)

    @property
    def missed(self) -> list[Happening]:
        """Events that have not happened because the run has not reached their step."""
        return list(self._at_step)

    @property
    def seconds(self) -> float:
        """Seconds since the run's first global step; 0 before it."""
        return 0.0 if self._began_at is None else time.monotonic() - self._began_at

    @property
    def is_over(self) -> bool:
        """Whether the scenario's time limit has passed."""
        until = self.scenario.file.until_seconds
        return until is not None and self.seconds >= until

    def poll(self) -> None:
        """Carry out everything that is due. Called several times a second."""
        if self._began_at is None:
            if self.run.global_step < 1:
                return
            self._begin()
        while self._due and self._due[0][0] <= self.seconds:
            heapq.heappop(self._due)[2]()
        step = self.run.global_step
        for happening in [h for h in self._at_step if (h.at_step or 0) <= step]:
            self._at_step.remove(happening)
            self._strike(happening)
        for entry in [each for each in self._to_end if each[0] <= step]:
            self._to_end.remove(entry)
            self._undo(entry[1], entry[2])
        for name in list(self._returning):
            if self.run.supervisor.bring_back(name):
                self._returning.discard(name)

    def close(self) -> None:
        """Continue every process, so that it can end."""
        for brake in self._brakes.values():
            brake.close()
        if self._guard is not None:
            self._guard.close()

    def _begin(self) -> None:
        self._began_at = time.monotonic()
        for happening in self.scenario.happenings:
            if happening.at_seconds is not None:
                self._at(happening.at_seconds, partial(self._strike, happening))
        for recurrence in self.scenario.recurrences:
            choices = recurrence.choices(self.scenario.seed)
            self._plan_next(recurrence, choices, recurrence.settings.from_seconds)

    def _at(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (seconds, next(self._order), work))

    def _plan_next(self, recurrence: Recurrence, choices: Choices, since: float) -> None:
        upcoming = recurrence.next(choices, since)
        if upcoming is not None:
            at, over_at, happening = upcoming
            self._at(at, lambda: self._strike(happening))
            self._at(over_at, lambda: self._plan_next(recurrence, choices, over_at))

    def _strike(self, happening: Happening) -> None:
        number = next(self._numbers)
        target = happening.target.some(happening.choose, self._choices)
        # shard-0 hosts the coordinator: it is not a process that a fault could hit alone.
        struck = tuple(name for name in target.processes if name != COORDINATOR)
        happening = replace(happening, target=replace(target, processes=struck))
        if happening.kind not in ("join", "leave"):  # these are not faults
            self.run.record(FaultInjected(happening.kind, target.name, struck))
        self._change(happening, number, begins=True)
        if happening.for_seconds is not None:
            self._at(self.seconds + happening.for_seconds, lambda: self._undo(happening, number))
        elif happening.until_step is not None:
            self._to_end.append((happening.until_step, happening, number))

    def _undo(self, happening: Happening, number: int) -> None:
        self._change(happening, number, begins=False)
        if happening.kind in LASTING:
            target = happening.target
            self.run.record(FaultEnded(happening.kind, target.name, target.processes))

    def _change(self, happening: Happening, number: int, *, begins: bool) -> None:
        match happening.kind:
            case "cut" | "break" | "delay" | "loss" | "corrupt":
                self._change_links(happening, begins=begins)
            case "throttle":
                assert self._shaper is not None
                for link in {self.scenario.members[n].link for n in happening.target.processes}:
                    assert link is not None
                    self._shaper.throttle(link, happening.factor, begins=begins)
            case _:
                for name in happening.target.processes:
                    change = self._apply if begins else self._recover
                    change(name, happening, number)

    def _apply(self, name: str, happening: Happening, number: int) -> None:
        match happening.kind:
            case "kill":
                self._take_down(name, number)
            case "vanish":
                self._silence(name, begins=True)
                self._take_down(name, number)
            case "disk-lost":
                self._take_down(name, number)
                self._when_ended(name, lambda: self._disks.lose(name))
            case "restart" | "leave":
                self._take_down(name, number, signal.SIGTERM)
                self._at(self.seconds + TERMINATE_SECONDS, lambda: self._insist(name, number))
            case "join":
                # A join overrides everything that keeps the learner away.
                self._away[name].clear()
                self._returning.add(name)
            case "pause":
                self._brake(name).pause(number)
            case "slow":
                self._brake(name).slow(happening.factor)
            case "disk-full":
                self._full[name] += 1
                self._disks.fill(name)

    def _recover(self, name: str, happening: Happening, number: int) -> None:
        match happening.kind:
            case "kill" | "vanish" | "disk-lost" | "restart" | "leave":
                if happening.kind == "vanish":
                    self._silence(name, begins=False)
                self._away[name].discard(number)
                if not self._away[name]:
                    self._returning.add(name)
            case "join":
                self._take_down(name, number, signal.SIGTERM)
            case "pause":
                self._brake(name).resume(number)
            case "slow":
                self._brake(name).quicken(happening.factor)
            case "disk-full":
                self._full[name] -= 1
                if not self._full[name]:
                    self._disks.free(name)

    def _take_down(
        self, name: str, number: int, with_signal: signal.Signals = signal.SIGKILL
    ) -> None:
        self._away[name].add(number)
        self._returning.discard(name)
        self.run.supervisor.take_down(name, with_signal)

    def _insist(self, name: str, number: int) -> None:
        """Kill a process that received SIGTERM and has not ended."""
        child = self.run.supervisor.children[name]
        if child.running and child.held:
            logger.warning(
                "%s has not ended %g s after SIGTERM; killing it", name, TERMINATE_SECONDS
            )
            self.run.supervisor.take_down(name)

    def _when_ended(self, name: str, work: Callable[[], None]) -> None:
        if self.run.supervisor.children[name].running:
            # Keep it down until the work is done, even if its fault has ended meanwhile.
            self._returning.discard(name)
            self._at(self.seconds + RETRY_SECONDS, lambda: self._when_ended(name, work))
        else:
            work()

    def _brake(self, name: str) -> Brake:
        if self._guard is None:
            self._guard = Guard()
        if name not in self._brakes:
            group = self.scenario.members.get(name)
            step_seconds = 0.5 if group is None else group.step_seconds
            self._brakes[name] = Brake(lambda: self._pid(name), self._guard, step_seconds)
        return self._brakes[name]

    def _pid(self, name: str) -> int | None:
        process = self.run.supervisor.children[name].process
        return None if process is None else process.pid

    def _change_links(self, happening: Happening, *, begins: bool) -> None:
        assert self._links is not None
        struck = set(happening.target.processes)
        for name in struck:
            for wire, outwards in self._wires(name, struck):
                match happening.kind:
                    case "cut":
                        self._cut(wire, happening, outwards, begins=begins)
                    case "break":
                        self._links.break_connections([wire])
                    case "delay":
                        sign = 1 if begins else -1
                        wire.delay_seconds = max(
                            0.0, wire.delay_seconds + sign * happening.delay_seconds
                        )
                    case "loss" | "corrupt":
                        shares = wire.losses if happening.kind == "loss" else wire.corruptions
                        (shares.append if begins else shares.remove)(happening.share)

    def _wires(self, name: str, struck: set[str]) -> list[tuple[Wire, bool]]:
        """Return the wires between a process and all processes that the fault does not hit.

        Each comes with a flag: whether the process is the end that dials.
        """
        assert self._links is not None
        shards = self.run.ports
        own = [(w, True) for w in self._links.wires(name) if shards.get(w.port) not in struck]
        ports = [port for port, shard in shards.items() if shard == name]
        to_it = [
            (wire, False)
            for port in ports
            for wire in self._links.wires(port=port)
            if wire.process not in struck
        ]
        return own + to_it

    def _cut(self, wire: Wire, happening: Happening, outwards: bool, *, begins: bool) -> None:
        """Cut or heal a wire.

        A happening's ``up`` means away from its target, which may be at either end of the wire. A
        wire's ``up`` means away from the process that dials.
        """
        assert self._links is not None
        away, towards = (happening.direction in ("both", way) for way in ("up", "down"))
        up, down = (away, towards) if outwards else (towards, away)
        (self._links.cut if begins else self._links.heal)([wire], up=up, down=down)

    def _silence(self, name: str, *, begins: bool) -> None:
        """Silence the host of a process, so that its peers receive no reset when it dies."""
        assert self._links is not None
        wires = [wire for wire, _ in self._wires(name, set())]
        (self._links.cut if begins else self._links.heal)(wires, up=True, down=True)
