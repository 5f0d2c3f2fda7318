"""What must hold of the revisions of H and τ; see `protocol.revisions`.

A number means one plan, whoever tells of it and however often the coordinator has died; a plan is
within the user's limits; nobody goes back to an earlier one; at each tick those fragments are due
that the plan names that holds at it, as far as the shard has heard. When all is calm, everybody has
the newest plan, a while after it was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from decoupled_diloco.protocol.effects import Broadcast, ClockAdvanced, Send
from decoupled_diloco.protocol.events import Received, StepFinished
from decoupled_diloco.protocol.revisions import Revision
from decoupled_diloco.simulate.system import System


class RevisionChecker:
    """Watches one world; raises `AssertionError` at the event that breaks a rule.

    Attributes:
        plans: Every revision that was told of, by its number.
    """

    def __init__(self, system: System) -> None:
        self.system = system
        self.plans: dict[int, Revision] = {}
        self._lives: dict[str, int] = {}
        self._stepped: dict[str, float] = {}
        self._known: dict[str, int] = {}
        self._clocks: dict[str, int] = {}
        self._heard: dict[str, list[Revision]] = defaultdict(list)
        self._shards = {shard.name: shard for shard in system.shard_processes}
        self._made_at: dict[int, float] = {}
        system.recorders.append(self)

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """One event that a machine has handled."""
        host = self._shards.get(who) or self.system.participants.get(who)
        if host is not None and self._lives.get(who) != host.life:
            self._lives[who] = host.life  # a new process has to hear of them first
            for kept in (self._known, self._clocks, self._heard):
                kept.pop(who, None)
        if isinstance(event, Received) and isinstance(event.message, Revision):
            heard = self._heard[who]
            if not heard or event.message.number > heard[-1].number:
                heard.append(event.message)
        if isinstance(event, StepFinished):
            self._stepped[who] = self.system.now
        for effect in effects:
            match effect:
                case Send(message=Revision() as plan) | Broadcast(message=Revision() as plan):
                    self._told(plan)
                case ClockAdvanced(clock):
                    self._ticked(who, clock)
        if host is not None and host.machine is not None:
            self._has(who, host.machine.state.revision)

    def _told(self, plan: Revision) -> None:
        limits = self.system.options.adapt
        assert limits is not None, "H and τ are to stay"
        known = self.plans.setdefault(plan.number, plan)
        self._made_at.setdefault(plan.number, self.system.now)
        assert known == plan, f"{known} and {plan} have one number"
        assert limits.period[0] <= plan.period <= limits.period[1], f"{plan}: {limits}"
        assert limits.overlap[0] <= plan.overlap <= limits.overlap[1], f"{plan}: {limits}"
        assert plan.overlap < plan.period

    def _has(self, who: str, plan: Revision | None) -> None:
        number = 0 if plan is None else plan.number
        assert number >= self._known.get(who, 0), f"{who} goes back to revision {number}"
        assert plan is None or self.plans[number] == plan, f"{who} has a plan that nobody made"
        self._known[who] = number

    def _ticked(self, who: str, clock: int) -> None:
        """Each fragment is due once in H steps, spread evenly, and then has a round or waits."""
        before, self._clocks[who] = self._clocks.get(who), clock
        state, options = self._shards[who].machine.state, self.system.options
        if before is None or clock - before > options.periods[0] or options.phases:
            return  # it was not at work, or has leapt: nothing that was due is made up for
        for tick in range(before + 1, clock + 1):
            heard = [plan for plan in self._heard[who] if plan.tick <= tick]
            period = heard[-1].period if heard else options.period
            for fragment in self._shards[who].machine.owned:
                if tick % period == fragment * period // options.fragments:
                    known = state.phase != "running" or fragment in state.queue
                    text = f"fragment {fragment} is due at {tick} of {who}: every {period} steps"
                    assert known or fragment in state.rounds, text

    def check_calm(self, patience: float) -> None:
        """Each shard, and each learner at its last step, has every plan that is so old."""
        options = self.system.options
        for shard in map(self.system.acting, range(options.shards)):
            if shard.machine is not None:
                state = shard.machine.state
                self._knows(shard.name, state.clock, state.revision, self.system.now - patience)
        for host in self.system.learners.values():
            if host.alive and host.machine is not None:
                until = self._stepped.get(host.name, 0.0) - patience
                machine = host.machine
                self._knows(host.name, machine.global_step, machine.state.revision, until)

    def _knows(self, who: str, clock: int, plan: Revision | None, until: float) -> None:
        old = [number for number, at in self._made_at.items() if at <= until]
        expected = self.plans[max(old)] if old else None
        number = 0 if plan is None else plan.number
        text = f"{who} is at {clock} and has revision {number}, not {expected}"
        assert expected is None or number >= expected.number or clock < expected.tick, text
