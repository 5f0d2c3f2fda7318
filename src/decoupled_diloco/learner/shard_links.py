"""A participant's connections to the shards: each is kept for ever, whatever the others do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from decoupled_diloco.config.addresses import alternatives
from decoupled_diloco.errors import AccessError, ProtocolError, TransportError
from decoupled_diloco.learner.joining import TRAINING_GOES_ON, WAY_OUT, ProcessIdentity
from decoupled_diloco.learner.sense import require_sense
from decoupled_diloco.learner.trouble import TroubleLog
from decoupled_diloco.observe.samples import LinkState, Sample
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.checkpoints.events import CheckpointHeard
from decoupled_diloco.protocol.learner import LearnerMachine
from decoupled_diloco.protocol.peers import shard_peer
from decoupled_diloco.protocol.wire import decode, number_of, numbered
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.transport.backoff import BRISK_SECONDS, CAP_SECONDS, Backoff
from decoupled_diloco.transport.base import Channel, Client

logger = logging.getLogger(__name__)

_TO_LEARNER = get_args(say.ToLearner)


@dataclass(frozen=True)
class LinkDuties:
    """What the connections need of the rest; all are called in the event loop.

    Attributes:
        client: Dials.
        machine: The learner's machine.
        told: Tells it a fact.
        sample: Writes a measurement to the tape.
        confirmed: Waits, as long as is wise, for the coordinator to be the run's own.
        admitted: Whether the run has let this process in for good; a refusal before is an error.
        over: Whether the run is over.
        ending: Whether the run is over or this process about to go: nobody is told of trouble.
    """

    client: Callable[[], Client]
    machine: Callable[[], LearnerMachine]
    told: Callable[[fact.LearnerEvent], None]
    sample: Callable[[Sample], None]
    confirmed: Callable[[int], Awaitable[None]]
    admitted: Callable[[], bool]
    over: Callable[[], bool]
    ending: Callable[[], bool]


class ShardLinks:
    """See the module.

    Args:
        identity: Who this process is.
        duties: Who is told of what.

    Attributes:
        addresses: Where each shard was reached last, or is to be; empty before the run is joined.
        channels: The connections that stand, by shard.
        refusals: Why shards do not take this process, in words, by shard.
        alone_since: When a connection was lost last.
    """

    def __init__(self, identity: ProcessIdentity, duties: LinkDuties) -> None:
        self.addresses: list[str] = []
        self.channels: dict[int, Channel] = {}
        self.refusals: dict[int, str] = {}
        self.alone_since = now()
        self._identity = identity
        self._duties = duties
        self._rng = runtime().rng()

    @property
    def missing(self) -> list[str]:
        """The addresses of shards that are not connected."""
        return [a for shard, a in enumerate(self.addresses) if shard not in self.channels]

    def say(self, shard: int, message: say.Message) -> None:
        """Says something to a shard, if it is connected."""
        channel = self.channels.get(shard)
        if channel is not None:
            channel.send(numbered(message, self._duties.machine().state.checkpoint))

    def stay(self) -> Iterator[Coroutine[Any, Any, None]]:
        """A coroutine for each shard, which keeps its connection until the run is over."""
        for shard, address in enumerate(self.addresses):
            yield self._follow(shard, alternatives(address))

    async def close(self) -> None:
        """Closes all connections."""
        channels = list(self.channels.values())
        await asyncio.gather(*(channel.close("goodbye") for channel in channels))

    async def _follow(self, shard: int, addresses: Sequence[str]) -> None:
        """Nothing that a shard says ends the training."""
        duties = self._duties
        backoff, trouble = Backoff(brisk_seconds=BRISK_SECONDS), TroubleLog()
        subject = f"{self._identity.name}: shard {shard}"
        while not duties.over():
            await duties.confirmed(shard)
            pause = backoff.next()
            try:
                channel = await self._dial(shard, addresses)
                await self._converse(shard, channel, backoff, trouble)
            except (AccessError, ProtocolError) as error:
                if not duties.admitted():
                    raise
                self.refusals[shard] = str(error)
                trouble.tell("refuses", f"{subject} refuses this learner ({error}): {WAY_OUT}")
                pause = self._rng.uniform(CAP_SECONDS / 2, CAP_SECONDS)
            except TransportError as error:
                if not duties.ending():
                    sentence = f"{subject} is out of reach ({error}): {TRAINING_GOES_ON}"
                    trouble.tell("out of reach", sentence)
            await asyncio.sleep(pause)

    async def _dial(self, shard: int, addresses: Sequence[str]) -> Channel:
        """Connects to the one that answers; last of all to the one that did before."""
        client, failure = self._duties.client(), cast("TransportError | None", None)
        for address in sorted(addresses, key=lambda each: each == self.addresses[shard]):
            try:
                channel = await client.connect(address, self._identity.role, self._identity.name)
            except AccessError:
                raise
            except TransportError as error:
                failure = error
            else:
                self.addresses[shard] = address
                return channel
        assert failure is not None, "a shard has an address"
        raise failure

    async def _converse(
        self, shard: int, channel: Channel, backoff: Backoff, trouble: TroubleLog
    ) -> None:
        """Listens to a shard until its connection breaks.

        Raises:
            AccessError: It does not take this process.
            ProtocolError: It has said what cannot be.
        """
        duties, name = self._duties, self._identity.name
        self.channels[shard] = channel
        duties.sample(LinkState(shard, True))
        duties.told(fact.Connected(shard_peer(shard)))
        try:
            while True:
                checkpoint = number_of(data := await channel.receive())
                message = cast("say.ToLearner", decode(data, _TO_LEARNER))
                machine = duties.machine()
                require_sense(message, shard, machine.options)
                if checkpoint > machine.state.checkpoint_heard:
                    duties.told(CheckpointHeard(checkpoint))  # break: copy-before-checkpoint
                duties.told(fact.Received(shard_peer(shard), message))
                if isinstance(message, say.Welcome):
                    backoff.reset()
                    self.refusals.pop(shard, None)
                    trouble.over(f"{name}: shard {shard} is back")
                if isinstance(message, say.Refusal) and message.final:
                    raise AccessError(message.reason)
        except (AccessError, ProtocolError) as error:
            await channel.close(str(error))
            raise
        except TransportError as error:
            logger.info("%s: shard %d: %s", name, shard, error)
        finally:
            del self.channels[shard]
            self.alone_since = now()
            duties.sample(LinkState(shard, False))
            duties.told(fact.Lost(shard_peer(shard)))  # break: learner-ignores-lost-link
