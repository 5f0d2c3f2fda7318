"""A participant's membership of a run: it joins, stays connected to the syncer, and leaves.

`Membership` owns the background, whose thread has all connections. The methods of `Membership` run
on the training thread. They wait only for changes that the background notifies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from decoupled_diloco.config.addresses import require_address
from decoupled_diloco.errors import ConfigError, RunEndedError, TransportError
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
    """The values that the run assigned to a learner at its join; the same on all of its ranks.

    Attributes:
        name: The learner's name.
        epoch: The learner's incarnation, assigned by the coordinator.
        index: The number of the name in the run.
        count: Number of learners that the run expects.
        settings: The run's public settings.
    """

    name: str
    epoch: int
    index: int
    count: int
    settings: dict[str, Any]


class Waits(Protocol):
    """Waits for a change; a multi-rank learner serves its other ranks meanwhile.

    The caller of `wait` holds the background's lock. The lock is released until `wait` returns.
    """

    async def wait(self, seconds: float) -> None: ...


class Membership:
    """One process's membership; see the module.

    Args:
        store: The parameters.
        connection: The addresses of the shards, and the client.
        options: The options from the program or its launcher.
        name: The process's name in the run.
        role: The process's role in the run.
        exchange: Creates the object that executes orders about payloads.
        checkpointer: A learner's checkpointer; ``None`` for observers.
        transfers: The state that a learner shares.
        device: Description of the device, for displays.

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
        party = options.party.load(name) if role == "learner" else None
        self.name, self.addresses = name, connection.addresses
        self.join_timeout = options.timeouts.join
        self.background = Background(
            ProcessIdentity(name, runtime().unique_id(), role, device, party),
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
        """Return once the run has admitted this process, and all shards are connected.

        Args:
            waits: Waits for changes; the default waits without other work.

        Raises:
            DilocoError: The run rejects this process, or ``Timeouts.join`` has passed.
        """
        self.background.start()
        background, began, limit = self.background, now(), self.join_timeout
        with background.changed:
            while not background.ready:
                self.raise_failure()
                if background.is_too_late:
                    raise RunEndedError(
                        f"the run is over: it ended while {self.name} was joining. Its weights are "
                        "in the syncer's run folder"
                    )
                if limit is not None and now() - began > limit:
                    self._refuse_to_wait_for(background.links.missing, limit)
                    self.check_place(limit)
                await (waits or self).wait(min(1.0, limit or 1.0))

    @staticmethod
    def _refuse_to_wait_for(addresses: list[str], join_timeout: float) -> None:
        """Raise an error if the coordinator answers, but a shard's address cannot be reached."""
        if addresses:
            raise TransportError(
                f"{', '.join(addresses)}: no answer within Timeouts(join={join_timeout:g}) s, "
                "though the coordinator lists these shards: start the syncer with --addresses that "
                "can be reached from here, or raise the timeout (None: forever)"
            )

    def check_place(self, join_timeout: float) -> None:
        """Raise an error if a device still waits for its place to train."""
        shared = self.background.shared
        if shared is not None and shared.machine.state.place == 0:
            raise TransportError(
                f"{self.name} got no place to train within Timeouts(join={join_timeout:g}) s, "
                "because other devices hold all of them: what it has trained alone is sent; visit "
                "again later, or raise the timeout (None: forever)"
            )

    async def wait(self, seconds: float) -> None:
        """See `Waits`."""
        await self.background.changed.wait(seconds)

    def raise_failure(self) -> None:
        """Raise the error that ended the background, if any."""
        if self.background.failure is not None:
            raise self.background.failure

    @property
    def shared(self) -> Shared:
        """The objects that this thread and the background share; valid after `join`."""
        shared = self.background.shared
        assert shared is not None, "join() returns only once the run has admitted this process"
        return shared

    @property
    def state(self) -> LearnerState:
        """The machine's state; it may change whenever the lock is free."""
        return self.shared.machine.state

    @property
    def admission(self) -> Admission:
        """The values that the run assigned to this process."""
        background, machine = self.background, self.shared.machine
        settings = self.shared.config.public()
        return Admission(self.name, machine.epoch, background.index, background.count, settings)

    @property
    def versions(self) -> tuple[str, ...]:
        """The version of each fragment that the parameters were last aligned with."""
        return tuple(str(view.held) for view in self.state.fragments)

    def leave(self, farewell: str, *, abrupt: bool = False) -> None:
        """Leave the shards and end the background; see `Background.stop`."""
        self.background.stop(farewell, abrupt=abrupt)


def _tape_maker(tape: str | Path | MakeTape | None, name: str) -> MakeTape | None:
    if tape is None or callable(tape):
        return tape
    path = Path(tape)
    return lambda header: open_tape(path, name, header)


def open_tape(path: Path, name: str, header: dict[str, Any]) -> TapeWriter:
    """Open an event tape whose errors, for example on a full disk, are only logged."""
    return TapeWriter(path, name, header, on_failure=lambda error: logger.error("%s", error))
