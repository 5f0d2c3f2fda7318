"""Each learner sends in as many bits as its link carries in time (rule 20).

Steps of a second, 24 fragments of a million parameters, a period of 24, τ = 2: a body has a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol.effects import Fold, Note, RoundFinished, SendBody
from decoupled_diloco.protocol.events import StepFinished
from decoupled_diloco.simulate import LearnerSpec
from decoupled_diloco.simulate.crowd import Crowd

PARAMETERS = 1_000_000
LADDER = (("bf16", 16.0), ("int8", 8.125), ("int4", 4.125), ("int2", 2.125))
MBIT = 125_000.0


class Seen:
    """Which codec each learner sent in, by step, what was merged, and what was said of it."""

    def __init__(self, rates: Sequence[float], ladder: Any = LADDER, **settings: Any) -> None:
        options = Options(fragments=24, period=24, overlap=2, ladder=ladder, **settings)
        specs = [
            LearnerSpec(
                f"learner-{n}",
                latency=0.01,
                joins_at=0.1 * n,
                up_bytes_per_second=rate * MBIT,
                down_bytes_per_second=1000 * MBIT,
            )
            for n, rate in enumerate(rates)
        ]
        sizes = [4.0 * PARAMETERS] * 24
        self.world = Crowd(options, specs, seed=1, fragment_bytes=sizes, checks=False)
        self.codecs: dict[str, list[str]] = defaultdict(list)
        self.folded: dict[str, int] = defaultdict(int)
        self.steps: dict[str, int] = defaultdict(int)
        self.notes: list[tuple[float, Note]] = []
        self.merged = 0
        self.world.recorders.append(self)

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        self.steps[who] += isinstance(event, StepFinished)
        for effect in effects:
            match effect:
                case SendBody(codec=codec):
                    self.codecs[who].append(codec)
                case Fold(learner=learner):
                    self.folded[learner] += 1
                case Note(text) if "from now on" in text:
                    self.notes.append((now, effect))
                case RoundFinished(verdict="merged"):
                    self.merged += 1


def test_three_sites_and_each_sends_what_its_link_carries() -> None:
    """A body of bf16 is 16 Mbit: in 0.16, 0.8 and 3.2 s; of 4 bits a quarter of that."""
    seen = Seen([100, 20, 5])
    seen.world.run(until=300)
    assert set(seen.codecs["learner-0"]) == {"bf16"}
    assert set(seen.codecs["learner-1"][100:]) == {"int8"}
    assert set(seen.codecs["learner-2"][100:]) == {"int2"}
    assert seen.merged >= 0.95 * 300
    for n in range(3):
        assert seen.folded[f"learner-{n}"] >= 0.9 * seen.steps[f"learner-{n}"]
    assert len(seen.notes) == 2, [note.text for _, note in seen.notes]
    assert seen.notes[0][1].why.startswith("2 bodies took too long, the last one ")


@pytest.mark.parametrize("codec", ["bf16", "int2"])
def test_what_is_fixed_is_too_much_or_too_little(codec: str) -> None:
    """The same sites, with one codec for all."""
    fixed = (next(rung for rung in LADDER if rung[0] == codec),)
    seen = Seen([100, 20, 5], fixed)
    seen.world.run(until=300)
    slowest = seen.folded["learner-2"] / seen.steps["learner-2"]
    assert not seen.notes
    assert slowest < 0.4 if codec == "bf16" else slowest > 0.9


def test_a_link_that_falls_to_a_tenth_for_a_while() -> None:
    seen = Seen([100, 40])
    world = seen.world
    world.run(until=100)
    link = world.learners["learner-1"].link
    assert seen.codecs["learner-1"][-1] == "bf16"
    link.stretch("up", 4 * MBIT, world.clockwork)
    world.run(until=200)
    assert seen.codecs["learner-1"][-1] == "int2"
    link.stretch("up", 40 * MBIT, world.clockwork)
    world.run(until=400)
    assert seen.codecs["learner-1"][-1] == "bf16"
    assert len(seen.notes) <= 6, [note.text for _, note in seen.notes]
    assert seen.folded["learner-1"] >= 0.9 * seen.steps["learner-1"]
