"""Carries out what is ordered about transfers: copies, serves, relays and fetches a state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, assert_never

import torch
from torch import Tensor

from decoupled_diloco.errors import (
    AccessError,
    ConfigError,
    MergeError,
    ProtocolError,
    StorageError,
    TransportError,
)
from decoupled_diloco.learner.state_blob import StateBlob
from decoupled_diloco.merge import as_bytes, digest
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol.transfer.coordinator import HEAD_BYTES_MAX
from decoupled_diloco.protocol.transfer.effects import (
    CopyState,
    DropState,
    FetchState,
    ForgetState,
    RelayState,
)
from decoupled_diloco.protocol.transfer.events import (
    ChunkArrived,
    StateArrived,
    StateCopied,
    StateFailed,
    StateNotCopied,
)
from decoupled_diloco.runtime import runtime
from decoupled_diloco.transport.base import Client, Server
from decoupled_diloco.transport.bodies import body_url
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.tls import Tls

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 0.1
"""A chunk that a relay does not have yet, or has no room for, is tried again after so long."""

DIRECT_TRIES_MAX = 3
"""A donor that cannot be reached so often in a row is asked for through a relay."""

_T = TypeVar("_T")

TransferOrder = RelayState | ForgetState | FetchState | DropState


@dataclass(frozen=True)
class Surroundings:
    """What transfers need of the learner's background.

    Attributes:
        tell: Tells the machine a fact; in the event loop.
        spawn: Runs a coroutine in the event loop.
        in_worker: Runs a function in the worker.
        client: The transport's client.
        relay: The address of the process that relays.
    """

    tell: Callable[[fact.LearnerEvent], None]
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    in_worker: Callable[[Callable[[], Any]], Awaitable[Any]]
    client: Callable[[], Client]
    relay: Callable[[], str]


class StateTransfers:
    """The giving and the taking side of one learner.

    Args:
        stateful: What this learner gives away, and takes, by name.
        make_server: Makes the server by which others reach this learner, given the key that opens
            it; `None`: they cannot.
        tls: Whom this learner trusts: a donor's certificate must name the donor.

    Attributes:
        taken: A donor's state, once it is here.
    """

    def __init__(
        self,
        stateful: Mapping[str, Any],
        make_server: Callable[[str], Server] | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._key = runtime().secret()
        self.taken: Mapping[str, Any] | None = None
        self._stateful = dict(stateful)
        self._make_server = make_server
        self._server: Server | None = None
        self._blobs: dict[tuple[str, int], tuple[StateBlob, bytes]] = {}
        self._unsealed: dict[tuple[str, int], StateBlob | ConfigError] = {}
        self._fetching: asyncio.Task[None] | None = None
        self._around: Surroundings | None = None

    @property
    def wanted(self) -> bool:
        """Whether this learner would take anything from a donor."""
        return bool(self._stateful)

    def enter(self, surroundings: Surroundings) -> None:
        """The background is there."""
        self._around = surroundings

    @property
    def _here(self) -> Surroundings:
        assert self._around is not None
        return self._around

    def copy(self, order: CopyState) -> None:
        """Copies the state as it is at this step boundary; the trainer calls it."""
        key = (order.learner, order.attempt)
        try:
            self._unsealed[key] = StateBlob.of(
                {name: thing.state_dict() for name, thing in self._stateful.items()}
            )
        except ConfigError as error:
            self._unsealed[key] = error

    async def serve(self, order: CopyState) -> None:
        """Seals the copy and offers it, or waits for a relay."""
        key = (order.learner, order.attempt)
        blob = self._unsealed.pop(key)
        if isinstance(blob, ConfigError):
            self._here.tell(StateNotCopied(order.learner, order.attempt, str(blob)))
            return
        head = await self._here.in_worker(blob.head)
        self._blobs[key] = (blob, head)
        address = await self._listen()
        if self._server is not None:
            for number, body in enumerate(_bodies(blob, head)):
                self._server.bodies.offer(_path(key, number), body.numpy().data, digest(body))
        self._here.tell(
            StateCopied(
                order.learner,
                order.attempt,
                len(head),
                blob.data.numel(),
                digest(head),
                address,
                self._key if address else "",
            )
        )

    async def _listen(self) -> str:
        """The address at which others reach this learner; empty: they cannot."""
        if self._server is None and self._make_server is not None:
            server = self._make_server(self._key)
            try:
                await server.start()
            except TransportError as error:
                logger.warning("%s: a shard relays instead", error)
                self._make_server = None
                return ""
            self._server = server
        return "" if self._server is None else self._server.address

    async def _deliver(self, order: RelayState) -> None:
        key = (order.learner, order.attempt)
        if key not in self._blobs:
            return
        for number, body in enumerate(_bodies(*self._blobs[key])):
            url = body_url(f"{order.path}/in/{number}")
            while key in self._blobs:
                try:
                    await self._here.client().put(url, body.numpy().data, base=self._here.relay())
                    break
                except AccessError as error:
                    refused = StateNotCopied(order.learner, order.attempt, str(error))
                    self._here.tell(refused)
                    return
                except (ProtocolError, TransportError):  # no room yet, or out of reach
                    await asyncio.sleep(AGAIN_SECONDS)

    def _forget(self, learner: str, attempt: int) -> None:
        kept = self._blobs.pop((learner, attempt), None)
        if kept is not None and self._server is not None:
            for number in range(len(_bodies(*kept))):
                self._server.bodies.withdraw(_path((learner, attempt), number))

    async def _fetch(self, order: FetchState, me: str) -> None:
        try:
            self.taken = await self._fetched(order, me)
        except (AccessError, TransportError, StorageError, MergeError, ProtocolError) as error:
            self._here.tell(StateFailed(order.attempt, str(error)))
            return
        self._here.tell(StateArrived(order.attempt))

    async def _fetched(self, order: FetchState, me: str) -> Mapping[str, Any]:
        if not 0 < order.head_nbytes <= HEAD_BYTES_MAX:
            raise ProtocolError(f"a head of {order.head_nbytes} bytes is none")
        if order.path:
            return await self._fetched_by(order, me, self._here.client())
        # The run's own token is not for another learner to see.
        if self._tls is not None and not order.address.startswith("https://"):
            raise TransportError(f"{order.donor} gives its state at {order.address} in plain text")
        client = HttpClient(
            token=order.key,
            trusted=(order.address,),
            principal=me,
            tls=self._tls,
            server_name=order.donor,
        )
        try:
            return await self._fetched_by(order, me, client)
        finally:
            await client.close()

    async def _fetched_by(self, order: FetchState, me: str, client: Client) -> Mapping[str, Any]:
        head = torch.empty(order.head_nbytes, dtype=torch.uint8, device="cpu")
        await self._chunk(client, order, me, 0, head, order.digest)
        blob, digests = StateBlob.open(head.numpy().tobytes(), order.nbytes)
        for number, (chunk, announced) in enumerate(
            zip(blob.chunks(), digests, strict=True), start=1
        ):
            await self._chunk(client, order, me, number, chunk, announced)
        state = blob.state()
        if not isinstance(state, dict):
            raise StorageError(f"the state of {order.donor} is a {type(state).__name__}")
        return state

    async def _chunk(
        self,
        client: Client,
        order: FetchState,
        me: str,
        number: int,
        out: Tensor,
        announced: str,
    ) -> None:
        """Fetches one chunk, again and again if it comes by a relay: the machine has patience."""
        path = f"{order.path}/out/{number}" if order.path else _path((me, order.attempt), number)
        base = self._here.relay() if order.path else order.address
        tries = 0
        while True:
            try:
                await client.get(body_url(path), out.numpy().data, base=base)
                if await self._here.in_worker(lambda: digest(out)) != announced:
                    raise MergeError(f"chunk {number} of {order.donor} has another digest")
                break
            except AccessError:
                raise
            except (ProtocolError, TransportError, MergeError):
                tries += 1
                if not order.path and tries >= DIRECT_TRIES_MAX:
                    raise
                await asyncio.sleep(AGAIN_SECONDS)
        self._here.tell(ChunkArrived(order.attempt, number, out.numel()))

    def carry_out(self, order: TransferOrder, me: str) -> None:
        """Begins what is ordered; in the event loop."""
        match order:
            case RelayState():
                self._here.spawn(self._deliver(order))
            case ForgetState(learner, attempt):
                self._forget(learner, attempt)
            case FetchState():
                self._stop_fetching()
                self._fetching = self._here.spawn(self._fetch(order, me))
            case DropState():
                self._stop_fetching()
            case _:
                assert_never(order)

    def _stop_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    async def close(self) -> None:
        """Nobody is served any more."""
        self._blobs.clear()
        if self._server is not None:
            await self._server.stop()


def _bodies(blob: StateBlob, head: bytes) -> list[Tensor]:
    """The head, then the chunks."""
    return [as_bytes(head), *blob.chunks()]


def _path(key: tuple[str, int], number: int) -> str:
    learner, attempt = key
    return f"/state/{learner}/{attempt}/{number}"
