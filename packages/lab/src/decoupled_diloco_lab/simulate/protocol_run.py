"""Simulate only the protocol of a scenario, with almost no tensors, for many learners.

For up to `MANY` learners the whole system runs. A model of some thousand elements replaces the real
one, and links are slower by the same factor. For more learners only the bare state machines run;
see `crowd`.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.messages import RoundFinished
from decoupled_diloco.tape import pack_tapes
from decoupled_diloco.workloads import workload_of
from decoupled_diloco_lab.simulate.crowd import Crowd
from decoupled_diloco_lab.simulate.scenario import Scenario
from decoupled_diloco_lab.simulate.script import Script
from decoupled_diloco_lab.simulate.simulation import Clockwatch, await_participants, specs_of
from decoupled_diloco_lab.simulate.system import System

MANY = 100
"""With more learners, only the bare state machines run."""

ELEMENTS = 1024
"""Elements of a simulated fragment. Small next to a real fragment, but large enough that the
model's layout, whose bytes are scaled up as well, does not matter."""

INBOX_SECONDS = 0.05
"""Interval in which a bare shard batches step reports. One event per report would take more time
than everything else."""

SHELL_KINDS = ("disk-full", "disk-lost", "clock-jump", "corrupt")
"""Kinds of faults that bare state machines cannot simulate, because they have no disk, no clock and
no bytes."""


