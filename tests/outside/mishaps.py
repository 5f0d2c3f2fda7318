"""Random worlds: options, machines, links and mishaps, all from one seed."""

from __future__ import annotations

import random

from decoupled_diloco.protocol import Options
from outside.content import missing
from outside.learner import Learner
from outside.measures import final, nothing_trained_is_missing
from outside.nodes import Chances, Spec
from outside.shard import Shard
from outside.world import World

MISHAPS = (
    *("break", "break", "break and lose", "stall", "stall"),
    *("freeze", "crash", "silent", "go", "shard"),
)


def options_of(rng: random.Random, learners: int) -> Options:
    fragments = rng.choice([1, 2, 3, 4, 6, 8])
    return Options(
        fragments=fragments,
        period=rng.choice([2, 4, 6, 8, 12]),
        overlap=rng.choice([0, 1, 2, 3]),
        quorum=rng.choice([1, 1, 1, 2, learners]),
        shards=rng.choice([1, 1, 2, 3]) if fragments > 2 else 1,
        grace_margin=rng.choice([0.0, 0.8]),
        participants=rng.choice(["reported", "reported", "all"]),
        alignment=rng.choice(["overwrite", "overwrite", "carry"]),
        missed=rng.choice(["overwrite", "rebase"]),
        apply=rng.choice(["on_arrival", "on_arrival", "at_tau"]),
        late=rng.choice(["next", "next", "next", "drop"]),
        late_rounds_max=rng.choice([1, 32]),
        counter_cap_periods=rng.choice([1, 4]),
    )


def spec_of(rng: random.Random) -> Spec:
    return Spec(
        step=rng.choice([0.5, 1.0, 1.0, 1.18, 2.0, 4.0]),
        upload=rng.choice([0.02, 0.02, 0.3, 1.0, 3.0, 8.0]),
        download=rng.choice([0.02, 0.02, 0.3, 1.0, 3.0]),
        latency=rng.choice([0.005, 0.005, 0.3]),
        joins=rng.choice([0.0, 0.1, rng.uniform(0.0, 20.0)]),
        jitter=rng.choice([0.0, 0.05, 0.2]),
    )


class Storm:
    """A world in which things go wrong, until it is told to end; half of them calm down before."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(f"storm {seed}")
        rng = self.rng
        count = rng.choice([2, 3, 4, 5])
        self.options = options_of(rng, count)
        self.rate = rng.choice([0.0, 0.05, 0.15, 0.4])
        chance = rng.choice([0.0, 0.0, 0.02, 0.1])
        self.world = World(
            self.options,
            [spec_of(rng) for _ in range(count)],
            seed=seed,
            sizes=[rng.choice([0.1, 1.0, 1.0, 1.0, 5.0]) for _ in range(self.options.fragments)],
            merge_seconds=rng.choice([0.001, 0.1, 0.5]),
            chances=Chances(*(chance * rng.choice([0, 1]) for _ in range(4))),
            disk=rng.random() < 0.7,
        )
        self.kinds = rng.sample(MISHAPS, rng.randint(1, len(MISHAPS)))
        self.until = rng.choice([30.0, 60.0, 100.0])
        self.calms_down = rng.random() < 0.5

    def run(self) -> World:
        self._begin()
        if self.rate:
            self._next()
        self.world.run(self.until)
        if self.calms_down:
            self.rate = 0.0
            self.world.chances = Chances()
            self.world.run(self.until + 40.0)
        else:
            self.until += 30.0  # mishaps go on into the end
        here = {x for x in self.world.learners if x.alive and x.training}
        self.world.end(within=3000.0)
        self.verdict(here)
        return self.world

    def _begin(self) -> None:
        """The first weights have to be there before anything can end."""
        while not self.world.coordinator.begun and self.world.now < 2000.0:
            self.world.run(self.world.now + 1.0)
        assert self.world.coordinator.begun, "the run never begins"
        self.until += self.world.now

    def _next(self) -> None:
        self.world.at(self.rng.expovariate(self.rate), self._mishap)

    def _mishap(self) -> None:
        if not self.rate or self.world.now > self.until:
            return
        rng = self.rng
        learner, shard = rng.choice(self.world.learners), rng.choice(self.world.shards)
        self._happens(rng.choice(self.kinds), learner, shard)
        self._next()

    def _happens(self, kind: str, learner: Learner, shard: Shard) -> None:
        rng = self.rng
        self.world.stats[f"mishap {kind}"] += 1
        match kind:
            case "break" | "break and lose":
                if shard.index in learner.links:
                    after = rng.choice([0.0, 0.1, 2.0, 12.0]) * rng.random()
                    shard_after = rng.choice([0.0, after, 12.0 * rng.random(), None])
                    learner.links[shard.index].cut(after, shard_after)
                if kind == "break and lose":
                    for number, (_, to) in list(learner.transfers.items()):
                        if to is shard:
                            learner.upload_broken(number, "the link broke")
            case "stall":
                learner.still_until = self.world.now + rng.choice([5.0, 20.0, 100.0]) * rng.random()
            case "freeze":
                node = rng.choice([learner, shard])
                node.freeze(rng.choice([1.0, 10.0, 40.0]) * rng.random())
            case "crash" | "silent":
                learner.crash(rng.uniform(0.5, 25.0), silent=kind == "silent")
            case "go":
                learner.leave(patience=30.0)
            case "shard":
                shard.crash(rng.uniform(0.5, 6.0))

    def verdict(self, here: set[Learner]) -> None:
        world = self.world
        result = final(world)
        for c in world.contributions.values():
            accepted = [o for o in c.told if o.verdict == "accepted"]
            assert len(accepted) <= 1, f"told twice: {c}"
            assert len([o for o in c.heard if o.verdict == "accepted"]) <= 1, f"heard twice: {c}"
            if c.arrived is not None and not c.term_over:
                assert c.folded or c.dropped, f"neither folded nor dropped: {c}"
            if c.folded and not c.merge_failed and not c.term_over:
                assert c.version is not None, f"folded, never merged: {c}"
            if accepted:
                assert accepted[0].version == c.version, f"told another version: {c}"
            if c.version is not None and world.disk:
                lost = missing(c.content, result[c.fragment])
                assert not lost, f"merged, and not in the end: {lost[:3]} of {c}"
        if self.calms_down:
            nothing_trained_is_missing(world, here)
