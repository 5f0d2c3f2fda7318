"""A scenario without tensors to speak of: the protocol alone, for many learners.

Up to `MANY` learners the whole system runs, with a model of some thousand elements in the place of
the real one, and links as much slower. For more learners only the bare state machines run; see
`crowd`.
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
from decoupled_diloco.observe.tape import pack_tapes
from decoupled_diloco.protocol.effects import RoundFinished
from decoupled_diloco.simulate.crowd import Crowd
from decoupled_diloco.simulate.scenario import Scenario
from decoupled_diloco.simulate.script import Script
from decoupled_diloco.simulate.simulation import Clockwatch, say_goodbye, specs_of
from decoupled_diloco.simulate.system import System
from decoupled_diloco.workloads import workload_of

MANY = 100
"""With more learners there are only the bare state machines."""

ELEMENTS = 1024
"""Of a fragment that stands for a real one: next to them the model's layout, whose bytes count as
many times more too, is little."""

INBOX_SECONDS = 0.05
"""A bare shard takes the reports of so much time at once: each by itself would cost more than all
the rest."""

OF_SHELLS = ("disk-full", "disk-lost", "clock-jump", "corrupt")
"""What befalls that of which bare machines have nothing."""


@dataclass
class Tally:
    """What became of all rounds.

    Attributes:
        merged: Rounds that were merged.
        reasons: Why the others were given up.
        asked: Learners that rounds asked, all merged rounds together.
        states: What became of those that were asked.
        quorum_seconds: From a merged round's opening until a quorum qualified, where that was not
            at once.
        closed_seconds: From each merged round's opening to the end of its window.
        finished_seconds: From a round's opening to its new version.
    """

    merged: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    states: Counter[str] = field(default_factory=Counter)
    quorum_seconds: list[float] = field(default_factory=list)
    closed_seconds: list[float] = field(default_factory=list)
    finished_seconds: list[float] = field(default_factory=list)

    def record(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """A `system.Recorder`."""
        if who.startswith("shard-"):
            for effect in effects:
                if type(effect) is RoundFinished:
                    self.take(effect)

    def take(self, round: RoundFinished) -> None:
        """One more round is over."""
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
        """Rounds that were given up."""
        return sum(self.reasons.values())

    @property
    def folded(self) -> int:
        """Contributions that went into a merge."""
        return self.states["folded"]


class ProtocolRun:
    """The protocol of a scenario in virtual time.

    Args:
        scenario: What is simulated.
        tape: Folder for the event tape; ``None``: none is written.

    Raises:
        ConfigError: the workload's model, whose size is needed, cannot be built; or bodies are to
            be kept.
    """

    def __init__(self, scenario: Scenario, tape: Path | None = None) -> None:
        if scenario.config.syncer.record_payloads:
            raise ConfigError(
                "syncer.record_payloads=true would be ignored, because without tensors there are "
                "no bodies: leave --protocol-only out, or set it to false"
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
        """Why it is over; empty while it goes on."""
        return self._watch.reason

    @property
    def finished(self) -> bool:
        """Whether the run's budget is spent."""
        return self.system.finished

    @property
    def real_seconds(self) -> float:
        """How long it has taken."""
        return time.perf_counter() - self._began

    @property
    def tokens(self) -> int:
        """Tokens that all learners together have reported."""
        machines = [shard.machine for shard in self.system.shards]
        return max((machine.state.tokens for machine in machines if machine), default=0)

    @property
    def data_sent(self) -> int:
        """Bytes of bodies that all learners have sent."""
        sent = sum(host.data_sent for host in self.system.learners.values())
        return round(self._factor * sent)

    def advance(self, events: int = 4096) -> bool:
        """Lets some more happen; ``False``: it is over, see `reason`."""
        return self._watch.advance(events)

    def close(self) -> None:
        """Ends the tape, if there is one, and compresses it.

        Raises:
            StorageError: it cannot be written.
        """
        if self._closed:
            return
        self._closed = True
        if isinstance(self.system, System):
            if self.finished:
                say_goodbye(self.system)
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
    """What bare machines cannot do is told before anything begins."""
    learners = scenario.config.run.learners
    way_out = f"with learners={learners}, more than {MANY}, there are only bare state machines"
    if tape is not None:
        raise ConfigError(f"--tape would be ignored: {way_out}: leave it out")
    kinds = [h.kind for h in scenario.happenings] + [r.settings.kind for r in scenario.recurrences]
    for kind in kinds:
        if kind in OF_SHELLS:
            raise ConfigError(f"kind={kind!r} is not possible: {way_out}: take it out")
    targets = [h.target for h in scenario.happenings] + [r.target for r in scenario.recurrences]
    for target in targets:
        ends = [name for name in target.processes if name not in scenario.members]
        if ends:
            raise ConfigError(f"target={target.name!r} is not possible: {way_out}: take it out")


def _without_tensors(config: RunConfig) -> RunConfig:
    """The run without what is about the model itself, and without checkpoints of learners."""
    changes: dict[str, Any] = {
        "sync": config.sync.model_copy(update={"initial_weights": None}),
        "learner": config.learner.model_copy(update={"checkpoint_every_seconds": 0.0}),
    }
    return config.model_copy(update=changes)


def _parameters(scenario: Scenario) -> int:
    """Size of the model: as the scenario says, or that of the workload's."""
    if scenario.file.parameters is not None:
        return scenario.file.parameters
    model = workload_of(scenario.config).model()
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
