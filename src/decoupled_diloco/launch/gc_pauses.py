"""Short pauses of Python's cycle collector in a process with very many objects.

A full collection traverses every object while nothing else runs: 0.4 s with the connections of
4,000 learners. Therefore `gc.freeze` sets the survivors of a collection aside, and the next one
traverses only newer objects. Reference counts still free objects that are set aside; only cycles
among them wait. When four times as many memory blocks are in use as after the last full traversal,
everything is traversed again, in one long pause. With 4,000 learners this happens at most once.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

GROWTH = 4
"""Growth of the number of memory blocks in use after which all objects are traversed again."""

THRESHOLDS = (20_000, 0, 0)
"""Thresholds of `gc.set_threshold`: each collection traverses at most 60,000 objects, which takes
30 ms. A round with thousands of learners causes one or two collections."""


class Survivors:
    """Sets the survivors of full collections aside, from `begin` to `end`."""

    def __init__(self) -> None:
        self._traverses_all = True
        self._known = 0
        self._thresholds = gc.get_threshold()

    def begin(self) -> None:
        """Collect the current garbage, and from now on traverse only newer objects."""
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(self._collected)
        gc.collect()

    def end(self) -> None:
        """Traverse all objects again, as Python does by default."""
        gc.set_threshold(*self._thresholds)
        gc.callbacks.remove(self._collected)
        gc.unfreeze()

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase != "stop" or info["generation"] < 2:
            return
        gc.freeze()
        # Blocks instead of objects: counting the objects would take as long as a collection.
        blocks = sys.getallocatedblocks()
        if self._traverses_all:
            self._traverses_all, self._known = False, blocks
        elif blocks > GROWTH * self._known:
            gc.unfreeze()
            self._traverses_all = True
