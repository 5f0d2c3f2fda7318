"""What must hold of a learner that trains on alone while its link is down, where that is dropped.

With ``missed = "overwrite"`` it contributes nothing from a version that it held before, if its link
was down for more of its own steps than count, and if it has been told that the fragment has gone on
for as many versions. Its next copy overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decoupled_diloco.protocol.effects import Apply, Relabel, SendBody
from decoupled_diloco.protocol.events import Lost, Received
from decoupled_diloco.protocol.messages import Published, Welcome
from decoupled_diloco.simulate.system import System

Life = tuple[str, int, str]


class ApartChecker:
    """Watches one world; raises `AssertionError` at the event that breaks a rule.

    Attributes:
        apart: So many times a copy was taken by who was apart.
    """

    def __init__(self, system: System) -> None:
        self.system = system
        self.apart = 0
        self._lost_at: dict[tuple[Life, str], int] = {}
        self._alone: dict[tuple[Life, int], int] = {}
        self._newest: dict[tuple[Life, int], int] = {}
        self._held: dict[tuple[Life, int], int] = {}
        if system.options.missed == "overwrite":
            system.recorders.append(self)

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """One event that a machine has handled."""
        host = self.system.learners.get(who)
        if host is None or host.machine is None:
            return
        machine = host.machine
        life, step = (who, machine.epoch, machine.nonce), machine.state.step
        match event:
            case Lost(peer):
                self._lost_at.setdefault((life, peer), step)
            case Received(peer, Welcome(shard)):
                alone = step - self._lost_at.pop((life, peer), step)
                for fragment in self.system.options.owned(shard):
                    place = (life, fragment)
                    self._alone[place] = max(alone, self._alone.get(place, 0))
            case Received(_, Published(fragment, version)):
                self._newest[life, fragment] = version.counter
        for effect in effects:
            if isinstance(effect, SendBody | Apply):
                self._goes_or_comes(life, effect)
            elif isinstance(effect, Relabel) and not effect.staged:
                self._held[life, effect.fragment] = effect.version.counter

    def _goes_or_comes(self, life: Life, effect: SendBody | Apply) -> None:
        place = (life, effect.fragment)
        alone = self._alone.pop(place, 0)
        options = self.system.options
        counted = options.counter_cap_periods * options.periods[1]
        if isinstance(effect, SendBody):
            held, keeps = effect.base.counter, True
        else:
            keeps, newer = effect.mode != "overwrite", effect.version.counter
            held, self._held[place] = self._held.get(place, newer), newer
        gone_on = self._newest.get(place, held) - held
        if alone > counted and gone_on > options.counter_cap_periods:
            self.apart += 1
            assert not keeps, (
                f"{life[0]} was apart from fragment {effect.fragment} for {alone} steps, and keeps "
                f"them"
            )
