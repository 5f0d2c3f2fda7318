"""Each learner's codec follows its link; after the last codec, H and τ follow (rule 20).

Steps take one second. There are 24 fragments of a million parameters, H = 24 and τ = 2, so a
payload has one second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cases import long_after
from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of
from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol.adapt import AdaptLimits
from decoupled_diloco.protocol.messages import (
    Apply,
    Fold,
    Note,
    RoundFinished,
    SendBody,
    StepFinished,
)
from decoupled_diloco.run_model import run_of
from decoupled_diloco.show.explain import explain_round, explain_step
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco_lab.simulate import LearnerSpec
from decoupled_diloco_lab.simulate.crowd import Crowd
from decoupled_diloco_lab.simulate.system import System
from replay_check import assert_replays

PARAMETERS = 1_000_000
LADDER = (("bf16", 16.0), ("int8", 8.125), ("int4", 4.125), ("int2", 2.125))
MBIT = 125_000.0


class Seen:
    """Records each learner's codecs, merged contributions and notes about them."""

    def __init__(
        self,
        rates: Sequence[float],
        ladder: Any = LADDER,
        options: Options | None = None,
        **settings: Any,
    ) -> None:
        values = {"fragments": 24, "period": 24, "overlap": 2, **settings}
        options = options or Options(ladder=ladder, **values)
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
        self.clear()
        self.notes: list[tuple[float, Note]] = []
        self.revisions: list[tuple[float, Note]] = []
        self.late: list[Note] = []
        self.world.recorders.append(self)

    def clear(self) -> None:
        """Count from now on."""
        self.codecs: dict[str, list[str]] = defaultdict(list)
        self.folded: dict[str, int] = defaultdict(int)
        self.steps: dict[str, int] = defaultdict(int)
        self.tokens: dict[str, int] = defaultdict(int)
        self.discarded: dict[str, int] = defaultdict(int)
        self.merged = 0

    def counted(self, learner: str) -> float:
        """Return the share of a learner's tokens that it has not discarded."""
        fragments = self.world.options.fragments
        return 1 - self.discarded[learner] / fragments / self.tokens[learner]

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if isinstance(event, StepFinished):
            self.steps[process] += 1
            self.tokens[process] += event.tokens
        for effect in effects:
            match effect:
                case SendBody(codec=codec):
                    self.codecs[process].append(codec)
                case Apply(discarded_tokens=discarded):
                    self.discarded[process] += discarded
                case Fold(learner=learner):
                    self.folded[learner] += 1
                case Note(text) if "now sends in" in text:
                    self.notes.append((now, effect))
                case Note(text) if text.endswith(" came late"):
                    self.late.append(effect)
                case Note(text) if text.startswith("revision "):
                    self.revisions.append((now, effect))
                case RoundFinished(verdict="merged"):
                    self.merged += 1


def test_each_of_three_sites_uses_the_codec_that_its_link_carries() -> None:
    """A payload in bf16 has 16 Mbit, which take 0.16, 0.8 and 3.2 s; with 4 bits a quarter."""
    seen = Seen([100, 20, 5])
    seen.world.run(until=300)
    assert set(seen.codecs["learner-0"]) == {"bf16"}
    assert set(seen.codecs["learner-1"][100:]) == {"int8"}
    assert set(seen.codecs["learner-2"][100:]) == {"int2"}
    assert seen.merged >= 0.95 * 300
    for n in range(3):
        assert seen.folded[f"learner-{n}"] >= 0.9 * seen.steps[f"learner-{n}"]
    assert len(seen.notes) == 2, [note.text for _, note in seen.notes]
    assert seen.notes[0][1].why.startswith("2 payloads took too long, the last one ")


@pytest.mark.parametrize("shards", long_after(1, [1, 2]))
def test_half_of_a_slow_learners_tokens_count_with_the_defaults(shards: int) -> None:
    """One uplink of four has a twelfth of the bandwidth that bf16 needs: 16 Mbit per second."""
    options = options_of(RunConfig(run={"max_steps": 10_000}, syncer={"shards": shards}))
    seen = Seen([1000, 1000, 1000, 16 / 12], options=options)
    slow, warm_up = "learner-3", 100.0
    seen.world.run(until=warm_up)
    seen.clear()
    seen.world.run(until=warm_up + 360)
    assert {note.text for _, note in seen.notes} <= {f"{slow} now sends in int2 (before: bf16)"}
    assert seen.counted(slow) >= 0.5
    assert seen.merged >= 0.98 * 360
    for n in range(3):
        assert set(seen.codecs[f"learner-{n}"]) == {"bf16"}
        assert seen.folded[f"learner-{n}"] >= 0.98 * seen.merged, "it is in each round"
        assert seen.counted(f"learner-{n}") >= 0.9, "as without a slow learner"


