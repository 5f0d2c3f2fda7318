"""Simulate a scenario: a whole run in virtual time, with the same output files as a real run.

```python
simulation = Simulation(load_scenario(SCENARIOS.find("mixed-speeds")), folder)
while simulation.advance():
    ...                      # show something, or stop
simulation.finish()          # weights.safetensors
simulation.close()           # the tape, compressed
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config.method import plan_of
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.processes import EVALUATOR
from decoupled_diloco.launch.roles import evaluate_result
from decoupled_diloco.syncer.result import RESULT, assemble, read_layout
from decoupled_diloco.tape import pack_tapes
from decoupled_diloco.tape.samples import WeightsSaved
from decoupled_diloco.workloads import Workload
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.crowd import Crowd
from decoupled_diloco_lab.simulate.device_hosts import DeviceSystem, Habits
from decoupled_diloco_lab.simulate.hosts import ParticipantHost
from decoupled_diloco_lab.simulate.scenario import Scenario
from decoupled_diloco_lab.simulate.script import Script
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.simulate.training import unpaced

FAREWELL_SECONDS = 60.0
"""Time for learners and the evaluator to fetch the last copies, in virtual time."""

STALL_SECONDS = 300.0
STALL_STEPS = 50
"""A simulation is stalled if its clock has not moved for `STALL_SECONDS` and for `STALL_STEPS`
steps of the slowest learner. It is not stalled while an event is planned, or while a process has
just come back."""

CHECKED_MAX = 100
"""With more learners, the state machines are not checked after each event."""

STALL_TIMES_MAX = 20
"""After this multiple of that time, a simulation is stalled in any case. Otherwise recurring faults
could keep it alive forever."""


class Clockwatch:
    """Detects the end of a simulation: the run is over, its time is up, or it has stalled.

    Args:
        system: The simulated run.
        script: Carries out the scenario's events.
        scenario: Contains the limits.

    Attributes:
        reason: Why the simulation is over; empty until then.
    """

    def __init__(self, system: System | Crowd, script: Script, scenario: Scenario) -> None:
        self.system = system
        self.script = script
        self.reason = ""
        self._until = scenario.file.until_seconds
        slowest = max(group.step_seconds for group in scenario.members.values())
        self._patience = max(STALL_SECONDS, STALL_STEPS * slowest)
        self._quorum = scenario.config.sync.quorum
        self._moved_at, self._clock = 0.0, -1

    def advance(self, events: int) -> bool:
        """Simulate up to ``events`` events; return False when it is over (see `reason`)."""
        system = self.system
        soon = system.now + self._patience
        until = soon if self._until is None else min(soon, self._until)
        why = system.run(until=until, events=system.events + events, stop=lambda: system.finished)
        if self.script.clock != self._clock:
            self._clock, self._moved_at = self.script.clock, system.now
        still_seconds = system.now - self._moved_at
        if why == "stop":
            self.reason = "the budget is spent"
        elif self._until is not None and system.now >= self._until:
            self.reason = f"until_seconds={self._until:g} of the scenario is reached"
        elif why == "nothing left" or self._is_stalled(still_seconds):
            self.reason = self._stall_reason(still_seconds)
        return not self.reason

    def _is_stalled(self, still_seconds: float) -> bool:
        if still_seconds <= self._patience or self.script.planned:
            return False
        since_change = self.system.now - self.script.changed_at
        hopeless = still_seconds > STALL_TIMES_MAX * self._patience
        return hopeless or (since_change > self._patience and not self.script.waiting)

    def _stall_reason(self, seconds: float) -> str:
        alive = sum(host.alive for host in self.system.learners.values())
        return (
            f"the clock has not moved for {seconds:.0f} s at step {max(0, self._clock)}, with "
            f"{alive} live learners and quorum={self._quorum}"
        )


class Simulation:
    """A whole run with real tensors in virtual time.

    Args:
        scenario: The scenario to simulate.
        folder: The run folder, which must exist.
        workload: The result of `trained_in`, if it has been computed already.
        device: The device of all learners and the evaluator.

    Raises:
        ConfigError: The workload cannot be built, its model cannot be divided into fragments, or
            the scenario sets sizes that real tensors already have.
    """

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        workload: Callable[[ParticipantHost], Workload] | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        torch.set_num_threads(1)
        config = scenario.config
        self.scenario = scenario
        self.folder = folder
        specs = specs_of(scenario)
        if config.run.evaluator:
            specs.append(LearnerSpec(EVALUATOR, role="observer"))
        self.system = system_of(
            scenario,
            specs,
            folder,
            workload=workload or trained_in(scenario),
            tapes=folder,
            device=device,
        )
        self.script = Script(self.system, scenario)
        self._watch = Clockwatch(self.system, self.script, scenario)

    @property
    def reason(self) -> str:
        """Why the simulation is over; empty until then."""
        return self._watch.reason

    @property
    def finished(self) -> bool:
        """Whether the run's budget is spent."""
        return self.system.finished

    def advance(self, events: int = 32) -> bool:
        """Simulate up to ``events`` more events; return False when it is over (see `reason`)."""
        return self._watch.advance(events)

    def finish(self) -> Path:
        """Wait until all participants have the last copies, then write the global weights.

        Returns:
            The path of the weights.

        Raises:
            StorageError: The weights cannot be written.
        """
        system, config = self.system, self.scenario.config
        await_participants(system)
        plan = plan_of(read_layout(self.folder), config)
        weights = assemble(self.folder, plan, config.syncer.shards)
        system.sample(WeightsSaved(RESULT))
        if config.run.evaluator and not system.participants[EVALUATOR].over:
            system.launcher(evaluate_result, config, folder=self.folder)
        return weights

    def close(self) -> None:
        """End the tapes and compress them.

        Raises:
            StorageError: The tapes cannot be written.
        """
        self.system.close()
        pack_tapes(self.folder)


