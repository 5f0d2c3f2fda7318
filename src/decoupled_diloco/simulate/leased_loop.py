"""Leased data in a virtual world: what `learner.leased` is to a real training loop.

The loop of a virtual learner takes its batches here, and what it really trained is written down, so
that a checker can hold the ledger to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from decoupled_diloco.protocol.data_leases.events import DataOpened, PartWanted
from decoupled_diloco.protocol.data_leases.state import DataView
from decoupled_diloco.protocol.events import StepFinished

if TYPE_CHECKING:
    from decoupled_diloco.simulate.learner_process import LearnerProcess


class Parts(Protocol):
    """Data in parts, as `learner.leased.PartedData`."""

    @property
    def parts(self) -> int:
        """How many there are."""
        ...

    def open(self, part: int, start: int, turn: int) -> Iterator[Any]:
        """The batches of a part from number ``start`` on."""
        ...


@dataclass(frozen=True)
class NumberedParts:
    """Parts of a few numbers each, of different lengths; some are empty, not the first."""

    parts: int
    longest: int

    def length(self, part: int, turn: int) -> int:
        """How many batches a part has in a pass."""
        return max(part == 0, (part * 7 + turn * 3) % (self.longest + 1))

    def open(self, part: int, start: int, turn: int) -> Iterator[int]:
        """See `Parts.open`."""
        return iter(range(start, self.length(part, turn)))


@dataclass(frozen=True, slots=True)
class Trained:
    """One batch that was really trained: whose step, under which lease."""

    learner: str
    epoch: int
    step: int
    lease: int
    turn: int
    part: int
    index: int
    repeat: bool


@dataclass
class VirtualData:
    """The data of a world.

    Attributes:
        source: The parts.
        ahead: Spare leases that a learner holds.
        batches_per_step: What one step takes.
        trained: Everything that was trained, in order.
    """

    source: Parts
    ahead: int = 2
    batches_per_step: int = 1
    trained: list[Trained] = field(default_factory=list)


class LeasedLoop:
    """The data side of one virtual training loop."""

    def __init__(self, process: LearnerProcess, data: VirtualData) -> None:
        self._process = process
        self._data = data
        self._batches: Iterator[Any] | None = None
        self._position = 0
        self._since_told = 0
        self._taken: list[tuple[int, int, int, int, bool]] = []
        self.batch: Any = None

    def open(self) -> None:
        """The loop begins."""
        self._process.tell(DataOpened(self._data.source.parts, self._data.ahead))

    def draw(self) -> bool:
        """Takes the batches of the next step; ``False``: there is no lease yet."""
        while len(self._taken) < self._data.batches_per_step:
            if self._batches is None or self._view.leave:
                self._next_part(None)
            if self._batches is None:
                return False
            try:
                self.batch = next(self._batches)
            except StopIteration:
                self._next_part(self._position)
                continue
            view = self._view
            lease = view.leases[view.current].lease
            place = (lease.number, lease.turn, lease.part, self._position, view.repeating)
            self._taken.append(place)
            self._position += 1
            self._since_told += 1
        return True

    def finished(self, tokens: int) -> StepFinished:
        """The step that took them is finished."""
        process, epoch = self._process, self._process.epoch
        step = process.machine.state.step + 1
        self._data.trained += [Trained(process.name, epoch, step, *place) for place in self._taken]
        self._taken.clear()
        batches, self._since_told = self._since_told, 0
        return StepFinished(tokens, batches)

    @property
    def _view(self) -> DataView:
        view = self._process.machine.state.data
        assert view is not None, "the loop has opened its data"
        return view

    def _next_part(self, ended: int | None) -> None:
        taken, self._since_told = self._since_told, 0
        self._process.tell(PartWanted(ended, taken))
        view = self._view
        if not view.current:
            self._batches = None
            return
        lease, self._position = view.next_batch()
        self._batches = self._data.source.open(lease.part, self._position, lease.turn)
