"""No learner waits for a slow link or for a stalled loop (rules 2 and 4).

Steps take one second. There are 24 fragments and H = 24, so one round per step is nominal. Three
learners upload quickly and the fourth slowly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from cases import long_after
from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol.messages import BodyArrived, Fold, RoundFinished, StepFinished
from decoupled_diloco_lab.simulate import LearnerSpec
from decoupled_diloco_lab.simulate.crowd import Crowd

FRAGMENT_BYTES = 2_000_000
BODY_BYTES = FRAGMENT_BYTES / 2
WARM_UP = 120.0


class Seen:
    """Records the rounds and the slow learner's contributions after the warm-up."""

    def __init__(self, world: Crowd) -> None:
        self.world = world
        self.merged = 0
        self.merged_slow: Counter[int] = Counter()
        self.delivered = self.folded = 0
        self.in_versions: Counter[Any] = Counter()
        self.ages: Counter[int] = Counter()
        self.stepped: dict[str, list[float]] = {}
        world.recorders.append(self)

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if isinstance(event, StepFinished):
            self.stepped.setdefault(process, []).append(now)
        if now < WARM_UP:
            return
        if isinstance(event, BodyArrived) and event.learner == "slow":
            self.delivered += 1
            self.folded += any(isinstance(effect, Fold) for effect in effects)
        for effect in effects:
            if isinstance(effect, RoundFinished) and effect.verdict == "merged":
                self.merged += 1
                for part in effect.participants:
                    if part.learner == "slow" and part.state == "folded":
                        self.merged_slow[effect.fragment] += 1
                        self.in_versions[effect.fragment, part.ask] += 1
                        self.ages[part.age] += 1

    def longest_step(self, learner: str) -> float:
        """Return the longest step of a learner. A step without a wait takes one second."""
        at = self.stepped[learner]
        return max(b - a for a, b in pairwise(at))


def run(
    upload_steps: float,
    *,
    steps: int = 960,
    sizes: Sequence[int] | None = None,
    **settings: Any,
) -> Seen:
    options = Options(**{"fragments": 24, "period": 24, "overlap": 2, **settings})
    rate = BODY_BYTES / upload_steps if upload_steps else 1e9
    specs = [
        LearnerSpec(
            f"fast-{number}",
            latency=0.005,
            joins_at=0.1 * number,
            up_bytes_per_second=1e8,
            down_bytes_per_second=1e8,
        )
        for number in range(3)
    ]
    specs.append(
        LearnerSpec(
            "slow",
            latency=0.005,
            joins_at=0.35,
            up_bytes_per_second=rate,
            down_bytes_per_second=1e8,
        )
    )
    sizes = list(sizes or [FRAGMENT_BYTES] * options.fragments)
    world = Crowd(options, specs, seed=1, fragment_bytes=sizes, checks=False)
    seen = Seen(world)
    world.run(until=WARM_UP + steps)
    return seen


@pytest.mark.parametrize(
    ("upload_steps", "shards"),
    long_after(
        4, [(0.5, 1), (6, 1), (24, 1), (3, 3), (1, 1), (3, 1), (12, 1), (40, 1), (0.5, 3), (12, 3)]
    ),
)
def test_one_slow_upload_costs_the_others_nothing(upload_steps: float, shards: int) -> None:
    steps = max(480, int(48 * upload_steps))
    seen = run(upload_steps, steps=steps, shards=shards)
    assert seen.merged >= 0.98 * steps, "rounds are merged as without a slow learner"
    for learner in ("fast-0", "fast-1", "fast-2"):
        assert seen.longest_step(learner) == pytest.approx(1.0), "no learner waits"
    busy = seen.delivered * upload_steps / steps
    assert busy >= 0.9 * min(1.0, upload_steps), "its link is not idle"
    assert seen.folded == seen.delivered, "all its contributions are folded"
    assert set(seen.in_versions.values()) == {1}, "each is merged once"
    assert sum(seen.in_versions.values()) >= seen.delivered - 24, "some still wait for a round"
    for shard in seen.world.shards:
        counts = shard.machine.state.members["slow"].uploads
        times = [counts[fragment] for fragment in shard.machine.state.fragments]
        assert max(times) - min(times) <= 2, "equally often"


@pytest.mark.long
def test_an_upload_of_two_hundred_steps_is_eight_versions_late_and_still_merged() -> None:
    seen = run(200, steps=3000)
    assert seen.merged >= 0.98 * 3000
    assert seen.delivered >= 0.9 * 3000 / 200
    assert seen.folded == seen.delivered
    assert set(seen.in_versions.values()) == {1}
    # Before the shard has measured the slow link, it requests two contributions at once.
    assert sum(count for age, count in seen.ages.items() if age > 9) <= 1


@pytest.mark.parametrize("seconds", [120, 600])
def test_a_stalled_loop_costs_the_others_nothing(seconds: int) -> None:
    seen = run(0, steps=0)
    world = seen.world
    slow = world.learners["slow"]
    slow.slowness = float(seconds)
    world.run(until=WARM_UP + 2)
    slow.slowness = 1.0
    before = seen.merged
    world.run(until=WARM_UP + 2 + seconds)
    assert seen.merged - before >= 0.98 * seconds
    for learner in ("fast-0", "fast-1", "fast-2"):
        assert seen.longest_step(learner) == pytest.approx(1.0)
    seen.merged_slow.clear()
    world.run(until=world.now + 60)
    assert set(seen.merged_slow) == set(range(24)), (
        "when it steps again, every fragment merges it soon"
    )
    rounds = seen.merged
    seen.merged_slow.clear()
    world.run(until=world.now + 48)
    assert sum(seen.merged_slow.values()) >= 0.9 * (seen.merged - rounds), (
        "it is in nearly all rounds"
    )


@pytest.mark.parametrize("fragments", long_after(1, [8, 24]))
def test_a_fragment_sixty_times_as_large_is_merged_like_the_rest(fragments: int) -> None:
    sizes = [60 * FRAGMENT_BYTES] + [FRAGMENT_BYTES] * (fragments - 1)
    seen = run(0.2, steps=1920, sizes=sizes, fragments=fragments)
    assert seen.merged >= 0.98 * 1920 * fragments / 24
    times = [seen.merged_slow[fragment] for fragment in range(fragments)]
    assert times[0] == max(times), "the large one is merged whenever possible"
    assert min(times) >= max(times) / 2, "fragments due meanwhile have their turn afterwards"
    assert seen.folded == seen.delivered


def test_a_quorum_of_all_learners_waits_for_all() -> None:
    seen = run(20, steps=480, quorum=4)
    assert seen.merged <= 480 / 20 + 2
    assert sum(seen.merged_slow.values()) == seen.merged


def test_late_contributions_can_be_dropped() -> None:
    seen = run(6, steps=480, late="drop")
    assert seen.merged >= 0.98 * 480
    assert seen.folded < seen.delivered
    assert set(seen.ages) <= {0}
