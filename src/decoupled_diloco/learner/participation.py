"""What learners and observers have in common: joining a run, following it, closing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from decoupled_diloco.config.addresses import alternatives, require_address
from decoupled_diloco.errors import ConfigError, TransportError
from decoupled_diloco.learner import parts
from decoupled_diloco.learner.background import Background
from decoupled_diloco.learner.body_exchange import BodyExchange
from decoupled_diloco.learner.checkpointer import (
    Checkpointer,
)
from decoupled_diloco.learner.joining import Patience, ProcessIdentity
from decoupled_diloco.learner.shared import Shared
from decoupled_diloco.learner.store import ParameterStore
from decoupled_diloco.learner.transfers import StateTransfers
from decoupled_diloco.observe.writer import TapeWriter
from decoupled_diloco.protocol.events import Paused
from decoupled_diloco.protocol.peers import name_problem
from decoupled_diloco.runtime import blocking, now, runtime
from decoupled_diloco.transport.base import Client
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.tls import Tls, require_used
from decoupled_diloco.transport.tokens import read_secret


def addresses_in(syncer: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses of one or several shards, each with its standbys'."""
    told = (syncer,) if isinstance(syncer, str) else tuple(syncer)
    if not told:
        raise ConfigError("syncer=[] has no address: give one or several, as 'http://host:port'")
    for address in told:
        if not isinstance(address, str):
            require_address(address)
    return tuple(each for address in told for each in alternatives(address))


class Participation:
    """What learners and observers have in common: joining, following, closing."""

    def __init__(
        self,
        store: ParameterStore,
        syncer: str | Sequence[str],
        *,
        name: str,
        role: Literal["learner", "observer"],
        token: str | None,
        tls: Tls | None,
        give_up_seconds: float | None,
        join_timeout: float | None,
        tape: str | Path | None,
        client: Callable[[], Client] | None,
        checkpointer: Checkpointer | None = None,
        transfers: StateTransfers | None = None,
        device: str = "",
    ) -> None:
        unnamed = name_problem(name)
        if unnamed:
            raise ConfigError(unnamed)
        addresses = addresses_in(syncer)
        for address in addresses:
            if client is None:
                require_address(address)
            require_used(tls, address)
        if join_timeout is not None and not join_timeout > 0:
            raise ConfigError(f"join_timeout={join_timeout}: give more than 0 seconds, or None")
        secret = read_secret(token)
        self.name, self.addresses = name, addresses
        self._store = store
        self._closed = False
        self._background = Background(
            ProcessIdentity(name, runtime().unique_id(), role, device),
            addresses,
            store,
            client=client or (lambda: HttpClient(token=secret, tls=tls)),
            tape=self._tape_maker(tape),
            patience=Patience(join_timeout, give_up_seconds),
            exchange=self._exchange,
            checkpointer=checkpointer,
            transfers=transfers,
        )
        self._join_timeout = join_timeout
        self._enter()

    _exchange: Callable[..., BodyExchange] = BodyExchange

    def _tape_maker(self, tape: str | Path | None) -> Callable[[dict[str, Any]], TapeWriter] | None:
        path = None if tape is None else Path(tape)
        return None if path is None else lambda header: parts.open_tape(path, self.name, header)

    def _enter(self) -> None:
        blocking(self._join())

    async def _join(self) -> None:
        """Takes part from here on; waits until the run has let this process in."""
        try:
            self._background.start()
            await self._wait_until_ready(self._join_timeout)
            await self._begin()
        except BaseException:
            self._background.stop("", abrupt=True)
            self._closed = True
            raise

    async def _wait_until_ready(self, join_timeout: float | None) -> None:
        background, began = self._background, now()
        with background.changed:
            while not background.ready:
                self._raise_failure()
                if background.is_too_late:
                    raise TransportError(
                        f"the run is over: it ended while {self.name} was joining. Its weights are "
                        "in the syncer's run folder"
                    )
                if join_timeout is not None and now() - began > join_timeout:
                    self._refuse_to_wait_for(background.links.missing, join_timeout)
                await self._wait(min(1.0, join_timeout or 1.0))

    async def _wait(self, seconds: float) -> None:
        """Waits for a change; called with the background's lock, which is free meanwhile."""
        await self._background.changed.wait(seconds)

    @staticmethod
    def _refuse_to_wait_for(addresses: list[str], join_timeout: float) -> None:
        """The run has let this process in, but a shard is where it cannot be reached."""
        if addresses:
            raise TransportError(
                f"{', '.join(addresses)}: no answer within join_timeout={join_timeout:g} s, though "
                "the coordinator says that shards are there: give the syncer addresses that can "
                "be reached from here (--addresses), or raise join_timeout (None: for ever)"
            )

    async def _begin(self) -> None:
        """The first boundary."""
        self._boundary()

    def _raise_failure(self) -> None:
        if self._background.failure is not None:
            raise self._background.failure

    @property
    def _shared(self) -> Shared:
        shared = self._background.shared
        assert shared is not None, "the constructor returns only once the run let us in"
        return shared

    def _boundary(self) -> bool:
        """Carries out what a step boundary allows; returns whether anything was applied."""
        return bool(self._background.tell(Paused()).applied)

    @property
    def global_step(self) -> int:
        """The run's step: never goes back, and is the same on all learners to within a few."""
        return self._shared.machine.global_step

    @property
    def finished(self) -> bool:
        """Whether the run's budget is spent: stop training and `close`."""
        return self._shared.machine.state.ending

    @property
    def over(self) -> bool:
        """Whether every shard has finished; no newer weights will come."""
        return self._shared.machine.state.over

    @property
    def refused(self) -> str:
        """Why the syncer does not take this process any more, in words; empty: it does.

        Another run is at its address, or another process has its id. The loop goes on without the
        syncer, which is asked again; whoever would rather stop looks here.
        """
        return self._background.refused

    @property
    def settings(self) -> dict[str, Any]:
        """The run's public settings, as the syncer has them."""
        return self._shared.config.public()

    @property
    def versions(self) -> tuple[str, ...]:
        """The version of each fragment that the parameters were last aligned with."""
        return tuple(str(view.held) for view in self._shared.machine.state.fragments)

    def close(self) -> None:
        """Ends the participation and frees the thread and connections; calling it twice is fine."""
        blocking(self._close())

    async def _close(self) -> None:
        self._leave("")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Returns whether the error is only that a signal to stop has ended a loader's workers."""
        return blocking(self.__aexit__(kind, error, traceback))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if kind is None:
            await self._close()
        else:
            self._leave(f"{kind.__name__} in the training loop", abrupt=True)
        return False

    def _leave(self, farewell: str, *, abrupt: bool = False) -> None:
        if not self._closed:
            self._closed = True
            self._background.stop(farewell, abrupt=abrupt)
