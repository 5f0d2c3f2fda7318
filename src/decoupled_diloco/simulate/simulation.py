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

import json
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError, MergeError
from decoupled_diloco.observe.samples import (
    CorpusDescribed,
    PayloadsEnded,
    SampleGenerated,
    WeightsSaved,
    evaluation_of,
)
from decoupled_diloco.observe.tape import pack_tapes
from decoupled_diloco.protocol.effects import Ready, RunOver
from decoupled_diloco.simulate.learner_process import LearnerProcess, LearnerSpec
from decoupled_diloco.simulate.scenario import Scenario
from decoupled_diloco.simulate.script import Script
from decoupled_diloco.simulate.tapes import VirtualTapes
from decoupled_diloco.simulate.tensors import TensorLearner, TensorShard
from decoupled_diloco.simulate.training import VirtualRun, virtual_run
from decoupled_diloco.simulate.world import World
from decoupled_diloco.syncer.fragments import ShardTensors
from decoupled_diloco.syncer.payloads import Payloads
from decoupled_diloco.syncer.result import RESULT, assemble, save_share
from decoupled_diloco.workloads import Workload, load_workload
from decoupled_diloco.workloads.gpt import GptWorkload
from decoupled_diloco.workloads.paced import PacedOptions

EVALUATOR = "evaluator"

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
        world: What is simulated.
        script: What befalls it.
        scenario: Where its limits are.
    """

    def __init__(self, world: World, script: Script, scenario: Scenario) -> None:
        self.world = world
        self.script = script
        self.reason = ""
        self._until = scenario.file.until_seconds
        slowest = max(group.step_seconds for group in scenario.members.values())
        self._patience = max(STILL_SECONDS, STILL_STEPS * slowest)
        self._quorum = scenario.config.sync.quorum
        self._moved_at, self._clock = 0.0, -1

    def advance(self, events: int) -> bool:
        """Lets so many events happen; ``False``: it is over, and ``reason`` says why."""
        world = self.world
        why = world.run(until=self._until, events=world.events + events)
        if self.script.clock != self._clock:
            self._clock, self._moved_at = self.script.clock, world.now
        still = world.now - self._moved_at
        if why == "finished":
            self.reason = "the budget is spent"
        elif why == "until":
            self.reason = f"until_seconds={self._until:g} of the scenario is reached"
        elif why == "nothing left" or self._is_hopeless(still):
            self.reason = self._stand_still(still)
        return not self.reason

    def _is_hopeless(self, still: float) -> bool:
        if still <= self._patience or self.script.planned:
            return False
        since_change = self.world.now - self.script.changed_at
        lasts_on = still > STILL_TIMES * self._patience
        return lasts_on or (since_change > self._patience and not self.script.waiting)

    def _stand_still(self, seconds: float) -> str:
        alive = sum(p.alive and p.spec.role == "learner" for p in self.world.learners.values())
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

    Raises:
        ConfigError: the workload cannot be built, its model not be cut, or the scenario has sizes
            that tensors have of themselves.
    """

    def __init__(self, scenario: Scenario, folder: Path, workload: Workload | None = None) -> None:
        torch.set_num_threads(1)
        config = scenario.config
        self.scenario = scenario
        self.folder = folder
        specs = specs_of(scenario)
        if config.run.evaluator:
            specs.append(LearnerSpec(EVALUATOR, role="observer"))
        workload = workload or trained_in(scenario)
        self.run: VirtualRun = virtual_run(config, specs, seed=scenario.seed, workload=workload)
        self.world = self.run.world
        self.tapes = VirtualTapes(folder, self.world, config.public(), self.run.losses)
        self.script = Script(self.world, scenario, self.tapes.fault, self.tapes.fault_ended)
        self._watch = Clockwatch(self.world, self.script, scenario)
        if config.syncer.record_payloads:
            self._keep_bodies()
        if config.run.evaluator:
            process = self.world.learners[EVALUATOR]
            seconds = config.run.evaluate_every_seconds
            Evaluator(process, self.run.workload, self.tapes, seconds)

    def _keep_bodies(self) -> None:
        """Bodies are kept as by real shards; a disk that is full ends that, and is told."""
        bodies, options = self.run.bodies, self.world.options

        def ended(problem: str, who: str) -> None:
            self.tapes.sample(PayloadsEnded(problem), who)

        kept = []
        for shard in self.world.shards:
            tensors = ShardTensors(bodies.plan, options.owned(shard.shard))
            on_end = partial(ended, who=shard.name)
            payloads = Payloads(self.folder, shard.shard, tensors, on_end)
            if self.world.weights_from_file:
                initial = ((p, bodies.initial[p]) for p in tensors.owned)
                deque(payloads.keep_file(initial), maxlen=0)
            kept.append(payloads)
        self.world.keep_body = lambda shard, path, body: kept[shard].keep(path, body.payload)

    @property
    def reason(self) -> str:
        """Why it is over; empty while it goes on."""
        return self._watch.reason

    @property
    def finished(self) -> bool:
        """Whether the run's budget is spent."""
        return self.world.finished

    def advance(self, events: int = 32) -> bool:
        """Lets some more happen; ``False``: it is over, see `reason`."""
        return self._watch.advance(events)

    def finish(self) -> Path:
        """Lets everybody take the last copies, and writes the global weights.

        Raises:
            StorageError: they cannot be written.
        """
        world = self.world
        over_at = world.now + FAREWELL_SECONDS
        while world.now < over_at and any(p.alive for p in world.learners.values()):
            if world.run(until=over_at, events=world.events + 1, finish=False) != "events":
                break
        world.run(until=world.now, finish=False)  # the evaluator's last look
        for shard in world.shards:
            if not isinstance(shard.bodies, TensorShard):
                raise MergeError(f"{shard.name} has no tensors")
            versions = {p: str(v) for p, v in shard.bodies.versions.items()}
            save_share(self.folder, shard.shard, shard.bodies.tensors, versions)
        weights = assemble(self.folder, self.run.bodies.plan, len(world.shards))
        self.tapes.sample(WeightsSaved(RESULT))
        return weights

    def close(self) -> None:
        """Ends the tapes and compresses them.

        Raises:
            StorageError: they cannot be written.
        """
        self.tapes.close()
        pack_tapes(self.folder)


