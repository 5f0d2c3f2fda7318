"""A participant's way into the run, and its conversation with the coordinator ever after."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decoupled_diloco.config.addresses import alternatives, reached_by
from decoupled_diloco.errors import (
    AccessError,
    ConfigError,
    Error,
    ProtocolError,
    RunEndedError,
    TransportError,
)
from decoupled_diloco.learner.trouble import TroubleLog
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.wire import decode, encode
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.transport.backoff import BRISK_SECONDS, CAP_SECONDS, Backoff
from decoupled_diloco.transport.base import Channel, Client

JOIN_TIMEOUT_SECONDS = 300.0
"""How long the first join is tried: long enough for a syncer that is started a little later."""

ENDED_SECONDS = 3.0
"""How long the first join is tried although the run folder records the run's end: a syncer that
starts in that folder may be about to replace the record."""

CONFIRM_SECONDS = 5.0
"""While the coordinator is out of reach, a shard that was lost as well is dialled only after this:
both may be of another run by then, and the coordinator would say so."""

_ANSWERS: tuple[type[Any], ...] = (say.Admitted, say.JoinRefused, say.Referred)

TRAINING_GOES_ON = "training goes on, trying again"

WAY_OUT = (
    "training goes on without it, and it is asked again. To go on with the run that this learner "
    "is in, start the syncer with --resume; to take part in another one, start this process again"
)


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of this process in the run; ``device``: description of a learner's device."""

    name: str
    nonce: str
    role: say.Role
    device: str = ""


@dataclass(frozen=True)
class Patience:
    """How long a process waits for its syncer.

    Attributes:
        join_seconds: For the first join; ``None``: for ever.
        alone_seconds: At any time, without any shard; ``None``: for ever.
    """

    join_seconds: float | None
    alone_seconds: float | None


@dataclass(frozen=True)
class Coordinations:
    """Who is told of what the coordinator says; all are called in the event loop.

    Attributes:
        admitted: The run has let this process in, by this address.
        linked: From now on `CoordinatorLink.tell` reaches the coordinator.
        told: It has said something.
        unlinked: It is out of reach.
        over: Whether the run is over, or this process about to go: nobody need be dialled.
        check_patience: Raises `TransportError` when nobody was in reach for too long, given what
            could not be done.
    """

    admitted: Callable[[say.Admitted, str], None]
    linked: Callable[[], None]
    told: Callable[[say.ToMember], None]
    unlinked: Callable[[], None]
    over: Callable[[], bool]
    check_patience: Callable[[str], None]


