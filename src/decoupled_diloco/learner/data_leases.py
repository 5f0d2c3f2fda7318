"""Where a training loop gets its leases: between `leased.LeasedBatches` and the state machine."""

from __future__ import annotations

from collections.abc import Callable

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.background import Background
from decoupled_diloco.protocol.data_leases.events import DataClosed, DataOpened, PartWanted
from decoupled_diloco.protocol.data_leases.messages import Lease
from decoupled_diloco.protocol.data_leases.state import DataView


class DataLeases:
    """One learner's leases, as its training loop sees them; idle until `open`.

    Attributes:
        taken: Batches taken since it was asked last; for `Learner.step`.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self.taken: Callable[[], int] = lambda: 0

    @property
    def _view(self) -> DataView | None:
        shared = self._background.shared
        return None if shared is None else shared.machine.state.data

    def open(self, parts: int, ahead: int, taken: Callable[[], int]) -> None:
        """The loop takes its batches from leased parts; ``taken`` counts those since it was asked.

        Raises:
            ConfigError: it does already.
        """
        if self._view is not None:
            name = self._background.identity.name
            raise ConfigError(f"{name} has leased data already: one loop has one source")
        self.taken = taken
        self._background.tell(DataOpened(parts, ahead))

    @property
    def part_is_over(self) -> bool:
        """Whether the loop should ask for a part before its next batch."""
        view = self._view
        return view is not None and view.leave

    async def next_part(self, ended: int | None, taken: int) -> tuple[Lease, int]:
        """The lease to train now, and from which batch; waits only if there has been none yet.

        Args:
            ended: How many batches the part before has, if it has ended.
            taken: Batches of it since the last step.

        Raises:
            ConfigError: the data are not the run's.
            TransportError: ``give_up_seconds`` have passed without any shard.
        """
        background = self._background
        with background.changed:
            background.tell(PartWanted(ended, taken))
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
                    background.tell(PartWanted(None))

    def close(self) -> None:
        """The loop has ended: what is not durable goes to others."""
        if self._view is not None:
            self._background.tell(DataClosed())
