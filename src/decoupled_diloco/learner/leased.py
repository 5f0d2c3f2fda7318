"""One's own data as leased parts: every part trained once, by whoever is there.

```python
data = dd.MapParts(dataset, parts=64, batch_size=32)
for batch in dd.leased(learner, data):
    ...
    if not learner.step(tokens=batch.numel()):
        break
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from torch.utils.data import DataLoader, Dataset

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.checkpointer import Stateful
from decoupled_diloco.learner.data_leases import DataLeases
from decoupled_diloco.learner.learner import Learner
from decoupled_diloco.runtime import blocking
from decoupled_diloco.workloads.text import region

PARTS_MAX = 1 << 24
LEASES_AHEAD = 2


@runtime_checkable
class PartedData(Protocol):
    """Data in virtual parts: what `leased` needs."""

    @property
    def parts(self) -> int:
        """How many parts, at least 1, the same in every learner.

        Several times as many as learners, and each of many steps.
        """
        ...

    def open(self, part: int, start: int, turn: int) -> Iterator[Any]:
        """The batches of one part, from number ``start`` on, to its end.

        Batch number i of a part depends on nothing but the part, i and the turn. Where what is
        returned has ``state_dict`` and ``load_state_dict``, they are used to go on in a part
        without reading all that is before.

        Args:
            part: 0 to parts - 1.
            start: Number of the first batch, at least 0.
            turn: Which pass over the data, 0 and up: the place to shuffle anew.
        """
        ...


def leased(learner: Learner, data: PartedData, *, ahead: int | None = None) -> LeasedBatches:
    """The batches that this learner is to train: endless, from parts that are its own alone.

    Take the next batch only after `Learner.step` has been told of the one before (or of several,
    when gradients are accumulated): a batch that was taken counts as trained by the next step.

    Before the first batch it waits for the first lease, as the learner has waited for the weights;
    after that it never waits. While the coordinator is out of reach it goes on with what it holds;
    when that is used up it trains the last part once more, and the ledger says so.

    Args:
        learner: Whose they are.
        data: The data.
        ahead: Leases to hold beyond the one being trained, at least 1; more of them last longer
            while the coordinator is away. Default: the run's ``data.leases_ahead``.

    Raises:
        ConfigError: The data have another number of parts than the run's, or none.
    """
    return LeasedBatches(data, ahead=ahead).of(learner)


class LeasedBatches(Iterator[Any]):
    """What `leased` returns; made by itself, it can be one of the ``stateful`` of a `Learner`.

    ```python
    batches = dd.LeasedBatches(data)
    learner = dd.Learner(model, address, checkpoint=folder, stateful={"data": batches}, ...)
    for batch in batches.of(learner):
    ```

    Args:
        data: As for `leased`.
        ahead: As for `leased`.

    Raises:
        ConfigError: The data are not in parts, have none, or too many, or ``ahead`` is less than 1.
    """

    def __init__(self, data: PartedData, *, ahead: int | None = None) -> None:
        if not isinstance(data, PartedData):
            raise ConfigError(
                f"the data are a {type(data).__name__} without parts: wrap a map-style dataset as "
                "MapParts(dataset, parts=…, batch_size=…), what is read in order as "
                "StreamParts(make, parts=…)"
            )
        if not 1 <= data.parts <= PARTS_MAX:
            raise ConfigError(f"parts={data.parts} of the data is not 1 to {PARTS_MAX}")
        if ahead is not None and ahead < 1:
            raise ConfigError(f"ahead={ahead}: one lease at least must lie ready")
        self._data = data
        self._ahead = ahead
        self._data_leases: DataLeases | None = None
        self._batches: Iterator[Any] | None = None
        self._place = (-1, -1)
        self._position = 0
        self._taken = 0
        self._empty = 0
        self._saved: dict[str, Any] = {}

    def of(self, learner: Learner) -> Self:
        """These batches, from now on for this learner.

        Raises:
            ConfigError: It has leased data already.
        """
        ahead = self._ahead
        if ahead is None:
            ahead = int(learner.settings.get("data", {}).get("leases_ahead", LEASES_AHEAD))
        learner.leases.open(self._data.parts, ahead, self._take)
        self._data_leases = learner.leases
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return blocking(self.__anext__())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        data_leases = self._data_leases
        if data_leases is None:
            raise ConfigError("these batches are nobody's yet: iterate over batches.of(learner)")
        while True:
            if self._batches is None or data_leases.part_is_over:
                await self._next_part(None)
            assert self._batches is not None
            try:
                batch = next(self._batches)
            except StopIteration:
                await self._ended()
                continue
            self._position += 1
            self._taken += 1
            self._empty = 0
            return batch

    @property
    def part(self) -> tuple[int, int]:
        """Pass over the data and part of the batch that was taken last."""
        return self._place

    def state_dict(self) -> dict[str, Any]:
        """Where it is in the data. Which parts are its own the coordinator knows, not this."""
        stream = self._batches.state_dict() if isinstance(self._batches, Stateful) else None
        turn, part = self._place
        return {"turn": turn, "part": part, "position": self._position, "stream": stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Where an earlier life was: used if the coordinator lets this one go on there."""
        self._saved = dict(state)

    def _take(self) -> int:
        """Batches taken since the last time; for `Learner.step`."""
        taken, self._taken = self._taken, 0
        return taken

    async def _ended(self) -> None:
        self._empty += self._position == 0
        if self._empty > self._data.parts:
            raise ConfigError(f"all {self._data.parts} parts of the data are empty")
        await self._next_part(self._position)

    async def _next_part(self, ended: int | None) -> None:
        assert self._data_leases is not None
        lease, start = await self._data_leases.next_part(ended, self._take())
        self._place, self._position = (lease.turn, lease.part), start
        self._batches = self._opened(lease.turn, lease.part, start)

    def _opened(self, turn: int, part: int, start: int) -> Iterator[Any]:
        saved = self._saved
        if (saved.get("turn"), saved.get("part")) == (turn, part):
            position, stream = int(saved["position"]), saved["stream"]
            batches = self._data.open(part, 0, turn)
            if stream is not None and position <= start and isinstance(batches, Stateful):
                batches.load_state_dict(stream)
                return _Skipped(batches, start - position)
        return self._data.open(part, start, turn)


