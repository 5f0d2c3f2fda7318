"""Data in partitions that move between learners: each partition is trained once per epoch.

```python
loader = dd.data.ElasticLoader(dataset, partitions=64, batch_size=32)
for batch in loader.bind(learner):
    ...
    if not learner.step(loss):
        break
```
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from torch.utils.data import DataLoader, Dataset

from decoupled_diloco.config.settings import shown, suggestion
from decoupled_diloco.errors import ConfigError, a_kind
from decoupled_diloco.learner.checkpointer import Stateful
from decoupled_diloco.learner.data_leases import DataLeases, Leaseholder
from decoupled_diloco.runtime import blocking
from decoupled_diloco.workloads.text import region

__all__ = ["ElasticLoader", "PartitionedData"]

PARTITIONS_MAX = 1 << 24
PREFETCH = 2


@runtime_checkable
class PartitionedData(Protocol):
    """A custom source of data for `ElasticLoader`."""

    @property
    def partitions(self) -> int:
        """Number of partitions, at least 1, the same in every learner.

        Use several times as many as learners, and each of many steps.
        """
        ...

    def iter_partition(self, index: int, start_batch: int, epoch: int) -> Iterator[Any]:
        """Iterate over the batches of one partition, from ``start_batch`` to its end.

        Batch number i of a partition depends only on the partition, i and the epoch. If the
        iterator has ``state_dict`` and ``load_state_dict``, they are used to continue within a
        partition without reading everything before.

        Args:
            index: Number of the partition, 0 to partitions - 1.
            start_batch: Number of the first batch, at least 0.
            epoch: Number of the pass over the data, from 0 on; use it to shuffle differently.
        """
        ...


class ElasticLoader(Iterator[Any]):
    """An endless loader whose partitions are assigned to the run's learners.

    Each partition is trained once per epoch, by one learner, while learners join and leave. The
    coordinator assigns the partitions; `bind` connects the loader to a learner.

    Before the first batch the loader waits for its first partition. After that it never waits: if
    the coordinator is unreachable, it uses the partitions that it holds, and then repeats the last
    one. ``ddiloco data`` shows repeated partitions.

    Take the next batch only after `Learner.step` has counted the previous one. With gradient
    accumulation, take several batches per step: a step counts all batches taken since the last one.

    Pass it in ``Checkpointing(state={"data": loader})``, so that it continues inside a partition
    after a restart.

    Args:
        dataset: A map-style dataset (with ``len`` and numbered items), which is shuffled in each
            epoch. Or, for data that can only be read in order, a function of partition and epoch
            that returns the partition's batches. If the returned object has ``state_dict`` and
            ``load_state_dict``, like torchdata's ``StatefulDataLoader``, a partition continues
            from its state; otherwise its first batches are skipped. Or `PartitionedData`.
        partitions: Number of partitions, 1 to 2^24, the same in every learner. At most the number
            of batches of a map-style dataset. Required unless the dataset is `PartitionedData`.
        batch_size: Items per batch of a map-style dataset; the last batch of an epoch may be
            smaller.
        seed: Seed of the shuffling of a map-style dataset.
        prefetch: Partitions to hold in addition to the current one, at least 1. More of them last
            longer while the coordinator is unreachable. Default: the run's setting ``prefetch``.
        loader_options: Further arguments of `torch.utils.data.DataLoader` for a map-style dataset,
            such as ``num_workers``.

    Raises:
        ConfigError: An argument is missing, has no effect, or is out of range.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Callable[[int, int], Iterable[Any]] | PartitionedData,
        *,
        partitions: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        prefetch: int | None = None,
        **loader_options: Any,
    ) -> None:
        for name in loader_options:
            _refuse_unknown(name)
        _require_whole("batch_size", batch_size, 1, "items")
        _require_whole("seed", seed, 0)
        _require_whole("prefetch", prefetch, 1, "partitions")
        self._data = _data_of(dataset, partitions, batch_size, seed, loader_options)
        _require_integer("partitions", self._data.partitions, f"1 to {PARTITIONS_MAX}")
        if not 1 <= self._data.partitions <= PARTITIONS_MAX:
            raise ConfigError(
                f"partitions={self._data.partitions} is out of range: pass 1 to {PARTITIONS_MAX}"
            )
        self._prefetch = prefetch
        self._leases: DataLeases | None = None
        self._batches: Iterator[Any] | None = None
        self._place = (-1, -1)
        self._position = 0
        self._taken = 0
        self._empty = 0
        self._saved: dict[str, Any] = {}

    def bind(self, learner: Leaseholder) -> Self:
        """Use this loader with a learner; return the loader.

        Raises:
            ConfigError: The learner has a loader already, or the run has another number of
                partitions.
        """
        prefetch = self._prefetch
        if prefetch is None:
            prefetch = int(learner.run_config.get("data", {}).get("prefetch", PREFETCH))
        learner._leases.open(self._data.partitions, prefetch, self._take)
        self._leases = learner._leases
        return self

    def iter_partition(self, index: int, start_batch: int = 0, epoch: int = 0) -> Iterator[Any]:
        """Iterate over one partition without a learner; see `PartitionedData.iter_partition`."""
        return self._data.iter_partition(index, start_batch, epoch)

    @property
    def partitions(self) -> int:
        """Number of partitions."""
        return self._data.partitions

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and partition of the last batch; (-1, -1) before the first one."""
        return self._place

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, without the leases, which the coordinator has."""
        stream = self._batches.state_dict() if isinstance(self._batches, Stateful) else None
        epoch, index = self._place
        return {"epoch": epoch, "index": index, "position": self._position, "stream": stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position; it is used if the coordinator lets this learner continue there."""
        self._saved = dict(state)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return blocking(self.__anext__())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        leases = self._leases
        if leases is None:
            raise ConfigError(
                "this ElasticLoader has no learner: iterate over loader.bind(learner)"
            )
        while True:
            if self._batches is None or leases.partition_is_over:
                await self._next_partition(None)
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

    def _take(self) -> int:
        """Return the batches taken since the last call, for `Learner.step`."""
        taken, self._taken = self._taken, 0
        return taken

    async def _ended(self) -> None:
        self._empty += self._position == 0
        if self._empty > self._data.partitions:
            raise ConfigError(
                f"all {self._data.partitions} partitions are empty: check what iter_partition "
                "returns"
            )
        await self._next_partition(self._position)

    async def _next_partition(self, ended: int | None) -> None:
        assert self._leases is not None
        lease, start = await self._leases.next_partition(ended, self._take())
        self._place, self._position = (lease.turn, lease.part), start
        self._batches = self._opened(lease.turn, lease.part, start)

    def _opened(self, epoch: int, index: int, start: int) -> Iterator[Any]:
        saved = self._saved
        if (saved.get("epoch"), saved.get("index")) == (epoch, index):
            position, stream = int(saved["position"]), saved["stream"]
            batches = self._data.iter_partition(index, 0, epoch)
            if stream is not None and position <= start and isinstance(batches, Stateful):
                batches.load_state_dict(stream)
                return _Skipped(batches, start - position)
        return self._data.iter_partition(index, start, epoch)


OWN_CHOICES = ("batch_sampler", "sampler", "shuffle", "drop_last")
"""Arguments of `DataLoader` that an `ElasticLoader` chooses itself."""


def _refuse_unknown(name: str) -> None:
    own = [each for each in inspect.signature(ElasticLoader).parameters if each != "loader_options"]
    further = inspect.signature(DataLoader).parameters
    if name in OWN_CHOICES:
        raise ConfigError(
            f"{name}= has no effect, because ElasticLoader assigns and shuffles the items itself: "
            "leave it out"
        )
    if name not in further:
        known = list(dict.fromkeys([*own, *(each for each in further if each not in OWN_CHOICES)]))
        raise ConfigError(
            f"{name}= is not known to ElasticLoader, nor to torch.utils.data.DataLoader: "
            f"{suggestion(name, known)}"
        )


def _require_whole(name: str, value: object, least: int, of: str = "") -> None:
    """Check a number that has a lower limit; ``None`` is allowed."""
    if value is None:
        return
    fix = f"{least} or more {of}".rstrip()
    if _require_integer(name, value, fix) < least:
        raise ConfigError(f"{name}={shown(value)} is out of range: pass {fix}")


def _require_integer(name: str, value: Any, fix: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name}={shown(value)} is not a whole number: pass {fix}") from None


def _data_of(
    dataset: Any,
    partitions: int | None,
    batch_size: int | None,
    seed: int,
    loader_options: dict[str, Any],
) -> PartitionedData:
    options = {"batch_size": batch_size, "seed": seed or None, **loader_options}
    given = sorted(name for name, value in options.items() if value is not None)
    if isinstance(dataset, PartitionedData):
        given += [] if partitions is None else ["partitions"]
        kind, data = "a dataset with iter_partition, which decides that itself", dataset
    elif isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
        if partitions is None or batch_size is None:
            raise ConfigError(
                "ElasticLoader(dataset) needs partitions= and batch_size= for a map-style dataset"
            )
        return _MapPartitions(dataset, partitions, batch_size, seed, loader_options)
    elif callable(dataset):
        if partitions is None:
            raise ConfigError("ElasticLoader(function) needs partitions=")
        kind, data = "a function, whose batches are used as they are", _Streams(dataset, partitions)
    else:
        raise ConfigError(
            f"ElasticLoader cannot split {a_kind(dataset)}: pass a map-style dataset "
            "(with len), a function of partition and epoch that returns batches, or an object with "
            "partitions and iter_partition"
        )
    if given:
        raise ConfigError(f"{given[0]}= has no effect with {kind}: leave it out")
    return data


class _Skipped(Iterator[Any]):
    """A stream that starts at a later batch, with the stream's state."""

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


class _MapPartitions:
    """A map-style dataset: each item once per epoch, shuffled differently in each epoch."""

    def __init__(
        self,
        dataset: Any,
        partitions: int,
        batch_size: int,
        seed: int,
        loader_options: dict[str, Any],
    ) -> None:
        self._dataset, self.partitions, self._size = dataset, partitions, batch_size
        self._seed, self._options = seed, loader_options
        self._items = len(dataset)
        self._batches = -(-self._items // batch_size)
        _require_integer("partitions", partitions, f"1 to {self._batches}")
        self._epoch, self._order = -1, np.arange(0)
        if not 1 <= partitions <= self._batches:
            raise ConfigError(
                f"partitions={partitions} is out of range: {self._items} items are {self._batches} "
                f"batches of {batch_size}: pass 1 to {self._batches} partitions"
            )

    def iter_partition(self, index: int, start_batch: int, epoch: int) -> Iterator[Any]:
        """See `PartitionedData.iter_partition`."""
        if epoch != self._epoch:  # a learner trains several partitions of each epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._items)
            self._epoch = epoch
        order = self._order
        own = region(self._batches, index, self.partitions)[start_batch:]
        size = self._size
        batches = [order[number * size : (number + 1) * size].tolist() for number in own]
        return iter(DataLoader(self._dataset, batch_sampler=batches, **self._options))


class _Streams:
    """Data that can only be read in order: a function returns the batches of a partition."""

    def __init__(self, make: Callable[[int, int], Iterable[Any]], partitions: int) -> None:
        self._make, self.partitions = make, partitions

    def iter_partition(self, index: int, start_batch: int, epoch: int) -> Iterator[Any]:
        """See `PartitionedData.iter_partition`."""
        source = self._make(index, epoch)
        stream = _StatefulStream(source) if isinstance(source, Stateful) else iter(source)
        for _ in islice(stream, start_batch):
            pass
        return stream


class _StatefulStream(Iterator[Any]):
    """A stateful loader as its own iterator; it starts when the first batch is requested."""

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
