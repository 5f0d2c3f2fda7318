"""The ranks of one learner: small documents at boundaries, tensors behind, and a watch over them.

Three process groups of gloo's, all in host memory: *boundary* for one document of every rank each
step, which travels while the step is trained; *bodies* for redistribution and *checkpoints* for
those, each used by one thread of each rank. None is the framework's own, so nothing here waits for
its collectives, nor they for this.

A rank that waits in a collective cannot say which rank hangs, so `Watch` does: in a thread of its
own each rank tells the job's store every few seconds that it lives, and at which place of its
program it is. Rank 0 looks at all others, they look at rank 0. Nothing is ended here: collectives
have timeouts of their own (`SILENCE_SECONDS`, and the training program's).
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

LOOK_SECONDS = 5.0
LONG_SECONDS = 20.0
"""Ranks that are at different places for so long, or say nothing, are named."""


@dataclass
class _Seen:
    """What was last heard of a rank, and since when it is so (seconds of the runtime)."""

    said: Any = None
    heard: float = 0.0
    place: str = ""
    since: float = 0.0
    told: str = ""


class Watch:
    """One rank's look at the others, in a thread of its own.

    Args:
        store: The job's; copied, since a store serves one thread at a time.
        meeting: Begins the keys; the same on every rank, and used once.
        rank: This one.
        size: How many there are.

    Attributes:
        place: Where in its program this rank is.
    """

    def __init__(self, store: Any, meeting: str, rank: int, size: int) -> None:
        self.place = ""
        self._meeting = meeting
        self._rank = rank
        self._others = range(1, size) if rank == 0 else (0,)
        self._seen = {other: _Seen(heard=now()) for other in self._others}
        self._since, self._place = now(), ""
        self._end = threading.Event()
        if hasattr(store, "clone"):  # PyTorch before 2.8 has none
            self._store = store.clone()
            threading.Thread(target=self._run, name="ddiloco-watch", daemon=True).start()

    def close(self) -> None:
        """Ends the thread soon; does not wait for it."""
        self._end.set()

    def _run(self) -> None:
        lives = 0
        try:
            while not self._end.wait(LOOK_SECONDS):
                lives += 1
                self._store.set(self._key(self._rank), json.dumps([lives, self.place]))
                self._look(now())
        except RuntimeError as error:  # the store ends with the rank that serves it
            if not self._end.is_set():
                logger.warning("other ranks can't be watched any more: %s", str(error)[:200])

    def _key(self, rank: int) -> str:
        return f"{self._meeting}/at/{rank}"

    def _look(self, at: float) -> None:
        if self.place != self._place:
            self._place, self._since = self.place, at
        for rank, seen in self._seen.items():
            said = self._store.get(self._key(rank)) if self._has(rank) else None
            if said != seen.said:
                seen.said, seen.heard = said, at
                place = json.loads(said)[1] if said else ""
                if place != seen.place:
                    seen.place, seen.since = place, at
            trouble = self._trouble(rank, seen, at)
            if trouble and trouble != seen.told:
                logger.warning("%s", trouble)
            if seen.told and not trouble:
                logger.warning("rank %d of this learner goes on", rank)
            seen.told = trouble

    def _has(self, rank: int) -> bool:
        return bool(self._store.check([self._key(rank)]))

    def _trouble(self, rank: int, seen: _Seen, at: float) -> str:
        if at - seen.heard > LONG_SECONDS:
            return (
                f"rank {rank} of this learner says nothing: its process is stopped, or its "
                "machine or network is gone"
            )
        if seen.place != self._place and at - max(seen.since, self._since) > LONG_SECONDS:
            return (
                f"rank {rank} of this learner is at {seen.place!r} and rank {self._rank} at "
                f"{self._place!r}, for more than {LONG_SECONDS:.0f} s: every rank has to make the "
                "same calls, step by step"
            )
        return ""


SLOT_BYTES = 1024
"""What each rank says at a boundary is sent in one piece if it is no longer than this."""

LENGTH_BYTES = 4

SILENCE_SECONDS = 600.0
"""A rank that says nothing for so long while others wait for it is given up."""

MISSING_SECONDS = 10.0
"""After so long in the constructor it is said which ranks have made no `Learner` yet."""

_MEETINGS = itertools.count()
"""Every rank makes its groups in the same order."""


def ranks_of_this_job() -> int:
    """How many ranks the program's process group has; 1 without one.

    Raises:
        ConfigError: The program's launcher has started several, and there is no process group.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks not in ("", "0", "1"):
        raise ConfigError(
            f"WORLD_SIZE={ranks} says that this is one of {ranks} ranks, and there is no process "
            "group: call torch.distributed.init_process_group() before Learner, or unset "
            "WORLD_SIZE if every process is a learner of its own"
        )
    return 1


