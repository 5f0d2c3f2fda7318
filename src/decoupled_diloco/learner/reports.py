"""What others are told of a learner's steps: its counters, its log, its losses, its random numbers.

*Random numbers.* A loop that draws in every step may see the same batches as another learner: two
learners whose generators are in one state after equally many steps of their own have the same seed,
however far apart they have started. Only generators that move in every step count: a data loader
that shuffles once per epoch does not choose its batches by them.
"""

from __future__ import annotations

import logging
import math
import random
import sys
import zlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.arguments import endpoint_of, step_log_of
from decoupled_diloco.learner.boundary import LearnerProgress
from decoupled_diloco.learner.membership import Membership
from decoupled_diloco.learner.option_groups import ParticipantOptions
from decoupled_diloco.monitor.counters import LearnerTally
from decoupled_diloco.monitor.metric_sources import WatchedLearner
from decoupled_diloco.protocol.learner_machine import UNFIT, is_worth_a_word
from decoupled_diloco.protocol.messages import RandomDrawn
from decoupled_diloco.runtime import now

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_STEP, LAST_STEP = 8, 16
"""The steps of this process after which the generators are looked at: later is too late to help,
and the first ones may draw for something else."""


class HasProgress(Protocol):
    """What of a `Party` the reports need."""

    @property
    def progress(self) -> LearnerProgress: ...


class StepReports:
    """Reports each step of this process: to its counters, which can be scraped, and to its log.

    Args:
        membership: The process's membership of the run.
        options: Among them the experiment tracker and the metrics address.

    Raises:
        ConfigError: An argument is not valid.
    """

    def __init__(self, membership: Membership, options: ParticipantOptions) -> None:
        self._membership = membership
        self._party: HasProgress | None = None
        self._tally = LearnerTally()
        self._draws: Draws | None = Draws()
        self._losses_not_finite = 0
        wanted = options.observability
        self._log = step_log_of(wanted.tracker, membership.name)
        self._endpoint = endpoint_of(
            wanted.metrics_address, membership.name, options.auth_token, self._look
        )

    def start(self, party: HasProgress) -> None:
        """The learner has joined."""
        self._party = party
        for each in (self._endpoint, self._log):
            if each is not None:
                each.start()

    def close(self) -> None:
        """Waits until what was logged is kept."""
        for each in (self._endpoint, self._log):
            if each is not None:
                each.close()

    def stepped(self, began: float, applied: tuple[int, ...], loss: float | None) -> None:
        """A step is handled, and that began at an instant of the runtime."""
        self._tally.stepped(began, now(), len(applied), loss)
        if loss is not None and not math.isfinite(loss):
            self._warn_of_loss()
        if self._draws is not None:
            step = self._membership.state.step
            states = self._draws.stepped(step)
            if states:
                self._membership.background.tell_later(RandomDrawn(states))
            if step >= LAST_STEP:
                self._draws = None
        if self._log is not None:
            assert self._party is not None, "the learner has joined"
            self._log.stepped(began, self._party.progress.global_step, self._look)

    def _warn_of_loss(self) -> None:
        self._losses_not_finite += 1
        if is_worth_a_word(self._losses_not_finite, first=1):
            assert self._party is not None, "the learner has joined"
            logger.warning(
                "%s: the loss of step %d is not finite (the %d. so far): %s",
                self._membership.name,
                self._party.progress.steps,
                self._losses_not_finite,
                UNFIT,
            )

    def _look(self, read: Callable[[WatchedLearner], T]) -> T:
        """What is read of this learner as it is now, by another thread."""
        membership = self._membership
        with membership.background.changed:
            assert self._party is not None, "the learner has joined"
            progress, shared = self._party.progress, membership.shared
            return read(
                WatchedLearner(
                    name=membership.name,
                    run=shared.config.run.name,
                    epoch=shared.machine.epoch,
                    steps=progress.steps,
                    tokens=progress.tokens,
                    discarded_tokens=progress.discarded_tokens,
                    run_step=progress.global_step,
                    state=shared.machine.state,
                    tally=self._tally,
                    client=membership.background.client,
                )
            )


class Draws:
    """Follows the generators of this process from `FIRST_STEP` to `LAST_STEP`."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}

    def stepped(self, step: int) -> tuple[str, ...]:
        """Looks after a step of this process; about 30 µs in 9 steps, nothing in all others.

        Returns:
            After `LAST_STEP`: generator and state of those that moved in every step, else nothing.
        """
        if not FIRST_STEP <= step <= LAST_STEP:
            return ()
        states, before = _states(), self._states
        if step > FIRST_STEP:
            moved = {name for name, state in states.items() if before.get(name, state) != state}
            states = {name: states[name] for name in sorted(moved)}
        self._states = states
        if step < LAST_STEP:
            return ()
        return tuple(f"{name}:{state:08x}" for name, state in states.items())


def _states() -> dict[str, int]:
    torch_state = torch.default_generator.get_state().numpy().tobytes()
    states = {"torch": zlib.crc32(torch_state), "random": hash(random.getstate()) & 0xFFFFFFFF}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, key, position, *_ = numpy.random.get_state()
        states["numpy"] = zlib.crc32(key.tobytes(), position)
    return states


class StepLosses:
    """Turns what a program passes as ``loss=`` into numbers.

    A tensor on a GPU is copied to the host in the background of the device. Its number is returned
    by a later `read`, usually the next, because the training thread must not wait for the device.
    While one copy is under way, further losses are skipped.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._copied: torch.Event | None = None

    def read(self, loss: Any) -> float | None:
        """The number to report with this step, or ``None``: there is none yet.

        Args:
            loss: A number or a tensor with one element; NaN and infinity are allowed.

        Raises:
            ConfigError: It is neither.
        """
        if loss is None or type(loss) is float:
            return loss
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ConfigError(
                    f"loss has {loss.numel()} elements: give one number, such as loss.mean()"
                )
            loss = loss.detach().reshape(())
            if loss.device.type != "cpu":
                return self._later(loss)
        try:
            if isinstance(loss, str | bytes):
                raise TypeError
            return float(loss)
        except (TypeError, ValueError):
            raise ConfigError(
                f"loss={loss!r} is not a number: give the step's loss as a number or as a tensor "
                "with one element"
            ) from None

    def _later(self, loss: Tensor) -> float | None:
        found = None
        if self._copied is not None:
            assert self._copy is not None
            if not self._copied.query():
                return None
            found = float(self._copy)
        if self._copy is None:
            pinned = loss.device.type in ("cuda", "xpu")
            self._copy = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=pinned)
        self._copy.copy_(loss, non_blocking=True)
        self._copied = torch.Event(loss.device)
        self._copied.record()
        return found
