"""Rules for schedule revisions of H and τ; see `protocol.adapt`.

A number always names the same plan, also after the coordinator has died. A plan stays within the
user's limits. No process goes back to an earlier plan. At each tick, the fragments are due that
the newest plan in force requires, as far as the shard has received it. After faults have ceased,
every process has the newest plan some time after it was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from decoupled_diloco.protocol.messages import (
    Broadcast,
    ClockAdvanced,
    Received,
    Revision,
    RoundOpened,
    Send,
    StepFinished,
)
from decoupled_diloco_lab.simulate.system import System


class RevisionChecker:
    """Checks one world. It raises `AssertionError` at the event that breaks a rule.

    Attributes:
        plans: Every revision that was sent, by its number.
    """

    def __init__(self, system: System) -> None:
        self.system = system
        self.plans: dict[int, Revision] = {}
        self._lives: dict[str, int] = {}
        self._stepped: dict[str, float] = {}
        self._known: dict[str, int] = {}
        self._clocks: dict[str, int] = {}
        self._received: dict[str, list[Revision]] = defaultdict(list)
        self._shards = {shard.name: shard for shard in system.shard_processes}
        self._made_at: dict[int, float] = {}
        system.recorders.append(self)

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Check one event that a state machine has handled."""
        host = self._shards.get(process) or self.system.participants.get(process)
        if host is not None and self._lives.get(process) != host.life:
            self._lives[process] = host.life  # a new process has received no plan yet
            for kept in (self._known, self._clocks, self._received):
                kept.pop(process, None)
        if isinstance(event, Received) and isinstance(event.message, Revision):
            received = self._received[process]
            if not received or event.message.number > received[-1].number:
                received.append(event.message)
        if isinstance(event, StepFinished):
            self._stepped[process] = self.system.now
        for effect in effects:
            match effect:
                case Send(message=Revision() as plan) | Broadcast(message=Revision() as plan):
                    self._sent(plan)
                case ClockAdvanced(clock):
                    opened = {each.fragment for each in effects if isinstance(each, RoundOpened)}
                    self._ticked(process, clock, opened)
        if host is not None and host.machine is not None:
            self._has(process, host.machine.state.revision)

    def _sent(self, plan: Revision) -> None:
        limits = self.system.options.adapt
        assert limits is not None, "H and τ must not change"
        known = self.plans.setdefault(plan.number, plan)
        self._made_at.setdefault(plan.number, self.system.now)
        assert known == plan, f"{known} and {plan} have the same number"
        assert limits.period[0] <= plan.period <= limits.period[1], f"{plan}: {limits}"
        assert limits.overlap[0] <= plan.overlap <= limits.overlap[1], f"{plan}: {limits}"
        assert plan.overlap < plan.period

    def _has(self, process: str, plan: Revision | None) -> None:
        number = 0 if plan is None else plan.number
        assert number >= self._known.get(process, 0), f"{process} goes back to revision {number}"
        assert plan is None or self.plans[number] == plan, f"{process} has an unknown plan: {plan}"
        self._known[process] = number

    def _ticked(self, process: str, clock: int, opened: set[int]) -> None:
        """Check that each fragment due at these ticks has a round, or waits for one.

        A round that cannot have a quorum ends in the event that opened it.
        """
        before, self._clocks[process] = self._clocks.get(process), clock
        state, options = self._shards[process].machine.state, self.system.options
        if before is None or clock - before > options.periods[0] or options.phases:
            return  # it was down, or its clock jumped: it skips the rounds that were due
        for tick in range(before + 1, clock + 1):
            in_force = [plan for plan in self._received[process] if plan.tick <= tick]
            period = in_force[-1].period if in_force else options.period
            for fragment in self._shards[process].machine.owned:
                if tick % period == fragment * period // options.fragments:
                    known = state.phase != "running" or fragment in state.queue
                    text = (
                        f"fragment {fragment} is due at {tick} of {process}: every {period} steps"
                    )
                    assert known or fragment in state.rounds.keys() | opened, text

    def check_calm(self, patience: float) -> None:
        """Check that shards, and learners at their last step, have all plans of that age."""
        options = self.system.options
        for shard in map(self.system.acting, range(options.shards)):
            if shard.machine is not None:
                state = shard.machine.state
                self._has_newest(
                    shard.name, state.clock, state.revision, self.system.now - patience
                )
        for host in self.system.learners.values():
            if host.alive and host.machine is not None:
                until = self._stepped.get(host.name, 0.0) - patience
                machine = host.machine
                self._has_newest(host.name, machine.global_step, machine.state.revision, until)

    def _has_newest(self, process: str, clock: int, plan: Revision | None, until: float) -> None:
        old = [number for number, at in self._made_at.items() if at <= until]
        expected = self.plans[max(old)] if old else None
        number = 0 if plan is None else plan.number
        text = f"{process} is at {clock} and has revision {number}, not {expected}"
        assert expected is None or number >= expected.number or clock < expected.tick, text