def system_of(
    scenario: Scenario, specs: Sequence[LearnerSpec], folder: Path, **named: Any
) -> System:
    """Build the virtual run of a scenario, with devices if it has ``[devices]``.

    Args:
        scenario: The scenario.
        specs: Its participants, see `specs_of`.
        folder: The run folder.
        named: See `System`.
    """
    # The check of a shard takes as long as it has learners, and follows each of its events.
    named = {"seed": scenario.seed, "checks": scenario.config.run.learners <= CHECKED_MAX, **named}
    devices = scenario.file.devices
    if devices is None:
        return System(scenario.config, specs, folder, **named)
    habits = Habits(devices.steps, devices.online, devices.alone)
    return DeviceSystem(scenario.config, specs, folder, habits=lambda spec: habits, **named)


def await_participants(system: System) -> None:
    """Let time pass until learners and evaluator have ended by themselves, after a run's end."""
    hosts = system.participants.values()
    system.run(until=system.now + FAREWELL_SECONDS, stop=lambda: not any(p.alive for p in hosts))
    system.run(until=system.now)  # the launcher must still see the last one end


def trained_in(scenario: Scenario) -> Callable[[ParticipantHost], Workload]:
    """Return the workload of a scenario's processes, for a simulation with real tensors.

    Raises:
        ConfigError: The workload cannot be built, or the scenario sets sizes that real tensors
            already have.
    """
    tokens = [group.tokens for group in scenario.file.learners if group.tokens is not None]
    sizes = {"parameters": scenario.file.parameters, "tokens": next(iter(tokens), None)}
    for name, value in sizes.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value} in the scenario would be ignored, because the simulation trains "
                f"a real model on real data: add --protocol-only, or remove {name}"
            )
    return unpaced(scenario.config)


def specs_of(scenario: Scenario, bytes_factor: float = 1.0) -> list[LearnerSpec]:
    """Return the learners of a scenario as specs for a virtual run.

    Args:
        scenario: Describes the learners and their links.
        bytes_factor: The real model's size over the simulated model's size. Link rates are divided
            by it, so that transfers take as long as with the real model.
    """
    specs = []
    devices, rates = scenario.file.devices, Choices(f"{scenario.seed}/rates")
    for name, group in scenario.members.items():
        link = None if group.link is None else scenario.links[group.link]
        spec: dict[str, Any] = {}
        if link is not None:
            spec = {
                "latency": link.latency_seconds,
                "jitter": link.jitter_seconds,
                "up_bytes_per_second": link.up_bytes_per_second / bytes_factor,
                "down_bytes_per_second": link.down_bytes_per_second / bytes_factor,
                "shared_link": link.name if link.shared else "",
            }
        if devices is not None and devices.link is not None:
            rate = rates.log_uniform(*devices.bytes_per_second)
            spec |= {"up_bytes_per_second": rate, "down_bytes_per_second": rate}
        specs.append(
            LearnerSpec(
                name,
                step_seconds=group.step_seconds,
                variance=group.variance,
                tokens_per_step=group.tokens or 1,
                joins_at=0.0 if group.present else float("inf"),
                **spec,
            )
        )
    return specs
