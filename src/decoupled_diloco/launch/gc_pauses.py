"""Short pauses of Python's cycle collector in a process with very many objects.

A full collection looks at every object, and nothing else runs meanwhile: 0.4 s with the connections
of 4,000 learners. So what survives one is put aside (`gc.freeze`), and the next looks at newer
objects alone. What is put aside and becomes garbage is freed by its reference count as ever; cycles
among it wait until the process has four times as much memory in use as when all was looked at last:
then all is looked at again, in one long pause. With 4,000 learners it comes never or once.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

GROWTH = 4
"""All is looked at again when so many times as many blocks of memory are in use."""

THRESHOLDS = (20_000, 0, 0)
"""New objects before a collection, young ones before an older: each looks at 60,000 objects at
most, which takes 30 ms, and a round of thousands of learners leads to one or two."""


class Survivors:
    """Puts aside what survives full collections, from `begin` to `end`."""

    def __init__(self) -> None:
        self._all_are_looked_at = True
        self._known = 0
        self._thresholds = gc.get_threshold()

    def begin(self) -> None:
        """Collects what is garbage now, and from now on looks at newer objects alone."""
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(self._collected)
        gc.collect()

    def end(self) -> None:
        """Looks at everything again, as Python does of itself."""
        gc.set_threshold(*self._thresholds)
        gc.callbacks.remove(self._collected)
        gc.unfreeze()

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase != "stop" or info["generation"] < 2:
            return
        gc.freeze()
        there = sys.getallocatedblocks()  # counting what is put aside would take as long again
        if self._all_are_looked_at:
            self._all_are_looked_at, self._known = False, there
        elif there > GROWTH * self._known:
            gc.unfreeze()
            self._all_are_looked_at = True
