"""What must hold of a learner that trains on alone while its link is down, where that is dropped.

With ``missed = "overwrite"`` it contributes nothing from a version that it held before, if its link
was down for more of its own steps than count, and if it has been told that the fragment has gone on
for as many versions. Its next copy overwrites.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoupled_diloco.protocol.effects import Apply, Relabel, SendBody
from decoupled_diloco.protocol.events import Lost, Received
from decoupled_diloco.protocol.messages import Outcome, Published, Welcome
from decoupled_diloco.protocol.peers import shard_of
from decoupled_diloco.simulate.system import System


@dataclass(slots=True)
class Place:
    """One fragment at one learner.

    ``alone``: steps between a broken link and a welcome, since a copy was applied last;
    ``unheard``: at most as many, from the last word of the shard on.
    """

    held: int | None = None
    newest: int = 0
    lost_at: int | None = None
    heard_at: int = 0
    alone: int = 0
    unheard: int = 0

    def hears(self, event: Lost | Received, step: int, fragment: int) -> None:
        """Its shard says something, or its link breaks."""
        match event:
            case Lost():
                self.lost_at = step if self.lost_at is None else self.lost_at
                return
            case Received(_, Welcome()):
                self.alone += 0 if self.lost_at is None else step - self.lost_at
                self.unheard += step - self.heard_at
                self.lost_at = None
            case Received(_, Published() as told) if told.fragment == fragment:
                self.newest = told.version.counter
            case Received(_, Outcome() as told) if told.fragment == fragment:
                if told.verdict == "accepted":
                    self.alone = 0
        self.heard_at = step


class ApartChecker:
    """Watches one world; raises `AssertionError` at the event that breaks a rule."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._places: dict[tuple[str, int, str, int], Place] = defaultdict(Place)
        if system.options.missed == "overwrite":
            system.recorders.append(self)

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """One event that a machine has handled."""
        host = self.system.learners.get(who)
        if host is None or host.machine is None:
            return
        machine = host.machine
        life, step = (who, machine.epoch, machine.nonce), machine.state.step
        if isinstance(event, Lost | Received) and event.peer.startswith("shard-"):
            for fragment in self.system.options.owned(shard_of(event.peer)):
                self._places[*life, fragment].hears(event, step, fragment)
        for effect in effects:
            if isinstance(effect, SendBody):
                self._sends(who, effect.fragment, self._places[*life, effect.fragment])
            elif isinstance(effect, Apply):
                self._takes(who, effect, self._places[*life, effect.fragment], step)
            elif isinstance(effect, Relabel) and not effect.staged:
                self._places[*life, effect.fragment].held = effect.version.counter

    def _is_apart(self, place: Place) -> bool:
        options = self.system.options
        gone_on = 0 if place.held is None else place.newest - place.held
        counted = options.counter_cap_periods * options.periods[1]
        return place.alone > counted and gone_on >= options.counter_cap_periods

    def _sends(self, who: str, fragment: int, place: Place) -> None:
        text = f"{who} was apart from fragment {fragment} for {place.alone} steps, and sends them"
        assert not self._is_apart(place), text

    def _takes(self, who: str, taken: Apply, place: Place, step: int) -> None:
        options = self.system.options
        text = f"{who} was apart from fragment {taken.fragment} for {place.alone} steps"
        assert not self._is_apart(place) or taken.mode == "overwrite", f"{text}, and keeps them"
        if "it was apart" in taken.why:
            least = options.counter_cap_periods * options.periods[0]
            assert place.unheard > least, f"{text} at most, and drops them"
        place.alone = place.unheard = 0
        place.lost_at = None if place.lost_at is None else step
        place.held = taken.version.counter
