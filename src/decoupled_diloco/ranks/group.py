"""Communication of a learner's ranks: documents at boundaries, tensors in the background, a watch.

Each rank has three process groups. All use gloo and host memory:

- *boundary* exchanges one document per rank and step, while the step is trained,
- *payloads* redistributes fragments,
- *checkpoints* writes checkpoints.

One thread of each rank uses each group. The training framework has its own groups, so its
collectives and these never wait for each other.

A rank that waits in a collective cannot find out which rank hangs, so `Watch` does. A separate
thread of each rank writes an entry to the job's store every few seconds: the rank is alive, and at
this place in its program. Rank 0 reads the other ranks' entries; they read the entry of rank 0. The
watch only logs. Collectives have their own timeouts: `SILENCE_SECONDS` here, the training program's
elsewhere.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from decoupled_diloco.errors import ConfigError, DilocoError, TransportError
from decoupled_diloco.runtime import now

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
"""Seconds between two entries of a rank in the store."""
STALLED_SECONDS = 20.0
"""A rank that does not respond, or is at another place, for this many seconds is logged."""


@dataclass
class _LastSeen:
    """The last known state of another rank; times are seconds of the runtime's clock.

    Attributes:
        entry: Its last entry in the store.
        changed_at: When the entry last changed.
        place: Where in its program the rank is.
        since: When it came to this place.
        logged: The last warning about it; empty if it is in order.
    """

    entry: Any = None
    changed_at: float = 0.0
    place: str = ""
    since: float = 0.0
    logged: str = ""


class Watch:
    """One rank's watch over other ranks, in a separate thread.

    Args:
        store: The job's store. It is copied, because a store serves one thread at a time.
        meeting: Prefix of the keys; the same on every rank, and used once.
        rank: This rank.
        size: The number of ranks.

    Attributes:
        place: Where in its program this rank is.
    """

    def __init__(self, store: Any, meeting: str, rank: int, size: int) -> None:
        self.place = ""
        self._meeting = meeting
        self._rank = rank
        self._others = range(1, size) if rank == 0 else (0,)
        self._seen = {other: _LastSeen(changed_at=now()) for other in self._others}
        self._since, self._place = now(), ""
        self._end = threading.Event()
        if hasattr(store, "clone"):  # PyTorch before 2.8 has no clone(): no watch there
            self._store = store.clone()
            threading.Thread(target=self._run, name="ddiloco-watch", daemon=True).start()

    def close(self) -> None:
        """Stop the thread, without waiting for it."""
        self._end.set()

    def _run(self) -> None:
        beats = 0
        try:
            while not self._end.wait(CHECK_SECONDS):
                beats += 1
                self._store.set(self._key(self._rank), json.dumps([beats, self.place]))
                self._check(now())
        except RuntimeError as error:  # the store ends with the rank that serves it
            if not self._end.is_set():
                logger.warning(
                    "the job's store failed; other ranks are not watched any more: %s",
                    str(error)[:200],
                )

    def _key(self, rank: int) -> str:
        return f"{self._meeting}/at/{rank}"

    def _check(self, at: float) -> None:
        if self.place != self._place:
            self._place, self._since = self.place, at
        for rank, seen in self._seen.items():
            # get() of a missing key would block this thread.
            entry = self._store.get(self._key(rank)) if self._has(rank) else None
            if entry != seen.entry:
                seen.entry, seen.changed_at = entry, at
                place = json.loads(entry)[1] if entry else ""
                if place != seen.place:
                    seen.place, seen.since = place, at
            problem = self._problem(rank, seen, at)
            if problem and problem != seen.logged:
                logger.warning("%s", problem)
            if seen.logged and not problem:
                logger.warning("rank %d of this learner continues", rank)
            seen.logged = problem

    def _has(self, rank: int) -> bool:
        return bool(self._store.check([self._key(rank)]))

    def _problem(self, rank: int, seen: _LastSeen, at: float) -> str:
        """Return a sentence about a stalled rank; empty if it is in order."""
        if at - seen.changed_at > STALLED_SECONDS:
            return (
                f"rank {rank} of this learner does not respond: its process is stopped, or its "
                "machine or network is down"
            )
        if seen.place != self._place and at - max(seen.since, self._since) > STALLED_SECONDS:
            return (
                f"rank {rank} of this learner is at {seen.place!r} and rank {self._rank} at "
                f"{self._place!r}, for more than {STALLED_SECONDS:.0f} s: every rank must make "
                "the same calls in every step"
            )
        return ""


SLOT_BYTES = 1024
"""A rank's document at a boundary is sent in one piece if it fits into this many bytes."""

