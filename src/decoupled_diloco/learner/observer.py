"""`Observer`: follow the global weights of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from decoupled_diloco.learner import parts
from decoupled_diloco.learner.joining import JOIN_TIMEOUT_SECONDS
from decoupled_diloco.learner.participation import Participation
from decoupled_diloco.learner.store import ModuleStore
from decoupled_diloco.runtime import blocking, now
from decoupled_diloco.transport.base import Client
from decoupled_diloco.transport.tls import Tls


class Observer(Participation):
    """Follows the published weights without taking part: evaluation, dashboards, export.

    Args:
        model: Its parameters become the global weights at every `update`.
        syncer: As for `Learner`.
        name: The observer's name, its own among all that take part. Default: made of host name
            and process id.
        token: As for `Learner`.
        tls: As for `Learner`.
        give_up_seconds: As for `Learner`.
        join_timeout: As for `Learner`.
        tape: As for `Learner`.
        client: As for `Learner`.

    Raises:
        ConfigError: the model differs from the run's.
        AccessError: the syncer refuses the token.
        TransportError: ``join_timeout`` or ``give_up_seconds`` have passed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        syncer: str | Sequence[str],
        *,
        name: str | None = None,
        token: str | None = None,
        tls: Tls | None = None,
        give_up_seconds: float | None = None,
        join_timeout: float | None = JOIN_TIMEOUT_SECONDS,
        tape: str | Path | None = None,
        client: Callable[[], Client] | None = None,
    ) -> None:
        super().__init__(
            ModuleStore(model),
            syncer,
            name=name or f"observer-{parts.default_id()}",
            role="observer",
            token=token,
            tls=tls,
            give_up_seconds=give_up_seconds,
            join_timeout=join_timeout,
            tape=tape,
            client=client,
        )

    def update(self) -> bool:
        """Takes the newest published weights into the model; returns whether any were newer.

        Raises:
            TransportError: ``give_up_seconds`` have passed without any shard.
        """
        self._raise_failure()
        return self._boundary()

    def wait(self, seconds: float) -> None:
        """Returns after so long, or as soon as the run is over and all weights are here."""
        blocking(self.stay(seconds))

    async def stay(self, seconds: float) -> None:
        """What `wait` does, as a coroutine: `runtime.blocking` says what it may wait for."""
        deadline = now() + seconds
        with self._background.changed:
            while now() < deadline and not self.complete:
                self._raise_failure()
                await self._background.changed.wait(min(0.5, max(0.0, deadline - now())))

    @property
    def complete(self) -> bool:
        """Whether the run is over and its last weights are here; `update` takes them."""
        state = self._shared.machine.state
        return all(shard.finished for shard in state.shards) and all(
            view.fetching is None and view.latest is not None and view.latest.version == view.newest
            for view in state.fragments
        )
