"""What the trainer and the background of a participant share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.plugins import plugin_versions
from decoupled_diloco.learner.exchange import LearnerTensors
from decoupled_diloco.observe.tape import Recorder
from decoupled_diloco.observe.versions import versions
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol.learner import LearnerMachine


class Unrecorded:
    """A recorder that records nothing."""

    def __init__(self, machine: LearnerMachine) -> None:
        self._machine = machine

    def handle(self, now: float, event: fact.LearnerEvent) -> list[do.LearnerEffect]:
        """The machine's answer."""
        return self._machine.handle(now, event)


@dataclass
class Shared:
    """What the trainer and the background share, once the run has let this process in."""

    machine: LearnerMachine
    tensors: LearnerTensors
    config: RunConfig
    recorder: Recorder[Any, Any] | Unrecorded


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