class _Skipped(Iterator[Any]):
    """A stream that begins some batches later, with the stream's own state."""

    def __init__(self, stream: Any, count: int) -> None:
        self._stream = stream
        for _ in islice(stream, count):
            pass

    def __next__(self) -> Any:
        return next(self._stream)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._stream.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state)


class MapParts:
    """A map-style dataset in parts: each item once in a pass, shuffled anew in each.

    Args:
        dataset: With ``len`` and numbered items.
        parts: Number of parts.
        batch_size: Items of a batch; the last one of a pass may be smaller.
        seed: Of the shuffling.
        loader: Further arguments of `torch.utils.data.DataLoader`, such as ``num_workers``.

    Raises:
        ConfigError: There are more parts than batches, or the dataset has no ``len``.
    """

    def __init__(
        self, dataset: Dataset[Any], *, parts: int, batch_size: int, seed: int = 0, **loader: Any
    ) -> None:
        self.dataset = dataset
        self.parts = parts
        self.batch_size = batch_size
        self.seed = seed
        self._loader = loader
        if not isinstance(dataset, Sized):
            raise ConfigError(
                f"the dataset is a {type(dataset).__name__} without len: give data that can only "
                "be read in order as StreamParts(make, parts=…)"
            )
        self._items = len(dataset)
        self._batches = -(-self._items // batch_size)
        if not 1 <= parts <= self._batches:
            raise ConfigError(
                f"parts={parts}: the data have {self._items} items, so {self._batches} batches of "
                f"{batch_size}: give 1 to {self._batches} parts"
            )

    def open(self, part: int, start: int, turn: int) -> Iterator[Any]:
        """See `PartedData.open`."""
        order = np.random.default_rng([self.seed, turn]).permutation(self._items)
        mine = region(self._batches, part, self.parts)[start:]
        size = self.batch_size
        batches = [order[number * size : (number + 1) * size].tolist() for number in mine]
        return iter(DataLoader(self.dataset, batch_sampler=batches, **self._loader))


class StreamParts:
    """Data that can only be read in order: an `IterableDataset`, or a loader over one, per part.

    Args:
        make: Given part and turn, what iterates over the part's batches. If it has ``state_dict``
            and ``load_state_dict``, as torchdata's ``StatefulDataLoader`` has, a part is gone on
            with from its state; else from its beginning, leaving out what is before.
        parts: Number of parts.

    Raises:
        ConfigError: ``make`` cannot be called.
    """

    def __init__(self, make: Callable[[int, int], Iterable[Any]], *, parts: int) -> None:
        if not callable(make):
            raise ConfigError(
                f"make={make!r} cannot be called: give a function of part and turn that returns "
                "the part's batches"
            )
        self._make = make
        self.parts = parts

    def open(self, part: int, start: int, turn: int) -> Iterator[Any]:
        """See `PartedData.open`."""
        source = self._make(part, turn)
        stream = _StatefulStream(source) if isinstance(source, Stateful) else iter(source)
        for _ in islice(stream, start):
            pass
        return stream


class _StatefulStream(Iterator[Any]):
    """A stateful loader as its own iterator; it begins when the first batch is asked for."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._running: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._running is None:
            self._running = iter(self._loader)
        return next(self._running)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._running = None
