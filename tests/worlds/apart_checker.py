"""Rules for a learner that trains alone while its link is down and whose steps are then dropped.

They apply with ``missed = "overwrite"``. Such a learner has diverged if its link was down for more
of its own steps than may count, and if the shard published as many versions meanwhile. Then it
contributes nothing from a version that it held before, and its next copy overwrites its parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoupled_diloco.protocol.messages import (
    Apply,
    Lost,
    Outcome,
    Published,
    Received,
    Relabel,
    SendBody,
    Welcome,
    shard_of,
)
from decoupled_diloco_lab.simulate.system import System


@dataclass(slots=True)
class Place:
    """One fragment at one learner.

    Attributes:
        held: Counter of the version that the learner holds.
        newest: Counter of the newest version that the shard has announced.
        lost_at: Step at which the link broke, while it is down.
        received_at: Step at which the shard last sent something.
        alone: Steps between a broken link and a `Welcome`, since the last applied copy.
        unheard: Steps between the shard's last message and a `Welcome`, an upper bound of `alone`.
    """

    held: int | None = None
    newest: int = 0
    lost_at: int | None = None
    received_at: int = 0
    alone: int = 0
    unheard: int = 0

    def receives(self, event: Lost | Received, step: int, fragment: int) -> None:
        """Handle a message of its shard, or the loss of its link."""
        match event:
            case Lost():
                self.lost_at = step if self.lost_at is None else self.lost_at
                return
            case Received(_, Welcome()):
                self.alone += 0 if self.lost_at is None else step - self.lost_at
                self.unheard += step - self.received_at
                self.lost_at = None
            case Received(_, Published() as message) if message.fragment == fragment:
                self.newest = message.version.counter
            case Received(_, Outcome() as message) if message.fragment == fragment:
                if message.verdict == "accepted":
                    self.alone = 0
        self.received_at = step


class ApartChecker:
    """Checks one world. It raises `AssertionError` at the event that breaks a rule."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._places: dict[tuple[str, int, str, int], Place] = defaultdict(Place)
        if system.options.missed == "overwrite":
            system.recorders.append(self)

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Check one event that a state machine has handled."""
        host = self.system.learners.get(process)
        if host is None or host.machine is None:
            return
        machine = host.machine
        life, step = (process, machine.epoch, machine.nonce), machine.state.step
        if isinstance(event, Lost | Received) and event.peer.startswith("shard-"):
            for fragment in self.system.options.owned(shard_of(event.peer)):
                self._places[*life, fragment].receives(event, step, fragment)
        for effect in effects:
            if isinstance(effect, SendBody):
                self._sends(process, effect.fragment, self._places[*life, effect.fragment])
            elif isinstance(effect, Apply):
                self._takes(process, effect, self._places[*life, effect.fragment], step)
            elif isinstance(effect, Relabel) and not effect.staged:
                self._places[*life, effect.fragment].held = effect.version.counter

    def _has_diverged(self, place: Place) -> bool:
        options = self.system.options
        behind = 0 if place.held is None else place.newest - place.held
        counted = options.counter_cap_periods * options.periods[1]
        return place.alone > counted and behind >= options.counter_cap_periods

    def _sends(self, process: str, fragment: int, place: Place) -> None:
        text = f"{process} sends {place.alone} steps in which fragment {fragment} had diverged"
        assert not self._has_diverged(place), text

    def _takes(self, process: str, taken: Apply, place: Place, step: int) -> None:
        options = self.system.options
        text = f"{process} trained fragment {taken.fragment} alone for {place.alone} steps"
        assert not self._has_diverged(place) or taken.mode == "overwrite", f"{text} and keeps them"
        if "it was disconnected for more" in taken.why:
            least = options.counter_cap_periods * options.periods[0]
            assert place.unheard > least, f"{text} at most and drops them"
        place.alone = place.unheard = 0
        place.lost_at = None if place.lost_at is None else step
        place.held = taken.version.counter
