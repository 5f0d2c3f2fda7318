"""Nobody waits for a slow link or for a loop that stands still (rules 2 and 4).

Steps of a second, 24 fragments and a period of 24, so that one round a step is nominal. Three
learners upload at once, the fourth slowly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol.effects import Fold, RoundFinished
from decoupled_diloco.protocol.events import BodyArrived, StepFinished
from decoupled_diloco.simulate import LearnerSpec
from decoupled_diloco.simulate.crowd import Crowd

FRAGMENT_BYTES = 2_000_000
BODY_BYTES = FRAGMENT_BYTES / 2
WARM_UP = 120.0


class Seen:
    """What befell the rounds and the slow learner after the beginning."""

    def __init__(self, world: Crowd) -> None:
        self.world = world
        self.merged = 0
        self.heard: Counter[int] = Counter()
        self.delivered = self.folded = 0
        self.in_versions: Counter[Any] = Counter()
        self.ages: Counter[int] = Counter()
        self.stepped: dict[str, list[float]] = {}
        world.recorders.append(self)

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if isinstance(event, StepFinished):
            self.stepped.setdefault(who, []).append(now)
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
                        self.heard[effect.fragment] += 1
                        self.in_versions[effect.fragment, part.ask] += 1
                        self.ages[part.age] += 1

    def longest_step(self, learner: str) -> float:
        """Of those that did not wait for anybody, all take as long."""
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
    [(0.5, 1), (1, 1), (3, 1), (6, 1), (12, 1), (24, 1), (40, 1), (0.5, 3), (3, 3), (12, 3)],
)
def test_one_slow_upload_costs_the_others_nothing(upload_steps: float, shards: int) -> None:
    steps = max(480, int(48 * upload_steps))
    seen = run(upload_steps, steps=steps, shards=shards)
    assert seen.merged >= 0.98 * steps, "rounds are merged as if nobody were slow"
    for learner in ("fast-0", "fast-1", "fast-2"):
        assert seen.longest_step(learner) == pytest.approx(1.0), "nobody waits"
    busy = seen.delivered * upload_steps / steps
    assert busy >= 0.9 * min(1.0, upload_steps), "its link does not stand idle"
    assert seen.folded == seen.delivered, "all that it delivers is taken"
    assert set(seen.in_versions.values()) == {1}, "and merged once"
    assert sum(seen.in_versions.values()) >= seen.delivered - 24, "but for what waits for its round"
    times = [seen.heard[fragment] for fragment in range(24)]
    assert max(times) - min(times) <= 2, "every fragment hears it as often"


def test_an_upload_of_two_hundred_steps_is_late_by_eight_versions_and_counts() -> None:
    seen = run(200, steps=3000)
    assert seen.merged >= 0.98 * 3000
    assert seen.delivered >= 0.9 * 3000 / 200
    assert seen.folded == seen.delivered
    assert set(seen.in_versions.values()) == {1}
    # Before it is known how slow the link is, two were asked for at once.
    assert sum(count for age, count in seen.ages.items() if age > 9) <= 1


@pytest.mark.parametrize("seconds", [120, 600])
def test_a_loop_that_stands_still_costs_the_others_nothing(seconds: int) -> None:
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
    seen.heard.clear()
    world.run(until=world.now + 60)
    assert set(seen.heard) == set(range(24)), "when it steps again every fragment hears it soon"
    rounds = seen.merged
    seen.heard.clear()
    world.run(until=world.now + 48)
    assert sum(seen.heard.values()) >= 0.9 * (seen.merged - rounds), "and it is in nearly all"


@pytest.mark.parametrize("fragments", [24, 8])
def test_a_fragment_sixty_times_as_large_is_heard_like_the_rest(fragments: int) -> None:
    sizes = [60 * FRAGMENT_BYTES] + [FRAGMENT_BYTES] * (fragments - 1)
    seen = run(0.2, steps=1920, sizes=sizes, fragments=fragments)
    assert seen.merged >= 0.98 * 1920 * fragments / 24
    times = [seen.heard[fragment] for fragment in range(fragments)]
    assert times[0] == max(times), "the large one is heard whenever it can be"
    assert min(times) >= max(times) / 2, "what is due while it is sent has its turn afterwards"
    assert seen.folded == seen.delivered


def test_a_quorum_of_all_waits_for_all() -> None:
    seen = run(20, steps=480, quorum=4)
    assert seen.merged <= 480 / 20 + 2
    assert sum(seen.heard.values()) == seen.merged


def test_late_contributions_can_be_dropped() -> None:
    seen = run(6, steps=480, late="drop")
    assert seen.merged >= 0.98 * 480
    assert seen.folded < seen.delivered
    assert set(seen.ages) <= {0}
