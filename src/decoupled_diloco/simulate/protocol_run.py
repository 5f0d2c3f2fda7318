"""A scenario without tensors: the protocol alone, for thousands of learners.

What is merged is a lineage of steps instead of numbers; every decision is the real one.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoupled_diloco.config.method import options_of
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.observe.tape import pack_tapes
from decoupled_diloco.protocol.effects import RoundFinished
from decoupled_diloco.simulate.bodies import NoBodies
from decoupled_diloco.simulate.learner_process import LearnerProcess
from decoupled_diloco.simulate.scenario import Scenario
from decoupled_diloco.simulate.script import Script
from decoupled_diloco.simulate.shell import Shell
from decoupled_diloco.simulate.simulation import Clockwatch, specs_of, workload_of
from decoupled_diloco.simulate.tapes import VirtualTapes
from decoupled_diloco.simulate.world import World

BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of an element on the wire."""


MANY = 256
INBOX_SECONDS = 0.05
"""With so many learners a shard takes the reports of this much time at once, and the invariants of
its whole state are not asserted after each event: both would cost more than all the rest."""


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
        """A `world.Recorder`."""
        if not who.startswith("shard-"):
            return
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
        config = scenario.config
        if config.syncer.record_payloads:
            raise ConfigError(
                "syncer.record_payloads=true would be ignored, because without tensors there are "
                "no bodies: leave --protocol-only out, or set it to false"
            )
        self.scenario = scenario
        self.folder = tape
        self.tally = Tally()
        options = options_of(config)
        nbytes = 4 * math.ceil(_parameters(scenario) / options.fragments)
        ratio = BYTES.get(config.sync.uplink_codec, 2) / 4
        self.world = World(
            options,
            specs_of(scenario),
            seed=scenario.seed,
            bodies=NoBodies([nbytes] * options.fragments, ratio),
            recorder=self.tally.record,
            weights_from_file=True,
            checks=config.run.learners < MANY,
            inbox_seconds=0.0 if config.run.learners < MANY else INBOX_SECONDS,
        )
        self._sent_before = 0
        self.world.watchers.append(self)
        if tape is None:
            for learner in self.world.learners.values():
                learner.recorders = []  # the tally looks at shards only
        self.tapes: VirtualTapes | None = None
        if tape is not None:
            self.tapes = VirtualTapes(tape, self.world, config.public())
        tellers = (self.tapes.fault, self.tapes.fault_ended) if self.tapes else ()
        self.script = Script(self.world, scenario, *tellers)
        self._watch = Clockwatch(self.world, self.script, scenario)
        self._began = time.perf_counter()

    @property
    def reason(self) -> str:
        """Why it is over; empty while it goes on."""
        return self._watch.reason

    @property
    def finished(self) -> bool:
        """Whether the run's budget is spent."""
        return self.world.finished

    @property
    def real_seconds(self) -> float:
        """How long it has taken."""
        return time.perf_counter() - self._began

    @property
    def tokens(self) -> int:
        """Tokens that all learners together have reported."""
        return max(shard.machine.state.tokens for shard in self.world.shards if shard.machine)

    @property
    def data_sent(self) -> int:
        """Bytes of bodies that all learners have sent."""
        present = sum(p.data_sent for p in self.world.learners.values() if p.alive)
        return self._sent_before + present

    def began(self, process: Shell) -> None:
        """See `world.Watcher`."""

    def ended(self, process: Shell, *, killed: bool) -> None:
        """See `world.Watcher`: what a life has sent counts on."""
        if isinstance(process, LearnerProcess):
            self._sent_before += process.data_sent

    def advance(self, events: int = 4096) -> bool:
        """Lets some more happen; ``False``: it is over, see `reason`."""
        return self._watch.advance(events)

    def close(self) -> None:
        """Ends the tape, if there is one, and compresses it.

        Raises:
            StorageError: it cannot be written.
        """
        if self.tapes is not None and self.folder is not None:
            self.tapes.close()
            pack_tapes(self.folder)


def _parameters(scenario: Scenario) -> int:
    """Size of the model: as the scenario says, or that of the workload's."""
    if scenario.file.parameters is not None:
        return scenario.file.parameters
    model = workload_of(scenario.config).model()
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
