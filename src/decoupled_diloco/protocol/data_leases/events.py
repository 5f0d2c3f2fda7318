"""What a learner's machine is told by a loop that takes its batches from leased parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataOpened:
    """The training loop takes its batches from leased parts; it holds ``ahead`` spare leases."""

    parts: int
    ahead: int


@dataclass(frozen=True, slots=True)
class PartWanted:
    """The training loop needs a part; the one it had, if any, has ``batches`` and no more.

    ``None``: it had none, or was asked to leave it. ``taken``: batches of it that belong to the
    step that is under way.
    """

    batches: int | None
    taken: int = 0


@dataclass(frozen=True, slots=True)
class DataClosed:
    """The training loop has ended: what it holds of the data goes to others."""


DataEvent = DataOpened | PartWanted | DataClosed
