"""A shard's link to the coordinator, which runs in this process (shard 0) or in another one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, get_args

from decoupled_diloco.config.addresses import alternatives, on_this_machine
from decoupled_diloco.errors import ConfigError, LeaseError, TransportError
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.wire import decode, encode
from decoupled_diloco.syncer.coordinator import CoordinatorHost
from decoupled_diloco.transport.backoff import Backoff, reconnecting
from decoupled_diloco.transport.interface import Client

logger = logging.getLogger(__name__)

FromCoordinator = messages.ToShard | messages.ShardAdmitted
_FROM_COORDINATOR = (messages.ShardAdmitted, messages.JoinRefused, *get_args(messages.ToShard))


class CoordinatorLink:
    """Keeps a shard connected to the coordinator; rounds continue without it.

    Args:
        hello: The shard's first message.
        ordered: Receives each message, in order.
        host: The coordinator, if it runs in this process.
        client: Connects to the coordinator, if it runs in another process.
        address: The coordinator's address; see `config.addresses.alternatives`.
        fail: Receives an error that ``ordered`` raised outside `run`.
        out_of_reach: Called whenever an attempt to connect fails.
    """

    def __init__(
        self,
        hello: messages.ShardHello,
        ordered: Callable[[FromCoordinator], None],
        *,
        host: CoordinatorHost | None,
        client: Client,
        address: str,
        fail: Callable[[BaseException], None],
        out_of_reach: Callable[[], object],
    ) -> None:
        self._hello = hello
        self._ordered = ordered
        self._host = host
        self._client = client
        self._address = address
        self._fail = fail
        self._out_of_reach = out_of_reach
        self._held_back: list[FromCoordinator] | None = None
        self._send: Callable[[messages.FromShard], None] = lambda message: None

    def send(self, message: messages.FromShard) -> None:
        """Send a message, if the coordinator is connected."""
        self._send(message)

    def hold_back(self) -> None:
        """Queue messages from now on instead of passing them on."""
        self._held_back = []

    def let_go(self) -> None:
        """Pass the queued messages on."""
        waiting, self._held_back = self._held_back or [], None
        for message in waiting:
            self.hand_on(message)

    async def run(self) -> None:
        """Connect to the coordinator, again whenever the link breaks.

        Raises:
            ConfigError: The coordinator belongs to a run with other settings.
            LeaseError: Another process now acts for the shard.
        """
        if self._host is not None:
            self._greet_host(self._host)
            return
        backoff = Backoff()
        while True:
            await self._dial(backoff)
            logger.warning("the coordinator is out of reach: rounds continue, joins wait")
            await asyncio.sleep(backoff.next())

    def _greet_host(self, host: CoordinatorHost) -> None:
        loop, shard = asyncio.get_running_loop(), self._hello.shard

        def link(message: FromCoordinator | messages.JoinRefused) -> None:
            # In the next turn: the orders of one event are executed before the next event.
            loop.call_soon(self._handle, message)

        self._send = lambda message: host.shard_sent(shard, message)
        host.shard_greeted(self._hello, link)

    async def _dial(self, backoff: Backoff) -> None:
        shard = self._hello.shard
        channel = await reconnecting(
            self._client,
            alternatives(on_this_machine(self._address)),
            "shard",
            f"shard-{shard}",
            backoff,
            on_failure=self._report_failure,
        )
        self._send = lambda message: channel.send(encode(message))
        channel.send(encode(self._hello))
        with contextlib.suppress(TransportError):
            while True:
                self.hand_on(_not_refused(decode(await channel.receive(), _FROM_COORDINATOR)))
                backoff.reset()

    def _report_failure(self, error: TransportError, delay: float) -> None:
        logger.warning("the coordinator is out of reach, trying again in %.1f s: %s", delay, error)
        self._out_of_reach()

    def _handle(self, message: FromCoordinator | messages.JoinRefused) -> None:
        """Handle a message of a coordinator in this process."""
        try:
            self.hand_on(_not_refused(message))
        except Exception as error:
            self._fail(error)

    def hand_on(self, message: FromCoordinator) -> None:
        """Pass a message to the shard, or queue it while messages are held back."""
        if self._held_back is not None:
            self._held_back.append(message)
        else:
            self._ordered(message)


def _not_refused(message: Any) -> Any:
    if isinstance(message, messages.JoinRefused):
        raise LeaseError(message.reason) if message.retry else ConfigError(message.reason)
    return message
