"""A workload's data in partitions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from decoupled_diloco.workloads.text import region
from decoupled_diloco.workloads.workload import Batch, InPasses, Workload

PARTITION_BATCHES = 64
"""Batches per partition and epoch if the workload's data are endless. Leases are then rarely
requested, and a lost lease costs little."""


class WorkloadPartitions:
    """The data of a workload as `decoupled_diloco.data.PartitionedData`.

    A workload that is not `InPasses` has endless batches for each partition. Each epoch takes the
    next `PARTITION_BATCHES` of them.

    Args:
        workload: The workload.
        partitions: The highest number of partitions. There are fewer if an epoch has fewer batches.
    """

    def __init__(self, workload: Workload, partitions: int) -> None:
        self._workload = workload
        self._batches = workload.pass_batches() if isinstance(workload, InPasses) else None
        self.partitions = partitions if self._batches is None else min(partitions, self._batches)

    def iter_partition(self, index: int, start_batch: int, epoch: int) -> Iterator[Batch]:
        """See `PartitionedData.iter_partition`."""
        if self._batches is None:
            first = epoch * PARTITION_BATCHES
            endless = self._workload.batches(index, self.partitions, first + start_batch)
            return islice(endless, max(0, PARTITION_BATCHES - start_batch))
        return self._of_pass(region(self._batches, index, self.partitions)[start_batch:], epoch)

    def _of_pass(self, numbers: range, epoch: int) -> Iterator[Batch]:
        workload = self._workload
        assert isinstance(workload, InPasses)
        for number in numbers:
            yield workload.pass_batch(epoch, number)
