"""Objects that the training thread and the background share: machine, tensors, boundary plan.

`Context` is the interface of the background for its connections, payloads and transfers.
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
        orders: The fragments to apply and to snapshot, in this order.
        hold: Whether the next step must wait (synchronous baselines only).
        checkpoint: Order to take this process's part of a checkpoint of the run. The boundary must
            then be executed again.
    """

    orders: tuple[Apply | Snapshot, ...] = ()
    hold: bool = False
    checkpoint: TakeCheckpoint | None = None

    @classmethod
    def of(cls, effects: Iterable[LearnerEffect]) -> StepPlan:
        """Return the plan with those orders of a machine that belong to the boundary.

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
        """The fragments whose global weights are applied."""
        return tuple(order.fragment for order in self.orders if isinstance(order, Apply))


def with_loss(message: messages.Message, loss: float) -> messages.Message:
    """Return the report of a step with the step's loss; other messages are unchanged."""
    if not isinstance(message, messages.StepReport):
        return message
    # The comparison is false for NaN, which is therefore reported as LOSS_MAX too.
    bounded = loss if abs(loss) < messages.LOSS_MAX else messages.LOSS_MAX
    return replace(message, loss=bounded)


_T = TypeVar("_T")


@dataclass
class Shared:
    """Objects that the trainer and the background share after the join."""

    machine: LearnerMachine
    tensors: LearnerTensors
    config: RunConfig
    driver: Driver[messages.LearnerEvent, messages.LearnerEffect]


def header_of(machine: LearnerMachine, config: RunConfig) -> dict[str, Any]:
    """Return the tape's header: what a replay of this incarnation's machine needs."""
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
    """The background of a learner or observer, for its connections, payloads and transfers.

    All members are used on the background's event loop.

    Attributes:
        changed: The lock shared with the training thread.
        ready: Whether the join is complete. An earlier rejection is an error, a later one is not.
        run_id: Id of the run.
        identity: Identity of this process (`connections.ProcessIdentity`).
        bodies: Executes the orders about payloads.
    """

    changed: Monitor
    ready: bool
    run_id: str
    identity: Any
    bodies: Any

    @property
    def client(self) -> Client:
        """The transport's client."""

    @property
    def machine(self) -> LearnerMachine:
        """The state machine; valid after the join."""

    @property
    def tensors(self) -> LearnerTensors:
        """The fragments; valid after the join."""

    @property
    def over(self) -> bool:
        """Whether the run is over."""

    @property
    def leaving(self) -> bool:
        """Whether the run is over or this process is leaving; lost links are not logged then."""

    def deliver(self, event: messages.LearnerEvent) -> None:
        """Pass a fact to the machine, and execute its orders."""

    def sample(self, sample: Sample) -> None:
        """Write a measurement to the tape."""

    def admitted(self, admitted: messages.Admitted, dialled: str) -> None:
        """Create the shared objects: the run admitted this process at this address."""

    def coordinator_sent(self, message: messages.ToMember) -> None:
        """Pass a message of the coordinator to the machine.

        Raises:
            ProtocolError: The message is not valid.
        """

    def check_patience(self, what: str) -> None:
        """Check how long no shard has been reachable.

        Args:
            what: What has failed meanwhile, for the message.

        Raises:
            TransportError: It was longer than ``Timeouts.disconnect``.
        """

    async def confirmed(self, shard: int) -> None:
        """Return when this process may connect to a shard; see `CoordinatorSession.confirmed`."""

    def address_of(self, shard: int) -> str:
        """Return the address at which a shard was last reached."""

    def reaches(self, shard: int) -> bool:
        """Return whether a shard is connected."""

    def send(self, shard: int, message: messages.Message) -> None:
        """Send a message to a shard, if it is connected."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a coroutine; an error in it ends the background."""

    async def in_worker(self, task: Callable[[], _T]) -> _T:
        """Run a function in the worker's thread, and return its result."""
