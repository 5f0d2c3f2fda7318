"""Share a learner's state with another learner, or receive one, through a shard that relays it.

A state travels as a head and bytes in chunks (`StateBlob`). The head is JSON. It has the tensors'
names, dtypes, shapes and offsets, the rest of the state as packed by `storage.states`, and the
digest of each chunk. The digest of the head travels on the control plane.

The training thread makes the copy at a step boundary. Everything else runs on the background's
event loop and its worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoupled_diloco.errors import (
    AccessError,
    ConfigError,
    MergeError,
    ProtocolError,
    StorageError,
    TransportError,
    a_kind,
)
from decoupled_diloco.learner.shared import Context
from decoupled_diloco.merge import as_bytes, digest
from decoupled_diloco.protocol.features.state_transfer import HEAD_BYTES_MAX
from decoupled_diloco.protocol.messages import (
    ChunkArrived,
    CopyState,
    Done,
    DropState,
    Failed,
    FetchState,
    ForgetState,
    RelayState,
    StateCopied,
)
from decoupled_diloco.shell.driver import executes
from decoupled_diloco.storage.files import NOT_JSON
from decoupled_diloco.storage.states import pack, unpack
from decoupled_diloco.transport.byte_ranges import chunk_sizes
from decoupled_diloco.transport.payload_store import body_url

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 0.1
"""Wait before a chunk is tried again, if the relay does not have it yet or has no memory for it."""


class StateTransfers:
    """Both sides of one learner: it shares its state, and receives another learner's.

    Args:
        stateful: Name to object whose state this learner shares and receives.

    Attributes:
        taken: The received state of a state provider, or ``None``.
    """

    def __init__(self, stateful: Mapping[str, Any]) -> None:
        self.taken: Mapping[str, Any] | None = None
        self._stateful = dict(stateful)
        self._blobs: dict[tuple[str, int], tuple[StateBlob, bytes]] = {}
        self._unsealed: dict[tuple[str, int], StateBlob | ConfigError] = {}
        self._fetching: asyncio.Task[None] | None = None
        self._around: Context | None = None

    @property
    def wanted(self) -> bool:
        """Whether this learner shares and receives any state."""
        return bool(self._stateful)

    def enter(self, context: Context) -> None:
        """Set the background, once it runs."""
        self._around = context

    @property
    def _here(self) -> Context:
        assert self._around is not None
        return self._around

    def copy(self, order: CopyState) -> None:
        """Copy the state at this step boundary; the trainer calls it."""
        key = (order.learner, order.attempt)
        try:
            self._unsealed[key] = StateBlob.of(
                {name: thing.state_dict() for name, thing in self._stateful.items()}
            )
        except ConfigError as error:
            self._unsealed[key] = error

    async def serve(self, order: CopyState) -> None:
        """Compute the copy's digests and offer it to the other learner."""
        key = (order.learner, order.attempt)
        blob = self._unsealed.pop(key)
        if isinstance(blob, ConfigError):
            self._here.deliver(Failed(order, str(blob)))
            return
        head = await self._here.in_worker(blob.head)
        self._blobs[key] = (blob, head)
        copy = StateCopied(len(head), blob.data.numel(), digest(head))
        self._here.deliver(Done(order, copy))

    @executes(RelayState)
    async def _deliver(self, order: RelayState) -> None:
        key = (order.learner, order.attempt)
        if key not in self._blobs:
            return
        blob, head = self._blobs[key]
        for number, body in enumerate([as_bytes(head), *blob.chunks()]):
            url = body_url(f"{order.path}/in/{number}")
            while key in self._blobs:
                try:
                    await self._here.client.put(
                        url, body.numpy().data, base=self._here.address_of(0)
                    )
                    break
                except AccessError as error:
                    self._here.deliver(Failed(order, str(error)))
                    return
                except (ProtocolError, TransportError):  # no memory there yet, or unreachable
                    await asyncio.sleep(AGAIN_SECONDS)

    @executes(ForgetState)
    def _forget(self, order: ForgetState) -> None:
        self._blobs.pop((order.learner, order.attempt), None)

    async def _fetch(self, order: FetchState) -> None:
        try:
            self.taken = await self._fetched(order)
        except (AccessError, TransportError, StorageError, MergeError, ProtocolError) as error:
            self._here.deliver(Failed(order, str(error)))
            return
        self._here.deliver(Done(order))

    async def _fetched(self, order: FetchState) -> Mapping[str, Any]:
        if not 0 < order.head_nbytes <= HEAD_BYTES_MAX:
            raise ProtocolError(
                f"the head of a state has {order.head_nbytes} bytes, allowed are 1 to "
                f"{HEAD_BYTES_MAX}"
            )
        head = torch.empty(order.head_nbytes, dtype=torch.uint8, device="cpu")
        await self._chunk(order, 0, head, order.digest)
        blob, digests = StateBlob.open(head.numpy().tobytes(), order.nbytes)
        for number, (chunk, announced) in enumerate(
            zip(blob.chunks(), digests, strict=True), start=1
        ):
            await self._chunk(order, number, chunk, announced)
        state = blob.state()
        if not isinstance(state, dict):
            raise StorageError(f"the state of {order.donor} is {a_kind(state)}, not a dict")
        return state

    async def _chunk(self, order: FetchState, number: int, out: Tensor, announced: str) -> None:
        """Fetch one chunk; retry until the machine's timeout cancels the transfer."""
        url = body_url(f"{order.path}/out/{number}")
        while True:
            try:
                base = self._here.address_of(0)
                await self._here.client.get(url, out.numpy().data, base=base)
                if await self._here.in_worker(lambda: digest(out)) != announced:
                    raise MergeError(f"chunk {number} of {order.donor} has another digest")
                break
            except AccessError:
                raise
            except (ProtocolError, TransportError, MergeError):
                await asyncio.sleep(AGAIN_SECONDS)
        self._here.deliver(ChunkArrived(order.attempt, number, out.numel()))

    @executes(FetchState)
    def _begin_fetching(self, order: FetchState) -> None:
        self._stop_fetching()
        self._fetching = self._here.spawn(self._fetch(order))

    @executes(DropState)
    def _drop(self, order: DropState) -> None:
        self._stop_fetching()

    def _stop_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    async def close(self) -> None:
        """Stop sharing the state."""
        self._blobs.clear()