LENGTH_BYTES = 4
"""Bytes of a slot that contain the length of the document, big-endian."""

SILENCE_SECONDS = 600.0
"""Timeout of collectives: a rank that is awaited for this many seconds is treated as lost."""

MISSING_SECONDS = 10.0
"""After this many seconds, rank 0 logs which ranks have not created their `Learner` yet."""

_MEETINGS = itertools.count()
"""Numbers the meetings; every rank creates its groups in the same order."""


def ranks_of_this_job() -> int:
    """Return the number of ranks of the program's process group; 1 without a process group.

    Raises:
        ConfigError: WORLD_SIZE is above 1, and no process group is initialized.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks not in ("", "0", "1"):
        raise ConfigError(
            f"WORLD_SIZE={ranks}, but no process group is initialized: call "
            "torch.distributed.init_process_group() before Learner, or unset WORLD_SIZE if every "
            "process is a separate learner"
        )
    return 1


def chosen_sync_ranks(sync_ranks: object, hosts: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that communicate with the syncer; rank 0 is one of them.

    >>> chosen_sync_ranks(2, "aaaa"), chosen_sync_ranks("hosts", "aabb")
    ((0, 2), (0, 2))

    Args:
        sync_ranks: Their number, 1 to the number of ranks, evenly spread; ``"hosts"``: the first
            rank of each host; ``"all"``: every rank.
        hosts: The host of each rank.

    Raises:
        ConfigError: The value is not valid, or there are fewer ranks.
    """
    ranks = len(hosts)
    if sync_ranks == "all":
        return tuple(range(ranks))
    if sync_ranks == "hosts":
        return tuple(sorted({host: rank for rank, host in reversed([*enumerate(hosts)])}.values()))
    if type(sync_ranks) is not int or not 1 <= sync_ranks <= ranks:
        least = "1" if ranks == 1 else f"1 to {ranks}"
        raise ConfigError(
            f"sync_ranks={sync_ranks!r} is out of range: pass {least}, because this learner "
            f"has {ranks} rank{'s' * (ranks > 1)}, or 'hosts' (one per host) or 'all'"
        )
    return tuple(ranks * n // sync_ranks for n in range(sync_ranks))


def is_sharded(model: torch.nn.Module | Sequence[torch.nn.Module]) -> bool:
    """Whether a process group shards the model, even if the group has only one rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    # Slow to import; a sharded model has imported it already.
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    parts = [model] if isinstance(model, torch.nn.Module) else model
    modules = (module for part in parts for module in part.modules())
    return any(isinstance(module, FSDPModule) for module in modules) or any(
        isinstance(parameter, DTensor) for part in parts for parameter in part.parameters()
    )


class Exchange(Protocol):
    """An exchange that is under way: one document from every rank."""

    async def wait(self) -> list[dict[str, Any]]:
        """Return the document of each rank, by rank.

        Raises:
            TransportError: A rank is gone, or does not respond.
        """
        ...


class Watched(Protocol):
    """See `Watch`."""

    place: str

    def close(self) -> None: ...


class Collectives(Protocol):
    """The ranks of one learner; see `RankGroup`."""

    rank: int
    size: int

    @property
    def watch(self) -> Watched: ...

    def exchange(self, document: dict[str, Any]) -> Exchange: ...

    async def exchanged(self, document: dict[str, Any]) -> list[dict[str, Any]]: ...

    async def all_to_all(
        self, out: Tensor, given: Tensor, out_sizes: list[int], given_sizes: list[int]
    ) -> None: ...


class _Exchange:
    """An `Exchange` over gloo."""

    def __init__(self, group: RankGroup, mine: bytes) -> None:
        self._group = group
        self._mine = mine
        slot = torch.zeros(SLOT_BYTES, dtype=torch.uint8, device="cpu")
        slot[:LENGTH_BYTES] = _bytes(len(mine).to_bytes(LENGTH_BYTES, "big"))
        head = mine[: SLOT_BYTES - LENGTH_BYTES]
        slot[LENGTH_BYTES : LENGTH_BYTES + len(head)] = _bytes(head)
        self._slots = [torch.empty_like(slot) for _ in range(group.size)]
        with _collective_errors("start an exchange"):
            self._work = dist.all_gather(self._slots, slot, group.boundary, async_op=True)

    async def wait(self) -> list[dict[str, Any]]:
        """See `Exchange`; blocks this thread."""
        with _collective_errors("wait for the other ranks"):
            assert self._work is not None
            self._work.wait()
            return [json.loads(self._whole(rank)) for rank in range(self._group.size)]

    def _whole(self, rank: int) -> bytes:
        """Return a rank's document; receive the rest of it if it does not fit into a slot.

        Every rank calls this for every rank, in order, because the rest needs a collective.
        """
        slot = bytes(self._slots[rank].tolist())
        length = int.from_bytes(slot[:LENGTH_BYTES], "big")
        head = slot[LENGTH_BYTES : LENGTH_BYTES + length]
        rest = torch.zeros(length - len(head), dtype=torch.uint8, device="cpu")
        if rest.numel():
            if rank == self._group.rank:
                rest[:] = _bytes(self._mine[len(head) :])
            dist.broadcast(rest, self._group.global_rank(rank), self._group.boundary)
        return head + bytes(rest.tolist())


def _bytes(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device="cpu")


class _collective_errors:
    """Converts errors of collectives in its block to `TransportError`.

    Args:
        action: What the block does, for the message "could not {action} of this learner".
    """

    def __init__(self, action: str) -> None:
        self._action = action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError | ValueError) and not isinstance(error, DilocoError):
            raise TransportError(
                f"could not {self._action} of this learner: a rank is gone or hangs "
                f"({error!s:.300}). Let the launcher restart all ranks, as torchrun does"
            ) from error


class RankGroup:
    """The ranks of one learner: all ranks of the program's process group.

    Every rank creates one, at the same place in its program.

    Attributes:
        watch: Logs which rank hangs.
        rank: This process, 0 to size − 1. Rank 0 is the leader.
        size: The number of ranks.

    Raises:
        ConfigError: No process group is initialized, or PyTorch has no gloo.
        TransportError: A rank is gone.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "no process group is initialized: call torch.distributed.init_process_group() "
                "before RankGroup"
            )
        if not dist.is_gloo_available():
            raise ConfigError(
                "this build of PyTorch has no gloo, which a learner's ranks use to communicate in "
                "host memory: install a build with gloo, such as an official wheel"
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        silence = timedelta(seconds=SILENCE_SECONDS)
        with _collective_errors("meet the other ranks"):
            self.watch = self._meet()
            # The order is the same on every rank: new_group is a collective.
            self.boundary = dist.new_group(backend="gloo", timeout=silence)
            self.payloads = dist.new_group(backend="gloo", timeout=silence)
            self.checkpoints = dist.new_group(backend="gloo", timeout=silence)

    def global_rank(self, rank: int) -> int:
        """Return the rank in the program's process group of a rank of this group."""
        return rank

    def exchange(self, document: dict[str, Any]) -> _Exchange:
        """Send a document to all ranks and begin to receive theirs."""
        return _Exchange(self, json.dumps(document, separators=(",", ":")).encode())

    async def exchanged(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a document to all ranks and return the documents of all, by rank."""
        return await self.exchange(document).wait()

    async def all_to_all(
        self, out: Tensor, given: Tensor, out_sizes: list[int], given_sizes: list[int]
    ) -> None:
        """See `redistribute.AllToAll`."""
        with _collective_errors("move a fragment between the ranks"):
            dist.all_to_all_single(out, given, out_sizes, given_sizes, self.payloads)

    def close(self) -> None:
        """Destroy the process groups."""
        for group in (self.boundary, self.payloads, self.checkpoints):
            dist.destroy_process_group(group)

    def _meet(self) -> Watch:
        """Wait until every rank has arrived; log the missing ranks, which `new_group` cannot."""
        store = dist.distributed_c10d._get_default_store()
        meeting = f"decoupled-diloco/meeting-{next(_MEETINGS)}"
        store.set(f"{meeting}/{self.rank}", "here")
        store.add(meeting, 1)
        began = warned = time.monotonic()
        while store.add(meeting, 0) < self.size:
            time.sleep(0.05)
            waited = time.monotonic() - began
            if waited > SILENCE_SECONDS:
                raise TransportError(f"after {waited:.0f} s {self._missing(store, meeting)}")
            if self.rank == 0 and time.monotonic() - warned > MISSING_SECONDS:
                warned = time.monotonic()
                logger.warning("%s", self._missing(store, meeting))
        return Watch(store, meeting, self.rank, self.size)

    def _missing(self, store: Any, meeting: str) -> str:
        here = [store.check([f"{meeting}/{rank}"]) for rank in range(self.size)]
        missing = _numbers([rank for rank, present in enumerate(here) if not present])
        return (
            f"no Learner has been created yet on rank {missing} of {self.size}: every rank of the "
            "process group must create one, with the same arguments"
        )


def _numbers(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
