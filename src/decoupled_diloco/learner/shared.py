"""What the training thread and the background share: machine, tensors, the plan of a boundary.

`Context` is the background as its connections, payloads and transfers use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.plugins import plugin_versions
from decoupled_diloco.learner.exchange import LearnerTensors
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.learner_machine import LearnerMachine
from decoupled_diloco.protocol.messages import Apply, Hold, LearnerEffect, Snapshot, TakeCheckpoint
from decoupled_diloco.runtime import Monitor
from decoupled_diloco.shell.driver import Driver
from decoupled_diloco.tape.records import versions
from decoupled_diloco.tape.samples import Sample
from decoupled_diloco.transport.interface import Client


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The orders of one boundary.

    Attributes:
        orders: What to apply and what to snapshot, in this order.
        hold: Do not start the next step yet (synchronous baselines only).
        checkpoint: Take this process's part of a checkpoint of the run, then look at the boundary
            again.
    """

    orders: tuple[Apply | Snapshot, ...] = ()
    hold: bool = False
    checkpoint: TakeCheckpoint | None = None

    @classmethod
    def of(cls, effects: Iterable[LearnerEffect]) -> StepPlan:
        """The part of a machine's answer that belongs to the boundary.

        >>> StepPlan.of([Hold("not back yet")])
        StepPlan(orders=(), hold=True, checkpoint=None)
        """
        effects = list(effects)
        return cls(
            tuple(effect for effect in effects if isinstance(effect, (Apply, Snapshot))),
            any(isinstance(effect, Hold) for effect in effects),
            next((effect for effect in effects if isinstance(effect, TakeCheckpoint)), None),
        )

    @property
    def applied(self) -> tuple[int, ...]:
        """The fragments whose global weights are taken."""
        return tuple(order.fragment for order in self.orders if isinstance(order, Apply))


def with_loss(message: messages.Message, loss: float) -> messages.Message:
    """The report of a step with the step's loss in it; anything else as it is."""
    if not isinstance(message, messages.StepReport):
        return message
    told = loss if abs(loss) < messages.LOSS_MAX else messages.LOSS_MAX  # NaN is not less
    return replace(message, loss=told)


_T = TypeVar("_T")


@dataclass
class Shared:
    """What the trainer and the background share, once the run has let this process in."""

    machine: LearnerMachine
    tensors: LearnerTensors
    config: RunConfig
    driver: Driver[messages.LearnerEvent, messages.LearnerEffect]


def header_of(machine: LearnerMachine, config: RunConfig) -> dict[str, Any]:
    """What a replay of the machine's tape needs to know of this life."""
    return {
        "machine": "learner",
        "learner": machine.learner,
        "epoch": machine.epoch,
        "nonce": machine.nonce,
        "role": machine.role,
        "settings": config.public(),
        "versions": versions(),
        "plugins": plugin_versions(),
    }


class Context(Protocol):
    """The background of a learner or observer, as its connections, payloads and transfers use it.

    All is used on the background's event loop.

    Attributes:
        changed: The lock that the training thread shares.
        ready: Whether the run has let this process in for good; a refusal before is an error.
    """

    changed: Monitor
    ready: bool

    @property
    def client(self) -> Client:
        """The transport's client."""

    @property
    def machine(self) -> LearnerMachine:
        """The machine, once the run has let this process in."""

    @property
    def tensors(self) -> LearnerTensors:
        """The fragments, once the run has let this process in."""

    @property
    def over(self) -> bool:
        """Whether the run is over."""

    @property
    def leaving(self) -> bool:
        """Whether the run is over or this process about to leave: lost links are not reported."""

    def told(self, event: messages.LearnerEvent) -> None:
        """Tells the machine a fact, and carries out what follows."""

    def sample(self, sample: Sample) -> None:
        """Writes a measurement to the tape."""

    def admitted(self, admitted: messages.Admitted, dialled: str) -> None:
        """The run has let this process in, by this address."""

    def heard_of_coordinator(self, message: messages.ToMember) -> None:
        """Passes a message of the coordinator to the machine, if it makes sense."""

    def check_patience(self, what: str) -> None:
        """Raises `TransportError` if no shard was in reach for too long."""

    async def confirmed(self, shard: int) -> None:
        """Returns when a shard may be dialled: the run behind the addresses is still the same."""

    def address_of(self, shard: int) -> str:
        """Where a shard was reached last."""

    def reaches(self, shard: int) -> bool:
        """Whether a shard is connected."""

    def send(self, shard: int, message: messages.Message) -> None:
        """Sends a message to a shard, if it is connected."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine; an error in it ends the background."""

    async def in_worker(self, task: Callable[[], _T]) -> _T:
        """Runs a function in the worker."""
