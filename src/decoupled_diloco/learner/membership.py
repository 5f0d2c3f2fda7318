"""A participant's membership of a run: it joins, stays in reach of the syncer, and leaves.

`Membership` owns the background, whose thread has all connections. Its own methods run on the
training thread, which waits for nothing but a change that the background notifies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from decoupled_diloco.config.addresses import require_address
from decoupled_diloco.errors import ConfigError, TransportError
from decoupled_diloco.learner.background import Background
from decoupled_diloco.learner.checkpointer import Checkpointer
from decoupled_diloco.learner.connections import ProcessIdentity
from decoupled_diloco.learner.option_groups import MakeTape, ParticipantOptions, SyncerConnection
from decoupled_diloco.learner.parameter_store import ParameterStore
from decoupled_diloco.learner.payloads import BodyExchange
from decoupled_diloco.learner.shared import Context, Shared
from decoupled_diloco.learner.transfers import StateTransfers
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.messages import name_problem
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.tls import require_used
from decoupled_diloco.transport.tokens import read_secret

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Admission:
    """What the run has given a learner when it let it in; the same on all of its ranks.

    Attributes:
        name: The learner's name.
        epoch: The coordinator's number for this process.
        index: The number of the name in the run.
        count: How many learners the run has.
        settings: The run's public settings.
    """

    name: str
    epoch: int
    index: int
    count: int
    settings: dict[str, Any]


class Waits(Protocol):
    """What waits for a change: a learner of several ranks does something for the others meanwhile.

    `wait` is called with the background's lock, which is free until it returns.
    """

    async def wait(self, seconds: float) -> None: ...


class Membership:
    """See the module.

    Args:
        store: The parameters.
        connection: Where the shards are.
        options: As the program, or its launcher, gives them.
        name: The process's name in the run.
        role: What the process is in the run.
        exchange: Creates what carries out orders about payloads.
        checkpointer: A learner's checkpoints.
        transfers: A learner's state for others.
        device: The device, for displays.

    Raises:
        ConfigError: An argument is not valid.
    """

    def __init__(
        self,
        store: ParameterStore,
        connection: SyncerConnection,
        options: ParticipantOptions,
        *,
        name: str,
        role: Literal["learner", "observer"],
        exchange: Callable[[Context], BodyExchange] = BodyExchange,
        checkpointer: Checkpointer | None = None,
        transfers: StateTransfers | None = None,
        device: str = "",
    ) -> None:
        unnamed = name_problem(name)
        if unnamed:
            raise ConfigError(unnamed)
        tls = options.tls
        for address in connection.addresses:
            if connection.client is None:
                require_address(address)
            require_used(tls, address)
        secret = read_secret(options.auth_token)
        self.name, self.addresses = name, connection.addresses
        self._join_timeout = options.timeouts.join
        self.background = Background(
            ProcessIdentity(name, runtime().unique_id(), role, device),
            connection.addresses,
            store,
            client=connection.client or (lambda: HttpClient(token=secret, tls=tls)),
            tape=_tape_maker(options.observability.event_tape, name),
            timeouts=options.timeouts,
            exchange=exchange,
            checkpointer=checkpointer,
            transfers=transfers,
        )

    async def join(self, waits: Waits | None = None) -> None:
        """Returns once the run has let this process in, and all shards are in reach.

        Raises:
            Error: It does not, or not within ``Timeouts.join``.
        """
        self.background.start()
        background, began, limit = self.background, now(), self._join_timeout
        with background.changed:
            while not background.ready:
                self.raise_failure()
                if background.is_too_late:
                    raise TransportError(
                        f"the run is over: it ended while {self.name} was joining. Its weights are "
                        "in the syncer's run folder"
                    )
                if limit is not None and now() - began > limit:
                    self._refuse_to_wait_for(background.links.missing, limit)
                await (waits or self).wait(min(1.0, limit or 1.0))

    @staticmethod
    def _refuse_to_wait_for(addresses: list[str], join_timeout: float) -> None:
        """The run has let this process in, but a shard is where it cannot be reached."""
        if addresses:
            raise TransportError(
                f"{', '.join(addresses)}: no answer within Timeouts(join={join_timeout:g}) s, "
                "though the coordinator lists these shards: give the syncer addresses that can be "
                "reached from here (--addresses), or raise it (None: forever)"
            )

    async def wait(self, seconds: float) -> None:
        """See `Waits`."""
        await self.background.changed.wait(seconds)

    def raise_failure(self) -> None:
        """Raises what ended the background, if anything did."""
        if self.background.failure is not None:
            raise self.background.failure

    @property
    def shared(self) -> Shared:
        """What this thread and the background share."""
        shared = self.background.shared
        assert shared is not None, "join() returns only once the run let us in"
        return shared

    @property
    def state(self) -> LearnerState:
        """The machine's state; it changes whenever the lock is free."""
        return self.shared.machine.state

    @property
    def admission(self) -> Admission:
        """What the run has given this process."""
        background, machine = self.background, self.shared.machine
        settings = self.shared.config.public()
        return Admission(self.name, machine.epoch, background.index, background.count, settings)

    @property
    def versions(self) -> tuple[str, ...]:
        """The version of each fragment that the parameters were last aligned with."""
        return tuple(str(view.held) for view in self.state.fragments)

    def leave(self, farewell: str, *, abrupt: bool = False) -> None:
        """Says goodbye, and ends the background; see `Background.stop`."""
        self.background.stop(farewell, abrupt=abrupt)


def _tape_maker(tape: str | Path | MakeTape | None, name: str) -> MakeTape | None:
    if tape is None or callable(tape):
        return tape
    path = Path(tape)
    return lambda header: open_tape(path, name, header)


def open_tape(path: Path, name: str, header: dict[str, Any]) -> TapeWriter:
    """The tape; a full disk ends it, and nothing else."""
    return TapeWriter(path, name, header, on_failure=lambda error: logger.error("%s", error))
