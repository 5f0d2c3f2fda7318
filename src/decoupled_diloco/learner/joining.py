"""A participant's way into the run, and its conversation with the coordinator ever after."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decoupled_diloco.config.addresses import alternatives, reached_by
from decoupled_diloco.errors import AccessError, ConfigError, ProtocolError, TransportError
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.wire import decode, encode
from decoupled_diloco.transport.backoff import Backoff
from decoupled_diloco.transport.base import Channel, Client

logger = logging.getLogger(__name__)

JOIN_SECONDS_MAX = 5.0
"""Longest pause between two attempts to join."""

_ANSWERS: tuple[type[Any], ...] = (say.Admitted, say.JoinRefused, say.Referred)


@dataclass(frozen=True)
class Identity:
    """Who this process is in the run."""

    name: str
    nonce: str
    role: say.Role


@dataclass(frozen=True)
class Coordinations:
    """Who is told of what the coordinator says; all are called in the event loop.

    Attributes:
        admitted: The run has let this process in, by this address.
        linked: From now on `CoordinatorLink.tell` reaches the coordinator.
        told: It has said something.
        unlinked: It is out of reach.
        check_patience: Raises `TransportError` when nobody was in reach for too long, given what
            could not be done.
    """

    admitted: Callable[[say.Admitted, str], None]
    linked: Callable[[], None]
    told: Callable[[say.ToMember], None]
    unlinked: Callable[[], None]
    check_patience: Callable[[str], None]


class CoordinatorLink:
    """Joins the run, and stays joined: the coordinator knows by the connection who is there.

    Args:
        identity: Who this process is.
        layout: Its layout as JSON text.
        addresses: One or several shards' addresses; each knows where the coordinator is.
        coordinations: Who is told.
        give_up_seconds: How long to try at most; ``None``: for ever.
    """

    def __init__(
        self,
        identity: Identity,
        layout: str,
        addresses: tuple[str, ...],
        coordinations: Coordinations,
        give_up_seconds: float | None,
    ) -> None:
        self._identity = identity
        self._layout = layout
        self._addresses = addresses
        self._on = coordinations
        self._pause_seconds_max = min(JOIN_SECONDS_MAX, give_up_seconds or JOIN_SECONDS_MAX)
        self._channel: Channel | None = None

    def tell(self, message: say.FromMember) -> None:
        """Sends a message, if the coordinator is there."""
        if self._channel is not None:
            self._channel.send(encode(message))

    async def close(self) -> None:
        """Ends the conversation when all that was said is on its way."""
        if self._channel is not None:
            await self._channel.close("goodbye")

    async def join(self, client: Client) -> Channel:
        """Asks the coordinator to be let in, for as long as it takes.

        Raises:
            AccessError: The token is not accepted.
            ConfigError: The run refuses this process for good.
            TransportError: It took too long.
        """
        backoff, told = Backoff(), ""
        while True:
            for address in self._addresses:
                try:
                    return await self._join_once(client, address)
                except _TryAgainError as error:
                    problem = str(error)
                except AccessError:
                    raise
                except TransportError as error:
                    problem = str(error)
                if problem != told:
                    name = self._identity.name
                    logger.warning("%s is not in the run yet: %s", name, problem)
                    told = problem
            self._on.check_patience(f"the run could not be joined ({told})")
            await asyncio.sleep(min(backoff.next(), self._pause_seconds_max))

    async def stay(self, client: Client, channel: Channel) -> None:
        """Listens to the coordinator, and joins again whenever the connection breaks."""
        while True:
            with contextlib.suppress(TransportError):
                await self._converse(channel)
            await asyncio.sleep(Backoff().next())
            channel = await self.join(client)

    async def _converse(self, channel: Channel) -> None:
        self._channel = channel
        self._on.linked()
        try:
            while True:
                self._on.told(decode(await channel.receive(), say.TO_MEMBER))
        except ProtocolError as error:
            await channel.close(str(error))
        finally:
            self._channel = None
            self._on.unlinked()

    async def _join_once(self, client: Client, address: str) -> Channel:
        channel = await client.connect(address, self._identity.role, self._identity.name)
        try:
            return await self._ask(client, channel, address)
        except BaseException:
            await channel.close("not in the run")
            raise

    async def _ask(self, client: Client, channel: Channel, address: str) -> Channel:
        identity = self._identity
        join = say.Join(identity.name, identity.nonce, identity.role, self._layout)
        channel.send(encode(join))
        answer: Any = decode(await channel.receive(), _ANSWERS)
        if isinstance(answer, say.Referred):
            await channel.close("going to the coordinator")
            return await self._follow(client, reached_by(answer.address, address), address)
        if isinstance(answer, say.JoinRefused):
            if answer.retry:
                raise _TryAgainError(answer.reason)
            raise ConfigError(answer.reason)
        self._remember(reached_by(answer.shards[0], address) if answer.shards else "")
        self._on.admitted(answer, address)
        return channel

    async def _follow(self, client: Client, coordinator: str, referred_by: str) -> Channel:
        """Joins where a shard says that the coordinator is; its standby may have taken over."""
        *others, last = alternatives(coordinator)
        if referred_by in (*others, last):
            raise TransportError(f"{referred_by} refers to itself for the coordinator")
        for address in others:
            with contextlib.suppress(TransportError):
                return await self._join_once(client, address)
        return await self._join_once(client, last)

    def _remember(self, coordinator: str) -> None:
        """Where to join again, should the process that has let us in be gone by then."""
        known = (*self._addresses, *filter(None, alternatives(coordinator)))
        self._addresses = tuple(dict.fromkeys(known))


class _TryAgainError(Exception):
    """The coordinator refuses for a reason that may pass."""
