"""A scenario, simulated: a whole run in virtual time, with everything that a real run leaves.

```python
simulation = Simulation(load_scenario("scenarios/mixed-speeds.toml"), folder)
while simulation.advance():
    ...                      # show something, or stop
simulation.finish()          # weights.safetensors
simulation.close()           # the tape, compressed
```
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config.method import plan_of
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.processes import EVALUATOR
from decoupled_diloco.launch.roles import evaluate_result
from decoupled_diloco.observe.samples import WeightsSaved
from decoupled_diloco.observe.tape import pack_tapes
from decoupled_diloco.simulate.crowd import Crowd
from decoupled_diloco.simulate.hosts import ParticipantHost
from decoupled_diloco.simulate.scenario import Scenario
from decoupled_diloco.simulate.script import Script
from decoupled_diloco.simulate.spec import LearnerSpec
from decoupled_diloco.simulate.system import System
from decoupled_diloco.simulate.training import unpaced
from decoupled_diloco.syncer.result import RESULT, assemble, read_layout
from decoupled_diloco.workloads import Workload

FAREWELL_SECONDS = 60.0
"""How long learners and the evaluator may take for the last copies, in virtual time."""

STILL_SECONDS = 300.0
STILL_STEPS = 50
"""A clock that has not moved for so long, and for so many of the slowest learner's steps, with
nothing planned and nobody just back, stands still for ever."""

STILL_TIMES = 20
"""It does so after so many times as long in any case: something may always go on somewhere."""


class Clockwatch:
    """Notices how a simulation ends: the run is over, its time is up, or nothing moves any more.

    Args:
        system: What is simulated.
        script: What befalls it.
        scenario: Where its limits are.
    """

    def __init__(self, system: System | Crowd, script: Script, scenario: Scenario) -> None:
        self.system = system
        self.script = script
        self.reason = ""
        self._until = scenario.file.until_seconds
        slowest = max(group.step_seconds for group in scenario.members.values())
        self._patience = max(STILL_SECONDS, STILL_STEPS * slowest)
        self._quorum = scenario.config.sync.quorum
        self._moved_at, self._clock = 0.0, -1

    def advance(self, events: int) -> bool:
        """Lets so many events happen; ``False``: it is over, and ``reason`` says why."""
        system = self.system
        soon = system.now + self._patience
        until = soon if self._until is None else min(soon, self._until)
        why = system.run(until=until, events=system.events + events, stop=lambda: system.finished)
        if self.script.clock != self._clock:
            self._clock, self._moved_at = self.script.clock, system.now
        still = system.now - self._moved_at
        if why == "stop":
            self.reason = "the budget is spent"
        elif self._until is not None and system.now >= self._until:
            self.reason = f"until_seconds={self._until:g} of the scenario is reached"
        elif why == "nothing left" or self._is_hopeless(still):
            self.reason = self._stand_still(still)
        return not self.reason

    def _is_hopeless(self, still: float) -> bool:
        if still <= self._patience or self.script.planned:
            return False
        since_change = self.system.now - self.script.changed_at
        lasts_on = still > STILL_TIMES * self._patience
        return lasts_on or (since_change > self._patience and not self.script.waiting)

    def _stand_still(self, seconds: float) -> str:
        alive = sum(host.alive for host in self.system.learners.values())
        return (
            f"the clock has stood still for {seconds:.0f} s at step {max(0, self._clock)}, with "
            f"{alive} learners there and quorum={self._quorum}"
        )


class Simulation:
    """A whole run with real tensors in virtual time.

    Args:
        scenario: What is simulated.
        folder: The run folder; it exists.
        workload: What `trained_in` has made of the scenario, if that is done already.
        device: What all learners and the evaluator compute on.

    Raises:
        ConfigError: the workload cannot be built, its model not be cut, or the scenario has sizes
            that tensors have of themselves.
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
        self.system = System(
            config,
            specs,
            folder,
            seed=scenario.seed,
            workload=workload or trained_in(scenario),
            tapes=folder,
            device=device,
        )
        self.script = Script(self.system, scenario)
        self._watch = Clockwatch(self.system, self.script, scenario)

    @property
    def reason(self) -> str:
        """Why it is over; empty while it goes on."""
        return self._watch.reason

    @property
    def finished(self) -> bool:
        """Whether the run's budget is spent."""
        return self.system.finished

    def advance(self, events: int = 32) -> bool:
        """Lets some more happen; ``False``: it is over, see `reason`."""
        return self._watch.advance(events)

    def finish(self) -> Path:
        """Lets everybody take the last copies, and puts the global weights together.

        Raises:
            StorageError: they cannot be written.
        """
        system, config = self.system, self.scenario.config
        say_goodbye(system)
        plan = plan_of(read_layout(self.folder), config)
        weights = assemble(self.folder, plan, config.syncer.shards)
        system.sample(WeightsSaved(RESULT))
        if config.run.evaluator and not system.participants[EVALUATOR].over:
            system.launcher(evaluate_result, config, folder=self.folder)
        return weights

    def close(self) -> None:
        """Ends the tapes and compresses them.

        Raises:
            StorageError: they cannot be written.
        """
        self.system.close()
        pack_tapes(self.folder)


def say_goodbye(system: System) -> None:
    """Lets learners and evaluator end of themselves, once the run is over."""
    there = system.participants.values()
    system.run(until=system.now + FAREWELL_SECONDS, stop=lambda: not any(p.alive for p in there))
    system.run(until=system.now)  # the launcher sees the last one end


def trained_in(scenario: Scenario) -> Callable[[ParticipantHost], Workload]:
    """What the learners of a scenario train, where there are tensors.

    Raises:
        ConfigError: the workload cannot be built, or the scenario has sizes that tensors have of
            themselves.
    """
    tokens = [group.tokens for group in scenario.file.learners if group.tokens is not None]
    sizes = {"parameters": scenario.file.parameters, "tokens": next(iter(tokens), None)}
    for name, value in sizes.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value} in the scenario would be ignored, because tensors have it of "
                f"themselves: add --protocol-only, or take {name} out"
            )
    return unpaced(scenario.config)


def specs_of(scenario: Scenario, bytes_factor: float = 1.0) -> list[LearnerSpec]:
    """The learners of a scenario, as a virtual run wants them.

    Args:
        scenario: Where they are described.
        bytes_factor: Of a model of which only so small a part is there; links are as much slower.
    """
    specs = []
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
