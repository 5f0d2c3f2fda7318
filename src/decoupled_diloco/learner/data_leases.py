"""A learner's leases of data partitions, between `ElasticLoader` and the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.background import Background
from decoupled_diloco.protocol.learner_state import DataView
from decoupled_diloco.protocol.messages import DataClosed, DataOpened, Lease, PartWanted


class Leaseholder(Protocol):
    """The interface of a `Learner` that an `ElasticLoader` uses."""

    @property
    def run_config(self) -> dict[str, Any]:
        """The run's settings that all learners share."""

    @property
    def _leases(self) -> DataLeases:
        """The learner's leases of partitions."""


class DataLeases:
    """One learner's leases of partitions, for its training loop; unused until `open`.

    Attributes:
        taken: Returns the number of batches taken since its last call; for `Learner.step`.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self.taken: Callable[[], int] = lambda: 0

    @property
    def _view(self) -> DataView | None:
        shared = self._background.shared
        return None if shared is None else shared.machine.state.data

    def open(self, partitions: int, prefetch: int, taken: Callable[[], int]) -> None:
        """Start to take batches from leased partitions.

        Args:
            partitions: Number of partitions of the data.
            prefetch: Leases to hold beyond the current one.
            taken: Returns the number of batches taken since its last call.

        Raises:
            ConfigError: The learner already has a loader.
        """
        if self._view is not None:
            name = self._background.identity.name
            raise ConfigError(f"learner {name!r} has an ElasticLoader already: use one per learner")
        self.taken = taken
        self._background.submit(DataOpened(partitions, prefetch))

    @property
    def partition_is_over(self) -> bool:
        """Whether the loop must request a partition before its next batch."""
        view = self._view
        return view is not None and view.leave

    async def next_partition(self, ended: int | None, taken: int) -> tuple[Lease, int]:
        """Return the lease to train now, and its first batch; wait only if there is none yet.

        Args:
            ended: Number of batches in the previous partition, if it has ended.
            taken: Batches of it taken since the last step.

        Raises:
            ConfigError: The data differ from the run's.
            TransportError: ``Timeouts.disconnect`` has passed without any reachable shard.
        """
        background = self._background
        with background.changed:
            background.submit(PartWanted(ended, taken))
            while True:
                if background.failure is not None:
                    raise background.failure
                view = self._view
                assert view is not None, "the loop has opened its data"
                if view.refused:
                    raise ConfigError(view.refused)
                if view.current:
                    return view.next_batch()
                await background.changed.wait(1.0)
                if view.leases:
                    background.submit(PartWanted(None))

    def close(self) -> None:
        """End the loop's use of the data; other learners receive what is not durably trained."""
        if self._view is not None:
            self._background.submit(DataClosed())
