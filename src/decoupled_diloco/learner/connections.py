"""A participant's connections: to the coordinator, by which it joins the run, and to each shard.

Both last until the run is over. After a connection breaks, it is made again, and training continues
meanwhile. All of this runs on the background's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from decoupled_diloco.config.addresses import alternatives, reached_by
from decoupled_diloco.config.parties import OwnParty
from decoupled_diloco.errors import (
    AccessError,
    ConfigError,
    DilocoError,
    NotJoinedError,
    ProtocolError,
    RunEndedError,
    TransportError,
)
from decoupled_diloco.learner.option_groups import Timeouts
from decoupled_diloco.learner.shared import Context
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    CheckpointHeard,
    LeasesGiven,
    StateWanted,
    shard_peer,
)
from decoupled_diloco.protocol.wire import decode, encode, number_of, numbered
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.tape.samples import LinkState
from decoupled_diloco.transport.backoff import BRISK_SECONDS, CAP_SECONDS, Backoff
from decoupled_diloco.transport.interface import Channel, Client
from decoupled_diloco.units import format_duration

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
"""Interval at which a lasting problem is logged again."""


class TroubleLog:
    """Logs one problem: when it appears, then every ``AGAIN_SECONDS``, and when it is over.

    All records are warnings, also that it is over: without any logging setup, Python shows warnings
    only, and a reader of the first record needs the last one.
    """

    def __init__(self) -> None:
        self._kind = ""
        self._since = self._again_at = 0.0

    def warn(self, kind: str, sentence: str) -> None:
        """Log a problem, unless it was logged less than ``AGAIN_SECONDS`` ago.

        Args:
            kind: Identifies the problem; the same text while it lasts.
            sentence: The text to log; its details may differ each time.
        """
        at = now()
        if not self._kind:
            self._since = at
        if kind == self._kind and at < self._again_at:
            return
        lasting = f" (for {format_duration(at - self._since)})" if kind == self._kind else ""
        logger.warning("%s%s", sentence, lasting)
        self._kind, self._again_at = kind, at + AGAIN_SECONDS

    def over(self, sentence: str) -> None:
        """Log that the problem is over, if it was logged."""
        if self._kind:
            logger.warning("%s, after %s", sentence, format_duration(now() - self._since))
        self._kind = ""


def require_valid_from_shard(message: messages.ToLearner, shard: int, options: Options) -> None:
    """Reject a shard's message about a fragment that it does not own.

    Raises:
        ProtocolError: The message is rejected; the error names the fragment.
    """
    named = [getattr(message, "fragment", None), *getattr(message, "coming", ())]
    for fragment in (each for each in named if each is not None):
        if fragment >= options.fragments or options.owner(fragment) != shard:
            kind = type(message).__name__
            text = f"{kind} is about fragment {fragment}, which is not shard {shard}'s"
            raise ProtocolError(text)


def require_valid_from_coordinator(
    message: messages.ToMember, options: Options, partitions: int | None
) -> None:
    """Reject a coordinator's message about fragments or data partitions that do not exist.

    Raises:
        ProtocolError: The message is rejected; the error names the first such index.
    """
    match message:
        case StateWanted(seen=seen):
            wrong = [held.fragment for held in seen if held.fragment >= options.fragments]
            if wrong:
                raise ProtocolError(f"StateWanted names fragment {wrong[0]}, which does not exist")
        case LeasesGiven(leases=leases):
            parts = (lease.part for lease in leases)
            wrong = [part for part in parts if partitions is None or part >= partitions]
            if wrong:
                raise ProtocolError(f"LeasesGiven names partition {wrong[0]}, which does not exist")


ENDED_SECONDS = 3.0
"""Time for which the first join is tried although the run folder records the run's end: a syncer
that starts in that folder may be about to replace the record."""

CONFIRM_SECONDS = 5.0
"""Wait before a lost shard is connected again while the coordinator is unreachable. Both may belong
to another run by then, and only the coordinator would reject this process for that."""

_ANSWERS: tuple[type[Any], ...] = (messages.Admitted, messages.JoinRefused, messages.Referred)

TRAINING_GOES_ON = "training continues, retrying"

_HOW_TO_CONTINUE = (
    "training continues without the syncer, retrying. To continue the run that this learner is in, "
    "start the syncer with --resume; to take part in another run, start this process again"
)


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of this process in the run.

    Attributes:
        device: Description of a learner's device.
        party: The learner's party, from its own files; ``None`` without parties.
    """

    name: str
    nonce: str
    role: messages.Role
    device: str = ""
    party: OwnParty | None = None


