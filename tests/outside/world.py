"""A world of its own for the two machines: real decisions, virtual time, and lineage for weights.

Written from the rules and from the docstrings of messages, events, effects and options alone: the
project's own simulator and its shells were not looked at. Contents say which training is in them:
an atom is one step of one life of one learner, a fragment of the parameters counts atoms, a
contribution is a snapshot less the copy that it started from, and a merge adds contributions. An
atom that counts two in a published copy was merged twice; one that counts less than none was
undone.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol.versions import Asking, Version
from outside.content import Content, ill
from outside.learner import Learner
from outside.nodes import Chances, Contribution, Coordinator, Node, Spec
from outside.shard import Shard


class World:
    def __init__(
        self,
        options: Options,
        specs: list[Spec],
        *,
        seed: int = 0,
        sizes: list[float] | None = None,
        merge_seconds: float = 0.01,
        chances: Chances | None = None,
        disk: bool = True,
        check_every: int = 1,
    ) -> None:
        self.options, self.seed, self.rng = options, seed, random.Random(seed)
        self.now, self.heap, self.order = 0.0, [], itertools.count()
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]]
        self.sizes = sizes or [1.0] * options.fragments
        self.merge_seconds, self.chances, self.disk = merge_seconds, chances or Chances(), disk
        self.check_every, self.events = check_every, 0
        self.watchers: list[Callable[[Node, Any, list[Any]], None]] = []
        self.published: dict[tuple[int, Version], Content] = {}
        self.contributions: dict[tuple[str, int, Asking], Contribution] = {}
        self.stats: Counter[str] = Counter()
        self.connections = itertools.count(1)
        self.shards = [Shard(self, s) for s in range(options.shards)]
        self.learners = [Learner(self, i, spec) for i, spec in enumerate(specs)]
        self.coordinator = Coordinator(self)
        for shard in self.shards:
            self.at(0.0, shard.begin)
        for learner in self.learners:
            self.at(learner.spec.joins, learner.begin)

    def at(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (self.now + delay, next(self.order), call, args))

    def run(self, until: float) -> None:
        while self.heap and self.heap[0][0] <= until and not self.over:
            self.now, _, call, args = heapq.heappop(self.heap)
            call(*args)
        if not self.over:
            self.now = until

    def end(self, within: float) -> None:
        """Order the end, and see it come."""
        self.coordinator.end()
        self.run(self.now + within)
        assert self.over, f"no end within {within} s: swept {self.coordinator.swept}"

    @property
    def over(self) -> bool:
        return self.coordinator.finished and all(shard.stopped for shard in self.shards)

    def publish(self, fragment: int, version: Version, content: Content) -> None:
        assert not ill(content), f"t={self.now:.2f} {fragment} {version}: {ill(content)[:3]}"
        known = self.published.setdefault((fragment, version), content)
        assert known == content, f"t={self.now:.2f} {fragment} {version} names two contents"
