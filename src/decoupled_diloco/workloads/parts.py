"""A workload's data in virtual parts, for leases."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from decoupled_diloco.workloads.base import Batch, InPasses, Workload
from decoupled_diloco.workloads.text import region

PART_BATCHES = 64
"""Batches of a part where the workload's data have no end: asking for a lease is then rare, and
what a lost lease can cost is small."""


class WorkloadParts:
    """The data of a workload, pass after pass, cut into parts; see `learner.leased.PartedData`.

    A workload that is not `InPasses` is asked for the endless batches of each virtual part, of
    which each pass takes the next `PART_BATCHES`. ``parts``: how many at most, and then how many
    there are, since a part has at least one batch.
    """

    def __init__(self, workload: Workload, parts: int) -> None:
        self._workload = workload
        self._batches = workload.pass_batches() if isinstance(workload, InPasses) else None
        self.parts = parts if self._batches is None else min(parts, self._batches)

    def open(self, part: int, start: int, turn: int) -> Iterator[Batch]:
        """The batches of one part in one pass, from number `start` on."""
        if self._batches is None:
            first = turn * PART_BATCHES
            endless = self._workload.batches(part, self.parts, first + start)
            return islice(endless, max(0, PART_BATCHES - start))
        return self._of_pass(region(self._batches, part, self.parts)[start:], turn)

    def _of_pass(self, numbers: range, turn: int) -> Iterator[Batch]:
        workload = self._workload
        assert isinstance(workload, InPasses)
        for number in numbers:
            yield workload.pass_batch(turn, number)
