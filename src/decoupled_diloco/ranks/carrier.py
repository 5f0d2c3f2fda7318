"""What one carrier does with its range of every fragment: encode, send, fetch, decode, keep.

A *carrier* is a rank that talks to the syncer. The leader asks, each carrier does the same to its
own range and answers with the digests of its blocks; no rank ever has more of a fragment. A
fragment's values (a copy of the parameters, a published copy) have a number by which all know them.

Host memory of one of W carriers: 4·N/W bytes for what it holds of the published copies, and what is
in flight.

Source: rule 18 of the method's description (`docs/how-to/many-gpus.md`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError, Error, ProtocolError, StorageError, TransportError
from decoupled_diloco.merge import (
    Body,
    as_bytes,
    block_digests,
    clipped,
    codec,
    contribution,
    is_cuttable,
    receive,
)
from decoupled_diloco.merge.packing import packed, unpacked
from decoupled_diloco.merge.plan import MergePlan, values_of
from decoupled_diloco.storage.ranges import RESIDUAL, Ranges, keep_ranges, kept_range, summed
from decoupled_diloco.transport.base import Client

Document = dict[str, Any]

_ERRORS: dict[str, type[Error]] = {
    kind.__name__: kind for kind in (ConfigError, ProtocolError, StorageError, TransportError)
}


class CarriedValues:
    """A carrier's ranges of fragments, fp32, by number; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[int, Future[Tensor]] = {}
        self._error: BaseException | None = None

    def put(self, number: int, values: Tensor) -> None:
        """They are here."""
        future = self.future(number)
        if not future.done():
            future.set_result(values)

    def future(self, number: int) -> Future[Tensor]:
        """Done when they are here."""
        with self._lock:
            future = self._values.setdefault(number, Future())
            if self._error is not None and not future.done():
                future.set_exception(self._error)
            return future

    def forget(self, number: int) -> None:
        """Nobody needs them any more."""
        with self._lock:
            self._values.pop(number, None)

    def fail(self, error: BaseException) -> None:
        """What is not here will never be: who waits for it, or will, gets this error."""
        with self._lock:
            self._error = error
            for future in self._values.values():
                if not future.done():
                    future.set_exception(error)