class CoordinatorSession:
    """Joins the run and stays joined: a member is present while its connection lasts.

    A rejection of the first join may be a mistake of the user, so it is raised. Later rejections
    never are: a process that was in the run continues without it, logs the reason, and retries.

    Args:
        identity: Identity of this process.
        layout: The model's layout as text.
        addresses: Addresses of one or several shards; each can refer to the coordinator.
        context: The background around it.
        timeouts: How long to try.

    Attributes:
        refused: Why the run does not admit this process again, as text; empty if it does.
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        layout: str,
        addresses: tuple[str, ...],
        context: Context,
        timeouts: Timeouts,
    ) -> None:
        self.refused = ""
        self._identity = identity
        self._layout = layout
        self._addresses = addresses
        self._here = context
        self._timeouts = timeouts
        self._run = ""
        self._channel: Channel | None = None
        self._trouble = TroubleLog()
        self._rng = runtime().rng()
        self._joined = asyncio.Event()
        self._relays = set[str]()

    def send(self, message: messages.Message) -> None:
        """Send a message, if the coordinator is connected."""
        if self._channel is not None:
            self._channel.send(encode(message))

    async def close(self) -> None:
        """Close the connection after all queued messages were sent."""
        if self._channel is not None:
            await self._channel.close("goodbye")

    async def confirmed(self, shard: int) -> None:
        """Return when this process may connect to a shard, as its address is still of this run.

        Shard 0 is in the coordinator's process. The other shards continue without it, so they are
        connected after ``CONFIRM_SECONDS``, unless the coordinator answers and rejects the join.
        """
        while not self._joined.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._joined.wait(), CONFIRM_SECONDS)
            if shard != 0 and not self.refused:
                return

    async def join(self, client: Client) -> Channel:
        """Request admission from the coordinator until it succeeds or a timeout has passed.

        Raises:
            AccessError: The auth token is not accepted.
            ConfigError: The run rejects this process permanently.
            ProtocolError: The peer is not a syncer.
            NotJoinedError: A timeout has passed.
            RunEndedError: The run has ended.
        """
        backoff, began = Backoff(brisk_seconds=BRISK_SECONDS), now()
        while True:
            try:
                channel = await self._join_any(client)
            except (AccessError, ConfigError):
                raise
            except ProtocolError as error:
                raise ProtocolError(f"{error}: is this the syncer's address?") from error
            except (_TryAgainError, TransportError) as error:
                if isinstance(error, RunEndedError) and now() - began > ENDED_SECONDS:
                    raise
                name = self._identity.name
                self._trouble.warn(
                    "early",
                    f"{name} is not in the run yet: {error}: retrying{self._how_long()}. A run "
                    "that has ended has no syncer: its weights are in the syncer's run folder",
                )
                problem = f"the run could not be joined ({error})"
            else:
                self._trouble.over(f"{self._identity.name} is in the run")
                return channel
            try:
                self._here.check_patience(problem)
                self._check_timeout(problem, now() - began)
            except TransportError as error:
                raise NotJoinedError(str(error)) from None
            await asyncio.sleep(self._at_most(backoff.next()))

    async def stay(self, client: Client, channel: Channel) -> None:
        """Receive the coordinator's messages, and join again whenever the connection breaks.

        Raises:
            TransportError: No shard was reachable for ``Timeouts.disconnect``.
        """
        member: Channel | None = channel
        while member is not None:
            with contextlib.suppress(TransportError):
                await self._converse(member)
            member = await self._join_again(client)  # break: coordinator-not-rejoined

    async def _join_again(self, client: Client) -> Channel | None:
        """Retry until the run admits this process, or is over; then return ``None``."""
        name, backoff = self._identity.name, Backoff(brisk_seconds=BRISK_SECONDS)
        await asyncio.sleep(backoff.next())
        while not self._here.leaving:
            try:
                channel = await self._join_any(client)
            except (AccessError, ConfigError, ProtocolError) as error:
                self.refused = str(error)
                self._trouble.warn(
                    "refused",
                    f"{name}: the syncer rejects this learner ({error}): {_HOW_TO_CONTINUE}",
                )
                pause = self._rng.uniform(CAP_SECONDS / 2, CAP_SECONDS)
            except _TryAgainError as error:
                sentence = f"{name} is not back in the run yet: {error}: {TRAINING_GOES_ON}"
                self._trouble.warn("waiting", sentence)
                pause = backoff.next()
            except TransportError as error:
                self._trouble.warn(
                    "alone", f"{name}: shard 0 is unreachable ({error}): {TRAINING_GOES_ON}"
                )
                pause = backoff.next()
            else:
                self.refused = ""
                self._trouble.over(f"{name} is in the run again")
                return channel
            self._here.check_patience("the run could not be joined again")
            await asyncio.sleep(self._at_most(pause))
        return None

    def _check_timeout(self, problem: str, seconds: float) -> None:
        limit = self._timeouts.join
        if limit is not None and seconds > limit:
            raise TransportError(
                f"{problem} in {seconds:.0f} s, Timeouts(join={limit:g}): start the syncer, "
                f"correct its address ({', '.join(self._addresses)}), or raise the timeout (None: "
                "forever). If the run has ended, its weights are in the syncer's run folder"
            )

    def _how_long(self) -> str:
        limits = {"join": self._timeouts.join, "disconnect": self._timeouts.disconnect}
        known = [(limit, name) for name, limit in limits.items() if limit is not None]
        return " for {:g} s (Timeouts.{})".format(*min(known)) if known else ""

    def _at_most(self, pause: float) -> float:
        """Shorten a pause so that no timeout passes during it."""
        limits = (self._timeouts.join, self._timeouts.disconnect)
        return min(pause, *(limit for limit in limits if limit is not None), CAP_SECONDS)

    async def _converse(self, channel: Channel) -> None:
        self._channel = channel
        self._joined.set()
        self._here.deliver(messages.Connected(COORDINATOR))
        try:
            while True:
                message = decode(await channel.receive(), messages.TO_MEMBER)
                self._here.coordinator_sent(message)
        except ProtocolError as error:
            await channel.close(str(error))
        finally:
            self._channel = None
            self._joined.clear()
            self._here.deliver(messages.Lost(COORDINATOR))

    async def _join_any(self, client: Client) -> Channel:
        """Join by the first address that works; otherwise raise the rejection or the last error."""
        failure: DilocoError | _TryAgainError | None = None
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
        lost = RELAY_LOST_SECONDS if address in self._relays else None
        channel = await client.connect(
            address, self._identity.role, self._identity.name, lost_seconds=lost
        )
        try:
            return await self._send_join(client, channel, address)
        except BaseException:
            await channel.close("not in the run")
            raise

    async def _send_join(self, client: Client, channel: Channel, address: str) -> Channel:
        identity = self._identity
        me = (identity.name, identity.nonce, identity.role)
        join = messages.Join(*me, self._layout, self._run, identity.device)
        channel.send(encode(join))
        answer: Any = decode(await channel.receive(), _ANSWERS)
        if isinstance(answer, messages.Referred):
            await channel.close("going to the coordinator")
            return await self._follow(client, reached_by(answer.address, address), address)
        if isinstance(answer, messages.JoinRefused):
            if answer.retry:
                raise _TryAgainError(answer.reason)
            raise ConfigError(answer.reason)
        if answer.relayed:
            self._relays.add(address)
            # Not the relay's host stands for a wildcard of the shards, but that of a shard.
            address = self._addresses[-1]
        self._remember(reached_by(answer.shards[0], address) if answer.shards else "")
        self._run = answer.run
        self._here.admitted(answer, address)
        return channel

    async def _follow(self, client: Client, coordinator: str, referred_by: str) -> Channel:
        """Join at the coordinator's address from a shard, or at its standby, which may lead now."""
        *others, last = alternatives(coordinator)
        if referred_by in (*others, last):
            raise TransportError(f"{referred_by} refers to itself for the coordinator")
        for address in others:
            with contextlib.suppress(TransportError):
                return await self._join_once(client, address)
        return await self._join_once(client, last)

    def _remember(self, coordinator: str) -> None:
        """Add the coordinator's addresses: the process that admitted this one may be gone later."""
        known = (*self._addresses, *filter(None, alternatives(coordinator)))
        self._addresses = tuple(dict.fromkeys(known))