class CoordinatorSession:
    """Joins the run, and stays joined: the coordinator knows by the connection who is there.

    What the coordinator says to the first join may be an error of the user's, and is raised. What
    it says later never is: a process that was in the run goes on without it, tells why, and asks
    again.

    Args:
        identity: Who this process is.
        layout: Its layout as JSON text.
        addresses: One or several shards' addresses; each knows where the coordinator is.
        coordinations: Who is told.
        patience: How long to try.

    Attributes:
        refused: Why the run does not take this process back, in words; empty: it does.
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        layout: str,
        addresses: tuple[str, ...],
        coordinations: Coordinations,
        patience: Patience,
    ) -> None:
        self.refused = ""
        self._identity = identity
        self._layout = layout
        self._addresses = addresses
        self._on = coordinations
        self._patience = patience
        self._run = ""
        self._channel: Channel | None = None
        self._trouble = TroubleLog()
        self._rng = runtime().rng()
        self._joined = asyncio.Event()

    def tell(self, message: say.Message) -> None:
        """Sends a message, if the coordinator is there."""
        if self._channel is not None:
            self._channel.send(encode(message))

    async def close(self) -> None:
        """Ends the conversation when all that was said is on its way."""
        if self._channel is not None:
            await self._channel.close("goodbye")

    async def confirmed(self, shard: int) -> None:
        """Returns when a shard may be dialled: the run behind the addresses is still the same.

        Shard 0 is in the coordinator's process. Others go on without it, so they are dialled after
        a while, unless the coordinator answers and refuses.
        """
        while not self._joined.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._joined.wait(), CONFIRM_SECONDS)
            if shard != 0 and not self.refused:
                return

    async def join(self, client: Client) -> Channel:
        """Asks the coordinator to be let in, for as long as its patience lasts.

        Raises:
            AccessError: The token is not accepted.
            ConfigError: The run refuses this process for good.
            ProtocolError: What answers is no syncer.
            TransportError: It took too long, or the run has ended.
        """
        backoff, began = Backoff(brisk_seconds=BRISK_SECONDS), now()
        while True:
            try:
                channel = await self._ask_each(client)
            except (AccessError, ConfigError):
                raise
            except ProtocolError as error:
                raise ProtocolError(f"{error}: is this the syncer's address?") from error
            except (_TryAgainError, TransportError) as error:
                if isinstance(error, RunEndedError) and now() - began > ENDED_SECONDS:
                    raise
                name = self._identity.name
                self._trouble.tell(
                    "early",
                    f"{name} is not in the run yet: {error}: trying again{self._how_long()}. A "
                    "run that has ended has no syncer: its weights are in the syncer's run folder",
                )
                problem = f"the run could not be joined ({error})"
            else:
                self._trouble.over(f"{self._identity.name} is in the run")
                return channel
            self._on.check_patience(problem)
            self._check_timeout(problem, now() - began)
            await asyncio.sleep(self._at_most(backoff.next()))

    async def stay(self, client: Client, channel: Channel) -> None:
        """Listens to the coordinator, and joins again whenever the connection breaks.

        Raises:
            TransportError: Nobody was in reach for too long.
        """
        member: Channel | None = channel
        while member is not None:
            with contextlib.suppress(TransportError):
                await self._converse(member)
            member = await self._join_again(client)  # break: coordinator-not-rejoined

    async def _join_again(self, client: Client) -> Channel | None:
        """Until the run takes this process back, or is over."""
        name, backoff = self._identity.name, Backoff(brisk_seconds=BRISK_SECONDS)
        await asyncio.sleep(backoff.next())
        while not self._on.over():
            try:
                channel = await self._ask_each(client)
            except (AccessError, ConfigError, ProtocolError) as error:
                self.refused = str(error)
                self._trouble.tell(
                    "refused", f"{name}: the syncer refuses this learner ({error}): {WAY_OUT}"
                )
                pause = self._rng.uniform(CAP_SECONDS / 2, CAP_SECONDS)
            except _TryAgainError as error:
                sentence = f"{name} is not back in the run yet: {error}: {TRAINING_GOES_ON}"
                self._trouble.tell("waiting", sentence)
                pause = backoff.next()
            except TransportError as error:
                self._trouble.tell(
                    "alone", f"{name}: shard 0 is out of reach ({error}): {TRAINING_GOES_ON}"
                )
                pause = backoff.next()
            else:
                self.refused = ""
                self._trouble.over(f"{name} is in the run again")
                return channel
            self._on.check_patience("the run could not be joined again")
            await asyncio.sleep(self._at_most(pause))
        return None

    def _check_timeout(self, problem: str, seconds: float) -> None:
        limit = self._patience.join_seconds
        if limit is not None and seconds > limit:
            raise TransportError(
                f"{problem} in {seconds:.0f} s, join_timeout={limit:g}: start the syncer, correct "
                f"its address ({', '.join(self._addresses)}), or raise join_timeout (None: for "
                "ever). If the run has ended, its weights are in the syncer's run folder"
            )

    def _how_long(self) -> str:
        limit = self._patience.join_seconds
        return "" if limit is None else f" for {limit:g} s (join_timeout)"

    def _at_most(self, pause: float) -> float:
        """A pause that does not outlast anybody's patience."""
        limits = (self._patience.join_seconds, self._patience.alone_seconds)
        return min(pause, *(limit for limit in limits if limit is not None), CAP_SECONDS)

    async def _converse(self, channel: Channel) -> None:
        self._channel = channel
        self._joined.set()
        self._on.linked()
        try:
            while True:
                self._on.told(decode(await channel.receive(), say.TO_MEMBER))
        except ProtocolError as error:
            await channel.close(str(error))
        finally:
            self._channel = None
            self._joined.clear()
            self._on.unlinked()

    async def _ask_each(self, client: Client) -> Channel:
        """Joins by the first address that lets it; else what the last one said, or the refusal."""
        failure: Error | _TryAgainError | None = None
        for address in self._addresses:
            try:
                return await self._join_once(client, address)
            except (AccessError, ConfigError, ProtocolError) as error:
                failure = error
                break
            except (_TryAgainError, TransportError) as error:
                failure = error
        assert failure is not None, "there is an address"
        raise failure

    async def _join_once(self, client: Client, address: str) -> Channel:
        channel = await client.connect(address, self._identity.role, self._identity.name)
        try:
            return await self._ask(client, channel, address)
        except BaseException:
            await channel.close("not in the run")
            raise

    async def _ask(self, client: Client, channel: Channel, address: str) -> Channel:
        identity = self._identity
        me = (identity.name, identity.nonce, identity.role)
        join = say.Join(*me, self._layout, self._run, identity.device)
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
        self._run = answer.run
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