@dataclass
class Tally:
    """Counters for the outcome of all rounds.

    Attributes:
        merged: Number of merged rounds.
        reasons: Number of abandoned rounds by reason.
        asked: Number of contributions that all merged rounds requested.
        states: Number of those contributions by final state.
        quorum_seconds: Time from each merged round's opening until a quorum qualified, if that
            was not at once.
        closed_seconds: Time from each merged round's opening to the end of its window.
        finished_seconds: Time from each merged round's opening to its new version.
    """

    merged: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    states: Counter[str] = field(default_factory=Counter)
    quorum_seconds: list[float] = field(default_factory=list)
    closed_seconds: list[float] = field(default_factory=list)
    finished_seconds: list[float] = field(default_factory=list)

    def record(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Count the rounds that an event finished; a `Recorder`."""
        if process.startswith("shard-"):
            for effect in effects:
                if type(effect) is RoundFinished:
                    self.take(effect)

    def take(self, round: RoundFinished) -> None:
        """Count one finished round."""
        if round.verdict != "merged":
            self.reasons[round.reason] += round.given_up
            return
        self.merged += 1
        self.asked += len(round.participants)
        self.states.update(participant.state for participant in round.participants)
        if round.quorum_seconds:
            self.quorum_seconds.append(round.quorum_seconds)
        if round.closed_seconds is not None:
            self.closed_seconds.append(round.closed_seconds)
        self.finished_seconds.append(round.finished_seconds)

    @property
    def abandoned(self) -> int:
        """Number of abandoned rounds."""
        return sum(self.reasons.values())

    @property
    def folded(self) -> int:
        """Number of contributions that were merged."""
        return self.states["folded"]


class ProtocolRun:
    """The protocol of a scenario in virtual time.

    Args:
        scenario: The scenario to simulate.
        tape: Folder for the event tape; ``None``: no tape is written.

    Raises:
        ConfigError: The workload's model cannot be built to determine its size, the scenario
            has devices or records payloads, or it needs shells although it has more than `MANY`
            learners.
    """

    def __init__(self, scenario: Scenario, tape: Path | None = None) -> None:
        if scenario.file.devices is not None:
            raise ConfigError(
                "[devices] would be ignored with --protocol-only, which simulates connected "
                "learners: remove --protocol-only, or [devices]"
            )
        if scenario.config.syncer.record_payloads:
            raise ConfigError(
                "syncer.record_payloads=true would be ignored, because --protocol-only has no "
                "real payloads: remove --protocol-only, or set it to false"
            )
        self.scenario = scenario
        self.folder = tape
        self.tally = Tally()
        self.system: System | Crowd
        if scenario.config.run.learners > MANY:
            _require_bare(scenario, tape)
            self._factor = 1.0
            self.system = _crowd(scenario)
        else:
            fragments = scenario.config.sync.fragments
            self._factor = _parameters(scenario) / (fragments * ELEMENTS)
            self._files = tempfile.TemporaryDirectory()
            self.system = System(
                _without_tensors(scenario.config),
                specs_of(scenario, self._factor),
                Path(self._files.name),
                seed=scenario.seed,
                sizes=[ELEMENTS] * fragments,
                tapes=tape,
                bytes_factor=self._factor,
                checks=False,
            )
        self.system.recorders.append(self.tally.record)
        self.script = Script(self.system, scenario)
        self._watch = Clockwatch(self.system, self.script, scenario)
        self._began = time.perf_counter()
        self._closed = False

    @property
    def reason(self) -> str:
        """Why the simulation is over; empty until then."""
        return self._watch.reason

    @property
    def finished(self) -> bool:
        """Whether the run's budget is spent."""
        return self.system.finished

    @property
    def real_seconds(self) -> float:
        """Real time since the start of the simulation."""
        return time.perf_counter() - self._began

    @property
    def tokens(self) -> int:
        """Number of tokens that all learners together have reported."""
        machines = [shard.machine for shard in self.system.shards]
        return max((machine.state.tokens for machine in machines if machine), default=0)

    @property
    def data_sent(self) -> int:
        """Payload bytes that all learners have sent."""
        sent = sum(host.data_sent for host in self.system.learners.values())
        return round(self._factor * sent)

    def advance(self, events: int = 4096) -> bool:
        """Simulate up to ``events`` more events; return False when it is over (see `reason`)."""
        return self._watch.advance(events)

    def close(self) -> None:
        """End the tape, if there is one, and compress it.

        Raises:
            StorageError: The tape cannot be written.
        """
        if self._closed:
            return
        self._closed = True
        if isinstance(self.system, System):
            if self.finished:
                await_participants(self.system)
            self.system.close()
            self._files.cleanup()
        if self.folder is not None:
            pack_tapes(self.folder)


def _crowd(scenario: Scenario) -> Crowd:
    options = options_of(scenario.config)
    nbytes = 4 * math.ceil(_parameters(scenario) / options.fragments)
    return Crowd(
        options,
        specs_of(scenario),
        scenario.seed,
        fragment_bytes=[nbytes] * options.fragments,
        inbox_seconds=INBOX_SECONDS,
        checks=False,
    )


def _require_bare(scenario: Scenario, tape: Path | None) -> None:
    """Reject a scenario that bare state machines cannot simulate."""
    learners = scenario.config.run.learners
    reason = f"with learners={learners}, above {MANY}, only the bare state machines run"
    if tape is not None:
        raise ConfigError(f"--tape would be ignored, because {reason}: remove it")
    kinds = [h.kind for h in scenario.happenings] + [r.settings.kind for r in scenario.recurrences]
    for kind in kinds:
        if kind in SHELL_KINDS:
            raise ConfigError(f"kind={kind!r} is not possible, because {reason}: remove it")
    targets = [h.target for h in scenario.happenings] + [r.target for r in scenario.recurrences]
    for target in targets:
        ends = [name for name in target.processes if name not in scenario.members]
        if ends:
            raise ConfigError(
                f"target={target.name!r} is not possible, because {reason}: remove it"
            )


def _without_tensors(config: RunConfig) -> RunConfig:
    """Return the settings without initial weights and without learner checkpoints."""
    changes: dict[str, Any] = {
        "sync": config.sync.model_copy(update={"initial_weights": None}),
        "learner": config.learner.model_copy(update={"checkpoint_interval_seconds": 0.0}),
    }
    return config.model_copy(update=changes)


def _parameters(scenario: Scenario) -> int:
    """Return the number of parameters: from the scenario, otherwise of the workload's model."""
    if scenario.file.parameters is not None:
        return scenario.file.parameters
    model = workload_of(scenario.config).model()
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
