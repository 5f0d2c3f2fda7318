"""Payloads that pass through a relay: copies for its children, fetched once, and their copies."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.merge import digest, values_digest
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.protocol.messages import average_path
from decoupled_diloco.transport.interface import Client
from decoupled_diloco.transport.payload_store import BodyBooks, BodyUpload, body_url
from decoupled_diloco.transport.tokens import RequestRefusal

ANNOUNCED_MAX = 1 << 14
"""Announced sizes that are kept; the oldest are forgotten first."""

FETCHES_MAX = 3
"""Number of fetches of an average, each because a newer version was announced during the last."""


class Copies:
    """The published copies that a relay has fetched, and the copies that it passes on.

    A copy is fetched when the first child requests it; children that request it meanwhile wait for
    the same transfer. The most recently used copies stay, up to a limit in bytes. A fragment's
    average stays until the next version is announced, because its path is always the same.

    Args:
        bodies: The relay server's data plane.
        nbytes_max: The limit. One copy may exceed it.
        address_of: Returns the address of the process that has, or wants, a fragment's payloads.
        client: Fetches as the relay.
        client_of: Returns a client that acts for a child.
    """

    def __init__(
        self,
        bodies: BodyBooks,
        nbytes_max: int,
        address_of: Callable[[int], str],
        client: Client,
        client_of: Callable[[str], Client],
    ) -> None:
        self.plan: MergePlan | None = None
        self._bodies = bodies
        self._nbytes_max = nbytes_max
        self._address_of = address_of
        self._client = client
        self._client_of = client_of
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._renewed: Counter[str] = Counter()

    def announced(self, message: dict[str, Any]) -> None:
        """Note a version that is being announced to children: its size, and its new average."""
        average = average_path(message["fragment"]).lstrip("/")
        self._renewed[average] += 1
        if self._kept.pop(average, None) is not None:
            self._bodies.withdraw(average)
        url, nbytes = message.get("difference"), message.get("difference_nbytes")
        if isinstance(url, str) and isinstance(nbytes, int) and url and nbytes:
            self._sizes[url] = nbytes
            while len(self._sizes) > ANNOUNCED_MAX:
                self._sizes.popitem(last=False)

    async def offer(self, key: str) -> None:
        """See `PayloadSource`.

        Raises:
            RequestRefusal: It cannot be fetched.
        """
        if key not in self._fetching:
            self._fetching[key] = asyncio.get_running_loop().create_task(self._fetch(key))
        task = self._fetching[key]
        try:
            await asyncio.shield(task)
        finally:
            if task.done():
                self._fetching.pop(key, None)

    async def _fetch(self, key: str) -> None:
        kind, _, rest = key.partition("/")
        if self._sender_of(key) is None or kind not in ("whole", "difference", "average", "relay"):
            return
        try:
            for _ in range(FETCHES_MAX):
                renewed = self._renewed[key]
                body, digest = await self._got(key, kind, rest)
                if renewed == self._renewed[key]:
                    self._keep(key, body, digest)
                    return
        except TransportError as error:
            raise RequestRefusal(503, f"the relay cannot fetch {key}: {error}") from None
        except ProtocolError as error:
            raise RequestRefusal(410, f"the relay cannot fetch {key}: {error}") from None
        raise RequestRefusal(503, f"a newer {key} follows during each fetch: try again later")

    async def _got(self, key: str, kind: str, rest: str) -> tuple[memoryview, str]:
        url, base, plan = body_url(key), self._address_of(self._sender_of(key) or 0), self.plan
        nbytes = self._sizes.get(url, 0)
        if kind == "whole" and plan is not None:
            nbytes = plan.whole_nbytes(int(rest.partition("/")[0]))
        body = memoryview(bytearray(nbytes or await self._client.size(url, base=base)))
        stats = await self._client.get(url, body, base=base)
        # The digest of an average is its version.
        # break: relay-keeps-corrupt-copy
        if kind != "average" and stats.digest != _digest_of(kind, body):
            raise TransportError("it arrived with another digest")
        return body, stats.digest

    def _sender_of(self, key: str) -> int | None:
        """Return a fragment of the shard that has, or wants, this payload; ``None``: no shard.

        The chunks of states that learners share are at shard 0.
        """
        kind, _, rest = key.partition("/")
        if self.plan is None:
            return None
        if kind == "relay":
            return 0
        parts = rest.split("/")
        text = parts[1] if kind == "copy" and len(parts) == 4 else parts[0]
        known = kind in ("copy", "whole", "difference", "average") and text.isdigit()
        return int(text) if known and int(text) < len(self.plan.fragments) else None

    def _keep(self, key: str, body: memoryview, digest: str) -> None:
        self._bodies.offer(key, body, digest)
        self._kept[key] = len(body)
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and sum(self._kept.values()) > self._nbytes_max:
            self._bodies.withdraw(self._kept.popitem(last=False)[0])

    def expect(self, key: str, principal: str, total: int) -> None:
        """See `PayloadSource`: a child sends a fragment that a shard requested, or its state."""
        fragment, kind = self._sender_of(key), key.partition("/")[0]
        if fragment is None or kind not in ("copy", "relay") or total > self._bodies.pool.nbytes:
            return
        upload = self._bodies.expect(key, total, principal)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._pass(upload, key, principal, fragment))
        # The sender may be gone: then no request retrieves the error.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._bodies.passing[key] = task

    async def _pass(self, upload: BodyUpload, key: str, principal: str, fragment: int) -> None:
        body = await upload.body
        try:
            base = self._address_of(fragment)
            await self._client_of(principal).put(body_url(key), body.buffer, base=base)
        finally:
            body.release()

    async def close(self) -> None:
        """Cancel transfers in progress."""
        tasks = [*self._fetching.values(), *self._bodies.passing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _digest_of(kind: str, body: memoryview) -> str:
    """Return the digest of a payload in the form in which its shard offers it."""
    if kind == "whole":
        return values_digest(torch.frombuffer(body, dtype=torch.float32))
    return digest(body)