ALIGNMENT = 16


@dataclass
class StateBlob:
    """A state that was copied to the host.

    Attributes:
        text: The state without its tensors.
        tensors: Name, dtype, shape and offset in ``data`` of each tensor.
        data: The tensors' bytes, uint8 [B]; never written to again.
    """

    text: str
    tensors: list[tuple[str, str, list[int], int]]
    data: Tensor

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StateBlob:
        """Copy a state as it is now.

        Raises:
            ConfigError: It cannot be packed.
        """
        tensors, text = pack(dict(state))
        places: list[tuple[str, str, list[int], int]] = []
        nbytes = 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            places.append((name, dtype, list(tensor.shape), nbytes))
            size = tensor.numel() * tensor.element_size()
            nbytes += math.ceil(size / ALIGNMENT) * ALIGNMENT
        data = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        for (_, _, _, offset), tensor in zip(places, tensors.values(), strict=True):
            _view(data, tensor.dtype, list(tensor.shape), offset).copy_(tensor)
        return cls(text, places, data)

    def chunks(self) -> list[Tensor]:
        """Return the chunks in order; they are views of ``data``."""
        return list(torch.split(self.data, list(chunk_sizes(self.data.numel()))))

    def head(self) -> bytes:
        """Return the head, with the digests of all chunks."""
        digests = [digest(chunk) for chunk in self.chunks()]
        return json.dumps([self.text, self.tensors, digests]).encode()

    @classmethod
    def open(cls, head: bytes, nbytes: int) -> tuple[StateBlob, list[str]]:
        """Return an empty blob with this head, and the digests of its chunks.

        Args:
            head: The head, from another learner.
            nbytes: The announced size of ``data``.

        Raises:
            StorageError: The head cannot be read or does not fit ``nbytes``, or there is not enough
                memory.
        """
        try:
            text, tensors, digests = json.loads(head)
            blob = cls(
                str(text),
                [tuple(place) for place in tensors],
                torch.empty(0, dtype=torch.float32, device="cpu"),
            )
            ends = [
                offset + math.prod(shape) * getattr(torch, dtype).itemsize
                for _, dtype, shape, offset in blob.tensors
            ]
            least = min((min(offset, *shape, 0) for _, _, shape, offset in blob.tensors), default=0)
            fits = max(ends, default=0) <= nbytes and least == 0
            fits = fits and len(digests) == len(chunk_sizes(nbytes))
        except NOT_JSON as error:
            raise StorageError(f"the head of a shared state cannot be read: {error!r}") from error
        if not fits:
            raise StorageError(f"the head of a shared state does not fit the announced {nbytes} B")
        try:
            blob.data = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise StorageError(
                f"not enough memory for a shared state of {nbytes} B: {error}"
            ) from error
        return blob, digests

    def state(self) -> Any:
        """Return the state; its tensors are views of ``data``.

        Raises:
            StorageError: The bytes or the head are not a valid state.
        """
        try:
            tensors = {
                name: _view(self.data, getattr(torch, dtype), shape, offset)
                for name, dtype, shape, offset in self.tensors
            }
            return unpack(tensors, self.text)
        except (RuntimeError, *NOT_JSON) as error:
            raise StorageError(f"a shared state cannot be read: {error!r}") from error


def _view(data: Tensor, dtype: torch.dtype, shape: list[int], offset: int) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return data[offset : offset + size].view(dtype).view(shape)