class Carrier:
    """See the module; used by one event loop.

    Args:
        plan: The run's.
        ranges: Of each fragment the range that this carrier has.
        number: Which of the carriers it is.
        values: What it holds.
        client: The transport's client.
        in_worker: Runs what takes long.
    """

    def __init__(
        self,
        plan: MergePlan,
        ranges: Sequence[tuple[int, int]],
        number: int,
        values: CarriedValues,
        client: Callable[[], Client],
        in_worker: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._plan = plan
        self._ranges = ranges
        self._number = number
        self._values = values
        self._client = client
        self._in_worker = in_worker
        self._bodies: dict[int, tuple[Tensor, int, int]] = {}

    async def answer(self, asked: Document) -> Document:
        """Does what the leader asks; says what went wrong, if it is an error of ours."""
        try:
            match asked["do"]:
                case "encode":
                    return await self._encode(asked)
                case "copy":
                    return await self._copy(asked)
                case "put":
                    return await self._put(asked)
                case "drop":
                    self._bodies.pop(asked["job"], None)
                    return {}
                case "fetch":
                    return await self._fetch(asked)
                case "keep":
                    return await self._keep(asked)
                case "adopt":
                    return await self._adopt(asked)
                case _:
                    raise AssertionError(f"no order of this version: {asked}")
        except Error as error:
            return {"error": str(error), "kind": type(error).__name__}

    def drop_all(self) -> None:
        """Nobody will ask for what was made."""
        self._bodies.clear()

    async def _value(self, number: int) -> Tensor:
        return await asyncio.wrap_future(self._values.future(number))

    async def _encode(self, asked: Document) -> Document:
        """A contribution: the copy less the published one from which it was trained (rule 6)."""
        plan, fragment = self._plan, asked["fragment"]
        start, stop = self._ranges[fragment]
        theta, published = await self._value(asked["copy"]), await self._value(asked["published"])
        residuals = [await self._value(number) for number in asked["residuals"]]
        whole = plan.fragments[fragment]
        uplink = plan.uplink_of(fragment, asked["codec"])
        if stop - start < whole.numel and not is_cuttable(uplink):
            raise ConfigError(f"a body of codec {uplink.name!r} cannot be cut for several carriers")

        def encode() -> tuple[Tensor, bytes, Tensor | None]:
            part = clipped(whole, start, stop)
            d = contribution(part, plan.layout, theta, published)
            body, residual = plan.encode(d, residuals, uplink)
            digests = block_digests(body, uplink)
            # A fragment with buffers is not cut, so this carrier has all of them.
            return packed(body, plan.buffers_of(fragment, published), uplink), digests, residual

        body, digests, residual = await self._in_worker(encode)
        if residual is not None:
            self._values.put(asked["leaves"], residual)
        first = uplink.nbytes(start) if start else 0
        is_cut = stop - start < whole.numel
        total = uplink.nbytes(whole.numel) if is_cut else body.numel()
        self._bodies[asked["job"]] = body, first, total
        return {"digests": digests.hex()}

    async def _copy(self, asked: Document) -> Document:
        """The values themselves, as a shard wants them whole."""
        start, _ = self._ranges[asked["fragment"]]
        values = await self._value(asked["values"])
        digests = await self._in_worker(lambda: block_digests(values, codec("fp32")))
        total = self._plan.whole_nbytes(asked["fragment"])
        self._bodies[asked["job"]] = as_bytes(values), 4 * start, total
        return {"digests": digests.hex()}

    async def _put(self, asked: Document) -> Document:
        body, first, total = self._bodies.pop(asked["job"])
        url, base = asked["url"], asked["base"]
        await self._client().put(url, _view(body), base=base, first=first, total=total)
        return {"sent": body.numel()}

    async def _fetch(self, asked: Document) -> Document:
        """A published copy, or what it differs by from one that is here."""
        plan, fragment = self._plan, asked["fragment"]
        start, stop = self._ranges[fragment]
        whole, numel = asked["on"] is None, plan.fragments[fragment].numel
        downlink = codec("fp32") if whole else plan.downlink_of(fragment)
        first, total = downlink.nbytes(start) if start else 0, asked["nbytes"]
        last = downlink.nbytes(stop) if stop < numel else total
        body = torch.empty(last - first, dtype=torch.uint8, device="cpu")
        url, base = asked["url"], asked["base"]
        await self._client().get(url, _view(body), base=base, first=first, total=total)
        before = None if whole else await self._value(asked["on"])

        def decode() -> tuple[Tensor, bytes]:
            if before is None:
                values = values_of(body, stop - start)
            else:
                values = before.clone()
                buffers = plan.buffers_of(fragment, values)
                receive(values, unpacked(body, buffers, downlink), downlink)
            return values, block_digests(values, codec("fp32"))

        values, digests = await self._in_worker(decode)
        self._values.put(asked["number"], values)
        return {"digests": digests.hex(), "received": body.numel()}

    async def _keep(self, asked: Document) -> Document:
        """Published copies to the disk; each carrier has a file of its own."""
        published: Ranges = {}
        residuals: Ranges = {}
        for p, (start, stop) in enumerate(self._ranges):
            if start == stop:  # break: empty-range-awaited
                continue  # nobody brings it here
            published[p, start] = await self._value(asked["numbers"][p])
            left = [await self._value(number) for number in asked["residuals"][p]]
            if left:
                residuals[p, start] = await self._in_worker(partial(summed, left))
        folder = Path(asked["folder"])
        # break: ranks-keep-no-copies
        await self._in_worker(lambda: keep_ranges(folder, self._number, published))
        await self._in_worker(lambda: keep_ranges(folder, self._number, residuals, RESIDUAL))
        return {}

    async def _adopt(self, asked: Document) -> Document:
        """And back, whoever has written them."""
        folder, digests = Path(asked["folder"]), []
        for fragment, number in enumerate(asked["numbers"]):
            values = await self._in_worker(
                partial(kept_range, folder, fragment, *self._ranges[fragment])
            )
            digests.append(block_digests(values, codec("fp32")).hex())
            self._values.put(number, values)
        for fragment, number in asked["residuals"]:
            start, stop = self._ranges[fragment]
            read = partial(kept_range, folder, fragment, start, stop, RESIDUAL)
            self._values.put(number, await self._in_worker(read))
        return {"digests": digests}


def _view(body: Body) -> memoryview:
    return as_bytes(body).numpy().data


def raised(answer: Document) -> Document:
    """The same answer.

    Raises:
        Error: It tells of one.
    """
    if "error" in answer:
        raise _ERRORS.get(answer["kind"], TransportError)(answer["error"])
    return answer