def chosen_sync_ranks(carriers: object, hosts: Sequence[str]) -> tuple[int, ...]:
    """The ranks that talk to the syncer; rank 0 is one of them.

    >>> chosen_sync_ranks(2, "aaaa"), chosen_sync_ranks("hosts", "aabb")
    ((0, 2), (0, 2))

    Args:
        carriers: How many, evenly spread; ``"hosts"``: one on each; ``"all"``.
        hosts: The host of each rank.

    Raises:
        ConfigError: There are not so many ranks, or it is no such value.
    """
    ranks = len(hosts)
    if carriers == "all":
        return tuple(range(ranks))
    if carriers == "hosts":
        return tuple(sorted({host: rank for rank, host in reversed([*enumerate(hosts)])}.values()))
    if type(carriers) is not int or not 1 <= carriers <= ranks:
        raise ConfigError(
            f"sync_ranks={carriers!r} is out of range: pass 1 to {ranks}, because this learner has "
            f"{ranks} rank{'s' * (ranks > 1)}, or 'hosts' (one per host) or 'all'"
        )
    return tuple(ranks * n // carriers for n in range(carriers))


def is_sharded(model: torch.nn.Module | Sequence[torch.nn.Module]) -> bool:
    """Whether a process group holds the model in parts, be it a group of one rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule  # slow to import, and there with such a model
    from torch.distributed.tensor import DTensor

    parts = [model] if isinstance(model, torch.nn.Module) else model
    modules = (module for part in parts for module in part.modules())
    return any(isinstance(module, FSDPModule) for module in modules) or any(
        isinstance(parameter, DTensor) for part in parts for parameter in part.parameters()
    )


class Exchange(Protocol):
    """One document of every rank, on its way."""

    async def wait(self) -> list[dict[str, Any]]:
        """What each rank said, by rank.

        Raises:
            TransportError: A rank is gone, or silent for too long.
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
    """An `Exchange` by gloo."""

    def __init__(self, group: RankGroup, mine: bytes) -> None:
        self._group = group
        self._mine = mine
        slot = torch.zeros(SLOT_BYTES, dtype=torch.uint8, device="cpu")
        slot[:LENGTH_BYTES] = _bytes(len(mine).to_bytes(LENGTH_BYTES, "big"))
        head = mine[: SLOT_BYTES - LENGTH_BYTES]
        slot[LENGTH_BYTES : LENGTH_BYTES + len(head)] = _bytes(head)
        self._slots = [torch.empty_like(slot) for _ in range(group.size)]
        with _told("start an exchange"):
            self._work = dist.all_gather(self._slots, slot, group.boundary, async_op=True)

    async def wait(self) -> list[dict[str, Any]]:
        """See `Exchange`; blocks this thread."""
        with _told("wait for the other ranks"):
            assert self._work is not None
            self._work.wait()
            return [json.loads(self._whole(rank)) for rank in range(self._group.size)]

    def _whole(self, rank: int) -> bytes:
        """A document; what is too long for a slot follows."""
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


class _told:
    """Errors of collectives as this library's own."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError | ValueError) and not isinstance(error, DilocoError):
            raise TransportError(
                f"could not {self._what} of this learner: one is gone or hangs ({error!s:.300}). "
                "Have its launcher restart all of them, as torchrun does"
            ) from error


class RankGroup:
    """The ranks of one learner: all ranks of the program's process group.

    Every rank makes one, at the same place of its program.

    Attributes:
        watch: Says which rank hangs.
        rank: This process, 0 to size − 1. Rank 0 is the leader.
        size: How many there are.

    Raises:
        ConfigError: There is no process group, or PyTorch has no gloo.
        TransportError: A rank is gone.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise ConfigError("a RankGroup needs torch.distributed.init_process_group first")
        if not dist.is_gloo_available():
            raise ConfigError(
                "this build of PyTorch has no gloo, by which the ranks of a learner talk in host "
                "memory: install one that has it, as the official wheels do"
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        silence = timedelta(seconds=SILENCE_SECONDS)
        with _told("meet the other ranks"):
            self.watch = self._meet()
            self.boundary = dist.new_group(backend="gloo", timeout=silence)
            self.bodies = dist.new_group(backend="gloo", timeout=silence)
            self.checkpoints = dist.new_group(backend="gloo", timeout=silence)

    def global_rank(self, rank: int) -> int:
        """A rank of this group, as the program counts it."""
        return rank

    def exchange(self, document: dict[str, Any]) -> _Exchange:
        """Tells all ranks a document and begins to hear theirs."""
        return _Exchange(self, json.dumps(document, separators=(",", ":")).encode())

    async def exchanged(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        """The same, and waits for theirs."""
        return await self.exchange(document).wait()

    async def all_to_all(
        self, out: Tensor, given: Tensor, out_sizes: list[int], given_sizes: list[int]
    ) -> None:
        """See `redistribute.AllToAll`."""
        with _told("move a fragment between the ranks"):
            dist.all_to_all_single(out, given, out_sizes, given_sizes, self.bodies)

    def close(self) -> None:
        """Lets the groups go."""
        for group in (self.boundary, self.bodies, self.checkpoints):
            dist.destroy_process_group(group)

    def _meet(self) -> Watch:
        """Waits until every rank is here: the groups' own waiting would not say who is missing."""
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
            f"no Learner was made yet on rank {missing} of {self.size}: every rank of the process "
            "group has to make one, with the same arguments"
        )


def _numbers(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
