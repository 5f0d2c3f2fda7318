"""A run of the bare state machines; see `bare`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from decoupled_diloco.protocol.options import Options
from decoupled_diloco.simulate.bare import Bare, BareCoordinator, BareShard
from decoupled_diloco.simulate.bare_learner import BareLearner
from decoupled_diloco.simulate.network import Link
from decoupled_diloco.simulate.spec import LearnerSpec
from decoupled_diloco.simulate.stage import Recorder, Stage


class Crowd(Stage):
    """One run of bare machines.

    Args:
        options: The settings of the method.
        specs: Learners and observers.
        seed: Every random choice follows from it.
        fragment_bytes: Size of each fragment's fp32 copy.
        inbox_seconds: How often a shard looks into its inbox for step reports; 0: each at once.
        checks: Assert every invariant of a machine after each of its events; that looks at all
            learners each time, so it is left out where there are thousands.
        recorders: Told of every event that a machine has handled.

    Attributes:
        finished: Whether every shard has ended.
        wire_bytes: Of a contribution for each of a copy, by the codecs that learners choose from.
    """

    def __init__(
        self,
        options: Options,
        specs: Iterable[LearnerSpec],
        seed: int | str = 0,
        *,
        fragment_bytes: Sequence[float] = (),
        inbox_seconds: float = 0.0,
        checks: bool = True,
        recorders: Sequence[Recorder] = (),
    ) -> None:
        super().__init__(seed)
        # Nothing is kept of which a checkpoint of the run could be made.
        self.options = replace(options, checkpoint_every_seconds=0.0)
        self.fragment_bytes = fragment_bytes or [1000.0] * options.fragments
        self.wire_bytes = {name: bits / 32 for name, bits in options.ladder}
        self.inbox_seconds, self.checks = inbox_seconds, checks
        self.recorders = list(recorders)
        self.finished = False
        self._shared_links: dict[str, Link] = {}
        self.coordinator = BareCoordinator(self)
        self.shards = [BareShard(self, shard) for shard in range(options.shards)]
        self.learners = {spec.name: BareLearner(self, spec) for spec in specs}
        for process in (self.coordinator, *self.shards):
            self.clockwork.at(0.0, process.begin)
        for learner in self.learners.values():
            if learner.spec.joins_at < float("inf"):
                self.clockwork.at(learner.spec.joins_at, self.restart, learner)

    @property
    def participants(self) -> dict[str, BareLearner]:
        """See `System`."""
        return self.learners

    @property
    def shard_processes(self) -> list[BareShard]:
        """See `System`."""
        return self.shards

    @property
    def hosts(self) -> list[Bare]:
        """See `System`."""
        return [*self.shards, *self.learners.values()]

    def link_of(self, spec: LearnerSpec) -> Link:
        """See `System`."""
        own = Link(spec.latency, spec.jitter, spec.up_bytes_per_second, spec.down_bytes_per_second)
        return self._shared_links.setdefault(spec.shared_link, own) if spec.shared_link else own

    def ended(self, shard: BareShard) -> None:
        """A shard has ended of itself."""
        self.finished = all(each.over for each in self.shards)

    def crash(self, learner: Any, *, silent: bool = False) -> None:
        """See `System`; for learners."""
        learner.end(silent=silent)

    def restart(self, learner: Any) -> None:
        """See `System`; for learners."""
        if not (learner.alive or learner.over):
            learner.begin()

    def tell_to_go(self, learner: Any, seconds: float, number: Any) -> None:
        """See `System`: at once, and it hands nothing in."""
        if learner.alive:
            learner.leave("its loop has ended")

    def sample(self, sample: Any) -> None:
        """There is no tape."""