@pytest.mark.parametrize("codec", ["bf16", "int2"])
def test_one_codec_for_all_is_too_large_or_too_small(codec: str) -> None:
    """The same three sites, with one codec for all of them."""
    fixed = (next(rung for rung in LADDER if rung[0] == codec),)
    seen = Seen([100, 20, 5], fixed)
    seen.world.run(until=300)
    slowest = seen.folded["learner-2"] / seen.steps["learner-2"]
    assert not seen.notes
    assert slowest < 0.4 if codec == "bf16" else slowest > 0.9


def test_the_codec_follows_a_link_that_is_slow_for_a_while() -> None:
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


@pytest.mark.parametrize(("overlap", "count"), [(2, 1), (4, 0)])
def test_one_note_reports_that_all_contributions_are_late(overlap: int, count: int) -> None:
    """Payloads take 2.1 s and have two or four seconds."""
    seen = Seen([2, 2, 2, 2], LADDER[2:3], period=96, overlap=overlap)
    seen.world.run(until=500)
    assert [note.text for note in seen.late] == [
        "all contributions to the last 24 rounds came late"
    ] * count


LIMITS = AdaptLimits((24, 192), (2, 16))


def plans(seen: Seen) -> list[str]:
    return [note.text for _, note in seen.revisions]


@pytest.mark.parametrize(
    ("rates", "ladder", "period"),
    [
        ([20, 20, 20], LADDER, 24),
        ([2, 2, 2], LADDER, 48),
        ([1, 1, 1], LADDER, 96),
        ([5, 5, 5], LADDER[:1], 96),
        ([100, 100, 100, 2], LADDER, 24),
        ([100, 100, 2, 2], LADDER, 48),
    ],
)
def test_the_period_is_the_shortest_that_three_quarters_of_the_links_carry(
    rates: list[float], ladder: Any, period: int
) -> None:
    """A payload has 2.1 Mbit in int2 and 16 Mbit in bf16, and may take 0.95 H/P seconds."""
    seen = Seen(rates, ladder, adapt=LIMITS)
    seen.world.run(until=400)
    for host in (*seen.world.learners.values(), *seen.world.shards):
        assert host.machine.options.period == period, plans(seen)
    assert len(seen.revisions) <= 2, plans(seen)


def test_the_period_follows_a_link_down_and_up() -> None:
    seen = Seen([40, 40], adapt=LIMITS)
    world = seen.world
    world.run(until=100)
    assert not seen.revisions
    for host in world.learners.values():
        host.link.stretch("up", 1 * MBIT, world.clockwork)
    world.run(until=300)
    assert world.shards[0].machine.options.period == 96, plans(seen)
    for host in world.learners.values():
        host.link.stretch("up", 40 * MBIT, world.clockwork)
    world.run(until=700)
    assert world.shards[0].machine.options.period == 24, plans(seen)
    assert {codecs[-1] for codecs in seen.codecs.values()} == {"bf16"}
    assert len(seen.revisions) <= 5, plans(seen)


def test_a_late_learner_follows_the_current_plan() -> None:
    seen = Seen([2, 2, 2], adapt=LIMITS)
    late = seen.world.learners["learner-2"]
    seen.world.crash(late)
    seen.world.run(until=200)
    seen.world.restart(late)
    seen.world.run(until=260)
    assert late.machine.options.period == 48


def test_a_plan_is_explained_and_replays(tmp_path: Path) -> None:
    """Payloads take two steps, and one is due per step: then a fragment is sent every 16 steps."""
    limits = {"sync_every": [4, 16], "overlap_steps": [2, 6], "learner_share": 1.0}
    config = RunConfig(
        run={"folder": tmp_path, "learners": 2, "max_steps": 80},
        sync={"fragments": 4, "sync_every": 4, "codec": {"uplink": "bf16"}, "adapt": limits},
        syncer={"port": 0},
    )
    slow = LearnerSpec("learner-1", step_seconds=1.0, up_bytes_per_second=250.0)
    system = System(
        config, [LearnerSpec("learner-0"), slow], tmp_path, sizes=[250] * 4, tapes=tmp_path
    )
    system.run(stop=lambda: system.finished and not any(h.alive for h in system.hosts))
    system.close()
    run = run_of(list(TapeReader(tmp_path)))
    plan, why = run.revisions[1]
    assert (plan.period, plan.overlap) == (16, 3)
    text = " ".join(explain_step(run, plan.tick + 1, None))
    assert f"H = 16, τ = 3 since step {plan.tick}, schedule revision 1: {why}." in text
    rounds = [each for each in run.shards["shard-0"].rounds if each.tick]
    for each, period in ((rounds[0], 4), (rounds[-6], 16)):
        assert f"(every H = {period} steps, " in " ".join(explain_round(run, each.number, 0))
    assert_replays(tmp_path)