class Evaluator:
    """Scores what an observer of a world holds, at intervals of virtual time.

    Args:
        process: The observer.
        workload: What scores.
        tapes: Where the scores go.
        seconds: From one evaluation to the next; they take no virtual time.
    """

    def __init__(
        self, process: LearnerProcess, workload: Workload, tapes: VirtualTapes, seconds: float
    ) -> None:
        self._process = process
        self._world = process.world
        self._workload = workload
        self._tapes = tapes
        self._seconds = seconds
        self._world.recorders.append(self._record)

    def _record(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if who != EVALUATOR:
            return
        if any(type(effect) is Ready for effect in effects):
            self._tapes.open(EVALUATOR, {"machine": EVALUATOR})
            description = json.dumps(self._workload.describe())
            self._tapes.sample(CorpusDescribed(description), EVALUATOR)
            self._world.clockwork.after(0.0, self._again, self._process.life)
        if any(type(effect) is RunOver for effect in effects):
            self._world.clockwork.after(0.0, self._last)

    def _again(self, life: int) -> None:
        if self._process.alive and self._process.life == life and not self._process.over:
            self._evaluate()
            self._world.clockwork.after(self._seconds, self._again, life)

    def _last(self) -> None:
        self._evaluate()
        text = self._workload.sample(self._model())
        if text is not None:
            self._tapes.sample(SampleGenerated(text), EVALUATOR)

    def _evaluate(self) -> None:
        metrics = self._workload.evaluate(self._model())
        step = self._process.machine.global_step
        self._tapes.sample(evaluation_of(step, metrics), EVALUATOR)

    def _model(self) -> torch.nn.Module:
        bodies = self._process.bodies
        assert isinstance(bodies, TensorLearner)
        return bodies.trainee.model


def trained_in(scenario: Scenario) -> Workload:
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
    return workload_of(scenario.config)


def specs_of(scenario: Scenario) -> list[LearnerSpec]:
    """The learners of a scenario, as a virtual world wants them."""
    specs = []
    for name, group in scenario.members.items():
        link = None if group.link is None else scenario.links[group.link]
        spec: dict[str, Any] = {}
        if link is not None:
            spec = {
                "latency": link.latency_seconds,
                "jitter": link.jitter_seconds,
                "up_bytes_per_second": link.up_bytes_per_second,
                "down_bytes_per_second": link.down_bytes_per_second,
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


def workload_of(config: RunConfig) -> Workload:
    """The run's workload; in virtual time a paced one does not sleep."""
    options = config.workload_options()
    if config.workload.name == "paced":
        return GptWorkload(PacedOptions(**options))
    return load_workload(config.workload.name, options)
