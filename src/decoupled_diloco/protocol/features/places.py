"""PlaceBook: the devices that may train at a time, at the coordinator (rule 23).

At most ``cohort`` devices hold a place. A device that is present requests one. It keeps its place
while it is away, trains alone and comes back, and returns the place when it has contributed. After
``visit_seconds`` the place is free again, whatever has become of its device.

```
           PlaceWanted              drawn                PlaceReturned, or its time has passed
 (present) ───────────▶ waiting ───────────▶ holding ───────────────────────────────────────▶ free
```

*The draw* is repeatable. One of the waiting devices is drawn by a hash of the run's seed, the
number of the place, and its name. With ``draw = "fair"``, it is one of those with the fewest places
so far. The order that grants a place states how it was drawn, so the tape shows it.

Nothing here is durable. A device that holds a place reports that it is present to a restarted
coordinator like any other, and waits for the next draw only if it needs a new place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from decoupled_diloco.protocol.coordinator_state import Enrolled
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    CoordinatorEffect,
    PlaceGiven,
    PlaceLost,
    PlaceReturned,
    PlaceWanted,
    Send,
)


@dataclass(frozen=True, slots=True)
class Place:
    """One device's place: its number, and when it is over."""

    number: int
    until: float


@dataclass(slots=True)
class PlaceBook:
    """The places of one run.

    Attributes:
        held: The place of each device that holds one, present or not.
        waiting: The devices that wait for a place, all present.
        given: How many places each device has had.
        number: The number of the last place.
    """

    held: dict[str, Place] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    given: Counter[str] = field(default_factory=Counter)
    number: int = 0

    @property
    def deadline(self) -> float | None:
        """When the next place is over; ``None``: no place is held."""
        # All places last equally long, so the oldest ends first.
        return next((place.until for place in self.held.values()), None)

    def receive(
        self,
        options: Options,
        now: float,
        learner: str,
        message: PlaceWanted | PlaceReturned,
        first: str,
    ) -> list[CoordinatorEffect]:
        """Process a device's message; ``first`` is served before all others, or empty."""
        place = self.held.get(learner)
        match message:
            case PlaceReturned(number):
                if place is not None and place.number == number:
                    del self.held[learner]  # break: place-never-free
            case PlaceWanted(fresh):
                if place is not None and not fresh and now < place.until:
                    given = PlaceGiven(place.number, place.until - now)
                    return [Send(learner, given, "it still holds its place")]
                self.held.pop(learner, None)
                self.waiting.add(learner)
        return self.draw(options, now, first)

    def gone(self, learner: str) -> None:
        """Remove a device that is no longer present from the waiting ones. It keeps its place."""
        self.waiting.discard(learner)  # break: absent-device-drawn

    def over(
        self, options: Options, now: float, learners: Mapping[str, Enrolled]
    ) -> list[CoordinatorEffect]:
        """End the places whose time has passed, and draw the next devices."""
        effects: list[CoordinatorEffect] = []
        why = f"it has not come back within {options.visit_seconds:g} s"
        for learner, place in list(self.held.items()):
            if now >= place.until:  # break: place-kept-forever
                del self.held[learner]
                if learners[learner].present:
                    effects.append(Send(learner, PlaceLost(place.number), why))
        return effects + self.draw(options, now, "")

    def draw(self, options: Options, now: float, first: str) -> list[CoordinatorEffect]:
        """Give the free places to waiting devices."""
        effects: list[CoordinatorEffect] = []
        cohort = options.cohort or 0
        while self.waiting and len(self.held) < cohort:  # break: cohort-ignored
            fair, those = self.waiting, "any of them"
            if options.draw == "fair":
                fewest = min(self.given[name] for name in self.waiting)
                fair = {name for name in self.waiting if self.given[name] == fewest}
                those = f"those with {fewest} places so far"
            self.number += 1
            learner = first if first in self.waiting else drawn(options.seed, self.number, fair)
            why = (
                f"place {self.number}: drawn with seed {options.seed} among {len(fair)} of "
                f"{len(self.waiting)} waiting devices, {those}"
            )
            self.waiting.discard(learner)
            self.given[learner] += 1
            self.held[learner] = Place(self.number, now + options.visit_seconds)
            effects.append(Send(learner, PlaceGiven(self.number, options.visit_seconds), why))
        return effects

    def check(self, options: Options) -> None:
        """Assert the invariants."""
        assert options.cohort is None or len(self.held) <= options.cohort
        assert not self.waiting & self.held.keys()


def drawn(seed: int, number: int, names: set[str]) -> str:
    """Return the name that is drawn for a place: each is equally likely over all numbers.

    >>> drawn(0, 1, {"a", "b", "c"}), drawn(0, 2, {"a", "b", "c"}), drawn(1, 1, {"a", "b", "c"})
    ('c', 'a', 'a')
    """

    def lot(name: str) -> tuple[bytes, str]:
        return blake2b(f"{seed} {number} {name}".encode(), digest_size=8).digest(), name

    return min(names, key=lot)
