"""Rule 4: who has a slow link, or stands still, costs the others nothing and is itself heard."""

from __future__ import annotations

from functools import cache

import pytest

from decoupled_diloco.protocol import Options
from outside.measures import Rounds, all_told_once, calm, heard, nominal
from outside.nodes import Spec
from outside.world import World

PAPER = Options(fragments=24, period=24, overlap=2, quorum=1)
UPLOADS = {0.5: 250, 1.0: 250, 3.0: 350, 6.0: 450, 12.0: 450, 24.0: 600, 40.0: 600, 200.0: 700}
WARM_UP = 48.0


@cache
def one_slow(upload: float, shards: int = 1) -> tuple[World, Rounds]:
    """Four learners in step; an upload of the last takes so many steps."""
    options = Options(fragments=24, period=24, overlap=2, shards=shards)
    world, rounds = calm(options, [*[Spec()] * 3, Spec(upload=upload)])
    world.run(WARM_UP)
    world.learners[-1].up.busy_seconds()
    world.learners[-1].up.busy = 0.0
    world.run(float(UPLOADS[upload]))
    return world, rounds


@pytest.mark.parametrize("upload", UPLOADS)
def test_rule_4_rounds_merge_as_if_no_link_were_slow(upload: float) -> None:
    world, rounds = one_slow(upload)
    expected = nominal(world.options, world.now - WARM_UP)
    assert rounds.merged(WARM_UP, world.now) >= 0.98 * expected


@pytest.mark.parametrize("upload", [u for u in UPLOADS if u > 1.0])
def test_rule_4_a_slow_link_is_always_busy(upload: float) -> None:
    world, _ = one_slow(upload)
    assert world.learners[-1].up.busy_seconds() >= 0.9 * (world.now - WARM_UP)


@pytest.mark.parametrize("upload", UPLOADS)
def test_rule_4_every_fragment_hears_a_slow_learner_equally_often(upload: float) -> None:
    world, _ = one_slow(upload)
    counts = heard(world, world.learners[-1]).values()
    assert max(counts) - min(counts) <= 2


@pytest.mark.parametrize("upload", [5.99, 11.99])
def test_rule_4_equally_often_too_when_the_others_take_half_a_step(upload: float) -> None:
    world, _ = calm(PAPER, [*[Spec(upload=0.5)] * 3, Spec(upload=upload)])
    world.run(500.0)
    counts = heard(world, world.learners[-1]).values()
    assert max(counts) - min(counts) <= 2


@pytest.mark.parametrize("upload", UPLOADS)
def test_rule_4_nobody_waits_for_a_slow_link(upload: float) -> None:
    world, _ = one_slow(upload)
    assert {learner.done for learner in world.learners} == {int(world.now) - 1}


@pytest.mark.parametrize("upload", [0.5, 3.0, 12.0, 24.0])
def test_rule_4_what_a_slow_link_delivers_is_merged_once(upload: float) -> None:
    options = Options(fragments=24, period=24, overlap=2)
    world, _ = calm(options, [*[Spec()] * 3, Spec(upload=upload)])
    world.run(200.0)
    world.end(within=30 * 24 * upload + 300)
    all_told_once(world)
    delivered = [c for c in world.contributions.values() if c.arrived is not None]
    assert len(delivered) >= 0.9 * len(world.contributions)


@pytest.mark.parametrize("upload", [3.0, 12.0])
def test_rule_4_holds_for_several_shards(upload: float) -> None:
    """Slots and turns are counted at each shard, but the link is one."""
    world, rounds = one_slow(upload, shards=3)
    slow = world.learners[-1]
    assert rounds.merged(WARM_UP, world.now) >= 0.98 * nominal(world.options, world.now - WARM_UP)
    assert slow.up.busy_seconds() >= 0.9 * (world.now - WARM_UP)
    counts = heard(world, slow)
    for shard in world.shards:
        own = [counts[p] for p in shard.owned]
        assert max(own) - min(own) <= 2
    assert {learner.done for learner in world.learners} == {int(world.now) - 1}


@pytest.mark.parametrize("stands", [120.0, 600.0])
def test_rule_4_a_loop_that_stands_still_delays_no_round(stands: float) -> None:
    world, rounds = calm(PAPER, [Spec()] * 4)
    world.run(100.0)
    world.learners[-1].still_until = 100.0 + stands
    world.run(100.0 + stands)
    assert rounds.merged(100.0, world.now) >= 0.98 * nominal(PAPER, stands)
    assert {learner.done for learner in world.learners[:3]} == {int(world.now) - 1}
    assert world.stats["evicted"] == 0
    before = world.learners[-1].done
    world.run(world.now + 60.0)
    assert world.learners[-1].done >= before + 58
    counts = heard(world, world.learners[-1], after=100.0 + stands).values()
    assert min(counts) >= 1


def test_rule_4_a_fragment_sixty_times_as_large_is_heard_like_the_rest() -> None:
    world, rounds = calm(PAPER, [*[Spec()] * 3, Spec(upload=0.2)], sizes=[60.0] + [1.0] * 23)
    world.run(600.0)
    counts = heard(world, world.learners[-1])
    assert counts[0] > 0
    assert max(counts.values()) - min(counts.values()) <= 2
    assert rounds.merged(WARM_UP, world.now) >= 0.98 * nominal(PAPER, world.now - WARM_UP)


@pytest.mark.parametrize("upload", [3.0, 20.0])
def test_rule_4_a_quorum_of_all_waits_for_all(upload: float) -> None:
    options = Options(fragments=24, period=24, overlap=2, quorum=4)
    world, rounds = calm(options, [*[Spec()] * 3, Spec(upload=upload)])
    world.run(250.0)
    merged = [r for _, r in rounds.finished if r.verdict == "merged"]
    assert len(merged) >= 0.9 * (world.now - WARM_UP) / upload
    for finished in merged:
        folded = {p.learner for p in finished.participants if p.state == "folded"}
        assert len(folded) == 4, finished
    assert {learner.done for learner in world.learners} == {int(world.now) - 1}


def test_rule_4_a_quorum_of_two_waits_for_two_fast_ones() -> None:
    options = Options(fragments=24, period=24, overlap=2, quorum=2)
    world, rounds = calm(options, [*[Spec()] * 3, Spec(upload=3.0)])
    world.run(250.0)
    assert rounds.merged(WARM_UP, world.now) >= 0.98 * nominal(options, world.now - WARM_UP)


@pytest.mark.parametrize("participants", ["reported", "all"])
def test_rule_3_every_fragment_hears_learners_of_every_speed(participants: str) -> None:
    options = Options(
        fragments=24,
        period=24,
        overlap=2,
        participants="all" if participants == "all" else "reported",
    )
    paces = [1.0, 1.0, 2.0, 4.0]
    world, rounds = calm(options, [Spec(step=pace) for pace in paces])
    world.run(300.0)
    assert rounds.merged(WARM_UP, world.now) >= 0.98 * nominal(options, world.now - WARM_UP)
    for pace, learner in zip(paces, world.learners, strict=True):
        assert learner.done >= world.now / pace - 2
        counts = heard(world, learner)
        assert min(counts.values()) >= 0.5 * sum(counts.values()) / options.fragments
        assert min(counts.values()) >= 1
