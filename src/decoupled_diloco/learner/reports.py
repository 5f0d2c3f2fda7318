"""Reports of a learner's steps: counters, experiment tracker, losses and random number generators.

*Random numbers.* Learners with the same seed may train the same batches. They are recognized by
their generators: two learners whose generators have the same state after the same number of their
steps have the same seed, whenever they started. Only generators that move in every step count. A
data loader that shuffles once per epoch does not choose its batches by the others.
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
"""First and last step of this process after which the generators are read. Later a warning would
not help, and the first steps may draw numbers for something else."""


class HasProgress(Protocol):
    """The interface of a `Party` that the reports use."""

    @property
    def progress(self) -> LearnerProgress: ...


class StepReports:
    """Reports each step of this process to its counters and to the experiment tracker.

    Args:
        membership: The process's membership of the run.
        options: The options; the experiment tracker and the metrics address are used.

    Raises:
        ConfigError: An option is not valid.
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
            wanted.metrics_address, membership.name, options.auth_token, self._read
        )

    def start(self, party: HasProgress) -> None:
        """Start the metrics endpoint and the tracker: the learner has joined."""
        self._party = party
        for each in (self._endpoint, self._log):
            if each is not None:
                each.start()

    def close(self) -> None:
        """Close the endpoint and the tracker; wait until the logged values are saved."""
        for each in (self._endpoint, self._log):
            if each is not None:
                each.close()

    def stepped(self, began: float, applied: tuple[int, ...], loss: float | None) -> None:
        """Report a handled step.

        Args:
            began: When its handling began, on the runtime's clock.
            applied: The fragments applied at its boundary.
            loss: Its loss, if known.
        """
        self._tally.stepped(began, now(), len(applied), loss)
        if loss is not None and not math.isfinite(loss):
            self._warn_of_loss()
        if self._draws is not None:
            step = self._membership.state.step
            states = self._draws.stepped(step)
            if states:
                self._membership.background.deliver_later(RandomDrawn(states))
            if step >= LAST_STEP:
                self._draws = None
        if self._log is not None:
            assert self._party is not None, "the learner has joined"
            self._log.stepped(began, self._party.progress.global_step, self._read)

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

    def _read(self, read: Callable[[WatchedLearner], T]) -> T:
        """Call ``read`` with this learner's current values under the lock; for other threads."""
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
    """Reads the generators of this process from `FIRST_STEP` to `LAST_STEP`."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}

    def stepped(self, step: int) -> tuple[str, ...]:
        """Read the generators after a step; this takes about 30 µs in 9 steps only.

        Returns:
            After `LAST_STEP`, ``"generator:state"`` for those that moved in every step; otherwise
            nothing.
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
    """Turns the values that a program passes as ``loss=`` into numbers.

    A tensor on a GPU is copied to the host asynchronously, because the training thread must not
    wait for the device. A later `read`, usually the next one, returns its number. During a copy,
    further losses are skipped.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._copied: torch.Event | None = None

    def read(self, loss: Any) -> float | None:
        """Return the number to report with this step, or ``None`` if there is none yet.

        Args:
            loss: A number, a tensor with one element, or ``None``; NaN and infinity are allowed.

        Raises:
            ConfigError: ``loss`` is something else.
        """
        if loss is None or type(loss) is float:
            return loss
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ConfigError(
                    f"loss has {loss.numel()} elements: pass one number, such as loss.mean()"
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
                f"loss={loss!r} is not a number: pass the step's loss as a number or as a tensor "
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
            # Only to pinned memory can a device copy without blocking the host.
            pinned = loss.device.type in ("cuda", "xpu")
            self._copy = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=pinned)
        self._copy.copy_(loss, non_blocking=True)
        self._copied = torch.Event(loss.device)
        self._copied.record()
        return found
