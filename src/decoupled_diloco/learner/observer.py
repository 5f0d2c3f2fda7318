"""`Observer`: follow the global weights of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner import parts
from decoupled_diloco.learner.joining import JOIN_TIMEOUT_SECONDS
from decoupled_diloco.learner.launched import Launched, finds_its_run
from decoupled_diloco.learner.participation import Participation
from decoupled_diloco.learner.store import ModuleStore
from decoupled_diloco.observe.samples import evaluation_of
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.runtime import blocking, now
from decoupled_diloco.transport.base import Client
from decoupled_diloco.transport.tls import Tls

logger = logging.getLogger(__name__)


class Observer(Participation):
    """Follows the published weights without taking part: evaluation, dashboards, export.

    Args:
        model: Its parameters become the global weights at every `update`.
        syncer: As for `Learner`. Default: what the launcher has passed to this program, if it is
            the run's ``evaluate_command``.
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

    @finds_its_run("evaluator")
    def __init__(
        self,
        model: torch.nn.Module,
        syncer: str | Sequence[str] | None = None,
        *,
        name: str | None = None,
        token: str | None = None,
        tls: Tls | None = None,
        give_up_seconds: float | None = None,
        join_timeout: float | None = JOIN_TIMEOUT_SECONDS,
        tape: str | Path | None = None,
        client: Callable[[], Client] | None = None,
    ) -> None:
        assert syncer is not None, "the launcher's, if none is given"
        self._launched = Launched.read(os.environ)
        self._evaluations: TapeWriter | None = None
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

    def updates(self, seconds: float | None = None) -> Iterator[int]:
        """Takes the newest weights now and then, until those of the end of the run.

            for step in observer.updates():
                observer.log(loss=evaluate(model))

        Args:
            seconds: From one update's start to the next one's, more than 0. Default: the run's
                ``evaluate_every_seconds``, 10 where no launcher has passed it.

        Yields:
            The run's step, each time the model has newer weights. The last ones are the final ones.

        Raises:
            ConfigError: ``seconds`` is 0 or less.
            TransportError: ``give_up_seconds`` have passed without any shard.
        """
        every_seconds = float(self._launched.evaluate_seconds or 10) if seconds is None else seconds
        if not every_seconds > 0:
            raise ConfigError(f"seconds={seconds}: give more than 0, or leave it out")
        first, complete = True, False
        while not complete:
            began = now()
            complete = self.complete
            newer = self.update()
            if newer or first or complete:
                yield self.global_step
            first = False
            if not complete:
                self.wait(max(0.0, began + every_seconds - now()))

    def log(self, loss: float, **metrics: float) -> None:
        """Records an evaluation of the weights that the model has, for the run's report.

        Without the run's folder, in a program that no launcher has started, it is only logged.

        Args:
            loss: Mean loss on held-out data.
            metrics: Further numbers by name, such as ``accuracy=0.8``; ``tokens`` is the size of
                the held-out data.

        Raises:
            ConfigError: A value is not a number.
        """
        try:
            values = {name: float(value) for name, value in {"loss": loss, **metrics}.items()}
        except (TypeError, ValueError):
            raise ConfigError(
                f"log(loss={loss!r}, …): every metric is a number: pass tensor.item()"
            ) from None
        told = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        logger.info("step %d: %s", self.global_step, told)
        path = self._launched.tape
        if not path or self._launched.role != "evaluator":
            return
        if self._evaluations is None:
            self._evaluations = parts.open_tape(Path(path), "evaluator", {"machine": "evaluator"})
        self._evaluations.sample(now(), evaluation_of(self.global_step, values))
        self._evaluations.flush()

    def _leave(self, farewell: str, *, abrupt: bool = False) -> None:
        super()._leave(farewell, abrupt=abrupt)
        if self._evaluations is not None:
            self._evaluations.close()
            self._evaluations = None

    @property
    def complete(self) -> bool:
        """Whether the run is over and its last weights are here; `update` takes them."""
        state = self._shared.machine.state
        return all(shard.finished for shard in state.shards) and all(
            view.fetching is None and view.latest is not None and view.latest.version == view.newest
            for view in state.fragments
        )