class _TryAgainError(Exception):
    """The coordinator rejects the join for a temporary reason."""


_TO_LEARNER = get_args(messages.ToLearner)

RELAY_LOST_SECONDS = 3.0
"""Silence after which a relay is left for the next address: it is near, so three pings suffice."""

NEARER_SECONDS = 10.0
"""Longest time between two looks for a nearer relay."""


async def probed(
    client: Client, address: str, role: str, principal: str, shard: int
) -> messages.RelayProbed | None:
    """Ask the process at an address whether it is a relay with a connection to a shard.

    Returns:
        The answer; ``None`` if there is none.
    """
    try:
        channel = await client.connect(address, role, principal)
    except (AccessError, TransportError):
        return None
    try:
        async with asyncio.timeout(RELAY_LOST_SECONDS):
            channel.send(encode(messages.RelayProbe(shard)))
            return decode(await channel.receive(), (messages.RelayProbed,))
    except (TimeoutError, TransportError, ProtocolError):
        return None
    finally:
        await channel.close("it was a probe")


class ShardLinks:
    """Keeps a connection to each shard; see the module.

    Args:
        identity: Identity of this process.
        context: The background around it.

    Attributes:
        addresses: The last working address of each shard, or the one to try; empty before the join.
        channels: Shard to open connection.
        refusals: Shard to the reason, as text, why it rejects this process.
        near: Given addresses that may be those of relays, the nearest first.
        relays: Those of them that are known to be relays. Each has one address for all shards.
        alone_since: When a connection was last lost.
    """

    def __init__(self, identity: ProcessIdentity, context: Context) -> None:
        self.addresses: list[str] = []
        self.near: tuple[str, ...] = ()
        self.relays: set[str] = set()
        self.channels: dict[int, Channel] = {}
        self.refusals: dict[int, str] = {}
        self.alone_since = now()
        self._identity = identity
        self._here = context
        self._rng = runtime().rng()

    @property
    def missing(self) -> list[str]:
        """The addresses of shards that are not connected."""
        return [a for shard, a in enumerate(self.addresses) if shard not in self.channels]

    def send(self, shard: int, message: messages.Message) -> None:
        """Send a message to a shard, if it is connected."""
        channel = self.channels.get(shard)
        if isinstance(message, messages.Hello):
            message = replace(message, shard=shard)  # a relay has one address for all shards
        if channel is not None:
            channel.send(numbered(message, self._here.machine.state.checkpoint))

    def stay(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield a coroutine for each shard that keeps its connection until the run is over."""
        for shard, address in enumerate(self.addresses):
            yield self._follow(shard, alternatives(address))

    async def close(self) -> None:
        """Close all connections."""
        channels = list(self.channels.values())
        await asyncio.gather(*(channel.close("goodbye") for channel in channels))

    async def _follow(self, shard: int, addresses: Sequence[str]) -> None:
        """Keep one shard's connection; after the join, no error of a shard ends the training."""
        here = self._here
        backoff, trouble = Backoff(brisk_seconds=BRISK_SECONDS), TroubleLog()
        subject = f"{self._identity.name}: shard {shard}"
        while not here.over:
            await here.confirmed(shard)
            pause = backoff.next()
            try:
                relays = (each for each in self.near if each in self.relays)
                channel = await self._dial(shard, (*relays, *addresses))
                async with self._looking_nearer(shard, channel):
                    await self._converse(shard, channel, backoff, trouble)
            except (AccessError, ProtocolError) as error:
                if not here.ready:
                    raise
                self.refusals[shard] = str(error)
                sentence = f"{subject} rejects this learner ({error}): {_HOW_TO_CONTINUE}"
                trouble.warn("refuses", sentence)
                pause = self._rng.uniform(CAP_SECONDS / 2, CAP_SECONDS)
            except TransportError as error:
                if not here.leaving:
                    sentence = f"{subject} is unreachable ({error}): {TRAINING_GOES_ON}"
                    trouble.warn("out of reach", sentence)
            await asyncio.sleep(pause)

    async def _dial(self, shard: int, addresses: Sequence[str]) -> Channel:
        """Connect to the first address that answers; the last working one is tried last.

        That one has just failed, so a standby at another address is more likely to answer.
        """
        client, failure = self._here.client, cast("TransportError | None", None)
        for address in sorted(addresses, key=lambda each: each == self.addresses[shard]):
            try:
                lost = RELAY_LOST_SECONDS if address in self.relays else None
                channel = await client.connect(
                    address, self._identity.role, self._identity.name, lost_seconds=lost
                )
            except AccessError:
                raise
            except TransportError as error:
                failure = error
            else:
                self.addresses[shard] = address
                return channel
        assert failure is not None, "a shard has an address"
        raise failure

    @asynccontextmanager
    async def _looking_nearer(self, shard: int, channel: Channel) -> AsyncIterator[None]:
        """Look for a nearer relay within a ``with`` block, if the present address is not one."""
        present = self.addresses[shard]
        if not self.near or present == self.near[0]:
            yield
            return
        look = asyncio.ensure_future(self._look_nearer(shard, channel, present))
        try:
            yield
        finally:
            look.cancel()

    async def _look_nearer(self, shard: int, channel: Channel, present: str) -> None:
        """Close a channel as soon as a nearer relay can carry it: the next one leads there."""
        while True:
            await asyncio.sleep(self._rng.uniform(NEARER_SECONDS / 2, NEARER_SECONDS))
            nearer = self.near[: self.near.index(present)] if present in self.near else self.near
            for address in nearer:
                if await self._carries(shard, address):
                    self.relays.add(address)
                    await channel.close(f"the relay at {address} is nearer")
                    return

    async def _carries(self, shard: int, address: str) -> bool:
        """Return whether a relay at an address is connected to a shard."""
        me = self._identity
        answer = await probed(self._here.client, address, me.role, me.name, shard)
        if answer is not None and not answer.is_relay:
            self.near = tuple(each for each in self.near if each != address)
        return answer is not None and answer.is_connected

    async def _converse(
        self, shard: int, channel: Channel, backoff: Backoff, trouble: TroubleLog
    ) -> None:
        """Receive a shard's messages until its connection breaks.

        Raises:
            AccessError: It rejects this process.
            ProtocolError: It sent an invalid message.
        """
        here, name = self._here, self._identity.name
        self.channels[shard] = channel
        here.sample(LinkState(shard, True))
        here.deliver(messages.Connected(shard_peer(shard)))
        try:
            while True:
                checkpoint = number_of(data := await channel.receive())
                message = cast("messages.ToLearner", decode(data, _TO_LEARNER))
                machine = here.machine
                require_valid_from_shard(message, shard, machine.options)
                # First: this learner's part of the checkpoint must precede the message's effect.
                if checkpoint > machine.state.checkpoint_heard:
                    here.deliver(CheckpointHeard(checkpoint))  # break: copy-before-checkpoint
                if isinstance(message, messages.SumStep):
                    message = here.bodies.secure.receive(message)
                here.deliver(messages.Received(shard_peer(shard), message))
                if isinstance(message, messages.Welcome):
                    backoff.reset()
                    self.refusals.pop(shard, None)
                    trouble.over(f"{name}: shard {shard} is back")
                if isinstance(message, messages.Refusal) and message.final:
                    raise AccessError(message.reason)
        except (AccessError, ProtocolError) as error:
            await channel.close(str(error))
            raise
        except TransportError as error:
            address = self.addresses[shard]
            if address in self.relays and not (here.leaving or here.over):
                logger.info(
                    "%s: the relay at %s no longer connects it to shard %d (%s); training "
                    "continues, and it dials the next address",
                    *(name, address, shard, error),
                )
            else:
                logger.info("%s: shard %d: %s", name, shard, error)
        finally:
            del self.channels[shard]
            self.alone_since = now()
            here.sample(LinkState(shard, False))
            here.deliver(messages.Lost(shard_peer(shard)))  # break: learner-ignores-lost-link
